"""Which client holds which examples: partitions of a data set among clients.

Needs numpy alone. Every draw comes from a generator of its own, so that the same seed gives the same partition. To add
a partition, write its function and its row in one of the files of this folder.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsona.core import spec
from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.data.partition import by_class, by_owner, from_file
from sparsona.data.partition.kind import Partition, PartitionInput
from sparsona.data.pool import Array, Indices

PARTITIONS: dict[str, Partition] = {row.name: row for row in (*by_class.ROWS, by_owner.ROW, from_file.ROW)}


def partition(
    spec: str, labels: Array, num_clients: int | None, seed: int, min_size: int = 10, owners: Array | None = None
) -> list[Indices]:
    """Share examples out among clients.

    Every example is given to exactly one client, except by a file (as it says), by `natural` (examples without an
    owner, and of owners without a client, are left out) and by `pathological-refill:C`, which GIVES SOME EXAMPLES TO
    SEVERAL CLIENTS, though never twice to one, and leaves others out.

    Args:
        spec: One of the forms that `sparsona data` lists, for example "dirichlet:0.3".
        labels: One class per example; or a row of tokens or numbers per example, for `iid`, `natural` and `file:PATH`.
        num_clients: The number of clients; `natural` and `file:PATH` take all their clients if it is None, and
            `natural` takes that many at random otherwise.
        seed: Decides all that is random.
        min_size: The fewest examples per client, or there is an error; a file may have smaller clients.
        owners: Whose each example is, for `natural`: whole numbers from 0, -1 if unknown.

    Returns:
        For each client the sorted indices of its examples.

    Example:
        >>> import numpy as np
        >>> from sparsona.data.partition import partition
        >>> parts = partition("shards:2", np.arange(100) % 10, num_clients=5, seed=0)
        >>> [len(part) for part in parts]
        [20, 20, 20, 20, 20]
    """
    labels = np.asarray(labels)
    row, arguments = parse(spec)
    if num_clients is None and not row.finds_clients:
        raise SparsonaError(
            f"partition {spec} without a number of clients",
            expected="a number of clients; only natural and file:PATH know it by themselves",
            hint="say how many, for example 20",
        )
    if num_clients is not None and num_clients < 1:
        raise SparsonaError(f"{num_clients} clients", expected="at least 1 client", hint="ask for 1 client or more")
    if labels.ndim not in (1, 2) or not len(labels):
        raise SparsonaError(f"labels of shape {labels.shape}", expected="one label per example, and at least one")
    if labels.ndim > 1 and row.by_class:
        what = (
            "have numbers for targets, or several labels"
            if labels.dtype.kind == "f"
            else "are sequences, with a label at each position"
        )
        raise SparsonaError(
            f"partition {spec} goes by class, but these examples {what}",
            expected="one label per example",
            hint="use natural (by owner), iid or file:PATH",
        )
    if num_clients is not None and not row.finds_clients and min_size * num_clients > len(labels):
        raise SparsonaError(
            f"{len(labels)} examples cannot give {num_clients} clients {min_size} each",
            expected=f"at least {min_size * num_clients} examples",
            hint=f"ask for at most {max(1, len(labels) // min_size)} clients, or lower min_size",
        )
    rng = np.random.Generator(np.random.PCG64(seed))
    parts = row.deal(PartitionInput(labels, num_clients, rng, min_size, owners), *arguments)
    return [np.sort(part) for part in parts]


def parse(text: str) -> tuple[Partition, list[Any]]:
    """The row that a partition names, and the values of its arguments."""
    found = spec.parse("partition", text)
    name = found.name
    if name not in PARTITIONS:
        raise unknown_name("partition", name, (row.form for row in PARTITIONS.values()))
    row = PARTITIONS[name]
    if row.arguments:
        return row, row.read(text, found.argument or "")
    if found.argument is not None:
        raise SparsonaError(f"partition '{text}' has an argument", expected=f"{name} alone", hint=f"write {name}")
    return row, []
