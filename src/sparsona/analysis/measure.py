"""The figure that a run is judged by: accuracy, or in a regression the first of its metrics. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sparsona.analysis.format import signed
from sparsona.core.errors import SparsonaError
from sparsona.core.targets import TITLES, better, headline_metric
from sparsona.runs.facts import MEANS
from sparsona.runs.folder import RunFolder

if TYPE_CHECKING:
    from sparsona.analysis.view import RunView

PERCENT = frozenset(("accuracy", "balanced-accuracy", "f1"))
BY_EXAMPLES = "weighted by their test examples"


@dataclass(frozen=True)
class Measure:
    """How a figure of clients is read and printed.

    Args:
        name: "accuracy", the name of a metric, or "loss".
        title: for tables and axes.
        better: which end is the good one.
        unit: "%" where values from 0 to 1 are printed as percentages.
        weight: how clients count in a mean over them, all the same or by their test examples.
    """

    name: str
    title: str
    better: Literal["high", "low", "neither"]
    unit: str = ""
    weight: Literal["clients", "examples"] = "clients"

    @property
    def key(self) -> str:
        """What a mean of it over clients is called in data."""
        return self.name if self.weight == "clients" else f"{self.name}_weighted"

    @property
    def mean_name(self) -> str:
        """What a mean of it over clients is called in a sentence or a table."""
        return self.title if self.weight == "clients" else f"weighted {self.title}"

    @property
    def over(self) -> str:
        """What a mean of it is over."""
        return "clients" if self.weight == "clients" else f"clients {BY_EXAMPLES}"

    @property
    def mean_title(self) -> str:
        """For an axis: a mean of it."""
        return f"{self.mean_name}, mean over clients"

    @property
    def scale(self) -> int:
        """The factor from a value to what is printed."""
        return 100 if self.unit else 1

    @property
    def sign(self) -> int:
        """1 if more is better, -1 if less is."""
        return -1 if self.better == "low" else 1

    def show(self, value: float) -> str:
        """A value without its unit."""
        return f"{100 * value:.2f}" if self.unit else f"{value:.4g}"

    def brief(self, value: float) -> str:
        """A value for a sentence, with its unit."""
        return f"{value:.1%}" if self.unit else f"{value:.4g}"

    def gain(self, before: Any, after: Any) -> Any:
        """What is gained by a change of the value, above 0 where it is for the better, in `gain_unit`."""
        return self.sign * self.scale * (after - before)

    @property
    def gain_unit(self) -> str:
        """What gains are counted in."""
        return "percentage points" if self.unit else self.title

    @property
    def gain_title(self) -> str:
        """For an axis: what gains are, and which are for the better."""
        return f"percentage points of {self.title}" if self.unit else f"{self.title}, above 0 for the better"

    def show_gain(self, value: float, decimals: int = 2) -> str:
        """A gain or a difference, with its sign; `decimals` are those of percentage points."""
        return signed(value, decimals) if self.unit else f"{value:+.4g}".replace("-", "−")


ACCURACY = Measure("accuracy", "accuracy", "high", "%")
WEIGHTED = replace(ACCURACY, weight="examples")
LOSS = Measure("loss", "loss", "low")


def measure_of_metric(name: str) -> Measure:
    """How a metric is read and printed."""
    direction = better(name)
    known: Literal["high", "low", "neither"] = (
        "high" if direction == "high" else "low" if direction == "low" else "neither"
    )
    return Measure(name, TITLES.get(name, name), known, "%" if name in PERCENT else "")


def measure_called(name: str) -> Measure:
    """The measure of this name: "accuracy", "loss" or a metric."""
    return LOSS if name == "loss" else ACCURACY if name == "accuracy" else measure_of_metric(name)


def measure_of(folder: RunFolder) -> Measure:
    """The measure of a run: accuracy, or a regression's first metric that has a good end, or its loss where there is
    none."""
    facts = folder.facts
    if not facts.is_regression:
        return WEIGHTED if facts.weight == "examples" else ACCURACY
    recorded = {row.name for row in folder.records.metrics(folder.records.last_evaluated())}
    if (name := headline_metric(name for name in facts.metrics if name in recorded)) is not None:
        return measure_of_metric(name)
    loss = (facts.loss or "squared-error").removeprefix("given:")
    return Measure("loss", loss.replace("-", " "), "low")


def check_one_measure(views: Sequence[RunView], what: str, hint: str) -> None:
    """Raise SparsonaError where runs are judged by different figures."""
    if len(judged := {view.measure: view.name for view in views}) > 1:
        raise SparsonaError(
            f"{what} of runs that are judged by different figures: "
            + ", ".join(f"{name} by {measure.mean_title}" for measure, name in judged.items()),
            expected="runs of one task and one headline_weight, and in a regression with the same first metric",
            hint=hint,
        )


def headline_score(measure: Measure, summary: Mapping[str, Any]) -> float | None:
    """The mean over clients of what a run is judged by, of its summary; None where it is not known."""
    key = {"accuracy": "accuracy", "loss": "error"}.get(measure.name, "metrics")
    found: Any = summary.get(key, {})
    if key == "metrics":
        found = found.get(measure.name, {}).get("mean")
    else:
        found = found.get(MEANS[measure.weight] if key == "accuracy" else "loss", found.get("mse"))
    return None if found is None else float(found)


def metric_values(folder: RunFolder, completed: int, point: str) -> dict[str, np.ndarray]:
    """Each client's value of each metric, in the order of the run's metrics; NaN where it is undefined or not known.

    Empty where an older version made the run.
    """
    rows, num = folder.records.metrics(completed, point), len(folder.facts.sizes)
    found = {name: np.full(num, np.nan) for name in (*folder.facts.metrics, *(row.name for row in rows))}
    for row in rows:
        found[row.name][row.client] = row.value
    return found


def client_scores(folder: RunFolder, measure: Measure, completed: int, point: str) -> np.ndarray:
    """Each client's value of a measure; NaN where it was not tested, or the measure is undefined."""
    found = np.full(len(folder.facts.sizes), np.nan)
    if measure.name not in ("accuracy", "loss"):
        return metric_values(folder, completed, point).get(measure.name, found)
    for row in folder.records.evaluations(completed, point):
        if measure.name == "loss":
            found[row.client] = row.loss
        elif row.count:
            found[row.client] = (row.correct or 0) / row.count
    return found


def measure_curve(folder: RunFolder, measure: Measure, point: str) -> list[tuple[int, float]]:
    """The mean of a measure over clients against completed rounds."""
    records = folder.records
    if measure.name == "accuracy":
        found = records.accuracy_curve(point) if measure.weight == "clients" else records.weighted_curve(point)
    elif measure.name == "loss":
        found = records.loss_curve(point)
    else:
        found = records.metric_curve(measure.name, point)
    return [(one.completed, one.mean) for one in found]


def summarize_metrics(folder: RunFolder, completed: int, point: str) -> dict[str, dict[str, float | int | str | None]]:
    """Metrics at a point: the mean over the clients that they are defined for, how many those are, and the worst."""
    tested = len(folder.records.evaluations(completed, point))
    found: dict[str, dict[str, float | int | str | None]] = {}
    for name, values in metric_values(folder, completed, point).items():
        known, measure = values[~np.isnan(values)], measure_of_metric(name)
        mean = float(known.mean()) if len(known) else None
        found[name] = {"mean": mean, "clients": len(known), "tested": tested, "better": measure.better}
        if measure.better != "neither" and len(known):
            found[name]["worst"] = float(known.min() if measure.better == "high" else known.max())
    return found
