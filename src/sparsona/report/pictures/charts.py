"""Pictures of charts: lines with bands or error bars, and points with names beside them."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsona.analysis.charts import LineChart, Mark, Series
from sparsona.analysis.extra import import_extra
from sparsona.analysis.format import human_bytes, signed
from sparsona.report.palette import INK, MUTED, PAGE, colour_at, dash_at, mark_at
from sparsona.report.pictures.figure import Picture, new_picture, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

MOST_HINTS = 60
SIDES = ((1, 1), (-1, 1), (1, -1), (-1, -1), (0, 1), (0, -1))  # of a mark, for its name: across, and up


def draw_chart(chart: LineChart) -> Picture:
    """One plot with a legend under it; series of one method share its colour."""
    with style():
        names = list(dict.fromkeys(series.label for series in chart.series))
        picture = new_picture(chart.title, chart.sentences(), 4.2 + 0.18 * (len(names) // 4))
        axes = picture.figure.subplots()
        handles: dict[str, Any] = {}
        for series in chart.series:
            drawn = _draw(picture, axes, chart, series, names.index(series.label))
            if not series.is_faint or series.label not in {s.label for s in chart.series if not s.is_faint}:
                handles.setdefault(series.label, drawn)
        axes.grid(axis="y")
        axes.set_xlabel(chart.x_title)
        axes.set_ylabel(chart.y_title)
        _scale(axes, chart)
        if chart.y_unit == "points":
            axes.axhline(0, color=MUTED, linewidth=1)
        if len(names) > 1:
            picture.figure.legend(
                handles=list(handles.values()),
                labels=list(handles),
                loc="outside lower left",
                ncols=min(4, len(handles)),
                columnspacing=1.5,
            )
        _write_texts(picture, axes, chart)
    return picture


def _draw(picture: Picture, axes: Axes, chart: LineChart, series: Series, number: int) -> Any:
    place = number if series.place is None else series.place
    colour = MUTED if series.place is None else colour_at(place)
    y = [mark.y for mark in series.marks]
    beside = _dodge(chart, series)
    x = [mark.x + beside for mark in series.marks]
    _, dash = dash_at(place)
    if series.style == "level":
        return axes.axhline(y[0], color=colour, linewidth=1.5, linestyle=":")
    if series.style == "line":
        band = [(m.x, m.low, m.high) for m in series.marks if m.low is not None and m.high is not None]
        if band and not series.is_faint:
            across, low, high = (list(part) for part in zip(*band, strict=True))
            axes.fill_between(across, low, high, color=colour, alpha=0.15, linewidth=0)
        width, dash = (1.2, ":") if series.is_faint else (2, dash)
        (line,) = axes.plot(x, y, color=colour, linewidth=width, linestyle=dash)
        return line
    for mark in series.marks:
        if mark.spread is not None:
            axes.vlines(mark.x + beside, mark.y - mark.spread, mark.y + mark.spread, color=colour, linewidth=1.5)
    if series.style == "joined" and len(x) > 1:
        axes.plot(x, y, color=colour, linewidth=1.5, linestyle=dash)
    _, shape = mark_at(place)
    dots = axes.scatter(x, y, 46, colour, marker=shape, linewidth=1, edgecolors=PAGE, zorder=3)
    if len(series.marks) <= MOST_HINTS:
        picture.hint(dots, *(_about(chart, series, mark) for mark in series.marks))
    return dots


def _write_texts(picture: Picture, axes: Axes, chart: LineChart) -> None:
    """Names beside marks, each on the side where it covers the least of lines, marks and other names."""
    marks = [mark for series in chart.series for mark in series.marks if mark.text]
    if not marks:
        return
    picture.figure.draw_without_rendering()  # what is where in pixels is known afterwards
    taken = np.concatenate([_pixels(axes, series) for series in chart.series])
    for mark in marks:
        text = axes.annotate(
            mark.text, (mark.x, mark.y), (0, 0), "data", "offset points", size=8, color=INK, parse_math=False
        )
        covered = [_covered(_move(text, side), axes, taken) for side in SIDES]
        box = _move(text, SIDES[int(np.argmin(covered))])
        own = np.meshgrid(np.linspace(box.x0, box.x1, 30), np.linspace(box.y0, box.y1, 6))
        taken = np.concatenate([taken, np.stack(own, axis=-1).reshape(-1, 2)])


def _move(text: Annotation, side: tuple[int, int]) -> Bbox:
    across, up = side
    text.set_position((7 * across, 7 * up if across == 0 else 3 * up))
    text.set(ha=("center", "left", "right")[across], va=("center", "bottom", "top")[up])
    return text.get_window_extent()


def _covered(box: Bbox, axes: Axes, taken: np.ndarray) -> float:
    """How many of the pixels that are taken are in a box; one that leaves the plot is the last resort."""
    frame = axes.get_window_extent()
    if box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 or box.y1 > frame.y1:
        return np.inf
    wide = box.padded(2)
    return float(((taken >= wide.min) & (taken <= wide.max)).all(axis=1).sum())


def _pixels(axes: Axes, series: Series) -> np.ndarray:
    """Pixels of a series' lines, marks and error bars, some of each."""
    places = axes.transData.transform([(mark.x, mark.y) for mark in series.marks])
    if series.style == "level":
        frame = axes.get_window_extent()
        places = np.array([(frame.x0, places[0][1]), (frame.x1, places[0][1])])
    ends = list(pairwise(places)) if series.style != "points" else []
    for mark in series.marks:
        if mark.spread is not None:
            bar = [(mark.x, mark.y - mark.spread), (mark.x, mark.y + mark.spread)]
            ends.append(tuple(axes.transData.transform(bar)))
    return np.concatenate([places, *(np.linspace(first, last, 100) for first, last in ends)])


def _dodge(chart: LineChart, series: Series) -> float:
    """How far a series stands beside its places, so that error bars of several at one place can be told apart."""
    others = [one for one in chart.series if one.style == "joined"]
    if chart.x_unit or series not in others or all(mark.spread is None for one in others for mark in one.marks):
        return 0.0
    places = [mark.x for one in others for mark in one.marks]
    return (others.index(series) - (len(others) - 1) / 2) * 0.01 * (max(places) - min(places))


def _about(chart: LineChart, series: Series, mark: Mark) -> str:
    label = f"{series.label}: {mark.text}" if mark.text else series.label
    return f"{label}; {chart.x_title} {chart.write_x(mark.x)}; {chart.y_title} {chart.write_y(mark)}"


def _scale(axes: Axes, chart: LineChart) -> None:
    ticker = import_extra("matplotlib.ticker", "pictures")
    if chart.y_unit == "%":
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}%")
    elif chart.y_unit == "points":
        axes.yaxis.set_major_formatter(lambda value, _: signed(value, 0 if float(value).is_integer() else 1))
    if chart.x_unit == "bytes":
        axes.xaxis.set_major_formatter(lambda value, _: human_bytes(value, 3) if value > 0 else "0")
        axes.set_xlim(left=0)
    elif chart.x_unit == "log":
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    marks = [mark for series in chart.series for mark in series.marks if series.style != "level"]
    places = sorted({mark.x for mark in marks})
    if chart.x_unit == "" and 1 < len(places) <= 12:  # a few values that were chosen: densities, capacities, targets
        axes.set_xticks(places, [chart.write_x(value) for value in places])
    axes.margins(x=0.08 if any(mark.text for mark in marks) else 0.03, y=0.1)
    if chart.x_unit == "bytes":
        axes.set_xlim(left=0)
