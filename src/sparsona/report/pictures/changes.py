"""Pictures of what several methods do to each client: violins, scatter plots, sorted bars, and bands over seeds."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsona.analysis.changes import Band, ClientBands, ClientChanges
from sparsona.analysis.clients import Change
from sparsona.analysis.extra import import_extra
from sparsona.analysis.format import cut, signed
from sparsona.report.palette import BETTER, EQUAL, INK, MUTED, WORSE, colour_at
from sparsona.report.pictures.clients import draw_scatter, draw_violin
from sparsona.report.pictures.figure import Picture, new_picture, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_changes(changes: ClientChanges) -> Picture:
    """The picture that `changes.kind` asks for."""
    with style():
        return {"violins": _draw_violins, "samples": _draw_samples, "differences": _draw_bars}[changes.kind](changes)


def draw_bands(found: ClientBands) -> Picture:
    """For each method and kind of data: the mean as a line, in a band from the lowest to the highest seed."""
    with style():
        rows = -(-len(found.bands) // 2)
        picture = new_picture(found.title, found.sentences(), 0.4 + 2.6 * rows)
        panels = _panels(picture, len(found.bands), 2)
        for axes, band in zip(panels, found.bands, strict=True):
            _draw_band(picture, axes, band)
            _mark_points(axes)
        for axes in panels[::2]:
            axes.set_ylabel("percentage points")
    return picture


def _draw_violins(changes: ClientChanges) -> Picture:
    names = changes.names
    picture = new_picture(changes.title, changes.sentences(), 4.0)
    panels = picture.figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
    for axes, name in zip(panels, names, strict=True):
        shown = [method for method in changes.methods if name in method.changes]
        for place, method in enumerate(shown):
            colour = colour_at(method.place)
            draw_violin(picture, axes, place, method.changes[name], method.label, colour)
        width = max(10, 110 // (len(shown) * len(names)))  # names that do not fit beside each other are broken
        labels = [
            "\n".join(
                [
                    *textwrap.wrap(cut(one.label, 60), width, break_long_words=False),
                    *_hurt(one.changes[name]).split(", "),
                ]
            )
            for one in shown
        ]
        axes.set_xticks(range(len(shown)), labels, parse_math=False)
        axes.tick_params(axis="x", labelcolor=INK)
        axes.set_xlim(-0.6, len(shown) - 0.4)
        axes.set_title(f"{name} data", loc="left")
        _mark_points(axes)
    panels[0].set_ylabel("change of accuracy, percentage points")
    return picture


def _draw_samples(changes: ClientChanges) -> Picture:
    """A row for each kind of data, a column for each method."""
    names, methods = changes.names, changes.methods
    picture = new_picture(changes.title, changes.sentences(), 0.5 + 2.7 * len(names))
    panels = picture.figure.subplots(len(names), len(methods), squeeze=False, sharey="row", sharex="col")
    for row, name in enumerate(names):
        for column, method in enumerate(methods):
            axes = panels[row][column]
            if name not in method.changes:
                axes.set_visible(False)
                continue
            draw_scatter(picture, axes, method.changes[name])
            title = textwrap.wrap(f"{cut(method.label, 60)}, {name}", max(12, 90 // len(methods)))
            axes.set_title("\n".join(title), loc="left", parse_math=False)
            axes.set_xlabel("training examples of a client" if row == len(names) - 1 else "")
            _mark_points(axes)
        panels[row][0].set_ylabel("percentage points")
    _add_legend(picture, panels[0][0])
    return picture


def _draw_bars(changes: ClientChanges) -> Picture:
    """A panel for each method: every client's change on test data, in ascending order."""
    methods = [method for method in changes.methods if "test" in method.changes]
    columns = min(2, len(methods))
    picture = new_picture(changes.title, changes.sentences(), 0.5 + 2.6 * -(-len(methods) // columns))
    panels = _panels(picture, len(methods), columns)
    for axes, method in zip(panels, methods, strict=True):
        change = method.changes["test"]
        order = np.argsort(change.gains, kind="stable")
        gains = change.gains[order]
        colours = [BETTER if gain > 1e-9 else WORSE if gain < -1e-9 else EQUAL for gain in gains]
        axes.bar(range(len(gains)), gains, 0.85 if len(gains) <= 60 else 1.0, color=colours, linewidth=0)
        axes.axhline(float(gains.mean()), color=MUTED, linewidth=1, linestyle="--")
        axes.set_title(f"{cut(method.label, 60)}: {_hurt(change)}", loc="left", parse_math=False)
        axes.set_xlabel("clients, sorted")
        axes.set_xticks([])
        _mark_points(axes)
        if len(gains) <= 400:
            texts = [_about(change, place) for place in order.tolist()]
            picture.hint_bands(axes, texts, are_columns=True)
    for axes in panels[::columns]:
        axes.set_ylabel("percentage points")
    _add_legend(picture, panels[0])
    return picture


def _draw_band(picture: Picture, axes: Axes, band: Band) -> None:
    places = np.arange(len(band.clients))
    axes.fill_between(places, band.low, band.high, color=BETTER, alpha=0.25, linewidth=0, step="mid")
    axes.plot(places, band.mean, color=BETTER, linewidth=1.8)
    undecided = f"{band.num_undecided} of {len(places)} depend on the seed"
    axes.set_title(f"{cut(band.label, 30)}, {band.name}: {undecided}", loc="left", parse_math=False)
    axes.set_xlabel(f"clients, sorted by their mean over {band.seeds} seeds")
    axes.set_xticks([])
    axes.margins(x=0.01)
    if len(places) <= 400:
        texts = [
            f"client {client}: mean {signed(float(mean))}, from {signed(float(low))} to {signed(float(high))}"
            for client, mean, low, high in zip(band.labels or band.clients, band.mean, band.low, band.high, strict=True)
        ]
        picture.hint_bands(axes, texts, are_columns=True)


def _panels(picture: Picture, count: int, columns: int) -> list[Axes]:
    """So many plots in a grid, with one scale upwards."""
    grid = picture.figure.subplots(-(-count // columns), columns, squeeze=False, sharey=True).ravel().tolist()
    for spare in grid[count:]:
        spare.set_visible(False)
    return grid[:count]


def _hurt(change: Change) -> str:
    return f"{100 * change.num_hurt / len(change.clients):.0f}% hurt, mean {signed(float(change.gains.mean()))}"


def _about(change: Change, place: int) -> str:
    before, after = 100 * change.before[place], 100 * change.after[place]
    return f"client {change.who(int(place))}: {before:.1f}% to {after:.1f}%, {signed(change.gains[place])} points"


def _mark_points(axes: Axes) -> None:
    axes.grid(axis="y")
    axes.axhline(0, color=MUTED, linewidth=1)
    axes.yaxis.set_major_formatter(lambda value, _: signed(value, 0 if float(value).is_integer() else 1))


def _add_legend(picture: Picture, axes: Axes) -> None:
    lines = import_extra("matplotlib.lines", "pictures")
    dots = (("better", BETTER), ("hurt", WORSE), ("equal", EQUAL))
    handles: list[Any] = [
        lines.Line2D([], [], color=colour, marker="o", linewidth=0, markersize=5, label=name) for name, colour in dots
    ]
    mean = lines.Line2D([], [], color=MUTED, linestyle="--", linewidth=1, label="mean")
    picture.figure.legend(handles=[*handles, mean], loc="outside lower right", ncols=4, columnspacing=1)
