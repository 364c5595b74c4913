"""Numbers instead of classes: squared errors, no accuracy, and a linear model that is recovered."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

import sparsona as sp
from sparsona.analysis.numbers import numbers

SMALL = {"device": "cpu", "executor": "serial", "per_round": 4, "epochs": 2, "batch_size": 8, "weight_decay": 0.0}


def arrays(outputs=2):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(160, 5)).astype(np.float32)
    weights = rng.normal(size=(5, outputs))
    return x, (x @ weights + 0.5).astype(np.float64), weights


@pytest.mark.parametrize("executor", ["serial", "workers", "stacked"])
def test_a_linear_model_is_recovered(tmp_path, executor, forked_workers):
    x, y, weights = arrays()
    data = sp.federate(x, y, clients=4, partition="iid", seed=0)
    assert data.is_regression
    assert (data.num_classes, data.label_counts("train"), data.predicts_tokens) == (2, None, False)
    options = {**SMALL, "executor": executor, "rounds": 12, "guard": True, "tune_epochs": 1}
    run = sp.train("fedavg", data, "mlp:hidden=0", out=tmp_path / "run", **options)
    model = run.personal_model(0)
    np.testing.assert_allclose(model[1].weight.detach().numpy(), weights.T, atol=1e-3)
    assert run.summary["accuracy"]["mean"] is None
    assert run.summary["error"]["mse"] < 1e-4
    assert run.summary["metrics"]["rmse"]["mean"] < 1e-2
    assert run.summary["metrics"]["r2"] == {
        **run.summary["metrics"]["r2"],
        "clients": 4,
        "mean": pytest.approx(1.0, abs=1e-4),
    }
    assert "classes" not in run.summary
    (line, *_), last = numbers([run.view], "client"), numbers([run.view], "round")[-1]
    assert line["loss"] == pytest.approx(run.errors()[0])
    assert line["rmse"] > 0
    assert "accuracy" not in line
    assert "error" not in last
    assert last["rmse"] == run.summary["metrics"]["rmse"]["mean"]
    assert {"mae", "r2", "loss"} <= set(last) & set(line)
    assert set(run.summary["guard"]["error"]) == {"personal", "shared", "guarded"}
    assert "RMSE" in repr(run)
    assert "examples" in run.protocol
    curve = run.curve()
    assert curve[0][1] > 100 * curve[-1][1]


def test_the_error_is_the_mean_over_examples_of_squares_added_over_outputs(tmp_path):
    x, y, _ = arrays(3)
    data = sp.federate(x, y, clients=4, partition="iid", seed=0)
    net = nn.Linear(5, 3)
    run = sp.train("local", data, net, out=tmp_path / "run", rounds=1, **SMALL)
    found = run._folder.records.evaluations()
    assert len(found) == 4
    for row in found:
        test = data.examples(row.client, "test")
        with torch.no_grad():
            wrong = run.personal_model(row.client)(test.inputs) - test.targets
        assert row.loss == pytest.approx(float(wrong.square().sum(1).mean()), rel=1e-5)


def test_one_number_each_and_from_a_file(tmp_path, say):
    x, y, _ = arrays(1)
    np.savez(tmp_path / "own.npz", x=x, y=y[:, 0])
    said = say(
        *("run", "fedspa", "--data", "arrays:own.npz", "--model", "mlp:hidden=8", "--partition", "iid", "--clients", 4),
        *("--rounds", 2, "--executor", "serial", "--out", "run", "--device", "cpu"),
    )
    assert said.code == 0, said
    assert "MSE" in said.out
    assert "accuracy" not in said.out.split("How this was measured")[0]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["error"]["mse"] > 0
    assert "finished" in say("runs", "--in", ".").out


def test_tuned_and_guarded_models_are_shown_as_errors(tmp_path, say):
    x, y, _ = arrays(1)
    np.savez(tmp_path / "own.npz", x=x, y=y[:, 0])
    said = say(
        *("run", "fedavg-ft", "--data", "arrays:own.npz", "--model", "mlp:hidden=8", "--partition", "iid"),
        *("--clients", 4, "--rounds", 2, "--executor", "serial", "--out", "run", "--device", "cpu", "--guard"),
    )
    assert said.code == 0, said
    assert "MSE" in said.out
    run = sp.load(tmp_path / "run")
    shown = say("clients", "run", "--out", "clients.svg")
    assert shown.code == 0, shown
    assert "RMSE, above 0 for the better; with samples: rank correlation" in shown.out
    assert "test, guarded" in shown.out
    assert "percentage" not in shown.out + (tmp_path / "clients.svg").read_text()
    before, after = (run.metric("rmse", point) for point in ("received", "tuned"))
    change = run.clients().changes[0]
    np.testing.assert_allclose(change.gains, before - after)  # a lower error is a gain
    assert change.num_helped == (after < before).sum()
    assert change.client_rows()[-1]["change"] == f"{change.gains.max():+.4g}".replace("-", "−")
    assert "does to its RMSE, over a model that clients share" in run.report(tmp_path / "page.html").read_text()
    small = {**SMALL, "rounds": 1, "out": tmp_path / "other", "metrics": ["mae"]}
    other = sp.train("local", run._make_context().federation, "mlp:hidden=8", **small)
    with pytest.raises(sp.SparsonaError, match=r"is judged by RMSE, and '.*' by MAE"):
        run.clients(other)
    with pytest.raises(sp.SparsonaError, match="there is no accuracy"):
        run.accuracies()
    assert run.errors().mean() == pytest.approx(run.summary["error"]["mse"])
    assert run.errors("received").mean() == pytest.approx(run.curve()[-1][1])


def test_what_goes_by_class_is_refused():
    x, y, _ = arrays()
    with pytest.raises(sp.SparsonaError, match="goes by class, but these examples have numbers for targets"):
        sp.federate(x, y, clients=4)
    with pytest.raises(sp.SparsonaError, match="whole numbers from 0"):
        sp.federate(x, np.arange(160) % 3 * 1.0, clients=4)  # classes that somebody made floats
    with pytest.raises(sp.SparsonaError, match="NaN or infinity"):
        sp.federate(x, np.where(y > 1, np.nan, y), clients=4, partition="iid")


def test_clients_whose_data_is_apart(tmp_path):
    x, y, _ = arrays(1)
    parts = [(x[:40], y[:40, 0], x[40:50], y[40:50, 0]), (x[50:90], y[50:90, 0], x[90:99], y[90:99, 0])]
    data = sp.Federation.from_clients(parts)
    run = sp.train("fedavg", data, lambda: nn.Linear(5, 1), out=tmp_path / "run", rounds=2, **{**SMALL, "per_round": 2})
    assert np.isfinite(run.summary["error"]["worst"])
    again = sp.load(run.path, data, lambda: nn.Linear(5, 1))
    assert again.summary["error"] == run.summary["error"]
    data.save(tmp_path / "saved")
    assert sp.Federation.open(tmp_path / "saved").digest() == data.digest()
