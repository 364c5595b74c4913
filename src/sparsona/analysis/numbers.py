"""Results for other programs: numbers by method, client and round, and the table as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from sparsona.analysis.answer import scope
from sparsona.analysis.columns import Column, columns_for
from sparsona.analysis.groups import group_views
from sparsona.analysis.table import Row, figures, notes, table
from sparsona.analysis.view import RunView
from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.rows import text_table
from sparsona.runs.failed import FailedRun

Per = Literal["method", "client", "round"]
SMALL = frozenset(("accuracy_mean", "accuracy_bottom_decile", "error_loss", "bytes_total", "density"))  # of a prompt
LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "−": "$-$",
    "×": r"$\times$",
    "–": "--",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}

# Not every reader of Markdown takes a backslash before < for an escape.
MARKDOWN = {"<": "&lt;", ">": "&gt;"} | {one: f"\\{one}" for one in "\\`*_[]|"}


def numbers(views: Sequence[RunView], per: Per = "method") -> list[dict[str, Any]]:
    """Results as plain numbers, a dict for each line.

    Args:
        views: the runs.
        per: "method": mean and spread over seeds of every column; "client": each client of each run at the headline;
            "round": the mean over clients at each evaluation point of each run after each round.

    Returns:
        Dicts with the same keys for runs with the same metrics. Accuracies are from 0 to 1; `loss` and metrics are of
        test data; None where a figure is not known. A regression has no accuracy. Where a run has not finished, lines
        of methods and clients have `unfinished`: of how many runs that is so.
    """
    if per not in _MAKE:
        raise unknown_name("kind of line", per, _MAKE)
    return _MAKE[per](views)


def _unfinished(group: Sequence[RunView], views: Sequence[RunView]) -> dict[str, int]:
    if all(view.unfinished_at is None for view in views):
        return {}
    return {"unfinished": sum(view.unfinished_at is not None for view in group)}


def _by_method(views: Sequence[RunView]) -> list[dict[str, Any]]:
    found = []
    for row, group in zip(figures(views), group_views(views), strict=True):
        line = {key: value for key, value in row.items() if not isinstance(value, Mapping)}
        line |= _unfinished(group.views, views)
        for name, value in row.items():
            if isinstance(value, Mapping):
                figure, *spread = value.values()  # a mean and its spread, or the largest
                line |= {name: figure} | {f"{name}_spread": one for one in spread}
        found.append(line)
    return found


def _by_client(views: Sequence[RunView]) -> list[dict[str, Any]]:
    found = []
    for group in group_views(views):
        for view in group.views:
            for client, (right, count) in enumerate(zip(view.correct.tolist(), view.count.tolist(), strict=True)):
                train, validation, test = (int(size) for size in view.sizes[client])
                # A regression has no accuracy.
                score = {} if "error" in view.summary else {"accuracy": right / count if count else None}
                found.append(
                    {
                        "method": group.label,
                        "seed": view.seed,
                        "client": client,
                        **({"name": view.client_names[client]} if view.client_names else {}),
                        "point": view.point,
                        **_unfinished([view], views),
                        **score,
                        **({"loss": _known(view.losses[client])} if len(view.losses) else {}),
                        **{key: _known(one[client]) for key, one in view.metrics.items() if key != "accuracy"},
                        "tested": int(count),
                        "train": train,
                        "validation": validation,
                        "test": test,
                    }
                )
    return found


def _by_round(views: Sequence[RunView]) -> list[dict[str, Any]]:
    found = []
    for group in group_views(views):
        for view in group.views:
            loss, sent, steps = dict(view.train_loss), dict(view.cumulative_bytes), dict(view.cumulative_steps)
            for point, curve in view.curves.items():
                test_loss = dict(view.loss_curves.get(point, ()))
                metrics = {name: dict(curves.get(point, ())) for name, curves in view.metric_curves.items()}
                for completed, value in curve:
                    found.append(
                        {
                            "method": group.label,
                            "seed": view.seed,
                            "round": completed,
                            "point": point,
                            view.measure.key: value,
                            **({"loss": test_loss.get(completed)} if view.loss_curves else {}),
                            **{name: one.get(completed) for name, one in metrics.items()},
                            "train_loss": loss.get(completed),
                            "bytes_sent": sent.get(completed),
                            "steps": steps.get(completed),
                        }
                    )
    return found


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


_MAKE = {"method": _by_method, "client": _by_client, "round": _by_round}


def to_csv(views: Sequence[RunView], per: Per = "method") -> str:
    """The numbers as CSV, with a line of names."""
    lines = numbers(views, per)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for line in lines for key in line)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def to_text(views: Sequence[RunView], most: int = 20, missing: Sequence[FailedRun] = ()) -> str:
    """What methods are judged by, their traffic and density as plain text, for a prompt, and what must be known of it.

    Args:
        views: the runs.
        most: methods that are listed; of more, their number is shown.
        missing: runs that failed.

    Returns:
        Aligned lines without a line break at the end.
    """
    columns, rows = columns_for(views), table(views)
    kept = [i for i, column in enumerate(columns) if column.name in SMALL or _is_judged_by(column, views)]
    lines = [{"method": row.label} | {columns[i].title: row.cells[i].text for i in kept} for row in rows]
    added = [textwrap.fill(f"note: {one}", 100, subsequent_indent="  ") for one in notes(views, missing)]
    return "\n".join([text_table(lines, most), *added])


def _is_judged_by(column: Column, views: Sequence[RunView]) -> bool:
    named = {f"metric_{view.measure.name.replace('-', '_')}" for view in views}
    return column.name in named | {view.measure.key for view in views}


def escape_markdown(text: str) -> str:
    r"""A text that Markdown shows as it is, on one line: no markup, link, image or cell of a table begins in it.

    Args:
        text: any text, such as a name that a user chose.

    Returns:
        Markdown.

    Example:
        >>> print(escape_markdown("<b>[x](y)</b> | a_b"))
        &lt;b&gt;\[x\](y)&lt;/b&gt; \| a\_b
    """
    return "".join(MARKDOWN.get(one, one if one.isprintable() else " ") for one in text)


def to_markdown(views: Sequence[RunView], every: bool = False, missing: Sequence[FailedRun] = ()) -> str:
    """The table as Markdown, the best of each column in bold, and below it what its reader must know.

    Args:
        views: the runs.
        every: all columns instead of the first ones.
        missing: runs that failed.

    Returns:
        Text that ends with a line break.
    """
    titles, rows = _chosen(views, every)
    lines = [["method", *map(escape_markdown, titles)], ["---", *("---:" for _ in titles)]]
    for row, cells in rows:
        texts = [escape_markdown(cell.text) for cell in cells]
        shown = [f"**{text}**" if cell.best else text for text, cell in zip(texts, cells, strict=True)]
        lines.append([escape_markdown(row.label), *shown])
    added = [f"\n{escape_markdown(sentence)}\n" for sentence in notes(views, missing)]
    return "".join([*(f"| {' | '.join(line)} |\n" for line in lines), *added])


def to_latex(
    views: Sequence[RunView],
    every: bool = False,
    caption: str = "",
    label: str = "",
    missing: Sequence[FailedRun] = (),
) -> str:
    r"""The table for LaTeX, the best of each column in bold; it needs \usepackage{booktabs}.

    Comments before it say what it is of, such as data set, clients and rounds, and what its reader must know.

    Args:
        views: the runs.
        every: all columns instead of the first ones.
        caption: with one, the tabular stands in a table.
        label: of that table, for \ref; the table stands in one with a label alone, too.
        missing: runs that failed.

    Returns:
        Text that ends with a line break.
    """
    titles, rows = _chosen(views, every)
    comments = ["% " + _escape(" ".join(one.split())) for one in ("; ".join(scope(views)), *notes(views, missing))]
    comments.append(r"% This table needs \usepackage{booktabs}.")
    lines = [rf"\begin{{tabular}}{{l{'r' * len(titles)}}}", r"\toprule"]
    lines += [" & ".join(["method", *map(_escape, titles)]) + r" \\", r"\midrule"]
    for row, cells in rows:
        shown = [rf"\textbf{{{_escape(cell.text)}}}" if cell.best else _escape(cell.text) for cell in cells]
        lines.append(" & ".join([_escape(row.label), *shown]) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    if caption or label:
        _check_label(label)
        inner = [rf"\caption{{{_escape(caption)}}}"] if caption else []
        inner += [rf"\label{{{label}}}"] if label else []
        lines = [r"\begin{table}", r"\centering", *inner, *lines, r"\end{table}"]
    return "\n".join([*comments, *lines]) + "\n"


def _chosen(views: Sequence[RunView], every: bool) -> tuple[list[str], list[tuple[Row, list[Any]]]]:
    columns = columns_for(views)
    kept = [i for i, column in enumerate(columns) if every or column.is_first]
    return [columns[i].title for i in kept], [(row, [row.cells[i] for i in kept]) for row in table(views)]


def _check_label(label: str) -> None:
    r"""A label is read as it is by \ref: what would have to be escaped is refused."""
    refused = (LATEX.keys() - {"_"}) | set(",'\"")
    if wrong := sorted({one for one in label if one in refused or not one.isprintable()}):
        raise SparsonaError(
            f"the label {label!r} has {', '.join(map(repr, wrong))}",
            expected="letters, digits and : - _ . /, as \\ref takes them",
            hint="for example tab:digits",
        )


def _escape(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in text)
