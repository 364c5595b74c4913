"""Masks that only shrink: the smallest weights of each tensor go, or whole channels of a convolution."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparsona.core.layout import Layout
from sparsona.core.tree import Tree, counts
from sparsona.sparsity.erk import ROUNDING_SLACK
from sparsona.sparsity.selection import select


def num_pruned(mask: Tree, names: tuple[str, ...], rate: float, spare: int | None = None) -> tuple[int, ...]:
    """How many entries of each tensor a step of pruning removes: those below the percentile `rate` of its entries.

    Of n entries ceil(rate * (n - 1)) are below it, so that a tensor's last entry is never removed.

    Args:
        mask: the mask before the step.
        names: the tensors that are pruned.
        rate: the share of their entries.
        spare: the most entries that may be removed in all; a larger step is cut, in the same proportion everywhere.

    Returns:
        One number for each tensor of the mask; 0 for those that are not named.

    Example:
        >>> import torch
        >>> mask = Tree.of({"a": torch.ones(11, dtype=torch.bool), "b": torch.ones(4, dtype=torch.bool)})
        >>> num_pruned(mask, ("a", "b"), 0.5), num_pruned(mask, ("a", "b"), 0.5, spare=3)
        ((5, 2), (2, 1))
    """
    wanted = [
        math.ceil(rate * (alive - 1) * (1 - ROUNDING_SLACK)) if name in names and alive else 0
        for name, alive in zip(mask, counts(mask), strict=True)
    ]
    if spare is None or sum(wanted) <= spare:
        return tuple(wanted)
    total = sum(wanted)
    cut = [number * spare // total for number in wanted]
    left = spare - sum(cut)
    for place in sorted(range(len(cut)), key=lambda place: -(wanted[place] * spare % total))[:left]:
        cut[place] += 1  # the largest remainders
    return tuple(cut)


def prune_smallest(params: Tree, mask: Tree, numbers: tuple[int, ...]) -> Tree:
    """The mask without so many of each tensor's entries of smallest magnitude; ties go to the lowest index.

    Args:
        params: the weights.
        mask: the mask.
        numbers: how many entries of each tensor go.

    Returns:
        The smaller mask.

    Example:
        >>> import torch
        >>> params = Tree.of({"w": torch.tensor([0.5, -0.1, 0.0, 0.3])})
        >>> mask = Tree.of({"w": torch.tensor([True, True, False, True])})
        >>> prune_smallest(params, mask, (1,))["w"].tolist()
        [True, False, False, True]
    """
    return mask.like(mask.flat & ~select(params.flat, mask.flat, mask.layout.sizes, numbers))


@dataclass(frozen=True)
class Channels:
    """The channels that a convolution makes: one row of each of these tensors belongs to a channel.

    Args:
        weight: the name of the convolution's weight.
        others: its bias, and scale and shift of the norm that follows, as far as there are any.
        scale: the name of that norm's scale; None: there is no norm.
    """

    weight: str
    others: tuple[str, ...] = ()
    scale: str | None = None


def channels_of(layout: Layout, norms: tuple[str, ...]) -> tuple[Channels, ...]:
    """The convolutions of a model, and what belongs to their channels.

    Args:
        layout: the model: weights of three or more dimensions are those of convolutions, and vectors between such a
            weight and the next matrix that are as long as it has channels are taken to be theirs.
        norms: the names of the parameters of norms.

    Returns:
        One entry for each convolution.

    Example:
        >>> from sparsona.core.layout import Slot
        >>> layout = Layout((Slot("0.weight", (8, 3, 5, 5)), Slot("0.bias", (8,)), Slot("1.weight", (10, 8))))
        >>> channels_of(layout, norms=())
        (Channels(weight='0.weight', others=('0.bias',), scale=None),)
    """
    found: list[Channels] = []
    slots = layout.slots
    for place, slot in enumerate(slots):
        if len(slot.shape) < 3:
            continue
        others = []
        for other in slots[place + 1 :]:
            if len(other.shape) > 1:
                break
            if other.shape == slot.shape[:1]:
                others.append(other.name)
        scales = [name for name in others if name in norms and name.endswith("weight")]
        found.append(Channels(slot.name, tuple(others), scales[0] if scales else None))
    return tuple(found)


def prune_channels(params: Tree, mask: Tree, channels: tuple[Channels, ...], rate: float, least: float) -> Tree:
    """The mask without the weakest channels of each convolution.

    A channel is as strong as the magnitude of its norm's scale or, without a norm, as the sum of the magnitudes of its
    filter. What goes is its filter, bias, scale and shift, so that its output is 0. What reads that output stays: which
    layers do is not known.

    Args:
        params: the weights.
        mask: the mask.
        channels: from `channels_of`.
        rate: the share of a convolution's channels that goes, rounded up.
        least: the share of all its channels that stays.

    Returns:
        The smaller mask.

    Example:
        >>> import torch
        >>> params = Tree.of({"w": torch.tensor([[[3.0]], [[-1.0]], [[2.0]]]), "b": torch.ones(3)})
        >>> mask = params.like(params.flat != 0)
        >>> smaller = prune_channels(params, mask, channels_of(params.layout, ()), rate=0.3, least=0.5)
        >>> smaller["w"].flatten().tolist(), smaller["b"].tolist()
        ([True, False, True], [True, False, True])
    """
    smaller = mask.like(mask.flat.clone())
    for found in channels:
        alive = smaller[found.weight].flatten(1).any(1)
        have, total = int(alive.count_nonzero()), len(alive)
        spare = have - math.ceil(least * total * (1 - ROUNDING_SLACK))
        number = min(math.ceil(rate * have * (1 - ROUNDING_SLACK)), max(0, spare))
        strength = params[found.weight].flatten(1).abs().sum(1) if found.scale is None else params[found.scale].abs()
        stays = ~select(strength, alive, (total,), (number,))
        for name in (found.weight, *found.others):
            rows = smaller[name]
            rows &= stays.view(-1, *[1] * (rows.dim() - 1))  # a view of the copy above
    return smaller


def hamming_distance(one: Tree, other: Tree, names: tuple[str, ...]) -> float:
    """The share of entries in which two masks differ: of each tensor, then the mean over tensors.

    Args:
        one: a mask.
        other: a mask of the same layout.
        names: the tensors that are compared.

    Returns:
        A number from 0 to 1; 0 if no tensor is named.

    Example:
        >>> import torch
        >>> one = Tree.of({"a": torch.tensor([True, True]), "b": torch.tensor([True])})
        >>> other = Tree.of({"a": torch.tensor([True, False]), "b": torch.tensor([True])})
        >>> hamming_distance(one, other, ("a", "b"))
        0.25
    """
    differs = one.like(one.flat ^ other.flat)
    shares = [int(differs[name].count_nonzero()) / differs[name].numel() for name in names]
    return sum(shares) / len(shares) if shares else 0.0
