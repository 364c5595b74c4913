"""Blocks of a run's summary beyond its headline: what led to it, and what became of whom."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsona.analysis.statistics import accuracy_summary
from sparsona.runs.store import RunFolder


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


def pipeline(folder: RunFolder, completed: int) -> dict[str, Any]:
    """The steps that led to the models: where they began, how long they were trained and tuned, and what each gave."""
    steps = ("start", "received", "tuned")
    return {
        "warm_start": folder.about.get("warm_start"),
        "rounds": completed,
        "tune_epochs": folder.config["tune_epochs"],
        "accuracy": {point: mean for point in steps if (mean := mean_at(folder, completed, point)) is not None},
    }
