"""Constants of a loss at a point: gradients, their variance, and curvature by products with the Hessian.

A point is a tuple of vectors, one for each block of variables (u and v of a partly personal model, or one block). A
loss maps such a tuple and a batch to a scalar, the mean over the batch. Nothing here knows of methods.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Point = tuple[Tensor, ...]
Loss = Callable[[Point, Any], Tensor]
MOST_PRODUCTS, CLOSE = 30, 1e-3  # of a power iteration: how many at most, and the change at which it ends


@dataclass(frozen=True, eq=False)
class Objective:
    """F(x): the mean of a loss over all examples of some batches.

    Args:
        loss: the mean loss over a batch, as a function of a point.
        batches: the data.
        sizes: the examples of each batch.
    """

    loss: Loss
    batches: Sequence[Any]
    sizes: Sequence[int]

    def _mean(self, of: Callable[[Any], Point]) -> Point:
        total: list[Tensor] = []
        for batch, size in zip(self.batches, self.sizes, strict=True):
            some = of(batch)
            scaled = [value * (size / sum(self.sizes)) for value in some]
            total = [a + b for a, b in zip(total, scaled, strict=True)] if total else scaled
        return tuple(total)

    def value(self, x: Point) -> float:
        """F(x)."""
        with torch.no_grad():
            return float(self._mean(lambda batch: (self.loss(x, batch),))[0])

    def gradient(self, x: Point) -> Point:
        """The gradient of F, by block."""
        return self._mean(lambda batch: gradient(self.loss, x, batch))

    def hessian_times(self, x: Point, direction: Point) -> Point:
        """The Hessian of F at x times a direction, by block."""

        def one(batch: Any) -> Point:
            leaves = tuple(block.detach().requires_grad_() for block in x)
            first = torch.autograd.grad(self.loss(leaves, batch), leaves, create_graph=True, materialize_grads=True)
            along = sum(((g * d).sum() for g, d in zip(first, direction, strict=True)), start=first[0].new_zeros(()))
            if not along.requires_grad:  # linear in x
                return tuple(torch.zeros_like(block) for block in x)
            return torch.autograd.grad(along, leaves, materialize_grads=True)

        return tuple(block.detach() for block in self._mean(one))


def gradient(loss: Loss, x: Point, batch: Any) -> Point:
    """The gradient of a batch's mean loss, by block."""
    leaves = tuple(block.detach().requires_grad_() for block in x)
    found = torch.autograd.grad(loss(leaves, batch), leaves, materialize_grads=True)
    return tuple(block.detach() for block in found)


def squared_errors(loss: Loss, x: Point, mean: Point, batches: Iterable[Any]) -> list[list[float]]:
    """For each block, ||g(x; batch) - mean||^2 of every batch: their mean estimates the variance of Assumption 2."""
    found: list[list[float]] = [[] for _ in x]
    for batch in batches:
        for block, (g, m) in enumerate(zip(gradient(loss, x, batch), mean, strict=True)):
            found[block].append(float((g - m).double().square().sum()))
    return found


def block_norm(objective: Objective, x: Point, row: int, column: int, random: torch.Generator) -> float:
    """The spectral norm of one block of the Hessian, by power iteration on products with the Hessian.

    Args:
        objective: F.
        x: the point.
        row: the block that is differentiated first.
        column: the block that is differentiated second; equal to `row` on the diagonal.
        random: where the iteration begins.

    Returns:
        The largest singular value. A power iteration approaches it from below.
    """

    def times(block: int, other: int, direction: Tensor) -> Tensor:
        whole = tuple(direction if place == block else torch.zeros_like(part) for place, part in enumerate(x))
        return objective.hessian_times(x, whole)[other]

    vector = torch.randn(x[column].shape, generator=random).to(x[column])
    size = 0.0
    for _ in range(MOST_PRODUCTS):
        vector = vector / vector.norm()
        image = times(column, row, vector)
        if row == column:
            before, size, vector = size, float(image.norm()), image
        else:
            before, size = size, float(image.norm())
            vector = times(row, column, image / max(size, 1e-30))
        if not float(vector.norm()) or not math.isfinite(size):
            break
        if abs(size - before) <= CLOSE * size:
            break
    return size


def least_curvature(objective: Objective, x: Point, largest: float, random: torch.Generator) -> float:
    """The least eigenvalue of the Hessian of the first block: power iteration on H - L I, whose eigenvalues are all
    negative. It is approached from above, so that one below 0 proves that F is not convex."""
    vector = torch.randn(x[0].shape, generator=random).to(x[0])
    rest = tuple(torch.zeros_like(part) for part in x[1:])
    least = math.inf
    for _ in range(MOST_PRODUCTS):
        vector = vector / vector.norm()
        image = objective.hessian_times(x, (vector, *rest))[0]
        before, least = least, float(vector @ image)
        if abs(least - before) <= CLOSE * max(largest, 1e-30) * 0.01:
            break
        vector = image - largest * vector
        if not float(vector.norm()):
            break
    return least


def jacobian_norm(outputs: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """The spectral norm of a function's Jacobian, from its rows: for functions of few outputs."""
    leaf = x.detach().requires_grad_()
    values = outputs(leaf).reshape(-1)
    rows = []
    for place in range(len(values)):
        (row,) = torch.autograd.grad(values[place], leaf, retain_graph=True, materialize_grads=True)
        rows.append(row.double())
    return float(torch.linalg.matrix_norm(torch.stack(rows), 2))


def diameter(gradients: Tensor) -> float:
    """The largest distance between two rows."""
    return float(torch.cdist(gradients.double(), gradients.double()).max())
