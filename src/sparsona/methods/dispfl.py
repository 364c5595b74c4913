"""DisPFL: peers without a server, each with a sparse model inside an evolving mask of its own.

Paper: Dai, Shen, He, Tian, Tao, DisPFL: Towards Communication-Efficient Personalized Federated Learning via
Decentralized Sparse Training, ICML 2022, Algorithms 1 and 2.

Kept: the model, the mask it was trained in, the next mask. Travels, to each neighbour that asks: the model inside the
mask it was trained in, with that mask as bits; where one divides by new masks, these as well. Costs: sparse training,
and one dense gradient batch where masks regrow by gradient.

A round: the sum of one's own model and the neighbours', entry by entry over the number of masks that cover it; what is
inside one's own mask of that (`received`); training in it (`trained`); then the mask is pruned and regrown.

`--preset paper` is the text, `--preset authors` their published code and scripts. They differ in this:
- The divisor. The text divides by the masks of the coming round, which are not those the weights live in: an entry just
  pruned by a neighbour adds to the sum and not to the count. The code divides by the masks last used, a proper mean.
- Regrowth: the text takes the largest gradients; the scripts turn that off and draw at random, as SET does.
- The data, which is --partition's: the scripts share all of it by Dirichlet 0.3, the text CIFAR-100 and Tiny by 0.2.
Both draw a mask for each client; `initial_masks="same"` is the family's other choice. The text does not say what share
is pruned at first; 0.5 is the code's.

Differences from the text in both: all start from the same weights, cut down by their masks, where Algorithm 1 draws
each model (with the code); the gradient norm is clipped (with the code); the cosine ends after T rounds (with the code;
the text has no formula). A peer that never trained (novel, or not sampled yet) only listens: its initial weights are
nobody's knowledge. Tensors that ERK makes dense are left alone: all they could regrow is what they pruned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from sparsona.core import tree
from sparsona.core.method import Cost, Method, PartSize, PeerHalf, Support, Tree, dense, masked, message
from sparsona.learning.means import count_mean
from sparsona.methods.allocation import mask_counts
from sparsona.methods.training import Training, gradient_size, plain_weights, predictor, sgd_phase, training_flops
from sparsona.sparsity.evolve import cosine_rate, evolve
from sparsona.sparsity.masks import random_mask

if TYPE_CHECKING:
    from sparsona.core.task import Task


class DisPFLConfig(Training):
    """What DisPFL adds to the options of training."""

    density: float = Field(0.5, gt=0, le=1, description="share of the parameters kept; 1: as much as capacity allows")
    regrowth: Literal["gradient", "random"] = Field("gradient", description="what decides where a mask grows")
    initial_masks: Literal["same", "different"] = Field("different", description="whether clients start with one mask")
    divide_by: Literal["new", "used"] = Field("new", description="masks that count in the mean: the next, or the last")
    allocation: Literal["erk", "uniform"] = Field("erk", description="how density is shared among the tensors")
    prune_rate: float = Field(0.5, ge=0, le=1, description="share of a mask replaced in the first round")


@dataclass(frozen=True)
class DisPFLState:
    """What a peer keeps between rounds: w_k, the mask it lives in (empty before any training), and m_k."""

    params: Tree
    used: Tree
    mask: Tree
    buffers: Tree


@dataclass(frozen=True)
class DisPFLWork:
    """The model at hand, and the mask as numbers to multiply by."""

    params: Tree
    buffers: Tree
    mask: Tree


def dispfl(task: Task, config: DisPFLConfig) -> Method:
    """Peers without a server, each with an evolving mask of its own."""
    by_new = config.divide_by == "new"
    draw = lru_cache(maxsize=4)(random_mask)  # clients that start with one mask share one drawing of it
    empty = lru_cache(maxsize=1)(lambda layout: random_mask(layout, (0,) * len(layout.slots), 0))

    def kept(layout, client):
        return mask_counts(layout, min(config.density, client.capacity), config.allocation)

    def inside(params: Tree, mask: Tree) -> Tree:
        return params.like(params.flat.where(mask.flat.to(params.device), params.flat.new_zeros(())))

    def init_client(params, buffers, client, seeds):  # Algorithm 1 line 2
        seed = seeds.shared("mask") if config.initial_masks == "same" else seeds.of(client.index).own("mask")
        mask = draw(params.layout, kept(params.layout, client), seed)
        return DisPFLState(inside(params, mask), empty(params.layout), mask, buffers)

    def receive(state: DisPFLState, inbox, probe, round_):  # Algorithm 1 lines 6 to 8
        heard = tuple(inbox)

        def models():
            has_trained = state.used.flat.any()
            own = state.mask if by_new else state.used
            yield tree.scale(state.params, has_trained), own.like(own.flat & has_trained)
            for update in heard:
                part = update.parts["model"]
                yield part.tree(), update.parts["mask"].tree() if by_new else part.mask

        mean = count_mean(models()) if heard else state.params  # who hears nobody goes on with its own
        return DisPFLWork(inside(mean, state.mask), state.buffers, tree.as_numbers(state.mask, mean.dtype))

    def finish(state: DisPFLState, work: DisPFLWork, inbox, probe, round_):
        parts = {"model": masked(work.params, state.mask, Support.BITS)}
        mask = next_mask(work, state.mask, probe, round_)
        if by_new:
            parts["mask"] = dense(mask)
        return DisPFLState(work.params, state.mask, mask, work.buffers), message(round_, parts)

    def next_mask(work: DisPFLWork, mask: Tree, probe, round_) -> Tree:  # Algorithm 2
        rate = cosine_rate(config.prune_rate, round_.index, round_.total, decays_to_zero=False)
        scores = task.gradient(work.params, work.buffers, probe.batch()) if config.regrowth == "gradient" else None
        return evolve(work.params, mask, rate, scores, round_.seeds.own("regrowth"))

    def cost(layout, client, round_):
        size = sum(counts := kept(layout, client))
        model, mixed, total, count = (
            PartSize(n, layout, size, Support.KNOWN) for n in ("model", "mixed", "sum", "num")
        )
        used, mask = (PartSize(name, layout, layout.size, is_mask=True) for name in ("used", "mask"))
        sent = replace(model, support=Support.BITS)
        looks = min(round_.batch_size, client.num_examples) if config.regrowth == "gradient" else 0
        return Cost(
            None,
            (sent, mask) if by_new else (sent,),
            training_flops(layout, client, config, counts),
            looks * 3 * layout.forward_flops(),
            kept=(model, used, mask),
            infer_flops=layout.forward_flops(counts),
            at_work=(mixed, gradient_size(layout, config, size)),
            mixing=(total, count),
        )

    def consensus(inbox, round_) -> Tree:  # each entry's mean over those who trained it
        return count_mean((update.parts["model"].tree(), update.parts["model"].mask) for update in inbox)

    phase = sgd_phase(  # Algorithm 1 lines 9 to 13
        task,
        config,
        mask=lambda work: work.mask,
        flops=lambda work: 3 * task.layout.forward_flops(tree.counts(work.mask)),
    )
    return Method(
        init_client=init_client,
        receive=receive,
        phases=(phase,),
        finish=finish,
        predict=predictor(task),
        cost=cost,
        deploy=plain_weights,
        tune=phase,
        peer=PeerHalf(consensus=consensus),
        trait=lambda state: state.mask,
    )
