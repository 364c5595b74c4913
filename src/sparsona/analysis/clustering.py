"""Ward's hierarchical clustering, from distances alone."""

from __future__ import annotations

import numpy as np

from sparsona.core.errors import SparsonaError


def ward(distances: np.ndarray) -> np.ndarray:
    """Merges as rows (a, b, height, size), a < b, in the order of height; row i makes cluster n + i.

    By Lance and Williams' recurrence on squares, which for Euclidean distances is Ward's criterion: each merge is the
    one that adds least to the sum of squares within clusters. The height of two single points is their distance.
    """
    n = len(distances)
    if distances.shape != (n, n) or n < 1 or not np.allclose(distances, distances.T):
        raise SparsonaError(f"distances of shape {distances.shape}", expected="a symmetric square, one row per client")
    squares = np.full((2 * n - 1, 2 * n - 1), np.inf)
    squares[:n, :n] = np.asarray(distances, dtype=np.float64) ** 2
    np.fill_diagonal(squares, np.inf)
    sizes = np.zeros(2 * n - 1)
    sizes[:n] = 1
    merges = np.zeros((n - 1, 4))
    for i in range(n - 1):
        a, b = (int(place) for place in np.unravel_index(np.argmin(squares), squares.shape))
        height, new = squares[a, b], n + i
        merges[i] = min(a, b), max(a, b), np.sqrt(height), sizes[a] + sizes[b]
        others = [k for k in np.flatnonzero(sizes) if k not in (a, b)]
        for k in others:
            total = sizes[a] + sizes[b] + sizes[k]
            found = (sizes[a] + sizes[k]) * squares[a, k] + (sizes[b] + sizes[k]) * squares[b, k] - sizes[k] * height
            squares[new, k] = squares[k, new] = found / total
        sizes[new] = sizes[a] + sizes[b]
        sizes[[a, b]] = 0
        squares[[a, b], :] = squares[:, [a, b]] = np.inf
    return merges


def leaf_order(merges: np.ndarray) -> list[int]:
    """The points from left to right in a tree whose branches do not cross."""
    return members(merges)[-1]


def members(merges: np.ndarray) -> list[list[int]]:
    """The points of every cluster, single ones first, each in the order of its leaves."""
    found = [[point] for point in range(len(merges) + 1)]
    for a, b, _, _ in merges:
        found.append(found[int(a)] + found[int(b)])
    return found
