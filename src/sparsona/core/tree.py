"""Named tensors in one flat buffer, and arithmetic over them.

A `Tree` maps names to tensors; all of them are views of `flat`, so that scaling, masking or adding a whole model is one
operation. Trees are values: no function here modifies its arguments.
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
    """Cached facts about a tree's value, shared by all trees that are known to hold the same value.

    The same object means the same value, loaded or stored: trees are compared by it instead of entry by entry.
    """

    __slots__ = ("counts", "digest")

    def __init__(self) -> None:
        # Cached because reading either from a GPU waits for all pending work.
        self.counts: tuple[int, ...] | None = None
        self.digest: bytes | None = None


class Tree(Mapping[str, "Tensor"]):
    """An immutable mapping of names to tensors that share one flat buffer.

    A tree can be stored, packed or moved to another memory: `flat` then loads the buffer on each access.

    Args:
        layout: names and shapes of the tensors, in the order of the buffer.
        flat: the buffer; its last dimension has `layout.size` entries.
        identity: that of another tree which holds the same value.

    Example:
        >>> import torch
        >>> tree = Tree.of({"weight": torch.ones(2, 2), "bias": torch.zeros(2)})
        >>> tree["bias"].shape, tree.flat.tolist()
        (torch.Size([2]), [1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
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
        """Copy named tensors into a flat buffer, detached.

        Args:
            named: tensors of one dtype.
            layout: the order of the tensors; None: that of `named`.

        Returns:
            The tree.

        Example:
            >>> import torch
            >>> Tree.of({"w": torch.ones(3)})
            Tree(1 tensors, 3 entries, torch.float32)
        """
        import torch

        if layout is None:
            layout = Layout(tuple(Slot(name, tuple(value.shape)) for name, value in named.items()))
        if not layout.slots:
            return cls(layout, torch.zeros(0))
        return cls(layout, torch.cat([named[slot.name].detach().reshape(-1) for slot in layout.slots]))

    @property
    def flat(self) -> Tensor:
        """The buffer. That of a stored tree is loaded on each access."""
        if self._flat is not None:
            return self._flat
        assert self._stored is not None
        return self._stored.load()

    @property
    def identity(self) -> ValueIdentity:
        """Cached facts about this value; the same object for every tree that is known to hold it."""
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
        """The device of the buffer, or the one that it will be loaded to."""
        return self._backing.device

    def store(self) -> Stored:
        """Store the buffer, packed if it is bool.

        Returns:
            The stored buffer, which can be moved to another memory.
        """
        if self._stored is None:
            assert self._flat is not None
            self._stored = Stored(self._flat)
        self._flat = self._views = None
        return self._stored

    def loaded(self) -> Tree:
        """The same value with its buffer loaded, for repeated access. This tree stays stored."""
        if self._flat is not None:
            return self
        tree = Tree(self.layout, self.flat, self.identity)
        tree._stored = self._stored  # if that tree is stored as well, the two share one stored buffer
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

        if self.dtype is torch.bool and self.device.type == "cpu":  # pickled as bits, and stored at the other end
            return (_from_bits, (self.layout, self.bits(), self.shape, self.identity.counts, self.identity.digest))
        return (Tree, (self.layout, self.flat))

    def __repr__(self) -> str:
        return f"Tree({len(self)} tensors, {self.layout.size} entries, {self.dtype})"

    def like(self, flat: Tensor) -> Tree:
        """Another tree of the same layout.

        Args:
            flat: its buffer.

        Returns:
            The tree.
        """
        return Tree(self.layout, flat)

    def select(self, names: Iterator[str] | tuple[str, ...] | list[str]) -> Tree:
        """A tree of some of the tensors.

        Args:
            names: the tensors, in any order.

        Returns:
            A detached copy, in this tree's order.
        """
        layout, loaded = self.layout.select(names), self.loaded()
        return Tree.of({name: loaded[name] for name in layout.names}, layout)


def _from_bits(
    layout: Layout, bits: Tensor, shape: tuple[int, ...], counts: tuple[int, ...] | None, digest: bytes | None
) -> Tree:
    tree = Tree(layout, Stored.of_bits(bits, shape))
    tree.identity.counts, tree.identity.digest = counts, digest
    return tree


def join(layout: Layout, *parts: Tree) -> Tree:
    """One tree of the tensors of several; gradients flow through it, unlike through `Tree.of`.

    Args:
        layout: the order of the tensors.
        parts: trees that have all of them between them.

    Returns:
        The tree.

    Example:
        >>> import torch
        >>> head, body = Tree.of({"b": torch.ones(1)}), Tree.of({"a": torch.zeros(1)})
        >>> join(Layout((Slot("a", (1,)), Slot("b", (1,)))), head, body).flat.tolist()
        [0.0, 1.0]
    """
    import torch

    owner = {name: part for part in map(Tree.loaded, parts) for name in part}
    return Tree(layout, torch.cat([owner[name][name].reshape(-1) for name in layout.names]))


def check_layouts(first: Tree, *others: Tree) -> None:
    """Raise ValueError for trees whose entries are not the same parameters.

    Args:
        first: a tree.
        others: trees that must have its layout.
    """
    for other in others:
        if other.layout is not first.layout and other.layout.digest != first.layout.digest:
            raise ValueError(f"trees of different layouts: {first} and {other}")


def add(a: Tree, b: Tree) -> Tree:
    """The sum of two trees, entry by entry.

    Args:
        a: a tree.
        b: a tree of the same layout.

    Returns:
        A new tree.

    Example:
        >>> import torch
        >>> one = Tree.of({"w": torch.ones(2)})
        >>> add(one, one).flat.tolist()
        [2.0, 2.0]
    """
    check_layouts(a, b)
    return a.like(a.flat + b.flat)


def subtract(a: Tree, b: Tree) -> Tree:
    """The difference of two trees, entry by entry.

    Args:
        a: a tree.
        b: the tree to subtract, of the same layout.

    Returns:
        A new tree.

    Example:
        >>> import torch
        >>> one = Tree.of({"w": torch.ones(2)})
        >>> subtract(one, one).flat.tolist()
        [0.0, 0.0]
    """
    check_layouts(a, b)
    return a.like(a.flat - b.flat)


def scale(a: Tree, factor: float | Tensor) -> Tree:
    """A tree times a number.

    Args:
        a: a tree.
        factor: a number, or a tensor that broadcasts with the flat buffer.

    Returns:
        A new tree.

    Example:
        >>> import torch
        >>> scale(Tree.of({"w": torch.ones(2)}), 0.5).flat.tolist()
        [0.5, 0.5]
    """
    return a.like(a.flat * factor)


def zeros_like(a: Tree) -> Tree:
    """A tree of zeros.

    Args:
        a: a tree, for its layout, dtype and device.

    Returns:
        A new tree.

    Example:
        >>> import torch
        >>> zeros_like(Tree.of({"w": torch.ones(2)})).flat.tolist()
        [0.0, 0.0]
    """
    return a.like(a.flat.new_zeros(a.flat.shape))


def norm(a: Tree) -> Tensor:
    """The Euclidean norm over all entries.

    Args:
        a: a tree.

    Returns:
        A 0-dim tensor (one value for each client of a stack).

    Example:
        >>> import torch
        >>> norm(Tree.of({"w": torch.tensor([3.0, 4.0])})).item()
        5.0
    """
    length: Tensor = a.flat.norm(dim=-1)
    return length


def counts(mask: Tree) -> tuple[int, ...]:
    """The number of non-zero entries of each tensor; cached, since a tree does not change.

    Args:
        mask: a tree.

    Returns:
        One number for each tensor, in the layout's order.

    Example:
        >>> import torch
        >>> counts(Tree.of({"w": torch.tensor([True, False]), "b": torch.tensor([True])}))
        (1, 1)
    """
    import torch

    if mask.identity.counts is None:
        stored = mask._stored if mask._flat is None else None
        if stored is not None and stored.is_bits and len(mask.shape) == 1:
            mask.identity.counts = stored.counts(mask.layout.sizes)
            return mask.identity.counts
        tree, found = mask.loaded(), []
        if len(mask):
            found = torch.stack([tree[name].count_nonzero() for name in mask]).tolist()  # one wait for the GPU
        mask.identity.counts = tuple(found)
    return mask.identity.counts


def as_numbers(mask: Tree, dtype: torch.dtype) -> Tree:
    """A bool mask as numbers to multiply by: 1 inside, 0 outside. Its counts are cached already.

    Args:
        mask: a bool tree.
        dtype: the type of the numbers.

    Returns:
        A new tree.

    Example:
        >>> import torch
        >>> as_numbers(Tree.of({"w": torch.tensor([True, False])}), torch.float32).flat.tolist()
        [1.0, 0.0]
    """
    numbers = mask.like(mask.flat.to(dtype))
    numbers.identity.counts = counts(mask)
    return numbers


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors inside a State, Server or Work, each with the path of its field."""
    for place, leaf in parts(value, path):
        yield place, leaf.flat if isinstance(leaf, Tree) else leaf


def parts(value: Any, path: str = "") -> Iterator[tuple[str, Tree | Tensor]]:
    """The trees and single tensors inside a State, Server or Work; stored trees stay stored."""
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
            "dicts and dataclasses of them (a plain number would be a constant of a compiled step: use a 0-dim tensor)"
        )


def map_leaves(fn: Callable[[str, Tensor], Tensor], value: T, path: str = "") -> T:
    """The same structure with every tensor replaced by fn(path, tensor); an unchanged tree is the same object."""

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
    """The same structure with every tree loaded."""
    return map_parts(lambda _path, leaf: leaf.loaded() if isinstance(leaf, Tree) else leaf, value)
