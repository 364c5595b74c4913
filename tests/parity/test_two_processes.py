"""The two sides of a run in two processes that share nothing but bytes give the simulator's bits, for every method."""

from __future__ import annotations

import hashlib
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from client_side import read, write
from method_lines import anywhere, further_rows_are_slow

from sparsona import methods, models
from sparsona.core.task import Task
from sparsona.core.tree import leaves
from sparsona.engine.context import ServerContext
from sparsona.engine.jobs import settle
from sparsona.engine.plan import Plan
from sparsona.engine.rounds import engine_for, simulate
from sparsona.executors.serial import Serial
from sparsona.experiment import build

pytestmark = pytest.mark.long

COMMON = {"clients": 5, "per_round": 3, "rounds": 3, "epochs": 1, "executor": "serial", "device": "cpu", "novel": 1}
OWN = {
    "fedavg-ft": {"guard": True, "drop_rate": 0.3},
    "fedspa": {"points": ["trained", "global"], "drop_rate": 0.3, "everyone_trains": True, "tune_epochs": 1},
    "dispfl": {"points": ["consensus"], "drop_rate": 0.3, "tune_epochs": 1},
    "pfedgate": {"capacities": [0.3, 1.0], "points": ["global"]},
}


class RemoteClients:
    """Clients in another process. Every call is one frame of bytes each way."""

    encodes = True

    def __init__(self, method, options):
        self.states, self.tuned = {}, {}  # nothing of them is here
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("client_side.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.known = self._ask((method, options))

    def _ask(self, value):
        write(self.process.stdin, pickle.dumps(value))
        return pickle.loads(read(self.process.stdout))

    def at(self, states):
        assert states == {}
        return self

    def run(self, jobs):
        for job in jobs:
            assert job.state is None
            outcome = self._ask(("run", job.packed()))
            if (again := settle(job, outcome)) is not None:
                outcome = self._ask(("run", again.packed()))
                assert not outcome.lacks_mask
            yield outcome

    def keep(self, client):
        self._ask(("keep", client))

    def wanted(self, client, round_):
        return self._ask(("wanted", (client, round_)))

    def digest(self):
        return self._ask(("digest", None))

    def end(self):
        write(self.process.stdin, pickle.dumps(("end", None)))
        self.process.stdin.close()
        assert self.process.wait(timeout=60) == 0
        self.process.stdout.close()


def digest(value) -> str:
    state = hashlib.sha256()
    for path, tensor in leaves(value):
        state.update(path.encode() + tensor.contiguous().numpy().tobytes())
    return state.hexdigest()


def play(engine, rounds: int):
    """A whole run: what came of the server, what was said among peers, and every record."""
    population, records = engine.start(), []
    for index in range(rounds):
        population, record = engine.play(population, index)
        records.append((record.turns, told(record.evaluations), told(engine.evaluate(population, index + 1))))
    record, tuned = engine.finish(population)
    return population, [*records, (record.turns, told(record.evaluations))], tuned


def told(evaluations):
    return [(one.client, one.point, one.correct, one.count, one.loss) for one in evaluations]


# Further rows of a file are more of the same.


@pytest.mark.parametrize("name", further_rows_are_slow(sorted(methods.METHODS)))
def test_two_processes_give_the_simulators_bits(name):
    options = {**COMMON, **anywhere(name), **OWN.get(name, {})}
    if methods.METHODS[name].peers:
        options["per_round"] = None
    config = build.make_config(name, options)
    client_context = build.make_context(config)
    population, records, tuned = play(simulate(client_context, Serial(client_context)), config.rounds)
    remote = RemoteClients(name, options)
    # The server's side is built from names alone: it has no data, and is told of clients what they say of themselves.
    make, kind = methods.factory(name)
    task = Task(models.builder("digits-cnn", (1, 8, 8), 10), (1, 8, 8), 10)
    context = ServerContext.make(task, partial(make, config=kind(**config.options)), client_context.plan, remote.known)
    assert isinstance(context.plan, Plan)
    apart, apart_records, nothing = play(engine_for(context, remote), config.rounds)
    assert (apart.states, nothing) == ({}, {})
    assert apart_records == records
    assert (
        any(turn.traffic.up for turn in records[-2][0])
        or client_context.method.server is client_context.method.peer is None
    )
    assert digest(apart.server) == digest(population.server)
    assert apart.messages == population.messages
    assert remote.digest() == digest((population.states, tuned))
    remote.end()
