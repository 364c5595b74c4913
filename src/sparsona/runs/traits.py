"""Traits of a run's clients (Method.trait), and the distances between them: masks by bits, vectors by length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.seeds import generator
from sparsona.core.tree import Tree, loaded
from sparsona.engine.context import ClientContext
from sparsona.engine.plan import novel_clients
from sparsona.engine.population import Population
from sparsona.runs.records import TraitsRow, pack_numbers

MOST = 64  # clients compared with each other: pairs grow with the square


@dataclass(frozen=True, eq=False)
class Traits:
    """The traits of some clients. Masks are rows of packed bits, of `size` entries each; vectors are rows of floats."""

    kind: Literal["mask", "vector"]
    clients: tuple[int, ...]
    rows: np.ndarray
    size: int

    def distances(self) -> np.ndarray:
        """Between every two clients: the share of positions at which masks differ, or the vectors' Euclidean distance.

        Masks are aligned: compared position by position, which is what Hamming's distance counts.
        """
        found = np.zeros((len(self.rows), len(self.rows)))
        for i in range(len(self.rows) - 1):
            found[i, i + 1 :] = found[i + 1 :, i] = self._between(self.rows[i], self.rows[i + 1 :])
        return found

    def moved_from(self, first: Traits) -> np.ndarray:
        """Each client's distance to its own trait in `first`."""
        return np.array([self._between(old, new[None])[0] for old, new in zip(first.rows, self.rows, strict=True)])

    def _between(self, one: np.ndarray, others: np.ndarray) -> np.ndarray:
        if self.kind == "mask":
            return np.bitwise_count(others ^ one).sum(axis=1, dtype=np.int64) / max(self.size, 1)
        return np.sqrt(((others - one) ** 2).sum(axis=1))


def check_traits(context: ClientContext, of: str | None = None) -> None:
    """Refuse a run whose clients have no traits to compare, or none of this name."""
    method = context.method
    if method.trait is None:
        raise SparsonaError(
            f"{method.name}'s clients have neither masks nor gates to compare",
            expected="a method whose clients do, such as fedspa",
        )
    if of is not None and of not in method.other_traits:
        if not method.other_traits:
            raise SparsonaError(
                f"'{of}' of {method.name}'s clients",
                expected="no name: this method has one thing to compare",
            )
        raise unknown_name("trait", of, method.other_traits)
    if context.plan.stateless:
        raise SparsonaError(
            "stateless clients keep no masks or gates",
            expected="a run with clients that have a memory",
        )


def has_traits(context: ClientContext) -> bool:
    """Whether clients have traits, and keep them."""
    return context.method.trait is not None and not context.plan.stateless


def compared_clients(context: ClientContext) -> tuple[int, ...]:
    """The clients to compare: all that take part or, of many, MOST of them, drawn once by the run's seed."""
    novel = novel_clients(context.plan, context.clients)
    pool = [client.index for client in context.clients if client.index not in novel]
    if len(pool) <= MOST:
        return tuple(pool)
    order = torch.randperm(len(pool), generator=generator(context.plan.seeds.shared("traits")))
    return tuple(sorted(pool[place] for place in order[:MOST].tolist()))


def read_traits(
    context: ClientContext, population: Population | None, clients: Sequence[int], of: str | None = None
) -> Traits:
    """These clients' traits as the population stands; None: as they were at the start. `of` names another trait."""
    check_traits(context, of)
    trait = context.method.trait if of is None else context.method.other_traits[of]
    assert trait is not None
    rows, kinds, size = [], set(), 0
    for client in clients:
        state = None if population is None else population.states.get(client)
        state = context.fresh_state(client) if state is None else loaded(state)
        kind, row, size = _row(trait(state))
        rows.append(row)
        kinds.add(kind)
    (kind,) = kinds
    if len(lengths := sorted({len(row) for row in rows})) > 1:
        raise SparsonaError(
            f"clients of different sizes: {', '.join(f'{length:,}' for length in lengths)} entries to compare",
            expected="clients whose models are cut alike",
            hint="compare clients of one capacity",
        )
    return Traits(kind, tuple(clients), np.stack(rows), size)


def _row(trait: Any) -> tuple[Literal["mask", "vector"], np.ndarray, int]:
    if isinstance(trait, Tree) and trait.dtype is torch.bool:
        bits = trait.bits().numpy()
        words = np.zeros(-(-len(bits) // 8) * 8, dtype=np.uint8)  # as words of 64 bits, which are counted fastest
        words[: len(bits)] = bits
        return "mask", words.view(np.uint64), trait.layout.size
    flat = trait.flat if isinstance(trait, Tree) else trait
    vector = flat.detach().reshape(-1).double().cpu().numpy()
    return "vector", vector, len(vector)


class TraitRecord:
    """Records, at evaluations, how far apart the clients are and how far each has moved from its start."""

    def __init__(self, context: ClientContext) -> None:
        self._context, self._clients = context, compared_clients(context)
        self._first = read_traits(context, None, self._clients)

    def row(self, population: Population, completed: int) -> TraitsRow:
        """The distances after so many rounds."""
        now = read_traits(self._context, population, self._clients)
        distances = now.distances()
        pairs = distances[np.triu_indices(len(distances), 1)]
        apart = float(pairs.mean()) if len(pairs) else None
        moved = float(now.moved_from(self._first).mean())
        return TraitsRow(
            completed, now.kind, apart, moved, pack_numbers(now.clients, "<i4"), pack_numbers(pairs, "<f8")
        )
