"""What a method may do before it predicts, and what it may know of its data: `adapt`, `label_counts`, `is_new`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import sparsona as sp
from sparsona.core.errors import SparsonaError
from sparsona.core.losses import squared_error
from sparsona.core.task import Task
from sparsona.core.tree import scale
from sparsona.engine.context import ClientContext
from sparsona.engine.jobs import Job, Tally
from sparsona.engine.plan import Plan
from sparsona.engine.rounds import received_work, simulate
from sparsona.engine.turn import ClientProbe, begin
from sparsona.executors.graphed import Graphed
from sparsona.executors.serial import Serial
from sparsona.executors.stacked import Stacked
from sparsona.methods.fedavg import FedAvgConfig, fedavg

CLASSES = 3


def federation():
    x = torch.randn(4, 30, 5, generator=torch.Generator().manual_seed(1))
    y = (torch.arange(30) % CLASSES).repeat(4, 1)
    clients = [(x[k, :18], y[k, :18], x[k, 18:21], y[k, 18:21], x[k, 21:], y[k, 21:]) for k in range(4)]
    return sp.Federation.from_clients(clients, num_classes=CLASSES)


def context_of(change=lambda method: method, **plan):
    task = Task(lambda: nn.Linear(5, CLASSES), (5,), CLASSES)
    options = {"rounds": 2, "per_round": 4, "batch_size": 6, "seed": 0, "points": ("received", "trained"), **plan}
    return ClientContext(task, lambda task: change(fedavg(task, FedAvgConfig(epochs=1))), federation(), Plan(**options))


def zeroed(method):
    """FedAvg whose clients would predict with nothing but zeros, unless they were tuned."""

    def adapt(work, probe, round_):
        assert len(list(probe.train())) == 3  # it may read its data, and nobody is charged for it
        return replace(work, params=scale(work.params, 0.0))

    return replace(method, adapt=adapt)


@pytest.mark.parametrize("make", [Serial, Stacked, Graphed])
def test_a_model_is_adapted_before_it_predicts_and_tuned_ones_are_not(make):
    context = context_of(zeroed, tune_epochs=1)
    engine = simulate(context, make(context))
    population, record = engine.play(engine.start(), 0)
    found = record.evaluations + engine.evaluate(population, 1)
    assert {one.point for one in found} == {"trained", "received"}
    # All logits are zero: the loss is that of guessing.
    assert [one.loss for one in found] == pytest.approx([torch.tensor(CLASSES).log().item()] * 8)
    assert not received_work(context, population, 0).params.flat.any()
    final, tuned = engine.finish(population)
    assert all(abs(one.loss - torch.tensor(CLASSES).log().item()) > 1e-4 for one in final.evaluations)
    assert all(work.params.flat.any() for work in tuned.values())
    assert [turn.tally.search_flops for turn in record.turns] == [0] * 4
    plain = simulate(context_of(tune_epochs=1), make(context))
    assert torch.equal(plain.play(plain.start(), 0)[0].server.params.flat, population.server.params.flat)


def test_label_counts_are_free_and_of_the_training_data():
    context, tally = context_of(), Tally()
    train, validation = (context.federation.examples(0, part) for part in ("train", "validation"))
    round_ = context.plan.round_at(0).on(context.clients[0])
    probe = ClientProbe(context.task, train, validation, round_, tally)
    assert probe.label_counts().tolist() == [6, 6, 6]
    assert tally.search_flops == 0
    list(probe.train(flops=7))
    assert tally.search_flops == 18 * 7  # charged what was done
    list(probe.validation())
    assert tally.search_flops == 18 * 7 + 3 * context.task.layout.forward_flops()


def test_label_counts_of_numbers_are_refused():
    task = Task(lambda: nn.Linear(5, 1), (5,), 1, losses=squared_error)
    context = context_of()
    train = context.federation.examples(0, "train")
    train = replace(train, targets=train.targets[:, None].float())
    with pytest.raises(SparsonaError, match="no class"):
        ClientProbe(task, train, train, context.plan.round_at(0).on(context.clients[0]), Tally()).label_counts()


def test_a_round_says_whether_the_state_is_new():
    context = context_of()
    engine = simulate(context, Serial(context))
    population, _ = engine.play(engine.start(), 0)
    update = context.method.server.reply(population.server, context.clients[0], context.plan.round_at(1))
    job = Job("train", 0, context.plan.round_at(1), (update,))
    assert begin(context, job).round.is_new
    assert not begin(context, replace(job, state=population.states[0])).round.is_new
