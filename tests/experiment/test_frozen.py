"""Frozen parameters: in the module, and in no tree."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from older_runs import unseal
from safetensors.torch import load_file, save_file
from small_runs import played
from torch import nn

import sparsona as sp
from sparsona.core.errors import SparsonaError
from sparsona.engine.rounds import simulate
from sparsona.executors.graphed import Graphed
from sparsona.executors.serial import Serial
from sparsona.executors.stacked import Stacked
from sparsona.executors.workers import Workers
from sparsona.experiment.build import make_config, make_context
from sparsona.methods import METHODS

FROZEN = ("0.weight", "0.bias")


def build() -> nn.Module:
    net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3))
    net[0].requires_grad_(False)
    return net


def whole() -> nn.Module:
    return build().requires_grad_(True)


@pytest.fixture(scope="module")
def data() -> sp.Federation:
    x = np.random.default_rng(0).random((60, 8), dtype=np.float32)
    return sp.federate(x, np.arange(60) % 3, clients=3, partition="iid")


def context_of(data, method: str, model, **options):
    options = {"rounds": 1, "device": "cpu", "batch_size": 8, **options}
    return make_context(make_config(method, options, federation=data, model=model), data, model)


def sent(context) -> int:
    """Values in the messages of a client, both ways."""
    cost = context.method.cost(context.task.layout, context.clients[0], context.plan.round_at(0))
    return sum(part.num_values for part in (*(cost.up or ()), *(cost.down or ())) if not part.is_mask)


SAME = {"local", "lg-fedavg", "fedproto", "fedmask"}  # send nothing, the last layers, prototypes, or masks of the last


@pytest.mark.parametrize("method", METHODS)
def test_every_method_leaves_frozen_parameters_alone_and_does_not_send_them(data, method):
    torch.manual_seed(0)
    net = build()
    context = context_of(data, method, net)
    star = simulate(context, Serial(context))
    population, _ = star.play(star.start(), 0)
    (found,) = star.evaluate(population, 1)[:1]
    assert found.count
    assert not set(FROZEN) & set(context.task.layout.names)
    for name in FROZEN:
        assert torch.equal(context.task.frozen[name], net.get_parameter(name))
        assert torch.equal(
            context.task.module(context.params, context.buffers).get_parameter(name), net.get_parameter(name)
        )
    before = sent(context_of(data, method, whole()))
    assert sent(context) == before if method in SAME else sent(context) < before


@pytest.mark.slow  # a process is started; tests/core has a task that is pickled
def test_worker_processes_have_the_same_bits(data):
    context = context_of(data, "fedspa", build, rounds=2)
    workers = Workers(context, 1)
    try:
        assert played(context, workers, 2) == played(context, Serial(context), 2)
    finally:
        workers.close()


@pytest.mark.parametrize("make", [Stacked, Graphed])
def test_stacks_and_captured_steps_agree(data, make):
    """Frozen tensors are constants of the step, not stacked."""
    context = context_of(data, "fedavg", build)
    found = []
    for executor in (Serial(context), make(context)):
        star = simulate(context, executor)
        population, _ = star.play(star.start(), 0)
        found.append(population.server.params.flat)
    assert torch.allclose(*found, atol=1e-6)
    assert not torch.equal(found[0], context.params.flat)


def test_a_run_and_its_personal_models_have_one_backbone(data, tmp_path):
    torch.manual_seed(0)
    net, other = build(), build()
    run = sp.train("fedavg", data, net, rounds=1, executor="serial", out=tmp_path / "run")
    for client in (0, 2):
        model = run.personal_model(client)
        assert all(torch.equal(model.get_parameter(name), net.get_parameter(name)) for name in FROZEN)
        test = data.examples(client, "test")
        assert int((model(test.inputs).argmax(1) == test.targets).sum()) == round(
            len(test.targets) * run.accuracies()[client]
        )
    swapped = copy.deepcopy(other)
    swapped.load_state_dict({k: v for k, v in net.state_dict().items() if k not in FROZEN}, strict=False)
    # The folder has the module's weights, frozen ones as well: those of what is passed again do not matter.
    again = sp.load(run.path, model=swapped).personal_model(0)
    assert all(torch.equal(again.get_parameter(name), net.get_parameter(name)) for name in FROZEN)
    (run.path / "initial.safetensors").unlink()  # as in runs of older versions
    with pytest.raises(SparsonaError, match="does not start with the weights"):
        sp.resume(run.path, data, swapped)  # as trained as the first, on another backbone
    with pytest.raises(SparsonaError, match="the model is not that of"):
        sp.resume(run.path, data, copy.deepcopy(net).requires_grad_(True))


def test_a_function_builds_frozen_values_under_the_seed_of_the_run(data):
    """Also where peers draw the parameters that they train under seeds of their own."""
    found = [context_of(data, "dispfl", build, initial_weights="own", seed=seed) for seed in (1, 1, 2)]
    values = [context.task.frozen["0.weight"] for context in found]
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])
    with torch.random.fork_rng():
        torch.manual_seed(found[0].plan.seeds.shared("model"))
        assert torch.equal(values[0], build()[0].weight)
    assert len({context.start_digest for context in found}) == 2
    found[0].task.init(99)
    assert torch.equal(found[0].task.frozen["0.weight"], values[1])


def test_a_warm_start_fills_frozen_parameters(data, tmp_path):
    """The usual way: train everything together, then freeze the backbone and go on with the head."""
    torch.manual_seed(0)
    first = sp.train("fedavg", data, whole(), rounds=1, executor="serial", out=tmp_path / "whole")
    run = sp.train("local", data, build(), rounds=1, warm_start=first, executor="serial", out=tmp_path / "head")
    trained, tuned = first.personal_model(0), run.personal_model(0)
    assert torch.equal(trained[0].weight, tuned[0].weight)
    assert not torch.equal(trained[5].weight, tuned[5].weight)


@pytest.mark.parametrize("thaw", [False, True])
def test_a_head_takes_the_backbone_along_that_it_was_trained_on(data, tmp_path, thaw):
    torch.manual_seed(0)
    net = build()
    first = sp.train("fedavg", data, net, rounds=1, executor="serial", out=tmp_path / "first")
    torch.manual_seed(1)
    other = build().requires_grad_(thaw) if thaw else build()
    run = sp.train("fedavg", data, other, rounds=0, warm_start=first, executor="serial", out=tmp_path / "second")
    for later in (run, sp.load(run.path, model=build().requires_grad_(True) if thaw else build())):
        assert all(torch.equal(value, net.get_parameter(name)) for name, value in _frozen(later.model()).items())
        assert all(
            torch.equal(*pair) for pair in zip(later.model().parameters(), first.model().parameters(), strict=True)
        )
    # A file of an older version has the trained parameters only.
    unseal(tmp_path / "first")
    file = tmp_path / "first" / "global.safetensors"
    save_file({name: value for name, value in load_file(file).items() if name not in FROZEN}, file)
    if not thaw:
        run = sp.train("fedavg", data, other, rounds=0, warm_start=first, executor="serial", out=tmp_path / "older")
        assert torch.equal(run.model()[0].weight, other[0].weight)


def _frozen(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: net.get_parameter(name) for name in FROZEN}


def test_names_of_frozen_parts_are_refused(data):
    for personal in ("0.*", "input"):
        with pytest.raises(SparsonaError, match="is frozen in this model"):
            context_of(data, "fedalt", build(), personal=[personal])
    with pytest.raises(SparsonaError, match="all 8 parameters of the model are frozen"):
        context_of(data, "fedavg", build().requires_grad_(False))


def test_costs_count_what_frozen_layers_compute():
    """By hand: layers of 8x6, 6x5 and 5x3, 102 + 65 + 33 FLOPs forward; norms are free."""
    options = {"input_shape": (8,), "classes": 3, "rounds": 1, "clients": 1, "per_round": 1, "samples": 1, "epochs": 1}
    first, middle, last = (whole() for _ in range(3))
    for net, layer in ((first, 0), (middle, 2), (last, 5)):
        net[layer].requires_grad_(False)
    nets = {"first": first, "middle": middle, "last": last}
    found = {name: sp.cost("fedavg", model=net, **options) for name, net in nets.items()}
    per_round = {name: report.to_json()["per_client_round"]["flops"] for name, report in found.items()}
    # Nothing before the first layer is trained: its inputs have no gradient. Biases add nothing to that gradient.
    assert per_round == {"first": 102 + 3 * 98, "middle": 65 + 60 + 3 * 135, "last": 33 + 30 + 3 * 167}
    assert found["first"].memory.kept == 4 * 54
    assert "54 parameters more are frozen" in " ".join(found["first"].notes)
