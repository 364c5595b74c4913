"""pFedGate's options, and budgets counted in blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from sparsona.core.errors import SparsonaError
from sparsona.learning.optimizer import FLAG, Positive, Rate
from sparsona.learning.phases import Training
from sparsona.methods.pfedgate.blocks import Blocks, channels, chunks, filters, heads
from sparsona.methods.pfedgate.latency import block_latencies, read_latency

if TYPE_CHECKING:
    from torch import Tensor

    from sparsona.core.layout import Layout

MOST_CHOICES = 2**16  # that an exact solver tries one by one
FINE = 2**16  # finer than the differences between scores, coarser than rounding: ties stay ties on every executor


class PFedGateConfig(Training):
    """What pFedGate adds to the options of training, which hold for model and gate alike."""

    lr: Positive = Field(0.05, description="the model's learning rate in the first round")
    gate_lr: Positive = Field(1.0, description="the gate's learning rate in the first round")
    momentum: Rate = Field(
        0.9, description="momentum of optimizer=sgd, for model and gate; 0 with others", json_schema_extra=FLAG
    )
    steps: Literal["used", "all"] = Field(
        "used", description="entries that decay and momentum move: those the batch used, or all (authors)"
    )
    density: float = Field(0.5, gt=0, le=1, description="budget: share of the model that a batch may use, s")
    smallest: Annotated[float, Field(gt=0, le=1)] | Literal["authors"] = Field(
        0.2, description="share of each tensor that is always used, s_min, at most s; authors: max(1/B, 0.1), at most s"
    )
    num_blocks: int = Field(5, ge=2, description="blocks of each tensor (or layer), B")
    blocks: Literal["chunk", "filter", "channel", "head"] = Field("chunk", description="what a block is")
    blocks_of: Literal["tensors", "operators"] = Field(
        "tensors", description="what chunks are cut from: each tensor (authors), or a layer's tensors in a row (paper)"
    )
    num_heads: int = Field(4, ge=1, description="attention heads of the model, for blocks=head")
    equal_chunks: bool = Field(False, description="all chunks of one size, also the first (authors)")
    split_budget: bool = Field(
        False, description="linear layers have a budget of their own, and first chunks are free (authors): breaks s"
    )
    budget: str = Field(
        "parameters",
        description="what s is a share of: parameters, flops or latency:FILE.json",
        json_schema_extra={"paths": ["latency"]},
    )
    solver: Literal["greedy", "exact"] = Field("greedy", description="of the knapsack problem (6); exact: its maximum")
    solver_parts: int = Field(
        1024,
        ge=1,
        description="exact, with too many choices to try them all: parts of the budget that costs are whole in",
    )
    greedy_by: Literal["score", "density"] = Field("score", description="greedy: by score, or by score for cost")
    score_steps: int = Field(FINE, ge=1, description="scores are compared in whole steps of 1 / this (authors: 10)")
    floors_scores: bool = Field(False, description="scores are at least s_min (authors)")
    gating: Literal["batch", "sample", "client"] = Field(
        "batch", description="one gate for each training batch, each example, or for the client's mean input"
    )
    sample_chunk: int = Field(16, ge=1, description="examples at once that have a model each (gating by sample)")
    updates: Literal["joint", "alternating"] = Field(
        "joint", description="model and gate step together, or one pass trains the gate and the next the model"
    )
    straight_through: Literal["all", "kept", "authors"] = Field(
        "all", description="blocks whose scores get a gradient: all, those kept, or those kept and none with s = 1"
    )
    paths: Literal[1, 2] = Field(1, description="2: the weights of blocks have a linear layer of their own")
    pre_norm: bool = Field(True, description="switchable norm before the gate's linear layer")
    post_norm: bool = Field(True, description="batch norm behind it")
    sigmoid: bool = Field(True, description="weights of blocks between 0 and 1; otherwise unbounded")
    gate_start: float = Field(
        0.9, gt=0, lt=1, description="what weights of blocks are about at first (0.5 in the paper, by torch's layers)"
    )
    logits_relu: bool = Field(False, description="ReLU on the model's outputs (authors)")
    aggregation: Literal["uploaded", "dense"] = Field(
        "uploaded", description="mean of each entry over the clients that used it, or over all clients (authors)"
    )
    deploy_gate: Literal["stored", "sample", "transductive"] = Field(
        "stored", description="gate in use: of the last training, of each example, or of the test batch (authors)"
    )

    compute: Literal["masked", "compact"] = Field(
        "masked", description="compact: filters that are dropped are left out of the computation, which then is faster"
    )

    @field_validator("budget")
    @classmethod
    def _check_budget(cls, value: str) -> str:
        if value not in ("parameters", "flops") and not value.startswith("latency:"):
            raise ValueError("parameters, flops or latency:FILE.json")
        return value

    @model_validator(mode="before")
    @classmethod
    def _default_momentum(cls, values: Any) -> Any:
        """The default applies to SGD only."""
        if isinstance(values, dict) and values.get("optimizer", "sgd") != "sgd":
            return {"momentum": 0.0, **values}
        return values

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.split_budget and not (self.equal_chunks and self.blocks == "chunk" and self.budget == "parameters"):
            raise ValueError("split_budget with equal_chunks=true, blocks=chunk and budget=parameters only")
        if self.steps == "all" and self.aggregation == "uploaded":
            raise ValueError("steps=used with aggregation=uploaded: what moves must be what is sent")
        if self.blocks_of == "operators" and self.blocks != "chunk":
            raise ValueError("blocks_of=operators with blocks=chunk only: other blocks follow layers already")
        if self.gating == "client" and self.deploy_gate != "stored":
            raise ValueError("deploy_gate=stored with gating=client: that gate has never seen a single input")
        if self.compute == "compact":
            by_one = "sample" in (self.gating, self.deploy_gate)
            if self.blocks not in ("filter", "channel") or by_one or self.straight_through == "all":
                raise ValueError(
                    "compute=compact with blocks=filter or channel, one model for each batch, and "
                    "straight_through=kept: what is not computed has no gradient"
                )
        return self


@dataclass(frozen=True)
class Budget:
    """What each block costs, what is left for those that are not always kept, and the budget each is charged to."""

    costs: Tensor
    left: Tensor
    always: Tensor
    groups: Tensor
    shares: Tensor  # of the model's entries
    sparse: Tensor  # 0 where s is 1, and nothing is dropped; otherwise 1


def cut(layout: Layout, config: PFedGateConfig, smallest: float) -> Blocks:
    """The model's blocks, as the options say."""
    if config.blocks == "chunk":
        return chunks(layout, config.num_blocks, smallest, config.equal_chunks, config.blocks_of == "operators")
    if config.blocks == "head":
        return heads(layout, config.num_heads, config.num_blocks, smallest)
    return (filters if config.blocks == "filter" else channels)(layout, config.num_blocks, smallest)


def block_costs(blocks: Blocks, config: PFedGateConfig) -> tuple[int, ...]:
    """What the budget counts: entries, FLOPs, or nanoseconds by a file of `sparsona latency`."""
    if config.budget.startswith("latency:"):
        return block_latencies(blocks, read_latency(config.budget.removeprefix("latency:"), blocks.layout))
    return blocks.sizes if config.budget == "parameters" else blocks.flops


def budget_left(blocks: Blocks, config: PFedGateConfig, share: float, smallest: float) -> tuple[int, ...]:
    """What each budget has left for blocks that are not always kept."""
    costs = block_costs(blocks, config)
    budgets = range(max(blocks.groups) + 1) if config.split_budget else (0,)
    if config.split_budget:  # first chunks are not charged, and yet a share of s_min is taken off for them
        of = [
            [c for c, a, g in zip(costs, blocks.always, blocks.groups, strict=True) if g == p and not a]
            for p in budgets
        ]
        return tuple(sum(one) if share == 1 else round(sum(one) * (share - smallest)) for one in of)
    total, always = sum(costs), sum(c for c, a in zip(costs, blocks.always, strict=True) if a)
    whole = math.floor(share * total * (1 + 1e-12))
    if whole < always:
        raise SparsonaError(
            f"{always / total:.0%} of the model's {config.budget.partition(':')[0]} are always used, above the "
            f"budget of {share:.0%}",
            expected="blocks that are always kept to fit the budget",
            hint="raise the density or the capacity, lower smallest, or cut into chunks (--set blocks=chunk)",
        )
    if not any(blocks.always) and whole < (cheapest := min(cost for cost in costs if cost)):
        raise SparsonaError(
            f"a density of {share:g} keeps no parameter at all: the smallest block is {cheapest / total:.2%} of the "
            f"model's {config.budget.partition(':')[0]}",
            expected="a budget for one block at least",
            hint="raise --density or capacities, or cut smaller blocks (--set num_blocks=20)",
        )
    return (whole - always,)


def make_budget(blocks: Blocks, config: PFedGateConfig, share: float, smallest: float, like: Tensor) -> Budget:
    """A client's budget as tensors, on the device of `like`."""
    import torch

    costs = [0 if a else c for c, a in zip(block_costs(blocks, config), blocks.always, strict=True)]
    groups = blocks.groups if config.split_budget else [0] * len(blocks)
    return Budget(
        torch.tensor(costs, dtype=torch.int64, device=like.device),
        torch.tensor(budget_left(blocks, config, share, smallest), dtype=torch.int64, device=like.device),
        torch.tensor(blocks.always, dtype=torch.float32, device=like.device),
        torch.tensor(groups, dtype=torch.int64, device=like.device),
        torch.tensor([size / blocks.layout.size for size in blocks.sizes], dtype=torch.float32, device=like.device),
        torch.tensor(float(share < 1), dtype=torch.float32, device=like.device),
    )


def alike(blocks: Blocks, config: PFedGateConfig) -> tuple[tuple[tuple[int, ...], ...], ...] | None:
    """For each budget, the blocks that cost the same, in classes: among these only the number of blocks kept is to be
    chosen. None where there are too many choices to try them all."""
    costs = block_costs(blocks, config)
    found: list[dict[int, list[int]]] = [{} for _ in range(max(blocks.groups) + 1 if config.split_budget else 1)]
    for block, (cost, always) in enumerate(zip(costs, blocks.always, strict=True)):
        if not always:
            found[blocks.groups[block] if config.split_budget else 0].setdefault(cost, []).append(block)
    if any(math.prod(len(one) + 1 for one in classes.values()) > MOST_CHOICES for classes in found):
        return None
    return tuple(tuple(map(tuple, classes.values())) for classes in found)


def select(
    budget: Budget,
    scores: Tensor,
    config: PFedGateConfig,
    classes: tuple[tuple[tuple[int, ...], ...], ...] | None = None,
) -> Tensor:
    """I*, a solution of equation (6): 1 for blocks that are kept, 0 for others. `classes` are those of `alike`."""
    import torch

    from sparsona.methods.pfedgate.knapsack import best_of_all, exact, greedy, in_groups

    ranked = (scores.detach() * config.score_steps).round()
    solve: Any = partial(greedy, by=config.greedy_by)
    if config.solver == "exact":
        if classes is not None:
            parts = [
                best_of_all(ranked, budget.costs, left, one) for one, left in zip(classes, budget.left, strict=True)
            ]
            return torch.maximum(torch.stack(parts).amax(0), budget.always)
        solve = partial(exact, buckets=config.solver_parts)
    if len(budget.left) == 1:
        kept = solve(ranked, budget.costs, budget.left[0])
    else:
        kept = in_groups(solve, ranked, budget.costs, budget.left, budget.groups)
    return torch.maximum(kept, budget.always)


def used_flops(blocks: Blocks, counts: Iterable[float], examples: int) -> int:
    """FLOPs of so many forward passes, each block being kept in so many of them."""
    dense = [slot for slot in blocks.layout.slots if slot.bias_counts_dense]  # charged in full, masked or not
    found = examples * (blocks.layout.frozen.flops + sum(slot.size * slot.flops_per_weight for slot in dense))
    flops = list(blocks.flops)
    for slot, strip in zip(blocks.layout.slots, blocks.strips, strict=True):
        if slot.bias_counts_dense:
            for block, length in enumerate(strip.lengths, start=strip.first):
                flops[block] -= strip.repeats * length * slot.flops_per_weight
    return found + sum(int(count) * one for count, one in zip(counts, flops, strict=True))


def max_flops(blocks: Blocks, config: PFedGateConfig, left: Iterable[float]) -> int:
    """An upper bound of the FLOPs of a forward pass inside the budget, of which so much is left for blocks that are not
    always kept: those with the most FLOPs for their cost first, the last in part."""
    costs, budgets = block_costs(blocks, config), list(left)
    groups = blocks.groups if config.split_budget else (0,) * len(blocks)
    # The papers' counter charges these in full, masked or not.
    dense = sum(slot.size * slot.flops_per_weight for slot in blocks.layout.slots if slot.bias_counts_dense)
    found = dense + sum(f for f, a in zip(blocks.flops, blocks.always, strict=True) if a)
    optional = [b for b in range(len(blocks)) if not blocks.always[b]]
    for b in sorted(optional, key=lambda b: blocks.flops[b] / max(costs[b], 1e-12), reverse=True):
        part = min(1.0, budgets[groups[b]] / max(costs[b], 1e-12))
        found += math.ceil(part * blocks.flops[b])
        budgets[groups[b]] -= part * costs[b]
    return min(found + blocks.layout.frozen.flops, blocks.layout.forward_flops())
