"""Clients whose training diverges: left out of their rounds, recorded, counted, and named; or the end of the run."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from older_runs import unseal
from torch import nn

import sparsona as sp
from sparsona.core.errors import SparsonaError
from sparsona.core.tree import Tree
from sparsona.core.update import Update, dense
from sparsona.engine.divergence import Range, update_norm
from sparsona.engine.failures import DIVERGED, kind_of

BAD = 2  # the client that diverges
OPTIONS = {"rounds": 2, "per_round": 6, "epochs": 1, "batch_size": 10, "seed": 1, "lr": 0.1, "progress": False}


def federation(scale: float = 1.0, *, targets=lambda y: y, test_scale: float = 1.0) -> sp.Federation:
    """Six clients, of which one has inputs of another scale, to train on or only to be tested on."""
    x = torch.randn(6, 30, 6, generator=torch.Generator().manual_seed(0))
    y = targets((x[..., 0] > 0).long() + (x[..., 1] > 0).long())
    x[BAD, :20] *= scale
    x[BAD, 20:] *= test_scale
    return sp.Federation.from_clients([(x[k, :20], y[k, :20], x[k, 20:], y[k, 20:]) for k in range(6)])


class Squares(nn.Module):
    """Has no number for inputs of 1e30, whose squares are infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, inputs):
        return self.b(self.a(inputs * inputs).relu())


def rows(run: sp.Run) -> dict[str, object]:
    records = run._folder.records
    return {
        "turns": records.turns(),
        "failures": records.failures(),
        "evaluations": records.evaluations(),
        "bytes": run.summary["bytes"],
    }


@pytest.fixture(scope="module")
def serial(tmp_path_factory) -> dict[str, sp.Run]:
    folder = tmp_path_factory.mktemp("serial")
    return {
        method: sp.train(method, federation(1e30), Squares, out=folder / method, executor="serial", **OPTIONS)
        for method in ("fedspa", "dispfl", "local")
    }


@pytest.mark.parametrize("method", ["fedspa", "dispfl", "local"])
def test_a_client_that_diverges_is_left_out_and_nobody_else(serial, method):
    run = serial[method]
    failures = run._folder.records.failures()
    assert [(row.round, row.client) for row in failures] == [(0, BAD), (1, BAD)]
    assert all(row.reason == f"{DIVERGED}client {BAD}'s loss is nan in round {row.round + 1}" for row in failures)
    assert BAD not in run._progress(run._make_context()).population.states
    assert BAD not in run._progress(run._make_context()).population.messages
    for turn in run._folder.records.turns():
        assert turn.dropped == (turn.client == BAD)
        assert turn.steps > 0  # what it spent is charged
        assert np.isfinite(turn.loss)
    # It is tested with the model that it kept: the mean is over all clients, whoever diverged.
    assert np.isfinite(run.accuracies()).all()
    assert all(bool(p.isfinite().all()) for p in run.personal_model(BAD).parameters())
    assert run.summary["diverged"]["turns"] == 2
    assert run.summary["diverged"]["of"] == 12
    assert "heard" not in run.summary
    assert f"2 of 12 turns diverged and were left out (client {BAD})" in run.protocol
    assert "2 of 12 turns diverged" in str(run)


def test_the_table_shows_it_only_where_it_happened(serial, tmp_path):
    healthy = sp.train("local", federation(), Squares, out=tmp_path / "run", executor="serial", **OPTIONS)
    both = sp.Comparison(tmp_path, [serial["local"], serial["fedspa"]])
    assert [row["diverged"] for row in both.table()] == ["2", "2"]
    assert "diverged" not in sp.Comparison(tmp_path, [healthy]).table()[0]
    assert any("2 of 12 turns diverged" in note for note in both.notes())
    assert not any("diverged" in note for note in sp.Comparison(tmp_path, [healthy]).notes())


@pytest.mark.parametrize("method", ["fedspa", "dispfl"])
def test_what_others_do_is_as_if_it_had_not_taken_part(serial, tmp_path, method):
    """Not a bit of a client that diverges reaches the others: its data may as well be others that diverge."""
    other = sp.train(method, federation(3e30), Squares, out=tmp_path / "run", executor="serial", **OPTIONS)
    found = [[row for row in run._folder.records.evaluations() if row.client != BAD] for run in (serial[method], other)]
    assert found[0] == found[1]


@pytest.mark.parametrize("method", ["fedspa", "dispfl"])
def test_stacked_clients_agree(serial, tmp_path, method):
    run = sp.train(method, federation(1e30), Squares, out=tmp_path / "run", executor="stacked", device="cpu", **OPTIONS)
    assert rows(run)["failures"] == rows(serial[method])["failures"]
    assert run.accuracies().tolist() == serial[method].accuracies().tolist()
    for mine, theirs in zip(rows(run)["turns"], rows(serial[method])["turns"], strict=True):
        assert (mine.client, mine.steps, mine.train_flops, mine.bytes_up) == (
            theirs.client,
            theirs.steps,
            theirs.train_flops,
            theirs.bytes_up,
        )
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-4)


def test_resumed_runs_are_the_same(serial, tmp_path):
    path, data = tmp_path / "run", federation(1e30)
    sp.train("fedspa", data, Squares, out=path, executor="serial", max_seconds=1e-9, **OPTIONS)
    run = sp.resume(path, data, Squares, progress=False)
    assert rows(run) == rows(serial["fedspa"])


@pytest.mark.parametrize("executor", ["serial", "stacked"])
def test_stop_names_client_round_and_method(tmp_path, executor):
    stop = {**OPTIONS, "on_divergence": "stop", "executor": executor, "device": "cpu"}
    with pytest.raises(SparsonaError, match=rf"client {BAD}'s loss is nan in round 1 \(fedspa\)") as caught:
        sp.train("fedspa", federation(1e30), Squares, out=tmp_path / "run", **stop)
    assert "--on-divergence drop" in caught.value.hint


def test_a_run_in_which_all_diverge_ends(tmp_path):
    path, data = tmp_path / "run", federation()
    options = {**OPTIONS, "rounds": 9, "lr": 1e30, "clip_norm": None, "executor": "serial"}
    with pytest.raises(SparsonaError, match=r"every client diverged, 3 rounds in a row \(fedavg\)"):
        sp.train("fedavg", data, Squares, out=path, **options)
    run = sp.load(path, data, Squares)
    assert run.summary["rounds"] == 3
    assert np.isfinite(run.accuracies()).all()
    with pytest.raises(SparsonaError, match="4 rounds in a row"):
        sp.resume(path, data, Squares, progress=False)
    short = {**options, "rounds": 1}
    with pytest.raises(SparsonaError, match="1 round in a row"):
        sp.train("fedavg", data, Squares, out=tmp_path / "short", **short)
    with pytest.raises(SparsonaError, match="1 round in a row"):
        sp.resume(tmp_path / "short", data, Squares, progress=False)


@pytest.mark.parametrize("method", ["fedavg", "fedspa", "dispfl"])
def test_a_huge_update_that_is_finite_is_left_out(tmp_path, method):
    data, huge = federation(), federation(100.0)
    options = {**OPTIONS, "clip_norm": None, "executor": "serial", "rounds": 2}
    without = sp.train(method, huge, Squares, out=tmp_path / "off", **options, divergence_factor=None)
    run = sp.train(method, huge, Squares, out=tmp_path / "on", **options)
    assert "diverged" not in without.summary or without.summary["diverged"]["receivers"] == 0
    found = run.summary["diverged"]
    assert found["receivers"] if method == "dispfl" else found["turns"]
    assert "times as large as" in found["first"]
    assert "left out" in run.protocol
    healthy = sp.train(method, data, Squares, out=tmp_path / "healthy", **options)
    assert "diverged" not in healthy.summary


def test_norms_are_judged_among_enough_of_them():
    norms = Range(10.0)
    for norm in (1.0, 1e9, 2.0):
        norms.add(norm)
    assert norms.times_over(1e9) is None  # of three, nobody knows who is right
    norms.add(1.0)
    assert norms.times_over(1e9) == pytest.approx(1e9 / 1.5)
    assert norms.times_over(15.0) is None
    assert Range(None).times_over(1e9) is None


def test_a_norm_is_of_all_parts_but_masks():
    tree = Tree.of({"w": torch.tensor([3.0, 4.0])})
    update = Update(0, 0, 1.0, {"a": dense(tree), "b": dense(tree), "mask": dense(tree.like(tree.flat > 3))})
    assert update_norm(update) == pytest.approx(50**0.5)


class Difference(nn.Module):
    """A regression that has no number for inputs of 1e30."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)

    def forward(self, inputs):
        squares = (inputs * inputs).sum(1, keepdim=True)
        return self.linear(inputs.clamp(-9, 9)) + (squares - squares)


def test_a_test_loss_that_is_not_a_number_ends_nothing(tmp_path):
    data = federation(test_scale=1e30, targets=lambda y: y + 0.5)
    run = sp.train("fedavg", data, Difference, out=tmp_path / "run", executor="serial", **OPTIONS)
    assert np.isinf(run.errors()[BAD])
    assert np.isfinite(np.delete(run.errors(), BAD)).all()
    assert "diverged" not in run.summary
    assert run.summary["error"]["loss"] == np.inf  # not a mean over those that have a number
    assert json.loads((tmp_path / "run" / "summary.json").read_text())


def test_reasons_have_a_kind():
    assert kind_of(f"{DIVERGED}client 1's loss is nan in round 1") == "diverged"


def test_a_model_that_is_thrown_away_is_not_tested(tmp_path):
    options = {**OPTIONS, "clip_norm": None, "points": ["trained"], "executor": "serial"}
    run = sp.train("fedavg", federation(100.0), Squares, out=tmp_path / "run", **options)
    left_out = {(row.round, row.client) for row in run._folder.records.failures()}
    tested = {(row.completed - 1, row.client) for row in run._folder.records.evaluations(point="trained")}
    assert left_out
    assert not left_out & tested
    assert len(left_out) + len(tested) == 12


def test_a_run_of_an_older_version_goes_on_as_it_began(tmp_path):
    """It knew no `drop`."""
    limit = {"max_seconds": 1e-9}
    first = sp.train("fedavg", federation(), Squares, out=tmp_path / "run", **OPTIONS, **limit)
    unseal(tmp_path / "run")
    config = json.loads((first.path / "config.json").read_text())
    about = json.loads((first.path / "about.json").read_text())
    for name in ("on_divergence", "divergence_factor"):
        del config[name], about["config"][name]
    (first.path / "config.json").write_text(json.dumps(config))
    (first.path / "about.json").write_text(json.dumps(about))
    run = sp.resume(first.path, federation(), Squares, progress=False)
    plan = run._make_context().plan
    assert (plan.on_divergence, plan.divergence_factor) == ("stop", None)
