"""Clients that personalization helps and hurts, counted by hand on records written by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from made_facts import make_facts
from matplotlib.colors import to_rgb

import sparsona as sp
from sparsona.analysis.clients import Change, ClientEffects, Gap, client_effects, has_effects
from sparsona.analysis.format import signed
from sparsona.analysis.statistics import pearson, ranks, spearman
from sparsona.analysis.view import read_view
from sparsona.core.errors import SparsonaError
from sparsona.report.palette import BETTER, WORSE
from sparsona.report.pictures import draw
from sparsona.report.pictures.text import Terminal, clients_lines
from sparsona.runs.folder import RunFolder
from sparsona.runs.manifest import Manifest
from sparsona.runs.records import EvaluationRow

SIZES = [[10, 1, 4], [20, 1, 4], [30, 1, 4], [40, 1, 4]]


def make_run(path: Path, points: dict[str, list[int | None]], title: str = "FedSpa", data: str = "a", **config: object):
    """A run of four clients with four test examples each; `points` has the right ones by client, None for untested."""
    point = "tuned" if "tuned" in points else "received"
    kinds = {kind: config.pop(kind) for kind in ("peers", "alone") if kind in config}
    facts = make_facts(title=title, point=point, federation=data, sizes=np.array(SIZES), label_counts=None, **kinds)
    settings = {"rounds": 2, "seed": 0, "model": "cnn", **config}
    with RunFolder.create(path, json.dumps(settings), facts) as folder, folder.records.writing():
        rows = [
            EvaluationRow(2, client, point, correct, 4, 0.5)
            for point, by_client in points.items()
            for client, correct in enumerate(by_client)
            if correct is not None
        ]
        folder.records.add(rows)
        folder.records.add([EvaluationRow(1, 0, "received", 0, 4, 0.5)])  # an earlier round: nobody asks for it
    (path / "checkpoint").mkdir()
    Manifest(2, False, 0.0, 1, {}).write(path)
    return RunFolder.open(path)


def by_name(effects: ClientEffects) -> dict[str, Change]:
    return {change.name: change for change in effects.changes}


def test_hurt_and_helped_are_counted_by_hand(tmp_path):
    run = make_run(tmp_path / "run", {"received": [4, 1, 2, 4], "global": [2, 2, 2, 1]})
    found = client_effects(run)
    (test,) = found.changes
    assert found.title == "FedSpa: received over global"
    assert test.gains.tolist() == [50, -25, 0, 75]
    assert (test.num_hurt, test.num_helped) == (1, 2)
    row = test.row()
    assert row["hurt"] == "1 (25%)"
    assert row["mean"] == "+25.00"
    assert (row["worst"], row["median"], row["best"]) == ("−25.00", "+25.00", "+75.00")
    # Ranks of the change are 3, 1, 2, 4 and of the samples 1 to 4: 1 - 6 * (4 + 1 + 1 + 0) / (4 * 15)
    assert test.as_dict()["correlation"] == pytest.approx(0.4)
    assert found.gap is None
    assert json.loads(json.dumps(found.as_dict()))["changes"][0]["samples"] == [10, 20, 30, 40]


def test_training_data_and_a_guard_are_told_apart(tmp_path):
    run = make_run(
        tmp_path / "run",
        {
            "received": [4, 1, 2, 4],
            "global": [2, 2, 2, 1],
            "guarded": [4, 2, 2, 4],
            "received/train": [4, 4, 4, 4],
            "global/train": [3, 3, 3, 4],
        },
    )
    found = by_name(client_effects(run))
    assert list(found) == ["test", "test, guarded", "train"]
    assert [change.num_hurt for change in found.values()] == [1, 0, 0]
    assert found["train"].num_helped == 3


def test_without_a_global_model_tuning_is_compared_with_what_was_tuned(tmp_path):
    run = make_run(tmp_path / "run", {"tuned": [4, 1, 2, 4], "received": [3, 3, 3, 3], "start": [0, 0, 0, 0]})
    assert client_effects(run).title == "FedSpa: tuned over start"
    assert client_effects(run, "received").changes[0].num_hurt == 2
    assert has_effects(run)
    alone = make_run(tmp_path / "alone", {"received": [1, 1, 1, 1]})
    assert not has_effects(alone)
    with pytest.raises(SparsonaError, match="did not evaluate a shared model"):
        client_effects(alone)
    with pytest.raises(SparsonaError, match="point 'global'"):
        client_effects(run, "global")
    for kind, hint in (("peers", 'points=["consensus"]'), ("alone", "--against RUN"), ("none", 'points=["global"]')):
        with pytest.raises(SparsonaError) as told:
            client_effects(make_run(tmp_path / f"no {kind}", {"received": [1, 1, 1, 1]}, **{kind: True}))
        assert told.value.hint.rstrip("'").endswith(hint)


def test_against_another_run_clients_are_matched(tmp_path):
    run = make_run(tmp_path / "run", {"received": [4, 1, 2, None]}, rounds=5)
    other = make_run(tmp_path / "other", {"received": [2, 2, None, 4]}, title="FedAvg")
    found = client_effects(run, other)
    assert found.changes[0].clients.tolist() == [0, 1]
    assert found.changes[0].gains.tolist() == [50, -25]
    assert found.title == "FedSpa (received) over FedAvg (received)"
    assert found.notes == ("Not the same rounds: 5 and 2.",)
    elsewhere = make_run(tmp_path / "elsewhere", {"received": [1, 1, 1, 1]}, data="b")
    with pytest.raises(SparsonaError, match="hold different data"):
        client_effects(run, elsewhere)


def test_columns_of_clients_are_called_as_what_is_compared(tmp_path):
    def columns(run, against):
        row, *_ = client_effects(run, against).changes[0].client_rows()
        assert list(row)[::4] == ["client", "change"]
        return list(row)[2:4]

    score = {"received": [4, 1, 2, 4], "global": [2, 2, 2, 2]}
    run, same = make_run(tmp_path / "run", score), make_run(tmp_path / "same", score)
    assert columns(run, make_run(tmp_path / "other", score, title="FedAvg")) == ["FedAvg", "FedSpa"]
    assert columns(run, same) == ["same", "run"]
    (tmp_path / "more").mkdir()
    assert columns(run, namesake := make_run(tmp_path / "more" / "run", score)) == [str(namesake.path), str(run.path)]
    assert columns(make_run(tmp_path / "train", score), same) == [str(same.path), str(tmp_path / "train")]
    assert columns(run, RunFolder.open(run.path)) == ["other run", "this run"]
    assert columns(run, "global") == ["global", "received"]


def test_a_drop_is_weighted_and_of_the_bottom_decile(tmp_path):
    run = make_run(tmp_path / "run", {"received": [4, 1, 2, 4]})
    other = make_run(tmp_path / "other", {"received": [4, 3, 4, 4]}, title="FedAvg")
    (note,) = client_effects(run, other).notes
    assert note == (
        "Weighted by test examples: 68.75% against 93.75%, −25.00; "
        "bottom decile: 25.00% against 75.00%, −50.00 percentage points."
    )


def test_novel_clients_beside_themselves_had_they_taken_part(tmp_path):
    run = make_run(tmp_path / "run", {"received": [4, 4, 4, None], "novel": [None, None, None, 1]}, novel=1)
    full = make_run(tmp_path / "full", {"received": [3, 3, 3, 2]})
    alone = make_run(tmp_path / "one", {"received": [4, 4, 4, None], "novel": [None] * 3 + [1], "global": [1] * 4})
    found = client_effects(run, full)
    assert by_name(found)["novel"].gains.tolist() == [-25]
    assert by_name(found)["test"].clients.tolist() == [0, 1, 2]
    assert found.gap == Gap(taking_part=1.0, novel=0.25, novel_trained=0.5)
    assert "+75.00 percentage points" in found.sentences()[0]
    assert "+25.00 percentage points" in found.sentences()[1]
    assert client_effects(alone).gap == Gap(1.0, 0.25)


def test_correlations():
    assert ranks([3, 1, 3, 7]).tolist() == [2.5, 1, 2.5, 4]
    assert pearson([1, 2, 3], [2, 4, 6]) == pytest.approx(1)
    assert pearson([0, 1, 2, 3], [0, 1, 0, 1]) == pytest.approx(1 / np.sqrt(5))  # 1 / sqrt(5 * 1), by hand
    assert spearman([1, 2, 3, 4], [1, 10, 100, 1000]) == pytest.approx(1)
    assert spearman([1, 2, 3], [5, 5, 5]) is None
    assert pearson([1], [2]) is None
    with pytest.raises(SparsonaError, match="cannot be paired"):
        pearson([1, 2], [1])


def test_signed_numbers():
    assert [signed(value) for value in (1.204, -0.3, 0.0, -0.001)] == ["+1.20", "−0.30", "0.00", "0.00"]


def many(n: int, seed: int = 0) -> ClientEffects:
    rng = np.random.default_rng(seed)
    samples = rng.integers(10, 400, n)
    before, after = rng.random(n), rng.random(n)
    changes = [Change(name, np.arange(n), before, after, samples) for name in ("test", "train")]
    return ClientEffects("a title", tuple(changes))


def test_the_picture_has_every_client_in_its_place(tmp_path):
    effects = many(50)
    picture = draw(effects)
    _, *scatters = picture.figure.axes
    for axes, change in zip(scatters, effects.changes, strict=True):
        dots = next(found for found in axes.collections if len(found.get_offsets()) == 50)
        assert np.allclose(dots.get_offsets(), np.stack([change.samples, change.gains], axis=1))
        colours = [tuple(colour[:3]) for colour in dots.get_facecolors()]
        assert colours.count(to_rgb(BETTER)) == change.num_helped
        assert colours.count(to_rgb(WORSE)) == change.num_hurt
    svg = picture.svg()
    assert svg.count("client 7: ") == 2
    assert "nan" not in svg
    assert picture.save(tmp_path / "a.png").stat().st_size > 5000


def test_of_very_many_clients_some_are_drawn():
    svg = draw(many(5000)).svg()
    assert "test, 1,500 drawn" in svg
    assert "5000 clients" in svg
    assert "client 7: " not in svg


@pytest.mark.parametrize("equal", [True, False])
def test_one_client_or_equal_ones_can_be_drawn(equal):
    change = Change("test", np.arange(3), np.full(3, 0.5), np.full(3, 0.5 if equal else 0.75), np.full(3, 7))
    for effects in (
        ClientEffects("t", (change,)),
        ClientEffects("t", (Change("test", *(np.array([value]) for value in (0, 0.5, 1, 9))),)),
    ):
        assert "nan" not in draw(effects).svg()
        assert len(clients_lines(effects, Terminal(80))) > 10


def test_the_text_picture_counts_clients():
    change = Change("test", np.arange(4), np.zeros(4), np.array([0.5, 0.5, 0, 1]), np.array([10, 10, 40, 40]))
    lines = [line.plain for line in clients_lines(ClientEffects("t", (change,)), Terminal(60))]
    assert all(len(line) <= 80 for line in lines)
    drawn = "\n".join(lines[2:])
    assert len(re.findall("•", drawn)) == 2
    assert len(re.findall(r"│2", drawn)) == 1
    ascii_lines = clients_lines(ClientEffects("t", (change,)), Terminal(60, is_ascii=True))[2:]
    assert "\n".join(line.plain for line in ascii_lines).isascii()


def test_final_tuning_is_no_round_of_the_training_loss(tmp_path):
    run = sp.train(
        "fedavg-ft", clients=4, rounds=2, epochs=1, data_rate=0.2, executor="serial", device="cpu", out=tmp_path / "run"
    )
    assert [number for number, _ in read_view(run._folder).train_loss] == [1, 2]
