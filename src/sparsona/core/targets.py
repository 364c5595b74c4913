"""What is predicted for an example, and by which loss and metrics it may be judged. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable

# What a user says the task is: "auto" is decided by the targets. What is predicted then.
TASKS = {"classification": "classes", "binary": "binary", "multilabel": "labels", "regression": "numbers"}
# The losses of each; the first is the default.
LOSSES = {
    "classes": ("cross-entropy",),
    "tokens": ("cross-entropy",),
    "binary": ("bce",),
    "labels": ("bce",),
    "numbers": ("squared-error", "absolute-error", "huber"),
}
ALL_LOSSES = tuple(dict.fromkeys(name for names in LOSSES.values() for name in names))
# The metrics of each.
METRICS = {
    "classes": ("accuracy", "balanced-accuracy", "f1", "auc"),
    "tokens": ("accuracy",),
    "binary": ("accuracy", "balanced-accuracy", "f1", "auc"),
    "labels": ("accuracy", "f1", "auc"),
    "numbers": ("rmse", "mae", "r2"),
}
ALL_METRICS = tuple(dict.fromkeys(name for names in METRICS.values() for name in names))
# Metrics of a run that names none.
USUAL_METRICS = {"numbers": ("rmse", "mae", "r2")}
LOW_IS_BETTER = frozenset(("rmse", "mae"))
TITLES = {"auc": "AUC", "f1": "F1", "balanced-accuracy": "balanced", "mae": "MAE", "rmse": "RMSE", "r2": "R²"}
GIVEN = "given"  # in a config: it came from Python; of a function, its name follows after a colon


def task_of(targets: str) -> str:
    """The option `task` with which what is predicted so is read: "auto" where no other would do."""
    return next((task for task, found in TASKS.items() if found == targets), "auto")


def given_name(text: str) -> str | None:
    """The name of a function from Python, of an option that it was given for; None: the option has a name."""
    kind, _, name = text.partition(":")
    return name if kind == GIVEN else None


def better(metric: str) -> str:
    """Which end of a metric is the good one: "high", "low", or "neither" of a function from Python."""
    return "low" if metric in LOW_IS_BETTER else "high" if metric in ALL_METRICS else "neither"


def headline_metric(metrics: Iterable[str]) -> str | None:
    """What a regression is judged by: the first of its metrics that has a good end. None: by its loss."""
    return next((name for name in metrics if better(name) != "neither"), None)


LARGEST = 1e300  # of a loss or a metric: sums over clients are finite


def is_usable(value: float) -> bool:
    """Whether a value can be a model's loss or metric: with another, a mean over clients is no number."""
    return abs(value) <= LARGEST
