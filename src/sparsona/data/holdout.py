"""One client's examples cut into those to train, to decide and to test with. Needs numpy alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sparsona.core.errors import SparsonaError
from sparsona.core.tokens import NUM_SPECIAL

Array = npt.NDArray[Any]


def stratum(y: Array) -> Array:
    """What a split keeps in proportion: the class, or nothing where tokens are asked for."""
    return y if y.ndim == 1 else np.broadcast_to(np.int64(0), len(y))


def round_to(exact: float, at_least_one: bool, at_most: int) -> int:
    """To the nearest whole number, within bounds."""
    return min(max(int(exact + 0.5), int(at_least_one)), at_most)


def carve(mine: Array, labels: Array, total: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """`total` of a client's examples, and the others, with the same share of each class as nearly as counts permit.

    Largest remainder: each class gives its exact quota rounded down, and those that lost most by it give one more.
    """
    mine = rng.permutation(mine)
    mine = mine[np.argsort(labels[mine], kind="stable")]
    _, counts = np.unique(labels[mine], return_counts=True)
    taken, lost = np.divmod(counts * total, len(mine))  # whole numbers: a quota of exactly 2 stays 2
    # Classes that lost equally much take turns at random; by label, the last classes would never be tested.
    order = rng.permutation(len(counts))
    taken[order[np.argsort(-lost[order], kind="stable")][: total - taken.sum()]] += 1
    rank = np.arange(len(mine)) - np.repeat(np.cumsum(counts) - counts, counts)
    is_taken = rank < np.repeat(taken, counts)
    return np.sort(mine[is_taken]), np.sort(mine[~is_taken])


def cut_off(mine: Array, total: int, overlap: int) -> tuple[Array, Array]:
    """The last `total` of a client's examples, and the others but for the `overlap` in between, which know of both."""
    if not total:
        return mine[:0], mine
    return mine[-total:], mine[: max(0, len(mine) - total - overlap)]


def check_rates(validation_rate: float, test_rate: float | None = None) -> None:
    if not 0 <= validation_rate < 1:
        raise SparsonaError(
            f"validation_rate is {validation_rate}", expected="0 or more, and less than 1", mend="0.1 is usual"
        )
    if test_rate is None:
        return
    if not 0 < test_rate < 1:
        raise SparsonaError(f"test_rate is {test_rate}", expected="between 0 and 1", mend="0.25 is usual")
    if validation_rate + test_rate >= 1:
        raise SparsonaError(
            f"validation_rate {validation_rate} and test_rate {test_rate} leave nothing to train on",
            expected="a sum below 1",
            mend="0.1 and 0.25 are usual",
        )


def nothing_to_score(client: int) -> SparsonaError:
    return SparsonaError(
        f"client {client} has test sequences, but no token in them that is scored",
        expected=f"targets of {NUM_SPECIAL} and up: 0 to {NUM_SPECIAL - 1} are padding, begin, end and unknown words",
        mend=f"number your tokens from {NUM_SPECIAL}, leave this client out, or give it more",
    )


def no_data(client: int, count: int, part: str = "") -> SparsonaError:
    return SparsonaError(
        f"client {client} has {'no' if not count else 'only one'} {part}example{'s' * (not count)}",
        expected="at least one to train and one to test on",
        mend="leave this client out, ask for fewer clients, or give it more",
    )
