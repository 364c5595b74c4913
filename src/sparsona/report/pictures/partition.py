"""The picture of a partition: who holds how much of what."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparsona.core.errors import SparsonaError
from sparsona.report.pictures.drawing import LEVELS, Box, Drawing, Grid, Hint, Shape, Words, save_drawing, to_svg

PARTS = ("train", "validation", "test")
WIDTH, LEFT, RIGHT = 960, 66, 22
MOST_ROWS, MOST_COLUMNS, MOST_BARS = 300, 280, 400
HEAT_WIDTH, HEAT_HEIGHT, GUTTER = 560, 660, 30
LETTER = 6.4  # pixels that a letter of 12 pixels takes, about


@dataclass(frozen=True, eq=False)
class Partition:
    """How many examples each client has.

    `sizes` maps train, validation and test (those that are known) to a count per client; `counts` has the training
    examples by client and class, or is None where labels are tokens.
    """

    title: str
    sizes: Mapping[str, np.ndarray]
    counts: np.ndarray | None = None
    class_names: Sequence[str] | None = None

    def __post_init__(self) -> None:
        lengths = {len(size) for size in self.sizes.values()}
        if not self.sizes or set(self.sizes) - set(PARTS) or len(lengths) != 1 or 0 in lengths:
            found = ", ".join(f"{part}: {len(size)}" for part, size in self.sizes.items()) or "nothing"
            raise SparsonaError(f"sizes of {found}", expected=f"for some of {', '.join(PARTS)}, one count per client")
        if self.counts is not None and (self.counts.ndim != 2 or len(self.counts) != self.num_clients):
            raise SparsonaError(
                f"counts of shape {self.counts.shape}", expected=f"{self.num_clients} clients by the number of classes"
            )
        if self.class_names is not None and len(self.class_names) != self.num_classes:
            raise SparsonaError(
                f"{len(self.class_names)} class names", expected=f"{self.num_classes}, one per class, or None"
            )

    @property
    def num_clients(self) -> int:
        return len(next(iter(self.sizes.values())))

    @property
    def num_classes(self) -> int:
        return 0 if self.counts is None else self.counts.shape[1]

    @property
    def totals(self) -> np.ndarray:
        """The examples of each client, all parts together."""
        return np.sum([np.asarray(size) for size in self.sizes.values()], axis=0)

    @property
    def parts(self) -> list[tuple[str, np.ndarray]]:
        """What is known of train, validation and test, in this order; a part that nobody has is left out."""
        return [(part, np.asarray(self.sizes[part])) for part in PARTS if np.any(self.sizes.get(part, 0))]

    def summary(self) -> tuple[str, str]:
        """Two short lines: the whole, and the single client."""
        totals = self.totals
        parts = ", ".join(f"{int(size.sum()):,} {part}" for part, size in self.parts)
        whole = f"{_plural(self.num_clients, 'client')}, {_plural(int(totals.sum()), 'example')}"
        whole += f": {parts}" if parts else ""
        single = f"Per client: {_spread(totals, 'example')}"
        if self.counts is not None:
            single += f", {_spread((self.counts > 0).sum(axis=1), 'class')}"
        return whole, single

    def class_name(self, index: int) -> str:
        return str(self.class_names[index]) if self.class_names is not None else str(index)


@dataclass(frozen=True, eq=False)
class Cells:
    """A partition's counts, made to fit: a row is the mean of some clients, a column the sum of some classes."""

    values: np.ndarray
    row_clients: list[np.ndarray]
    group: int  # classes per column
    is_sorted: bool

    @property
    def highest(self) -> float:
        return max(float(self.values.max(initial=0)), 1.0)


def fit_cells(partition: Partition, counts: np.ndarray, max_rows: int, max_columns: int) -> Cells:
    """The counts in at most so many rows and columns.

    Where clients do not all fit they are sorted by size first, so that those which share a row are alike.
    """
    is_sorted = partition.num_clients > max_rows
    rows = group_clients(partition.totals, max_rows) if is_sorted else [np.array([k]) for k in range(len(counts))]
    merged, group = merge_classes(counts, max_columns)
    values = np.stack([merged[members].mean(axis=0) for members in rows])
    return Cells(values, rows, group, is_sorted)


def merge_classes(counts: np.ndarray, most: int) -> tuple[np.ndarray, int]:
    """Neighbouring classes added up so that there are at most `most` columns, and how many each column has."""
    group = math.ceil(counts.shape[1] / most)
    return np.add.reduceat(counts, np.arange(0, counts.shape[1], group), axis=1), group


def group_clients(totals: np.ndarray, most: int) -> list[np.ndarray]:
    """Clients from the largest to the smallest, neighbours together so that there are at most `most` groups."""
    order = np.argsort(-totals, kind="stable")
    step = math.ceil(len(order) / most)
    return [order[i : i + step] for i in range(0, len(order), step)]


def levels_of(values: np.ndarray, highest: float, levels: int = LEVELS) -> np.ndarray:
    """Counts as steps of a scale from 0 to `levels`; by the square root, which shows small ones. Only 0 is 0."""
    return np.ceil(levels * np.sqrt(values / highest) - 1e-9).astype(int)


def partition_svg(partition: Partition) -> str:
    """The picture as one SVG element that stands alone, light or dark as its reader's system is."""
    return to_svg(draw(partition), _label(partition))


def save_picture(partition: Partition, path: str | os.PathLike[str]) -> Path:
    """Write the picture to `path`, a .svg or (with Pillow) a .png, and return it."""
    return save_drawing(draw(partition), _label(partition), path)


def _label(partition: Partition) -> str:
    return " ".join([f"{partition.title}.", *partition.summary()])


def draw(partition: Partition) -> Drawing:
    """The shapes of the picture: a heatmap with bars beside it, or bars alone where there are no classes."""
    whole, single = partition.summary()
    head: list[Shape] = [
        Words(LEFT, 34, _cut(partition.title, 90), "ink", size=18, bold=True),
        Words(LEFT, 57, whole, "ink", size=13),
        Words(LEFT, 76, single, "ink", size=13),
    ]
    if partition.counts is None or not partition.num_classes:
        height, shapes = _draw_sizes(partition, 96)
    else:
        height, shapes = _draw_cells(partition, partition.counts, 96)
    return Drawing(WIDTH, height, (*head, *shapes))


def _draw_cells(partition: Partition, counts: np.ndarray, top: float) -> tuple[float, list[Shape]]:
    cells = fit_cells(partition, counts, MOST_ROWS, MOST_COLUMNS)
    rows, columns = cells.values.shape
    width, height = min(64.0, HEAT_WIDTH / columns), min(26.0, HEAT_HEIGHT / rows)
    gap = 1.0 if min(width, height) >= 6 else 0.0
    notes = []
    if cells.is_sorted:
        notes.append(f"Clients from the largest to the smallest; a row is the mean of {len(cells.row_clients[0])}.")
    if cells.group > 1:
        notes.append(f"A column is {cells.group} neighbouring classes together.")
    shapes: list[Shape] = []
    if notes:
        shapes.append(Words(LEFT, top, " ".join(notes), size=12))
        top += 20
    top += 34
    right, bottom = LEFT + width * columns, top + height * rows
    what = "training examples of a class" if cells.group == 1 else f"training examples of {cells.group} classes"
    shapes += _scale(LEFT, top - 30, cells.highest, what)
    shapes.append(Box(LEFT, top, right - LEFT - gap, bottom - top - gap, "none"))
    levels = levels_of(cells.values, cells.highest)
    shapes.append(Grid(LEFT, top, width, height, levels, gap))
    if gap and not cells.is_sorted and width > LETTER * len(f"{cells.highest:.0f}") + 6 and height >= 15:
        shapes += [
            Words(LEFT + width * (c + 0.5) - 0.5, top + height * (r + 0.5) + 3.5, f"{value:.0f}", paint, "middle", 11)
            for (r, c), value in np.ndenumerate(cells.values)
            if value and (paint := "strong" if levels[r, c] > 0.55 * LEVELS else "faint")
        ]
    shapes += _row_ticks(cells, LEFT - 8, top, height)
    bars = right + GUTTER
    shapes += _row_bars(partition, cells, bars, top, height, gap)
    shapes += _row_hints(partition, counts, cells, top, height)
    deep, ticks = _column_ticks(partition, cells, bottom, width)
    shapes += ticks
    shapes.append(Words((LEFT + right) / 2, bottom + deep + 18, "class", "muted", "middle"))
    shapes.append(Words((bars + WIDTH - RIGHT) / 2, bottom + 36, "examples", "muted", "middle"))
    rows_are = "clients, counted from the largest" if cells.is_sorted else "client"
    shapes.append(Words(18, (top + bottom) / 2, rows_are, "muted", "middle", turn=90))
    return bottom + max(deep + 18, 36) + 18, shapes


def _draw_sizes(partition: Partition, top: float) -> tuple[float, list[Shape]]:
    """A bar per client, from the largest to the smallest."""
    groups = group_clients(partition.totals, MOST_BARS)
    step = len(groups[0])
    shapes: list[Shape] = []
    if step > 1:
        shapes.append(Words(LEFT, top, f"A bar is the mean of {step} clients of about the same size.", size=12))
        top += 20
    shapes += _parts_legend(partition, LEFT, top + 8)
    top, height = top + 32, 300.0
    bottom, width = top + height, min(44.0, (WIDTH - LEFT - RIGHT) / len(groups))
    right = LEFT + width * len(groups)
    heights = {part: np.array([size[members].mean() for members in groups]) for part, size in partition.parts}
    highest = max(float(np.sum([*heights.values()], axis=0).max()), 1.0) if heights else 1.0
    for tick in nice_ticks(highest, 5):
        y = bottom - height * tick / highest
        shapes += [Box(LEFT, y, max(right, 320) - LEFT, 1, "rule"), Words(LEFT - 8, y + 4, _short(tick), align="end")]
    thick = width - 1 if width >= 5 else width
    base = np.full(len(groups), bottom)
    for part, size in heights.items():
        tall = height * size / highest
        base = base - tall
        shapes += [Box(LEFT + width * i, base[i], thick, tall[i], part) for i in range(len(groups)) if tall[i] > 0]
    shapes += [
        Hint(LEFT + width * i, top, width, height, _about_clients(partition, members))
        for i, members in enumerate(groups)
    ]
    is_named = len(groups) <= 40
    for k in index_ticks(partition.num_clients, width / step, LETTER * len(str(partition.num_clients)) + 14):
        bar, name = (k, str(groups[k][0])) if is_named else (max(k - 1, 0) // step, f"{max(k, 1):,}")
        shapes.append(Words(LEFT + width * (bar + 0.5), bottom + 18, name, align="middle"))
    what = "client, from the largest to the smallest" if is_named else "clients, counted from the largest"
    shapes.append(Words((LEFT + max(right, 320)) / 2, bottom + 38, what, align="middle"))
    shapes.append(Words(14, (top + bottom) / 2, "examples", align="middle", turn=90))
    return bottom + 56, shapes


def _scale(x: float, y: float, highest: float, what: str) -> Iterator[Shape]:
    """The colours and the counts they stand for."""
    step = 10.0
    yield Box(x, y, step, 9, "none")
    yield Words(x + step / 2, y + 21, "0", align="middle", size=11)
    start, length = x + step + 4, step * LEVELS
    for level in range(LEVELS):
        yield Box(start + step * level, y, step, 9, f"h{level + 1}")
    free = start + 2
    ends = [f"{highest:,.0f}"]
    limit = start + length - LETTER * len(ends[0]) / 2 - 10
    for tick in (mantissa * 10**power for power in range(9) for mantissa in (1, 2, 5)):
        at, half = start + length * math.sqrt(min(tick / highest, 1)), LETTER * len(f"{tick:,}") / 2
        if tick < highest and at - half > free and at + half < limit:
            yield Words(at, y + 21, f"{tick:,}", align="middle", size=11)
            free = at + half + 14
    yield Words(start + length, y + 21, ends[0], align="middle", size=11)
    yield Words(start + length + 14 + LETTER * len(ends[0]) / 2, y + 9, what)


def _parts_legend(partition: Partition, x: float, y: float) -> Iterator[Shape]:
    for part, _ in partition.parts:
        yield Box(x, y - 9, 10, 10, part)
        yield Words(x + 15, y, part)
        x += 30 + LETTER * len(part)


def _row_ticks(cells: Cells, x: float, top: float, height: float) -> Iterator[Shape]:
    """Clients by their number or, where they are sorted, by their rank, which counts from 1."""
    per_row = len(cells.row_clients[0])
    num_clients = sum(map(len, cells.row_clients))
    for k in index_ticks(num_clients, height / per_row, 24 if cells.is_sorted else 16):
        row, name = (max(k - 1, 0) // per_row, f"{max(k, 1):,}") if cells.is_sorted else (k, str(k))
        yield Words(x, top + height * (row + 0.5) + 4, name, align="end")


def _column_ticks(partition: Partition, cells: Cells, bottom: float, width: float) -> tuple[float, list[Shape]]:
    """The classes' names or numbers under their columns, and how deep they reach."""
    if partition.class_names is not None and cells.group == 1 and width >= 13:
        names = [_cut(name, 16) for name in partition.class_names]
        longest = LETTER * max(map(len, names))
        if longest + 6 > width:
            places = [(LEFT + width * (c + 0.6), bottom + 14, name) for c, name in enumerate(names)]
            return longest * 0.71 + 16, [Words(x, y, name, align="end", size=11, turn=45) for x, y, name in places]
    else:
        names = [str(c) for c in range(partition.num_classes)]
    ticks = index_ticks(len(names), width / cells.group, LETTER * len(names[-1]) + 14)
    middles = [(c, LEFT + width * (c // cells.group + 0.5)) for c in ticks]
    return 18, [Words(x, bottom + 18, names[c], align="middle") for c, x in middles]


def _row_bars(partition: Partition, cells: Cells, x: float, top: float, height: float, gap: float) -> Iterator[Shape]:
    """What each row has of train, validation and test, end to end."""
    width, bottom = WIDTH - RIGHT - x, top + height * len(cells.row_clients)
    parts = {part: np.array([size[row].mean() for row in cells.row_clients]) for part, size in partition.parts}
    highest = max(float(np.sum([*parts.values()], axis=0).max()), 1.0) if parts else 1.0
    yield from _parts_legend(partition, max(x, LEFT + 440), top - 21)  # beside the colours' legend
    for tick in nice_ticks(highest, 3):
        yield Box(x + width * tick / highest, top, 1, bottom - top, "rule")
        yield Words(x + width * tick / highest, bottom + 18, _short(tick), align="middle")
    base = np.full(len(cells.row_clients), x)
    thick = height - max(gap, 0.2 * height) if height > 3 else height
    for part, size in parts.items():
        long = width * size / highest
        for row in np.flatnonzero(long):
            yield Box(base[row], top + height * row + (height - gap - thick) / 2, long[row], thick, part)
        base = base + long


def _row_hints(partition: Partition, counts: np.ndarray, cells: Cells, top: float, height: float) -> Iterator[Shape]:
    for row, members in enumerate(cells.row_clients):
        held = counts[members].sum(axis=0)
        most = [int(c) for c in np.argsort(-held, kind="stable")[:6] if held[c]]
        shares = ", ".join(f"{partition.class_name(c)}: {100 * held[c] / held.sum():.0f}%" for c in most)
        rest = int((held > 0).sum()) - len(most)
        text = f"{_about_clients(partition, members)}\nclass {shares}" + (f", {rest} more" if rest else "")
        yield Hint(LEFT, top + height * row, WIDTH - RIGHT - LEFT, height, text)


def _about_clients(partition: Partition, members: np.ndarray) -> str:
    if len(members) > 1:
        totals = partition.totals[members]
        return f"{len(members)} clients with {totals.min():,} to {totals.max():,} examples"
    parts = ", ".join(f"{int(size[members[0]]):,} {part}" for part, size in partition.parts)
    return f"client {members[0]}: {parts}"


def index_ticks(num: int, size: float, room: float) -> range:
    """Which of `num` things of this size are labelled, if a label needs so much room."""
    steps = (mantissa * 10**power for power in range(9) for mantissa in (1, 2, 5))
    return range(0, num, next(step for step in steps if step * size >= room))


def nice_ticks(highest: float, most: int) -> range:
    """Whole numbers from 0 to `highest` in steps of 1, 2 or 5 times a power of ten, at most `most` above 0."""
    steps = (mantissa * 10**power for power in range(12) for mantissa in (1, 2, 5))
    step = next(step for step in steps if highest / step < most + 1)
    return range(0, int(highest) + 1, step)


def _spread(values: np.ndarray, noun: str) -> str:
    low, high, middle = values.min(), values.max(), float(np.median(values))
    return _plural(low, noun) if low == high else f"{low:,} to {_plural(high, noun)} (median {middle:,.10g})"


def _plural(count: int, noun: str) -> str:
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{ending}"


def _short(value: int) -> str:
    if value >= 1_000_000:
        return f"{value / 1_000_000:g}M"
    return f"{value / 1000:g}k" if value >= 10_000 else f"{value:,}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
