"""Terminal output: tables on stdout, progress on stderr."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from sparsona.analysis.columns import COLUMNS
from sparsona.analysis.format import cut, human_bytes
from sparsona.core.errors import SparsonaError

if TYPE_CHECKING:
    from sparsona.runs.observers import EvaluationResult, ProgressUpdate, RoundResult, RunEnd


MOST_CLIENTS = 40  # that a table lists by name


def show_rows(rows: list[dict[str, Any]], as_json: bool, hint: str) -> None:
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    print_table([{key: f"{v:,}" if isinstance(v, int) else str(v) for key, v in row.items()} for row in rows])
    click.echo(f"\n{hint}")


def print_results(rows: list[dict[str, Any]]) -> None:
    """The most important columns; the others only if the terminal is wide enough (the report has them all)."""
    columns = list(rows[0])
    if sys.stdout.isatty():
        first = ["method", *(column.title for column in COLUMNS if column.is_first)]
        room, kept = shutil.get_terminal_size().columns, set()
        for column in sorted(columns, key=lambda column: column not in first):
            room -= 3 + max(len(column), *(len(str(row[column])) for row in rows))
            if room >= 0:
                kept.add(column)
        left_out = [column for column in columns if column not in kept]
        columns = [column for column in columns if column in kept]
    print_table([{column: row[column] for column in columns} for row in rows])
    if sys.stdout.isatty() and left_out:
        click.echo(f"columns that do not fit: {', '.join(left_out)} (see the report)")


def print_text(text: str) -> None:
    """A paragraph, wrapped between words if stdout is a terminal."""
    if not sys.stdout.isatty():
        click.echo(text)
        return
    for line in text.split("\n"):
        click.echo(click.wrap_text(line, shutil.get_terminal_size().columns, subsequent_indent="  "))


def print_table(rows: list[dict[str, Any]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for position, column in enumerate(rows[0]):
        numeric = all(str(row[column])[:1] in "0123456789+-−–—>" for row in rows)
        # Names are copied by users: they are never broken.
        table.add_column(column, justify="right" if numeric else "left", overflow="fold", no_wrap=position == 0)
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    # Into a pipe there is no width to fit into: cells must not be cut.
    width = None if sys.stdout.isatty() else 400
    # Cells may be names from users' data: no text of theirs is markup.
    Console(highlight=False, width=width, markup=False, emoji=False).print(table)


def write_page(write: Callable[[], object]) -> str:
    """The report's path, or why there is none: a missing extra must not fail a finished run."""
    try:
        return str(write())
    except SparsonaError as error:
        return f"none ({error.what}; {error.hint})"


def print_profile(profile: dict[str, Any]) -> None:
    """Where the time went, of the last part: the others were shown when they were measured."""
    part = profile["parts"][-1]
    begun, done, workers = part["rounds"]["from"], part["rounds"]["to"], part["workers"]
    rounds = f"rounds {begun + 1} to {done}" if begun else f"{done} round{'s' * (done != 1)}"
    click.echo(f"Where the time went: {rounds} in {part['seconds']:.1f} s, {part['executor']} on {part['device']}")
    _print_phases(part["phases"])
    if workers is not None:
        count = workers["processes"]
        click.echo(f"\nIn {count} worker process{'es' * (count > 1)}, which lived {workers['seconds']:.1f} s together")
        _print_phases(workers["phases"], " in one process")
    if search := part.get("search"):
        ratio = f"{search['ratio']:.2%}"
        ratio += "" if search["ratio_sd"] is None else f" ± {100 * search['ratio_sd']:.2f}"
        seconds = [f"{1e3 * search[f'{name}_seconds']:,.2f} ms" for name in ("search", "train")]
        print_text(
            f"mask search: {ratio} of training, {seconds[0]} to {seconds[1]} a turn, over {search['turns']:,} turns"
        )
    memory = part["memory"]
    peaks = [f"{human_bytes(memory['process'])} in this process"]
    if memory["workers"]:
        peaks.append(f"up to {human_bytes(max(memory['workers']))} in a worker")
    if memory["gpu"] is not None:
        peaks.append(f"{human_bytes(memory['gpu'])} on the GPU")
    print_text(f"most memory: {', '.join(peaks)}")
    print_text("finish: what the method does after training and mask search; other: what no phase covers\n")


def _print_phases(phases: list[dict[str, Any]], where: str = "") -> None:
    def format_ms(value: float | None) -> str:
        return "–" if value is None else f"{value:,.2f}" if value < 100 else f"{value:,.0f}"

    print_table(
        [
            {
                "phase": phase["phase"],
                "seconds": f"{phase['seconds']:,.2f}",
                "share": f"{phase['share']:.1%}",
                "calls": f"{phase['calls']:,}" if phase["calls"] else "–",
                "ms per call": format_ms(phase["ms_per_call"]),
            }
            for phase in phases
        ]
    )
    for phase in phases:
        if phase.get("steps"):
            speed = f"{format_ms(phase['ms_per_step'])} ms each, {phase['examples_per_second']:,.0f} examples/s{where}"
            print_text(f"{phase['phase']}: {phase['steps']:,} client-steps, {speed}")


def print_partition(partition: Any) -> None:
    """A `Partition` as wide as the terminal; into a pipe without colours, 80 characters wide."""
    from sparsona.report.pictures.text import partition_lines

    _print_lines(partition_lines, partition)


def print_clients(effects: Any) -> None:
    """A `ClientEffects`: its table, and the change against the number of training examples."""
    from sparsona.report.pictures.text import clients_lines

    click.echo(effects.title)
    print_table(effects.rows())
    click.echo("percentage points of accuracy; with samples: rank correlation with the number of training examples")
    for sentence in effects.sentences():
        print_text(sentence)
    change = effects.changes[0] if effects.changes else None
    if change is not None and change.labels:
        rows = change.client_rows()
        click.echo(f"\nclient by client, on {change.name} data")
        print_table(rows if len(rows) <= MOST_CLIENTS else rows[: MOST_CLIENTS // 2] + rows[-MOST_CLIENTS // 2 :])
        if len(rows) > MOST_CLIENTS:
            click.echo(f"{len(rows) - MOST_CLIENTS:,} clients between the most hurt and the most helped are left out")
    _print_lines(clients_lines, effects)


def print_gates(gates: Any) -> None:
    """A `Gates`: its table."""
    click.echo(gates.title)
    print_table(gates.rows())
    for sentence in gates.sentences():
        print_text(sentence)


def print_similarity(similarity: Any) -> None:
    """A `Similarity`: its table and its heatmaps."""
    from sparsona.report.pictures.text import similarity_lines

    click.echo(similarity.title)
    print_table(similarity.rows())
    for sentence in similarity.sentences():
        print_text(sentence)
    click.echo()
    _print_lines(similarity_lines, similarity)


def print_analysis(found: Any) -> None:
    """Any analysis that has a title, a table and sentences."""
    click.echo(found.title)
    print_table(found.rows())
    for sentence in found.sentences():
        print_text(sentence)


def print_bounds(found: Any) -> None:
    """A `Bounds`: its constants, and each bound with its terms and assumptions."""
    from sparsona.analysis.format import number

    click.echo(found.title)
    for sentence in found.sentences():
        print_text(sentence)
    if not found.bounds:
        return
    print_table([one.row() for one in found.constants])
    print_table([one.row() for one in found.bounds])
    for bound in found.bounds:
        click.echo(f"\n{bound.theorem}")
        print_text(f"  bounds: {bound.bounds}")
        if bound.terms:
            label = "terms" if bound.value is not None else f"terms {bound.curve_label}".rstrip()
            print_text(f"  {label}: " + " + ".join(f"{number(value)} [{name}]" for name, value in bound.terms.items()))
        if bound.leaves_out_constants:
            click.echo("  stated up to an absolute constant, taken to be 1")
        for status in ("violated", "cannot be checked", "held"):
            for one in bound.assumptions:
                if one.status == status:
                    print_text(f"  {status}: {one.text}" + (f" ({one.why})" if one.why else ""))
        for note in bound.notes:
            print_text(f"  {note}")
    click.echo()


def _print_lines(draw: Callable[[Any, Any], list[Any]], found: Any) -> None:
    """Print what `draw` returns for this terminal."""
    from rich.console import Console

    from sparsona.report.pictures.text import Terminal

    console = Console(highlight=False)
    has_colours = console.color_system in ("256", "truecolor") and not console.no_color  # 16 are too few for a scale
    for line in draw(found, Terminal(console.width, has_colours, console.options.ascii_only)):
        console.print(line, no_wrap=True, overflow="ellipsis", crop=True)


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
            self._all = progress.add_task(total[0], total=total[1], accuracy="", doing="")

    def drop_idle(self) -> None:
        """Remove bars without progress: they would stand above the error message."""
        for task in list(self._progress.tasks):
            if not task.completed:
                self._progress.remove_task(task.id)

    def on_progress(self, progress: ProgressUpdate) -> None:
        with_seed = f"{progress.title}, seed {progress.seed}"
        self._name = self._title or (with_seed if self._has_seeds else progress.title)
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
        accuracy = task.fields["accuracy"] if accuracy is None else accuracy
        # The other columns, with the least of a bar, take 38 characters and their texts; they are not to be cut.
        room = self._progress.console.width - 38 - len(self._name) - len(accuracy) - 2 * len(str(task.total))
        self._progress.update(task.id, completed=completed, accuracy=accuracy, doing=cut(doing, max(room, 1)))
        if self._all is not None:
            running = sum(int(one.completed) for one in self._progress.tasks if one.id != self._all)
            self._progress.update(self._all, completed=self._done + running)


@contextmanager
def download_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar of bytes; yields a function to call with the bytes done and the total (0: unknown)."""
    from rich.progress import DownloadColumn, TransferSpeedColumn

    with _late_bar(title, DownloadColumn(), TransferSpeedColumn()) as listen:
        yield listen


@contextmanager
def decoding_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """The same for files or examples that are decoded."""
    from rich.progress import MofNCompleteColumn

    with _late_bar(title, MofNCompleteColumn()) as listen:
        yield listen


@contextmanager
def _late_bar(title: str, *columns: Any) -> Iterator[Callable[[int, int], None]]:
    """A bar that appears with the first progress."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    first = (TextColumn("{task.description}"), BarColumn())
    progress = Progress(*first, *columns, TimeRemainingColumn(), console=Console(stderr=True))

    def listen(done: int, total: int) -> None:
        if not progress.task_ids:
            progress.add_task(title, total=None)
            progress.start()
        progress.update(progress.task_ids[0], completed=done, total=total or None)

    try:
        yield listen
    finally:
        if progress.task_ids:
            progress.stop()


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
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rounds  {task.fields[accuracy]}"),
        TextColumn("{task.fields[doing]}"),
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
