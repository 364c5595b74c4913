"""Means over an inbox that is walked once. Sums are in double precision: memory does not grow with the cohort, and the
mean of one model is that model to the bit."""

from __future__ import annotations

from collections.abc import Iterable

from sparsona.core.tree import Tree, check_layouts


def weighted_mean(items: Iterable[tuple[Tree, float]], otherwise: Tree) -> Tree:
    """The mean of trees by weight, in the order given; `otherwise` if there are none."""
    total = None
    weights = 0.0
    for tree, weight in items:
        check_layouts(otherwise, tree)
        share = tree.flat.double() * weight
        total = share if total is None else total.add_(share)
        weights += weight
    if total is None:
        return otherwise
    return otherwise.like((total / weights).to(otherwise.flat.dtype))


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
