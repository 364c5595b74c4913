"""The side of clients, as the server or the router of peers' messages sees it: jobs go out, outcomes come back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Protocol, Self

from sparsona.core.errors import SparsonaError
from sparsona.core.method import Round, State, Work
from sparsona.core.tree import loaded
from sparsona.engine.collusion import collude_in_round
from sparsona.engine.context import ClientContext
from sparsona.engine.jobs import Executor, Job, Outcome
from sparsona.engine.turn import adapted_work, begin


class Clients(Protocol):
    """Clients that accept jobs, in this process or elsewhere.

    `states` holds the States of clients in this process; it is empty for clients elsewhere. `tuned` likewise holds the
    models after final tuning.
    """

    states: dict[int, State]
    tuned: dict[int, Work]

    @property
    def encodes(self) -> bool:
        """Whether messages to them are bytes."""
        ...

    def at(self, states: Mapping[int, State]) -> Clients:
        """The same clients with these states."""
        ...

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Run jobs; yields their outcomes in order, without what stays on a client."""
        ...

    def keep(self, client: int) -> None:
        """Commit the new State of the client whose outcome came last: its update has arrived."""
        ...

    def used(self, client: int) -> None:
        """The answer of this client was used: what was refused before no longer counts against it."""
        ...

    def refuses(self, client: int, error: SparsonaError) -> bool:
        """Whether a round goes on without this client, whose message cannot be used; otherwise the error is raised."""
        ...

    def blank_state(self, client: int) -> State:
        """A value with the structure of this client's entry in `states`, to read a stored one into."""
        ...

    def blank_tuned(self, job: Job) -> Work:
        """A value with the structure of an entry in `tuned`; `job` evaluates the model that would be tuned."""
        ...

    def saved(self, states: Mapping[int, State], tuned: Mapping[int, Work]) -> None:
        """These are on disk now: a run that is resumed goes back to them."""
        ...

    def wanted(self, client: int, round_: Round, available: tuple[int, ...]) -> tuple[int, ...] | None:
        """Those of the available peers whose messages this peer requests; None: its neighbours in the graph."""
        ...


class LocalClients:
    """Clients in this process: their states, and an executor that runs their turns; None: no turn will be run."""

    def __init__(
        self, context: ClientContext, executor: Executor | None, states: Mapping[int, State] | None = None
    ) -> None:
        self.context, self._executor = context, executor
        self.states: dict[int, State] = dict(states or {})
        self.tuned: dict[int, Work] = {}
        self._last: tuple[int, State] | None = None

    @property
    def encodes(self) -> bool:
        return self._executor is not None and self._executor.encodes  # read late: it may be opened after the engine

    def at(self, states: Mapping[int, State]) -> Self:
        return type(self)(self.context, self._executor, states)

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        assert self._executor is not None
        spill_store, attack = self.context.spill_store, self.context.plan.attack
        outcomes: Iterable[Outcome]
        if attack is not None and attack.colludes:
            outcomes = collude_in_round(self.context, self._executor, map(self.with_state, jobs))
        else:
            outcomes = self._executor.run(map(self.with_state, jobs))
        for outcome in outcomes:
            self._last = (outcome.client, outcome.state)
            if outcome.work is not None:
                self.tuned[outcome.client] = outcome.work
                spill_store.store(outcome.work)
            yield outcome.public

    def keep(self, client: int) -> None:
        assert self._last is not None
        assert self._last[0] == client
        if not self.context.plan.stateless:
            self.states[client] = self._last[1]
            self.context.spill_store.store(self._last[1])

    def used(self, client: int) -> None:
        pass  # nothing is refused here

    def refuses(self, client: int, error: SparsonaError) -> bool:
        return False  # a fault of this process, or of the method

    def blank_state(self, client: int) -> State:
        return self.context.fresh_state(client)

    def blank_tuned(self, job: Job) -> Work:
        return begin(self.context, self.with_state(job)).work  # adapting changes no shape, and reads data

    def saved(self, states: Mapping[int, State], tuned: Mapping[int, Work]) -> None:
        pass

    def work(self, job: Job) -> Work:
        """The model that a client would use if it received this job's messages."""
        return adapted_work(self.context, begin(self.context, self.with_state(job)))

    def wanted(self, client: int, round_: Round, available: tuple[int, ...]) -> tuple[int, ...] | None:
        half = self.context.method.peer
        if half is None or half.wants is None:
            return None
        state = self.states.get(client)
        found = self.context.fresh_state(client) if state is None else loaded(state)
        return half.wants(found, round_.on(self.context.clients[client]), available)

    def with_state(self, job: Job) -> Job:
        """A job with the client's State, still stored if it goes to another process."""
        state = None if self.context.plan.stateless else self.states.get(job.client)
        return replace(job, state=state if self.encodes else loaded(state))
