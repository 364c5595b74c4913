"""FedSim and FedAlt worked out by hand.

The model is u*x + v, u shared and v personal, both clients start with u = 1, v = 0, and the loss is the squared error
(y - u*x - v)^2, whose gradients are -2*r*x and -2*r where r = y - u*x - v. Client 0 has the example x = 1, y = 3,
client 1 has x = 2, y = 0. One step each; the rate is 0.1 for u and 0.25 for v.

FedSim, both gradients at the same point:
    client 0: r = 2, gradients -4 and -4: u = 1.4, v = 1
    client 1: r = -2, gradients 8 and 4: u = 0.2, v = -1          mean of u: 0.8

FedAlt, v first, then u at the new v:
    client 0: v = 1, then r = 3 - 1 - 1 = 1, gradient -2: u = 1.2
    client 1: v = -1, then r = 0 - 2 + 1 = -1, gradient 4: u = 0.6      mean of u: 0.9

Adam with a rate of 0.05 on FedAlt's way: slope 1 - 0.9 = 0.1, first = 0.01, second = 1e-5; corrected 0.1 and 0.01, so
that u moves by 0.05 to 0.95. If the next mean is 0.75: slope 0.2, first = 0.9 * 0.01 + 0.1 * 0.2 = 0.029, second =
0.999 * 1e-5 + 0.001 * 0.04 = 4.999e-5; corrected 0.029 / 0.19 = 0.152632 and 4.999e-5 / 0.001999 = 0.0250075, whose
root is 0.158138; u moves by 0.05 * 0.965182 = 0.048259 to 0.901741.

Clipped to a norm of 1, client 0. FedSim: the joint norm is sqrt(32), both gradients become 4 / 5.656854 = 0.707107: u
= 1.070711, v = 0.176777. FedAlt: the gradient of v becomes -1, v = 0.25; then r = 1.75 and the gradient of u is -3.5,
which becomes -1: u = 1.1. With the stale gradient in the norm, sqrt(3.5^2 + 1^2) = 3.640055, it becomes -0.961524: u
= 1.096152.
"""

from __future__ import annotations

from functools import reduce

import pytest
import torch
from torch import nn

from sparsona.core.method import Client, Round, message
from sparsona.core.seeds import Seeds
from sparsona.core.task import Task
from sparsona.core.tree import Tree
from sparsona.core.update import dense
from sparsona.data.batches import Examples
from sparsona.engine.jobs import Tally
from sparsona.engine.turn import run_phase
from sparsona.methods.fedalt import FedAltConfig, fedalt

RATES = {"lr": 0.1, "personal_lr": 0.25, "epochs": 1, "clip_norm": None, "personal": "bias", "weight": "equal"}
CLIENTS = (Client(0, 1, num_clients=2), Client(1, 1, num_clients=2))
DATA = tuple(Examples(torch.tensor([[x]]), torch.tensor([[y]])) for x, y in ((1.0, 3.0), (2.0, 0.0)))


def squared_error(outputs, batch):
    return (outputs - batch.targets).square().sum(-1), batch.weight


@pytest.fixture
def task():
    line = nn.Linear(1, 1)
    with torch.no_grad():
        line.weight.fill_(1.0)
        line.bias.fill_(0.0)
    return Task(line, (1,), 1, losses=squared_error)


def play(task, **options):
    """One round of both clients: the method, the server then, and each client's u and v."""
    method = fedalt(task, FedAltConfig(**{**RATES, **options}))
    params, buffers = task.init(0)
    server = method.server.init(params, CLIENTS, Seeds(0))
    round_, sent, ends = Round(0, 1, 1.0, 1, Seeds(0).at(0)), [], []
    for client, examples in zip(CLIENTS, DATA, strict=True):
        mine = round_.on(client)
        state = method.init_client(params, buffers, client, Seeds(0).of(client.index))
        inbox = (method.server.reply(server, client, round_),)
        work = method.receive(state, inbox, None, mine)
        for phase in method.phases:
            work = run_phase(phase, work, task, examples, None, mine, Tally())
        state, update = method.finish(state, work, inbox, None, mine)
        sent.append(update)
        ends.append((float(work.shared["weight"]), float(state.personal["bias"])))
    return method, aggregated(method, server, sent, round_), ends, round_


def aggregated(method, server, updates, round_):
    """The server after these updates."""
    half = method.server
    total = reduce(lambda total, update: half.add(server, total, update), updates, half.zero(server, round_))
    return half.step(server, total, round_)


def u(server) -> float:
    return float(server.shared["weight"])


def test_fedsim(task):
    _, server, ends, _ = play(task, updates="simultaneous")
    assert ends == [pytest.approx((1.4, 1.0)), pytest.approx((0.2, -1.0))]
    assert u(server) == pytest.approx(0.8)


def test_fedalt(task):
    method, server, ends, _ = play(task)
    assert ends == [pytest.approx((1.2, 1.0)), pytest.approx((0.6, -1.0))]
    assert u(server) == pytest.approx(0.9)
    # The model of all: u, and v as it began.
    assert {name: float(value) for name, value in method.server.global_model(server).items()} == {
        "weight": pytest.approx(0.9),
        "bias": 0.0,
    }


def test_adam(task):
    method, server, _, round_ = play(task, server_optimizer="adam", server_lr=0.05)
    assert u(server) == pytest.approx(0.95, abs=1e-6)
    mean = Tree(server.shared.layout, torch.tensor([0.75]))
    server = aggregated(method, server, [message(round_.on(CLIENTS[0]), {"shared": dense(mean)})], round_)
    assert u(server) == pytest.approx(0.901741, abs=2e-6)


def test_clipping_goes_by_all_that_a_phase_trains(task):
    assert play(task, updates="simultaneous", clip_norm=1.0)[2][0] == pytest.approx((1.070711, 0.176777), abs=1e-5)
    assert play(task, clip_norm=1.0)[2][0] == pytest.approx((1.1, 0.25), abs=1e-5)


def test_a_stale_gradient_in_the_norm(task):
    assert play(task, clip_norm=1.0, clip_stale=True)[2][0] == pytest.approx((1.096152, 0.25), abs=1e-5)
