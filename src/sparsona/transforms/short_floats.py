"""Two bytes a value: float16, or bfloat16 with the range of float32 and two to three significant digits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from sparsona.core.round import Round
from sparsona.core.transform import Memory, Way, plain
from sparsona.core.update import Part, PartSize, Update


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
        return _shorten(update, "float16"), {}

    def receive(self, update: Update) -> Update:
        return plain(update)

    def size(self, part: PartSize) -> PartSize:
        return replace(part, bits=16)

    def keeps(self, part: PartSize) -> bool:
        return False


@dataclass(frozen=True)
class BFloat16:
    """The same with bfloat16."""

    way: Way = "both"
    name = "bf16"
    for_changes = False
    compacts = False

    def describe(self) -> str:
        return "bfloat16"

    def send(self, update: Update, memory: Memory, round_: Round) -> tuple[Update, Memory]:
        return _shorten(update, "bfloat16"), {}

    def receive(self, update: Update) -> Update:
        return plain(update)

    def size(self, part: PartSize) -> PartSize:
        return replace(part, bits=16, is_bfloat=True)

    def keeps(self, part: PartSize) -> bool:
        return False


def _shorten(update: Update, name: Literal["float16", "bfloat16"]) -> Update:
    import torch  # here: costs and lists read transforms without it

    dtype: torch.dtype = getattr(torch, name)
    largest = torch.finfo(dtype).max

    def short(part: Part) -> Part:
        values = part.values
        # NaN and infinity are kept: a diverged client must not look like one with large weights.
        return part.carrying(values.clamp(-largest, largest).where(values.isfinite(), values).to(dtype))

    parts = {name: part if part.is_mask else short(part.plain()) for name, part in update.parts.items()}
    return replace(update, parts=parts)
