"""What may stand between `finish` and the wire, and between the wire and `add`, whatever the method is.

Transforms make a chain: a sender goes through it in order, a receiver backwards. Free of torch, as costs are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, Protocol

from sparsona.core.errors import SparsonaError
from sparsona.core.round import Round
from sparsona.core.tree import Tree
from sparsona.core.update import PartSize, Update

Way = Literal["up", "down", "both"]
# What a transform keeps between a client's turns, by a name of its own choice; nothing before the first one. It is
# provisional as the client's State is: it stays as it was if the message is lost, and a stateless client has none.
Memory = Mapping[str, Tree]


class Transform(Protocol):
    """A frozen value that changes messages.

    `send` sees the float32 values that a method or the transform before it gave (flags of masks pass untouched) and
    returns the message to send and what to keep; `receive` gives float32 values back. `size` is what `send` makes of
    one part, known before training. Draws are named: `round.seeds`, never a global generator.
    """

    @property
    def name(self) -> str:
        """The row in the table of transforms."""
        ...

    @property
    def way(self) -> Way:
        """Whose messages it changes: the clients' (up), the server's (down), or both. Peers' messages are up."""
        ...

    @property
    def for_changes(self) -> bool:
        """Whether it makes sense only for a change of a model, not for a model."""
        ...

    def describe(self) -> str:
        """A few words for the protocol of a run."""
        ...

    def send(self, update: Update, memory: Memory, round_: Round) -> tuple[Update, Memory]: ...

    def receive(self, update: Update, round_: Round) -> Update: ...

    def size(self, part: PartSize) -> PartSize: ...


Chain = Sequence[Transform]


def upward(chain: Chain) -> Chain:
    """The transforms of clients' messages."""
    return tuple(transform for transform in chain if transform.way != "down")


def downward(chain: Chain) -> Chain:
    """The transforms of the server's messages."""
    return tuple(transform for transform in chain if transform.way != "up")


def send(chain: Chain, update: Update, memory: Memory, round_: Round) -> tuple[Update, Memory]:
    """What is sent in place of `update`, and what the sender keeps."""
    kept: dict[str, Tree] = {}
    for place, transform in enumerate(chain):
        if transform.for_changes:
            for name, part in update.parts.items():
                if not part.is_mask:
                    _check_change(transform, name, part.is_change)
        start = f"{place}/"
        own = {key.removeprefix(start): value for key, value in memory.items() if key.startswith(start)}
        update, own_next = transform.send(update, own, round_)
        kept |= {f"{start}{key}": value for key, value in own_next.items()}
    return update, kept


def receive(chain: Chain, update: Update, round_: Round) -> Update:
    """What a method reads of what was sent: float32 values and flags."""
    for transform in reversed(chain):
        update = transform.receive(update, round_)
    return update


def sizes(chain: Chain, parts: tuple[PartSize, ...]) -> tuple[PartSize, ...]:
    """What a message will hold once it went through the chain. Refuses a model where only a change makes sense."""
    for transform in chain:
        if transform.for_changes:
            for part in parts:
                if not part.is_mask:
                    _check_change(transform, part.name, part.is_change)
        parts = tuple(part if part.is_mask else transform.size(part) for part in parts)
    return parts


def plain(update: Update) -> Update:
    """An update whose parts hold float32 values or flags, whatever form they travelled in."""
    parts = {name: part.plain() for name, part in update.parts.items()}
    return update if all(parts[name] is part for name, part in update.parts.items()) else replace(update, parts=parts)


def _check_change(transform: Transform, part: str, is_change: bool) -> None:
    if not is_change:
        raise SparsonaError(
            f"the transform '{transform.name}' for part '{part}', which is a model",
            expected="a method that sends changes, such as fedspa or pfedgate",
            mend="use 'half' or 'quantize', which are for models, too",
        )
