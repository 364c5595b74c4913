"""Many clients at once: their models are stacked, and a step is one step of all. For small models on a GPU.

Agrees with `serial` within rounding. A phase that must not be stacked (its examples see each other, its model draws
noise, or it says that it is not traceable) is run for one client after another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from sparsona.core.method import Phase, Tree, Work
from sparsona.core.task import Task
from sparsona.data.augment import look
from sparsona.engine.evaluate import Evaluation, evaluate_stacked
from sparsona.engine.gradient import CapturedTask
from sparsona.engine.jobs import Job, Outcome, Setting, Tell, examine, own_points
from sparsona.engine.lanes import Lane, Programs, meaning
from sparsona.engine.seats import (
    Seat,
    can_be_traced,
    finish_seat,
    must_be_alone,
    phases_of,
    take_seat,
    train_alone,
    training,
)
from sparsona.engine.stacking import kinds_of, over_clients, stack

MOST_AT_ONCE = 128
FEWEST_AT_ONCE = 16  # of unequal clients: with fewer, a GPU has too little to do


class Stacked:
    """The executor for many small models."""

    encodes = False

    def __init__(self, setting: Setting, most_at_once: int = MOST_AT_ONCE, tell: Tell = lambda text: None) -> None:
        task: Any = CapturedTask(_channels_first(setting.task), setting.largest_batch)
        self._setting, self._most = replace(setting, task=task), most_at_once
        self._programs = Programs(tell)
        self._lanes: dict[Hashable, Lane] = {}

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        waiting = iter(jobs)
        while group := list(islice(waiting, self._most)):
            seats = [take_seat(self._setting, job) for job in group]
            for phase in dict.fromkeys(phase for job in group for phase in phases_of(self._setting, job)):
                self._train(phase, [seat for seat in seats if phase in phases_of(self._setting, seat.job)])
            tested = [seat for seat in seats if own_points(seat.job)]
            found = dict(zip(map(id, tested), self._test(tested), strict=True))
            for seat in seats:
                yield finish_seat(self._setting, seat, found.get(id(seat)))

    def close(self) -> None:
        self._lanes.clear()
        self._programs = Programs()

    def _test(self, seats: Sequence[Seat]) -> list[Evaluation]:
        setting = self._setting
        if not seats:
            return []
        if not can_be_traced(setting) or len({kinds_of(seat.work) for seat in seats}) > 1:
            with setting.clock.measure("evaluate"):
                return [examine(setting, seat.job.client, seat.work) for seat in seats]
        tests = [setting.federation.examples(seat.job.client, "test") for seat in seats]
        predict = vectorised(setting.method.predict, [seat.work for seat in seats])
        with setting.clock.measure("evaluate"):
            return evaluate_stacked([seat.job.client for seat in seats], predict, setting.task, tests)

    def _train(self, phase: Phase, seats: Sequence[Seat]) -> None:
        setting = self._setting
        if must_be_alone(phase, setting):
            for seat in seats:
                train_alone(phase, seat, setting)
            return
        if phase.enter is not None:
            for seat in seats:
                seat.work = phase.enter(seat.work, seat.probe, seat.round)
        key = meaning(phase)
        if key not in self._lanes:
            # As many places as are ever taken in training, so that one program serves every group.
            everybody = len(setting.clients) if setting.plan.everyone_trains else setting.plan.per_round
            most = min(self._most, max(everybody, len(seats)))
            self._lanes[key] = Lane(setting, phase, seats[0].work, self._programs, places_for(setting, most))
        lane = self._lanes[key]
        fitting: list[Seat] = []
        for seat in seats:
            if lane.fits(seat):
                fitting.append(seat)
            else:  # a tensor of another size, for instance one entry for each of its examples
                train_alone(replace(phase, enter=None), seat, setting)
        # Clients of about the same size together: a stack goes on as long as its largest.
        fitting.sort(key=lambda seat: -seat.train.num_examples)
        for start in range(0, len(fitting), lane.num_seats):
            some = fitting[start : start + lane.num_seats]
            with training(phase, some, setting):
                lane.load(phase, some)
                lane.unload()


def places_for(setting: Setting, most: int) -> int:
    """How many clients to stack: as many as can be, unless clients of unequal sizes would wait for each other too long.

    Halved as long as that saves a fifth of the steps, were all clients to train, and sixteen are left.
    """
    batches = sorted((-(-client.num_examples // setting.largest_batch) for client in setting.clients), reverse=True)

    def steps(places: int) -> int:
        return sum(places * longest for longest in batches[::places])

    while most >= 2 * FEWEST_AT_ONCE and steps(most // 2) < 0.8 * steps(most):
        most //= 2
    return most


def vectorised(predict: Callable[[Work, Tensor], Tensor], works: Sequence[Work]) -> Callable[[Tensor], Tensor]:
    """`predict` for several clients: inputs [clients, N, ...] to outputs [clients, N, ...]."""
    work = stack(works)
    return lambda inputs: over_clients(predict, work, inputs)


def why_not_stacked(setting: Setting) -> str:
    """What torch says of running the model for two clients at once; nothing if it can. Tried: layers do not tell."""
    data, task = setting.federation, _channels_first(setting.task)
    image = look(data.x[:1], data.view)

    def outputs(params: Tree) -> Tensor:
        return task.forward(params, setting.buffers, image, False)[0]

    try:
        with torch.no_grad():
            over_clients(outputs, stack([setting.params] * 2))
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def _channels_first(task: Task) -> Task:
    """A stack of images has five dimensions, for which there is no channels last."""
    task = copy.copy(task)
    task.channels_last = False
    return task
