"""The picture of bounds: each theorem's over rounds, and the quantity that it bounds as measured, on one log scale."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sparsona.analysis.bounds import Bound, Bounds, number
from sparsona.analysis.extra import import_extra
from sparsona.core.errors import SparsonaError
from sparsona.report.palette import COLOURS, MUTED
from sparsona.report.pictures.figure import Picture, new_picture, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ACROSS, HIGH = 2, 3.1  # panels in a row, and inches of each


def draw_bounds(found: Bounds) -> Picture:
    """A panel for each theorem that speaks of rounds: a line for the bound, dots for the measured quantity."""
    panels = found.curves
    if not panels:
        raise SparsonaError(
            f"{found.title}: no bound over rounds to draw",
            expected="a run of which a theorem over rounds speaks",
            hint="`sparsona bounds` without --out prints what there is",
        )
    rows = math.ceil(len(panels) / ACROSS)
    sentences = [found.applies, *(f"{one.theorem}: {_sentence(one)}" for one in panels)]
    with style():
        picture = new_picture(f"Bounds: {found.title}", sentences, HIGH * rows + 0.3)
        every = picture.figure.subplots(rows, min(ACROSS, len(panels)), squeeze=False).ravel()
        for axes, one in zip(every, panels, strict=False):
            _panel(picture, axes, one)
        for axes in every[len(panels) :]:
            axes.set_visible(False)
        handles, labels = every[0].get_legend_handles_labels()
        picture.figure.legend(handles, labels, loc="outside lower right", ncols=2)
    return picture


def _sentence(one: Bound) -> str:
    ratio = "" if one.ratio is None else f", {number(one.ratio)} times as large as measured"
    value = "none for this run's step size or options" if one.value is None else number(one.value) + ratio
    return f"{value}; {len(one.violated)} of {len(one.assumptions)} assumptions violated"


def _panel(picture: Picture, axes: Axes, one: Bound) -> None:
    bound = [(x, y) for x, y in one.curve if y > 0 and math.isfinite(y)]
    (line,) = axes.plot(*zip(*bound, strict=True), color=COLOURS[1], label="bound") if bound else axes.plot([], [])
    picture.hint(line, f"{one.theorem}: {one.curve_label or 'bound'}")
    measured = [(x, y) for x, y in one.measured_curve if y > 0]
    if measured:
        (dots,) = axes.plot(*zip(*measured, strict=True), "o-", color=COLOURS[0], markersize=4, label="measured")
        hints = [f"round {x:g}: {number(y)}" for x, y in measured]
        picture.hint(dots, *hints[:1])
    axes.set_yscale("log")
    axes.grid(axis="y")
    axes.set_title(one.theorem, loc="left")
    if one.curve_label:
        axes.annotate(one.curve_label, (0.98, 0.5), xycoords="axes fraction", ha="right", color=MUTED, size=8)
    ticker = import_extra("matplotlib.ticker", "pictures")
    axes.xaxis.set_major_locator(ticker.MaxNLocator("auto", integer=True, min_n_ticks=1))
    axes.set_xlabel("completed rounds")
    axes.set_ylabel(one.unit)
