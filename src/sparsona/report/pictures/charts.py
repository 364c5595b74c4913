"""Pictures of charts: lines with bands or error bars, and points with names beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparsona.analysis.charts import LineChart, Mark, Series
from sparsona.analysis.extra import import_extra
from sparsona.analysis.format import human_bytes, signed
from sparsona.report.palette import COLOURS, INK, MUTED, PAGE
from sparsona.report.pictures.figure import Picture, new_picture, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINES = ("-", "--", "-.", ":")
SHAPES = ("o", "s", "D", "^", "v", "P", "X")
MOST_HINTS = 60


def draw_chart(chart: LineChart) -> Picture:
    """One plot with a legend under it; series of one name share a colour."""
    with style():
        names = list(dict.fromkeys(series.label for series in chart.series))
        picture = new_picture(chart.title, chart.sentences(), 4.2 + 0.18 * (len(names) // 4))
        axes = picture.figure.subplots()
        handles: dict[str, Any] = {}
        for series in chart.series:
            place = _colour_of(series.label, names)
            drawn = _draw(picture, axes, chart, series, place)
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
    return picture


def _colour_of(label: str, names: list[str]) -> int:
    """A series that is another point of a method ("FedSpa, global") has the method's colour."""
    longest = max((name for name in names if label == name or label.startswith(f"{name}, ")), key=len, default=label)
    shorter = [name for name in names if longest.startswith(f"{name}, ")]
    return names.index(min(shorter, key=len) if shorter else longest)


def _draw(picture: Picture, axes: Axes, chart: LineChart, series: Series, place: int) -> Any:
    colour, y = COLOURS[place % len(COLOURS)], [mark.y for mark in series.marks]
    beside = _dodge(chart, series)
    x = [mark.x + beside for mark in series.marks]
    dash = LINES[(place // len(COLOURS)) % len(LINES)]
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
    shape = SHAPES[place % len(SHAPES)]
    dots = axes.scatter(x, y, 46, colour, marker=shape, linewidth=1, edgecolors=PAGE, zorder=3)
    if len(series.marks) <= MOST_HINTS:
        picture.hint(dots, *(_about(chart, series, mark) for mark in series.marks))
    for mark in series.marks:
        if mark.text:
            axes.annotate(
                mark.text, (mark.x, mark.y), (7, 4), "data", "offset points", size=8, color=INK, parse_math=False
            )
    return dots


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
