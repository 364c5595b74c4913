"""Bytes sent and received, on the wire and as the papers count them. Free of torch."""

from __future__ import annotations

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
    """Bytes of an update as the papers count them: four for each float value; masks are not counted."""
    return paper_size(sizes_of(update))
