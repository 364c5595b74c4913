"""Executors that fill up batches refuse a loss that counts what they are filled up with, and change nothing else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from processes import traces
from torch import nn
from torch.nn import functional as F

import sparsona as sp
from sparsona import methods
from sparsona.core.errors import SparsonaError
from sparsona.core.method import Method
from sparsona.engine.rounds import simulate
from sparsona.executors.graphed import Graphed
from sparsona.executors.stacked import Stacked
from sparsona.experiment.build import make_config, make_context
from sparsona.gpu import padding
from sparsona.gpu.padding import PaddingCheck
from sparsona.methods.fedavg import FedAvgConfig, fedavg
from sparsona.runs.folder import reached

QUICK = {"clients": 4, "rounds": 1, "epochs": 1, "data_rate": 0.1, "progress": False}
REFUSED = "the loss of mine's phase 'train' counts the examples of weight 0"


def with_loss(of_batch, **phase):
    """FedAvg with another loss of outputs and batch."""

    def mine(task, config: FedAvgConfig) -> Method:
        base = fedavg(task, config)

        def loss(work, batch):
            outputs, buffers = task.forward(work.params, work.buffers, batch.inputs, True, batch.noise)
            return of_batch(outputs, batch) + 1e-3 * work.params.flat.square().sum(), buffers

        return replace(base, phases=(replace(base.phases[0], loss=loss, **phase),), tune=None)

    return mine


def each(outputs, batch):
    return F.cross_entropy(outputs, batch.targets, reduction="none")


def zero_net() -> nn.Module:
    """All losses are the same at first: only gradients tell which examples count."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))
    nn.init.zeros_(net[3].weight)
    nn.init.zeros_(net[3].bias)
    return net


WRONG = {
    "a plain mean": lambda outputs, batch: F.cross_entropy(outputs, batch.targets),
    "a plain sum": lambda outputs, batch: each(outputs, batch).sum(),
    "the largest": lambda outputs, batch: each(outputs, batch).topk(2).values.mean(),
    "of other examples' outputs": lambda outputs, batch: (each(outputs - outputs.mean(0), batch) * batch.weight).sum(),
}
RIGHT = {
    "a weighted mean": lambda outputs, batch: (each(outputs, batch) * batch.weight).sum() / batch.weight.sum(),
    "a weighted sum": lambda outputs, batch: (each(outputs, batch) * batch.weight).sum() / 32,
}


@pytest.mark.parametrize("model", ["mlp", zero_net], ids=["mlp", "zeros"])
@pytest.mark.parametrize("name", WRONG)
def test_a_loss_that_counts_padding_is_refused(name, model, tmp_path):
    mine = with_loss(WRONG[name])
    with pytest.raises(SparsonaError, match=REFUSED) as told:
        sp.train(mine, model=model, executor="stacked", out=tmp_path / "run", **QUICK)
    assert "(losses * batch.weight).sum() / batch.weight.sum()" in told.value.expected
    assert sp.train(mine, model=model, executor="serial", out=tmp_path / "serial", **QUICK).summary["rounds"] == 1


def test_a_mean_over_all_that_weighs_is_refused(tmp_path):
    """What the examples of weight 0 are does not matter to it, but how many they are."""

    def mine(task, config: FedAvgConfig) -> Method:
        base = fedavg(task, config)

        def loss(work, batch):
            outputs, buffers = task.forward(work.params, work.buffers, batch.inputs, True, batch.noise)
            return (each(outputs, batch) * batch.weight).mean(), buffers

        return replace(base, phases=(replace(base.phases[0], loss=loss),))

    with pytest.raises(SparsonaError, match=REFUSED):
        sp.train(mine, model="mlp", executor="stacked", out=tmp_path / "run", **QUICK)


@pytest.mark.parametrize("name", RIGHT)
def test_others_run(name, tmp_path):
    run = sp.train(with_loss(RIGHT[name]), model="mlp", executor="stacked", out=tmp_path / "run", **QUICK)
    assert run.summary["rounds"] == 1


def test_a_loss_that_is_not_finite_is_left_to_training(tmp_path):
    mine = with_loss(lambda outputs, batch: outputs.sum() * torch.nan)
    with pytest.raises(SparsonaError, match="loss is nan"):
        sp.train(mine, model="mlp", executor="stacked", out=tmp_path / "run", **QUICK)


def test_a_phase_that_says_that_it_mixes_examples_runs_alone(tmp_path):
    mine = with_loss(WRONG["a plain mean"], mixes_examples=True)
    found = [sp.train(mine, model="mlp", executor=name, out=tmp_path / name, **QUICK) for name in ("serial", "stacked")]
    one, other = (torch.cat([p.flatten() for p in run.model().parameters()]) for run in found)
    assert torch.allclose(one, other, 1e-5, 1e-6)


def relative(outputs, targets):
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return losses / losses.mean().detach()


def centred(outputs, targets):
    return F.cross_entropy(outputs - outputs.mean(0), targets, reduction="none")


def hardest(outputs, targets):
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return losses * (losses > losses.median())


@pytest.mark.parametrize("loss", [relative, centred, hardest])
def test_a_function_whose_losses_depend_on_the_batch_runs_without_padding(loss, tmp_path):
    with pytest.raises(SparsonaError, match="executor stacked, which fills up batches, with this loss"):
        sp.train("fedavg", model="mlp", loss=loss, executor="stacked", out=tmp_path / "run", **QUICK)
    assert not (tmp_path / "run").exists()
    assert sp.train("fedavg", model="mlp", loss=loss, out=tmp_path / "auto", **QUICK).config["executor"] == "serial"


def test_one_that_depends_on_each_example_alone_is_stacked(tmp_path):
    assert sp.train("fedavg", model="mlp", loss=halved, out=tmp_path / "auto", **QUICK).config["executor"] == "stacked"


class Scaled(nn.Module):
    """A network that mixes the examples of a batch, in training alone."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 8), nn.Linear(8, 10)

    def forward(self, inputs):
        hidden = torch.tanh(self.first(inputs.flatten(1)))
        return self.last(hidden / (hidden.std(0) + 1e-3) if self.training else hidden)


def weights_of(run):
    return torch.cat([value.detach().flatten() for value in run.model().parameters()])


@pytest.mark.parametrize("method", ["fedavg", with_loss(RIGHT["a weighted mean"])], ids=["fedavg", "mine"])
def test_a_network_that_mixes_examples_is_trained_without_padding(method, tmp_path):
    """As one with BatchNorm: by `stacked` one client after the other."""
    options = {**QUICK, "partition": "dirichlet:0.3"}
    serial, stacked, auto = (
        sp.train(method, model=Scaled, executor=name, out=tmp_path / name, **options)
        for name in ("serial", "stacked", "auto")
    )
    assert auto.config["executor"] == "serial"
    assert torch.allclose(weights_of(serial), weights_of(stacked), 1e-4, 1e-5)


def test_such_a_network_is_not_trained_on_one_example(tmp_path):
    with pytest.raises(SparsonaError, match="a model that mixes the examples of a batch, as BatchNorm does"):
        sp.train("fedavg", model=Scaled, batch_size=1, out=tmp_path / "run", **QUICK)


def with_wrong_tuning(**phase):
    """FedAvg that counts padding in its tuning alone; the options are those of its training."""

    def mine(task, config: FedAvgConfig) -> Method:
        base = with_loss(WRONG["a plain mean"])(task, config)
        train = with_loss(RIGHT["a weighted mean"], **phase)(task, config).phases
        return replace(base, phases=train, tune=replace(base.phases[0], name="tune"))

    return mine


@pytest.mark.parametrize("training", [{}, {"mixes_examples": True}], ids=["padded", "alone"])
@pytest.mark.parametrize("tuning", [{"tune_epochs": 1}, {"novel": 1, "novel_epochs": 1}], ids=["all", "novel"])
def test_tuning_that_counts_padding_is_refused_before_training(tuning, training, tmp_path):
    mine, options = with_wrong_tuning(**training), {**QUICK, "rounds": 2, **tuning}
    with pytest.raises(SparsonaError, match="the loss of mine's phase 'tune' counts the examples of weight 0"):
        sp.train(mine, model="mlp", executor="stacked", out=tmp_path / "run", **options)
    assert reached(tmp_path / "run").completed == 0


def test_tuning_that_does_not_run_is_not_tried(tmp_path):
    run = sp.train(with_wrong_tuning(), model="mlp", executor="stacked", out=tmp_path / "run", **QUICK)
    assert run.summary["rounds"] == 1


def test_tuning_is_entered_to_be_tried(tmp_path):
    """Its loss may need what is made there."""
    entered = []

    def mine(task, config: FedAvgConfig) -> Method:
        base = with_wrong_tuning()(task, config)

        def loss(work, batch):
            return base.tune.loss(work, batch) if entered else 1 / 0

        return replace(base, tune=replace(base.tune, loss=loss, enter=lambda work, *_: entered.append(work) or work))

    with pytest.raises(SparsonaError, match="phase 'tune' counts"):
        sp.train(mine, model="mlp", executor="stacked", out=tmp_path / "run", tune_epochs=1, **QUICK)
    assert reached(tmp_path / "run").completed == 0


def test_a_phase_that_begins_in_a_later_round_is_refused_then(tmp_path):
    """Only a run that is resumed ends as it began."""
    mine = with_loss(WRONG["a plain mean"], when=lambda round_: round_.index == 1)
    with pytest.raises(SparsonaError, match=REFUSED):
        sp.train(mine, model="mlp", executor="stacked", out=tmp_path / "run", **{**QUICK, "rounds": 2})


def test_a_run_that_began_with_such_a_loss_ends_with_it(monkeypatch, tmp_path, capsys):
    """Of an older version, which did not try: the executor is recorded, and another would change the bits."""
    mine = with_loss(WRONG["a plain mean"])
    monkeypatch.setattr(PaddingCheck, "__call__", lambda *_: None)
    sp.train(mine, model="mlp", executor="stacked", out=tmp_path / "run", max_steps=1, **{**QUICK, "rounds": 2})
    monkeypatch.undo()
    written = tmp_path / "run" / "config.json"
    written.write_text(json.dumps({**json.loads(written.read_text()), "max_steps": None}))
    assert sp.resume(tmp_path / "run", method=mine, progress=False).summary["rounds"] == 2
    assert REFUSED in capsys.readouterr().err


@pytest.mark.long
def test_that_is_said_of_runs_in_processes_as_well(monkeypatch, tmp_path, capfd):
    mine, path = with_loss(WRONG["a plain mean"]), tmp_path / "both"
    monkeypatch.setattr(PaddingCheck, "__call__", lambda *_: None)
    options = {**QUICK, "rounds": 2, "executor": "stacked", "max_steps": 1}
    sp.compare([mine, "fedavg"], model="mlp", out=path, **options)
    monkeypatch.undo()
    for written in path.glob("*/config.json"):
        written.write_text(json.dumps({**json.loads(written.read_text()), "max_steps": None}))
    capfd.readouterr()
    found = sp.resume_comparison(path, methods=[mine], jobs=2, progress=False)
    assert [run.summary["rounds"] for run in found.runs] == [2, 2]
    assert capfd.readouterr().err.count(REFUSED) == 1


def test_a_loss_without_a_module_is_tried(tmp_path):
    """As functions have that `exec` makes."""

    def mine(task, config: FedAvgConfig) -> Method:
        method = with_loss(WRONG["a plain mean"])(task, config)
        method.phases[0].loss.__module__ = None
        return method

    with pytest.raises(SparsonaError, match=REFUSED):
        sp.train(mine, model="mlp", executor="stacked", out=tmp_path / "run", **QUICK)


def halved(outputs, targets):
    """A loss for each example: one that may be given."""
    return F.cross_entropy(outputs, targets, reduction="none") / 2


@pytest.fixture
def tried(monkeypatch):
    """The names of phases, one for each step that is taken to try them."""
    calls, original = [], padding.take_step
    monkeypatch.setattr(padding, "take_step", lambda phase, *rest: calls.append(phase.name) or original(phase, *rest))
    return calls


def play(executor, name, options, rounds):
    context = make_context(make_config(name, {**options, "rounds": rounds}, model="mlp"), None, "mlp")
    engine = simulate(context, executor(context))
    population = engine.start()
    for index in range(rounds):
        population, _ = engine.play(population, index)
    return context.method


@pytest.mark.parametrize("executor", [Stacked, Graphed])
def test_it_is_tried_once_a_phase_by_both_that_pad(executor, tried, monkeypatch):
    monkeypatch.setattr(padding, "_is_ours", lambda phase: False)
    options = {"clients": 4, "epochs": 1, "data_rate": 0.1, "personal": ["output"]}
    method = play(executor, "fedalt", options, rounds=2)
    assert tried == [phase.name for phase in method.phases for _ in range(3 * len(padding.NOISES))]


def test_losses_of_the_package_are_not_tried_in_every_run(tried):
    play(Stacked, "fedspa", {"clients": 4, "epochs": 1, "data_rate": 0.1}, rounds=1)
    assert not tried


@pytest.mark.parametrize("name", sorted(methods.METHODS.keys() - {"fedbn"}))  # which has FedAvg's loss
def test_losses_of_the_package_leave_padding_out(name, tried, monkeypatch):
    monkeypatch.setattr(padding, "_is_ours", lambda phase: False)
    own = {"fedalt": {"personal": ["output"]}, "fedsim": {"personal": ["output"]}}.get(name, {})
    method = play(Stacked, name, {"clients": 3, "epochs": 1, "data_rate": 0.1, **own}, rounds=1)
    may_be_padded = [phase.name for phase in method.phases if not phase.mixes_examples]
    assert not may_be_padded or tried


def test_a_run_has_the_bits_it_had(tried, monkeypatch, tmp_path):
    """Neither the draws nor the models are changed by what is tried."""
    monkeypatch.setattr(padding, "_is_ours", lambda phase: False)
    once = sp.train("fedspa", model="mlp", executor="stacked", out=tmp_path / "tried", **QUICK)
    assert tried
    monkeypatch.undo()
    before = torch.get_rng_state()
    plain = sp.train("fedspa", model="mlp", executor="stacked", out=tmp_path / "plain", **QUICK)
    assert traces(once.path)["tensors"] == traces(plain.path)["tensors"]
    assert torch.equal(before, torch.get_rng_state())
