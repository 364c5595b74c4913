"""Tests one client's model after another on a GPU with a captured forward pass; results are read together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sparsona.core.method import Work
from sparsona.core.round import Batch
from sparsona.core.tree import leaves
from sparsona.data.augment import as_inputs
from sparsona.data.batches import as_targets
from sparsona.data.client_index import PARTS
from sparsona.engine.context import ClientContext
from sparsona.engine.evaluate import Evaluation, check_tested, confusion_cells, confusion_shape, counts_classes, judge
from sparsona.gpu.programs import Captured, compile_program
from sparsona.gpu.stacking import Template

MOST = 256  # examples in one forward pass


class CapturedTest:
    """Memory for one model and one batch, and the captured pass that uses it."""

    def __init__(self, context: ClientContext, work: Work) -> None:
        data, device = context.federation, context.device
        self._context, self._template = context, Template(work)
        self._leaves = [tensor.clone() for _, tensor in leaves(work)]
        self._size = min(MOST, int(data.sizes()[:, PARTS.index("test")].max()))
        self._index = torch.zeros(self._size, dtype=torch.int64, device=device)
        self._weight = torch.zeros(self._size, device=device)
        counts = not data.predicts_tokens and counts_classes(context.task)
        cells = math.prod(confusion_shape(context.task)) if counts else 0
        self._found = torch.zeros(4 + cells, dtype=torch.float64, device=device)  # right, of, loss, weight, confusion
        program = compile_program(self._pass, self._inputs(), compiles=False)
        self._captured = Captured(lambda: self._found.add_(program(self._inputs())[0]), device)  # type: ignore[arg-type]

    def _inputs(self) -> list[Tensor]:
        data = self._context.federation
        return [*self._leaves, data.x, data.y, self._index, self._weight]

    def _pass(self, *tensors: Tensor) -> list[Tensor]:
        *own, x, y, index, weight = tensors
        context, work = self._context, self._template.fill(own)
        with torch.no_grad():
            inputs = as_inputs(x.index_select(0, index), context.federation.view)
            outputs = context.method.predict(work, inputs)
            targets = as_targets(y.index_select(0, index))
            nothing = torch.zeros((), dtype=torch.int64, device=weight.device)
            batch = Batch(inputs, targets, weight, torch.arange(len(weight), device=weight.device), nothing)
            found = torch.stack([value.double() for value in judge(context.task, outputs, batch)])
            if len(self._found) > 4:
                cells = confusion_cells(context.task, outputs, targets)
                confusion = torch.zeros(len(self._found) - 4, dtype=torch.float64, device=weight.device)
                found = torch.cat([found, confusion.scatter_add(0, cells, (weight > 0).double())])
        return [found]

    def run(self, client: int, work: Work) -> Tensor:
        """Evaluate a client's model on its test data: returns sums, on the device, for `read`."""
        for fixed, (_, value) in zip(self._leaves, leaves(work), strict=True):
            fixed.copy_(value)
        self._found.zero_()
        mine = self._context.federation.splits[client].test.to(self._index.device, non_blocking=True)
        for start in range(0, len(mine), self._size):
            some = mine[start : start + self._size]
            self._index[: len(some)].copy_(some)
            self._weight.zero_()
            self._weight[: len(some)].fill_(1.0)
            self._captured.begin()
            self._captured.replay()
            self._captured.end()
        return self._found.clone()

    def read(self, clients: Sequence[int], rows: Sequence[Tensor]) -> list[Evaluation]:
        """The test results of several `run`s, at no point yet."""
        found = []
        for client, row in zip(clients, torch.stack(list(rows)).cpu(), strict=True):
            right, of, loss, weight = row[:4].tolist()
            check_tested(client, int(of))
            confusion = row[4:].int().view(confusion_shape(self._context.task)) if len(row) > 4 else None
            found.append(
                Evaluation(client, "", self._context.task.count_right(right), int(of), loss / weight, confusion)
            )
        return found
