"""Real processes for tests, cheaply: a server that has imported everything forks one per command.

Importing torch takes seconds; a fork takes milliseconds, and dies of a signal as any other process does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any


class ForkServer:
    """Starts `sparsona ARGS` as processes of their own."""

    def __init__(self) -> None:
        # One thread each: a process with threads must not be forked.
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **threads},
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        print(json.dumps(request), file=self._server.stdin, flush=True)
        return json.loads(self._server.stdout.readline())

    def close(self) -> None:
        self._server.stdin.close()
        self._server.wait(timeout=10)
        self._server.stdout.close()


@dataclass
class Process:
    """A command under way."""

    server: ForkServer
    pid: int
    folder: Path

    def kill(self, sign: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, sign)

    def wait(self) -> tuple[int, str, str]:
        """Exit code (minus the signal's number if one killed it), stdout, stderr."""
        code = self.server.ask(wait=self.pid)["code"]
        return code, (self.folder / "stdout").read_text(), (self.folder / "stderr").read_text()


class ForkedWorker:
    """What `executors.workers` sees of a worker process, here a fork: `subprocess.Popen` with two pipes."""

    def __init__(self, server: ForkServer, folder: Path) -> None:
        paths = [str(Path(tempfile.mkdtemp(dir=folder)) / name) for name in ("in", "out")]
        for path in paths:
            os.mkfifo(path)
        self._server, self.returncode = server, None
        self.pid = server.ask(worker=paths, path=sys.path)["pid"]
        self.stdin = os.fdopen(os.open(paths[0], os.O_WRONLY), "wb")  # in the order of the other side
        self.stdout = os.fdopen(os.open(paths[1], os.O_RDONLY), "rb")

    def terminate(self, sign: int = signal.SIGTERM) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sign)

    def kill(self) -> None:
        self.terminate(signal.SIGKILL)

    def wait(self, timeout: float = 60.0) -> int:
        deadline = time.monotonic() + timeout
        while self.returncode is None:
            self.returncode = self._server.ask(poll=self.pid)["code"]
            if self.returncode is None:
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired("a worker", timeout)
                time.sleep(0.002)
        return self.returncode


def start(server: ForkServer, folder: Path, *args: object, setup: str = "") -> Process:
    """Run `sparsona ARGS` in `folder`, where its output goes, too; `setup` is Python to be executed before."""
    pid = server.ask(start=[str(arg) for arg in args], folder=str(folder), setup=setup)["pid"]
    return Process(server, pid, folder)


# Python for `setup`: a checkpoint after every round, however short.
EAGER = "import sparsona.runs.session as session; session.CHECKPOINT_SECONDS = 0; session.CHECKPOINT_SHARE = 1e9\n"

# Python for `setup`: two workers that start at once.
TWO_WORKERS = "import processes; processes.fork_workers(2)\n"


def small(folder: Path, **options: object) -> list[str]:
    """Options of a run that takes moments: five clients with 40 digits each."""
    import numpy as np

    path = folder / "clients.npy"
    if not path.exists():
        holder = np.full(1797, -1)
        holder[:200] = np.arange(200) % 5
        np.save(path, holder)
    chosen = {"partition": f"file:{path}", "clients": 5, "per-round": 2, "epochs": 1, "batch-size": 10, "rounds": 3}
    chosen |= {"executor": "serial"} | {key.replace("_", "-"): value for key, value in options.items()}
    return [str(word) for key, value in chosen.items() for word in (f"--{key}", value)]


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to pass"
        time.sleep(0.002)


def children(pid: int) -> list[int]:
    """The processes that this one has started and that are there still."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in found.stdout.split()]


def is_alive(pid: int) -> bool:
    """Whether this process runs, or could: one that has ended and that nobody has asked about does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def rounds_recorded(run: Path) -> int:
    """How many rounds a run under way has written."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{run / 'records.sqlite'}?mode=ro", uri=True)) as db:
            return db.execute("SELECT COUNT(*) FROM rounds").fetchone()[0]
    except sqlite3.Error:
        return 0


def completed(run: Path) -> int:
    """How many rounds the checkpoint holds."""
    return json.loads((run / "checkpoint" / "manifest.json").read_text())["completed"]


def traces(run: Path) -> dict[str, Any]:
    """All that a run leaves behind, apart from when and where it was made: two runs are the same if these are."""
    from safetensors import safe_open

    manifest = json.loads((run / "checkpoint" / "manifest.json").read_text())
    tensors = {}
    for owner, entry in manifest["files"].items():
        state = hashlib.sha256()
        with safe_open(run / "checkpoint" / entry.split()[0], framework="np") as file:
            for key in sorted(file.keys()):
                value = file.get_tensor(key)
                state.update(f"{key} {value.dtype} {value.shape}".encode() + value.tobytes())
        tensors[owner] = state.hexdigest()
    with contextlib.closing(sqlite3.connect(run / "records.sqlite")) as db:
        rows = {}
        for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})") if row[1] != "seconds"]
            order = ", ".join(str(place + 1) for place in range(len(columns)))
            rows[table] = db.execute(f"SELECT {', '.join(columns)} FROM {table} ORDER BY {order}").fetchall()
    summary = json.loads((run / "summary.json").read_text())
    for where_and_when in ("run", "seconds"):
        del summary[where_and_when]
    reached = {key: manifest[key] for key in ("completed", "finished")}
    return {"tensors": tensors, "rows": rows, "summary": summary, "reached": reached}


def serve() -> None:
    os.fsync = lambda descriptor: None  # as in conftest.py
    # All that a command would import, so that its process starts at once.
    for name in (
        "cloudpickle",
        "cryptography.hazmat.primitives.asymmetric.ed25519",
        "cryptography.hazmat.primitives.serialization",
        "cryptography.x509",
        "numpy.ma",
        "numpy.random",
        "rich.progress",
        "rich.table",
        "safetensors.torch",
        "sparsona.cli.app",
        "sparsona.data.readers.digits",
        "sparsona.executors.stacked",
        "sparsona.executors.worker",
        "sparsona.executors.workers",
        "sparsona.experiment.client_side",
        "sparsona.experiment.compare",
        "sparsona.experiment.peers",
        "sparsona.experiment.server_side",
        "sparsona.experiment.train",
        "sparsona.methods.dispfl",
        "sparsona.methods.fedavg",
        "sparsona.methods.fedspa",
        "sparsona.models.cnn",
        "torch.fx.experimental.symbolic_shapes",  # with sympy, for the first gradient
        "torch.utils._device",
        "zenoh",
    ):
        import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = {"code": os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])}
        elif "poll" in request:
            ended, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = {"code": os.waitstatus_to_exitcode(status) if ended else None}
        else:
            pid = os.fork()
            if not pid:
                if "start" in request:
                    run_command(request)
                sys.path[:] = request["path"]
                be_worker(*(os.open(*end) for end in zip(request["worker"], (os.O_RDONLY, os.O_WRONLY), strict=True)))
            answer = {"pid": pid}
        print(json.dumps(answer), flush=True)


def be_worker(inbox: int, outbox: int, parent: int | None = None) -> None:
    """Be a worker process that has imported everything; never returns."""
    try:
        for sign in (signal.SIGTERM, signal.SIGHUP):  # which the process that it is a fork of may handle
            signal.signal(sign, signal.SIG_DFL)
        os.setpgid(0, 0)
        os.dup2(inbox, 0)
        os.dup2(outbox, 1)
        os.closerange(3, 256)  # the pipes of other workers among them
        sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
        from sparsona.executors.worker import main

        main(parent)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


class ChildWorker:
    """What `executors.workers` sees of a worker process, here a fork of the process that starts it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        (inbox, here_in), (here_out, outbox) = os.pipe(), os.pipe()
        parent, self.returncode = os.getpid(), None
        self.pid = os.fork()
        if not self.pid:
            be_worker(inbox, outbox, parent)
        os.close(inbox)
        os.close(outbox)
        self.stdin, self.stdout = os.fdopen(here_in, "wb"), os.fdopen(here_out, "rb")

    def terminate(self, sign: int = signal.SIGTERM) -> None:
        if self.returncode is None:
            os.kill(self.pid, sign)

    def kill(self) -> None:
        self.terminate(signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a worker", timeout)
            else:
                time.sleep(0.002)
        return self.returncode


def fork_workers(count: int) -> None:
    """Let the executor `workers` have so many, which are forks of this process and need not import torch."""
    from types import SimpleNamespace

    from sparsona.executors import workers

    workers.num_cores = lambda: count
    workers.subprocess = SimpleNamespace(PIPE=None, Popen=ChildWorker, TimeoutExpired=subprocess.TimeoutExpired)


def run_command(request: dict[str, Any]) -> None:
    """Be the command; never returns."""
    code = 1
    try:
        os.chdir(request["folder"])
        tempfile.tempdir = request["folder"]  # what a killed process leaves behind goes with the test's folder
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["sparsona", *request["start"]]
        exec(request["setup"], {})
        from sparsona.cli.app import main

        try:
            main()
            code = 0
        except SystemExit as done:
            code = int(done.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
