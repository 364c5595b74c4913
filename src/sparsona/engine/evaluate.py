"""How well a client's deployed model does on that client's test data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sparsona.core.errors import SparsonaError
from sparsona.core.round import Batch
from sparsona.core.task import Task
from sparsona.data.augment import look
from sparsona.data.batches import in_order
from sparsona.data.federation import Examples
from sparsona.engine.stacking import over_clients

BATCH = 512  # large enough to be quick, small enough for any device; only transductive predictions depend on it
STACKED_BATCH = 8192  # the same for many clients at once
MAX_CONFUSION = 256  # more classes than anybody looks at in a square; a client's would take a megabyte


@dataclass(frozen=True)
class Evaluation:
    """One client's test result. `confusion` counts true classes by row and predictions by column."""

    client: int
    point: str
    correct: int | None  # None: a regression, in which only the loss tells
    count: int
    loss: float
    confusion: Tensor | None = None


def evaluate(client: int, point: str, predict: Callable[[Tensor], Tensor], task: Task, test: Examples) -> Evaluation:
    """Run a prediction function over the client's test data."""
    correct = count = 0
    loss_sum = 0.0
    weight_sum = 0.0
    confusion = None
    if task.num_classes <= MAX_CONFUSION and not task.is_regression:
        confusion = torch.zeros(task.num_classes, task.num_classes, dtype=torch.int32, device=test.targets.device)
    with torch.no_grad():
        for batch in in_order(test, BATCH):
            outputs = predict(batch.inputs)
            right, of, loss, weight = judge(task, outputs, batch)
            correct, count = correct + int(right), count + int(of)
            loss_sum += float(loss)
            weight_sum += float(weight)
            if outputs.dim() != 2:
                confusion = None
            if confusion is not None:
                cells = batch.targets * task.num_classes + outputs[:, : task.num_classes].argmax(dim=1)
                confusion += torch.bincount(cells, minlength=task.num_classes**2).view_as(confusion).int()
    if "/" not in point:
        check_tested(client, count)
    return Evaluation(
        client,
        point,
        task.count_right(correct),
        count,
        loss_sum / (weight_sum or 1.0),
        None if confusion is None else confusion.cpu(),
    )


def check_tested(client: int, count: int) -> None:
    if not count:
        raise SparsonaError(f"client {client} has no test data to be evaluated on", expected="at least one example")


def judge(task: Task, outputs: Tensor, batch: Batch) -> tuple[Tensor, ...]:
    """How many are right, of how many, the sum of the losses and that of their weights; padding has weight 0."""
    (right, of), (losses, counted) = task.score(outputs, batch), task.losses(outputs, batch)
    # Padding is not a number where a model has never seen such inputs: left out, not weighed by 0.
    return right, of, torch.where(counted > 0, losses * counted, 0.0).double().sum(), counted.sum()


def evaluate_stacked(
    clients: Sequence[int],
    predict: Callable[[Tensor], Tensor],
    task: Task,
    tests: Sequence[Examples],
) -> list[Evaluation]:
    """`evaluate` for several clients at once, at no point yet: `predict` takes inputs [clients, N, ...]."""
    counts, device = [test.num_examples for test in tests], tests[0].targets.device
    for client, count in zip(clients, counts, strict=True):
        check_tested(client, count)
    sums = torch.zeros(4, len(clients), dtype=torch.float64, device=device)  # right, of, loss, weight
    confusion = None
    if task.num_classes <= MAX_CONFUSION and not task.is_regression:
        confusion = torch.zeros(len(clients), task.num_classes**2, dtype=torch.int64, device=device)
    at_once = max(1, STACKED_BATCH // len(clients))
    with torch.no_grad():
        for start in range(0, max(counts), at_once):
            batch = _padded(tests, start, min(at_once, max(counts) - start))
            outputs = predict(batch.inputs)
            found = over_clients(partial(judge, task), outputs, batch)
            for total, values in zip(sums, found, strict=True):
                total += values
            if outputs.dim() != 3:
                confusion = None
            if confusion is not None:
                cells = batch.targets * task.num_classes + outputs[..., : task.num_classes].argmax(dim=-1)
                confusion.scatter_add_(1, cells, (batch.weight > 0).long())
    rows = sums.T.tolist()
    matrices: Sequence[Tensor | None] = [None] * len(clients)
    if confusion is not None:
        matrices = confusion.view(-1, task.num_classes, task.num_classes).int().cpu().unbind()
    for client, row in zip(clients, rows, strict=True):
        check_tested(client, int(row[1]))
    return [
        Evaluation(client, "", task.count_right(right), int(of), loss / weight, matrix)
        for client, (right, of, loss, weight), matrix in zip(clients, rows, matrices, strict=True)
    ]


def _padded(tests: Sequence[Examples], start: int, size: int) -> Batch:
    """Some test examples of every client, [clients, size, ...]; where a client has no more, its first with weight 0."""
    device = tests[0].targets.device
    position = torch.arange(start, start + size, device=device)
    inputs, targets, weight = [], [], []
    for test in tests:
        is_there = position < test.num_examples
        chosen = torch.where(is_there, position, 0)
        inputs.append(look(test.inputs.index_select(0, chosen), test.view))
        targets.append(test.targets.index_select(0, chosen))
        weight.append(is_there.float())
    noise = torch.zeros(len(tests), dtype=torch.int64, device=device)
    return Batch(torch.stack(inputs), torch.stack(targets), torch.stack(weight), noise, noise)
