"""A worker that dies or hangs costs its client a turn, and never the run."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from small_runs import context_of
from torch import nn

import sparsona as sp
from sparsona.core.errors import SparsonaError
from sparsona.engine.jobs import Outcome
from sparsona.engine.rounds import simulate
from sparsona.executors import choose, workers
from sparsona.executors.serial import Serial
from sparsona.executors.workers import Workers
from sparsona.experiment import build

pytestmark = pytest.mark.long
DIED = "its process died 3 times: exit code -9"


class Fatal(nn.Module):
    """Signals the process that trains on marked data, unless that is the one that made the model."""

    def __init__(self, sign: int):
        super().__init__()
        self.layer, self.parent, self.sign = nn.Linear(4, 3), os.getpid(), sign

    def forward(self, inputs):
        if self.training and os.getpid() != self.parent and (inputs > 5).any():
            os.kill(os.getpid(), self.sign)
        return self.layer(inputs)


def options(**more):
    chosen = {"rounds": 1, "per_round": 4, "epochs": 1, "batch_size": 4, "device": "cpu"}
    return chosen | {"executor": "workers"} | more


def federation(*marked: int):
    """Four clients, some of whose data is what `Fatal` waits for."""
    chance = torch.Generator().manual_seed(0)

    def client(number: int):
        x = torch.rand(8, 4, generator=chance) + (10 if number in marked else 0)
        return x, torch.arange(8) % 3, torch.rand(3, 4, generator=chance), torch.arange(3)

    return sp.Federation.from_clients([client(number) for number in range(4)], validation_rate=0.0)


def context(*marked: int, sign: int = signal.SIGKILL, method: str = "fedavg", **more):
    data, model = federation(*marked), Fatal(sign)
    return build.make_context(build.make_config(method, options(**more), data, model), data, model)


@pytest.fixture
def opened(forked_workers):
    made = []

    def make(of, count: int = 2, **how) -> Workers:
        made.append(Workers(of, count, **how))
        return made[-1]

    yield make
    for executor in made:
        executor.close()


class Without:
    """One client after another, but one loses its turns."""

    encodes = True

    def __init__(self, of, client: int):
        self._inner, self._client = Serial(of), client

    def run(self, jobs):
        for job in jobs:
            yield Outcome(job.client, failure=DIED) if job.client == self._client else next(self._inner.run([job]))


@pytest.mark.parametrize("method", ["fedavg", "dispfl"])
def test_whose_worker_always_dies_loses_the_turn_alone(opened, method):
    """The server, or the peers, are as if that client had not been heard."""
    of = context(2, method=method)
    (lost, record), (expected, _) = (
        engine.play(engine.start(), 0) for engine in (simulate(of, opened(of)), simulate(of, Without(of, 2)))
    )
    assert [(turn.client, turn.trained, turn.dropped, turn.failure) for turn in record.turns if turn.failure] == [
        (2, False, True, DIED)
    ]
    assert sorted(lost.states) == sorted(expected.states)
    assert 2 not in lost.states
    assert lost.messages == expected.messages
    if method == "fedavg":
        assert torch.equal(lost.server.params.flat, expected.server.params.flat)


def test_a_run_records_it_and_says_so(forked_workers, monkeypatch, tmp_path):
    monkeypatch.setattr(workers, "num_cores", lambda: 1)
    run = sp.train("fedavg", federation(2), Fatal(signal.SIGKILL), **options(), out=tmp_path / "run")
    assert "1 of 4 clients was not heard in some rounds (its process died: 1 turn)." in run.protocol
    assert len(run.accuracies()) == 4  # being evaluated ends no process


@pytest.mark.parametrize("marked", [(0, 1, 2, 3), (1,)])
def test_a_run_without_any_client_stops(opened, marked):
    of = context(*marked, per_round=4 if len(marked) == 4 else 1)
    engine = simulate(of, opened(of, 1))
    jobs = (engine._job("train", client, engine.start().server, of.plan.round_at(0), (), {}) for client in marked)
    with pytest.raises(SparsonaError, match=f"no client's turn comes to its end; of the last one: {DIED}"):
        list(opened(of, 1).run(jobs))


def test_workers_that_cannot_start_stop_the_run(monkeypatch):
    monkeypatch.setattr(workers, "start_command", lambda: ["/bin/false"])
    of = context()
    executor = Workers(of, 1)
    try:
        with pytest.raises(SparsonaError, match="worker processes do not start: exit code 1"):
            simulate(of, executor).play(simulate(of, executor).start(), 0)
    finally:
        executor.close()


def test_a_turn_that_takes_too_long_is_lost(opened, monkeypatch):
    """At the limit and at once, though it would take forever; turns that take a thousandth of it are not."""
    limit, waited, real = 10.0, [], Workers._replace

    def replace(self, place):
        waited.append(time.monotonic() - self._workers[place].since)  # without the start of the process
        return real(self, place)

    monkeypatch.setattr(Workers, "_replace", replace)
    of = context(2, sign=signal.SIGSTOP, turn_seconds=limit)
    engine = simulate(of, opened(of))
    _, record = engine.play(engine.start(), 0)
    failed = {turn.client: turn.failure for turn in record.turns if turn.failure}
    assert failed == {2: "its turn took longer than 10 s"}
    (seconds,) = waited
    assert limit <= seconds < 3 * limit


def test_who_is_waited_for_is_reported(opened, monkeypatch):
    monkeypatch.setattr(workers, "SLOW_SECONDS", 0.05)
    of, said = context(2, sign=signal.SIGSTOP), []

    def report(text):
        said.append(text)
        if "client 2" in text:
            for worker in executor._workers:
                os.kill(worker.process.pid, signal.SIGKILL)

    executor = opened(of, 1, report=report)
    engine = simulate(of, executor)
    _, record = engine.play(engine.start(), 0)
    assert any(text.startswith("waiting for client 2 for 0 s (process ") for text in said), said
    assert [turn.client for turn in record.turns if turn.failure] == [2]


def test_a_limit_needs_processes_that_can_be_ended():
    assert choose("auto", context(turn_seconds=5.0)) == "workers"
    for name in ("serial", "stacked"):
        with pytest.raises(SparsonaError, match=f"turn_seconds=5 with executor {name}: a turn cannot be ended"):
            choose(name, context(turn_seconds=5.0))
    assert choose("serial", context_of()) == "serial"
