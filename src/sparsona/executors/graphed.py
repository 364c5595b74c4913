"""Large models on a GPU: a step is compiled and captured once, then replayed; several clients run side by side.

Agrees with `serial` within rounding. While the steps of some clients are replayed in their lanes, others finish their
turns and the next ones begin theirs.
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
from sparsona.engine.context import ClientContext
from sparsona.engine.evaluate import Evaluation, at_points, evaluate_own, needs_outputs, needs_own_model, own_points
from sparsona.engine.jobs import Job, Outcome, Report
from sparsona.engine.turn import OpenTurn, adapted_work, begin, end, phases_of, train_alone, training
from sparsona.gpu.captured_task import CapturedTask
from sparsona.gpu.captured_test import CapturedTest
from sparsona.gpu.lanes import (
    MOST_SHAPES,
    Lane,
    Programs,
    build_ahead,
    can_be_traced,
    has_room,
    must_be_alone,
    program_key,
)
from sparsona.gpu.padding import PaddingCheck
from sparsona.gpu.stacking import kinds_of

LANES = 4
TESTED_TOGETHER = 64  # clients whose results are waited for at once
FINISHED_TOGETHER = 16  # the same for clients that have trained: their new models are held until then


@dataclass
class _Underway:
    """A client in the middle of its turn: its position among the lanes, and the phases that remain."""

    number: int
    turn: OpenTurn
    place: int
    phases: deque[Phase] = field(default_factory=deque)
    lane: Lane | None = None


@dataclass(frozen=True)
class _Finished:
    """A finished turn, and the test of its own model, whose result may not be known yet, at the points of the job."""

    outcome: Outcome
    job: Job | None = None
    tested: tuple[int, CapturedTest, Tensor] | Evaluation | None = None


class Graphed:
    """The executor for large models on a GPU."""

    encodes = False

    def __init__(self, context: ClientContext, lanes: int = LANES, report: Report = lambda text: None) -> None:
        laid_out = copy.copy(context.task)
        laid_out.channels_last = laid_out.takes_channels_last  # the fast layout for convolutions on a GPU
        task: Any = CapturedTask(laid_out, context.largest_batch)
        self._context = replace(context, task=task)
        self._num_lanes = lanes
        self._programs = Programs(report)
        self._check_padding = PaddingCheck(self._context)
        # By phase and shapes, then by position: clients that run side by side need separate memory.
        self._lanes: dict[tuple[Hashable, Hashable], dict[int, Lane]] = {}
        self._tests: dict[Hashable, CapturedTest] = {}  # by the shapes of a Work
        build_ahead(self._context, stacks=False)

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        waiting = iter(jobs)
        first = next(waiting, None)
        if first is None:
            return
        all_jobs = chain((first,), waiting)
        yield from self._evaluate(all_jobs) if first.do == "evaluate" else self._train(all_jobs)

    def close(self) -> None:
        if self._context.device.type == "cuda":
            torch.cuda.synchronize(self._context.device)  # memory that is freed must not be in use
        self._lanes.clear()
        self._programs = Programs()
        self._tests.clear()

    def _train(self, jobs: Iterator[Job]) -> Iterator[Outcome]:
        """Turns; outcomes are yielded in the order of the jobs, though clients with fewer phases finish earlier."""
        underway: deque[_Underway] = deque()
        free = deque(range(self._num_lanes))
        ready: dict[int, _Finished] = {}
        held: list[_Finished] = []
        taken = given = 0
        try:
            while True:
                while free and (job := next(jobs, None)) is not None:
                    turn = begin(self._context, job)
                    phases = deque(phases_of(self._context, turn))
                    underway.append(_Underway(taken, turn, free.popleft(), phases))
                    taken += 1
                    self._go_on(underway[-1])
                if not underway:
                    yield from self._read(held)
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
                ready[client.number] = self._finish(client.turn)
                while given in ready:
                    held.append(ready.pop(given))
                    given += 1
                # Reading a test's result waits for all lanes: those of several clients are read together.
                if held and (len(held) >= FINISHED_TOGETHER or not any(one.tested for one in held)):
                    yield from self._read(held)
        finally:
            if underway and self._context.device.type == "cuda":  # the caller stopped in the middle
                torch.cuda.synchronize(self._context.device)

    def _finish(self, turn: OpenTurn) -> _Finished:
        if not (points := own_points(turn.job)) or turn.diverged is not None:
            return _Finished(end(self._context, turn))
        tested = self._test(turn)
        others = replace(turn.job, points=tuple(point for point in turn.job.points if point not in points))
        return _Finished(end(self._context, replace(turn, job=others)), turn.job, tested)

    def _read(self, held: list[_Finished]) -> Iterator[Outcome]:
        """The outcomes with the results of their tests; `held` is empty afterwards."""
        found = {one.client: one for one in self._results([one.tested for one in held if one.tested is not None])}
        for one in held:
            if one.job is None:
                yield one.outcome
            else:
                own = at_points(one.job, found[one.outcome.client])
                yield replace(one.outcome, evaluations=own + one.outcome.evaluations)
        held.clear()

    def _go_on(self, client: _Underway) -> None:
        """Start the client's next phase in its lane; phases that cannot be captured are run immediately."""
        context, turn = self._context, client.turn
        while client.phases and turn.diverged is None:
            phase = client.phases.popleft()
            self._check_padding(phase, turn)
            if must_be_alone(phase, context):
                train_alone(context, turn, phase)
                continue
            if phase.enter is not None:
                turn.work = phase.enter(turn.work, turn.probe, turn.round)
            key = program_key(phase, kinds_of(turn.work))
            if not has_room(self._lanes, key):
                train_alone(context, turn, replace(phase, enter=None))
                continue
            lanes = self._lanes.setdefault(key, {})
            if client.place not in lanes:
                lanes[client.place] = Lane(context, phase, turn.work, self._programs, None)
            lane = lanes[client.place]
            with training(context, [turn], phase):
                lane.load(phase, [turn])
                if context.clock.is_on:  # measured phases are waited for: one client after another
                    lane.unload()
            if not context.clock.is_on:
                client.lane = lane
                return

    def _evaluate(self, jobs: Iterator[Job]) -> Iterator[Outcome]:
        while group := list(islice(jobs, TESTED_TOGETHER)):
            turns, tests = [], []
            for job in group:
                turn = begin(self._context, job)
                if own_points(job):
                    tests.append(self._test(turn))
                # A model is needed only while it is evaluated.
                turns.append(turn if needs_own_model(job) else replace(turn, work=None))
            found = {one.client: one for one in self._results(tests)}
            for turn in turns:
                yield end(self._context, turn, found.get(turn.job.client))

    def _test(self, turn: OpenTurn) -> tuple[int, CapturedTest, Tensor] | Evaluation:
        """Evaluate a client's model on its test data: sums that are still being computed, or the result."""
        context, client = self._context, turn.job.client
        with context.clock.measure("evaluate"):
            work = adapted_work(context, turn)
            # A captured pass adds up what it finds; metrics need every output.
            if needs_outputs(context.task) or not can_be_traced(context):
                return evaluate_own(context, client, work)
            kinds = kinds_of(work)
            if kinds not in self._tests:
                if len(self._tests) >= MOST_SHAPES:
                    return evaluate_own(context, client, work)
                self._tests[kinds] = CapturedTest(context, work)
            test = self._tests[kinds]
            return client, test, test.run(client, work)

    def _results(self, tests: Sequence[tuple[int, CapturedTest, Tensor] | Evaluation]) -> list[Evaluation]:
        """Results of tests, waited for together."""
        found = [one for one in tests if isinstance(one, Evaluation)]
        waiting: dict[CapturedTest, list[tuple[int, Tensor]]] = {}
        for one in tests:
            if not isinstance(one, Evaluation):
                waiting.setdefault(one[1], []).append((one[0], one[2]))
        for test, sums in waiting.items():
            found += test.read([client for client, _ in sums], [row for _, row in sums])
        return found
