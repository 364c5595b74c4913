"""The recipes and their state: is the data here, what is done, how long the rest may take. Free of torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsona.core.errors import SparsonaError
from sparsona.reproduce.folder import default_path
from sparsona.reproduce.recipe import PAPERS, Recipe, load, names
from sparsona.reproduce.rows import can_run, data_of, folder_of, is_here, row_options, why_absent
from sparsona.reproduce.table import row_cost
from sparsona.runs.folder import processor, reached


@dataclass(frozen=True)
class Status:
    """A recipe as it stands on this machine.

    Args:
        name: its name.
        recipe: the recipe.
        data: for each data set, "" if it is here, else how it can be had or why it cannot.
        done: finished runs.
        runs: runs that the paper's number of seeds takes, of the rows whose data is here.
        seconds: estimate of what is not done; None: nothing is known.
    """

    name: str
    recipe: Recipe
    data: Mapping[str, str]
    done: int
    runs: int
    seconds: float | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "name": self.name,
            "paper": self.name.partition("/")[0],
            "where": self.recipe.where,
            "title": self.recipe.title,
            "rows": len(self.recipe.rows),
            "seeds": self.recipe.seeds,
            "data": {name: {"here": not why, "how": why} for name, why in self.data.items()},
            "done": self.done,
            "runs": self.runs,
            "seconds": self.seconds,
        }


def statuses(paper: str | None = None) -> list[Status]:
    """Every recipe, or those of one paper."""
    speeds = Speeds.measured(Path("runs"))
    return [status(name, load(name), speeds) for name in names() if paper in (None, name.partition("/")[0])]


def status(name: str, recipe: Recipe, speeds: Speeds) -> Status:
    """One recipe."""
    data: dict[str, str] = {}
    done = runs = 0
    seconds: float | None = 0.0
    for row, entry in recipe.rows.items():
        if not can_run(entry.method):
            continue
        options = row_options(recipe, row)
        source = data_of(entry.method, options)
        if not is_here(recipe, row, source):
            data[source] = why_absent(recipe, source)
            continue
        data.setdefault(source, "")
        left = 0
        for seed in range(recipe.seeds):
            runs += 1
            finished = is_finished(default_path(name, 1) / folder_of(row, seed))
            done, left = done + finished, left + (not finished)
        taken = speeds.estimate(recipe, row) if left and seconds is not None else 0.0
        seconds = None if seconds is None or taken is None else seconds + left * taken
    return Status(name, recipe, data, done, runs, seconds)


def is_finished(folder: Path) -> bool:
    """Whether the run in a folder is finished; a damaged one is not."""
    try:
        return reached(folder).finished
    except SparsonaError:
        return False


@dataclass(frozen=True)
class Speeds:
    """Seconds for a FLOP, by network, of runs that were finished on this machine.

    Only those on the device of the latest run count: a GPU that is here will be used again. Of short runs and small
    networks most is overhead, so the fastest run of a network counts, and the fastest of all for a network that was not
    run yet.
    """

    by_model: Mapping[str | None, float]

    @classmethod
    def measured(cls, where: Path) -> Speeds:
        """From the runs in a folder, at any depth that comparisons and reproductions have."""
        found: list[tuple[float, str, str | None, float]] = []
        for depth in ("*", "*/*", "*/*/*/*"):
            for path in where.glob(f"{depth}/summary.json"):
                if (one := _speed(path)) is not None:
                    found.append(one)
        if not found:
            return cls({})
        device = max(found)[1]
        rates: dict[str | None, list[float]] = {}
        for _, used, model, rate in found:
            if used == device:
                rates.setdefault(model, []).append(rate)
                rates.setdefault(None, []).append(rate)
        return cls({model: min(known) for model, known in rates.items()})

    def estimate(self, recipe: Recipe, row: str, changes: Mapping[str, Any] | None = None) -> float | None:
        """Seconds of one run of a row at full size; None: nothing is known."""
        if not self.by_model:
            return None
        try:
            report = row_cost(recipe, row, changes or {})
        except SparsonaError:
            return None
        flops = report["total"]["flops"]
        rate = self.by_model.get(report["model"], self.by_model.get(None))
        return None if flops is None or rate is None else flops * rate


def _speed(path: Path) -> tuple[float, str, str | None, float] | None:
    """When a run ended, its device, its network, and seconds for a FLOP; None if it does not tell."""
    try:
        summary, config, machine = (
            json.loads((path.parent / name).read_text(encoding="utf-8"))
            for name in ("summary.json", "config.json", "environment.json")
        )
        flops = (summary["flops"]["train"] or 0) + (summary["flops"]["mask_search"] or 0)
        if not flops or (machine["processor"], machine["cores"]) != (processor(), os.cpu_count()):
            return None
        return path.stat().st_mtime, config["device"], config["model"], summary["seconds"] / flops
    except (OSError, ValueError, KeyError, TypeError):
        return None


def titles() -> dict[str, str]:
    """The papers, by the first part of a recipe's name."""
    return dict(PAPERS)


def missing_data(found: Iterable[Status]) -> Sequence[str]:
    """Data sets of recipes that can be downloaded."""
    return sorted({why.strip("`") for one in found for why in one.data.values() if why.startswith("`")})
