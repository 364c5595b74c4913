"""Mask evolution: prune the smallest weights, grow as many entries elsewhere. SET and RigL differ in one score."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sparsona.core.errors import SparsonaError
from sparsona.core.tree import Tree, counts
from sparsona.sparsity.erk import ROUNDING_SLACK
from sparsona.sparsity.selection import kernels_for, select

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def cosine_rate(initial: float, index: int, total: int, decays_to_zero: bool) -> float:
    """The share of active entries to swap in round `index` of `total`: initial/2 * (1 + cos(pi * index / total)).

    Args:
        initial: the rate of the first round, also if it is the only one.
        index: the round, from 0.
        total: the number of rounds.
        decays_to_zero: the denominator is total - 1, as in the FedSpa paper, and the last round's rate is 0; otherwise
            it is total, as in the DisPFL code, and the last round still swaps a few entries.

    Returns:
        The rate.

    Example:
        >>> cosine_rate(0.5, index=0, total=10, decays_to_zero=True)
        0.5
    """
    _check_rate(initial)
    if not 0 <= index < total:
        raise SparsonaError(f"round {index} of {total}", expected=f"a round from 0 to {total - 1}")
    last = max(1, total - 1) if decays_to_zero else total
    return initial / 2 * (1 + math.cos(math.pi * index / last))


def evolve(params: Tree, mask: Tree, rate: float, scores: Tree | None, seed: int) -> Tree:
    """The next mask: per tensor, ceil(rate * active) entries move; the number of active entries stays.

    First the active entries of smallest |param| are pruned, then as many of all inactive entries are grown, those just
    pruned among them: the ones of largest |score|, or uniformly at random if `scores` is None (only then is `seed`
    used). Ties go to the lowest index, both in pruning and in growing. Any rate above 0 moves at least one entry of a
    tensor, rate 0 none; a dense or empty tensor stays as it is. 0.1 of 30 is 3, whatever floats make of it.
    """
    _check_rate(rate)
    mask = mask.loaded()
    _check_mask(mask)
    _check_layout("params", params, mask)
    if scores is not None:
        _check_layout("scores", scores, mask)
    grows_by = mask.like(random_scores(mask.layout.size, seed, params.device)) if scores is None else scores
    kernels = kernels_for(params.flat, grows_by.flat)
    if kernels is not None:
        evolved, broken = kernels.evolve(params.flat, mask.flat, grows_by.flat, mask.layout.sizes, rate, ROUNDING_SLACK)
        # The only wait for the GPU, after all its work was queued. A NaN must be refused here: it cannot be seen in the
        # mask.
        if any(broken.tolist()):
            _check_numbers(params, scores)
        return _of_same_counts(mask, evolved)
    _check_numbers(params, scores)
    moved = _num_moved(mask, rate)
    kept = mask.flat & ~select(params.flat, mask.flat, mask.layout.sizes, moved)
    return _of_same_counts(mask, kept | select(grows_by.flat, ~kept, mask.layout.sizes, moved, largest=True))


def random_scores(size: int, seed: int, device: torch.device) -> Tensor:
    """A number for each entry, computed from its index and the seed alone (splitmix64): the same on every device. Of
    2**24 possible numbers some are equal; between these the lowest index goes first."""
    import torch

    def mix(value: Tensor, shift: int, factor: int) -> Tensor:
        shifted = (value >> shift).bitwise_and_((1 << (64 - shift)) - 1)  # an unsigned shift
        return value.bitwise_xor_(shifted).mul_(factor)

    value = torch.arange(size, dtype=torch.int64, device=device).add_(seed).mul_(-0x61C8864680B583EB)
    value = mix(mix(value, 30, -0x40A7B892E31B1A47), 27, -0x6B2FB644ECCEEE15)
    return (mix(value, 31, 1) >> 40).bitwise_and_((1 << 24) - 1).float()


def _num_moved(mask: Tree, rate: float) -> tuple[int, ...]:
    """The number of entries of each tensor that move."""
    return tuple(
        # In a dense tensor the pruned entries are the only candidates and would all grow again.
        0 if active == size else min(active, math.ceil(rate * active * (1 - ROUNDING_SLACK)))
        for size, active in zip(mask.layout.sizes, counts(mask), strict=True)
    )


def _of_same_counts(mask: Tree, flat: Tensor) -> Tree:
    evolved = mask.like(flat)
    evolved.identity.counts = counts(mask)  # read from the GPU once, for the first mask
    return evolved


def _check_rate(rate: float) -> None:
    if not 0 <= rate <= 1:
        raise SparsonaError(
            f"a rate of {rate}", expected="a number from 0 to 1", hint="0.5 swaps half of the active entries"
        )


def _check_mask(mask: Tree) -> None:
    import torch

    if mask.dtype is not torch.bool or len(mask.shape) != 1:
        raise SparsonaError(
            f"a mask of shape {mask.shape} and type {mask.dtype}",
            expected="the bool mask of one client",
            hint="convert a float mask with mask.like(mask.flat != 0)",
        )


def _check_layout(what: str, tree: Tree, mask: Tree) -> None:
    if tree.layout is not mask.layout and tree.layout.digest != mask.layout.digest:
        raise SparsonaError(
            f"{what} and mask have different layouts: {tree} and {mask}",
            expected="the same names and shapes in the same order",
            hint=f"select the mask's tensors from the {what}",
        )


def _check_numbers(params: Tree, scores: Tree | None) -> None:
    import torch

    trees = {"params": params} if scores is None else {"params": params, "scores": scores}
    # A sum is NaN if an entry is, and ten times faster to check; inf - inf gives NaN too, so entries are checked then.
    suspects = torch.stack([tree.flat.sum().isnan() for tree in trees.values()]).tolist()
    for (what, tree), suspect in zip(trees.items(), suspects, strict=True):
        if suspect and bool(tree.flat.isnan().any()):
            names = ", ".join(name for name in tree if bool(tree[name].isnan().any()))
            raise SparsonaError(
                f"{what} are not a number (NaN) in {names}",
                expected="numbers: otherwise there is no smallest weight and no largest score",
                hint="training diverged: lower the learning rate or clip gradients",
            )
