"""Large models on a GPU: a step is compiled and captured once, then replayed; several clients run side by side.

Agrees with `serial` within rounding. Each lane has a stream and memory of its own; a client's model is copied into it,
its steps are replayed without Python in between, and the model is copied out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from sparsona.core.method import Phase, Tick, Work
from sparsona.core.round import Batch
from sparsona.core.task import Task
from sparsona.core.tree import Tree, leaves, map_leaves
from sparsona.data.augment import Draws, augment, look
from sparsona.data.federation import Federation
from sparsona.engine.compiled import Captured, Program, compile_program
from sparsona.engine.evaluate import Evaluation, evaluate
from sparsona.engine.jobs import Job, Outcome, Setting
from sparsona.engine.schedule import plan_client
from sparsona.engine.seats import Seat, finish_seats, take_seat
from sparsona.engine.turn import phase_flops, record_phase, run_phase, take_step

LANES = 4


class CompiledTask:
    """A task whose gradient is compiled and captured; everything else is the task's own."""

    def __init__(self, task: Task, batch_size: int) -> None:
        self._task, self._size = task, batch_size
        self._captured: Captured | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def gradient(self, params: Tree, buffers: Tree, batch: Batch) -> Tree:
        if len(batch.targets) > self._size or self._task.mixes_examples:
            return self._task.gradient(params, buffers, batch)
        fill = torch.arange(self._size, device=batch.targets.device) % len(batch.targets)
        now = [params.flat, buffers.flat, batch.inputs[fill], batch.targets[fill]]
        now.append((torch.arange(self._size, device=fill.device) < len(batch.targets)).float())
        if self._captured is None:
            self._capture(params, buffers, batch, now)
        assert self._captured is not None
        for fixed, value in zip(self._fixed, now, strict=True):
            fixed.copy_(value)
        self._captured.begin()
        self._captured.replay()
        self._captured.end()
        return params.like(self._found.clone())

    def _capture(self, params: Tree, buffers: Tree, batch: Batch, now: list[Tensor]) -> None:
        def gradient(flat: Tensor, kept: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> list[Tensor]:
            whole = replace(batch, inputs=inputs, targets=targets, weight=weight)
            return [self._task.gradient(params.like(flat), buffers.like(kept), whole).flat]

        self._fixed = [value.clone() for value in now]
        program = compile_program(gradient, self._fixed)
        self._found = torch.empty_like(params.flat)
        self._captured = Captured(lambda: self._found.copy_(program(self._fixed)[0]), params.flat.device)  # type: ignore[arg-type]


class Graphed:
    """The executor for large models on a GPU."""

    encodes = False

    def __init__(self, setting: Setting, lanes: int = LANES) -> None:
        setting.task.channels_last = True  # as convolutions on a GPU like it
        task: Any = CompiledTask(setting.task, setting.plan.batch_size)
        self._setting = replace(setting, task=task)
        self._num_lanes = lanes
        self._programs: dict[str, tuple[Program, list[int]]] = {}
        self._lanes: dict[tuple[str, int], Lane] = {}

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        waiting = iter(jobs)
        while group := list(islice(waiting, self._num_lanes)):
            seats = [take_seat(self._setting, job) for job in group]
            yield from finish_seats(self._setting, seats, self._train, self._test)

    def close(self) -> None:
        self._lanes.clear()
        self._programs.clear()

    def _test(self, seats: Sequence[Seat], point: str) -> list[Evaluation]:
        setting = self._setting
        return [
            evaluate(
                seat.job.client,
                point,
                partial(setting.method.predict, seat.work),
                setting.task,
                setting.federation.examples(seat.job.client, "test"),
            )
            for seat in seats
        ]

    def _train(self, phase: Phase, seats: Sequence[Seat]) -> None:
        task = self._setting.task
        plain = phase.after_batch is None and phase.batches_per_step == phase.repeats == 1
        if phase.mixes_examples or not phase.traceable or task.draws_noise or not plain:
            for seat in seats:
                seat.work = run_phase(phase, seat.work, task, seat.train, seat.probe, seat.round, seat.tally)
            return
        for seat in seats:
            if phase.enter is not None:
                seat.work = phase.enter(seat.work, seat.probe, seat.round)
        flops = [phase_flops(phase, seat.work, task) for seat in seats]
        lanes = [self._lane(phase, seat, place) for place, seat in enumerate(seats)]
        for lane, seat in zip(lanes, seats, strict=True):
            lane.load(phase, seat)
        for number in range(max(lane.num_steps for lane in lanes)):
            for lane in lanes:
                if number < lane.num_steps:
                    lane.captured.replay()
        for lane, seat, each in zip(lanes, seats, flops, strict=True):
            seat.work, loss_sum = lane.unload()
            record_phase(phase, seat.work, seat.tally, seat.round, lane.num_examples, lane.num_steps, each, loss_sum)

    def _lane(self, phase: Phase, seat: Seat, place: int) -> Lane:
        key = (phase.name, place)
        if key not in self._lanes:
            self._lanes[key] = Lane(phase, seat, self._setting.federation, self._programs)
        return self._lanes[key]


class Lane:
    """Memory for one client at a time, and the captured step that works on it."""

    def __init__(
        self, phase: Phase, seat: Seat, federation: Federation, programs: dict[str, tuple[Program, list[int]]]
    ) -> None:
        device = federation.x.device
        self._federation, self._template = federation, seat.work
        self._leaves = [tensor.clone() for _, tensor in leaves(seat.work)]
        self._rows = torch.zeros(0)
        self._capacity = 0
        self._number = torch.zeros(1, dtype=torch.int64, device=device)
        self._lr_scale = torch.ones((), device=device)
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._programs, self._phase = programs, phase
        self.num_steps = self.num_examples = 0
        self.captured: Captured

    def _reserve(self, rows: Tensor) -> None:
        """Room for a schedule of [steps, rows, batch size]; a graph is captured anew if there was too little."""
        self._capacity = max(64, 2 * len(rows))
        self._rows = rows.new_zeros((self._capacity, *rows.shape[1:]))
        self._rows[: len(rows)] = rows
        phase = self._phase
        if phase.name not in self._programs:
            changed: list[int] = []
            examples = [*self._leaves, self._federation.x, self._federation.y, rows[0], self._lr_scale, self._number[0]]
            self._programs[phase.name] = (compile_program(partial(self._one_step, changed), examples), changed)
        self.captured = Captured(self._advance, self._federation.x.device)

    def _one_step(self, changed: list[int], *tensors: Tensor) -> list[Tensor]:
        """The whole step as a function of tensors: gather, augment, loss, gradient, update."""
        own, (x, y, row, lr_scale, number) = tensors[: len(self._leaves)], tensors[len(self._leaves) :]
        source = iter(own)
        work: Work = map_leaves(lambda _path, _value: next(source), self._template)
        # Rows of a schedule: positions in the pool, in the client's own data, weights, and crops and mirrors.
        index, view = row[0], self._federation.view
        stored = x.index_select(0, index)
        if view.augments:
            inputs = augment(stored, view, Draws(row[3], row[4], row[5] > 0))
        else:
            inputs = look(stored, view)
        batch = Batch(inputs, y.index_select(0, index).long(), row[2].float(), row[1], number)
        work, loss = take_step(self._phase, work, batch, Tick(lr_scale, number))
        after = [tensor for _, tensor in leaves(work)]
        changed[:] = [place for place, (old, new) in enumerate(zip(own, after, strict=True)) if old is not new]
        return [*(after[place] for place in changed), loss]

    def _advance(self) -> None:
        """One step on this lane's memory."""
        program, changed = self._programs[self._phase.name]
        row = self._rows.index_select(0, self._number)[0]
        fixed = [self._federation.x, self._federation.y, row, self._lr_scale, self._number[0]]
        *after, loss = program([*self._leaves, *fixed])
        for place, value in zip(changed, after, strict=True):
            self._leaves[place].copy_(value)
        self._loss_sum += loss.double() * row[2].sum()
        self._number += 1

    def load(self, phase: Phase, seat: Seat) -> None:
        """Take a client in: its model, and the batches of this phase."""
        order, sizes, draws = plan_client(phase, seat.train, seat.round, seat.round.batch_size)
        self.num_steps, self.num_examples = len(order), int(sizes.sum())
        mine = self._federation.splits[seat.job.client].train.cpu()
        weight = torch.arange(order.shape[1]) < sizes[:, None]
        nothing = torch.zeros_like(order)
        crops = (nothing, nothing, nothing) if draws is None else draws
        rows = torch.stack([mine[order], order, weight, *crops], dim=1).to(self._federation.x.device)
        if len(rows) > self._capacity:
            self._reserve(rows)
        else:
            self._rows[: len(rows)] = rows
        for fixed, (_, value) in zip(self._leaves, leaves(seat.work), strict=True):
            fixed.copy_(value)
        self._number.zero_()
        self._loss_sum.zero_()
        self._lr_scale.fill_(seat.round.lr_scale)
        self.captured.begin()

    def unload(self) -> tuple[Work, float]:
        """The client's model as it is now, and the sum of its losses."""
        self.captured.end()
        now = iter([tensor.clone() for tensor in self._leaves])
        return map_leaves(lambda _path, _value: next(now), self._template), float(self._loss_sum)
