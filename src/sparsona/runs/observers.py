"""Observers receive typed records of what happens in a run. They return nothing and cannot change it.

The progress bar (terminal.py), the records (recorder.py) and the log (json_lines.py) are observers. Free of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.printable import printable
from sparsona.runs.facts import RunFacts


@dataclass(frozen=True)
class RunStart:
    """A run starts, or is resumed after `completed` of its `rounds`.

    After a resumption rounds past `completed` are played again, with the same results.

    Args:
        path: the run's folder.
        facts: what is known of its data, model and method.
        options: those of config.json.
        completed: rounds completed.
        rounds: rounds planned.
    """

    path: Path
    facts: RunFacts
    options: Mapping[str, Any]
    completed: int
    rounds: int

    def __repr__(self) -> str:
        """Without the facts, which have each client's number of examples of each class."""
        return f"RunStart({self})"

    def __str__(self) -> str:
        return printable(f"{self.facts.title} in '{self.path}': {self.completed} of {self.rounds} rounds")


@dataclass(frozen=True)
class ProgressUpdate:
    """The current activity of a start or of a long round.

    It may come before `RunStart`: data is read before a run is made.

    Args:
        title: the title of the run's method.
        seed: the run's seed.
        completed: rounds completed.
        rounds: rounds planned.
        doing: the activity; empty when a start is over.
        seconds: since the run started.
        is_over: whether the run is over. Only of one in a process of its own, of which bars receive no `RunEnd`.

    Example:
        >>> print(ProgressUpdate("FedAvg", 0, 0, 30, "reading digits", 0.0))
        FedAvg: reading digits
    """

    title: str
    seed: int
    completed: int
    rounds: int
    doing: str
    seconds: float
    is_over: bool = False

    def __str__(self) -> str:
        return f"{self.title}: {self.doing or ('finished' if self.is_over else 'ready')}"


@dataclass(frozen=True, slots=True)
class TurnResult:
    """What one client did in one round. A peer that only sent its last message has a turn, too.

    Args:
        client: the number of the client.
        loss: mean training loss over examples.
        examples: examples trained on, counted in every epoch.
        steps: steps made.
        trained: whether it trained.
        aggregated: whether its update was aggregated.
        dropped: whether its update was lost; of a peer, whether it was out of reach.
        bytes_up: bytes sent, as encoded.
        bytes_down: bytes received, as encoded.
        paper_up: bytes sent as the papers count, four for each float value.
        paper_down: bytes received as the papers count.
        train_flops: FLOPs of training.
        search_flops: FLOPs of mask search.
        measures: what the method measured of the turn, by name, in rounds that are evaluated.
        failure: why a client on another machine was not heard; "" if it was.
    """

    client: int
    loss: float
    examples: int
    steps: int
    trained: bool
    aggregated: bool
    dropped: bool
    bytes_up: int
    bytes_down: int
    paper_up: int
    paper_down: int
    train_flops: int
    search_flops: int
    measures: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True)
class RoundResult:
    """One round: its turns, and how long it took, evaluation included.

    Args:
        index: the round, from 0; of final tuning, the number of rounds.
        lr_scale: the learning rate as a share of the first round's.
        turns: what each client did.
        seconds: wall time.
        is_tuning: whether this is final tuning, after the last round.
        time: the simulated time of the round, where clients have speeds; None: not simulated.
        num_awake: how many clients were awake, where not all always are.
        num_late: how many of those that trained would not have made the deadline, where there is one.

    Example:
        >>> print(RoundResult(0, 1.0, (), 0.5))
        round 1: 0 clients trained, 0.5 s
    """

    index: int
    lr_scale: float
    turns: tuple[TurnResult, ...]
    seconds: float
    is_tuning: bool = False
    time: float | None = None
    num_awake: int | None = None
    num_late: int | None = None

    @property
    def loss(self) -> float | None:
        """Mean training loss over examples; None if no client trained."""
        examples = self.total("examples")
        return sum(turn.loss * turn.examples for turn in self.turns) / examples if examples else None

    def total(self, name: str) -> int:
        """The sum of a figure over turns, such as "bytes_up" or "dropped"."""
        return sum(getattr(turn, name) for turn in self.turns)

    def __str__(self) -> str:
        what = "final tuning" if self.is_tuning else f"round {self.index + 1}"
        loss = "" if self.loss is None else f", loss {self.loss:.4g}"
        return f"{what}: {self.total('trained')} clients trained{loss}, {self.seconds:.1f} s"


@dataclass(frozen=True, slots=True)
class ClassCounts:
    """Predictions on classes that a client has among its training data, and on those that it has not.

    Args:
        seen_correct: right ones of the first kind.
        seen_count: all of the first kind.
        unseen_correct: right ones of the second kind.
        unseen_count: all of the second kind.
    """

    seen_correct: int
    seen_count: int
    unseen_correct: int
    unseen_count: int


def class_counts(correct: np.ndarray, count: np.ndarray, has: np.ndarray) -> ClassCounts:
    """Sums over the classes that a client has, and over the others.

    Args:
        correct: right predictions by true class.
        count: predictions by true class.
        has: whether the client has training examples of the class.

    Returns:
        The counts.
    """
    sums = (correct[has], count[has], correct[~has], count[~has])
    return ClassCounts(*(int(values.sum()) for values in sums))


@dataclass(frozen=True, slots=True)
class ClientEvaluation:
    """The evaluation of one client at one point of core/points.py.

    Args:
        client: the number of the client.
        point: the name of the point.
        correct: right predictions; None in a regression, which has only a loss.
        count: predictions.
        loss: mean loss.
        confusion: counts by true class (row) and prediction (column), read-only; None where it was not kept.
        classes: counts by whether the client has the class, where there are too many classes for a matrix.
        metrics: the values of the run's metrics, by name; those that are undefined for the client are absent.
    """

    client: int
    point: str
    correct: int | None
    count: int
    loss: float
    confusion: np.ndarray | None = None
    classes: ClassCounts | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluationResult:
    """All evaluations after a round.

    Args:
        completed: rounds completed.
        point: the point to show.
        clients: the evaluations, one per client and point.
        sent_to: how many clients were sent a message for them; 0: they were made on messages of training.
        bytes_up: bytes of the answers, which are no part of training; None where they were not encoded, as in a
            simulation.
        bytes_down: bytes of the messages.
        failures: why clients have no result, by client.
        is_final: whether these belong to the end of the run, after the last round.
        weight: how clients count in means of accuracy: "clients", all the same, or by their test "examples".

    Example:
        >>> found = EvaluationResult(1, "received", (ClientEvaluation(0, "received", 3, 4, 0.5),))
        >>> print(found)
        evaluated after round 1, accuracy 75.0% at 'received' on test data
    """

    completed: int
    point: str
    clients: tuple[ClientEvaluation, ...]
    sent_to: int = 0
    bytes_up: int | None = None
    bytes_down: int = 0
    failures: Mapping[int, str] = field(default_factory=dict)
    is_final: bool = False
    weight: str = "clients"

    @property
    def accuracy(self) -> float | None:
        """Mean accuracy over clients at `point`; None in a regression.

        This is accuracy on TEST data, for display. Choosing anything by it (a tuner, an early stop) uses the test data
        up: choose by a point on validation data, such as received/validation.
        """
        return self.mean(self.point)

    def mean(self, point: str) -> float | None:
        """Mean accuracy over the clients that were evaluated at a point, weighted by `weight`; None: there is none."""
        found = [
            (one.correct, one.count)
            for one in self.clients
            if one.point == point and one.correct is not None and one.count
        ]
        if not found:
            return None
        if self.weight == "examples":
            return sum(correct for correct, _ in found) / sum(count for _, count in found)
        return sum(correct / count for correct, count in found) / len(found)

    @property
    def metrics(self) -> dict[str, float]:
        """The mean of each metric at `point`, over the clients that it is defined for. On test data, as `accuracy`."""
        found: dict[str, list[float]] = {}
        for one in self.clients:
            for name, value in one.metrics.items() if one.point == self.point else ():
                found.setdefault(name, []).append(value)
        return {name: sum(values) / len(values) for name, values in found.items()}

    def __str__(self) -> str:
        figures = [] if self.accuracy is None else [f"accuracy {self.accuracy:.1%}"]
        figures += [f"{name} {value:.4g}" for name, value in self.metrics.items() if name != "accuracy"]
        shown = f", {', '.join(figures)} at '{self.point}' on test data" if figures else ""
        return f"evaluated after round {self.completed}{shown}"


@dataclass(frozen=True)
class RunEnd:
    """A run ends. What was reached is saved.

    Args:
        completed: rounds completed.
        rounds: rounds planned.
        seconds: wall time.
        finished: whether the run is complete.
        reason: why it stopped, such as "max_seconds", "interrupted" or an error; of a finished run, why it ended early
            ("best validation at round 12"), or None.
        summary: that of summary.json; None after an interruption or an error.

    Example:
        >>> print(RunEnd(3, 30, 1.5, False, "max_seconds", None))
        stopped (max_seconds) after round 3 of 30
    """

    completed: int
    rounds: int
    seconds: float
    finished: bool
    reason: str | None
    summary: Mapping[str, Any] | None

    def __str__(self) -> str:
        where = f"after round {self.completed} of {self.rounds}"
        if self.finished and self.reason:
            return f"stopped early {where}, {self.reason}"
        return f"finished {where}" if self.finished else f"stopped ({self.reason}) {where}"


Record = RunStart | ProgressUpdate | RoundResult | EvaluationResult | RunEnd


class Observer(Protocol):
    """What an observer may have; it need not have all of these. A function is one, too: it gets every record.

    One that raises ends the run as any error does, with what was reached saved.
    """

    def on_start(self, start: RunStart) -> None: ...

    def on_progress(self, progress: ProgressUpdate) -> None: ...

    def on_round(self, result: RoundResult) -> None: ...

    def on_evaluation(self, result: EvaluationResult) -> None: ...

    def on_end(self, end: RunEnd) -> None: ...


EVENTS = tuple(name for name in vars(Observer) if name.startswith("on_"))


@dataclass(frozen=True)
class ObserverRow:
    """An observer that has a name, made with a place to write to."""

    where: str  # module:class
    text: str


# `--log NAME:PLACE`, or a place that ends in .NAME; imported when it is used.
OBSERVERS = {
    "jsonl": ObserverRow(
        "sparsona.runs.json_lines:JsonLines", "a line of JSON for the start, each round and evaluation, and the end"
    ),
    "tensorboard": ObserverRow("sparsona.runs.trackers:TensorBoard", "a folder for TensorBoard"),
    "mlflow": ObserverRow("sparsona.runs.trackers:MLflow", "a tracking URI of MLflow"),
    "wandb": ObserverRow("sparsona.runs.trackers:WandB", "a project of Weights & Biases, offline by default"),
}


def make_observer(text: str) -> object:
    """The observer that a text such as "run.jsonl" or "jsonl:run.log" names."""
    name, _, place = text.partition(":")
    if name not in OBSERVERS:
        if place and name.isidentifier() and len(name) > 1:  # one letter may be a drive
            raise unknown_name("kind of log", name, OBSERVERS)
        name, place = Path(text).suffix.removeprefix("."), text
    if name not in OBSERVERS or not place:
        raise SparsonaError(
            f"log '{text}'",
            expected="FILE.jsonl, or " + ", ".join(f"{name}:PLACE ({row.text})" for name, row in OBSERVERS.items()),
            hint="for example --log run.jsonl",
        )
    module, _, kind = OBSERVERS[name].where.partition(":")
    return getattr(import_module(module), kind)(place)


class ObserverList:
    """Several observers as one, in their order.

    One with `is_live = True` shows what is under way: it has no use for the records of a run that is over.
    """

    def __init__(self, observers: Iterable[object] = ()) -> None:
        if isinstance(observers, str):
            raise SparsonaError(
                f"observers = '{observers}'", expected="a list of observers", hint=f"observers=['{observers}']"
            )
        self._observers = [make_observer(one) if isinstance(one, str) else one for one in observers]
        self._receivers = {event: [_receiver(one, event) for one in self._observers] for event in EVENTS}

    @property
    def is_empty(self) -> bool:
        return not self._observers

    def of_records(self) -> ObserverList:
        """Those that are to receive the records of a run when it is over: all but bars and the like."""
        return ObserverList(one for one in self._observers if not getattr(one, "is_live", False))

    def titled(self, title: str) -> ObserverList:
        """The same with a title of one's own for what is under way."""

        def change(receive: Callable[[Any], object]) -> Callable[[Any], object]:
            return lambda progress: receive(replace(progress, title=title))

        found = ObserverList()
        found._observers = self._observers
        found._receivers = {**self._receivers, "on_progress": [*map(change, self._receivers["on_progress"])]}
        return found

    def on_start(self, start: RunStart) -> None:
        self._notify("on_start", start)

    def on_progress(self, progress: ProgressUpdate) -> None:
        self._notify("on_progress", progress)

    def on_round(self, result: RoundResult) -> None:
        self._notify("on_round", result)

    def on_evaluation(self, result: EvaluationResult) -> None:
        self._notify("on_evaluation", result)

    def on_end(self, end: RunEnd) -> None:
        self._notify("on_end", end)

    def on_failure(self, end: RunEnd, error: BaseException) -> None:
        """The end by an error. What fails here is noted on that error and does not take its place."""
        for receive in self._receivers["on_end"]:
            try:
                receive(end)
            except Exception as other:
                error.add_note(f"an observer failed at the end, too: {other!r}")

    def _notify(self, event: str, record: Record) -> None:
        for receive in self._receivers[event]:
            receive(record)


def _receiver(observer: Any, event: str) -> Callable[[Any], object]:
    """The function that is called with the records of an event."""
    known = [name for name in dir(observer) if name.startswith("on_")]
    if isinstance(observer, type) or (not known and not callable(observer)):
        raise SparsonaError(
            f"{observer!r} is no observer",
            expected=f"an object with some of {', '.join(EVENTS)}, a function of one record, or a text such as "
            "'run.jsonl'",
            hint=f"make one: {observer.__name__}()" if isinstance(observer, type) else "",
        )
    if misspelt := [name for name in known if name not in EVENTS]:
        raise unknown_name("method of an observer", misspelt[0], EVENTS)
    if not known:
        return observer
    return getattr(observer, event, _ignore)


def _ignore(record: object) -> None:
    """For events that an observer has no method for."""
