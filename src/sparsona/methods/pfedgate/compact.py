"""Real savings: a network without the filters that were dropped, run through the same module.

A filter without weight and bias gives 0, and so does ReLU of it: neither it nor what the next layer makes of it need be
computed. `chain` checks once whether a network can be narrowed like this; `compact` then gives the smaller tensors,
for Task.forward. Shapes follow what was kept: a phase whose loss does this is not traceable, and runs one client at a
time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparsona.core.errors import SparsonaError
from sparsona.core.layout import Slot
from sparsona.methods.pfedgate.blocks import Blocks, Strip, by_layer, spread

if TYPE_CHECKING:
    from torch import Tensor

    from sparsona.core.task import Task


@dataclass(frozen=True)
class Cut:
    """Units (filters, channels) side by side: blocks `first`, `first + 1`, ... of so many each."""

    first: int
    lengths: tuple[int, ...]

    @property
    def blocks(self) -> range:
        return range(self.first, self.first + len(self.lengths))


@dataclass(frozen=True)
class Link:
    """One layer of a chain. `inputs` and `outputs` may be left out in part where they are cut; the weight and the bias
    are scaled by the same cuts, or by one block each."""

    weight: str
    bias: str | None
    inputs: Cut | None
    outputs: Cut | None
    weight_by: Cut | int
    bias_by: Cut | int | None


@dataclass(frozen=True)
class Chain:
    """A network whose layers follow one another, each feeding the next and nothing else."""

    links: tuple[Link, ...]


def chain(task: Task, blocks: Blocks) -> Chain:
    """The layers of a task whose units can be left out. Refuses other networks and other blocks, with the reason.

    Takes convolutions and linear layers in a row, in the order of their parameters, with what leaves 0 at 0 (ReLU,
    pooling, flattening) in between; cut into `filters` or `channels`. Tried once, on random weights.
    """
    layers = [_weight_and_bias(name, slots) for name, slots in by_layer(blocks.layout).items()]
    strips = dict(zip(blocks.layout.names, blocks.strips, strict=True))
    units = [0, *(weight.shape[0] for weight, _ in layers)]
    rows = [_rows(weight, bias, strips) for weight, bias in layers]
    columns = [
        _columns(weight, strips[weight.name], before) for (weight, _), before in zip(layers, units, strict=False)
    ]
    if rows[-1] is not None:
        raise _refusal("outputs of the network can be dropped", "an output layer that is kept whole")
    links: list[Link] = []
    for place, (weight, bias) in enumerate(layers):
        inputs = links[-1].outputs if links else None
        outputs = columns[place + 1] if place + 1 < len(layers) else None
        outputs = outputs or rows[place]
        weight_by = rows[place] or columns[place] or _whole(weight, strips, blocks)
        bias_by = None if bias is None else rows[place] or _whole(bias, strips, blocks)
        links.append(Link(weight.name, bias.name if bias else None, inputs, outputs, weight_by, bias_by))
    found = Chain(tuple(links))
    _try(task, blocks, found)
    return found


def compact(chain: Chain, params: Mapping[str, Tensor], kept: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
    """The tensors that are left, for Task.forward: it then gives what it gives for `params * spread(kept * scale)`.

    `kept` is 0 or 1 for each block, `scale` a factor for each. Gradients flow back to whole params, 0 where a block was
    dropped, and to the scales of blocks that were kept. Waits for `kept`, if that is on a GPU.
    """
    flags = [value > 0 for value in kept.detach().tolist()]
    smaller: dict[str, Tensor] = {}
    for link in chain.links:
        weight = _left(params[link.weight], link.outputs, flags)
        shape = weight.shape
        if link.inputs is not None:
            width = weight[0].numel() // sum(link.inputs.lengths)
            weight = _left(weight.flatten(1), link.inputs, flags, dim=1, width=width)
        if scale is not None:
            weight = weight.flatten(1) * _factors(scale, link, flags, weight.flatten(1).shape[1])
        smaller[link.weight] = weight.view(shape[0], -1, *shape[2:])
        if link.bias is not None:
            bias = _left(params[link.bias], link.outputs, flags)
            if scale is not None:
                by = link.bias_by
                bias = bias * (_by_unit(scale, by, flags) if isinstance(by, Cut) else scale[by])
            smaller[link.bias] = bias
    return smaller


def _left(tensor: Tensor, cut: Cut | None, flags: list[bool], dim: int = 0, width: int = 1) -> Tensor:
    """The stretches of kept blocks. One split: its backward pass is one concatenation, not a scatter of rows."""
    import torch

    if cut is None or all(flags[block] for block in cut.blocks):
        return tensor
    parts = tensor.split([width * length for length in cut.lengths], dim=dim)  # type: ignore[no-untyped-call]
    left = [part for block, part in zip(cut.blocks, parts, strict=True) if flags[block]]
    if not left:
        raise SparsonaError("every unit of a layer was dropped", expected="at least the blocks that are always kept")
    return torch.cat(left, dim=dim)


def _factors(scale: Tensor, link: Link, flags: list[bool], num_columns: int) -> Tensor:
    """What to multiply a layer's weight by: a number, a column of numbers (filters) or a row of them (channels)."""
    if isinstance(link.weight_by, int):
        return scale[link.weight_by]
    factors = _by_unit(scale, link.weight_by, flags)
    if link.weight_by == link.inputs:
        return factors.unsqueeze(-1).expand(len(factors), num_columns // len(factors)).flatten()
    return factors.unsqueeze(-1)


def _by_unit(scale: Tensor, cut: Cut, flags: list[bool]) -> Tensor:
    import torch

    lengths = zip(cut.blocks, cut.lengths, strict=True)
    return torch.cat([scale[block].expand(length) for block, length in lengths if flags[block]])


def _weight_and_bias(name: str, slots: list[Slot]) -> tuple[Slot, Slot | None]:
    matrices = [slot for slot in slots if len(slot.shape) > 1]
    others = [slot for slot in slots if len(slot.shape) <= 1]
    if len(matrices) != 1 or len(others) > 1 or any(slot.shape != matrices[0].shape[:1] for slot in others):
        raise _refusal(f"'{name}' is no convolution and no linear layer", "these only: a norm maps 0 to other values")
    return matrices[0], others[0] if others else None


def _whole(slot: Slot, strips: Mapping[str, Strip], blocks: Blocks) -> int:
    """The one block of a tensor that is always kept."""
    strip = strips[slot.name]
    if len(strip.lengths) != 1 or not blocks.always[strip.first]:
        raise _refusal(f"blocks of '{slot.name}' are no whole filters or channels", "blocks of filters or channels")
    return strip.first


def _rows(weight: Slot, bias: Slot | None, strips: Mapping[str, Strip]) -> Cut | None:
    """The cut of a layer's rows, if whole rows and the same entries of the bias are dropped together."""
    strip, width = strips[weight.name], weight.size // weight.shape[0]
    if strip.repeats != 1 or len(strip.lengths) == 1 or any(length % width for length in strip.lengths):
        return None
    lengths = tuple(length // width for length in strip.lengths)
    together = bias is None or strips[bias.name] == Strip(strip.first, lengths)
    return Cut(strip.first, lengths) if together else None


def _columns(weight: Slot, strip: Strip, before: int) -> Cut | None:
    """The cut of a layer's columns by units of the layer before. Refuses a layer that does not follow that one."""
    if before and (weight.shape[1] % before or (len(weight.shape) > 2 and weight.shape[1] != before)):
        raise _refusal(f"'{weight.name}' does not take what the layer before it gives", "layers that follow each other")
    if not before or strip.repeats != weight.shape[0] or len(strip.lengths) == 1:
        return None
    width = weight.size // weight.shape[0] // before
    if any(length % width for length in strip.lengths):
        return None
    return Cut(strip.first, tuple(length // width for length in strip.lengths))


def _try(task: Task, blocks: Blocks, found: Chain) -> None:
    """Compare both ways on random inputs, weights and factors, with about half of the blocks dropped."""
    import torch

    draws = torch.Generator().manual_seed(0)
    params, buffers = task.init(0)
    params = params.like(torch.randn(params.flat.shape, generator=draws) / 8)  # no bias may be 0 by chance
    inputs = torch.rand((2, *task.input_shape), generator=draws)
    always = torch.tensor(blocks.always)
    kept = (always | (torch.rand(len(blocks), generator=draws) < 0.5)).float()
    scale = 0.5 + torch.rand(len(blocks), generator=draws)
    with torch.no_grad():
        whole = params.like(params.flat * spread(blocks, kept * scale))
        try:
            expected, _ = task.forward(whole, buffers, inputs, train=False)
            narrow, _ = task.forward(compact(found, params, kept, scale), buffers, inputs, train=False)
        except RuntimeError as error:
            raise _refusal(
                f"this network does not run with fewer filters ({error})", "a plain chain of layers"
            ) from None
    slack = 1e-3 * float(expected.abs().max()) + 1e-6
    if narrow.shape != expected.shape or not torch.allclose(narrow, expected, rtol=0.0, atol=slack):
        raise _refusal("this network computes something else with fewer filters", "layers between that leave 0 at 0")


def _refusal(what: str, expected: str) -> SparsonaError:
    return SparsonaError(what, expected=expected, hint="train without compact: masks work for every network")
