"""Several worker processes, one thread each. Same bits as `serial`, on all cores."""

from __future__ import annotations

import contextlib
import io
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import cloudpickle

from sparsona.core.errors import SparsonaError
from sparsona.engine.context import ClientContext
from sparsona.engine.jobs import Job, Outcome, Report
from sparsona.engine.profiler import START, WAIT, Clock
from sparsona.engine.tempdirs import claim, make_folder
from sparsona.executors.backlog import Backlog, PackedJob
from sparsona.executors.worker import is_importable, open_answer, read_frame, write_body, write_frame

# The environment of a process that trains on one thread. Memory that a step frees is kept for the next: requesting it
# again, page by page, takes a tenth of a step.
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**29)}
PREFIX = "sparsona-data-"  # of folders that hold the data for workers


def num_cores() -> int:
    """The number of cores that this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Worker:
    """One process and its two pipes."""

    def __init__(self, recipe: bytes, clock: Clock, by_value: bool) -> None:
        self._clock, self._number = clock, clock.add_worker()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sparsona.executors.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**MEMORY, **os.environ, **THREADS},
            process_group=0,  # a terminal sends Ctrl-C to a whole group, and only the parent handles it
        )
        self.stdin = cast(BinaryIO, self.process.stdin)
        # Unbuffered: the selector would not see an answer that a buffer had read together with the one before.
        self.stdout: io.RawIOBase = cast(Any, self.process.stdout).raw
        self.job: tuple[int, Job] | None = None
        self.opening = True
        write_frame(self.stdin, (sys.path, clock.is_on, by_value))
        write_frame(self.stdin, ("open", recipe))

    def send(self, packed: PackedJob) -> None:
        self.job = (packed.number, packed.job)
        with self._clock.measure("pipe"):
            write_body(self.stdin, packed.body)

    def receive(self) -> Any:
        with self._clock.measure("pipe"):
            message = read_frame(self.stdout)
        answer, report = open_answer(message)
        self._clock.record_worker(self._number, report)
        return answer

    def end(self) -> None:
        if self._clock.is_on and self.job is None and not self.opening:
            with contextlib.suppress(OSError, EOFError):
                write_frame(self.stdin, ("report", None))  # what it measured since its last job: its idle time
                self.receive()
        for pipe in (self.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                cast(BinaryIO, pipe).close()
        self.process.terminate()
        self.process.wait()
        self._clock.end_worker(self._number)


class Workers:
    """The executor for a CPU with several cores."""

    encodes = True

    def __init__(
        self, context: ClientContext, num_workers: int | None = None, report: Report = lambda text: None
    ) -> None:
        self._clock, self._report = context.clock, report
        num_workers = num_workers or num_cores()
        report(f"starting {num_workers} worker{'s' * (num_workers > 1)}")
        self._workers: list[_Worker] = []
        self._folder: Path | None = None
        try:
            self._folder = make_folder(PREFIX)
            claim(self._folder)
            context.federation.save(self._folder)
            self._recipe = cloudpickle.dumps(
                (context.task, context.make_method, str(self._folder), context.plan, context.capacities)
            )
            self._by_value = not is_importable(context.make_method)
            for _ in range(num_workers):
                self._workers.append(_Worker(self._recipe, self._clock, self._by_value))
        except OSError as error:
            self.close()
            raise SparsonaError(
                f"worker processes could not be started: {error}",
                expected=f"room for the data in '{tempfile.gettempdir()}', and processes to spare",
                hint="free some space or set TMPDIR, or use --executor serial",
            ) from error
        except BaseException:
            self.close()
            raise

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        backlog = Backlog(jobs, self._by_value)
        packed: PackedJob | None = None
        while True:
            # Jobs are written to idle workers only, so that the two sides cannot block each other.
            for place, worker in enumerate(self._workers):
                while worker.job is None and (packed := packed or backlog.take(len(self._workers))) is not None:
                    try:
                        worker.send(packed)
                        packed = None
                    except (BrokenPipeError, OSError):
                        worker = self._replace(place, backlog)
            # Yielded after jobs were sent: workers do not wait while the caller uses outcomes or makes the next job.
            yield from backlog.outcomes()
            packed = packed or backlog.take(len(self._workers))
            if not any(worker.job for worker in self._workers):
                if packed is None:
                    return
                continue
            for place in self._readable():
                worker = self._workers[place]
                assert worker.job is not None or worker.opening
                try:
                    answer = worker.receive()
                except EOFError:
                    if worker.job is not None:
                        backlog.lost(*worker.job)
                    self._replace(place, backlog)
                    continue
                if worker.opening:
                    worker.opening = False
                    if not any(other.opening for other in self._workers):
                        self._report("")
                    continue
                assert worker.job is not None
                number, job = worker.job
                worker.job = None
                backlog.done(number, job, answer)

    def _readable(self) -> list[int]:
        with selectors.DefaultSelector() as selector:
            for place, worker in enumerate(self._workers):
                if worker.job is not None or worker.opening:
                    selector.register(worker.stdout, selectors.EVENT_READ, place)
            starting = any(worker.opening for worker in self._workers)
            with self._clock.measure(f"{START}workers" if starting else WAIT):
                return [key.data for key, _ in selector.select()]

    def _replace(self, place: int, backlog: Backlog) -> _Worker:
        """Start a new process for one that died; its job, if any, is run again."""
        dead = self._workers[place]
        dead.end()
        number, during = (dead.job[0], f"client {dead.job[1].client}'s turn") if dead.job else (-1, "starting up")
        backlog.count_death(number, during, f"exit code {dead.process.returncode}")
        self._workers[place] = _Worker(self._recipe, self._clock, self._by_value)
        return self._workers[place]

    def close(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
