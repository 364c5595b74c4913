"""Clipping: the norm of a client's change is limited, so that none outweighs the others."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from sparsona.core.errors import SparsonaError
from sparsona.core.round import Round
from sparsona.core.transform import Memory, Way, plain
from sparsona.core.update import PartSize, Update


@dataclass(frozen=True)
class Clip:
    """A message whose Euclidean norm, over all its parts together, exceeds `norm` is scaled down to it."""

    norm: float = 1.0
    name = "clip"
    way: ClassVar[Way] = "up"
    for_changes = True
    compacts = False

    def __post_init__(self) -> None:
        if not (self.norm > 0 and math.isfinite(self.norm)):
            raise SparsonaError(f"a norm of {self.norm}", expected="a finite number above 0", hint="clip:1.0")

    def describe(self) -> str:
        return f"changes clipped to norm {self.norm:.4g}"

    def send(self, update: Update, memory: Memory, round_: Round) -> tuple[Update, Memory]:
        update = plain(update)
        values = {name: part.values for name, part in update.parts.items() if not part.is_mask}
        length = math.sqrt(sum(float(value.double().square().sum()) for value in values.values()))
        if length > self.norm and math.isfinite(length):
            short = {name: update.parts[name].carrying(value * (self.norm / length)) for name, value in values.items()}
            update = replace(update, parts={**update.parts, **short})
        return update, {}

    def receive(self, update: Update) -> Update:
        return plain(update)

    def size(self, part: PartSize) -> PartSize:
        return part

    def keeps(self, part: PartSize) -> bool:
        return False
