"""What every test may rely on: one thread, a small problem, no network, and nobody touching the global generators."""

from __future__ import annotations

import gc
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from processes import ForkedWorker, ForkServer

# Started in the background of a script, this process ignores Ctrl-C, and by `nohup` hang-ups; so would every process
# that the tests send them to.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_finish():
    """Modules and tests are there to the end: the garbage collector need not walk over them again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _seeds_come_from_nowhere():
    """Until there is a GPU, torch writes down the stack of each `manual_seed`: a thirtieth of the suite's time."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (torch.cuda, torch.xpu):
            patch.setattr(module, "traceback", SimpleNamespace(format_stack=list))
        yield


@pytest.fixture(autouse=True, scope="session")
def _disks_need_not_be_waited_for():
    """What fsync adds is what outlives a power failure, and none happens here; it is as slow as the rest of a run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def _is_here(host: object) -> bool:
    """Whether a host is this machine, or nothing that would have to be looked up elsewhere."""
    text = host.decode() if isinstance(host, bytes) else host
    if text in (None, "", "localhost"):
        return True
    try:
        address = ipaddress.ip_address(str(text).partition("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


@pytest.fixture(autouse=True)
def _no_network(request, monkeypatch):
    """Connections and names beyond this machine are refused. Processes that a test starts are not covered."""
    if request.node.get_closest_marker("network"):
        return

    def refuse(host: object) -> None:
        if not _is_here(host):
            raise AssertionError(f"a test wants to connect to {host!r}: tests have no network")

    def guarded(call):
        def connect(self, address):
            if self.family in (socket.AF_INET, socket.AF_INET6):
                refuse(address[0])
            return call(self, address)

        return connect

    def look_up(host, *args, **options):
        refuse(host)
        return found(host, *args, **options)

    found = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, guarded(getattr(socket.socket, name)))


@pytest.fixture
def untouched_generators():
    """Fails if the test moved a global generator."""
    torch.manual_seed(11)
    np.random.seed(11)
    before = torch.get_rng_state().clone(), np.random.get_state()[1].copy()
    yield
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])


@dataclass(frozen=True)
class Said:
    """What a command answered."""

    code: int
    out: str
    err: str

    def refused(self, *words: str, code: int = 1) -> None:
        """One clear message with these words, on stderr alone, and no traceback."""
        assert self.code == code, self
        assert self.out == ""
        assert "Traceback" not in self.err
        for word in words:
            assert word in self.err, (word, self.err)
        if code == 1:  # ours, and not about the shape of the command line
            assert self.err.count("error: ") == 1
            assert "\n  expected: " in self.err or "mistakes" in self.err, self.err


@pytest.fixture
def say(capsys, monkeypatch, tmp_path) -> Callable[..., Said]:
    """`sparsona ARGS` in this process, in a folder of its own."""
    from sparsona.cli import app as cli

    monkeypatch.chdir(tmp_path)

    def call(*args: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["sparsona", *map(str, args)])
        before = {sign: signal.getsignal(sign) for sign in (signal.SIGTERM, signal.SIGHUP)}
        capsys.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as done:
            code = int(done.code or 0)
        finally:
            for sign, handler in before.items():
                signal.signal(sign, handler)
        return Said(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="session")
def forks():
    """Starts commands as processes: see processes.py."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def forked_workers(forks, monkeypatch, tmp_path_factory):
    """Worker processes begin as forks of one that has imported torch, which takes seconds."""
    from sparsona.executors import workers

    folder = tmp_path_factory.mktemp("pipes")
    fake = SimpleNamespace(
        PIPE=None,
        Popen=lambda *command, **how: ForkedWorker(forks, folder),
        TimeoutExpired=subprocess.TimeoutExpired,
    )
    monkeypatch.setattr(workers, "subprocess", fake)
