"""A model of one weight, w*x with the loss (y - w*x)^2, on two clients: small enough to follow a method by hand.

The gradient is -2*(y - w*x)*x, the rate 0.1, and w starts with 1. Client 0 has one example, x = 1, y = 3: a step takes
w to w + 0.2 * (3 - w). Client 1 has three times x = 2, y = 0, in one batch: a step takes w to 0.2 * w. Two steps of
SGD: 1, 1.4, 1.72 and 1, 0.2, 0.04, whose mean by examples is (1.72 + 3 * 0.04) / 4 = 0.46; their plain mean is 0.88.
"""

from dataclasses import replace
from functools import reduce

import torch
from torch import nn

from sparsona.core.method import Client, Round
from sparsona.core.seeds import Seeds
from sparsona.core.task import Task
from sparsona.data.batches import Examples, in_order
from sparsona.engine.jobs import Tally
from sparsona.engine.turn import run_phase

CLIENTS = (Client(0, 1, num_clients=2), Client(1, 3, num_clients=2))
DATA = (
    Examples(torch.tensor([[1.0]]), torch.tensor([[3.0]])),
    Examples(torch.full((3, 1), 2.0), torch.zeros(3, 1)),
)
PLAIN = {"lr": 0.1, "epochs": 2, "weight_decay": 0.0, "clip_norm": None}


def squared_error(outputs, batch):
    return (outputs - batch.targets).square().sum(-1), batch.weight


class Probe:
    """A client's data, in one batch."""

    def __init__(self, client):
        self.client = client

    def train(self, flops=None):
        return in_order(DATA[self.client], 3)


class Line:
    """A method, its server, and the States of clients that had a turn."""

    def __init__(self, factory, config, **options):
        line = nn.Linear(1, 1, bias=False)
        nn.init.ones_(line.weight)
        self.task = Task(line, (1,), 1, losses=squared_error)
        self.method = factory(self.task, config(**{**PLAIN, **options}))
        self.params, self.buffers = self.task.init(0)
        self.server = self.method.server.init(self.params, CLIENTS, Seeds(0))
        self.states = {}

    def turn(self, client=0, phases=None):
        """A turn whose result is not kept: the Work after training, the new State and the Update."""
        one = CLIENTS[client]
        round_ = replace(Round(0, 2, 1.0, 3, Seeds(0)).on(one), is_new=client not in self.states)
        state = self.states.get(client) or self.method.init_client(self.params, self.buffers, one, Seeds(0))
        probe = Probe(client)
        inbox = (self.method.server.reply(self.server, one, round_),)
        work = self.method.receive(state, inbox, probe, round_)
        for phase in self.method.phases if phases is None else phases:
            work = run_phase(phase, work, self.task, DATA[client], probe, round_, Tally())
        return work, *self.method.finish(state, work, inbox, probe, round_)

    def play(self, *clients):
        """A round of these clients."""
        half, round_, updates = self.method.server, Round(0, 2, 1.0, 3, Seeds(0)), []
        for client in clients or range(len(CLIENTS)):
            _, self.states[client], update = self.turn(client)
            updates.append(update)
        total = reduce(lambda sum_, one: half.add(self.server, sum_, one), updates, half.zero(self.server, round_))
        self.server = half.step(self.server, total, round_)
        return self

    @property
    def w(self):
        """The shared model."""
        return weight(self.method.server.global_model(self.server))

    def deployed(self, work):
        """The weight that this Work predicts with."""
        return float(self.method.predict(work, torch.ones(1, 1)))


def weight(tree):
    return float(tree["weight"])
