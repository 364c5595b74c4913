"""Learning curves of the seeds of a method: which are read, and at which rounds they can be averaged."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sparsona.analysis.groups import Group


def drawn_point(group: Group) -> str:
    """The evaluation point whose curve is drawn: the headline's own, unless another was measured more often."""
    view = group.views[0]
    lengths = {point: len(curve) for point, curve in view.curves.items()}
    if lengths.get(view.point, 0) > 1 or not lengths:
        return view.point
    return max(lengths, key=lambda point: (lengths[point], point == view.point))


def common_rounds(curves: Sequence[dict[int, float]]) -> list[int]:
    """Rounds that every seed has, because a mean over changing seeds would jump; without NaN."""
    common = set.intersection(*(set(curve) for curve in curves))
    return sorted(r for r in common if all(math.isfinite(curve[r]) for curve in curves))


def spent_by(group: Group, rounds: Sequence[int], name: str) -> list[float]:
    """What was spent up to each of these rounds, the mean over the group's seeds."""
    totals = np.zeros(len(rounds))
    for view in group.views:
        known = sorted(getattr(view, name))
        so_far = np.array([0, *(spent for _, spent in known)], dtype=np.float64)
        totals += so_far[np.searchsorted([r for r, _ in known], rounds, side="right")]
    return [float(total) for total in totals / len(group.views)]
