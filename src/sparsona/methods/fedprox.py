"""FedProx: FedAvg whose clients are pulled towards the model they received.

Paper: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, Federated Optimization in Heterogeneous Networks, MLSys 2020,
Algorithm 2.
Kept: nothing but BatchNorm statistics. Travels: the dense model, both ways. Costs: dense training, and in it the
received model beside the trained one.

Differences from the text: the inexact solution that a device aims for is a fixed number of epochs, the same for all,
where the paper lets slow devices do fewer. Updates weigh by examples (the text samples devices by their examples and
takes a plain mean: `weight=equal`). The pull is part of the loss, so that it counts in the norm that is clipped. Final
tuning is pulled as well, to the last model received.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import Field

from sparsona.core.method import Batch, Client, Cost, Inbox, Layout, Method, PartSize, Probe, Round, State, Tree
from sparsona.learning.phases import Model
from sparsona.methods.fedavg import FedAvgConfig, fedavg

if TYPE_CHECKING:
    from torch import Tensor

    from sparsona.core.task import Task


class FedProxConfig(FedAvgConfig):
    """What FedProx adds to the options of FedAvg."""

    prox: float = Field(
        0.01, ge=0, allow_inf_nan=False, description="weight of half the squared distance to the received model"
    )


@dataclass(frozen=True, kw_only=True)
class FedProxWork(Model):
    """FedAvg's Work, and the model that was received."""

    start: Tree


def fedprox(task: Task, config: FedProxConfig) -> Method:
    """FedAvg with a proximal term."""
    base = fedavg(task, config)
    (plain,) = base.phases

    def receive(state: State, inbox: Inbox, probe: Probe, round_: Round) -> FedProxWork:
        work = base.receive(state, inbox, probe, round_)
        return FedProxWork(**vars(work), start=work.params)

    def loss(work: FedProxWork, batch: Batch) -> tuple[Tensor, Any]:
        value, buffers = plain.loss(work, batch)
        distance = (work.params.flat - work.start.flat).square().sum()
        return value + config.prox / 2 * distance, buffers  # h_k of equation 2

    def cost(layout: Layout, client: Client, round_: Round) -> Cost:
        found = base.cost(layout, client, round_)
        return replace(found, at_work=(PartSize("start", layout, layout.size), *(found.at_work or ())))

    phase = replace(plain, loss=loss)
    return replace(base, receive=receive, phases=(phase,), tune=phase, cost=cost)
