"""What a report needs to know of a run, and which runs are seeds of the same experiment."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from sparsona.analysis.clients import Devices
    from sparsona.analysis.similarity import Similarity

# Settings that say where a run was made and what was looked at, not what was tried. (Seeds are the other exception.)
CIRCUMSTANCES = frozenset(
    {"out", "executor", "workers", "threads", "name", "run", "path", "eval_every", "points", "record_traits"}
)


@dataclass(frozen=True, eq=False)
class RunView:
    """One finished (or unfinished) run, as plain data; accuracies are fractions from 0 to 1 everywhere.

    `curves` maps an evaluation point to (completed rounds, mean accuracy); `correct` and `count` are per client at the
    headline point; `confusion` is summed over clients, rows are the true classes; `label_counts` counts the training
    data by client (row i is client i of `count`) and class, and is None where labels are tokens; `cumulative_bytes` is
    (completed rounds, bytes sent so far in both directions); `sizes` has each client's number of training, validation
    and test examples. `devices`, `similarity` and `distances` are there where the run looked at them; the last is
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
    devices: Devices | None = None
    similarity: Similarity | None = None
    distances: Sequence[tuple[int, float, float]] = ()


