"""Models of several clients on their test data at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from sparsona.core.round import Batch
from sparsona.core.task import Task
from sparsona.data.augment import as_inputs
from sparsona.data.federation import Examples
from sparsona.engine.evaluate import (
    Evaluation,
    check_tested,
    confusion_cells,
    confusion_shape,
    counts_classes,
    judge,
    measure,
    needs_outputs,
)
from sparsona.gpu.stacking import over_clients

BATCH = 8192  # examples of all clients in one pass


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
    rows_and_columns = confusion_shape(task)
    collected: list[list[tuple[Tensor, Tensor]]] = [[] for _ in clients]
    if counts_classes(task):
        confusion = torch.zeros(len(clients), math.prod(rows_and_columns), dtype=torch.int64, device=device)
    at_once = max(1, BATCH // len(clients))
    with torch.no_grad():
        for start in range(0, max(counts), at_once):
            batch = _padded(tests, start, min(at_once, max(counts) - start))
            outputs = predict(batch.inputs)
            found = over_clients(partial(judge, task), outputs, batch)
            for total, values in zip(sums, found, strict=True):
                total += values
            if needs_outputs(task):
                for mine, predicted, true, count in zip(collected, outputs, batch.targets, counts, strict=True):
                    mine.append((predicted[: max(count - start, 0)], true[: max(count - start, 0)]))
            if outputs.dim() != 3:
                confusion = None
            if confusion is not None:
                cells = confusion_cells(task, outputs, batch.targets)
                confusion.scatter_add_(1, cells, (batch.weight > 0).long())
    rows = sums.T.tolist()
    matrices: Sequence[Tensor | None] = [None] * len(clients)
    if confusion is not None:
        matrices = confusion.view(-1, *rows_and_columns).int().cpu().unbind()
    for client, row in zip(clients, rows, strict=True):
        check_tested(client, int(row[1]))
    return [
        Evaluation(client, "", task.count_right(right), int(of), loss / weight, matrix, measure(task, right, of, mine))
        for client, (right, of, loss, weight), matrix, mine in zip(clients, rows, matrices, collected, strict=True)
    ]


def _padded(tests: Sequence[Examples], start: int, size: int) -> Batch:
    """Some test examples of every client, [clients, size, ...]; where a client has no more, its first with weight 0."""
    device = tests[0].targets.device
    position = torch.arange(start, start + size, device=device)
    inputs, targets, weight = [], [], []
    for test in tests:
        is_there = position < test.num_examples
        chosen = torch.where(is_there, position, 0)
        inputs.append(as_inputs(test.inputs.index_select(0, chosen), test.view))
        targets.append(test.targets.index_select(0, chosen))
        weight.append(is_there.float())
    noise = torch.zeros(len(tests), dtype=torch.int64, device=device)
    return Batch(torch.stack(inputs), torch.stack(targets), torch.stack(weight), noise, noise)
