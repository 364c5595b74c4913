"""Who is like whom: Ward's clustering against its definition, correlations and pictures on small cases."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from sparsona.analysis.clustering import leaf_order, members, ward
from sparsona.report.pictures.drawing import LEVELS, Grid, Line, Words, to_svg
from sparsona.report.pictures.textplots import similarity_lines

from sparsona.analysis.similarity import Similarity
from sparsona.core.errors import SparsonaError
from sparsona.report.pictures.similarity import draw_similarity


def by_definition(points: np.ndarray) -> list[tuple[frozenset[int], float]]:
    """Ward's merges from the points: always the two clusters whose union adds least to the squares within."""

    def squares(who: frozenset[int]) -> float:
        inside = points[sorted(who)]
        return float(((inside - inside.mean(axis=0)) ** 2).sum())

    clusters = [frozenset([k]) for k in range(len(points))]
    merges = []
    while len(clusters) > 1:
        pairs = [(a, b) for i, a in enumerate(clusters) for b in clusters[i + 1 :]]
        a, b = min(pairs, key=lambda pair: squares(pair[0] | pair[1]) - squares(pair[0]) - squares(pair[1]))
        merges.append((a | b, np.sqrt(2 * (squares(a | b) - squares(a) - squares(b)))))
        clusters = [cluster for cluster in clusters if cluster not in (a, b)] + [a | b]
    return merges


def distances_of(points: np.ndarray) -> np.ndarray:
    return np.linalg.norm(points[:, None] - points[None], axis=2)


@pytest.mark.parametrize("seed", range(5))
def test_ward_is_what_its_definition_says(seed):
    points = np.random.default_rng(seed).normal(size=(11, 3))
    merges = ward(distances_of(points))
    clusters = members(merges)
    for row, (who, height) in enumerate(by_definition(points)):
        assert frozenset(clusters[11 + row]) == who
        assert merges[row, 2] == pytest.approx(height)
        assert merges[row, 3] == len(who)
    assert sorted(leaf_order(merges)) == list(range(11))
    assert np.all(np.diff(merges[:, 2]) >= 0)


def test_ward_by_hand():
    # 0 and 1 on a line, and 5: the first two merge at 1; then sqrt(2 * 2 * 1 / 3) * 4.5 = 5.196...
    merges = ward(distances_of(np.array([[0.0], [5.0], [1.0]])))
    assert merges[0].tolist() == [0, 2, 1, 2]
    assert merges[1, :2].tolist() == [1, 3]
    assert merges[1, 2] == pytest.approx(4.5 * np.sqrt(4 / 3))
    assert leaf_order(merges) == [1, 0, 2]
    assert ward(np.zeros((1, 1))).shape == (0, 4)
    with pytest.raises(SparsonaError, match="symmetric"):
        ward(np.array([[0.0, 1], [2, 0]]))


def make(kind: str = "mask", n: int = 12, classes: int = 8, seed: int = 0) -> Similarity:
    """Clients of three groups in turn; traits follow the groups."""
    rng = np.random.default_rng(seed)
    group = np.arange(n) % 3
    labels = np.eye(classes, dtype=int)[group] * 30 + rng.integers(0, 3, (n, classes))
    points = np.eye(3)[group] + 0.1 * rng.normal(size=(n, 3))
    distances = distances_of(points)
    return Similarity("a run", kind, tuple(range(100, 100 + n)), distances / (8 if kind == "mask" else 1), labels)


def test_correlations_by_hand():
    labels = np.array([[1, 0], [1, 0], [0, 1]])  # cosines: 1 between the first two, else 0
    distances = np.array([[0, 0.1, 0.3], [0.1, 0, 0.5], [0.3, 0.5, 0]])
    found = Similarity("t", "mask", (4, 7, 9), distances, labels)
    assert found.cosines.round(6).tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    # Distances .1 .3 .5, cosines 1 0 0: -.2 / sqrt(.08 * .6667); ranks 1 2 3 and 3 1.5 1.5: -1.5 / sqrt(2 * 1.5)
    assert found.correlations == pytest.approx((-0.2 / np.sqrt(0.08 * 2 / 3), -1.5 / np.sqrt(3)))
    assert [row["number"] for row in found.rows()] == ["3", "1", "2"]
    assert [row["mean"] for row in found.rows()] == ["0.3", "0.1", "0.4"]
    assert "Pearson −0.87, Spearman −0.87, over 3 pairs" in found.sentences()[1]
    assert json.loads(json.dumps(found.as_dict()))["clients"] == [4, 7, 9]


def test_without_classes_there_is_nothing_to_correlate():
    found = Similarity("t", "mask", (0, 1, 2), distances_of(np.arange(3.0)[:, None]))
    assert found.correlations == (None, None)
    assert len(found.rows()) == 1
    assert len([shape for shape in draw_similarity(found).shapes if isinstance(shape, Grid)]) == 1
    assert similarity_lines(found, 80, coloured=False)
    with pytest.raises(SparsonaError, match="1 client"):
        Similarity("t", "mask", (0,), np.zeros((1, 1)))


def test_groups_stand_together():
    found = make()
    groups = [found.clients[place] % 3 for place in found.order]
    assert sum(a != b for a, b in pairwise(groups)) == 2
    assert found.correlations[0] < -0.9


def test_two_heatmaps_in_which_strong_is_alike():
    found = make()
    labels, masks = (shape for shape in draw_similarity(found).shapes if isinstance(shape, Grid))
    assert labels.levels.shape == masks.levels.shape == (12, 12)
    assert not labels.levels.diagonal().any()
    place = {client: k for k, client in enumerate(found.clients[p] for p in found.order)}
    same, other = (place[100], place[103]), (place[100], place[101])
    for grid in (labels, masks):
        assert grid.levels[same] > grid.levels[other] > 0
        assert grid.levels.max() == LEVELS
    svg = to_svg(draw_similarity(found), "x")
    assert "client 100: masks nearest to its: " in svg
    assert len(svg) < 30_000


def test_a_tree_over_its_leaves_classes():
    found = make("vector", n=6)
    shapes = draw_similarity(found).shapes
    lines = [shape for shape in shapes if isinstance(shape, Line)]
    assert len(lines) == 5
    tops = sorted(min(y for _, y in line.points) for line in lines)
    heights = sorted(found.tree[:, 2], reverse=True)
    assert (tops[1] - tops[0]) / (tops[-1] - tops[0]) == pytest.approx(
        (heights[0] - heights[1]) / (heights[0] - heights[-1])
    )
    (strip,) = (shape for shape in shapes if isinstance(shape, Grid))
    order = leaf_order(found.tree)
    assert strip.levels.argmax(axis=0).tolist() == [place % 3 for place in order]
    named = [shape.text for shape in shapes if isinstance(shape, Words) and shape.paint == "ink"]
    assert [str(found.clients[place]) for place in order] == [name for name in named if name in map(str, found.clients)]


def test_text_pictures_fit():
    for kind in ("mask", "vector"):
        for n, width in ((12, 80), (64, 80), (64, 60)):
            for coloured in (True, False):
                lines = similarity_lines(make(kind, n), width, coloured)
                assert max(len(line.plain.rstrip()) for line in lines) <= width, (kind, n, width)


def test_the_text_tree_joins_like_clients():
    points = np.array([[0.0], [10.0], [1.0], [11.0]])
    found = Similarity("t", "vector", (0, 1, 2, 3), distances_of(points), np.eye(4, dtype=int))
    _, *lines = (line.plain for line in similarity_lines(found, 60, coloured=False))
    assert [line.split()[0] for line in lines] == ["0", "2", "1", "3"]
    trees = [line.split(maxsplit=2)[2] for line in lines]
    assert trees[0].index("┬") == trees[1].index("┘") < trees[0].index("┐")
    ascii_lines = similarity_lines(found, 60, coloured=False, ascii_only=True)
    assert "\n".join(line.plain for line in ascii_lines).isascii()
