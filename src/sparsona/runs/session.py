"""Plays a run from its last checkpoint to its end: rounds, evaluations, records, checkpoints.

In this order: a round's rows are written in one transaction; then observers are notified; then, if one is due, a
checkpoint is saved, for which the rows are brought to the disk first and the manifest is written last. The manifest is
authoritative: rows past it are dropped when a run is resumed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from sparsona.core.errors import DivergedError, SparsonaError
from sparsona.core.points import FEW, RECEIVED
from sparsona.core.printable import warn
from sparsona.engine.clients import Clients
from sparsona.engine.context import ServerContext
from sparsona.engine.evaluate import Evaluation
from sparsona.engine.failures import DIVERGED, WITHHELD
from sparsona.engine.jobs import Report
from sparsona.engine.plan import Plan, tested_clients
from sparsona.engine.population import EvaluationLog, Population, RoundRecord
from sparsona.engine.profiler import START
from sparsona.engine.rounds import check_plan, engine_for
from sparsona.runs.checkpoint import Checkpoints, Progress
from sparsona.runs.facts import RunFacts
from sparsona.runs.folder import GLOBAL_FILE, SUMMARY_FILE, RunFolder
from sparsona.runs.manifest import MANIFEST
from sparsona.runs.observers import (
    ClientEvaluation,
    EvaluationResult,
    ObserverList,
    ProgressUpdate,
    RoundResult,
    RunEnd,
    RunStart,
    TurnResult,
    class_counts,
)
from sparsona.runs.profile import ProfileFile
from sparsona.runs.recorder import Recorder
from sparsona.runs.records import Kept
from sparsona.runs.stopping import (
    Patience,
    Spent,
    Stopping,
    reached,
    recorded_patience,
    scores_of,
    validation_point,
    watched,
)
from sparsona.runs.traits import TraitRecord

# Checkpoints may take this share of the time, and are not worth taking more often than this.
CHECKPOINT_SHARE = 0.05
CHECKPOINT_SECONDS = 2.0

FRUITLESS = 3  # rounds in a row in which all diverge: the run ends

PROGRESS_SECONDS = 2.0  # a round that takes longer is reported while it is played

Listen = Callable[[str, int], None]


@dataclass(frozen=True)
class Played:
    """Where a run stands when it is finished or stopped; `stopped_by` says why, and is None if it is finished.

    `best` is the round with the best validation score, of a run that ended early for want of a better one.
    """

    progress: Progress
    stopped_by: str | None
    best: int | None = None


class Side(Protocol):
    """Where a run is played: the server's context and its clients, in this process or elsewhere."""

    context: ServerContext
    clients: Clients

    def numeric_mode(self) -> AbstractContextManager[None]:
        """The settings of torch on which the bits of results depend."""
        ...

    def open(self, executor: str, report: Report, listen: Listen) -> AbstractContextManager[None]:
        """Make the clients ready for jobs, while the context lasts.

        Args:
            executor: the executor of the run.
            report: is called with what the start is doing, and with "" when it is over.
            listen: is called with the kind of a job and how many of that kind are done, after each outcome.
        """
        ...

    def traits(self) -> TraitRecord | None:
        """Records how far apart clients' masks or gates are; None where they are not known."""
        ...


class Session:
    """Plays one run. It is made before the run's folder: a plan that the method does not support is refused here."""

    def __init__(self, side: Side, observers: ObserverList) -> None:
        self.side, self.context, self.observers = side, side.context, observers
        self.clock = side.context.clock
        check_plan(side.context)
        self.engine = engine_for(side.context, side.clients)
        self._started = False
        self._progress: Progress | None = None

    def play(self, folder: RunFolder, executor: str, limits: Stopping) -> Played:
        """Continue from the last checkpoint, or from the start. The folder must be locked by the caller.

        Whatever ends it (the last round, a stop, Ctrl-C, an error), what was reached is on disk.
        """
        with self.side.numeric_mode():
            self._open(folder)
            if self.progress.finished:
                return Played(self.progress, None)  # and no worker is started
            profile = {"executor": executor, "device": self.context.device.type}
            self._profile = ProfileFile(folder.path, self.clock, self.progress.completed, **profile)
            self._profile.write(self.progress.completed)  # from now on this is a profiled run, also after a kill
            self._start()
            self.report("starting")
            with self.side.open(executor, self.report, self._report_outcome):
                try:
                    reason = self._play_rounds(limits)
                    return self._played(reason)
                finally:
                    self._profile.write(self.progress.completed)

    def _played(self, reason: str | None) -> Played:
        best = None if self.context.plan.ends_after is None or reason else self._patience.best
        return Played(self.progress, reason, best)

    @property
    def is_finished(self) -> bool:
        """Whether all rounds were played."""
        return self._progress is not None and self._progress.finished

    @property
    def progress(self) -> Progress:
        """Where the run stands."""
        assert self._progress is not None, "not played yet"
        return self._progress

    # Start.

    def _open(self, folder: RunFolder) -> None:
        """Load the checkpoint, or save the first one, and check that the records match it."""
        self._folder, self._records = folder, folder.records
        self._recorder = Recorder(folder.records)
        self._checkpoints = Checkpoints(folder.path, self.context.method)
        with self.clock.measure(f"{START}build"):
            self._initial: Population = self.engine.start()
        with self.clock.measure("checkpoint"):
            found = self._checkpoints.load(self.engine, self._initial)
        self._progress = found or Progress(0, 0.0, self._initial, {})
        self.side.clients.saved(self.progress.population.states, self.progress.tuned)
        self._began = time.monotonic() - self.progress.seconds
        self._checkpoint_at, self._checkpoint_cost = time.monotonic(), 0.0
        self._reported_at = time.monotonic()
        self._unsaved = False
        if found is None:
            # A manifest precedes the first record: records without one have lost it, and are not begun anew.
            if self._records.exist:
                raise SparsonaError(
                    f"'{folder.path / MANIFEST}' is missing",
                    expected="the manifest that belongs to the records of this run",
                    hint="restore it from a copy, or start the run again in another folder",
                )
            with self.clock.measure("checkpoint"):
                self._save_sealed()
        with self.clock.measure("records"):
            if folder.seal is None:  # an older version wrote it
                self._records.check(self.progress.completed)
            else:
                folder.check_records()
        self._patience, self._has_warned = Patience(), False
        self._traits: TraitRecord | None = None
        if folder.config.get("record_traits") and not self.progress.finished:
            self._traits = self.side.traits()

    def _start(self) -> None:
        self._started = True
        options = deepcopy(self._folder.config)  # an observer's own: it cannot change the run
        completed, rounds = self.progress.completed, self.context.plan.rounds
        self.observers.on_start(RunStart(self._folder.path, self._folder.facts, options, completed, rounds))

    # Rounds.

    def _play_rounds(self, limits: Stopping) -> str | None:
        """Play until the last round or a stop; why it was stopped, or None if it is finished."""
        plan, completed = self.context.plan, self.progress.completed
        with self.clock.measure("records"):
            self._folder.drop(SUMMARY_FILE, GLOBAL_FILE)
            self._records.rewind(completed, self._kept)
            if self._folder.facts.extensions:  # what were the last ten rounds are so no more
                self._records.drop_evaluations(dropped_evaluations(plan, completed))
        began, self._spent, reason = time.monotonic(), Spent(), None
        self._limits, self._patience = limits, self._recorded_patience(limits)
        try:
            while self.progress.completed < plan.rounds and reason is None and not self._lost_patience:
                if self._round():
                    self._check_divergence()
                reason = reached(limits, replace(self._spent, seconds=time.monotonic() - began))
                if reason is None and self._checkpoint_is_due():
                    self._save()
            self._evaluate_where_it_stops()
            if self._lost_patience and self.progress.completed < plan.rounds:
                plan, reason = replace(plan, ends_after=self.progress.completed), None
                self.context = self.engine.context = replace(self.context, plan=plan)
            if self.progress.completed == plan.last:
                self._check_divergence()
                self._finish()
            self._save()
        except BaseException:
            if self._unsaved:
                self._save()
            raise
        return None if self.progress.finished else reason

    def _round(self) -> bool:
        """Play a round; returns whether training diverged in it and nobody trained."""
        began, index = time.monotonic(), self.progress.completed
        population, played = self.engine.play(self.progress.population, index)
        if self.context.plan.tests_everyone_after(index + 1):
            played.evaluations.extend(self.engine.evaluate(population, index + 1, played.log))
        result = round_result(played, time.monotonic() - began)
        self._spent = replace(
            self._spent,
            bytes=self._spent.bytes + result.total("bytes_up") + result.total("bytes_down"),
            steps=self._spent.steps + result.total("steps"),
            flops=self._spent.flops + result.total("train_flops") + result.total("search_flops"),
        )
        facts = self._folder.facts
        evaluation = evaluation_result(facts, index + 1, played.evaluations, played.log)
        earlier = earlier_result(facts, played)
        if self._limits.patience is not None:
            self._wait(index + 1, played.evaluations)
        self._keep(replace(self.progress, completed=index + 1, population=population), result, evaluation, earlier)
        return not result.total("trained") and any(turn.failure.startswith(DIVERGED) for turn in result.turns)

    def _check_divergence(self) -> None:
        """Raise DivergedError after rounds in a row in which every client's training diverged, so that a run that can
        never go on ends. One that is resumed plays one round more."""
        most = min(FRUITLESS, self.context.plan.rounds)
        with self.clock.measure("records"):
            found = self._records.fruitless()
        if found and len(found) >= most:
            raise DivergedError(
                f"the training of every client diverged, {len(found)} round{'s' * (len(found) > 1)} in a row "
                f"({self.context.method.name}); one of them: {found[-1].removeprefix(DIVERGED)}",
                expected="finite numbers from one client or more",
                hint="lower the learning rate (--lr), or clip gradients (--set clip_norm=1); --on-divergence stop ends "
                "a run with the first client that diverges, and says more of why",
            )

    # Patience: the mean score on validation data, after each evaluation.

    @property
    def _lost_patience(self) -> bool:
        return self._limits.patience is not None and self._patience.waited >= self._limits.patience

    def _wait(self, completed: int, found: Iterable[Evaluation]) -> None:
        facts, limits = self._folder.facts, self._limits
        point = validation_point(facts.point)
        here = ((one, one.metrics) for one in found if one.point == point)
        known = scores_of(limits.patience_metric, here, facts.is_regression)
        if not known and not self._has_warned and self.context.plan.tests_everyone_after(completed):
            self._has_warned = True
            by = watched(limits.patience_metric, facts.is_regression)
            warn(
                f"patience: after round {completed} no client's {by} on validation data is known; such evaluations do "
                "not count"
            )
        self._patience = self._patience.after(completed, known, limits.min_delta)

    def _recorded_patience(self, limits: Stopping) -> Patience:
        """What a run that is resumed has seen: its records have every evaluation."""
        if limits.patience is None:
            return Patience()
        return recorded_patience(self._records, self._folder.facts, limits.patience_metric, limits.min_delta)

    def _evaluate_where_it_stops(self) -> None:
        """The result must be that of the round which was reached: between two evaluations, and without any round."""
        completed, plan = self.progress.completed, self.context.plan
        if not plan.rounds or not plan.tests_everyone_after(completed):
            log = EvaluationLog()
            found = self.engine.evaluate(self.progress.population, completed, log)
            self._keep(self.progress, None, evaluation_result(self._folder.facts, completed, found, log))

    def _finish(self) -> None:
        """Final tuning and novel clients."""
        began, rounds = time.monotonic(), self.context.plan.last
        played, tuned = self.engine.finish(self.progress.population)
        result = replace(round_result(played, time.monotonic() - began), is_tuning=True)
        evaluation = evaluation_result(self._folder.facts, rounds, played.evaluations, played.log, is_final=True)
        is_any = bool(played.turns or played.evaluations)
        self._keep(replace(self.progress, tuned=tuned, finished=True), result if is_any else None, evaluation)

    def _keep(
        self,
        progress: Progress,
        result: RoundResult | None,
        evaluation: EvaluationResult | None,
        earlier: EvaluationResult | None = None,
    ) -> None:
        """Record what was reached, all of it or nothing, and then notify the observers."""
        traits, is_evaluated = [], evaluation is not None or self.context.plan.evaluates_after(progress.completed)
        if self._traits is not None and is_evaluated and not progress.finished:
            traits = [self._traits.row(progress.population, progress.completed)]
        with self.clock.measure("records"), self._records.writing():
            if result is not None:
                self._recorder.on_round(result)
            for found in filter(None, (earlier, evaluation)):
                self._recorder.on_evaluation(found)
            self._records.add(traits)
        self._progress, self._unsaved = replace(progress, seconds=self._seconds), True
        self._reported_at = time.monotonic()
        if earlier is not None:
            self.observers.on_evaluation(earlier)
        if result is not None:
            self.observers.on_round(result)
        if evaluation is not None:
            self.observers.on_evaluation(evaluation)

    # Checkpoints.

    def _checkpoint_is_due(self) -> bool:
        since = time.monotonic() - self._checkpoint_at
        return since >= max(CHECKPOINT_SECONDS, self._checkpoint_cost / CHECKPOINT_SHARE)

    def _save(self) -> None:
        """Rows to the disk, then the checkpoint, whose manifest says that they are there."""
        began = time.monotonic()
        with self.clock.measure("records"):
            self._records.flush()
        with self.clock.measure("checkpoint"):
            self._save_sealed()
            self._profile.write(self.progress.completed)
        self.side.clients.saved(self.progress.population.states, self.progress.tuned)
        self._unsaved = False
        self._checkpoint_at = time.monotonic()
        self._checkpoint_cost = self._checkpoint_at - began

    @property
    def _kept(self) -> Kept:
        """What a run that is resumed from here keeps of what was evaluated last: what it would not evaluate again."""
        plan, completed = self.context.plan, self.progress.completed
        everyone, traits = plan.tests_everyone_after(completed), plan.evaluates_after(completed)
        return Kept(plan.points_after(completed), everyone, traits)

    def _save_sealed(self) -> None:
        finished, completed = self.progress.finished, self.progress.completed
        seal = self._folder.next_seal(completed, None if finished else self._kept)
        self._checkpoints.save(self.progress, self._initial, seal)
        self._folder.sealed(seal, None if finished else completed)

    # Reports to observers.

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def report(self, doing: str) -> None:
        """Report the current activity to observers; "" when a start is over."""
        title, plan = self._folder.facts.title, self.context.plan
        self._reported_at = time.monotonic()
        self.observers.on_progress(
            ProgressUpdate(title, plan.seed, self.progress.completed, plan.rounds, doing, self._seconds)
        )

    def _report_outcome(self, kind: str, done: int) -> None:
        """Report the progress of a long round, at most every PROGRESS_SECONDS."""
        if time.monotonic() - self._reported_at >= PROGRESS_SECONDS:
            plan, num = self.context.plan, len(self.context.clients)
            trains = num - plan.num_novel if plan.everyone_trains else plan.per_round
            tuned = num if plan.tune_epochs else plan.num_novel
            tested = len(tested_clients(plan, self.context.clients))
            total = {"train": trains, "evaluate": tested, "tune": tuned}[kind]
            what = {"train": "trained", "evaluate": "tested", "tune": "tuned"}[kind]
            self.report(f"{done}/{total} {what}")

    def end(self, played: Played, summary: dict[str, object]) -> None:
        """Report the end to observers, if a start was reported."""
        if self._started:
            reason, progress = played.stopped_by, played.progress
            if played.best is not None:
                reason = f"best validation at round {played.best}"
            rounds, finished = self.context.plan.rounds, progress.finished
            self.observers.on_end(
                RunEnd(progress.completed, rounds, progress.seconds, finished, reason, deepcopy(summary))
            )

    def fail(self, error: BaseException) -> None:
        """Report an end by an interruption or an error to observers."""
        if self._started:
            reason = "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
            completed, seconds = self.progress.completed, self.progress.seconds
            end = RunEnd(completed, self.context.plan.rounds, seconds, False, reason.splitlines()[0], None)
            self.observers.on_failure(end, error)


def dropped_evaluations(plan: Plan, completed: int) -> list[int]:
    """The rounds after which a run that was given more of them does not evaluate."""
    return [number for number in range(1, completed + 1) if not plan.evaluates_after(number)]


def round_result(played: RoundRecord, seconds: float) -> RoundResult:
    """What observers receive of a round."""
    turns = tuple(
        TurnResult(
            client=turn.client,
            loss=turn.tally.loss,
            examples=turn.tally.examples,
            steps=turn.tally.steps,
            trained=turn.trained,
            aggregated=turn.aggregated,
            dropped=turn.dropped,
            bytes_up=turn.traffic.up,
            bytes_down=turn.traffic.down,
            paper_up=turn.traffic.paper_up,
            paper_down=turn.traffic.paper_down,
            train_flops=turn.tally.train_flops,
            search_flops=turn.tally.search_flops,
            measures=turn.tally.measures,
            failure=turn.failure,
        )
        for turn in played.turns
    )
    return RoundResult(
        played.index,
        played.lr_scale,
        turns,
        seconds,
        time=played.time,
        num_awake=played.num_awake,
        num_late=played.num_late,
    )


def evaluation_result(
    facts: RunFacts, completed: int, found: Sequence[Evaluation], log: EvaluationLog, is_final: bool = False
) -> EvaluationResult | None:
    """What observers receive of evaluations after so many rounds; None: nothing happened."""
    if not found and not log.jobs and not log.failures:
        return None
    shown = facts.point if any(one.point == facts.point for one in found) else RECEIVED
    clients = tuple(_client_evaluation(one, facts.label_counts) for one in found)
    traffic = log.jobs, log.up, log.down
    return EvaluationResult(completed, shown, clients, *traffic, dict(log.failures), is_final, facts.weight)


def earlier_result(facts: RunFacts, played: RoundRecord) -> EvaluationResult | None:
    """What observers receive of evaluations before clients trained in a round."""
    withheld = EvaluationLog(failures=dict.fromkeys(played.withheld, WITHHELD))
    return evaluation_result(facts, played.index, played.earlier, withheld)


def _client_evaluation(found: Evaluation, label_counts: np.ndarray | None) -> ClientEvaluation:
    confusion = classes = None
    if found.confusion is not None:
        table = found.confusion.numpy()
        if table.shape[0] == table.shape[1]:
            confusion = table
            confusion.flags.writeable = False
        elif label_counts is not None and (table != FEW).all():
            classes = class_counts(table[:, 1], table.sum(axis=1), label_counts[found.client] != 0)
    plain = (found.client, found.point, found.correct, found.count, found.loss)
    return ClientEvaluation(*plain, confusion, classes, dict(found.metrics))
