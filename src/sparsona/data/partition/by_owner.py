"""Whose examples are whose, and which people can be clients. Needs numpy alone.

Owners may be a mapped file of a hundred million numbers: they are looked through piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sparsona.core.errors import SparsonaError
from sparsona.core.tokens import NUM_SPECIAL

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]
PIECE = 1 << 20


def number_owners(owners: Array) -> Array:
    """The same people numbered without gaps, in the same order; negative numbers are nobody, -1."""
    names, numbers = np.unique(owners, return_inverse=True)
    return np.maximum(numbers - np.count_nonzero(names < 0), -1).astype(np.int64)


def count_by_owner(owners: Array, num_owners: int, y: Array | None = None) -> Indices:
    """How many examples each has; with `y`, tokens, how many of them that ask for a token of the vocabulary."""
    counts = np.zeros(num_owners + 1, dtype=np.int64)
    for start, piece in _pieces(owners):
        if y is not None:
            piece = piece[asks(y[start : start + PIECE])]
        counts += np.bincount(piece + 1, minlength=num_owners + 1)  # the first is nobody
    return counts[1:]


def asks(y: Array) -> npt.NDArray[np.bool_]:
    """Which sequences of targets hold one that is scored: neither padding, nor an end, nor an unknown word."""
    if y.dtype.kind == "f":  # of a regression every one is
        return np.ones(len(y), dtype=bool)
    return np.asarray((y >= NUM_SPECIAL).any(axis=1))


def find_by_owner(owners: Array, chosen: Sequence[int], start: int = 0) -> list[Indices]:
    """For each of some people, the positions of what is theirs, sorted, among `owners` from `start` on."""
    found = [
        np.flatnonzero(np.isin(piece, chosen)).astype(np.int64) + start + offset
        for offset, piece in _pieces(owners[start:])
    ]
    rows = np.concatenate([*found, np.empty(0, dtype=np.int64)])
    whose = np.asarray(owners[rows])
    order = np.argsort(whose, kind="stable")
    starts, ends = (np.searchsorted(whose[order], chosen, side) for side in ("left", "right"))
    return [rows[order[a:b]] for a, b in zip(starts, ends, strict=True)]


def keep_able(people: Array, has: Mapping[str, Array], num_clients: int | None) -> tuple[Array, dict[str, int]]:
    """Those who have everything, and how many were left out for the first thing that they lack.

    `has` says in words what somebody lacks, and of each of the people whether they have it after all.
    """
    is_able, left_out = np.ones(len(people), dtype=bool), {}
    for lack, fulfils in has.items():
        if lost := int(np.count_nonzero(is_able & ~fulfils)):
            left_out[lack] = lost
        is_able &= fulfils
    able = int(np.count_nonzero(is_able))
    if able < (num_clients or 1):
        wanted = f", but {num_clients} clients were asked for" if num_clients else ""
        raise SparsonaError(
            f"{able} of {len(people)} people can be clients{wanted}" + tell_left_out(left_out, "; left out: "),
            expected=f"at least {num_clients or 1} of them",
            mend="lower the options named" if any("(" in lack for lack in left_out) else "see --test and --clients",
        )
    return people[is_able], left_out


def tell_left_out(left_out: Mapping[str, int], before: str = "") -> str:
    """'3 with fewer than 10 examples (min_size), 1 with ...'; nothing if there was nobody."""
    return before * bool(left_out) + ", ".join(f"{count:,} with {lack}" for lack, count in left_out.items())


def _pieces(array: Array) -> Iterator[tuple[int, Array]]:
    for start in range(0, len(array), PIECE):
        yield start, np.asarray(array[start : start + PIECE])
