"""Whether an update leaves the range of the others: by its norm against their median, without a clock or test data."""

from __future__ import annotations

from bisect import insort
from math import hypot
from statistics import median
from typing import TYPE_CHECKING

from sparsona.core.update import Part, Update

if TYPE_CHECKING:
    from torch import Tensor

FEWEST = 4  # norms that a median is taken of


def update_norm(update: Update) -> float:
    """The Euclidean norm of what an update sends, model or change: of all its parts but masks.

    Args:
        update: the update, as it arrived.

    Returns:
        The norm, in double precision.

    Example:
        >>> import torch
        >>> from sparsona.core.tree import Tree
        >>> from sparsona.core.update import dense
        >>> update_norm(Update(0, 0, 1.0, {"model": dense(Tree.of({"w": torch.tensor([3.0, -4.0])}))}))
        5.0
    """
    import torch

    norms = [
        float(torch.linalg.vector_norm(_values(part.plain()), dtype=torch.float64))
        for part in update.parts.values()
        if not part.is_mask
    ]
    return hypot(*norms)


def _values(part: Part) -> Tensor:
    """The values of a part, among zeros where it holds a whole tree: gathering them takes longer than adding zeros."""
    if part.whole is None or part.mask is None:
        return part.values
    return part.whole.flat.where(part.mask.flat, 0)


class Range:
    """The norms of a round's updates so far, in the order of clients: the same under every executor.

    Args:
        factor: how many times the median a norm may be; None: any.

    Example:
        >>> norms = Range(10.0)
        >>> for norm in (1.0, 2.0, 500.0, 3.0):
        ...     norms.add(norm)
        >>> norms.times_over(3.0), norms.times_over(500.0)
        (None, 200.0)
    """

    def __init__(self, factor: float | None) -> None:
        self.factor, self._norms = factor, list[float]()

    @property
    def is_known(self) -> bool:
        """Whether there are enough norms to judge by."""
        return len(self._norms) >= FEWEST

    def add(self, norm: float) -> None:
        """Add the norm of one more update."""
        insort(self._norms, norm)

    def times_over(self, norm: float) -> float | None:
        """How many times the median a norm is, if that is too many; None: it is in range, or too few are known."""
        if self.factor is None or not self.is_known:
            return None
        middle = median(self._norms)
        return norm / middle if norm > self.factor * middle > 0 else None
