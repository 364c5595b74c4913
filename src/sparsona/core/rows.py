"""Rows of texts, as a prompt and a notebook show them. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from sparsona.core.printable import printable

NUMERIC = frozenset("0123456789+-−–—>")  # what a figure begins with


def is_numeric(cells: Sequence[object]) -> bool:
    """Whether a column has figures alone, which are set to the right."""
    return all(str(cell)[:1] in NUMERIC for cell in cells)


def text_table(rows: Sequence[Mapping[str, object]], most: int = 20) -> str:
    """Rows in aligned columns.

    Args:
        rows: with the same keys, which are the titles of the columns.
        most: rows that are shown; of more, their number is shown.

    Returns:
        Lines without a line break at the end; "" without rows.

    Example:
        >>> print(text_table([{"method": "FedAvg", "steps": "1,980"}, {"method": "Ditto", "steps": "990"}]))
        method  steps
        FedAvg  1,980
        Ditto     990
    """
    columns = []
    for title in rows[0] if rows else ():
        cells = [printable(row[title], kept="") for row in rows[:most]]
        width = max(map(len, (title, *cells)))
        put = str.rjust if is_numeric(cells) else str.ljust
        columns.append([put(cell, width) for cell in (title, *cells)])
    lines = ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
    return "\n".join(lines + [f"... and {len(rows) - most} more"] * (len(rows) > most))


def html_table(rows: Sequence[Mapping[str, object]], head: str = "", most: int = 20) -> str:
    """The same as HTML, in which the first cell of a row is its name.

    Args:
        rows: likewise.
        head: a line above the table.
        most: likewise.

    Returns:
        A fragment without scripts, in the notebook's own style; texts of others are escaped.

    Example:
        >>> html_table([{"of": "<all>", "n": 3}]).partition("<tbody>")[2]
        '<tr><th>&lt;all&gt;</th><td>3</td></tr></tbody></table>'
    """

    def shown(text: object) -> str:
        return escape(printable(text, kept=""))

    titles = "".join(f"<th>{shown(title)}</th>" for title in (rows[0] if rows else ()))
    body = ""
    for row in rows[:most]:
        first, *others = (shown(value) for value in row.values())
        body += f"<tr><th>{first}</th>{''.join(f'<td>{one}</td>' for one in others)}</tr>"
    more = f"<p>... and {len(rows) - most} more</p>" * (len(rows) > most)
    above = f"<p>{shown(head)}</p>" if head else ""
    return f"{above}<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>{more}"
