"""FedSpa: one dense model on the server, one evolving mask per client.

Paper: Huang, Liu, Shen, He, Lin, Tao, Achieving Personalized Federated Learning with Sparse Local Models, 2022,
Algorithms 1 to 3. Its authors' code is not published; DisPFL's, of the same family, settles what the text leaves open.

Kept: the mask. Travels: down, the model inside the client's mask; up, the change inside that mask and, with dynamic
search, the next mask as one bit an entry. Costs: sparse training, and one dense gradient batch where masks regrow by
gradient.

Differences from the text: the gradient norm is clipped (`clip_norm`) and weights decay, as the family's code does;
`anneal="family"` divides the round by T in the cosine, as that code does, where the paper writes T - 1. Tensors that
ERK makes dense are left alone: all they could regrow is what they pruned.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from sparsona.core import tree
from sparsona.core.method import Cost, Method, PartSize, ServerHalf, Support, Tree, dense, masked, message
from sparsona.learning.means import WeightedSum
from sparsona.methods.allocation import mask_counts
from sparsona.methods.training import Training, gradient_size, plain_weights, predictor, sgd_phase, training_flops
from sparsona.sparsity.evolve import cosine_rate, evolve
from sparsona.sparsity.masks import random_mask

if TYPE_CHECKING:
    from sparsona.core.task import Task


class FedSpaConfig(Training):
    """What FedSpa adds to the options of training."""

    density: float = Field(0.5, gt=0, le=1, description="share of the parameters a client's model keeps")
    search: Literal["dst", "rsm"] = Field("dst", description="masks evolve (dst) or stay as drawn (rsm)")
    regrowth: Literal["gradient", "random"] = Field("gradient", description="what decides where a mask grows")
    initial_masks: Literal["same", "different"] = Field("same", description="whether clients start with one mask")
    allocation: Literal["erk", "uniform"] = Field("erk", description="how density is shared among the tensors")
    prune_rate: float = Field(0.5, ge=0, le=1, description="share of a mask replaced in the first round")
    anneal: Literal["paper", "family"] = Field("paper", description="cosine over T - 1 rounds, or over T")


@dataclass(frozen=True)
class FedSpaState:
    """What a client keeps between rounds: m_k."""

    mask: Tree
    buffers: Tree


@dataclass(frozen=True)
class FedSpaWork:
    """The model at hand, where it started, and the mask as numbers to multiply by."""

    params: Tree
    buffers: Tree
    start: Tree
    mask: Tree


@dataclass(frozen=True)
class FedSpaServer:
    """The dense model w, and the mask that each client will use next."""

    params: Tree
    masks: dict[int, Tree]


@dataclass(frozen=True)
class FedSpaSum:
    """The changes of a round, and the next mask of everybody who sent one."""

    changes: WeightedSum
    masks: dict[int, Tree]


def fedspa(task: Task, config: FedSpaConfig) -> Method:
    """One dense model on the server, one evolving mask per client."""
    evolves = config.search == "dst"
    draw = lru_cache(maxsize=4)(random_mask)  # clients that start with one mask share one drawing of it

    def kept(layout, client):
        return mask_counts(layout, min(config.density, client.capacity), config.allocation)

    def initial_mask(layout, client, seeds) -> Tree:  # Algorithm 2, MaskInit
        seed = seeds.shared("mask") if config.initial_masks == "same" else seeds.of(client.index).own("mask")
        return draw(layout, kept(layout, client), seed)

    def init_client(params, buffers, client, seeds):
        return FedSpaState(initial_mask(params.layout, client, seeds), buffers)

    def receive(state: FedSpaState, inbox, probe, round_):
        (update,) = inbox
        part = update.parts["model"]
        mask = part.bitmap or state.mask  # a client that lost its mask is sent it
        params = part.tree(mask)
        return FedSpaWork(params, state.buffers, params, tree.as_numbers(mask, params.flat.dtype))

    def finish(state: FedSpaState, work: FedSpaWork, inbox, probe, round_):
        mask = next(iter(inbox)).parts["model"].bitmap or state.mask
        parts = {"update": masked(tree.subtract(work.start, work.params), mask)}  # U_k, Algorithm 1 line 17
        if evolves:
            mask = next_mask(work, mask, probe, round_)
            parts["mask"] = dense(mask)
        return FedSpaState(mask, work.buffers), message(round_, parts)

    def next_mask(work: FedSpaWork, mask: Tree, probe, round_) -> Tree:  # Algorithm 2, NextMasks
        rate = cosine_rate(config.prune_rate, round_.index, round_.total, decays_to_zero=config.anneal == "paper")
        scores = task.gradient(work.params, work.buffers, probe.batch()) if config.regrowth == "gradient" else None
        return evolve(work.params, mask, rate, scores, round_.seeds.own("regrowth"))

    def cost(layout, client, round_):
        counts = kept(layout, client)
        down, update, start = (
            (PartSize(name, layout, sum(counts), Support.KNOWN),) for name in ("model", "update", "start")
        )
        mask = (PartSize("mask", layout, layout.size, is_mask=True),)
        looks = min(round_.batch_size, client.num_examples) if evolves and config.regrowth == "gradient" else 0
        search = looks * 3 * layout.forward_flops()
        train, infer = training_flops(layout, client, config, counts), layout.forward_flops(counts)
        at_work = (*start, gradient_size(layout, config, sum(counts)))
        up = update + mask if evolves else update
        return Cost(down, up, train, search, kept=mask, infer_flops=infer, at_work=at_work)

    def init_server(params, clients, seeds):
        return FedSpaServer(params, {c.index: initial_mask(params.layout, c, seeds) for c in clients})

    def reply(server: FedSpaServer, client, round_):  # m_k * w, Algorithm 1 line 9
        return message(round_, {"model": masked(server.params, server.masks[client.index])})

    def zero(server: FedSpaServer, round_):
        return FedSpaSum(WeightedSum(), {})

    def add(server: FedSpaServer, total: FedSpaSum, update):
        changes = total.changes.add(update.parts["update"].tree(server.masks[update.sender]), 1.0)
        if evolves:
            total.masks[update.sender] = update.parts["mask"].tree()
        return FedSpaSum(changes, total.masks)

    def merge(one: FedSpaSum, other: FedSpaSum):
        return FedSpaSum(one.changes.merge(other.changes), one.masks | other.masks)

    def step(server: FedSpaServer, total: FedSpaSum, round_):
        # A plain mean over those who took part, not over those who hold a coordinate: Algorithm 1 line 11.
        mean = total.changes.mean(otherwise=tree.zeros_like(server.params))
        return FedSpaServer(tree.subtract(server.params, mean), server.masks | total.masks)

    phase = sgd_phase(  # Algorithm 1 lines 13 to 16
        task,
        config,
        mask=lambda work: work.mask,
        flops=lambda work: 3 * task.layout.forward_flops(tree.counts(work.mask)),
    )
    server = ServerHalf(
        init=init_server,
        reply=reply,
        zero=zero,
        add=add,
        step=step,
        merge=merge,
        global_model=lambda server: server.params,
        client_memory=("masks",),
    )
    return Method(
        init_client=init_client,
        receive=receive,
        phases=(phase,),
        finish=finish,
        predict=predictor(task),
        cost=cost,
        deploy=plain_weights,
        tune=phase,
        server=server,
        trait=lambda state: state.mask,
    )
