"""Plays a run from where it stands to its end: rounds, evaluations, records, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from sparsona.core.errors import SparsonaError
from sparsona.engine.clock import OTHER, START, Clock
from sparsona.engine.context import Setting
from sparsona.engine.evaluate import Evaluation
from sparsona.engine.executors import open_executor, rounding_as_asked
from sparsona.engine.jobs import Executor, Job, Outcome
from sparsona.engine.plan import tested_clients
from sparsona.engine.population import Population, RoundRecord
from sparsona.engine.rounds import simulate
from sparsona.runs.checkpoint import Checkpoints, Progress
from sparsona.runs.profile import ProfileFile
from sparsona.runs.store import RunFolder, pack_confusion
from sparsona.runs.traits import TraitRecord, has_traits
from sparsona.wire.ledger import Traffic

# Checkpoints may take this share of the time, and are not worth taking more often than this.
CHECKPOINT_SHARE = 0.05
CHECKPOINT_SECONDS = 2.0


TELL_SECONDS = 2.0  # a round that takes longer is told about while it is played


@dataclass(frozen=True)
class Event:
    """What a progress bar shows after a round, or, with `doing`, in the middle of a long one or of start-up."""

    completed: int
    total: int
    accuracy: float | None
    seconds: float
    doing: str = ""


Listener = Callable[[Event], None]


class _Watched:
    """An executor whose every outcome is told."""

    def __init__(self, executor: Executor, tell: Callable[[str, int], None], clock: Clock) -> None:
        self._executor, self._tell, self._clock = executor, tell, clock
        self.encodes = executor.encodes

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        doing = ""

        def seen() -> Iterator[Job]:
            nonlocal doing
            for job in jobs:
                doing = job.do
                yield job

        outcomes = self._executor.run(seen())
        for done in count(1):
            with self._clock.measure(OTHER):  # whoever asks for outcomes (the server) has not spent this
                outcome = next(outcomes, None)
                if outcome is None:
                    return
                self._tell(doing, done)
            yield outcome

    def close(self) -> None:
        self._executor.close()


def play(
    folder: RunFolder,
    setting: Setting,
    executor_name: str,
    max_seconds: float | None,
    listen: Listener = lambda event: None,
) -> Progress:
    """Go on from the last checkpoint, or from the start. The folder must be locked by the caller.

    Whatever ends it (the last round, the time limit, Ctrl-C, an error), what was reached is on disk.
    """
    with rounding_as_asked(setting):
        return _play(folder, setting, executor_name, max_seconds, listen)


def _play(
    folder: RunFolder, setting: Setting, executor_name: str, max_seconds: float | None, listen: Listener
) -> Progress:
    session = _Session(folder, setting, listen)
    if session.progress.finished:
        return session.progress  # and no worker is started
    about = {"executor": executor_name, "device": setting.device.type}
    session.profile = ProfileFile(folder.path, setting.clock, session.progress.completed, **about)
    session.profile.write(session.progress.completed)  # from now on this is a profiled run, also after a kill
    session.tell_start("starting")
    executor = open_executor(executor_name, setting, session.tell_start)
    try:
        session.engine = simulate(setting, _Watched(executor, session.tell, setting.clock))
        return session.run(max_seconds)
    finally:
        executor.close()
        session.profile.write(session.progress.completed)


class _Session:
    def __init__(self, folder: RunFolder, setting: Setting, listen: Listener) -> None:
        self.folder, self.setting, self.listen = folder, setting, listen
        self.clock = setting.clock
        self.profile: ProfileFile | None = None
        self.checkpoints = Checkpoints(folder.path, setting.method)
        with self.clock.measure(f"{START}build"):
            self.engine = simulate(setting)
            self.initial: Population = self.engine.start()
        with self.clock.measure("checkpoint"):
            found = self.checkpoints.load(setting, self.initial)
        self.progress = found or Progress(0, 0.0, self.initial, {})
        self.began = time.monotonic() - self.progress.seconds
        self.checkpoint_at = time.monotonic()
        self.checkpoint_cost = 0.0
        self.told = time.monotonic()
        self.num_tested = len(tested_clients(setting.plan, setting.clients))
        self.accuracy: float | None = None
        self.traits: TraitRecord | None = None
        if folder.config.get("record_traits") and has_traits(setting) and not self.progress.finished:
            self.traits = TraitRecord(setting)
        if found is None:
            # A manifest precedes the first record: records without one have lost it, and are not begun anew.
            if folder.has_records:
                raise SparsonaError(
                    f"'{folder.path / 'checkpoint' / 'manifest.json'}' is missing",
                    expected="the manifest that goes with the records of this run",
                    mend="restore it from a copy, or start the run again in another folder",
                )
            with self.clock.measure("checkpoint"):
                self.checkpoints.save(self.progress, self.initial)
        with self.clock.measure("records"):
            folder.check_records(self.progress.completed)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def tell(self, doing: str, done: int) -> None:
        """What a long round is at: at most every TELL_SECONDS."""
        if time.monotonic() - self.told >= TELL_SECONDS:
            plan, num = self.setting.plan, len(self.setting.clients)
            trains = num - plan.num_novel if plan.everyone_trains else plan.per_round
            tuned = num if plan.tune_epochs else plan.num_novel
            total = {"train": trains, "evaluate": self.num_tested, "tune": tuned}[doing]
            what = {"train": "trained", "evaluate": "tested", "tune": "tuned"}[doing]
            self._tell(self.accuracy, f"{done}/{total} {what}")

    def tell_start(self, doing: str) -> None:
        """What start-up is doing; "" when it is over."""
        self._tell(self.accuracy, doing)

    def _tell(self, accuracy: float | None, doing: str = "") -> None:
        self.told, self.accuracy = time.monotonic(), accuracy
        self.listen(Event(self.progress.completed, self.setting.plan.rounds, accuracy, self.seconds, doing))

    def run(self, max_seconds: float | None) -> Progress:
        with self.clock.measure("records"):
            completed = self.progress.completed
            self.folder.rewind(completed, self.setting.plan.points_after(completed))
        deadline = None if max_seconds is None else time.monotonic() + max_seconds
        unsaved = False
        try:
            while self.progress.completed < self.setting.plan.rounds:
                self._round()
                unsaved = True
                if deadline is not None and time.monotonic() >= deadline:
                    self._evaluate_where_it_stops()
                    break
                if self._checkpoint_is_due():
                    self._save()
                    unsaved = False
            if self.progress.completed == self.setting.plan.rounds:
                self._close()
            self._save()
        except BaseException:
            if unsaved:
                self._save()
            raise
        return self.progress

    def _round(self) -> None:
        began = time.monotonic()
        index = self.progress.completed
        population, record = self.engine.play(self.progress.population, index)
        if self.setting.plan.evaluates_after(index + 1):
            record.evaluations.extend(self.engine.evaluate(population, index + 1))
        self._write(record, index + 1, time.monotonic() - began)
        if self.setting.plan.evaluates_after(index + 1):
            self._record_traits(population, index + 1)
        self.progress = replace(self.progress, completed=index + 1, seconds=self.seconds, population=population)
        self._tell(_mean(record.evaluations, "received"))

    def _evaluate_where_it_stops(self) -> None:
        """The result must be that of the round which was reached, also between two evaluations."""
        completed = self.progress.completed
        if not self.setting.plan.evaluates_after(completed):
            found = self.engine.evaluate(self.progress.population, completed)
            with self.clock.measure("records"), self.folder.writing():
                self.folder.insert("evaluations", (_row(completed, evaluation) for evaluation in found))
            self._record_traits(self.progress.population, completed)

    def _record_traits(self, population: Population, completed: int) -> None:
        if self.traits is not None:
            row = self.traits.row(population, completed)
            with self.clock.measure("records"), self.folder.writing():
                self.folder.insert("traits", [row])

    def _close(self) -> None:
        """Final tuning and novel clients."""
        began = time.monotonic()
        record, tuned = self.engine.finish(self.progress.population)
        if record.turns or record.evaluations:
            self._write(record, self.setting.plan.rounds, time.monotonic() - began)
        self.progress = replace(self.progress, tuned=tuned, seconds=self.seconds, finished=True)
        accuracy = _mean(record.evaluations, "tuned")
        if accuracy is not None:
            self._tell(accuracy)

    def _checkpoint_is_due(self) -> bool:
        since = time.monotonic() - self.checkpoint_at
        return since >= max(CHECKPOINT_SECONDS, self.checkpoint_cost / CHECKPOINT_SHARE)

    def _save(self) -> None:
        began = time.monotonic()
        with self.clock.measure("records"):
            self.folder.flush()
        with self.clock.measure("checkpoint"):
            self.checkpoints.save(self.progress, self.initial)
            if self.profile is not None:
                self.profile.write(self.progress.completed)
        self.checkpoint_at = time.monotonic()
        self.checkpoint_cost = self.checkpoint_at - began

    def _write(self, record: RoundRecord, completed: int, seconds: float) -> None:
        turns = record.turns
        total = sum((turn.traffic for turn in turns), Traffic())
        examples = sum(turn.tally.examples for turn in turns)
        loss = sum(turn.tally.loss * turn.tally.examples for turn in turns) / examples if examples else None
        summary = (
            record.index,
            record.lr_scale,
            sum(turn.trained for turn in turns),
            sum(turn.aggregated for turn in turns),
            sum(turn.dropped for turn in turns),
            loss,
            *_counts(total),
            sum(turn.tally.train_flops for turn in turns),
            sum(turn.tally.search_flops for turn in turns),
            seconds,
        )
        with self.clock.measure("records"), self.folder.writing():
            self.folder.insert("rounds", [summary])
            self.folder.insert(
                "turns",
                (
                    (
                        record.index,
                        turn.client,
                        turn.tally.loss,
                        turn.tally.examples,
                        turn.tally.steps,
                        turn.aggregated,
                        turn.dropped,
                        *_counts(turn.traffic),
                        turn.tally.train_flops,
                        turn.tally.search_flops,
                    )
                    for turn in turns
                ),
            )
            self.folder.insert("evaluations", (_row(completed, evaluation) for evaluation in record.evaluations))


def _counts(traffic: Traffic) -> tuple[int, int, int, int]:
    return traffic.up, traffic.down, traffic.paper_up, traffic.paper_down


def _row(completed: int, found: Evaluation) -> tuple[Any, ...]:
    confusion = pack_confusion(found.confusion)
    return completed, found.client, found.point, found.correct, found.count, found.loss, confusion


def _mean(evaluations: list[Evaluation], point: str) -> float | None:
    found = [one.correct / one.count for one in evaluations if one.point == point and one.correct is not None]
    return sum(found) / len(found) if found else None
