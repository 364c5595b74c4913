"""Compaction: messages in as few bytes as their content allows, read back bit for bit.

docs/wire-format.md says how. What is received, and so every result, stays as it is without it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec

from sparsona.core.errors import SparsonaError
from sparsona.core.round import Round
from sparsona.core.transform import Memory, Way
from sparsona.core.update import PartSize, Update


@dataclass(frozen=True)
class Compact:
    """Masks and values are written as what is shortest, anywhere in a chain: it changes neither."""

    way: Way = "both"
    name = "compact"
    for_changes = False
    compacts = True

    def __post_init__(self) -> None:
        if find_spec("zstandard") is None:
            raise SparsonaError(
                "the transform 'compact' needs the package zstandard, which is not installed",
                expected="the extra 'peers'",
                hint="pip install 'sparsona[peers]'",
            )

    def describe(self) -> str:
        return "compacted without loss"

    def send(self, update: Update, memory: Memory, round_: Round) -> tuple[Update, Memory]:
        return replace(update, compact=True), {}

    def receive(self, update: Update) -> Update:
        return replace(update, compact=False)

    def size(self, part: PartSize) -> PartSize:
        return part

    def keeps(self, part: PartSize) -> bool:
        return False
