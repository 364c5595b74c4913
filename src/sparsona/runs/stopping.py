"""When a run stops before its last round, at a point from which it can be resumed. Free of torch.

A criterion is an option of `Stopping` and what is measured against it in `MEASURES`. A resumed run counts anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Protocol

from pydantic import AfterValidator, BaseModel, ConfigDict

from sparsona.core import points
from sparsona.core.errors import SparsonaError
from sparsona.core.targets import better, is_usable
from sparsona.runs.declaration import option

if TYPE_CHECKING:
    from sparsona.runs.facts import RunFacts
    from sparsona.runs.records import Records

LOSS, ACCURACY = "loss", "accuracy"  # what patience may go by besides the metrics of a run
_ENDS = ("high", "low")


@dataclass(frozen=True)
class Spent:
    """What a run has used since it was started or resumed."""

    seconds: float = 0.0
    bytes: int = 0  # as encoded, both ways
    steps: int = 0  # of all clients together
    flops: int = 0  # of training and mask search


def check_metric(text: str | None) -> str | None:
    """Check how the metric of patience is written: a name, and of a function from Python which end is the good one."""
    if text is None:
        return None
    name, colon, end = text.partition(":")
    known = _known_end(name)
    if not name.strip() or (colon and end not in _ENDS) or (colon and known not in (end, "neither")):
        good = "" if known == "neither" else f": of {name} that is {known}"
        raise ValueError(text) from SparsonaError(
            f"patience_metric '{text}'",
            expected=f"the name of a metric; after a colon, high or low: which end is the good one{good}",
            hint="for example --set patience_metric=f1, or gain:high of a function from Python",
        )
    return text


def _known_end(name: str) -> str:
    return "low" if name == LOSS else better(name)


class Stopping(BaseModel):
    """Limits of a run; the first that is reached stops it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_seconds: float | None = option(
        None, "stop after the round in which this time is reached", group="stop", none="never", condition=True, gt=0
    )
    max_bytes: int | None = option(
        None,
        "stop after the round in which these bytes are sent",
        group="stop",
        none="never",
        condition=True,
        gt=0,
        le=2**63 - 1,
    )
    max_steps: int | None = option(
        None,
        "stop after the round in which clients have taken these local steps, all together",
        group="stop",
        none="never",
        condition=True,
        gt=0,
        le=2**63 - 1,
    )
    max_flops: float | None = option(
        None,
        "stop after the round in which these FLOPs of training and mask search are spent",
        group="stop",
        none="never",
        condition=True,
        gt=0,
    )
    patience: int | None = option(
        None,
        "end the run after so many evaluations in a row without a better plain mean on clients' validation data",
        group="stop",
        none="all rounds are played",
        condition=True,
        ge=1,
    )
    min_delta: float = option(
        0.0, "of patience: by how much a mean must be better to count", group="stop", condition=True, ge=0
    )
    patience_metric: Annotated[str | None, AfterValidator(check_metric)] = option(
        None,
        f"of patience: what the mean is of: {ACCURACY}, {LOSS}, or one of the run's metrics; NAME:high or NAME:low of "
        "a function from Python",
        group="stop",
        none=f"{ACCURACY}, or {LOSS} where numbers are predicted",
        condition=True,
    )


@dataclass(frozen=True)
class Patience:
    """How validation scores went so far; a higher score is better.

    Args:
        best: the round of the best mean.
        scores: of each client then, or when it was heard last before.
        waited: evaluations since then.
    """

    best: int = 0
    scores: Mapping[int, float] = field(default_factory=dict)
    waited: int = 0

    def after(self, completed: int, scores: Mapping[int, float], min_delta: float) -> Patience:
        """The same after one more evaluation.

        Means are compared over the clients that both evaluations heard and found a value for, so that who is not heard,
        or whose model is none, makes nothing better or worse. Fewer models that are none are better by themselves. An
        evaluation that has none of the clients does not count.
        """
        if self.scores and not self.scores.keys() & scores.keys():
            return self
        if self._is_beaten_by(scores, min_delta):
            return Patience(completed, {**self.scores, **scores})  # who was not heard now has its last score
        return replace(self, waited=self.waited + bool(scores))

    def _is_beaten_by(self, scores: Mapping[int, float], min_delta: float) -> bool:
        both = sorted(self.scores.keys() & scores.keys())
        if not both:
            return any(map(is_usable, scores.values()))
        before, after = ({client for client in both if is_usable(of[client])} for of in (self.scores, scores))
        if len(after) > len(before):
            return True
        shared = sorted(before & after)
        return bool(shared) and _mean(scores, shared) > _mean(self.scores, shared) + min_delta


def _mean(scores: Mapping[int, float], clients: Collection[int]) -> float:
    return math.fsum(scores[client] for client in clients) / len(clients)


class Scored(Protocol):
    """One client's result at a point."""

    @property
    def client(self) -> int: ...
    @property
    def correct(self) -> int | None: ...
    @property
    def count(self) -> int: ...
    @property
    def loss(self) -> float | None: ...


def validation_point(headline: str) -> str:
    """The point that patience goes by: the headline's model on validation data, or the received one before tuning."""
    found = points.point(headline)
    return points.on(found.base if found.when != "end" else points.RECEIVED, "validation")


def watched(metric: str | None, is_regression: bool) -> str:
    """The name of what patience goes by; `metric` is the option."""
    return (LOSS if is_regression else ACCURACY) if metric is None else metric.partition(":")[0]


def check_computed(metric: str | None, metrics: Collection[str], is_regression: bool) -> None:
    """Raise SparsonaError if a run does not compute what patience is to go by, or nobody knows which end is good.

    Args:
        metric: the option.
        metrics: the names of the run's metrics.
        is_regression: whether numbers are predicted, which are not right or wrong.
    """
    name = watched(metric, is_regression)
    if name not in metrics and name != LOSS and (name != ACCURACY or is_regression):
        others = [LOSS, *([] if is_regression else [ACCURACY]), *(one for one in metrics if one != ACCURACY)]
        raise SparsonaError(
            f"patience by '{name}', which this run does not compute",
            expected=f"one of {', '.join(others)}",
            hint=f"--set metrics={name} has it computed" if better(name) != "neither" else "add it to metrics",
        )
    if metric is not None and ":" not in metric and _known_end(name) == "neither":
        raise SparsonaError(
            f"patience by '{name}', a function from Python",
            expected="which end of it is the good one",
            hint=f"patience_metric='{name}:high', or '{name}:low'",
        )


def score_of(
    metric: str | None, found: Scored, metrics: Mapping[str, float], is_regression: bool = False
) -> float | None:
    """One client's score, of which more is better; None: what patience goes by is undefined for it, or not told.

    Args:
        metric: the option.
        found: the client's result.
        metrics: its metrics.
        is_regression: whether numbers are predicted.
    """
    name = watched(metric, is_regression)
    if name == ACCURACY and found.correct is not None:
        return found.correct / found.count
    # A model whose loss is not a number is the worst: its metrics are undefined. The records have none in its place.
    if found.loss is None or not math.isfinite(found.loss):
        return -math.inf
    value = found.loss if name == LOSS else metrics.get(name)
    end = (metric or "").partition(":")[2] or _known_end(name)
    return None if value is None else -value if end == "low" else value


def scores_of(
    metric: str | None, found: Iterable[tuple[Scored, Mapping[str, float]]], is_regression: bool
) -> dict[int, float]:
    """The scores of the clients that have one; `found` are results with their metrics."""
    scores = {one.client: score_of(metric, one, metrics, is_regression) for one, metrics in found}
    return {client: score for client, score in scores.items() if score is not None}


def recorded_patience(records: Records, facts: RunFacts, metric: str | None, min_delta: float) -> Patience:
    """How scores went by the records of a run, in the order of rounds, at the point that patience goes by."""
    point = validation_point(facts.point)
    metrics: dict[tuple[int, int], dict[str, float]] = {}  # metrics have rows of their own
    for one in records.metrics(point=point):
        metrics.setdefault((one.completed, one.client), {})[one.name] = one.value
    seen = Patience()
    for completed, rows in groupby(records.evaluations(point=point), key=lambda row: row.completed):
        found = ((row, metrics.get((completed, row.client), {})) for row in rows)
        seen = seen.after(completed, scores_of(metric, found, facts.is_regression), min_delta)
    return seen


MEASURES: dict[str, Callable[[Spent], float]] = {
    "max_seconds": lambda spent: spent.seconds,
    "max_bytes": lambda spent: spent.bytes,
    "max_steps": lambda spent: spent.steps,
    "max_flops": lambda spent: spent.flops,
}


def reached(limits: Stopping, spent: Spent) -> str | None:
    """The option whose limit is reached; None: continue."""
    for name, measure in MEASURES.items():
        limit = getattr(limits, name)
        if limit is not None and measure(spent) >= limit:
            return name
    return None
