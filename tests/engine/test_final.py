"""After the last round: tuning, novel clients, and looks that are taken once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import sparsona as sp
from sparsona.analysis.outcomes import keeps_the_shared_model
from sparsona.engine.guard import Seen, keeps_shared

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
    return [(row.client, row.correct, row.count, row.loss) for row in run._folder.records.evaluations(2, point)]


@pytest.mark.parametrize("executor", ["serial", "stacked"])
def test_novel_clients_are_tuned_alone(federation, tmp_path, executor):
    options = {**SMALL, "executor": executor, "novel": 0.4}
    run = sp.train("fedavg", federation, net, novel_epochs=3, out=tmp_path / "run", **options)
    assert len(run.novel) == 2
    assert [row[0] for row in rows(run, "novel")] == [row[0] for row in rows(run, "novel_tuned")] == run.novel
    assert "tuned" not in run.points
    tuning = run._folder.records.turns(2)
    assert len(tuning) == 2
    assert sum(turn.bytes_up for turn in tuning) == 0
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


@pytest.fixture(scope="module")
def shared(federation, tmp_path_factory):
    return sp.train("fedavg", federation, net, out=tmp_path_factory.mktemp("shared") / "run", **SMALL)


@pytest.mark.parametrize("executor", ["serial", "stacked"])
def test_the_last_models_on_training_data(federation, shared, tmp_path, executor):
    options = {**SMALL, "executor": executor, "train_accuracy": True}
    run = sp.train("fedavg", federation, net, tune_epochs=20, warm_start=shared, out=tmp_path / "run", **options)
    num_train = federation.sizes()[:, 0].tolist()
    for point in ("received/train", "tuned/train", "global/train", "start/train"):
        assert [row[2] for row in rows(run, point)] == num_train, point
    assert [row[2] for row in rows(run, "start")] == federation.sizes()[:, 2].tolist()
    # FedAvg sends everybody the global model, and the start is what the other run ended with.
    np.testing.assert_allclose(rows(run, "global/train"), rows(run, "received/train"), rtol=1e-5)
    np.testing.assert_allclose(rows(run, "start"), rows(shared, "received"), rtol=1e-5)
    means = run.summary["other_points"]
    assert means["tuned/train"] > means["received/train"]
    assert run.summary["pipeline"]["accuracy"]["start"] == pytest.approx(shared.summary["accuracy"]["mean"])
    plain = sp.train("fedavg", federation, net, out=tmp_path / "plain", **SMALL)
    assert plain.points == ["received"]


def test_who_keeps_the_shared_model():
    better = Seen(8, 10, 0.9)
    assert keeps_shared(Seen(7, 10, 0.1), better)  # accuracy first
    assert not keeps_shared(better, Seen(7, 10, 0.1))
    assert keeps_shared(Seen(8, 10, 1.0), better)  # then loss
    assert keeps_shared(Seen(4, 5, 1.0), better)
    assert not keeps_shared(better, better)  # then one's own
    assert not keeps_shared(Seen(8, 10, 0.8), better)
    assert not keeps_shared(Seen(0, 0, float("nan")), Seen(0, 0, float("nan")))


@pytest.mark.parametrize("executor", ["serial", "stacked"])
@pytest.mark.parametrize("warm", [False, True])
def test_guard(federation, shared, tmp_path, executor, warm):
    options = {**SMALL, "executor": executor, "tune_epochs": 6, "lr": 0.5} | ({"warm_start": shared} if warm else {})
    run = sp.train("fedavg", federation, net, guard=True, out=tmp_path / "run", **options)
    own, other = (rows(run, f"{model}/validation") for model in ("personal", "shared"))
    assert [row[2] for row in own] == [row[2] for row in other] == federation.sizes()[:, 1].tolist()
    base, tested = rows(run, "start" if warm else "global"), rows(run, "tuned")
    expected = [
        b if keeps_shared(Seen(*mine[1:]), Seen(*theirs[1:])) else p
        for mine, theirs, b, p in zip(own, other, base, tested, strict=True)
    ]
    assert rows(run, "guarded") == expected
    block = run.summary["guard"]
    assert block["clients"] == 5
    assert block["kept_shared"] == sum(row == b != p for row, b, p in zip(expected, base, tested, strict=True))
    accuracy = {name: np.mean([row[1] / row[2] for row in found]) for name, found in (("guarded", expected),)}
    assert block["accuracy"]["guarded"] == pytest.approx(accuracy["guarded"])
    assert block["accuracy"]["personal"] == run.summary["accuracy"]["mean"]
    hurt = [p[1] < b[1] for p, b in zip(tested, base, strict=True)]
    assert block["hurt"]["personal"] == sum(hurt)
    assert block["hurt"]["guarded"] == sum(row[1] < b[1] for row, b in zip(expected, base, strict=True))
    for client, kept in enumerate(row == b for row, b in zip(expected, base, strict=True)):
        weights = [
            torch.cat([value.flatten() for value in run.personal_model(client, guarded=guarded).parameters()])
            for guarded in (False, True)
        ]
        assert torch.equal(*weights) is not kept


def test_test_data_never_decides(tmp_path):
    """The same clients with every test label changed: other accuracies, the same choices."""
    federation = sp.federate(*arrays(), clients=6, partition="iid", seed=1, validation_rate=0.4)
    y = federation.y.clone()
    for split in federation.splits:
        y[split.test] = (y[split.test] + 1) % 3
    chosen, means = [], []
    for name, data in (("a", federation), ("b", replace(federation, y=y))):
        run = sp.train("fedavg", data, net, guard=True, tune_epochs=10, out=tmp_path / name, **{**SMALL, "epochs": 4})
        chosen.append([keeps_the_shared_model(run._folder, client) for client in range(6)])
        means.append(run.summary["guard"]["accuracy"]["guarded"])
    assert means[0] != means[1]
    assert chosen[0] == chosen[1]
    assert 0 < sum(chosen[0]) < 6  # or nothing was decided


def test_guard_needs_a_shared_model_and_validation_data(federation, tmp_path):
    with pytest.raises(sp.SparsonaError, match="local has no shared model"):
        sp.train("local", federation, net, guard=True, out=tmp_path / "run", **SMALL)
    with pytest.raises(sp.SparsonaError, match=r"fedalt has no shared model .* no client trains all of the global one"):
        sp.train("fedalt", federation, net, guard=True, personal="2.*", out=tmp_path / "run", **SMALL)
    bare = sp.federate(*arrays(), clients=5, partition="iid", seed=0, validation_rate=0)
    with pytest.raises(sp.SparsonaError, match="5 clients have no validation data"):
        sp.train("fedavg", bare, net, guard=True, out=tmp_path / "run", **SMALL)
    assert not (tmp_path / "run").exists()


def test_no_choice_is_made_up_where_there_was_no_guard(federation, tmp_path):
    run = sp.train("fedavg", federation, net, out=tmp_path / "run", **SMALL)
    with pytest.raises(sp.SparsonaError, match="without a guard"):
        run.personal_model(0, guarded=True)


def test_a_global_model_with_an_untrained_part_is_nothing_to_compare_with(federation, tmp_path):
    run = sp.train("fedalt", federation, net, personal="2.*", points=["global"], out=tmp_path / "run", **SMALL)
    with pytest.raises(sp.SparsonaError, match="did not evaluate a shared model") as refused:
        run.clients()
    assert "--warm-start" in str(refused.value)
    assert run.clients("global").changes  # where a person asks for it
    assert (
        "start"
        in sp.train(
            "fedalt", federation, net, personal="2.*", guard=True, warm_start=run, out=tmp_path / "warm", **SMALL
        )
        .clients()
        .title
    )


def test_classes_seen_and_unseen_in_training(tmp_path):
    x, y = arrays()
    few = [(x[y < 2][:60], y[y < 2][:60], x[:30], y[:30]), (x[60:120], y[60:120], x[120:150], y[120:150])]
    data = sp.Federation.from_clients(few, seed=0)
    run = sp.train("local", data, net, out=tmp_path / "run", **{**SMALL, "per_round": 2, "epochs": 5})
    found, unseen = run.summary["classes"], int((y[:30] == 2).sum())
    nobody_taught_it = {"mean": 0.0, "weighted": 0.0, "clients": 1, "examples": unseen, "share": unseen / 60}
    assert found["unseen"] == nobody_taught_it
    assert (found["seen"]["clients"], found["seen"]["examples"]) == (2, 60 - unseen)
    right = [row[1] for row in rows(run, "received")]
    assert found["seen"]["weighted"] == pytest.approx(sum(right) / (60 - unseen))
    assert found["seen"]["mean"] == pytest.approx(np.mean([right[0] / (30 - unseen), right[1] / 30]))


@pytest.mark.parametrize("executor", ["serial", "stacked"])
def test_classes_seen_and_unseen_are_counted_for_any_number_of_classes(executor, tmp_path, monkeypatch):
    """Without a matrix the counts are the same, and a resumed run has them."""
    x, y = arrays()
    few = [(x[y < 2][:60], y[y < 2][:60], x[:30], y[:30]), (x[60:120], y[60:120], x[120:150], y[120:150])]
    data = sp.Federation.from_clients(few, seed=0)
    options = {**SMALL, "per_round": 2, "executor": executor, "tune_epochs": 1}
    found = sp.train("fedavg", data, net, out=tmp_path / "matrix", **options).summary["classes"]
    assert found["unseen"]["examples"] == int((y[:30] == 2).sum())
    monkeypatch.setattr("sparsona.engine.evaluate.MAX_CONFUSION", 2)
    run = sp.train("fedavg", data, net, out=tmp_path / "counts", **options)
    assert run.view.confusion is None
    assert run.summary["classes"] == found
    sp.train("fedavg", data, net, out=tmp_path / "part", max_seconds=1e-9, **options)
    part = sp.resume(tmp_path / "part", data, net)
    for completed in (1, 2):
        assert part._folder.records.classes(completed, "received") == run._folder.records.classes(completed, "received")
    assert part.summary["classes"] == found


def test_classes_seen_and_unseen_of_2028_classes(tmp_path):
    """A model that always answers class 7, by hand: client 0 has seen 7 and 300, client 1 only 2,027."""
    module = torch.nn.Linear(2, 2028)
    with torch.no_grad():
        module.weight.zero_()
        module.bias.zero_()[7] = 1.0
    x = torch.zeros(4, 2)
    clients = [
        (x[:2], torch.tensor([7, 300]), x, torch.tensor([7, 7, 300, 9])),
        (x[:2], torch.tensor([2027, 2027]), x[:2], torch.tensor([7, 2027])),
    ]
    data = sp.Federation.from_clients(clients, validation_rate=0, num_classes=2028)
    options = {**SMALL, "rounds": 0, "per_round": 2}
    found = sp.train("fedavg", data, module, out=tmp_path / "run", **options).summary["classes"]
    assert found["seen"] == {"mean": pytest.approx(1 / 3), "weighted": 0.5, "clients": 2, "examples": 4, "share": 4 / 6}
    assert found["unseen"] == {"mean": 0.5, "weighted": 0.5, "clients": 2, "examples": 2, "share": 2 / 6}


def test_no_class_is_unseen(federation, tmp_path):
    data = sp.federate(*arrays(), clients=2, partition="iid", seed=0)
    found = sp.train("fedavg", data, net, out=tmp_path / "run", **{**SMALL, "per_round": 2}).summary["classes"]
    assert found["unseen"] == {"mean": None, "weighted": None, "clients": 0, "examples": 0, "share": 0.0}


def test_every_point_that_was_asked_for_is_in_the_summary(tmp_path):
    asked = ["received/validation", "trained/train", "global"]
    options = {"clients": 4, "per_round": 2, "rounds": 1, "epochs": 1, "executor": "serial"}
    run = sp.train("fedavg", points=asked, out=tmp_path / "run", **options)
    assert set(run.summary["other_points"]) == set(asked)
    assert run.accuracies("received/validation").shape == (4,)


def test_points_need_the_data_they_are_on(tmp_path):
    options = {"clients": 4, "rounds": 1, "validation_rate": 0.0, "out": tmp_path / "run"}
    with pytest.raises(sp.SparsonaError, match="no validation data"):
        sp.train("fedavg", points=["received/validation"], **options)
    assert not (tmp_path / "run").exists()
