"""Killed, stopped or interrupted at any moment, a run goes on to the very bits it would have had."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import sqlite3
import time

import numpy as np
import pytest
from older import unseal
from processes import EAGER, TWO_WORKERS, completed, rounds_recorded, small, start, traces, wait_until

import sparsona as sp
from sparsona.runs import manifest, session, simulation
from sparsona.runs.folder import ENDED
from sparsona.runs.verify import MISSING, verify

pytestmark = pytest.mark.long

ROUNDS = 6
METHODS = ("fedspa", "fedavg-ft")

# Python for `setup`: sends a signal when so many outcomes of a kind have been seen, whatever the executor.
SIGNAL_AT = """
import os, signal
import sparsona.runs.simulation as simulation
opened = simulation.open_executor

class Watched:
    def __init__(self, *how):
        self.inner, self.left = opened(*how), {count}
        self.encodes = self.inner.encodes

    def run(self, jobs):
        for outcome in self.inner.run(jobs):
            self.left -= {kind}
            if not self.left:
                os.{call}
            yield outcome

    def close(self):
        self.inner.close()

simulation.open_executor = Watched
"""
TRAINED, TUNED = "outcome.message is not None", "outcome.work is not None"
KILL = "kill(os.getpid(), signal.SIGKILL)"


def signal_at(count: int, kind: str = TRAINED, call: str = KILL) -> str:
    return SIGNAL_AT.format(count=count, kind=kind, call=call)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The traces of an uninterrupted run of each method, made one client after another in this process."""
    folder = tmp_path_factory.mktemp("reference")
    found = {}
    for method in METHODS:
        options = dict(zip(*[iter(small(folder, rounds=ROUNDS))] * 2, strict=True))
        typed = {
            key.removeprefix("--").replace("-", "_"): int(value) if value.isdigit() else value
            for key, value in options.items()
        }
        found[method] = traces(sp.train(method, out=folder / method, **typed).path)
        assert found[method]["reached"] == {"completed": ROUNDS, "finished": True}
    assert any(owner.startswith("tuned/") for owner in found["fedavg-ft"]["tensors"])
    return found


def command(folder, method: str, **options) -> list[str]:
    """Start the run, or go on with it if it got as far as being one."""
    if (folder / "run" / "config.json").exists():
        return ["resume", "run", "--json"]
    return ["run", method, *small(folder, rounds=ROUNDS, out="run", **options), "--json"]


def finish(forks, folder, method: str, setup: str = "") -> dict:
    code, out, err = start(forks, folder, *command(folder, method), setup=setup).wait()
    assert code == 0, err
    assert json.loads(out)["method"] == method
    return traces(folder / "run")


def is_whole(run) -> bool:
    """Whether nothing is wrong with a folder, but for results that were not written yet when the run was killed."""
    if not (run / "config.json").exists():
        return True
    wrong = [one for one in verify(run).findings if one.state == "wrong"]
    return all(one.file in ENDED and one.what == MISSING for one in wrong)


@pytest.mark.parametrize("method", METHODS)
def test_killed_at_random_moments(forks, tmp_path, reference, method):
    chance, run = random.Random(method), tmp_path / "run"
    kills = 0
    for attempt in range(5):
        process = start(forks, tmp_path, *command(tmp_path, method), setup=EAGER)
        if attempt:  # one more round, then at once or a little later
            reached = completed(run) if (run / "checkpoint" / "manifest.json").exists() else 0
            wait_until(lambda reached=reached: rounds_recorded(run) >= min(reached + 1, ROUNDS))
            time.sleep(chance.uniform(0, 0.02))
        else:
            time.sleep(chance.uniform(0, 0.3))
        process.kill()
        kills += process.wait()[0] == -signal.SIGKILL
        assert is_whole(run)  # whatever it was killed at
    assert kills >= 3  # those that came too late do not count
    assert finish(forks, tmp_path, method) == reference[method]


def killer_at(step: int) -> str:
    """Python that kills the process when it is about to touch its folder for the step-th time."""
    return f"""
import os, signal, sys
steps = 0

def hook(event, args):
    global steps
    if event in ("open", "os.rename", "os.remove", "os.mkdir", "sqlite3.connect") and "run" in str(args[0]).split("/"):
        steps += 1
        if steps == {step}:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(hook)
"""


@pytest.mark.parametrize(
    ("step", "next_step"),
    [
        *((1, 3), (9, 12), (40, 20), (150, 25)),
        *(
            pytest.param(*steps, marks=pytest.mark.slow)
            for steps in ((3, 4), (6, 5), (12, 2), (15, 30), (22, 14), (67, 16), (94, 33), (121, 25))
        ),
    ],
)
def test_killed_before_it_touches_a_file(forks, tmp_path, reference, step, next_step):
    """From the first folder to the last summary: before opening, renaming or removing a file; and again on resuming."""
    for number in (step, next_step):
        process = start(forks, tmp_path, *command(tmp_path, "fedspa"), setup=EAGER + killer_at(number))
        assert process.wait()[0] == -signal.SIGKILL
        assert is_whole(tmp_path / "run")
    assert finish(forks, tmp_path, "fedspa") == reference["fedspa"]


def test_killed_while_tuning(forks, tmp_path, reference):
    process = start(forks, tmp_path, *command(tmp_path, "fedavg-ft"), setup=EAGER + signal_at(3, TUNED))
    assert process.wait()[0] == -signal.SIGKILL
    assert verify(tmp_path / "run").is_right
    assert completed(tmp_path / "run") == ROUNDS
    assert finish(forks, tmp_path, "fedavg-ft") == reference["fedavg-ft"]


@pytest.mark.parametrize(("sign", "expected"), [("SIGINT", 130), ("SIGTERM", 130), ("SIGHUP", 129)])
def test_interrupted(forks, tmp_path, reference, sign, expected):
    """In the middle of the fourth round, long before a checkpoint is due."""
    setup = signal_at(7, call=f"kill(os.getpid(), signal.{sign})")
    code, out, err = start(forks, tmp_path, *command(tmp_path, "fedspa"), setup=setup).wait()
    assert code == expected
    assert out == ""
    assert "Traceback" not in err
    assert "`sparsona resume run` continues it" in err
    assert err.rstrip().endswith("stopped")
    assert completed(tmp_path / "run") == 3
    assert finish(forks, tmp_path, "fedspa") == reference["fedspa"]


def test_interrupted_in_the_last_tuning(forks, tmp_path, reference):
    setup = signal_at(2, TUNED, "kill(os.getpid(), signal.SIGINT)")
    assert start(forks, tmp_path, *command(tmp_path, "fedavg-ft"), setup=setup).wait()[0] == 130
    assert completed(tmp_path / "run") == ROUNDS
    assert finish(forks, tmp_path, "fedavg-ft") == reference["fedavg-ft"]


def test_workers_interrupted_as_a_terminal_does_then_killed(forks, tmp_path, reference):
    """Ctrl-C goes to every process in the foreground; only the parent answers. The bits are those of serial."""
    run = tmp_path / "run"
    # One worker: it has had turns, and so has left the group, when the signal is sent.
    one_worker = "import os, processes; os.setsid(); processes.fork_workers(1)\n"
    setup = one_worker + signal_at(5, call="killpg(0, signal.SIGINT)")
    code, out, err = start(forks, tmp_path, *command(tmp_path, "fedspa", executor="workers"), setup=setup).wait()
    assert code == 130, err
    assert out == ""
    assert "Traceback" not in err
    assert json.loads((run / "config.json").read_text())["executor"] == "workers"
    assert completed(run) == 2
    process = start(forks, tmp_path, *command(tmp_path, "fedspa"), setup=TWO_WORKERS + EAGER + signal_at(4))
    assert process.wait()[0] == -signal.SIGKILL
    assert completed(run) == 3
    assert finish(forks, tmp_path, "fedspa", TWO_WORKERS) == reference["fedspa"]


def test_workers_killed_while_tuning(forks, tmp_path, reference):
    args = command(tmp_path, "fedavg-ft", executor="workers")
    setup = TWO_WORKERS + EAGER + signal_at(2, TUNED)
    assert start(forks, tmp_path, *args, setup=setup).wait()[0] == -signal.SIGKILL
    assert completed(tmp_path / "run") == ROUNDS
    assert finish(forks, tmp_path, "fedavg-ft", TWO_WORKERS) == reference["fedavg-ft"]


@pytest.mark.parametrize("method", METHODS)
def test_stopped_by_the_clock(say, tmp_path, reference, method):
    """A limit so short that every session plays one round: the result is still the same."""
    said = say(*command(tmp_path, method), "--set", "max_seconds=1e-9")
    for reached in range(1, ROUNDS + 1):
        assert said.code == 0
        assert completed(tmp_path / "run") == reached
        assert json.loads(said.out)["rounds"] == reached
        if reached < ROUNDS:
            assert (
                f"stopped by max_seconds after round {reached} of {ROUNDS}; `sparsona resume` continues it" in said.err
            )
            said = say("resume", "run", "--json")
    assert "stopped" not in said.err
    assert traces(tmp_path / "run") == reference[method]


def test_resuming_a_finished_run_changes_nothing(say, tmp_path, monkeypatch):
    say("run", "fedavg", *small(tmp_path, out="run"), "--json")
    before = traces(tmp_path / "run")
    manifest = (tmp_path / "run" / "checkpoint" / "manifest.json").read_bytes()
    monkeypatch.setattr(simulation, "open_executor", None)  # nothing is to be started for it
    said = say("resume", "run", "--json")
    assert said.code == 0
    assert json.loads(said.out)["accuracy"] == before["summary"]["accuracy"]
    assert traces(tmp_path / "run") == before
    assert (tmp_path / "run" / "checkpoint" / "manifest.json").read_bytes() == manifest


def test_killed_before_the_summary_was_written(say, tmp_path):
    say("run", "fedavg", *small(tmp_path, out="run"), "--json")
    before = traces(tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    loaded = sp.load(tmp_path / "run")
    assert loaded.summary["accuracy"] == before["summary"]["accuracy"]
    assert loaded.summary["bytes"] == before["summary"]["bytes"]
    assert say("resume", "run", "--json").code == 0
    assert traces(tmp_path / "run") == before


def test_an_old_summary_is_not_mistaken_for_the_present(forks, say, tmp_path):
    """Stopped, resumed and killed: what is told is what the records say, not what was true at the stop."""
    say("run", "fedavg", *small(tmp_path, out="run", rounds=6), "--set", "max_seconds=1e-9")
    assert sp.load(tmp_path / "run").summary["rounds"] == 1
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    (tmp_path / "run" / "config.json").write_text(json.dumps({**config, "max_seconds": None}))
    assert start(forks, tmp_path, "resume", "run", setup=EAGER + signal_at(7)).wait()[0] == -signal.SIGKILL
    run = sp.load(tmp_path / "run")
    assert run.summary["rounds"] == run.curve()[-1][0] > 1
    assert run.summary["accuracy"]["mean"] == pytest.approx(np.mean(run.accuracies()), abs=1e-12)
    (row,) = json.loads(say("runs", "--in", ".", "--json").out)
    assert row["state"] == "unfinished: resume it"
    assert row["rounds"] == f"{completed(tmp_path / 'run')}/6"


def test_records_past_the_manifest_are_dropped(say, tmp_path):
    """As if killed after three rounds were recorded and one was saved."""
    run = tmp_path / "run"
    say(*command(tmp_path, "fedspa"), "--set", "max_seconds=1e-9")
    shutil.copytree(run / "checkpoint", tmp_path / "after one")
    for _ in range(2):
        say("resume", "run", "--json")
    assert rounds_recorded(run) == 3
    shutil.rmtree(run / "checkpoint")
    shutil.copytree(tmp_path / "after one", run / "checkpoint")
    assert json.loads(say("resume", "run", "--json").out)["rounds"] == 2
    assert rounds_recorded(run) == 2


def test_records_are_on_the_disk_before_the_manifest_says_so(tmp_path, monkeypatch):
    """If power failed right after a manifest was written, the records file alone must have its rounds."""
    found = []
    write = manifest.write_atomically

    def spy(path, data):
        if path.name == "manifest.json" and (path.parents[1] / "records.sqlite").exists():
            shutil.copy(path.parents[1] / "records.sqlite", tmp_path / "alone")
            with contextlib.closing(sqlite3.connect(tmp_path / "alone")) as db:
                found.append((json.loads(data)["completed"], db.execute("SELECT COUNT(*) FROM rounds").fetchone()[0]))
        write(path, data)

    monkeypatch.setattr(manifest, "write_atomically", spy)
    monkeypatch.setattr(session, "CHECKPOINT_SECONDS", 0)
    monkeypatch.setattr(session, "CHECKPOINT_SHARE", 1e9)
    sp.train("fedavg", rounds=3, clients=4, epochs=1, data_rate=0.1, executor="serial", out=tmp_path / "run")
    assert found == [(1, 1), (2, 2), (3, 3), (3, 3), (3, 3)]


def test_another_environment_is_told(say, tmp_path):
    say("run", "fedavg", *small(tmp_path, out="run"), "--json")
    path = tmp_path / "run" / "environment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "torch": "1.0"}))
    unseal(tmp_path / "run")
    said = say("resume", "run", "--json")
    assert said.code == 0
    assert "warning: not the environment this run began in, so its last bits may differ: torch 1.0 -> " in said.err
    json.loads(said.out)


def test_checkpoints_keep_to_their_share_of_the_time(tmp_path, monkeypatch):
    """A checkpoint that took a second is not repeated for twenty."""
    clock = [0.0]
    monkeypatch.setattr(session.time, "monotonic", lambda: clock[0])
    timer = session.Session.__new__(session.Session)
    timer._checkpoint_at, timer._checkpoint_cost = 0.0, 1.0
    clock[0] = 19.9
    assert not timer._checkpoint_is_due()
    clock[0] = 20.1
    assert timer._checkpoint_is_due()
    timer._checkpoint_cost = 0.0
    clock[0] = session.CHECKPOINT_SECONDS - 0.1
    assert not timer._checkpoint_is_due()
