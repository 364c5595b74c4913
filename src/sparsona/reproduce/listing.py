"""The recipes and their state: is the data here, what is done, how long the rest may take. Free of torch."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from sparsona.core.errors import SparsonaError
from sparsona.core.reading import MOST_BYTES, parse_json, read_text
from sparsona.reproduce import recipe as recipes
from sparsona.reproduce.folder import default_path, run_state
from sparsona.reproduce.recipe import PAPERS, Recipe
from sparsona.reproduce.rows import data_of, folder_of, has_gpu, is_here, row_options, why_absent, why_not_run
from sparsona.reproduce.table import row_cost
from sparsona.runs.folder import processor

LONG_ENOUGH = 20.0  # seconds of a run that tells how fast a network is trained
SIDE = 1024  # of the matrices that a CPU's speed is measured with
SHARE_OF_PRODUCT = 0.5  # of that speed, what training reaches
HOW_ESTIMATED = (
    f"time: estimated for runs that are not done: by the fastest finished run of the network of {LONG_ENOUGH:g} s or "
    "more in ./runs; without one, on a CPU by half the speed of a matrix product, on a GPU unknown"
)


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
    return [
        status(name, recipes.load(name), speeds) for name in recipes.names() if paper in (None, name.partition("/")[0])
    ]


def status(name: str, recipe: Recipe, speeds: Speeds) -> Status:
    """One recipe."""
    data: dict[str, str] = {}
    done = runs = 0
    seconds: float | None = 0.0
    for row, entry in recipe.rows.items():
        options = row_options(recipe, row)
        if why_not_run(recipe, row, options):
            continue
        source = data_of(entry.method, options)
        if not is_here(recipe, row, options):
            data[source] = why_absent(recipe, row, options)
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
        return run_state(folder) == "done"
    except SparsonaError:
        return False


@dataclass(frozen=True)
class Speeds:
    """Seconds for a FLOP, by device and network, of runs that were finished on this machine.

    Of a short run most is overhead, so only those of some length count, and of these the fastest. For a network that
    has none, a CPU is taken to train at half the speed of a matrix product; of a GPU nothing is known.
    """

    by_network: Mapping[tuple[str, str | None], float]

    @classmethod
    def measured(cls, where: Path) -> Speeds:
        """From the runs in a folder, at any depth that comparisons and reproductions have."""
        rates: dict[tuple[str, str | None], float] = {}
        for depth in ("*", "*/*", "*/*/*/*"):
            for path in where.glob(f"{depth}/summary.json"):
                if (one := _speed(path)) is not None:
                    rates[one[0]] = min(one[1], rates.get(one[0], math.inf))
        return cls(rates)

    def estimate(self, recipe: Recipe, row: str, changes: Mapping[str, Any] | None = None) -> float | None:
        """Seconds of one run of a row at full size; None: nothing is known."""
        device = row_options(recipe, row, changes).get("device", "auto")
        if device == "auto":
            device = "cuda" if has_gpu() else "cpu"
        try:
            report = row_cost(recipe, row, changes or {})
        except SparsonaError:
            return None
        flops = report["total"]["flops"]
        rate = self.by_network.get((device, report["model"]))
        if rate is None and device == "cpu":
            rate = seconds_of_a_flop() / SHARE_OF_PRODUCT
        return None if flops is None or rate is None else float(flops * rate)


@cache
def seconds_of_a_flop() -> float:
    """Of a product of two matrices on the CPU, the best of three."""
    one, times = np.ones((SIDE, SIDE), np.float32), []
    for _ in range(4):  # the first also starts threads
        began = time.perf_counter()
        one @ one
        times.append(time.perf_counter() - began)
    return min(times[1:]) / (2 * SIDE**3)


def _speed(path: Path) -> tuple[tuple[str, str | None], float] | None:
    """Device and network of a run, and its seconds for a FLOP; None if it does not tell, or was too short."""
    try:
        summary, config, machine = (
            parse_json(read_text(path.parent / name, MOST_BYTES))
            for name in ("summary.json", "config.json", "environment.json")
        )
        flops = (summary["flops"]["train"] or 0) + (summary["flops"]["mask_search"] or 0)
        if not flops or (machine["processor"], machine["cores"]) != (processor(), os.cpu_count()):
            return None
        if summary["seconds"] < LONG_ENOUGH:
            return None
        return (config["device"], config["model"]), summary["seconds"] / flops
    except (OSError, ValueError, KeyError, TypeError):
        return None


def titles() -> dict[str, str]:
    """The papers, by the first part of a recipe's name."""
    return dict(PAPERS)


def missing_data(found: Iterable[Status]) -> Sequence[str]:
    """Data sets of recipes that can be downloaded."""
    return sorted({why.strip("`") for one in found for why in one.data.values() if why.startswith("`")})
