"""Who holds which examples: a partition of a labelled data set among clients.

Needs numpy alone. Every draw comes from a generator of its own, so that the same seed gives the same partition.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.data import PARTITIONS

Indices = npt.NDArray[np.int64]

MAX_TRIES, MAX_DRAWS = 5_000, 50_000  # of `dirichlet:A`, one draw per class and try; hopeless ones end in seconds
MAX_CONCENTRATION = 1e6  # beyond it shares are even to a millionth, and far beyond it they overflow


def partition(spec: str, labels: npt.NDArray[Any], num_clients: int, seed: int, min_size: int = 10) -> list[Indices]:
    """The sorted indices of each client's examples; no example is given to two clients.

    `spec` is one of the forms in `PARTITIONS`. All but `file:PATH` give out every example, and at least `min_size` to
    each client or raise an error; a file may leave examples unused and clients as small as it likes.
    """
    labels = np.asarray(labels)
    name, argument = _parse(spec)
    if num_clients < 1:
        raise SparsonaError(f"{num_clients} clients", expected="at least 1 client", mend="ask for 1 client or more")
    if labels.ndim != 1 or not len(labels):
        raise SparsonaError(f"labels of shape {labels.shape}", expected="one label per example, and at least one")
    if name == "file":
        return _from_file(Path(str(argument)).expanduser(), len(labels), num_clients)
    if min_size * num_clients > len(labels):
        raise SparsonaError(
            f"{len(labels)} examples cannot give {num_clients} clients {min_size} each",
            expected=f"at least {min_size * num_clients} examples",
            mend=f"ask for at most {max(1, len(labels) // min_size)} clients, or lower min_size",
        )
    rng = np.random.Generator(np.random.PCG64(seed))
    if name == "iid":
        parts = np.array_split(rng.permutation(len(labels)), num_clients)
    elif name == "dirichlet":
        parts = _dirichlet(labels, num_clients, float(argument), rng, min_size)
    elif name == "dirichlet-equal":
        parts = _dirichlet_equal(labels, num_clients, float(argument), rng)
    else:
        parts = _shards(labels, num_clients, int(argument), rng, min_size)
    return [np.sort(part) for part in parts]


def _parse(spec: str) -> tuple[str, float | int | str]:
    """The name of a partition and its argument, checked."""
    name, colon, text = spec.strip().partition(":")
    if name not in PARTITIONS:
        raise unknown_name("partition", name, (card.form for card in PARTITIONS.values()))
    form = PARTITIONS[name].form
    if name == "iid":
        if colon:
            raise SparsonaError(f"partition '{spec}' has an argument", expected="iid alone", mend="write iid")
        return name, ""
    if not text:
        example = {"shards": "shards:2", "file": "file:clients.npy"}.get(name, f"{name}:0.3")
        raise SparsonaError(
            f"partition '{spec}' lacks its argument", expected=form, mend=f"write for example {example}"
        )
    if name == "file":
        return name, text
    if name == "shards":
        if not (text.isascii() and text.isdigit() and int(text) > 0):
            raise SparsonaError(
                f"partition '{spec}': '{text}' is not a number of shards",
                expected="shards:C with C a positive whole number",
                mend="write for example shards:2",
            )
        return name, int(text)
    try:
        concentration = float(text)
    except ValueError:
        concentration = float("nan")
    if not 0 < concentration <= MAX_CONCENTRATION:
        raise SparsonaError(
            f"partition '{spec}': '{text}' is not a concentration",
            expected=f"{form} with A greater than 0 and at most {MAX_CONCENTRATION:,.0f}",
            mend=f"write for example {name}:0.3 (small A: clients differ much), or iid for clients that do not differ",
        )
    return name, concentration


def _dirichlet(
    labels: npt.NDArray[Any], num_clients: int, concentration: float, rng: np.random.Generator, min_size: int
) -> list[Indices]:
    """FedML's "hetero": class after class shared out by Dir(A) among the clients that have less than n/K so far."""
    members = _by_class(labels)
    # Sizes are drawn first and examples only once they will do: a try costs one small draw per class.
    tries, best = min(max(100, MAX_DRAWS // len(members)), MAX_TRIES), -1
    for _ in range(tries):
        counts = _dirichlet_counts([len(indices) for indices in members], num_clients, concentration, rng)
        smallest = int(counts.sum(axis=0).min())
        if smallest >= min_size:
            break
        best = max(best, smallest)
    else:
        raise SparsonaError(
            f"no draw of dirichlet:{concentration:g} in {tries:,} gave each of {num_clients} clients "
            f"{min_size} examples; the best left a client with {best}",
            expected=f"a partition with at least {min_size} examples per client (min_size)",
            mend="use a larger A, fewer clients or a smaller min_size; dirichlet-equal:A has equal sizes by design",
        )
    pieces = [
        np.split(rng.permutation(indices), np.cumsum(row)[:-1]) for indices, row in zip(members, counts, strict=True)
    ]
    return [np.concatenate(part) for part in zip(*pieces, strict=True)]


def _dirichlet_counts(
    class_sizes: list[int], num_clients: int, concentration: float, rng: np.random.Generator
) -> Indices:
    """How many examples of each class (row) each client (column) gets."""
    cap = sum(class_sizes) / num_clients
    counts = np.zeros((len(class_sizes), num_clients), dtype=np.int64)
    sizes = np.zeros(num_clients, dtype=np.int64)
    for row, class_size in zip(counts, class_sizes, strict=True):
        # While examples are left some client is below the mean. A Dirichlet draw with some shares set to zero and the
        # rest renormalised is a Dirichlet draw over the rest: drawing only those can neither divide by zero nor hand
        # a rounding leftover to a full client.
        is_open = np.flatnonzero(sizes < cap)
        shares = rng.dirichlet(np.full(len(is_open), concentration))
        ends = (np.cumsum(shares) * class_size).astype(np.int64)
        ends[-1] = class_size  # the last open client takes what rounding left
        ends[1:] -= ends[:-1].copy()
        row[is_open] = ends
        sizes += row
    return counts


def _dirichlet_equal(
    labels: npt.NDArray[Any], num_clients: int, concentration: float, rng: np.random.Generator
) -> list[Indices]:
    """DisPFL's "dir": equal sizes; examples drawn one by one for a random client that still lacks some."""
    count = len(labels)
    pools = [rng.permutation(indices).tolist() for indices in _by_class(labels)]
    priors = rng.dirichlet(np.full(len(pools), concentration), size=num_clients)
    lacking = np.full(num_clients, count // num_clients)
    lacking[: count % num_clients] += 1
    lacks: list[int] = lacking.tolist()
    unfilled = [client for client in range(num_clients) if lacks[client]]
    parts: list[list[int]] = [[] for _ in range(num_clients)]
    bounds = _cumulative(priors, pools)
    # Plain lists and bisection: one scalar at a time, they are ten times faster than numpy.
    for which, where in rng.random((count, 2)).tolist():
        position = int(which * len(unfilled))
        client = unfilled[position]
        label = bisect_right(bounds[client], where)
        parts[client].append(pools[label].pop())
        lacks[client] -= 1
        if not lacks[client]:
            unfilled[position] = unfilled[-1]
            unfilled.pop()
        if not pools[label]:
            bounds = _cumulative(priors, pools)
    return [np.array(part, dtype=np.int64) for part in parts]


def _cumulative(priors: npt.NDArray[np.float64], pools: list[list[int]]) -> list[list[float]]:
    """Cumulative class priors over the classes not exhausted; a draw u picks the first entry above u.

    To redraw until the class is not exhausted is to draw from the prior restricted to the others.
    """
    is_left = np.array([bool(pool) for pool in pools])
    if not is_left.any():
        return []
    left = np.where(is_left, priors, 0.0)
    # A client whose every liked class is exhausted likes the others equally; redrawing would never end.
    left = np.where(left.sum(axis=1, keepdims=True) > 1e-300, left, is_left.astype(np.float64))
    bounds = np.cumsum(left, axis=1)
    bounds /= bounds[:, -1:]  # the last entry becomes exactly 1, and every draw is below 1
    rows: list[list[float]] = bounds.tolist()
    return rows


def _shards(
    labels: npt.NDArray[Any], num_clients: int, per_client: int, rng: np.random.Generator, min_size: int
) -> list[Indices]:
    """McMahan et al. (2017): sorted by label, cut into C*K shards, C of them to each client at random."""
    num_shards = per_client * num_clients
    size = len(labels) // num_shards
    if size * per_client < min_size or not size:
        raise SparsonaError(
            f"shards:{per_client} for {num_clients} clients cuts {len(labels)} examples into {num_shards} shards "
            f"of {size}, {size * per_client} for some clients",
            expected=f"shards of at least 1 example, and at least {min_size} examples per client (min_size)",
            mend="use a smaller C, fewer clients or a smaller min_size",
        )
    shards = np.array_split(np.argsort(labels, kind="stable"), num_shards)
    dealt = rng.permutation(num_shards).reshape(num_clients, per_client)
    return [np.concatenate([shards[shard] for shard in hand]) for hand in dealt]


def _by_class(labels: npt.NDArray[Any]) -> list[Indices]:
    """The indices of each class that occurs, in label order."""
    _, counts = np.unique(labels, return_counts=True)
    return np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])


def _from_file(path: Path, count: int, num_clients: int) -> list[Indices]:
    """A partition somebody else made."""
    what = f"partition file '{path}'"
    if path.suffix not in (".npy", ".json"):
        raise SparsonaError(
            f"{what} has the ending '{path.suffix}'", expected=".npy or .json", mend="see `sparsona data`"
        )
    if not path.is_file():
        raise SparsonaError(
            f"{what} does not exist", expected="a file that can be read", mend=f"from here it would be {path.resolve()}"
        )
    parts = _read_npy(path, what, count) if path.suffix == ".npy" else _read_json(path, what, count)
    if len(parts) != num_clients:
        raise SparsonaError(
            f"{what} is for {len(parts)} clients, but {num_clients} were asked for",
            expected="the same number of clients in both",
            mend=f"ask for {len(parts)} clients, or use another file",
        )
    examples, times = np.unique(np.concatenate(parts), return_counts=True)
    if len(twice := examples[times > 1]):
        raise SparsonaError(
            f"{what} names {len(twice)} example{'s' * (len(twice) > 1)} more than once, the first is {twice[0]}",
            expected="every example with at most one client",
            mend="remove the repetitions: shared examples would leak between clients",
        )
    return [np.sort(part) for part in parts]


def _read_npy(path: Path, what: str, count: int) -> list[Indices]:
    try:
        owners = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise SparsonaError(
            f"{what} cannot be read: {error}", expected="an array of whole numbers saved with numpy.save"
        ) from error
    if not isinstance(owners, np.ndarray) or owners.ndim != 1 or not np.issubdtype(owners.dtype, np.integer):
        found = f"{owners.dtype} of shape {owners.shape}" if isinstance(owners, np.ndarray) else "several arrays"
        raise SparsonaError(
            f"{what} holds {found}",
            expected=f"one whole number per example, shape ({count},)",
            mend="save it with numpy.save(path, owners.astype(numpy.int64))",
        )
    if len(owners) != count:
        raise SparsonaError(
            f"{what} has {len(owners)} entries, but the data set has {count} examples",
            expected="one client number per example, -1 for an example that nobody uses",
            mend="check that the file was made for this data set",
        )
    if owners.min() < -1 or owners.max() < 0:
        raise SparsonaError(
            f"{what} has client numbers from {owners.min()} to {owners.max()}",
            expected="client numbers 0, 1, 2, ..., and -1 for an example that nobody uses",
        )
    if owners.max() >= count:  # before a list is made for each client
        raise SparsonaError(
            f"{what} has client number {owners.max()}",
            expected=f"client numbers below the number of examples, {count}",
            mend="number the clients 0, 1, 2, ...: numpy.unique(owners, return_inverse=True)[1]",
        )
    owners = owners.astype(np.int64)
    sizes = np.bincount(owners[owners >= 0])
    order = np.argsort(owners, kind="stable")[len(owners) - int(sizes.sum()) :]
    return np.split(order, np.cumsum(sizes)[:-1])


def _read_json(path: Path, what: str, count: int) -> list[Indices]:
    expected = 'a list of lists of example numbers, or {"0": [...], "1": [...], ...}'
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SparsonaError(f"{what} is not JSON: {error}", expected=expected) from error
    if isinstance(content, dict):
        names = [str(client) for client in range(len(content))]
        if set(content) != set(names):
            odd = next(name for name in content if name not in names)
            raise SparsonaError(
                f"{what} has a client '{odd}' among {len(names)}",
                expected=f"clients numbered '0' to '{len(names) - 1}' without gaps",
                mend="number the clients from 0, or write a list of lists",
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
                mend="check that the file was made for this data set; numbers start at 0",
            )
    return [np.array(part, dtype=np.int64) for part in content]
