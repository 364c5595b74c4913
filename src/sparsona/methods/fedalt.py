"""FedSim and FedAlt: a part of the model is shared, the rest is each client's own and never travels.

Paper: Pillutla, Malik, Mohamed, Rabbat, Sanjabi, Xiao, Federated Learning with Partial Model Personalization, 2022,
Algorithms 1 to 3. FedAlt trains the personal part and then the shared one, FedSim both at once (`updates`).

Kept: the personal part (where it is pulled, also as it began). Travels: the shared part, both ways. Costs: dense
training, twice the passes with FedAlt. A client's capacity does not apply: the model is dense.

Preset `paper`: one local epoch, a plain mean (Algorithm 1 line 7), no clipping but where the text has it
(StackOverflow: clip_norm=0.1), five epochs of final tuning. Preset `authors`, as their code differs: clients weigh by
their number of batches; at most 1,000 steps train the personal part (FedSim: both parts); where gradients are clipped
(StackOverflow: clip_norm=0.25), the last personal one stays in the norm while the shared part trains (`clip_stale`).
Both: no momentum, no decay of weights. Rates and schedules go by data set, the form of adapters by model: see
docs/methods/fedalt.md. Left out: the authors test stateless clients with what they trained last; ours start afresh.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from sparsona.core import tree
from sparsona.core.errors import SparsonaError
from sparsona.core.method import Cost, Method, Phase, ServerHalf, Tree, dense, message
from sparsona.learning.means import WeightedSum
from sparsona.methods.personal import PersonalPart, fused, split_model, trained_examples, whole
from sparsona.methods.server_optimizer import Moments, begin_moments, server_step
from sparsona.methods.training import clip_share, sgd

if TYPE_CHECKING:
    from sparsona.core.task import Task


class FedAltConfig(PersonalPart):
    """What FedSim and FedAlt add to the options of training, of a personal part and of the server's step."""

    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False, description="L2 pull of the weights towards zero")
    updates: Literal["alternating", "simultaneous"] = Field("alternating", description="personal, then shared; or both")
    weight: Literal["examples", "batches", "equal"] = Field("examples", description="what a client's update weighs by")
    clip_stale: bool = Field(False, description="the last personal gradient counts when the shared one is clipped")


@dataclass(frozen=True)
class FedAltState:
    """What a client keeps between rounds: v_i, and v_i as it began if it is pulled there."""

    personal: Tree
    start: tuple[Tree, ...]
    buffers: Tree


@dataclass(frozen=True)
class FedAltWork:
    """u_i and v_i, what v_i is pulled to, and its last gradient if that counts."""

    shared: Tree
    personal: Tree
    start: tuple[Tree, ...]
    stale: tuple[Tree, ...]
    buffers: Tree


@dataclass(frozen=True)
class FedAltServer:
    """u, the rest of the model as it began, and what the optimizer remembers."""

    shared: Tree
    rest: Tree
    moments: tuple[Moments, ...]


def fedalt(task: Task, config: FedAltConfig) -> Method:
    """A shared part and a personal one."""
    alternates = config.updates == "alternating"
    if not alternates and config.personal_epochs not in (None, config.epochs):
        what, mend = "personal_epochs where both parts take the same steps", "leave personal_epochs out, or use fedalt"
        raise SparsonaError(what, expected="updates=alternating", mend=mend)
    parts = split_model(task, config.personal, config.additive_hidden)
    begin = lru_cache(maxsize=2)(parts.begin)  # clients that are as they began share one tree
    configs = {"shared": config, "personal": config.model_copy(update={"lr": config.personal_lr or config.lr})}
    remembers = alternates and config.clip_stale and config.clip_norm is not None
    flops = task.layout.forward_flops() + parts.additive.forward_flops()

    def init_client(params, buffers, client, seeds):
        personal = begin(params, seeds.shared("additive"))
        return FedAltState(personal, (personal,) if config.pull else (), buffers)

    def receive(state: FedAltState, inbox, probe, round_):
        (update,) = inbox
        stale = (tree.zeros_like(state.personal),) if remembers else ()
        return FedAltWork(update.parts["shared"].tree(), state.personal, state.start, stale, state.buffers)

    def outputs(work: FedAltWork, inputs, train, noise=None):
        found, buffers = task.forward({**work.shared, **work.personal}, work.buffers, inputs, train, noise)
        return fused(task, found, work.personal, inputs) if parts.additive.slots else found, buffers

    def loss(work: FedAltWork, batch):
        found, buffers = outputs(work, batch.inputs, True, batch.noise)
        pulls = (config.pull * (work.personal.flat - start.flat).square().sum() for start in work.start)
        return sum(pulls, start=task.mean_loss(found, batch)), buffers

    def update(work: FedAltWork, grads, tick):
        stale = () if "personal" in grads else work.stale
        share = clip_share(config, *grads.values(), *stale)  # by all that the phase trains
        new: dict[str, Any] = {n: sgd(getattr(work, n), grads[n], tick, configs[n], share=share) for n in grads}
        if not remembers:
            return replace(work, **new)
        stale = stale or (grads["personal"],)  # torch clips gradients where they lie, a stale one too
        return replace(work, **new, stale=tuple(tree.scale(grad, share) for grad in stale))

    def finish(state: FedAltState, work: FedAltWork, inbox, probe, round_):
        count = round_.client.num_examples
        weight = {"examples": count, "batches": -(-count // round_.batch_size), "equal": 1.0}[config.weight]
        kept = FedAltState(work.personal, work.start, work.buffers)
        return kept, message(round_, {"shared": dense(work.shared)}, weight)  # Algorithm 1 line 6

    def cost(layout, client, round_):
        most = max(parts.shared, parts.personal, key=lambda of: of.size) if alternates else parts.all_slots
        kept = whole("personal", parts.personal) + (whole("start", parts.personal) if config.pull else ())
        at_work = whole("gradient", most) + (whole("stale", parts.personal) if remembers else ())
        examples, sent = sum(trained_examples(p, client, round_) for p in phases), whole("shared", parts.shared)
        return Cost(sent, sent, 3 * flops * examples, kept=kept, infer_flops=flops, at_work=at_work)

    def init_server(params, clients, seeds):
        shared = params.select(parts.shared.names)
        return FedAltServer(shared, params.select(parts.own.names), begin_moments(config, shared))

    def reply(server: FedAltServer, client, round_):
        return message(round_, {"shared": dense(server.shared)})

    def zero(server: FedAltServer, round_):
        return WeightedSum()

    def add(server: FedAltServer, total: WeightedSum, update):
        return total.add(update.parts["shared"].tree(), update.weight)

    def step(server: FedAltServer, total: WeightedSum, round_):  # Algorithm 1 line 7
        mean = total.mean(otherwise=server.shared)
        shared, moments = server_step(config, server.shared, mean, server.moments)
        return FedAltServer(shared, server.rest, moments)

    def phase(name, trains, epochs, max_steps):
        return Phase(
            name=name,
            trains=trains,
            loss=loss,
            update=update,
            epochs=epochs,
            max_steps=max_steps,
            mixes_examples=task.mixes_examples,
            flops=lambda work: 3 * flops,
        )

    own = phase("personal", ("personal",), config.personal_epochs or config.epochs, config.max_personal_steps)
    both = phase("both", ("personal", "shared"), config.epochs, config.max_personal_steps)
    # Algorithm 3, or 2
    phases = (own, phase("shared", ("shared",), config.epochs, None)) if alternates else (both,)
    deploy = None if parts.additive.slots else lambda work: (parts.join(work.shared, work.personal), work.buffers)
    server = ServerHalf(
        init=init_server,
        reply=reply,
        zero=zero,
        add=add,
        step=step,
        merge=WeightedSum.merge,
        global_model=lambda server: parts.join(server.shared, server.rest),
        is_partial=bool(parts.own.slots),
    )
    return Method(
        init_client=init_client,
        receive=receive,
        phases=phases,
        finish=finish,
        predict=lambda work, inputs: outputs(work, inputs, False)[0],
        cost=cost,
        deploy=deploy,
        tune=replace(own, max_steps=None),
        server=server,
    )
