"""How many examples each client has, of which parts and classes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sparsona.analysis.format import between, plural
from sparsona.core.errors import SparsonaError
from sparsona.core.points import FEW

PARTS = ("train", "validation", "test")


@dataclass(frozen=True, eq=False)
class Partition:
    """The examples of all clients, counted.

    Args:
        title: what is shared out, and how.
        sizes: train, validation and test (those that are known), each with a count per client.
        counts: the training examples by client and class, FEW for 1 to 4 that a client does not tell; None where labels
            are tokens, or not known.
        client_names: of the clients, in order; None or empty: they have none.
        class_names: of the classes, likewise.
    """

    title: str
    sizes: Mapping[str, np.ndarray]
    counts: np.ndarray | None = None
    client_names: Sequence[str] | None = None
    class_names: Sequence[str] | None = None

    def __post_init__(self) -> None:
        lengths = {len(size) for size in self.sizes.values()}
        if not self.sizes or set(self.sizes) - set(PARTS) or len(lengths) != 1 or 0 in lengths:
            found = ", ".join(f"{part}: {len(size)}" for part, size in self.sizes.items()) or "nothing"
            raise SparsonaError(f"sizes of {found}", expected=f"for some of {', '.join(PARTS)}, one count per client")
        if self.counts is not None and (self.counts.ndim != 2 or len(self.counts) != self.num_clients):
            raise SparsonaError(
                f"counts of shape {self.counts.shape}", expected=f"{self.num_clients} clients by the number of classes"
            )

    @property
    def num_clients(self) -> int:
        return len(next(iter(self.sizes.values())))

    @property
    def num_classes(self) -> int:
        return 0 if self.counts is None else self.counts.shape[1]

    @property
    def totals(self) -> np.ndarray:
        """The examples of each client, all parts together."""
        return np.sum([np.asarray(size) for size in self.sizes.values()], axis=0)

    @property
    def parts(self) -> list[tuple[str, np.ndarray]]:
        """The counts of train, validation and test, in this order; empty parts are left out."""
        return [(part, np.asarray(self.sizes[part])) for part in PARTS if np.any(self.sizes.get(part, 0))]

    def summary(self) -> tuple[str, str]:
        """Two short lines: the whole, and the single client."""
        totals, known = self.totals, self.totals[self.totals > 0]
        parts = ", ".join(f"{int(size.sum()):,} {part}" for part, size in self.parts)
        whole = f"{plural(self.num_clients, 'client')}, {plural(int(totals.sum()), 'example')}"
        whole += f": {parts}" if parts else ""
        single = f"Per client: {_spread(known if len(known) else totals, 'example')}"
        if self.counts is not None:
            single += f", {_spread((self.counts != 0).sum(axis=1), 'class')}"
        if 0 < len(known) < len(totals):
            single += f"; of {plural(len(totals) - len(known), 'client')} not known"
        if self.counts is not None and (self.counts == FEW).any():
            single += "; few: 1 to 4, drawn as 2"
        return whole, single


def drawn_counts(counts: np.ndarray) -> np.ndarray:
    """Counts with 2 in place of FEW, which is 1 to 4."""
    return np.where(counts == FEW, 2, counts)


def merge_classes(counts: np.ndarray, most: int) -> tuple[np.ndarray, int]:
    """Neighbouring classes added up so that there are at most `most` columns, and how many each column has."""
    group = math.ceil(counts.shape[1] / most)
    return np.add.reduceat(counts, np.arange(0, counts.shape[1], group), axis=1), group


def group_clients(totals: np.ndarray, most: int) -> list[np.ndarray]:
    """Clients in at most `most` groups: each alone, in order, or neighbours from the largest to the smallest."""
    if len(totals) <= most:
        return [np.array([client]) for client in range(len(totals))]
    order = np.argsort(-totals, kind="stable")
    step = math.ceil(len(order) / most)
    return [order[i : i + step] for i in range(0, len(order), step)]


def _spread(values: np.ndarray, noun: str) -> str:
    low, high, middle = int(values.min()), int(values.max()), float(np.median(values))
    return between(low, high, noun) + f" (median {middle:,.10g})" * (low < high)
