"""LotteryFL: every client looks for a lottery ticket, a sub-network of the shared model that starts from first weights.

Paper: Li, Sun, Wang, Duan, Li, Chen, Li, LotteryFL: Personalized and Communication-Efficient Federated Learning with
Lottery Ticket Hypothesis on Non-IID Datasets, 2020; SEC 2021. Official code: charleslipku/LotteryFL.

Kept: the mask, and the initial weights that clients rewind to. Travels: down, the model inside the client's mask; up,
the model inside the next mask, and that mask as one bit an entry in rounds in which the client pruned. Costs: sparse
training and, until a client has reached its target, one pass over its validation data in each of its rounds. Clients
start dense and accuracy decides who prunes when, so costs are upper bounds.

A round of a client: it receives the shared model inside its mask. If its accuracy with that model is above
`accuracy_threshold` and its density above `density`, it prunes the `prune_rate` smallest of each tensor's weights,
those of the received model, and rewinds: what is left, biases included, starts from the initial weights. Then it trains
inside its mask. The server averages each entry over the clients whose masks have it; what nobody has keeps its value. A
client is evaluated with the shared model inside its mask. Every rewinding pulls the shared model back to its start, so
that it improves slowly until clients have reached their targets (`rewind=false` shows by how much).

Differences from the code: it measures the accuracy on (at most two batches of) the client's TEST data, and prints the
best accuracy of all rounds; neither is reproduced. Validation data decide, and it is the last round that is reported.
It freezes what is smaller than 1e-6 at a step, by which it recognises pruned weights: here the mask does. The last
step is cut so that a client ends at `density` (`overshoots` lets it be whole, as in the code). ceil(rate * (n - 1)) of
n weights go, which is what lies below numpy's percentile unless weights are equal. Norms are never pruned unless
`prunes="weights"`. The gradient norm is clipped and weights decay by default, as everywhere here.

Preset `authors`: their command for MNIST and FEMNIST, with the 60 local epochs that their code has by default; for
CIFAR-10 they set `accuracy_threshold=0.1` and `density=0.5`. Its accident: the last step is whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pydantic import Field

from sparsona.core import tree
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
    Support,
    Tree,
    Update,
    message,
)
from sparsona.learning.optimizer import Memory, Rate, make_optimizer, mask_memory
from sparsona.learning.phases import plain_weights, predictor, training_phase, turn_flops
from sparsona.learning.subnetworks import (
    PruningOptions,
    accuracy_flops,
    check_task,
    full_mask,
    is_accurate,
    num_spare,
    pruned_names,
    step_numbers,
    subnet_part,
    subnet_server,
)
from sparsona.sparsity.prune import prune_smallest

if TYPE_CHECKING:
    from sparsona.core.task import Task


class LotteryFLConfig(PruningOptions):
    """LotteryFL has the options of training and of pruning, and one more."""

    prune_rate: Rate = Field(0.2, description="share of a tensor's remaining weights that one step of pruning removes")
    rewind: bool = Field(True, description="whether a client that pruned starts again from the initial weights")


@dataclass(frozen=True)
class LotteryFLState:
    """What a client keeps between rounds."""

    mask: Tree
    initial: Tree
    buffers: Tree
    memory: Memory = ()


@dataclass(frozen=True)
class LotteryFLWork:
    """The current model, the mask as numbers to multiply by, the initial weights, and the optimizer's memory."""

    params: Tree
    buffers: Tree
    mask: Tree
    initial: Tree
    memory: Memory


def lotteryfl(task: Task, config: LotteryFLConfig) -> Method:
    """Sub-networks that clients prune before training, and rewind."""
    check_task(task)
    optimizer = make_optimizer(config)
    names = pruned_names(task.whole_layout, config.prunes)

    def prune(work: LotteryFLWork, probe: Probe, round_: Round) -> LotteryFLWork:
        mask = work.mask.like(work.mask.flat > 0)
        if num_spare(mask, config) <= 0 or not is_accurate(task, work.params, mask, work.buffers, probe, config):
            return work
        mask = prune_smallest(work.params, mask, step_numbers(mask, names, config))
        numbers = tree.as_numbers(mask, work.params.flat.dtype)
        start = work.initial if config.rewind else work.params
        memory = optimizer.init(start) if config.rewind else mask_memory(work.memory, numbers)
        return replace(work, params=start.like(start.flat * numbers.flat), mask=numbers, memory=memory)

    train = training_phase(
        task,
        config,
        mask=lambda work: work.mask,
        flops=lambda work: task.layout.train_flops(tree.counts(work.mask)),
    )
    phase = replace(train, enter=prune)

    def init_client(params: Tree, buffers: Tree, client: Client, seeds: Seeds) -> LotteryFLState:
        return LotteryFLState(full_mask(params), params, buffers, optimizer.first(params))

    def receive(state: LotteryFLState, inbox: Inbox, probe: Probe, round_: Round) -> LotteryFLWork:
        (update,) = inbox
        part = update.parts["model"]
        mask = part.bitmap or state.mask  # a client that lost its mask is sent it
        params = part.tree(mask)
        numbers = tree.as_numbers(mask, params.flat.dtype)
        return LotteryFLWork(params, state.buffers, numbers, state.initial, optimizer.begin(state.memory, params))

    def finish(
        state: LotteryFLState, work: LotteryFLWork, inbox: Inbox, probe: Probe, round_: Round
    ) -> tuple[LotteryFLState, Update]:
        mask = old = next(iter(inbox)).parts["model"].bitmap or state.mask
        if sum(tree.counts(work.mask)) < sum(tree.counts(old)):  # it pruned before training
            mask = old.like(work.mask.flat > 0)
        new = LotteryFLState(mask, state.initial, work.buffers, optimizer.end(work.memory))
        return new, message(round_, {"model": subnet_part(work.params, old, mask)})

    def cost(layout: Layout, client: Client, round_: Round) -> Cost:
        model, gradient = (PartSize(name, layout, layout.size, Support.KNOWN) for name in ("model", "gradient"))
        initial = PartSize("initial", layout, layout.size)
        mask = PartSize("mask", layout, layout.size, is_mask=True)
        memory = optimizer.sizes("memory", layout)
        per_example, per_step = layout.train_flops(), optimizer.flops * layout.size
        return Cost(
            (model,),
            (replace(model, support=Support.BITS),),
            turn_flops((phase,), client, round_, per_example, per_step),
            accuracy_flops(layout, client, config),
            exact=False,
            kept=(mask, initial, *memory) if optimizer.keeps else (mask, initial),
            at_work=(gradient,) if optimizer.keeps else (*memory, gradient),
            tune_flops=turn_flops((replace(train, epochs=1),), client, round_, per_example, per_step),
        )

    return Method(
        init_client=init_client,
        receive=receive,
        phases=(phase,),
        finish=finish,
        predict=predictor(task),
        cost=cost,
        deploy=plain_weights,
        tune=train,
        server=subnet_server(config),
        trait=lambda state: state.mask,
    )
