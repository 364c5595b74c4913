"""When a run stops before its last round, at a point from which it can be resumed. Free of torch.

A criterion is an option of `Stopping` and what is measured against it in `MEASURES`. A resumed run counts anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

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
    )
    max_steps: int | None = option(
        None,
        "stop after the round in which clients have taken these local steps, all together",
        group="stop",
        none="never",
        condition=True,
        gt=0,
    )
    max_flops: float | None = option(
        None,
        "stop after the round in which these FLOPs of training and mask search are spent",
        group="stop",
        none="never",
        condition=True,
        gt=0,
    )


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
