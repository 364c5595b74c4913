"""Who is like whom: Ward's clustering against its definition, correlations and pictures on small cases."""

from __future__ import annotations

import json
import re
import sys
from itertools import pairwise

import numpy as np
import pytest

from sparsona.analysis.similarity import Similarity, leaf_order
from sparsona.core.errors import SparsonaError
from sparsona.report.pictures import draw
from sparsona.report.pictures.text import Terminal, similarity_lines


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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["mask", "vector"])
def test_the_tree_is_what_wards_definition_says(kind, seed):
    """Of masks too: aligned Hamming distances are squares of the Euclidean ones between the masks' points."""
    points = np.random.default_rng(seed).normal(size=(11, 3))
    distances = distances_of(points) ** (2 if kind == "mask" else 1)
    tree = Similarity("t", kind, tuple(range(11)), distances).tree
    clusters = [frozenset([k]) for k in range(11)]
    for row, (who, height) in enumerate(by_definition(points)):
        clusters.append(clusters[int(tree[row, 0])] | clusters[int(tree[row, 1])])
        assert clusters[-1] == who
        assert tree[row, 2] == pytest.approx(height)
    assert sorted(leaf_order(tree)) == list(range(11))


def test_without_scipy_there_is_a_table_and_the_extra_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "scipy"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "scipy", None)
    found = make()
    assert len(found.rows()) == 3
    with pytest.raises(SparsonaError, match=re.escape("pip install 'sparsona[report]'")):
        similarity_lines(found, Terminal(80))


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
    assert len([axes for axes in draw(found).figure.axes if axes.images]) == 1
    assert similarity_lines(found, Terminal(80, False))
    with pytest.raises(SparsonaError, match="1 client"):
        Similarity("t", "mask", (0,), np.zeros((1, 1)))


def test_groups_stand_together():
    found = make()
    groups = [found.clients[place] % 3 for place in found.order]
    assert sum(a != b for a, b in pairwise(groups)) == 2
    assert found.correlations[0] < -0.9


def test_two_heatmaps_in_which_strong_is_alike():
    found = make()
    picture = draw(found)
    images = [axes.images[0] for axes in picture.figure.axes if axes.images]
    place = {client: k for k, client in enumerate(found.clients[p] for p in found.order)}
    same, other = (place[100], place[103]), (place[100], place[101])
    assert len(images) == 2
    for image in images:
        likeness = image.norm(image.get_array())
        assert likeness[same] > likeness[other] >= 0
        assert likeness.mask.diagonal().all()
    svg = picture.svg()
    assert "client 100: masks nearest to its: " in svg
    assert len(svg) < 60_000


def test_a_tree_over_its_leaves_classes():
    found = make("vector", n=6)
    picture = draw(found)
    tree, strip, _ = picture.figure.axes
    heights = sorted(max(line.get_ydata()) for line in tree.lines)
    assert heights == pytest.approx(sorted(found.tree[:, 2]))
    order = leaf_order(found.tree)
    assert strip.images[0].get_array().argmax(axis=0).tolist() == [place % 3 for place in order]
    assert [label.get_text() for label in tree.get_xticklabels()] == [str(found.clients[place]) for place in order]
    groups = [sorted(100 + k for k in range(6) if k % 3 == g) for g in range(3)]
    svg = picture.svg()
    assert all(re.search(f"clients ({a}, {b}|{b}, {a})\n", svg) for a, b in groups)
    whole = re.search(r"clients ((?:\d+, ){5}\d+)\n", svg)
    assert whole is not None
    assert sorted(map(int, whole[1].split(", "))) == list(found.clients)


@pytest.mark.parametrize("kind", ["mask", "vector"])
def test_text_pictures_fit(kind):
    for n, width in ((12, 80), (64, 80), (64, 60)):
        for coloured in (True, False):
            lines = similarity_lines(make(kind, n), Terminal(width, coloured))
            assert max(len(line.plain.rstrip()) for line in lines) <= width, (kind, n, width)


def test_text_pictures_shade_what_is_alike():
    points = np.array([[0.0], [10.0], [1.0], [11.0]])
    found = Similarity("t", "vector", (0, 1, 2, 3), distances_of(points))
    heading, *lines = (line.plain for line in similarity_lines(found, Terminal(60, False)))
    assert heading.split() == ["client", "distance", "of", "gates"]
    assert [line.split()[0] for line in lines] in (["0", "2", "1", "3"], ["1", "3", "0", "2"])
    assert lines[0][8:12] == "  @@"
