"""Ditto: FedAvg, and beside it a personal model that is pulled towards the model received.

Paper: Li, Hu, Beirami, Smith, Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021,
Algorithm 1. The shared model is FedAvg's, to the bit; the personal one minimises the client's loss plus prox / 2 times
its squared distance to the received model.

Kept: the personal model, as of the client's last turn. Travels: the dense model, both ways. Costs: dense training of
two models.

`personal_start` says where the personal model of a client that has none (new, or without memory) starts: `received`,
from the model that it first receives, or `initial`, from the initial weights, as in both published codes. `restart`,
which nobody published: every client's starts from the received model in every turn, so that what is kept is only used
between turns.

`schedule` says when the personal model is trained. `interleaved`, as in the authors' code: on the same batches as the
shared one, a step of each; the pull goes to the received model, not to the client's copy of it, so that the order of
the two steps does not matter. `sequential`: after the shared one, in batches and epochs of its own. `tuning`: in the
final tuning alone (give `tune_epochs`), from the shared model, and no personal model is kept.

Preset `authors`: personal models start from the initial weights, updates weigh equally, constant rate, neither decay of
weights nor clipping; the client's choice of prox among .1, 1 and 2 by validation loss at every step (their
`dynamic_lam`) is left to `sparsona tune`. Presets `fedspa` and `dispfl`: the same start; 2 epochs of the shared model,
then 3 of the personal one, whose pull is a step of its own after each step of SGD (`prox_step=decoupled`), so that it
sees the new weights and is not clipped (on Tiny ImageNet the latter took 3 and 2 epochs). Preset `fedalt`: a FedAvg
model is tuned for 5 epochs; its penalty .1 ||v - w||^2 has no half, so prox is .2 (StackOverflow: prox=0.002), and
updates weigh by batches. Preset `pfedgate`: one epoch with momentum; prox was searched among .05, .1, .5 and .8.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from sparsona.core.errors import SparsonaError
from sparsona.core.method import (
    Batch,
    Client,
    Cost,
    Grads,
    Inbox,
    Layout,
    Method,
    PartSize,
    Phase,
    Probe,
    Round,
    Seeds,
    Tick,
    Tree,
    Update,
    dense,
    message,
)
from sparsona.learning.means import client_weight
from sparsona.learning.optimizer import Memory, Positive, make_optimizer
from sparsona.learning.phases import turn_flops
from sparsona.methods.fedavg import fedavg
from sparsona.methods.fedprox import FedProxConfig, fedprox

if TYPE_CHECKING:
    from torch import Tensor

    from sparsona.core.task import Task


class DittoConfig(FedProxConfig):
    """What Ditto adds to the options of FedAvg; `prox` is its lambda."""

    prox: float = Field(
        0.5,
        ge=0,
        allow_inf_nan=False,
        description="weight of half the squared distance of the personal model to the received one",
    )
    schedule: Literal["interleaved", "sequential", "tuning"] = Field(
        "interleaved",
        description="when the personal model is trained: with the shared one, after it, or in final tuning alone",
    )
    prox_step: Literal["gradient", "decoupled"] = Field(
        "gradient", description="the pull is part of the loss, or a step of its own after each step on the loss"
    )
    prox_to: Literal["received", "trained"] = Field(
        "received",
        description="what the personal model is pulled to: the received model, or the client's trained copy of it "
        "(schedule=sequential)",
    )
    personal_start: Literal["received", "initial", "restart"] = Field(
        "received",
        description="where a client's first personal model starts: from the received model or the initial weights; "
        "restart: from the received model in every turn",
    )
    personal_epochs: int | None = Field(
        None, ge=1, description="passes that train the personal model, with schedule=sequential; none: epochs"
    )
    personal_lr: Positive | None = Field(None, description="learning rate of the personal model; none: lr")


@dataclass(frozen=True)
class DittoState:
    """v_k, the statistics of both models, and the optimizers' memory if kept."""

    personal: Tree
    buffers: Tree
    buffers_personal: Tree
    memory: dict[str, Memory]


@dataclass(frozen=True)
class DittoWork:
    """The shared model in training, v_k, w^t as received; statistics and memory by the name of the model."""

    shared: Tree
    personal: Tree
    start: Tree
    buffers: dict[str, Tree]
    memory: dict[str, Memory]


def ditto(task: Task, config: DittoConfig) -> Method:
    """A shared model, and a personal one that is pulled towards it."""
    is_sequential = config.schedule == "sequential"
    if not is_sequential and config.personal_epochs not in (None, config.epochs):
        raise SparsonaError(
            f"personal_epochs with schedule={config.schedule}",
            expected="schedule=sequential, where the personal model has epochs of its own",
            hint="leave personal_epochs out, or choose that schedule",
        )
    if not is_sequential and config.prox_to != "received":
        raise SparsonaError(
            f"prox_to={config.prox_to} with schedule={config.schedule}",
            expected="schedule=sequential, where the shared model is trained first",
            hint="leave prox_to out, or choose that schedule",
        )
    if config.schedule == "tuning":
        if config.personal_start != "received":
            raise SparsonaError(
                f"personal_start={config.personal_start} with schedule=tuning",
                expected="personal_start=received: there the personal model starts from the last shared one",
                hint="leave personal_start out, or choose another schedule",
            )
        return _only_tuned(task, config)
    base = fedavg(task, config)
    optimizers = {"shared": make_optimizer(config), "personal": make_optimizer(config, config.personal_lr)}
    keeps, cost_of_step = optimizers["shared"].keeps, optimizers["shared"].flops
    size = task.layout.size

    def init_client(params: Tree, buffers: Tree, client: Client, seeds: Seeds) -> DittoState:
        memory = {name: optimizer.first(params) for name, optimizer in optimizers.items()} if keeps else {}
        return DittoState(params, buffers, buffers, memory)

    def receive(state: DittoState, inbox: Inbox, probe: Probe, round_: Round) -> DittoWork:
        (update,) = inbox
        start = update.parts["model"].tree()
        begins = round_.is_new and config.personal_start != "initial"  # State has the initial weights
        now = {"shared": start, "personal": start if begins else state.personal}
        memory = {name: optimizers[name].begin(state.memory.get(name, ()), now[name]) for name in now}
        buffers = {"shared": state.buffers, "personal": state.buffers_personal}
        return DittoWork(now["shared"], now["personal"], start, buffers, memory)

    def anchor(work: DittoWork) -> Tensor:
        return work.start.flat if config.prox_to == "received" else work.shared.flat

    def loss(work: DittoWork, batch: Batch, trains: tuple[str, ...]) -> tuple[Tensor, Any]:
        values, buffers = [], dict(work.buffers)
        for name in trains:
            outputs, buffers[name] = task.forward(
                getattr(work, name), work.buffers[name], batch.inputs, True, batch.noise
            )
            values.append(task.mean_loss(outputs, batch))
        if "personal" in trains and config.prox_step == "gradient":  # h_k of Ditto's equation 1
            values.append(config.prox / 2 * (work.personal.flat - anchor(work)).square().sum())
        return sum(values[1:], values[0]), buffers  # no term depends on both models: each has its own gradient

    def update(work: DittoWork, grads: Grads, tick: Tick) -> DittoWork:
        new: dict[str, Any] = {}
        memory = dict(work.memory)
        for name in grads:
            new[name], memory[name] = optimizers[name].step(getattr(work, name), grads[name], memory[name], tick)
        if "personal" in new and config.prox_step == "decoupled":
            v = new["personal"].flat
            rate = (config.personal_lr or config.lr) * tick.lr_scale
            new["personal"] = new["personal"].like(v - rate * config.prox * (v - anchor(work)))
        return replace(work, **new, memory=memory)

    def finish(
        state: DittoState, work: DittoWork, inbox: Inbox, probe: Probe, round_: Round
    ) -> tuple[DittoState, Update]:
        memory = work.memory if keeps else {}
        kept = DittoState(work.personal, work.buffers["shared"], work.buffers["personal"], memory)
        return kept, message(round_, {"model": dense(work.shared)}, weight=client_weight(config.weight, round_))

    def restart(work: DittoWork, probe: Probe, round_: Round) -> DittoWork:
        return replace(work, personal=work.start)

    def phase(name: str, *trains: str, epochs: int = config.epochs) -> Phase:
        return Phase(
            name=name,
            trains=trains,
            loss=lambda work, batch: loss(work, batch, trains),
            update=update,
            epochs=epochs,
            enter=restart if "personal" in trains and config.personal_start == "restart" else None,
            mixes_examples=task.mixes_examples,
            flops=lambda work: len(trains) * task.layout.train_flops(),
            step_flops=lambda work: cost_of_step * len(trains) * size,
        )

    own = phase("personal", "personal", epochs=config.personal_epochs or config.epochs)
    # Named "train", both have the batches of FedAvg's phase.
    phases = (phase("train", "shared"), own) if is_sequential else (phase("train", "shared", "personal"),)

    def cost(layout: Layout, client: Client, round_: Round) -> Cost:
        def part(name: str) -> PartSize:
            return PartSize(name, layout, layout.size)

        def of(*phases: Phase) -> int:
            per_example, per_step = layout.train_flops(), cost_of_step * layout.size
            return sum(
                len(found.trains) * turn_flops((found,), client, round_, per_example, per_step) for found in phases
            )

        memory = tuple(one for name, found in optimizers.items() for one in found.sizes(f"{name} memory", layout))
        at_work = (part("trained"), part("gradient"), *(() if is_sequential else (part("second gradient"),)))
        return Cost(
            (part("model"),),
            (part("model"),),
            of(*phases),
            kept=(part("personal"), *memory) if keeps else (part("personal"),),
            at_work=at_work if keeps else at_work + memory,
            tune_flops=of(replace(own, epochs=1)),
        )

    def predict(work: DittoWork, inputs: Tensor) -> Tensor:
        return task.forward(work.personal, work.buffers["personal"], inputs, train=False)[0]

    return replace(
        base,
        init_client=init_client,
        receive=receive,
        phases=phases,
        finish=finish,
        predict=predict,
        cost=cost,
        deploy=lambda work: (work.personal, work.buffers["personal"]),
        tune=own,
    )


def _only_tuned(task: Task, config: DittoConfig) -> Method:
    """FedAvg in the rounds; in final tuning FedProx, whose pull goes to the last shared model."""
    if config.prox_step != "gradient":
        raise SparsonaError(
            f"prox_step={config.prox_step} with schedule=tuning",
            expected="prox_step=gradient",
            hint="leave prox_step out",
        )
    rate = {} if config.personal_lr is None else {"lr": config.personal_lr}
    pulled = fedprox(task, config.model_copy(update=rate))
    plain = fedavg(task, config)
    return replace(pulled, phases=plain.phases)
