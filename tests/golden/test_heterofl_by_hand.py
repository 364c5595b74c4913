"""HeteroFL and FedRolex by hand: which entries a narrow network has, one step of it, and the mean of several."""

from __future__ import annotations

import pytest
import torch
from mlp_by_hand import backward, forward, probabilities
from torch import nn

import sparsona as sp
from sparsona.core.layout import Layout, Slot
from sparsona.core.method import Batch, Client, Tick, Tree, dense, message
from sparsona.core.task import Task
from sparsona.engine.context import ClientContext
from sparsona.engine.plan import Plan
from sparsona.engine.rounds import received_work, simulate
from sparsona.engine.turn import take_step
from sparsona.executors.serial import Serial
from sparsona.methods.heterofl import HeteroFLConfig, heterofl
from sparsona.sparsity.widths import find_widths


def places(net, shape, classes, rate, shift):
    widths = find_widths(Task(net, shape, classes))
    narrow = widths.narrow(widths.layout, rate)
    found = widths.places(widths.layout, narrow, shift).tolist()
    assert narrow.size == len(found)
    return narrow, found


def test_entries_of_a_convolution_that_is_flattened():
    """Two channels of two pixels, two hidden units, three classes. In the flat buffer: convolution 0 1, its bias 2 3;
    the hidden layer's rows 4 5 6 7 and 8 9 10 11, of which channel 0 has the first two columns, its bias 12 13; the
    output's rows 14 15, 16 17, 18 19, its bias 20 21 22, which stays whole.

    Half of it, first units: channel 0, hidden unit 0. One round later in a rolling window: channel 1, unit 1.
    """
    net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten(), nn.Linear(4, 2), nn.Linear(2, 3))
    narrow, found = places(net, (1, 1, 2), 3, 0.5, 0)
    assert found == [0, 2, 4, 5, 12, 14, 16, 18, 20, 21, 22]
    assert [slot.shape for slot in narrow.slots] == [(1, 1, 1, 1), (1,), (1, 2), (1,), (3, 1), (3,)]
    assert places(net, (1, 1, 2), 3, 0.5, 1)[1] == [1, 3, 10, 11, 13, 15, 17, 19, 20, 21, 22]


def test_a_window_wraps_around():
    """Three hidden units of which two are kept, ceil(0.5 * 3): from unit 2 on they are 2 and 0. Weights 0 1 2, biases
    3 4 5; the output's rows 6 7 8 and 9 10 11, its bias 12 13. Entries stay in their order."""
    net = nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 2))
    assert places(net, (1,), 2, 0.5, 2)[1] == [0, 2, 3, 5, 6, 8, 9, 11, 12, 13]


def test_groups_of_a_norm_stay_together():
    """Four channels in two groups of two: half of them are channels 0 and 1, or in the next window 2 and 3. A third
    rounds up to one group."""
    net = nn.Sequential(nn.Conv2d(1, 4, 1), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4, 2))
    first = [0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25]
    assert places(net, (1, 1, 1), 2, 1 / 3, 0)[1] == first
    assert places(net, (1, 1, 1), 2, 0.5, 1)[1] == [place + 2 for place in first[:-2]] + [24, 25]


def context_of(config, capacities):
    """Two inputs, four hidden units, three classes; the second client has labels 1 and 2 only."""
    x = torch.randn(2, 12, 2, generator=torch.Generator().manual_seed(0))
    y = torch.stack([torch.arange(12) % 3, 1 + torch.arange(12) % 2])
    clients = [(x[k, :9], y[k, :9], x[k, 9:], y[k, 9:]) for k in range(2)]
    federation = sp.Federation.from_clients(clients, num_classes=3, validation_rate=0.0)
    task = Task(lambda: nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)), (2,), 3)
    plan = Plan(rounds=2, per_round=2, batch_size=9, seed=0)
    return ClientContext(task, lambda task: heterofl(task, config), federation, plan, capacities)


LAYERS = [("0.weight", "0.bias"), ("2.weight", "2.bias")]


@pytest.mark.parametrize("masked_loss", ["off", "exclude", "zero"])
def test_one_narrow_step(masked_loss):
    """Client 1 at half the width. Its hidden layer is divided by 1/2, so that its network is that of V = 2 W: by the
    chain rule dL/dW = 2 dL/dV. Label 0, which it has not, is out of the softmax, or has the logit 0 in it; either way
    no derivative. One step at rate 0.3."""
    config = HeteroFLConfig(
        width="rate", masked_loss=masked_loss, lr=0.3, weight_decay=0.0, clip_norm=None, epochs=1, masked_outputs=False
    )
    context = context_of(config, (1.0, 0.5))
    population = simulate(context, Serial(context)).start()
    work, train = received_work(context, population, 1), context.federation.examples(1, "train")
    w = {name: value.double() for name, value in context.params.items()}
    hidden = {"0.weight": w["0.weight"][:2], "0.bias": w["0.bias"][:2]}
    outer = {"2.weight": w["2.weight"][:, :2], "2.bias": w["2.bias"]}
    mine = {name: 2 * value for name, value in hidden.items()} | outer
    activations = forward(mine, LAYERS, train.inputs)
    outputs = activations[-1].clone()
    if masked_loss != "off":
        outputs[:, 0] = 0.0 if masked_loss == "zero" else -torch.inf
    slopes = probabilities(outputs)
    slopes[torch.arange(9), train.targets] -= 1.0
    if masked_loss != "off":
        slopes[:, 0] = 0.0
    gradient = backward(mine, LAYERS, activations, slopes)
    weight, nothing = torch.ones(9), torch.zeros((), dtype=torch.int64)
    batch = Batch(train.inputs, train.targets, weight, torch.arange(9), nothing)
    after, _ = take_step(context.method.phases[0], work, batch, Tick(torch.tensor(1.0), nothing))
    for name, value in after.params.items():
        scale = 2.0 if name.startswith("0") else 1.0
        assert torch.allclose(value.double(), mine[name] / scale - 0.3 * scale * gradient[name], atol=1e-6), name
    # Predictions divide by nothing.
    plain = forward(hidden | outer, LAYERS, train.inputs)[-1]
    assert torch.allclose(context.method.predict(work, train.inputs).double(), plain, atol=1e-6)


@pytest.mark.parametrize(("weight", "of_first"), [("equal", 1), ("examples", 3)])
def test_the_mean_of_those_who_have_an_entry(weight, of_first):
    """A wide network of ones with labels 0 and 1, and a narrow one of fives with labels 1 and 2 (of two hidden units).
    Where both are, (1 + 5) / 2 = 3, or by 30 and 10 examples (30 * 1 + 10 * 5) / 40 = 2.

    Hidden units 0 and 1 are in both, 2 and 3 in the wide one. Output row 0 is the wide one's; row 1 of both, in the
    columns of units 0 and 1; row 2 the narrow one's, and its columns 2 and 3 nobody's: they stay as they were.
    """
    context = context_of(HeteroFLConfig(width="rate", weight=weight), (1.0, 0.5))
    half, round_ = context.method.server, context.plan.round_at(0)
    server = half.init(context.params, context.clients, context.plan.seeds)
    total = half.zero(server, round_)
    for index, (value, labels, examples) in enumerate(((1.0, (1, 1, 0), 30), (5.0, (0, 1, 1), 10))):
        model = half.reply(server, context.clients[index], round_).parts["model"].tree()
        flags = Tree(Layout((Slot("labels", (3,)),)), torch.tensor(labels).bool())
        parts = {"model": dense(model.like(torch.full_like(model.flat, value))), "labels": dense(flags)}
        bound = round_.on(Client(index, examples))
        total = half.add(server, total, message(bound, parts, 1.0 if weight == "equal" else examples))
    found, old = half.global_model(half.step(server, total, round_)), context.params["2.weight"]
    both = {1: 3.0, 3: 2.0}[of_first]
    assert found["0.weight"].tolist() == [[both] * 2, [both] * 2, [1.0] * 2, [1.0] * 2]
    assert found["0.bias"].tolist() == [both, both, 1.0, 1.0]
    assert found["2.weight"][:2].tolist() == [[1.0] * 4, [both, both, 1.0, 1.0]]
    assert found["2.weight"][2].tolist() == [5.0, 5.0, *old[2, 2:].tolist()]
    assert found["2.bias"].tolist() == [1.0, both, 5.0]
