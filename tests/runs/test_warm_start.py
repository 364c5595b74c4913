"""A run that begins with another run's model: what is taken, what is refused, and that it can be resumed."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from torch import nn

import sparsona as sp
from sparsona.core.outline import Roles
from sparsona.runs.warm_start import GLOBAL_FILE, START_FILE, warm_start_from

SMALL = {"device": "cpu", "executor": "serial", "rounds": 2, "per_round": 3, "epochs": 1, "batch_size": 8}


def net(width=5, extra=False):
    model = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))
    if extra:
        model.add_module("adapter", nn.Linear(3, 3))
    return model


@pytest.fixture(scope="module")
def federation():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 120)
    x = rng.normal(size=(120, 6)).astype(np.float32) + np.eye(6, dtype=np.float32)[y]
    return sp.federate(x, y, clients=4, partition="iid", seed=0)


@pytest.fixture(scope="module")
def source(federation, tmp_path_factory):
    return sp.train("fedavg", federation, net, out=tmp_path_factory.mktemp("warm") / "a", **SMALL)


def traces(run):
    return [(row.client, row.loss, row.point) for row in run._folder.records.evaluations()]


def test_everybody_begins_where_the_other_run_ended(federation, source, tmp_path):
    end = warm_start_from(source.path).weights
    tuned = {**SMALL, "rounds": 1, "tune_epochs": 1}
    run = sp.train("fedspa", federation, net, warm_start=source, out=tmp_path / "b", density=1.0, **tuned)
    params = run._make_context().params
    assert all(torch.equal(params[name], end[name]) for name in params)
    steps = run.summary["pipeline"]
    assert steps["warm_start"]["run"] == str(source.path)
    assert (steps["warm_start"]["rounds"], steps["rounds"], steps["tune_epochs"]) == (2, 1, 1)
    assert (steps["warm_start"]["taken"], steps["warm_start"]["of"]) == (4, 4)
    assert steps["accuracy"]["tuned"] == run.summary["accuracy"]["mean"]
    assert steps["accuracy"]["received"] == run.curve("received")[-1][1]
    assert str(source.path) in run.protocol
    cold = sp.train("fedspa", federation, net, out=tmp_path / "c", density=1.0, **tuned)
    assert traces(cold) != traces(run)
    assert cold.summary["pipeline"]["warm_start"] is None


@pytest.mark.long
def test_workers_begin_there_too(federation, source, tmp_path, forked_workers):
    found = [
        sp.train("fedavg", federation, net, warm_start=source, out=tmp_path / name, **{**SMALL, "executor": name})
        for name in ("serial", "workers")
    ]
    assert traces(found[0]) == traces(found[1])


def test_it_goes_on_when_the_source_is_gone_and_not_from_another_start(federation, source, tmp_path):
    copied = tmp_path / "source"
    shutil.copytree(source.path, copied)
    whole = sp.train("fedavg", federation, net, warm_start=copied, out=tmp_path / "whole", **SMALL)
    part = sp.train("fedavg", federation, net, warm_start=copied, out=tmp_path / "part", max_seconds=1e-9, **SMALL)
    assert part.summary["rounds"] == 1
    shutil.rmtree(copied)
    config = (part.path / "config.json").read_text()
    (part.path / "config.json").write_text(config.replace("1e-09", "null"))
    assert traces(sp.resume(part.path, federation, net)) == traces(whole)
    shutil.copy(source.path / GLOBAL_FILE, tmp_path / "other")
    cold = sp.train("fedavg", federation, net, out=tmp_path / "cold", **{**SMALL, "rounds": 1})
    shutil.copy(cold.path / GLOBAL_FILE, part.path / START_FILE)
    with pytest.raises(sp.SparsonaError, match="differs since the run was started"):
        sp.resume(part.path, federation, net)
    (part.path / START_FILE).unlink()
    with pytest.raises(sp.SparsonaError, match="is missing"):
        sp.resume(part.path, federation, net)


def test_a_model_with_more_parameters_takes_what_there_is(federation, source, tmp_path, capsys):
    run = sp.train("fedavg", federation, lambda: net(extra=True), warm_start=source, out=tmp_path / "b", **SMALL)
    params, end = run._make_context().params, warm_start_from(source.path).weights
    assert torch.equal(params["0.weight"], end["0.weight"])
    assert params["adapter.weight"].abs().sum() > 0
    assert run.summary["pipeline"]["warm_start"]["taken"] == 4
    assert "4 of 6 parameters are taken" in capsys.readouterr().err


def test_other_networks_are_refused(federation, source, tmp_path):
    def begin(model):
        sp.train("fedavg", federation, model, warm_start=source.path, out=tmp_path / "b", **SMALL)

    with pytest.raises(sp.SparsonaError, match=r"its '0\.weight' has shape \[5, 6\]"):
        begin(lambda: net(7))
    with pytest.raises(sp.SparsonaError, match="no parameter has a name"):
        begin(lambda: nn.ModuleDict({"a": nn.Linear(6, 3)})["a"])
    with pytest.raises(sp.SparsonaError, match=r"this model has no '2\.bias'"):
        begin(lambda: nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)))
    assert not (tmp_path / "b").exists()


def test_runs_that_leave_no_model(federation, source, tmp_path):
    alone = sp.train("local", federation, net, out=tmp_path / "alone", **SMALL)
    half = sp.train("fedavg", federation, net, out=tmp_path / "half", max_seconds=1e-9, **SMALL)
    for run, word in ((alone, "Local has no global model"), (half, "reached round 1 of 2")):
        with pytest.raises(sp.SparsonaError, match=word):
            sp.train("fedavg", federation, net, warm_start=run, out=tmp_path / "b", **SMALL)
    with pytest.raises(sp.SparsonaError, match="there is no run 'nowhere'"):
        sp.train("fedavg", federation, net, warm_start="nowhere", out=tmp_path / "b", **SMALL)


def test_a_start_that_has_seen_other_clients_is_told(source, tmp_path, capsys):
    rng = np.random.default_rng(1)
    other = sp.federate(rng.normal(size=(80, 6)).astype(np.float32), rng.integers(0, 3, 80), clients=4, partition="iid")
    run = sp.train("fedavg", other, net, warm_start=source, out=tmp_path / "b", **SMALL)
    assert "may be what it was trained on" in capsys.readouterr().err
    assert "may have been trained on what is tested here" in run.protocol


PART = {**SMALL, "rounds": 0, "personal": "adapter", "tune_epochs": 2, "lr": 0.5}


class Adapted(nn.Module):
    """The network of `net` with an adapter behind it, under the same names."""

    def __init__(self):
        super().__init__()
        layers = net()
        for name, layer in layers.named_children():
            self.add_module(name, layer)
        self.adapter = nn.Linear(3, 3)
        self.roles = Roles(
            input=("0.weight", "0.bias"), output=("2.weight", "2.bias"), adapter=("adapter.weight", "adapter.bias")
        )

    def forward(self, x):
        for name in ("0", "1", "2"):
            x = self.get_submodule(name)(x)
        return x + self.adapter(x)


@pytest.mark.parametrize("method", ["fedavg-ft-part", "fedalt"])
def test_a_stored_model_is_only_tuned(federation, source, tmp_path, method):
    """FT (part.) with adapters: new ones beside the stored model, which stays as it is."""
    run = sp.train(method, federation, Adapted, warm_start=source, out=tmp_path / "b", **PART)
    end = warm_start_from(source.path).weights
    fresh = sp.train(method, federation, Adapted, out=tmp_path / "c", **{**SMALL, "rounds": 1})
    drawn = fresh._make_context().params
    params = run._make_context().params
    for name in params:
        assert torch.equal(params[name], end[name] if name in end else drawn[name]), name
    own = [run.personal_model(client).state_dict() for client in range(4)]
    for weights in own:
        for name in params:
            assert torch.equal(weights[name], params[name]) is (name in end), name
    assert not torch.equal(own[0]["adapter.weight"], own[1]["adapter.weight"])
    steps = run.summary["pipeline"]
    assert (run.summary["rounds"], steps["rounds"], steps["tune_epochs"]) == (0, 0, 2)
    assert list(steps["accuracy"]) == ["start", "received", "tuned"]
    assert steps["accuracy"]["start"] == steps["accuracy"]["received"] == run.curve()[0][1]
    assert run.curve()[0][0] == 0
    assert steps["accuracy"]["tuned"] == run.summary["accuracy"]["mean"]
    assert steps["weighted"]["tuned"] == run.summary["accuracy"]["weighted"]
    assert run.summary["turns"] == {"rounds": 0, "tuning": 4, "total": 4}
    assert run.summary["bytes"]["up"] == 0 < run.summary["bytes"]["down"]
    assert "no rounds were played" in run.protocol
    assert "2 tensors drawn from the seed were added" in run.protocol
    assert run.report(tmp_path / "page.html").exists()
    again = sp.train("fedavg", federation, Adapted, warm_start=run, out=tmp_path / "d", **SMALL | {"rounds": 0})
    assert again.summary["accuracy"]["mean"] == steps["accuracy"]["start"]  # it leaves the model that it began with


def test_an_interrupted_tuning_of_a_stored_model_is_resumed(federation, source, tmp_path):
    class Interrupt:
        def on_evaluation(self, result):
            raise KeyboardInterrupt

    whole = sp.train("fedalt", federation, Adapted, warm_start=source, out=tmp_path / "whole", **PART)
    with pytest.raises(KeyboardInterrupt):
        sp.train(
            "fedalt", federation, Adapted, warm_start=source, out=tmp_path / "part", observers=[Interrupt()], **PART
        )
    part = sp.resume(tmp_path / "part", federation, Adapted)
    assert traces(part) == traces(whole)
    for client in range(4):
        ours, theirs = (run.personal_model(client).state_dict() for run in (part, whole))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("fedavg-ft-part", {"personal": "output"}, ["it has no 'adapter.weight' and 1 more", "which is output"]),
        ("fedalt", {"personal": "output", "rounds": 2}, ["it has no 'adapter.weight' and 1 more"]),
        ("fedalt", {"personal": "adapter.weight"}, ["it has no 'adapter.bias'\n"]),
        ("fedavg-ft", {}, ["it has no 'adapter.weight'", "this method has none"]),
    ],
)
def test_only_a_personal_part_may_be_new(federation, source, tmp_path, method, options, words):
    with pytest.raises(sp.SparsonaError) as caught:
        sp.train(
            method, federation, Adapted, warm_start=source, out=tmp_path / "b", **{**SMALL, "rounds": 0, **options}
        )
    assert all(word in str(caught.value) for word in words)
    assert not (tmp_path / "b").exists()


def test_no_rounds_need_a_model_that_was_trained(federation, tmp_path):
    with pytest.raises(sp.SparsonaError, match="rounds = 0 without a model"):
        sp.train("fedavg", rounds=0, clients=4, tune_epochs=1, out=tmp_path / "a")
    with pytest.raises(sp.SparsonaError, match="--match steps with rounds = 0"):
        sp.compare(["fedavg", "fedalt"], federation, net(), match="steps", out=tmp_path / "b", **SMALL | {"rounds": 0})
    module = net()  # a module is what its user has made of it
    run = sp.train("fedavg", federation, module, out=tmp_path / "c", **SMALL | {"rounds": 0})
    assert run.summary["turns"]["total"] == run.summary["bytes"]["total"] == run.summary["flops"]["train"] == 0
    assert run.summary["bytes"]["busiest_node"] == 0
