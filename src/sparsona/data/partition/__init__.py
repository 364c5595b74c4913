"""Who holds which examples: a partition of a data set among clients.

Needs numpy alone. Every draw comes from a generator of its own, so that the same seed gives the same partition.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.data import PARTITIONS
from sparsona.data.partition.by_class import (
    cut_shards,
    deal_classes,
    refill_classes,
    share_dirichlet,
    share_dirichlet_uncapped,
    share_equally,
)
from sparsona.data.partition.from_file import Indices, read_partition

Array = npt.NDArray[Any]

MAX_CONCENTRATION = 1e6  # beyond it shares are even to a millionth, and far beyond it they overflow
NEED_NO_CLASSES = ("iid", "natural", "file")
COUNTED = {"shards": "shards", "pathological": "classes", "pathological-refill": "classes"}  # what C is the number of


def partition(
    spec: str, labels: Array, num_clients: int | None, seed: int, min_size: int = 10, owners: Array | None = None
) -> list[Indices]:
    """The sorted indices of each client's examples. No example is given to two clients, except as said below.

    `spec` is one of the forms in `PARTITIONS`. Each client gets at least `min_size` examples, or there is an error;
    only a file may leave clients as small as it likes. Every example is given out, except by a file (as it says), by
    `natural` (examples of nobody, and of owners not taken) and by `pathological-refill:C`, which IN RETURN GIVES SOME
    EXAMPLES TO SEVERAL CLIENTS, though never twice to one: its clients know parts of each other's data.

    `labels` holds one class per example; with several per example (tokens), only `iid`, `natural` and `file:PATH`
    make sense. `owners` says whose each example is, -1 for nobody's: `natural` makes each owner of `min_size` examples
    a client, in order of owner number; `num_clients` takes so many of them at random, None takes all. None also takes
    all clients of a file.
    """
    labels = np.asarray(labels)
    name, numbers, path = _parse(spec)
    if num_clients is None and name not in ("natural", "file"):
        raise SparsonaError(
            f"partition {spec} without a number of clients",
            expected="a number of clients, which only natural and file:PATH know by themselves",
            mend="say how many, for example 20",
        )
    if num_clients is not None and num_clients < 1:
        raise SparsonaError(f"{num_clients} clients", expected="at least 1 client", mend="ask for 1 client or more")
    if labels.ndim not in (1, 2) or not len(labels):
        raise SparsonaError(f"labels of shape {labels.shape}", expected="one label per example, and at least one")
    if labels.ndim > 1 and name not in NEED_NO_CLASSES:
        what = (
            "have numbers for targets" if labels.dtype.kind == "f" else "are sequences, with a label at each position"
        )
        raise SparsonaError(
            f"partition {spec} goes by class, but these examples {what}",
            expected="one label per example",
            mend="use natural (by owner), iid or file:PATH",
        )
    rng = np.random.Generator(np.random.PCG64(seed))
    if name == "file":
        return read_partition(Path(path).expanduser(), len(labels), num_clients)
    if name == "natural":
        return _natural(owners, len(labels), num_clients, rng, min_size)
    assert num_clients is not None
    if min_size * num_clients > len(labels):
        raise SparsonaError(
            f"{len(labels)} examples cannot give {num_clients} clients {min_size} each",
            expected=f"at least {min_size * num_clients} examples",
            mend=f"ask for at most {max(1, len(labels) // min_size)} clients, or lower min_size",
        )
    if name == "iid":
        parts = np.array_split(rng.permutation(len(labels)), num_clients)
    elif name == "dirichlet":
        parts = share_dirichlet(labels, num_clients, numbers[0], rng, min_size)
    elif name == "dirichlet-uncapped":
        parts = share_dirichlet_uncapped(labels, num_clients, numbers[0], rng, min_size)
    elif name == "dirichlet-equal":
        parts = share_equally(labels, num_clients, num_clients, numbers[0], rng)
    elif name == "groups":
        parts = share_equally(labels, num_clients, int(numbers[0]), numbers[1], rng)
    elif name == "shards":
        parts = cut_shards(labels, num_clients, int(numbers[0]), rng, min_size)
    elif name == "pathological":
        parts = deal_classes(labels, num_clients, int(numbers[0]), rng, min_size)
    else:
        parts = refill_classes(labels, num_clients, int(numbers[0]), rng)
    return [np.sort(part) for part in parts]


def _parse(spec: str) -> tuple[str, list[float], str]:
    """The name of a partition, its numbers and its path, checked."""
    name, colon, text = spec.strip().partition(":")
    if name not in PARTITIONS:
        raise unknown_name("partition", name, (card.form for card in PARTITIONS.values()))
    form = PARTITIONS[name].form
    if form == name:
        if colon:
            raise SparsonaError(f"partition '{spec}' has an argument", expected=f"{name} alone", mend=f"write {name}")
        return name, [], ""
    example = {"file": "file:clients.npy", "groups": "groups:4:0.3"}.get(name, f"{name}:0.3")
    if name in COUNTED:
        example = f"{name}:2"
    first, _, last = text.partition(":")
    if not text or (name == "groups" and not (first and last)):
        raise SparsonaError(
            f"partition '{spec}' lacks {'one of its arguments' if text else 'its argument'}",
            expected=form,
            mend=f"write for example {example}",
        )
    if name == "file":
        return name, [], text
    if name == "groups":
        return name, [_count(spec, first, "groups", form, example), _concentration(spec, last, form, example)], ""
    if name in COUNTED:
        return name, [_count(spec, text, COUNTED[name], form, example)], ""
    return name, [_concentration(spec, text, form, example)], ""


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _count(spec: str, text: str, what: str, form: str, example: str) -> int:
    if not (re.fullmatch("[0-9]{1,9}", text) and int(text) > 0):
        letter = form.split(":")[1]
        raise SparsonaError(
            f"partition '{_shorten(spec)}': '{_shorten(text)}' is not a number of {what}",
            expected=f"{form} with {letter} a positive whole number of at most nine digits",
            mend=f"write for example {example}",
        )
    return int(text)


def _concentration(spec: str, text: str, form: str, example: str) -> float:
    try:
        concentration = float(text) if text.isascii() and "_" not in text else float("nan")
    except ValueError:
        concentration = float("nan")
    if not 0 < concentration <= MAX_CONCENTRATION:
        raise SparsonaError(
            f"partition '{_shorten(spec)}': '{_shorten(text)}' is not a concentration",
            expected=f"{form} with A greater than 0 and at most {MAX_CONCENTRATION:,.0f}",
            mend=f"write for example {example} (small A: clients differ much), or iid for clients that do not differ",
        )
    return concentration


def _natural(
    owners: Array | None, count: int, num_clients: int | None, rng: np.random.Generator, min_size: int
) -> list[Indices]:
    """Every example with its owner."""
    if owners is None:
        raise SparsonaError(
            "partition natural: nobody knows whose these examples are",
            expected="data by writer, speaker, user or author: femnist, shakespeare, stackoverflow, gldv2; or mnist "
            "with qmnist-train-labels-idx2-int.gz and qmnist-test-labels-idx2-int.gz, which name its writers",
            mend="`sparsona data get mnist` fetches them; otherwise use such data, or another partition, and in Python "
            "pass owners=, a whole number per example",
        )
    owners = np.asarray(owners)
    if owners.shape != (count,) or not np.issubdtype(owners.dtype, np.integer):
        raise SparsonaError(
            f"owners are {owners.dtype} of shape {owners.shape}",
            expected=f"one whole number per example, shape ({count},), -1 for an example of nobody",
        )
    order = np.argsort(owners, kind="stable")
    order = order[np.searchsorted(owners[order], 0) :]
    _, starts, sizes = np.unique(owners[order], return_index=True, return_counts=True)
    taken = np.flatnonzero(sizes >= min_size)
    if len(taken) < max(1, num_clients or 0):
        raise SparsonaError(
            f"{len(taken)} of {len(sizes)} owners have {min_size} examples or more"
            + (f", but {num_clients} clients were asked for" if num_clients else ""),
            expected=f"at least {num_clients or 1} of them",
            mend="ask for fewer clients or for a smaller min_size" if len(taken) else "ask for a smaller min_size",
        )
    if num_clients is not None:
        taken = np.sort(rng.choice(taken, num_clients, replace=False))
    return [order[starts[owner] : starts[owner] + sizes[owner]] for owner in taken]
