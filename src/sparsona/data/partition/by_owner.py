"""The natural partition, and lookups by owner: which examples are whose, and which owners can be clients.

Owners may be a mapped file of a hundred million numbers: they are read piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from sparsona.core.errors import SparsonaError
from sparsona.data.partition.kind import Partition, PartitionInput
from sparsona.data.pool import Array, Indices, has_scored_token

PIECE = 1 << 20
NAMED = 5  # of the owners that are left out


def deal_to_owners(inputs: PartitionInput) -> list[Indices]:
    """Each owner of `inputs.min_size` examples is a client; with a number of clients, so many of them at random."""
    owners, count, num_clients = inputs.owners, len(inputs.labels), inputs.num_clients
    if owners is None:
        raise SparsonaError(
            "partition natural, but these examples have no owners",
            expected="data by writer, speaker, user or author: femnist, shakespeare, stackoverflow, gldv2; or mnist "
            "with qmnist-train-labels-idx2-int.gz and qmnist-test-labels-idx2-int.gz, which name its writers",
            hint="`sparsona data get mnist` fetches them; otherwise use such data, or another partition, and in Python "
            "pass owners=, a name or a number for each example",
        )
    owners = np.asarray(owners)
    if owners.shape != (count,) or not np.issubdtype(owners.dtype, np.integer):
        raise SparsonaError(
            f"owners are {owners.dtype} of shape {owners.shape}",
            expected=f"the number of an owner for each example, shape ({count},), -1 for an example without an owner",
        )
    order = np.argsort(owners, kind="stable")
    order = order[np.searchsorted(owners[order], 0) :]
    _, starts, sizes = np.unique(owners[order], return_index=True, return_counts=True)
    taken = np.flatnonzero(sizes >= inputs.min_size)
    if len(taken) < max(1, num_clients or 0):
        raise SparsonaError(
            f"{len(taken)} of {len(sizes)} owners have {inputs.min_size} examples or more"
            + (f", but {num_clients} clients were requested" if num_clients else ""),
            expected=f"at least {num_clients or 1} of them",
            hint="ask for fewer clients or for a smaller min_size" if len(taken) else "ask for a smaller min_size",
        )
    if num_clients is not None:
        taken = np.sort(inputs.rng.choice(taken, num_clients, replace=False))
    return [order[starts[owner] : starts[owner] + sizes[owner]] for owner in taken]


ROW = Partition(
    "natural",
    "Every writer, user or speaker is a client and has its own examples; for data that says whose it is.",
    deal_to_owners,
    by_class=False,
    finds_clients=True,
)


def number_owners(owners: Array) -> Array:
    """The same owners, numbers or names, numbered from 0 without gaps in the same order; negative numbers become -1."""
    names, numbers = np.unique(owners, return_inverse=True)
    num_unknown = np.count_nonzero(names < 0) if owners.dtype.kind == "i" else 0
    return np.maximum(numbers - num_unknown, -1).astype(np.int64)


def known_owners(owners: Array) -> Array:
    """The owners that `number_owners` numbers 0, 1, ..., in that order."""
    return np.unique(owners[owners >= 0])


def count_by_owner(owners: Array, num_owners: int, y: Array | None = None) -> Indices:
    """How many examples each owner has; with `y`, tokens, how many of those with a token that is scored."""
    counts = np.zeros(num_owners + 1, dtype=np.int64)
    for start, piece in _pieces(owners):
        if y is not None:
            piece = piece[has_scored_token(y[start : start + PIECE])]
        counts += np.bincount(piece + 1, minlength=num_owners + 1)  # the first counts examples without an owner
    return counts[1:]


def find_by_owner(owners: Array, chosen: Sequence[int], start: int = 0) -> list[Indices]:
    """For each chosen owner, the sorted positions of its examples among `owners` from `start` on."""
    found = [
        np.flatnonzero(np.isin(piece, chosen)).astype(np.int64) + start + offset
        for offset, piece in _pieces(owners[start:])
    ]
    rows = np.concatenate([*found, np.empty(0, dtype=np.int64)])
    found_owners = np.asarray(owners[rows])
    order = np.argsort(found_owners, kind="stable")
    starts, ends = (np.searchsorted(found_owners[order], chosen, side) for side in ("left", "right"))
    return [rows[order[a:b]] for a, b in zip(starts, ends, strict=True)]


def keep_eligible(owners: Array, has: Mapping[str, Array], num_clients: int | None) -> tuple[Array, dict[str, Array]]:
    """The owners that can be clients, and those that are left out, by the first requirement that they do not meet.

    `has` maps the words for what is missing to whether each owner has it.
    """
    is_eligible, left_out = np.ones(len(owners), dtype=bool), {}
    for missing, is_met in has.items():
        if len(lost := owners[is_eligible & ~is_met]):
            left_out[missing] = lost
        is_eligible &= is_met
    found = int(np.count_nonzero(is_eligible))
    if found < (num_clients or 1):
        wanted = f", but {num_clients} clients were requested" if num_clients else ""
        lacking = describe_left_out({missing: len(lost) for missing, lost in left_out.items()}, "; left out: ")
        hints = ["lower the options named"] if any("(" in lack for lack in left_out) else []
        if num_clients and found:
            hints.append(
                f"lower --clients (clients=) to {found}, or leave it out: each of these owners is a client then"
            )
        raise SparsonaError(
            f"{found} of {len(owners)} owners can be clients{wanted}{lacking}",
            expected=f"at least {num_clients or 1} of them",
            hint="; or ".join(hints) or "see --test, or add examples",
        )
    return owners[is_eligible], left_out


def describe_left_out(
    left_out: Mapping[str, int], before: str = "", names: Mapping[str, Sequence[str]] | None = None
) -> str:
    """'3 with fewer than 10 examples (min_size), 1 with ...', after `before`; an empty text if none were left out.

    With `names` of those that have one, a few are named: '5 with ...: ana, bo, cy and 2 more; 1 with ...: dee'.
    """
    found = []
    for missing, count in left_out.items():
        who = (names or {}).get(missing, ())[:NAMED]
        more = f" and {count - len(who):,} more" if count > len(who) else ""
        found.append(f"{count:,} with {missing}" + (f": {', '.join(who)}{more}" if who else ""))
    return before * bool(found) + ("; " if names else ", ").join(found)


def _pieces(array: Array) -> Iterator[tuple[int, Array]]:
    for start in range(0, len(array), PIECE):
        yield start, np.asarray(array[start : start + PIECE])
