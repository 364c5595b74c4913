"""What the theorems say of a run: constants as estimated, bounds beside what was measured, and their assumptions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from sparsona.analysis.format import UNKNOWN, number

Status = Literal["held", "violated", "cannot be checked"]


@dataclass(frozen=True)
class Constant:
    """A constant of a theorem, estimated on some clients.

    Args:
        symbol: as the paper writes it.
        value: what the bound is computed with: the largest seen, where the assumption is "for all".
        mean: over clients and rounds.
        spread: the standard deviation over clients, averaged over rounds; None of one client, or of what is known.
        count: how many values it comes from; 1: it is known, not estimated.
        how: how it was estimated.
    """

    symbol: str
    value: float
    mean: float
    spread: float | None
    count: int
    how: str

    @classmethod
    def known(cls, symbol: str, value: float, how: str) -> Constant:
        """A constant that options or counting determine."""
        return cls(symbol, value, value, None, 1, how)

    @classmethod
    def largest(cls, symbol: str, values: np.ndarray | Sequence[Sequence[float]], how: str) -> Constant:
        """The largest of [rounds, clients]."""
        found = np.asarray(values, dtype=float)
        spread = float(found.std(axis=1, ddof=1).mean()) if found.shape[1] > 1 else None
        return cls(symbol, float(found.max()), float(found.mean()), spread, found.size, how)

    def row(self) -> dict[str, str]:
        """As a row of a table."""
        estimated = self.count > 1
        return {
            "constant": self.symbol,
            "value": number(self.value),
            "mean": number(self.mean) if estimated else UNKNOWN,
            "sd over clients": number(self.spread) if estimated else UNKNOWN,
            "estimated from": self.how,
        }


@dataclass(frozen=True)
class Assumption:
    """One of a theorem's assumptions, and whether the run keeps it."""

    text: str
    status: Status
    why: str = ""

    @classmethod
    def check(cls, text: str, holds: bool, why: str = "") -> Assumption:
        """Held or violated."""
        return cls(text, "held" if holds else "violated", why)


@dataclass(frozen=True)
class Bound:
    """A theorem's bound beside what was measured.

    Args:
        theorem: which one, and its equation.
        bounds: what it bounds, in the paper's symbols.
        value: the bound with the run's own options; None where it does not exist, or its condition on the step size (or
            on noise) is violated.
        terms: its terms.
        measured: the same quantity, measured.
        curve: (rounds, bound); empty where it does not exist, or where the theorem does not speak of rounds.
        measured_curve: (rounds, measured).
        assumptions: what the theorem assumes.
        notes: what a reader must know besides.
        leaves_out_constants: the paper states it up to an absolute constant, which is taken to be 1.
        measured_error: the standard error of `measured` over the sampled clients; None where all were measured.
        unit: what the vertical axis of its picture shows.
        curve_label: what the curve supposes, where it is not the run's own options.
        allowed_curve: (rounds, bound) with the largest step size that the theorem allows.
    """

    theorem: str
    bounds: str
    value: float | None
    measured: float | None
    terms: Mapping[str, float] = field(default_factory=dict)
    curve: Sequence[tuple[float, float]] = ()
    measured_curve: Sequence[tuple[float, float]] = ()
    assumptions: Sequence[Assumption] = ()
    notes: Sequence[str] = ()
    leaves_out_constants: bool = False
    measured_error: float | None = None
    unit: str = ""
    curve_label: str = ""
    allowed_curve: Sequence[tuple[float, float]] = ()

    @property
    def ratio(self) -> float | None:
        """How many times as large as the measured quantity the bound is."""
        if self.value is None or not self.measured or not math.isfinite(self.value):
            return None
        return self.value / self.measured

    @property
    def violated(self) -> list[Assumption]:
        return [one for one in self.assumptions if one.status == "violated"]

    def row(self) -> dict[str, str]:
        """As a row of a table."""
        kept = sum(one.status == "held" for one in self.assumptions)
        return {
            "theorem": self.theorem,
            "bound": "none" if self.value is None else number(self.value),
            "measured": number(self.measured)
            + ("" if self.measured is None or self.measured_error is None else f" ± {number(self.measured_error)}"),
            "bound / measured": number(self.ratio),
            "assumptions": f"{kept} held, {len(self.violated)} violated, "
            f"{len(self.assumptions) - kept - len(self.violated)} cannot be checked",
        }


@dataclass(frozen=True)
class Bounds:
    """Everything that `sparsona bounds` shows of a run."""

    title: str
    applies: str
    clients: tuple[int, ...]
    batches: int
    seed: int
    rounds: tuple[int, ...]
    constants: Sequence[Constant] = ()
    bounds: Sequence[Bound] = ()
    notes: Sequence[str] = ()

    @property
    def curves(self) -> list[Bound]:
        """The bounds that are drawn: those that speak of rounds."""
        return [bound for bound in self.bounds if bound.measured_curve]

    def sentences(self) -> list[str]:
        """How the estimates were made."""
        if not self.constants:
            return [self.applies]
        where = ", ".join(map(str, self.rounds)) if len(self.rounds) <= 8 else f"{len(self.rounds)} of the rounds"
        data = f"all training data of {len(self.clients)} clients, seed {self.seed}"
        some = f"{self.batches} batches each for variances and Hessian products"
        return [
            self.applies,
            f"Estimated on {data} ({some}), from the models after {where} rounds.",
            "A constant that must hold everywhere is the largest seen: the true one, and so the bound, may be larger.",
            *self.notes,
        ]

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON. What is infinite or undefined is null."""
        found = asdict(self) | {
            "bounds": [asdict(bound) | {"ratio": bound.ratio} for bound in self.bounds],
        }
        plain: dict[str, Any] = _plain(found)
        return plain


def running_means(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The mean of all values up to each place, each weighted by the stretch of rounds that it stands for.

    Args:
        points: (rounds, value) in order; a value stands for the rounds nearest to it.

    Returns:
        (rounds, mean so far).

    Example:
        >>> running_means([(0, 4.0), (2, 2.0)])
        [(0, 4.0), (2, 3.0)]
    """
    found: list[tuple[float, float]] = []
    for end, (place, _) in enumerate(points, 1):
        some = points[:end]
        if end == 1:
            found.append((place, some[0][1]))
            continue
        xs, ys = np.array([x for x, _ in some]), np.array([y for _, y in some])
        found.append((place, float(np.trapezoid(ys, xs) / (xs[-1] - xs[0]))))
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value
