"""Workers, their parent, or all of them killed or stopped at any moment: the same bits, and nothing left behind."""

from __future__ import annotations

import json
import os
import random
import signal
import time

import pytest
from processes import (
    EAGER,
    TWO_WORKERS,
    children,
    completed,
    is_alive,
    rounds_recorded,
    small,
    start,
    traces,
    wait_until,
)

pytestmark = pytest.mark.long

ROUNDS = 6
WHOM = ("one worker", "the parent", "all")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("reference")


@pytest.fixture(scope="module")
def reference(forks, folder):
    """An uninterrupted run without workers."""
    assert start(forks, folder, "run", "fedspa", *small(folder, rounds=ROUNDS, out="run"), "--json").wait()[0] == 0
    return traces(folder / "run")


def command(folder) -> list[str]:
    if (folder / "run" / "config.json").exists():
        return ["resume", "run", "--json"]
    return ["run", "fedspa", *small(folder, rounds=ROUNDS, out="run", executor="workers"), "--json"]


def kill_chain(forks, folder, chance: random.Random, num_kills: int) -> tuple[int, float]:
    """A run that meets so many kills before it may end; returns how many hit, and how long orphans lived at most."""
    run, hits, longest = folder / "run", 0, 0.0
    for _ in range(num_kills):
        process = start(forks, folder, *command(folder), setup=TWO_WORKERS + EAGER)
        wait_until(lambda process=process: len(children(process.pid)) >= 2 or not is_alive(process.pid))
        time.sleep(chance.uniform(0, 0.15))
        workers, whom = children(process.pid), chance.choice(WHOM)
        if not workers or not is_alive(process.pid):
            process.wait()
            continue
        victims = {"one worker": [chance.choice(workers)], "the parent": [process.pid], "all": [*workers, process.pid]}
        for pid in victims[whom]:
            os.kill(pid, signal.SIGKILL)
        began, hits = time.monotonic(), hits + 1
        if whom == "one worker":
            code, _, err = process.wait()
            assert code == 0, err
            break  # to its end
        assert process.wait()[0] == -signal.SIGKILL
        wait_until(lambda workers=workers: not any(map(is_alive, workers)), 2)
        longest = max(longest, time.monotonic() - began)
    code, _, err = start(forks, folder, *command(folder), setup=TWO_WORKERS).wait()
    assert code == 0, err
    assert completed(run) == ROUNDS
    return hits, longest


def check_chain(forks, folder, reference, number: int, num_kills: int) -> tuple[int, float]:
    found = kill_chain(forks, folder, random.Random(number), num_kills)
    assert traces(folder / "run") == reference
    assert not list(folder.glob("sparsona-data-*"))  # what a killed process left was removed by the next one
    return found


def test_killed_with_workers(forks, tmp_path, reference):
    hits, _ = check_chain(forks, tmp_path, reference, 1, 4)
    assert hits


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_two_hundred_kills_with_workers(forks, tmp_path, reference, capsys):
    hits = number = 0
    longest = 0.0
    while hits < 200:
        number += 1
        at = tmp_path / str(number)
        at.mkdir()
        found, lived = check_chain(forks, at, reference, number, 8)
        hits, longest = hits + found, max(longest, lived)
        with capsys.disabled():
            print(f"{hits} kills in {number} runs: all the same; the longest-lived orphan {longest:.2f} s", flush=True)


def begun(forks, folder, **options):
    """A run whose turns take long, and its workers, both at work."""
    args = small(folder, rounds=1000, out="run", executor="workers", per_round=5, **options)
    process = start(forks, folder, "run", "fedavg", *args, setup=TWO_WORKERS)
    wait_until(lambda: rounds_recorded(folder / "run") >= 1)
    return process, children(process.pid)


@pytest.mark.parametrize(
    ("sign", "expected"),
    [
        ("SIGINT", 130),
        pytest.param("SIGTERM", 130, marks=pytest.mark.slow),
        pytest.param("SIGHUP", 129, marks=pytest.mark.slow),  # test_resume has all three, with workers that run
    ],
)
def test_a_signal_ends_a_run_with_a_stopped_worker_within_five_seconds(forks, tmp_path, sign, expected):
    process, workers = begun(forks, tmp_path)
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGSTOP)
    time.sleep(0.1)  # until its parent waits for it
    began = time.monotonic()
    process.kill(getattr(signal, sign))
    code, _, err = process.wait()
    assert time.monotonic() - began < 5
    assert code == expected
    assert "`sparsona resume run` continues it" in err
    assert completed(tmp_path / "run") == rounds_recorded(tmp_path / "run") >= 1
    assert not any(map(is_alive, workers))
    assert not list(tmp_path.glob("sparsona-data-*"))


def test_a_stopped_worker_does_not_outlive_its_parent(forks, tmp_path):
    process, workers = begun(forks, tmp_path)
    os.kill(workers[0], signal.SIGSTOP)
    process.kill()
    assert process.wait()[0] == -signal.SIGKILL
    wait_until(lambda: not any(map(is_alive, workers)), 2)


def test_a_hang_up_that_is_ignored_stays_so(forks, tmp_path):
    """As nohup has it."""
    setup = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    process = start(forks, tmp_path, "run", "fedavg", *small(tmp_path, rounds=40, out="run"), "--json", setup=setup)
    wait_until(lambda: rounds_recorded(tmp_path / "run") >= 1)
    process.kill(signal.SIGHUP)
    code, out, err = process.wait()
    assert code == 0, err
    assert json.loads(out)["rounds"] == 40
