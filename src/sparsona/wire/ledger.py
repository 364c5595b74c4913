"""Counts the bytes that travel, as sent and as the papers count them. Free of torch."""

# ruff: noqa: A002 - a round is called round, here as everywhere

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparsona.wire.format import paper_size, sizes_of

if TYPE_CHECKING:
    from sparsona.core.update import Update


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes to the server or a neighbour (up) and from it (down); `paper_*` count four bytes per float value only."""

    up: int = 0
    down: int = 0
    paper_up: int = 0
    paper_down: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.up + other.up,
            self.down + other.down,
            self.paper_up + other.paper_up,
            self.paper_down + other.paper_down,
        )

    @property
    def total(self) -> int:
        return self.up + self.down


def paper_bytes(update: Update) -> int:
    """Bytes of an update as the papers count them: four for each float value; masks are free."""
    return paper_size(sizes_of(update))


class Ledger:
    """What each client sent and received in each round. A message sent twice is counted twice."""

    def __init__(self) -> None:
        self._entries: defaultdict[tuple[int, int], Traffic] = defaultdict(Traffic)
        # Running sums, so that asking after every round does not cost a pass over all rounds.
        self._rounds: defaultdict[int, Traffic] = defaultdict(Traffic)
        self._clients: defaultdict[int, Traffic] = defaultdict(Traffic)
        self._total = Traffic()

    def down(self, round: int, client: int, data: bytes | int, update: Update) -> None:
        """A message to a client: its bytes, or their exact number where a simulation skipped the copy."""
        self.add(round, client, Traffic(down=_length(data), paper_down=paper_bytes(update)))

    def up(self, round: int, client: int, data: bytes | int, update: Update) -> None:
        """A message from a client: its bytes, or their exact number where a simulation skipped the copy."""
        self.add(round, client, Traffic(up=_length(data), paper_up=paper_bytes(update)))

    def add(self, round: int, client: int, traffic: Traffic) -> None:
        """Count what is already summed, such as the stored rows of a run that is taken up again."""
        self._entries[round, client] += traffic
        self._rounds[round] += traffic
        self._clients[client] += traffic
        self._total += traffic

    def of(self, round: int, client: int) -> Traffic:
        return self._entries.get((round, client), Traffic())

    def of_round(self, round: int) -> Traffic:
        return self._rounds.get(round, Traffic())

    def of_client(self, client: int) -> Traffic:
        return self._clients.get(client, Traffic())

    def totals(self) -> Traffic:
        return self._total

    def busiest_node(self, server: bool = True) -> int:
        """Bytes in and out of the busiest node so far.

        With a server that is the server, through which everything passes. Without one it is the busiest client, whose
        messages must then be recorded at both ends: `up` at the sender and `down` at the receiver.
        """
        if server:
            return self._total.total
        return max((traffic.total for traffic in self._clients.values()), default=0)


def _length(data: bytes | int) -> int:
    return data if isinstance(data, int) else len(data)
