"""Pictures of who is like whom: two heatmaps side by side, and a tree over its leaves' labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from sparsona.analysis.clustering import leaf_order, members
from sparsona.analysis.similarity import Similarity
from sparsona.report.pictures.axes import Axis
from sparsona.report.pictures.drawing import LEVELS, Box, Drawing, Grid, Hint, Line, Shape, Words
from sparsona.report.pictures.partition import LETTER, index_ticks, levels_of, merge_classes

WIDTH, LEFT, RIGHT, GUTTER = 960, 66, 22, 60
TREE_HEIGHT, MOST_CLASSES = 240, 50


def draw_similarity(similarity: Similarity) -> Drawing:
    """Masks are two heatmaps (DisPFL, figure 5), vectors a tree (pFedGate, figure 4; common classes at its forks)."""
    shapes: list[Shape] = [Words(LEFT, 34, _cut(similarity.title, 88), "ink", size=18, bold=True)]
    top = 57.0
    for sentence in similarity.sentences():
        shapes.append(Words(LEFT, top, sentence, "ink", size=13))
        top += 19
    draw = _heatmaps if similarity.kind == "mask" else _tree
    height, more = draw(similarity, top + 6)
    return Drawing(WIDTH, height, (*shapes, *more))


def _heatmaps(similarity: Similarity, top: float) -> tuple[float, list[Shape]]:
    """Dark is alike in both, so that like pictures mean like relations."""
    n = len(similarity.clients)
    side = (WIDTH - LEFT - RIGHT - GUTTER) / 2
    cell = min(side / n, 40.0)
    distance, _ = similarity.pairs
    low, high = float(distance.min()), float(distance.max())
    top += 42
    shapes: list[Shape] = []

    def panel(left: float, title: str, ends: tuple[str, str], closeness: np.ndarray) -> None:
        levels = 1 + np.round((LEVELS - 1) * np.clip(closeness, 0, 1)).astype(int)
        np.fill_diagonal(levels, 0)
        shapes.extend(_scale(left, top - 32, ends, title))
        gap = 1.0 if cell >= 6 else 0.0
        shapes.append(Box(left, top, cell * n - gap, cell * n - gap, "none"))
        shapes.append(Grid(left, top, cell, cell, levels[np.ix_(similarity.order, similarity.order)], gap))
        for place in index_ticks(n, cell, 16):
            name = str(similarity.clients[similarity.order[place]])
            shapes.append(Words(left - 8, top + cell * (place + 0.5) + 4, name, align="end", size=11))
        for place in index_ticks(n, cell, LETTER * len(str(max(similarity.clients))) + 8):
            name = str(similarity.clients[similarity.order[place]])
            shapes.append(Words(left + cell * (place + 0.5), top + cell * n + 16, name, align="middle", size=11))
        shapes.append(Words(left + cell * n / 2, top + cell * n + 36, "client", align="middle"))

    left = float(LEFT)
    if similarity.cosines is not None:
        panel(left, "cosine of label distributions", ("0", "1"), similarity.cosines)
        shapes += _row_hints(similarity, left, top, cell, similarity.cosines, "labels most like its", largest=True)
        left += side + GUTTER
    closeness = (high - similarity.distances) / ((high - low) or 1.0)
    panel(left, "distance of masks, far to near", (f"{high:.3g}", f"{low:.3g}"), closeness)
    shapes += _row_hints(similarity, left, top, cell, similarity.distances, "masks nearest to its", largest=False)
    return top + cell * n + 56, shapes


def _scale(left: float, y: float, ends: tuple[str, str], what: str) -> Iterator[Shape]:
    yield Words(left, y + 9, ends[0], size=11)
    start = left + LETTER * len(ends[0]) + 6
    for level in range(LEVELS):
        yield Box(start + 7 * level, y, 7, 10, f"h{level + 1}")
    yield Words(start + 7 * LEVELS + 6, y + 9, ends[1], size=11)
    yield Words(start + 7 * LEVELS + 6 + LETTER * len(ends[1]) + 14, y + 9, what, "ink")


def _row_hints(
    similarity: Similarity, left: float, top: float, cell: float, values: np.ndarray, what: str, largest: bool
) -> Iterator[Shape]:
    """For each client its five nearest."""
    clients = similarity.clients
    for row, place in enumerate(similarity.order):
        nearest = [
            int(k) for k in np.argsort(-values[place] if largest else values[place], kind="stable") if k != place
        ]
        named = ", ".join(f"{clients[k]} ({values[place, k]:.3g})" for k in nearest[:5])
        text = f"client {clients[place]}: {what}: {named}"
        yield Hint(left, top + cell * row, cell * len(clients), cell, text)


def _tree(similarity: Similarity, top: float) -> tuple[float, list[Shape]]:
    """A dendrogram; below each leaf, the client's training examples by class."""
    merges, order = similarity.tree, leaf_order(similarity.tree)
    step = (WIDTH - LEFT - RIGHT) / len(order)
    top, bottom = top + 18, top + 18 + TREE_HEIGHT
    y = Axis(0, float(merges[-1, 2]) * 1.03 or 1.0, bottom, top)
    shapes: list[Shape] = []
    for tick in y.ticks(5):
        shapes += [
            Box(LEFT, y.at(tick) - 0.5, WIDTH - LEFT - RIGHT, 1, "rule"),
            Words(LEFT - 8, y.at(tick) + 4, f"{tick:g}", align="end"),
        ]
    shapes.append(Words(16, (top + bottom) / 2, "Ward's distance", align="middle", turn=90))
    shapes += _branches(similarity, y, lambda place: LEFT + step * (place + 0.5))
    names = [str(similarity.clients[place]) for place in order]
    for place in index_ticks(len(order), step, LETTER * max(map(len, names)) + 8):
        shapes.append(Words(LEFT + step * (place + 0.5), bottom + 17, names[place], "ink", "middle"))
    shapes.append(Words(LEFT - 14, bottom + 17, "client", align="end"))
    below = bottom + 28
    if similarity.label_counts is not None:
        below, strip = _label_strip(similarity.label_counts[order], names, step, below)
        shapes += strip
    return below + 20, shapes


def _branches(similarity: Similarity, y: Axis, at: Callable[[float], float]) -> Iterator[Shape]:
    merges, order = similarity.tree, leaf_order(similarity.tree)
    n = len(order)
    places: list[float] = [float(order.index(point)) for point in range(n)]
    heights = [0.0] * n
    clusters = members(merges)
    for number, (a, b, height, _) in enumerate(merges.tolist()):
        left, right = sorted((places[int(a)], places[int(b)]))
        ends = (heights[int(a)], heights[int(b)]) if places[int(a)] == left else (heights[int(b)], heights[int(a)])
        corner = y.at(height)
        path = ((at(left), y.at(ends[0])), (at(left), corner), (at(right), corner), (at(right), y.at(ends[1])))
        yield Line(path, "helps", 1.6)
        who = clusters[n + number]
        common = _common_classes(similarity, who)
        if common and LETTER * len(common) < at(right) - at(left) - 8:
            yield Words((at(left) + at(right)) / 2, corner + 13, common, "hurts", "middle", size=11)
        text = f"clients {', '.join(str(similarity.clients[k]) for k in who)}\ncommon classes: {common or 'none'}"
        yield Hint(at(left), corner - 6, at(right) - at(left), 12, text)
        places.append((left + right) / 2)
        heights.append(height)


def _common_classes(similarity: Similarity, who: list[int]) -> str:
    if similarity.label_counts is None:
        return ""
    return ", ".join(map(str, np.flatnonzero((similarity.label_counts[who] > 0).all(axis=0)).tolist()))


def _label_strip(counts: np.ndarray, names: list[str], step: float, top: float) -> tuple[float, list[Shape]]:
    """A column per leaf, a row per class (or some neighbouring ones), coloured by its share of the client's data."""
    merged, group = merge_classes(counts, MOST_CLASSES)
    shares = merged / np.maximum(merged.sum(axis=1, keepdims=True), 1)
    tall = min(14.0, 260 / merged.shape[1])
    gap = 1.0 if min(tall, step) >= 6 else 0.0
    bottom = top + tall * merged.shape[1]
    shapes: list[Shape] = [Box(LEFT, top, WIDTH - LEFT - RIGHT - gap, bottom - top - gap, "none")]
    shapes.append(Grid(LEFT, top, step, tall, levels_of(shares.T, 1.0), gap))
    for row in index_ticks(merged.shape[1], tall, 14):
        shapes.append(Words(LEFT - 8, top + tall * (row + 0.5) + 4, str(row * group), align="end", size=11))
    for column, name in enumerate(names):
        held = [f"{c * group}: {share:.0%}" for c, share in enumerate(shares[column]) if share > 0]
        text = f"client {name}: class {', '.join(held[:12])}"
        shapes.append(Hint(LEFT + step * column, top, step, bottom - top, text))
    what = "class of training examples" if group == 1 else f"classes of training examples, {group} to a row"
    shapes.append(Words(16, (top + bottom) / 2, "class", align="middle", turn=90))
    shapes.append(
        Words(
            (LEFT + WIDTH - RIGHT) / 2, bottom + 17, f"{what}; stronger: a larger share of the client's", align="middle"
        )
    )
    return bottom + 17, shapes


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
