"""The meaning of a turn: what one client does when it is called. Every executor and every deployment calls this."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from sparsona.core.errors import SparsonaError
from sparsona.core.method import Inbox, Method, Phase, Probe, Round, State, Tick, Update, Work
from sparsona.core.round import Batch
from sparsona.core.task import Task
from sparsona.core.tree import leaves, map_leaves
from sparsona.data.batches import in_order, shuffled
from sparsona.data.federation import Examples
from sparsona.engine.clock import OFF, Clock


@dataclass
class Tally:
    """What a turn did, counted as it happened."""

    examples: int = 0
    steps: int = 0
    loss: float = 0.0  # mean over the examples of the last phase that trained
    train_flops: int = 0
    search_flops: int = 0


class ClientProbe(Probe):
    """A client's own training and validation data, charged by use. It has no way to reach test data."""

    def __init__(self, task: Task, train: Examples, validation: Examples, round_: Round, tally: Tally) -> None:
        self._task, self._train, self._validation = task, train, validation
        self._round, self._tally, self._looks = round_, tally, 0

    def batch(self) -> Batch:
        self._looks += 1
        batch = next(shuffled(self._train, self._round.batch_size, self._round.seeds.own(f"probe/{self._looks}")))
        self._charge(len(batch.targets), passes=3)
        return batch

    def train(self) -> Iterator[Batch]:
        self._charge(len(self._train.targets), passes=1)
        return in_order(self._train, self._round.batch_size)

    def validation(self) -> Iterator[Batch]:
        self._charge(len(self._validation.targets), passes=1)
        return in_order(self._validation, self._round.batch_size)

    def _charge(self, examples: int, passes: int) -> None:
        self._tally.search_flops += examples * passes * self._task.layout.forward_flops()


def client_turn(
    method: Method,
    task: Task,
    state: State,
    inbox: Inbox,
    train: Examples,
    validation: Examples,
    round_: Round,
    clock: Clock = OFF,
) -> tuple[State, Update | None, Work, Tally]:
    """Receive, train, finish. `inbox` must be re-iterable; `round_` is bound to the client."""
    tally = Tally()
    probe = ClientProbe(task, train, validation, round_, tally)
    with clock.measure("receive"):
        work = method.receive(state, inbox, probe, round_)
    for phase in method.phases:
        if phase.when(round_):
            with clock.training(phase.name, [tally]):
                work = run_phase(phase, work, task, train, probe, round_, tally)
    with clock.measure("finish"):
        state, update = method.finish(state, work, inbox, probe, round_)
    return state, update, work, tally


def tuning_turn(
    method: Method,
    task: Task,
    state: State,
    inbox: Inbox,
    train: Examples,
    validation: Examples,
    round_: Round,
    epochs: int,
    clock: Clock = OFF,
) -> tuple[Work, Tally]:
    """Receive and tune; nothing is sent."""
    assert method.tune is not None
    tally = Tally()
    probe = ClientProbe(task, train, validation, round_, tally)
    with clock.measure("receive"):
        work = method.receive(state, inbox, probe, round_)
    with clock.training("tune", [tally]):  # whatever its phase is called: often "train", too
        return run_phase(replace(method.tune, epochs=epochs), work, task, train, probe, round_, tally), tally


def run_phase(phase: Phase, work: Work, task: Task, train: Examples, probe: Probe, round_: Round, tally: Tally) -> Work:
    """Train for the phase's epochs. The reference that faster executors must equal."""
    if phase.enter is not None:
        work = phase.enter(work, probe, round_)
    flops = phase_flops(phase, work, task)
    lr_scale = torch.tensor(round_.lr_scale, dtype=torch.float32)
    # Kept as a tensor until the phase ends: asking for its value would wait for every step.
    loss_sum = torch.zeros((), dtype=torch.float64, device=train.targets.device)
    examples = steps = 0
    for size, batch in _groups(phase, train, round_):
        for _ in range(phase.repeats):
            tick = Tick(lr_scale, torch.tensor(steps, dtype=torch.int64))
            work, loss = take_step(phase, work, batch, tick)
            loss_sum += loss * size
            examples += size
            steps += 1
        if phase.after_batch is not None:
            with torch.no_grad():
                work = phase.after_batch(work, batch, tick)
    is_finite = all(bool(finite) for finite in are_finite(phase, work, 0))
    record_phase(tally, round_, examples, steps, flops, float(loss_sum), is_finite)
    return work


def are_finite(phase: Phase, work: Work, kept_dims: int) -> list[Tensor]:
    """For each tensor that was trained, whether all its numbers are finite; for each client where they are stacked."""
    trained = [tensor for name in phase.trains for _, tensor in leaves(getattr(work, name))]
    return [tensor.isfinite().reshape(*tensor.shape[:kept_dims], -1).all(-1) for tensor in trained]


def record_phase(
    tally: Tally, round_: Round, examples: int, steps: int, flops: int, loss_sum: float, is_finite: bool
) -> None:
    """Count what a phase did, and refuse a model that is no longer made of numbers."""
    tally.examples += examples
    tally.steps += steps
    tally.train_flops += examples * flops
    tally.loss = loss_sum / max(examples, 1)
    if not math.isfinite(tally.loss) or not is_finite:
        assert round_.client is not None
        what = "weights are not finite" if math.isfinite(tally.loss) else f"loss is {tally.loss}"
        raise SparsonaError(
            f"training diverged: client {round_.client.index}'s {what} in round {round_.index}",
            expected="finite numbers",
            mend="lower the learning rate (--lr), or clip gradients (--set clip_norm=1)",
        )


def phase_batch_size(phase: Phase, train: Examples, round_: Round) -> int:
    """A phase that looks at two batches at once needs two, also of a client whose data would fit into one."""
    return max(1, min(round_.batch_size, train.num_examples // phase.batches_per_step))


def phase_flops(phase: Phase, work: Work, task: Task) -> int:
    """FLOPs of one example's step."""
    return phase.flops(work) if phase.flops is not None else 3 * task.layout.forward_flops()


def _groups(phase: Phase, train: Examples, round_: Round) -> Iterator[tuple[int, Any]]:
    """The batches of all epochs, in groups if the phase looks at several at once; with the number of examples."""
    size = phase_batch_size(phase, train, round_)

    def batches() -> Iterator[Batch]:
        for epoch in range(phase.epochs):
            yield from shuffled(train, size, round_.seeds.own(f"{phase.name}/{epoch}"), phase.mixes_examples)

    stream = islice(batches(), None if phase.max_steps is None else phase.max_steps * phase.batches_per_step)
    if phase.batches_per_step == 1:
        for batch in stream:
            yield len(batch.targets), batch
        return
    while group := tuple(islice(stream, phase.batches_per_step)):
        if len(group) == phase.batches_per_step:  # what is left at the very end may be fewer
            yield sum(len(batch.targets) for batch in group), group


def call(function: Callable[..., Any], *values: Any) -> Any:
    return function(*values)


def take_step(phase: Phase, work: Work, batch: Any, tick: Tick, over: Callable[..., Any] = call) -> tuple[Work, Tensor]:
    """One gradient step: the executor differentiates, the method says what to do with the gradient.

    `over` calls a function for one client, or for each of a stack: the gradient of the sum is everybody's own.
    """
    leaf_of: list[Tensor] = []

    def leaf(_path: str, value: Tensor) -> Tensor:
        leaf_of.append(value.detach().requires_grad_())
        return leaf_of[-1]

    live = {name: map_leaves(leaf, getattr(work, name)) for name in phase.trains}
    loss, buffers = over(phase.loss, replace(work, **live), batch)
    flat = iter(torch.autograd.grad(loss, leaf_of, torch.ones_like(loss), materialize_grads=True))
    with torch.no_grad():
        grads = {name: map_leaves(lambda _path, _value: next(flat), live[name]) for name in phase.trains}
        if buffers is not work.buffers:
            work = replace(work, buffers=map_leaves(lambda _path, value: value.detach(), buffers))
        return over(lambda w, g: phase.update(w, g, tick), work, grads), loss.detach()


def check_finite(update: Update) -> None:
    """Refuse an update that would poison the mean."""
    for name, part in update.parts.items():
        if not part.is_finite():
            raise SparsonaError(
                f"client {update.sender}'s update in round {update.round} has values in '{name}' that are not finite",
                expected="finite numbers",
                mend="lower the learning rate (--lr), clip gradients (--set clip_norm=1), or look at its data",
            )
    if not 0 <= update.weight < float("inf"):
        raise SparsonaError(f"client {update.sender}'s update claims weight {update.weight}", expected="0 or more")
