"""How far apart clients' masks or gates are, beside how alike their labels are.

DisPFL's figure 5 (masks as heatmaps) and pFedGate's figure 4 (gates as a tree).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from sparsona.analysis.extra import import_extra
from sparsona.analysis.format import UNKNOWN
from sparsona.analysis.partition import drawn_counts
from sparsona.analysis.statistics import pearson, spearman
from sparsona.core.errors import SparsonaError
from sparsona.runs.folder import RunFolder
from sparsona.runs.records import unpack_numbers

ALIKE = 0.9  # the cosine from which two clients' labels are called alike
MEASURES = {"mask": "share of positions at which two masks differ", "vector": "Euclidean distance of gates"}


@dataclass(frozen=True, eq=False)
class Similarity:
    """Distances between some clients' traits, and the labels they train on (None where labels are tokens).

    Between masks a distance is aligned Hamming: the share of positions at which they differ.
    """

    title: str
    kind: Literal["mask", "vector"]
    clients: tuple[int, ...]
    distances: np.ndarray
    label_counts: np.ndarray | None = None
    labels: tuple[str, ...] = ()  # the clients' names, if they have any

    def who(self, place: int) -> str:
        """The client at this place by name, or by number."""
        return self.labels[place] if self.labels else str(self.clients[place])

    def __post_init__(self) -> None:
        if len(self.clients) < 2:
            raise SparsonaError(f"{len(self.clients)} client to compare", expected="two or more")

    @cached_property
    def cosines(self) -> np.ndarray | None:
        """The cosine between every two clients' label distributions: 1 for the same shares, 0 for no common label."""
        if self.label_counts is None:
            return None
        length = np.linalg.norm(self.label_counts, axis=1, keepdims=True)
        unit = self.label_counts / np.maximum(length, 1e-300)
        return np.clip(unit @ unit.T, 0, 1)

    @cached_property
    def tree(self) -> np.ndarray:
        """Ward's clustering of the traits, as scipy's linkage has it; needs the extra `report`.

        Hamming distances are squares of Euclidean ones, so that of masks the root is clustered.
        """
        return _ward(np.sqrt(self.distances) if self.kind == "mask" else self.distances)

    @cached_property
    def order(self) -> list[int]:
        """Places in `clients` such that clients with like labels stand together (like traits, where there are none)."""
        if self.label_counts is None:
            return leaf_order(self.tree)
        shares = self.label_counts / np.maximum(self.label_counts.sum(axis=1, keepdims=True), 1)
        return leaf_order(_ward(np.linalg.norm(shares[:, None] - shares[None], axis=2)))

    @property
    def pairs(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Distances and cosines of all pairs of different clients."""
        upper = np.triu_indices(len(self.clients), 1)
        return self.distances[upper], None if self.cosines is None else self.cosines[upper]

    @property
    def correlations(self) -> tuple[float | None, float | None]:
        """Pearson's and Spearman's between distance and label similarity, over pairs."""
        distance, cosine = self.pairs
        return (None, None) if cosine is None else (pearson(distance, cosine), spearman(distance, cosine))

    def rows(self) -> list[dict[str, str]]:
        """Mean distances: of all pairs, of pairs with like labels, and of the others."""
        distance, cosine = self.pairs
        chosen = {"all": np.full(len(distance), True)}
        if cosine is not None:
            chosen |= {f"labels alike (cosine {ALIKE:g} or more)": cosine >= ALIKE, "others": cosine < ALIKE}
        return [_row(name, distance[which]) for name, which in chosen.items()]

    def sentences(self) -> list[str]:
        """What the table does not show."""
        linear, ranked = self.correlations
        found = [f"Distance: {MEASURES[self.kind]}; {len(self.clients)} clients."]
        if linear is not None and ranked is not None:
            text = f"Correlation of distance with label similarity: Pearson {linear:+.2f}, Spearman {ranked:+.2f}"
            found.append(f"{text}, over {len(self.pairs[0]):,} pairs.".replace("-", "−"))
        return found

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        linear, ranked = self.correlations
        return {
            "title": self.title,
            "kind": self.kind,
            "clients": list(self.clients),
            **({"names": list(self.labels)} if self.labels else {}),
            "pearson": linear,
            "spearman": ranked,
            "distances": self.distances.tolist(),
            "cosines": None if self.cosines is None else self.cosines.tolist(),
            "order": [self.clients[place] for place in self.order],
            "tree": self.tree.tolist(),
        }


def leaf_order(tree: np.ndarray) -> list[int]:
    """The points from left to right in a tree whose branches do not cross."""
    return [int(place) for place in _hierarchy().leaves_list(tree)]


def similarity_of(
    run: RunFolder,
    kind: Literal["mask", "vector"],
    clients: tuple[int, ...],
    distances: np.ndarray,
    of: str | None = None,
) -> Similarity:
    """These distances, with the clients' labels from the run's folder. `of` names what was compared, for the title."""
    facts, config = run.facts, run.config
    counts = None if facts.label_counts is None else drawn_counts(facts.label_counts[list(clients)])
    parts = [facts.title, config["data"].partition(":")[0], config["partition"], f"seed {config['seed']}"]
    parts += [] if of is None else [of]
    labels = tuple(facts.client_names[client] for client in clients) if facts.client_names else ()
    return Similarity(", ".join(map(str, parts)), kind, clients, distances, counts, labels)


def recorded_similarity(run: RunFolder) -> Similarity | None:
    """The last traits that a run with `record_traits` stored; None where it stored none, or had one client."""
    rows = run.records.traits()
    if not rows:
        return None
    most = run.records.bounds.numbers
    clients = tuple(unpack_numbers(rows[-1].clients, "<i4", most).tolist())
    if len(clients) < 2:
        return None
    num, pairs = len(clients), unpack_numbers(rows[-1].pairs, "<f8", most)
    if len(pairs) != num * (num - 1) // 2 or not all(0 <= client < len(run.facts.sizes) for client in clients):
        raise SparsonaError(
            f"'{run.records.path}' has distances of clients that this run does not have",
            expected="the file as sparsona wrote it",
            hint="restore it from a copy",
        )
    distances = np.zeros((num, num))
    distances[np.triu_indices(num, 1)] = pairs
    kind: Literal["mask", "vector"] = "mask" if rows[-1].kind == "mask" else "vector"
    return similarity_of(run, kind, clients, distances + distances.T)


def recorded_distances(run: RunFolder) -> list[tuple[int, float, float]]:
    """(completed rounds, mean distance between clients, mean distance of each to its own start), as recorded."""
    return [(row.completed, row.apart, row.moved) for row in run.records.traits() if row.apart is not None]


def _hierarchy() -> Any:
    return import_extra("scipy.cluster.hierarchy", "trees and ordered heatmaps of clients")


def _ward(distances: np.ndarray) -> np.ndarray:
    """Merges as rows (a, b, height, size); row i makes cluster n + i."""
    return _hierarchy().ward(distances[np.triu_indices(len(distances), 1)])


def _row(name: str, distance: np.ndarray) -> dict[str, str]:
    figures = (UNKNOWN,) * 3 if not len(distance) else (f"{f(distance):.4g}" for f in (np.mean, np.min, np.max))
    return {"pairs": name, "number": f"{len(distance):,}", **dict(zip(("mean", "least", "most"), figures, strict=True))}
