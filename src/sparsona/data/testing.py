"""Which examples of a published test set a client is tested on. Needs numpy alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from sparsona.core.errors import SparsonaError
from sparsona.core.seeds import Seeds

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]


def draw_by_shares(train_counts: Array, test_labels: Array, per_client: int | None, seed: int) -> list[Indices]:
    """FedSpa and DisPFL: about `per_client` test examples for each client, in the label shares of its training data.

    `train_counts` (clients, classes) says how many training examples each client has of each class. Of each class a
    client is tested on its share times `per_client` (None: an even share of the test set, rounded up), rounded up: on
    up to one example per class more than asked for, and on every class it knows. Examples are drawn without
    repetition for one client, but for each by itself: clients are tested on some of the same. Of a class with fewer
    test examples than that all are taken, and nothing in their stead. Indices are positions in `test_labels`, sorted;
    a client's depend on its own counts, its number, `per_client` and `seed` alone.
    """
    train_counts, test_labels = np.asarray(train_counts, dtype=np.int64), np.asarray(test_labels)
    if train_counts.ndim != 2 or test_labels.ndim != 1:
        raise SparsonaError(
            f"test examples by label shares, with labels of shape {test_labels.shape}",
            expected="one label per example: sequences have a label at each position, and no shares",
            mend="test by owner, or split each client's own examples",
        )
    if per_client is None:
        per_client = -(-len(test_labels) // len(train_counts))
    if per_client < 1:
        raise SparsonaError(f"{per_client} test examples per client", expected="1 or more", mend="100 are usual")
    order = np.argsort(test_labels, kind="stable")
    ends = np.searchsorted(test_labels[order], np.arange(train_counts.shape[1] + 1))
    members = [order[start:end] for start, end in pairwise(ends)]
    chosen = []
    for client, counts in enumerate(train_counts):
        rng = np.random.Generator(np.random.PCG64(Seeds(seed).of(client).own("test")))
        # Whole numbers: 0.07 * 100 is a little more than 7 in floating point, and would be rounded up to 8.
        wanted = -(-counts * per_client // max(1, int(counts.sum())))
        drawn = [
            rng.choice(members[label], min(wanted[label], len(members[label])), replace=False)
            for label in np.flatnonzero(wanted)
        ]
        chosen.append(np.sort(np.concatenate([*drawn, np.empty(0, dtype=np.int64)])))
    return chosen
