"""Several worker processes, one thread each. Same bits as `serial`, on all cores."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import selectors
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import cloudpickle

from sparsona.core.errors import SparsonaError
from sparsona.engine.context import ClientContext
from sparsona.engine.jobs import Job, Outcome, Report, settle
from sparsona.engine.profiler import START, WAIT, Clock
from sparsona.engine.tempdirs import claim, make_folder
from sparsona.executors.worker import pack, read_frame, write_body, write_frame

AHEAD = 4  # jobs for each worker that may start before the outcome of the first is yielded
TRIES = 3  # after a job has killed its worker this often, the run fails
PREFIX = "sparsona-data-"  # of folders that hold the data for workers


def num_cores() -> int:
    """The number of cores that this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _is_importable(make_method: Any) -> bool:
    """Whether another process can import a method's classes: not those of a script, a notebook or a function."""
    try:
        return b"__main__" not in pickle.dumps(make_method)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False


class _Packed:
    """A job, its number, and its bytes for a worker."""

    def __init__(self, number: int, job: Job, by_value: bool) -> None:
        self.number, self.job = number, job
        self.body = pack(("job", job.packed()), by_value)


class _Worker:
    """One process and its two pipes."""

    def __init__(self, recipe: bytes, clock: Clock, by_value: bool) -> None:
        self._clock, self._number = clock, clock.add_worker()
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        # Memory that a step frees is kept for the next: requesting it again, page by page, takes a tenth of a step.
        memory = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**29)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sparsona.executors.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**memory, **os.environ, **threads},
            process_group=0,  # a terminal sends Ctrl-C to a whole group, and only the parent handles it
        )
        self.stdin = cast(BinaryIO, self.process.stdin)
        # Unbuffered: the selector would not see an answer that a buffer had read together with the one before.
        self.stdout: io.RawIOBase = cast(Any, self.process.stdout).raw
        self.job: tuple[int, Job] | None = None
        self.opening = True
        write_frame(self.stdin, (sys.path, clock.is_on, by_value))
        write_frame(self.stdin, ("open", recipe))

    def send(self, packed: _Packed) -> None:
        self.job = (packed.number, packed.job)
        with self._clock.measure("pipe"):
            write_body(self.stdin, packed.body)

    def receive(self) -> Any:
        with self._clock.measure("pipe"):
            kind, value = read_frame(self.stdout)
        if kind == "error":
            raise value
        if kind == "crash":
            raise RuntimeError(f"a worker process failed:\n{value}")
        answer, report = value
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
            self._by_value = not _is_importable(context.make_method)
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
        waiting = enumerate(jobs)
        again: deque[tuple[int, Job]] = deque()  # jobs whose worker died
        tries: dict[int, int] = {}
        ready: dict[int, Outcome] = {}
        next_number = taken = 0

        def following() -> _Packed | None:
            nonlocal taken
            if again:
                return _Packed(*again.popleft(), self._by_value)
            # Outcomes wait for those before them: behind a slow job they must not accumulate.
            item = None if taken - next_number >= AHEAD * len(self._workers) else next(waiting, None)
            if item is None:
                return None
            taken += 1
            return _Packed(*item, self._by_value)

        packed: _Packed | None = None
        while True:
            # Jobs are written to idle workers only, so that the two sides cannot block each other.
            for place, worker in enumerate(self._workers):
                while worker.job is None and (packed := packed or following()) is not None:
                    try:
                        worker.send(packed)
                        packed = None
                    except (BrokenPipeError, OSError):
                        worker = self._replace(place, tries)
            # Yielded after jobs were sent: workers do not wait while the caller uses outcomes or makes the next job.
            while next_number in ready:
                yield ready.pop(next_number)
                next_number += 1
            packed = packed or following()
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
                        again.append(worker.job)
                    self._replace(place, tries)
                    continue
                if worker.opening:
                    worker.opening = False
                    if not any(other.opening for other in self._workers):
                        self._report("")
                    continue
                assert worker.job is not None
                number, job = worker.job
                worker.job = None
                if (instead := settle(job, answer)) is not None:
                    again.append((number, instead))
                else:
                    ready[number] = answer

    def _readable(self) -> list[int]:
        with selectors.DefaultSelector() as selector:
            for place, worker in enumerate(self._workers):
                if worker.job is not None or worker.opening:
                    selector.register(worker.stdout, selectors.EVENT_READ, place)
            starting = any(worker.opening for worker in self._workers)
            with self._clock.measure(f"{START}workers" if starting else WAIT):
                return [key.data for key, _ in selector.select()]

    def _replace(self, place: int, tries: dict[int, int]) -> _Worker:
        """Start a new process for one that died; its job, if any, is run again."""
        dead = self._workers[place]
        dead.end()
        number, client = (dead.job[0], f"client {dead.job[1].client}'s turn") if dead.job else (-1, "starting up")
        tries[number] = tries.get(number, 0) + 1
        if tries[number] >= TRIES:
            raise SparsonaError(
                f"a worker process died {TRIES} times during {client} (exit code {dead.process.returncode})",
                expected="workers that keep running; -9 usually means that memory ran out",
                hint="use --executor serial, a smaller model or a smaller batch",
            )
        self._workers[place] = _Worker(self._recipe, self._clock, self._by_value)
        return self._workers[place]

    def close(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
