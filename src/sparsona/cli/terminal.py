"""Terminal output: tables on stdout, progress on stderr."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from textwrap import fill
from typing import TYPE_CHECKING, Any

import click

from sparsona.analysis.format import UNKNOWN, human_bytes
from sparsona.core.errors import SparsonaError
from sparsona.core.printable import printable
from sparsona.core.rows import is_numeric

if TYPE_CHECKING:
    from rich.text import Text

    from sparsona.analysis.view import RunView
    from sparsona.runs.failed import FailedRun


UNLIMITED = 400  # characters in a line that nobody looks at: cells must not be cut


MOST_CLIENTS = 40  # that a table lists by name


def echo(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a text, on stdout or stderr. Everything that commands print passes here or through `as_text`, so that names
    and values of others, such as a folder's, cannot control the terminal."""
    click.echo(printable(text), err=err, nl=nl)


def as_text(value: object, style: str = "") -> Text:
    """One line of a table or a bar: without markup, and with nothing that cannot be printed."""
    from rich.text import Text

    return Text(printable(value, kept=""), style)


def show_rows(rows: list[dict[str, Any]], as_json: bool, hint: str) -> None:
    if as_json:
        echo(json.dumps(rows, indent=2))
        return
    print_table([{key: f"{v:,}" if isinstance(v, int) else str(v) for key, v in row.items()} for row in rows])
    echo(f"\n{hint}")


def print_results(views: Sequence[RunView], missing: Sequence[FailedRun] = ()) -> None:
    """The answer in a sentence, the first columns of the table, the others as far as the terminal is wide, and the
    notes of the table. Runs that failed have a row that says so."""
    from sparsona.analysis.answer import answer
    from sparsona.analysis.columns import columns_for
    from sparsona.analysis.table import notes, table

    if sentence := answer(views):
        print_text(f"{sentence}\n")
    columns, found = columns_for(views), table(views)
    widths = [
        3 + max(len(column.title), *(len(row.cells[i].text) for row in found)) for i, column in enumerate(columns)
    ]
    # Into a pipe there is no width to fit into, and the first columns are enough: --json has all.
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    room -= max(len(row.label) for row in found) + sum(
        width for width, column in zip(widths, columns, strict=True) if column.is_first
    )
    kept = []
    for i, column in enumerate(columns):
        if not column.is_first:
            room -= widths[i]
        if column.is_first or room >= 0:
            kept.append(i)
    titles = [columns[i].title for i in kept]
    failed = [{"method": one.label} | dict.fromkeys(titles, UNKNOWN) | {titles[0]: "– failed"} for one in missing]
    print_table(
        [*({"method": row.label} | {columns[i].title: row.cells[i].text for i in kept} for row in found), *failed],
        [*({columns[i].title for i in kept if row.cells[i].best} for row in found), *(() for _ in failed)],
    )
    if left_out := [column.title for i, column in enumerate(columns) if i not in kept]:
        print_text(f"more columns in the report and with --json: {', '.join(left_out)}")
    spread = "±: sample standard deviation over seeds; " if len(views) > len(found) else ""
    echo(f"{spread}words: docs/glossary.md, and at the end of the report")
    for note in notes(views, missing):
        print_text(f"note: {note}")


def terminal_width() -> int:
    """How many characters fit into a line; into a pipe, as many as there are."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else UNLIMITED


def print_text(text: str, indent: str = "", rest: str = "  ") -> None:
    """A paragraph, wrapped between words on a terminal: its first line after `indent`, the others after `rest`."""
    width = terminal_width()
    for line in text.split("\n"):
        if width == UNLIMITED:
            echo(indent + line)
        else:
            wrapped = fill(line, width, initial_indent=indent, subsequent_indent=rest, break_on_hyphens=False)
            echo(wrapped)


def print_table(rows: list[dict[str, Any]], best: Sequence[Collection[str]] = ()) -> None:
    """Rows by the titles of their columns; `best` names, for each row, the columns in which it is the best."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for position, column in enumerate(rows[0]):
        numeric = is_numeric([row[column] for row in rows])
        # Names are copied by users: they are never broken.
        table.add_column(
            as_text(column), justify="right" if numeric else "left", overflow="fold", no_wrap=position == 0
        )
    for place, row in enumerate(rows):
        marked = best[place] if best else ()
        table.add_row(*(as_text(value, "bold" if key in marked else "") for key, value in row.items()))
    Console(highlight=False, width=terminal_width()).print(table)


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
    echo(f"Where the time went: {rounds} in {part['seconds']:.1f} s, {part['executor']} on {part['device']}")
    _print_phases(part["phases"])
    if workers is not None:
        count = workers["processes"]
        echo(f"\nIn {count} worker process{'es' * (count > 1)}, which lived {workers['seconds']:.1f} s together")
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

    echo(effects.title)
    print_table(effects.rows())
    echo(f"{effects.measure.gain_title}; with samples: rank correlation with the number of training examples")
    for sentence in effects.sentences():
        print_text(sentence)
    change = effects.changes[0] if effects.changes else None
    if change is not None and change.labels:
        rows = change.client_rows()
        echo(f"\nclient by client, on {change.name} data")
        print_table(rows if len(rows) <= MOST_CLIENTS else rows[: MOST_CLIENTS // 2] + rows[-MOST_CLIENTS // 2 :])
        if len(rows) > MOST_CLIENTS:
            echo(f"{len(rows) - MOST_CLIENTS:,} clients between the most hurt and the most helped are left out")
    _print_lines(clients_lines, effects)


def print_gates(gates: Any) -> None:
    """A `Gates`: its table."""
    echo(gates.title)
    print_table(gates.rows())
    for sentence in gates.sentences():
        print_text(sentence)


def print_similarity(similarity: Any) -> None:
    """A `Similarity`: its table and its heatmaps."""
    from sparsona.report.pictures.text import similarity_lines

    echo(similarity.title)
    print_table(similarity.rows())
    for sentence in similarity.sentences():
        print_text(sentence)
    echo()
    _print_lines(similarity_lines, similarity)


def print_analysis(found: Any) -> None:
    """Any analysis that has a title, a table and sentences."""
    echo(found.title)
    print_table(found.rows())
    for sentence in found.sentences():
        print_text(sentence)


def print_bounds(found: Any) -> None:
    """A `Bounds`: its constants, and each bound with its terms and assumptions."""
    from sparsona.analysis.format import number

    echo(found.title)
    for sentence in found.sentences():
        print_text(sentence)
    if not found.bounds:
        return
    print_table([one.row() for one in found.constants])
    print_table([one.row() for one in found.bounds])
    for bound in found.bounds:
        echo(f"\n{bound.theorem}")
        print_text(f"  bounds: {bound.bounds}")
        if bound.terms:
            label = "terms" if bound.value is not None else f"terms {bound.curve_label}".rstrip()
            print_text(f"  {label}: " + " + ".join(f"{number(value)} [{name}]" for name, value in bound.terms.items()))
        if bound.leaves_out_constants:
            echo("  stated up to an absolute constant, taken to be 1")
        for status in ("violated", "cannot be checked", "held"):
            for one in bound.assumptions:
                if one.status == status:
                    print_text(f"  {status}: {one.text}" + (f" ({one.why})" if one.why else ""))
        for note in bound.notes:
            print_text(f"  {note}")
    echo()


def _print_lines(draw: Callable[[Any, Any], list[Any]], found: Any) -> None:
    """Print what `draw` returns for this terminal."""
    from rich.console import Console

    from sparsona.report.pictures.text import Terminal

    console = Console(highlight=False)
    has_colours = console.color_system in ("256", "truecolor") and not console.no_color  # 16 are too few for a scale
    for line in draw(found, Terminal(console.width, has_colours, console.options.ascii_only)):
        line.plain = printable(line.plain, kept="")
        console.print(line, no_wrap=True, overflow="ellipsis", crop=True)


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

    first = (TextColumn("{task.description}", markup=False), BarColumn())
    progress = Progress(*first, *columns, TimeRemainingColumn(), console=Console(stderr=True))

    def listen(done: int, total: int) -> None:
        if not progress.task_ids:
            progress.add_task(printable(title, kept=""), total=None)
            progress.start()
        progress.update(progress.task_ids[0], completed=done, total=total or None)

    try:
        yield listen
    finally:
        if progress.task_ids:
            progress.stop()
