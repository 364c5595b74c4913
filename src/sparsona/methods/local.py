"""Local: every client trains alone.

Kept: the client's own model. Travels: nothing. Costs: dense training. Papers differ only in how often a client trains:
DisPFL lets all train every round, FedSpa only those sampled (`per_round` decides).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsona.core.method import Cost, Method, PartSize
from sparsona.methods.training import Model, Training, plain_weights, predictor, sgd_phase, training_flops

if TYPE_CHECKING:
    from sparsona.core.task import Task


class LocalConfig(Training):
    """Local has no options beyond those of training."""


def local(task: Task, config: LocalConfig) -> Method:
    """Every client trains alone."""

    def init_client(params, buffers, client, seeds):
        return Model(params, buffers)

    def receive(state: Model, inbox, probe, round_):
        return state

    def finish(state: Model, work: Model, inbox, probe, round_):
        return work, None

    def cost(layout, client, round_):
        model = (PartSize("params", layout, layout.size),)
        return Cost(None, None, training_flops(layout, client, config), kept=model)

    phase, predict = sgd_phase(task, config), predictor(task)
    return Method(
        init_client=init_client,
        receive=receive,
        phases=(phase,),
        finish=finish,
        predict=predict,
        cost=cost,
        deploy=plain_weights,
        tune=phase,
    )
