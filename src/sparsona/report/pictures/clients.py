"""The picture of what personalization does to clients: violins of the change, and the change against samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sparsona.analysis.clients import Change, ClientEffects
from sparsona.analysis.extra import import_extra
from sparsona.analysis.format import UNKNOWN
from sparsona.report.palette import BETTER, EQUAL, INK, MUTED, PAGE, WORSE
from sparsona.report.pictures.figure import Picture, new_picture, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_HINTS, MOST_DOTS = 400, 1500


def draw_clients(effects: ClientEffects) -> Picture:
    """A violin per kind of data at the left (dot: median; bar: middle half), and a scatter plot of each beside it."""
    count = len(effects.changes)
    sentences = [*map(_sentence, effects.changes), *effects.sentences()]
    with style():
        picture = new_picture(effects.title, sentences, 3.9)
        violins, *scatters = picture.figure.subplots(
            1, 1 + count, sharey=True, width_ratios=[0.4 + 0.8 * count, *[6 / count] * count], squeeze=False
        )[0]
        for place, change in enumerate(effects.changes):
            draw_violin(picture, violins, place, change, change.name)
            draw_scatter(picture, scatters[place], change)
        violins.set_xticks(range(count), [change.name for change in effects.changes])
        violins.tick_params(axis="x", labelcolor=INK, length=0)
        violins.set_xlim(-0.6, count - 0.4)
        measure = effects.measure
        violins.set_ylabel(f"change of {measure.title}, {'percentage points' if measure.unit else 'above 0: better'}")
        violins.yaxis.set_major_formatter(
            lambda value, _: measure.show_gain(value, 0 if float(value).is_integer() else 1)
        )
        for axes in (violins, *scatters):
            axes.grid(axis="y")
            axes.axhline(0, color=MUTED, linewidth=1)
        handles = [
            scatters[0].scatter([], [], color=colour, label=name, linewidth=0)
            for name, colour in (("better", BETTER), ("hurt", WORSE), ("equal", EQUAL))
        ]
        (mean,) = scatters[0].plot([], [], "--", color=MUTED, linewidth=1, label="mean")
        picture.figure.legend(handles=[*handles, mean], loc="outside lower right", ncols=4, columnspacing=1)
    return picture


def _sentence(change: Change) -> str:
    found = change.row()
    text = f"{change.name}: {found['clients']} clients, {found['hurt']} hurt, {found['helped']} better; "
    text += f"mean {found['mean']}, from {found['worst']} to {found['best']} {change.measure.gain_unit}"
    samples = found["with samples"]
    return text + ("" if samples == UNKNOWN else f"; rank correlation with samples {samples}")


def draw_violin(picture: Picture, axes: Axes, place: int, change: Change, name: str, colour: str = BETTER) -> None:
    """A kernel density from the lowest to the highest change; the bar is the middle half, the dot the median."""
    low, quarter, median, three, high = np.percentile(change.gains, [0, 25, 50, 75, 100]).tolist()
    drawn: dict[str, Any] = axes.violinplot([change.gains], [place], widths=0.8, showextrema=False)
    (body,) = drawn["bodies"]
    body.set(facecolor=colour, alpha=0.3)
    measure = change.measure
    first, last, least, most = (measure.show_gain(one) for one in (low, high, quarter, three))
    text = f"from {first} to {last} {measure.gain_unit}, middle half {least} to {most}"
    picture.hint(body, f"{name}: {text}")
    axes.vlines(place, low, high, color=MUTED, linewidth=1)
    axes.vlines(place, quarter, three, color=colour, linewidth=6)
    axes.plot(place, median, "o", color=PAGE, markersize=4, markeredgewidth=0, zorder=3)


def draw_scatter(picture: Picture, axes: Axes, change: Change) -> None:
    """Each client's change against its number of training examples; of very many clients, some."""
    drawn = np.arange(len(change.clients))
    if len(drawn) > MOST_DOTS:
        drawn = np.linspace(0, len(drawn) - 1, MOST_DOTS).round().astype(int)
    some = "" if len(drawn) == len(change.clients) else f", {len(drawn):,} drawn"
    axes.set_title(f"{change.name}{some}", loc="left")
    axes.axhline(float(change.gains.mean()), color=MUTED, linewidth=1, linestyle="--")
    gains, samples = change.gains[drawn], change.samples[drawn]
    colours = [BETTER if gain > 1e-9 else WORSE if gain < -1e-9 else EQUAL for gain in gains]
    dots = axes.scatter(samples, gains, 26 if len(drawn) <= 200 else 10, colours, linewidth=0, alpha=0.7)
    if len(drawn) <= MOST_HINTS:
        picture.hint(dots, *(_about(change, place) for place in drawn))
    ticker = import_extra("matplotlib.ticker", "pictures")
    axes.xaxis.set_major_locator(ticker.MaxNLocator("auto", integer=True, min_n_ticks=1))
    axes.set_xlabel("training examples of a client")


def _about(change: Change, place: np.integer) -> str:
    measure = change.measure
    before, after = (measure.brief(found[place]) for found in (change.before, change.after))
    return (
        f"client {change.who(int(place))}: {before} to {after}, {measure.show_gain(change.gains[place])} "
        f"{measure.gain_unit}; {change.samples[place]:,} training examples"
    )
