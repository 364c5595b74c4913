"""Half precision: two bytes a value."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparsona.core.round import Round
from sparsona.core.transform import Memory, Way, plain
from sparsona.core.update import Part, PartSize, Update

LARGEST = 65504.0


@dataclass(frozen=True)
class Half:
    """Values are rounded to the nearest float16; a finite one beyond its range becomes the largest."""

    way: Way = "both"
    name = "half"
    for_changes = False
    compacts = False

    def describe(self) -> str:
        return "half precision"

    def send(self, update: Update, memory: Memory, round_: Round) -> tuple[Update, Memory]:
        parts = {name: part if part.is_mask else _halve(part.plain()) for name, part in update.parts.items()}
        return replace(update, parts=parts), {}

    def receive(self, update: Update) -> Update:
        return plain(update)

    def size(self, part: PartSize) -> PartSize:
        return replace(part, bits=16)

    def keeps(self, part: PartSize) -> bool:
        return False


def _halve(part: Part) -> Part:
    values = part.values
    # NaN and infinity are kept: a diverged client must not look like one with large weights.
    return part.carrying(values.clamp(-LARGEST, LARGEST).where(values.isfinite(), values).half())
