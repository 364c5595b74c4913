"""Mask evolution: prune the smallest weights, grow as many entries elsewhere. SET and RigL differ in one score."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sparsona.core.errors import SparsonaError
from sparsona.core.seeds import generator
from sparsona.core.tree import Tree, counts
from sparsona.sparsity.erk import ROUNDING_SLACK

if TYPE_CHECKING:
    from torch import Tensor


def cosine_rate(initial: float, index: int, total: int, decays_to_zero: bool) -> float:
    """The share of active entries to swap in round `index` of `total`: initial/2 * (1 + cos(pi * index / total)).

    With `decays_to_zero` the denominator is total - 1, as the FedSpa paper writes it, and the last round's rate is 0;
    without, as the DisPFL code has it, the last round still swaps a little. The first round's rate is `initial` either
    way, also when it is the only round.
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
    import torch

    _check_rate(rate)
    _check_mask(mask)
    _check_tree("params", params, mask)
    if scores is not None:
        _check_tree("scores", scores, mask)
    random = generator(seed)
    flat = mask.flat.clone()
    end = 0
    for size, active in zip(mask.layout.sizes, counts(mask), strict=True):
        start, end = end, end + size
        before = mask.flat[start:end]
        moved = min(active, math.ceil(rate * active * (1 - ROUNDING_SLACK)))
        if moved == 0 or active == size:
            # In a dense tensor the pruned entries are the only candidates and would all grow again.
            continue
        kept = before & ~_smallest(params.flat[start:end].detach().abs(), before, moved)
        free = ~kept
        if scores is None:
            # Drawn on the CPU, so that it is the same on every device.
            drawn = torch.randperm(size - active + moved, generator=random)[:moved].to(free.device)
            kept[free.nonzero().squeeze(1)[drawn]] = True
        else:
            kept |= _smallest(-scores.flat[start:end].detach().abs(), free, moved)
        flat[start:end] = kept
    return mask.like(flat)


def _smallest(values: Tensor, among: Tensor, count: int) -> Tensor:
    """Flags of the `count` smallest values where `among` is true; of equal ones those that come first."""
    import torch

    if values.device.type != "cpu":
        # A GPU sorts faster than it selects, and need not be waited for.
        order = values.where(among, math.inf).argsort(stable=True)[:count]
        return torch.zeros_like(among).index_fill_(0, order, True)
    # Selecting the threshold and then counting off its ties gives what a stable sort would, several times faster.
    # Infinity fills the places that do not take part: it cannot lower the threshold, and ties are looked for `among`.
    threshold = values.where(among, math.inf).kthvalue(count).values
    chosen = among & (values < threshold)
    ties = (among & (values == threshold)).nonzero().squeeze(1)
    chosen[ties[: count - int(chosen.count_nonzero())]] = True
    return chosen


def _check_rate(rate: float) -> None:
    if not 0 <= rate <= 1:
        raise SparsonaError(
            f"a rate of {rate}", expected="a number from 0 to 1", mend="0.5 swaps half of the active entries"
        )


def _check_mask(mask: Tree) -> None:
    import torch

    if mask.flat.dtype is not torch.bool or mask.flat.dim() != 1:
        raise SparsonaError(
            f"a mask of shape {tuple(mask.flat.shape)} and type {mask.flat.dtype}",
            expected="the bool mask of one client",
            mend="a float mask becomes one with mask.like(mask.flat != 0)",
        )


def _check_tree(what: str, tree: Tree, mask: Tree) -> None:
    if tree.layout is not mask.layout and tree.layout.digest != mask.layout.digest:
        raise SparsonaError(
            f"{what} and mask have different layouts: {tree} and {mask}",
            expected="the same names and shapes in the same order",
            mend=f"select the mask's tensors from the {what}",
        )
    # A sum is NaN if an entry is, and ten times faster to look at; inf - inf makes one too, so make sure.
    if bool(tree.flat.sum().isnan()) and bool(tree.flat.isnan().any()):
        names = ", ".join(name for name in tree if bool(tree[name].isnan().any()))
        raise SparsonaError(
            f"{what} are not a number (NaN) in {names}",
            expected="numbers, or there is no smallest weight and no largest score",
            mend="training diverged: lower the learning rate or clip gradients",
        )
