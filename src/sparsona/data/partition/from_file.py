"""Partitions made elsewhere, read from a file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from sparsona.core.errors import SparsonaError
from sparsona.core.reading import MOST_BYTES, expand, parse_json, read_text
from sparsona.data.partition.kind import Argument, Partition, PartitionInput
from sparsona.data.pool import Indices


def read_partition(inputs: PartitionInput, text: str) -> list[Indices]:
    """The examples of each client of the file; the number of clients, if given, must be the file's."""
    path, count, num_clients = expand(text), len(inputs.labels), inputs.num_clients
    what = f"partition file '{path}'"
    if path.suffix not in (".npy", ".json"):
        raise SparsonaError(
            f"{what} has the ending '{path.suffix}'", expected=".npy or .json", hint="see `sparsona data`"
        )
    if not path.is_file():
        raise SparsonaError(
            f"{what} does not exist", expected="a file that can be read", hint=f"from here it would be {path.resolve()}"
        )
    parts = _read_npy(path, what, count) if path.suffix == ".npy" else _read_json(path, what, count)
    if num_clients not in (None, len(parts)):
        raise SparsonaError(
            f"{what} is for {len(parts)} clients, but {num_clients} were requested",
            expected="the same number of clients in both",
            hint=f"ask for {len(parts)} clients, or use another file",
        )
    examples, times = np.unique(np.concatenate(parts), return_counts=True)
    if len(twice := examples[times > 1]):
        raise SparsonaError(
            f"{what} names {len(twice)} example{'s' * (len(twice) > 1)} more than once, the first is {twice[0]}",
            expected="every example with at most one client",
            hint="remove the repetitions: shared examples would leak between clients",
        )
    return parts


def _read_npy(path: Path, what: str, count: int) -> list[Indices]:
    try:
        owners = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError, MemoryError) as error:
        raise SparsonaError(
            f"{what} cannot be read: {error}", expected="an array of whole numbers saved with numpy.save"
        ) from error
    if not isinstance(owners, np.ndarray) or owners.ndim != 1 or not np.issubdtype(owners.dtype, np.integer):
        found = f"{owners.dtype} of shape {owners.shape}" if isinstance(owners, np.ndarray) else "several arrays"
        raise SparsonaError(
            f"{what} holds {found}",
            expected=f"one whole number per example, shape ({count},)",
            hint="save it with numpy.save(path, owners.astype(numpy.int64))",
        )
    if len(owners) != count:
        raise SparsonaError(
            f"{what} has {len(owners)} entries, but the data set has {count} examples",
            expected="one client number per example, -1 for an example that is not used",
            hint="check that the file was made for this data set",
        )
    if owners.min() < -1 or owners.max() < 0:
        raise SparsonaError(
            f"{what} has client numbers from {owners.min()} to {owners.max()}",
            expected="client numbers 0, 1, 2, ..., and -1 for an example that is not used",
        )
    if owners.max() >= count:  # before a list is made for each client
        raise SparsonaError(
            f"{what} has client number {owners.max()}",
            expected=f"client numbers below the number of examples, {count}",
            hint="number the clients 0, 1, 2, ...: numpy.unique(owners, return_inverse=True)[1]",
        )
    owners = owners.astype(np.int64)
    sizes = np.bincount(owners[owners >= 0])
    order = np.argsort(owners, kind="stable")[len(owners) - int(sizes.sum()) :]
    return np.split(order, np.cumsum(sizes)[:-1])


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON lets a name occur twice, and Python keeps the last of them in silence."""
    found = dict(pairs)
    if len(found) < len(pairs):
        repeated = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"'{repeated}' occurs more than once")
    return found


def _read_json(path: Path, what: str, count: int) -> list[Indices]:
    expected = 'a list of lists of example numbers, or {"0": [...], "1": [...], ...}'
    try:
        content = parse_json(read_text(path, MOST_BYTES), object_pairs_hook=_refuse_repeats)
    except (ValueError, OSError) as error:
        raise SparsonaError(f"{what} cannot be read: {error}", expected=expected) from error
    if isinstance(content, dict):
        names = [str(client) for client in range(len(content))]
        if set(content) != set(names):
            odd = next(name for name in content if name not in names)
            raise SparsonaError(
                f"{what} has a client '{odd}' among {len(names)}",
                expected=f"clients numbered '0' to '{len(names) - 1}' without gaps",
                hint="number the clients from 0, or write a list of lists",
            )
        content = [content[name] for name in names]
    if not isinstance(content, list) or not content:
        raise SparsonaError(f"{what} holds no clients", expected=expected)
    for client, part in enumerate(content):
        if not isinstance(part, list) or not all(type(index) is int for index in part):
            raise SparsonaError(f"{what}: client {client} is not a list of whole numbers", expected=expected)
        outside = next((index for index in part if not 0 <= index < count), None)
        if outside is not None:
            raise SparsonaError(
                f"{what}: client {client} has example {outside}",
                expected=f"example numbers from 0 to {count - 1}",
                hint="check that the file was made for this data set; numbers start at 0",
            )
    return [np.array(part, dtype=np.int64) for part in content]


ROW = Partition(
    "file",
    "Read from a file: .npy, one client number per example (-1: unused), or .json, the examples of each client.",
    read_partition,
    (Argument("PATH", "clients.npy", str),),
    by_class=False,
    finds_clients=True,
)
