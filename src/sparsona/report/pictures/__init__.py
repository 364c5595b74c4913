"""Pictures of analyses, in files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparsona.analysis.bounds import Bounds
from sparsona.analysis.changes import ClientBands, ClientChanges
from sparsona.analysis.charts import LineChart, targets_chart
from sparsona.analysis.clients import ClientEffects
from sparsona.analysis.gates import Gates
from sparsona.analysis.partition import Partition
from sparsona.analysis.similarity import Similarity
from sparsona.analysis.targets import Targets
from sparsona.core.errors import SparsonaError
from sparsona.report.pictures.bounds import draw_bounds
from sparsona.report.pictures.changes import draw_bands, draw_changes
from sparsona.report.pictures.charts import draw_chart
from sparsona.report.pictures.clients import draw_clients
from sparsona.report.pictures.figure import Picture
from sparsona.report.pictures.gates import draw_gates
from sparsona.report.pictures.partition import draw_partition
from sparsona.report.pictures.similarity import draw_similarity

Analysis = Bounds | ClientBands | ClientChanges | ClientEffects | Gates | LineChart | Partition | Similarity | Targets


def draw(found: Analysis) -> Picture:
    """The picture of an analysis."""
    if isinstance(found, Targets):
        chart = targets_chart(found)
        if chart is None:
            raise SparsonaError(
                "no method reached a target in all of its seeds" if found.targets else "no target to draw rounds of",
                expected="an accuracy in percent that a method reached",
                hint="--at 70,75,80; a share of the final accuracy is in the table alone",
            )
        return draw_chart(chart)
    for kind, drawn in _DRAWN.items():
        if isinstance(found, kind):
            return drawn(found)
    raise TypeError(f"there is no picture of {type(found).__name__}")


_DRAWN: dict[type, Callable[[Any], Picture]] = {
    Bounds: draw_bounds,
    ClientBands: draw_bands,
    ClientChanges: draw_changes,
    ClientEffects: draw_clients,
    Gates: draw_gates,
    LineChart: draw_chart,
    Partition: draw_partition,
    Similarity: draw_similarity,
}


def save_picture(found: Analysis, path: str | os.PathLike[str]) -> Path:
    """Draw an analysis into a file; needs the extra `report`.

    Args:
        found: what a method of a run or a comparison returned: `bounds()`, `clients()`, `gates()`, `similarity()`,
            `figure()` or `rounds_to()`.
        path: a file that ends in .svg (light or dark as its reader's system is) or .png.

    Returns:
        The path.

    Example:
        >>> import sparsona as sp
        >>> run = sp.train("fedspa", clients=4, rounds=1, points=["global"])
        >>> save_picture(run.clients(), "clients.svg").name
        'clients.svg'
    """
    return draw(found).save(path)
