"""The table of a recipe: what the paper prints, what came out here, and whether the two agree. Free of torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from sparsona.analysis.format import UNKNOWN, signed
from sparsona.core import spec
from sparsona.core.errors import SparsonaError
from sparsona.costs import PAPERS, cost
from sparsona.data.catalog import SOURCES
from sparsona.data.split_plan import SplitPlan
from sparsona.reproduce.measures import Figure, find, of_runs
from sparsona.reproduce.recipe import Column, Printed, Recipe
from sparsona.reproduce.rows import data_of, row_options, with_published
from sparsona.runs.options import OPTIONS

if TYPE_CHECKING:
    from sparsona.experiment.run import Run


AVERAGE = "average"  # in place of the setting, in the name of a mean over settings


@dataclass(frozen=True)
class Cell:
    """One figure of a table.

    Args:
        row: the name of the row.
        column: the name of the column.
        paper: what is printed; None: nothing, or the row's data only stands in for the paper's.
        ours: what came out; None: nothing yet.
        is_cost: computed without training.
        difference: ours minus the paper's, where the two are comparable.
        agrees: whether they differ by no more than their spreads allow, a cost by no more than a unit of the last digit
            printed; None: no claim.
        why: how `agrees` was decided, or why it was not.
    """

    row: str
    column: str
    paper: Printed | None
    ours: Figure | None
    is_cost: bool
    difference: float | None = None
    agrees: bool | None = None
    why: str = ""


@dataclass(frozen=True)
class Known:
    """What the figures of a table are read from, by row; those of rows that others are compared with included.

    Args:
        runs: finished runs.
        costs: what `row_cost` returned; None: it is not known.
        options: of a run, and of its method.
        eval_every: the recipe's.
    """

    runs: Mapping[str, Sequence[Run]]
    costs: Mapping[str, Mapping[str, Any] | None]
    options: Mapping[str, Mapping[str, Any]]
    eval_every: Mapping[str, int] = field(default_factory=dict)

    def runs_for(self, row: str, column: Column) -> Sequence[Run]:
        """The runs that a figure is made of: those that were evaluated at the recipe's rounds, if any were.

        Where a figure depends on the evaluated rounds and none was, they are those of the first run's `eval_every`.
        """
        found = self.runs.get(row, ())
        if not find(column.measure)[0].by_evaluation or row not in self.eval_every or not found:
            return found
        as_said = [run for run in found if run.config["eval_every"] == self.eval_every[row]]
        return as_said or [run for run in found if run.config["eval_every"] == found[0].config["eval_every"]]

    def no_claim(self, recipe: Recipe, row: str, column: Column) -> str:
        """Why the runs of this figure cannot be compared with the paper's; "": they can."""
        measure = find(column.measure)[0]
        against = recipe.rows[row].against
        if not column.comparable:
            return "not comparable"
        if measure.needs_against and against == row:
            return "compared with itself"
        if measure.by_evaluation:
            for name in dict.fromkeys((row, against or row) if measure.needs_against else (row,)):
                for run in self.runs_for(name, column) if name in self.eval_every else ():
                    if run.config["eval_every"] != self.eval_every[name]:
                        return f"evaluated every {run.config['eval_every']} rounds, not {self.eval_every[name]}"
        return ""

    def figure(self, recipe: Recipe, row: str, column: Column) -> Figure | None:
        """Our figure in this place."""
        measure, argument = find(column.measure)
        against = recipe.rows[row].against or ""
        if measure.of_run is not None:
            others = {run.config["seed"]: run for run in self.runs_for(against, column)}
            return of_runs(column.measure, self.runs_for(row, column), others) if self.runs.get(row) else None
        found: Any = None
        if measure.of_cost is not None and (report := self.costs.get(row)) is not None:
            found = measure.of_cost(report, self.costs.get(against), argument)
        elif measure.of_options is not None and row in self.options:
            found = measure.of_options(self.options[row], argument)
        return None if found is None else Figure(found)


def cells(recipe: Recipe, rows: Sequence[str], known: Known, no_claim: str = "", changed: str = "") -> list[Cell]:
    """Every figure of these rows that is printed or was measured, row by row, and then of means over settings.

    Args:
        recipe: the recipe.
        rows: names of its rows.
        known: what the figures are read from.
        no_claim: why runs are not comparable with the paper, such as "scaled"; "": they are.
        changed: why costs are not, which are those of the full size; "": they are.

    Returns:
        One cell for each row and column.
    """
    found = []
    for name in rows:
        row = recipe.rows[name]
        for key, column in recipe.columns.items():
            paper = row.printed.get(key)  # none, if it stands in: the recipe is checked
            ours = known.figure(recipe, name, column)
            is_cost = not find(column.measure)[0].needs_training
            # Of a row that is printed only in part, costs that are not printed say nothing.
            if paper is None and (ours is None or (is_cost and row.printed)):
                continue
            why = changed if is_cost else no_claim or known.no_claim(recipe, name, column)
            found.append(_cell(name, key, paper, ours, column, why))
    for name, printed in recipe.averages.items():
        every = [one for setting in recipe.settings if (one := f"{setting}/{name}") in recipe.rows]
        of = [one for one in every if not recipe.rows[one].stand_in]
        for key, paper in printed.items() if set(of) & set(rows) else ():
            column = recipe.columns[key]
            parts = [known.figure(recipe, one, column) if one in rows else None for one in of]
            means = [one.value for one in parts if one is not None and not one.is_bound]
            ours = Figure(math.fsum(means) / len(means)) if means and len(means) == len(of) else None
            why = no_claim or next(filter(None, (known.no_claim(recipe, one, column) for one in of)), "")
            why = why if find(column.measure)[0].needs_training else changed
            found.append(_cell(f"{AVERAGE}/{name}", key, paper, ours, column, why))
    return found


def _cell(row: str, key: str, paper: Printed | None, ours: Figure | None, column: Column, no_claim: str) -> Cell:
    is_cost = not find(column.measure)[0].needs_training
    return Cell(row, key, paper, ours, is_cost, *_agreement(paper, ours, column, is_cost, no_claim))


def _agreement(
    paper: Printed | None, ours: Figure | None, column: Column, is_cost: bool, no_claim: str
) -> tuple[float | None, bool | None, str]:
    """Difference, whether it is small enough, and how that was decided."""
    if paper is None or ours is None:
        return None, None, ""
    if no_claim:
        return None, None, no_claim
    if paper.is_bound or ours.is_bound:
        return None, *_agreement_of_bounds(paper, ours)
    if ours.is_early:
        return ours.value - paper.value, None, "stopped early"
    difference = ours.value - paper.value
    if is_cost:
        units = abs(difference) * 10 ** _digits(paper, column.digits)
        return difference, units <= 1 + 1e-9, "to the digit" if units <= 0.5 + 1e-9 else "in the last digit"
    known = [spread for spread in (paper.spread, ours.spread) if spread is not None]
    if not known:
        return difference, None, "no spread is known"
    of = "both" if len(known) == 2 else "the paper's" if ours.spread is None else "ours"
    return difference, abs(difference) <= math.hypot(*known) + 1e-9, f"spread: {of}"


def _agreement_of_bounds(paper: Printed, ours: Figure) -> tuple[bool | None, str]:
    """Whether two figures agree of which one or both are lower bounds: a target was not reached."""
    spread = math.hypot(paper.spread or 0.0, ours.spread or 0.0) + 1e-9
    if ours.is_early:
        return None, "stopped early"
    if paper.is_bound and ours.is_bound:
        trained_enough = not ours.reached and ours.value >= paper.value
        return True if trained_enough else None, "neither gets there" + " so far" * (not trained_enough)
    if ours.is_bound:
        too_late = ours.value > paper.value + spread
        return False if too_late else None, "ours does not get there" + " so far" * (not too_late)
    too_soon = ours.value <= paper.value - spread
    return False if too_soon else None, "the paper's does not get there"


def lines(recipe: Recipe, found: Sequence[Cell]) -> list[dict[str, str]]:
    """The cells as text, a line each."""
    texts = []
    for cell in found:
        digits = own = recipe.columns[cell.column].digits
        if _is_hidden_by_rounding(cell, digits):
            own += 1
        texts.append(
            {
                "row": label(recipe, cell.row),
                "figure": recipe.columns[cell.column].title,
                "paper": format_printed(cell.paper, digits),
                "ours": format_ours(cell.ours, own),
                "difference": UNKNOWN if cell.difference is None else signed(cell.difference, own),
                "agrees": _verdict(cell),
            }
        )
    return texts


def _is_hidden_by_rounding(cell: Cell, digits: int) -> bool:
    """Whether a cost is denied, and what is shown would not show why: with one digit more it does."""
    if cell.agrees is not False or not cell.is_cost or cell.difference is None:
        return False
    return abs(round(cell.difference, digits)) * 10**digits <= 1 + 1e-9


def aligned(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Lines of text with the columns below each other."""
    if not rows:
        return []
    texts = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(one, widths, strict=True)).rstrip() for one in texts]


def label(recipe: Recipe, row: str) -> str:
    """A row's name; one whose data is not the paper's says so."""
    stand_in = recipe.rows[row].stand_in if row in recipe.rows else None
    return f"{row} (stand-in for {stand_in})" if stand_in else row


def format_printed(printed: Printed | None, digits: int) -> str:
    """A printed figure, as it is printed."""
    if printed is None:
        return UNKNOWN
    digits = _digits(printed, digits)
    text = f"{'>' * printed.is_bound}{printed.value:,.{digits}f}"
    return text if printed.spread is None else f"{text} ± {printed.spread:.{digits}f}"


def _digits(printed: Printed, of_column: int) -> int:
    """The decimals that a figure is printed with."""
    return of_column if printed.digits is None else printed.digits


def format_ours(ours: Figure | None, digits: int) -> str:
    """Our figure, with as many digits as the paper prints in its column."""
    if ours is None:
        return UNKNOWN
    text = f"{'>' * ours.is_bound}{ours.value:,.{digits}f}"
    text = text if ours.spread is None else f"{text} ± {ours.spread:.{digits}f}"
    of = f"{ours.reached} of " if ours.reached else ""
    return f"{text} ({of}{ours.seeds} seeds)" if ours.seeds > 1 else text


def _verdict(cell: Cell) -> str:
    if cell.agrees is None:
        return cell.why or UNKNOWN
    return f"{'yes' if cell.agrees else 'NO'}{f' ({cell.why})' if cell.agrees or not cell.is_cost else ''}"


def row_cost(recipe: Recipe, name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """What a row costs in the papers' counting, at full size and with the row's quirks: `CostReport.to_json`.

    FLOPs are None where it takes the data to know how many examples a client has.

    Raises:
        SparsonaError: If it cannot be computed.
    """
    row = recipe.rows[name]
    options = row_options(recipe, name, changes)
    all_options = with_published(row.method, options)
    given = {key: value for key, value in options.items() if not isinstance(_says(key), str)}
    given |= {"data": data_of(row.method, options), "counting": "paper", "quirks": row.quirks}
    if (novel := all_options.get("novel") or 0) >= 1 and all_options.get("clients"):
        given["clients"] = all_options["clients"] - novel
    if "emnist-400-rounds" in row.quirks:
        given["rounds"] = 400
    samples = _samples(given["data"], all_options)
    report = deepcopy(_report(row.method, json.dumps({**given, "samples": samples or 1}, sort_keys=True)))
    report["dense_flops"] = _dense_flops(given["data"], given.get("model"))
    size = all_options.get("batch_size") or OPTIONS["batch_size"].default
    left_out = report["samples"] % size if all_options.get("drop_last") and report["samples"] > size else 0
    report["trained"] = report["samples"] - left_out  # of a client in an epoch
    if samples is None:  # bytes do not depend on it
        for block in ("total", "per_round", "per_client_round"):
            report[block] |= dict.fromkeys(("flops", "train_flops", "search_flops"))
    return report


@cache
def _report(method: str, options: str) -> dict[str, Any]:
    """`sparsona cost`; tables and figures of a paper have many rows in common, and a listing asks for all."""
    return cost(method, **json.loads(options)).to_json()


@cache
def _dense_flops(data: str, model: str | None) -> float:
    """FLOPs of predicting one example with the whole network."""
    named = {} if model is None else {"model": model}
    return float(cost("fedavg", data=data, **named, samples=1).inference_flops)


def _says(key: str) -> bool | str:
    return OPTIONS[key].cost if key in OPTIONS else True


def _samples(data: str, options: Mapping[str, Any]) -> int | None:
    """Training examples of a client, where all have about as many; None: not known before the data is read."""
    source = spec.parse("data set", data)
    partition = spec.parse("partition", str(options.get("partition", SplitPlan().partition))).name
    if source.name not in SOURCES or SOURCES[source.name].is_natural or partition == "natural":
        return None
    card, clients = SOURCES[source.name], options.get("clients") or PAPERS["clients"]
    usual = SplitPlan()
    splits = spec.parse("test", str(options.get("test", usual.test))).name == "split" or card.num_train is None
    total = card.num_examples if splits else card.num_train
    assert total is not None
    kept = 1 - options.get("validation_rate", usual.validation_rate)
    kept -= options.get("test_rate", usual.test_rate) if splits else 0
    return max(1, int(total * options.get("data_rate", 1.0) * kept / clients + 1e-6))


def costs_of(
    recipe: Recipe, rows: Sequence[str], changes: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Any] | None], dict[str, str]]:
    """What each row costs, or None; and why it is not known, by row, where a column asks for it."""
    asks = any(find(column.measure)[0].of_cost is not None for column in recipe.columns.values())
    found: dict[str, dict[str, Any] | None] = {}
    why: dict[str, str] = {}
    for name in rows if asks else ():
        try:
            found[name] = row_cost(recipe, name, changes)
        except SparsonaError as error:
            found[name], why[name] = None, error.what
    return found, why
