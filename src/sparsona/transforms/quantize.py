"""Stochastic quantisation: a few bits a value, unbiased.

Paper: Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, NeurIPS 2017, with the
largest magnitude of a tensor as its scale. Each value is rounded to one of its two neighbouring levels, to the nearer
one with the greater probability, so that its expectation is the value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sparsona.core.errors import SparsonaError
from sparsona.core.round import Round
from sparsona.core.seeds import generator
from sparsona.core.transform import Memory, Way, plain
from sparsona.core.tree import counts
from sparsona.core.update import Levels, Part, PartSize, Support, Update

if TYPE_CHECKING:
    from torch import Generator


@dataclass(frozen=True)
class Quantize:
    """`bits` a value, and for each tensor a scale and the number of its values."""

    bits: int = 4
    way: Way = "up"
    name = "quantize"
    for_changes = False
    compacts = False

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise SparsonaError(f"{self.bits} bits a value", expected="2 to 8", hint="for example quantize:4")

    def describe(self) -> str:
        return f"stochastic quantisation to {self.bits} bits"

    def send(self, update: Update, memory: Memory, round_: Round) -> tuple[Update, Memory]:
        # A server draws once a round for all its clients, so that equal models stay equal.
        seed = round_.seeds.shared("quantize") if round_.client is None else round_.seeds.own("quantize")
        draws = generator(seed)
        parts = {
            name: part if part.is_mask else _quantize(part.plain(), self.bits, draws)
            for name, part in update.parts.items()
        }
        return replace(update, parts=parts), {}

    def receive(self, update: Update) -> Update:
        return plain(update)

    def size(self, part: PartSize) -> PartSize:
        return replace(part, bits=self.bits)

    def keeps(self, part: PartSize) -> bool:
        return False


def _quantize(part: Part, bits: int, draws: Generator) -> Part:
    import torch

    values, numbers = part.values, part.layout.sizes
    if part.support is not Support.DENSE:
        if part.mask is None:
            raise SparsonaError(
                "a part to be quantised whose mask is not here", expected="a part made with `dense` or `masked`"
            )
        numbers = counts(part.mask)
    zero = values.new_zeros(1)
    tensors = values.split(numbers)
    scales = torch.stack([torch.cat([zero, tensor.abs()]).amax() for tensor in tensors]) if numbers else values[:0]
    levels = Levels(bits, scales, numbers)
    steps = values / levels.spread() * levels.top
    steps = steps.nan_to_num()  # 0 / 0 in a tensor of zeros; a NaN in a tensor shows in its scale
    below = steps.floor()
    up = torch.rand(len(values), generator=draws).to(values.device) < steps - below
    found = (below + up + levels.top).clamp(0, 2 * levels.top).to(torch.uint8)
    return part.carrying(found, levels)
