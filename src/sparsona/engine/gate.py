"""The gate: an arriving update is held against what its method's `cost` says that this client sends.

A message that decodes well can still do harm: a mask of all ones, a weight of 1e300, values of another layout. The gate
refuses it before a server adds it or a peer mixes it. It reads values once and copies none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import isfinite

from sparsona.core.errors import SparsonaError
from sparsona.core.round import Client
from sparsona.core.tree import counts
from sparsona.core.update import Cost, Part, PartSize, Support, Update
from sparsona.wire.codec import decode
from sparsona.wire.format import message_size, short, sizes_of

MAX_MAGNITUDE = 1e3  # weights and changes of a model that learns are far below


class RefusedError(SparsonaError):
    """An update that its sender's method would not have made."""


def largest_message(expected: tuple[PartSize, ...]) -> int:
    """The most bytes that a message with these parts can have: a longer one need not be read to its end.

    Args:
        expected: the parts, `Cost.up` of the sender.

    Returns:
        The number of bytes.

    Example:
        >>> from sparsona.core.layout import Layout, Slot
        >>> largest_message((PartSize("model", Layout((Slot("w", (3,)),)), num_values=3),))
        72
    """
    return message_size(expected)


def check_message(message: bytes, cost: Cost, *, client: Client, round: int) -> Update:  # noqa: A002 (as below)
    """Read a message. One that a client cannot have made honestly is refused, and read no further than that takes.

    Args:
        message: the bytes, as they arrived.
        cost: what the client's turn costs.
        client: the client that it must be from.
        round: the round in which it must have been made.

    Returns:
        The update in it.

    Raises:
        SparsonaError: names what is wrong with it.
    """
    if cost.up is None:
        raise RefusedError("a message where none is sent", expected="none")
    update = decode(message, cost.up)
    check_update(update, cost.up, client=client, round=round, exact=cost.exact)
    return update


def check_update(
    update: Update,
    expected: tuple[PartSize, ...],
    *,
    client: Client,
    round: int,  # noqa: A002 (what a message calls it)
    exact: bool,
    max_magnitude: float = MAX_MAGNITUDE,
) -> None:
    """Refuse an update that a client cannot have made honestly.

    Args:
        update: the update, as it arrived: before transforms are undone.
        expected: the parts that the client sends, `Cost.up` of its turn (for peers: of the sender's).
        client: the client that it must be from. A weight is at most its number of examples (or 1, where all weigh the
            same), and 0 only without examples.
        round: the round in which it must have been made.
        exact: `Cost.exact`. Otherwise training decides how many values are sent: at most as many as expected, and a
            mask only if it changed.
        max_magnitude: the largest magnitude of a value. Counts of examples are allowed whatever it is.

    Raises:
        RefusedError: names what is not as expected.

    Example:
        >>> import torch
        >>> from sparsona.core.tree import Tree
        >>> from sparsona.core.update import dense
        >>> tree = Tree.of({"w": torch.ones(3)})
        >>> expected = (PartSize("model", tree.layout, num_values=3),)
        >>> update = Update(sender=0, round=4, weight=10.0, parts={"model": dense(tree)})
        >>> check_update(update, expected, client=Client(0, num_examples=10), round=4, exact=True)
        >>> check_update(update, expected, client=Client(0, num_examples=9), round=4, exact=True)
        Traceback (most recent call last):
        ...
        sparsona.engine.gate.RefusedError: client 0's update in round 5 was refused: weight 10
          expected: at most its 9 examples
          hint:     ...
    """

    def refuse(what: str, wanted: str) -> RefusedError:
        return RefusedError(
            f"client {client.label}'s update in round {round + 1} was refused: {what}",
            expected=wanted,
            hint="the client must run the same method, options and version; if its training diverged, lower --lr or "
            "clip gradients (--set clip_norm=1)",
        )

    if (update.sender, update.round) != (client.index, round):
        raise refuse(
            f"it says client {update.sender}, round {update.round + 1}",
            f"its own sender and round: {client.index}, {round + 1}",
        )
    weight, most = update.weight, max(1, client.num_examples)
    if not (isfinite(weight) and 0 <= weight <= most):
        raise refuse(f"weight {weight:g}", f"at most its {client.num_examples} examples")
    if weight == 0 and client.num_examples:
        raise refuse("weight 0", f"more than 0 from a client with {client.num_examples} examples")
    wanted = {part.name: part for part in expected}
    if update.parts.keys() != wanted.keys():
        raise refuse(f"it has the parts {_names(update.parts)}", _names(wanted))
    for arrived in sizes_of(update):
        name, size, part = short(arrived.name), wanted[arrived.name], update.parts[arrived.name]
        if arrived.layout is not size.layout and arrived.layout.digest != size.layout.digest:
            raise refuse(f"part {name} has a layout of {arrived.layout.size} entries", _entries(size))
        if not _supports(arrived.support, size.support, exact):
            raise refuse(f"part {name} has support {arrived.support.name}", size.support.name)
        if not _is_of_type(arrived, size):
            raise refuse(f"part {name} has {_kind(arrived)}", _kind(size))
        if arrived.num_values != size.num_values if exact else arrived.num_values > size.num_values:
            amount = "" if exact else "at most "
            raise refuse(f"part {name} has {arrived.num_values} values", f"{amount}{size.num_values}")
        found = None if size.ones is None else _covered(part)
        if found is not None and found != size.ones:
            tensor, got, due = _first_difference(size, found)
            raise refuse(f"part {name} has {got} ones in tensor {short(tensor)}", f"{due}")
        limit = max(max_magnitude, client.num_examples)
        if not part.is_mask and not _is_within(part, limit):
            raise refuse(f"part {name} has values that are not finite or too large", f"magnitudes of at most {limit:g}")


def _supports(found: Support, wanted: Support, exact: bool) -> bool:
    """A method that sends a mask where it changed has BITS in its cost, and may send KNOWN."""
    return found is wanted or (not exact and wanted is Support.BITS and found is Support.KNOWN)


def _is_of_type(found: PartSize, wanted: PartSize) -> bool:
    """Whether all that is left of two sizes is the same: the type of their values."""
    same = replace(
        found,
        layout=wanted.layout,
        num_values=wanted.num_values,
        support=wanted.support,
        is_change=wanted.is_change,
        ones=wanted.ones,
    )
    return same == wanted


def _covered(part: Part) -> tuple[int, ...] | None:
    """How many entries of each tensor a part covers, or how many of its flags are true, as far as it says so."""
    if part.is_mask and part.support is Support.DENSE and part.whole is not None:
        return counts(part.whole)
    if part.levels is not None:
        return part.levels.counts
    return None if part.mask is None else counts(part.mask)


def _is_within(part: Part, limit: float) -> bool:
    """Whether no magnitude is above a limit. The comparison is false for what is not a number."""
    values = part.values if part.levels is None else part.levels.scales
    if not values.numel():
        return True
    low, high = (float(end) for end in values.aminmax())
    return -limit <= low and high <= limit


def _first_difference(size: PartSize, found: tuple[int, ...]) -> tuple[str, int, int]:
    assert size.ones is not None
    trios = zip(size.layout.names, found, size.ones, strict=True)
    return next((name, got, due) for name, got, due in trios if got != due)


def _names(parts: Iterable[str]) -> str:
    return ", ".join(short(name) for name in list(parts)[:8]) or "none"


def _entries(size: PartSize) -> str:
    return f"the model's layout of {size.layout.size} entries in {len(size.layout.slots)} tensors"


def _kind(size: PartSize) -> str:
    return "flags of one bit" if size.is_mask else f"numbers of {size.bits} bits{' (bfloat16)' * size.is_bfloat}"
