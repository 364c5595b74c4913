"""Local training as the papers share it: plain SGD with weight decay and clipping, one loss, one prediction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from sparsona.core import tree
from sparsona.core.layout import Layout
from sparsona.core.method import Grads, Phase, Work
from sparsona.core.round import Batch, Client, Tick
from sparsona.core.tree import Tree
from sparsona.core.update import PartSize, Support

if TYPE_CHECKING:
    from torch import Tensor

    from sparsona.core.task import Task

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Training(BaseModel):
    """Options of local training. A method's Config adds its own to these."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: Positive = Field(0.1, description="learning rate in the first round")
    epochs: int = Field(5, ge=1, description="passes over the client's data in one round")
    weight_decay: float = Field(5e-4, ge=0, allow_inf_nan=False, description="L2 pull of the weights towards zero")
    clip_norm: Positive | None = Field(10.0, description="largest gradient norm, over all entries; 'none' for no limit")


@dataclass(frozen=True)
class Model:
    """Work of a method that trains one model and nothing else."""

    params: Tree
    buffers: Tree


def clip_share(config: Training, *grads: Tree) -> Tensor | float:
    """What clipping leaves of a gradient that is spread over these trees."""
    if config.clip_norm is None:
        return 1.0
    norm = reduce(lambda one, other: one.hypot(other), map(tree.norm, grads))
    share: Tensor = (config.clip_norm / (norm + 1e-6)).clamp(max=1.0)
    return share


def sgd(
    params: Tree,
    grads: Tree,
    tick: Tick,
    config: Training,
    mask: Tree | None = None,
    share: Tensor | float | None = None,
) -> Tree:
    """One step, inside the mask if there is one; `share` is what clipping leaves where it goes by more than `grads`.

    Clips the gradient of the loss alone, then adds the decay, as torch's clip and SGD do in that order. One new buffer,
    then in place on it: memory, not arithmetic, is what a step of a small network waits for.
    """
    lr = config.lr * tick.lr_scale
    size = lr * (clip_share(config, grads) if share is None else share)
    # Not params * (1 - lr * decay): next to 1, a small decay drowns in rounding.
    flat = params.flat.addcmul(params.flat, lr * config.weight_decay, value=-1.0)
    flat = flat.addcmul(grads.flat, size, value=-1.0)  # not in place: a stack of clients has no such operation
    return params.like(flat if mask is None else flat.mul_(mask.flat))


def sgd_phase(
    task: Task,
    config: Training,
    mask: Callable[[Work], Tree | None] = lambda work: None,
    flops: Callable[[Work], int] | None = None,
) -> Phase:
    """Train `work.params` for some epochs, inside `mask(work)` if there is one."""

    def loss(work: Work, batch: Batch) -> tuple[Tensor, Any]:
        outputs, buffers = task.forward(work.params, work.buffers, batch.inputs, True, batch.noise)
        return task.mean_loss(outputs, batch), buffers

    def update(work: Work, grads: Grads, tick: Tick) -> Work:
        return replace(work, params=sgd(work.params, grads["params"], tick, config, mask(work)))

    return Phase(
        name="train",
        trains=("params",),
        loss=loss,
        update=update,
        epochs=config.epochs,
        mixes_examples=task.mixes_examples,
        flops=flops,
    )


def predictor(task: Task) -> Callable[[Work, Tensor], Tensor]:
    """Logits of `work.params` in evaluation mode."""

    def predict(work: Work, inputs: Tensor) -> Tensor:
        return task.forward(work.params, work.buffers, inputs, train=False)[0]

    return predict


def plain_weights(work: Work) -> tuple[Tree, Tree]:
    """What to deploy where the model at hand is the model to deploy."""
    return work.params, work.buffers


def training_flops(layout: Layout, client: Client, config: Training, nonzeros: tuple[int, ...] | None = None) -> int:
    """FLOPs of one client's local epochs: three forward passes an example."""
    return config.epochs * client.num_examples * 3 * layout.forward_flops(nonzeros)


def gradient_size(layout: Layout, config: Training, num_values: int) -> PartSize:
    """The gradient of a model of so many entries: of all entries, also those outside a mask, where its norm is taken
    over all of them."""
    return PartSize("gradient", layout, num_values if config.clip_norm is None else layout.size, Support.KNOWN)
