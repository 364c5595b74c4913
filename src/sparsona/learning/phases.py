"""Local training as the papers share it: one optimizer, one loss, one prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import Field

from sparsona.core.layout import Layout
from sparsona.core.method import Grads, Phase, Work, examples_seen, steps_taken
from sparsona.core.round import Batch, Client, Round, Tick
from sparsona.core.tree import Tree, counts
from sparsona.core.update import PartSize, Support
from sparsona.learning.optimizer import FLAG, Memory, OptimizerOptions, inside, make_optimizer

if TYPE_CHECKING:
    from torch import Tensor

    from sparsona.core.task import Task


class Training(OptimizerOptions):
    """Options of local training. A method's Config adds its own to these."""

    epochs: int = Field(5, ge=1, description="passes over the client's data in one round", json_schema_extra=FLAG)


@dataclass(frozen=True)
class Model:
    """Work of a method that trains one model and nothing else, and what its optimizer remembers."""

    params: Tree
    buffers: Tree
    memory: Memory = ()


def training_phase(
    task: Task,
    config: Training,
    mask: Callable[[Work], Tree] | None = None,
    flops: Callable[[Work], int] | None = None,
) -> Phase:
    """Train `work.params` for some epochs by the optimizer of `config`, inside `mask(work)` if there is one.

    An optimizer that remembers something has its memory in `work.memory`. Outside the mask, parameters and memory are
    zero; clipping goes by the whole gradient.
    """
    optimizer = make_optimizer(config)

    def loss(work: Work, batch: Batch) -> tuple[Tensor, Any]:
        outputs, buffers = task.forward(work.params, work.buffers, batch.inputs, True, batch.noise)
        return task.mean_loss(outputs, batch), buffers

    def update(work: Work, grads: Grads, tick: Tick) -> Work:
        memory = work.memory if optimizer.num_trees else ()
        params, memory = optimizer.step(work.params, grads["params"], memory, tick)
        if mask is not None:
            zeros_and_ones = mask(work)
            params.flat.mul_(zeros_and_ones.flat)  # in place: a step makes a new buffer
            memory = inside(memory, zeros_and_ones)
        return replace(work, params=params, memory=memory) if memory else replace(work, params=params)

    def step_flops(work: Work) -> int:
        entries = task.layout.size if mask is None else sum(counts(mask(work)))
        return optimizer.flops * entries

    return Phase(
        name="train",
        trains=("params",),
        loss=loss,
        update=update,
        epochs=config.epochs,
        mixes_examples=task.mixes_examples,
        flops=flops,
        step_flops=step_flops if optimizer.flops else None,
    )


def predictor(task: Task) -> Callable[[Work, Tensor], Tensor]:
    """Logits of `work.params` in evaluation mode."""

    def predict(work: Work, inputs: Tensor) -> Tensor:
        return task.forward(work.params, work.buffers, inputs, train=False)[0]

    return predict


def plain_weights(work: Work) -> tuple[Tree, Tree]:
    """What to deploy where the model at hand is the model to deploy."""
    return work.params, work.buffers


def turn_flops(phases: Iterable[Phase], client: Client, round_: Round, per_example: int, per_step: int = 0) -> int:
    """FLOPs of one client's training: so many an example, and so many a step."""
    return sum(
        per_example * examples_seen(phase, client, round_) + per_step * steps_taken(phase, client, round_)
        for phase in phases
    )


def gradient_size(layout: Layout, config: Training, num_values: int) -> PartSize:
    """The gradient of a model of so many entries: of all entries, also those outside a mask, where its norm is taken
    over all of them."""
    return PartSize("gradient", layout, num_values if config.clip_norm is None else layout.size, Support.KNOWN)
