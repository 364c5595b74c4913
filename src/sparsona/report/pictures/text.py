"""The picture of a partition in a terminal: the same cells as characters, and numbers where they fit."""

from __future__ import annotations

import textwrap
from itertools import pairwise

import numpy as np
from rich.style import Style
from rich.text import Text

from sparsona.report.pictures.drawing import LEVELS, PAINTS
from sparsona.report.pictures.partition import Partition, index_ticks, levels_of, merge_classes, nice_ticks

MOST_ROWS = 24
SHADES = " .:-=+*#%@"
BAR = "#2b8cc4"  # seen on black and on white
HEADINGS = {"train": "train", "validation": "valid", "test": "test"}
# The dark page's colours whatever the terminal's are: what is more must look like more on every background.
BACKGROUNDS = [PAINTS["none"][1], *(PAINTS[f"h{level}"][1] for level in range(1, LEVELS + 1))]


def partition_lines(partition: Partition, width: int, coloured: bool, ascii_only: bool = False) -> list[Text]:
    """Lines that fit into `width`. Without colours, shades or numbers say the same."""
    block = "#" if ascii_only else "█"
    rows = _shown_rows(partition.totals)
    sizes = [(HEADINGS[part], [f"{size[k]:,}" for k in rows]) for part, size in partition.parts]
    if width - sum(2 + len(heading) for heading, _ in sizes) < 40:
        sizes = [("total", [f"{partition.totals[k]:,}" for k in rows])]
    left = max(6, len(str(partition.num_clients - 1)))
    widths = [max(len(heading), *map(len, shown)) for heading, shown in sizes]
    room = max(8, width - left - 2 - sum(2 + wide for wide in widths))
    if partition.counts is not None and partition.num_classes:
        heading, middles, scale = _cells(partition, partition.counts[rows], room, coloured)
    else:
        heading, scale = "examples", []
        longest = max(int(partition.totals.max()), 1)
        middles = [Text(block * max(1, round(room * partition.totals[k] / longest)), BAR) for k in rows]
    room = max(len(heading), *map(len, middles))

    def line(first: str, middle: Text, last: list[str], style: str = "") -> Text:
        text = Text(f"{first:>{left}}  ", style, no_wrap=True, overflow="ellipsis", end="")
        text.append_text(middle).append(" " * (room - len(middle)))
        return text.append("".join(f"  {value:>{wide}}" for value, wide in zip(last, widths, strict=True)))

    lines = [Text(" ".join(partition.title.split()), "bold")]
    lines += [Text(piece) for sentence in partition.summary() for piece in textwrap.wrap(sentence, width)]
    lines.append(Text())
    lines.append(line("client", Text(heading), [heading for heading, _ in sizes], "dim"))
    lines += [line(str(k), middles[i], [shown[i] for _, shown in sizes]) for i, k in enumerate(rows)]
    hidden = partition.num_clients - len(rows)
    if hidden:
        lines.append(Text(f"... {hidden:,} more; shown: evenly spaced, largest to smallest", "dim"))
    if scale:
        lines += [Text(), *scale]
    if hidden and np.ptp(partition.totals):
        lines += [Text(), *_histogram(partition.totals, min(width, 80), block)]
    return lines


def _shown_rows(totals: np.ndarray) -> list[int]:
    """All clients or, where they are too many, some by size, the largest first."""
    if len(totals) <= MOST_ROWS:
        return list(range(len(totals)))
    ranks = np.linspace(0, len(totals) - 1, MOST_ROWS).round().astype(int)
    return [int(k) for k in np.argsort(-totals, kind="stable")[ranks]]


def _cells(partition: Partition, counts: np.ndarray, room: int, coloured: bool) -> tuple[str, list[Text], list[Text]]:
    """The heading, a text per row, and the lines that explain the colours or shades."""
    merged, group = merge_classes(counts, room)
    highest = max(int(merged.max()), 1)
    cell = min(room // merged.shape[1], 7)
    numbers = cell > len(str(highest))
    levels = levels_of(merged, highest, LEVELS if coloured else len(SHADES) - 1)

    def paint(value: int, level: int) -> tuple[str, Style]:
        text = f"{value or '.':>{cell - 1}} " if numbers else " " * cell if coloured else SHADES[level] * cell
        if not coloured:
            return text, Style.null()
        ink = "muted" if not value else "strong" if level > 0.55 * LEVELS else "faint"
        return text, Style(color=PAINTS[ink][1], bgcolor=BACKGROUNDS[level])

    rows = [
        Text.assemble(*(paint(int(value), int(level)) for value, level in zip(*row, strict=True)))
        for row in zip(merged, levels, strict=True)
    ]
    scale = Text(f"{'training examples of a class' if group == 1 else f'training examples of {group} classes'}: 0 ")
    if coloured:
        for background in BACKGROUNDS:
            scale.append(" ", Style(bgcolor=background))
    else:
        scale.append(f'"{SHADES}"')
    scale.append(f" {highest:,}")
    return _heading(partition, cell, group, merged.shape[1]), rows, [scale] if coloured or not numbers else []


def _heading(partition: Partition, cell: int, group: int, columns: int) -> str:
    """Names of classes where they have room for three letters, else numbers, as many as fit."""
    if partition.class_names is not None and group == 1 and cell >= 4:
        return "".join(f"{name[: cell - 1]:>{cell - 1}} " for name in partition.class_names)
    heading = [" "] * (cell * columns)
    for c in index_ticks(partition.num_classes, cell / group, len(str(partition.num_classes)) + 1):
        name = f"{c:>{cell - 1}}" if cell > len(str(c)) else str(c)
        at = cell * (c // group)
        if at + len(name) <= len(heading):
            heading[at : at + len(name)] = name
    return "".join(heading)


def _histogram(totals: np.ndarray, width: int, block: str) -> list[Text]:
    """How many clients have how many examples."""
    ticks = nice_ticks(int(totals.max()), 8)
    edges = np.array([*ticks, ticks[-1] + ticks.step])
    if np.histogram(totals, edges)[0].max() > 0.6 * len(totals):  # a few are far larger than the many
        edges = np.array([0, *(mantissa * 10**power for power in range(12) for mantissa in (1, 2, 5))])
    edges = edges[np.searchsorted(edges, totals.min(), "right") - 1 : np.searchsorted(edges, totals.max(), "right") + 1]
    held = np.histogram(totals, edges)[0]
    labels = [f"{low:,} to {high - 1:,}" if high - low > 1 else f"{low:,}" for low, high in pairwise(edges)]
    wide = max(len("examples"), *map(len, labels))
    room = width - wide - 4 - len(f"{held.max():,}")
    lines = [Text(f"{'examples':>{wide}}  clients", "dim")]
    for label, num in zip(labels, held.tolist(), strict=True):
        bar = block * (max(1, round(room * num / held.max())) if num else 0)
        lines.append(Text.assemble(f"{label:>{wide}}  ", (bar, BAR), f"{' ' if bar else ''}{num:,}"))
    return lines
