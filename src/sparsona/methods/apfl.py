"""APFL: FedAvg, and a personal model that is mixed with the shared one.

Paper: Deng, Kamani, Mahdavi, Adaptive Personalized Federated Learning, 2020, Algorithm 1. A client predicts with
mix * v + (1 - mix) * w; w is FedAvg's, to the bit, and v learns from the gradient of the mixture, on the same batches.

Kept: the personal model v, and its share of the mixture if that is learned. Travels: the dense model, both ways. Costs:
dense training of two models.

`mix` is the paper's alpha. With `learn_mix` every client adapts its own by a gradient step at every batch, within
0 and 1; the authors' code takes that step once a round.

Differences from the text: updates weigh by examples (the text takes a plain mean: `weight=equal`). A client that has no
personal model yet (new, or without memory) starts it from the model it receives. What is evaluated is v mixed with the
last shared model, also for clients that were not sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import Field

from sparsona.core.errors import SparsonaError
from sparsona.core.layout import Slot
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
from sparsona.methods.fedavg import FedAvgConfig, fedavg

if TYPE_CHECKING:
    from torch import Tensor

    from sparsona.core.task import Task


class APFLConfig(FedAvgConfig):
    """What APFL adds to the options of FedAvg."""

    mix: float = Field(0.5, ge=0, le=1, description="share of the personal model in the mixture; at first, if learned")
    learn_mix: bool = Field(False, description="each client adapts its share of the mixture")
    personal_lr: Positive | None = Field(None, description="learning rate of the personal model; none: lr")
    mix_lr: Positive | None = Field(None, description="learning rate of the share, with learn_mix; none: lr")


@dataclass(frozen=True)
class APFLState:
    """v_i, the statistics of the shared model and of the mixture, and the optimizers' memory if kept."""

    personal: Tree
    mix: Tensor | None  # None: it is the same for all, and constant
    buffers: Tree
    buffers_mixed: Tree
    memory: dict[str, Memory]


@dataclass(frozen=True)
class APFLWork:
    """w_i, v_i and alpha_i; statistics by model, memory by what is trained."""

    shared: Tree
    personal: Tree
    mix: Tensor
    buffers: dict[str, Tree]
    memory: dict[str, Memory]


def apfl(task: Task, config: APFLConfig) -> Method:
    """A shared model, and a personal one that is mixed with it."""
    if config.mix_lr is not None and not config.learn_mix:
        raise SparsonaError(
            f"mix_lr={config.mix_lr} without learn_mix",
            expected="learn_mix=true, where each client adapts its share",
            hint="leave mix_lr out, or --set learn_mix=true",
        )
    base = fedavg(task, config)
    optimizers = {"shared": make_optimizer(config), "personal": make_optimizer(config, config.personal_lr)}
    keeps, cost_of_step = optimizers["shared"].keeps, optimizers["shared"].flops
    learned = ("mix",) if config.learn_mix else ()

    def init_client(params: Tree, buffers: Tree, client: Client, seeds: Seeds) -> APFLState:
        memory = {name: optimizer.first(params) for name, optimizer in optimizers.items()} if keeps else {}
        mix = params.flat.new_tensor(config.mix) if config.learn_mix else None
        return APFLState(params, mix, buffers, buffers, memory)

    def receive(state: APFLState, inbox: Inbox, probe: Probe, round_: Round) -> APFLWork:
        (update,) = inbox
        shared = update.parts["model"].tree()
        now = {"shared": shared, "personal": shared if round_.is_new else state.personal}
        memory = {name: optimizers[name].begin(state.memory.get(name, ()), now[name]) for name in now}
        mix = shared.flat.new_tensor(config.mix) if state.mix is None else state.mix
        buffers = {"shared": state.buffers, "mixed": state.buffers_mixed}
        return APFLWork(now["shared"], now["personal"], mix, buffers, memory)

    def mixture(work: APFLWork) -> Tree:
        """v-bar_i. The shared model is a constant in it: its gradient is that of its own loss."""
        return work.personal.like(work.mix * work.personal.flat + (1 - work.mix) * work.shared.flat.detach())

    def loss(work: APFLWork, batch: Batch, trains: tuple[str, ...]) -> tuple[Tensor, Any]:
        models = {"shared": work.shared} if "shared" in trains else {}
        values, buffers = [], dict(work.buffers)
        for name, params in {**models, "mixed": mixture(work)}.items():
            outputs, buffers[name] = task.forward(params, work.buffers[name], batch.inputs, True, batch.noise)
            values.append(task.mean_loss(outputs, batch))
        return sum(values[1:], values[0]), buffers

    def update(work: APFLWork, grads: Grads, tick: Tick) -> APFLWork:
        new: dict[str, Any] = {}
        memory = dict(work.memory)
        for name in optimizers:  # Algorithm 1: w_i by its own gradient, v_i by that of the mixture
            if name in grads:
                new[name], memory[name] = optimizers[name].step(getattr(work, name), grads[name], memory[name], tick)
        if config.learn_mix:  # alpha_i by <v_i - w_i, gradient of the mixture>
            rate = (config.mix_lr or config.lr) * tick.lr_scale
            new["mix"] = (work.mix - rate * grads["mix"]).clamp(0.0, 1.0)
        return replace(work, **new, memory=memory)

    def finish(state: APFLState, work: APFLWork, inbox: Inbox, probe: Probe, round_: Round) -> tuple[APFLState, Update]:
        mix, memory = work.mix if config.learn_mix else None, work.memory if keeps else {}
        kept = APFLState(work.personal, mix, work.buffers["shared"], work.buffers["mixed"], memory)
        return kept, message(round_, {"model": dense(work.shared)}, weight=client_weight(config.weight, round_))

    def phase(name: str, *models: str) -> Phase:
        trains = (*models, *learned)
        return Phase(
            name=name,
            trains=trains,
            loss=lambda work, batch: loss(work, batch, trains),
            update=update,
            epochs=config.epochs,
            mixes_examples=task.mixes_examples,
            flops=lambda work: len(models) * task.layout.train_flops(),
            step_flops=lambda work: cost_of_step * len(models) * task.layout.size,
        )

    both, own = phase("train", "shared", "personal"), phase("personal", "personal")

    def cost(layout: Layout, client: Client, round_: Round) -> Cost:
        def part(name: str) -> PartSize:
            return PartSize(name, layout, layout.size)

        def of(phase: Phase, models: int) -> int:
            per_example, per_step = layout.train_flops(), cost_of_step * layout.size
            return models * turn_flops((phase,), client, round_, per_example, per_step)

        mix = (PartSize("mix", Layout((Slot("mix", ()),)), 1),)
        memory = tuple(one for name, found in optimizers.items() for one in found.sizes(f"{name} memory", layout))
        kept = (part("personal"), *(mix if config.learn_mix else ()))
        at_work = (part("mixture"), part("gradient"), part("second gradient"), *(() if config.learn_mix else mix))
        return Cost(
            (part("model"),),
            (part("model"),),
            of(both, 2),
            kept=kept + memory if keeps else kept,
            at_work=at_work if keeps else at_work + memory,
            tune_flops=of(replace(own, epochs=1), 1),
        )

    def predict(work: APFLWork, inputs: Tensor) -> Tensor:
        return task.forward(mixture(work), work.buffers["mixed"], inputs, train=False)[0]

    return replace(
        base,
        init_client=init_client,
        receive=receive,
        phases=(both,),
        finish=finish,
        predict=predict,
        cost=cost,
        deploy=lambda work: (mixture(work), work.buffers["mixed"]),
        tune=own,
    )
