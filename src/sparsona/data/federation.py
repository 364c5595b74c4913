"""Clients and their data: all examples in one pool, and which of them each client trains, validates and tests on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsona.core.arguments import number
from sparsona.core.errors import DataNeededError, SparsonaError, unknown_name
from sparsona.core.files import replace_file
from sparsona.core.packing import Packing
from sparsona.core.reading import MOST_BYTES, parse_json, read_text
from sparsona.core.round import Client
from sparsona.core.seeds import Seeds
from sparsona.core.targets import TASKS
from sparsona.data import validate
from sparsona.data.augment import as_inputs
from sparsona.data.batches import Examples, as_targets
from sparsona.data.client_index import PARTS, ClientIndex, Split
from sparsona.data.client_view import ClientView
from sparsona.data.given import ALL, Columns, name_classes, read_client
from sparsona.data.holdout import (
    HELD_OUT,
    Holdout,
    check_rates,
    hold_out,
    no_data,
    nothing_to_score,
    round_to,
    strata,
    take_stratified,
)
from sparsona.data.names import Names, clean_names, find_client, name_of
from sparsona.data.packing import is_several, pack, refuse_other
from sparsona.data.pool import Array, View, has_scored_token
from sparsona.data.shown import as_html, in_a_line
from sparsona.data.split_plan import SplitPlan, check_arguments

MANIFEST = "federation.json"
PIECE = 2**24  # bytes of examples that a digest gathers at a time
GIVEN_TEST = "given"  # test examples are those that clients brought
FORMAT, PACKED_FORMAT = 2, 3  # the second with several inputs, which versions that know only the first cannot read


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """The data of all clients. Made by `federate`, `Federation.from_clients` or `Federation.open`, which check it.

    Args:
        x: The inputs of all examples: float32, or images as bytes, or tokens. Nothing may write to them.
        y: The targets of all examples: int64, or float32 for labels and numbers.
        splits: For each client, which examples it trains, validates and tests on.
        num_classes: The number of outputs that a model has for an example: one for each class, token of the vocabulary,
            label or number, and one where it tells two classes apart by one logit.
        name: What the data set is called in results.
        view: How stored examples become a model's inputs.
        tested_on: How test examples were chosen.
        left_out: How many owners of the data set are no clients, by what they lack.
        task: What is predicted: "classification", "binary", "multilabel" or "regression"; "auto": as `y` tells.
        packing: Each example is several inputs, packed into a row of `x`; None: it is one.
        train_counts: Of a federation without its examples, how many of each class each client trains on.
        client_names: What clients are called in results, in order; None: by their numbers.
        class_names: What classes are called, likewise.
        client_owners: Of clients without names, the numbers of the owners that they are in the user's data; None: they
            are no owners, or of a data set of the catalog.
        drawn_by: The partition that made clients up out of everybody's examples; "": clients have their own.

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
    tested_on: str = GIVEN_TEST
    left_out: Mapping[str, int] = field(default_factory=dict)
    task: str = "auto"
    packing: Packing | None = None
    train_counts: Array | None = field(default=None, repr=False)
    client_names: Names = None
    class_names: Names = None
    client_owners: tuple[int, ...] | None = None
    drawn_by: str = ""

    def __post_init__(self) -> None:
        if self.task == "auto":
            object.__setattr__(self, "task", "regression" if self.y.is_floating_point() else "classification")
        if self.task not in TASKS:
            raise unknown_name("task", str(self.task), TASKS)
        if not isinstance(self.splits, ClientIndex):
            object.__setattr__(self, "splits", ClientIndex.of(self.splits))
        for name, what, count in (
            ("client_names", "clients", self.num_clients),
            ("class_names", "classes", self.num_labels),
        ):
            if (names := getattr(self, name)) is not None:
                object.__setattr__(self, name, clean_names(names, what, count))

    def __len__(self) -> int:
        return self.num_clients

    def __getitem__(self, client: int | str) -> ClientView:
        return ClientView(self, find_client(client, self.client_names, self.num_clients))

    def __iter__(self) -> Iterator[ClientView]:
        return (ClientView(self, client) for client in range(self.num_clients))

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
        return self.y.dim() == 2 and not self.y.is_floating_point()

    @property
    def is_regression(self) -> bool:
        """Whether numbers are predicted, `num_classes` of them for each example, rather than classes."""
        return self.task == "regression"

    @property
    def targets(self) -> str:
        """What is predicted: classes, tokens, one of two classes by one logit (binary), labels or numbers."""
        return "tokens" if self.predicts_tokens else TASKS[self.task]

    @property
    def num_labels(self) -> int:
        """The number of classes that examples have: two where one logit tells them apart."""
        return 2 if self.task == "binary" else self.num_classes

    @property
    def has_examples(self) -> bool:
        """Whether the examples are here, and not only their shapes and the sizes of the clients' parts."""
        return self._splits.is_filled

    @classmethod
    def outline(
        cls, sizes: Array, x: Tensor, y: Tensor, num_classes: int, name: str, view: View, train_counts: Array | None
    ) -> Federation:
        """The shapes and sizes of a federation, without its examples: enough for models, not for training.

        Args:
            sizes: how many examples each client trains, validates and tests on, int64 [clients, 3].
            x: an empty tensor of inputs, whose shape and type are those of the examples.
            y: likewise of targets.
            num_classes: as of a federation.
            name: likewise.
            view: likewise.
            train_counts: likewise.

        Returns:
            A federation whose `examples` raise DataNeededError.
        """
        splits = ClientIndex(torch.zeros(0, dtype=torch.int64), sizes)
        return cls(x, y, splits, num_classes, name, view, train_counts=train_counts)

    def __repr__(self) -> str:
        return in_a_line(self)

    def _repr_html_(self) -> str:
        return as_html(self)

    def to(self, device: torch.device) -> Federation:
        """The same federation with everything on `device`."""
        if self.x.device == device:
            return self
        moved = replace(self, x=self.x.to(device), y=self.y.to(device), splits=self._splits.to(device))
        vars(moved).update({name: vars(self)[name] for name in ("_digest", "_client_digest") if name in vars(self)})
        return moved

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
        most, names = max(train for train, _, _ in rows), self.client_names
        return tuple(
            Client(k, train, capacities[k % every], held, num, most, test > 0, name=names[k] if names else "")
            for k, (train, held, test) in enumerate(rows)
        )

    def examples(self, client: int | str, part: str) -> Examples:
        """A copy of a client's examples, normalised as a model takes them.

        Images that training augments stay as they are stored: each batch is augmented and normalised by itself.

        Args:
            client: The number of the client, or its name.
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

    def packed_examples(self, client: int | str, part: str) -> Examples:
        """`examples`, with several inputs packed into rows, as batches are made of them."""
        self._check_examples(f"the {part} data of client {client}")
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
            int64 [clients, classes]; None if tokens, labels or numbers are predicted.

        Example:
            >>> import numpy as np
            >>> import sparsona as sp
            >>> federation = sp.federate(np.eye(40), np.arange(40) % 2, clients=2, partition="shards:1", min_size=1)
            >>> federation.label_counts("test").sum(1).tolist()
            [5, 5]
        """
        if self.y.dim() > 1:
            return None
        if part not in PARTS:
            raise unknown_name("part of the data", part, PARTS)
        if not self.has_examples and part == "train" and self.train_counts is not None:
            return torch.from_numpy(self.train_counts.copy())
        self._check_examples("the labels")
        client, example = self._splits.clients_of(part)
        cells = client * self.num_labels + self.y.cpu().numpy()[example]
        found = np.bincount(cells, minlength=self.num_clients * self.num_labels)
        return torch.from_numpy(found.reshape(self.num_clients, self.num_labels))

    def balanced_weights(self) -> tuple[float, ...]:
        """Weights that make the classes of all clients' training data count the same in the sum of all losses.

        Returns:
            For each class, the number of examples over that of the class times the number of classes; for each of
            several labels, how many examples lack it over how many have it.

        Example:
            >>> import numpy as np
            >>> import sparsona as sp
            >>> x, y = np.eye(4), [0, 0, 0, 1]
            >>> sp.Federation.from_clients([(x, y, x, y)] * 2, validation_rate=0).balanced_weights()
            (0.6666666666666666, 2.0)
        """
        y = self.y.cpu().numpy()[self._splits.clients_of("train")[1]]
        if self.targets not in ("classes", "binary", "labels"):
            raise SparsonaError(f"balanced weights where {self.targets} are predicted", expected="classes or labels")
        counts = y.sum(axis=0) if y.ndim > 1 else np.bincount(y, minlength=self.num_labels)
        if absent := np.flatnonzero(counts == 0).tolist():
            raise SparsonaError(
                f"balanced weights where no training example has class {absent[0]}",
                expected="training examples of every class",
                hint="give class_weights as numbers",
            )
        found = (len(y) - counts) / counts if y.ndim > 1 else len(y) / (len(counts) * counts)
        return tuple(float(weight) for weight in found)

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
            splits.append(
                hold_out(
                    name_of(self.client_names, client), (train, validation, test), y, (validation_rate, rate), 0, rng
                )
            )
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
        """A hash of all examples in their order, of labels, splits and the view; the name is not part of it.

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

    def client_digest(self) -> str:
        """A hash of what each client trains, validates and tests on, in its order, and of the view.

        It does not depend on where these examples are among all, nor on what is beside them. Neither does a run.

        Returns:
            32 hexadecimal digits.

        Example:
            >>> import numpy as np
            >>> import sparsona as sp
            >>> x, y, owners = np.eye(40), np.arange(40) // 2 % 2, np.arange(40) % 2
            >>> one = sp.federate(x, y, owners=owners)
            >>> same = sp.Federation.from_clients([(x[owners == k], y[owners == k]) for k in (0, 1)])
            >>> one.digest() == same.digest(), one.client_digest() == same.client_digest()
            (False, True)
        """
        return self._client_digest

    @cached_property
    def _digest(self) -> str:
        state = hashlib.blake2b(digest_size=16)
        index, sizes = self._flat_splits()
        for array in (self.x.cpu().numpy(), self.y.cpu().numpy(), index, sizes, np.array(self.num_classes)):
            state.update(f"{array.dtype.str}{array.shape}".encode())
            state.update(_as_bytes(array))
        return self._with_meaning(state)

    @cached_property
    def _client_digest(self) -> str:
        self._check_examples("all clients")
        state, entries = hashlib.blake2b(digest_size=16), self._splits.entries
        for pool in (self.x, self.y):
            state.update(f"{pool.dtype}{tuple(pool.shape[1:])}".encode())
            # In pieces: the examples of all clients together are as large as the pool.
            for some in entries.split(max(1, PIECE // max(1, pool[:1].nbytes))):
                state.update(_as_bytes(pool.index_select(0, some).cpu().numpy()))
        state.update(f"{self._splits.sizes.tolist()}{self.num_classes}".encode())
        return self._with_meaning(state)

    def _with_meaning(self, state: hashlib.blake2b) -> str:
        """A digest of what was added so far, and of what turns stored examples into a model's inputs and targets."""
        state.update((repr(self.view) + ", test_resize" * self.view.test_resize).encode())
        if self.task in ("binary", "multilabel"):  # others are told by the type of `y`
            state.update(self.task.encode())
        if self.packing is not None:
            state.update(json.dumps(self.packing.as_json()).encode())
        return state.hexdigest()

    def _check_examples(self, what: str) -> None:
        if not self.has_examples:
            raise DataNeededError(
                f"only the sizes of {what} are here",
                expected="the federation that the run was started with",
                hint="call sparsona.load with the same federation",
            )

    def _indices(self, client: int | str, part: str) -> Tensor:
        if part not in PARTS:
            raise unknown_name("part of the data", part, PARTS)
        return self._splits.part(find_client(client, self.client_names, self.num_clients), PARTS.index(part))

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
            "task": self.task,
            "client_names": self.client_names,
            "class_names": self.class_names,
            "client_owners": self.client_owners,
            "drawn_by": self.drawn_by,
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
            manifest = parse_json(read_text(folder / MANIFEST, MOST_BYTES))
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
            known |= {"left_out": manifest.get("left_out", {}), "task": manifest.get("task", "auto")}
            known["drawn_by"] = str(manifest.get("drawn_by", ""))
            known |= {key: manifest.get(key) for key in ("client_names", "class_names")}
            if (owners := manifest.get("client_owners")) is not None:
                known["client_owners"] = tuple(map(int, owners))
            return cls(*tensors, splits, view=view, packing=packing, **known)
        except (OSError, ValueError, KeyError, TypeError, EOFError, SparsonaError) as error:
            why = error.what if isinstance(error, SparsonaError) else error
            raise SparsonaError(
                f"'{folder}' holds no federation that can be read: {why}",
                expected="a folder written by Federation.save",
                hint="save the federation again",
            ) from error

    @classmethod
    def from_clients(
        cls,
        clients: Mapping[Any, Any] | Sequence[Any],
        validation_rate: float = SplitPlan.validation_rate,
        seed: int = SplitPlan.seed,
        num_classes: int | None = None,
        name: str = "arrays",
        view: View | None = None,
        tokens: bool = False,
        task: str = "auto",
        *,
        test_rate: float = SplitPlan.test_rate,
        target: str | None = None,
        inputs: str | Sequence[str] | None = None,
        client_names: Sequence[str] | None = None,
        class_names: Sequence[str] | None = None,
    ) -> Federation:
        """A federation of clients whose data is separate already.

        What a client has may be

        - `(x, y)`, a torch Dataset or DataLoader, a Hugging Face dataset or a data frame: all of its examples, of which
          `test_rate` are for testing and `validation_rate` for validation, class by class;
        - `{"train": ..., "test": ...}` with any of these, perhaps with "validation"; without "test" the client trains
          and is not tested;
        - `(x_train, y_train, x_test, y_test)` or `(x_train, y_train, x_validation, y_validation, x_test, y_test)`.

        Without validation examples of its own, `validation_rate` of those for training are taken.

        Args:
            clients: What each client has, as a list, or as a dict by the clients' names. Arrays are checked and
                converted as by `federate`; an x may be several inputs, as there. Labels that are texts become classes
                with these names, sorted.
            validation_rate: Share of a client's training examples held for validation, where it has no such arrays.
            seed: Decides which examples those are.
            num_classes: The number of classes; None: as many as there are labels.
            name: What the data set is called in results.
            view: How stored images of bytes become a model's inputs.
            tokens: Rows of x are token numbers, as for `federate`.
            task: What targets are, as for `federate`; "auto" is decided by the targets of all clients together.
            test_rate: Share of a client's examples held for testing, where it does not say which.
            target: Of tables, the column of labels; None: "label", "labels", "target" or "y".
            inputs: Of tables, the column of inputs, or columns of numbers; None: all others.
            client_names: The clients' names, where `clients` is a list.
            class_names: The names of classes 0, 1, ...

        Returns:
            The federation, to be handed to `sparsona.train`.

        Example:
            >>> import numpy as np
            >>> import sparsona as sp
            >>> x, y = np.eye(10), np.arange(10) % 2
            >>> federation = sp.Federation.from_clients([(x[:8], y[:8], x[8:], y[8:])] * 3)
            >>> federation.sizes().tolist()
            [[7, 1, 2], [7, 1, 2], [7, 1, 2]]
            >>> federation = sp.Federation.from_clients({"north": (x, y), "south": {"train": (x, y)}})
            >>> len(federation), federation["south"]
            (2, Client 1 'south': 9 train, 1 validation, 0 test)
        """
        check_arguments(seed, num_classes, name, task, tokens, view)
        check_rates(number("validation_rate", validation_rate))
        number("test_rate", test_rate)
        if not isinstance(clients, Mapping | Sequence) or isinstance(clients, str | bytes):
            raise SparsonaError(
                f"clients as a {type(clients).__name__}",
                expected="a list of what each client has, or a dict by their names",
                hint="Federation.from_clients([(x, y), ...]); federate(x, y, clients=5) shares one data set out",
            )
        if isinstance(clients, Mapping):
            if client_names is not None:
                raise SparsonaError("client_names together with a dict of clients", expected="the dict's keys alone")
            client_names, clients = list(clients), list(clients.values())
        if not len(clients):
            raise SparsonaError("no clients", expected="at least 1 client")
        names = None if client_names is None else clean_names(client_names, "clients", len(clients))
        columns = Columns(target, inputs)
        found = [
            (index, part, given)
            for index, client in enumerate(clients)
            for part, given in read_client(client, f"client {name_of(names, index)}", columns, seed).items()
        ]
        wheres = [
            f"client {name_of(names, index)}, {part}: " if part != ALL else f"client {name_of(names, index)}: "
            for index, part, _ in found
        ]
        if view is None and all(given.is_image for _, _, given in found):
            view = View()  # bytes are stored as such, and divided by 255
        known = [given.class_names for _, _, given in found if given.class_names is not None]
        if any(one != known[0] for one in known):
            raise SparsonaError("clients whose classes have other names", expected="the same classes in the same order")
        given_names = known[0] if class_names is None and known else class_names
        classes = None if given_names is None else clean_names(given_names, "classes")
        targets, classes = name_classes([given.y for _, _, given in found], wheres, classes)
        requested, task = task, validate.find_task(targets, task)
        xs: list[Tensor] = []
        ys: list[Tensor] = []
        sizes = np.zeros((len(clients), len(PARTS)), dtype=np.int64)
        first = wheres[0].rstrip(": ")
        packing: Packing | None = None
        for (index, part, given), where, labels in zip(found, wheres, targets, strict=True):
            if packing is not None or (is_several(given.x) and not xs):
                if not is_several(given.x):
                    raise SparsonaError(
                        f"{where}one array of inputs", expected=f"{packing and packing.describe()}, as of {first}"
                    )
                x, packing = pack(given.x, where, packing)
                refuse_other(packing, view, tokens, where)
            else:
                x = validate.check_inputs(
                    given.x, where, as_bytes=view is not None, as_tokens=tokens, columns=given.columns
                )
            y = validate.check_targets(labels, where, as_tokens=tokens, task=validate.task_of(labels, requested, task))
            validate.check_lengths(x, y, where)
            if not x.shape[0]:
                if part in ("train", ALL):
                    raise no_data(name_of(names, index), 0, "train " * (part == "train"))
                continue
            if xs and x.shape[1:] != xs[0].shape[1:]:
                raise SparsonaError(
                    f"{where}examples of shape {tuple(x.shape[1:])}",
                    expected=f"{tuple(xs[0].shape[1:])}, as of {first}",
                )
            if ys and y.dtype != ys[0].dtype:
                raise SparsonaError(
                    f"{where}targets of another kind than those of {first}",
                    expected="classes everywhere, or numbers with fractions everywhere",
                    hint='task="regression" if whole numbers are numbers, too',
                )
            if ys and y.shape[1:] != ys[0].shape[1:]:
                raise SparsonaError(
                    f"{where}{y.shape[1:].numel()} targets for an example",
                    expected=f"{ys[0].shape[1:].numel()}, as of {first}",
                )
            sizes[index, PARTS.index("train" if part == ALL else part)] = x.shape[0]
            xs.append(x)
            ys.append(y)
        if not (lacks := sizes[:, 0] > 0).all():
            raise no_data(name_of(names, int(np.flatnonzero(~lacks)[0])), 0, "train ")
        x, y = torch.cat(xs), torch.cat(ys)
        num_classes = validate.count_outputs(y, num_classes, x, task, classes, requested)
        validate.warn_of_one_class(name, task, y, num_classes)
        if packing is None:
            validate.warn_of_scale(name, x.numpy())
        parts: list[set[str]] = [set() for _ in clients]
        for index, part, _ in found:
            parts[index].add(part)
        entries, counts = _split_parts(y.numpy(), sizes, parts, names, seed, (validation_rate, test_rate))
        if not counts[:, PARTS.index("test")].any():
            raise SparsonaError(
                "no client has test examples",
                expected="at least one client that is tested",
                hint='pass (x, y), of which test_rate are split off, or {"train": ..., "test": ...}',
            )
        splits = ClientIndex(torch.from_numpy(entries), counts)
        shown = view or View()
        tested_on = _tested_on(parts, counts)
        return cls(
            x,
            y,
            splits,
            num_classes,
            name,
            shown,
            tested_on,
            task=task,
            packing=packing,
            client_names=names,
            class_names=classes,
        )


def _as_bytes(array: Array) -> memoryview:
    """The values of an array, for a digest."""
    found: memoryview = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return found


def _tested_on(parts: Sequence[set[str]], counts: Array) -> str:
    """How the test examples of clients were chosen that brought their data, as a federation says it."""
    tested = np.flatnonzero(counts[:, PARTS.index("test")]).tolist()
    is_split = [ALL in parts[client] for client in tested]
    return "split" if all(is_split) else f"{GIVEN_TEST}, for some clients split" if any(is_split) else GIVEN_TEST


def _split_parts(
    y: Array,
    sizes: Array,
    parts: Sequence[set[str]],
    names: Names,
    seed: int,
    rates: tuple[float, float],
) -> tuple[Array, Array]:
    """The examples of all clients' parts, end to end, and how many of each there are.

    Args:
        y: the targets of all, end to end as they were given.
        sizes: how many each client was given of each part; what is still to be split counts as training.
        parts: which parts each client was given.
        names: of the clients.
        seed: decides which examples are taken for testing and validation.
        rates: the shares for validation and for testing.
    """
    labels, counts, entries = strata(y), sizes.copy(), np.arange(len(y))
    if any(ALL in given for given in parts):
        check_rates(*rates)
    start = 0
    for index, (num_train, num_validation, num_test) in enumerate(sizes.tolist()):
        rng = np.random.Generator(np.random.PCG64(Seeds(seed).of(index).own("split")))
        mine = entries[start : start + num_train]
        if ALL in parts[index]:
            split = Holdout("split", None, *rates, 0).split(name_of(names, index), mine.copy(), None, y, rng)
            mine[:], counts[index] = np.concatenate(split), [len(part) for part in split]
        elif "validation" not in parts[index]:
            wanted = round_to(num_train * rates[0], rates[0] > 0, num_train - 1)
            if wanted:
                validation, rest = take_stratified(mine.copy(), labels, wanted, rng)
                mine[:], counts[index] = np.concatenate([rest, validation]), [len(rest), wanted, num_test]
        test = start + num_train + num_validation
        if y.ndim == 2 and num_test and not has_scored_token(y[test : test + num_test]).any():
            raise nothing_to_score(name_of(names, index))
        start = test + num_test
    return entries, counts
