"""Top-k with error feedback: only the largest changes are sent, and what is held back is added to the next ones.

Papers: Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, NeurIPS 2018; Lin et al., Deep Gradient Compression, ICLR
2018.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from sparsona.core.errors import SparsonaError
from sparsona.core.round import Round
from sparsona.core.transform import Memory, Way, plain
from sparsona.core.tree import Tree
from sparsona.core.update import Part, PartSize, Support, Update, places


@dataclass(frozen=True)
class TopK:
    """Of each part, the share `rate` of its values that is largest in magnitude, with a bitmap of their entries.

    What a client held back is a flat buffer over the part's whole layout: if its mask moves, the values outside stay
    there until it covers them again.
    """

    rate: float = 0.1
    name = "topk"
    way: ClassVar[Way] = "up"
    for_changes = True
    compacts = False

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise SparsonaError(f"a share of {self.rate} of the values", expected="above 0, at most 1", hint="topk:0.1")

    def describe(self) -> str:
        return f"the largest {self.rate:.4g} of a change, the rest kept for later"

    def send(self, update: Update, memory: Memory, round_: Round) -> tuple[Update, Memory]:
        parts, kept = dict(update.parts), dict(memory)
        for name, part in update.parts.items():
            if not part.is_mask:
                parts[name], kept[name] = self._send(part.plain(), memory.get(name))
        return replace(update, parts=parts), kept

    def receive(self, update: Update) -> Update:
        return plain(update)

    def size(self, part: PartSize) -> PartSize:
        return replace(part, num_values=self.number(part.num_values), support=Support.BITS, ones=None)

    def keeps(self, part: PartSize) -> bool:
        return True

    def number(self, num_values: int) -> int:
        """How many of `num_values` values are sent: at least one."""
        # 0.07 * 100 is 7.000000000000001, which must not round up to 8.
        return min(num_values, max(1, math.ceil(round(self.rate * num_values, 6))))

    def _send(self, part: Part, before: Tree | None) -> tuple[Part, Tree]:
        """What is sent of a part, and what is left, over the whole layout."""
        import torch

        values, layout = part.values, part.layout
        where = None if part.support is Support.DENSE else places(_mask_of(part))
        left = values.new_zeros(layout.size) if before is None else before.flat.to(values.device, copy=True)
        total = values + (left if where is None else left[where])
        # A stable sort: among equal magnitudes, the choice must not depend on the machine.
        chosen = total.abs().argsort(descending=True, stable=True)[: self.number(len(total))].sort().values
        sent = total[chosen]
        total[chosen] = 0
        if where is None:
            left, at = total, chosen
        else:
            left[where], at = total, where[chosen]
        flags = torch.zeros(layout.size, dtype=torch.bool, device=left.device)
        flags[at] = True
        largest = replace(part.carrying(sent), support=Support.BITS, mask=Tree(layout, flags), digest=b"", seed=b"")
        return largest, Tree(layout, left)


def _mask_of(part: Part) -> Tree:
    if part.mask is None:
        raise SparsonaError("a part for top-k whose mask is not here", expected="a part made with `dense` or `masked`")
    return part.mask
