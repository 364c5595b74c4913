"""Blocks of a run's summary beyond its headline: novel clients, the guard, classes, and the steps of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from sparsona.analysis.statistics import accuracy_summary
from sparsona.core.points import (
    CONSENSUS,
    FEW,
    GLOBAL,
    GUARDED,
    NOVEL,
    NOVEL_TUNED,
    PERSONAL,
    RECEIVED,
    SHARED,
    START,
    TUNED,
    headline,
    on,
)
from sparsona.engine.guard import Seen, keeps_shared
from sparsona.runs.facts import MEANS
from sparsona.runs.folder import RunFolder
from sparsona.runs.observers import ClassCounts, class_counts
from sparsona.runs.records import ClassesRow, EvaluationRow

ERRORS = ("mse", "weighted", "worst")  # what `errors` returns


def errors(folder: RunFolder, completed: int, point: str) -> dict[str, Any] | None:
    """Mean losses of a regression's clients at one point: over clients (also as `mse`, where it is the squared error),
    over examples, and the worst client's."""
    rows = folder.records.evaluations(completed, point)
    if not rows:
        return None
    loss, count = np.array([(row.loss, row.count) for row in rows], dtype=np.float64).T
    is_squared = folder.facts.loss in ("", "squared-error")  # "": an older version, which had no other
    return {
        **({"mse": float(loss.mean())} if is_squared else {}),
        "loss": float(loss.mean()),
        "weighted": float((loss * count).sum() / count.sum()),
        "worst": float(loss.max()),
    }


def mean_at(folder: RunFolder, completed: int, point: str, weight: str = "clients") -> float | None:
    """Mean accuracy (of a regression: loss) over clients, or None if no client was evaluated there."""
    rows = folder.records.evaluations(completed, point)
    if rows and folder.facts.is_regression:
        return (errors(folder, completed, point) or {})["loss"]
    return accuracy_summary(*arrays(rows))[MEANS[weight]] if rows else None


def arrays(rows: list[EvaluationRow]) -> tuple[np.ndarray, np.ndarray]:
    """Right predictions and examples, a row each."""
    return np.array([row.correct or 0 for row in rows]), np.array([row.count for row in rows])


def novel(folder: RunFolder, completed: int, point: str) -> dict[str, Any]:
    """Results of the clients that took no part, and how far behind the others they are: the generalization gap."""
    headline, met, tuned = (mean_at(folder, completed, at, folder.facts.weight) for at in (point, NOVEL, NOVEL_TUNED))
    sign = -1 if folder.facts.is_regression else 1  # a gap above 0 says that the novel ones are worse off
    best = met if tuned is None else tuned
    return {
        "clients": [row.client for row in folder.records.evaluations(completed, NOVEL)],
        "met": met,
        "tuned": tuned,
        "participants": headline,
        "gap": None if best is None or headline is None else sign * (headline - best),
    }


def guard(folder: RunFolder, completed: int) -> dict[str, Any]:
    """What letting clients keep the shared model did: to how many, to the mean, and to those that were hurt.

    A client is hurt whose model does worse on its test data than the shared one.
    """
    common = GLOBAL if folder.records.evaluations(completed, GLOBAL) else CONSENSUS
    shared = START if folder.config["warm_start"] else common
    personal = headline(folder.config["tune_epochs"])
    own, other, kept = (_figures(folder, completed, point) for point in (personal, shared, GUARDED))
    counts = {row.client: row.count for row in folder.records.evaluations(completed, GUARDED)}
    sign = -1 if folder.facts.is_regression else 1
    chose = _choices(folder, completed)
    weights = [counts[client] for client in chose] if folder.facts.weight == "examples" else None
    return {
        "clients": len(chose),
        "kept_shared": sum(chose.values()),
        "shared": shared,
        "error" if folder.facts.is_regression else "accuracy": {
            name: float(np.average([found[client] for client in chose], weights=weights))
            for name, found in ((PERSONAL, own), (SHARED, other), (GUARDED, kept))
        },
        "hurt": {
            name: sum(sign * found[client] < sign * other[client] for client in chose)
            for name, found in ((PERSONAL, own), (GUARDED, kept))
        },
    }


def _choices(folder: RunFolder, completed: int) -> dict[int, bool]:
    """Whether each client keeps the shared model."""
    seen: list[dict[int, Seen]] = []
    for point in (PERSONAL, SHARED):
        rows = folder.records.evaluations(completed, on(point, "validation"))
        seen.append({row.client: Seen(row.correct, row.count, row.loss) for row in rows})
    own, other = seen
    return {client: keeps_shared(own[client], other[client]) for client in own if client in other}


def _figures(folder: RunFolder, completed: int, point: str) -> dict[int, float]:
    """Each client's accuracy, or its squared error in a regression."""
    rows = folder.records.evaluations(completed, point)
    return {row.client: row.loss if row.correct is None else row.correct / row.count for row in rows}


def keeps_the_shared_model(folder: RunFolder, client: int) -> bool:
    """Whether a client of a guarded run keeps the shared model."""
    return _choices(folder, folder.last_round).get(client, False)


def classes(folder: RunFolder, completed: int, point: str) -> dict[str, Any] | None:
    """Accuracy on the classes that a client has among its training data, and on those that it has not.

    For each: the mean over clients that have such test examples (None: no client has), with every test example counting
    the same, how many clients and examples there are, and their share of all test examples. None where predictions were
    not counted by class.
    """
    found = _class_counts(folder, completed, point)
    if not found:
        return None
    seen = [(one.seen_correct, one.seen_count) for one in found if one.seen_count]
    unseen = [(one.unseen_correct, one.unseen_count) for one in found if one.unseen_count]
    num = sum(count for _, count in seen + unseen)
    return {"seen": _by_class(seen, num), "unseen": _by_class(unseen, num)}


def capacities(config: Mapping[str, Any], correct: np.ndarray, count: np.ndarray) -> dict[float, dict[str, Any]]:
    """Clients by capacity, ascending: how many were tested, and their mean accuracy; empty where all have the same."""
    given: Any = config.get("capacities") or (1.0,)
    own = np.array([given[client % len(given)] for client in range(len(count))])
    if len(set(given)) == 1:
        return {}
    found = {}
    for capacity in sorted(set(own[count > 0].tolist())):
        which = (own == capacity) & (count > 0)
        found[capacity] = {"clients": int(which.sum()), "mean": float((correct[which] / count[which]).mean())}
    return found


def _class_counts(folder: RunFolder, completed: int, point: str) -> Sequence[ClassCounts | ClassesRow]:
    """Each client's counts, from its matrix where one was kept."""
    label_counts = folder.facts.label_counts
    if label_counts is None:
        return []
    matrices = folder.records.confusions(completed, point)
    return [
        class_counts(np.diag(matrix), matrix.sum(axis=1), label_counts[client] != 0)
        for client, matrix in matrices.items()
        if (matrix != FEW).all()
    ] or folder.records.classes(completed, point)


def _by_class(found: list[tuple[int, int]], of: int) -> dict[str, Any]:
    if not found:
        return {"mean": None, "weighted": None, "clients": 0, "examples": 0, "share": 0.0}
    right, count = np.array(found).T
    mean, num = float(np.mean(right / count)), int(count.sum())
    return {
        "mean": mean,
        "weighted": int(right.sum()) / num,
        "clients": len(found),
        "examples": num,
        "share": num / of,
    }


def pipeline(folder: RunFolder, completed: int) -> dict[str, Any]:
    """The steps that led to the models: where they began, how long they were trained and tuned, and what each gave."""
    steps, start = (START, RECEIVED, TUNED), folder.facts.warm_start
    key = "error" if folder.facts.is_regression else "accuracy"
    at = {point: rows for point in steps if (rows := folder.records.evaluations(completed, point))}
    return {
        "warm_start": None if start is None else asdict(start),
        "rounds": completed,
        "tune_epochs": folder.config["tune_epochs"],
        key: {point: mean_at(folder, completed, point) for point in at},
        "weighted": {point: _weighted(rows) for point, rows in at.items()},
    }


def _weighted(rows: list[EvaluationRow]) -> float:
    """Accuracy (of a regression: squared error) with every test example counting the same."""
    return sum(row.loss * row.count if row.correct is None else row.correct for row in rows) / sum(
        row.count for row in rows
    )
