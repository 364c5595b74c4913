"""When a run stops before its last round, at a point from which it can be resumed. Free of torch.

A criterion is an option of `Stopping` and what is measured against it in `MEASURES`. A resumed run counts anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from sparsona.core import points
from sparsona.runs.declaration import option


@dataclass(frozen=True)
class Spent:
    """What a run has used since it was started or resumed."""

    seconds: float = 0.0
    bytes: int = 0  # as encoded, both ways
    steps: int = 0  # of all clients together
    flops: int = 0  # of training and mask search


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
        "end the run after so many evaluations in a row without a better mean on clients' validation data",
        group="stop",
        none="all rounds are played",
        condition=True,
        ge=1,
    )
    min_delta: float = option(
        0.0, "of patience: by how much a mean must be better to count", group="stop", condition=True, ge=0
    )


@dataclass(frozen=True)
class Patience:
    """How validation scores went so far; a higher score is better.

    Args:
        best: the round of the best score.
        score: the best score.
        waited: evaluations since then.
    """

    best: int = 0
    score: float = -math.inf
    waited: int = 0

    def after(self, completed: int, score: float, min_delta: float) -> Patience:
        """The same after one more evaluation."""
        if score > self.score + min_delta:
            return Patience(completed, score)
        return Patience(self.best, self.score, self.waited + 1)


class Scored(Protocol):
    """One client's result at a point."""

    @property
    def completed(self) -> int: ...
    @property
    def correct(self) -> int | None: ...
    @property
    def count(self) -> int: ...
    @property
    def loss(self) -> float: ...


def validation_point(headline: str) -> str:
    """The point that patience goes by: the headline's model on validation data, or the received one before tuning."""
    found = points.point(headline)
    return points.on(found.base if found.when != "end" else points.RECEIVED, "validation")


def mean_score(correct: Iterable[tuple[int | None, int, float | None]]) -> float:
    """The mean over clients, of which more is better, whatever their order: accuracy, or the negative loss where
    numbers are predicted. Of each client: right predictions, examples, loss."""
    # A loss that is not a number is the worst; the records have none in its place.
    worst = -math.inf
    scores = [
        right / count if right is not None else worst if loss is None or math.isnan(loss) else -loss
        for right, count, loss in correct
    ]
    return math.fsum(scores) / len(scores)


def recorded_patience(rows: Iterable[Scored], min_delta: float) -> Patience:
    """How scores went by the records of a run, in the order of rounds, at the point that patience goes by."""
    seen = Patience()
    for completed, found in groupby(rows, key=lambda row: row.completed):
        seen = seen.after(completed, mean_score((one.correct, one.count, one.loss) for one in found), min_delta)
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
