"""Results as a table: one row per method, one column per row of analysis/columns.py."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsona.analysis.columns import Column, columns_for, has_uneven_tests, ways_of_running
from sparsona.analysis.conditions import early_stop_sentence
from sparsona.analysis.format import UNKNOWN, human_flops, percent, signed
from sparsona.analysis.groups import Group, group_views, pairs, same_clients
from sparsona.analysis.heard import divergence_note
from sparsona.analysis.measure import ACCURACY, WEIGHTED, Measure
from sparsona.analysis.protocol import join_labels
from sparsona.analysis.statistics import mean_and_spread, paired_difference
from sparsona.analysis.view import RunView
from sparsona.core.targets import TITLES
from sparsona.runs.facts import MEANS
from sparsona.runs.failed import FailedRun
from sparsona.runs.folder import NETWORK

FEWEST_UNSEEN = 10  # examples of unseen classes, of all clients and seeds, of which a share says something
UNEQUAL = 1.2  # local steps of the method that took most over those of the one that took fewest: worth a note


@dataclass(frozen=True)
class Cell:
    """A printed figure: its value, its spread over seeds ('' for one seed), and whether it is the column's best."""

    value: str
    spread: str = ""
    unit: str = ""
    best: bool = False

    @property
    def text(self) -> str:
        return f"{self.value} ± {self.spread}{self.unit}" if self.spread else f"{self.value}{self.unit}"


@dataclass(frozen=True)
class Row:
    """One method's line; `seeds` is the number of runs behind it."""

    label: str
    point: str
    seeds: int
    cells: tuple[Cell, ...]


def table(views: Sequence[RunView], in_print: bool = True) -> list[Row]:
    """A row per method in order of appearance; the best of each column is marked unless all are equal.

    What prints alike is equally good: a difference that the table does not show marks no best. Nor is a method the best
    one whose runs have not finished: what it spent so far, and what it reached, is no result.
    """
    groups = group_views(views)
    columns = [_column_cells(column, groups) for column in columns_for(views, in_print)]
    return [
        Row(group.label, group.views[0].point, len(group.views), tuple(cells[i] for cells in columns))
        for i, group in enumerate(groups)
    ]


def rows(views: Sequence[RunView], in_print: bool = True) -> list[dict[str, str]]:
    """The table as text: a dict per method, keyed "method" and by the titles of its columns."""
    titles = [column.title for column in columns_for(views, in_print)]
    return [
        {"method": row.label} | {title: cell.text for title, cell in zip(titles, row.cells, strict=True)}
        for row in table(views, in_print)
    ]


def failed_rows(missing: Sequence[FailedRun], titles: Sequence[str]) -> list[dict[str, str]]:
    """A row for each run that failed: why, in the first of these columns, and nothing in the others."""
    return [
        {"method": one.label} | dict.fromkeys(titles, UNKNOWN) | dict.fromkeys(titles[:1], f"failed: {one.what}")
        for one in missing
    ]


def figures(views: Sequence[RunView]) -> list[dict[str, Any]]:
    """The table as numbers, for JSON, unrounded: by the names of its columns, the mean over seeds and its spread; of a
    bound, the largest."""
    found: list[dict[str, Any]] = []
    for group in group_views(views):
        found.append({"method": group.label, "point": group.views[0].point, "seeds": len(group.views)})
        for column in columns_for(views, in_print=False):
            figure, spread = _over_seeds(column, group) or (None, None)
            if figure is not None and math.isinf(figure):  # an epsilon; JSON has no such number
                figure = None
            is_mean = column.over_seeds == "mean"
            found[-1][column.name] = {"mean": figure, "spread": spread} if is_mean else {column.over_seeds: figure}
    return found


def differences(views: Sequence[RunView], in_print: bool = True) -> list[dict[str, str]]:
    """Each further method against the first, paired by seed: keys method, difference, interval, seeds.

    In percentage points of the mean accuracy that is the result, or in what a regression is judged by; only runs on the
    same clients are paired. `weighted` and `weighted interval` are the same of the accuracy weighted by test size,
    where that is not the result; in print only where clients differ in it.
    """
    is_wanted = not in_print or has_uneven_tests(views)
    groups, both = group_views(views), is_wanted and any(view.measure != WEIGHTED for view in views)
    return [{"method": group.label} | _differences(groups[0], group, both) for group in groups[1:]]


def notes(views: Sequence[RunView], missing: Sequence[FailedRun] = ()) -> list[str]:
    """What every table says to its reader, also one that is pasted elsewhere: runs that failed, have not finished, had
    more rounds than others or ended early, clients that never trained, turns that diverged, and methods that did not
    get the same work, though nothing else was matched."""
    found = [*(f"{one.sentence}." for one in missing), *round_notes(views), *_early_stops(views)]
    found += [*_untrained_notes(views), *_divergences(views), *_undefined_notes(views), *_effort_notes(views)]
    found += _unlike_notes(views)
    if ways := ways_of_running(views):
        found.append(f"There is no column of seconds: runs were executed in different ways ({', '.join(ways)}).")
    return found


def _unlike_notes(views: Sequence[RunView]) -> list[str]:
    """Of runs that were put together afterwards: a comparison has one federation, and one way of weighing clients."""
    found = []
    weighted = [view.name for view in views if view.measure == WEIGHTED]
    if weighted and len(weighted) < len(views):
        found.append(f"Clients count alike here; the result of {join_labels(weighted)} is the weighted mean.")
    first: dict[int, RunView] = {}
    if not all(same_clients(first.setdefault(view.seed, view), view) for view in views):
        found.append("Runs of one seed are not on the same clients or splits: their figures do not compare.")
    return found


def round_notes(views: Sequence[RunView]) -> list[str]:
    """What a table says of its runs' rounds.

    Args:
        views: the runs.

    Returns:
        Sentences such as "FedAvg has not finished: round 10 of 40.", for each method with such runs, and one where runs
        were given different numbers of rounds and nothing else was matched.
    """
    found = []
    for group in group_views(views):
        open_ = [view for view in group.views if view.unfinished_at is not None]
        rounds = ", ".join(f"{view.unfinished_at} of {view.config['rounds']}" for view in open_)
        if len(group.views) == len(open_) == 1:
            found.append(f"{group.label} has not finished: round {rounds}.")
        elif open_:
            found.append(f"{group.label}: {len(open_)} of {len(group.views)} runs have not finished: rounds {rounds}.")
    rounds_of: dict[str, set[Any]] = {}
    for view in views:
        rounds_of.setdefault(view.title, set()).add(view.config["rounds"])
    is_matched = any(view.config.get("matched") for view in views)
    if not is_matched and len(set().union(*rounds_of.values())) > 1:
        counts = ", ".join(f"{title} {' and '.join(map(str, sorted(given)))}" for title, given in rounds_of.items())
        found.append(f"Not all runs had the same number of rounds: {counts}.")
    return found


def _untrained_notes(views: Sequence[RunView]) -> list[str]:
    """Clients that are scored with a model that they did not train: with Local the initial one."""
    found: dict[str, list[str]] = {}
    groups = group_views(views)
    for group in groups:
        known = [one for view in group.views if (one := view.summary.get("untrained"))]
        if known:
            most, of = max((one["clients"], one["of"]) for one in known)
            upto = "up to " * (len({one["clients"] for one in known}) > 1 or len(known) < len(group.views))
            found.setdefault(f"{upto}{most:,} of {of:,} clients", []).append(group.label)
    texts = []
    for who, labels in found.items():
        whose = "" if len(labels) == len(groups) else f" ({join_labels(labels)})"
        why = "(not sampled, or their turns were lost): they are scored with the model that they received or began with"
        texts.append(f"{who[0].upper()}{who[1:]}{whose} trained in no round {why}.")
    return texts


def _divergences(views: Sequence[RunView]) -> list[str]:
    found = _blocks(views, "diverged")
    return [f"{name}{seed}: {divergence_note(known)}. The first: {known['first']}." for name, seed, known in found]


def _early_stops(views: Sequence[RunView]) -> list[str]:
    found = _blocks(views, "early_stop")
    return [f"{name}{seed}{',' * bool(seed)} {early_stop_sentence(stop)}." for name, seed, stop in found]


def _blocks(views: Sequence[RunView], key: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """What the summaries of runs have under a key, with the name of each run, and its seed where there are several."""
    for group in group_views(views):
        for view in group.views:
            if known := view.summary.get(key):
                yield group.label, f", seed {view.seed}" if len(group.views) > 1 else "", known


def _undefined_notes(views: Sequence[RunView]) -> list[str]:
    """Metrics that are not defined for all clients, and for how many they are."""
    few: dict[str, list[str]] = {}
    for group in group_views(views):
        for name in dict.fromkeys(name for view in group.views for name in view.summary.get("metrics", {})):
            known = [view.summary["metrics"][name] for view in group.views if name in view.summary.get("metrics", {})]
            clients, tested = (sum(one[key] for one in known) for key in ("clients", "tested"))
            if clients < tested:
                few.setdefault(name, []).append(f"{clients:,} of {tested:,} clients of {group.label}")
    # Clients on other machines may keep to themselves what would tell their label counts.
    verb = "is told by" if any(view.config.get("executor") == NETWORK for view in views) else "is defined for"
    return [f"{TITLES.get(name, name)} {verb} {', '.join(texts)}." for name, texts in few.items()]


def _effort_notes(views: Sequence[RunView]) -> list[str]:
    """Who took more local steps than others; where these are matched, who took more FLOPs for them."""
    if any(view.unfinished_at is not None for view in views):
        return []  # they were to train longer
    matched = [known for view in views if isinstance(known := view.config.get("matched"), dict)]
    see = "(docs/experiments.md, fair comparisons)."
    if not matched:
        steps = _means(views, "steps", "total")
        if steps and max(steps.values()) > UNEQUAL * (least := min(steps.values())):
            fewest = next(label for label, taken in steps.items() if taken == least)
            more = sorted((item for item in steps.items() if item[1] > UNEQUAL * least), key=lambda item: -item[1])
            took = " and ".join(f"{label} {taken:,.0f}" for label, taken in more)
            note = f"These methods did not train equally long, in local steps: {took}, but {fewest} {least:,.0f}."
            return [f"{note} `--match steps` gives all about the same number {see}"]
    elif all(known.get("by") == "steps" for known in matched):
        flops, steps = _means(views, "flops", "train"), _means(views, "steps", "total")
        each = [flops[label] / steps[label] for label in flops if steps.get(label)]
        if each and max(each) > UNEQUAL * min(each):
            spent = ", ".join(f"{label} {human_flops(mean)}" for label, mean in flops.items())
            return [
                f"Equal local steps are not equal work. Training took {spent}. `--match flops` makes it equal {see}"
            ]
    return []


def _means(views: Sequence[RunView], block: str, key: str) -> dict[str, float]:
    """A total of the runs of each method, the mean over seeds; only of methods that have it."""
    return {
        group.label: mean_and_spread(known)[0]
        for group in group_views(views)
        if (known := [float(view.summary[block][key]) for view in group.views if block in view.summary])
    }


def class_rows(views: Sequence[RunView]) -> list[dict[str, str]]:
    """Accuracy on classes that a client has among its training data, and on those it has not: a dict per method.

    Empty where clients were not tested on classes that they never saw, or on a few examples of them only.
    """
    found = []
    for group in group_views(views):
        blocks = [view.summary["classes"] for view in group.views if view.summary.get("classes")]
        if sum(block["unseen"]["examples"] for block in blocks) >= FEWEST_UNSEEN:
            found.append(
                {"method": group.label} | {name: _format_seen([b[name] for b in blocks]) for name in ("seen", "unseen")}
            )
    return found


def _format_seen(blocks: Sequence[dict[str, Any]]) -> str:
    """The mean over seeds and clients, and how many test examples are behind it."""
    known = [block for block in blocks if block["mean"] is not None]
    if not known:
        return UNKNOWN
    mean, spread = mean_and_spread([block["mean"] for block in known])
    spread_text = "" if spread is None else f" ± {percent(spread)}"
    counts = [sum(block[key] for block in known) for key in ("clients", "examples")]
    return f"{percent(mean)}{spread_text}% ({counts[1]:,} examples of {counts[0]:,} clients)"


def _differences(reference: Group, group: Group, both: bool) -> dict[str, str]:
    matched = pairs(reference, group)
    weights = {view.measure.weight for pair in matched for view in pair}
    key = MEANS["examples" if weights == {"examples"} else "clients"]
    found = dict(zip(("difference", "interval"), _difference(matched, key), strict=True))
    if both:
        found |= dict(zip(("weighted", "weighted interval"), _difference(matched, "weighted"), strict=True))
    return found | {"seeds": str(len(matched))}


def _difference(matched: Sequence[tuple[RunView, RunView]], key: str) -> tuple[str, str]:
    """The difference of this accuracy, and its interval."""
    if not matched:
        return UNKNOWN, "no common seed on the same clients"
    measure = matched[0][0].measure
    names = {view.measure.name for pair in matched for view in pair}
    if len(names) > 1 or (key == "weighted" and names != {ACCURACY.name}):
        return UNKNOWN, "not known" if key == "weighted" else "judged by different figures"
    if measure.name != ACCURACY.name:
        return _measure_difference(matched, measure)
    figures = [[view.summary["accuracy"][key] for view in pair] for pair in matched]
    if any(figure is None for pair in figures for figure in pair):
        return UNKNOWN, "nothing was evaluated"
    before, after = ([float(pair[which]) for pair in figures] for which in (0, 1))
    found = paired_difference(after, before)
    interval = "one seed: no interval"
    if found.low is not None and found.high is not None:
        interval = f"{signed(100 * found.low)} to {signed(100 * found.high)}"
    return signed(100 * found.mean), interval


def _measure_difference(matched: Sequence[tuple[RunView, RunView]], measure: Measure) -> tuple[str, str]:
    """The difference of the mean of another measure than accuracy, and its interval."""
    before, after = ([float(np.nanmean(pair[which].scores)) for pair in matched] for which in (0, 1))
    found = paired_difference(after, before)
    interval = "one seed: no interval"
    if found.low is not None and found.high is not None:
        interval = f"{measure.show_gain(found.low)} to {measure.show_gain(found.high)}"
    return measure.show_gain(found.mean), interval


def difference_unit(views: Sequence[RunView]) -> str:
    """What `differences` are of, in words."""
    measure = views[0].measure
    if measure.name == ACCURACY.name:
        return f"percentage points of {'mean ' * (measure.weight == 'clients')}{measure.mean_name}"
    return f"mean {measure.title} ({measure.better} is better)"


def _column_cells(column: Column, groups: Sequence[Group]) -> list[Cell]:
    means = [_over_seeds(column, group) for group in groups]
    over = [all(view.unfinished_at is None for view in group.views) for group in groups]
    known = [
        found[0]
        for found, is_over in zip(means, over, strict=True)
        if is_over and found is not None and (found[0] or column.marks_zero)
    ]
    show, best = column.writer(found[0] for found in means if found is not None), None
    if column.better != "neither" and len({show(mean) for mean in known}) > 1:
        best = show(max(known) if column.better == "high" else min(known))
    cells = []
    for found, is_over in zip(means, over, strict=True):
        if found is None:
            cells.append(Cell(UNKNOWN))
            continue
        value, spread = show(found[0]), found[1]
        shown = (column.show_spread or show)(spread) if column.has_spread and spread is not None else ""
        cells.append(Cell(value, shown, column.unit, is_over and value == best))
    return cells


def _over_seeds(column: Column, group: Group) -> tuple[float, float | None] | None:
    """The figure of a group's runs, and its spread if it is a mean."""
    values = [value for view in group.views if (value := column.value(view)) is not None]
    if values and column.over_seeds == "largest":
        return max(values), None
    return mean_and_spread(values) if values else None
