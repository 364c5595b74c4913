"""Masks of methods that train inside one: how much of each tensor they keep, how they start, how they evolve."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Literal, Protocol

from sparsona.core.errors import SparsonaError
from sparsona.core.layout import Layout
from sparsona.core.round import Client, Probe, Round
from sparsona.core.seeds import Seeds
from sparsona.core.tree import Tree
from sparsona.sparsity.erk import erk_densities, kept_counts, uniform_densities
from sparsona.sparsity.evolve import cosine_rate, evolve
from sparsona.sparsity.masks import random_mask

if TYPE_CHECKING:
    from sparsona.core.task import Task


class MaskOptions(Protocol):
    """The options of a client's masks; learning/mask_options.py has them as options of a method."""

    @property
    def density(self) -> float: ...
    @property
    def allocation(self) -> Literal["erk", "uniform"]: ...
    @property
    def initial_masks(self) -> Literal["same", "different"]: ...
    @property
    def regrowth(self) -> Literal["gradient", "random"]: ...
    @property
    def prune_rate(self) -> float: ...


@lru_cache(maxsize=64)  # called for every client, though there are few capacities
def mask_counts(layout: Layout, density: float, allocation: Literal["erk", "uniform"]) -> tuple[int, ...]:
    """How many entries of each tensor a mask keeps. A density that keeps no entry raises SparsonaError."""
    allocate = erk_densities if allocation == "erk" else uniform_densities
    counts = kept_counts(layout, allocate(layout, density))
    if not any(counts):
        raise SparsonaError(
            f"a density of {density:g} keeps no parameter at all", expected="more", hint="raise --density or capacities"
        )
    return counts


def client_counts(layout: Layout, client: Client, options: MaskOptions) -> tuple[int, ...]:
    """How many entries of each tensor a client's mask keeps: no more than the client can hold."""
    return mask_counts(layout, min(options.density, client.capacity), options.allocation)


_draw_mask = lru_cache(maxsize=4)(random_mask)  # clients that start with the same mask share one tree


def initial_mask(layout: Layout, client: Client, seeds: Seeds, options: MaskOptions) -> Tree:
    """The mask that a client starts with."""
    seed = seeds.shared("mask") if options.initial_masks == "same" else seeds.of(client.index).own("mask")
    return _draw_mask(layout, client_counts(layout, client, options), seed)


def next_mask(
    task: Task,
    params: Tree,
    buffers: Tree,
    mask: Tree,
    probe: Probe,
    round_: Round,
    options: MaskOptions,
    decays_to_zero: bool = False,
) -> Tree:
    """The mask after a round: the smallest weights are pruned, and as many entries grow elsewhere."""
    rate = cosine_rate(options.prune_rate, round_.index, round_.total, decays_to_zero)
    with probe.searching():
        scores = task.gradient(params, buffers, probe.batch()) if options.regrowth == "gradient" else None
        return evolve(params, mask, rate, scores, round_.seeds.own("regrowth"))


def search_flops(layout: Layout, client: Client, round_: Round, options: MaskOptions) -> int:
    """FLOPs of `next_mask`: one dense gradient batch, where masks regrow by gradient."""
    examples = min(round_.batch_size, client.num_examples) if options.regrowth == "gradient" else 0
    return examples * layout.train_flops()
