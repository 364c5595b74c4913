"""Named tensors in one flat buffer, and arithmetic over them.

A `Tree` maps names to tensors; all of them are views of `flat`, so that scaling, masking or adding a whole model is one
operation. Trees are values: nothing here changes its arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from sparsona.core.layout import Layout, Slot

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class Tree(Mapping[str, "Tensor"]):
    """An immutable mapping of names to tensors that share one flat buffer."""

    __slots__ = ("_counts", "_digest", "_views", "flat", "layout")

    def __init__(self, layout: Layout, flat: Tensor) -> None:
        if flat.shape[-1] != layout.size:
            raise ValueError(f"a layout of {layout.size} entries cannot hold a buffer of shape {tuple(flat.shape)}")
        self.layout = layout
        self.flat = flat
        self._views: tuple[Tensor, ...] | None = None
        self._digest: bytes | None = None
        self._counts: tuple[int, ...] | None = None

    @classmethod
    def of(cls, named: Mapping[str, Tensor], layout: Layout | None = None) -> Tree:
        """Copy named tensors of one dtype, detached, into a flat buffer, in the mapping's order or the layout's."""
        import torch

        if layout is None:
            layout = Layout(tuple(Slot(name, tuple(value.shape)) for name, value in named.items()))
        if not layout.slots:
            return cls(layout, torch.zeros(0))
        return cls(layout, torch.cat([named[slot.name].detach().reshape(-1) for slot in layout.slots]))

    def __getitem__(self, name: str) -> Tensor:
        if self._views is None:
            # One split for all: its backward pass is one concatenation, whatever the number of tensors.
            parts = self.flat.split(self.layout.sizes, dim=-1)  # type: ignore[no-untyped-call]
            lead = tuple(self.flat.shape[:-1])
            self._views = tuple(
                part.view(lead + slot.shape) for part, slot in zip(parts, self.layout.slots, strict=True)
            )
        return self._views[self.layout.place[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.names)

    def __len__(self) -> int:
        return len(self.layout.slots)

    # Identity, not entry by entry: a comparison of tensors is a tensor, which `==` on mappings cannot use.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        return (Tree, (self.layout, self.flat))

    def __repr__(self) -> str:
        return f"Tree({len(self)} tensors, {self.layout.size} entries, {self.flat.dtype})"

    def like(self, flat: Tensor) -> Tree:
        """Another tree of the same layout."""
        return Tree(self.layout, flat)

    def select(self, names: Iterator[str] | tuple[str, ...] | list[str]) -> Tree:
        """A tree of some of the tensors: a detached copy."""
        layout = self.layout.select(names)
        return Tree.of({name: self[name] for name in layout.names}, layout)


def join(layout: Layout, *parts: Tree) -> Tree:
    """One tree of the tensors of several, in the layout's order; gradients flow through, unlike through Tree.of."""
    import torch

    owner = {name: part for part in parts for name in part}
    return Tree(layout, torch.cat([owner[name][name].reshape(-1) for name in layout.names]))


def check_layouts(first: Tree, *others: Tree) -> None:
    """Refuse trees whose entries do not stand for the same parameters."""
    for other in others:
        if other.layout is not first.layout and other.layout.digest != first.layout.digest:
            raise ValueError(f"trees of different layouts: {first} and {other}")


def add(a: Tree, b: Tree) -> Tree:
    check_layouts(a, b)
    return a.like(a.flat + b.flat)


def subtract(a: Tree, b: Tree) -> Tree:
    check_layouts(a, b)
    return a.like(a.flat - b.flat)


def multiply(a: Tree, b: Tree) -> Tree:
    check_layouts(a, b)
    return a.like(a.flat * b.flat)


def scale(a: Tree, factor: float | Tensor) -> Tree:
    return a.like(a.flat * factor)


def zeros_like(a: Tree) -> Tree:
    return a.like(a.flat.new_zeros(a.flat.shape))


def norm(a: Tree) -> Tensor:
    """The Euclidean norm over all entries."""
    length: Tensor = a.flat.norm(dim=-1)
    return length


def counts(mask: Tree) -> tuple[int, ...]:
    """Number of non-zero entries of each tensor; counted once, as a tree does not change."""
    import torch

    if mask._counts is None:
        found: list[int] = []
        if len(mask):
            found = torch.stack([mask[name].count_nonzero() for name in mask]).tolist()  # one wait for all
        mask._counts = tuple(found)
    return mask._counts


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors inside a State, Server or Work, each with a path that names its place."""
    if value is None:
        return
    if isinstance(value, Tree):
        yield path, value.flat
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name), f"{path}.{field.name}" if path else field.name)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{path}[{key}]")
    elif isinstance(value, tuple):
        for position, item in enumerate(value):
            yield from leaves(item, f"{path}[{position}]")
    elif hasattr(value, "dtype"):
        yield path, value
    else:
        raise TypeError(
            f"'{path}' is a {type(value).__name__}; a State, Server or Work holds tensors and trees, in tuples, "
            "dicts and dataclasses of them (a plain number would be baked into a compiled step: make it a 0-dim tensor)"
        )


def map_leaves(fn: Callable[[str, Tensor], Tensor], value: T, path: str = "") -> T:
    """The same structure with every tensor replaced by fn(path, tensor)."""
    result: Any
    if value is None:
        result = None
    elif isinstance(value, Tree):
        result = value.like(fn(path, value.flat))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {
            field.name: map_leaves(fn, getattr(value, field.name), f"{path}.{field.name}" if path else field.name)
            for field in dataclasses.fields(value)
        }
        result = dataclasses.replace(value, **changed)
    elif isinstance(value, Mapping):
        result = {key: map_leaves(fn, item, f"{path}[{key}]") for key, item in value.items()}
    elif isinstance(value, tuple):
        result = tuple(map_leaves(fn, item, f"{path}[{position}]") for position, item in enumerate(value))
    else:
        result = fn(path, value)  # type: ignore[arg-type]
    return result  # type: ignore[no-any-return]
