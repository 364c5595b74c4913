"""Every random draw has a name. Nothing touches the global generator."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Generator


@dataclass(frozen=True)
class Seeds:
    """Seeds derived from a root by purpose, so that adding a draw never shifts another.

    `shared(purpose)` is the same for server and every client; `own(purpose)` differs by client. `at(round)` makes both
    differ by round as well.
    """

    root: int
    client: int | None = None
    round: int | None = None

    def at(self, round_index: int) -> Seeds:
        return replace(self, round=round_index)

    def of(self, client: int) -> Seeds:
        return replace(self, client=client)

    def shared(self, purpose: str) -> int:
        return self._derive(purpose, None)

    def own(self, purpose: str) -> int:
        if self.client is None:
            raise ValueError("a server has no draws of its own: use shared(purpose)")
        return self._derive(purpose, self.client)

    def _derive(self, purpose: str, client: int | None) -> int:
        text = f"{self.root}/{self.round}/{client}/{purpose}"
        # 63 bits: what a torch.Generator and an SQLite integer both take.
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int) -> Generator:
    """A CPU generator of its own for this seed."""
    import torch

    return torch.Generator().manual_seed(seed)
