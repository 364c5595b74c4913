"""Clients and their data: one pooled storage, and for each client which examples it trains, validates and tests on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.round import Client
from sparsona.core.seeds import Seeds
from sparsona.data import validate as checked
from sparsona.data.augment import look
from sparsona.data.batches import Examples, as_targets
from sparsona.data.client_index import PARTS, Split, Splits
from sparsona.data.holdout import carve, check_rates, no_data, nothing_to_score, round_to, stratum
from sparsona.data.partition.by_owner import asks
from sparsona.data.pool import View

Array = npt.NDArray[Any]
MANIFEST = "federation.json"
FORMAT = 2


@dataclass(frozen=True, eq=False)
class Federation:
    """Everybody's data. Made by `federate`, `Federation.from_clients` or `Federation.open`, which check it.

    `x` (float32; bytes and tokens as they are) and `y` (int64; float32 for a regression) pool all examples; nothing may
    write to them. `view` is how a model sees them, and `tested_on` how test examples were chosen. `left_out` counts the
    people of the data set who are no clients, by what they lack.
    """

    x: Tensor
    y: Tensor
    splits: Sequence[Split]
    num_classes: int
    name: str = "arrays"
    view: View = field(default_factory=View)
    tested_on: str = "given"
    left_out: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.splits, Splits):
            object.__setattr__(self, "splits", Splits.of(self.splits))

    @property
    def _splits(self) -> Splits:
        assert isinstance(self.splits, Splits)
        return self.splits

    @property
    def num_clients(self) -> int:
        return len(self.splits)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example as a model sees it."""
        return self.view.shape(tuple(self.x.shape[1:]))

    @property
    def has_tokens(self) -> bool:
        """Whether inputs are tokens: indices that a model looks up."""
        return self.x.dtype == torch.int32

    @property
    def asks_per_token(self) -> bool:
        """Whether the next token is asked for at each position, rather than one class per example."""
        return self.y.dim() == 2 and not self.is_regression

    @property
    def is_regression(self) -> bool:
        """Whether numbers are asked for, `num_classes` of them for each example, rather than classes."""
        return self.y.is_floating_point()

    def to(self, device: torch.device) -> Federation:
        """The same federation with everything on `device`."""
        if self.x.device == device:
            return self
        return replace(self, x=self.x.to(device), y=self.y.to(device), splits=self._splits.to(device))

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
        num, every = self.num_clients, len(capacities)
        rows = enumerate(self._splits.sizes.tolist())
        return tuple(Client(k, train, capacities[k % every], held, num) for k, (train, held, _) in rows)

    def examples(self, client: int, part: str) -> Examples:
        """A copy of a client's "train", "validation" or "test" examples, scaled as a model takes them.

        Images that training augments stay as they are stored: scaling comes after, batch by batch.
        """
        index = self._indices(client, part)
        inputs, targets = self.x.index_select(0, index), as_targets(self.y.index_select(0, index))
        if part == "train" and self.view.augments:
            return Examples(inputs, targets, self.view)
        return Examples(look(inputs, self.view), targets)

    def train_on_host(self, client: int) -> Tensor:
        """A client's training examples, as indices into the pool: for those who lay out batches on the host."""
        return self._splits.train_on_host(client)

    def sizes(self) -> Tensor:
        """How many examples each client trains, validates and tests on: int64 [clients, 3]."""
        return torch.from_numpy(self._splits.sizes.copy())

    def label_counts(self, part: str) -> Tensor | None:
        """How many examples of each class each client has: int64 [clients, classes]; None if tokens or numbers are
        asked for."""
        if self.asks_per_token or self.is_regression:
            return None
        if part not in PARTS:
            raise unknown_name("part of the data", part, PARTS)
        client, example = self._splits.clients_of(part)
        cells = client * self.num_classes + self.y.cpu().numpy()[example]
        found = np.bincount(cells, minlength=self.num_clients * self.num_classes)
        return torch.from_numpy(found.reshape(self.num_clients, self.num_classes))

    def digest(self) -> str:
        """Tells apart federations that differ in any example, label or split; the name does not count."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        state = hashlib.blake2b(digest_size=16)
        index, sizes = self._flat_splits()
        for array in (self.x.cpu().numpy(), self.y.cpu().numpy(), index, sizes, np.array(self.num_classes)):
            state.update(f"{array.dtype.str}{array.shape}".encode())
            state.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        state.update(repr(self.view).encode())
        return state.hexdigest()

    def _indices(self, client: int, part: str) -> Tensor:
        if part not in PARTS:
            raise unknown_name("part of the data", part, PARTS)
        if not 0 <= client < self.num_clients:
            raise SparsonaError(f"there is no client {client}", expected=f"0 to {self.num_clients - 1}")
        return self._splits.part(client, PARTS.index(part))

    def _flat_splits(self) -> tuple[Array, Array]:
        """All indices end to end, and how many each client has of each part."""
        return self._splits.on_host.numpy(), self._splits.sizes

    def save(self, folder: str | Path) -> None:
        """Write it to a folder from which `Federation.open` maps it into memory, for other processes to share."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        index, sizes = self._flat_splits()
        arrays = {"x": self.x.cpu().numpy(), "y": self.y.cpu().numpy(), "index": index, "sizes": sizes}
        for name, array in arrays.items():
            # Written aside and renamed: a process that has the old file mapped keeps it whole.
            aside = folder / f"{name}.npy.part"
            with aside.open("wb") as file:
                np.save(file, array, allow_pickle=False)
            os.replace(aside, folder / f"{name}.npy")
        manifest = {
            "format": FORMAT,
            "name": self.name,
            "num_classes": self.num_classes,
            "view": asdict(self.view),
            "tested_on": self.tested_on,
            "left_out": dict(self.left_out),
        }
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
            splits = Splits(torch.from_numpy(index), sizes)
            seen: dict[str, Any] = manifest["view"]
            view = View(**seen | {"mean": tuple(seen["mean"]), "std": tuple(seen["std"])})
            tensors = (torch.from_numpy(x), torch.from_numpy(y))
            known = {key: manifest[key] for key in ("num_classes", "name", "tested_on")}
            return cls(*tensors, splits, view=view, left_out=manifest.get("left_out", {}), **known)
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
        view: View | None = None,
        tokens: bool = False,
    ) -> Federation:
        """A federation of clients whose data is already apart.

        Each client is (x_train, y_train, x_test, y_test), and validation data is then carved out of its training data
        class by class; or (x_train, y_train, x_validation, y_validation, x_test, y_test), kept as it is. Arrays are
        treated as `federate` treats them.
        """
        check_rates(validation_rate)
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
                x = checked.inputs(x, where, as_bytes=view is not None, as_tokens=tokens)
                y = checked.targets(y, where, as_tokens=tokens)
                checked.check_lengths(x, y, where)
                if not x.shape[0] and part != "validation":
                    raise no_data(index, 0, f"{part} ")
                if xs and x.shape[1:] != xs[0].shape[1:]:
                    raise SparsonaError(
                        f"{where}examples of shape {tuple(x.shape[1:])}",
                        expected=f"{tuple(xs[0].shape[1:])}, as in the training data of client 0",
                    )
                if ys and y.dtype != ys[0].dtype:
                    raise SparsonaError(
                        f"{where}targets of another kind than those of client 0",
                        expected="classes everywhere, or numbers with fractions everywhere",
                    )
                sizes[-1][part] = x.shape[0]
                xs.append(x)
                ys.append(y)
        x, y = torch.cat(xs), torch.cat(ys)
        num_classes = checked.count_outputs(y, num_classes, x)
        labels, counts = stratum(y.numpy()), np.array([[size[part] for part in PARTS] for size in sizes])
        entries = np.arange(len(x))  # everybody's parts lie end to end, as they were given
        starts = np.cumsum(counts.sum(1)) - counts.sum(1)
        for index, (start, (num_train, num_validation, num_test)) in enumerate(
            zip(starts.tolist(), counts.tolist(), strict=True)
        ):
            wanted = round_to(num_train * validation_rate, validation_rate > 0, num_train - 1)
            if wanted and len(clients[index]) == 4:
                rng = np.random.Generator(np.random.PCG64(Seeds(seed).of(index).own("split")))
                train = entries[start : start + num_train]
                validation, rest = carve(train.copy(), labels, wanted, rng)
                train[:] = np.concatenate([rest, validation])
                counts[index] = len(rest), wanted, num_test
            test = start + num_train + num_validation
            if y.dim() == 2 and not asks(y[test : test + num_test].numpy()).any():
                raise nothing_to_score(index)
        return cls(x, y, Splits(torch.from_numpy(entries), counts), num_classes, name, view or View())
