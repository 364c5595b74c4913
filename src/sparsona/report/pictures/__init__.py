"""Pictures of one run or of one partition, in files."""

from __future__ import annotations

import os
from pathlib import Path

from sparsona.analysis.clients import ClientEffects
from sparsona.analysis.gates import Gates
from sparsona.analysis.partition import Partition
from sparsona.analysis.similarity import Similarity
from sparsona.report.pictures.clients import draw_clients
from sparsona.report.pictures.figure import Picture
from sparsona.report.pictures.gates import draw_gates
from sparsona.report.pictures.partition import draw_partition
from sparsona.report.pictures.similarity import draw_similarity


def draw(found: ClientEffects | Gates | Partition | Similarity) -> Picture:
    """The picture of an analysis."""
    if isinstance(found, ClientEffects):
        return draw_clients(found)
    if isinstance(found, Gates):
        return draw_gates(found)
    return draw_partition(found) if isinstance(found, Partition) else draw_similarity(found)


def save_picture(found: ClientEffects | Gates | Partition | Similarity, path: str | os.PathLike[str]) -> Path:
    """Draw an analysis into a file; needs the extra `report`.

    Args:
        found: what `Run.clients()`, `Run.similarity()` or `Run.gates()` returned.
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
