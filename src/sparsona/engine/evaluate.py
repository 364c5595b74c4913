"""Evaluation of models on a client's data, at the evaluation points of a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsona.core import metrics, points
from sparsona.core.errors import SparsonaError
from sparsona.core.method import State, Tree, Work
from sparsona.core.round import Batch
from sparsona.core.task import Task
from sparsona.data.batches import in_order
from sparsona.data.federation import Examples
from sparsona.engine.context import ClientContext

if TYPE_CHECKING:
    from sparsona.engine.jobs import Job

BATCH = 512  # large enough to be quick, small enough for any device; only transductive predictions depend on it
MAX_CONFUSION = 256  # classes of a confusion matrix: a larger one is unreadable, and takes a megabyte per client


@dataclass(frozen=True)
class Evaluation:
    """One client's test result.

    `confusion` counts predictions, true classes by row: by column the predicted class, or with more than MAX_CONFUSION
    classes (whose matrix is not kept) 0 for a wrong and 1 for a right one. Of a client elsewhere, FEW is a count from 1
    to 4.
    """

    client: int
    point: str
    correct: int | None  # None: a regression, which has a loss only
    count: int
    loss: float
    confusion: Tensor | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)  # those that are defined for this client


def evaluate(
    client: int, point: str, predict: Callable[[Tensor], Tensor], task: Task, test: Examples, label: str = ""
) -> Evaluation:
    """Run a prediction function over the test data of a client, which errors call `label` or by its number."""
    correct = count = 0
    loss_sum = 0.0
    weight_sum = 0.0
    confusion = None
    collected: list[tuple[Tensor, Tensor]] = []
    if counts_classes(task):
        confusion = torch.zeros(confusion_shape(task), dtype=torch.int32, device=test.targets.device)
    with torch.no_grad():
        for batch in in_order(test, BATCH):
            outputs = predict(batch.inputs)
            right, of, loss, weight = judge(task, outputs, batch)
            correct, count = correct + int(right), count + int(of)
            loss_sum += float(loss)
            weight_sum += float(weight)
            if needs_outputs(task):
                collected.append((outputs, batch.targets))
            if outputs.dim() != 2:
                confusion = None
            if confusion is not None:
                cells = confusion_cells(task, outputs, batch.targets)
                confusion += torch.bincount(cells, minlength=confusion.numel()).view_as(confusion).int()
    if not point or points.point(point).data == "test":
        check_tested(label or client, count)
    return Evaluation(
        client,
        point,
        task.count_right(correct),
        count,
        loss_sum / (weight_sum or 1.0),
        None if confusion is None else confusion.cpu(),
        measure(task, correct, count, collected),
    )


def measure(task: Task, correct: float, count: float, collected: list[tuple[Tensor, Tensor]]) -> Mapping[str, float]:
    """The metrics of a task, of the outputs and targets of all batches; the accuracy of tokens is that of `score`."""
    if task.metrics and task.targets == "tokens":
        return {"accuracy": correct / count} if count else {}
    return metrics.measure(task.metrics, *metrics.gather(collected)) if collected else {}


def needs_outputs(task: Task) -> bool:
    """Whether metrics are computed of all outputs of a client; those of tokens would be too many, and need not be."""
    return bool(task.metrics) and task.targets != "tokens"


def counts_classes(task: Task) -> bool:
    """Whether predictions are counted by class: each example has one."""
    return task.targets in ("classes", "tokens", "binary")


def confusion_shape(task: Task) -> tuple[int, int]:
    """Rows and columns of an Evaluation's `confusion`."""
    return task.num_labels, task.num_labels if task.num_labels <= MAX_CONFUSION else 2


def confusion_cells(task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
    """The cell of that table, flattened, that each prediction counts in."""
    rows, columns = confusion_shape(task)
    predicted = task.predict_classes(outputs)
    return targets * columns + (predicted if columns == rows else (predicted == targets).long())


def check_tested(label: str | int, count: int) -> None:
    if not count:
        raise SparsonaError(f"client {label} has no test data to be evaluated on", expected="at least one example")


def judge(task: Task, outputs: Tensor, batch: Batch) -> tuple[Tensor, ...]:
    """The number of correct predictions, of all, the sum of the losses and of their weights; padding has weight 0."""
    (right, of), (losses, counted) = task.score(outputs, batch), task.losses(outputs, batch)
    # The loss of padding may be NaN, which a weight of 0 would not remove.
    return right, of, torch.where(counted > 0, losses * counted, 0.0).double().sum(), counted.sum()


def first_points(job: Job) -> tuple[str, ...]:
    """The points of a job at which the model is evaluated before it is trained."""
    return tuple(name for name in job.points if job.do == "train" and points.point(name).when == "round")


def last_points(job: Job) -> tuple[str, ...]:
    """The points of a job at which the model is evaluated when the job is done."""
    first = first_points(job)
    return tuple(name for name in job.points if name not in first) if first else job.points


def own_points(job: Job) -> list[str]:
    """The `last_points` at which the client's own model is tested: one and the same model within a job."""
    return [point for point in last_points(job) if points.is_own(point)]


def needs_own_model(job: Job) -> bool:
    """Whether the job evaluates the client's own model on other data than its test data, when it is done."""
    return any(points.point(point).model == "own" and not points.is_own(point) for point in last_points(job))


def at_points(job: Job, found: Evaluation) -> tuple[Evaluation, ...]:
    """The result of a client's own model, at each of its points."""
    return tuple(replace(found, point=point) for point in own_points(job))


def evaluate_own(context: ClientContext, client: int, work: Work) -> Evaluation:
    """A client's own model on its test data, at no point yet."""
    test = context.federation.packed_examples(client, "test")
    return evaluate(
        client, "", partial(context.method.predict, work), context.task, test, context.clients[client].label
    )


def evaluate_other_points(context: ClientContext, job: Job, state: State, work: Work | None) -> tuple[Evaluation, ...]:
    """The points of a job that are not `own_points`: a shared model, with this client's buffers, or other data."""
    found = []
    for name in last_points(job):
        if points.is_own(name):
            continue
        point = points.point(name)
        predict = partial(context.method.predict, work)
        if point.model != "own":
            model = context.params if point.model == "start" else job.shared_model
            assert model is not None
            predict = partial(_predict_plainly, context.task, model, state.buffers)
        examples = context.federation.packed_examples(job.client, point.data)
        with context.clock.measure("evaluate"):
            label = context.clients[job.client].label
            found.append(evaluate(job.client, name, predict, context.task, examples, label))
    return tuple(found)


def _predict_plainly(task: Task, model: Tree, buffers: Tree, inputs: Tensor) -> Tensor:
    return task.forward(model, buffers, inputs, False)[0]
