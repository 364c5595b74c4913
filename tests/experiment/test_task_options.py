"""Losses, targets and metrics in runs: every kind of task, under every executor, resumed, and on pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sparsona as sp
from sparsona.analysis.measure import headline_score
from sparsona.core.targets import METRICS
from sparsona.deploy.jobs import reported_metrics
from sparsona.engine.evaluate import Evaluation
from sparsona.engine.population import EvaluationLog
from sparsona.engine.rounds import simulate
from sparsona.executors.graphed import Graphed
from sparsona.executors.serial import Serial
from sparsona.experiment.agreement import agree
from sparsona.experiment.build import make_config, make_context
from sparsona.runs.listing import list_runs

RNG = np.random.default_rng(0)
X = RNG.normal(size=(80, 4)).astype(np.float32)
Z = X @ RNG.normal(size=(4, 3))
# For each kind of task: targets, options of the data, the model's outputs, and options of the run.
KINDS = {
    "classes": (Z.argmax(1), {"partition": "iid"}, 3, {"class_weights": "balanced", "label_smoothing": 0.1}),
    "binary": ((Z[:, 0] > 0) * 1, {"task": "binary", "partition": "iid"}, 1, {"class_weights": [1.0, 2.0]}),
    "labels": ((Z > 0) * 1.0, {"partition": "iid"}, 3, {"class_weights": "balanced"}),
    "numbers": (np.round(3 * Z[:, 0]), {"task": "regression", "partition": "iid"}, 1, {"loss": "huber"}),
}
SMALL = {"device": "cpu", "rounds": 2, "per_round": 2, "batch_size": 8, "executor": "serial"}


def federation_of(kind):
    y, options, outputs, _ = KINDS[kind]
    return sp.federate(X, y, clients=4, seed=1, **options), lambda: nn.Linear(4, outputs)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of each kind, in this process."""
    where = tmp_path_factory.mktemp("tasks")
    return {
        kind: sp.train(
            "fedavg-ft", *federation_of(kind), out=where / kind, metrics=METRICS[kind], **SMALL, **KINDS[kind][3]
        )
        for kind in KINDS
    }


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_its_figures(runs, kind, tmp_path):
    run = runs[kind]
    assert run._folder.facts.targets == kind
    for name in METRICS[kind]:
        values = run.metric(name)
        known = values[~np.isnan(values)]
        assert run.summary["metrics"][name]["mean"] == pytest.approx(known.mean())
        assert run.summary["metrics"][name]["clients"] == len(known)
        assert run.metric_curve(name)[-1][0] == 2
    assert {row.point for row in run._folder.records.metrics()} == {"received", "tuned"}
    if kind == "numbers":
        assert (run.view.measure.name, run.view.measure.better) == ("rmse", "low")
        assert "mse" not in run.summary["error"]  # the loss is another one
        np.testing.assert_allclose(run.view.scores, run.metric("rmse"))
    else:
        np.testing.assert_allclose(run.metric("accuracy"), run.accuracies())
    model, data = run.personal_model(1), federation_of(kind)[0].examples(1, "test")
    with torch.no_grad():
        outputs = model(data.inputs)
    if kind == "binary":
        assert run.accuracies()[1] == ((outputs[:, 0] > 0) == data.targets).double().mean()
        assert run._folder.records.confusions(2, "tuned")[1].shape == (2, 2)
    elif kind == "labels":
        assert run.accuracies()[1] == ((outputs > 0) == (data.targets > 0)).all(1).double().mean()
    elif kind == "numbers":
        assert run.metric("mae")[1] == pytest.approx(float((outputs - data.targets).abs().mean()), rel=1e-5)
        assert run.errors()[1] == pytest.approx(float(F.huber_loss(outputs, data.targets)), rel=1e-5)
    again = sp.load(run.path, model=federation_of(kind)[1])  # its models need no data
    (row,) = again.evaluate(1, X[:30], KINDS[kind][0][:30]).rows()
    assert set(METRICS[kind]) - {"accuracy"} <= set(row)
    if kind != "classes":
        with pytest.raises(sp.SparsonaError):
            again.evaluate(1, X[:30], np.zeros((30, 7)) + 2)
    page = run.report(tmp_path / "page.html").read_text()
    for title in {"classes": ["AUC", "F1"], "binary": ["AUC"], "labels": ["F1"], "numbers": ["RMSE", "MAE"]}[kind]:
        assert title in page


@pytest.mark.parametrize(
    ("executor", "kind"),
    [*(("stacked", kind) for kind in KINDS), pytest.param("workers", "binary", marks=pytest.mark.slow)],
)
def test_executors_agree(runs, executor, kind, tmp_path):
    options = {**SMALL, "executor": executor, "metrics": METRICS[kind], **KINDS[kind][3]}
    run = sp.train("fedavg-ft", *federation_of(kind), out=tmp_path / "run", **options)
    rows, expected = (one._folder.records.metrics() for one in (run, runs[kind]))
    if executor == "workers":
        assert rows == expected
    assert [(row.client, row.name, row.point) for row in rows] == [
        (row.client, row.name, row.point) for row in expected
    ]
    np.testing.assert_allclose([row.value for row in rows], [row.value for row in expected], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps_agree(kind):
    """The executor of large models, without its GPU."""
    data, net = federation_of(kind)
    config = make_config("fedavg", {**SMALL, "metrics": METRICS[kind], **KINDS[kind][3]}, data, net)
    context, found = make_context(config, data, net), []
    for engine in (simulate(context, Serial(context)), simulate(context, Graphed(context, 2))):
        population, _ = engine.play(engine.start(), 0)
        found.append(sorted(engine.evaluate(population, 1, EvaluationLog()), key=lambda one: one.client))
    for one, other in zip(*found, strict=True):
        assert other.metrics == pytest.approx(dict(one.metrics), rel=1e-4)
        assert other.loss == pytest.approx(one.loss, rel=1e-4)


def focal(outputs, targets):
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return (1 - (-losses).exp()).square() * losses


def best_two(outputs, targets):
    return (outputs.topk(2).indices == targets[:, None]).any(1).double().mean()


class _Stop:
    def on_round(self, result):
        if result.index == 1:
            raise KeyboardInterrupt


def test_functions_from_python_are_passed_again_and_a_killed_run_has_the_same_records(tmp_path):
    data, net = federation_of("classes")
    options = {**SMALL, "rounds": 3, "loss": focal, "metrics": ["f1", best_two]}
    whole = sp.train("fedavg", data, net, out=tmp_path / "whole", **options)
    assert (whole.config["loss"], whole.config["metrics"]) == ("given:focal", ["f1", "given:best_two"])
    assert whole.summary["metrics"]["best_two"]["better"] == "neither"
    with pytest.raises(KeyboardInterrupt):
        sp.train("fedavg", data, net, out=tmp_path / "cut", observers=[_Stop()], **options)
    folder = sp.load(tmp_path / "cut")._folder
    with folder.records.writing():  # as if it had been killed after the rows of a round, before its checkpoint
        folder.records.writer.execute("INSERT INTO client_metrics VALUES (3, 0, 'received', 'strange', 1.0)")
    folder.records.close()
    for missing in ({}, {"loss": focal}, {"metrics": [best_two]}):
        with pytest.raises(sp.SparsonaError, match="is a function from Python"):
            sp.resume(tmp_path / "cut", data, net, **missing)
    run = sp.resume(tmp_path / "cut", data, net, loss=focal, metrics=[best_two])
    assert run._folder.records.metrics() == whole._folder.records.metrics()
    assert len(run._folder.records.metrics()) == 3 * 4 * 2
    assert run._folder.records.evaluations() == whole._folder.records.evaluations()
    # Models need no function that judged them, and no other loss is reported under its name.
    some = data.x[:8].numpy(), data.y[:8].numpy()
    with_all = sp.load(tmp_path / "cut", data, net, loss=focal, metrics=[best_two])
    (full,), (bare,) = (one.evaluate(0, *some).rows() for one in (with_all, sp.load(tmp_path / "cut", model=net)))
    assert bare == {key: value for key, value in full.items() if key not in ("loss", "best_two")}
    assert full["loss"] > 0
    assert {"f1", "best_two"} <= full.keys()
    loaded = sp.load(tmp_path / "cut", model=net)
    assert loaded.personal_model(0).training is False
    assert "(focal, a function from Python)" in loaded.export(0, tmp_path / "a.safetensors").card.read_text()


def test_observers_and_tables_have_metrics_and_say_for_how_many_clients(tmp_path):
    yes = (Z[:, 0] > 0) * 1
    parts = [(X[:20], yes[:20], X[20:40], yes[20:40]), (X[40:60], yes[40:60], X[60:], yes[60:])]
    parts += [(X[:20], yes[:20], X[yes == sign], yes[yes == sign]) for sign in (0, 1)]  # tested on one class
    data, net = sp.Federation.from_clients(parts, task="binary"), lambda: nn.Linear(4, 1)
    seen = []

    class Watch:
        def on_evaluation(self, result):
            seen.append(result)

    options = {**SMALL, "rounds": 1, "metrics": ["auc"]}
    both = sp.compare(["local", "fedavg"], data, net, out=tmp_path / "both", observers=[Watch()], **options)
    known = [one for one in seen[0].clients if "auc" in one.metrics]
    assert [one.client for one in known] == [0, 1]
    assert seen[0].metrics["auc"] == pytest.approx(np.mean([one.metrics["auc"] for one in known]))
    assert all(row["AUC"] for row in both.table())
    assert f"AUC is defined for {len(known)} of 4 clients of Local" in " ".join(both.notes())
    assert {"metric_auc"} <= set(both.figures()[0])


@pytest.mark.parametrize(
    ("metrics", "shown"), [(None, "RMSE"), (["r2", "mae"], "R²"), ([lambda outputs, targets: 3.0], "huber")]
)
def test_every_view_of_a_regression_has_one_headline(metrics, shown, tmp_path):
    run = sp.train("local", *federation_of("numbers"), out=tmp_path / "run", metrics=metrics, loss="huber", **SMALL)
    score = f"{headline_score(run.view.measure, run.summary):.4g}"
    assert f", {shown} {score}, '" in repr(run)
    assert f"{score} ({shown}) on average" in run._repr_html_()
    (row,) = list_runs(tmp_path)
    assert row["accuracy"] == f"{'loss' if shown == 'huber' else shown} {score}"


def test_a_regression_in_the_terminal_and_on_a_page(tmp_path, say):
    y, _, _, _ = KINDS["numbers"]
    np.savez(tmp_path / "own.npz", x=X, y=y)
    data = ("--data", "arrays:own.npz", "--set", "task=regression", "--partition", "iid", "--clients", 4)
    small = ("--model", "mlp:hidden=0", "--rounds", 1, "--executor", "serial", "--device", "cpu")
    said = say("compare", "local", "fedavg", *data, *small, "--set", "metrics=mae,r2", "--out", "both")
    assert said.code == 0, said
    assert said.out.startswith("FedAvg serves clients best, ")  # whose error is the lower one
    assert "(MAE); next is Local" in said.out
    said = say("report", "both", "--out", "page.html")
    assert said.code == 0, said
    page = (tmp_path / "page.html").read_text()
    assert "Mean MAE over clients after each round. Lower is better." in page
    assert "client MAE" in page
    assert "MAE against traffic" in page


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": "cross-entropi"}, "did you mean 'cross-entropy'"),
        ({"loss": F.cross_entropy}, "one loss per example"),
        ({"metrics": "rmse"}, "where classes are predicted"),
        ({"metrics": ["acuracy"]}, "did you mean 'accuracy'"),
        ({"metrics": [best_two, best_two]}, "two metrics called 'best_two'"),
        ({"metrics": ["f1-macro"]}, "did you mean 'f1'"),
        ({"metrics": "roc_auc"}, "did you mean 'auc'"),
        ({"class_weights": [1, 2]}, "3, one for each class, in this order: 0, 1, 2"),
        ({"class_weights": {"1": 2.0, "3": 1.0}}, "class_weights of '3', which is no class\\n.*any of 0, 1, 2"),
        ({"class_weights": "0=0,1=0,2=0"}, "all 0"),
        ({"class_weights": {"1": -1.0}}, "0 or more"),
        ({"class_weights": [1, -2, 1]}, "0 or more"),
        ({"label_smoothing": 1.0}, "less than 1"),
        ({"task": "binary"}, "give it to sparsona.federate"),
    ],
)
def test_wrong_options(options, words, tmp_path):
    with pytest.raises(sp.SparsonaError, match=words):
        sp.train("fedavg", *federation_of("classes"), out=tmp_path / "run", **SMALL, **options)


@pytest.mark.parametrize("name", ["wet\x1b[2J", "wet\\x1b[2J"])
def test_a_class_is_named_as_it_was_given_or_as_it_is_shown(name, tmp_path):
    y = np.array(["dry", "mild", "wet\x1b[2J"])[Z.argmax(1)]
    federation = sp.federate(X, y, clients=4, seed=1, partition="iid")
    run = sp.train("fedavg", federation, lambda: nn.Linear(4, 3), out=tmp_path, class_weights={name: 3}, **SMALL)
    assert run._folder.facts.class_weights == (1.0, 1.0, 3.0)
    assert r"Losses are weighted by class (dry 1, mild 1, wet\x1b[2J 3)." in run.protocol


@pytest.mark.parametrize("weights", [{"wet": 3, "dry": 0.5}, "wet=3, dry=0.5"])
def test_weights_by_the_names_of_classes(weights, tmp_path):
    y = np.array(["dry", "mild", "wet"])[Z.argmax(1)]
    federation = sp.federate(X, y, clients=4, seed=1, partition="iid")
    run = sp.train("fedavg", federation, lambda: nn.Linear(4, 3), out=tmp_path, class_weights=weights, **SMALL)
    assert run._folder.facts.class_weights == (0.5, 1.0, 3.0)
    assert run.config["class_weights"] == {"wet": 3.0, "dry": 0.5}
    assert sp.load(tmp_path, federation, lambda: nn.Linear(4, 3)).config == run.config
    with pytest.raises(sp.SparsonaError, match="class_weights of 'wed', which is no class") as caught:
        sp.train("fedavg", federation, lambda: nn.Linear(4, 3), class_weights={"wed": 2}, **SMALL)
    assert "any of dry, mild, wet" in caught.value.expected
    assert "'wet'" in caught.value.hint


def test_what_several_machines_agree_on():
    run = agree("fedavg", {"class_weights": [1, 2]}, model="mlp", classes=1, input_shape=(4,), predicts="binary")
    assert (run["class_weights"], run["predicts"], run["metrics"]) == ([1.0, 2.0], "binary", None)
    for options, words in (
        ({"loss": focal}, "the function 'focal'"),
        ({"class_weights": "balanced"}, "label counts no side knows"),
        ({"class_weights": {"0": 2}}, "class_weights by name"),
        ({"loss": "huber"}, "where one of two classes"),
        ({"metrics": ["mae"]}, "the metric 'mae'"),
    ):
        with pytest.raises(sp.SparsonaError, match=words):
            agree("fedavg", options, model="mlp", classes=1, input_shape=(4,), predicts="binary")


def test_clients_elsewhere_withhold_metrics_as_they_do_confusions():
    metrics = {"accuracy": 0.5, "auc": 0.7}
    found = Evaluation(0, "received", 10, 20, 0.1, torch.tensor([[5, 5], [5, 5]]), metrics)
    assert reported_metrics(found, shares_labels=True) == metrics
    assert reported_metrics(found, shares_labels=False) == {"accuracy": 0.5}
    few = Evaluation(0, "received", 10, 20, 0.1, torch.tensor([[16, 0], [2, 2]]), metrics)
    assert reported_metrics(few, shares_labels=True) == {"accuracy": 0.5}
    numbers = Evaluation(0, "received", None, 20, 0.1, None, {"rmse": 1.0, "r2": 0.5})
    assert reported_metrics(numbers, shares_labels=False) == {"rmse": 1.0}
