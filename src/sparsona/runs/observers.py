"""Observers: who is told what happens in a run, as typed records. They return nothing and cannot change it.

The progress bar (terminal.py), the records (recorder.py) and the log (json_lines.py) are observers. Free of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.runs.facts import RunFacts


@dataclass(frozen=True)
class RunStart:
    """A run begins, or goes on after `completed` of its `rounds`.

    `options` are those of config.json. After a resumption rounds past `completed` are played again, the same.
    """

    path: Path
    facts: RunFacts
    options: Mapping[str, Any]
    completed: int
    rounds: int

    def __str__(self) -> str:
        return f"{self.facts.title} in '{self.path}': {self.completed} of {self.rounds} rounds"


@dataclass(frozen=True)
class ProgressUpdate:
    """What a long round, or a start, is doing; `doing` is empty when a start is over.

    It may come before `RunStart`: data is read before a run is made. `title` and `seed` say of which run it is.
    """

    title: str
    seed: int
    completed: int
    rounds: int
    doing: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.title}: {self.doing or 'ready'}"


@dataclass(frozen=True, slots=True)
class TurnResult:
    """What one client did in one round. A peer that did not train, and whose last message was received, has a turn,
    too. `paper_*` count bytes as the papers do: four for each float value."""

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


@dataclass(frozen=True)
class RoundResult:
    """One round: its turns, and how long it took, evaluation included.

    `is_tuning`: final tuning, after the last round. It has the index of a round that there is not.
    """

    index: int
    lr_scale: float
    turns: tuple[TurnResult, ...]
    seconds: float
    is_tuning: bool = False

    @property
    def loss(self) -> float | None:
        """Mean training loss over examples; None if nobody trained."""
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
class ClientEvaluation:
    """One client at one point of core/points.py; `correct` is None in a regression, in which only the loss tells.

    `confusion` counts true classes by row and predictions by column, where it was kept. It cannot be written to.
    """

    client: int
    point: str
    correct: int | None
    count: int
    loss: float
    confusion: np.ndarray | None = None


@dataclass(frozen=True)
class EvaluationResult:
    """All evaluations after `completed` rounds; `point` is the one to show."""

    completed: int
    point: str
    clients: tuple[ClientEvaluation, ...]

    @property
    def accuracy(self) -> float | None:
        """Mean accuracy over clients at `point`; None in a regression.

        This is accuracy on TEST data, for display. Whoever chooses anything by it (a tuner, an early stop) has no test
        data left: choose by a point on validation data, such as received/validation.
        """
        return self.mean(self.point)

    def mean(self, point: str) -> float | None:
        """Mean accuracy over the clients that were evaluated at a point; None where there is none."""
        found = [one.correct / one.count for one in self.clients if one.point == point and one.correct is not None]
        return sum(found) / len(found) if found else None

    def __str__(self) -> str:
        shown = "" if self.accuracy is None else f", accuracy {self.accuracy:.1%} at '{self.point}' on test data"
        return f"evaluated after round {self.completed}{shown}"


@dataclass(frozen=True)
class RunEnd:
    """A run ends: `finished`, or stopped for a `reason`, such as "max_seconds", "interrupted" or an error.

    What was reached is saved. `summary` is that of summary.json, and None after an interruption or an error.
    """

    completed: int
    rounds: int
    seconds: float
    finished: bool
    reason: str | None
    summary: Mapping[str, Any] | None

    def __str__(self) -> str:
        how = "finished" if self.finished else f"stopped ({self.reason})"
        return f"{how} after round {self.completed} of {self.rounds}"


Record = RunStart | ProgressUpdate | RoundResult | EvaluationResult | RunEnd
EVENTS = ("on_start", "on_progress", "on_round", "on_evaluation", "on_end")


class Observer(Protocol):
    """What an observer may have; it need not have all of these. A function is one, too: it gets every record.

    One that raises ends the run as any error does, with what was reached saved.
    """

    def on_start(self, start: RunStart) -> None: ...

    def on_progress(self, progress: ProgressUpdate) -> None: ...

    def on_round(self, result: RoundResult) -> None: ...

    def on_evaluation(self, result: EvaluationResult) -> None: ...

    def on_end(self, end: RunEnd) -> None: ...


@dataclass(frozen=True)
class ObserverRow:
    """An observer that has a name, made with a place to write to."""

    where: str  # module:class
    text: str


# `--log NAME:PLACE`, or a place that ends in .NAME; imported when it is asked for.
OBSERVERS = {
    "jsonl": ObserverRow("sparsona.runs.json_lines:JsonLines", "a line of JSON for the start, each round and the end"),
}


def make_observer(text: str) -> object:
    """The observer that a text such as "run.jsonl" or "jsonl:run.log" names."""
    name, _, place = text.partition(":")
    if name not in OBSERVERS:
        name, place = Path(text).suffix.removeprefix("."), text
    if name not in OBSERVERS or not place:
        raise SparsonaError(
            f"log '{text}'",
            expected=" or ".join(f"FILE.{name} ({row.text})" for name, row in OBSERVERS.items()),
            hint="for example --log run.jsonl",
        )
    module, _, kind = OBSERVERS[name].where.partition(":")
    return getattr(import_module(module), kind)(place)


class ObserverList:
    """Several observers as one, in their order."""

    def __init__(self, observers: Iterable[object] = ()) -> None:
        found = [make_observer(one) if isinstance(one, str) else one for one in observers]
        self._receivers = {event: [_receiver(one, event) for one in found] for event in EVENTS}

    def on_start(self, start: RunStart) -> None:
        self._tell("on_start", start)

    def on_progress(self, progress: ProgressUpdate) -> None:
        self._tell("on_progress", progress)

    def on_round(self, result: RoundResult) -> None:
        self._tell("on_round", result)

    def on_evaluation(self, result: EvaluationResult) -> None:
        self._tell("on_evaluation", result)

    def on_end(self, end: RunEnd) -> None:
        self._tell("on_end", end)

    def on_failure(self, end: RunEnd, error: BaseException) -> None:
        """The end by an error. What fails here is noted on that error and does not take its place."""
        for receive in self._receivers["on_end"]:
            try:
                receive(end)
            except Exception as other:
                error.add_note(f"an observer failed at the end, too: {other!r}")

    def _tell(self, event: str, record: Record) -> None:
        for receive in self._receivers[event]:
            receive(record)


def _receiver(observer: Any, event: str) -> Callable[[Any], object]:
    """What is called with the records of an event."""
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
    """For what an observer has no method for."""
