"""Pools of runs: they end with their parent, by any signal, and import nothing from the current folder."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import is_alive, wait_until

from sparsona.core.errors import MachineError, SparsonaError
from sparsona.experiment.parallel import is_of_machine
from sparsona.runs.files import explain_disk_errors
from sparsona.runs.records import explain_record_errors

# A pool of two whose processes sleep; torch is a stub, which takes them seconds less. Each child has said its number.
POOL = """
import os, sys, time
sys.path.insert(0, {stub!r})
from sparsona.cli.signals import stop_on_signals
from sparsona.experiment import parallel
stop_on_signals()

def main():
    with parallel.processes(2) as pool:
        made = [pool.submit(parallel.unless_stopped, parallel_stub.sleep) for _ in range(2)]
        print("begun", flush=True)
        [one.result() for one in made]

import parallel_stub
if __name__ == "__main__":
    main()
"""
STUB = """
import os, sys, time

def sleep():
    with open(os.environ["PIDS"], "a") as file:
        file.write(f"{os.getpid()}\\n")
    if "BRIEF" in os.environ and len(open(os.environ["PIDS"]).readlines()) == 2:
        return  # this process has nothing more to do
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        open(os.environ["PIDS"] + ".saved", "a").write("saved\\n")
        raise
"""


@pytest.fixture
def pool(tmp_path, request):
    """Starts the pool in a folder with a foreign `pickle.py` and `torch.py`, and returns it with its children."""
    stub, here = tmp_path / "stub", tmp_path / "here"
    for folder in (stub, here):
        folder.mkdir()
    (stub / "torch.py").write_text("def set_num_threads(count): pass\n")
    (stub / "parallel_stub.py").write_text(STUB)
    for name in ("pickle", "torch", "multiprocessing", "struct"):
        (here / f"{name}.py").write_text("open('EXECUTED', 'w')\n")
    script, pids = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(POOL.format(stub=str(stub)))
    pids.write_text("")
    process = subprocess.Popen(
        [sys.executable, script],
        cwd=here,
        env={**os.environ, "PIDS": str(pids), **getattr(request, "param", {})},
        stderr=subprocess.PIPE,
    )
    wait_until(lambda: len(pids.read_text().split()) == 2)
    children = [int(word) for word in pids.read_text().split()]
    yield process, children, tmp_path
    for pid in children:
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait()
    process.stderr.close()


def test_killed_with_one_child_stopped(pool):
    process, children, folder = pool
    assert not (folder / "here" / "EXECUTED").exists()
    os.kill(children[0], signal.SIGSTOP)
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(is_alive, children)), 2)


@pytest.mark.parametrize("sign", [signal.SIGHUP, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_stopped_by_a_signal_with_one_child_stopped(pool, sign):
    process, children, folder = pool
    os.kill(children[0], signal.SIGSTOP)
    began = time.monotonic()
    process.send_signal(sign)
    process.wait(10)
    assert time.monotonic() - began < 5
    assert not any(map(is_alive, children))
    assert (folder / "pids.saved").read_text() == "saved\n"  # the other one had its time


@pytest.mark.parametrize("pool", [{"BRIEF": "1"}], indirect=True)
def test_a_process_that_waits_for_a_job_ends_in_silence(pool):
    process, children, folder = pool
    time.sleep(0.3)  # its job is over
    process.send_signal(signal.SIGTERM)
    process.wait(10)
    told = process.stderr.read().decode()
    assert "_process_worker" not in told
    assert "call_queue" not in told
    assert not any(map(is_alive, children))
    assert (folder / "pids.saved").read_text() == "saved\n"


def test_errors_of_the_machine_are_known_as_such_in_another_process():
    with pytest.raises(MachineError) as caught, explain_disk_errors(Path("somewhere")):
        raise OSError(errno.ENOSPC, "no space")
    assert is_of_machine(pickle.loads(pickle.dumps(caught.value)))
    with pytest.raises(MachineError) as caught, explain_record_errors(Path("somewhere")):
        raise sqlite3.OperationalError("database or disk is full")
    assert is_of_machine(pickle.loads(pickle.dumps(caught.value)))
    assert not is_of_machine(SparsonaError("of a method"))
