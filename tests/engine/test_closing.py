"""After the last round: tuning, novel clients, and looks that are taken once."""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn

import sparsona as sp

SMALL = {"device": "cpu", "executor": "serial", "rounds": 2, "per_round": 3, "epochs": 1, "batch_size": 8, "lr": 0.2}


def net():
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def arrays():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 240)
    return rng.normal(size=(240, 6)).astype(np.float32) + 1.5 * np.eye(6, dtype=np.float32)[y], y


@pytest.fixture(scope="module")
def federation():
    return sp.federate(*arrays(), clients=5, partition="dirichlet:0.5", seed=0, validation_rate=0.3)


def rows(run, point):
    """What is stored at a point: client, right, count, loss."""
    return run._folder.select(
        "SELECT client, correct, count, loss FROM evaluations WHERE point = ? AND completed = 2 ORDER BY client",
        (point,),
    )


@pytest.mark.parametrize("executor", ["serial", "stacked"])
def test_novel_clients_are_tuned_alone(federation, tmp_path, executor):
    options = {**SMALL, "executor": executor, "novel": 0.4}
    run = sp.train("fedavg", federation, net, novel_epochs=3, out=tmp_path / "run", **options)
    assert len(run.novel) == 2
    assert [row[0] for row in rows(run, "novel")] == [row[0] for row in rows(run, "novel_tuned")] == run.novel
    assert "tuned" not in run.points
    (trained,) = run._folder.select("SELECT COUNT(*), MIN(steps), SUM(bytes_up) FROM turns WHERE round = 2")
    assert trained[0] == 2
    assert trained[2] == 0
    block = run.summary["novel"]
    assert block["clients"] == run.novel
    tuned = np.nanmean(run.accuracies("novel_tuned"))
    assert block["tuned"] == pytest.approx(tuned)
    assert block["met"] == pytest.approx(np.nanmean(run.accuracies("novel")))
    assert block["gap"] == pytest.approx(run.summary["accuracy"]["mean"] - tuned)
    assert np.flatnonzero(~np.isnan(run.accuracies("novel_tuned"))).tolist() == run.novel
    # As many epochs for the novel as for all: the same as before.
    everybody = sp.train("fedavg", federation, net, tune_epochs=3, out=tmp_path / "all", **options)
    np.testing.assert_allclose(rows(everybody, "novel_tuned"), rows(run, "novel_tuned"), rtol=1e-5)
    assert len(rows(everybody, "tuned")) == 3


def test_the_novel_may_be_spared_where_all_are_tuned(federation, tmp_path):
    run = sp.train("fedavg", federation, net, novel=1, novel_epochs=0, tune_epochs=1, out=tmp_path / "run", **SMALL)
    assert len(rows(run, "tuned")) == 4
    assert "novel_tuned" not in run.points
    assert run.summary["novel"]["tuned"] is None
    assert run.summary["novel"]["gap"] == run.summary["accuracy"]["mean"] - run.summary["novel"]["met"]
    with pytest.raises(sp.SparsonaError, match="unknown point 'novel_tuned'"):
        run.accuracies("novel_tuned")
