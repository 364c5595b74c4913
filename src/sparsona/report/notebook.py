"""What a notebook shows of results and of data, without printing any of the data itself."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from sparsona.analysis.answer import answer, differing
from sparsona.analysis.columns import columns_for
from sparsona.analysis.table import notes, table
from sparsona.analysis.view import RunView
from sparsona.runs.failed import FailedRun


def results_html(views: Sequence[RunView], missing: Sequence[FailedRun] = ()) -> str:
    """The answer and the first columns of the table of these runs, and what its reader must know, as HTML.

    Args:
        views: the runs.
        missing: runs that failed.

    Returns:
        A fragment without scripts, in the notebook's own style.
    """
    columns = columns_for(views)
    kept = [i for i, column in enumerate(columns) if column.is_first]
    head = "".join(f'<th title="{escape(columns[i].meaning)}">{escape(columns[i].title)}</th>' for i in kept)
    rows = []
    for row in table(views):
        cells = [row.cells[i] for i in kept]
        shown = "".join(f"<td>{f'<b>{escape(c.text)}</b>' if c.best else escape(c.text)}</td>" for c in cells)
        rows.append(f"<tr><th>{escape(row.label)}</th>{shown}</tr>")
    unequal = differing(views)
    sentences = notes(views, missing)
    sentences += [f"What differs between the methods: {'; '.join(unequal)}."] if unequal else []
    return (
        f"<p>{escape(answer(views))}</p>"
        f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        + "".join(f"<p><small>{escape(one.replace('`', ''))}</small></p>" for one in sentences)
    )
