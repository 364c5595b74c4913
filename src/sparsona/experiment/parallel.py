"""Whole runs side by side, each in a process of its own: the trials of a search, the runs of a comparison."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from sparsona.core.arguments import whole
from sparsona.core.errors import SparsonaError


class InThisProcess(Executor):
    """A pool of no processes: what is submitted is done at once."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(function(*args, **options))
        except Exception as error:
            done.set_exception(error)
        return done


@contextmanager
def processes(jobs: int) -> Iterator[Executor]:
    """A pool of `jobs` processes that share the processor's cores; for one job, this process.

    However the block is left, its processes end: a run that is under way is stopped where it can be resumed.
    """
    if jobs == 1:
        yield InThisProcess()
        return
    threads = max(1, (os.cpu_count() or 1) // jobs)
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin, (threads,))
    try:
        yield pool
    except BrokenProcessPool as error:
        raise SparsonaError(
            "a process ended before its run did, perhaps for want of memory",
            expected=f"memory for {jobs} runs at once",
            hint="resume with fewer --jobs; what is finished is kept",
        ) from error
    except BaseException:
        for child in multiprocessing.active_children():
            child.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin(threads: int) -> None:
    """In a new process: Ctrl-C is for the process that started it, which ends its children by SIGTERM."""
    import torch

    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)  # the parent was killed: nobody would read what is done here

    threading.Thread(target=watch, daemon=True).start()


_is_stopped = False


def _stop(*_: Any) -> None:
    global _is_stopped
    _is_stopped = True
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: the run writes its checkpoint now
    raise KeyboardInterrupt


def unless_stopped(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a process of a pool; one that was told to end begins nothing that waits in its queue."""
    if _is_stopped:
        raise KeyboardInterrupt
    return function(*args)


def usual_jobs(has_gpu: bool) -> int:
    """How many runs are worth having side by side: one a core; on a GPU, which they share, up to four."""
    cores = os.cpu_count() or 1
    return min(4, cores) if has_gpu else cores


MOST_JOBS = 10_000


def check_jobs(jobs: int | None) -> None:
    """Refuse what is no number of processes."""
    whole("jobs", jobs, 1, MOST_JOBS, none=True)
