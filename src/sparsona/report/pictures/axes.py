"""An axis of a drawing: from values to pixels, with round numbers to label."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` on the pixels from `start` to `end` (which may run backwards: y grows downwards)."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def around(cls, values: Iterable[float], start: float, end: float, margin: float = 0.04) -> Axis:
        """An axis that holds all values with some room beyond them; of one value, a little of both sides of it."""
        found = [float(value) for value in values]
        low, high = min(found), max(found)
        room = margin * (high - low) if high > low else 0.5
        return cls(low - room, high + room, start, end)

    def at(self, value: float) -> float:
        """The pixel of a value."""
        return self.start + (self.end - self.start) * (value - self.low) / (self.high - self.low)

    def ticks(self, most: int) -> list[float]:
        """Round numbers on the axis, in steps of 1, 2 or 5 times a power of ten: at most `most` steps."""
        least = (self.high - self.low) / most
        power = math.floor(math.log10(least))
        step = next(m * 10.0**p for p in (power, power + 1) for m in (1, 2, 5) if m * 10.0**p >= least)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [float(round(place * step, 12)) for place in range(first, last + 1)]


def density(values: np.ndarray, at: np.ndarray) -> np.ndarray:
    """A Gaussian kernel's estimate of how values are spread, with Silverman's bandwidth; zeros where all are equal."""
    low, high = np.percentile(values, [25, 75])
    spread = min((width for width in (values.std(), (high - low) / 1.34) if width > 0), default=0.0)
    bandwidth = 0.9 * spread * len(values) ** -0.2
    if not bandwidth:
        return np.zeros(len(at))
    distance = (at[:, None] - values[None, :]) / bandwidth
    return np.exp(-0.5 * distance**2).mean(axis=1) / (bandwidth * math.sqrt(2 * math.pi))
