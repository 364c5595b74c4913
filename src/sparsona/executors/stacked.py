"""Many clients at once: their models are stacked, and a step is one step of all. For small models.

Agrees with `serial` within rounding. A phase that must not be stacked (its loss mixes examples, its model draws noise,
or it is not traceable) is run for one client after another.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from sparsona.core.method import Phase, Tree, Work
from sparsona.core.round import Batch
from sparsona.core.task import Task
from sparsona.data.augment import as_inputs
from sparsona.data.batches import as_targets
from sparsona.engine.context import ClientContext
from sparsona.engine.evaluate import Evaluation, evaluate_own, own_points
from sparsona.engine.jobs import Job, Outcome, Report
from sparsona.engine.turn import OpenTurn, adapted_work, begin, end, phases_of, train_alone, training
from sparsona.gpu.captured_task import CapturedTask
from sparsona.gpu.lanes import Lane, Programs, build_ahead, can_be_traced, has_room, must_be_alone, program_key
from sparsona.gpu.padding import PaddingCheck
from sparsona.gpu.stacked_test import evaluate_stacked
from sparsona.gpu.stacking import kinds_of, over_clients, stack

MOST_AT_ONCE = 128
FEWEST_AT_ONCE = 16  # of unequal clients: fewer do not use a whole GPU


class Stacked:
    """The executor for many small models."""

    encodes = False

    def __init__(
        self, context: ClientContext, most_at_once: int = MOST_AT_ONCE, report: Report = lambda text: None
    ) -> None:
        task: Any = CapturedTask(_channels_first(context.task), context.largest_batch)
        self._context, self._most = replace(context, task=task), most_at_once
        self._programs = Programs(report)
        self._check_padding = PaddingCheck(self._context)
        self._lanes: dict[tuple[Hashable, Hashable], Lane] = {}
        build_ahead(self._context, stacks=True)

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        waiting = iter(jobs)
        while group := list(islice(waiting, self._most)):
            turns = [begin(self._context, job) for job in group]
            for phase in dict.fromkeys(phase for turn in turns for phase in phases_of(self._context, turn)):
                self._train(phase, [turn for turn in turns if phase in phases_of(self._context, turn)])
            tested = [turn for turn in turns if own_points(turn.job) and turn.diverged is None]
            found = dict(zip(map(id, tested), self._test(tested), strict=True))
            for turn in turns:
                yield end(self._context, turn, found.get(id(turn)))

    def close(self) -> None:
        self._lanes.clear()
        self._programs = Programs()

    def _test(self, turns: Sequence[OpenTurn]) -> list[Evaluation]:
        """Models on their clients' test data; those of one shape together."""
        context, found = self._context, dict[int, Evaluation]()
        with context.clock.measure("evaluate"):
            works = [adapted_work(context, turn) for turn in turns]
            for places in _by_kind(works).values():
                some, clients = [works[place] for place in places], [turns[place].job.client for place in places]
                if not can_be_traced(context):
                    results = [evaluate_own(context, *one) for one in zip(clients, some, strict=True)]
                else:
                    tests = [context.federation.packed_examples(client, "test") for client in clients]
                    predict = vectorise(context.method.predict, some)
                    results = evaluate_stacked(clients, predict, context.task, tests)
                found |= dict(zip(places, results, strict=True))
        return [found[place] for place in range(len(turns))]

    def _train(self, phase: Phase, turns: Sequence[OpenTurn]) -> None:
        context = self._context
        if not turns:  # training of all diverged in a phase before
            return
        self._check_padding(phase, max(turns, key=lambda turn: turn.train.num_examples))
        if must_be_alone(phase, context):
            for turn in turns:
                train_alone(context, turn, phase)
            return
        if phase.enter is not None:
            for turn in turns:
                turn.work = phase.enter(turn.work, turn.probe, turn.round)
        for kinds, places in _by_kind([turn.work for turn in turns]).items():
            alike = [turns[place] for place in places]
            for rate in dict.fromkeys(turn.round.lr_scale for turn in alike):  # a stack has one learning rate
                self._train_alike(phase, kinds, [turn for turn in alike if turn.round.lr_scale == rate])

    def _train_alike(self, phase: Phase, kinds: Hashable, turns: list[OpenTurn]) -> None:
        """Clients whose Works have the same shapes."""
        context, key = self._context, program_key(phase, kinds)
        if not has_room(self._lanes, key):
            for turn in turns:
                train_alone(context, turn, replace(phase, enter=None))
            return
        if key not in self._lanes:
            # As many positions as training ever needs, so that one program serves every group.
            num_trained = len(context.clients) if context.plan.everyone_trains else context.plan.per_round
            most = min(self._most, max(num_trained, len(turns)))
            self._lanes[key] = Lane(context, phase, turns[0].work, self._programs, places_for(context, most))
        lane = self._lanes[key]
        # Clients of about the same size together: a stack takes as long as its largest client.
        turns.sort(key=lambda turn: -turn.train.num_examples)
        for start in range(0, len(turns), lane.num_places):
            some = turns[start : start + lane.num_places]
            with training(context, some, phase):
                lane.load(phase, some)
                lane.unload()


def _by_kind(works: Sequence[Work]) -> dict[Hashable, list[int]]:
    """The places of Works that have the same shapes."""
    found: dict[Hashable, list[int]] = {}
    for place, work in enumerate(works):
        found.setdefault(kinds_of(work), []).append(place)
    return found


def places_for(context: ClientContext, most: int) -> int:
    """How many clients to stack: at most `most`, fewer if clients of unequal sizes would wait for each other too long.

    Halved as long as that saves a fifth of the steps, if all clients trained, and sixteen are left.
    """
    batches = sorted((-(-client.num_examples // context.largest_batch) for client in context.clients), reverse=True)

    def steps(places: int) -> int:
        return sum(places * longest for longest in batches[::places])

    while most >= 2 * FEWEST_AT_ONCE and steps(most // 2) < 0.8 * steps(most):
        most //= 2
    return most


def vectorise(predict: Callable[[Work, Tensor], Tensor], works: Sequence[Work]) -> Callable[[Tensor], Tensor]:
    """`predict` for several clients: inputs [clients, N, ...] to outputs [clients, N, ...]."""
    work = stack(works)
    return lambda inputs: over_clients(predict, work, inputs)


def why_not_stacked(context: ClientContext) -> str:
    """The error of torch for a training step of two clients at once; "" if it can be made. It is tried."""
    return _try(context)[0]


def stacks_well(context: ClientContext) -> bool:
    """Whether clients can be stacked, and every layer with them: torch runs some for one client after the other."""
    if any(must_be_alone(phase, context) for phase in context.method.phases):
        return False
    error, is_slow = _try(context)
    return not error and not is_slow


def _try(context: ClientContext) -> tuple[str, bool]:
    """The error of a step of two clients, if any, and whether torch warns that it is slow.

    The network as it is tested, and its loss and gradient as in training; one that is trained alone is only tested.
    """
    data, task = context.federation, _channels_first(context.task)
    image, target = as_inputs(data.x[:1], data.view), as_targets(data.y[:1])
    is_trained = not (task.mixes_examples or task.draws_noise or task.moves_buffers)
    ones = torch.ones(1, device=image.device)
    zeros = torch.zeros(1, dtype=torch.int64, device=image.device)

    def outputs(params: Tree, inputs: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        tested = task.forward(params, context.buffers, inputs, False)[0]
        if not is_trained:
            return (tested,)
        batch = Batch(inputs, targets, ones, zeros, zeros[0])

        def loss(named: dict[str, Tensor]) -> Tensor:
            losses, weights = task.losses(task.forward(named, context.buffers, inputs, True)[0], batch)
            return (losses * weights).sum()

        return tested, *torch.func.grad(loss)({name: params[name] for name in params}).values()

    with torch.no_grad(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            over_clients(outputs, stack([context.params] * 2), torch.stack([image] * 2), torch.stack([target] * 2))
        except Exception as error:  # of torch, or of the user's own network and loss, which run for one client alone
            return (str(error).splitlines() or [type(error).__name__])[0], False
    return "", any("batching rule" in str(one.message) for one in warned)


def _channels_first(task: Task) -> Task:
    """The same task in channels first: a stack of images has five dimensions, which have no channels-last format."""
    task = copy.copy(task)
    task.channels_last = False
    return task
