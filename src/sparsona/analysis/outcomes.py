"""Blocks of a run's summary beyond its headline: what led to it, and what became of whom."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsona.analysis.statistics import accuracy_summary
from sparsona.core.guard import Seen, keeps_shared
from sparsona.runs.store import RunFolder, unpack_confusion


def evaluated(folder: RunFolder, completed: int, point: str) -> list[tuple[Any, ...]]:
    """Client, right predictions and examples at one point, in the order of clients."""
    return folder.select(
        "SELECT client, correct, count FROM evaluations WHERE completed = ? AND point = ? ORDER BY client",
        (completed, point),
    )


def mean_at(folder: RunFolder, completed: int, point: str) -> float | None:
    """Mean accuracy over clients, or None if nobody was evaluated there."""
    rows = evaluated(folder, completed, point)
    return accuracy_summary(*arrays(rows))["mean"] if rows else None


def arrays(rows: list[tuple[Any, ...]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([row[1] for row in rows]), np.array([row[2] for row in rows])


def novel(folder: RunFolder, completed: int, headline: float) -> dict[str, Any]:
    """How the clients that took no part were served, and how far behind the others they are: the generalization gap."""
    met, tuned = (mean_at(folder, completed, point) for point in ("novel", "novel_tuned"))
    best = met if tuned is None else tuned
    return {
        "clients": [row[0] for row in evaluated(folder, completed, "novel")],
        "met": met,
        "tuned": tuned,
        "participants": headline,
        "gap": None if best is None else headline - best,
    }


def guard(folder: RunFolder, completed: int) -> dict[str, Any]:
    """What letting clients keep the shared model did: to how many, to the mean, and to those that were hurt.

    A client is hurt whose model does worse on its test data than the shared one.
    """
    common = "global" if evaluated(folder, completed, "global") else "consensus"
    shared = "start" if folder.config["warm_start"] else common
    personal = "tuned" if folder.config["tune_epochs"] else "received"
    own, other, kept = (_accuracies(folder, completed, point) for point in (personal, shared, "guarded"))
    chose = _choices(folder, completed)
    return {
        "clients": len(chose),
        "kept_shared": sum(chose.values()),
        "shared": shared,
        "accuracy": {
            name: float(np.mean([found[client] for client in chose]))
            for name, found in (("personal", own), ("shared", other), ("guarded", kept))
        },
        "hurt": {
            name: sum(found[client] < other[client] for client in chose)
            for name, found in (("personal", own), ("guarded", kept))
        },
    }


def _choices(folder: RunFolder, completed: int) -> dict[int, bool]:
    """Whether each client keeps the shared model."""
    seen: list[dict[int, Seen]] = []
    for point in ("personal/validation", "shared/validation"):
        query = "SELECT client, correct, count, loss FROM evaluations WHERE completed = ? AND point = ? ORDER BY client"
        seen.append({row[0]: Seen(*row[1:]) for row in folder.select(query, (completed, point))})
    own, other = seen
    return {client: keeps_shared(own[client], other[client]) for client in own}


def _accuracies(folder: RunFolder, completed: int, point: str) -> dict[int, float]:
    return {client: correct / count for client, correct, count in evaluated(folder, completed, point)}


def keeps_the_shared_model(folder: RunFolder, client: int) -> bool:
    """What a client of a guarded run decided."""
    return _choices(folder, folder.config["rounds"]).get(client, False)


def classes(folder: RunFolder, completed: int, point: str) -> dict[str, Any] | None:
    """Accuracy on the classes that a client has among its training data, and on those that it has not.

    For each: the mean over clients that have such test examples (None: nobody has), with every test example counting
    the same, and how many clients and examples there are. None where predictions were not counted by class.
    """
    label_counts = folder.about["label_counts"]
    rows = folder.select(
        "SELECT client, confusion FROM evaluations WHERE completed = ? AND point = ? AND confusion IS NOT NULL",
        (completed, point),
    )
    if label_counts is None or not rows:
        return None
    right: dict[str, list[int]] = {"seen": [], "unseen": []}
    count: dict[str, list[int]] = {"seen": [], "unseen": []}
    for client, blob in rows:
        matrix = unpack_confusion(blob)
        assert matrix is not None
        has = np.array(label_counts[client]) > 0
        for name, which in (("seen", has), ("unseen", ~has)):
            if num := int(matrix[which].sum()):
                right[name].append(int(np.diag(matrix)[which].sum()))
                count[name].append(num)
    return {name: _by_class(right[name], count[name]) for name in right}


def _by_class(right: list[int], count: list[int]) -> dict[str, Any]:
    if not count:
        return {"mean": None, "weighted": None, "clients": 0, "examples": 0}
    mean = float(np.mean(np.array(right) / np.array(count)))
    return {"mean": mean, "weighted": sum(right) / sum(count), "clients": len(count), "examples": sum(count)}


def pipeline(folder: RunFolder, completed: int) -> dict[str, Any]:
    """The steps that led to the models: where they began, how long they were trained and tuned, and what each gave."""
    steps = ("start", "received", "tuned")
    return {
        "warm_start": folder.about.get("warm_start"),
        "rounds": completed,
        "tune_epochs": folder.config["tune_epochs"],
        "accuracy": {point: mean for point in steps if (mean := mean_at(folder, completed, point)) is not None},
    }
