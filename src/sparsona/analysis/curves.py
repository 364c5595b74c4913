"""Learning curves of the seeds of a method: which are read, and at which rounds they can be averaged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sparsona.analysis.groups import Group
from sparsona.analysis.measure import LOSS, Measure, measure_called, measure_of_metric
from sparsona.analysis.view import RunView
from sparsona.core.errors import SparsonaError, nearest
from sparsona.core.targets import ALL_METRICS


def stops_by(views: Sequence[RunView]) -> Measure | None:
    """The figure that `patience_metric` of all these runs names; None: they name none, or not the same."""
    named = [view.config.get("patience_metric") for view in views]
    if not isinstance(named[0], str) or any(other != named[0] for other in named):
        return None
    name, colon, end = named[0].partition(":")
    judged = views[0].measure
    measure = judged if name == judged.name else measure_called(name)
    return replace(measure, better="low" if end == "low" else "high") if colon else measure


def drawn_measure(views: Sequence[RunView], metric: str | None = None) -> Measure:
    """The figure whose curves are drawn.

    Args:
        views: the runs.
        metric: "accuracy", "loss" or a metric of the runs; None: what they stop by, if it was evaluated already, and
            otherwise what they are judged by.
    """
    judged, stopping = views[0].measure, stops_by(views)
    if metric is None:
        return stopping if stopping and any(curves_of(view, stopping).curves for view in views) else judged
    known = {one.name: one for one in (*map(measure_of_metric, _metrics(views)), LOSS, stopping, judged) if one}
    if metric not in known:
        name = nearest(str(metric), (*known, *ALL_METRICS))
        raise SparsonaError(
            f"curves of '{metric}', which was not recorded",
            expected=f"one of {', '.join(sorted(known))}",
            hint="" if name is None else f"did you mean '{name}'?" if name in known else f"train with metrics={[name]}",
        )
    return known[metric]


def curves_of(view: RunView, measure: Measure) -> RunView:
    """The run with the curves of a figure, as if it were judged by that; none where it does not have the figure."""
    if measure.name == view.measure.name:
        return view
    found = view.loss_curves if measure.name == "loss" else view.metric_curves.get(measure.name, {})
    return replace(view, measure=measure, curves={point: list(curve) for point, curve in found.items()})


def _metrics(views: Sequence[RunView]) -> list[str]:
    return [name for view in views for name in view.metric_curves]


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
