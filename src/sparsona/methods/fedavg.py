"""FedAvg: one shared model, the mean of the clients' models weighted by their number of examples.

Paper: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.
Kept: nothing but BatchNorm statistics. Travels: the dense model, both ways. Costs: dense training.
FedAdam, FedYogi and FedAdagrad (Reddi et al., ICLR 2021) are this method with another step of the server
(`server_optimizer`; see learning/server_optimizer.py), which tells no client more. FedAvg-FT is it followed by the
engine's final tuning of every client; FT (part.) of the partial-personalisation paper tunes a part of the model only.

Presets of the papers that compare with it: `dispfl` tunes at the rate of round -1, .1 / .998; `fedalt` has the rates
of step (a) in the rounds and of step (c) in tuning; `pfedgate` tunes for one epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pydantic import Field

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
    Tree,
    Update,
    dense,
    message,
)
from sparsona.learning.means import WEIGHT_TEXT, Weight, WeightedSum, client_weight
from sparsona.learning.optimizer import DECAY_TEXT, Decay, Memory, Moments, make_optimizer
from sparsona.learning.partial import PartNames, part_phase
from sparsona.learning.phases import Model, plain_weights, predictor, training_phase, turn_flops
from sparsona.learning.server_optimizer import ServerStep, begin_moments, server_step

if TYPE_CHECKING:
    from sparsona.core.task import Task


class FedAvgConfig(ServerStep):
    """What FedAvg adds to the options of training and of the server's step."""

    weight: Weight = Field("examples", description=WEIGHT_TEXT)


class FedAvgPartConfig(FedAvgConfig):
    """FedAvg whose final tuning trains a part of the model alone."""

    weight_decay: Decay = Field(0.0, description=DECAY_TEXT)
    personal: PartNames = Field(
        ("output",),
        description="what is tuned: input, output, norm, adapter, adapter+norms, split, all-norms, last:N (layers), or "
        "patterns of names; !output: all but output",
    )


@dataclass(frozen=True)
class FedAvgState:
    """What a client keeps between rounds."""

    buffers: Tree
    memory: Memory = ()


@dataclass(frozen=True)
class FedAvgServer:
    """The shared model, and the state of the server's optimizer."""

    params: Tree
    moments: tuple[Moments, ...]


def fedavg(task: Task, config: FedAvgConfig) -> Method:
    """One shared model."""
    optimizer = make_optimizer(config)
    phase = training_phase(task, config)
    tune = part_phase(task, config, config.personal) if isinstance(config, FedAvgPartConfig) else phase

    def init_client(params: Tree, buffers: Tree, client: Client, seeds: Seeds) -> FedAvgState:
        return FedAvgState(buffers, optimizer.first(params))

    def receive(state: FedAvgState, inbox: Inbox, probe: Probe, round_: Round) -> Model:
        (update,) = inbox
        params = update.parts["model"].tree()
        return Model(params, state.buffers, optimizer.begin(state.memory, params))

    def finish(
        state: FedAvgState, work: Model, inbox: Inbox, probe: Probe, round_: Round
    ) -> tuple[FedAvgState, Update]:
        update = message(round_, {"model": dense(work.params)}, weight=client_weight(config.weight, round_))
        return FedAvgState(work.buffers, optimizer.end(work.memory)), update

    def cost(layout: Layout, client: Client, round_: Round) -> Cost:
        model, gradient = (PartSize(name, layout, layout.size) for name in ("model", "gradient"))
        memory = optimizer.sizes("memory", layout)
        per_example, per_step = layout.train_flops(), optimizer.flops * layout.size
        return Cost(
            (model,),
            (model,),
            turn_flops((phase,), client, round_, per_example, per_step),
            kept=memory if optimizer.keeps else (),
            at_work=(gradient,) if optimizer.keeps else (*memory, gradient),
            tune_flops=turn_flops((replace(tune, epochs=1),), client, round_, per_example, per_step),
        )

    def init_server(params: Tree, clients: tuple[Client, ...], seeds: Seeds) -> FedAvgServer:
        return FedAvgServer(params, begin_moments(config, params))

    def reply(server: FedAvgServer, client: Client, round_: Round) -> Update:
        return message(round_, {"model": dense(server.params)})

    def zero(server: FedAvgServer, round_: Round) -> WeightedSum:
        return WeightedSum()

    def add(server: FedAvgServer, total: WeightedSum, update: Update) -> WeightedSum:
        return total.add(update.parts["model"].tree(), update.weight)

    def step(server: FedAvgServer, total: WeightedSum, round_: Round) -> FedAvgServer:
        mean = total.mean(otherwise=server.params)
        return FedAvgServer(*server_step(config, server.params, mean, server.moments))

    server = ServerHalf(
        init=init_server,
        reply=reply,
        zero=zero,
        add=add,
        step=step,
        merge=WeightedSum.merge,
        takes_mean=True,
        global_model=lambda server: server.params,
    )
    return Method(
        init_client=init_client,
        receive=receive,
        phases=(phase,),
        finish=finish,
        predict=predictor(task),
        cost=cost,
        deploy=plain_weights,
        tune=tune,
        server=server,
    )
