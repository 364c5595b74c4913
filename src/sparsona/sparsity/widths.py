"""Narrow networks: some units of each hidden layer of a network, and where their entries are in the wide one.

A unit is a channel or a neuron; where a GroupNorm follows, it is one of its groups, so that every channel is normalised
with the same channels as in the wide network. Inputs and outputs of the network stay whole. Which units a layer keeps
depends on its width alone, so layers that are added to each other (shortcuts) keep the same ones.

`find_widths` reads this structure from names and shapes; `check_widths` tests it on the network itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NoReturn

from sparsona.core.errors import SparsonaError
from sparsona.core.layout import Layout, Slot
from sparsona.core.seeds import generator
from sparsona.core.tree import Tree, zeros_like

if TYPE_CHECKING:
    from torch import Tensor

    from sparsona.core.task import Task

STATISTICS = ("running_mean", "running_var")  # BatchNorm's, one each for a channel
SLACK = 1e-9  # 0.07 * 100 is more than 7


@dataclass(frozen=True)
class Axis:
    """One dimension of a tensor: `units` of `each` entries side by side; no units: it stays whole."""

    units: int = 0
    each: int = 1


WHOLE = Axis()


@dataclass(frozen=True, eq=False)  # compared by identity: it is a key of caches
class Widths:
    """A network whose hidden layers can be narrowed.

    Args:
        layout: the layout of the wide network.
        axes: for each of its tensors, its dimensions.
        buffer_axes: the same for its buffers.
        output: the names of the tensors of the output layer, whose first dimension is the classes.
        hidden: the names of the tensors of all other convolutions and linear layers.
    """

    layout: Layout
    axes: Mapping[str, tuple[Axis, ...]]
    buffer_axes: Mapping[str, tuple[Axis, ...]]
    output: tuple[str, ...]
    hidden: tuple[str, ...]

    @cached_property
    def most_units(self) -> int:
        """The number of units of the widest layer."""
        return max(axis.units for axes in self.axes.values() for axis in axes)

    def narrow(self, layout: Layout, rate: float) -> Layout:
        """The layout of a network that keeps a share of the units of each hidden layer, rounded up.

        Args:
            layout: the wide layout, of parameters or of buffers.
            rate: the share.

        Returns:
            The layout of the narrow network.
        """

        def shape(slot: Slot) -> tuple[int, ...]:
            return tuple(
                math.ceil(rate * axis.units - SLACK) * axis.each if axis.units else size
                for size, axis in zip(slot.shape, self._of(slot), strict=True)
            )

        return replace(layout, slots=tuple(replace(slot, shape=shape(slot)) for slot in layout.slots))

    def fit(self, density: float) -> float:
        """The largest rate whose network has at most this share of the parameters.

        Args:
            density: the share of the parameters.

        Returns:
            The rate: a number of units of the widest layer, over all of them.
        """
        most, budget = self.most_units, density * self.layout.size + SLACK
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.narrow(self.layout, middle / most).size <= budget
            low, high = (middle, high) if fits else (low, middle - 1)
        if not low:
            least = self.narrow(self.layout, 1 / most).size / self.layout.size
            raise SparsonaError(
                f"no width fits {density:g} of the parameters: one unit a layer has {least:.2g} of them",
                expected=f"a capacity and a density of at least {math.ceil(1000 * least) / 1000:g}",
                hint="raise capacities or density, or read them as shares of the width: --set width=rate",
            )
        return low / most

    def places(self, wide: Layout, narrow: Layout, shift: int) -> Tensor:
        """Where the entries of a narrow network are in the wide one.

        Args:
            wide: the wide layout, of parameters or of buffers.
            narrow: the layout that `narrow` made of it.
            shift: the first unit of the windows, which wrap around; 0: the first units of each layer.

        Returns:
            For each entry of the narrow buffer its index in the wide one.
        """
        import torch

        found, start = [], 0
        for slot, kept in zip(wide.slots, narrow.slots, strict=True):
            index = torch.zeros((), dtype=torch.int64)
            for size, left, axis in zip(slot.shape, kept.shape, self._of(slot), strict=True):
                index = index.unsqueeze(-1) * size + _window(size, left, axis, shift)
            found.append(start + index.reshape(-1))
            start += slot.size
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)

    def _of(self, slot: Slot) -> tuple[Axis, ...]:
        found = self.axes.get(slot.name) or self.buffer_axes.get(slot.name)
        return found or (WHOLE,) * len(slot.shape)


def _window(size: int, left: int, axis: Axis, shift: int) -> Tensor:
    """The entries of one dimension, in rising order, so that a window of all units is the wide network to the bit."""
    import torch

    if not axis.units:
        return torch.arange(size)
    units = torch.arange(shift, shift + left // axis.each).remainder(axis.units).sort().values
    return (units.unsqueeze(-1) * axis.each + torch.arange(axis.each)).reshape(-1)


def gather(tree: Tree, layout: Layout, places: Tensor) -> Tree:
    """The entries of a wide tree that a narrow one has.

    Args:
        tree: the wide tree.
        layout: the narrow layout.
        places: where its entries are.

    Returns:
        The narrow tree.

    Example:
        >>> import torch
        >>> wide = Tree.of({"w": torch.tensor([1.0, 2.0, 3.0])})
        >>> gather(wide, Layout((Slot("w", (2,)),)), torch.tensor([0, 2])).flat.tolist()
        [1.0, 3.0]
    """
    return Tree(layout, tree.flat.index_select(0, places))


def scatter(tree: Tree, onto: Tree, places: Tensor) -> Tree:
    """A wide tree with the entries of a narrow one in their places.

    Args:
        tree: the narrow tree.
        onto: the wide tree, which is not changed.
        places: where the entries are.

    Returns:
        A new wide tree.

    Example:
        >>> import torch
        >>> narrow, wide = (Tree.of({"w": torch.tensor(values)}) for values in ([5.0, 6.0], [1.0, 2.0, 3.0]))
        >>> scatter(narrow, wide, torch.tensor([0, 2])).flat.tolist()
        [5.0, 2.0, 6.0]
    """
    return onto.like(onto.flat.index_copy(0, places, tree.flat))


def find_widths(task: Task) -> Widths:
    """What can be narrowed of a network, read from the names and shapes of its tensors.

    Takes convolutions and linear layers with biases and norms, in the order of their parameters, each of which takes
    the inputs of the network, what a layer before it gives, or (linear layers) that of the last layer flattened.

    Args:
        task: a Task or an Outline.

    Returns:
        Its widths.

    Raises:
        SparsonaError: the network is of another kind.

    Example:
        >>> from torch import nn
        >>> from sparsona.core.task import Task
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> widths = find_widths(Task(net, (4,), 3))
        >>> [slot.shape for slot in widths.narrow(widths.layout, 0.5).slots]
        [(4, 4), (4,), (3, 4), (3,)]
    """
    if task.takes_tokens:
        _refuse("it takes tokens, and its embedding is no hidden layer")
    slots = task.layout.slots
    matrices = [slot for slot in slots if len(slot.shape) > 1]
    outputs = [slot for slot in matrices if slot.shape[0] == task.num_classes]
    if len(matrices) < 2 or not outputs or outputs[-1] is matrices[0]:
        _refuse("it has no hidden layer")
    output, units = _layer(outputs[-1]), _units_by_width(task)
    inputs = {task.input_shape[0], math.prod(task.input_shape)}
    axes: dict[str, tuple[Axis, ...]] = {}
    by_layer: dict[str, Axis] = {}  # the outputs of each convolution and linear layer
    by_width: dict[int, Axis] = {}
    last, flattens = 0, False  # the width of the last such layer, and whether its outputs may be flattened

    def from_last(size: int) -> Axis | None:
        return Axis(units(last), size // units(last)) if flattens and size % last == 0 else None

    for slot in slots:
        layer = _layer(slot)
        if len(slot.shape) > 1:
            if layer in by_layer:
                _refuse(f"'{layer}' has several matrices: it is no convolution and no linear layer")
            size = slot.shape[1]
            taken = (from_last(size) if len(slot.shape) == 2 else None) or by_width.get(size)
            if slot is matrices[0] or (taken is None and size in inputs):
                taken = WHOLE
            if taken is None:
                _refuse(f"'{slot.name}' takes {size} inputs, which no layer before it gives")
            by_layer[layer] = WHOLE
            if layer != output:
                last, flattens = slot.shape[0], len(slot.shape) > 2
                by_layer[layer] = by_width[last] = Axis(units(last), last // units(last))
            axes[slot.name] = (by_layer[layer], taken, *(WHOLE,) * (len(slot.shape) - 2))
        elif len(slot.shape) == 1:  # a bias or a norm
            own = by_layer.get(layer) or by_width.get(slot.size) or from_last(slot.size)
            if own is None and slot.size not in (1, *inputs):
                _refuse(f"'{slot.name}' has {slot.size} entries, and no layer before it as many outputs")
            axes[slot.name] = (own or WHOLE,)
    buffer_axes = {
        slot.name: axes.get(f"{_layer(slot)}.weight") or (by_width.get(slot.size, WHOLE),)
        for slot in task.buffer_layout.slots
        if slot.name.rpartition(".")[2] in STATISTICS
    }
    names = [slot.name for slot in slots if _layer(slot) in by_layer]
    of_output = tuple(name for name in names if name.rpartition(".")[0] == output)
    return Widths(task.layout, axes, buffer_axes, of_output, tuple(name for name in names if name not in of_output))


def check_widths(task: Task, widths: Widths) -> None:
    """Raise SparsonaError if a narrow network is not the part of the wide one that it is taken for.

    With the weights of a narrow network and zeros elsewhere, the wide one must predict the same. Where a norm computes
    over all channels of a layer (LayerNorm, one group) it does not, and only shapes are checked.

    Args:
        task: the task.
        widths: what `find_widths` found.
    """
    import torch

    params, buffers = task.init(0)
    draws = generator(0)
    params = params.like(params.flat + torch.randn(params.flat.shape, generator=draws) / 16)  # no bias is 0 by chance
    inputs = torch.rand((2, *task.input_shape), generator=draws)
    narrow, statistics = (widths.narrow(tree.layout, 0.5) for tree in (params, buffers))
    places = widths.places(params.layout, narrow, 1)
    small = gather(params, narrow, places)
    kept = gather(buffers, statistics, widths.places(buffers.layout, statistics, 1))
    with torch.no_grad():
        wide, _ = task.forward(scatter(small, zeros_like(params), places), buffers, inputs, train=False)
        try:
            found, _ = task.forward(small, kept, inputs, train=False)
        except RuntimeError as error:
            _refuse(f"it does not run with narrower layers ({error})")
    spans_layer = 1 in task.norm_groups.values()
    slack = (1e-3 if task.half is None else 0.05) * float(wide.abs().max()) + 1e-6
    if not spans_layer and not torch.allclose(found, wide, rtol=0.0, atol=slack):
        _refuse("with narrower layers it computes something else")


def _layer(slot: Slot) -> str:
    return slot.name.rpartition(".")[0]


def _units_by_width(task: Task) -> Callable[[int], int]:
    """How many units a layer of some width has: its channels, or the groups that all norms of this width share."""
    sizes = dict(zip(task.layout.names, task.layout.sizes, strict=True))
    shared: dict[int, int] = {}
    for name, groups in task.norm_groups.items():
        if groups > 1:
            shared[sizes[name]] = math.gcd(groups, shared.get(sizes[name], 0))
    return lambda width: shared.get(width, width)


def _refuse(what: str) -> NoReturn:
    raise SparsonaError(
        f"this network cannot be narrowed: {what}",
        expected="convolutions and linear layers that follow one another, with norms and shortcuts",
        hint="choose another --model, or a method with masks (fedspa), which takes any network",
    )
