"""Large models on a GPU: a step is compiled and captured once, then replayed; several clients run side by side.

Agrees with `serial` within rounding. While the steps of some clients are replayed in their lanes, others finish their
turns and the next ones take their seats.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from sparsona.core.method import Phase
from sparsona.engine.evaluate import Evaluation
from sparsona.engine.examiner import Examiner
from sparsona.engine.gradient import CapturedTask
from sparsona.engine.jobs import Job, Outcome, Setting, Tell, examine, needs_work, own_points
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

LANES = 4
TESTED_TOGETHER = 64  # clients whose results are waited for at once


@dataclass
class _Underway:
    """A client in the middle of its turn: its place among the lanes, and what it has yet to do."""

    number: int
    seat: Seat
    place: int
    phases: deque[Phase] = field(default_factory=deque)
    lane: Lane | None = None


class Graphed:
    """The executor for large models on a GPU."""

    encodes = False

    def __init__(self, setting: Setting, lanes: int = LANES, tell: Tell = lambda text: None) -> None:
        laid_out = copy.copy(setting.task)
        laid_out.channels_last = laid_out.takes_channels_last  # as convolutions on a GPU like it
        task: Any = CapturedTask(laid_out, setting.largest_batch)
        self._setting = replace(setting, task=task)
        self._num_lanes = lanes
        self._programs = Programs(tell)
        self._lanes: dict[tuple[Hashable, int], Lane] = {}
        self._examiner: Examiner | None = None

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        waiting = iter(jobs)
        first = next(waiting, None)
        if first is None:
            return
        everybody = chain((first,), waiting)
        yield from self._evaluate(everybody) if first.do == "evaluate" else self._train(everybody)

    def close(self) -> None:
        if self._setting.device.type == "cuda":
            torch.cuda.synchronize(self._setting.device)  # what is let go of must not be in use
        self._lanes.clear()
        self._programs = Programs()
        self._examiner = None

    def _train(self, jobs: Iterator[Job]) -> Iterator[Outcome]:
        """Turns, handed out in the order of the jobs. Who has more phases than others is done after them."""
        underway: deque[_Underway] = deque()
        free = deque(range(self._num_lanes))
        ready: dict[int, Outcome] = {}
        taken = given = 0
        try:
            while True:
                while free and (job := next(jobs, None)) is not None:
                    seat = take_seat(self._setting, job)
                    phases = deque(phases_of(self._setting, job))
                    underway.append(_Underway(taken, seat, free.popleft(), phases))
                    taken += 1
                    self._go_on(underway[-1])
                if not underway:
                    return
                client = underway.popleft()
                if client.lane is not None:
                    client.lane.unload()
                    client.lane = None
                    self._go_on(client)
                    if client.lane is not None:
                        underway.append(client)
                        continue
                free.append(client.place)
                ready[client.number] = self._finish(client.seat)
                while given in ready:
                    yield ready.pop(given)
                    given += 1
        finally:
            if underway and self._setting.device.type == "cuda":  # given up in the middle
                torch.cuda.synchronize(self._setting.device)

    def _finish(self, seat: Seat) -> Outcome:
        tested = None
        if own_points(seat.job):
            (tested,) = self._told([(seat.job.client, self._look(seat))])
        return finish_seat(self._setting, seat, tested)

    def _go_on(self, client: _Underway) -> None:
        """Start the client's next phase in its lane; what cannot be captured is done here and now."""
        setting, seat = self._setting, client.seat
        while client.phases:
            phase = client.phases.popleft()
            if must_be_alone(phase, setting):
                train_alone(phase, seat, setting)
                continue
            if phase.enter is not None:
                seat.work = phase.enter(seat.work, seat.probe, seat.round)
            key = (meaning(phase), client.place)
            if key not in self._lanes:
                self._lanes[key] = Lane(setting, phase, seat.work, self._programs, None)
            lane = self._lanes[key]
            if not lane.fits(seat):  # a tensor of another size, for instance one entry for each of its examples
                train_alone(replace(phase, enter=None), seat, setting)
                continue
            with training(phase, [seat], setting):
                lane.load(phase, [seat])
                if setting.clock.is_on:  # what is measured is waited for: one client after another
                    lane.unload()
            if not setting.clock.is_on:
                client.lane = lane
                return

    def _evaluate(self, jobs: Iterator[Job]) -> Iterator[Outcome]:
        while group := list(islice(jobs, TESTED_TOGETHER)):
            seats, rows = [], []
            for job in group:
                seat = take_seat(self._setting, job)
                if own_points(job):
                    rows.append((job.client, self._look(seat)))
                # A model is needed only while it is looked at.
                seats.append(seat if needs_work(job) else replace(seat, work=None))
            found = {one.client: one for one in self._told(rows)}
            for seat in seats:
                yield finish_seat(self._setting, seat, found.get(seat.job.client))

    def _look(self, seat: Seat) -> Tensor | Evaluation:
        """A client's model on its test data: sums that are not waited for yet, or the result."""
        with self._setting.clock.measure("evaluate"):
            if self._examiner is None and can_be_traced(self._setting):
                self._examiner = Examiner(self._setting, seat.work)
            if self._examiner is None or not self._examiner.fits(seat.work):
                return examine(self._setting, seat.job.client, seat.work)
            return self._examiner.look(seat.job.client, seat.work)

    def _told(self, looks: Sequence[tuple[int, Tensor | Evaluation]]) -> list[Evaluation]:
        """What came of looks, waited for together."""
        told = [found for _, found in looks if isinstance(found, Evaluation)]
        sums = [(client, found) for client, found in looks if isinstance(found, Tensor)]
        if self._examiner is not None and sums:
            told += self._examiner.tell([client for client, _ in sums], [found for _, found in sums])
        return told
