"""Which examples each client trains, validates and tests on: one index for all clients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from sparsona.data.pool import Array


@dataclass(frozen=True, eq=False)
class Split:
    """Which examples of the pool a client trains, validates and tests on: int64 indices, without overlap.

    Two clients' test examples may be the same, if they were drawn from one published test set.
    """

    train: Tensor
    validation: Tensor
    test: Tensor


PARTS = tuple(field.name for field in fields(Split))


class ClientIndex(Sequence[Split]):
    """The Split of every client: all indices end to end, and how many each client has of each part.

    Three small tensors for each of 100,000 clients would take longer to make than the rest of the start together.
    """

    def __init__(self, entries: Tensor, sizes: Array, on_host: Tensor | None = None) -> None:
        self.entries, self.sizes = entries, sizes  # int64 [entries]; int64 [clients, parts], on the host
        self.on_host = entries.cpu() if on_host is None else on_host
        self._ends = np.concatenate([[0], np.cumsum(sizes)])

    @classmethod
    def of(cls, splits: Iterable[Split | tuple[Array, ...]]) -> ClientIndex:
        """From one Split, or three arrays, for each client."""
        parts: list[Any] = []
        for split in splits:
            parts.extend(split if isinstance(split, tuple) else (split.train, split.validation, split.test))
        sizes = np.array([len(part) for part in parts], dtype=np.int64).reshape(-1, len(PARTS))
        arrays = [part.cpu().numpy() if isinstance(part, Tensor) else part for part in parts]
        index = np.concatenate(arrays) if arrays else np.zeros(0, np.int64)
        device = parts[0].device if parts and isinstance(parts[0], Tensor) else "cpu"
        return cls(torch.from_numpy(index.astype(np.int64, copy=False)).to(device), sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, place: int) -> Split: ...
    @overload
    def __getitem__(self, place: slice) -> ClientIndex: ...
    def __getitem__(self, place: int | slice) -> Split | ClientIndex:
        if isinstance(place, slice):
            return ClientIndex.of([self[k] for k in range(len(self))[place]])
        client = range(len(self))[place]
        return Split(*(self.part(client, number) for number in range(len(PARTS))))

    @property
    def is_filled(self) -> bool:
        """Whether the indices are here, and not only how many each client has."""
        return len(self.on_host) == int(self._ends[-1])

    def part(self, client: int, number: int) -> Tensor:
        """The indices of one client's part, by the part's number."""
        at = client * len(PARTS) + number
        return self.entries[self._ends[at] : self._ends[at + 1]]

    def train_on_host(self, client: int) -> Tensor:
        """A client's training examples as indices on the host, whatever device the others are on."""
        at = client * len(PARTS) + PARTS.index("train")
        return self.on_host[self._ends[at] : self._ends[at + 1]]

    def clients_of(self, part: str) -> tuple[Array, Array]:
        """For each entry of that part, in order, the client and the example."""
        number = PARTS.index(part)
        owner = np.repeat(np.arange(self.sizes.size), self.sizes.reshape(-1))
        chosen = owner % len(PARTS) == number
        return owner[chosen] // len(PARTS), self.on_host.numpy()[chosen]

    def to(self, device: torch.device) -> ClientIndex:
        return ClientIndex(self.entries.to(device), self.sizes, self.on_host)
