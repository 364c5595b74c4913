"""Optimizers against torch's own; what their memory is and where it lives."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from method_lines import anywhere, further_rows_are_slow, with_memory
from pydantic import ValidationError
from torch import nn

from sparsona import methods
from sparsona.core.errors import SparsonaError
from sparsona.core.round import Client, Tick
from sparsona.core.tree import Tree, leaves
from sparsona.engine.rounds import simulate
from sparsona.executors.serial import Serial
from sparsona.executors.stacked import Stacked
from sparsona.experiment import build
from sparsona.learning.optimizer import (
    OPTIMIZERS,
    OptimizerName,
    OptimizerOptions,
    clip_share,
    make_optimizer,
    mask_memory,
)
from sparsona.runs.checkpoint import Checkpoints, Progress

TORCH = {
    "sgd": ({}, lambda own, decay: torch.optim.SGD(own, 0.1, weight_decay=decay)),
    "momentum": ({"momentum": 0.9}, lambda own, decay: torch.optim.SGD(own, 0.1, 0.9, weight_decay=decay)),
    "nesterov": (
        {"momentum": 0.9, "nesterov": True},
        lambda own, decay: torch.optim.SGD(own, 0.1, 0.9, weight_decay=decay, nesterov=True),
    ),
    "adam": ({"optimizer": "adam"}, lambda own, decay: torch.optim.Adam(own, 0.1, weight_decay=decay)),
    "adam, other betas": (
        {"optimizer": "adam", "beta1": 0.5, "beta2": 0.9, "eps": 1e-3},
        lambda own, decay: torch.optim.Adam(own, 0.1, (0.5, 0.9), 1e-3, weight_decay=decay),
    ),
    "adamw": ({"optimizer": "adamw"}, lambda own, decay: torch.optim.AdamW(own, 0.1, weight_decay=decay)),
}


def quadratic(params):
    return sum(((index + 1.0) * (value - 1).square()).sum() for index, value in enumerate(params))


def small_net(params):
    weight, bias = params
    draws = torch.Generator().manual_seed(1)
    x, y = torch.randn(9, 4, generator=draws), torch.randint(3, (9,), generator=draws)
    return nn.functional.cross_entropy(torch.tanh(x @ weight.T + bias), y)


@pytest.mark.parametrize("problem", [quadratic, small_net])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("name", TORCH)
def test_steps_are_torchs(name, decay, clip, problem):
    options, make = TORCH[name]
    optimizer = make_optimizer(OptimizerOptions(lr=0.2, weight_decay=decay, clip_norm=clip, **options))
    draws = torch.Generator().manual_seed(0)
    params = Tree.of({"a": torch.randn(3, 4, generator=draws), "b": torch.randn(3, generator=draws)})
    own = [nn.Parameter(params[name].clone()) for name in params]
    theirs, memory = make(own, decay), optimizer.init(params)
    assert optimizer.num_trees == sum(tensor.ndim for _, tensor in leaves(memory))
    for step in range(6):
        flat = params.flat.detach().requires_grad_()
        (grads,) = torch.autograd.grad(problem(list(params.like(flat).values())), flat)
        tick = Tick(torch.tensor(0.5), torch.tensor(step))  # a rate of 0.2 is scaled to torch's 0.1
        params, memory = optimizer.step(params, params.like(grads), memory, tick)
        theirs.zero_grad()
        problem(own).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(own, clip)
        theirs.step()
    for parameter, name in zip(own, params, strict=True):
        torch.testing.assert_close(params[name], parameter.detach(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", TORCH)
def test_what_may_not_move_stays_with_its_memory_and_arguments_are_left_alone(name):
    optimizer = make_optimizer(OptimizerOptions(lr=0.5, weight_decay=0.1, **TORCH[name][0]))
    tick = Tick(torch.tensor(1.0), torch.tensor(0))
    params, grads = (Tree.of({"a": torch.arange(1.0, 4.0) * sign}) for sign in (1, -1))
    _, memory = optimizer.step(params, grads, optimizer.init(params), tick)
    before = [tensor.clone() for _, tensor in leaves((params, grads, memory))]
    found, after = optimizer.step(params, grads, memory, tick, where=torch.tensor([1.0, 0.0, 1.0]))
    for tensor, (_, now) in zip(before, leaves((params, grads, memory)), strict=True):
        assert torch.equal(tensor, now)
    assert (found.flat == params.flat).tolist() == [False, True, False]
    for (_, old), (_, new) in zip(leaves(memory), leaves(after), strict=True):
        assert not old.ndim or old[1] == new[1]


def test_clipping_goes_by_all_the_trees():
    one, other = Tree.of({"a": torch.tensor([3.0])}), Tree.of({"a": torch.tensor([4.0])})
    assert float(clip_share(1.0, one, other)) == pytest.approx(0.2)
    assert float(clip_share(10.0, one, other)) == 1.0
    assert clip_share(None, one) == 1.0


def test_a_memory_inside_a_mask_keeps_its_count():
    optimizer = make_optimizer(OptimizerOptions(optimizer="adam"))
    params = Tree.of({"a": torch.ones(3)})
    _, memory = optimizer.step(params, params, optimizer.init(params), Tick(torch.tensor(1.0), torch.tensor(0)))
    (found,) = mask_memory(memory, params.like(torch.tensor([True, False, True])))
    assert (found.first.flat > 0).tolist() == (found.second.flat > 0).tolist() == [True, False, True]
    assert float(found.step) == 1


def test_every_name_has_an_optimizer():
    assert set(OPTIMIZERS) == set(get_args(OptimizerName))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"optimizer": "adam", "momentum": 0.9}, "momentum with optimizer=sgd only"),
        ({"nesterov": True}, "nesterov with a momentum"),
        ({"momentum": 1.0}, "less than 1"),
        ({"optimizer": "lion"}, "'sgd', 'adam' or 'adamw'"),
    ],
)
def test_what_makes_no_sense_is_refused(options, told):
    with pytest.raises(ValidationError, match=told):
        OptimizerOptions(**options)


def test_pfedgate_has_its_momentum_with_sgd_alone():
    assert build.make_config("pfedgate", {}).options["momentum"] == 0.9
    assert build.make_config("pfedgate", {"optimizer": "adam"}).options["momentum"] == 0.0


SMALL = {
    "clients": 4,
    "per_round": 3,
    "rounds": 2,
    "epochs": 1,
    "batch_size": 16,
    "device": "cpu",
    "seed": 3,
    "data_rate": 0.08,
}


def context_of(name, **options):
    return build.make_context(build.make_config(name, SMALL | options))


def played(context, executor=Serial):
    engine = simulate(context, executor(context))
    population = engine.start()
    records = []
    for index in range(2):
        population, record = engine.play(population, index)
        records.append(record)
    return engine, population, records


def tensors(population):
    return dict(leaves((population.server, population.states)))


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"optimizer": "adam", "lr": 0.01}], ids=["momentum", "adam"])
@pytest.mark.parametrize("name", further_rows_are_slow(methods.METHODS))
def test_every_method_has_every_optimizer(name, options):
    """Kept memory is in the State, on the bill, and makes a difference; FLOPs are what the turns count."""
    found = {}
    if (own := with_memory(name)) is None:
        with pytest.raises(SparsonaError, match="optimizer_memory"):
            context_of(name, optimizer_memory="keep", **options)
        return
    for kept in ("reset", "keep"):
        context = context_of(name, optimizer_memory=kept, **{**anywhere(name), **own, **options})
        _, population, records = played(context)
        cost = context.method.cost(context.task.layout, context.clients[0], context.plan.round_at(0))
        bill = cost.kept if kept == "keep" else cost.at_work
        assert any("memory" in part.name for part in bill)
        assert kept == "keep" or not any("memory" in part.name for part in cost.kept)
        for turn in records[0].turns:
            cost = context.method.cost(context.task.layout, context.clients[turn.client], context.plan.round_at(0))
            if any(phase.used_flops for phase in context.method.phases):  # the cost is a bound
                assert 0 < turn.tally.train_flops <= cost.train_flops
            else:
                assert turn.tally.train_flops == cost.train_flops
        found[kept] = tensors(population)
    extra = found["keep"].keys() - found["reset"].keys()
    assert extra
    assert all("memory" in path for path in extra)
    assert any(not torch.equal(value, found["keep"][path]) for path, value in found["reset"].items())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedspa", {"momentum": 0.9}),
        ("fedalt", {"optimizer": "adam", "lr": 0.01}),
        # A larger eps: with 1e-8 a gradient that is nothing but rounding makes a whole step.
        ("pfedgate", {"optimizer": "adam", "lr": 0.01, "gate_lr": 0.01, "eps": 1e-4}),
        ("dispfl", {"momentum": 0.9, "nesterov": True}),
    ],
)
def test_executors_agree(name, options):
    """And memory that is kept is nothing outside a mask."""
    options = options | {"optimizer_memory": "keep"}
    context = context_of(name, **options)
    _, one, _ = played(context)
    _, other, _ = played(context_of(name, **options), Stacked)
    one_by_path, other_by_path = tensors(one), tensors(other)
    assert one_by_path.keys() == other_by_path.keys()
    for path, value in one_by_path.items():
        if value.dtype is not torch.bool:
            torch.testing.assert_close(value, other_by_path[path], rtol=1e-3, atol=1e-4)
    for state in one.states.values():
        if hasattr(state, "mask"):
            assert not any(
                tensor[~state.mask.flat].any() for _, tensor in leaves(state.memory) if tensor.ndim and tensor.any()
            )


@pytest.mark.parametrize("name", ["fedalt", "dispfl"])
def test_memory_survives_the_store(name, tmp_path):
    context = context_of(name, optimizer="adam", lr=0.01, optimizer_memory="keep")
    engine, population, _ = played(context)
    Checkpoints(tmp_path, context.method).save(Progress(2, 1.0, population, {}), engine.start())
    found = Checkpoints(tmp_path, context.method).load(engine, engine.start())
    expected, again = tensors(population), tensors(found.population)
    assert expected.keys() == again.keys()
    assert any("memory" in path for path in expected)
    assert all(torch.equal(value, again[path]) for path, value in expected.items())


def test_adams_flops_are_charged_by_the_step():
    context = context_of("local", optimizer="adam")
    plain = context_of("local")
    layout, round_ = context.task.layout, context.plan.round_at(0)
    client = Client(0, 33)  # three batches of 16, 16 and 1
    more = (
        context.method.cost(layout, client, round_).train_flops - plain.method.cost(layout, client, round_).train_flops
    )
    assert more == 3 * 15 * layout.size


def test_without_memory_nothing_is_added():
    context = context_of("fedspa")
    client = context.clients[0]
    assert context.method.cost(context.task.layout, client, context.plan.round_at(0)).kept[0].name == "mask"
    assert context.fresh_state(0).memory == ()
