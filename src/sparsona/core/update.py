"""Messages: named trees, each with the support that its values cover."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from sparsona.core.errors import MaskMismatchError, SparsonaError
from sparsona.core.layout import Layout
from sparsona.core.round import Round
from sparsona.core.storage import Stored
from sparsona.core.tree import Tree, counts

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

SERVER = -1


class Support(enum.IntEnum):
    """How the receiver knows which entries the values belong to."""

    DENSE = 0  # all of them
    BITS = 1  # the message has a bitmap
    SEED = 2  # the message has a 16-byte seed, from which the receiver draws the mask
    KNOWN = 3  # the receiver has the mask; the message has its digest only


@dataclass(frozen=True)
class Levels:
    """The scales of quantised values: level v of tensor t means scales[t] * (v - top) / top, with top = 2^(bits-1) - 1.

    Args:
        bits: the bits of a level, 1 to 8. One bit is a sign: its top is a half.
        scales: the largest magnitude of each tensor.
        counts: how many values belong to each tensor: a receiver may have to read them before it has the mask.
    """

    bits: int
    scales: Tensor
    counts: tuple[int, ...]

    @property
    def top(self) -> float:
        """The level of value 0; levels are 0 to twice this."""
        return (1 << self.bits - 1) - 1 or 0.5

    def spread(self) -> Tensor:
        """The scale of each value."""
        import torch

        repeats = torch.tensor(self.counts, dtype=torch.int64).to(self.scales.device)
        return self.scales.repeat_interleave(repeats, output_size=sum(self.counts))


@dataclass(frozen=True)
class Part:
    """One tree of an update, reduced to the values inside its support.

    Make parts with `dense` or `masked`. Between a transform's `send` and its `receive`, values may also be float16,
    bfloat16, or uint8 with `levels`; `plain` converts them to float32.

    Args:
        layout: names and shapes of the tree.
        arrived: the values of a decoded part: one-dimensional, in the layout's order, float32 or bool (one bit each on
            the wire, and until `values` is read); None: they are in `whole`.
        support: which entries there are values for.
        mask: the mask; at a receiver only if the message had it.
        digest: the digest of the mask, where the message had that only.
        seed: the seed of the mask, with support SEED.
        whole: the tree of a part that was not encoded: its values are gathered only when it is.
        levels: the scales of quantised values.
        is_change: the difference to a model rather than a model; not part of the message.
    """

    layout: Layout
    arrived: Tensor | Stored | None = None
    support: Support = Support.DENSE
    mask: Tree | None = None
    digest: bytes = b""
    seed: bytes = b""
    whole: Tree | None = None
    levels: Levels | None = None
    is_change: bool = False

    @property
    def values(self) -> Tensor:
        """The values inside the support; gathered on each call if this part holds a whole tree."""
        if self.arrived is not None:
            return self.arrived.load() if isinstance(self.arrived, Stored) else self.arrived
        assert self.whole is not None
        if self.support is Support.DENSE:
            return self.whole.flat
        assert self.mask is not None
        return self.whole.flat.index_select(0, places(self.mask))

    @property
    def num_values(self) -> int:
        """How many values there are, without gathering them."""
        if self.arrived is not None:
            return prod(self.arrived.shape)
        assert self.whole is not None
        if self.support is Support.DENSE:
            return prod(self.whole.shape)
        assert self.mask is not None
        return sum(counts(self.mask))

    @property
    def dtype(self) -> torch.dtype:
        values = self.arrived if self.whole is None else self.whole
        assert values is not None
        return values.dtype

    def is_finite(self) -> bool:
        """Whether all values are numbers, without gathering them."""
        if self.levels is not None:
            return bool(self.levels.scales.isfinite().all())
        if not self.dtype.is_floating_point:
            return True
        if self.whole is None or self.support is Support.DENSE:
            # A finite sum proves it in a tenth of the time; if the sum overflows, each value is checked.
            return bool(self.values.sum().isfinite()) or bool(self.values.isfinite().all())
        assert self.mask is not None
        return bool((self.whole.flat.isfinite() | ~self.mask.flat).all())

    def tree(self, mask: Tree | None = None) -> Tree:
        """The whole tree, zero outside the support. KNOWN and SEED need the receiver's `mask`."""
        assert self.levels is None, "levels are converted by `plain` before a method reads them"
        if self.support is Support.DENSE:
            return Tree(self.layout, self.values) if self.whole is None else self.whole
        if self.support is Support.BITS:
            mask = self.mask
        elif mask is None:
            raise MaskMismatchError(f"a part with support {self.support.name} needs the receiver's mask to be read")
        # Masks that were not encoded are compared by identity, without loading them.
        elif not (self.mask is not None and self.mask.identity is mask.identity) and mask_digest(mask) != self.proof:
            raise MaskMismatchError("this message assumes a mask that the receiver does not hold")
        assert mask is not None
        # Before anything is allocated: a sender may claim a vast layout beside the digest of the receiver's mask.
        if mask.layout is not self.layout and mask.layout.digest != self.layout.digest:
            raise SparsonaError(
                f"a part of {self.layout.size} entries in {len(self.layout.slots)} tensors for a mask of "
                f"{mask.layout.size} in {len(mask.layout.slots)}",
                expected="the names and shapes of the mask",
                hint="both sides must have the same model",
            )
        if self.whole is not None:
            flat = self.whole.flat
            return Tree(self.layout, flat.where(mask.flat, flat.new_zeros(())))  # the bits of gather and scatter
        where = places(mask)
        if len(where) != self.num_values:
            raise SparsonaError(f"{self.num_values} values for a mask of {len(where)} entries", expected="one each")
        return Tree(self.layout, self.values.new_zeros(self.layout.size).scatter_(0, where, self.values))

    @property
    def is_mask(self) -> bool:
        """Whether the values are flags, which no transform changes."""
        return self.levels is None and not self.dtype.is_floating_point

    @property
    def is_bfloat(self) -> bool:
        """Whether the values are bfloat16."""
        import torch

        return self.dtype is torch.bfloat16

    def plain(self) -> Part:
        """The same part with float32 values (or flags), whatever type they were sent in."""
        import torch

        if self.levels is not None:
            values, top = self.values, self.levels.top
            return self.carrying(self.levels.spread().to(values.device) * ((values.float() - top) / top))
        return self.carrying(self.values.float()) if self.dtype in (torch.float16, torch.bfloat16) else self

    def carrying(self, values: Tensor, levels: Levels | None = None) -> Part:
        """The same part with other values inside its support."""
        return replace(self, arrived=values, whole=None, levels=levels)

    @property
    def proof(self) -> bytes:
        """The digest of the mask that the values assume; computed on first use."""
        return self.digest or (b"" if self.mask is None else mask_digest(self.mask))

    @property
    def bitmap(self) -> Tree | None:
        """The mask, if it is in the message: the one that a receiver may rely on."""
        return self.mask if self.support is Support.BITS else None

    def with_bitmap(self) -> Part:
        """The same part with its mask in the message, for a receiver that does not have it."""
        if self.support in (Support.DENSE, Support.BITS):
            return self
        return replace(self, support=Support.BITS)


def dense(tree: Tree, *, is_change: bool = False) -> Part:
    """A part that covers every entry.

    Args:
        tree: a float32 tree, or a bool tree: a mask, sent as bits.
        is_change: the tree is the difference to a model, rather than a model.

    Returns:
        The part. Its values are not copied.

    Example:
        >>> import torch
        >>> dense(Tree.of({"w": torch.ones(3)})).num_values
        3
    """
    return Part(tree.layout, whole=tree, is_change=is_change)


def masked(
    tree: Tree, mask: Tree, support: Support = Support.KNOWN, seed: bytes = b"", *, is_change: bool = False
) -> Part:
    """A part with the entries of a tree inside a mask.

    Args:
        tree: the values.
        mask: a bool tree of the same layout, true where an entry is sent.
        support: how the receiver gets the mask; KNOWN: it has it already.
        seed: 16 bytes from which the receiver draws the mask, with support SEED.
        is_change: the tree is the difference to a model, rather than a model.

    Returns:
        The part. Its values are not copied.

    Example:
        >>> import torch
        >>> tree = Tree.of({"w": torch.tensor([1.0, 2.0, 3.0])})
        >>> masked(tree, tree.like(tree.flat > 1)).values.tolist()
        [2.0, 3.0]
    """
    return Part(tree.layout, None, support, mask, seed=seed, whole=tree, is_change=is_change)


def places(mask: Tree) -> Tensor:
    """The indices of the entries inside a mask. On a CPU numpy finds them eight times faster than torch."""
    import numpy as np
    import torch

    flags = mask.flat
    if flags.device.type != "cpu":
        return flags.nonzero().squeeze(1)
    return torch.from_numpy(np.flatnonzero(flags.numpy()))


def mask_digest(mask: Tree) -> bytes:
    """Eight bytes that differ between masks; cached, since a mask does not change."""
    if mask.identity.digest is None:
        mask.identity.digest = bits_digest(mask.layout, mask.bits().numpy())
    return mask.identity.digest


def bits_digest(layout: Layout, packed: NDArray[np.uint8]) -> bytes:
    """The digest of the mask that has these bits."""
    found = hashlib.blake2b(layout.digest, digest_size=8)
    found.update(packed.data)
    return found.digest()


@dataclass(frozen=True)
class Update:
    """A message between a client and the server, or between peers; make it with `message`.

    Args:
        sender: the client's index, or `SERVER`.
        round: the round in which it was made.
        weight: the weight of the update in a mean.
        parts: the parts by name.
        compact: it is encoded in as few bytes as its content allows, with the same meaning.
    """

    sender: int
    round: int
    weight: float
    parts: Mapping[str, Part]
    compact: bool = False

    def with_bitmaps(self) -> Update:
        """The same message with all its masks in it, for a receiver that does not have them."""
        return replace(self, parts={name: part.with_bitmap() for name, part in self.parts.items()})

    def owned(self) -> Update:
        """The same message with its numbers in memory of their own: a stack is filled again for the next clients."""
        parts = {
            name: part if part.is_mask else part.carrying(part.values.clone(), part.levels)
            for name, part in self.parts.items()
        }
        return replace(self, parts=parts)


def message(round_: Round, parts: Mapping[str, Part], weight: float = 1.0) -> Update:
    """An update from the client that a round is bound to, or from the server if it is bound to none.

    Args:
        round_: the round that the method was called with.
        parts: the parts by name, made with `dense` or `masked`.
        weight: the weight of the update in a mean.

    Returns:
        The message.

    Example:
        >>> import torch
        >>> from sparsona.core.seeds import Seeds
        >>> round_ = Round(index=3, total=10, lr_scale=1.0, batch_size=16, seeds=Seeds(0))
        >>> update = message(round_, {"model": dense(Tree.of({"w": torch.ones(3)}))})
        >>> update.sender == SERVER, update.round
        (True, 3)
    """
    return Update(SERVER if round_.client is None else round_.client.index, round_.index, weight, parts)


@dataclass(frozen=True)
class PartSize:
    """The size of one part of a message, known before training: enough to count its bytes exactly.

    Args:
        name: the name of the part.
        layout: names and shapes of its tree.
        num_values: how many values are sent.
        support: how the receiver knows their entries.
        is_mask: the values are flags of one bit.
        bits: of a float value: 32, 16 (half precision), or 1 to 8 (levels, with a scale per tensor).
        is_change: as in `Part`.
        ones: how many entries of each tensor the support covers, or how many flags of a mask are true, where that is
            known before training; not part of the message. An arriving message is held to it.
        is_bfloat: the values of 16 bits are bfloat16, not float16.
    """

    name: str
    layout: Layout
    num_values: int
    support: Support = Support.DENSE
    is_mask: bool = False
    bits: int = 32
    is_change: bool = False
    ones: tuple[int, ...] | None = None
    is_bfloat: bool = False


@dataclass(frozen=True)
class Cost:
    """What one client costs in one round. Bytes follow from the sizes of the messages.

    Args:
        down: the message to the client; None: nothing is sent. For peers it is None: a peer receives what its
            neighbours send.
        up: the message from the client; None: nothing is sent.
        train_flops: FLOPs of the phases.
        search_flops: FLOPs outside of training steps, such as those of a mask search.
        exact: False if the figures depend on training; the rule's card says how.
        kept: what stays on the client between rounds, without BatchNorm statistics.
        infer_flops: FLOPs of one prediction; None: one dense forward pass.
        at_work: what is held in training besides `kept` and `down`; the part "gradient" is replaced by a dense one
            while masks are searched by gradient. None: a dense gradient.
        mixing: what a peer holds of its neighbours' messages besides `kept`.
        tune_flops: FLOPs of one epoch of final tuning; None: three predictions an example.
        requests: how many peers' messages a client requests in a round at most, where the method has `PeerHalf.wants`.
        tune_search_flops: FLOPs of final tuning outside of training steps, whatever its epochs.
        message_flops: what each message that a peer receives adds to these and to `search_flops`, which include it for
            `requests` messages; with `tune_from=all` more arrive.
        compact: messages are encoded compactly: `up` and `down` say what they hold, and at most how many bytes they
            take.
    """

    down: tuple[PartSize, ...] | None
    up: tuple[PartSize, ...] | None
    train_flops: int
    search_flops: int = 0
    exact: bool = True
    kept: tuple[PartSize, ...] = ()
    infer_flops: int | None = None
    at_work: tuple[PartSize, ...] | None = None
    mixing: tuple[PartSize, ...] = ()
    tune_flops: int | None = None
    requests: int | None = None
    tune_search_flops: int = 0
    message_flops: int = 0
    compact: bool = False


Inbox = Iterable[Update]
