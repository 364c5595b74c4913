"""A task whose gradient runs without Python: methods compute it outside of training steps, one client at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsona.core.round import Batch
from sparsona.core.task import Task
from sparsona.core.tree import Tree
from sparsona.gpu.programs import Captured, compile_program


class CapturedTask:
    """A task whose gradient is captured; everything else is the task's own."""

    def __init__(self, task: Task, batch_size: int) -> None:
        self._task, self._size = task, batch_size
        self._captured: Captured | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "_task":  # not set yet while this object is being copied
            raise AttributeError(name)
        return getattr(self._task, name)

    def gradient(self, params: Tree, buffers: Tree, batch: Batch) -> Tree:
        device = params.flat.device
        if device.type != "cuda" or len(batch.targets) > self._size or self._task.mixes_examples:
            return self._task.gradient(params, buffers, batch)
        if self._captured is None:
            self._capture(params, buffers, batch)
        assert self._captured is not None
        flat, kept, inputs, targets, weight, index = self._fixed
        count = len(batch.targets)
        flat.copy_(params.flat)
        kept.copy_(buffers.flat)
        # Examples beyond the batch keep their old values, with weight 0.
        inputs[:count].copy_(batch.inputs)
        targets[:count].copy_(batch.targets)
        weight[:count].copy_(batch.weight)
        weight[count:].fill_(0.0)
        index[:count].copy_(batch.index)
        self._captured.begin()
        self._captured.replay()
        self._captured.end()
        return params.like(self._found.clone())

    def _capture(self, params: Tree, buffers: Tree, batch: Batch) -> None:
        def gradient(flat: Tensor, kept: Tensor, *fields: Tensor) -> list[Tensor]:
            inputs, targets, weight, index = fields
            whole = replace(batch, inputs=inputs, targets=targets, weight=weight, index=index)
            return [self._task.gradient(params.like(flat), buffers.like(kept), whole).flat]

        first = torch.arange(self._size, device=params.flat.device) % len(batch.targets)
        ones = torch.ones(self._size, device=params.flat.device)
        examples = (params.flat, buffers.flat, batch.inputs[first], batch.targets[first], ones, batch.index[first])
        self._fixed = [value.clone() for value in examples]
        program = compile_program(gradient, self._fixed, compiles=False)  # used too rarely to be worth compiling
        self._found = torch.empty_like(params.flat)
        self._captured = Captured(lambda: self._found.copy_(program(self._fixed)[0]), params.flat.device)  # type: ignore[arg-type]
