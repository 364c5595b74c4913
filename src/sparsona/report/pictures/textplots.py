"""The analyses' pictures in a terminal: a scatter plot, two heatmaps, a tree."""

from __future__ import annotations

import numpy as np
from rich.style import Style
from rich.text import Text

from sparsona.analysis.clients import Change, Devices, signed
from sparsona.analysis.clustering import leaf_order
from sparsona.analysis.similarity import Similarity
from sparsona.report.pictures.axes import Axis
from sparsona.report.pictures.drawing import LEVELS
from sparsona.report.pictures.text import BACKGROUNDS, SHADES

PLOT_ROWS, MOST_WIDTH, TREE_COLUMNS = 15, 100, 40
# How a tree's strokes (up, down, left, right) look where they meet.
CORNERS = {"": " ", "lr": "─", "l": "─", "r": "─", "ud": "│", "u": "│", "d": "│", "dl": "┐", "ul": "┘", "dr": "┌"}
CORNERS |= {"ur": "└", "udr": "├", "udl": "┤", "dlr": "┬", "ulr": "┴", "udlr": "┼"}


def devices_lines(devices: Devices, width: int, ascii_only: bool = False) -> list[Text]:
    """A scatter plot for each kind of data: change of accuracy against a device's training examples."""
    lines: list[Text] = []
    for change in devices.changes:
        lines += [Text(), *_scatter_lines(change, min(width, MOST_WIDTH), ascii_only)]
    return lines


def _scatter_lines(change: Change, width: int, ascii_only: bool) -> list[Text]:
    """A dot is one device, a digit several (9: nine or more)."""
    y = Axis.around([*change.points.tolist(), 0.0], PLOT_ROWS - 1, 0, margin=0.0)
    labels = {round(y.at(tick)): signed(tick, 0 if float(tick).is_integer() else 1) for tick in y.ticks(5)}
    left = max(map(len, labels.values()))
    columns = max(20, width - left - 3)
    x = Axis.around(change.samples.tolist(), 0, columns - 1, margin=0.0)
    counts = np.zeros((PLOT_ROWS, columns), dtype=int)
    for samples, value in zip(change.samples.tolist(), change.points.tolist(), strict=True):
        counts[round(y.at(value)), round(x.at(samples))] += 1
    zero, dot, rule, side = round(y.at(0)), *(("o", "-", "|") if ascii_only else ("•", "─", "│"))
    lines = [Text(f"{change.name}: points gained against training examples; a digit: so many", "bold")]
    for row in range(PLOT_ROWS):
        line = Text(f"{labels.get(row, ''):>{left}} {side}", "dim", end="", no_wrap=True)
        for count in counts[row].tolist():
            shown = (rule if row == zero else " ") if not count else dot if count == 1 else str(min(count, 9))
            line.append(shown, "dim" if not count else "blue" if row < zero else "red" if row > zero else "")
        lines.append(line)
    ends = [f"{value:,.0f}" for value in (x.low, x.high)]
    lines.append(Text(f"{'':>{left}} {side}{ends[0]}{ends[1]:>{columns - len(ends[0])}}", "dim"))
    return lines


def similarity_lines(similarity: Similarity, width: int, coloured: bool, ascii_only: bool = False) -> list[Text]:
    """Masks as two heatmaps, vectors as a tree."""
    if similarity.kind == "mask":
        return _heat_lines(similarity, width, coloured)
    return _tree_lines(similarity, width, ascii_only)


def _heat_lines(similarity: Similarity, width: int, coloured: bool) -> list[Text]:
    """Dark (or dense) is alike in both."""
    distance, _ = similarity.pairs
    high = float(distance.max())
    closeness = (high - similarity.distances) / ((high - float(distance.min())) or 1.0)
    panels = [("distance of masks", closeness)]
    if similarity.cosines is not None:
        panels.insert(0, ("cosine of labels", similarity.cosines))
    left = max(6, len(str(max(similarity.clients))))
    room = (width - left - 2 - 3 * len(panels)) // len(panels)
    cell = 2 if len(similarity.order) * 2 <= room else 1
    most = max(room // cell, 2)
    order = similarity.order
    if len(order) > most:
        order = [order[place] for place in np.linspace(0, len(order) - 1, most).round().astype(int)]
    wide = max(cell * len(order), *(len(name) for name, _ in panels))
    steps = LEVELS if coloured else len(SHADES) - 1
    lines = [Text(f"{'client':>{left}}  " + "   ".join(f"{name:<{wide}}" for name, _ in panels), "dim")]
    for place in order:
        line = Text(f"{similarity.clients[place]:>{left}}  ", no_wrap=True, end="")
        for _, values in panels:
            for other in order:
                level = 0 if other == place else 1 + round((steps - 1) * float(np.clip(values[place, other], 0, 1)))
                if coloured:
                    line.append(" " * cell, Style(bgcolor=BACKGROUNDS[level]))
                else:
                    line.append(SHADES[level] * cell)
            line.append(" " * (wide - cell * len(order) + 3))
        lines.append(line)
    hidden = len(similarity.order) - len(order)
    if hidden:
        lines.append(Text(f"... {hidden:,} more; shown: evenly spaced, like labels together", "dim"))
    return lines


def _tree_lines(similarity: Similarity, width: int, ascii_only: bool) -> list[Text]:
    """The tree on its side: a line per client, the root at the right; at the left, its classes."""
    merges, order = similarity.tree, leaf_order(similarity.tree)
    n = len(order)
    classes = [_classes(similarity, place) for place in order]
    wide = min(max(len("classes"), *map(len, classes)), 28)
    left = max(6, len(str(max(similarity.clients))))
    columns = max(10, min(TREE_COLUMNS, width - left - wide - 6))
    x = Axis(0, float(merges[-1, 2]) or 1.0, 0, columns - 1)
    strokes: list[list[set[str]]] = [[set() for _ in range(columns)] for _ in range(n)]
    rows, ends = [order.index(point) for point in range(n)], [0] * n

    def across(row: int, start: int, end: int) -> None:
        for column in range(start, end):
            strokes[row][column].add("r")
            strokes[row][column + 1].add("l")

    for a, b, height, _ in merges.tolist():
        upper, lower = sorted((int(a), int(b)), key=lambda cluster: rows[cluster])
        corner = round(x.at(height))
        for cluster in (upper, lower):
            across(rows[cluster], ends[cluster], corner)
        for row in range(rows[upper], rows[lower]):
            strokes[row][corner].add("d")
            strokes[row + 1][corner].add("u")
        rows.append((rows[upper] + rows[lower]) // 2)
        ends.append(corner)
    lines = [Text(f"{'client':>{left}}  {'classes':<{wide}}  Ward's distance, up to {merges[-1, 2]:.3g}", "dim")]
    for row, place in enumerate(order):
        drawn = "".join(CORNERS["".join(side for side in "udlr" if side in found)] for found in strokes[row])
        if ascii_only:
            drawn = "".join("-" if c == "─" else "|" if c == "│" else c if c == " " else "+" for c in drawn)
        shown = classes[row] if len(classes[row]) <= wide else f"{classes[row][: wide - 3]}..."
        lines.append(Text(f"{similarity.clients[place]:>{left}}  {shown:<{wide}}  {drawn.rstrip()}", no_wrap=True))
    return lines


def _classes(similarity: Similarity, place: int) -> str:
    """A client's classes, from the one it has most of."""
    if similarity.label_counts is None:
        return ""
    counts = similarity.label_counts[place]
    return " ".join(str(c) for c in np.argsort(-counts, kind="stable") if counts[c])
