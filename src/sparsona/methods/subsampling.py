"""Subsampling: FedAvg whose clients send a random share of their change, a different one in every round.

Paper: Konečný et al., Federated Learning: Strategies for Improving Communication Efficiency, 2016, section 3 ("random
mask", "subsampling"). FedSpa's table 1 has it as a baseline with half of the change.

Kept: nothing but BatchNorm statistics. Travels: down, the dense model; up, the change inside the mask and the 16-byte
seed that the mask is drawn from. Costs: dense training; 0.75 of FedAvg's bytes at density 0.5.

Differences from the text: the mask is drawn over the whole model and not matrix by matrix, so that every entry has the
same chance, also in small tensors. With `rescale`, the default, a change is divided by the share that was sent, so that
its mean over masks is the whole change. FedSpa mentions no rescaling: `preset=fedspa` has none, so that the server's
steps are shorter by `density`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pydantic import Field

from sparsona.core import tree
from sparsona.core.layout import Slot
from sparsona.core.method import (
    Client,
    Cost,
    Inbox,
    Layout,
    Method,
    PartSize,
    Probe,
    Round,
    Server,
    State,
    Support,
    Tree,
    Update,
    masked,
    message,
)
from sparsona.learning.means import WeightedSum
from sparsona.learning.optimizer import FLAG
from sparsona.learning.phases import Model
from sparsona.learning.server_optimizer import server_step
from sparsona.methods.fedavg import FedAvgConfig, fedavg
from sparsona.sparsity.evolve import random_scores
from sparsona.sparsity.search import mask_counts
from sparsona.sparsity.selection import select

if TYPE_CHECKING:
    import torch

    from sparsona.core.task import Task

SEED_BYTES = 16


class SubsamplingConfig(FedAvgConfig):
    """What Subsampling adds to the options of FedAvg."""

    density: float = Field(0.5, gt=0, le=1, description="share of the change that is sent", json_schema_extra=FLAG)
    rescale: bool = Field(True, description="divide what arrives by that share, so that the mean is unbiased")


@dataclass(frozen=True, kw_only=True)
class SubsamplingWork(Model):
    """FedAvg's Work, and the model that was received."""

    start: Tree


def num_sent(layout: Layout, density: float) -> int:
    """How many entries of a change are sent."""
    (found,) = mask_counts(Layout((Slot("change", (layout.size,)),)), density, "uniform")
    return found


def draw_mask(layout: Layout, density: float, seed: bytes, device: torch.device) -> Tree:
    """The mask that client and server draw from a seed; the same on every device."""
    import torch

    number = int.from_bytes(seed, "little") % 2**63  # whatever bytes arrive, it fits an int64
    scores = random_scores(layout.size, number, device)
    everywhere = torch.ones_like(scores, dtype=torch.bool)
    return Tree(layout, select(scores, everywhere, (layout.size,), (num_sent(layout, density),)))


def subsampling(task: Task, config: SubsamplingConfig) -> Method:
    """FedAvg with a random mask on the uplink."""
    base = fedavg(task, config)
    assert base.server is not None
    share = num_sent(task.layout, config.density) / task.layout.size

    def receive(state: State, inbox: Inbox, probe: Probe, round_: Round) -> SubsamplingWork:
        work = base.receive(state, inbox, probe, round_)
        return SubsamplingWork(**vars(work), start=work.params)

    def finish(
        state: State, work: SubsamplingWork, inbox: Inbox, probe: Probe, round_: Round
    ) -> tuple[State, Update | None]:
        kept, whole = base.finish(state, work, inbox, probe, round_)
        assert whole is not None
        seed = round_.seeds.own("subsampling").to_bytes(SEED_BYTES, "little")  # fresh: of this client in this round
        change = tree.subtract(work.params, work.start)
        mask = draw_mask(change.layout, config.density, seed, change.device)
        part = masked(change, mask, Support.SEED, seed, is_change=True)
        return kept, message(round_, {"update": part}, weight=whole.weight)

    def cost(layout: Layout, client: Client, round_: Round) -> Cost:
        found = base.cost(layout, client, round_)
        update = PartSize("update", layout, num_sent(layout, config.density), Support.SEED, is_change=True)
        start = PartSize("start", layout, layout.size)
        return replace(found, up=(update,), at_work=(start, *(found.at_work or ())))

    def add(server: Server, total: WeightedSum, update: Update) -> WeightedSum:
        part = update.parts["update"]
        change = part.tree(draw_mask(part.layout, config.density, part.seed, part.values.device))
        return total.add(tree.scale(change, 1 / share) if config.rescale else change, update.weight)

    def step(server: Server, total: WeightedSum, round_: Round) -> Server:
        change = total.mean(otherwise=tree.zeros_like(server.params))
        mean = tree.add(server.params, change)
        params, moments = server_step(config, server.params, mean, server.moments)
        return replace(server, params=params, moments=moments)

    server = replace(base.server, add=add, step=step, takes_mean=False)
    return replace(base, receive=receive, finish=finish, cost=cost, server=server)
