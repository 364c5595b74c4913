"""Means of trees, as sums that add: a server adds one update at a time, and memory does not grow with the cohort.

Sums are in double precision, so that the mean of one model is that model to the bit. Each begins with the first tree
that is added, not with zeros: 0.0 + -0.0 is 0.0. Adding consumes the sum that is added to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparsona.core.tree import Tree, check_layouts

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class WeightedSum:
    """Trees times their weights, and the sum of the weights."""

    total: Tree | None = None  # in double precision; None: nothing was added yet
    weight: float = 0.0

    def add(self, tree: Tree, weight: float) -> WeightedSum:
        """This sum and one tree more."""
        return self.merge(WeightedSum(tree.like(tree.flat.double() * weight), weight))

    def merge(self, other: WeightedSum) -> WeightedSum:
        """The sum of what was added to either."""
        if self.total is None or other.total is None:
            return other if self.total is None else self
        check_layouts(self.total, other.total)
        return WeightedSum(self.total.like(self.total.flat.add_(other.total.flat)), self.weight + other.weight)

    def mean(self, otherwise: Tree) -> Tree:
        """The mean by weight, as numbers like those of `otherwise`, which is the mean of nothing."""
        if self.total is None:
            return otherwise
        check_layouts(otherwise, self.total)
        return otherwise.like((self.total.flat / self.weight).to(otherwise.flat.dtype))


@dataclass(frozen=True)
class IndexedSum:
    """Trees times their weights, and for each entry the sum of the weights of the masks that cover it."""

    total: Tree | None = None  # in double precision; None: nothing was added yet
    weights: Tensor | None = None

    def add(self, tree: Tree, mask: Tree, weight: float) -> IndexedSum:
        """This sum and one tree more, which is zero outside its mask."""
        share = tree.like(tree.flat.double() * weight)
        return self.merge(IndexedSum(share, mask.flat.double() * weight))

    def merge(self, other: IndexedSum) -> IndexedSum:
        """The sum of what was added to either."""
        if self.total is None or other.total is None or self.weights is None or other.weights is None:
            return other if self.total is None else self
        check_layouts(self.total, other.total)
        total = self.total.like(self.total.flat.add_(other.total.flat))
        return IndexedSum(total, self.weights.add_(other.weights))

    def mean(self, otherwise: Tree) -> Tree:
        """Entry by entry the mean over the masks that cover it, 0 where none does; `otherwise` if nothing was added."""
        if self.total is None or self.weights is None:
            return otherwise
        check_layouts(otherwise, self.total)
        weights = self.weights.where(self.weights > 0, 1.0)
        return otherwise.like((self.total.flat / weights).to(otherwise.flat.dtype))


def count_mean(items: Iterable[tuple[Tree, Tree]]) -> Tree:
    """Entry by entry, the sum of trees over the number of masks that cover it, or over 1 if none does."""
    import torch

    rest = iter(items)
    first, mask = next(rest)
    total, count = first.flat.double(), mask.flat.to(torch.int32)
    for tree, mask in rest:
        check_layouts(first, tree, mask)
        total.add_(tree.flat)
        count.add_(mask.flat)
    return first.like(total.div_(count.clamp_(min=1)).to(first.flat.dtype))
