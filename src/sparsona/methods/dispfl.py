"""DisPFL: peers without a server, each with a sparse model inside an evolving mask of its own.

Paper: Dai, Shen, He, Tian, Tao, DisPFL: Towards Communication-Efficient Personalized Federated Learning via
Decentralized Sparse Training, ICML 2022, Algorithms 1 and 2.

Kept: the model, the mask it was trained in, the next mask. Travels, to each neighbour: the model inside the
mask it was trained in, with that mask as bits; where one divides by new masks, these as well. Costs: sparse training,
and one dense gradient batch where masks regrow by gradient.

A round: the sum of a peer's own model and its neighbours', entry by entry over the number of masks that cover it; what
is inside its own mask of that (`received`); training in it (`trained`); then the mask is pruned and regrown.

`--preset paper` is the text, `--preset authors` their published code and scripts. They differ in this:
- The divisor. The text divides by the masks of the coming round, which are not those the weights live in: an entry just
  pruned by a neighbour adds to the sum and not to the count. The code divides by the masks last used, a proper mean.
- Regrowth: the text takes the largest gradients; the scripts turn that off and draw at random, as SET does.
- The graph: in the text no peer has more than ten neighbours; in the code each draws ten, and any number may draw it.
- Clipping: the code clips gradients at a norm of 10, the text has no word of it.
- The data: the scripts share all of it by Dirichlet 0.3, the text CIFAR-100 and Tiny by 0.2; 500 rounds, Tiny 300.
- First weights: Algorithm 1 draws each peer's (`initial_weights="own"`), and neighbours mix them in the first round;
  they follow from the seed, so that nothing is sent for it. In the code all start from the same ones, cut down by
  their masks, and mixing them would change nothing.
The result is `trained`, which Algorithm 1 puts out, and not `received`, which is mixed once more. Both draw a mask for
each client; `initial_masks="same"` is the family's other choice. The text does not say what share is pruned at first;
0.5 is the code's.

Differences from the text in both: the cosine ends after T rounds (with the code; the text has no formula). After the
first round a peer that never trained (novel, or not sampled yet) only receives: its initial weights hold no knowledge.
Tensors that ERK makes dense are left alone: all they could regrow is what they pruned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from sparsona.core import tree
from sparsona.core.method import (
    Client,
    Cost,
    Inbox,
    Layout,
    Method,
    PartSize,
    PeerHalf,
    Probe,
    Round,
    Seeds,
    Support,
    Tree,
    Update,
    dense,
    masked,
    message,
)
from sparsona.core.update import Part
from sparsona.learning.mask_options import MaskSearchOptions
from sparsona.learning.means import count_mean
from sparsona.learning.optimizer import Memory, make_optimizer, mask_memory
from sparsona.learning.phases import Training, gradient_size, plain_weights, predictor, training_phase, turn_flops
from sparsona.sparsity.masks import random_mask
from sparsona.sparsity.search import client_counts, initial_mask, next_mask, search_flops

if TYPE_CHECKING:
    from sparsona.core.task import Task


class DisPFLConfig(MaskSearchOptions, Training):
    """What DisPFL adds to the options of training and of masks that evolve."""

    initial_masks: Literal["same", "different"] = Field("different", description="whether clients start with one mask")
    initial_weights: Literal["common", "own"] = Field(
        "common", description="whether peers start from the same weights; those of a warm start, or of a module, are"
    )
    divide_by: Literal["new", "used"] = Field("new", description="masks that count in the mean: the next, or the last")


@dataclass(frozen=True)
class DisPFLState:
    """What a peer keeps between rounds: w_k, the mask it lives in (empty before any training), and m_k."""

    params: Tree
    used: Tree
    mask: Tree
    buffers: Tree
    memory: Memory = ()


@dataclass(frozen=True)
class DisPFLWork:
    """The current model, the mask as numbers to multiply by, and the optimizer's memory."""

    params: Tree
    buffers: Tree
    mask: Tree
    memory: Memory


def dispfl(task: Task, config: DisPFLConfig) -> Method:
    """Peers without a server, each with an evolving mask of its own."""
    by_new, has_own_weights = config.divide_by == "new", config.initial_weights == "own"
    optimizer = make_optimizer(config)
    phase = training_phase(  # Algorithm 1 lines 9 to 13
        task,
        config,
        mask=lambda work: work.mask,
        flops=lambda work: task.layout.train_flops(tree.counts(work.mask)),
    )

    @lru_cache(maxsize=1)  # one tree for all peers that never trained
    def empty_mask(layout: Layout) -> Tree:
        return random_mask(layout, (0,) * len(layout.slots), 0)

    def cut_down(params: Tree, mask: Tree) -> Tree:
        return params.like(params.flat.where(mask.flat.to(params.device), params.flat.new_zeros(())))

    def start(params: Tree, client: Client, seeds: Seeds) -> tuple[Tree, Tree]:  # Algorithm 1 line 2
        mask = initial_mask(params.layout, client, seeds, config)
        if has_own_weights:
            params = params.like(task.init(seeds.of(client.index).own("model"))[0].flat.to(params.device))
        return cut_down(params, mask), mask

    def init_client(params: Tree, buffers: Tree, client: Client, seeds: Seeds) -> DisPFLState:
        params, mask = start(params, client, seeds)
        return DisPFLState(params, empty_mask(params.layout), mask, buffers, optimizer.first(params))

    def model_parts(params: Tree, used: Tree, mask: Tree) -> dict[str, Part]:
        parts = {"model": masked(params, used, Support.BITS)}
        return {**parts, "mask": dense(mask)} if by_new else parts

    def first(params: Tree, client: Client, seeds: Seeds, round_: Round) -> Update:
        params, mask = start(params, client, seeds)
        return message(round_, model_parts(params, mask, mask))

    def receive(state: DisPFLState, inbox: Inbox, probe: Probe, round_: Round) -> DisPFLWork:
        received = tuple(inbox)
        used = state.mask if has_own_weights and round_.index == 0 else state.used  # where it has what others mix, too

        def models() -> Iterator[tuple[Tree, Tree]]:
            has_model = used.flat.any()  # a number to multiply by: reading its value would wait for the GPU
            own = state.mask if by_new else used
            yield tree.scale(state.params, has_model), own.like(own.flat & has_model)
            for update in received:
                part = update.parts["model"]
                assert part.mask is not None
                yield part.tree(), update.parts["mask"].tree() if by_new else part.mask

        # Algorithm 1 lines 6 to 8; a peer without messages continues with its own model.
        mean = count_mean(models()) if received else state.params
        memory = optimizer.begin(state.memory, mean)
        mask = tree.as_numbers(state.mask, mean.dtype)
        return DisPFLWork(cut_down(mean, state.mask), state.buffers, mask, memory)

    def finish(
        state: DisPFLState, work: DisPFLWork, inbox: Inbox, probe: Probe, round_: Round
    ) -> tuple[DisPFLState, Update]:
        mask = next_mask(task, work.params, work.buffers, state.mask, probe, round_, config)  # Algorithm 2
        parts = model_parts(work.params, state.mask, mask)
        memory = mask_memory(optimizer.end(work.memory), mask)  # regrown entries start without momentum
        return DisPFLState(work.params, state.mask, mask, work.buffers, memory), message(round_, parts)

    def cost(layout: Layout, client: Client, round_: Round) -> Cost:
        counts = client_counts(layout, client, config)
        size = sum(counts)
        model, mixed, total, count = (
            PartSize(name, layout, size, Support.KNOWN) for name in ("model", "mixed", "sum", "num")
        )
        used = PartSize("used", layout, layout.size, is_mask=True)
        mask = replace(used, name="mask", ones=counts)
        sent = replace(model, support=Support.BITS, ones=counts)
        memory = optimizer.sizes("memory", layout, size, Support.KNOWN)
        gradient = gradient_size(layout, config, size)
        per_example, per_step = layout.train_flops(counts), optimizer.flops * size
        return Cost(
            None,
            (sent, mask) if by_new else (sent,),
            turn_flops((phase,), client, round_, per_example, per_step),
            search_flops(layout, client, round_, config),
            kept=(model, used, mask, *memory) if optimizer.keeps else (model, used, mask),
            infer_flops=layout.forward_flops(counts),
            at_work=(mixed, gradient) if optimizer.keeps else (mixed, *memory, gradient),
            mixing=(total, count),
            tune_flops=turn_flops((replace(phase, epochs=1),), client, round_, per_example, per_step),
        )

    def consensus(inbox: Inbox, round_: Round) -> Tree:  # each entry's mean over the peers that trained it
        def models() -> Iterator[tuple[Tree, Tree]]:
            for update in inbox:
                part = update.parts["model"]
                assert part.mask is not None
                yield part.tree(), part.mask

        return count_mean(models())

    return Method(
        init_client=init_client,
        receive=receive,
        phases=(phase,),
        finish=finish,
        predict=predictor(task),
        cost=cost,
        deploy=plain_weights,
        tune=phase,
        peer=PeerHalf(consensus=consensus, mask=lambda state: state.mask, first=first if has_own_weights else None),
        trait=lambda state: state.mask,
        annealed=("prune_rate",),
    )
