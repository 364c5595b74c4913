"""The picture of bounds: each theorem's over rounds, and the quantity that it bounds as measured, on one log scale."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sparsona.analysis.bounds import Bound, Bounds
from sparsona.analysis.extra import import_extra
from sparsona.analysis.format import number
from sparsona.core.errors import SparsonaError
from sparsona.report.palette import COLOURS
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
        handles = {
            label: handle for axes in every for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        picture.figure.legend(
            list(handles.values()), list(handles), loc="outside lower right", ncols=3, columnspacing=1
        )
    return picture


def _sentence(one: Bound) -> str:
    ratio = "" if one.ratio is None else f", {number(one.ratio)} times as large as measured"
    value = "none for this run's step size or options" if one.value is None else number(one.value) + ratio
    return f"{value}; {len(one.violated)} of {len(one.assumptions)} assumptions violated"


def _panel(picture: Picture, axes: Axes, one: Bound) -> None:
    is_bound = one.value is not None
    for points, style_of, label in (
        (one.curve, "-" if is_bound else "-.", "bound" if is_bound else "no bound: what its title supposes"),
        (one.allowed_curve, "--", "bound, with the largest step size that the theorem allows"),
    ):
        if drawn := [(x, y) for x, y in points if y > 0 and math.isfinite(y)]:
            (line,) = axes.plot(*zip(*drawn, strict=True), style_of, color=COLOURS[1], label=label)
            picture.hint(line, f"{one.theorem}: {label}, {number(drawn[-1][1])} after {drawn[-1][0]:g} rounds")
    if measured := [(x, y) for x, y in one.measured_curve if y > 0]:
        (dots,) = axes.plot(*zip(*measured, strict=True), "o-", color=COLOURS[0], markersize=4, label="measured")
        picture.hint(dots, f"measured: {number(measured[-1][1])} after {measured[-1][0]:g} rounds")
    axes.set_yscale("log")
    axes.grid(axis="y")
    supposed = f" ({one.curve_label})" if one.curve and one.curve_label else ""
    axes.set_title(f"{one.theorem}{supposed}", loc="left")
    ticker = import_extra("matplotlib.ticker", "pictures")
    axes.xaxis.set_major_locator(ticker.MaxNLocator("auto", integer=True, min_n_ticks=1))
    axes.set_xlabel("completed rounds")
    axes.set_ylabel(one.unit)
