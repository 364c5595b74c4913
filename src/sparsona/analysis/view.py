"""What a table or a report needs to know of a run, read from its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsona.analysis.clients import ClientEffects, client_effects, has_effects
from sparsona.analysis.similarity import Similarity, recorded_distances, recorded_similarity
from sparsona.analysis.summary import curve, headline, points, summarize
from sparsona.core.points import point as evaluation_point
from sparsona.runs.store import RunFolder, unpack_confusion


@dataclass(frozen=True, eq=False)
class RunView:
    """One finished (or unfinished) run, as plain data; accuracies are fractions from 0 to 1 everywhere.

    `curves` maps an evaluation point to (completed rounds, mean accuracy); `correct` and `count` are per client at the
    headline point; `confusion` is summed over clients, rows are the true classes; `label_counts` counts the training
    data by client (row i is client i of `count`) and class, and is None where labels are tokens; `cumulative_bytes` is
    (completed rounds, bytes sent so far in both directions); `sizes` has each client's number of training, validation
    and test examples. `effects`, `similarity` and `distances` are there where the run recorded them; the last is
    (completed rounds, mean distance between clients' traits, mean distance of each to its own start).
    """

    name: str
    path: str
    method: str
    title: str
    seed: int
    protocol: str
    point: str
    config: dict[str, object]
    environment: dict[str, object]
    summary: dict[str, Any]
    curves: dict[str, list[tuple[int, float]]]
    train_loss: list[tuple[int, float]]
    correct: np.ndarray
    count: np.ndarray
    confusion: np.ndarray | None
    label_counts: np.ndarray | None
    sizes: np.ndarray
    cumulative_bytes: list[tuple[int, int]]
    effects: ClientEffects | None = None
    similarity: Similarity | None = None
    distances: Sequence[tuple[int, float, float]] = ()


def read_view(folder: RunFolder) -> RunView:
    """Everything a table or a report needs of a run."""
    about, config = folder.about, folder.config
    point, completed, correct, count = headline(folder)
    matrices = [
        unpack_confusion(row[0])
        for row in folder.select(
            "SELECT confusion FROM evaluations WHERE completed = ? AND point = ? AND confusion IS NOT NULL",
            (completed, point),
        )
    ]
    sent = "bytes_down" if about.get("peers") else "bytes_up + bytes_down"
    rounds = folder.select(f"SELECT round + 1, loss, {sent} FROM rounds ORDER BY round")
    summary = folder.summary
    if summary is None:
        seconds = folder.select("SELECT SUM(seconds) FROM rounds")[0][0]
        summary = summarize(folder, seconds or 0.0)
    return RunView(
        name=folder.path.name,
        path=str(folder.path),
        method=about["method"],
        title=about["title"],
        seed=config["seed"],
        protocol=summary["protocol"],
        point=point,
        config=config,
        environment=folder.environment,
        summary=summary,
        curves={name: curve(folder, name) for name in points(folder) if evaluation_point(name).data == "test"},
        # Final tuning is written down as one round more, and is none.
        train_loss=[(number, loss) for number, loss, _ in rounds if loss is not None and number <= config["rounds"]],
        correct=correct,
        count=count,
        confusion=np.sum([m for m in matrices if m is not None], axis=0) if matrices else None,
        sizes=np.array(about["sizes"]),
        label_counts=None if about["label_counts"] is None else np.array(about["label_counts"]),
        cumulative_bytes=list(
            zip((row[0] for row in rounds), np.cumsum([row[2] for row in rounds]).tolist(), strict=True)
        ),
        effects=client_effects(folder) if has_effects(folder) else None,
        similarity=recorded_similarity(folder),
        distances=recorded_distances(folder),
    )
