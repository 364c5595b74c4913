"""Who does what in which round among peers: functions of the plan alone, so that every peer knows it of every other."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, partial

from sparsona.core.points import point, select
from sparsona.engine.context import ClientContext
from sparsona.engine.final import final_points
from sparsona.engine.gossip import graph_of, members_of
from sparsona.engine.graphs import senders
from sparsona.engine.plan import novel_clients, participation, tested_clients


class Calendar:
    """Who does what in which round, as every peer knows it.

    Args:
        context: of any peer: its data and the cards of the others do not matter.
    """

    def __init__(self, context: ClientContext) -> None:
        self._context, self._plan, self._method = context.server_side, context.plan, context.method
        self._members = members_of(self._context)
        self._tested = frozenset(tested_clients(context.plan, context.clients))
        self.who = lru_cache(maxsize=4096)(partial(participation, context.plan, context.clients))
        self.sources = lru_cache(maxsize=65536)(self._sources)

    def made(self, client: int, index: int) -> int | None:
        """The round in which a peer made its last message before a round; None: it has made none."""
        return next((at for at in range(index - 1, -1, -1) if client in self.who(at).trains), None)

    def receives(self, client: int, index: int) -> bool:
        """Whether a peer mixes messages in this round."""
        if index >= self._plan.rounds:
            return False
        who = self.who(index)
        return client in who.trains and client not in who.dropped

    def points_after(self, client: int, completed: int) -> tuple[str, ...]:
        """The points at which a peer evaluates after so many rounds, on messages that are fetched for that."""
        is_due = self._plan.tests_everyone_after(completed) if completed else not self._plan.rounds
        return select(self._plan.points, "round") if is_due and client in self._tested else ()

    def needs_all(self, client: int, index: int) -> bool:
        """Whether a peer needs the messages of all, to evaluate their mean or to tune it."""
        points = self.points_after(client, index)
        if index == self._plan.rounds:
            points += final_points(self._plan, self._method.shared_point)[0] if client in self._tested else ()
            is_novel = client in novel_clients(self._plan, self._context.clients)
            if self._plan.tune_from == "all" and self._plan.tuning_epochs(is_novel):
                return True
        return any(point(name).model == "shared" for name in points)

    def _sources(self, client: int, index: int) -> frozenset[int]:
        """From whom a peer may fetch messages for a round, for the evaluation before it, or for the end."""
        is_end = index == self._plan.rounds
        if not (is_end or self.points_after(client, index) or self.receives(client, index)):
            return frozenset()
        assert self._method.peer is not None
        found: Iterable[int] = self._members
        if self._method.peer.wants is None and not self.needs_all(client, index):
            found = senders(graph_of(self._context), self._members, client, self._plan.round_at(index).seeds)
        return frozenset(one for one in found if one != client and self.made(one, index) is not None)
