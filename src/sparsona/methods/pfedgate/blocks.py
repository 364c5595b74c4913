"""Models cut into blocks that are kept or dropped as a whole. Free of torch until values are spread.

`chunks` ignores layers, as in pFedGate (section 5.2.2). `filters`, `channels` and `heads` follow what a
network computes: what they drop need not be computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from sparsona.core.errors import SparsonaError
from sparsona.core.layout import Layout, Slot
from sparsona.sparsity.erk import ROUNDING_SLACK

if TYPE_CHECKING:
    from torch import Tensor

ATTENTION = ("query", "key", "value", "projection")  # the layers of an attention, as the transformer here names them


@dataclass(frozen=True)
class Strip:
    """How one tensor, flattened, is cut: blocks `first`, `first + 1`, ... of `lengths` entries, all of it `repeats`
    times over (once for rows, once for each row where the blocks are columns)."""

    first: int
    lengths: tuple[int, ...]
    repeats: int = 1


@dataclass(frozen=True)
class Blocks:
    """Every entry of a layout in one block. `strips` gives the blocks of each tensor."""

    sizes: tuple[int, ...]  # entries of each block
    flops: tuple[int, ...]  # FLOPs of one forward pass through each block; they add up to the layout's
    always: tuple[bool, ...]  # kept whatever the scores are
    groups: tuple[int, ...]  # the budget that each block is charged to
    layout: Layout
    strips: tuple[Strip, ...]

    def __len__(self) -> int:
        return len(self.sizes)

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}  # without what is derived from them

    def owner(self) -> Tensor:
        """The block of each entry: int64, as long as the layout."""
        return self._owner

    @cached_property
    def _owner(self) -> Tensor:
        import torch

        return spread(self, torch.arange(len(self)))

    @cached_property
    def _plan(self) -> tuple[list[int], list[tuple[int, list[tuple[int, int, int]]]]]:
        """How long the segments are that the values fall into, and for each tensor how often it repeats what segments
        (their place, how many blocks they have, how many entries each of these)."""
        cuts = {0, len(self)}
        for strip in self.strips:
            before = None
            for place, length in enumerate(strip.lengths, start=strip.first):
                if length != before:
                    cuts.add(place)
                before = length
            cuts.add(strip.first + len(strip.lengths))
        ends = sorted(cuts)
        tensors = []
        for strip in self.strips:
            last = strip.first + len(strip.lengths)
            pieces = [
                (segment, end - start, strip.lengths[start - strip.first])
                for segment, (start, end) in enumerate(pairwise(ends))
                if strip.first <= start < last
            ]
            if pieces:
                tensors.append((strip.repeats, pieces))
        return [end - start for start, end in pairwise(ends)], tensors


def spread(blocks: Blocks, values: Tensor) -> Tensor:
    """The value of each entry's block: [..., blocks] -> [..., entries].

    Lengths are fixed and no index is used: the backward pass sums over stretches in a fixed order, where that of an
    index adds every entry to one of a few cells, which is slow, and on a GPU in any order.
    """
    import torch

    if values.shape[-1] != len(blocks):
        raise ValueError(f"{values.shape[-1]} values for {len(blocks)} blocks")
    counts, tensors = blocks._plan
    lead = values.shape[:-1]
    segments = values.split(counts, dim=-1)  # type: ignore[no-untyped-call]
    parts = []
    for repeats, pieces in tensors:
        row = [
            segments[place].unsqueeze(-1).expand(*lead, count, length).flatten(-2) for place, count, length in pieces
        ]
        if repeats > 1:
            joined = torch.cat(row, dim=-1).unsqueeze(-2)
            row = [joined.expand(*lead, repeats, joined.shape[-1]).flatten(-2)]
        parts += row
    return torch.cat(parts, dim=-1)


def chunks(layout: Layout, num_blocks: int, smallest: float, equal: bool = False, by_operator: bool = False) -> Blocks:
    """Every tensor flattened and cut into `num_blocks` consecutive chunks, the first of which is always kept.

    With `by_operator`, the tensors of a layer are put in a row and cut as one: weights and bias together.

    The paper's: the first chunk has floor(smallest * size) entries, the others share the rest in equal parts, the last
    shorter. With `equal`, the authors' code: all have ceil(size / num_blocks), the last shorter, and linear layers have
    a budget of their own beside that of all others. No chunk is empty: short tensors have fewer. A tensor whose first
    chunk would be empty has none that is always kept, so that with the paper's chunks the first ones never exceed
    `smallest` of all entries; the authors' may.
    """
    _check(num_blocks, smallest)
    linear = _linear_layers(layout)
    cut = _Cut(layout)
    for slots in by_layer(layout).values() if by_operator else ([slot] for slot in layout.slots):
        size = sum(slot.size for slot in slots)
        if equal:
            step = math.ceil(size / num_blocks)
            lengths, keeps_first = _steps(size, step), True
        else:
            lengths, keeps_first = _first_and_rest(size, num_blocks, smallest)
        kind = "linear" if equal and _layer(slots[0]) in linear else "all"
        cut.add(tuple(slots), len(lengths), keeps_first, kind)
        cut.lay_in_a_row(slots, lengths)
    return cut.done()


def filters(layout: Layout, num_blocks: int | None = None, smallest: float = 0.0) -> Blocks:
    """Filters as blocks: rows of a layer's weight (dimension 0, of convolutions and linear layers alike) and the same
    entries of its bias, together.

    Each layer's rows are cut as `chunks` cuts entries, into `num_blocks` of consecutive rows (a block for each row if
    None); the first block, of one row at least, is always kept. So are, as one block each, the output layer (its rows
    are the classes), norms, and what is no layer's: embeddings, and biases without a weight.
    """
    cut, whole = _Cut(layout), _whole_layers(layout)
    for name, slots in by_layer(layout).items():
        cut.filters(slots, num_blocks, smallest, whole=name in whole)
    return cut.done()


def channels(layout: Layout, num_blocks: int | None = None, smallest: float = 0.0) -> Blocks:
    """Input channels as blocks: columns of a layer's weight (dimension 1).

    A channel of a linear layer that follows convolutions is the stretch of columns that comes from one of their
    filters. Cut as `filters` cuts rows. Always kept, as one block each: the first layer, whose channels are the
    image's, biases, norms and embeddings.
    """
    cut = _Cut(layout)
    whole = _lookups(layout)
    before = None  # the filters of the layer before
    for name, slots in by_layer(layout).items():
        weight = _matrix(slots)
        if weight is None or name in whole or before is None:
            for slot in slots:
                cut.whole(slot)
        else:
            inputs = weight.shape[1]
            number = before if len(weight.shape) == 2 and inputs % before == 0 else inputs
            width = math.prod(weight.shape[1:]) // number
            lengths, _ = _first_and_rest(number, num_blocks or number, smallest, least=1)
            cut.add((weight,), len(lengths), True)
            cut.lay(weight, tuple(width * length for length in lengths), repeats=weight.shape[0])
            for slot in slots:
                if slot is not weight:
                    cut.whole(slot)
        if weight is not None and name not in whole:
            before = weight.shape[0]
    return cut.done()


def heads(layout: Layout, num_heads: int, num_blocks: int | None = None, smallest: float = 0.0) -> Blocks:
    """Attention heads as blocks: a head's rows of query, key and value and its columns of the projection, together.

    floor(smallest * num_heads) heads of each attention, one at least, are always kept. Every other layer is cut into
    filters.
    """
    cut, layers, whole = _Cut(layout), by_layer(layout), _whole_layers(layout)
    found = [name.removesuffix("query") for name in layers if name.rpartition(".")[2] == "query"]
    attentions = [stem for stem in found if all(f"{stem}{part}" in layers for part in ATTENTION)]
    if not attentions:
        raise SparsonaError(
            "this network has no attention that can be cut into heads",
            expected=f"layers named {', '.join(ATTENTION)} beside each other",
            hint="cut into filters, channels or chunks",
        )
    inside = {f"{stem}{part}": stem for stem in attentions for part in ATTENTION}
    for name, slots in layers.items():
        stem = inside.get(name)
        if stem is None:
            cut.filters(slots, num_blocks, smallest, whole=name in whole)
        elif name == f"{stem}query":
            parts = [slot for part in ATTENTION for slot in layers[f"{stem}{part}"]]
            _cut_attention(cut, parts, num_heads, smallest, f"{stem}projection")
    return cut.done()


def _cut_attention(cut: _Cut, slots: list[Slot], num_heads: int, smallest: float, projection: str) -> None:
    width = slots[0].shape[0]
    if width % num_heads:
        raise SparsonaError(f"{num_heads} heads of {width} rows", expected="a number that divides the rows")
    lengths, _ = _first_and_rest(num_heads, num_heads, smallest, least=1)
    aligned = [slot for slot in slots if _layer(slot) != projection or len(slot.shape) > 1]
    cut.add(tuple(aligned), len(lengths), True)
    for slot in aligned:
        rows = slot.shape[0] if _layer(slot) == projection else 1
        each = slot.size // rows // num_heads
        cut.lay(slot, tuple(each * length for length in lengths), repeats=rows)
    for slot in slots:
        if slot not in aligned:  # the projection's bias is of no head
            cut.whole(slot)


class _Cut:
    """Blocks in the making: `add` some for certain tensors, then `lay` them over each of these."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.strips: dict[str, Strip] = {}
        self.starts: dict[str, int] = {}
        self.always: list[bool] = []
        self.kinds: list[str] = []

    def add(self, slots: tuple[Slot, ...], number: int, keeps_first: bool, kind: str = "all") -> None:
        for slot in slots:
            self.starts[slot.name] = len(self.always)
        self.always += [keeps_first and place == 0 for place in range(number)]
        self.kinds += [kind] * number

    def lay(self, slot: Slot, lengths: tuple[int, ...], repeats: int = 1) -> None:
        self.strips[slot.name] = Strip(self.starts[slot.name], lengths, repeats)

    def lay_in_a_row(self, slots: list[Slot], lengths: tuple[int, ...]) -> None:
        """Lay blocks over the tensors one after the other: one may begin in a tensor and end in the next."""
        ends = list(accumulate(lengths, initial=0))
        begin = 0
        for slot in slots:
            end = begin + slot.size
            inside = [
                (block, min(end, after) - max(begin, before))
                for block, (before, after) in enumerate(pairwise(ends))
                if before < end and after > begin
            ]
            first = inside[0][0] if inside else 0
            self.strips[slot.name] = Strip(self.starts[slot.name] + first, tuple(length for _, length in inside))
            begin = end

    def whole(self, slot: Slot) -> None:
        self.add((slot,), min(1, slot.size), True)
        self.lay(slot, (slot.size,) if slot.size else ())

    def filters(self, slots: list[Slot], num_blocks: int | None, smallest: float, whole: bool) -> None:
        weight = _matrix(slots)
        if whole or weight is None:
            for slot in slots:
                self.whole(slot)
            return
        rows = weight.shape[0]
        lengths, _ = _first_and_rest(rows, num_blocks or rows, smallest, least=1)
        self.add(tuple(slots), len(lengths), True)
        for slot in slots:
            self.lay(slot, tuple(slot.size // rows * length for length in lengths))

    def done(self) -> Blocks:
        sizes, flops = [0] * len(self.always), [0] * len(self.always)
        strips = tuple(self.strips[slot.name] for slot in self.layout.slots)
        for slot, strip in zip(self.layout.slots, strips, strict=True):
            for block, length in enumerate(strip.lengths, start=strip.first):
                sizes[block] += strip.repeats * length
                flops[block] += strip.repeats * length * slot.flops_per_weight
        kinds = list(dict.fromkeys(self.kinds))  # groups are numbered as they appear
        groups = tuple(kinds.index(kind) for kind in self.kinds)
        return Blocks(tuple(sizes), tuple(flops), tuple(self.always), groups, self.layout, strips)


def _first_and_rest(size: int, num_blocks: int, smallest: float, least: int = 0) -> tuple[tuple[int, ...], bool]:
    """Lengths: floor(smallest * size), `least` at least, then the rest in equal parts; and whether the first is so."""
    num_blocks = max(2, num_blocks)
    _check(num_blocks, smallest, lowest=0.0 if least else None)
    first = min(size, max(least, math.floor(size * smallest * (1 + ROUNDING_SLACK))))
    rest = _steps(size - first, math.ceil((size - first) / (num_blocks - 1)))
    return ((first, *rest), True) if first else (rest, False)


def _steps(size: int, step: int) -> tuple[int, ...]:
    return tuple(min(step, size - start) for start in range(0, size, step or 1))


def _check(num_blocks: int, smallest: float, lowest: float | None = None) -> None:
    if num_blocks < 2:
        raise SparsonaError(f"{num_blocks} blocks for each tensor", expected="2 or more", hint="the paper has 5")
    if not (0 < smallest <= 1 or smallest == lowest):
        raise SparsonaError(f"a first block of {smallest} of its tensor", expected="a share above 0 and at most 1")


def _layer(slot: Slot) -> str:
    return slot.name.rpartition(".")[0]


def by_layer(layout: Layout) -> dict[str, list[Slot]]:
    """Tensors by the layer that they belong to; a parameter of no layer is one of its own."""
    found: dict[str, list[Slot]] = {}
    for slot in layout.slots:
        found.setdefault(_layer(slot) or slot.name, []).append(slot)
    return found


def _matrix(slots: list[Slot]) -> Slot | None:
    """The weight of a convolution or linear layer, if the layer is one whose other tensors are as long as it is."""
    matrices = [slot for slot in slots if len(slot.shape) > 1]
    if len(matrices) != 1 or any(slot.shape[:1] != matrices[0].shape[:1] for slot in slots):
        return None
    return matrices[0]


def _linear_layers(layout: Layout) -> set[str]:
    return {_layer(slot) for slot in layout.slots if len(slot.shape) == 2 and slot.flops_per_weight}


def _lookups(layout: Layout) -> set[str]:
    """Layers whose rows are looked up: matrices that cost nothing; and the embedding that lends the output layer its
    weight, which has a row for each entry of a bias that has no weight beside it."""
    layers = by_layer(layout)
    lonely = {slots[0].shape for slots in layers.values() if len(slots) == 1 and slots[0].name.endswith(".bias")}
    return {
        name
        for name, slots in layers.items()
        if (weight := _matrix(slots)) is not None
        and (not weight.flops_per_weight or (len(slots) == 1 and weight.shape[:1] in lonely))
    }


def _whole_layers(layout: Layout) -> set[str]:
    """Layers of which no row is dropped: embeddings, and the last one, unless its weight is the embedding's."""
    last = next((name for name, slots in reversed(by_layer(layout).items())), "")
    return _lookups(layout) | {last}
