"""The picture of what personalization does to devices: violins of the change, and the change against samples."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sparsona.analysis.clients import Change, Devices, signed
from sparsona.report.pictures.axes import Axis, density
from sparsona.report.pictures.drawing import Area, Box, Dot, Drawing, Hint, Line, Shape, Words

WIDTH, LEFT, RIGHT, GAP = 960, 66, 22, 34
HEIGHT, VIOLIN = 300, 96
MOST_HINTS, MOST_DOTS = 400, 1500


def draw_devices(devices: Devices) -> Drawing:
    """A violin per kind of data at the left (dot: median; bar: middle half), and a scatter plot of each beside it."""
    shapes: list[Shape] = [Words(LEFT, 34, _cut(devices.title, 88), "ink", size=18, bold=True)]
    top = 57.0
    for sentence in [*map(_told, devices.changes), *devices.sentences()]:
        shapes.append(Words(LEFT, top, _cut(sentence, 135), "ink", size=13))
        top += 19
    top += 24
    bottom = top + HEIGHT
    values = [float(value) for change in devices.changes for value in change.points]
    y = Axis.around([*values, 0.0], bottom, top)
    edge = LEFT + VIOLIN * len(devices.changes)
    shapes += _frame(y, LEFT, edge, labels=True)
    shapes.append(Words(16, (top + bottom) / 2, "change of accuracy, points", align="middle", turn=90))
    for place, change in enumerate(devices.changes):
        middle = LEFT + VIOLIN * (place + 0.5)
        shapes += _violin(change, y, middle)
        shapes.append(Words(middle, bottom + 20, change.name, "ink", "middle"))
    room = (WIDTH - RIGHT - edge) / len(devices.changes)
    for place, change in enumerate(devices.changes):
        start = edge + room * place + GAP
        shapes += _scatter(change, y, start, edge + room * (place + 1))
    for place, (paint, name) in enumerate((("helps", "better"), ("hurts", "hurt"), ("test", "equal"))):
        at = edge + GAP + 5 + 64 * place
        shapes += [Dot(at, bottom + 36, 4, paint), Words(at + 9, bottom + 40, name)]
    shapes.append(Words(WIDTH - RIGHT, bottom + 40, "training examples of a device", align="end"))
    return Drawing(WIDTH, bottom + 56, tuple(shapes))


def _told(change: Change) -> str:
    found = change.row()
    text = f"{change.name}: {found['devices']} devices, {found['hurt']} hurt, {found['helped']} better; "
    text += f"mean {found['mean']}, from {found['worst']} to {found['best']} points"
    return text + ("" if found["with samples"] == "–" else f"; rank correlation with samples {found['with samples']}")


def _frame(y: Axis, left: float, right: float, labels: bool = False) -> Iterator[Shape]:
    for tick in y.ticks(7):
        yield Box(left, y.at(tick) - 0.5, right - left, 1, "rule")
        if labels:
            yield Words(left - 8, y.at(tick) + 4, signed(tick, 0 if float(tick).is_integer() else 1), align="end")
    yield Box(left, y.at(0) - 0.5, right - left, 1.2, "muted")


def _violin(change: Change, y: Axis, middle: float) -> Iterator[Shape]:
    points = change.points
    low, quarter, median, three, high = np.percentile(points, [0, 25, 50, 75, 100]).tolist()
    at = np.linspace(low, high, 60)
    spread = density(points, at)
    yield Line(((middle, y.at(low)), (middle, y.at(high))), "muted", 1)
    if spread.max() > 0:
        half = 0.42 * VIOLIN * spread / spread.max()
        outline = [(middle + side, y.at(value)) for side, value in zip(half, at, strict=True)]
        outline += [(middle - side, y.at(value)) for side, value in zip(half[::-1], at[::-1], strict=True)]
        yield Area(tuple(outline), "train", 0.35)
    yield Box(middle - 4, y.at(three), 8, max(y.at(quarter) - y.at(three), 1), "ink")
    yield Dot(middle, y.at(median), 4, "page")
    text = (
        f"{change.name}: from {signed(low)} to {signed(high)} points, middle half {signed(quarter)} to {signed(three)}"
    )
    yield Hint(middle - 0.45 * VIOLIN, y.at(high) - 4, 0.9 * VIOLIN, y.at(low) - y.at(high) + 8, text)


def _scatter(change: Change, y: Axis, left: float, right: float) -> Iterator[Shape]:
    yield from _frame(y, left, right)
    top, bottom = y.end, y.start
    drawn = np.arange(len(change.clients))
    if len(drawn) > MOST_DOTS:
        drawn = np.linspace(0, len(drawn) - 1, MOST_DOTS).round().astype(int)
    some = "" if len(drawn) == len(change.clients) else f", {len(drawn):,} drawn"
    yield Words((left + right) / 2, top - 12, f"{change.name}{some}", "ink", "middle")
    x = Axis.around(change.samples.tolist(), left, right)
    points = change.points
    mean = float(points.mean())
    yield Line(((left, y.at(mean)), (right, y.at(mean))), "muted", 1.2, is_dashed=True)
    radius = 3.6 if len(points) <= 200 else 2.2
    columns = (change.clients, change.samples, points)
    dots = list(zip(*(column[drawn].tolist() for column in columns), strict=True))
    for _, samples, value in dots:
        paint = "helps" if value > 1e-9 else "hurts" if value < -1e-9 else "test"
        yield Dot(x.at(samples), y.at(value), radius, paint, 0.7)
    if len(dots) <= MOST_HINTS:
        for place, (client, samples, value) in enumerate(dots):
            old, new = 100 * change.before[place], 100 * change.after[place]
            text = f"client {client}: {old:.1f}% to {new:.1f}%, {signed(value)} points; {samples:,} training examples"
            yield Hint(x.at(samples) - 4, y.at(value) - 4, 8, 8, text)
    for tick in x.ticks(max(4, int((right - left) / 60))):
        if tick.is_integer():  # devices of one size have an axis of one example
            yield Words(x.at(tick), bottom + 20, f"{tick:,.0f}", align="middle")
    above = y.at(mean) - 5 if y.at(mean) - 5 > top + 8 else y.at(mean) + 14
    yield Words(left + 2, above, f"mean {signed(mean)}", size=11)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
