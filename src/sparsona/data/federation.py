"""Clients and their data: one pooled storage, and for each client which examples it trains, validates and tests on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.round import Client
from sparsona.core.seeds import Seeds
from sparsona.data.batches import Examples
from sparsona.data.partition import partition as partition_labels

Array = npt.NDArray[Any]
MANIFEST = "federation.json"
FORMAT = 1


@dataclass(frozen=True, eq=False)
class Split:
    """Which examples of the pool a client trains, validates and tests on: int64 indices, without overlap."""

    train: Tensor
    validation: Tensor
    test: Tensor


PARTS = tuple(field.name for field in fields(Split))


@dataclass(frozen=True, eq=False)
class Federation:
    """Everybody's data. Made by `federate`, `Federation.from_clients` or `Federation.open`, which check it.

    `x` (float32) and `y` (int64) pool all examples; nothing may write to them.
    """

    x: Tensor
    y: Tensor
    splits: tuple[Split, ...]
    num_classes: int
    name: str = "arrays"

    @property
    def num_clients(self) -> int:
        return len(self.splits)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return tuple(self.x.shape[1:])

    def client(self, index: int, capacity: float = 1.0) -> Client:
        """The client as methods see it."""
        num_train, num_validation = (len(self._indices(index, part)) for part in ("train", "validation"))
        return Client(index, num_train, capacity, num_validation, self.num_clients)

    def clients(self, capacities: Sequence[float] | None = None) -> tuple[Client, ...]:
        """All clients; client k has the k-th capacity, over and over if there are fewer capacities than clients."""
        capacities = [1.0] if capacities is None else list(capacities)
        if not capacities or not all(0 < capacity <= 1 for capacity in capacities):
            raise SparsonaError(
                f"capacities {capacities}",
                expected="one or more densities, each greater than 0 and at most 1",
                mend="write for example [0.2, 0.5, 1.0], or leave them out: every client then holds a dense model",
            )
        return tuple(self.client(index, capacities[index % len(capacities)]) for index in range(self.num_clients))

    def examples(self, client: int, part: str) -> Examples:
        """A copy of a client's "train", "validation" or "test" examples."""
        index = self._indices(client, part)
        return Examples(self.x.index_select(0, index), self.y.index_select(0, index))

    def label_counts(self, part: str) -> Tensor:
        """How many examples of each class each client has: int64 [clients, classes]."""
        rows = [self.y[self._indices(k, part)].bincount(minlength=self.num_classes) for k in range(self.num_clients)]
        return torch.stack(rows)

    def digest(self) -> str:
        """Tells apart federations that differ in any example, label or split; the name does not count."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        state = hashlib.blake2b(digest_size=16)
        index, sizes = self._flat_splits()
        for array in (self.x.numpy(), self.y.numpy(), index, sizes, np.array(self.num_classes)):
            state.update(f"{array.dtype.str}{array.shape}".encode())
            state.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return state.hexdigest()

    def _indices(self, client: int, part: str) -> Tensor:
        if part not in PARTS:
            raise unknown_name("part of the data", part, PARTS)
        if not 0 <= client < self.num_clients:
            raise SparsonaError(f"there is no client {client}", expected=f"0 to {self.num_clients - 1}")
        indices: Tensor = getattr(self.splits[client], part)
        return indices

    def _flat_splits(self) -> tuple[Array, Array]:
        """All indices end to end, and how many each client has of each part."""
        parts = [getattr(split, part).numpy() for split in self.splits for part in PARTS]
        return np.concatenate(parts), np.array([len(part) for part in parts]).reshape(-1, len(PARTS))

    def save(self, folder: str | Path) -> None:
        """Write it to a folder from which `Federation.open` maps it into memory, for other processes to share."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        index, sizes = self._flat_splits()
        arrays = {"x": self.x.numpy(), "y": self.y.numpy(), "index": index, "sizes": sizes}
        for name, array in arrays.items():
            # Written aside and renamed: a process that has the old file mapped keeps it whole.
            aside = folder / f"{name}.npy.part"
            with aside.open("wb") as file:
                np.save(file, array, allow_pickle=False)
            os.replace(aside, folder / f"{name}.npy")
        manifest = {"format": FORMAT, "name": self.name, "num_classes": self.num_classes}
        aside = folder / f"{MANIFEST}.part"
        aside.write_text(json.dumps(manifest) + "\n", encoding="utf-8")
        os.replace(aside, folder / MANIFEST)

    @classmethod
    def open(cls, folder: str | Path) -> Federation:
        """A saved federation. Examples are read when they are used and shared between processes, never written back."""
        folder = Path(folder)
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            if manifest["format"] != FORMAT:
                raise ValueError(f"format {manifest['format']} instead of {FORMAT}")
            # "c", copy on write: torch warns of arrays that cannot be written to.
            x, y = (np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False) for name in ("x", "y"))
            index, sizes = (np.load(folder / f"{name}.npy", allow_pickle=False) for name in ("index", "sizes"))
            if sizes.sum() != len(index) or len(x) != len(y):
                raise ValueError("its files do not belong together")
            pieces = map(torch.from_numpy, np.split(index, np.cumsum(sizes)[:-1]))
            splits = tuple(Split(*(next(pieces) for _ in PARTS)) for _ in sizes)
            return cls(torch.from_numpy(x), torch.from_numpy(y), splits, manifest["num_classes"], manifest["name"])
        except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
            raise SparsonaError(
                f"'{folder}' holds no federation that can be read: {error}",
                expected="a folder written by Federation.save",
                mend="save the federation again",
            ) from error

    @classmethod
    def from_clients(
        cls,
        clients: Sequence[Sequence[Any]],
        validation_rate: float = 0.1,
        seed: int = 0,
        num_classes: int | None = None,
        name: str = "arrays",
    ) -> Federation:
        """A federation of clients whose data is already apart.

        Each client is (x_train, y_train, x_test, y_test), and validation data is then carved out of its training data
        class by class; or (x_train, y_train, x_validation, y_validation, x_test, y_test), kept as it is. Arrays are
        treated as `federate` treats them.
        """
        _check_rates(validation_rate)
        if not len(clients):
            raise SparsonaError("no clients", expected="at least 1 client")
        xs: list[Tensor] = []
        ys: list[Tensor] = []
        sizes: list[dict[str, int]] = []
        for index, arrays in enumerate(clients):
            if len(arrays) not in (4, 6):
                raise SparsonaError(
                    f"client {index} has {len(arrays)} arrays",
                    expected="4: x_train, y_train, x_test, y_test; or 6, with x_validation, y_validation in the middle",
                )
            parts = ("train", "test") if len(arrays) == 4 else PARTS
            sizes.append(dict.fromkeys(PARTS, 0))
            for part, x, y in zip(parts, arrays[::2], arrays[1::2], strict=True):
                where = f"client {index}, {part}: "
                x, y = _inputs(x, where), _labels(y, where)
                _check_lengths(x, y, where)
                if not len(x) and part != "validation":
                    raise _no_data(index, 0, f"{part} ")
                if xs and x.shape[1:] != xs[0].shape[1:]:
                    raise SparsonaError(
                        f"{where}examples of shape {tuple(x.shape[1:])}",
                        expected=f"{tuple(xs[0].shape[1:])}, as in the training data of client 0",
                    )
                sizes[-1][part] = len(x)
                xs.append(x)
                ys.append(y)
        x, y = torch.cat(xs), torch.cat(ys)
        num_classes = _count_classes(y, num_classes)
        labels, splits, start = y.numpy(), [], 0
        for index, size in enumerate(sizes):
            ends = np.cumsum([start, *(size[part] for part in PARTS)])
            train, validation, test = (np.arange(a, b) for a, b in pairwise(ends))
            if len(clients[index]) == 4:
                rng = np.random.Generator(np.random.PCG64(Seeds(seed).of(index).own("split")))
                wanted = _round_to(len(train) * validation_rate, validation_rate > 0, len(train) - 1)
                validation, train = _carve(train, labels, wanted, rng)
            splits.append(Split(*map(torch.from_numpy, (train, validation, test))))
            start = int(ends[-1])
        return cls(x, y, tuple(splits), num_classes, name)


def federate(
    x: Any,
    y: Any,
    *,
    clients: int,
    partition: str = "dirichlet:0.3",
    seed: int = 0,
    partition_seed: int | None = None,
    validation_rate: float = 0.1,
    test_rate: float = 0.25,
    num_classes: int | None = None,
    name: str = "arrays",
    min_size: int = 10,
) -> Federation:
    """Share a data set out among clients, then split each client's examples into train, validation and test.

    `x` and `y` are numpy arrays or torch tensors, one row and one whole number from 0 per example. Rows keep their
    shape. Whole-number inputs become float32 as they are: scaling them (say, by 255) is the caller's job; float32
    inputs are shared with the caller, who must not change them afterwards. `partition` is one of the forms that
    `sparsona data` lists, and gives each client `min_size` examples or more. `partition_seed`, if given, replaces
    `seed` here, so that runs with different seeds can share one partition and its splits.

    A client's three parts have the same share of each class as nearly as counts permit. Each client has at least one
    training and one test example, and one for validation if it has three or more and `validation_rate` is not 0.
    """
    _check_rates(validation_rate, test_rate)
    x, y = _inputs(x), _labels(y)
    _check_lengths(x, y)
    if not len(x):
        raise SparsonaError("no examples", expected="at least one row in x and y")
    num_classes = _count_classes(y, num_classes)
    labels = y.numpy()
    seeds = Seeds(seed if partition_seed is None else partition_seed)
    splits = []
    for index, mine in enumerate(partition_labels(partition, labels, clients, seeds.shared("partition"), min_size)):
        if len(mine) < 2:
            raise _no_data(index, len(mine))
        rng = np.random.Generator(np.random.PCG64(seeds.of(index).own("split")))
        wants_validation = validation_rate > 0 and len(mine) > 2
        num_test = _round_to(len(mine) * test_rate, True, len(mine) - 1 - wants_validation)
        num_validation = _round_to(len(mine) * validation_rate, wants_validation, len(mine) - 1 - num_test)
        test, rest = _carve(mine, labels, num_test, rng)
        validation, train = _carve(rest, labels, num_validation, rng)
        splits.append(Split(*map(torch.from_numpy, (train, validation, test))))
    return Federation(x, y, tuple(splits), num_classes, name)


def _round_to(exact: float, at_least_one: bool, at_most: int) -> int:
    return min(max(int(exact + 0.5), int(at_least_one)), at_most)


def _carve(mine: Array, labels: Array, total: int, rng: np.random.Generator) -> tuple[Array, Array]:
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


def _check_rates(validation_rate: float, test_rate: float | None = None) -> None:
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


def _inputs(x: Any, where: str = "") -> Tensor:
    """Inputs as a contiguous float32 tensor without NaN; not copied if they are that already."""
    array = _array("x", x, where)
    if array.dtype.kind not in "fiub" or not array.ndim:
        raise SparsonaError(
            f"{where}x is an array of {array.dtype} of shape {array.shape}",
            expected="one row of real numbers per example",
            mend="convert it with x.astype(numpy.float32)",
        )
    with np.errstate(over="ignore"):  # told below
        # Writable, since torch warns of arrays that are not (a file mapped for reading is copied here).
        array = np.require(array, np.float32, ["C", "W"])
    is_finite = np.isfinite(array).all(axis=tuple(range(1, array.ndim)))
    if not is_finite.all():
        bad = np.flatnonzero(~is_finite)
        raise SparsonaError(
            f"{where}x holds NaN or infinity in {len(bad)} of {len(array)} examples, the first is example {bad[0]}",
            expected="finite numbers that fit into float32",
            mend="drop these examples or fill the gaps",
        )
    return torch.from_numpy(array)


def _array(name: str, value: Any, where: str) -> Array:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        # numpy has no bfloat16
        array: Array = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
        return array
    try:
        return np.asarray(value)
    except ValueError as error:
        raise SparsonaError(
            f"{where}{name} is not an array: {error}", expected="a numpy array or a torch tensor, rows of equal shape"
        ) from error


def _labels(y: Any, where: str = "") -> Tensor:
    """Labels as an int64 tensor of one dimension."""
    y = _array("y", y, where)
    if y.ndim != 1:
        raise SparsonaError(
            f"{where}y has shape {y.shape}", expected="one label per example, shape (N,)", mend="y.reshape(-1), perhaps"
        )
    if y.dtype.kind not in "iu" and len(y):
        some = ", ".join(map(repr, y[:3].tolist()))
        mend = "convert them with y.astype(numpy.int64) if they are whole numbers"
        if y.dtype.kind not in "fb":
            mend = "number them with numpy.unique(y, return_inverse=True)[1]"
        raise SparsonaError(
            f"{where}labels of type {y.dtype}: {some}, ...", expected="whole numbers from 0, one per class", mend=mend
        )
    return torch.from_numpy(y.astype(np.int64))


def _count_classes(y: Tensor, num_classes: int | None) -> int:
    """The number of classes, checked against the labels."""
    if num_classes is not None and num_classes < 1:
        raise SparsonaError(f"num_classes is {num_classes}", expected="1 or more, or None to count the labels")
    found = np.unique(y.numpy())
    last = int(found[-1]) if num_classes is None else num_classes - 1
    outside = found[(found < 0) | (found > last)]
    if len(outside):
        raise SparsonaError(
            f"labels {_some(outside)} are outside the range",
            expected=f"whole numbers from 0 to {max(last, 0)}",
            mend="number the classes from 0 with numpy.unique(y, return_inverse=True)[1], or pass another num_classes",
        )
    if num_classes is None and len(found) <= last:
        raise SparsonaError(
            f"{last + 1 - len(found)} of the labels from 0 to {last} never occur, the first is "
            f"{int(np.flatnonzero(found != np.arange(len(found)))[0])}",
            expected=f"every whole number from 0 to {last}, or num_classes if that is as it should be",
            mend="number the classes without gaps with numpy.unique(y, return_inverse=True)[1]",
        )
    return last + 1


def _some(values: Array) -> str:
    return ", ".join(map(str, values[:5].tolist())) + (", ..." if len(values) > 5 else "")


def _check_lengths(x: Tensor, y: Tensor, where: str = "") -> None:
    if len(x) != len(y):
        raise SparsonaError(
            f"{where}x has {len(x)} examples and y has {len(y)} labels", expected="one label per example"
        )


def _no_data(client: int, count: int, part: str = "") -> SparsonaError:
    return SparsonaError(
        f"client {client} has {'no' if not count else 'only one'} {part}example{'s' * (not count)}",
        expected="at least one to train and one to test on",
        mend="leave this client out, ask for fewer clients, or give it more",
    )
