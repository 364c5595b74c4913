"""Means of trees as running sums: a server adds one update at a time, and memory does not grow with the cohort.

Sums are in double precision, so that the mean of one model is that model to the bit. Each starts with the first tree
that is added, not with zeros: 0.0 + -0.0 is 0.0. Adding modifies the sum that is added to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Literal

from sparsona.core.errors import SparsonaError
from sparsona.core.round import Round
from sparsona.core.tree import Tree, check_layouts

if TYPE_CHECKING:
    from torch import Tensor

Weight = Literal["examples", "batches", "equal"]
WEIGHT_TEXT = "what a client's update weighs by"


def client_weight(by: Weight, round_: Round) -> float:
    """The weight of a client's update in a mean.

    Args:
        by: what it weighs by: the client's training examples, its batches in an epoch, or nothing.
        round_: the round, bound to the client.

    Returns:
        The weight.

    Example:
        >>> from sparsona.core.method import Client, Seeds
        >>> client_weight("batches", Round(0, 1, 1.0, 4, Seeds(0), Client(0, num_examples=10)))
        3
    """
    assert round_.client is not None
    count = round_.client.num_examples
    return {"examples": count, "batches": -(-count // round_.batch_size), "equal": 1.0}[by]


@dataclass(frozen=True)
class WeightedSum:
    """The sum of trees times their weights, and the sum of the weights.

    Args:
        total: the sum in double precision; None: nothing was added yet.
        weight: the sum of the weights.

    Example:
        >>> import torch
        >>> zero, one = (Tree.of({"w": torch.tensor([value])}) for value in (0.0, 1.0))
        >>> WeightedSum().add(zero, weight=1).add(one, weight=3).mean(otherwise=zero)["w"].item()
        0.75
    """

    total: Tree | None = None
    weight: float = 0.0

    def add(self, tree: Tree, weight: float) -> WeightedSum:
        """This sum with one more tree.

        Args:
            tree: the tree.
            weight: its weight.

        Returns:
            The new sum; this one must not be used afterwards.
        """
        return self.merge(WeightedSum(tree.like(tree.flat.double() * weight), weight))

    def merge(self, other: WeightedSum) -> WeightedSum:
        """The sum of everything added to this sum or to another.

        Args:
            other: the other sum.

        Returns:
            The new sum; neither of the two must be used afterwards.
        """
        if self.total is None or other.total is None:
            return other if self.total is None else self
        check_layouts(self.total, other.total)
        return WeightedSum(self.total.like(self.total.flat.add_(other.total.flat)), self.weight + other.weight)

    def mean(self, otherwise: Tree) -> Tree:
        """The weighted mean.

        Args:
            otherwise: the result if nothing was added, or nothing of any weight; also gives the type of the result.

        Returns:
            The mean.

        Raises:
            SparsonaError: the sum of the weights is not finite.
        """
        if self.total is None or self.weight == 0:
            return otherwise
        _check_sum(self.weight)
        check_layouts(otherwise, self.total)
        return otherwise.like((self.total.flat / self.weight).to(otherwise.flat.dtype))


@dataclass(frozen=True)
class IndexedSum:
    """The sum of masked trees times their weights, and for each entry the sum of the weights of masks that cover it.

    Args:
        total: the sum in double precision; None: nothing was added yet.
        weights: the sum of the weights of each entry.

    Example:
        >>> import torch
        >>> tree = Tree.of({"w": torch.tensor([2.0, 0.0])})
        >>> full = Tree.of({"w": torch.tensor([4.0, 4.0])})
        >>> total = IndexedSum().add(tree, tree.like(tree.flat > 0), 1.0).add(full, full.like(full.flat > 0), 1.0)
        >>> total.mean(otherwise=full)["w"].tolist()
        [3.0, 4.0]
    """

    total: Tree | None = None
    weights: Tensor | None = None

    def add(self, tree: Tree, mask: Tree, weight: float) -> IndexedSum:
        """This sum with one more tree.

        Args:
            tree: the tree, zero outside its mask.
            mask: its mask.
            weight: its weight.

        Returns:
            The new sum; this one must not be used afterwards.
        """
        share = tree.like(tree.flat.double() * weight)
        return self.merge(IndexedSum(share, mask.flat.double() * weight))

    def merge(self, other: IndexedSum) -> IndexedSum:
        """The sum of everything added to this sum or to another.

        Args:
            other: the other sum.

        Returns:
            The new sum; neither of the two must be used afterwards.
        """
        if self.total is None or other.total is None or self.weights is None or other.weights is None:
            return other if self.total is None else self
        check_layouts(self.total, other.total)
        total = self.total.like(self.total.flat.add_(other.total.flat))
        return IndexedSum(total, self.weights.add_(other.weights))

    def mean(self, otherwise: Tree) -> Tree:
        """For each entry the mean over the trees whose masks cover it, 0 where none does.

        Args:
            otherwise: the result if nothing was added; also gives the type of the result.

        Returns:
            The mean.

        Raises:
            SparsonaError: a sum of weights is not finite.
        """
        if self.total is None or self.weights is None:
            return otherwise
        _check_sum(float(self.weights.amax()) if self.weights.numel() else 0.0)
        check_layouts(otherwise, self.total)
        weights = self.weights.where(self.weights > 0, 1.0)
        return otherwise.like((self.total.flat / weights).to(otherwise.flat.dtype))


def _check_sum(weight: float) -> None:
    """Weights that are finite can add up to one that is not: the mean would then be NaN."""
    if not isfinite(weight):
        raise SparsonaError(f"weights of a mean that add up to {weight}", expected="a finite sum")


def count_mean(items: Iterable[tuple[Tree, Tree]]) -> Tree:
    """For each entry, the sum of trees divided by the number of masks that cover it, or by 1 if none does.

    Args:
        items: trees and their masks, one or more.

    Returns:
        The mean.

    Example:
        >>> import torch
        >>> tree = Tree.of({"w": torch.tensor([2.0, 0.0])})
        >>> full = Tree.of({"w": torch.tensor([4.0, 4.0])})
        >>> count_mean([(tree, tree.like(tree.flat > 0)), (full, full.like(full.flat > 0))])["w"].tolist()
        [3.0, 4.0]
    """
    import torch

    pairs = iter(items)
    first, mask = next(pairs)
    total, count = first.flat.double(), mask.flat.to(torch.int32)
    for tree, mask in pairs:
        check_layouts(first, tree, mask)
        total.add_(tree.flat)
        count.add_(mask.flat)
    return first.like(total.div_(count.clamp_(min=1)).to(first.flat.dtype))
