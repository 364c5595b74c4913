"""Named seeds for every random draw. The global generator is never used."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Generator


@dataclass(frozen=True)
class Seeds:
    """Seeds derived from a root by purpose, so that adding a draw never changes another one.

    Args:
        root: the seed of the run.
        client: the client that `own` seeds are for; None: the server.
        round: the round that all seeds are for; None: none, as before the first round.
        key: what a client on a machine of its own adds to `secret` seeds; in a simulation nothing, and they repeat.

    Example:
        >>> seeds = Seeds(0).at(3)
        >>> seeds.of(1).shared("mask") == seeds.of(2).shared("mask")
        True
        >>> seeds.of(1).own("mask") == seeds.of(2).own("mask")
        False
    """

    root: int
    client: int | None = None
    round: int | None = None
    key: bytes = field(default=b"", repr=False)

    def at(self, round_index: int) -> Seeds:
        """The seeds of a round."""
        return replace(self, round=round_index)

    def of(self, client: int) -> Seeds:
        """The same seeds, bound to a client."""
        return replace(self, client=client)

    def shared(self, purpose: str) -> int:
        """The seed of a draw that server and clients have in common.

        Args:
            purpose: the name of the draw.

        Returns:
            A whole number of 63 bits.
        """
        return self._derive(purpose, None)

    def own(self, purpose: str) -> int:
        """The seed of a draw that differs from client to client.

        Args:
            purpose: the name of the draw.

        Returns:
            A whole number of 63 bits.

        Raises:
            ValueError: the seeds are not bound to a client.
        """
        if self.client is None:
            raise ValueError("a server has no draws of its own: use shared(purpose)")
        return self._derive(purpose, self.client)

    def secret(self, purpose: str) -> int:
        """The seed of a draw that nobody but this client may repeat, such as noise that hides what it learned.

        Args:
            purpose: the name of the draw.

        Returns:
            A whole number of 63 bits; in a simulation that of `own`.
        """
        if self.client is None:
            raise ValueError("a server has no secrets: use shared(purpose)")
        return self._derive(purpose, self.client, self.key)

    def _derive(self, purpose: str, client: int | None, key: bytes = b"") -> int:
        text = f"{self.root}/{self.round}/{client}/{purpose}"
        # 63 bits: a torch.Generator and an SQLite integer both accept them.
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, key=key).digest(), "little") >> 1


def generator(seed: int) -> Generator:
    """A new CPU generator.

    Args:
        seed: such as `round.seeds.own("mask")`.

    Returns:
        A torch.Generator with this seed.

    Example:
        >>> import torch
        >>> first, second = (torch.rand(3, generator=generator(Seeds(0).shared("mask"))) for _ in range(2))
        >>> torch.equal(first, second)
        True
    """
    import torch

    return torch.Generator().manual_seed(seed)
