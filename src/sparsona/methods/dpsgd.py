"""D-PSGD: peers average their models with those of their neighbours, and train on their own data.

Paper: Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms? A Case Study for Decentralized
Parallel Stochastic Gradient Descent, NeurIPS 2017, Algorithm 1.

Kept: the model, and the mask if there is one. Travels, to each neighbour: the model. Costs: dense training. With
`density` below 1 a peer trains, keeps and sends a smaller model: one static random mask, the same for all peers and
drawn from the seed of the run, cuts it out. This is "D-PSGD (50% params)" of DisPFL's table 3, and the mask itself is
never sent.

A round: the uniform mean of a peer's own model and those it received (`received`), then training (`trained`). The
result is the mean of all models (`consensus`), which is what DisPFL prints as D-PSGD. D-PSGD-FT is this method followed
by the engine's final tuning, of the mean of all models: `tune_from=all`.

The mean has the weights 1 / (1 + number of neighbours). They are doubly stochastic, as the theory asks, where all peers
have as many neighbours as others have them: on a ring, a grid, a full or exponential graph and with `random:N:bounded`,
but not with `random:N`, nor in general with a graph of one's own. Metropolis weights would need each neighbour's number
of neighbours in the coming round, which no message of the last one has.

Differences from the text: a round is some epochs, as in DisPFL, not one step (`steps_a_round=1`); it adds the gradient
of the mixed model, where Algorithm 1 adds that of the unmixed one to the mixed (the paper allows to exchange the two
lines). A peer that never trained (novel, or not sampled yet) only receives: its initial weights hold no knowledge.

`--preset paper` takes one plain SGD step a round, on a ring. `--preset dispfl` is how DisPFL ran both, with the last
tuning at lr / lr_decay: the code counts that round as -1. Not reproduced: its neighbours are drawn with the seed
round + client, so those of a client are those of the next client a round before; ours are drawn independently.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import merge
from itertools import chain
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from sparsona.core import tree
from sparsona.core.method import (
    Client,
    Cost,
    Inbox,
    Layout,
    Method,
    PartSize,
    PeerHalf,
    Probe,
    Round,
    Seeds,
    Support,
    Tree,
    Update,
    dense,
    masked,
    message,
)
from sparsona.learning.means import WeightedSum
from sparsona.learning.optimizer import FLAG, Memory, make_optimizer
from sparsona.learning.phases import Training, gradient_size, plain_weights, predictor, training_phase, turn_flops
from sparsona.sparsity.masks import random_mask
from sparsona.sparsity.search import mask_counts

if TYPE_CHECKING:
    from sparsona.core.task import Task


class DPSGDConfig(Training):
    """What D-PSGD adds to the options of training."""

    steps_a_round: int | None = Field(None, ge=1, description="most steps of a round; none: all of `epochs`")
    density: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of the parameters of a smaller shared model, cut out by one static mask",
        json_schema_extra=FLAG,
    )
    allocation: Literal["uniform", "erk"] = Field("uniform", description="how density is shared among the tensors")


@dataclass(frozen=True)
class DPSGDState:
    """What a peer keeps between rounds: its model, and the mask that all share, if there is one."""

    params: Tree
    buffers: Tree
    masks: tuple[Tree, ...]
    memory: Memory = ()


@dataclass(frozen=True)
class DPSGDWork:
    """The current model, the mask as numbers to multiply by, and the optimizer's memory."""

    params: Tree
    buffers: Tree
    masks: tuple[Tree, ...]
    memory: Memory


def dpsgd(task: Task, config: DPSGDConfig) -> Method:
    """Peers that average their models."""
    is_dense = config.density == 1
    optimizer = make_optimizer(config)

    def counts(layout: Layout) -> tuple[int, ...] | None:
        return None if is_dense else mask_counts(layout, config.density, config.allocation)

    tune = training_phase(
        task,
        config,
        mask=None if is_dense else lambda work: work.masks[0],
        flops=lambda work: task.layout.train_flops(counts(task.layout)),
    )
    phase = replace(tune, max_steps=config.steps_a_round)

    @lru_cache(maxsize=1)  # one tree for all peers
    def shared_masks(layout: Layout, root: int) -> tuple[Tree, ...]:
        kept = counts(layout)
        return () if kept is None else (random_mask(layout, kept, Seeds(root).shared("mask")),)

    def read(update: Update, masks: tuple[Tree, ...]) -> Tree:
        return update.parts["model"].tree(*masks)

    def mean(models: Iterator[Tree]) -> Tree:
        first = next(models)
        total = WeightedSum().add(first, weight=1.0)
        for model in models:
            total = total.add(model, weight=1.0)
        return total.mean(otherwise=first)

    def init_client(params: Tree, buffers: Tree, client: Client, seeds: Seeds) -> DPSGDState:
        masks = shared_masks(params.layout, seeds.root)
        for mask in masks:
            params = params.like(params.flat.where(mask.flat.to(params.device), params.flat.new_zeros(())))
        return DPSGDState(params, buffers, masks, optimizer.first(params))

    def receive(state: DPSGDState, inbox: Inbox, probe: Probe, round_: Round) -> DPSGDWork:
        assert round_.client is not None
        received = tuple(inbox)
        # In client order, its own among them, so that peers that receive the same models have the same mean.
        own = [] if received and round_.is_new else [(round_.client.index, None)]
        others = ((update.sender, update) for update in received)

        def models() -> Iterator[Tree]:
            for _, update in merge(others, own, key=lambda item: item[0]):
                yield state.params if update is None else read(update, state.masks)

        params = mean(models())  # Algorithm 1 line 4: the neighbours' weighted average
        masks = tuple(tree.as_numbers(mask, params.dtype) for mask in state.masks)
        return DPSGDWork(params, state.buffers, masks, optimizer.begin(state.memory, params))

    def finish(
        state: DPSGDState, work: DPSGDWork, inbox: Inbox, probe: Probe, round_: Round
    ) -> tuple[DPSGDState, Update]:
        part = masked(work.params, state.masks[0]) if state.masks else dense(work.params)
        kept = DPSGDState(work.params, work.buffers, state.masks, optimizer.end(work.memory))
        return kept, message(round_, {"model": part})

    def consensus(inbox: Inbox, round_: Round) -> Tree:
        updates = iter(inbox)
        first = next(updates)
        device = first.parts["model"].values.device
        masks = tuple(
            Tree(mask.layout, mask.flat.to(device), mask.identity)
            for mask in shared_masks(task.layout, round_.seeds.root)
        )
        return mean(read(update, masks) for update in chain((first,), updates))

    def cost(layout: Layout, client: Client, round_: Round) -> Cost:
        kept = counts(layout)
        size = layout.size if kept is None else sum(kept)
        support = Support.DENSE if kept is None else Support.KNOWN
        model, mixed, total = (PartSize(name, layout, size, support, ones=kept) for name in ("model", "mixed", "sum"))
        mask = () if kept is None else (PartSize("mask", layout, layout.size, is_mask=True),)
        memory = optimizer.sizes("memory", layout, size, support)
        gradient = gradient_size(layout, config, size)
        per_example, per_step = layout.train_flops(kept), optimizer.flops * size
        return Cost(
            None,
            (model,),
            turn_flops((phase,), client, round_, per_example, per_step),
            kept=(model, *mask, *memory) if optimizer.keeps else (model, *mask),
            infer_flops=layout.forward_flops(kept),
            at_work=(mixed, gradient) if optimizer.keeps else (mixed, *memory, gradient),
            mixing=(total,),
            tune_flops=turn_flops((replace(tune, epochs=1),), client, round_, per_example, per_step),
        )

    return Method(
        init_client=init_client,
        receive=receive,
        phases=(phase,),
        finish=finish,
        predict=predictor(task),
        cost=cost,
        deploy=plain_weights,
        tune=tune,
        peer=PeerHalf(consensus=consensus, mask=None if is_dense else lambda state: state.masks[0]),
    )
