"""Which blocks to keep under a budget, as tensor operations: nothing waits, nothing branches on a value.

pFedGate's problem (6): the largest sum of scores of the blocks kept, with a sum of costs of at most the budget. The
paper names no solver. Its authors' code walks the blocks by score alone, not by score for cost, after rounding scores
to whole tenths: `greedy(10 * scores rounded, ...)`.

All functions take scores and costs as [..., blocks] and budgets as [...], and return 0 or 1 as numbers of the scores'
dtype, without a gradient. Costs are at least 0; whole numbers (int64) are counted exactly. Blocks that are kept in any
case are paid for first: pass the budget that is left, and a cost above it, or 0, for these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Solver = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]


def greedy(scores: Tensor, costs: Tensor, budget: Tensor, by: Literal["score", "density"] = "score") -> Tensor:
    """Walk the blocks by falling score, ties by index; take what still fits, skip what does not.

    `by="density"` walks by score for cost instead. A block of cost 0 has the highest density. Scores only order: one
    of 0, or below, is taken if it fits. A few small operations for each block, one after the other.
    """
    import torch

    scores, costs = torch.broadcast_tensors(scores.detach(), costs)
    rank = scores if by == "score" else torch.where(costs > 0, scores / costs, math.inf)
    order = rank.argsort(dim=-1, descending=True, stable=True)
    ordered = costs.gather(-1, order)
    left, before = budget.to(torch.promote_types(costs.dtype, budget.dtype)).expand(costs.shape[:-1]), []
    for cost in ordered.unbind(-1):
        before.append(left)
        left = torch.where(cost <= left, left - cost, left)
    fits = (ordered <= torch.stack(before, dim=-1)).to(scores.dtype)
    return torch.zeros_like(scores).scatter(-1, order, fits)


def exact(scores: Tensor, costs: Tensor, budget: Tensor, buckets: int = 1024) -> Tensor:
    """The largest sum of scores, by a dynamic program over the budget in `buckets` equal parts.

    Costs are rounded up to whole buckets, so that the budget always holds; the choice is the best there is where costs
    are whole buckets, which whole-numbered costs are under a budget of at most `buckets`. Otherwise something that just
    fits may count as too large: where `greedy` then finds more, its choice is taken. Ties go to low indices; a block
    that adds nothing to the sum may be left out. Sums are made in float64. Takes time and memory for blocks x buckets.
    """
    import torch

    dtype = scores.dtype
    scores, costs = torch.broadcast_tensors(scores.detach().double(), costs)
    budget = budget.expand(costs.shape[:-1])
    weights, top = _in_buckets(costs, budget, buckets)
    # best[1 + j]: the best sum that j buckets can buy. best[0] stands for what no money buys.
    places = torch.arange(buckets + 2, device=weights.device)
    best = torch.where(places > 0, 0.0, -math.inf).double().expand(*costs.shape[:-1], buckets + 2)
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
    planned, walked = torch.stack(kept[::-1], dim=-1), greedy(scores, costs, budget)
    poorer_plan = (scores * planned).sum(dim=-1, keepdim=True) < (scores * walked).sum(dim=-1, keepdim=True)
    return torch.where(poorer_plan, walked, planned).to(dtype)


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
    # To every other group a block is too dear.
    kept = solve(scores.expand(own.shape), torch.where(own, costs, limits + 1), budgets)
    return (kept * own).sum(dim=0)
