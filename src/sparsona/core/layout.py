"""Names, shapes and positions of the tensors inside one flat buffer. Free of torch, so that costs need none."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property


@dataclass(frozen=True)
class Slot:
    """One named tensor of a layout, and what a non-zero entry of it costs in a forward pass.

    Args:
        name: the name of the parameter or buffer.
        shape: its shape.
        flops_per_weight: counted per example as the papers do: twice the output positions for the weight of a
            convolution or linear layer, once for its bias, nothing for norms.
        bias_counts_dense: True for convolution biases, which the papers' counter charges in full whatever their mask.
    """

    name: str
    shape: tuple[int, ...]
    flops_per_weight: int = 0
    bias_counts_dense: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Frozen:
    """What a model has besides the tensors of its layout: parameters that are neither trained nor sent.

    Args:
        size: how many there are.
        flops: what they add to one example's forward pass.
        gradient_flops: what they add to its backward pass: the gradient of their layers' inputs, where a trained
            parameter needs it.
    """

    size: int = 0
    flops: int = 0
    gradient_flops: int = 0


NOTHING_FROZEN = Frozen()


@dataclass(frozen=True)
class Layout:
    """The order of named tensors in a flat buffer. Two trees of equal layout can be added entry by entry.

    Args:
        slots: the tensors.
        frozen: what a model with these parameters has besides them. It counts in costs, and makes no layouts unequal.
    """

    slots: tuple[Slot, ...]
    frozen: Frozen = field(default=NOTHING_FROZEN, compare=False)

    def __hash__(self) -> int:
        return self._hash  # cached: layouts are keys of caches that are read for every client

    def __getstate__(self) -> dict[str, object]:
        return {"slots": self.slots, "frozen": self.frozen}  # not the hash: it differs between processes

    @cached_property
    def _hash(self) -> int:
        return hash(self.slots)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(slot.name for slot in self.slots)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(slot.size for slot in self.slots)

    @cached_property
    def size(self) -> int:
        return sum(self.sizes)

    @cached_property
    def place(self) -> dict[str, int]:
        return {slot.name: position for position, slot in enumerate(self.slots)}

    @cached_property
    def digest(self) -> bytes:
        """Eight bytes that differ when names, order or shapes differ (costs are not included)."""
        # Names are preceded by their length, so that no name can be mistaken for a name and a shape.
        text = ";".join(f"{len(slot.name)}:{slot.name}:{','.join(map(str, slot.shape))}" for slot in self.slots)
        return hashlib.blake2b(text.encode(), digest_size=8).digest()

    def select(self, names: Iterable[str]) -> Layout:
        """The layout of some of the tensors, in this layout's order whatever order `names` has."""
        wanted = set(names)
        missing = wanted - set(self.names)
        if missing:
            raise KeyError(f"no tensor named {sorted(missing)} in this layout")
        return Layout(tuple(slot for slot in self.slots if slot.name in wanted))

    def keep(self, counts: Iterable[int]) -> Layout:
        """The layout of a sub-network that keeps so many entries of each tensor: a tensor that is not whole becomes a
        vector of them."""
        kept = tuple(
            slot if count == slot.size else replace(slot, shape=(count,))
            for slot, count in zip(self.slots, counts, strict=True)
        )
        return replace(self, slots=kept)

    def forward_flops(self, nonzeros: Iterable[int] | None = None) -> int:
        """FLOPs of one example's forward pass, given the number of non-zero entries per tensor (dense if None).

        Frozen parameters are included.
        """
        counts = self.sizes if nonzeros is None else tuple(nonzeros)
        if len(counts) != len(self.slots):
            raise ValueError(f"{len(counts)} counts for {len(self.slots)} tensors")
        return self.frozen.flops + sum(
            slot.flops_per_weight * (slot.size if slot.bias_counts_dense else count)
            for slot, count in zip(self.slots, counts, strict=True)
        )

    def train_flops(self, nonzeros: Iterable[int] | None = None) -> int:
        """FLOPs of training on one example, given the number of non-zero entries per tensor (dense if None)."""
        return self.with_backward(self.forward_flops(nonzeros))

    def with_backward(self, forward: int) -> int:
        """FLOPs of training on one example whose forward pass takes so many.

        The backward pass takes twice as many, half of them for the gradients of weights, which frozen ones do not have.
        """
        return 3 * forward - 2 * self.frozen.flops + self.frozen.gradient_flops
