"""Models of a run on data that it has not seen."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

import sparsona as sp
from sparsona.cli.app import cli as main
from sparsona.data.readers.npz import read_new

CLASSES = 3


def pictures(seed, count):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, CLASSES, count)
    return (rng.integers(0, 100, (count, 1, 4, 4)) + 70 * y[:, None, None, None]).astype(np.uint8), y


@pytest.fixture(scope="module")
def federation():
    view = sp.View(mean=(0.4,), std=(0.3,))
    return sp.Federation.from_clients([(*pictures(k, 40), *pictures(50 + k, 15)) for k in range(3)], view=view)


@pytest.fixture(scope="module")
def run(federation, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    options = {"rounds": 2, "points": ["global"], "per_round": 3}
    return sp.load(sp.train("fedavg-ft", federation, "mlp", out=path, tune_epochs=1, **options).path)


def stored_test(federation, client):
    index = federation.splits[client].test
    return federation.x[index].numpy(), federation.y[index].numpy()


def test_a_clients_test_data_gives_its_accuracy(run, federation):
    for client in range(3):
        found = run.evaluate(client, *stored_test(federation, client))
        (row,) = found.rows()
        assert row["accuracy"] == pytest.approx(run.accuracies()[client])
        assert row["loss"] == pytest.approx(run.errors()[client], rel=1e-5)
        assert row["low"] < row["accuracy"] < row["high"] or row["accuracy"] in (0, 1)
        assert row["examples"] == 15
        assert np.trace(found.results[0].confusion) == pytest.approx(15 * row["accuracy"])


def test_several_models_and_the_shared_one(run, federation):
    x, y = stored_test(federation, 1)
    found = run.evaluate([2, "1", None], x, y)
    assert [row["client"] for row in found.rows()] == [2, 1, "shared"]
    assert found.rows()[2]["accuracy"] == pytest.approx(run.accuracies("global")[1])
    plain = json.loads(json.dumps(found.as_dict()))
    assert len(plain["models"]) == 3
    assert np.sum(plain["models"][0]["confusion"]) == 15


def test_classes_by_hand(run):
    x = pictures(3, 60)[0]
    y = np.zeros(60, dtype=int)
    y[30:] = 2
    found = run.evaluate(0, x, y).results[0]
    confusion, rows = found.confusion, {row["class"]: row for row in found.classes()}
    assert confusion[1].sum() == 0
    assert rows[0]["examples"] == rows[2]["examples"] == 30
    assert rows[0]["recall"] == confusion[0, 0] / 30
    assert rows[2]["precision"] == confusion[2, 2] / confusion[:, 2].sum()
    if 1 in rows:  # predicted, though no example is of it
        assert rows[1]["recall"] is None


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (np.zeros((5, 1, 5, 4), np.uint8), np.zeros(5, int), "examples of shape (1, 5, 4)"),
        (np.zeros((5, 1, 4, 4), np.float32), np.zeros(5, int), "x is float32, and the run's data was images of bytes"),
        (np.zeros((5, 1, 4, 4), np.uint8), np.full(5, 3), "labels from 3 to 3"),
        (np.zeros((5, 1, 4, 4), np.uint8), np.full(5, -1), "labels from -1 to -1"),
        (np.zeros((5, 1, 4, 4), np.uint8), np.zeros(4, int), "5 examples and y has 4 labels"),
        (np.zeros((5, 1, 4, 4), np.uint8), np.zeros((5, 2), int), "y has shape (5, 2)"),
        (np.zeros((0, 1, 4, 4), np.uint8), np.zeros(0, int), "x has no examples"),
        (np.array(["a"]), np.zeros(1, int), "x is an array of <U1"),
        (np.zeros((5, 1, 4, 4), np.uint8), np.zeros(5), "labels of type float64"),
    ],
)
def test_other_data_is_refused(run, x, y, words):
    with pytest.raises(sp.SparsonaError) as caught:
        run.evaluate(0, x, y)
    assert words in str(caught.value)
    assert caught.value.expected


def test_images_with_channels_last(run, federation):
    x, y = stored_test(federation, 0)
    expected = run.evaluate(0, x, y).rows()
    assert run.evaluate(0, x[:, 0], y).rows() == expected
    assert run.evaluate(0, x.transpose(0, 2, 3, 1), y).rows() == expected
    with pytest.raises(sp.SparsonaError, match="no client to evaluate"):
        run.evaluate([], x, y)


def test_numbers(tmp_path):
    rng = np.random.default_rng(0)

    def some(count):
        x = rng.random((count, 3), dtype=np.float32)
        return x, x @ np.array([[1.0, 2.0], [0.5, 0.0], [0.0, 1.0]])

    federation = sp.Federation.from_clients([(*some(20), *some(9)) for _ in range(2)])
    run = sp.load(sp.train("local", federation, "mlp", out=tmp_path / "run", rounds=1).path)
    found = run.evaluate(0, *stored_test(federation, 0))
    assert found.rows()[0].keys() == {"client", "examples", "loss", "rmse", "mae", "r2"}
    assert found.rows()[0]["rmse"] == pytest.approx(run.metric("rmse")[0], rel=1e-5)
    assert found.rows()[0]["loss"] == pytest.approx(run.errors()[0], rel=1e-5)
    assert found.results[0].classes() == []
    for y in (np.zeros((2, 3)), np.full((2, 2), np.nan), "ab"):
        with pytest.raises(sp.SparsonaError):
            run.evaluate(0, np.zeros((2, 3)), y)
    assert run.export(0, tmp_path / "one.safetensors").largest_difference < 1e-5


def test_a_method_without_a_plain_model_is_evaluated(federation, tmp_path):
    run = sp.train("pfedgate:deploy_gate=sample", federation, "mlp", out=tmp_path / "run", rounds=1)
    with pytest.raises(sp.SparsonaError, match="deploys no plain model"):
        run.personal_model(0)
    found = sp.load(run.path).evaluate(0, *stored_test(federation, 0))
    assert found.rows()[0]["accuracy"] == pytest.approx(run.accuracies()[0])


def people(labels, count=60, seed=0):
    """Examples of owners in turn."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, CLASSES, count)
    return (
        rng.normal(y[:, None], 0.7, (count, 4)).astype(np.float32),
        y,
        [labels[i % len(labels)] for i in range(count)],
    )


@pytest.fixture(scope="module")
def owned(tmp_path_factory):
    """Runs whose clients are owners by name, owners by number, and no owners, in a folder `runs`."""
    folder = tmp_path_factory.mktemp("owned")
    for name, labels, options in (
        ("named", ["ana", "bo", "cy"], {}),
        ("numbered", [21, 24, 30], {}),
        ("shared", ["ana", "bo", "cy"], {"partition": "iid", "clients": 3}),
    ):
        x, y, owners = people(labels)
        federation = sp.federate(x, y, owners=owners, **options)
        sp.train("fedavg-ft", federation, "mlp", out=folder / "runs" / name, rounds=1, tune_epochs=1, per_round=3)
    return folder


@pytest.mark.parametrize(
    ("name", "labels", "stranger", "column"),
    [("named", ["cy", "ana", "dee"], "dee", "name"), ("numbered", [30, 21, 25], "25", "owner")],
)
def test_each_client_is_evaluated_on_its_own_rows(owned, capsys, name, labels, stranger, column):
    run = sp.load(owned / "runs" / name)
    x, y, owners = people(labels, 50, seed=1)
    owners[:3] = ["" if name == "named" else -1] * 3
    found = run.evaluate("all", x, y, owners=owners)
    last = [k for k, one in enumerate(owners) if one == labels[0]]
    first = [k for k, one in enumerate(owners) if one == labels[1]]
    assert [row["client"] for row in found.rows()] == [0, 2]
    assert [row[column] for row in found.rows()] == [str(labels[1]), str(labels[0])]
    expected = [run.evaluate(0, x[first], y[first]).rows()[0], run.evaluate(2, x[last], y[last]).rows()[0]]
    assert found.rows() == expected
    assert capsys.readouterr().err == (
        f"warning: clients without rows in the new data are left out: {'bo' if name == 'named' else '1 (owner 24)'}\n"
        f"warning: owners in the new data that are no clients of the run: {stranger}\n"
        "warning: 3 of 50 examples have no owner and belong to no client\n"
    )
    several = run.evaluate([2, None], x, y, owners=np.array(owners))
    assert several.rows()[0] == expected[1]
    assert several.rows()[1]["examples"] == 50  # the shared model is nobody's
    assert [row["examples"] for row in run.evaluate("all", x, y).rows()] == [50] * 3
    assert capsys.readouterr().err == ""
    there = f"{', '.join(sorted(map(str, labels)))}"
    with pytest.raises(sp.SparsonaError, match=f"no rows of client .*\n.*its owners are {there}\n.*--all-rows"):
        run.evaluate([0, 1], x, y, owners=owners)
    with pytest.raises(sp.SparsonaError, match=f"no rows of client .*\n.*its owners are {stranger}\n"):
        run.evaluate("all", x[:5], y[:5], owners=[owners[5]] * 5)
    with pytest.raises(sp.SparsonaError, match="49 owners for 50 examples"):
        run.evaluate(0, x, y, owners=owners[1:])


@pytest.mark.parametrize("kind", ["float64", "object", "str"])
def test_numbers_of_owners_are_found_however_they_are_stored(owned, kind):
    x, y, owners = people([21, 24, 30])
    rows = sp.load(owned / "runs" / "numbered").evaluate("all", x, y, owners=np.array(owners).astype(kind)).rows()
    assert [row["owner"] for row in rows] == ["21", "24", "30"]
    assert {row["examples"] for row in rows} == {20}


def test_owners_of_new_data_where_clients_are_none(owned):
    run = sp.load(owned / "runs" / "shared")
    x, y, owners = people(["ana", "bo", "cy"])
    with pytest.raises(sp.SparsonaError, match=r"which of them the run's clients are is not known(.|\n)*--all-rows"):
        run.evaluate("all", x, y, owners=owners)
    assert run.evaluate(None, x, y, owners=owners).rows()[0]["examples"] == 60


def test_owners_in_a_file_of_new_data(owned, tmp_path, monkeypatch):
    """From the shell, published splits and several inputs included."""
    monkeypatch.chdir(owned)
    x, y, owners = people(["ana", "cy"], 40, seed=2)
    train = {"x_train": x[:1], "y_train": y[:1], "owners_train": ["bo"]}
    np.savez(tmp_path / "new.npz", x_test=x, y_test=y, owners_test=owners, **train)

    def shown(*arguments):
        found = CliRunner().invoke(
            main, ["evaluate", "named", "--data", str(tmp_path / "new.npz"), "--json", *arguments]
        )
        return {row["client"]: row["examples"] for row in json.loads(found.stdout)["models"]} if found.stdout else found

    assert shown("--client", "all") == {0: 20, 2: 20}
    assert shown("--client", "all", "--global", "--client", "ana") == {0: 20, 2: 20, "shared": 40}
    assert shown("--client", "cy", "--global") == {2: 20, "shared": 40}
    assert shown("--client", "all", "--all-rows") == {0: 40, 1: 40, 2: 40}
    assert "no rows of client bo" in str(shown("--client", "bo").exception)
    np.savez(tmp_path / "several.npz", x_a=x, x_b=x[:, 0], y=y, owners=[7, -1] * 20)
    several, _, numbers = read_new(tmp_path / "several.npz")
    assert (sorted(several), numbers.tolist()) == (["a", "b"], [7, -1] * 20)
    np.savez(tmp_path / "texts.npz", x=x, y=y, owners=["bo", ""] * 20)
    assert read_new(tmp_path / "texts.npz")[2].tolist() == ["bo", ""] * 20


def test_who_the_clients_are_stays_with_a_federation(tmp_path):
    """Of numbers that are clients, those alone."""
    x, y, owners = people([30, 21, 24, 99], 61)
    owners[3::4] = [-1] * len(owners[3::4])
    owners[3] = 99  # one example is too few
    federation = sp.federate(x, y, owners=owners)
    assert (federation.client_owners, federation.client_names) == ((21, 24, 30), None)
    federation.save(tmp_path / "saved")
    assert sp.Federation.open(tmp_path / "saved").client_owners == (21, 24, 30)
    assert sp.federate(x, y, owners=owners, clients=1, seed=3).client_owners in ((21,), (24,), (30,))
    assert sp.federate(x, y, owners=[f"p{one}" for one in owners]).client_owners is None
    np.savez(tmp_path / "mine.npz", x=x, y=y, owners=owners)
    run = sp.train("local", data=str(tmp_path / "mine.npz"), rounds=1, out=tmp_path / "run")
    assert sp.load(run.path).evaluate(1, x, y).rows()[0]["owner"] == "24"


def test_labels_of_another_kind_are_not_printed(owned):
    x, _, _ = people(["ana"], 5)
    with pytest.raises(sp.SparsonaError, match="labels of type <U6") as caught:
        sp.load(owned / "runs" / "named").evaluate(0, x, ["secret"] * 5)
    assert "secret" not in str(caught.value)
