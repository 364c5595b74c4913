"""Charts whose marks are methods or groups of clients: numbers that the papers' figures draw against each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from sparsona.analysis.curves import common_rounds, drawn_point, spent_by
from sparsona.analysis.format import human_bytes, signed
from sparsona.analysis.groups import (
    UNSET,
    Group,
    group_views,
    one_method,
    pairs,
    setting_label,
    settings_of,
    shared_and_differing,
)
from sparsona.analysis.measure import check_one_measure, headline_score
from sparsona.analysis.outcomes import capacities
from sparsona.analysis.statistics import accuracy_summary, mean_and_spread
from sparsona.analysis.targets import Targets
from sparsona.analysis.view import RunView
from sparsona.core.points import CONSENSUS, GLOBAL, START, on

MOST_ROWS = 12  # marks of one series that a table lists; of more, the last alone


@dataclass(frozen=True)
class Mark:
    """One figure: where it stands, its spread, and what is written beside it.

    Args:
        x: across.
        y: up: the mean over seeds.
        spread: the standard deviation over seeds, an error bar; None: of one seed.
        low: the lowest seed, the lower end of a band; None: there is none.
        high: the highest seed.
        text: written beside the mark.
    """

    x: float
    y: float
    spread: float | None = None
    low: float | None = None
    high: float | None = None
    text: str = ""


@dataclass(frozen=True)
class Series:
    """Marks of one name.

    Args:
        label: the name.
        marks: in the order in which they are joined.
        style: a line (with a band), single points, points joined by a line, or a level line.
        is_faint: drawn behind the others, and not listed.
        place: that of its method among those of the runs, which has a colour of its own; None: not of one method.
    """

    label: str
    marks: tuple[Mark, ...]
    style: Literal["line", "points", "joined", "level"] = "joined"
    is_faint: bool = False
    place: int | None = None


@dataclass(frozen=True)
class LineChart:
    """Series over the same axes. `x_unit` says how numbers across are written, and "log" that the axis is one."""

    title: str
    x_title: str
    y_title: str
    series: tuple[Series, ...]
    notes: tuple[str, ...] = ()
    x_unit: Literal["", "bytes", "log"] = ""
    y_unit: Literal["%", "points", "", "number"] = "%"

    def rows(self) -> list[dict[str, str]]:
        """A line per mark (of a learning curve: for its last), ready to print."""
        found = []
        for series in self.series:
            if series.is_faint:
                continue
            for mark in series.marks if len(series.marks) <= MOST_ROWS else series.marks[-1:]:
                label = f"{series.label}: {mark.text}" if mark.text else series.label
                across = "all" if series.style == "level" else self.write_x(mark.x)
                found.append({"series": label, self.x_title: across, self.y_title: self.write_y(mark)})
        return found

    def sentences(self) -> list[str]:
        """What the table does not show."""
        return list(self.notes)

    def write_x(self, value: float) -> str:
        return human_bytes(value) if self.x_unit == "bytes" else f"{value:,.10g}"

    def write_y(self, mark: Mark) -> str:
        """Such as "88.20 ± 0.40%", or "88.20 (87.80 to 88.60)%" with the lowest and the highest seed."""
        if self.y_unit == "number":
            return f"{mark.y:.4g}" + (f" ± {mark.spread:.2g}" if mark.spread is not None else "")
        digits = 2 if self.y_unit else 1
        shown = signed(mark.y) if self.y_unit == "points" else f"{mark.y:.{digits}f}"
        if mark.spread is not None:
            shown += f" ± {mark.spread:.{digits}f}"
        elif mark.low is not None and mark.high is not None:
            shown += f" ({mark.low:.{digits}f} to {mark.high:.{digits}f})"
        return f"{shown}{'%' if self.y_unit == '%' else ''}"

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        series = [
            {"series": one.label, "style": one.style, "marks": [vars(mark) for mark in one.marks]}
            for one in self.series
        ]
        return {"title": self.title, "x": self.x_title, "y": self.y_title, "series": series, "notes": list(self.notes)}


def accuracy_by_rounds(views: Sequence[RunView]) -> LineChart | None:
    """Learning curves: the mean over seeds, in a band from the lowest to the highest.

    Other points that were evaluated over the rounds are faint (FedSpa, figure 8). A headline that is measured once,
    after the last round, is a point at the end.
    """
    check_one_measure(views, "a picture", "draw those with one headline_weight")
    series = []
    for place, group in enumerate(group_views(views)):
        drawn, headline = drawn_point(group), group.views[0].point
        for point in dict.fromkeys((drawn, *group.views[0].curves)):
            marks = _curve_marks(group, point)
            if len(marks) > 1 or (marks and point in (drawn, headline)):
                label = group.label if point == drawn else f"{group.label}, {point}"
                style: Literal["line", "points"] = "line" if len(marks) > 1 else "points"
                series.append(Series(label, marks, style, point not in (drawn, headline), place))
    notes = _band_notes(views)
    return _chart("Learning curves", "completed rounds", views[0].measure.mean_title, series, notes)


def accuracy_by_bytes(views: Sequence[RunView], counting: Literal["encoded", "paper"] = "encoded") -> LineChart | None:
    """Where each method ends in bytes and accuracy, over its learning curve (FedSpa, figure 1).

    Args:
        views: the runs; those of one method that differ in density are one series.
        counting: bytes as encoded, or four for each parameter with masks free, as the papers count.
    """
    check_one_measure(views, "a picture", "draw those with one headline_weight")
    name = "cumulative_bytes" if counting == "encoded" else "cumulative_paper_bytes"
    most = max((sent for view in views for _, sent in getattr(view, name)), default=0)
    if not most:
        return None
    series = []
    for label, members in sweeps(views):
        ends, place = [], _place(views, members)
        for density, group in members:
            curve = _curve_marks(group, drawn_point(group))
            sent = spent_by(group, [round(mark.x) for mark in curve], name)
            total = spent_by(group, [1 << 62], name)[0]  # final tuning sends, too, among peers
            moved = tuple(Mark(x, mark.y) for x, mark in zip(sent, curve, strict=True))
            text = f"density {density:g}" if len(members) > 1 and density is not None else ""
            if known := _headlines(group):
                ends.append(_over_seeds(total, known, text))
                if drawn_point(group) != group.views[0].point:  # final tuning led from the curve to the result
                    moved += (Mark(total, ends[-1].y),)
            if total and len(moved) > 1:
                series.append(Series(label, moved, "line", True, place))
        if not ends:
            continue  # nothing was evaluated
        if all(mark.x == 0 for mark in ends):
            series.append(Series(f"{label}, sends nothing", (ends[0],), "level", place=place))
        else:
            series.append(Series(label, tuple(ends), place=place))
    counted = "as encoded" if counting == "encoded" else "as the papers count: parameters × 4, masks free"
    notes = [f"Bytes in both directions, {counted}.", *_spread_notes(views)]
    x_title = "bytes sent in the whole run"
    measure = views[0].measure
    title, y_title = f"{measure.title[0].upper()}{measure.title[1:]} by traffic", measure.mean_title
    unit: Literal["%", "number"] = "%" if measure.unit else "number"
    return _chart(title, x_title, y_title, series, notes, x_unit="bytes", y_unit=unit)


def accuracy_by_capacity(views: Sequence[RunView]) -> LineChart | None:
    """The mean accuracy of clients of each capacity (DisPFL, figure 4); None where all have the same."""
    series = []
    for place, group in enumerate(group_views(views)):
        by_seed = [capacities(view.config, view.correct, view.count) for view in group.views]
        known = sorted(set.intersection(*(set(found) for found in by_seed)))
        if len(known) > 1:
            marks = [_over_seeds(capacity, [100 * found[capacity]["mean"] for found in by_seed]) for capacity in known]
            series.append(Series(group.label, tuple(marks), place=place))
    notes = _spread_notes(views)
    return _chart("Accuracy by capacity", "capacity of a client", "accuracy, mean over clients", series, notes)


def accuracy_by_density(views: Sequence[RunView]) -> LineChart | None:
    """Accuracy against the density of models (FedSpa, figure 4; DisPFL, table 4; pFedGate, figure 5).

    Methods without a density are level lines. None where no method has several.
    """
    check_one_measure(views, "a picture", "draw those with one headline_weight")
    measure = views[0].measure
    return _by_density(views, _headline, measure.mean_title, "%")


def gap_by_density(views: Sequence[RunView]) -> LineChart | None:
    """Train accuracy less test accuracy against density: DisPFL's claim that the gap falls with sparsity (3.3)."""
    return _by_density(views, train_test_gap, "train less test accuracy, percentage points", "points")


def gain_by_personal(views: Sequence[RunView], against: Sequence[RunView] = ()) -> LineChart | None:
    """The gain in accuracy, weighted by test examples, against the number of personal parameters (FedAlt, figure 3).

    Args:
        views: the runs.
        against: runs of one method to compare with, by seed. None given: the shared model that every run evaluated;
            where some run has none, the first method of `views`.
    """
    whole: list[Mark] = []
    part: list[Mark] = []
    groups, reference = group_views(views), one_method(against) if against else None
    if reference is None and any(gain(view) is None for view in views):
        reference, groups = groups[0], groups[1:]
    for group in groups:
        if reference is None:
            gains = [gain(view) for view in group.views]
        else:
            gains = [gain(after, before) for before, after in pairs(reference, group)]
        num = group.views[0].num_personal
        if num and gains:
            mark = _over_seeds(num, gains, group.label)
            (whole if num >= (group.views[0].num_parameters or 0) else part).append(mark)
    series = [
        Series(label, tuple(marks), "points")
        for label, marks in (("part of the model", part), ("whole model", whole))
        if marks
    ]
    over = "the shared model of the same run" if reference is None else reference.label
    weighted = f"Gain in accuracy weighted by test examples, as in FedAlt's paper, over {over}."
    elsewhere = " Elsewhere each client counts the same." if views[0].measure.weight == "clients" else ""
    notes = [f"{weighted}{elsewhere}", *_spread_notes(views)]
    x_title, y_title = "personal parameters of a client", "gain in weighted accuracy, percentage points"
    return _chart("Gain by personal parameters", x_title, y_title, series, notes, "log", "points")


def targets_chart(found: Targets) -> LineChart | None:
    """Rounds to each target, one series per method; targets that some seed did not reach are left out."""
    series = []
    for place, (label, reached) in enumerate(found.reached.items()):
        marks = [
            _over_seeds(target, [float(rounds) for rounds in one.rounds if rounds is not None])
            for target, one in zip(found.targets, reached, strict=True)
            if one is not None and not one.is_bound
        ]
        if marks:
            series.append(Series(label, tuple(marks), place=place))
    known = [one for reached in found.reached.values() for one in reached if one is not None]
    many, notes = any(len(one.rounds) > 1 for one in known), list(found.notes)
    if many:
        notes.append("Means over seeds; error bars: one standard deviation.")
    if any(one.is_bound for one in known):
        notes.append(f"Targets that were not reached{' by all seeds' * many} are not drawn.")
    return _chart(found.title, "target accuracy, %", "rounds", series, notes, y_unit="")


def train_test_gap(view: RunView) -> float | None:
    """Mean accuracy over clients on their training data less that on their test data, in percentage points.

    None where the run did not evaluate training data (`train_accuracy=true`).
    """
    found = [view.results.get(point) for point in (on(view.point, "train"), view.point)]
    if found[0] is None or found[1] is None:
        return None
    # Clients without test data are in neither mean.
    tested = found[1][1] > 0
    train, test = (accuracy_summary(correct[tested], count[tested])["mean"] for correct, count in (found[0], found[1]))
    return 100 * (train - test)


def weighted_at(view: RunView, point: str) -> float | None:
    """Accuracy weighted by examples at a point, from 0 to 1; None where it was not evaluated."""
    found = view.results.get(point)
    return None if found is None else accuracy_summary(*found)["weighted"]


def novel_gap(view: RunView) -> float | None:
    """Accuracy of participating clients less that of novel ones, weighted, in points: pFedGate's table 5."""
    met = next((found for point in ("novel_tuned", "novel") if (found := weighted_at(view, point)) is not None), None)
    own = weighted_at(view, view.point)
    return None if met is None or own is None else 100 * (own - met)


def gain(view: RunView, against: RunView | None = None) -> float | None:
    """Weighted accuracy less that of another run, in percentage points. Its negative is the drop of pFedGate's table 6.

    None given: over the shared model that the run evaluated; None is returned where there was none.
    """
    if against is not None:
        base: float | None = against.summary["accuracy"]["weighted"]
    else:
        shared = (point for point in (START, GLOBAL, CONSENSUS) if point != view.point)
        base = next((found for point in shared if (found := weighted_at(view, point)) is not None), None)
    return None if base is None else 100 * (view.summary["accuracy"]["weighted"] - base)


def sweeps(views: Sequence[RunView]) -> list[tuple[str, list[tuple[float | None, Group]]]]:
    """Groups that differ in their density, under one name, in the order of density.

    Learning rates may differ with it, as papers choose them for each density, if then every density is there once.
    """
    groups = group_views(views)
    strict, loose = ([_without_density(group, rates) for group in groups] for rates in (False, True))
    keys = []
    for own, free in zip(strict, loose, strict=True):
        together = [density for (density, _), other in zip(strict, loose, strict=True) if other[1] == free[1]]
        keys.append(free[1] if len(set(together)) == len(together) else own[1])
    found: dict[tuple[tuple[str, str], ...], list[tuple[float | None, Group]]] = {}
    for key, (density, _), group in zip(keys, strict, groups, strict=True):
        found.setdefault(key, []).append((density, group))
    named = []
    for key, members in found.items():
        title = members[0][1].views[0].title
        alike = [dict(other) for other in found if found[other][0][1].views[0].title == title]
        _, differing = shared_and_differing(alike)
        own_values = (setting_label(name, dict(key).get(name, UNSET)) for name in differing)
        label = ", ".join([title, *own_values]) if 0 < len(differing) <= 3 else title
        if len(members) == 1 and len(alike) > 1:
            label = members[0][1].label
        named.append((label, sorted(members, key=lambda member: member[0] or 0.0)))
    return named


def _place(views: Sequence[RunView], members: Sequence[tuple[float | None, Group]]) -> int:
    """That of the first method of a sweep."""
    labels = [group.label for group in group_views(views)]
    return min(labels.index(group.label) for _, group in members)


def _without_density(group: Group, without_rates: bool) -> tuple[float | None, tuple[tuple[str, str], ...]]:
    settings = {"title": group.views[0].title, **settings_of(group.views[0])}
    density = settings.pop("options.density", None)
    kept = {key: value for key, value in settings.items() if not (without_rates and key.endswith(("lr", "lr_scale")))}
    return None if density is None else float(density), tuple(sorted(kept.items()))


def _by_density(
    views: Sequence[RunView],
    figure: Callable[[RunView], float | None],
    y_title: str,
    y_unit: Literal["%", "points"],
) -> LineChart | None:
    series = []
    for label, members in sweeps(views):
        marks = []
        for density, group in members:
            values = [value for view in group.views if (value := figure(view)) is not None]
            if values:
                marks.append(_over_seeds(1.0 if density is None else density, values))
        if marks:
            style: Literal["level", "joined"] = "level" if members[0][0] is None else "joined"
            series.append(Series(label, tuple(marks), style, place=_place(views, members)))
    if not any(len(one.marks) > 1 for one in series):
        return None
    return _chart("Results by density", "density", y_title, series, _spread_notes(views), y_unit=y_unit)


def _curve_marks(group: Group, point: str) -> tuple[Mark, ...]:
    curves = [dict(view.curves.get(point, [])) for view in group.views]
    return tuple(_marks(curves, group.views[0].measure.scale))


def _marks(curves: Sequence[Mapping[int, float]], scale: int) -> Iterator[Mark]:
    for completed in common_rounds([dict(curve) for curve in curves]):
        values = [scale * curve[completed] for curve in curves]
        ends = (min(values), max(values)) if len(values) > 1 else (None, None)
        yield Mark(completed, float(np.mean(values)), None, *ends)


def _headlines(group: Group) -> list[float]:
    return [score for view in group.views if (score := _headline(view)) is not None]


def _headline(view: RunView) -> float | None:
    score = headline_score(view.measure, view.summary)
    return None if score is None else view.measure.scale * score


def _over_seeds(x: float, values: Sequence[float | None], text: str = "") -> Mark:
    known = [float(value) for value in values if value is not None]
    return Mark(x, *mean_and_spread(known), text=text)


def _spread_notes(views: Sequence[RunView]) -> list[str]:
    many = any(len(group.views) > 1 for group in group_views(views))
    return ["Means over seeds; error bars: one standard deviation."] if many else []


def _band_notes(views: Sequence[RunView]) -> list[str]:
    many = any(len(group.views) > 1 for group in group_views(views))
    return ["Lines are means over seeds; bands reach from the lowest to the highest seed."] if many else []


def _chart(
    title: str,
    x_title: str,
    y_title: str,
    series: Sequence[Series],
    notes: Sequence[str],
    x_unit: Literal["", "bytes", "log"] = "",
    y_unit: Literal["%", "points", "", "number"] = "%",
) -> LineChart | None:
    return LineChart(title, x_title, y_title, tuple(series), tuple(notes), x_unit, y_unit) if series else None
