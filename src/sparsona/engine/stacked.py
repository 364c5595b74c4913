"""Many clients at once: their models are stacked, and a step is one step of all. For small models on a GPU.

Agrees with `serial` within rounding. A phase that must not be stacked (its examples see each other, its model draws
noise, or it says that it is not traceable) is run for one client after another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparsona.core.method import Phase, Round, Tick, Work
from sparsona.core.tree import leaves, map_leaves
from sparsona.data.batches import Examples
from sparsona.engine.evaluate import Evaluation, evaluate_stacked
from sparsona.engine.jobs import Job, Outcome, Setting
from sparsona.engine.schedule import plan_batches
from sparsona.engine.seats import Seat, finish_seats, take_seat
from sparsona.engine.turn import phase_flops, record_phase, run_phase

T = TypeVar("T")
MOST_AT_ONCE = 128


class Stacked:
    """The executor for many small models."""

    encodes = False

    def __init__(self, setting: Setting, most_at_once: int = MOST_AT_ONCE) -> None:
        task = copy.copy(setting.task)
        task.channels_last = False  # a stack of images has five dimensions, for which there is no such layout
        self._setting, self._most = replace(setting, task=task), most_at_once

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        waiting = iter(jobs)
        while group := list(islice(waiting, self._most)):
            seats = [take_seat(self._setting, job) for job in group]
            yield from finish_seats(self._setting, seats, self._train, self._test)

    def close(self) -> None:
        pass

    def _test(self, seats: Sequence[Seat], point: str) -> list[Evaluation]:
        setting = self._setting
        tests = [setting.federation.examples(seat.job.client, "test") for seat in seats]
        predict = vectorised(setting.method.predict, [seat.work for seat in seats])
        return evaluate_stacked([seat.job.client for seat in seats], point, predict, setting.task, tests)

    def _train(self, phase: Phase, seats: Sequence[Seat]) -> None:
        task = self._setting.task
        if phase.mixes_examples or not phase.traceable or task.draws_noise or len(seats) == 1:
            for seat in seats:
                seat.work = run_phase(phase, seat.work, task, seat.train, seat.probe, seat.round, seat.tally)
            return
        if phase.enter is not None:
            for seat in seats:
                seat.work = phase.enter(seat.work, seat.probe, seat.round)
        flops = [phase_flops(phase, seat.work, task) for seat in seats]
        works, steps, loss_sums = train_stacked(
            phase, [seat.work for seat in seats], [seat.train for seat in seats], [seat.round for seat in seats]
        )
        for seat, work, (num_steps, examples), loss_sum, each in zip(
            seats, works, steps, loss_sums, flops, strict=True
        ):
            seat.work = work
            record_phase(phase, work, seat.tally, seat.round, examples, num_steps, each, loss_sum)


def train_stacked(
    phase: Phase, works: Sequence[Work], trains: Sequence[Examples], rounds: Sequence[Round]
) -> tuple[list[Work], list[tuple[int, int]], list[float]]:
    """`turn.run_phase` for several clients: their works, their steps and examples, and sums of their losses."""
    schedule = plan_batches(phase, trains, rounds)
    device, at_once = trains[0].inputs.device, phase.batches_per_step
    work = stack(works)
    lr_scale = torch.tensor(rounds[0].lr_scale, dtype=torch.float32, device=device)
    loss_sum = torch.zeros(len(works), dtype=torch.float64, device=device)
    sizes = schedule.sizes.view(len(works), -1, at_once).sum(-1)  # of each step
    kept = (sizes > 0).to(device)
    counted = sizes.to(device, torch.float64)
    step = torch.zeros((), dtype=torch.int64, device=device)
    for number in range(sizes.shape[1]):
        batch: Any = schedule.batch(number * at_once)
        if at_once > 1:
            batch = tuple(schedule.batch(number * at_once + place) for place in range(at_once))
        before, is_whole = work, bool((sizes[:, number] > 0).all())
        for _ in range(phase.repeats):
            tick = Tick(lr_scale, step)
            work, loss = _step(phase, work, batch, tick)
            loss_sum += torch.where(kept[:, number], loss.double() * counted[:, number], 0.0)
            step = step + 1
        if phase.after_batch is not None:
            with torch.no_grad():
                work = _over_clients(partial(_after_batch, phase.after_batch, tick), work, batch)
        if not is_whole:
            work = _where(kept[:, number], work, before)
    sums = loss_sum.tolist()
    done = [(int((row > 0).sum()) * phase.repeats, int(row.sum()) * phase.repeats) for row in sizes]
    return unstack(work, len(works)), done, sums


def _step(phase: Phase, work: Work, batch: Any, tick: Tick) -> tuple[Work, Tensor]:
    """`turn.take_step` for a stack: the gradient of the sum is every client's own gradient."""
    leaf_of: list[Tensor] = []

    def leaf(_path: str, value: Tensor) -> Tensor:
        leaf_of.append(value.detach().requires_grad_())
        return leaf_of[-1]

    live = {name: map_leaves(leaf, getattr(work, name)) for name in phase.trains}
    losses, buffers = _over_clients(phase.loss, replace(work, **live), batch)
    flat = iter(torch.autograd.grad(losses.sum(), leaf_of, materialize_grads=True))
    with torch.no_grad():
        grads = {name: map_leaves(lambda _path, _value: next(flat), live[name]) for name in phase.trains}
        if buffers is not work.buffers:
            work = replace(work, buffers=map_leaves(lambda _path, value: value.detach(), buffers))
        return _over_clients(lambda w, g: phase.update(w, g, tick), work, grads), losses.detach()


def _after_batch(do: Callable[[Work, Any, Tick], Work], tick: Tick, work: Work, batch: Any) -> Work:
    return do(work, batch, tick)


def _over_clients(function: Callable[..., T], *values: Any) -> T:
    """`function` for every client of stacked values: dataclasses, trees, dicts and tuples of tensors."""
    flat = [tensor for value in values for _, tensor in leaves(value)]
    shape: list[Any] = []

    def plain(*tensors: Tensor) -> tuple[Tensor, ...]:
        source = iter(tensors)
        result = function(*(map_leaves(lambda _path, _value: next(source), value) for value in values))
        shape[:] = [result]
        return tuple(tensor for _, tensor in leaves(result))

    found = iter(torch.func.vmap(plain, in_dims=0, out_dims=0)(*flat))
    return map_leaves(lambda _path, _value: next(found), shape[0])


def vectorised(predict: Callable[[Work, Tensor], Tensor], works: Sequence[Work]) -> Callable[[Tensor], Tensor]:
    """`predict` for several clients: inputs [clients, N, ...] to outputs [clients, N, ...]."""
    work = stack(works)
    return lambda inputs: _over_clients(lambda w, x: predict(w, x), work, inputs)


def stack(values: Sequence[T]) -> T:
    """One value whose tensors have a first dimension of clients."""
    rows = [[tensor for _, tensor in leaves(value)] for value in values]
    stacked = iter([torch.stack(column) for column in zip(*rows, strict=True)])
    return map_leaves(lambda _path, _value: next(stacked), values[0])


def unstack(value: T, count: int) -> list[T]:
    """The clients of a stack, each in memory of its own: a slice would keep the whole stack alive."""
    return [map_leaves(lambda _path, tensor, place=place: tensor[place].clone(), value) for place in range(count)]  # type: ignore[misc]


def _where(kept: Tensor, new: T, old: T) -> T:
    """`new` for the clients that are kept, `old` for the others."""
    before = iter([tensor for _, tensor in leaves(old)])

    def choose(_path: str, value: Tensor) -> Tensor:
        return torch.where(kept.view(-1, *[1] * (value.dim() - 1)), value, next(before))

    return map_leaves(choose, new)
