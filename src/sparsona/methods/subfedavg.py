"""Sub-FedAvg: every client prunes its own sub-network of one shared model, step by step, while it stays accurate.

Paper: Vahidian, Morafah, Lin, Personalized Federated Learning by Structured and Unstructured Pruning under Data
Heterogeneity, ICDCS workshops 2021, Algorithms 1 (unstructured) and 2 (hybrid).

Kept: the mask. Travels: down, the model inside the client's mask; up, the model inside the next mask, and that mask as
one bit an entry in rounds in which the client pruned. Costs: sparse training and, where a client is about to prune, one
pass over its validation data. Clients start dense and accuracy decides who prunes when, so costs are upper bounds.

A client trains inside its mask. A candidate mask is made after the first epoch and another after the last, each without
the `prune_rate` smallest of each tensor's weights. The client takes the second if the two differ enough (`distance`),
its density is above `density`, and its accuracy inside the candidate is above `accuracy_threshold`. (If `epochs` is 1,
the first candidate is that of the received model.) The server averages each entry over the clients whose masks have it;
what nobody has keeps its value. A client is evaluated with the shared model inside its mask.

With `structure="hybrid"` (the row `sub-fedavg-hy`) matrices of linear layers are pruned like that, and after them, with
a distance and an accuracy check of their own, whole channels of convolutions: those whose norm's scale is smallest or,
in a network without norms, whose filter has the smallest L1 norm. A channel's filter, bias, scale and shift go. The
weights of the next layer that read it stay in the mask (they read zeros): the authors remove them, in a network for
which they know the next layer, so that our hybrid sends more for the same channels. `channel_density` of a
convolution's channels always stay.

Differences from text and code: the accuracy is that on validation data; the authors' code measures it on the client's
TEST data, which is not reproduced. The last step of weights is cut so that a client ends at `density` (`overshoots`
lets it be whole); the authors' code does that too, with a limit of 5% that its published values never reach. A step of
channels is never cut: one that would end below `density` is not taken, unless `overshoots`.
Candidates leave out ceil(rate * (n - 1)) of n weights, which is what lies below numpy's percentile unless weights are
equal. Norms and biases are never pruned unless `prunes="weights"`. The gradient norm is clipped and weights decay by
default, as everywhere here. The second phase's batches have draws of their own, so that a client that never
prunes does not repeat FedAvg's batches after the first epoch.

Presets. `authors`: their code, but for the test accuracy. `dispfl`: as DisPFL ran it. Its accidents: accuracy of the
TRAINING data decides (`accuracy_on="train"`); models that were just pruned count with the mask before that
(`divide_by="used"`), which shrinks what they pruned towards 0 instead of leaving it to the others; every name with
"weight" and without "bn" is pruned, so that scales of GroupNorm are, too (`prunes="weights"`); the last step is whole
(`overshoots`). FedSpa's figures are of the same code: `fedspa` is that with its training. Not reproduced: that code
evaluates a client inside the mask it trained with in its last turn; here, as in all presets, it is the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from sparsona.core import tree
from sparsona.core.errors import SparsonaError
from sparsona.core.method import (
    Client,
    Cost,
    Inbox,
    Layout,
    Method,
    PartSize,
    Phase,
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
    SubnetState,
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
from sparsona.sparsity.prune import Channels, channels_of, hamming_distance, num_pruned, prune_channels, prune_smallest

if TYPE_CHECKING:
    from sparsona.core.task import Task


class SubFedAvgConfig(PruningOptions):
    """What Sub-FedAvg adds to the options of training and of pruning."""

    distance: float = Field(
        1e-4, ge=0, le=1, description="share in which the masks of first and last epoch must differ"
    )
    structure: Literal["weights", "hybrid"] = Field(
        "weights", description="weights are pruned, or channels of convolutions"
    )
    channel_rate: Rate = Field(0.1, description="hybrid: share of remaining channels that one step removes")
    channel_distance: float = Field(0.01, ge=0, le=1, description="hybrid: `distance` of channels")
    channel_density: float = Field(0.5, gt=0, le=1, description="hybrid: share of a convolution's channels that stays")


@dataclass(frozen=True)
class SubFedAvgWork:
    """The current model, the mask as numbers to multiply by, the mask proposed after the first epoch, and memory."""

    params: Tree
    buffers: Tree
    mask: Tree
    early: Tree
    memory: Memory


def subfedavg(task: Task, config: SubFedAvgConfig) -> Method:
    """Sub-networks that clients prune by magnitude."""
    check_task(task)
    optimizer = make_optimizer(config)
    channels = _channels(task) if config.structure == "hybrid" else ()
    filters = tuple(found.weight for found in channels)
    whole = {*filters, *(name for found in channels for name in found.others)}  # pruned by channel, not by weight
    names = tuple(name for name in pruned_names(task.whole_layout, config.prunes) if name not in whole)
    train = training_phase(
        task,
        config,
        mask=lambda work: work.mask,
        flops=lambda work: task.layout.train_flops(tree.counts(work.mask)),
    )

    def candidate(params: Tree, mask: Tree) -> Tree:
        """Both ways of pruning, each on its own tensors."""
        weights = prune_smallest(params, mask, num_pruned(mask, names, config.prune_rate))
        return prune_channels(params, weights, channels, config.channel_rate, config.channel_density)

    def propose(work: SubFedAvgWork, probe: Probe, round_: Round) -> SubFedAvgWork:
        return replace(work, early=candidate(work.params, work.mask.like(work.mask.flat > 0)))

    def begin(work: SubFedAvgWork, probe: Probe, round_: Round) -> SubFedAvgWork:
        assert round_.client is not None
        return propose(work, probe, round_) if (round_.client.epochs or config.epochs) == 1 else work

    phases: tuple[Phase, ...] = (
        replace(train, epochs=1, own_epochs=lambda own: 1, enter=begin),
        replace(train, name="later", epochs=config.epochs - 1, own_epochs=lambda own: own - 1, enter=propose),
    )

    def next_mask(work: SubFedAvgWork, mask: Tree, probe: Probe) -> Tree:
        late = candidate(work.params, mask)

        def accepted(new: Tree, old: Tree) -> Tree:
            fits = config.overshoots or num_spare(new, config) >= 0
            return new if fits and is_accurate(task, work.params, new, work.buffers, probe, config) else old

        if num_spare(mask, config) > 0 and hamming_distance(work.early, late, names) > config.distance:
            mask = accepted(prune_smallest(work.params, mask, step_numbers(mask, names, config)), mask)
        if num_spare(mask, config) > 0 and hamming_distance(work.early, late, filters) > config.channel_distance:
            fewer = prune_channels(work.params, mask, channels, config.channel_rate, config.channel_density)
            mask = accepted(fewer, mask)
        return mask

    def init_client(params: Tree, buffers: Tree, client: Client, seeds: Seeds) -> SubnetState:
        return SubnetState(full_mask(params), buffers, optimizer.first(params))

    def receive(state: SubnetState, inbox: Inbox, probe: Probe, round_: Round) -> SubFedAvgWork:
        (update,) = inbox
        part = update.parts["model"]
        mask = part.bitmap or state.mask  # a client that lost its mask is sent it
        params = part.tree(mask)
        numbers = tree.as_numbers(mask, params.flat.dtype)
        return SubFedAvgWork(params, state.buffers, numbers, mask, optimizer.begin(state.memory, params))

    def finish(
        state: SubnetState, work: SubFedAvgWork, inbox: Inbox, probe: Probe, round_: Round
    ) -> tuple[SubnetState, Update]:
        old = next(iter(inbox)).parts["model"].bitmap or state.mask
        new = next_mask(work, old, probe)
        memory = mask_memory(optimizer.end(work.memory), new)
        return SubnetState(new, work.buffers, memory), message(round_, {"model": subnet_part(work.params, old, new)})

    def cost(layout: Layout, client: Client, round_: Round) -> Cost:
        model, gradient = (PartSize(name, layout, layout.size, Support.KNOWN) for name in ("model", "gradient"))
        mask = PartSize("mask", layout, layout.size, is_mask=True)
        memory = optimizer.sizes("memory", layout)
        per_example, per_step = layout.train_flops(), optimizer.flops * layout.size
        work = (mask, mask, gradient)  # the candidates after the first and the last epoch
        return Cost(
            (model,),
            (replace(model, support=Support.BITS),),
            turn_flops(phases, client, round_, per_example, per_step),
            accuracy_flops(layout, client, config) * (2 if channels else 1),
            exact=False,
            kept=(mask, *memory) if optimizer.keeps else (mask,),
            at_work=work if optimizer.keeps else (*memory, *work),
            tune_flops=turn_flops((replace(train, epochs=1),), client, round_, per_example, per_step),
        )

    return Method(
        init_client=init_client,
        receive=receive,
        phases=phases,
        finish=finish,
        predict=predictor(task),
        cost=cost,
        deploy=plain_weights,
        tune=train,
        server=subnet_server(config),
        trait=lambda state: state.mask,
    )


def _channels(task: Task) -> tuple[Channels, ...]:
    """The channels of the whole network; SparsonaError if entries of theirs were left out of a fixed sub-network."""
    found = channels_of(task.whole_layout, task.roles.norm)
    whole, left = ({slot.name: slot.shape for slot in layout.slots} for layout in (task.whole_layout, task.layout))
    for name in (name for one in found for name in (one.weight, *one.others)):
        if whole[name] != left[name]:
            raise SparsonaError(
                f"structure=hybrid on a sub-network that has {left[name][0]} entries of '{name}' {list(whole[name])}",
                expected="convolutions with whole channels to prune",
                hint="use sub-fedavg, which prunes weights; or leave subnetwork and capacities out",
            )
    return found
