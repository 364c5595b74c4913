"""`jobs="auto"`: how many runs share a machine, by the time that their rounds take."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import wait_until

import sparsona as sp
from sparsona.core.errors import SparsonaError
from sparsona.experiment import compare as comparisons
from sparsona.experiment import parallel
from sparsona.experiment.packing import ROUNDS, Packing, Timer, read_rounds
from sparsona.runs.observers import ObserverList, RoundResult
from sparsona.runs.options import RunConfig


class Machine:
    """A machine on which `num` runs side by side do `speed[num]` rounds a second together, played round by round."""

    def __init__(self, *speed: float, evaluates: int = 0) -> None:
        self.speed, self.evaluates, self.now = dict(enumerate(speed, 1)), evaluates, 100.0
        self.rounds: dict[str, list[tuple[float, float]]] = {}
        self.most_seen = 0

    def play(self, packing: Packing, seconds: float, lasts: int = 10**9) -> None:
        end, number = self.now + seconds, 0
        while self.now < end:
            while len(self.rounds) < packing.limit:
                self.rounds[f"run {number}"] = []
                number += 1
            self.most_seen = max(self.most_seen, len(self.rounds))
            took = len(self.rounds) / self.speed[len(self.rounds)]
            self.now += took
            for one in self.rounds.values():
                slow = 20.0 if not one else 3.0 if self.evaluates and len(one) % self.evaluates == 0 else 1.0
                one.append((self.now, took * slow))  # compiling and testing take longer
            self.rounds = {run: one for run, one in self.rounds.items() if len(one) < lasts}
            packing.update(self.rounds, self.now)


@pytest.mark.parametrize(
    ("speed", "best"),
    [
        ((1.0, 1.04), 1),  # one run fills it
        ((1.0, 1.9, 1.95), 2),
        ((1.0, 2.0, 3.0, 4.0, 4.1, 4.2), 4),
        ((1.0, 2.0, 3.0, 4.0), 4),  # all that may be
        ((1.0, 0.5), 1),  # worse together
    ],
)
@pytest.mark.parametrize("evaluates", [0, 5])
def test_one_more_for_as_long_as_all_get_faster(speed, best, evaluates):
    packing, machine = Packing(most=len(speed)), Machine(*speed, evaluates=evaluates)
    machine.play(packing, 2000)
    assert packing.is_settled
    assert packing.limit == best
    assert machine.most_seen == min(best + 1, len(speed))  # no more was tried than had to be


def test_rounds_before_a_run_was_added_and_those_that_compile_do_not_count():
    packing = Packing(most=3)
    alone = [(float(n), 1.0) for n in range(1, ROUNDS + 2)]
    packing.update({"a": []}, 0.0)
    packing.update({"a": alone[:-1]}, 5.5)  # the first of them has compiled: there is one too few
    assert packing.limit == 1
    packing.update({"a": alone}, 6.5)
    assert packing.limit == 2
    slower = [(7.0 + 1.5 * n, 1.5) for n in range(1, 2 * ROUNDS)]
    packing.update({"a": alone, "b": []}, 7.0)
    packing.update({"a": alone + slower[:ROUNDS], "b": []}, 16.0)  # b still compiles
    assert packing.limit == 2
    b = [(slower[1][0], 3.0), *slower[2:]]
    packing.update({"a": alone + slower, "b": b[: ROUNDS + 1]}, 20.0)
    assert packing.limit == 3
    assert not packing.is_settled


def test_runs_that_end_before_they_were_timed_together_prove_nothing():
    packing, machine = Packing(most=4), Machine(1.0, 2.0, 3.0, 4.0)
    machine.play(packing, 3000, lasts=ROUNDS + 2)  # over when the next has begun
    assert machine.most_seen <= 2
    assert not packing.is_settled


def test_a_number_is_not_measured():
    packing = Packing(3, limit=3)
    assert packing.is_settled
    assert packing.limit == 3


def test_memory_that_is_used_up_leaves_fewer():
    packing = Packing(most=8)
    packing.limit = 4
    assert packing.give_way(running=3)
    assert packing.limit == 3
    assert packing.is_settled
    assert not packing.give_way(running=0)  # it was alone: an error of the run


def test_times_are_read_while_they_are_written(tmp_path):
    path = tmp_path / "0.rounds"
    assert read_rounds(path) == ()
    timer = Timer(path)
    timer.on_round(RoundResult(0, 1.0, (), 0.5))
    timer.on_round(RoundResult(1, 1.0, (), 9.0, is_tuning=True))  # no round
    with path.open("ab") as file:
        file.write(b"half")
    ((end, took),) = read_rounds(path)
    assert took == 0.5
    assert abs(end - time.time()) < 60
    Timer(path)  # the run goes on in another process
    assert read_rounds(path) == ()


TINY = {"clients": 4, "rounds": 8, "data_rate": 0.2, "executor": "serial", "device": "cpu", "progress": False}


def test_a_comparison_has_the_same_results(tmp_path, monkeypatch):
    monkeypatch.setattr(parallel.os, "cpu_count", lambda: 2)
    one = sp.compare(["local", "fedavg"], seeds=2, out=tmp_path / "one", **TINY)
    found = sp.compare(["local", "fedavg"], seeds=2, out=tmp_path / "auto", jobs="auto", **TINY)
    assert [run.summary["accuracy"] for run in found.runs] == [run.summary["accuracy"] for run in one.runs]


def test_a_run_that_finds_no_memory_goes_on_with_fewer_beside_it(tmp_path, monkeypatch):
    """Of processes that are played by threads: `b` wants more than `a` leaves."""
    begun, told = [], []
    is_full = threading.Event()

    def play(path, values, given, records, times):
        begun.append(Path(path).name)
        if begun.count("b") == 1 and begun[-1] == "b":
            is_full.set()
            raise MemoryError("no room")
        assert is_full.wait(10)
        wait_until(lambda: "waits for memory" in {one.doing for one in told})

    packing = Packing(most=3)
    packing.limit = 2
    monkeypatch.setattr(comparisons, "packing_of", lambda *_: packing)
    monkeypatch.setattr(comparisons, "processes", ThreadPoolExecutor)
    monkeypatch.setattr(comparisons, "unless_stopped", lambda function, *args: function(*args))
    monkeypatch.setattr(comparisons, "_play_run", play)
    monkeypatch.setattr(comparisons, "PROGRESS_SECONDS", 0.02)
    planned = [(tmp_path / name, RunConfig(method="local", rounds=9), None) for name in "abc"]
    titles = {folder: folder.name for folder, _, _ in planned}
    assert comparisons.play_in_processes(planned, titles, None, None, ObserverList([told.append]), "auto") == {}
    assert begun == ["a", "b", "b", "c"]  # one after another, once memory was used up
    assert packing.limit == 1
    assert packing.is_settled


@pytest.mark.parametrize("jobs", ["many", 0, 1.5])
def test_what_is_no_number_of_jobs(jobs, tmp_path):
    with pytest.raises(SparsonaError, match="jobs"):
        sp.compare(["local"], jobs=jobs, out=tmp_path / "x", **TINY)
    with pytest.raises(SparsonaError, match="jobs"):
        sp.tune(["local"], jobs="auto", out=tmp_path / "y", **TINY)


@pytest.mark.parametrize(
    ("text", "words"), [("nonsense", "neither a whole number nor auto"), ("0", "from 1 to 10,000")]
)
def test_what_is_no_number_of_jobs_on_a_command_line(text, words, say):
    found = say("compare", "local", "--jobs", text)
    assert found.code
    assert words in found.err
