"""Which blocks to keep under a budget, as tensor operations: nothing waits, nothing branches on a value.

pFedGate's problem (6): the largest sum of scores of the blocks kept, with a sum of costs of at most the budget. The
paper names no solver. `best_of_all` is exact, where there are few classes of blocks of one cost; `exact` is where costs
are whole parts of the budget, and otherwise never over it. The authors' code walks the blocks by score alone, not by
score for cost, after rounding scores to whole tenths: `greedy(10 * scores rounded, ...)`.

All functions take scores and costs as [..., blocks] and budgets as [...], and return 0 or 1 as numbers of the scores'
dtype, without a gradient. Costs are at least 0; whole numbers (int64) are counted exactly. Blocks that are kept in any
case are paid for first: pass the budget that is left, and a cost above it, or 0, for these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

Solver = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]


def greedy(scores: Tensor, costs: Tensor, budget: Tensor, by: Literal["score", "density"] = "score") -> Tensor:
    """Walk the blocks by falling score, ties by index; take what still fits, skip what does not.

    `by="density"` walks by score for cost instead. A block of cost 0 has the highest density. Scores only order: one
    of 0, or below, is taken if it fits. A few small operations for each block, one after the other.
    """
    import torch

    scores, costs = torch.broadcast_tensors(scores.detach(), costs)  # type: ignore[no-untyped-call]
    rank = scores if by == "score" else torch.where(costs > 0, scores / costs, math.inf)
    order = rank.argsort(dim=-1, descending=True, stable=True)
    ordered = costs.gather(-1, order)
    fits = _opaque(_walk)(ordered, budget.to(torch.promote_types(costs.dtype, budget.dtype)).expand(costs.shape[:-1]))
    return torch.zeros_like(scores).scatter(-1, order, fits.to(scores.dtype))


def exact(scores: Tensor, costs: Tensor, budget: Tensor, buckets: int = 1024) -> Tensor:
    """The largest sum of scores, by a dynamic program over the budget in `buckets` equal parts.

    Costs are rounded up to whole buckets, so that the budget always holds; the choice is the best there is where costs
    are whole buckets, which whole-numbered costs are under a budget of at most `buckets`. Otherwise something that just
    fits may count as too large: where `greedy` then finds more, its choice is taken. Ties go to low indices; a block
    that adds nothing to the sum may be left out. Sums are made in float64. Takes time and memory for blocks x buckets.
    """
    import torch

    dtype = scores.dtype
    scores, costs = torch.broadcast_tensors(scores.detach().double(), costs)  # type: ignore[no-untyped-call]
    budget = budget.expand(costs.shape[:-1])
    weights, top = _in_buckets(costs, budget, buckets)
    planned = _opaque(_plan_blocks)(scores, weights, top, torch.zeros(buckets + 2, device=scores.device))
    walked = greedy(scores, costs, budget)
    poorer_plan = (scores * planned).sum(dim=-1, keepdim=True) < (scores * walked).sum(dim=-1, keepdim=True)
    return torch.where(poorer_plan, walked, planned).to(dtype)


def best_of_all(scores: Tensor, costs: Tensor, budget: Tensor, classes: Sequence[Sequence[int]]) -> Tensor:
    """The largest sum of scores, by trying every choice that can be the best: exact whatever the costs are.

    `classes` are blocks of one cost each. Of such blocks the best ones are kept, so that a choice is how many of each
    class; there are prod(1 + blocks of a class) choices, and memory for all of them is needed. Blocks of no class are
    not kept. Sums are made in float64. Ties go to the choice with more blocks of the earlier classes, and within a
    class to low indices.
    """
    import torch

    dtype = scores.dtype
    scores, costs = torch.broadcast_tensors(scores.detach().double(), costs)  # type: ignore[no-untyped-call]
    total, spent = torch.zeros_like(scores[..., :1]), torch.zeros_like(costs[..., :1])
    ranks = []
    for members in classes:  # counts fall, so that the first of equal sums has the most
        own = torch.stack([scores[..., block] for block in members], dim=-1)
        order = own.argsort(dim=-1, descending=True, stable=True)
        ranks.append(order.argsort(dim=-1))
        sums = torch.cat([torch.zeros_like(own[..., :1]), own.gather(-1, order).cumsum(-1)], dim=-1).flip(-1)
        counts = torch.arange(len(members), -1, -1, device=costs.device)
        total = (total.unsqueeze(-1) + sums.unsqueeze(-2)).flatten(-2)
        spent = (spent.unsqueeze(-1) + (costs[..., members[0], None] * counts).unsqueeze(-2)).flatten(-2)
    best = torch.where(spent <= budget.unsqueeze(-1), total, -math.inf).argmax(dim=-1)
    kept = [torch.zeros_like(best, dtype=torch.bool)] * scores.shape[-1]
    for members, rank in zip(reversed(classes), reversed(ranks), strict=True):
        count = len(members) - best % (len(members) + 1)
        best = best.div(len(members) + 1, rounding_mode="floor")
        for place, block in enumerate(members):
            kept[block] = rank[..., place] < count
    return torch.stack(kept, dim=-1).to(dtype)


def _walk(costs: Tensor, budget: Tensor) -> Tensor:
    """Which of these costs, in their order, still fit."""
    import torch

    if costs.dim() == 1 and costs.device.type == "cpu" and not costs.is_floating_point():
        left, fitting = int(budget), []  # whole numbers, and nothing to wait for: a tenth of the time
        for one in costs.tolist():
            fitting.append(one <= left)
            left -= one if one <= left else 0
        return torch.tensor(fitting, dtype=torch.bool)
    fits = torch.empty_like(costs, dtype=torch.bool)
    for place, cost in enumerate(costs.unbind(-1)):
        fits[..., place] = cost <= budget
        budget = torch.where(fits[..., place], budget - cost, budget)
    return fits


def _plan_blocks(scores: Tensor, weights: Tensor, top: Tensor, room: Tensor) -> Tensor:
    """The dynamic program: which blocks to keep. `room` has as many entries as there are buckets, and two more."""
    import torch

    # best[1 + j]: the best sum for a budget of j buckets. best[0] stands for over budget.
    places = torch.arange(room.shape[-1], device=weights.device)
    best = torch.where(places > 0, 0.0, -math.inf).double().expand(*scores.shape[:-1], len(places))
    poorer = (places - weights.unsqueeze(-1)).clamp(min=0)
    takes = []
    for score, place in zip(scores.unbind(-1), poorer.unbind(-2), strict=True):
        with_it = best.gather(-1, place) + score.unsqueeze(-1)
        takes.append(with_it > best)
        best = torch.maximum(best, with_it)
    left, kept = top + 1, []
    for take, weight in zip(reversed(takes), reversed(weights.unbind(-1)), strict=True):
        kept.append(take.gather(-1, left.unsqueeze(-1)).squeeze(-1))
        left = left - weight * kept[-1]
    return torch.stack(kept[::-1], dim=-1)


@lru_cache(maxsize=2)
def _opaque(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function as one operation, of bools shaped as its first argument: a compiler needs half a minute to trace
    such a chain of small steps. The last dimension is never stacked over, so that any others may be."""
    import torch

    names = tuple(function.__annotations__)[:-1]
    schema = f"({', '.join(f'Tensor {name}' for name in names)}) -> Tensor"
    operation = torch.library.custom_op(f"sparsona::{function.__name__[1:]}", function, mutates_args=(), schema=schema)
    operation.register_fake(lambda first, *_: torch.empty_like(first, dtype=torch.bool))

    def stacked(info: Any, dims: tuple[int | None, ...], *values: Tensor) -> tuple[Tensor, int]:
        def lead(value: Tensor, dim: int | None) -> Tensor:
            return value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)

        return operation(*(lead(value, dim) for value, dim in zip(values, dims, strict=True))), 0

    operation.register_vmap(stacked)
    return operation


def _in_buckets(costs: Tensor, budget: Tensor, buckets: int) -> tuple[Tensor, Tensor]:
    """Costs and budget in whole buckets, costs rounded up; what costs more than the budget is beyond all buckets."""
    import torch

    limit = budget.unsqueeze(-1)
    if costs.is_floating_point() or budget.is_floating_point():
        limit, costs = limit.double(), costs.double()
        top = torch.full_like(budget, buckets, dtype=torch.int64)
        parts = (costs * buckets / limit.clamp(min=torch.finfo(torch.float64).tiny)).nan_to_num().clamp(max=buckets)
        weights = parts.ceil()
        weights = (weights + (weights * limit < costs * buckets)).long()  # the division may have rounded down
    else:
        limit, costs = limit.long(), costs.long()
        top = budget.long().clamp(min=0, max=buckets)  # a bucket is never less than one
        weights = (costs.minimum(limit) * top.unsqueeze(-1) + limit - 1).div(limit.clamp(min=1), rounding_mode="floor")
    return torch.where(costs > limit, buckets + 1, weights.clamp(0, buckets)), top


def in_groups(solve: Solver, scores: Tensor, costs: Tensor, budgets: Tensor, groups: Tensor) -> Tensor:
    """Solve for each group of blocks under a budget of its own: scores, costs, groups [blocks], budgets [groups]."""
    import torch

    own = groups == torch.arange(budgets.shape[-1], device=groups.device).unsqueeze(-1)
    limits = budgets.unsqueeze(-1)
    # In every other group a block is over budget.
    kept = solve(scores.expand(own.shape), torch.where(own, costs, limits + 1), budgets)
    return (kept * own).sum(dim=0)
