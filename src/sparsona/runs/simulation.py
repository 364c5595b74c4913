"""A run whose clients are all in this process, or in processes that it starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count

from sparsona.engine.clients import Clients, LocalClients
from sparsona.engine.context import ClientContext
from sparsona.engine.jobs import Executor, Job, Outcome, Report
from sparsona.engine.profiler import OTHER, Clock
from sparsona.executors import numeric_mode, open_executor
from sparsona.runs.session import Listen
from sparsona.runs.traits import TraitRecord, has_traits


class Simulation:
    """The side of a session that simulates its clients.

    Args:
        client_context: the side of clients, with everybody's data.
    """

    def __init__(self, client_context: ClientContext) -> None:
        self.client_context, self.context = client_context, client_context.server_side
        self._executor = _ReportingExecutor(client_context.clock)
        self.clients: Clients = LocalClients(client_context, self._executor)

    def numeric_mode(self) -> AbstractContextManager[None]:
        return numeric_mode(self.client_context)

    @contextmanager
    def open(self, executor: str, report: Report, listen: Listen) -> Iterator[None]:
        self._executor.open(open_executor(executor, self.client_context, report), listen)
        try:
            yield
        finally:
            self._executor.close()

    def traits(self) -> TraitRecord | None:
        return TraitRecord(self.client_context) if has_traits(self.client_context) else None


class _ReportingExecutor:
    """An executor whose every outcome is reported. It is opened when a run is played."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self.encodes = clock, False
        self._executor: Executor | None = None

    def open(self, executor: Executor, listen: Listen) -> None:
        self._executor, self._listen, self.encodes = executor, listen, executor.encodes

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        assert self._executor is not None, "not open yet"
        kind = ""

        def seen() -> Iterator[Job]:
            nonlocal kind
            for job in jobs:
                kind = job.do
                yield job

        outcomes = self._executor.run(seen())
        for done in count(1):
            with self._clock.measure(OTHER):  # not time of the server, which iterates over outcomes
                outcome = next(outcomes, None)
                if outcome is None:
                    return
                self._listen(kind, done)
            yield outcome

    def close(self) -> None:
        if self._executor is not None:
            self._executor.close()
