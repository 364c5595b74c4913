"""Processes that end with the one that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
from processes import is_alive, wait_until

from sparsona.core.parents import end_with_parent, parent_to_die_with

CHILD = """
import json, sys, time
from sparsona.core.parents import end_with_parent, exit_when_closed
how = json.loads(sys.argv[1])
if "parent" in how:
    end_with_parent(how["parent"])
if how.get("pipe"):
    exit_when_closed(0)
print("ready", flush=True)
time.sleep(60)
"""


def parent_of(how: str) -> tuple[subprocess.Popen, int]:
    """A process, and the number of its child that has begun to sleep."""
    code = f"""
        import json, os, subprocess, sys, time
        how = {how}
        child = subprocess.Popen(
            [sys.executable, "-c", {CHILD!r}, json.dumps(how)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        child.stdout.readline()
        print(child.pid, flush=True)
        time.sleep(60)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE)
    with parent.stdout as said:
        return parent, int(said.readline())


@pytest.mark.parametrize(
    ("how", "is_stopped"),
    [
        pytest.param('{"parent": os.getpid()}', True, id="the kernel ends even a stopped one"),
        pytest.param('{"pipe": True}', False, id="the pipe ends one that runs"),
    ],
)
def test_a_child_ends_with_its_parent(how, is_stopped):
    parent, child = parent_of(how)
    try:
        if is_stopped:
            os.kill(child, signal.SIGSTOP)
        parent.kill()
        parent.wait()
        wait_until(lambda: not is_alive(child), 2)
    finally:
        if is_alive(child):
            os.kill(child, signal.SIGKILL)


def test_a_child_whose_parent_ended_before_it_began(tmp_path):
    code = "from sparsona.core.parents import end_with_parent; end_with_parent(1); print('it goes on')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


def test_a_thread_that_may_end_first_is_no_parent():
    found = []
    thread = threading.Thread(target=lambda: found.append(parent_to_die_with()))
    thread.start()
    thread.join()
    assert found == [None]
    assert parent_to_die_with() == os.getpid()
    end_with_parent(None)  # does nothing
