"""Runs of a few clients, for tests of what executes them."""

from __future__ import annotations

import hashlib
import os
import signal

from torch import nn

from sparsona.core.tree import leaves
from sparsona.engine.rounds import simulate
from sparsona.executors.serial import Serial
from sparsona.experiment import build

SMALL = {"device": "cpu", "clients": 5, "per_round": 4, "rounds": 3, "epochs": 1, "batch_size": 16, "data_rate": 0.12}


def context_of(method: str = "fedspa", model=None, **more):
    return build.make_context(build.make_config(method, {**SMALL, **more}, model=model), None, model)


def played(context, executor, rounds: int = 3, after_round=lambda index: None) -> str:
    """A digest of everything that the rounds of a run leave behind: records, the server, states."""
    star = simulate(context, executor)
    population, records = star.start(), []
    for index in range(rounds):
        population, record = star.play(population, index)
        records.append([(turn.client, turn.tally, turn.traffic, turn.aggregated) for turn in record.turns])
        after_round(index)
    evaluations = star.evaluate(population, rounds)
    scores = [
        (e.client, e.correct, e.count, e.loss, e.confusion.tolist(), sorted(e.metrics.items())) for e in evaluations
    ]
    state = hashlib.sha256(repr((records, scores)).encode())
    for path, tensor in sorted(leaves((population.server, population.states)), key=lambda item: item[0]):
        state.update(path.encode() + tensor.cpu().numpy().tobytes())
    return state.hexdigest()


def evaluation_jobs(context, repeats: int = 4):
    """Jobs that evaluate each of five clients."""
    star = simulate(context, Serial(context))
    population, round_ = star.start(), context.plan.round_at(0)
    for client in [*range(5)] * repeats:
        yield star.evaluation_job(population, client, round_, ("received",))


class Deadly(nn.Module):
    """A model that kills the process that trains it, unless that is the one that made it."""

    def __init__(self):
        super().__init__()
        self.layer, self.parent = nn.Linear(64, 10), os.getpid()

    def forward(self, inputs):
        if self.training and os.getpid() != self.parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(inputs.flatten(1))


class Printing(nn.Module):
    """A user's model that prints, which must not end up among the outcomes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, inputs):
        print("a line on stdout")
        return self.layer(inputs.flatten(1))
