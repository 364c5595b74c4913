"""Clients and their data: all examples in one pool, and which of them each client trains, validates and tests on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.files import replace_file
from sparsona.core.packing import Packing
from sparsona.core.round import Client
from sparsona.core.seeds import Seeds
from sparsona.data import validate
from sparsona.data.augment import as_inputs
from sparsona.data.batches import Examples, as_targets
from sparsona.data.client_index import PARTS, ClientIndex, Split
from sparsona.data.holdout import (
    HELD_OUT,
    check_rates,
    hold_out,
    no_data,
    nothing_to_score,
    round_to,
    strata,
    take_stratified,
)
from sparsona.data.packing import is_several, pack, refuse_other
from sparsona.data.pool import Array, View, has_scored_token
from sparsona.data.shown import as_html, in_a_line
from sparsona.data.split_plan import SplitPlan

MANIFEST = "federation.json"
FORMAT, PACKED_FORMAT = 2, 3  # the second with several inputs, which versions that know only the first cannot read


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """The data of all clients. Made by `federate`, `Federation.from_clients` or `Federation.open`, which check it.

    Args:
        x: The inputs of all examples: float32, or images as bytes, or tokens. Nothing may write to them.
        y: The targets of all examples: int64, or float32 for a regression.
        splits: For each client, which examples it trains, validates and tests on.
        num_classes: The number of classes, of tokens in the vocabulary, or of outputs of a regression.
        name: What the data set is called in results.
        view: How stored examples become a model's inputs.
        tested_on: How test examples were chosen.
        left_out: How many owners of the data set are no clients, by what they lack.
        packing: Each example is several inputs, packed into a row of `x`; None: it is one.

    Example:
        >>> import numpy as np
        >>> import sparsona as sp
        >>> x, y = np.random.default_rng(0).random((60, 1, 8, 8), dtype=np.float32), np.arange(60) % 3
        >>> federation = sp.federate(x, y, clients=3, partition="iid", num_classes=3)
        >>> federation.input_shape, federation.num_clients, federation.tested_on
        ((1, 8, 8), 3, 'split')
    """

    x: Tensor
    y: Tensor
    splits: Sequence[Split]
    num_classes: int
    name: str = "arrays"
    view: View = field(default_factory=View)
    tested_on: str = "given"
    left_out: Mapping[str, int] = field(default_factory=dict)
    packing: Packing | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.splits, ClientIndex):
            object.__setattr__(self, "splits", ClientIndex.of(self.splits))

    @property
    def _splits(self) -> ClientIndex:
        assert isinstance(self.splits, ClientIndex)
        return self.splits

    @property
    def num_clients(self) -> int:
        return len(self.splits)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example as a model sees it; of several inputs, that of their packed row."""
        return self.view.shape(tuple(self.x.shape[1:]))

    @property
    def has_tokens(self) -> bool:
        """Whether inputs are tokens: indices that a model looks up."""
        return self.x.dtype == torch.int32

    @property
    def predicts_tokens(self) -> bool:
        """Whether the next token is predicted at each position, rather than one class per example."""
        return self.y.dim() == 2 and not self.is_regression

    @property
    def is_regression(self) -> bool:
        """Whether numbers are predicted, `num_classes` of them for each example, rather than classes."""
        return self.y.is_floating_point()

    def __repr__(self) -> str:
        return in_a_line(self)

    def _repr_html_(self) -> str:
        return as_html(self)

    def to(self, device: torch.device) -> Federation:
        """The same federation with everything on `device`."""
        if self.x.device == device:
            return self
        return replace(self, x=self.x.to(device), y=self.y.to(device), splits=self._splits.to(device))

    def clients(self, capacities: Sequence[float] | None = None) -> tuple[Client, ...]:
        """All clients as methods receive them.

        Args:
            capacities: The share of a model's parameters that each client can hold; repeated if there are fewer than
                clients. None: 1 for all.

        Returns:
            A `Client` for each, in order.

        Example:
            >>> import numpy as np
            >>> import sparsona as sp
            >>> federation = sp.federate(np.eye(40), np.arange(40) % 2, clients=4, partition="iid")
            >>> [client.capacity for client in federation.clients([0.5, 1.0])]
            [0.5, 1.0, 0.5, 1.0]
        """
        capacities = [1.0] if capacities is None else list(capacities)
        if not capacities or not all(0 < capacity <= 1 for capacity in capacities):
            raise SparsonaError(
                f"capacities {capacities}",
                expected="one or more densities, each greater than 0 and at most 1",
                hint="write for example [0.2, 0.5, 1.0], or leave them out: every client then holds a dense model",
            )
        num, every = self.num_clients, len(capacities)
        rows = self._splits.sizes.tolist()
        most = max(train for train, _, _ in rows)
        return tuple(
            Client(k, train, capacities[k % every], held, num, most) for k, (train, held, _) in enumerate(rows)
        )

    def examples(self, client: int, part: str) -> Examples:
        """A copy of a client's examples, normalised as a model takes them.

        Images that training augments stay as they are stored: each batch is augmented and normalised by itself.

        Args:
            client: The number of the client.
            part: "train", "validation" or "test".

        Returns:
            Inputs and targets, and the view under which they are still to be seen. Several inputs are a tuple or a
            dict, as the model is passed them.

        Example:
            >>> import numpy as np
            >>> import sparsona as sp
            >>> federation = sp.federate(np.eye(40), np.arange(40) % 2, clients=4, partition="iid")
            >>> federation.examples(0, "test").inputs.shape
            torch.Size([3, 40])
        """
        found = self.packed_examples(client, part)
        return found if self.packing is None else replace(found, inputs=self.packing.unpack(found.inputs))

    def packed_examples(self, client: int, part: str) -> Examples:
        """`examples`, with several inputs packed into rows, as batches are made of them."""
        index = self._indices(client, part)
        inputs, targets = self.x.index_select(0, index), as_targets(self.y.index_select(0, index))
        if part == "train" and self.view.augments:
            return Examples(inputs, targets, self.view)
        return Examples(as_inputs(inputs, self.view), targets)

    def train_on_host(self, client: int) -> Tensor:
        """A client's training examples, as indices into the pool, on the host, where batches are laid out."""
        return self._splits.train_on_host(client)

    def sizes(self) -> Tensor:
        """How many examples each client trains, validates and tests on.

        Returns:
            int64 [clients, 3].

        Example:
            >>> import numpy as np
            >>> import sparsona as sp
            >>> federation = sp.federate(np.eye(40), np.arange(40) % 2, clients=4, partition="iid")
            >>> federation.sizes()[0].tolist()
            [6, 1, 3]
        """
        return torch.from_numpy(self._splits.sizes.copy())

    def label_counts(self, part: str) -> Tensor | None:
        """How many examples of each class each client has.

        Args:
            part: "train", "validation" or "test".

        Returns:
            int64 [clients, classes]; None if tokens or numbers are predicted.

        Example:
            >>> import numpy as np
            >>> import sparsona as sp
            >>> federation = sp.federate(np.eye(40), np.arange(40) % 2, clients=2, partition="shards:1", min_size=1)
            >>> federation.label_counts("test").sum(1).tolist()
            [5, 5]
        """
        if self.predicts_tokens or self.is_regression:
            return None
        if part not in PARTS:
            raise unknown_name("part of the data", part, PARTS)
        client, example = self._splits.clients_of(part)
        cells = client * self.num_classes + self.y.cpu().numpy()[example]
        found = np.bincount(cells, minlength=self.num_clients * self.num_classes)
        return torch.from_numpy(found.reshape(self.num_clients, self.num_classes))

    def hold_out(self, rate: float, validation_rate: float = SplitPlan.validation_rate, seed: int = 0) -> Federation:
        """The same clients without their test examples: each is tested on a part of its other examples in their place.

        For choosing options: what is chosen has not seen the test data.

        Args:
            rate: The share of a client's training and validation examples that it is tested on.
            validation_rate: The share of them that is held for validation.
            seed: Decides which examples those are.

        Returns:
            A federation over the same pool of examples.

        Example:
            >>> import numpy as np
            >>> import sparsona as sp
            >>> federation = sp.federate(np.eye(40), np.arange(40) % 2, clients=4, partition="iid")
            >>> federation.sizes()[0].tolist(), federation.hold_out(0.3, 0.0).sizes()[0].tolist()
            ([6, 1, 3], [5, 0, 2])
        """
        check_rates(validation_rate, rate)
        y, splits = self.y.cpu().numpy(), []
        for client, split in enumerate(self.splits):
            rng = np.random.Generator(np.random.PCG64(Seeds(seed).of(client).own("holdout")))
            train, validation, test = (part.cpu().numpy() for part in (split.train, split.validation, split.test))
            splits.append(hold_out(client, (train, validation, test), y, (validation_rate, rate), 0, rng))
        return replace(self, splits=ClientIndex.of(splits), tested_on=HELD_OUT)

    def without_validation(self) -> Federation:
        """The same clients, each with its validation examples among those that it trains on.

        Returns:
            A federation over the same pool of examples.

        Example:
            >>> import numpy as np
            >>> import sparsona as sp
            >>> federation = sp.federate(np.eye(40), np.arange(40) % 2, clients=4, partition="iid")
            >>> federation.without_validation().sizes()[0].tolist()
            [7, 0, 3]
        """
        splits = []
        for split in self.splits:
            train, validation, test = (part.cpu().numpy() for part in (split.train, split.validation, split.test))
            splits.append((np.sort(np.concatenate([train, validation])), validation[:0], test))
        return replace(self, splits=ClientIndex.of(splits))

    def digest(self) -> str:
        """A hash of all examples, labels, splits and the view; the name is not part of it.

        Returns:
            32 hexadecimal digits.

        Example:
            >>> import numpy as np
            >>> import sparsona as sp
            >>> one, same, other = (
            ...     sp.federate(np.eye(40), np.arange(40) % 2, clients=4, seed=s, partition="iid") for s in (0, 0, 1)
            ... )
            >>> one.digest() == same.digest(), one.digest() == other.digest()
            (True, False)
        """
        return self._digest

    @cached_property
    def _digest(self) -> str:
        state = hashlib.blake2b(digest_size=16)
        index, sizes = self._flat_splits()
        for array in (self.x.cpu().numpy(), self.y.cpu().numpy(), index, sizes, np.array(self.num_classes)):
            state.update(f"{array.dtype.str}{array.shape}".encode())
            state.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        state.update((repr(self.view) + ", test_resize" * self.view.test_resize).encode())
        if self.packing is not None:
            state.update(json.dumps(self.packing.as_json()).encode())
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
        """Write the federation to a folder, for `Federation.open`.

        Args:
            folder: Made if needed. A federation in it is replaced; processes that have it open keep the old one.

        Example:
            >>> import tempfile
            >>> import numpy as np
            >>> import sparsona as sp
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     sp.federate(np.eye(40), np.arange(40) % 2, clients=4, partition="iid").save(folder)
            ...     sp.Federation.open(folder).num_clients
            4
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        index, sizes = self._flat_splits()
        arrays = {"x": self.x.cpu().numpy(), "y": self.y.cpu().numpy(), "index": index, "sizes": sizes}
        for name, array in arrays.items():
            with replace_file(folder / f"{name}.npy") as file:
                np.save(file, array, allow_pickle=False)
        manifest = {
            "format": FORMAT if self.packing is None else PACKED_FORMAT,
            "name": self.name,
            "num_classes": self.num_classes,
            "view": asdict(self.view),
            "tested_on": self.tested_on,
            "left_out": dict(self.left_out),
        }
        if self.packing is not None:
            manifest["packing"] = self.packing.as_json()
        with replace_file(folder / MANIFEST) as file:
            file.write((json.dumps(manifest) + "\n").encode())

    @classmethod
    def open(cls, folder: str | Path) -> Federation:
        """Open a saved federation. Its examples are mapped into memory, which processes share.

        Args:
            folder: A folder written by `Federation.save`.

        Returns:
            The federation. What is written to its tensors is not written to the files.

        Example:
            >>> import tempfile
            >>> import numpy as np
            >>> import sparsona as sp
            >>> federation = sp.federate(np.eye(40), np.arange(40) % 2, clients=4, partition="iid")
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     federation.save(folder)
            ...     sp.Federation.open(folder).digest() == federation.digest()
            True
        """
        folder = Path(folder)
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            if manifest["format"] not in (FORMAT, PACKED_FORMAT):
                raise ValueError(f"format {manifest['format']} instead of {FORMAT}")
            packing = Packing.from_json(manifest["packing"]) if manifest["format"] == PACKED_FORMAT else None
            # "c", copy on write: torch warns of arrays that cannot be written to.
            x, y = (np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False) for name in ("x", "y"))
            index, sizes = (np.load(folder / f"{name}.npy", allow_pickle=False) for name in ("index", "sizes"))
            if packing is not None and x.shape[1:] != (packing.size,):
                raise ValueError(f"rows of shape {x.shape[1:]} for the inputs {packing.describe()}")
            if sizes.sum() != len(index) or len(x) != len(y):
                raise ValueError("its files do not belong together")
            splits = ClientIndex(torch.from_numpy(index), sizes)
            seen: dict[str, Any] = manifest["view"]
            view = View(**seen | {"mean": tuple(seen["mean"]), "std": tuple(seen["std"])})
            tensors = (torch.from_numpy(x), torch.from_numpy(y))
            known = {key: manifest[key] for key in ("num_classes", "name", "tested_on")}
            return cls(*tensors, splits, view=view, left_out=manifest.get("left_out", {}), packing=packing, **known)
        except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
            raise SparsonaError(
                f"'{folder}' holds no federation that can be read: {error}",
                expected="a folder written by Federation.save",
                hint="save the federation again",
            ) from error

    @classmethod
    def from_clients(
        cls,
        clients: Sequence[Sequence[Any]],
        validation_rate: float = SplitPlan.validation_rate,
        seed: int = SplitPlan.seed,
        num_classes: int | None = None,
        name: str = "arrays",
        view: View | None = None,
        tokens: bool = False,
    ) -> Federation:
        """A federation of clients whose data is separate already.

        Args:
            clients: For each client (x_train, y_train, x_test, y_test), where validation examples are then taken out
                of the training examples class by class; or (x_train, y_train, x_validation, y_validation, x_test,
                y_test). Arrays are checked and converted as by `federate`; an x may be several inputs, as there.
            validation_rate: Share of a client's training examples held for validation, where it has no such arrays.
            seed: Decides which examples those are.
            num_classes: The number of classes; None: as many as there are labels.
            name: What the data set is called in results.
            view: How stored images of bytes become a model's inputs.
            tokens: Rows of x are token numbers, as for `federate`.

        Returns:
            The federation, to be handed to `sparsona.train`.

        Example:
            >>> import numpy as np
            >>> import sparsona as sp
            >>> x, y = np.eye(10), np.arange(10) % 2
            >>> federation = sp.Federation.from_clients([(x[:8], y[:8], x[8:], y[8:])] * 3)
            >>> federation.sizes().tolist()
            [[7, 1, 2], [7, 1, 2], [7, 1, 2]]
        """
        check_rates(validation_rate)
        if not len(clients):
            raise SparsonaError("no clients", expected="at least 1 client")
        xs: list[Tensor] = []
        ys: list[Tensor] = []
        sizes: list[dict[str, int]] = []
        packing: Packing | None = None
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
                if packing is not None or (is_several(x) and not xs):
                    if not is_several(x):
                        raise SparsonaError(
                            f"{where}one array of inputs", expected=f"{packing and packing.describe()}, as client 0 has"
                        )
                    x, packing = pack(x, where, packing)
                    refuse_other(packing, view, tokens, where)
                else:
                    x = validate.check_inputs(x, where, as_bytes=view is not None, as_tokens=tokens)
                y = validate.check_targets(y, where, as_tokens=tokens)
                validate.check_lengths(x, y, where)
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
        num_classes = validate.count_outputs(y, num_classes, x)
        labels, counts = strata(y.numpy()), np.array([[size[part] for part in PARTS] for size in sizes])
        entries = np.arange(len(x))  # the parts of all clients, end to end
        starts = np.cumsum(counts.sum(1)) - counts.sum(1)
        for index, (start, (num_train, num_validation, num_test)) in enumerate(
            zip(starts.tolist(), counts.tolist(), strict=True)
        ):
            wanted = round_to(num_train * validation_rate, validation_rate > 0, num_train - 1)
            if wanted and len(clients[index]) == 4:
                rng = np.random.Generator(np.random.PCG64(Seeds(seed).of(index).own("split")))
                train = entries[start : start + num_train]
                validation, rest = take_stratified(train.copy(), labels, wanted, rng)
                train[:] = np.concatenate([rest, validation])
                counts[index] = len(rest), wanted, num_test
            test = start + num_train + num_validation
            if y.dim() == 2 and not has_scored_token(y[test : test + num_test].numpy()).any():
                raise nothing_to_score(index)
        return cls(
            x, y, ClientIndex(torch.from_numpy(entries), counts), num_classes, name, view or View(), packing=packing
        )
