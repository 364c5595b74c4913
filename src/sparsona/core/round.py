"""Who takes part, when, and what a client may look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from sparsona.core.seeds import Seeds

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Client:
    """A participant: its index among how many, how much data it has, and the density its device can hold."""

    index: int
    num_examples: int  # for training
    capacity: float = 1.0
    num_validation: int = 0
    num_clients: int = 1


def client_kinds(clients: Iterable[Client]) -> Iterator[tuple[Client, int]]:
    """One client of each kind, and how many there are of it: costs follow from capacity and amounts of data."""
    first: dict[tuple[float, ...], Client] = {}
    counts: Counter[tuple[float, ...]] = Counter()
    for client in clients:
        kind = (client.capacity, client.num_examples, client.num_validation)
        first.setdefault(kind, client)
        counts[kind] += 1
    return ((client, counts[kind]) for kind, client in first.items())


@dataclass(frozen=True)
class Round:
    """Where a run stands. On a client, `client` is that client and `seeds` is bound to it; on the server it is None.

    `is_new`: the client's State is fresh, made by `init_client` for this very turn.
    """

    index: int
    total: int
    lr_scale: float
    batch_size: int
    seeds: Seeds
    client: Client | None = None
    is_new: bool = False

    def on(self, client: Client) -> Round:
        return replace(self, client=client, seeds=self.seeds.of(client.index))


class Tick(NamedTuple):
    """What an update may know of time: 0-dim tensors, so that a captured step sees them change."""

    lr_scale: Tensor
    step: Tensor


@dataclass(frozen=True)
class Batch:
    """Some examples. `weight` is 0 for padding; `index` says which of the client's examples these are; `noise` seeds
    whatever is random in a forward pass (dropout)."""

    inputs: Tensor
    targets: Tensor
    weight: Tensor
    index: Tensor
    noise: Tensor


class Probe(Protocol):
    """What a client may read outside a training step. Never test data; every use is charged to FLOPs."""

    def batch(self) -> Batch:
        """The first batch of a freshly shuffled, augmented pass over the training data; charged as one gradient."""
        ...

    def train(self, flops: int | None = None) -> Iterator[Batch]:
        """One pass over the training data in order, not augmented.

        Args:
            flops: what is done with each example; None: one dense forward pass.
        """
        ...

    def validation(self, flops: int | None = None) -> Iterator[Batch]:
        """One pass over the validation data in order, charged as `train` is."""
        ...

    def label_counts(self) -> Tensor:
        """How many training examples of each class there are; costs nothing."""
        ...
