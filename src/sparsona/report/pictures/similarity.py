"""Pictures of the similarity of clients: two heatmaps side by side, or a tree over its leaves' labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sparsona.analysis.extra import import_extra
from sparsona.analysis.partition import merge_classes
from sparsona.analysis.similarity import Similarity
from sparsona.report.palette import BETTER, WORSE
from sparsona.report.pictures.figure import Picture, add_scale, heat_map, mark_whole, new_picture, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_CLASSES = 50


def draw_similarity(similarity: Similarity) -> Picture:
    """Masks are two heatmaps (DisPFL, figure 5), vectors a tree (pFedGate, figure 4; common classes at its forks)."""
    with style():
        return (_draw_heatmaps if similarity.kind == "mask" else _draw_tree)(similarity)


def _draw_heatmaps(similarity: Similarity) -> Picture:
    """Strong is alike in both, so that like pictures mean like relations."""
    picture = new_picture(similarity.title, similarity.sentences(), 5.6)
    panels = picture.figure.subplots(1, 2)
    distance, _ = similarity.pairs
    low, high = float(distance.min()), float(distance.max())
    if similarity.cosines is None:
        panels[0].remove()
    else:
        scale = ("cosine of label distributions", 0.0, 1.0)
        _heatmap(picture, panels[0], similarity, similarity.cosines, *scale, nearest="labels most like its")
    # Distances are drawn below 0, so that near is strong; the scale's labels drop the sign.
    scale = ("distance of masks, far to near", -high, -low if low < high else 1 - high)
    _heatmap(picture, panels[1], similarity, -similarity.distances, *scale, nearest="masks nearest to its")
    return picture


def _heatmap(
    picture: Picture,
    axes: Axes,
    similarity: Similarity,
    likeness: np.ndarray,
    label: str,
    low: float,
    high: float,
    nearest: str,
) -> None:
    order = similarity.order
    shown = likeness[np.ix_(order, order)].astype(float)
    np.fill_diagonal(shown, np.nan)  # the diagonal says nothing
    image = axes.imshow(shown, heat_map(), vmin=low, vmax=high, interpolation="none")
    add_scale(picture, image, axes, label, format=lambda value, _: f"{abs(value):.3g}", ticks=np.linspace(low, high, 5))
    names = [similarity.who(place) for place in order]
    mark_whole(axes.xaxis, len(order), names, most=20)
    mark_whole(axes.yaxis, len(order), names, most=20)
    axes.set_xlabel("client")
    texts = []
    for place in order:
        near = [int(k) for k in np.argsort(-likeness[place], kind="stable") if k != place][:5]
        listed = ", ".join(f"{similarity.who(k)} ({abs(likeness[place, k]):.3g})" for k in near)
        texts.append(f"client {similarity.who(place)}: {nearest}: {listed}")
    picture.hint_bands(axes, texts)


def _draw_tree(similarity: Similarity) -> Picture:
    """A dendrogram; below each leaf, the client's training examples by class."""
    hierarchy = import_extra("scipy.cluster.hierarchy", "trees of clients")
    found = hierarchy.dendrogram(similarity.tree, no_plot=True)
    order = found["leaves"]
    names = [similarity.who(place) for place in order]
    has_labels = similarity.label_counts is not None
    picture = new_picture(similarity.title, similarity.sentences(), 6.2 if has_labels else 3.8)
    axes = picture.figure.subplots(2 if has_labels else 1, 1, squeeze=False, height_ratios=[1, 1][: 1 + has_labels])[
        :, 0
    ]
    _branches(picture, axes[0], similarity, found)
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("Ward's distance")
    axes[0].grid(axis="y")
    for panel in axes:
        panel.set_xlim(-0.5, len(names) - 0.5)
        mark_whole(panel.xaxis, len(names), names, most=40)
        panel.set_xlabel("client")
    if similarity.label_counts is not None:
        _label_strip(picture, axes[1], similarity.label_counts[order], names)
    return picture


def _branches(picture: Picture, axes: Axes, similarity: Similarity, found: dict[str, list[list[float]]]) -> None:
    """The forks, which scipy puts at 5, 15, 25, ... from left to right; each named by its common classes."""
    leaves = [int(leaf) for leaf in found["leaves"]]  # type: ignore[call-overload]
    tallest = similarity.tree[-1, 2]
    for xs, heights in zip(found["icoord"], found["dcoord"], strict=True):
        at = [(x - 5) / 10 for x in xs]
        (line,) = axes.plot(at, heights, color=BETTER, linewidth=1.6)
        who = _below(found, xs, heights)
        common = _common_classes(similarity, [leaves[place] for place in who])
        named = ", ".join(similarity.who(leaves[place]) for place in who)
        picture.hint(line, f"clients {named}\ncommon classes: {common or 'none'}")
        has_room = heights[1] - max(heights[0], heights[3]) > 0.08 * tallest  # or a lower fork would cross it
        if common and has_room and 0.012 * len(common) < (at[2] - at[1]) / len(leaves):
            middle = (at[1] + at[2]) / 2
            axes.annotate(
                common, (middle, heights[1]), (0, -9), "data", "offset points", ha="center", size=8, color=WORSE
            )


def _below(found: dict[str, list[list[float]]], xs: list[float], heights: list[float]) -> range:
    """The places of the leaves under a fork: as far to both sides as its lower forks reach."""
    ends = []
    for side, x, height in ((0, xs[0], heights[0]), (-1, xs[3], heights[3])):
        while height > 0:
            lower = zip(found["icoord"], found["dcoord"], strict=True)
            below, tops = next(fork for fork in lower if (fork[0][1] + fork[0][2]) / 2 == x and fork[1][1] == height)
            x, height = below[side], tops[side]
        ends.append(round((x - 5) / 10))
    return range(ends[0], ends[1] + 1)


def _common_classes(similarity: Similarity, who: list[int]) -> str:
    if similarity.label_counts is None:
        return ""
    return ", ".join(map(str, np.flatnonzero((similarity.label_counts[who] > 0).all(axis=0)).tolist()))


def _label_strip(picture: Picture, axes: Axes, counts: np.ndarray, names: list[str]) -> None:
    """A column per leaf, a row per class (or some neighbouring ones), coloured by its share of the client's data."""
    merged, group = merge_classes(counts, MOST_CLASSES)
    shares = merged / np.maximum(merged.sum(axis=1, keepdims=True), 1)
    extent = (-0.5, len(names) - 0.5, merged.shape[1] * group - 0.5, -0.5)
    norm = import_extra("matplotlib.colors", "pictures").PowerNorm(0.5, 0, 1)
    image = axes.imshow(shares.T, heat_map(), norm, aspect="auto", interpolation="none", extent=extent)
    add_scale(picture, image, axes, "share of the client's training examples", format="{x:.0%}")
    axes.set_ylabel("class" if group == 1 else f"class ({group} to a row)")
    mark_whole(axes.yaxis, counts.shape[1])
    texts = []
    for column, name in enumerate(names):
        held = [f"{c * group}: {share:.0%}" for c, share in enumerate(shares[column]) if share > 0]
        texts.append(f"client {name}: class {', '.join(held[:12])}")
    picture.hint_bands(axes, texts, are_columns=True)
