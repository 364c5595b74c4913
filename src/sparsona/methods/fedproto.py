"""FedProto: clients share the mean features of each class, and no model.

Paper: Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, FedProto: Federated Prototype Learning across Heterogeneous Clients,
AAAI 2022. A prototype is the mean of what enters the output layer, over a client's examples of a class.

Kept: the client's own model. Travels: up, a client's prototypes and how many examples each is the mean of; down, the
mean prototypes of all, and the same counts (0: there is none of this class yet): classes x (features + 1) numbers each
way. Costs: dense training, and a forward pass over the training data, which makes the prototypes. The arithmetic of
distances is not counted, as that of losses is not. Clients without memory (`stateless`) are refused: no model travels,
so that theirs would begin anew in every turn.

Clients may have different networks with equally many features: see `networks` of `fedproto`, which Python offers and
the command line does not.

Differences from the text: equation 6 divides by the number of clients although its weights add up to 1, which would
shrink the prototypes: ours is the mean weighted by examples. The distance is squared, and a mean over features, as in
the code; it is that of each example (`distance_of=classes`: of a batch's prototypes, as in the text). Clients that were
not sampled, and classes that nobody sent, keep the prototypes they had; all take part in every round of the paper.
Differences from the code: it makes prototypes of the features seen during the last epoch, while the model moves; ours
are those of the trained model. Its test by prototypes considers only the classes that a client is known to have, and
its accuracies add up over clients as they are tested; ours are each client's own.
Preset `authors`: every client counts the same (`weight=equal`), one epoch, momentum .5, no decay, no clipping, and
prediction by the nearest prototype (theirs reports both). Its rates and sizes of batches are not among the facts here.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from sparsona.core.errors import SparsonaError
from sparsona.core.layout import Slot
from sparsona.core.method import (
    Batch,
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
    Work,
    dense,
    message,
)
from sparsona.learning.features import output_layer
from sparsona.learning.optimizer import make_optimizer
from sparsona.learning.phases import Model, Training, training_phase, turn_flops

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sparsona.core.task import Task


class FedProtoConfig(Training):
    """What FedProto adds to the options of training."""

    prototype_weight: float = Field(
        1.0, ge=0, allow_inf_nan=False, description="weight of the distance between features and prototypes"
    )
    distance_of: Literal["examples", "classes"] = Field(
        "examples", description="what is compared with prototypes: each example, or the means of a batch's classes"
    )
    weight: Literal["examples", "equal"] = Field(
        "examples", description="what a client's prototype weighs by: its examples of that class, or all the same"
    )
    predict_by: Literal["classifier", "prototypes"] = Field(
        "classifier", description="predictions by the client's own output layer, or by the nearest prototype"
    )


@dataclass(frozen=True, kw_only=True)
class FedProtoWork(Model):
    """A client's model, and the prototypes that it received."""

    prototypes: Tree


@dataclass(frozen=True)
class FedProtoServer:
    """The mean of the features of each class, and of how many examples."""

    prototypes: Tree


@dataclass(frozen=True)
class PrototypeSum:
    """For each class: the sum of weighted prototypes, of the weights, and of the examples, in double precision."""

    total: Tensor
    weight: Tensor
    count: Tensor

    def merge(self, other: PrototypeSum) -> PrototypeSum:
        """The sum of everything added to either."""
        return PrototypeSum(self.total + other.total, self.weight + other.weight, self.count + other.count)


def fedproto(task: Task, config: FedProtoConfig, networks: tuple[Task, ...] = ()) -> Method:
    """Mean features of each class travel, and no model.

    Args:
        task: the task; its network is that of clients with a capacity of 1.
        config: the options.
        networks: tasks with further networks. A client has the largest of all whose size is within its capacity, as a
            share of the task's own network, or else the smallest.

    Returns:
        The method.
    """
    all_ = (task, *(_laid_out_like(task, other) for other in networks))
    layers = {net.layout.digest: (net, *output_layer(net)) for net in all_}
    widths = {width for _, _, width in layers.values()}
    if len(widths) > 1 or len(layers) < len(all_):
        raise SparsonaError(
            f"{len(all_)} networks, with {', '.join(map(str, sorted(widths)))} features",
            expected="networks with equally many features, and different names or shapes of parameters",
            hint="give their last hidden layers the same width",
        )
    (width,), classes = widths, task.num_classes
    layout = Layout((Slot("mean", (classes, width)), Slot("count", (classes,))))
    optimizer, plain = make_optimizer(config), training_phase(task, config)

    def network_of(client: Client) -> Task:
        if not networks:
            return task
        by_size = sorted(all_, key=lambda net: net.layout.size)
        fitting = [net for net in by_size if net.layout.size <= client.capacity * task.layout.size]
        return fitting[-1] if fitting else by_size[0]

    @lru_cache(maxsize=8)  # clients that are as they began share one tree
    def begin(digest: bytes, seed: int) -> tuple[Tree, Tree]:
        return layers[digest][0].init(seed)

    def init_client(params: Tree, buffers: Tree, client: Client, seeds: Seeds) -> Model:
        if (net := network_of(client)) is not task:
            params, buffers = begin(net.layout.digest, seeds.shared("network"))
        return Model(params, buffers, optimizer.first(params))

    def receive(state: Model, inbox: Inbox, probe: Probe, round_: Round) -> FedProtoWork:
        (update,) = inbox
        memory = optimizer.begin(state.memory, state.params)
        prototypes = update.parts["prototypes"].tree()
        return FedProtoWork(state.params, state.buffers, memory, prototypes=prototypes)

    def forward(work: Work, inputs: Tensor, train: bool, noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tree]:
        net, layer, _ = layers[work.params.layout.digest]
        return net.forward_with_features(work.params, work.buffers, inputs, layer, train, noise)

    def loss(work: FedProtoWork, batch: Batch) -> tuple[Tensor, Any]:
        outputs, features, buffers = forward(work, batch.inputs, True, batch.noise)
        value = task.mean_loss(outputs, batch)
        if config.prototype_weight:
            value = value + config.prototype_weight * distance(work, features, batch)  # equation 7
        return value, buffers

    def distance(work: FedProtoWork, features: Tensor, batch: Batch) -> Tensor:
        means, known = work.prototypes["mean"], work.prototypes["count"] > 0  # 0 where there is no prototype
        if config.distance_of == "examples":
            weight = known[batch.targets] * batch.weight
            return (weight * (features - means[batch.targets]).square().mean(-1)).sum() / batch.weight.sum()
        own, count = class_means(features, batch, classes)  # equation 3, of a batch
        return ((own - means).square().mean(-1) * (known & (count > 0))).sum()

    def predict(work: FedProtoWork, inputs: Tensor) -> Tensor:
        outputs, features, _ = forward(work, inputs, False)
        if config.predict_by == "classifier":
            return outputs
        means, known = work.prototypes["mean"], work.prototypes["count"] > 0
        # The negative distance, less the squared norm of the features, which is the same for all classes.
        near = (2 * features @ means.T - means.square().sum(-1)) / width
        last = near.where(known, float("inf")).amin(-1, keepdim=True) - 1  # classes without a prototype come last
        return near.where(known, last).where(known.any(), outputs)

    def finish(
        state: Model, work: FedProtoWork, inbox: Inbox, probe: Probe, round_: Round
    ) -> tuple[Model, Update]:  # equation 3: the mean of the trained model's features, class by class
        import torch

        flat = work.params.flat
        total, count = flat.new_zeros(classes, width).double(), flat.new_zeros(classes).double()
        with torch.no_grad():
            for batch in probe.train(work.params.layout.forward_flops()):
                _, features, _ = forward(work, batch.inputs, False)
                means, some = class_means(features.double(), batch, classes)
                total, count = total + means * some[:, None], count + some
        means = total / count.clamp(min=1)[:, None]
        prototypes = Tree.of({"mean": means.to(flat.dtype), "count": count.to(flat.dtype)}, layout)
        kept = Model(work.params, work.buffers, optimizer.end(work.memory))
        return kept, message(round_, {"prototypes": dense(prototypes)})

    def cost(_: Layout, client: Client, round_: Round) -> Cost:
        own = network_of(client).layout
        model, gradient = (PartSize(name, own, own.size) for name in ("params", "gradient"))
        sent, memory = (PartSize("prototypes", layout, layout.size),), optimizer.sizes("memory", own)
        per_example, per_step = own.train_flops(), optimizer.flops * own.size
        return Cost(
            sent,
            sent,
            turn_flops((phase,), client, round_, per_example, per_step),
            client.num_examples * own.forward_flops(),
            kept=(model, *memory) if optimizer.keeps else (model,),
            infer_flops=own.forward_flops(),
            at_work=(gradient,) if optimizer.keeps else (*memory, gradient),
            tune_flops=turn_flops((replace(phase, epochs=1),), client, round_, per_example, per_step),
        )

    def init_server(params: Tree, clients: tuple[Client, ...], seeds: Seeds) -> FedProtoServer:
        return FedProtoServer(Tree(layout, params.flat.new_zeros(layout.size)))

    def reply(server: FedProtoServer, client: Client, round_: Round) -> Update:
        return message(round_, {"prototypes": dense(server.prototypes)})

    def zero(server: FedProtoServer, round_: Round) -> PrototypeSum:
        flat = server.prototypes.flat
        total, none = flat.new_zeros(classes, width).double(), flat.new_zeros(classes).double()
        return PrototypeSum(total, none, none)

    def add(server: FedProtoServer, total: PrototypeSum, update: Update) -> PrototypeSum:
        found = update.parts["prototypes"].tree()
        count = found["count"].double()
        weight = count if config.weight == "examples" else (count > 0).double()
        return total.merge(PrototypeSum(found["mean"].double() * weight[:, None], weight, count))

    def step(server: FedProtoServer, total: PrototypeSum, round_: Round) -> FedProtoServer:  # equation 6
        old, sent = server.prototypes, total.weight > 0
        means = (total.total / total.weight.where(sent, 1.0)[:, None]).to(old.flat.dtype)
        new = {
            "mean": means.where(sent[:, None], old["mean"]),  # a class that nobody sent keeps its prototype
            "count": total.count.to(old.flat.dtype).where(sent, old["count"]),
        }
        return FedProtoServer(Tree.of(new, layout))

    def deploy(work: FedProtoWork) -> tuple[Tree, Tree] | nn.Module:
        net = layers[work.params.layout.digest][0]
        return (work.params, work.buffers) if net is task else net.module(work.params, work.buffers)

    phase = replace(
        plain,
        loss=loss,
        mixes_examples=any(net.mixes_examples for net in all_),
        traceable=not any(net.draws_noise or net.moves_buffers for net in all_[1:]),
        flops=lambda work: work.params.layout.train_flops(),
        step_flops=None if plain.step_flops is None else lambda work: optimizer.flops * work.params.layout.size,
    )
    server = ServerHalf(
        init=init_server,
        reply=reply,
        zero=zero,
        add=add,
        step=step,
        merge=PrototypeSum.merge,
        comparable=False,  # a prototype is zeros, and a count 0, for a class that the client does not have
    )
    return Method(
        init_client=init_client,
        receive=receive,
        phases=(phase,),
        finish=finish,
        predict=predict,
        cost=cost,
        deploy=deploy if config.predict_by == "classifier" else None,
        tune=phase,
        server=server,
        model_travels=False,
    )


def class_means(features: Tensor, batch: Batch, classes: int) -> tuple[Tensor, Tensor]:
    """The mean features of each class in a batch, 0 where it has none, and how many examples it has."""
    hot = features.new_zeros(features.shape[0], classes).scatter(1, batch.targets[:, None], 1.0)
    hot = hot * batch.weight[:, None]
    count = hot.sum(0)
    return hot.T @ features / count.clamp(min=1)[:, None], count


def _laid_out_like(task: Task, other: Task) -> Task:
    """The other task, computed as the executor computes this one."""
    other = copy.copy(other)
    other.half, other.channels_last = task.half, task.channels_last and other.takes_channels_last
    return other
