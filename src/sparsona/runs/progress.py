"""The progress of runs, shown while they train: in a terminal, or in a notebook."""

from __future__ import annotations

import html
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from sparsona.core.arguments import truth
from sparsona.core.errors import SparsonaError
from sparsona.core.printable import printable

if TYPE_CHECKING:
    from sparsona.runs.observers import EvaluationResult, ProgressUpdate, RoundResult, RunEnd


@contextmanager
def shown_progress(
    progress: bool | None, observers: Sequence[object], title: str | None = None, has_seeds: bool = False
) -> Iterator[list[object]]:
    """The observers of a run, with a bar before them.

    Args:
        progress: whether there is a bar. None: in a notebook, and where stderr is a terminal.
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
        progress = in_notebook or sys.stderr.isatty()
    if not progress:
        yield list(observers)
    elif in_notebook:
        yield [NotebookBar(has_seeds), *observers]
    else:
        with progress_bar(title, has_seeds) as bar:
            yield [bar, *observers]


class NotebookBar:
    """The observer that shows the progress of one run after another below a notebook's cell, a line for each."""

    def __init__(self, has_seeds: bool = False) -> None:
        self._has_seeds = has_seeds
        self._name, self._accuracy, self._doing = "", "", ""
        self._completed, self._rounds = 0, 0
        self._lines: dict[str, Any] = {}

    def on_progress(self, progress: ProgressUpdate) -> None:
        name = f"{progress.title}, seed {progress.seed}" if self._has_seeds else progress.title
        if name != self._name:
            self._name, self._accuracy = name, ""
        self._completed, self._rounds, self._doing = progress.completed, progress.rounds, progress.doing
        self._show()

    def on_round(self, result: RoundResult) -> None:
        if not result.is_tuning:
            self._completed, self._doing = result.index + 1, ""
            self._show()

    def on_evaluation(self, result: EvaluationResult) -> None:
        if result.accuracy is not None:
            self._accuracy = f"accuracy {result.accuracy:.1%}"
            self._show()
        elif result.metrics:
            name, value = next(iter(result.metrics.items()))
            self._accuracy = f"{name} {value:.4g}"
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


class Bar:
    """The observer that shows the progress of one run after another, on stderr.

    A run is labelled `title` or, without one, its method's title, with its seed if there are several. With `total`, a
    name and a number of rounds, one more bar counts the rounds of all runs, and bars of finished runs go.
    """

    def __init__(self, progress: Any, title: str | None, has_seeds: bool, total: tuple[str, int] | None = None) -> None:
        self._progress, self._title, self._has_seeds = progress, title, has_seeds
        self._tasks: dict[str, Any] = {}
        self._name = ""
        self._all, self._done = None, 0
        if total is not None:
            self._all = progress.add_task(printable(total[0], kept=""), total=total[1], accuracy="", doing="")

    def drop_idle(self) -> None:
        """Remove bars without progress: they would stand above the error message."""
        for task in list(self._progress.tasks):
            if not task.completed:
                self._progress.remove_task(task.id)

    def on_progress(self, progress: ProgressUpdate) -> None:
        with_seed = f"{progress.title}, seed {progress.seed}"
        self._name = printable(self._title or (with_seed if self._has_seeds else progress.title), kept="")
        if self._name not in self._tasks:
            self._tasks[self._name] = self._progress.add_task(
                self._name, total=progress.rounds, accuracy="", doing="", completed=progress.completed
            )
        self._show(progress.completed, doing=progress.doing)
        if progress.completed >= progress.rounds and not progress.doing:
            self._drop_finished()  # in a process of its own, whose end is not reported

    def on_round(self, result: RoundResult) -> None:
        if not result.is_tuning:
            self._show(result.index + 1)

    def on_evaluation(self, result: EvaluationResult) -> None:
        if result.accuracy is not None:
            self._show(result.completed, accuracy=f"accuracy {result.accuracy:.1%}")
        elif result.metrics:
            name, value = next(iter(result.metrics.items()))
            self._show(result.completed, accuracy=f"{name} {value:.4g}")

    def on_end(self, end: RunEnd) -> None:
        self._drop_finished()

    def _drop_finished(self) -> None:
        if self._all is not None and self._name in self._tasks:
            task = self._tasks.pop(self._name)
            self._done += int(next(one.completed for one in self._progress.tasks if one.id == task))
            self._progress.remove_task(task)

    def _show(self, completed: int, accuracy: str | None = None, doing: str = "") -> None:
        if self._name not in self._tasks:  # finished
            return
        task = next(task for task in self._progress.tasks if task.id == self._tasks[self._name])
        accuracy = task.fields["accuracy"] if accuracy is None else printable(accuracy, kept="")
        doing = printable(doing, kept="")
        # The other columns, with the least of a bar, take 38 characters and their texts; they are not to be cut.
        room = self._progress.console.width - 38 - len(self._name) - len(accuracy) - 2 * len(str(task.total))
        self._progress.update(
            task.id, completed=completed, accuracy=accuracy, doing=shorten(doing, max(room, 1), placeholder="…")
        )
        if self._all is not None:
            running = sum(int(one.completed) for one in self._progress.tasks if one.id != self._all)
            self._progress.update(self._all, completed=self._done + running)


@contextmanager
def progress_bar(
    title: str | None = None, has_seeds: bool = False, total: tuple[str, int] | None = None
) -> Iterator[Bar]:
    """A `Bar` for the runs inside."""
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
        TextColumn("rounds  {task.fields[accuracy]}", markup=False),
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
