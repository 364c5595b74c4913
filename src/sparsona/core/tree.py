"""Named tensors in one flat buffer, and arithmetic over them.

A `Tree` maps names to tensors; all of them are views of `flat`, so that scaling, masking or adding a whole model is one
operation. Trees are values: nothing here changes its arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from sparsona.core.layout import Layout, Slot
from sparsona.core.storage import Stored, pack_bits

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")


class ValueIdentity:
    """What was found out about a tree's value, shared by all trees that are known to hold that very value.

    The same object means the same value, whether it is at hand or rests: trees are compared by it instead of by bits.
    """

    __slots__ = ("counts", "digest")

    def __init__(self) -> None:
        # On a GPU each question waits for all that is under way.
        self.counts: tuple[int, ...] | None = None
        self.digest: bytes | None = None


class Tree(Mapping[str, "Tensor"]):
    """An immutable mapping of names to tensors that share one flat buffer.

    A tree may rest, packed or moved elsewhere: `flat` then brings the buffer back each time it is asked for.
    """

    __slots__ = ("__weakref__", "_flat", "_identity", "_stored", "_views", "layout")

    def __init__(self, layout: Layout, flat: Tensor | Stored, identity: ValueIdentity | None = None) -> None:
        if flat.shape[-1] != layout.size:
            raise ValueError(f"a layout of {layout.size} entries cannot hold a buffer of shape {tuple(flat.shape)}")
        self.layout = layout
        self._flat: Tensor | None = None if isinstance(flat, Stored) else flat
        self._stored: Stored | None = flat if isinstance(flat, Stored) else None
        self._views: tuple[Tensor, ...] | None = None
        self._identity = identity

    @classmethod
    def of(cls, named: Mapping[str, Tensor], layout: Layout | None = None) -> Tree:
        """Copy named tensors of one dtype, detached, into a flat buffer, in the mapping's order or the layout's."""
        import torch

        if layout is None:
            layout = Layout(tuple(Slot(name, tuple(value.shape)) for name, value in named.items()))
        if not layout.slots:
            return cls(layout, torch.zeros(0))
        return cls(layout, torch.cat([named[slot.name].detach().reshape(-1) for slot in layout.slots]))

    @property
    def flat(self) -> Tensor:
        """The buffer. That of a resting tree is brought back, and not kept."""
        if self._flat is not None:
            return self._flat
        assert self._stored is not None
        return self._stored.load()

    @property
    def identity(self) -> ValueIdentity:
        """What is known of this value; the same object for every tree that is known to have it."""
        if self._identity is None:
            self._identity = ValueIdentity()
        return self._identity

    @property
    def _backing(self) -> Tensor | Stored:
        found = self._stored if self._flat is None else self._flat
        assert found is not None
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._backing.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self._backing.dtype

    @property
    def device(self) -> torch.device:
        """Where the buffer is, or will be brought back to."""
        return self._backing.device

    def store(self) -> Stored:
        """Put the buffer away, packed if it is bool; returns where it lies, for it to be moved elsewhere."""
        if self._stored is None:
            assert self._flat is not None
            self._stored = Stored(self._flat)
        self._flat = self._views = None
        return self._stored

    def loaded(self) -> Tree:
        """The same value with its buffer at hand, for those who will ask for it often. This tree goes on resting."""
        if self._flat is not None:
            return self
        tree = Tree(self.layout, self.flat, self.identity)
        tree._stored = self._stored  # should that one rest, too, they share what is put away
        return tree

    def bits(self) -> Tensor:
        """A bool tree's entries as packed bits on the host."""
        return pack_bits(self.flat.reshape(-1)) if self._stored is None else self._stored.bits()

    def __getitem__(self, name: str) -> Tensor:
        if self._flat is None:
            return self.loaded()[name]
        if self._views is None:
            # One split for all: its backward pass is one concatenation, whatever the number of tensors.
            parts = self._flat.split(self.layout.sizes, dim=-1)  # type: ignore[no-untyped-call]
            lead = tuple(self._flat.shape[:-1])
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
        import torch

        if self.dtype is torch.bool and self.device.type == "cpu":  # travels, and arrives, as bits
            return (_from_bits, (self.layout, self.bits(), self.shape, self.identity.counts, self.identity.digest))
        return (Tree, (self.layout, self.flat))

    def __repr__(self) -> str:
        return f"Tree({len(self)} tensors, {self.layout.size} entries, {self.dtype})"

    def like(self, flat: Tensor) -> Tree:
        """Another tree of the same layout."""
        return Tree(self.layout, flat)

    def select(self, names: Iterator[str] | tuple[str, ...] | list[str]) -> Tree:
        """A tree of some of the tensors: a detached copy."""
        layout, at_hand = self.layout.select(names), self.loaded()
        return Tree.of({name: at_hand[name] for name in layout.names}, layout)


def _from_bits(
    layout: Layout, bits: Tensor, shape: tuple[int, ...], counts: tuple[int, ...] | None, digest: bytes | None
) -> Tree:
    tree = Tree(layout, Stored.of_bits(bits, shape))
    tree.identity.counts, tree.identity.digest = counts, digest
    return tree


def join(layout: Layout, *parts: Tree) -> Tree:
    """One tree of the tensors of several, in the layout's order; gradients flow through, unlike through Tree.of."""
    import torch

    owner = {name: part for part in map(Tree.loaded, parts) for name in part}
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
    """Number of non-zero entries of each tensor; remembered, since a mask is a value."""
    import torch

    if mask.identity.counts is None:
        at_hand, found = mask.loaded(), []
        if len(mask):
            found = torch.stack([at_hand[name].count_nonzero() for name in mask]).tolist()  # one wait for all
        mask.identity.counts = tuple(found)
    return mask.identity.counts


def as_numbers(mask: Tree, dtype: torch.dtype) -> Tree:
    """A bool mask as numbers to multiply by: 1 inside, 0 outside. It has the same counts."""
    numbers = mask.like(mask.flat.to(dtype))
    numbers.identity.counts = counts(mask)
    return numbers


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors inside a State, Server or Work, each with a path that names its place."""
    for place, leaf in parts(value, path):
        yield place, leaf.flat if isinstance(leaf, Tree) else leaf


def parts(value: Any, path: str = "") -> Iterator[tuple[str, Tree | Tensor]]:
    """The trees and single tensors inside a State, Server or Work; trees that rest are left to rest."""
    if value is None:
        return
    if isinstance(value, Tree):
        yield path, value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from parts(getattr(value, field.name), f"{path}.{field.name}" if path else field.name)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from parts(item, f"{path}[{key}]")
    elif isinstance(value, tuple):
        for position, item in enumerate(value):
            yield from parts(item, f"{path}[{position}]")
    elif hasattr(value, "dtype"):
        yield path, value
    else:
        raise TypeError(
            f"'{path}' is a {type(value).__name__}; a State, Server or Work holds tensors and trees, in tuples, "
            "dicts and dataclasses of them (a plain number would be baked into a compiled step: make it a 0-dim tensor)"
        )


def map_leaves(fn: Callable[[str, Tensor], Tensor], value: T, path: str = "") -> T:
    """The same structure with every tensor replaced by fn(path, tensor); a tree whose tensor stays is the same tree."""

    def change(place: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tree):
            return fn(place, leaf)
        flat = leaf.flat
        changed = fn(place, flat)
        return leaf if changed is flat else leaf.like(changed)

    return map_parts(change, value, path)


def map_parts(fn: Callable[[str, Any], Any], value: T, path: str = "") -> T:
    """The same structure with every tree and every single tensor replaced by fn(path, it)."""
    result: Any
    if value is None:
        result = None
    elif isinstance(value, Tree):
        result = fn(path, value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {
            field.name: map_parts(fn, getattr(value, field.name), f"{path}.{field.name}" if path else field.name)
            for field in dataclasses.fields(value)
        }
        result = dataclasses.replace(value, **changed)
    elif isinstance(value, Mapping):
        result = {key: map_parts(fn, item, f"{path}[{key}]") for key, item in value.items()}
    elif isinstance(value, tuple):
        result = tuple(map_parts(fn, item, f"{path}[{position}]") for position, item in enumerate(value))
    else:
        result = fn(path, value)
    return result  # type: ignore[no-any-return]


def loaded(value: T) -> T:
    """The same structure with every tree's buffer at hand."""
    return map_parts(lambda _path, leaf: leaf.loaded() if isinstance(leaf, Tree) else leaf, value)
