"""How well a client's deployed model does on that client's test data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsona.core.errors import SparsonaError
from sparsona.core.task import Task
from sparsona.data.batches import in_order
from sparsona.data.federation import Examples

BATCH = 512  # large enough to be quick, small enough for any device; predictions do not depend on it
MAX_CONFUSION = 256  # more classes than anybody looks at in a square; a client's would take a megabyte


@dataclass(frozen=True)
class Evaluation:
    """One client's test result. `confusion` counts true classes by row and predictions by column."""

    client: int
    point: str
    correct: int
    count: int
    loss: float
    confusion: Tensor | None = None


def evaluate(client: int, point: str, predict: Callable[[Tensor], Tensor], task: Task, test: Examples) -> Evaluation:
    """Run a prediction function over the client's test data."""
    correct = count = 0
    loss_sum = 0.0
    weight_sum = 0.0
    confusion = None
    if task.num_classes <= MAX_CONFUSION:
        confusion = torch.zeros(task.num_classes, task.num_classes, dtype=torch.int32)
    with torch.no_grad():
        for batch in in_order(test, BATCH):
            outputs = predict(batch.inputs)
            right, of = task.score(outputs, batch)
            losses, weight = task.losses(outputs, batch)
            correct, count = correct + int(right), count + int(of)
            loss_sum += float((losses * weight).double().sum())
            weight_sum += float(weight.sum())
            if outputs.dim() != 2:
                confusion = None
            if confusion is not None:
                cells = batch.targets * task.num_classes + outputs[:, : task.num_classes].argmax(dim=1)
                confusion += torch.bincount(cells, minlength=task.num_classes**2).view_as(confusion).int()
    if not count:
        raise SparsonaError(f"client {client} has no test data to be evaluated on", expected="at least one example")
    return Evaluation(client, point, correct, count, loss_sum / weight_sum, confusion)
