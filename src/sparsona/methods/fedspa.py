"""FedSpa: one dense model on the server, one evolving mask per client.

Paper: Huang, Liu, Shen, He, Lin, Tao, Achieving Personalized Federated Learning with Sparse Local Models, 2022,
Algorithms 1 to 3. Its authors' code is not published; DisPFL's, of the same family, settles what the text leaves open.

Kept: the mask. Travels: down, the model inside the client's mask; up, the change inside that mask and, with dynamic
search, the next mask as one bit an entry. Costs: sparse training, and one dense gradient batch where masks regrow by
gradient.

The text decays weights and does not clip (`--preset paper`); the family's code clips the gradient norm at 10, and
divides the round by T in the cosine, where the paper writes T - 1 (`--preset authors`). Tensors that ERK makes dense
are left alone: all they could regrow is what they pruned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    Probe,
    Round,
    Seeds,
    ServerHalf,
    Support,
    Tree,
    Update,
    dense,
    masked,
    message,
)
from sparsona.learning.mask_options import MaskSearchOptions
from sparsona.learning.means import WeightedSum
from sparsona.learning.optimizer import Memory, make_optimizer, mask_memory
from sparsona.learning.phases import Training, gradient_size, plain_weights, predictor, training_phase, turn_flops
from sparsona.sparsity.search import client_counts, initial_mask, next_mask, search_flops

if TYPE_CHECKING:
    from sparsona.core.task import Task


class FedSpaConfig(MaskSearchOptions, Training):
    """What FedSpa adds to the options of training and of masks that evolve."""

    search: Literal["dst", "rsm"] = Field("dst", description="masks evolve (dst) or stay as drawn (rsm)")
    anneal: Literal["paper", "family"] = Field("paper", description="cosine over T - 1 rounds, or over T")


@dataclass(frozen=True)
class FedSpaState:
    """What a client keeps between rounds: m_k."""

    mask: Tree
    buffers: Tree
    memory: Memory = ()


@dataclass(frozen=True)
class FedSpaWork:
    """The current model, where it started, the mask as numbers to multiply by, and the optimizer's memory."""

    params: Tree
    buffers: Tree
    start: Tree
    mask: Tree
    memory: Memory


@dataclass(frozen=True)
class FedSpaServer:
    """The dense model w, and the mask that each client will use next."""

    params: Tree
    masks: dict[int, Tree]


@dataclass(frozen=True)
class FedSpaSum:
    """The changes of a round, and the next mask of every client that sent one."""

    changes: WeightedSum
    masks: dict[int, Tree]


def fedspa(task: Task, config: FedSpaConfig) -> Method:
    """One dense model on the server, one evolving mask per client."""
    evolves = config.search == "dst"
    optimizer = make_optimizer(config)
    phase = training_phase(  # Algorithm 1 lines 13 to 16
        task,
        config,
        mask=lambda work: work.mask,
        flops=lambda work: task.layout.train_flops(tree.counts(work.mask)),
    )

    def init_client(params: Tree, buffers: Tree, client: Client, seeds: Seeds) -> FedSpaState:
        mask = initial_mask(params.layout, client, seeds, config)  # Algorithm 2, MaskInit
        return FedSpaState(mask, buffers, optimizer.first(params))

    def receive(state: FedSpaState, inbox: Inbox, probe: Probe, round_: Round) -> FedSpaWork:
        (update,) = inbox
        part = update.parts["model"]
        mask = part.bitmap or state.mask  # a client that lost its mask is sent it
        params = part.tree(mask)
        numbers = tree.as_numbers(mask, params.flat.dtype)
        return FedSpaWork(params, state.buffers, params, numbers, optimizer.begin(state.memory, params))

    def finish(
        state: FedSpaState, work: FedSpaWork, inbox: Inbox, probe: Probe, round_: Round
    ) -> tuple[FedSpaState, Update]:
        mask = next(iter(inbox)).parts["model"].bitmap or state.mask
        change = tree.subtract(work.start, work.params)  # U_k, Algorithm 1 line 17
        parts = {"update": masked(change, mask, is_change=True)}
        if evolves:  # Algorithm 2, NextMasks
            to_zero = config.anneal == "paper"
            mask = next_mask(task, work.params, work.buffers, mask, probe, round_, config, to_zero)
            parts["mask"] = dense(mask)
        memory = mask_memory(optimizer.end(work.memory), mask)  # regrown entries start without momentum
        return FedSpaState(mask, work.buffers, memory), message(round_, parts)

    def cost(layout: Layout, client: Client, round_: Round) -> Cost:
        counts = client_counts(layout, client, config)
        size = sum(counts)
        model, start = (PartSize(name, layout, size, Support.KNOWN) for name in ("model", "start"))
        update = PartSize("update", layout, size, Support.KNOWN, is_change=True, ones=counts)
        mask = PartSize("mask", layout, layout.size, is_mask=True, ones=counts)
        memory = optimizer.sizes("memory", layout, size, Support.KNOWN)
        gradient = gradient_size(layout, config, size)
        per_example, per_step = layout.train_flops(counts), optimizer.flops * size
        return Cost(
            (model,),
            (update, mask) if evolves else (update,),
            turn_flops((phase,), client, round_, per_example, per_step),
            search_flops(layout, client, round_, config) if evolves else 0,
            kept=(mask, *memory) if optimizer.keeps else (mask,),
            infer_flops=layout.forward_flops(counts),
            at_work=(start, gradient) if optimizer.keeps else (start, *memory, gradient),
            tune_flops=turn_flops((replace(phase, epochs=1),), client, round_, per_example, per_step),
        )

    def init_server(params: Tree, clients: tuple[Client, ...], seeds: Seeds) -> FedSpaServer:
        return FedSpaServer(params, {c.index: initial_mask(params.layout, c, seeds, config) for c in clients})

    def reply(server: FedSpaServer, client: Client, round_: Round) -> Update:  # m_k * w, Algorithm 1 line 9
        return message(round_, {"model": masked(server.params, server.masks[client.index])})

    def zero(server: FedSpaServer, round_: Round) -> FedSpaSum:
        return FedSpaSum(WeightedSum(), {})

    def add(server: FedSpaServer, total: FedSpaSum, update: Update) -> FedSpaSum:
        changes = total.changes.add(update.parts["update"].tree(server.masks[update.sender]), 1.0)
        if evolves:
            total.masks[update.sender] = update.parts["mask"].tree()
        return FedSpaSum(changes, total.masks)

    def merge(one: FedSpaSum, other: FedSpaSum) -> FedSpaSum:
        return FedSpaSum(one.changes.merge(other.changes), one.masks | other.masks)

    def step(server: FedSpaServer, total: FedSpaSum, round_: Round) -> FedSpaServer:
        # A plain mean over the clients that took part, not over those that hold a coordinate: Algorithm 1 line 11.
        mean = total.changes.mean(otherwise=tree.zeros_like(server.params))
        return FedSpaServer(tree.subtract(server.params, mean), server.masks | total.masks)

    server = ServerHalf(
        init=init_server,
        reply=reply,
        zero=zero,
        add=add,
        step=step,
        merge=merge,
        global_model=lambda server: server.params,
        client_memory=("masks",),
        takes_mean=True,
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
        annealed=("prune_rate",) if evolves else (),
    )
