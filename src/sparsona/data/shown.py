"""What a prompt and a notebook show of a federation: how much there is of what, and none of the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from sparsona.core.printable import printable
from sparsona.core.rows import html_table
from sparsona.data.client_index import PARTS

if TYPE_CHECKING:
    from sparsona.data.federation import Federation

NAMES_SHOWN = 3
LONGEST = 40  # of a name: what people call their data may be a path


def in_a_line(federation: Federation) -> str:
    """The federation for a prompt.

    Args:
        federation: any.

    Returns:
        Its name, its clients, examples, the shape of an input, and its classes, in one line.
    """
    return printable(
        f"Federation('{_short(federation.name)}', {_count(federation.num_clients, 'client')}, "
        f"{_count(_examples(federation), 'example')}, {_inputs(federation)}, {_outputs(federation)})"
    )


def as_html(federation: Federation) -> str:
    """The federation for a notebook.

    Args:
        federation: any.

    Returns:
        A fragment without scripts: a line, and a table of what clients have at least, in the middle and at most.
    """
    head = f"{federation.name}: {_count(federation.num_clients, 'client')}{_names(federation.client_names)}, "
    head += f"{_count(_examples(federation), 'example')}, {_inputs(federation)}, {_outputs(federation)}"
    head += f"{_names(federation.class_names)}; test examples: {federation.tested_on}"
    rows = dict(zip((f"{part} examples" for part in PARTS), federation.sizes().numpy().T, strict=True))
    is_known = federation.has_examples or federation.train_counts is not None
    if is_known and (counts := federation.label_counts("train")) is not None:
        rows["classes in training"] = (counts > 0).sum(1).numpy()
    found = []
    for title, values in rows.items():
        figures = {"least": values.min(), "median": np.median(values), "most": values.max()}
        found.append({"by client": title} | {name: f"{one:,.10g}" for name, one in figures.items()})
    return html_table(found, head)


def _examples(federation: Federation) -> int:
    return int(federation.sizes().sum())


def _inputs(federation: Federation) -> str:
    if federation.packing is not None:
        return f"inputs {federation.packing.describe()}"
    return f"{'tokens' if federation.has_tokens else 'inputs'} {federation.input_shape}"


def _outputs(federation: Federation) -> str:
    if federation.is_regression:
        return _count(federation.num_classes, "number") + " to predict"
    if federation.predicts_tokens:
        return f"next of {_count(federation.num_classes, 'token')}"
    if federation.task == "multilabel":
        return _count(federation.num_classes, "label")
    return f"{federation.num_labels:,} class{'es' * (federation.num_labels != 1)}"


def _names(names: Sequence[str] | None) -> str:
    if not names:
        return ""
    more = ", …" * (len(names) > NAMES_SHOWN)
    return f" ({', '.join(_short(name) for name in names[:NAMES_SHOWN])}{more})"


def _short(name: str) -> str:
    line = " ".join(name.split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"


def _count(number: int, unit: str) -> str:
    return f"{number:,} {unit}{'s' * (number != 1)}"
