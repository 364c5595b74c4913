"""Clients whose models are sub-networks of one dense model: masks that start full and shrink while accuracy allows it.

A step of pruning is taken where the accuracy of the client's model on its validation data is above a threshold and its
density above a target. The server holds the dense model and each client's mask, and averages each entry over the
clients that have it; an entry that no client has keeps its value.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from sparsona.core.errors import SparsonaError
from sparsona.core.layout import Layout
from sparsona.core.method import ServerHalf
from sparsona.core.round import Batch, Client, Probe, Round
from sparsona.core.seeds import Seeds
from sparsona.core.tree import Tree, counts
from sparsona.core.update import Part, Support, Update, masked, message
from sparsona.learning.means import IndexedSum
from sparsona.learning.optimizer import FLAG, Memory, Rate
from sparsona.learning.phases import Training
from sparsona.sparsity.erk import kept_count
from sparsona.sparsity.prune import num_pruned

if TYPE_CHECKING:
    from sparsona.core.task import Task


class PruningOptions(Training):
    """Options of methods whose clients prune."""

    density: float = Field(
        0.5, gt=0, le=1, description="share of the parameters at which a client stops pruning", json_schema_extra=FLAG
    )
    prune_rate: Rate = Field(0.1, description="share of a tensor's remaining weights that one step of pruning removes")
    accuracy_threshold: float = Field(0.5, ge=0, le=1, description="a client prunes where its accuracy is above")
    accuracy_on: Literal["validation", "train"] = Field("validation", description="data that this accuracy is of")
    overshoots: bool = Field(False, description="the last step of pruning is whole and may end below `density`")
    prunes: Literal["matrices", "weights"] = Field(
        "matrices", description="tensors that are pruned: of two or more dimensions; or by name, norms' scales included"
    )
    divide_by: Literal["new", "used"] = Field("new", description="masks that count in the mean: the next, or the last")


@dataclass(frozen=True)
class SubnetState:
    """What a client keeps between rounds."""

    mask: Tree
    buffers: Tree
    memory: Memory = ()


@dataclass(frozen=True)
class SubnetServer:
    """The dense model, and the mask that each client will use next."""

    params: Tree
    masks: dict[int, Tree]


@dataclass(frozen=True)
class SubnetSum:
    """The models of a round, and the next mask of every client that pruned."""

    models: IndexedSum
    masks: dict[int, Tree]


def pruned_names(layout: Layout, which: Literal["matrices", "weights"]) -> tuple[str, ...]:
    """The tensors that are pruned.

    Args:
        layout: the whole model (`Task.whole_layout`): in a fixed sub-network, what is left of a matrix is a vector.
        which: "weights" is every name with "weight" and without "bn" in it, as DisPFL's code selects them: scales of
            norms that are not called bn are among them.

    Returns:
        Their names.
    """
    if which == "matrices":
        return tuple(slot.name for slot in layout.slots if len(slot.shape) > 1)
    return tuple(name for name in layout.names if "weight" in name and "bn" not in name)


def check_task(task: Task) -> None:
    """Raise SparsonaError for a regression, whose models have no accuracy to decide by."""
    if task.is_regression:
        raise SparsonaError(
            "clients that prune by their accuracy, in a regression", expected="a task with right and wrong predictions"
        )


def full_mask(params: Tree) -> Tree:
    """The mask that every client starts with."""
    import torch

    return params.like(torch.ones_like(params.flat, dtype=torch.bool))


def num_spare(mask: Tree, options: PruningOptions) -> int:
    """How many entries a mask has above the target; 0 or less: the client does not prune any more."""
    return sum(counts(mask)) - kept_count(mask.layout.size, options.density)


def step_numbers(mask: Tree, names: tuple[str, ...], options: PruningOptions) -> tuple[int, ...]:
    """How many entries of each tensor the next step removes; the last step ends at the target, unless it overshoots."""
    return num_pruned(mask, names, options.prune_rate, None if options.overshoots else num_spare(mask, options))


def is_accurate(task: Task, params: Tree, mask: Tree, buffers: Tree, probe: Probe, options: PruningOptions) -> bool:
    """Whether the accuracy of the model inside a mask is above the threshold, on the client's validation data (or its
    training data). Charged what a sparse forward pass costs."""
    flops, inside = task.layout.forward_flops(counts(mask)), params.like(params.flat * mask.flat)
    batches: Iterable[Batch] = probe.validation(flops) if options.accuracy_on == "validation" else probe.train(flops)
    right = total = 0.0
    for batch in batches:
        outputs, _ = task.forward(inside, buffers, batch.inputs, train=False)
        found, of = task.score(outputs, batch)
        right, total = right + float(found), total + float(of)
    return right > options.accuracy_threshold * total


def accuracy_flops(layout: Layout, client: Client, options: PruningOptions) -> int:
    """The most that one call of `is_accurate` costs."""
    examples = client.num_validation if options.accuracy_on == "validation" else client.num_examples
    return examples * layout.forward_flops()


def subnet_part(params: Tree, old: Tree, new: Tree) -> Part:
    """The model inside its new mask, which is in the message only if it is not the one that the server has."""
    return masked(params, new, Support.KNOWN if new is old else Support.BITS)


def subnet_server(options: PruningOptions) -> ServerHalf:
    """The server of a method whose clients send the part "model" that `subnet_part` makes.

    Args:
        options: `divide_by` says which masks count.

    Returns:
        The server's side: an unweighted mean over the clients that have an entry.
    """

    def init(params: Tree, clients: tuple[Client, ...], seeds: Seeds) -> SubnetServer:
        mask = full_mask(params)
        return SubnetServer(params, {client.index: mask for client in clients})

    def reply(server: SubnetServer, client: Client, round_: Round) -> Update:
        return message(round_, {"model": masked(server.params, server.masks[client.index])})

    def zero(server: SubnetServer, round_: Round) -> SubnetSum:
        return SubnetSum(IndexedSum(), {})

    def add(server: SubnetServer, total: SubnetSum, update: Update) -> SubnetSum:
        part, old = update.parts["model"], server.masks[update.sender]
        new = part.bitmap or old
        counted = new if options.divide_by == "new" else old
        return SubnetSum(total.models.add(part.tree(old), counted, 1.0), total.masks | {update.sender: new})

    def merge(one: SubnetSum, other: SubnetSum) -> SubnetSum:
        return SubnetSum(one.models.merge(other.models), one.masks | other.masks)

    def step(server: SubnetServer, total: SubnetSum, round_: Round) -> SubnetServer:
        mean, weights = total.models.mean(otherwise=server.params), total.models.weights
        assert weights is not None
        covered = mean.flat.where(weights > 0, server.params.flat)  # an entry that nobody has keeps its value
        return SubnetServer(mean.like(covered), server.masks | total.masks)

    return ServerHalf(
        init=init,
        reply=reply,
        zero=zero,
        add=add,
        step=step,
        merge=merge,
        global_model=lambda server: server.params,
        client_memory=("masks",),
        needs_every_update=True,  # with the mask before a client pruned it would undo that in every round
    )
