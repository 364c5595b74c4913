"""FedProx: FedAvg whose clients are pulled towards the model they received.

Paper: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020.
Kept: nothing but BatchNorm statistics. Travels: the dense model, both ways. Costs: dense training.
Differences from the text: a fixed number of local epochs instead of an inexactness criterion.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pydantic import Field

from sparsona.core.method import Method, PartSize, Tree
from sparsona.learning.phases import Model
from sparsona.methods.fedavg import FedAvgConfig, fedavg


class FedProxConfig(FedAvgConfig):
    """What FedProx adds to the options of FedAvg."""

    mu: float = Field(0.01, ge=0, description="strength of the pull towards the received model")


@dataclass(frozen=True, kw_only=True)
class FedProxWork(Model):
    """FedAvg's Work, and the model that was received."""

    start: Tree


def fedprox(task, config: FedProxConfig) -> Method:
    """FedAvg with a proximal term."""
    base = fedavg(task, config)
    (plain,) = base.phases

    def receive(state, inbox, probe, round_):
        work = base.receive(state, inbox, probe, round_)
        return FedProxWork(**vars(work), start=work.params)

    def loss(work: FedProxWork, batch):
        value, buffers = plain.loss(work, batch)
        pull = (work.params.flat - work.start.flat).square().sum()
        return value + config.mu / 2 * pull, buffers  # equation 2

    def cost(layout, client, round_):
        found = base.cost(layout, client, round_)
        return replace(found, at_work=(PartSize("start", layout, layout.size), *found.at_work))

    phase = replace(plain, loss=loss)
    return replace(base, receive=receive, phases=(phase,), tune=phase, cost=cost)
