"""Jobs for other processes: taken a few at a time, given out again when a process dies, their outcomes put in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

from sparsona.core.errors import MachineError, SparsonaError
from sparsona.engine.failures import DIED
from sparsona.engine.jobs import Job, Outcome, settle
from sparsona.executors.worker import pack

AHEAD = 4  # jobs for each process that may start before the outcome of the first is yielded
TRIES = 3  # after a job has killed its process this often, its client loses the turn


class PackedJob:
    """A job, its number, and its bytes for another process. `is_repeated`: a process died of it, or beside it."""

    def __init__(self, number: int, job: Job, body: bytes, is_repeated: bool) -> None:
        self.number, self.job, self.body, self.is_repeated = number, job, body, is_repeated


class Backlog:
    """The jobs of one `Executor.run` until their outcomes have been yielded.

    Args:
        jobs: the jobs, taken as processes become free.
        by_value: jobs are packed with classes that another process cannot import.
        encodes: messages are sent as bytes; otherwise as updates, which arrive on the device that they were on.
    """

    def __init__(self, jobs: Iterable[Job], by_value: bool, encodes: bool = True) -> None:
        self._waiting, self._by_value, self._encodes = enumerate(jobs), by_value, encodes
        self._again: deque[tuple[int, Job]] = deque()
        self._deaths: dict[int, int] = {}
        self._ready: dict[int, Outcome] = {}
        self._next = self._taken = self._num_given_up = self._num_done = 0

    def take(self, processes: int) -> PackedJob | None:
        """The next job for one of so many processes; None: no job may be started now."""
        if self._again:
            return self._packed(*self._again.popleft())
        # Outcomes wait for those before them: behind a slow job they must not accumulate.
        item = None if self._taken - self._next >= AHEAD * processes else next(self._waiting, None)
        if item is None:
            return None
        self._taken += 1
        return self._packed(*item)

    def _packed(self, number: int, job: Job) -> PackedJob:
        sent = job.packed() if self._encodes else replace(job, resend=None)
        return PackedJob(number, job, pack(("job", sent), self._by_value), number in self._deaths)

    def done(self, number: int, job: Job, outcome: Outcome) -> None:
        """Keep an outcome until it is its turn, or the job for another try if the client lacked a mask."""
        if (instead := settle(job, outcome)) is not None:
            self._again.append((number, instead))
        else:
            self._ready[number] = outcome
            self._num_done += 1

    def lost(self, number: int, job: Job) -> None:
        """Give out a job once more: its process ended before it began."""
        self._again.append((number, job))

    def died(self, number: int, job: Job, cause: str) -> None:
        """Give out a job once more whose process died; after TRIES of them its client loses the turn."""
        self._deaths[number] = self._deaths.get(number, 0) + 1
        if self._deaths[number] < TRIES:
            self._again.append((number, job))
        else:
            self.give_up(number, job, DIED.format(times=TRIES, cause=cause))

    def give_up(self, number: int, job: Job, why: str) -> None:
        """Let a client lose its turn; raises SparsonaError if those of all others were lost, too."""
        self._ready[number] = Outcome(job.client, failure=why)
        self._num_given_up += 1
        if self._num_given_up >= TRIES:
            self._check(why)
        self._last_reason = why

    def end(self) -> None:
        """All outcomes were yielded; raises SparsonaError if there is not one among them: a run without clients."""
        if self._num_given_up:
            self._check(self._last_reason)

    def _check(self, why: str) -> None:
        if not self._num_done:
            raise SparsonaError(
                f"no client's turn comes to its end; of the last one: {why}",
                expected="workers that keep running (-9 usually means that memory ran out), within turn_seconds",
                hint="use --executor serial, a smaller model or a smaller batch, or raise turn_seconds",
            )

    def outcomes(self) -> Iterator[Outcome]:
        """The outcomes whose turn has come."""
        while self._next in self._ready:
            yield self._ready.pop(self._next)
            self._next += 1


def not_started(cause: str) -> SparsonaError:
    """The error for processes that die before they can do anything."""
    return MachineError(
        f"worker processes do not start: {cause}",
        expected="workers that start; -9 usually means that memory ran out",
        hint="use --executor serial, or free some memory",
    )
