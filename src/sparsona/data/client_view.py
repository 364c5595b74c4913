"""One client of a federation, to inspect: its name, its sizes, its examples on request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparsona.data.client_index import PARTS
from sparsona.data.names import name_of

if TYPE_CHECKING:
    from torch import Tensor

    from sparsona.data.batches import Examples
    from sparsona.data.federation import Federation


@dataclass(frozen=True, eq=False, repr=False)
class ClientView:
    """A client of a federation. `federation["hospital-3"]` and `federation[3]` return it; it copies nothing.

    Args:
        federation: whose client it is.
        index: its number.

    Example:
        >>> import numpy as np
        >>> import sparsona as sp
        >>> x, y = np.eye(12), np.arange(12) % 2
        >>> federation = sp.Federation.from_clients({"north": (x, y), "south": (x, y)})
        >>> federation["south"]
        Client 1 'south': 8 train, 1 validation, 3 test
        >>> federation["south"].label_counts("test").tolist()
        [2, 1]
    """

    federation: Federation
    index: int

    @property
    def name(self) -> str:
        """Its name, or its number as text where clients have no names."""
        return name_of(self.federation.client_names, self.index)

    @property
    def sizes(self) -> dict[str, int]:
        """How many examples it trains, validates and is tested on."""
        return dict(zip(PARTS, self.federation.sizes()[self.index].tolist(), strict=True))

    def examples(self, part: str) -> Examples:
        """A copy of its examples: see `Federation.examples`."""
        return self.federation.examples(self.index, part)

    def label_counts(self, part: str = "train") -> Tensor | None:
        """How many examples of each class it has; None if tokens or numbers are predicted."""
        counts = self.federation.label_counts(part)
        return None if counts is None else counts[self.index]

    def __repr__(self) -> str:
        name = f" '{self.name}'" if self.federation.client_names else ""
        return f"Client {self.index}{name}: {', '.join(f'{count} {part}' for part, count in self.sizes.items())}"
