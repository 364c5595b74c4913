"""What a method is called with: the client, the round, batches, and the data that a client may read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from sparsona.core.seeds import Seeds

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Client:
    """A participant of a federation.

    Args:
        index: the number of the client, from 0.
        num_examples: its training examples.
        capacity: the highest density that it can hold.
        num_validation: its validation examples.
        num_clients: how many clients there are.
        most_examples: the training examples of the largest client: a table with a row for each example has this many in
            every client's Work, so that executors can run them together. 0: not known.
        is_tested: it has test examples.
        lr_scale: a factor of its learning rates.
        epochs: its own passes over the data in a round; None: the method's.
        share: the share of its steps that it makes in a round, at least one of each phase.
        time: the simulated time of its turn, where clients have speeds; 0: not simulated.
        name: what it is called in messages; "": by its number. No part of what makes two clients equal.
    """

    index: int
    num_examples: int
    capacity: float = 1.0
    num_validation: int = 0
    num_clients: int = 1
    most_examples: int = 0
    is_tested: bool = True
    lr_scale: float = 1.0
    epochs: int | None = None
    share: float = 1.0
    time: float = 0.0
    name: str = field(default="", compare=False)

    @property
    def label(self) -> str:
        """Its name, or its number where it has none."""
        return self.name or str(self.index)

    @property
    def in_tuning(self) -> Client:
        """The client in final tuning, which has no deadline and an option of its own for its length."""
        return self if self.epochs is None and self.share == 1 else replace(self, epochs=None, share=1.0)

    @property
    def kind(self) -> tuple[float, ...]:
        """What its costs depend on: capacity, amounts of data, and how long it trains."""
        epochs = -1 if self.epochs is None else self.epochs
        return self.capacity, self.num_examples, self.num_validation, epochs, self.share


def client_kinds(clients: Iterable[Client]) -> Iterator[tuple[Client, int]]:
    """One client of each kind, and how many there are of it."""
    first: dict[tuple[float, ...], Client] = {}
    counts: Counter[tuple[float, ...]] = Counter()
    for client in clients:
        first.setdefault(client.kind, client)
        counts[client.kind] += 1
    return ((client, counts[kind]) for kind, client in first.items())


@dataclass(frozen=True)
class Round:
    """A round, as a client or the server sees it.

    Args:
        index: the number of the round, from 0.
        total: how many rounds the run has.
        lr_scale: the factor of the learning rate; of a round bound to a client, with the client's own in it.
        batch_size: the size of training batches.
        seeds: the seeds of the round, bound to `client`.
        client: the client whose turn it is; None on the server.
        is_new: the client's State was made by `init_client` for this turn.
        drop_last: a pass over the training data leaves out its last batch if that is incomplete.
    """

    index: int
    total: int
    lr_scale: float
    batch_size: int
    seeds: Seeds
    client: Client | None = None
    is_new: bool = False
    drop_last: bool = False

    @property
    def title(self) -> str:
        """What it is called where people read it: rounds are counted from 1 there."""
        return f"round {self.index + 1}" if self.index < self.total else "final tuning"

    def on(self, client: Client) -> Round:
        """The round as this client sees it."""
        scale = self.lr_scale * client.lr_scale
        return replace(self, client=client, seeds=self.seeds.of(client.index), lr_scale=scale)


class Tick(NamedTuple):
    """The time of a step: 0-dim tensors, so that a captured step reads their current values."""

    lr_scale: Tensor
    step: Tensor


@dataclass(frozen=True)
class Batch:
    """Some examples.

    Args:
        inputs: the inputs of the model.
        targets: classes, tokens or numbers.
        weight: 1 for each example, 0 for padding.
        index: the positions of the examples in the client's data.
        noise: the seed of what is random in a forward pass (dropout).
    """

    inputs: Tensor
    targets: Tensor
    weight: Tensor
    index: Tensor
    noise: Tensor


class Probe(Protocol):
    """The data that a client may read outside a training step: never test data. Every use is charged in FLOPs."""

    def batch(self) -> Batch:
        """The first batch of a newly shuffled, augmented pass over the training data; charged as one gradient."""
        ...

    def train(self, flops: int | None = None) -> Iterator[Batch]:
        """One pass over the training data in order, not augmented.

        Args:
            flops: what each example is charged; None: one dense forward pass.
        """
        ...

    def validation(self, flops: int | None = None) -> Iterator[Batch]:
        """One pass over the validation data in order, charged as `train` is."""
        ...

    def label_counts(self) -> Tensor:
        """How many training examples of each class there are; not charged."""
        ...

    def uncharged(self) -> Probe:
        """The same data for what is no part of the client's work, such as what a simulated attacker compares with."""
        ...

    def searching(self) -> AbstractContextManager[None]:
        """A block in which a mask is searched: `--profile` shows its time apart from the rest of the method's."""
        ...
