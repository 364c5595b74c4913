"""FedMask: weights are never trained. Each client learns which weights of the last layers to use, and only bits travel.

Paper: Li, Sun, Zeng, Zhang, Li, Chen, FedMask: Joint Computation and Communication-Efficient Personalized Federated
Learning via Heterogeneous Masking, SenSys 2021. No code is published, and of the text this file relies on what its
abstract says of it, and the paper of pFedGate, which ran it as a baseline: the weights of every local model stay as
they are; a client learns a binary mask, one bit a parameter, for the last few layers; only masks travel; they are
aggregated (pFedGate: by intersection), and each client ends up with a sparse model of its own; the masks are one-shot.

Our choices where those are silent. All clients have the same initial weights, so that these need not be sent. Masks of
PyTorch's own initial weights learn next to nothing; so each weight has its sign and one size in its layer, and biases
are 0. After a warm start, `frozen_weights="initial"` takes the trained weights as they are. Weights of the masked
layers have a score each; a bit is 1 where the score is above 0 (its sigmoid above a half), and the gradient passes
through that threshold as through the sigmoid (straight-through). Biases and other layers have no masks. At the end of
a client's first turn the lowest scores are pruned, once and for good: `density` of each masked layer is left, the
client's support (the paper's sparsity is structured; ours is by entry). The server takes, for each entry that the
supports of two or more participants have in common, the majority of their bits, weighted by examples; with
`aggregation="intersection"` it is 1 only if all of them have 1. A client that receives another bit than its own turns
the sign of that score; where supports do not overlap, bits stay personal.

Kept: the frozen model, the scores, the support. Travels: down, the aggregated bits and which of them are shared; up,
the client's bits and its support. Costs: dense training, since scores of unused weights have gradients, too. A client
that has not had a turn yet is served the aggregated mask, which `density` does not bound. Capacities change nothing: a
client keeps all frozen weights, however few it uses, so that a comparison with capacities gives all a sub-network.

Preset `pfedgate`: intersection, and that paper's way of training; it masked the last layer of its EMNIST network and
the last two of those for CIFAR (`num_masked_layers`). Its 0.5 of the parameters is taken as `density`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from sparsona.core import tree
from sparsona.core.errors import SparsonaError
from sparsona.core.method import (
    Batch,
    Client,
    Cost,
    Grads,
    Inbox,
    Layout,
    Method,
    PartSize,
    Phase,
    Probe,
    Round,
    Seeds,
    ServerHalf,
    Tick,
    Tree,
    Update,
    dense,
    message,
)
from sparsona.core.seeds import generator
from sparsona.learning.means import IndexedSum
from sparsona.learning.optimizer import DECAY_TEXT, FLAG, Decay, Memory, make_optimizer
from sparsona.learning.phases import Training, turn_flops
from sparsona.sparsity.search import mask_counts
from sparsona.sparsity.selection import select

if TYPE_CHECKING:
    from torch import Tensor

    from sparsona.core.task import Task

# The largest score at first. Only its ratio to the learning rate matters: at the default rate, a few passes over a
# client's data turn a tenth of the bits.
START = 1e-2
LEAST = 1e-5  # of a score whose sign is turned: 0 has none


class FedMaskConfig(Training):
    """What FedMask adds to the options of training, which are those of the scores."""

    weight_decay: Decay = Field(0.0, description=DECAY_TEXT.replace("weights", "scores"))
    density: float = Field(
        0.5,
        gt=0,
        le=1,
        description="share of the masked layers' weights that a client's mask may use after its first turn",
        json_schema_extra=FLAG,
    )
    frozen_weights: Literal["signed", "initial"] = Field(
        "signed",
        description="the signs of the initial weights, at one size a layer; or the initial weights (warm start)",
    )
    num_masked_layers: int = Field(2, ge=1, description="how many of the last layers have masks")
    aggregation: Literal["majority", "intersection"] = Field(
        "majority", description="a shared bit is 1 if most participants that may use it have 1, or if all have"
    )


@dataclass(frozen=True)
class FedMaskState:
    """What a client keeps between rounds: the frozen model, its scores, and which entries its mask may use."""

    params: Tree
    scores: Tree
    support: Tree
    buffers: Tree
    memory: Memory = ()


@dataclass(frozen=True)
class FedMaskWork:
    """The same in training: the support is of numbers to multiply by, 0 or 1."""

    params: Tree
    scores: Tree
    support: Tree
    buffers: Tree
    memory: Memory


@dataclass(frozen=True)
class FedMaskServer:
    """The frozen model, the aggregated bits, and which of them are shared so far."""

    params: Tree
    mask: Tree
    shared: Tree


@dataclass(frozen=True)
class FedMaskSum:
    """Bits and supports of a round, weighted, and how many supports cover each entry."""

    bits: IndexedSum
    holders: Tensor | None = None

    def merge(self, other: FedMaskSum) -> FedMaskSum:
        if self.holders is None or other.holders is None:
            return other if self.holders is None else self
        return FedMaskSum(self.bits.merge(other.bits), self.holders.add_(other.holders))


def fedmask(task: Task, config: FedMaskConfig) -> Method:
    """Frozen weights, and masks of the last layers."""
    optimizer = make_optimizer(config)
    names = _last_layers(task.whole_layout, config.num_masked_layers)
    masked_layers = task.layout.select(names)
    left = mask_counts(masked_layers, config.density, "uniform")

    def freeze(params: Tree) -> Tree:
        return _signed(params, task.whole_layout) if config.frozen_weights == "signed" else params

    def init_client(params: Tree, buffers: Tree, client: Client, seeds: Seeds) -> FedMaskState:
        import torch

        params, seed = freeze(params), seeds.shared("scores")
        draws = START * (1 - torch.rand(masked_layers.size, generator=generator(seed)))  # all bits are 1
        scores = Tree(masked_layers, draws.to(params.device, params.flat.dtype))
        return FedMaskState(params, scores, scores.like(scores.flat > 0), buffers, optimizer.first(scores))

    def receive(state: FedMaskState, inbox: Inbox, probe: Probe, round_: Round) -> FedMaskWork:
        (update,) = inbox
        bits, shared = (update.parts[name].tree().flat for name in ("mask", "shared"))
        old = state.scores.flat
        received = old.abs().clamp(min=LEAST) * (2 * bits.to(old.dtype) - 1)
        differs = shared & ((old > 0) != bits)
        scores = state.scores.like(received.where(differs, old))
        support = tree.as_numbers(state.support, old.dtype)
        return FedMaskWork(state.params, scores, support, state.buffers, optimizer.begin(state.memory, scores))

    def used(params: Tree, bits: Tensor) -> dict[str, Tensor]:
        """The model whose masked layers are multiplied by these bits."""
        frozen = tree.join(masked_layers, params)
        return {**params, **frozen.like(frozen.flat * bits)}

    def loss(work: FedMaskWork, batch: Batch) -> tuple[Tensor, Tree]:
        soft = work.scores.flat.sigmoid()
        hard = (work.scores.flat > 0).to(soft.dtype)
        # Straight-through: the value of the threshold, the slope of the sigmoid.
        bits = (hard + (soft - soft.detach())) * work.support.flat
        outputs, buffers = task.forward(used(work.params, bits), work.buffers, batch.inputs, True, batch.noise)
        return task.mean_loss(outputs, batch), buffers

    def update(work: FedMaskWork, grads: Grads, tick: Tick) -> FedMaskWork:
        scores, memory = optimizer.step(work.scores, grads["scores"], work.memory, tick)
        return replace(work, scores=scores, memory=memory)

    def mask_of(scores: Tree, support: Tree) -> Tree:
        return scores.like((scores.flat > 0) & (support.flat > 0))

    def finish(
        state: FedMaskState, work: FedMaskWork, inbox: Inbox, probe: Probe, round_: Round
    ) -> tuple[FedMaskState, Update]:
        assert round_.client is not None
        support = state.support
        if round_.is_new:  # one-shot pruning: the highest scores of each layer are kept
            above = work.scores.flat - work.scores.flat.min()
            kept = select(above, support.flat, masked_layers.sizes, left, largest=True)
            support = support.like(kept)
        parts = {"mask": dense(mask_of(work.scores, support)), "support": dense(support)}
        memory = optimizer.end(work.memory)
        kept_state = FedMaskState(state.params, work.scores, support, work.buffers, memory)
        return kept_state, message(round_, parts, weight=round_.client.num_examples)

    def predict(work: FedMaskWork, inputs: Tensor) -> Tensor:
        bits = (work.scores.flat > 0).to(work.support.flat.dtype) * work.support.flat
        return task.forward(used(work.params, bits), work.buffers, inputs, False)[0]

    def deploy(work: FedMaskWork) -> tuple[Tree, Tree]:
        bits = mask_of(work.scores, work.support).flat
        return Tree.of(used(work.params, bits), work.params.layout), work.buffers

    def cost(layout: Layout, client: Client, round_: Round) -> Cost:
        mask, shared, support = (
            PartSize(name, masked_layers, masked_layers.size, is_mask=True) for name in ("mask", "shared", "support")
        )
        support = replace(support, ones=left)
        scores, gradient = (PartSize(name, masked_layers, masked_layers.size) for name in ("scores", "gradient"))
        memory = optimizer.sizes("memory", masked_layers)
        kept = (PartSize("frozen", layout, layout.size), scores, support)
        active = dict(zip(names, left, strict=True))
        per_example, per_step = layout.train_flops(), optimizer.flops * masked_layers.size
        return Cost(
            (mask, shared),
            (mask, support),
            turn_flops((phase,), client, round_, per_example, per_step),
            kept=kept + memory if optimizer.keeps else kept,
            infer_flops=layout.forward_flops(active.get(slot.name, slot.size) for slot in layout.slots),
            at_work=(gradient,) if optimizer.keeps else (*memory, gradient),
            tune_flops=turn_flops((replace(phase, epochs=1),), client, round_, per_example, per_step),
        )

    def init_server(params: Tree, clients: tuple[Client, ...], seeds: Seeds) -> FedMaskServer:
        own = params.select(names)
        ones = own.flat.new_ones(own.flat.shape) > 0
        return FedMaskServer(freeze(params), own.like(ones), own.like(~ones))

    def reply(server: FedMaskServer, client: Client, round_: Round) -> Update:
        return message(round_, {"mask": dense(server.mask), "shared": dense(server.shared)})

    def zero(server: FedMaskServer, round_: Round) -> FedMaskSum:
        return FedMaskSum(IndexedSum())

    def add(server: FedMaskServer, total: FedMaskSum, update: Update) -> FedMaskSum:
        bits, support = (update.parts[name].tree() for name in ("mask", "support"))
        numbers = bits.like(bits.flat.to(server.params.flat.dtype))
        one = IndexedSum().add(numbers, support, update.weight)
        return total.merge(FedMaskSum(one, support.flat.int()))

    def step(server: FedMaskServer, total: FedMaskSum, round_: Round) -> FedMaskServer:
        on, weights, holders = total.bits.total, total.bits.weights, total.holders
        assert on is not None
        assert weights is not None
        assert holders is not None
        common = holders >= 2
        bits = on.flat >= weights if config.aggregation == "intersection" else 2 * on.flat >= weights
        mask = server.mask.like(bits.where(common, server.mask.flat))
        return FedMaskServer(server.params, mask, server.shared.like(server.shared.flat | common))

    def global_model(server: FedMaskServer) -> Tree:
        return Tree.of(used(server.params, server.mask.flat), server.params.layout)

    phase = Phase(
        name="train",
        trains=("scores",),
        loss=loss,
        update=update,
        epochs=config.epochs,
        mixes_examples=task.mixes_examples,
        step_flops=(lambda work: optimizer.flops * masked_layers.size) if optimizer.flops else None,
    )
    return Method(
        init_client=init_client,
        receive=receive,
        phases=(phase,),
        finish=finish,
        predict=predict,
        cost=cost,
        deploy=deploy,
        tune=phase,
        server=ServerHalf(
            init=init_server,
            reply=reply,
            zero=zero,
            add=add,
            step=step,
            merge=FedMaskSum.merge,
            global_model=global_model,
        ),
        trait=lambda state: mask_of(state.scores, state.support),
    )


def _signed(params: Tree, whole: Layout) -> Tree:
    """Each weight with its sign and the magnitude of its tensor's Kaiming draw, the root of 2 / fan-in; no biases.

    `whole` is the layout of the whole model: in a fixed sub-network a matrix is a vector of what is left of it, and the
    fan-in is what is left of a row on average.
    """
    import torch

    found = []
    for slot in whole.slots:
        value = params[slot.name]
        if slot.flops_per_weight:
            fan_in = max(1, value.numel() // slot.shape[0])
            value = value.sign() * (2 / fan_in) ** 0.5 if len(slot.shape) > 1 else value.new_zeros(value.shape)
        found.append(value.reshape(-1))
    return params.like(torch.cat(found))


def _last_layers(layout: Layout, number: int) -> tuple[str, ...]:
    """The weights of the last layers that multiply: tensors of two or more dimensions with FLOPs."""
    found = [slot.name for slot in layout.slots if len(slot.shape) > 1 and slot.flops_per_weight]
    if number > len(found):
        raise SparsonaError(
            f"masks of {number} layers, and the model has {len(found)}",
            expected=f"num_masked_layers from 1 to {len(found)}",
        )
    return tuple(found[-number:])
