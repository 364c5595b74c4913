"""Rounds until a target accuracy is reached: FedSpa's table 2, DisPFL's tables 5 to 7, T_0.8 of pFedGate's table 2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from sparsona.analysis.format import UNKNOWN
from sparsona.analysis.groups import group_views
from sparsona.analysis.measure import check_one_measure
from sparsona.analysis.statistics import mean_and_spread
from sparsona.analysis.view import RunView
from sparsona.core.errors import SparsonaError
from sparsona.core.points import RECEIVED
from sparsona.core.points import point as evaluation_point


@dataclass(frozen=True)
class Reached:
    """After how many rounds each seed reached a target.

    Args:
        rounds: by seed; None: not within the rounds that were run.
        limits: the rounds that were run, by seed.
    """

    rounds: tuple[int | None, ...]
    limits: tuple[int, ...]

    @property
    def num_reached(self) -> int:
        return sum(rounds is not None for rounds in self.rounds)

    @property
    def is_bound(self) -> bool:
        """Whether some seed did not reach the target, so that `mean` is less than the true one."""
        return self.num_reached < len(self.rounds)

    @property
    def mean(self) -> float:
        """The mean over all seeds. A seed that did not reach the target counts with the rounds that it was run.

        The mean over those that did would reward a method for failing with its slow seeds.
        """
        counted = [limit if found is None else found for found, limit in zip(self.rounds, self.limits, strict=True)]
        return mean_and_spread([float(value) for value in counted])[0]

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds; None of one seed, or where not all reached the target."""
        known = [float(found) for found in self.rounds if found is not None]
        return None if self.is_bound else mean_and_spread(known)[1]

    @property
    def text(self) -> str:
        """Such as "134.0 ± 2.9", ">1000", or ">556.3 (2 of 3 seeds)"."""
        shown = f"{self.mean:.0f}" if float(self.mean).is_integer() and self.spread is None else f"{self.mean:.1f}"
        if self.is_bound:
            part = f" ({self.num_reached} of {len(self.rounds)} seeds)" if self.num_reached else ""
            return f">{shown}{part}"
        return shown if self.spread is None else f"{shown} ± {self.spread:.1f}"

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        figures = {"mean": self.mean, "spread": self.spread, "is_bound": self.is_bound}
        return {**figures, "rounds": list(self.rounds), "limits": list(self.limits)}


@dataclass(frozen=True)
class RelativeRounds:
    """Rounds until a share of a method's own final accuracy, and how many times those of a reference that is.

    `mean` and `spread` are over seeds that both have; None: there is none, or (spread) only one.
    """

    rounds: Reached
    mean: float | None
    spread: float | None

    @property
    def text(self) -> str:
        if self.mean is None:
            return UNKNOWN
        return f"{self.mean:.2f}" if self.spread is None else f"{self.mean:.2f} ± {self.spread:.2f}"


@dataclass(frozen=True)
class Targets:
    """Rounds to some targets, in percent of mean accuracy over clients, by method.

    `reached` has one entry per target; None: the method has no curve. `relative` is there if a share was asked for.
    `hints` are for who asked, and not for a reader of a page.
    """

    title: str
    targets: tuple[float, ...]
    reached: dict[str, tuple[Reached | None, ...]]
    share: float | None = None
    relative: dict[str, RelativeRounds | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()

    def rows(self) -> list[dict[str, str]]:
        """A line per method, ready to print."""
        found = []
        for label, reached in self.reached.items():
            row = {"method": label}
            for target, one in zip(self.targets, reached, strict=True):
                row[f"to {target:g}%"] = UNKNOWN if one is None else one.text
            if self.share is not None:
                known = self.relative[label]
                row[f"T_{self.share:g}"] = UNKNOWN if known is None else known.rounds.text
                row["relative"] = UNKNOWN if known is None else known.text
            found.append(row)
        return found

    def sentences(self) -> list[str]:
        """What the table does not show, and how to see it."""
        found = [*self.notes, *self.hints]
        if self.share is None:
            return found
        text = f"T_{self.share:g} is the first evaluated round at {self.share:g} of a method's own final accuracy, "
        first = next(iter(self.relative))
        return [*found, f"{text}weighted by test examples; relative: over that of {first} under the same seed."]

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        methods: list[dict[str, Any]] = []
        for label, reached in self.reached.items():
            targets = [
                {"target": target, **({} if one is None else one.as_dict())}
                for target, one in zip(self.targets, reached, strict=True)
            ]
            methods.append({"method": label, "targets": targets})
            if known := self.relative.get(label):
                figures = {"mean": known.mean, "spread": known.spread}
                methods[-1]["share"] = {"share": self.share, **known.rounds.as_dict(), "relative": figures}
        return {"title": self.title, "methods": methods, "notes": self.sentences()}


def first_reached(curve: Sequence[tuple[int, float]], target: float) -> int | None:
    """The completed rounds at the first evaluation at or above a target; None: never.

    Args:
        curve: completed rounds and accuracy, from 0 to 1.
        target: an accuracy, from 0 to 1.

    Example:
        >>> first_reached([(1, 0.5), (2, 0.71), (3, 0.69)], 0.7)
        2
    """
    # A mean of fractions that is 0.7 on paper may be one rounding below it.
    return next((completed for completed, value in sorted(curve) if value >= target - 1e-12), None)


def rounds_to(views: Sequence[RunView], target: float, point: str | None = None) -> Reached | None:
    """Rounds until the mean accuracy over clients first reached a target, in runs that differ in their seed alone.

    Args:
        views: the runs.
        target: in percent.
        point: whose curve is read; None: that of the headline.

    Returns:
        None where that point was not evaluated over the rounds (final tuning).
    """
    curves = [_curve(view, point) for view in views]
    if not views or any(curve is None for curve in curves):
        return None
    found = tuple(first_reached(curve or (), target / 100) for curve in curves)
    return Reached(found, tuple(int(view.summary["rounds"]) for view in views))


def relative_rounds(views: Sequence[RunView], against: Sequence[RunView], share: float = 0.8) -> RelativeRounds | None:
    """Rounds until a share of the final accuracy, over those of a reference: T_0.8 of pFedGate's table 2.

    The target is the share of each run's own final accuracy, weighted by test examples as in that paper. Its text
    leaves open whose accuracy is meant, and its figures settle it: on CIFAR-100 the row without sigmoid ends at 31.29
    and has a T_0.8, though 0.8 times the reference's 39.72 would be 31.78.

    Args:
        views: the runs of one method, which differ in their seed alone.
        against: those of the reference; runs of one seed are compared.
        share: from 0 to 1.

    Returns:
        None where the headline was not evaluated over the rounds.
    """
    own, other = ({view.seed: _rounds_to_share(view, share) for view in some} for some in (views, against))
    if not own or None in own.values():
        return None
    reached = Reached(tuple(own.values()), tuple(int(view.summary["rounds"]) for view in views))
    # A reference that is there before the first round has no multiple.
    ratios = [found / base for seed, found in own.items() if found is not None and (base := other.get(seed))]
    return RelativeRounds(reached, *(mean_and_spread(ratios) if ratios else (None, None)))


def targets_of(
    views: Sequence[RunView], targets: Sequence[float], point: str | None = None, share: float | None = None
) -> Targets:
    """Rounds to each of these targets, by method.

    Args:
        views: the runs; seeds of one method are one row, and the first method is the reference of `share`.
        targets: accuracies in percent.
        point: whose curve is read; None: each method's headline.
        share: also the rounds to this share of each method's own final accuracy, relative to the first method's.

    Returns:
        A table.
    """
    if any("error" in view.summary for view in views):
        raise SparsonaError("runs that predict numbers have no accuracy to reach", expected="runs on classes")
    check_one_measure(views, "rounds to a target", "give those with one headline_weight")
    if wrong := [target for target in targets if not 1 < target <= 100]:
        raise SparsonaError(f"target {wrong[0]:g}", expected="an accuracy in percent", hint="--at 70,75,80")
    if share is not None and not 0 < share < 1:
        raise SparsonaError(f"share {share:g}", expected="a number between 0 and 1", hint="--share 0.8")
    if not targets and share is None:
        raise SparsonaError("no target", expected="accuracies in percent, or a share", hint="--at 70,75,80")
    groups = group_views(views)
    reached = {group.label: tuple(rounds_to(group.views, target, point) for target in targets) for group in groups}
    relative = {}
    if share is not None:
        relative = {group.label: relative_rounds(group.views, groups[0].views, share) for group in groups}
    title = (
        f"Rounds until the mean accuracy over {views[0].measure.over} reaches a target{f', {point}' if point else ''}"
    )
    has_tuning = any(_curve(view, point) is None and view.curves.get(RECEIVED) for view in views)
    hints = ("--point received reads the curve of the model before final tuning.",) if has_tuning else ()
    return Targets(title, tuple(targets), reached, share, relative, tuple(_notes(views, point)), hints)


def default_targets(views: Sequence[RunView], most: int = 3) -> list[float]:
    """The highest multiples of 5% that every seed of some method reached, in ascending order."""
    groups = group_views(views)
    candidates = [float(target) for target in range(5, 101, 5)]

    def is_reached(target: float) -> bool:
        found = (rounds_to(group.views, target) for group in groups)
        return any(one is not None and not one.is_bound for one in found)

    return [target for target in candidates if is_reached(target)][-most:]


def _notes(views: Sequence[RunView], point: str | None) -> list[str]:
    groups, notes = group_views(views), []
    gaps = {group.label: max(_longest_gap(_curve(view, point) or ()) for view in group.views) for group in groups}
    if seldom := {label: gap for label, gap in gaps.items() if gap > 1}:
        which = "" if len(seldom) == len(groups) else f" ({', '.join(seldom)})"
        notes.append(
            f"Clients were evaluated every {max(seldom.values())} rounds{which}: a target is seen up to "
            f"{max(seldom.values()) - 1} rounds late, and later where accuracy swings from round to round."
        )
    if unknown := [group.label for group in groups if any(_curve(view, point) is None for view in group.views)]:
        points = {point or view.point for group in groups if group.label in unknown for view in group.views}
        notes.append(
            f"{', '.join(unknown)}: '{', '.join(sorted(points))}' was not evaluated over the rounds, and has no curve."
        )
    if any(_curve(view, point) and view.summary["rounds"] < int(str(view.config.get("rounds", 0))) for view in views):
        notes.append("Some runs have not finished: '>' counts the rounds that they were run.")
    return notes


def _rounds_to_share(view: RunView, share: float) -> int | None:
    curve = view.weighted_curves.get(view.point, ())
    if evaluation_point(view.point).when == "end" or not curve:
        return None
    return first_reached(curve, share * max(curve)[1])


def _curve(view: RunView, point: str | None) -> Sequence[tuple[int, float]] | None:
    """None: not evaluated over the rounds."""
    name = point or view.point
    found = view.curves.get(name)
    return None if evaluation_point(name).when == "end" or not found else found


def _longest_gap(curve: Sequence[tuple[int, float]]) -> int:
    completed = [0, *sorted(completed for completed, _ in curve)]
    return max((after - before for before, after in pairwise(completed)), default=1)
