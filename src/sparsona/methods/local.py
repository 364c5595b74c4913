"""Local: every client trains alone.

Kept: the client's own model. Travels: nothing. Costs: dense training. Papers differ only in how often a client trains:
DisPFL lets all train every round, FedSpa only those sampled (`per_round` decides).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sparsona.core.method import Client, Cost, Inbox, Layout, Method, PartSize, Probe, Round, Seeds, Tree
from sparsona.learning.optimizer import make_optimizer
from sparsona.learning.phases import Model, Training, plain_weights, predictor, training_phase, turn_flops

if TYPE_CHECKING:
    from sparsona.core.task import Task


class LocalConfig(Training):
    """Local has no options beyond those of training."""


def local(task: Task, config: LocalConfig) -> Method:
    """Every client trains alone."""
    optimizer = make_optimizer(config)
    phase = training_phase(task, config)

    def init_client(params: Tree, buffers: Tree, client: Client, seeds: Seeds) -> Model:
        return Model(params, buffers, optimizer.first(params))

    def receive(state: Model, inbox: Inbox, probe: Probe, round_: Round) -> Model:
        return replace(state, memory=optimizer.begin(state.memory, state.params))

    def finish(state: Model, work: Model, inbox: Inbox, probe: Probe, round_: Round) -> tuple[Model, None]:
        return replace(work, memory=optimizer.end(work.memory)), None

    def cost(layout: Layout, client: Client, round_: Round) -> Cost:
        model, gradient = (PartSize(name, layout, layout.size) for name in ("params", "gradient"))
        memory = optimizer.sizes("memory", layout)
        per_example, per_step = layout.train_flops(), optimizer.flops * layout.size
        return Cost(
            None,
            None,
            turn_flops((phase,), client, round_, per_example, per_step),
            kept=(model, *memory) if optimizer.keeps else (model,),
            at_work=(gradient,) if optimizer.keeps else (*memory, gradient),
            tune_flops=turn_flops((replace(phase, epochs=1),), client, round_, per_example, per_step),
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
    )
