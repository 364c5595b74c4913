"""FedSim and FedAlt: a part of the model is shared, the rest is each client's own and never travels.

Paper: Pillutla, Malik, Mohamed, Rabbat, Sanjabi, Xiao, Federated Learning with Partial Model Personalization, 2022,
Algorithms 1 to 3. FedAlt trains the personal part and then the shared one, FedSim both at once (`updates`).

Kept: the personal part (where it is pulled, also as it began). Travels: the shared part, both ways. Costs: dense
training, twice the passes with FedAlt (`epochs` for the shared part, and as many for the personal one unless
`personal_epochs` says otherwise). A client's capacity does not apply: the model is dense.

Preset `paper`: one local epoch, a mean by numbers of examples (appendix B), no clipping but where the text has it
(StackOverflow: clip_norm=0.1), five epochs of final tuning. Preset `authors`, as their code differs: clients weigh by
their number of batches; at most 1,000 steps train the personal part (FedSim: both parts); where gradients are clipped
(StackOverflow: clip_norm=0.25), the last personal one stays in the norm while the shared part trains (`clip_stale`).
Both: no momentum, no decay of weights. Rates, rounds and schedules go by data set (table 8), the form of adapters by
model: see docs/methods/fedalt.md. Left out: the authors test stateless clients with what they trained last; ours start
afresh.

Four rows are this method with other options. All: the server weighs by examples (`weight`), and statistics of norms
stay with the client, as in every method here.

FedPer (Arivazhagan, Aggarwal, Singh, Choudhary, 2019) is FedSim with a personal output layer. `personal=last:N` keeps
more of the last layers, as the paper's experiments do.

FedRep (Collins, Hassani, Mokhtari, Shakkottai, ICML 2021) is FedAlt with a personal output layer: ten epochs train the
head, then `epochs` train the representation with the head frozen (the paper: one or five, by data set; five is this
package's default for everybody). After the last round all clients tune the head for ten epochs; the code tunes for as
many as a round's head epochs if those are more (`tune_epochs`). Preset `paper`: one epoch of representation, momentum
.5, a plain mean. Preset `authors`: a mean by examples, rate .01, batches of 10, decay 1e-4. Theirs spares biases, ours
decays all entries; they report the mean of the last ten rounds. Preset `pfedgate`: one epoch for each part and no final
tuning, of which that paper says nothing; it searched `personal_lr` (the row's grid).

LG-FedAvg (Liang, Liu, Liu, Salakhutdinov, Morency, 2020) is FedSim the other way round: the output layer is shared, the
representation is personal (`!output`). The authors start from a trained FedAvg model: --warm-start RUN. Preset
`authors` (their CIFAR-10): the last two layers are shared, a plain mean, one epoch, batches of 50, rate .1, momentum
.5. Not reproduced: their code keeps, for each user, the model that was best on its TEST data, averages the shared
layers of those, and reports the best round.

FedBN (Li, Jiang, Zhang, Kamp, Dou, ICLR 2021) is FedSim with every norm personal (`all-norms`), its running statistics
too. It needs a network with norms. Preset `authors` (their digits): one epoch, batches of 32, rate .01, a plain mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from sparsona.core import tree
from sparsona.core.errors import SparsonaError
from sparsona.core.method import (
    Batch,
    Client,
    Cost,
    Grads,
    Inbox,
    Layout,
    Method,
    Phase,
    Probe,
    Round,
    Seeds,
    ServerHalf,
    Tick,
    Tree,
    Update,
    dense,
    message,
)
from sparsona.learning.means import WEIGHT_TEXT, Weight, WeightedSum, client_weight
from sparsona.learning.optimizer import DECAY_TEXT, Decay, Memory, Moments, clip_share, make_optimizer
from sparsona.learning.partial import PartialConfig, mix_outputs, split_model, whole
from sparsona.learning.phases import turn_flops
from sparsona.learning.server_optimizer import begin_moments, server_step

if TYPE_CHECKING:
    from torch import Tensor

    from sparsona.core.task import Task


class FedAltConfig(PartialConfig):
    """What FedSim and FedAlt add to the options of training, of a personal part and of the server's step."""

    weight_decay: Decay = Field(0.0, description=DECAY_TEXT)
    updates: Literal["alternating", "simultaneous"] = Field("alternating", description="personal, then shared; or both")
    weight: Weight = Field("examples", description=WEIGHT_TEXT)
    clip_stale: bool = Field(False, description="the last personal gradient counts when the shared one is clipped")


@dataclass(frozen=True)
class FedAltState:
    """What a client keeps between rounds: v_i; v_i as it began, if it is pulled there; optimizers' memory, if kept."""

    personal: Tree
    start: Tree | None
    buffers: Tree
    memory: dict[str, Memory]


@dataclass(frozen=True)
class FedAltWork:
    """u_i and v_i, what v_i is pulled to, its last gradient if that counts, and the optimizers' memory by part."""

    shared: Tree
    personal: Tree
    start: Tree | None
    stale: Tree | None
    buffers: Tree
    memory: dict[str, Memory]


@dataclass(frozen=True)
class FedAltServer:
    """u, the rest of the initial model, and the state of the server's optimizer."""

    shared: Tree
    rest: Tree
    moments: tuple[Moments, ...]


def fedalt(task: Task, config: FedAltConfig) -> Method:
    """A shared part and a personal one."""
    alternates = config.updates == "alternating"
    if not alternates and config.personal_epochs not in (None, config.epochs):
        raise SparsonaError(
            "personal_epochs where both parts take the same steps",
            expected="updates=alternating",
            hint="leave personal_epochs out, or use fedalt",
        )
    parts = split_model(task, config.personal, config.additive_hidden)
    begin = lru_cache(maxsize=2)(parts.begin)  # clients that are as they began share one tree
    optimizers = {"shared": make_optimizer(config), "personal": make_optimizer(config, config.personal_lr)}
    keeps, cost_of_step = optimizers["shared"].keeps, optimizers["shared"].flops
    has_stale = alternates and config.clip_stale and config.clip_norm is not None
    flops = task.layout.forward_flops() + parts.additive.forward_flops()
    train_flops = task.layout.train_flops() + parts.additive.train_flops()

    def init_client(params: Tree, buffers: Tree, client: Client, seeds: Seeds) -> FedAltState:
        personal = begin(params, seeds.shared("additive"))
        start = personal if config.start_pull else None
        first = {"shared": params.select(parts.shared.names), "personal": personal} if keeps else {}
        return FedAltState(personal, start, buffers, {name: optimizers[name].first(first[name]) for name in first})

    def receive(state: FedAltState, inbox: Inbox, probe: Probe, round_: Round) -> FedAltWork:
        (update,) = inbox
        now = {"shared": update.parts["shared"].tree(), "personal": state.personal}
        memory = {name: optimizers[name].begin(state.memory.get(name, ()), now[name]) for name in now}
        stale = tree.zeros_like(state.personal) if has_stale else None
        return FedAltWork(now["shared"], state.personal, state.start, stale, state.buffers, memory)

    def outputs(work: FedAltWork, inputs: Tensor, train: bool, noise: Tensor | None = None) -> tuple[Tensor, Tree]:
        found, buffers = task.forward({**work.shared, **work.personal}, work.buffers, inputs, train, noise)
        if parts.additive.slots:
            found = mix_outputs(task, found, work.personal, inputs)
        return found, buffers

    def loss(work: FedAltWork, batch: Batch) -> tuple[Tensor, Tree]:
        found, buffers = outputs(work, batch.inputs, True, batch.noise)
        value = task.mean_loss(found, batch)
        if work.start is not None:
            value = value + config.start_pull * (work.personal.flat - work.start.flat).square().sum()
        return value, buffers

    def update(work: FedAltWork, grads: Grads, tick: Tick) -> FedAltWork:
        # torch clips gradients in place, those of an earlier phase too.
        stale = work.stale if "personal" not in grads else None
        share = clip_share(config.clip_norm, *grads.values(), *(() if stale is None else (stale,)))
        new: dict[str, Any] = {}
        memory = dict(work.memory)
        for name in grads:
            params = getattr(work, name)
            new[name], memory[name] = optimizers[name].step(params, grads[name], memory[name], tick, share=share)
        if has_stale:
            new["stale"] = tree.scale(grads["personal"] if stale is None else stale, share)
        return replace(work, **new, memory=memory)

    def finish(
        state: FedAltState, work: FedAltWork, inbox: Inbox, probe: Probe, round_: Round
    ) -> tuple[FedAltState, Update]:
        kept = FedAltState(work.personal, work.start, work.buffers, work.memory if keeps else {})
        weight = client_weight(config.weight, round_)
        return kept, message(round_, {"shared": dense(work.shared)}, weight)  # Algorithm 1 line 6

    def cost(layout: Layout, client: Client, round_: Round) -> Cost:
        sent = whole("shared", parts.shared)
        kept = whole("personal", parts.personal)
        if config.start_pull:
            kept += whole("start", parts.personal)
        memory = optimizers["shared"].sizes("shared memory", parts.shared)
        memory += optimizers["personal"].sizes("personal memory", parts.personal)
        at_work = whole("gradient", max(parts.shared, parts.personal, key=lambda part: part.size))
        if not alternates:
            at_work = whole("gradient", parts.all_slots)
        if has_stale:
            at_work += whole("stale", parts.personal)

        def of(phases: tuple[Phase, ...]) -> int:
            return sum(turn_flops((p,), client, round_, train_flops, step_flops(p.trains)) for p in phases)

        return Cost(
            sent,
            sent,
            of(phases),
            kept=kept + memory if keeps else kept,
            infer_flops=flops,
            at_work=at_work if keeps else at_work + memory,
            tune_flops=of((replace(tune, epochs=1),)),
        )

    def init_server(params: Tree, clients: tuple[Client, ...], seeds: Seeds) -> FedAltServer:
        shared = params.select(parts.shared.names)
        return FedAltServer(shared, params.select(parts.own.names), begin_moments(config, shared))

    def reply(server: FedAltServer, client: Client, round_: Round) -> Update:
        return message(round_, {"shared": dense(server.shared)})

    def zero(server: FedAltServer, round_: Round) -> WeightedSum:
        return WeightedSum()

    def add(server: FedAltServer, total: WeightedSum, update: Update) -> WeightedSum:
        return total.add(update.parts["shared"].tree(), update.weight)

    def step(server: FedAltServer, total: WeightedSum, round_: Round) -> FedAltServer:  # Algorithm 1 line 7
        mean = total.mean(otherwise=server.shared)
        shared, moments = server_step(config, server.shared, mean, server.moments)
        return FedAltServer(shared, server.rest, moments)

    def step_flops(trains: tuple[str, ...]) -> int:
        sizes = {"shared": parts.shared.size, "personal": parts.personal.size}
        return cost_of_step * sum(sizes[name] for name in trains)

    def phase(name: str, trains: tuple[str, ...], epochs: int, max_steps: int | None) -> Phase:
        return Phase(
            name=name,
            trains=trains,
            loss=loss,
            update=update,
            epochs=epochs,
            max_steps=max_steps,
            mixes_examples=task.mixes_examples,
            flops=lambda work: train_flops,
            step_flops=lambda work: step_flops(trains),
        )

    def deploy(work: FedAltWork) -> tuple[Tree, Tree]:
        return parts.join(work.shared, work.personal), work.buffers

    own = phase("personal", ("personal",), config.personal_epochs or config.epochs, config.max_personal_steps)
    if alternates:  # Algorithm 3
        phases: tuple[Phase, ...] = (own, phase("shared", ("shared",), config.epochs, None))
    else:  # Algorithm 2
        phases = (phase("both", ("personal", "shared"), config.epochs, config.max_personal_steps),)
    tune = replace(own, max_steps=None)
    server = ServerHalf(
        init=init_server,
        reply=reply,
        zero=zero,
        add=add,
        step=step,
        merge=WeightedSum.merge,
        takes_mean=True,
        global_model=lambda server: parts.join(server.shared, server.rest),
        is_partial=lambda clients: bool(parts.own.slots),
    )
    return Method(
        init_client=init_client,
        receive=receive,
        phases=phases,
        finish=finish,
        predict=lambda work, inputs: outputs(work, inputs, False)[0],
        cost=cost,
        deploy=None if parts.additive.slots else deploy,
        tune=tune,
        server=server,
    )
