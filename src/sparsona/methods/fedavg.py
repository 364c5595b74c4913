"""FedAvg: one model for all, the mean of the clients' models weighted by their number of examples.

Paper: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.
Kept: nothing but BatchNorm statistics. Travels: the dense model, both ways. Costs: dense training.
FedAdam (Reddi et al., ICLR 2021) is this method with `server_optimizer="adam"`, and FedAvg-FT is it followed by the
engine's final tuning of every client; FT (part.) of the partial-personalisation paper tunes a part of the model only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import Field

from sparsona.core.method import Cost, Method, PartSize, ServerHalf, Tree, dense, message
from sparsona.learning.means import WeightedSum
from sparsona.methods.personal import PartNames, part_phase
from sparsona.methods.server_optimizer import Moments, ServerStep, begin_moments, server_step
from sparsona.methods.training import Model, plain_weights, predictor, sgd_phase, training_flops

if TYPE_CHECKING:
    from sparsona.core.task import Task


class FedAvgConfig(ServerStep):
    """FedAvg has no options beyond those of training and of the server's step."""


class FedAvgPartConfig(FedAvgConfig):
    """FedAvg whose final tuning trains a part of the model alone."""

    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False, description="L2 pull of the weights towards zero")
    personal: PartNames = Field(
        ("output",), description="what is tuned: input, output, norm, adapter, split, or patterns of parameter names"
    )


@dataclass(frozen=True)
class FedAvgState:
    """What a client keeps between rounds."""

    buffers: Tree


@dataclass(frozen=True)
class FedAvgServer:
    """The model of all, and what the server's optimizer remembers."""

    params: Tree
    moments: tuple[Moments, ...]


def fedavg(task: Task, config: FedAvgConfig) -> Method:
    """One model for all."""

    def init_client(params, buffers, client, seeds):
        return FedAvgState(buffers)

    def receive(state: FedAvgState, inbox, probe, round_):
        (update,) = inbox
        return Model(update.parts["model"].tree(), state.buffers)

    def finish(state: FedAvgState, work: Model, inbox, probe, round_):
        update = message(round_, {"model": dense(work.params)}, weight=round_.client.num_examples)
        return FedAvgState(work.buffers), update

    def cost(layout, client, round_):
        model = (PartSize("model", layout, layout.size),)
        return Cost(model, model, training_flops(layout, client, config))

    def init_server(params, clients, seeds):
        return FedAvgServer(params, begin_moments(config, params))

    def reply(server: FedAvgServer, client, round_):
        return message(round_, {"model": dense(server.params)})

    def zero(server: FedAvgServer, round_):
        return WeightedSum()

    def add(server: FedAvgServer, total: WeightedSum, update):
        return total.add(update.parts["model"].tree(), update.weight)

    def step(server: FedAvgServer, total: WeightedSum, round_):
        mean = total.mean(otherwise=server.params)
        return FedAvgServer(*server_step(config, server.params, mean, server.moments))

    phase, predict = sgd_phase(task, config), predictor(task)
    tune = part_phase(task, config, config.personal) if isinstance(config, FedAvgPartConfig) else phase
    server = ServerHalf(
        init=init_server,
        reply=reply,
        zero=zero,
        add=add,
        step=step,
        merge=WeightedSum.merge,
        global_model=lambda server: server.params,
    )
    return Method(
        init_client=init_client,
        receive=receive,
        phases=(phase,),
        finish=finish,
        predict=predict,
        cost=cost,
        deploy=plain_weights,
        tune=tune,
        server=server,
    )
