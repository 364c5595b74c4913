"""The same pictures in a terminal, as lines of rich text: heatmaps, bars and a scatter plot."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from rich.style import Style
from rich.text import Text

from sparsona.analysis.clients import Change, ClientEffects
from sparsona.analysis.format import cut
from sparsona.analysis.partition import Partition, merge_classes
from sparsona.analysis.similarity import Similarity
from sparsona.report.palette import TERMINAL_BAR, TERMINAL_SCALE

MOST_ROWS, PLOT_ROWS, MOST_WIDTH = 24, 15, 100
SHADES = " .:-=+*#%@"
HEADINGS = {"train": "train", "validation": "valid", "test": "test"}
ROUND_EDGES = [0, *(mantissa * 10**power for power in range(12) for mantissa in (1, 2, 5))]


@dataclass(frozen=True)
class Terminal:
    """What lines must fit: their width, and whether colours and characters beyond ASCII can be shown."""

    width: int
    has_colours: bool = True
    is_ascii: bool = False

    @property
    def block(self) -> str:
        return "#" if self.is_ascii else "█"

    def cells(self, shares: np.ndarray, wide: int, numbers: np.ndarray | None = None) -> Text:
        """A row of a heatmap: cells `wide` characters wide, from nothing (0) to the strongest (1)."""
        text = Text(no_wrap=True, end="")
        levels = np.ceil((len(TERMINAL_SCALE) - 1 if self.has_colours else len(SHADES) - 1) * shares).astype(int)
        for place, level in enumerate(levels.tolist()):
            shown = " " * wide if self.has_colours else SHADES[level] * wide
            if numbers is not None:
                shown = f"{int(numbers[place]) or '.':>{wide - 1}} "
            ink = "black" if level >= len(TERMINAL_SCALE) - 2 else "white"
            text.append(shown, Style(color=ink, bgcolor=TERMINAL_SCALE[level]) if self.has_colours else None)
        return text

    def bar(self, share: float, room: int) -> Text:
        """A bar of at most `room` characters; only of nothing there is none."""
        return Text(self.block * (max(1, round(room * share)) if share else 0), TERMINAL_BAR)


def partition_lines(partition: Partition, terminal: Terminal) -> list[Text]:
    """Clients by classes: numbers where they fit, else colours or shades; of many clients, some and a histogram."""
    totals, width = partition.totals, terminal.width
    rows = np.arange(len(totals))
    if len(rows) > MOST_ROWS + 1:  # no line for one that is left out; from the largest to the smallest
        ranks = np.linspace(0, len(rows) - 1, MOST_ROWS).round().astype(int)
        rows = np.argsort(-totals, kind="stable")[ranks]
    sizes = {HEADINGS[part]: [f"{size[k]:,}" for k in rows] for part, size in partition.parts}
    if width - sum(2 + len(heading) for heading in sizes) < 40:
        sizes = {"total": [f"{totals[k]:,}" for k in rows]}
    widths = {heading: max(len(heading), *map(len, shown)) for heading, shown in sizes.items()}
    names = [str(k) if not (named := partition.client_names) else f"{k} {cut(named[k], 24)}" for k in rows.tolist()]
    left = max(6, len(str(len(totals) - 1)), *map(len, names))
    room = max(8, width - left - 2 - sum(2 + wide for wide in widths.values()))
    scale: list[Text] = []
    is_named = False
    if partition.counts is not None and partition.num_classes:
        heading, middles, scale, is_named = _class_cells(partition.counts[rows], terminal, room, partition.class_names)
    else:
        heading, middles = "examples", [terminal.bar(totals[k] / max(totals.max(), 1), room) for k in rows]
    room = max(len(heading), *map(len, middles))

    def line(first: str, middle: Text, last: Sequence[str], style: str = "") -> Text:
        text = Text(f"{first:>{left}}  ", style, no_wrap=True, overflow="ellipsis", end="")
        text.append_text(middle).append(" " * (room - len(middle)))
        return text.append("".join(f"  {value:>{wide}}" for value, wide in zip(last, widths.values(), strict=True)))

    lines = [Text(" ".join(partition.title.split()), "bold")]
    lines += [Text(piece) for sentence in partition.summary() for piece in textwrap.wrap(sentence, width)]
    lines += [Text(), line("client", Text(heading), list(sizes), "dim")]
    lines += [line(name, middles[i], [shown[i] for shown in sizes.values()]) for i, name in enumerate(names)]
    if hidden := len(totals) - len(rows):
        lines.append(Text(f"... {hidden:,} more; shown: evenly spaced, largest to smallest", "dim"))
    lines += [Text(), *scale] if scale else []
    if partition.class_names and partition.counts is not None and not is_named:
        listed = ", ".join(f"{c}: {cut(name, 40)}" for c, name in enumerate(partition.class_names[:40]))
        more = len(partition.class_names) - 40
        listed = f"classes: {listed}" + (f", {more:,} more" if more > 0 else "")
        lines += [Text(), *(Text(piece, "dim") for piece in textwrap.wrap(listed, width))]
    if hidden and np.ptp(totals):
        lines += [Text(), *_histogram(totals, terminal)]
    return lines


def _class_cells(
    counts: np.ndarray, terminal: Terminal, room: int, names: Sequence[str] | None
) -> tuple[str, list[Text], list[Text], bool]:
    """The heading, a text per row, the line that explains colours or shades, and whether the names of classes are the
    heading: they are where all fit."""
    merged, group = merge_classes(counts, room)
    highest = max(int(merged.max()), 1)
    longest = max(map(len, names)) + 1 if names and group == 1 else 0
    is_named = 0 < longest <= room // merged.shape[1]
    wide = min(room // merged.shape[1], max(7, longest if is_named else 0))
    has_numbers = wide > len(str(highest))
    shares = np.sqrt(merged / highest)  # the root shows small counts
    rows = [
        terminal.cells(share, wide, row if has_numbers else None) for row, share in zip(merged, shares, strict=True)
    ]
    step = next(s for s in ROUND_EDGES[1:] if s * wide / group > len(str(counts.shape[1])))
    heading = [" "] * (wide * merged.shape[1])
    for c in range(0, counts.shape[1], step):
        name, at = f"{c:>{max(wide - 1, 0)}}", wide * (c // group)
        if at + len(name) <= len(heading):
            heading[at : at + len(name)] = name
    shown = "".join(f"{name:>{wide - 1}} " for name in names) if names and is_named else "".join(heading)
    if has_numbers and not terminal.has_colours:
        return shown, rows, [], is_named
    what = "a class" if group == 1 else f"{group} classes"
    levels = np.linspace(0, 1, len(TERMINAL_SCALE) if terminal.has_colours else len(SHADES))
    scale = Text(f"training examples of {what}: 0 ").append_text(terminal.cells(levels, 1)).append(f" {highest:,}")
    return shown, rows, [scale], is_named


def _histogram(totals: np.ndarray, terminal: Terminal) -> list[Text]:
    """How many clients have how many examples."""
    step = next(s for s in ROUND_EDGES[1:] if totals.max() / s < 9)
    edges = np.arange(0, totals.max() + step + 1, step)
    if np.histogram(totals, edges)[0].max() > 0.6 * len(totals):  # a few are far larger than the many
        edges = np.array(ROUND_EDGES)
    edges = edges[np.searchsorted(edges, totals.min(), "right") - 1 : np.searchsorted(edges, totals.max(), "right") + 1]
    held = np.histogram(totals, edges)[0]
    labels = [f"{low:,} to {high - 1:,}" if high - low > 1 else f"{low:,}" for low, high in pairwise(edges)]
    wide = max(len("examples"), *map(len, labels))
    room = min(terminal.width, 80) - wide - 4 - len(f"{held.max():,}")
    lines = [Text(f"{'examples':>{wide}}  clients", "dim")]
    for label, num in zip(labels, held.tolist(), strict=True):
        bar = terminal.bar(num / held.max(), room)
        lines.append(Text.assemble(f"{label:>{wide}}  ", bar, f"{' ' if len(bar) else ''}{num:,}"))
    return lines


def clients_lines(effects: ClientEffects, terminal: Terminal) -> list[Text]:
    """A scatter plot for each kind of data: what clients gain against their numbers of training examples."""
    return [line for change in effects.changes for line in (Text(), *_scatter_lines(change, terminal))]


def _scatter_lines(change: Change, terminal: Terminal) -> list[Text]:
    """A dot is one client, a digit several (9: nine or more)."""
    low, high = min(0.0, float(change.gains.min())), max(0.0, float(change.gains.max()))
    high = high if high > low else low + 1.0
    shown = {gain: change.measure.show_gain(gain, 1) for gain in (low, high)}
    left = max(map(len, shown.values()))
    columns = max(20, min(terminal.width, MOST_WIDTH) - left - 3)
    fewest, most = int(change.samples.min()), int(change.samples.max())

    def row_of(gain: float | np.ndarray) -> np.ndarray:
        return np.rint((PLOT_ROWS - 1) * (high - np.asarray(gain)) / (high - low)).astype(int)

    counts = np.zeros((PLOT_ROWS, columns), dtype=int)
    across = np.rint((columns - 1) * (change.samples - fewest) / max(most - fewest, 1)).astype(int)
    np.add.at(counts, (row_of(change.gains), across), 1)
    zero, dot, rule, side = int(row_of(0.0)), *(("o", "-", "|") if terminal.is_ascii else ("•", "─", "│"))
    labels = {0: shown[high], PLOT_ROWS - 1: shown[low], zero: "0"}
    gained = f"{change.name}: {change.measure.gain_unit} gained against training examples; a digit counts clients"
    lines = [Text(gained, "bold")]
    for row in range(PLOT_ROWS):
        line = Text(f"{labels.get(row, ''):>{left}} {side}", "dim", end="", no_wrap=True)
        for count in counts[row].tolist():
            sign = (rule if row == zero else " ") if not count else dot if count == 1 else str(min(count, 9))
            line.append(sign, "dim" if not count else "blue" if row < zero else "red" if row > zero else "")
        lines.append(line)
    lines.append(Text(f"{'':>{left}} {side}{fewest:,}{f'{most:,}':>{columns - len(f'{fewest:,}')}}", "dim"))
    return lines


def similarity_lines(similarity: Similarity, terminal: Terminal) -> list[Text]:
    """Heatmaps of the labels' likeness and of the traits' nearness: strong is alike in both."""
    distance, _ = similarity.pairs
    high = float(distance.max())
    nearness = (high - similarity.distances) / ((high - float(distance.min())) or 1.0)
    panels = {f"distance of {'masks' if similarity.kind == 'mask' else 'gates'}": nearness}
    if similarity.cosines is not None:
        panels = {"cosine of labels": similarity.cosines, **panels}
    names = [cut(similarity.who(place), 24) for place in range(len(similarity.clients))]
    left = max(6, *map(len, names))
    room = (terminal.width - left - 2 - 3 * len(panels)) // len(panels)
    order = similarity.order
    wide = 2 if len(order) * 2 <= room else 1
    if hidden := max(0, len(order) - max(room // wide, 2)):
        order = [order[place] for place in np.linspace(0, len(order) - 1, len(order) - hidden).round().astype(int)]
    room = max(wide * len(order), *(len(name) for name in panels))
    lines = [Text(f"{'client':>{left}}  " + "   ".join(f"{name:<{room}}" for name in panels), "dim")]
    for place in order:
        line = Text(f"{names[place]:>{left}}  ", no_wrap=True, end="")
        for likeness in panels.values():
            shares = np.where(np.array(order) == place, 0, np.clip(likeness[place, order], 0.01, 1))
            line.append_text(terminal.cells(shares, wide)).append(" " * (room - wide * len(order) + 3))
        lines.append(line)
    if hidden:
        lines.append(Text(f"... {hidden:,} more; shown: evenly spaced, like labels together", "dim"))
    return lines
