"""A turn: what one client does with a job.

`begin`, the phases, `end`: every executor runs these, and executors differ only in how they run the phases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NoReturn

import torch
from torch import Tensor

from sparsona.core.errors import DivergedError, MaskMismatchError, SparsonaError
from sparsona.core.method import Phase, Probe, Round, State, Tick, Update, Work
from sparsona.core.round import Batch
from sparsona.core.task import Task
from sparsona.core.tree import leaves, loaded, map_leaves
from sparsona.data.batches import in_order, shuffled
from sparsona.data.federation import Examples, Federation
from sparsona.engine.context import ClientContext
from sparsona.engine.evaluate import (
    Evaluation,
    at_points,
    evaluate_other_points,
    evaluate_own,
    first_points,
    last_points,
    needs_own_model,
    own_points,
)
from sparsona.engine.failures import DIVERGED
from sparsona.engine.jobs import Job, Outcome, Tally, open_message, unreadable
from sparsona.engine.profiler import OFF, SEARCH, Clock
from sparsona.wire.codec import encode


class ClientProbe(Probe):
    """A client's own training and validation data, charged by use. It has no access to test data."""

    def __init__(
        self, task: Task, train: Examples, validation: Examples, round_: Round, tally: Tally, clock: Clock = OFF
    ) -> None:
        self._task, self._train, self._validation = task, train, validation
        self._round, self._tally, self._clock, self._num_batches = round_, tally, clock, 0

    def batch(self) -> Batch:
        self._num_batches += 1
        seed = self._round.seeds.own(f"probe/{self._num_batches}")
        batch = next(shuffled(self._train, self._round.batch_size, seed))
        self._charge(len(batch.targets), self._task.layout.train_flops())
        return batch

    def train(self, flops: int | None = None) -> Iterator[Batch]:
        return self._pass(self._train, flops)

    def validation(self, flops: int | None = None) -> Iterator[Batch]:
        return self._pass(self._validation, flops)

    def label_counts(self) -> Tensor:
        targets = self._train.targets
        if targets.is_floating_point() or targets.dim() != 1:
            raise SparsonaError(
                "label_counts() of examples that have no class",
                expected="a task whose examples each belong to one class",
            )
        return torch.bincount(targets, minlength=self._task.num_labels)

    def uncharged(self) -> Probe:
        return ClientProbe(self._task, self._train, self._validation, self._round, Tally(), self._clock)

    def searching(self) -> AbstractContextManager[None]:
        return self._clock.measure(SEARCH)

    def _pass(self, examples: Examples, flops: int | None) -> Iterator[Batch]:
        self._charge(len(examples.targets), self._task.layout.forward_flops() if flops is None else flops)
        return in_order(examples, self._round.batch_size)

    def _charge(self, examples: int, flops: int) -> None:
        self._tally.search_flops += examples * flops


class AbsentProbe(Probe):
    """The probe of a client whose data is not here: every use raises DataNeededError."""

    def __init__(self, federation: Federation, client: int) -> None:
        self._federation, self._client = federation, client

    def batch(self) -> Batch:
        self._refuse("train")

    def train(self, flops: int | None = None) -> Iterator[Batch]:
        self._refuse("train")

    def validation(self, flops: int | None = None) -> Iterator[Batch]:
        self._refuse("validation")

    def label_counts(self) -> Tensor:
        counts = self._federation.label_counts("train")
        return self._refuse("train") if counts is None else counts[self._client]

    def uncharged(self) -> Probe:
        return self

    def searching(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _refuse(self, part: str) -> NoReturn:
        self._federation.examples(self._client, part)
        raise AssertionError("a federation without examples gave some")


def training_data(context: ClientContext, client: int) -> Examples:
    """A client's training examples; none where the context has the shapes and sizes of its data alone."""
    federation = context.federation
    return (
        federation.packed_examples(client, "train") if federation.has_examples else Examples(federation.x, federation.y)
    )


def probe_of(
    context: ClientContext, client: int, train: Examples, round_: Round, tally: Tally, clock: Clock = OFF
) -> Probe:
    """What a method reads of a client's data in this round, charged to `tally`."""
    if not context.federation.has_examples:
        return AbsentProbe(context.federation, client)
    validation = context.federation.packed_examples(client, "validation")
    return ClientProbe(context.task, train, validation, round_, tally, clock)


@dataclass
class OpenTurn:
    """A turn between `begin` and `end`: the job and its results so far. Executors train `work`."""

    job: Job
    round: Round  # bound to the client
    state: State
    inbox: tuple[Update, ...]
    train: Examples
    probe: Probe
    tally: Tally
    work: Work
    tested: tuple[Evaluation, ...] = ()  # before training
    diverged: DivergedError | None = None  # of a phase: no further one is run


def begin(context: ClientContext, job: Job) -> OpenTurn:
    """Start a client's turn: its messages become the model it works on.

    Args:
        context: the side of clients, with this client's data.
        job: what to do. If the client lacks a mask that a message assumes and the job can be sent again, it is.

    Returns:
        The open turn, whose `work` is the result of the method's `receive`.

    Raises:
        MaskMismatchError: the client lacks a mask, and the sender must send the job again with `Job.again`.

    Example:
        A whole turn of client 0 in round 0::

            turn = begin(context, Job("train", 0, plan.round_at(0), messages))
            for phase in phases_of(context, turn):
                train_alone(context, turn, phase)
            outcome = end(context, turn)
    """
    try:
        return _begin(context, job)
    except MaskMismatchError:
        if job.resend is None:
            raise
    try:
        return _begin(context, job.again())
    except MaskMismatchError:
        raise unreadable(job, context.clients[job.client].label) from None


def _begin(context: ClientContext, job: Job) -> OpenTurn:
    client = context.clients[job.client]
    round_ = replace(job.round.on(client.in_tuning if job.do == "tune" else client), is_new=job.state is None)
    state = context.fresh_state(job.client) if job.state is None else loaded(job.state)
    train = training_data(context, job.client)
    tally = Tally()
    # Evaluation is part of the simulation, not of the client's work: data that a method reads for it is not charged.
    charged = tally if job.do != "evaluate" else Tally()
    probe = probe_of(context, job.client, train, round_, charged, context.clock)
    inbox = tuple(open_message(message, context.clock) for message in job.messages)
    with context.clock.measure("receive"):
        work = context.method.receive(state, inbox, probe, round_)
    turn = OpenTurn(job, round_, state, inbox, train, probe, tally, work)
    if first := first_points(job):
        turn.tested = _evaluate_first(context, turn, first)
    return turn


def _evaluate_first(context: ClientContext, turn: OpenTurn, points: tuple[str, ...]) -> tuple[Evaluation, ...]:
    """The model that a client received to train, as an evaluation after the round before would find it."""
    job = replace(turn.job, do="evaluate", points=points)
    with context.clock.measure("evaluate"):
        work = adapted_work(context, turn)
        found = at_points(job, evaluate_own(context, job.client, work)) if own_points(job) else ()
    return found + evaluate_other_points(context, job, turn.state, work)


def phases_of(context: ClientContext, turn: OpenTurn) -> tuple[Phase, ...]:
    """The phases of a turn.

    Args:
        context: the side of clients.
        turn: an open turn.

    Returns:
        The method's phases that run in this round, or its tuning phase; none after training diverged.
    """
    method = context.method
    if turn.diverged is not None:
        return ()
    if turn.job.do == "tune":
        assert method.tune is not None
        return (replace(method.tune, epochs=turn.job.epochs),)
    client = context.clients[turn.job.client]
    return tuple(
        phase
        for phase in method.phases
        if turn.job.do == "train" and phase.epochs_of(client) and phase.when(turn.round)
    )


def train_alone(context: ClientContext, turn: OpenTurn, phase: Phase) -> None:
    """Run one phase of one turn: the reference that faster executors must match.

    Args:
        context: the side of clients.
        turn: an open turn, whose `work` is replaced. If training diverged before, nothing is done; if it does now, the
            turn says so.
        phase: the phase.
    """
    if turn.diverged is not None:
        return
    with training(context, [turn], phase), catching_divergence(turn):
        turn.work = run_phase(phase, turn.work, context.task, turn.train, turn.probe, turn.round, turn.tally)


@contextmanager
def catching_divergence(turn: OpenTurn) -> Iterator[None]:
    """Note in the turn that its training diverged, so that the turns beside it go on."""
    try:
        yield
    except DivergedError as error:
        turn.diverged = error


def training(context: ClientContext, turns: Sequence[OpenTurn], phase: Phase) -> AbstractContextManager[None]:
    """A context manager that is measured as training these clients."""
    name = "tune" if turns[0].job.do == "tune" else phase.name  # the tuning phase is often called "train" as well
    return context.clock.training(name, [turn.tally for turn in turns])


def adapted_work(context: ClientContext, turn: OpenTurn) -> Work:
    """The Work that a client would predict with: adapted to its data if the method does that, also after tuning."""
    adapt = context.method.adapt
    if adapt is None or (turn.job.do == "tune" and not context.method.adapts_tuned):
        return turn.work
    uncharged = probe_of(context, turn.job.client, turn.train, turn.round, Tally())
    return adapt(turn.work, uncharged, turn.round)


def end(context: ClientContext, turn: OpenTurn, tested: Evaluation | None = None) -> Outcome:
    """Finish a client's turn: its new State, the message to send, and evaluations.

    Args:
        context: the side of clients that the turn was begun with.
        turn: an open turn whose phases have been run.
        tested: the client's own model on its test data, if an executor evaluated it already.

    Returns:
        The outcome. Its tensors share no memory with the lane or stack that they were trained in. If training
        diverged, its `failure` says so and it has neither State nor message.

    Raises:
        DivergedError: training diverged, and the plan says that this ends the run.
    """
    if turn.diverged is not None:
        return _diverged(context, turn, turn.diverged)
    job, method, clock = turn.job, context.method, context.clock
    done = Outcome(job.client, tally=turn.tally, evaluations=_evaluate_last(context, turn, tested))
    if job.do == "evaluate":
        return done
    if job.do == "tune":
        return replace(done, work=own_memory(adapted_work(context, turn)))
    if method.measure is not None and context.plan.evaluates_after(turn.round.index + 1):
        found_measures = method.measure(turn.work, turn.round)
        turn.tally.measures = {name: tuple(value.reshape(-1).tolist()) for name, value in found_measures.items()}
    with clock.measure("finish"):
        # A peer's message is kept as long as its State: neither may share memory with a stack; the two share theirs.
        work = turn.work if method.peer is None else own_memory(turn.work)
        state, update = method.finish(turn.state, work, turn.inbox, turn.probe, turn.round)
    return replace(done, state=own_memory(state), message=update)


def _evaluate_last(context: ClientContext, turn: OpenTurn, tested: Evaluation | None) -> tuple[Evaluation, ...]:
    """All evaluations of a turn: those before training, and those of the models that it ends with."""
    job, work = turn.job, turn.work
    if (own_points(job) and tested is None) or needs_own_model(job):
        with context.clock.measure("evaluate"):
            work = adapted_work(context, turn)
            if own_points(job) and tested is None:
                tested = evaluate_own(context, job.client, work)
    found = turn.tested if tested is None else turn.tested + at_points(job, tested)
    return found + evaluate_other_points(context, job, turn.state, work)


def _diverged(context: ClientContext, turn: OpenTurn, error: DivergedError) -> Outcome:
    """The outcome of a turn without effect: the client has the model that it had before, and that one is evaluated."""
    if context.plan.on_divergence == "stop":
        raise DivergedError(f"{error.what} ({context.method.name})", expected=error.expected, hint=error.hint)
    # What it spent is charged. Its loss is no part of a mean, in which it would weigh by its examples.
    tally, found = replace(turn.tally, examples=0, loss=0.0), turn.tested
    if points := last_points(turn.job):
        found += _evaluate_last(context, begin(context, replace(turn.job, points=points)), None)
    return Outcome(turn.job.client, tally=tally, evaluations=found, failure=error.what)


def perform(context: ClientContext, job: Job) -> Outcome:
    """Run a whole turn of one client. Pure: the same context and job give the same outcome in any process.

    Args:
        context: the side of clients, with this client's data.
        job: what to do.

    Returns:
        The outcome; its message is bytes if the context encodes.
    """
    turn = begin(context, job)
    for phase in phases_of(context, turn):
        train_alone(context, turn, phase)
    outcome = end(context, turn)
    if context.encodes and isinstance(outcome.message, Update):
        with context.clock.measure("encode"):
            return replace(outcome, message=encode(outcome.message))
    return outcome


def own_memory(value: Any) -> Any:
    """The same value with slices copied: a slice would keep the whole stack alive."""

    def own(_path: str, tensor: Tensor) -> Tensor:
        is_slice = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
        return tensor.clone() if is_slice else tensor

    return map_leaves(own, value)


def run_phase(phase: Phase, work: Work, task: Task, train: Examples, probe: Probe, round_: Round, tally: Tally) -> Work:
    """Train for the phase's epochs: the reference that faster executors must match."""
    if phase.enter is not None:
        work = phase.enter(work, probe, round_)
    before, flops = work, phase_flops(phase, work, task)
    lr_scale = torch.tensor(round_.lr_scale, dtype=torch.float32)
    # A tensor until the phase ends: reading its value would synchronise at every step.
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
    used = phase.used_flops(before, work) if phase.used_flops is not None and is_finite else None
    record_phase(task, tally, round_, examples, steps, flops, float(loss_sum), is_finite, used)
    return work


def are_finite(phase: Phase, work: Work, kept_dims: int) -> list[Tensor]:
    """For each tensor that was trained, whether all its numbers are finite; for each client where they are stacked."""
    trained = [tensor for name in phase.trains for _, tensor in leaves(getattr(work, name))]
    return [tensor.isfinite().reshape(*tensor.shape[:kept_dims], -1).all(-1) for tensor in trained]


def record_phase(
    task: Task,
    tally: Tally,
    round_: Round,
    examples: int,
    steps: int,
    flops: tuple[int, int],
    loss_sum: float,
    is_finite: bool,
    used_flops: int | None = None,
) -> None:
    """Add a phase to the tally, and raise DivergedError if training diverged."""
    tally.examples += examples
    tally.steps += steps
    per_example, per_step = flops
    tally.train_flops += (examples * per_example if used_flops is None else used_flops) + steps * per_step
    tally.loss = loss_sum / max(examples, 1)
    if not math.isfinite(tally.loss) or not is_finite:
        assert round_.client is not None
        what = "weights are not finite" if math.isfinite(tally.loss) else f"loss is {tally.loss}"
        raise DivergedError(
            f"{DIVERGED}client {round_.client.label}'s {what} in {round_.title}",
            expected="finite numbers",
            hint="lower the learning rate (--lr), or clip gradients (--set clip_norm=1); --on-divergence drop leaves a "
            "client that diverges out of the round"
            if (name := task.undefined_at_zero()) is None
            else f"this network has no value where a row of '{name}' is zero (weight_norm divides by its norm): "
            "if this method sets weights to zero, take the norm out (remove_parametrizations); otherwise lower --lr",
        )


def phase_batch_size(phase: Phase, train: Examples, round_: Round) -> int:
    """The size of a phase's batches of these examples."""
    return phase.batch_size(train.num_examples, round_.batch_size)


def phase_flops(phase: Phase, work: Work, task: Task) -> tuple[int, int]:
    """FLOPs of an example in a step, and of a step whatever its number of examples."""
    per_example = task.layout.train_flops() if phase.flops is None else phase.flops(work)
    return per_example, 0 if phase.step_flops is None else phase.step_flops(work)


def _groups(phase: Phase, train: Examples, round_: Round) -> Iterator[tuple[int, Any]]:
    """The batches of all epochs, in groups if a step reads several; with the number of examples."""
    size, client = phase_batch_size(phase, train, round_), round_.client
    assert client is not None

    def batches() -> Iterator[Batch]:
        for epoch in range(phase.epochs_of(client)):
            seed = round_.seeds.own(f"{phase.name}/{epoch}")
            yield from shuffled(train, size, seed, phase.mixes_examples, round_.drop_last)

    stream = islice(batches(), phase.num_batches(client, phase.batches_in_pass(train.num_examples, round_)))
    if phase.batches_per_step == 1:
        for batch in stream:
            yield len(batch.targets), batch
        return
    while group := tuple(islice(stream, phase.batches_per_step)):
        if len(group) == phase.batches_per_step:  # the last group may be incomplete
            yield sum(len(batch.targets) for batch in group), group


def call(function: Callable[..., Any], *values: Any) -> Any:
    return function(*values)


def take_step(phase: Phase, work: Work, batch: Any, tick: Tick, over: Callable[..., Any] = call) -> tuple[Work, Tensor]:
    """One gradient step: the executor differentiates, and the method's `update` uses the gradient.

    `over` calls a function for one client, or for each client of a stack: the gradient of the sum of their losses holds
    each client's own gradient.
    """
    leaf_of: list[Tensor] = []

    def leaf(_path: str, value: Tensor) -> Tensor:
        leaf_of.append(value.detach().requires_grad_())
        return leaf_of[-1]

    live = {name: map_leaves(leaf, getattr(work, name)) for name in phase.trains}
    found = over(phase.loss, replace(work, **live), batch)
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise SparsonaError(
            f"the loss of phase '{phase.name}', {getattr(phase.loss, '__qualname__', 'a callable')}, returned "
            + (f"{len(found)} values" if isinstance(found, tuple | list) else f"a {type(found).__name__}"),
            expected="two values: the loss, and the buffers after the forward pass",
            hint="`outputs, buffers = task.forward(...)`, then `return loss, buffers`; or work.buffers as they were",
        )
    loss, buffers = found
    flat = iter(torch.autograd.grad(loss, leaf_of, torch.ones_like(loss), materialize_grads=True))
    with torch.no_grad():
        grads = {name: map_leaves(lambda _path, _value: next(flat), live[name]) for name in phase.trains}
        if buffers is not work.buffers:
            work = replace(work, buffers=map_leaves(lambda _path, value: value.detach(), buffers))
        return over(lambda w, g: phase.update(w, g, tick), work, grads), loss.detach()
