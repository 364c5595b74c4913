"""Gaussian noise on changes, drawn by the client: after `clip`, the mechanism of client-side differential privacy.

Epsilon is computed of `--privacy` (transforms/privacy.py), not of this transform.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from sparsona.core.errors import SparsonaError
from sparsona.core.round import Round
from sparsona.core.seeds import generator
from sparsona.core.transform import Memory, Way, plain
from sparsona.core.update import PartSize, Update


@dataclass(frozen=True)
class Noise:
    """To each value sent, an independent normal draw of standard deviation `std` is added."""

    std: float = 0.01
    name = "noise"
    way: ClassVar[Way] = "up"
    for_changes = True
    compacts = False

    def __post_init__(self) -> None:
        if not (self.std > 0 and math.isfinite(self.std)):
            raise SparsonaError(
                f"a standard deviation of {self.std}", expected="a finite number above 0", hint="noise:0.01"
            )

    def describe(self) -> str:
        return f"Gaussian noise of standard deviation {self.std:.4g}"

    def send(self, update: Update, memory: Memory, round_: Round) -> tuple[Update, Memory]:
        import torch

        draws = generator(round_.seeds.secret("noise"))
        parts = dict(update.parts)
        for name, part in plain(update).parts.items():
            if not part.is_mask:
                drawn = torch.randn(part.num_values, generator=draws).to(part.values.device)
                parts[name] = part.carrying(part.values + self.std * drawn)
        return replace(update, parts=parts), {}

    def receive(self, update: Update) -> Update:
        return plain(update)

    def size(self, part: PartSize) -> PartSize:
        return part

    def keeps(self, part: PartSize) -> bool:
        return False
