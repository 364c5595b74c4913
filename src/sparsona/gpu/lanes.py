"""A lane: memory for one client, or for a stack of them, and a phase's step on it, compiled and captured.

Clients are copied in, their steps are replayed with no Python in between, and they are copied out. Without a GPU the
step is neither compiled nor captured; everything else is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count
from typing import Any

import torch
from torch import Tensor

from sparsona.core.kernels import have_triton
from sparsona.core.method import Phase, Tick, Work
from sparsona.core.tree import leaves, map_leaves
from sparsona.engine.context import ClientContext
from sparsona.engine.jobs import Report
from sparsona.engine.profiler import START
from sparsona.engine.turn import OpenTurn, are_finite, call, catching_divergence, phase_flops, record_phase, take_step
from sparsona.gpu.programs import Captured, Program, compile_program, in_background
from sparsona.gpu.schedule import NUM_FIELDS, WEIGHT, gather, plan_rows
from sparsona.gpu.stacked_conv import as_products
from sparsona.gpu.stacking import Template, over_clients, where_kept
from sparsona.sparsity.selection import build_kernels

ByKey = dict[Hashable, Program]
# Shapes of Work that a phase has lanes for; clients of further shapes run alone. Networks come in a few widths, while a
# Work with an entry for each example has as many shapes as there are clients.
MOST_SHAPES = 8
# Steps of one client from which compiling pays, and the share of such a step that each client of a stack takes.
WORTH_COMPILING, STACKED_STEP = 50_000, 0.2


def program_key(phase: Phase, kinds: Hashable) -> tuple[Hashable, Hashable]:
    """The key of a compiled step: what the phase computes, whatever its name and length, and the shapes of its Work."""
    what = (phase.loss, phase.update, phase.after_batch, phase.trains, phase.batches_per_step, phase.repeats)
    return what, kinds


def must_be_alone(phase: Phase, context: ClientContext) -> bool:
    """Whether a phase can be neither stacked nor captured: both pad batches and cannot draw noise."""
    task, is_mixed = context.task, phase.mixes_examples or context.task.mixes_examples
    return is_mixed or not phase.traceable or task.draws_noise or task.moves_buffers


def can_be_traced(context: ClientContext) -> bool:
    """Whether `predict` can be captured or run for several clients at once: it follows the rules of the phases."""
    return all(phase.traceable for phase in context.method.phases) and not context.method.transductive


def has_room(lanes: Mapping[tuple[Hashable, Hashable], object], key: tuple[Hashable, Hashable]) -> bool:
    """Whether a phase has, or may get, a lane of this shape."""
    return key in lanes or sum(what == key[0] for what, _ in lanes) < MOST_SHAPES


def is_worth_compiling(context: ClientContext, phase: Phase, stacks: bool) -> bool:
    """Whether a run has enough steps to pay for compiling one. It depends on the plan alone, so that a resumed run
    decides as before."""
    plan, clients = context.plan, context.clients
    trained = len(clients) if plan.everyone_trains else plan.per_round
    batches = sum(-(-client.num_examples // context.largest_batch) for client in clients) / len(clients)
    steps = plan.rounds * trained * phase.epochs * batches
    return steps * (STACKED_STEP if stacks else 1) >= WORTH_COMPILING


def build_ahead(context: ClientContext, stacks: bool) -> None:
    """Build in the background what the first round will need, while states and masks are made."""
    method, layout, device = context.method, context.task.layout, context.device
    if device.type != "cuda" or not have_triton():
        return
    compiles = stacks and any(is_worth_compiling(context, phase, stacks) for phase in method.phases)
    needed = "torch._inductor.compile_fx" if compiles else "torch.fx.experimental.proxy_tensor"
    in_background(lambda: import_module(needed), device)
    if method.cost(layout, context.clients[0], context.plan.round_at(0)).search_flops:
        in_background(lambda: build_kernels(layout.sizes, device), device)


@dataclass
class Programs:
    """What lanes of one executor share, by phase and shapes: compiled steps, and the tensors of a Work they change."""

    report: Report = lambda text: None  # reports compiling, which takes long
    steps: ByKey = field(default_factory=dict)
    ends: ByKey = field(default_factory=dict)
    changed: dict[Hashable, set[int]] = field(default_factory=dict)


class Lane:
    """Runs one phase for one client at a time, or for `stacked` clients at once."""

    def __init__(
        self, context: ClientContext, phase: Phase, work: Work, programs: Programs, stacked: int | None
    ) -> None:
        self._context, self._phase, self._programs = context, phase, programs
        self._stacked, self.num_places = stacked, stacked or 1
        one = [tensor for _, tensor in leaves(work)]
        self._leaves = [t.clone() if stacked is None else torch.stack([t] * stacked) for t in one]
        self._template = Template(work)
        self._key = program_key(phase, self._template.kinds)
        self._over = call if stacked is None else over_clients
        device, lead = context.device, () if stacked is None else (stacked,)
        self._size = context.largest_batch
        self._batch = torch.zeros(1, dtype=torch.int64, device=device)  # which row of the schedule is next
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._lr_scale = torch.ones((), device=device)
        self._loss_sum = torch.zeros(lead, dtype=torch.float64, device=device)
        # A client's batches are as many as the largest client's, or fewer.
        batches = phase.epochs * -(-max(client.num_examples for client in context.clients) // self._size)
        self._reserve(max(8, batches // phase.batches_per_step))  # a capture runs the first few
        self._present: list[OpenTurn] = []

    def _reserve(self, steps: int) -> None:
        """Allocate a schedule of so many steps; the step is then captured again."""
        phase, device = self._phase, self._context.device
        lead = () if self._stacked is None else (self._stacked,)
        shape = (steps, phase.batches_per_step, NUM_FIELDS, *lead, self._size)
        # Pinned memory, so that copies to the device are asynchronous.
        pinned = device.type == "cuda"
        self._rows_here = torch.zeros(shape, dtype=torch.int64, pin_memory=pinned)
        self._rows_here[:, :, WEIGHT] = (
            1  # the mean of an empty batch would be NaN, also in the trial runs of a capture
        )
        self._sizes_here = torch.zeros((steps, *lead), dtype=torch.int64, pin_memory=pinned)
        self._rows, self._sizes = self._rows_here.to(device), self._sizes_here.to(device)
        self._captured: Captured | None = None

    def _batch_at(self, row: Tensor, x: Tensor, y: Tensor) -> Any:
        noise = torch.zeros(row.shape[2:-1], dtype=torch.int64, device=row.device)
        batches = tuple(gather(x, y, one, self._context.federation.view, noise) for one in row)
        return batches[0] if len(batches) == 1 else batches

    def _take(self, *tensors: Tensor) -> list[Tensor]:
        """A whole step as a function of tensors: gather, augment, loss, gradient, update."""
        before, batch, size, tick = self._unpack(tensors)
        work, loss = take_step(self._phase, before, batch, tick, self._over)
        loss = loss.double() * size
        self._write(before, work, size)
        return [loss if self._stacked is None else torch.where(size > 0, loss, 0.0)]

    def _end_batch(self, *tensors: Tensor) -> list[Tensor]:
        """The method's `after_batch` as a function of tensors."""
        before, batch, size, tick = self._unpack(tensors)
        after = self._phase.after_batch
        assert after is not None
        with torch.no_grad():
            work = self._over(lambda w, b: after(w, b, tick), before, batch)
        self._write(before, work, size)
        return []

    def _unpack(self, tensors: Sequence[Tensor]) -> tuple[Work, Any, Tensor, Tick]:
        """The inverse of `_inputs`: the clients' Work, their batch, its number of examples, and the time."""
        own, (x, y, row, size, lr_scale, step) = tensors[: len(self._leaves)], tensors[len(self._leaves) :]
        return self._template.fill(own), self._batch_at(row, x, y), size, Tick(lr_scale, step)

    def _write(self, before: Work, work: Work, size: Tensor) -> None:
        """Copy changed tensors back to their memory, as part of the program: a later copy would be one more pass."""
        own = [tensor for _, tensor in leaves(before)]
        if self._stacked is not None:
            work = where_kept(size > 0, work, before)
        memory = {tensor.untyped_storage()._cdata for tensor in own}
        moves = [(place, new) for place, (_, new) in enumerate(leaves(work)) if new is not own[place]]
        # A tensor that moves to another field is copied first: its memory is about to be overwritten.
        moves = [(place, new.clone() if new.untyped_storage()._cdata in memory else new) for place, new in moves]
        for place, new in moves:
            own[place].copy_(new)
            self._programs.changed.setdefault(self._key, set()).add(place)

    def _inputs(self) -> list[Tensor]:
        row, size = (values.index_select(0, self._batch)[0] for values in (self._rows, self._sizes))
        own, data = self._leaves, self._context.federation
        if (places := self._places_at_work()) < self.num_places:
            own, row, size = [tensor[:places] for tensor in own], row[..., :places, :], size[:places]
        return [*own, data.x, data.y, row, size, self._lr_scale, self._step]

    def _places_at_work(self) -> int:
        """How many of the first places have all clients that are not done yet. A captured step has a fixed size."""
        if self._stacked is None or self._context.device.type == "cuda":
            return self.num_places
        return int(self._sizes[self._batch].nonzero()[:, 1].amax()) + 1

    def _program(self, kept: ByKey, function: Callable[..., list[Tensor]]) -> Program:
        if self._key not in kept:
            products = None if self._stacked is None else as_products(self._stacked)
            kept[self._key] = compile_program(function, self._inputs(), products, compiles=self._is_worth_compiling)
        return kept[self._key]

    @property
    def _is_worth_compiling(self) -> bool:
        return is_worth_compiling(self._context, self._phase, self._stacked is not None)

    def _advance(self) -> None:
        """All steps on one batch, on this lane's memory."""
        for _ in range(self._phase.repeats):
            (loss,) = self._program(self._programs.steps, self._take)(self._inputs())
            total = self._loss_sum if self._stacked is None else self._loss_sum[: len(loss)]
            total += loss
            last_step = self._step.clone()
            self._step += 1
        if self._phase.after_batch is not None:
            self._program(self._programs.ends, self._end_batch)([*self._inputs()[:-1], last_step])
        self._batch += 1

    def _capture(self) -> Captured:
        if self._context.device.type != "cuda":
            return Captured(self._advance, self._context.device)
        with self._context.clock.measure(f"{START}compile"):
            if self._is_worth_compiling and self._key not in self._programs.steps:
                self._programs.report("compiling, kept for later runs")
            self._program(self._programs.steps, self._take)
            if self._phase.after_batch is not None:
                self._program(self._programs.ends, self._end_batch)
            self._batch.zero_()
            captured = Captured(self._advance, self._context.device)
            self._programs.report("")
            return captured

    def load(self, phase: Phase, turns: Sequence[OpenTurn]) -> None:
        """Copy clients in and start their steps; `unload` waits for them. `phase` may differ in its length."""
        self._phase, context = phase, self._context
        if self._captured is not None:
            self._captured.end()  # of a round that was interrupted
        rows, sizes = plan_rows(
            phase,
            [turn.train for turn in turns],
            [context.federation.train_on_host(turn.job.client) for turn in turns],
            [turn.round for turn in turns],
            self._size,
            self.num_places,
        )
        if len(rows) > len(self._rows):
            self._reserve(2 * len(rows))
        if self._captured is None:
            self._captured = self._capture()
        steps = len(rows)
        self._counted = sizes
        self._rows_here[:steps] = rows if self._stacked is not None else rows.squeeze(3)
        self._sizes_here[:steps] = sizes if self._stacked is not None else sizes.squeeze(1)
        self._rows[:steps].copy_(self._rows_here[:steps], non_blocking=True)
        self._sizes[:steps].copy_(self._sizes_here[:steps], non_blocking=True)
        columns = zip(*([tensor for _, tensor in leaves(turn.work)] for turn in turns), strict=True)
        for fixed, column in zip(self._leaves, columns, strict=True):
            if self._stacked is None:
                fixed.copy_(column[0])
            else:
                torch.stack(column, out=fixed[: len(turns)])
        self._batch.zero_()
        self._step.zero_()
        self._loss_sum.zero_()
        self._lr_scale.fill_(turns[0].round.lr_scale)
        self._present = list(turns)
        self._captured.begin()
        for _ in range(steps):
            self._captured.replay()

    def unload(self) -> None:
        """Copy the clients' models back to their turns, and record the phase."""
        assert self._captured is not None
        self._captured.end()
        turns, phase = self._present, self._phase
        # All values are read with one synchronisation.
        finite = are_finite(phase, self._template.fill(self._leaves), 0 if self._stacked is None else 1)
        results = torch.stack([self._loss_sum, *(flags.double() for flags in finite)])
        loss_sums, *are_numbers = results.reshape(len(results), self.num_places).tolist()
        # Tensors that no step changes stay the client's own, not this lane's copies.
        after = {number: self._leaves[number].clone() for number in self._programs.changed.get(self._key, ())}
        for place, turn in enumerate(turns):
            counted = self._counted[:, place]
            steps, examples = (phase.repeats * int(n) for n in ((counted > 0).sum(), counted.sum()))
            before, flops = turn.work, phase_flops(phase, turn.work, self._context.task)
            is_finite = all(flags[place] for flags in are_numbers)
            numbers = count()

            def now(_path: str, came: Tensor, place: int = place, numbers: Iterator[int] = numbers) -> Tensor:
                found = after.get(next(numbers), came)
                return found if found is came or self._stacked is None else found[place]

            turn.work = map_leaves(now, before)
            used = phase.used_flops(before, turn.work) if phase.used_flops is not None and is_finite else None
            task, loss_sum = self._context.task, loss_sums[place]
            with catching_divergence(turn):
                record_phase(task, turn.tally, turn.round, examples, steps, flops, loss_sum, is_finite, used)
        self._present = []
