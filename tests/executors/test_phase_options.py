"""Everything a Phase may ask for, on executors that run many clients at once: as `serial` does it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from test_executors_agree import DEVICE, EXECUTORS, assert_agree, played
from torch import nn

import sparsona as sp
from sparsona.core.method import (
    Client,
    Cost,
    Method,
    PartSize,
    ServerHalf,
    Tree,
    dense,
    examples_seen,
    message,
    steps_taken,
)
from sparsona.core.task import Task
from sparsona.engine.context import ClientContext
from sparsona.engine.plan import Plan
from sparsona.executors.serial import Serial
from sparsona.learning.means import WeightedSum
from sparsona.learning.phases import Training, plain_weights, predictor, training_phase

CONFIG = Training(lr=0.1, epochs=2, weight_decay=0.0, clip_norm=None)


@dataclass(frozen=True)
class _Work:
    params: Tree
    buffers: Tree
    before: Tree
    factor: torch.Tensor  # no dimension
    own: torch.Tensor  # one entry for each of the client's examples


@dataclass(frozen=True)
class _State:
    buffers: Tree


@dataclass(frozen=True)
class _Server:
    params: Tree


def averaging(task, phases, tune=None):
    """FedAvg around any phases."""

    def receive(state, inbox, probe, round_):
        (update,) = inbox
        params = update.parts["model"].tree()
        device = params.flat.device
        own = torch.linspace(1, 2, round_.client.num_examples, device=device)
        return _Work(params, state.buffers, params, torch.ones((), device=device), own)

    def finish(state, work, inbox, probe, round_):
        return _State(work.buffers), message(round_, {"model": dense(work.params)})

    def cost(layout, client, round_):
        model = (PartSize("model", layout, layout.size),)
        return Cost(model, model, 0)

    server = ServerHalf(
        init=lambda params, clients, seeds: _Server(params),
        reply=lambda server, client, round_: message(round_, {"model": dense(server.params)}),
        zero=lambda server, round_: WeightedSum(),
        add=lambda server, total, update: total.add(update.parts["model"].tree(), 1.0),
        step=lambda server, total, round_: _Server(total.mean(otherwise=server.params)),
    )
    return Method(
        init_client=lambda params, buffers, client, seeds: _State(buffers),
        receive=receive,
        phases=phases,
        finish=finish,
        predict=predictor(task),
        cost=cost,
        deploy=plain_weights,
        tune=tune,
        server=server,
    )


def heavy_ball(task):
    """One tensor hands its old value to another."""

    def update(work, grads, tick):
        step = 0.1 * tick.lr_scale * grads["params"].flat - 0.9 * (work.params.flat - work.before.flat)
        return replace(work, params=work.params.like(work.params.flat - step), before=work.params)

    return (replace(training_phase(task, CONFIG), update=update),)


def several_steps_on_a_batch(task):
    def after(work, batch, tick):
        return replace(work, before=work.params, params=work.params.like(0.99 * work.params.flat))

    return (replace(training_phase(task, CONFIG), repeats=2, after_batch=after, max_steps=3),)


def two_batches_a_step(task):
    plain = training_phase(task, CONFIG.model_copy(update={"epochs": 1}))

    def loss(work, batches):
        (first, buffers), (second, _) = (plain.loss(work, batch) for batch in batches)
        return first + second, buffers

    return (replace(plain, loss=loss, batches_per_step=2),)


def a_number_is_trained(task):
    def loss(work, batch):
        outputs, buffers = task.forward(work.params, work.buffers, batch.inputs, True, batch.noise)
        return task.mean_loss(outputs * work.factor, batch), buffers

    def update(work, grads, tick):
        return replace(work, factor=work.factor - 0.1 * grads["factor"])

    return (replace(training_phase(task, CONFIG), loss=loss, update=update, trains=("factor",)), *heavy_ball(task))


def an_entry_for_each_example(task):
    def loss(work, batch):
        outputs, buffers = task.forward(work.params, work.buffers, batch.inputs, True, batch.noise)
        losses, weight = task.losses(outputs, batch)
        weight = weight * work.own.index_select(0, batch.index)
        return (losses * weight).sum() / weight.sum(), buffers

    return (replace(training_phase(task, CONFIG), loss=loss),)


def phases_of_their_own(task):
    plain = training_phase(task, CONFIG)
    idle = replace(plain, name="idle", update=lambda work, grads, tick: work)
    half = replace(plain, name="half", when=lambda round_: round_.client.index % 2 == 0)
    entered = replace(
        plain,
        name="entered",
        enter=lambda work, probe, round_: replace(work, params=work.params.like(1.1 * work.params.flat)),
    )
    return (idle, half, entered, replace(plain, name="alone", traceable=False))


def federation(sizes):
    rng, clients = np.random.default_rng(0), []
    for size in sizes:
        y = np.arange(size) % 3
        x = (rng.normal(size=(size, 6)) + y[:, None]).astype(np.float32)
        clients.append((x, y, rng.normal(size=(4, 6)).astype(np.float32), np.arange(4) % 3))
    return sp.Federation.from_clients(clients, validation_rate=0.0, num_classes=3)


def play(make, phases, data, model, **more):
    task = Task(model, data.input_shape, data.num_classes)
    points = ("trained", "received")
    usual = {"rounds": 2, "per_round": data.num_clients, "batch_size": 4, "seed": 0, "lr_decay": 0.5}
    plan = Plan(**usual, tune_epochs=1, points=points, **more)

    def make_method(task):
        made = phases(task)
        return averaging(task, made, made[-1])

    context = ClientContext(task, make_method, data, plan, device=torch.device(DEVICE))
    return played(make, context)


def small_net():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


PHASES = [
    heavy_ball,
    several_steps_on_a_batch,
    two_batches_a_step,
    a_number_is_trained,
    an_entry_for_each_example,
    phases_of_their_own,
]


@pytest.mark.parametrize("executor", sorted(EXECUTORS))
@pytest.mark.parametrize("phases", PHASES, ids=lambda phases: phases.__name__)
def test_phases(phases, executor):
    data = federation((1, 9, 5, 17))
    one, other = (play(make, phases, data, small_net) for make in (Serial, EXECUTORS[executor]))
    assert_agree(one, other)
    assert any(turn.tally.steps for record in one[1] for turn in record.turns)


@pytest.mark.parametrize("executor", sorted(EXECUTORS))
@pytest.mark.parametrize("phases", [several_steps_on_a_batch, two_batches_a_step, phases_of_their_own])
def test_incomplete_batches_are_left_out(phases, executor):
    """Of 1, 9, 5 and 17 examples in batches of 4: 1, 8, 4 and 16; as the counts without training have it."""
    data = federation((1, 9, 5, 17))
    one, other = (play(make, phases, data, small_net, drop_last=True) for make in (Serial, EXECUTORS[executor]))
    assert_agree(one, other)
    made = phases(Task(small_net, data.input_shape, data.num_classes))
    round_ = Plan(rounds=2, per_round=4, batch_size=4, seed=0, drop_last=True).round_at(0)
    for turn in one[1][0].turns:
        client = Client(turn.client, (1, 9, 5, 17)[turn.client])
        bound = [(phase, client, round_.on(client)) for phase in made]
        assert turn.tally.examples == sum(examples_seen(*args) for args in bound)
        assert turn.tally.steps == sum(steps_taken(*args) for args in bound)
    if phases is phases_of_their_own:  # two epochs of three phases, and one more for even clients
        assert [turn.tally.examples for turn in one[1][0].turns] == [8 * 1, 6 * 8, 8 * 4, 6 * 16]


@pytest.mark.parametrize("executor", sorted(EXECUTORS))
def test_statistics_see_no_padding(executor):
    def model():
        norm = nn.InstanceNorm1d(2, track_running_stats=True)
        return nn.Sequential(nn.Unflatten(1, (2, 3)), norm, nn.Flatten(), nn.Linear(6, 3))

    data = federation((5, 9, 7))
    plain = lambda task: (training_phase(task, CONFIG),)  # noqa: E731
    assert_agree(play(Serial, plain, data, model), play(EXECUTORS[executor], plain, data, model))
