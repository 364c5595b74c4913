"""Examples with a gate each in one ordinary forward pass, without a model for each of them.

A block of a layer's flattened weight is a stretch of its rows. What a layer makes of an input is therefore the sum over
blocks of a block's gate times what the block alone makes of it: rows are computed with the plain weight, which all
examples share, and scaled afterwards. A row that belongs to several blocks is computed once for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING

from sparsona.core.layout import Slot
from sparsona.methods.pfedgate.blocks import Blocks, Strip, by_layer, spread

if TYPE_CHECKING:
    from torch import Tensor

    from sparsona.core.task import Task
    from sparsona.core.tree import Tree

Stretch = tuple[int, int, int]  # first entry, end, block


@dataclass(frozen=True)
class Rows:
    """A layer's rows: (block, how many) of the stretches that rows begin with, in order; and the rows that belong to
    several blocks, with their stretches."""

    layer: str
    weight: Slot
    bias: Slot | None
    bias_blocks: tuple[tuple[int, int], ...]
    begins: tuple[tuple[int, int], ...]
    shared: tuple[tuple[int, tuple[Stretch, ...]], ...]

    @property
    def _lengths(self) -> list[int]:
        """How many rows lie before a shared one, the shared one, and so on to the end. One split gives them all: its
        backward pass is one concatenation, that of a slice fills and adds a tensor as large as the whole."""
        lengths, done = [], 0
        for row, _ in self.shared:
            lengths += [row - done, 1]
            done = row + 1
        return [*lengths, self.weight.shape[0] - done]

    def expand(self, weight: Tensor) -> Tensor:
        """The weight with a row for each stretch: where rows begin, then the others. Slices alone: nothing is moved to
        a device while a step is captured."""
        import torch

        pieces = iter(weight.flatten(1).split(self._lengths))  # type: ignore[no-untyped-call]
        parts, others = [], []
        for _, stretches in self.shared:
            before, row = next(pieces), next(pieces)[0]
            alone = [_alone(row, first, end) for first, end, _ in stretches]
            parts += [before, alone[0]]
            others += alone[1:]
        whole = torch.cat([*parts, *pieces, *others])
        return whole.view(len(whole), *weight.shape[1:])

    def scale(self, gates: Tensor, bias: Tensor | None, outputs: Tensor) -> Tensor:
        """What the layer gives under these gates [N, blocks], from what its rows give."""
        import torch

        dim = 1 if len(self.weight.shape) > 2 else -1

        def along(values: Tensor) -> Tensor:  # [N, rows] beside the outputs
            ones = [1] * (outputs.dim() - 2)
            return values.reshape(*values.shape, *ones) if dim == 1 else values.reshape(len(values), *ones, -1)

        others = [block for _, stretches in self.shared for _, _, block in stretches[1:]]
        factors = [*self.begins, *((block, 1) for block in others)]
        outputs = outputs * along(_by_runs(gates, factors))
        if others:
            more = [len(stretches) - 1 for _, stretches in self.shared]
            pieces = outputs.split([*self._lengths, *more], dim=dim)  # type: ignore[no-untyped-call]
            begins, added = pieces[: -len(more)], pieces[-len(more) :]
            parts = list(begins)
            parts[1::2] = [row + extra.sum(dim, keepdim=True) for row, extra in zip(begins[1::2], added, strict=True)]
            outputs = torch.cat(parts, dim=dim)
        return outputs if bias is None else outputs + along(bias * _by_runs(gates, self.bias_blocks))


def rows_of(task: Task, blocks: Blocks) -> tuple[Rows, ...] | None:
    """The rows of all layers; None where a model for each example is needed: for layers other than convolutions and
    linear ones, columns as blocks, and models that draw noise or move buffers. Tried once, on random weights."""
    strips = dict(zip(blocks.layout.names, blocks.strips, strict=True))
    plain = task.plain_layers()
    found = []
    for name, slots in by_layer(blocks.layout).items():
        weight = next((slot for slot in slots if len(slot.shape) > 1), None)  # it may be frozen, or a part of it fixed
        if weight is None or name not in plain or any(strips[slot.name].repeats > 1 for slot in slots):
            return None
        bias = next((slot for slot in slots if slot is not weight), None)
        begins, shared = _lay(weight, strips[weight.name])
        inside = tuple(_runs(strips[bias.name])) if bias else ()
        found.append(Rows(name, weight, bias, inside, begins, shared))
    changes = task.draws_noise or task.moves_buffers  # in training
    return None if changes or not _agrees(task, blocks, tuple(found)) else tuple(found)


def forward_rows(
    task: Task, rows: tuple[Rows, ...], params: Mapping[str, Tensor], buffers: Tree, inputs: Tensor, gates: Tensor
) -> Tensor:
    """Outputs [N, ...] of the examples under their gates [N, blocks]."""
    named: dict[str, Tensor] = {}
    after: dict[str, Callable[[Tensor], Tensor]] = {}
    for layer in rows:
        named[layer.weight.name] = weight = layer.expand(params[layer.weight.name])
        bias = None
        if layer.bias is not None:
            bias = params[layer.bias.name]
            named[layer.bias.name] = bias.new_zeros(len(weight))  # added where it has been scaled
        after[layer.layer] = partial(layer.scale, gates, bias)
    return task.forward_through(named, buffers, inputs, after)


def _alone(row: Tensor, first: int, end: int) -> Tensor:
    import torch

    return torch.cat([row.new_zeros(first), row[first:end], row.new_zeros(len(row) - end)])[None]


def _by_runs(gates: Tensor, runs: list[tuple[int, int]] | tuple[tuple[int, int], ...]) -> Tensor:
    import torch

    return torch.cat([gates[:, block : block + 1].expand(len(gates), count) for block, count in runs], dim=1)


def _runs(strip: Strip) -> list[tuple[int, int]]:
    return [(block, length) for block, length in enumerate(strip.lengths, start=strip.first) if length]


def _lay(weight: Slot, strip: Strip) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, tuple[Stretch, ...]], ...]]:
    width, rows = weight.size // weight.shape[0], weight.shape[0]
    ends = list(accumulate((length for _, length in _runs(strip)), initial=0))
    stretches: list[list[Stretch]] = [[] for _ in range(rows)]
    for (block, _), (first, end) in zip(_runs(strip), pairwise(ends), strict=True):
        for row in range(first // width, -(-end // width)):
            start = row * width
            stretches[row].append((max(first - start, 0), min(end - start, width), block))
    begins = groupby(one[0][2] for one in stretches)
    shared = tuple((row, tuple(one)) for row, one in enumerate(stretches) if len(one) > 1)
    return tuple((block, len(list(group))) for block, group in begins), shared


def _agrees(task: Task, blocks: Blocks, rows: tuple[Rows, ...]) -> bool:
    """Whether the network is what its layers make of it: it may use their weights in other ways."""
    import torch

    random = torch.Generator().manual_seed(0)
    params, buffers = task.init(0)
    inputs = torch.rand((2, *task.input_shape), generator=random)
    gates = torch.rand((2, len(blocks)), generator=random)
    try:
        with torch.no_grad():
            together = forward_rows(task, rows, params, buffers, inputs, gates)
            for place in range(2):
                own = params.like(params.flat * spread(blocks, gates[place]))
                alone = task.forward(own, buffers, inputs[place : place + 1], train=False)[0]
                if not torch.allclose(together[place : place + 1], alone, rtol=1e-3, atol=1e-4):
                    return False
    except RuntimeError:
        return False
    return True
