"""Several worker processes, one thread each. Same bits as `serial`, on all cores."""

from __future__ import annotations

import contextlib
import io
import os
import selectors
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import cloudpickle

from sparsona.core.errors import SparsonaError
from sparsona.engine.context import ClientContext
from sparsona.engine.failures import OVERDUE
from sparsona.engine.jobs import Job, Outcome, Report
from sparsona.engine.profiler import START, WAIT, Clock
from sparsona.engine.tempdirs import claim, make_folder
from sparsona.executors.backlog import TRIES, Backlog, PackedJob, not_started
from sparsona.executors.worker import is_importable, open_answer, read_frame, start_command, write_body, write_frame

# The environment of a process that trains on one thread. Memory that a step frees is kept for the next: requesting it
# again, page by page, takes a tenth of a step.
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**29)}
PREFIX = "sparsona-data-"  # of folders that hold the data for workers
REPORT_SECONDS = 1.0  # that idle workers have, together, to report what they measured
END_SECONDS = 2.0  # that workers have, together, to end before they are killed: one may be stopped
SLOW_SECONDS = 30.0  # after which, again and again, it is reported whose turn is waited for


def num_cores() -> int:
    """The number of cores that this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Worker:
    """One process and its two pipes."""

    def __init__(
        self, recipe: bytes, clock: Clock, by_value: bool, environment: Mapping[str, str] | None = None
    ) -> None:
        self._clock, self._number = clock, clock.add_worker()
        self.process = subprocess.Popen(
            start_command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**MEMORY, **os.environ, **THREADS, **(environment or {})},
            process_group=0,  # a terminal sends Ctrl-C to a whole group, and only the parent handles it
        )
        self.stdin = cast(BinaryIO, self.process.stdin)
        # Unbuffered: the selector would not see an answer that a buffer had read together with the one before.
        self.stdout: io.RawIOBase = cast(Any, self.process.stdout).raw
        self.job: tuple[int, Job] | None = None
        self.since = time.monotonic()  # when it began what it is doing
        self.opening = True
        with contextlib.suppress(OSError):  # it is dead: whoever reads from it will see
            write_frame(self.stdin, (clock.is_on, by_value))
            write_frame(self.stdin, ("open", recipe))

    def send(self, packed: PackedJob) -> None:
        self.job = (packed.number, packed.job)
        if not self.opening:
            self.since = time.monotonic()
        with self._clock.measure("pipe"):
            write_body(self.stdin, packed.body)

    def receive(self) -> Any:
        with self._clock.measure("pipe"):
            message = read_frame(self.stdout)
        answer, report = open_answer(message)
        self._clock.record_worker(self._number, report)
        return answer

    def report(self, seconds: float) -> None:
        """Have an idle worker report what it measured since its last job: its idle time."""
        if not self._clock.is_on or self.job is not None or self.opening:
            return
        with contextlib.suppress(OSError, EOFError), selectors.DefaultSelector() as selector:
            write_frame(self.stdin, ("report", None))
            selector.register(self.stdout, selectors.EVENT_READ)
            if selector.select(seconds):
                self.receive()

    def close(self) -> None:
        """Close the pipes of a process that has ended: before, what a full one still holds would be waited for."""
        for pipe in (self.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                cast(BinaryIO, pipe).close()
        self._clock.end_worker(self._number)


def end_workers(workers: Sequence[Worker]) -> None:
    """End these processes: by a request, and those that do not follow it by force."""
    deadline = time.monotonic() + REPORT_SECONDS
    for worker in workers:
        worker.report(max(0.0, deadline - time.monotonic()))
    for worker in workers:
        worker.process.terminate()
    deadline = time.monotonic() + END_SECONDS
    for worker in workers:
        try:
            worker.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # in the kernel, where no signal reaches it yet
                worker.process.wait(END_SECONDS / 2)
        worker.close()


class Workers:
    """The executor for a CPU with several cores."""

    encodes = True

    def __init__(
        self, context: ClientContext, num_workers: int | None = None, report: Report = lambda text: None
    ) -> None:
        self._clock, self._report, self._context = context.clock, report, context
        self._failed_starts = 0  # in a row
        self._reported = time.monotonic()
        num_workers = num_workers or num_cores()
        report(f"starting {num_workers} worker{'s' * (num_workers > 1)}")
        self._workers: list[Worker] = []
        self._folder: Path | None = None
        try:
            self._folder = make_folder(PREFIX)
            claim(self._folder)
            context.federation.save(self._folder)
            fields = {name: getattr(context, name) for name in ("task", "make_method", "plan", "capacities")}
            self._recipe = cloudpickle.dumps((fields, str(self._folder), None))
            self._by_value = not is_importable(context.make_method)
            for _ in range(num_workers):
                self._workers.append(Worker(self._recipe, self._clock, self._by_value))
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
                    except OSError:  # it died: another process has the job
                        worker.job = None
                        worker = self._replace(place)
            # Yielded after jobs were sent: workers do not wait while the caller uses outcomes or makes the next job.
            yield from backlog.outcomes()
            packed = packed or backlog.take(len(self._workers))
            if not any(worker.job for worker in self._workers):
                if packed is None:
                    backlog.end()
                    return
                continue
            for place in self._readable():
                worker = self._workers[place]
                assert worker.job is not None or worker.opening
                try:
                    answer = worker.receive()
                except EOFError:
                    self._bury(place, backlog)
                    continue
                if worker.opening:
                    worker.opening, worker.since, self._failed_starts = False, time.monotonic(), 0
                    if not any(other.opening for other in self._workers):
                        self._report("")
                    continue
                assert worker.job is not None
                number, job = worker.job
                worker.job = None
                backlog.done(number, job, answer)
            self._check_turns(backlog)

    def _readable(self) -> list[int]:
        """The places of workers that have answered or died; none, if there is something to say or to end."""
        with selectors.DefaultSelector() as selector:
            for place, worker in enumerate(self._workers):
                if worker.job is not None or worker.opening:
                    selector.register(worker.stdout, selectors.EVENT_READ, place)
            starting = any(worker.opening for worker in self._workers)
            patience, limit = SLOW_SECONDS / 2, self._context.plan.turn_seconds
            if limit is not None:
                ends = (worker.since + limit for worker in self._workers if worker.job and not worker.opening)
                patience = max(0.0, min([patience, *(end - time.monotonic() for end in ends)]))
            with self._clock.measure(f"{START}workers" if starting else WAIT):
                return [key.data for key, _ in selector.select(patience)]

    def _check_turns(self, backlog: Backlog) -> None:
        """Report whose turn takes long, and end those that take longer than they may."""
        now, limit = time.monotonic(), self._context.plan.turn_seconds
        for place, worker in enumerate(self._workers):
            if limit is not None and worker.job is not None and not worker.opening and now - worker.since >= limit:
                number, job = worker.job
                worker.job = None
                self._replace(place)
                backlog.give_up(number, job, OVERDUE.format(seconds=limit))
        working = [worker for worker in self._workers if worker.job is not None or worker.opening]
        slowest = min(working, key=lambda worker: worker.since, default=None)
        if slowest is None or now - max(slowest.since, self._reported) < SLOW_SECONDS:
            return
        self._reported = now
        what = "a worker to start"
        if slowest.job is not None and not slowest.opening:
            what = f"client {self._context.clients[slowest.job[1].client].label}"
        self._report(f"waiting for {what} for {now - slowest.since:.0f} s (process {slowest.process.pid})")

    def _bury(self, place: int, backlog: Backlog) -> None:
        """Give a dead worker's job to another process, and start one in its place."""
        dead = self._workers[place]
        end_workers([dead])
        cause = f"exit code {dead.process.returncode}"
        if dead.opening:
            self._failed_starts += 1
            if self._failed_starts >= TRIES:
                raise not_started(cause)
        if dead.job is not None:
            (backlog.lost if dead.opening else partial(backlog.died, cause=cause))(*dead.job)
        self._start_anew(place)

    def _replace(self, place: int) -> Worker:
        """Another process in place of one that has no job any more."""
        self._workers[place].process.kill()
        end_workers([self._workers[place]])
        return self._start_anew(place)

    def _start_anew(self, place: int) -> Worker:
        try:
            self._workers[place] = Worker(self._recipe, self._clock, self._by_value)
        except OSError as error:
            raise not_started(str(error)) from error
        return self._workers[place]

    def close(self) -> None:
        end_workers(self._workers)
        self._workers.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
