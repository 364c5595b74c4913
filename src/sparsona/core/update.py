"""The only thing that travels: named trees, each with the support on which its values live."""

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
from sparsona.core.tree import Tree, counts

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SERVER = -1


class Support(enum.IntEnum):
    """How the receiver learns which entries the values belong to."""

    DENSE = 0  # all of them
    BITS = 1  # a bitmap travels along
    SEED = 2  # a 16-byte seed travels along, from which the receiver draws the mask
    KNOWN = 3  # the receiver has the mask; only its digest travels


@dataclass(frozen=True)
class Levels:
    """How quantised values are read: level v of tensor t stands for scales[t] * (v - top) / top, top = 2^(bits-1) - 1.

    One bit is a sign: its top is a half, so that its levels stand for -scales[t] and scales[t].
    `counts` says how many values belong to each tensor: a receiver may have to read them before it knows the mask.
    """

    bits: int
    scales: Tensor
    counts: tuple[int, ...]

    @property
    def top(self) -> float:
        """The highest step of a scale; levels are 0 to twice this."""
        return (1 << self.bits - 1) - 1 or 0.5

    def spread(self) -> Tensor:
        """The scale of each value."""
        import torch

        repeats = torch.tensor(self.counts, dtype=torch.int64).to(self.scales.device)
        return self.scales.repeat_interleave(repeats, output_size=sum(self.counts))


@dataclass(frozen=True)
class Part:
    """One tree of an update, reduced to the values inside its support.

    `values` is one-dimensional, in the layout's order: float32, or bool (one bit each on the wire). `mask` is there at
    the sender, and at the receiver if it travelled; `digest` is what arrived of it otherwise. A part that never left
    this process holds the `whole` tree: its values are gathered only if it is encoded. Between a transform's `send` and
    its `receive`, values may also be float16, or uint8 with the `levels` they stand for; `plain` reads them.
    `is_change`: the difference to a model rather than a model; it does not travel.
    """

    layout: Layout
    arrived: Tensor | None = None
    support: Support = Support.DENSE
    mask: Tree | None = None
    digest: bytes = b""
    seed: bytes = b""
    whole: Tree | None = None
    levels: Levels | None = None
    is_change: bool = False

    @property
    def values(self) -> Tensor:
        """The values inside the support; gathered anew each time if this part holds a whole tree."""
        if self.arrived is not None:
            return self.arrived
        assert self.whole is not None
        if self.support is Support.DENSE:
            return self.whole.flat
        assert self.mask is not None
        return self.whole.flat.index_select(0, places(self.mask))

    @property
    def num_values(self) -> int:
        """How many values there are, without gathering them."""
        if self.arrived is not None:
            return self.arrived.numel()
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
            # A sum of numbers is one, in a tenth of the time; if it is too large to be, look at each.
            return bool(self.values.sum().isfinite()) or bool(self.values.isfinite().all())
        assert self.mask is not None
        return bool((self.whole.flat.isfinite() | ~self.mask.flat).all())

    def tree(self, mask: Tree | None = None) -> Tree:
        """The whole tree, zero outside the support. KNOWN and SEED need the receiver's `mask`."""
        assert self.levels is None, "levels are read by `plain`, before a method sees them"
        if self.support is Support.DENSE:
            return Tree(self.layout, self.values) if self.whole is None else self.whole
        if self.support is Support.BITS:
            mask = self.mask
        elif mask is None:
            raise MaskMismatchError(f"a part with support {self.support.name} needs the receiver's mask to be read")
        # A mask that never left this process need not be read to be known.
        elif not (self.mask is not None and self.mask.identity is mask.identity) and mask_digest(mask) != self.proof:
            raise MaskMismatchError("this message assumes a mask that the receiver does not hold")
        assert mask is not None
        if self.whole is not None:
            flat = self.whole.flat
            return Tree(self.layout, flat.where(mask.flat, flat.new_zeros(())))  # the bits of gather and scatter
        where = places(mask)
        if len(where) != self.num_values:
            raise SparsonaError(f"{self.num_values} values for a mask of {len(where)} entries", expected="one each")
        return Tree(self.layout, self.values.new_zeros(self.layout.size).scatter_(0, where, self.values))

    @property
    def is_mask(self) -> bool:
        """Whether the values are flags, which no transform touches."""
        return self.levels is None and not self.dtype.is_floating_point

    def plain(self) -> Part:
        """The same part with float32 values (or flags), whatever form they travelled in."""
        import torch

        if self.levels is not None:
            values, top = self.values, self.levels.top
            return self.carrying(self.levels.spread().to(values.device) * ((values.float() - top) / top))
        return self.carrying(self.values.float()) if self.dtype is torch.float16 else self

    def carrying(self, values: Tensor, levels: Levels | None = None) -> Part:
        """The same part with other values inside its support."""
        return replace(self, arrived=values, whole=None, levels=levels)

    @property
    def proof(self) -> bytes:
        """The digest of the mask that the values assume; worked out only when somebody asks."""
        return self.digest or (b"" if self.mask is None else mask_digest(self.mask))

    @property
    def bitmap(self) -> Tree | None:
        """The mask, if it travels along: what a receiver may go by."""
        return self.mask if self.support is Support.BITS else None

    def with_bitmap(self) -> Part:
        """The same part with its mask sent along, for a receiver that lost it."""
        if self.support in (Support.DENSE, Support.BITS):
            return self
        return replace(self, support=Support.BITS)


def dense(tree: Tree, *, is_change: bool = False) -> Part:
    """A part that covers every entry; a bool tree is a mask that travels as bits."""
    return Part(tree.layout, whole=tree, is_change=is_change)


def masked(
    tree: Tree, mask: Tree, support: Support = Support.KNOWN, seed: bytes = b"", *, is_change: bool = False
) -> Part:
    """The entries of `tree` where the bool tree `mask` is true."""
    return Part(tree.layout, None, support, mask, seed=seed, whole=tree, is_change=is_change)


def places(mask: Tree) -> Tensor:
    """Indices of the entries inside a mask. On a CPU numpy finds them eight times faster than torch."""
    import numpy as np
    import torch

    flags = mask.flat
    if flags.device.type != "cpu":
        return flags.nonzero().squeeze(1)
    return torch.from_numpy(np.flatnonzero(flags.numpy()))


def mask_digest(mask: Tree) -> bytes:
    """Eight bytes that tell masks apart; remembered, since a mask is a value."""
    if mask.identity.digest is None:
        text = mask.layout.digest + mask.bits().numpy().tobytes()
        mask.identity.digest = hashlib.blake2b(text, digest_size=8).digest()
    return mask.identity.digest


@dataclass(frozen=True)
class Update:
    """A message between a client and the server, or between peers."""

    sender: int
    round: int
    weight: float
    parts: Mapping[str, Part]

    def with_bitmaps(self) -> Update:
        return replace(self, parts={name: part.with_bitmap() for name, part in self.parts.items()})


def message(round_: Round, parts: Mapping[str, Part], weight: float = 1.0) -> Update:
    """An update from whoever this round is bound to: a client, or the server."""
    return Update(SERVER if round_.client is None else round_.client.index, round_.index, weight, parts)


@dataclass(frozen=True)
class PartSize:
    """What one part of a message will hold, known before training: enough to count its bytes exactly."""

    name: str
    layout: Layout
    num_values: int
    support: Support = Support.DENSE
    is_mask: bool = False
    bits: int = 32  # of a float value: 32, 16 (half precision), or 1 to 8 (levels, with a scale per tensor)
    is_change: bool = False


@dataclass(frozen=True)
class Cost:
    """What one client costs in one round. Bytes follow from the messages; None means that nothing is sent.

    `exact` False: training decides, and the rule's card says how these figures stand to it. For peers `down` is None:
    what a peer is sent is what its neighbours send, and `mixing` is what it holds of that besides `kept`. `kept` is
    what stays on the client between rounds, BatchNorm statistics aside. `at_work` is what is held besides `kept` and
    `down` while training, the part "gradient" giving way to a dense one while masks are searched by it; None: a dense
    gradient. `infer_flops` is what one prediction costs; None: one dense forward pass. `tune_flops` is what one epoch
    of final tuning costs; None: three predictions an example.
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


Inbox = Iterable[Update]
