"""Local training as most methods have it: one optimizer, one loss, one prediction."""

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
from sparsona.learning.optimizer import FLAG, Memory, OptimizerOptions, make_optimizer, mask_memory

if TYPE_CHECKING:
    from torch import Tensor

    from sparsona.core.task import Task


class Training(OptimizerOptions):
    """Options of local training. A method's Config adds its own to these."""

    epochs: int = Field(5, ge=1, description="passes over the client's data in one round", json_schema_extra=FLAG)


@dataclass(frozen=True)
class Model:
    """The Work of a method that trains one model and nothing else.

    Args:
        params: the parameters.
        buffers: the buffers of the model.
        memory: the memory of the optimizer.
    """

    params: Tree
    buffers: Tree
    memory: Memory = ()


def training_phase(
    task: Task,
    config: Training,
    mask: Callable[[Work], Tree] | None = None,
    flops: Callable[[Work], int] | None = None,
) -> Phase:
    """A phase that trains `work.params` with the optimizer of `config`.

    Args:
        task: the task.
        config: the options of training.
        mask: `mask(work)` returns the mask as numbers, 0 or 1; parameters and memory are zero outside. Clipping uses
            the norm of the whole gradient. None: dense training.
        flops: FLOPs per example and step; None: three dense forward passes.

    Returns:
        The phase. The memory of an optimizer that has one is in `work.memory`.

    Example:
        >>> from torch import nn
        >>> from sparsona.core.task import Task
        >>> phase = training_phase(Task(nn.Linear(4, 3), (4,), 3), Training(epochs=2))
        >>> phase.trains, phase.epochs
        (('params',), 2)
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
            memory = mask_memory(memory, zeros_and_ones)
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
    """A `predict` function: the outputs of `work.params` in evaluation mode.

    Args:
        task: the task.

    Returns:
        A function of a Work and inputs.

    Example:
        >>> import torch
        >>> from sparsona.core.task import Task
        >>> task = Task(torch.nn.Linear(4, 3), (4,), 3)
        >>> predictor(task)(Model(*task.init(0)), torch.zeros(2, 4)).shape
        torch.Size([2, 3])
    """

    def predict(work: Work, inputs: Tensor) -> Tensor:
        return task.forward(work.params, work.buffers, inputs, train=False)[0]

    return predict


def plain_weights(work: Work) -> tuple[Tree, Tree]:
    """A `deploy` function for a method whose Work holds the model to deploy.

    Args:
        work: a Work with `params` and `buffers`.

    Returns:
        The two trees.
    """
    return work.params, work.buffers


def turn_flops(phases: Iterable[Phase], client: Client, round_: Round, per_example: int, per_step: int = 0) -> int:
    """FLOPs of one client's training in a round.

    Args:
        phases: the phases of the method.
        client: the client.
        round_: the round.
        per_example: FLOPs of an example in a step.
        per_step: FLOPs of a step whatever its number of examples.

    Returns:
        The number of FLOPs.

    Example:
        >>> from sparsona.core.method import Seeds
        >>> phase = Phase(name="train", trains=("params",), loss=lambda w, b: b, update=lambda w, g, t: w)
        >>> turn_flops([phase], Client(0, num_examples=10), Round(0, 1, 1.0, 4, Seeds(0)), per_example=6)
        60
    """
    return sum(
        per_example * examples_seen(phase, client, round_) + per_step * steps_taken(phase, client, round_)
        for phase in phases
    )


def gradient_size(layout: Layout, config: Training, num_values: int) -> PartSize:
    """The size of a gradient that is held in training.

    Args:
        layout: the layout of the model.
        config: the options of training: with clipping, the gradient has all entries, since its norm is that of all.
        num_values: the entries of the model inside its mask.

    Returns:
        The size of the part "gradient".
    """
    return PartSize("gradient", layout, num_values if config.clip_norm is None else layout.size, Support.KNOWN)
