"""Models of a run on data that it has not seen."""

from __future__ import annotations

import json

import numpy as np
import pytest

import sparsona as sp

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
