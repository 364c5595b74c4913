"""Values of several clients as one value whose tensors have a first dimension of clients, and functions of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from sparsona.core.tree import Tree, leaves, map_leaves, parts

T = TypeVar("T")


def stack(values: Sequence[T]) -> T:
    """One value whose tensors have a first dimension of clients."""
    rows = [[tensor for _, tensor in leaves(value)] for value in values]
    stacked = iter([torch.stack(column) for column in zip(*rows, strict=True)])
    return map_leaves(lambda _path, _value: next(stacked), values[0])


class Template(Generic[T]):
    """The structure of a value, without its tensors, to be filled with others."""

    def __init__(self, value: T) -> None:
        self._empty = map_leaves(lambda _path, tensor: tensor.new_empty(tensor.shape, device="meta"), value)
        self.kinds = kinds_of(value)

    def fill(self, tensors: Iterable[Tensor]) -> T:
        """The structure with these tensors in it; they may be stacks."""
        source = iter(tensors)
        return map_leaves(lambda _path, _value: next(source), self._empty)


def kinds_of(value: Any) -> tuple[Any, ...]:
    """The paths, layouts, shapes and types of a value's tensors: values can share a stack or a program if they are
    equal. Trees of two networks may have equally many entries."""
    return tuple(
        (path, leaf.layout.digest if isinstance(leaf, Tree) else b"", tuple(leaf.shape), leaf.dtype)
        for path, leaf in parts(value)
    )


def over_clients(function: Callable[..., T], *values: Any) -> T:
    """`function` for every client of stacked values: dataclasses, trees, dicts and tuples of tensors.

    A tensor that the function returns unchanged is the same object as before.
    """
    flat = [tensor for value in values for _, tensor in leaves(value)]
    shape: list[Any] = []
    handed_on: list[int | None] = []

    def plain(*tensors: Tensor) -> tuple[Tensor, ...]:
        source = iter(tensors)
        result = function(*(map_leaves(lambda _path, _value: next(source), value) for value in values))
        shape[:] = [result]
        place = {id(tensor): number for number, tensor in enumerate(tensors)}
        found = [tensor for _, tensor in leaves(result)]
        handed_on[:] = [place.get(id(tensor)) for tensor in found]
        return tuple(tensor for tensor, number in zip(found, handed_on, strict=True) if number is None)

    made = iter(torch.func.vmap(plain, in_dims=0, out_dims=0)(*flat))
    found = iter([next(made) if number is None else flat[number] for number in handed_on])
    return map_leaves(lambda _path, _value: next(found), shape[0])


def where_kept(kept: Tensor, new: T, old: T) -> T:
    """`new` for the clients that are kept, `old` for the others; unchanged tensors are not read."""
    before = iter([tensor for _, tensor in leaves(old)])

    def choose(_path: str, value: Tensor) -> Tensor:
        was = next(before)
        return value if value is was else torch.where(kept.view(-1, *[1] * (value.dim() - 1)), value, was)

    return map_leaves(choose, new)
