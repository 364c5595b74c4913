"""The clock: time counts once, for the innermost block; what is not measured is told as such."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from sparsona.engine import profiler as clocks
from sparsona.engine.profiler import OFF, Clock, Span, WorkerReport
from sparsona.engine.turn import Tally


@pytest.fixture
def hand(monkeypatch):
    """Time that passes only when it is told to."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(clocks, "time", SimpleNamespace(perf_counter=lambda: now.seconds))

    def passes(seconds: float) -> None:
        now.seconds += seconds

    return passes


def table(rows) -> dict[str, tuple[float, int]]:
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    return {row["phase"]: (pytest.approx(row["seconds"]), row["calls"]) for row in rows}


def test_a_block_counts_what_blocks_inside_it_do_not(hand):
    clock = Clock()
    hand(1)
    for _ in range(2):
        with clock.measure("aggregate"):
            hand(2)
            with clock.measure("decode"):
                hand(3)
                with clock.measure("aggregate"):  # the same name, deeper
                    hand(0.5)
            hand(4)
    with contextlib.suppress(KeyError), clock.measure("reply"):  # a block that fails is counted, too
        hand(5)
        raise KeyError
    found = clock.profile()
    assert found["seconds"] == 25
    assert table(found["phases"]) == {"reply": (5, 1), "decode": (6, 2), "aggregate": (13, 4), "other": (1, 0)}
    assert [row["phase"] for row in found["phases"]] == ["reply", "decode", "aggregate", "other"]
    assert found["phases"][2]["ms_per_call"] == pytest.approx(3250)
    assert found["workers"] is None


def test_what_is_measured_as_other_is_other(hand):
    """An executor's own work, inside the server's, is nobody's; nor is it counted twice."""
    clock = Clock()
    with clock.measure("aggregate"):
        hand(1)
        with clock.measure("other"):
            hand(2)
            with clock.measure("train"):
                hand(4)
    hand(8)
    assert table(clock.profile()["phases"]) == {"aggregate": (1, 1), "train": (4, 1), "other": (10, 0)}


def test_training_counts_steps_by_the_tallies(hand):
    clock, first, second = Clock(), Tally(examples=7, steps=1), Tally()
    for phase in ("train", "personal"):
        with clock.training(phase, [first, second]):
            hand(2)
            first.steps, first.examples = first.steps + 10, first.examples + 160
            second.steps, second.examples = second.steps + 6, second.examples + 90
    rows = {row["phase"]: row for row in clock.profile()["phases"]}
    assert list(rows) == ["train", "train: personal", "other"]
    for name in ("train", "train: personal"):
        assert (rows[name]["calls"], rows[name]["steps"], rows[name]["examples"]) == (1, 16, 250)
        assert rows[name]["ms_per_step"] == 125
        assert rows[name]["examples_per_second"] == 125
    assert "steps" not in rows["other"]


def test_a_clock_that_is_off_is_one_block_that_does_nothing(hand):
    assert OFF.measure("a") is OFF.measure("b") is OFF.training("train", [Tally()])
    with OFF.measure("a"):
        hand(3)
    OFF.record_worker(OFF.add_worker(), WorkerReport({"train": Span(1.0, 1)}, 5))
    assert [row["phase"] for row in OFF.profile()["phases"]] == ["other"]
    assert OFF.profile()["workers"] is None


def test_workers_are_told_against_the_time_they_lived(hand):
    parent, worker = Clock(), Clock()
    hand(10)
    numbers = [parent.add_worker(), parent.add_worker()]
    with worker.measure("train"):
        hand(3)
    parent.record_worker(numbers[0], worker.take())
    with worker.measure("train"):
        hand(1)
    with worker.measure("idle"):
        hand(2)
    parent.record_worker(numbers[0], worker.take())
    parent.end_worker(numbers[0])
    assert parent.profile()["workers"]["seconds"] == 12  # 6 of the first, and of the second, which still lives
    hand(4)
    parent.record_worker(numbers[1], WorkerReport({"train": Span(2.0, 1, 8, 80), "idle": Span(7.0, 1)}, 123))
    parent.end_worker(numbers[1])
    hand(50)
    found = parent.profile()
    assert (found["workers"]["processes"], found["workers"]["seconds"]) == (2, 16)
    assert table(found["workers"]["phases"]) == {"train": (6, 3), "idle": (9, 2), "other": (1, 0)}
    assert found["memory"]["workers"][1] == 123
    assert found["memory"]["process"] > 2**20
    assert [row["phase"] for row in found["phases"]] == ["other"]  # none of it was this process's time


def test_a_gpu_is_waited_for_where_blocks_begin_and_end(hand, monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 77)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: (waited.append(device), hand(2)))
    clock, off, gpu = Clock(), Clock(is_on=False), torch.device("cuda")
    for each in (clock, off):
        each.attach(gpu)
    with off.measure("train"):
        assert not waited
    with clock.measure("train"):
        hand(1)
        assert waited == [gpu]
    assert len(waited) == 2
    assert table(clock.profile()["phases"]) == {"train": (3, 1), "other": (4, 0)}
    assert clock.profile()["memory"]["gpu"] == 77


def play_turns(clock, hand, times, group=1):
    """Turns that train and then search; of a group that trains together, all search afterwards."""
    for first in range(0, len(times), group):
        together = times[first : first + group]
        with clock.training("train", []):
            hand(sum(train for train, _ in together))
        for _, search in together:
            with clock.measure("finish"):
                hand(0.25)
                with clock.measure(clocks.SEARCH):
                    hand(search)
                hand(0.25)


def test_mask_search_is_compared_with_the_training_of_its_turn(hand):
    """Ratios 0.5, 0.5 and 0.2: their mean is 0.4, not that of the sums (2 / 6), and so is their spread, sqrt(0.03)."""
    clock = Clock()
    play_turns(clock, hand, [(1, 0.5), (2, 1), (2.5, 0.5)])
    found = clock.profile()
    assert table(found["phases"])["finish"] == (1.5, 3)
    assert found["search"] == pytest.approx(
        {
            "turns": 3,
            "ratio": 0.4,
            "ratio_sd": 0.03**0.5,
            "train_seconds": 5.5 / 3,
            "train_sd": (((1 - 5.5 / 3) ** 2 + (2 - 5.5 / 3) ** 2 + (2.5 - 5.5 / 3) ** 2) / 2) ** 0.5,
            "search_seconds": 2 / 3,
            "search_sd": (1 / 12) ** 0.5,
        }
    )


def test_clients_that_train_together_have_no_spread(hand):
    clock = Clock()
    play_turns(clock, hand, [(1, 0.5), (2, 1), (2, 0.5), (3, 1)], group=2)
    found = clock.profile()["search"]
    assert (found["turns"], found["ratio"], found["ratio_sd"]) == (4, pytest.approx(3 / 8), None)
    assert (found["train_seconds"], found["train_sd"]) == (2, None)


def test_where_nothing_is_searched_there_is_no_ratio(hand):
    clock = Clock()
    with clock.training("train", []):
        hand(1)
    assert clock.profile()["search"] is None


def test_workers_report_their_searches(hand):
    clock, worker = Clock(), Clock()
    number = clock.add_worker()
    for times in ([(1, 0.5)], [(1, 0.25), (1, 0.25)]):
        play_turns(worker, hand, times)
        clock.record_worker(number, worker.take())
    found = clock.profile()["search"]
    assert (found["turns"], found["ratio"]) == (3, pytest.approx(1 / 3))
