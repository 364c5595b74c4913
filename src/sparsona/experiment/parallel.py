"""Whole runs side by side, each in a process of its own: the trials of a search, the runs of a comparison."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, Literal

from sparsona.core.arguments import whole
from sparsona.core.errors import MachineError, SparsonaError
from sparsona.core.parents import end_with_parent, parent_to_die_with
from sparsona.experiment.packing import Packing

STOP_SECONDS = 2.5  # that runs have, together, to write their checkpoints and end before their processes are killed


class InThisProcess(Executor):
    """A pool of no processes: what is submitted is done at once."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(function(*args, **options))
        except Exception as error:
            done.set_exception(error)
        return done


class _Pool(ProcessPoolExecutor):
    """Processes that do not import the script that started them: without `if __name__ == "__main__":` they would run it
    again. What they need of it is sent to them (`pack_given`)."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        main = sys.modules["__main__"]
        before = {name: getattr(main, name, None) for name in ("__file__", "__spec__")}
        try:
            for name in before:
                setattr(main, name, None)  # by these a new process finds the script
            return super().submit(function, *args, **options)
        finally:
            for name, value in before.items():
                setattr(main, name, value)


@contextmanager
def processes(jobs: int) -> Iterator[Executor]:
    """A pool of `jobs` processes that share the processor's cores; for one job, this process.

    However the block is left, its processes end: a run that is under way is stopped where it can be resumed.
    """
    if jobs == 1:
        yield InThisProcess()
        return
    threads, others = max(1, (os.cpu_count() or 1) // jobs), set(multiprocessing.active_children())
    how = threads, parent_to_die_with()
    with _safe_path(), _Pool(jobs, multiprocessing.get_context("spawn"), _begin, how) as pool:
        try:
            yield pool
        except BaseException as error:
            # Of what waits in the queue nothing begins; the pool itself is closed on the way out.
            pool.shutdown(wait=False, cancel_futures=True)
            _end(set(multiprocessing.active_children()) - others)
            if not isinstance(error, BrokenProcessPool):
                raise
            raise SparsonaError(
                "a process ended before its run did, perhaps for want of memory",
                expected=f"memory for {jobs} runs at once",
                hint="resume with fewer --jobs; what is finished is kept",
            ) from error


@contextmanager
def _safe_path() -> Iterator[None]:
    """New processes begin without the current folder among those that modules are imported from, and then receive the
    path of this one: Python's own `spawn` looks for its modules in the current folder first."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def _end(children: set[Any]) -> None:
    """Stop these processes where their runs can be resumed; those that do not follow are killed."""
    for child in children:
        child.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    try:
        for child in children:
            child.join(max(0.0, deadline - time.monotonic()))
    finally:
        for child in children:
            child.kill()


def _begin(threads: int, parent: int | None) -> None:
    """In a new process: Ctrl-C and a lost terminal are for the process that started it, which ends its children by
    SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    end_with_parent(parent)
    started_by = multiprocessing.parent_process()
    assert started_by is not None

    def watch() -> None:
        started_by.join()
        os._exit(1)  # the parent was killed: nobody would read what is done here

    threading.Thread(target=watch, daemon=True).start()
    import torch

    torch.set_num_threads(threads)


_is_stopped = False
_is_busy = False  # whether a job is under way


def _stop(*_: Any) -> None:
    global _is_stopped
    _is_stopped = True
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: the run writes its checkpoint now
    if not _is_busy:
        os._exit(1)  # in the middle of an import, or waiting for a job, there is nothing to save
    raise KeyboardInterrupt


def unless_stopped(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a process of a pool; one that was told to end begins nothing that waits in its queue."""
    global _is_busy
    if _is_stopped:
        raise KeyboardInterrupt
    _is_busy = True
    try:
        return function(*args)
    except Exception as error:
        if _can_travel(error):
            raise
        text = f"{type(error).__name__}: {error}"
        raise (MachineError(text) if is_of_machine(error) else SparsonaError(text)) from error
    finally:
        _is_busy = False


def _can_travel(error: Exception) -> bool:
    """Whether the process that waits for a job can read its error; a pool ends by one that cannot be read."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # of a class in the user's script, or one with several arguments
        return False
    return True


def pack_given(*given: Any) -> bytes:
    """What a caller passed from Python, pickled for processes: functions and classes of a notebook by value."""
    import cloudpickle

    try:
        body: bytes = cloudpickle.dumps(given)
    except Exception as error:  # whatever an object raises that refuses to be pickled
        raise SparsonaError(
            f"data, model, methods or functions that cannot be sent to other processes: {error}",
            expected="objects that can be pickled, without open files, locks or the like",
            hint="jobs=1, so that runs follow one another in this process",
        ) from error
    return body


def is_of_machine(error: BaseException) -> bool:
    """Whether an error is the machine's fault, such as a full disk: other runs on it would meet it, too."""
    # By type: an error that comes from another process has lost its cause.
    return isinstance(error, MachineError | OSError) or is_out_of_memory(error)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether a run wanted more memory than was left, of the machine or of its GPU."""
    from torch import OutOfMemoryError

    return isinstance(error, MemoryError | OutOfMemoryError)


def usual_jobs(has_gpu: bool) -> int:
    """How many runs are worth having side by side: one a core; on a GPU, which they share, up to four."""
    cores = os.cpu_count() or 1
    return min(4, cores) if has_gpu else cores


AUTO = "auto"  # as many as are worth it, by the time that their rounds take: packing.py
MOST_JOBS = 10_000
MOST_ON_GPU = 8  # of AUTO: each has a CUDA context and compiled programs of its own
Jobs = int | Literal["auto"]


def packing_of(jobs: Jobs, has_gpu: bool) -> Packing:
    """How many runs to have at a time: a fixed number, or for AUTO one that is found."""
    if not isinstance(jobs, str):
        return Packing(jobs, limit=jobs)
    cores = os.cpu_count() or 1
    return Packing(min(MOST_ON_GPU, cores) if has_gpu else cores)


def check_jobs(jobs: Any, can_measure: bool = True, none: bool = False) -> Any:
    """Refuse what is no number of processes; `can_measure`: AUTO is accepted."""
    if can_measure and isinstance(jobs, str):
        if jobs == AUTO:
            return jobs
        raise SparsonaError(f"jobs='{jobs}'", expected=f"a whole number from 1 to {MOST_JOBS:,}, or '{AUTO}'")
    return whole("jobs", jobs, 1, MOST_JOBS, none=none)
