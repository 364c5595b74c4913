"""Figures over clients and over seeds, with numpy alone: a run and a comparison need no extra."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparsona.core.errors import SparsonaError

ACCURACIES = ("mean", "weighted", "bottom_decile", "worst", "std")  # what `accuracy_summary` returns


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences and its confidence interval; no interval from a single pair."""

    mean: float
    low: float | None
    high: float | None
    n: int


def accuracy_summary(correct: np.ndarray, count: np.ndarray) -> dict[str, float]:
    """Mean, weighted, bottom_decile, worst and std of the clients' accuracies.

    `mean` weighs every client equally, `weighted` every test example; `bottom_decile` is the floor(C/10)-th worst
    client (at least the worst one); `std` is over the clients, as a population. Clients without test data are left out.
    """
    correct, count = np.asarray(correct, dtype=np.float64), np.asarray(count, dtype=np.float64)
    if correct.shape != count.shape or correct.ndim != 1:
        raise SparsonaError(
            f"correct has shape {correct.shape}, count has shape {count.shape}",
            expected="one number per client in each",
        )
    tested = count > 0
    if not tested.any():
        raise SparsonaError("no client has test data", expected="at least one test example")
    correct, count = correct[tested], count[tested]
    accuracy = np.sort(correct / count)
    return {
        "mean": float(accuracy.mean()),
        "weighted": float(correct.sum() / count.sum()),
        "bottom_decile": float(accuracy[max(len(accuracy) // 10, 1) - 1]),
        "worst": float(accuracy[0]),
        "std": float(accuracy.std()),
    }


def wilson_interval(correct: int, count: int) -> tuple[float, float]:
    """The 95% interval of an accuracy that was measured on `count` examples, by Wilson's score."""
    z, rate = 1.959963984540054, correct / count
    middle = (rate + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def mean_of_last(curve: Sequence[tuple[int, float]], n: int = 10) -> float | None:
    """Mean accuracy after each of the last `n` rounds, or None where that is not known.

    It is known when the `n` last evaluations are one round apart. A run that evaluates every fifth round, or that is
    shorter than `n` rounds, has no such mean: one over other rounds would not compare with it. Round 0 (nothing
    trained yet) does not count as a round.
    """
    last = sorted(point for point in curve if point[0] > 0)[-n:]
    if n < 1 or len(last) < n or last[-1][0] - last[0][0] != n - 1:
        return None
    return sum(value for _, value in last) / n


def mean_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation (n - 1); the spread of a single value is None, not 0."""
    if not values:
        raise SparsonaError("no values to average", expected="at least one")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, None
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def pearson(a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray) -> float | None:
    """The linear correlation of pairs, from -1 to 1; None of fewer than two pairs or where one side is constant."""
    x, y = (np.asarray(values, dtype=np.float64) for values in (a, b))
    if x.shape != y.shape or x.ndim != 1:
        raise SparsonaError(f"values of shapes {x.shape} and {y.shape} cannot be paired", expected="as many of each")
    if len(x) < 2 or not np.ptp(x) or not np.ptp(y):
        return None
    x, y = x - x.mean(), y - y.mean()
    return float(np.clip(x @ y / math.sqrt((x @ x) * (y @ y)), -1, 1))


def spearman(a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray) -> float | None:
    """The correlation of ranks, equal values sharing the mean of theirs; None where `pearson` is."""
    return pearson(ranks(a), ranks(b))


def ranks(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Places in ascending order, from 1; equal values share the mean of their places."""
    _, place, count = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]


def paired_difference(a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> Difference:
    """Mean of a - b, where a[i] and b[i] share a seed, with a Student t interval."""
    if len(a) != len(b):
        raise SparsonaError(f"{len(a)} values cannot be paired with {len(b)}", expected="one value per seed in each")
    if not 0 < confidence < 1:
        raise SparsonaError(f"confidence {confidence}", expected="a number between 0 and 1")
    mean, spread = mean_and_spread([x - y for x, y in zip(a, b, strict=True)])
    if spread is None:
        return Difference(mean, None, None, len(a))
    half = student_t_quantile((1 + confidence) / 2, len(a) - 1) * spread / math.sqrt(len(a))
    return Difference(mean, mean - half, mean + half, len(a))


def student_t_quantile(probability: float, freedom: int) -> float:
    """The value that Student's t with `freedom` degrees of freedom stays below with this probability.

    Exact to rounding, from the finite series for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4):
    intervals are printed by an installation without scipy.
    """
    if not 0 < probability < 1 or freedom < 1:
        raise SparsonaError(
            f"no t quantile for probability {probability} and {freedom} degrees of freedom",
            expected="a probability between 0 and 1 and one or more degrees of freedom",
        )
    if probability < 0.5:
        return -student_t_quantile(1 - probability, freedom)
    low, high = 0.0, math.pi / 2  # of atan(t / sqrt(freedom)), in which the series is written
    while low < (middle := (low + high) / 2) < high:  # until there is no float between
        low, high = (middle, high) if _t_within(middle, freedom) < 2 * probability - 1 else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _t_within(angle: float, freedom: int) -> float:
    """P(|T| <= t), where angle = atan(t / sqrt(freedom))."""
    is_odd = freedom % 2
    term, total = math.cos(angle) if is_odd else 1.0, 0.0
    for k in range(1 + is_odd, freedom, 2):
        total += term
        term *= math.cos(angle) ** 2 * k / (k + 1)
    if not is_odd:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + math.sin(angle) * total)
