"""The picture of a partition: examples by client and class."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparsona.analysis.extra import import_extra
from sparsona.analysis.format import between
from sparsona.analysis.partition import Partition, drawn_counts, group_clients, merge_classes
from sparsona.core.points import FEW
from sparsona.data.names import name_of
from sparsona.report.palette import INK, ON_HEAT, PAGE, PARTS
from sparsona.report.pictures.figure import LONGEST, Picture, add_scale, heat_map, mark_whole, new_picture, style

MOST_ROWS, MOST_COLUMNS, MOST_BARS = 300, 280, 400


def draw_partition(partition: Partition) -> Picture:
    """A heatmap of clients by classes with bars of their sizes beside it, or bars alone where there are no classes."""
    with style():
        if partition.counts is None or not partition.num_classes:
            return _draw_sizes(partition)
        return _draw_classes(partition, drawn_counts(partition.counts), partition.counts == FEW)


def _draw_classes(partition: Partition, counts: np.ndarray, few: np.ndarray) -> Picture:
    rows = group_clients(partition.totals, MOST_ROWS)
    merged, group = merge_classes(counts, MOST_COLUMNS)
    values = np.stack([merged[members].mean(axis=0) for members in rows])
    is_sorted = len(rows) < partition.num_clients
    notes = []
    if is_sorted:
        notes.append(f"Clients from the largest to the smallest; a row is the mean of {len(rows[0])}.")
    if group > 1:
        notes.append(f"A column is {group} neighbouring classes together.")
    sentences = [*partition.summary(), *([" ".join(notes)] if notes else [])]
    classes = partition.class_names if partition.class_names and group == 1 else ()
    height = 1.3 + min(0.24 * len(rows), 6.6)
    if classes:  # which may stand upright below the rows, and are of wide letters at worst
        height = max(height, 1.6 + 0.13 * min(max(map(len, classes)), LONGEST))
    picture = new_picture(partition.title, sentences, height)
    heat, bars = picture.figure.subplots(1, 2, sharey=True, width_ratios=[2.2, 1])
    num_rows, num_columns = values.shape
    highest = max(float(values.max()), 1.0)
    norm = import_extra("matplotlib.colors", "pictures").PowerNorm(0.5, 0, highest)  # the root shows small counts
    # Ends of axes are ranks of clients and numbers of classes, whatever was merged.
    step = len(rows[0])
    extent = (-0.5, num_columns * group - 0.5, num_rows * step - 0.5, -0.5)
    image = heat.imshow(values, heat_map(), norm, aspect="auto", interpolation="none", extent=extent)
    add_scale(picture, image, heat, f"training examples of {'a class' if group == 1 else f'{group} classes'}")
    if not is_sorted and num_rows <= 40 and num_columns <= 16:
        for (row, column), value in np.ndenumerate(values):
            if value:
                colour = ON_HEAT if norm(value) > 0.6 else INK
                text = "few" if few[row, column] else f"{value:.0f}"
                heat.text(column, row, text, ha="center", va="center", size=8, color=colour, in_layout=False)
    if num_columns <= 60 and num_rows <= 60:
        heat.hlines(np.arange(num_rows + 1) - 0.5, *extent[:2], color=PAGE, linewidth=1)
        heat.vlines(np.arange(num_columns + 1) * group - 0.5, *extent[2:], color=PAGE, linewidth=1)
    heat.set_xlabel("class")
    heat.set_ylabel("clients, counted from the largest" if is_sorted else "client")
    mark_whole(heat.xaxis, partition.num_classes, classes)
    names = partition.client_names if partition.client_names and not is_sorted else ()
    mark_whole(heat.yaxis, partition.num_clients, names, most=60 if names else 25)
    _stack(partition, rows, bars.barh, bars.stairs, step)
    bars.set_xlabel("examples")
    bars.grid(axis="x")
    bars.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, handlelength=1, columnspacing=1)
    texts = [
        f"{_about(partition, members)}\n{_labels(counts[members].sum(axis=0), partition.class_names)}"
        for members in rows
    ]
    for axes in (heat, bars):
        picture.hint_bands(axes, texts, step)
    return picture


def _draw_sizes(partition: Partition) -> Picture:
    """A bar per client, from the largest to the smallest."""
    rows = group_clients(partition.totals, MOST_BARS)
    step = len(rows[0])
    rows = rows if step > 1 else [rows[client] for client in np.argsort(-partition.totals, kind="stable")]
    note = [f"A bar is the mean of {step} clients of about the same size."] if step > 1 else []
    picture = new_picture(partition.title, [*partition.summary(), *note], 4.0)
    axes = picture.figure.subplots()
    _stack(partition, rows, axes.bar, axes.stairs, step)
    axes.set_xlabel("client, from the largest to the smallest" if step == 1 else "clients, counted from the largest")
    axes.set_ylabel("examples")
    axes.set_xlim(-0.5, len(rows) * step - 0.5)
    axes.grid(axis="y")
    mark_whole(
        axes.xaxis,
        partition.num_clients,
        [name_of(partition.client_names, members[0]) for members in rows] if step == 1 else (),
    )
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, handlelength=1)
    picture.hint_bands(axes, [_about(partition, members) for members in rows], step, are_columns=True)
    return picture


def _stack(partition: Partition, rows: Sequence[np.ndarray], bar: object, stairs: object, step: int) -> None:
    """What each row has of train, validation and test, end to end; many rows are one outline, which is small."""
    base = np.zeros(len(rows))
    for part, size in partition.parts:
        held = np.array([size[members].mean() for members in rows])
        style = {"color": PARTS[part], "label": part}
        if len(rows) <= 60:
            bar(np.arange(len(rows)), held, 0.8, base, **style)  # type: ignore[operator]
        else:
            way = "horizontal" if getattr(bar, "__name__", "") == "barh" else "vertical"
            edges = np.arange(len(rows) + 1) * step - 0.5
            stairs(base + held, edges, baseline=base, fill=True, orientation=way, **style)  # type: ignore[operator]
        base = base + held


def _about(partition: Partition, members: np.ndarray) -> str:
    if len(members) > 1:
        totals = partition.totals[members]
        return f"{len(members)} clients with {between(int(totals.min()), int(totals.max()), 'example')}"
    parts = ", ".join(f"{int(size[members[0]]):,} {part}" for part, size in partition.parts)
    return f"client {name_of(partition.client_names, members[0])}: {parts}"


def _labels(held: np.ndarray, names: Sequence[str] | None, most: int = 6) -> str:
    """The largest classes of a client or group."""
    first = [int(c) for c in np.argsort(-held, kind="stable")[:most] if held[c]]
    more = int((held > 0).sum()) - len(first)
    shares = ", ".join(f"{name_of(names, c)}: {100 * held[c] / held.sum():.0f}%" for c in first)
    return f"class {shares}" + (f", {more} more" if more else "")
