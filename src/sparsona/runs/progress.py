"""The progress of runs, shown while they train: as bars in a terminal or a notebook, as lines in a log file."""

from __future__ import annotations

import html
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from sparsona.core.arguments import truth
from sparsona.core.errors import SparsonaError
from sparsona.core.printable import printable
from sparsona.core.targets import TITLES, headline_metric

if TYPE_CHECKING:
    from sparsona.runs.observers import EvaluationResult, ProgressUpdate, RoundResult, RunEnd, RunStart

LINE_SECONDS = 60.0  # between lines about the same thing in a log file


@contextmanager
def shown_progress(
    progress: bool | None, observers: Sequence[object], title: str | None = None, has_seeds: bool = False
) -> Iterator[list[object]]:
    """The observers of a run, with one before them that shows its progress.

    Args:
        progress: whether there is one. None: in a notebook, and where stderr is a terminal.
        observers: the others.
        title: what the run is called; None: by its method.
        has_seeds: whether seeds belong to the titles.

    Yields:
        All of them.
    """
    truth("progress", progress, none=True)
    in_notebook = "ipykernel" in sys.modules
    if isinstance(observers, str) or not isinstance(observers, Iterable):
        raise SparsonaError(
            f"observers = {observers!r}", expected="a list of observers", hint=f"observers=[{observers!r}]"
        )
    if progress is None:
        progress = in_notebook or _is_terminal()
    if not progress:
        yield list(observers)
    elif in_notebook:
        yield [NotebookBar(has_seeds), *observers]
    else:
        with progress_bar(title, has_seeds) as bar:
            yield [bar, *observers]


class NotebookBar:
    """The observer that shows the progress of one run after another below a notebook's cell, a line for each."""

    is_live = True

    def __init__(self, has_seeds: bool = False) -> None:
        self._has_seeds = has_seeds
        self._name, self._accuracy, self._doing = "", "", ""
        self._completed, self._rounds = 0, 0
        self._lines: dict[str, Any] = {}

    def on_progress(self, progress: ProgressUpdate) -> None:
        name = _name(progress, None, self._has_seeds)
        if name != self._name:
            self._name, self._accuracy = name, ""
        self._completed, self._rounds, self._doing = progress.completed, progress.rounds, progress.doing
        self._show()

    def on_round(self, result: RoundResult) -> None:
        if not result.is_tuning:
            self._completed, self._doing = result.index + 1, ""
            self._show()

    def on_evaluation(self, result: EvaluationResult) -> None:
        self._accuracy = _accuracy(result) or self._accuracy
        self._show()

    def on_end(self, end: RunEnd) -> None:
        self._doing = ""
        self._show()

    def _show(self) -> None:
        from IPython.display import HTML, display

        words = [f"{self._completed} of {self._rounds} rounds", self._accuracy, self._doing]
        text = ", ".join(html.escape(word) for word in words if word)
        line = HTML(
            f"<div><span style='display:inline-block;min-width:12em'>{html.escape(self._name)}</span> "
            f"<progress max='{max(self._rounds, 1)}' value='{self._completed}'></progress> {text}</div>"
        )
        if self._name in self._lines:
            self._lines[self._name].update(line)
        else:
            self._lines[self._name] = display(line, display_id=True)


_EMPTY = {"accuracy": "", "doing": ""}


class Bar:
    """The observer that shows the progress of one run after another, on a terminal.

    A run is labelled `title` or, without one, its method's title, with its seed if there are several. With `total`, a
    name and a number of rounds, one more bar counts the rounds of all runs, and bars of finished runs go.
    """

    is_live = True

    def __init__(self, progress: Any, title: str | None, has_seeds: bool, total: tuple[str, int] | None = None) -> None:
        self._progress, self._title, self._has_seeds = progress, title, has_seeds
        self._tasks: dict[str, Any] = {}
        self._name = ""
        self._all, self._done = None, 0
        if total is not None:
            self._all = progress.add_task(printable(total[0], kept=""), total=total[1], **_EMPTY, of="rounds")
        self._trials: Any = None

    def trials(self, done: int, total: int, text: str) -> None:
        """Show how many trials of a search are finished, and what is known of the last one, above the runs."""
        if self._trials is None:
            self._trials = self._progress.add_task("trials", total=total, **_EMPTY, of="")
        task = next(task for task in self._progress.tasks if task.id == self._trials)
        self._progress.update(self._trials, completed=done, total=total, doing=self._fit(text, task))

    def drop_idle(self) -> None:
        """Remove bars without progress: they would stand above the error message."""
        for task in list(self._progress.tasks):
            if not task.completed:
                self._progress.remove_task(task.id)

    def on_progress(self, progress: ProgressUpdate) -> None:
        self._name = _name(progress, self._title, self._has_seeds)
        if self._name not in self._tasks:
            if self._trials is not None:
                self._progress.update(self._trials, doing="")  # it was fitted to a line without these bars
            self._tasks[self._name] = self._progress.add_task(
                self._name, total=progress.rounds, completed=progress.completed, **_EMPTY, of="rounds"
            )
        if progress.is_over:
            self._finish(progress.completed, progress.doing, progress.doing in ("", "stopped early"))
        else:
            self._show(progress.completed, doing=progress.doing)

    def on_round(self, result: RoundResult) -> None:
        if not result.is_tuning:
            self._show(result.index + 1)

    def on_evaluation(self, result: EvaluationResult) -> None:
        if accuracy := _accuracy(result):
            self._show(result.completed, accuracy=accuracy)

    def on_end(self, end: RunEnd) -> None:
        self._finish(end.completed, "" if end.completed == end.rounds else str(end), end.finished)

    def _finish(self, completed: int, doing: str, is_finished: bool) -> None:
        """A run is over: its clock stands still, and the next run of that name has a bar of its own."""
        if self._name not in self._tasks:
            return
        self._show(completed, doing=doing)
        task = self._tasks.pop(self._name)
        self._progress.stop_task(task)
        if is_finished:
            self._progress.update(task, total=completed)  # nothing is left of a run that stopped early
        if self._all is not None:
            self._done += completed
            self._progress.remove_task(task)

    def _show(self, completed: int, accuracy: str | None = None, doing: str = "") -> None:
        if self._name not in self._tasks:  # finished
            return
        task = next(task for task in self._progress.tasks if task.id == self._tasks[self._name])
        accuracy = task.fields["accuracy"] if accuracy is None else printable(accuracy, kept="")
        self._progress.update(task.id, completed=completed, accuracy=accuracy, doing=self._fit(doing, task))
        if self._all is not None:
            running = sum(int(one.completed) for one in self._progress.tasks if one.id != self._all)
            self._progress.update(self._all, completed=self._done + running)

    def _fit(self, doing: str, task: Any) -> str:
        """As much of a text as a line has room for beside the other columns, which are not to be cut: with the least of
        a bar they take 38 characters and their texts."""
        taken = 38 + len(task.description) + len(task.fields["accuracy"]) + 2 * len(str(task.total))
        room = self._progress.console.width - taken
        return shorten(printable(doing, kept=""), max(room, 1), placeholder="…")


@dataclass
class _RunOfLines:
    """What lines say of a run: `reached` is when it completed so many rounds, `began` when it had `first` of them."""

    completed: int
    rounds: int
    started: float
    printed: float
    began: float
    first: int
    reached: float
    accuracy: str = ""

    def complete(self, completed: int) -> None:
        if completed != self.completed:
            self.completed, self.reached = completed, time.monotonic()

    def left(self) -> str:
        """How long the other rounds will take, by those that were played."""
        played = self.completed - self.first
        if played <= 0 or self.completed >= self.rounds:
            return ""
        seconds = (self.rounds - self.completed) * (self.reached - self.began) / played
        return f"about {_rough(max(0.0, seconds - (time.monotonic() - self.reached)))} left"


class Lines:
    """The observer that prints lines on stderr, for a log file: of each run one when it starts, one when it is over,
    and at most one a minute between. Its arguments are those of `Bar`."""

    is_live = True

    def __init__(self, title: str | None, has_seeds: bool, total: tuple[str, int] | None = None) -> None:
        self._title, self._has_seeds, self._total = title, has_seeds, total
        self._runs: dict[str, _RunOfLines] = {}
        self._name, self._done = "", 0
        self._trials_printed = 0.0

    def trials(self, done: int, total: int, text: str) -> None:
        """As of `Bar`: a line when a search begins, for its last trial, and at most one a minute between."""
        now = time.monotonic()
        if done in (0, total) or now - self._trials_printed >= LINE_SECONDS:
            self._trials_printed = now
            _log(f"trials: {done} of {total}" + (f", {text}" if text else ""))

    def on_progress(self, progress: ProgressUpdate) -> None:
        self._name = _name(progress, self._title, self._has_seeds)
        if self._name not in self._runs and not progress.is_over:
            now, completed = time.monotonic(), progress.completed
            self._runs[self._name] = _RunOfLines(completed, progress.rounds, now, now, now, completed, now)
            self._print(f"resumed after round {completed} of {progress.rounds}" if completed else "starting")
        if (run := self._runs.get(self._name)) is not None:
            run.complete(progress.completed)
            if progress.is_over:
                where = f"after round {progress.completed} of {progress.rounds}"
                self._end(f"{progress.doing or 'finished'} {where}", progress.completed, progress.seconds)
            else:
                self._show(run, progress.doing)

    def on_start(self, start: RunStart) -> None:
        if (run := self._runs.get(self._name)) is not None:
            run.began = run.reached = time.monotonic()
            run.first = run.completed = start.completed
            if start.completed:
                self._print(f"resumed after round {start.completed} of {start.rounds}")

    def on_round(self, result: RoundResult) -> None:
        if (run := self._runs.get(self._name)) is not None:
            self._show(run)  # the rounds before this one: only of these all evaluations were received
            run.complete(result.index + (not result.is_tuning))

    def on_evaluation(self, result: EvaluationResult) -> None:
        if (run := self._runs.get(self._name)) is not None:
            run.accuracy = _accuracy(result) or run.accuracy

    def on_end(self, end: RunEnd) -> None:
        self._end(str(end), end.completed, end.seconds)

    def _show(self, run: _RunOfLines, doing: str = "") -> None:
        if time.monotonic() - run.printed >= LINE_SECONDS:
            run.printed = time.monotonic()
            self._print(f"round {run.completed} of {run.rounds}", run.accuracy, doing, run.left())

    def _end(self, how: str, completed: int, seconds: float) -> None:
        run = self._runs.pop(self._name, None)  # the next run may have the same name
        if run is not None:
            # With what it took before it was resumed; what is saved lacks the reading of data, and a last, long round.
            took = max(seconds, time.monotonic() - run.started)
            self._print(how, run.accuracy, f"took {_rough(took)}")
            if self._total is not None:
                self._done += completed
                _log(f"{self._total[0]}: {self._done} of {self._total[1]} rounds")

    def _print(self, *words: str) -> None:
        _log(f"{self._name}: {', '.join(word for word in words if word)}")


def _log(text: str) -> None:
    """Print a line of progress on stderr, to be read at once."""
    print(printable(text, kept=""), file=sys.stderr, flush=True)


def _rough(seconds: float) -> str:
    """A duration of which only the size matters: 40 s, 12 min, 3 h 05 min."""
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min" if seconds >= 90 else f"{max(seconds, 1):.0f} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _accuracy(result: EvaluationResult) -> str:
    """The accuracy of an evaluation or, of a regression, what it is judged by; "" where nothing is known."""
    if result.accuracy is not None:
        return f"{'weighted ' * (result.weight == 'examples')}accuracy {result.accuracy:.1%}"
    metrics = result.metrics
    if (name := headline_metric(metrics)) is not None:
        return f"{TITLES[name]} {metrics[name]:.4g}"
    losses = [one.loss for one in result.clients if one.point == result.point]
    return f"loss {sum(losses) / len(losses):.4g}" if losses else ""


def _name(progress: ProgressUpdate, title: str | None, has_seeds: bool) -> str:
    """What a bar or a line calls a run."""
    with_seed = f"{progress.title}, seed {progress.seed}"
    return printable(title or (with_seed if has_seeds else progress.title), kept="")


def _is_terminal() -> bool:
    """Whether stderr is a terminal on which a bar can move."""
    return sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


@contextmanager
def progress_bar(
    title: str | None = None, has_seeds: bool = False, total: tuple[str, int] | None = None
) -> Iterator[Bar | Lines]:
    """A `Bar` for the runs inside; `Lines` where stderr is no terminal."""
    if not _is_terminal():
        yield Lines(title, has_seeds, total)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[of]}  {task.fields[accuracy]}", markup=False),
        TextColumn("{task.fields[doing]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    ) as progress:
        bar = Bar(progress, title, has_seeds, total)
        try:
            yield bar
        except SparsonaError:
            bar.drop_idle()
            raise
