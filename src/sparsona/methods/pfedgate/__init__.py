"""pFedGate: a private gate scales blocks of the shared model and drops those that do not fit the client's budget.

Paper: Chen, Yao, Gao, Ding, Li, Efficient Personalized Federated Learning via Sparse Model-Adaptation, ICML 2023.

Kept: the gate, its norms' statistics, and the mean scores of the last turn. Travels: down, the dense model; up, the
change of the blocks that the turn used, and one bit for each block. Costs: training inside the budget, and the gate:
upper bounds, since training decides which blocks are used; a run counts those that were. |I* W| / d <= s_i =
min(density, capacity) in every batch.

Beyond the text: gates start at .9, where torch's layers start at .5, which halves every layer of the model. Momentum,
decay and clipping are the authors' code's, but only where a batch used a block: what is sent is all that moved.
A client deploys the model that the mean of its training scores makes (plain weights); one that never trained, that of
equal scores. Scores are compared in steps of 2**-16, so that rounding breaks no tie.

`paper`: two paths, a gate for each example, in training and in use, blocks cut from an operator's weights and bias
together, and the maximum of (6), not the walk by score. `authors`: one path and a gate for each batch, also of the test
data (`transductive`: what is predicted depends on what shares its batch, and results say so); equal chunks, whose first
ones are free, in two budgets (`split_budget`: with s below 1/B they alone exceed s; with s = .5 the model in use has
.43), s_min = min(max(1/B, .1), s); scores in tenths, at least s_min; no gradient to the scores of dropped blocks, and
with s = 1 to none; incomplete batches of CIFAR left out; two paths on CIFAR-100; decay and momentum everywhere, the
latter also from turn to turn; ReLU on logits; a dense mean over all clients, where those not sampled stand still. Not
reproduced of it: rates that follow the accuracy on test data, and another network for CIFAR-100. Both: batches of 128,
one pass, gates that start at .5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sparsona.core import tree
from sparsona.core.method import (
    Client,
    Cost,
    Inbox,
    Layout,
    Method,
    Phase,
    Probe,
    Round,
    Seeds,
    ServerHalf,
    Tree,
    Update,
    dense,
    masked,
    message,
)
from sparsona.learning.means import IndexedSum, WeightedSum
from sparsona.learning.optimizer import Memory
from sparsona.methods.pfedgate.blocks import spread
from sparsona.methods.pfedgate.config import PFedGateConfig, make_budget
from sparsona.methods.pfedgate.model import GatedModel, GatedWork, Traces

if TYPE_CHECKING:
    from torch import Tensor

    from sparsona.core.task import Task

__all__ = ["PFedGateConfig", "pfedgate"]


@dataclass(frozen=True)
class PFedGateState:
    """What a client keeps: phi_i, its norms' statistics, the scores G and M it deploys by, and memory if it is kept."""

    gate: Tree
    statistics: Tree
    scores: Tensor
    memory: dict[str, Memory]
    buffers: Tree


@dataclass(frozen=True)
class PFedGateServer:
    """theta_g, and the training examples and the budget of each client."""

    params: Tree
    sizes: Tensor
    shares: Tensor


def pfedgate(task: Task, config: PFedGateConfig) -> Method:
    """A private gate, a shared model, a budget."""
    model = GatedModel(task, config)
    optimizers, keeps = model.optimizers, config.optimizer_memory == "keep"
    sends_blocks = config.aggregation == "uploaded"

    def share_of(client: Client) -> float:
        return min(config.density, client.capacity)  # s_i

    def smallest_of(share: float) -> float:
        smallest = max(1 / config.num_blocks, 0.1) if config.smallest == "authors" else config.smallest
        return min(smallest, share)  # s_min is in (0, s_i]

    def init_client(params: Tree, buffers: Tree, client: Client, seeds: Seeds) -> PFedGateState:
        here = model.cut(smallest_of(share_of(client)))
        gate, statistics = here.form.init(seeds.own("gate"), params.flat)
        scores = params.flat.new_full((2, here.bits.size), config.gate_start)
        first = {"params": params, "gate": gate} if keeps else {}
        memory = {name: optimizers[name].first(first[name]) for name in first}
        return PFedGateState(gate, statistics, scores, memory, buffers)

    def receive(state: PFedGateState, inbox: Inbox, probe: Probe, round_: Round) -> GatedWork:
        assert round_.client is not None
        (update,) = inbox
        params, share = update.parts["model"].tree(), share_of(round_.client)
        smallest = smallest_of(share)
        budget = make_budget(model.cut(smallest).blocks, config, share, smallest, params.flat)
        now = {"params": params, "gate": state.gate}
        memory = {name: optimizers[name].begin(state.memory.get(name, ()), now[name]) for name in now}
        traces = Traces.start(state.buffers, state.statistics, state.scores)
        pooled = params.flat.new_zeros(task.input_shape if config.gating == "client" else ())
        return GatedWork(params, state.gate, traces, state.scores, memory, {str(smallest): budget}, pooled)

    def finish(
        state: PFedGateState, work: GatedWork, inbox: Inbox, probe: Probe, round_: Round
    ) -> tuple[PFedGateState, Update]:
        assert round_.client is not None
        start = next(iter(inbox)).parts["model"].tree()
        change, traces = tree.subtract(work.params, start), work.buffers  # Algorithm 1 line 9
        memory = work.memory if keeps else {}
        state = PFedGateState(work.gate, traces.gate, model.current(work), memory, traces.model)
        parts = {"update": dense(change, is_change=True)}
        if sends_blocks:
            here, used = model.of(work)[0], traces.used > 0
            mask = Tree(task.layout, spread(here.blocks, used))
            parts = {"update": masked(change, mask, is_change=True), "blocks": dense(Tree(here.bits, used))}
        return state, message(round_, parts, weight=round_.client.num_examples)

    def cost(layout: Layout, client: Client, round_: Round) -> Cost:
        share = share_of(client)
        return model.cost(client, round_, share, smallest_of(share), phases, tune)

    def init_server(params: Tree, clients: tuple[Client, ...], seeds: Seeds) -> PFedGateServer:
        of = params.flat[:0].double().new_tensor
        return PFedGateServer(params, of([c.num_examples for c in clients]), of([share_of(c) for c in clients]))

    def reply(server: PFedGateServer, client: Client, round_: Round) -> Update:
        return message(round_, {"model": dense(server.params)})

    def zero(server: PFedGateServer, round_: Round) -> IndexedSum | WeightedSum:
        return IndexedSum() if sends_blocks else WeightedSum()

    def add(server: PFedGateServer, total: IndexedSum | WeightedSum, update: Update) -> IndexedSum | WeightedSum:
        if isinstance(total, WeightedSum):
            return total.add(update.parts["update"].tree(), update.weight)
        blocks = model.cut(smallest_of(float(server.shares[update.sender]))).blocks
        mask = Tree(task.layout, spread(blocks, update.parts["blocks"].tree().flat))
        return total.add(update.parts["update"].tree(mask), mask, update.weight)

    def step(  # line 10
        server: PFedGateServer, total: IndexedSum | WeightedSum, round_: Round
    ) -> PFedGateServer:
        if isinstance(total, WeightedSum):  # a mean over all clients; those that sent nothing count as unchanged
            total = replace(total, weight=float(server.sizes.sum()))
        return replace(server, params=tree.add(server.params, total.mean(tree.zeros_like(server.params))))

    phases: tuple[Phase, ...] = (model.phase("train", "params", "gate"),)  # lines 7 and 8
    if config.updates == "alternating":
        phases = (model.phase("gate", "gate"), model.phase("model", "params"))
    is_plain = config.deploy_gate == "stored" and not config.logits_relu
    deploy, tune = model.deploy if is_plain else None, model.phase("tune", "gate")  # appendix H.1: the gate alone
    server = ServerHalf(
        init=init_server,
        reply=reply,
        zero=zero,
        add=add,
        step=step,
        merge=lambda one, other: one.merge(other),
        global_model=lambda server: server.params,
    )
    return Method(
        init_client=init_client,
        receive=receive,
        phases=phases,
        finish=finish,
        predict=model.predict,
        cost=cost,
        deploy=deploy,
        tune=tune,
        server=server,
        trait=lambda state: state.scores[0],
        other_traits={"phi": lambda state: state.gate},
        measure=model.measure,
        transductive=config.deploy_gate == "transductive",
    )
