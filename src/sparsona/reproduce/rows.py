"""The rows of a recipe: which are selected, with which options each is run, at full size or scaled. Free of torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from sparsona import methods
from sparsona.core import spec
from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.costs import row_of
from sparsona.data.cache import cache_folder
from sparsona.data.catalog import OWN, SOURCES
from sparsona.data.readers.files import list_places
from sparsona.reproduce.recipe import Recipe
from sparsona.runs.options import OPTIONS, RunConfig
from sparsona.runs.request import parse_method, with_names

# What may be set for all rows without making it another experiment: where, how fast and how often things happen.
HARMLESS = frozenset(
    name for name, one in OPTIONS.items() if one.circumstance or one.group in ("place", "stop") or name == "data_dir"
)
SHEET = "sheet-0000.webp"  # the first of the sheets that a data set may be kept in
FEWEST_CLIENTS, FEWEST_SAMPLED, FEWEST_ROUNDS, FEWEST_EXAMPLES = 4, 2, 2, 5  # however small the scale


def select(recipe: Recipe, pattern: str, name: str) -> list[str]:
    """The rows whose name the pattern matches, in their order; wildcards as in file names."""
    if found := [row for row in recipe.rows if fnmatchcase(row, pattern)]:
        return found
    raise SparsonaError(
        f"no row of {name} is called '{pattern}'",
        expected="one of " + ", ".join(recipe.rows),
        hint="wildcards work as in file names: --rows '*/fedavg'",
    )


def with_needed(recipe: Recipe, rows: Collection[str]) -> list[str]:
    """The rows and those that they start from or are compared with, each after what it starts from."""
    found: list[str] = []

    def add(name: str) -> None:
        row = recipe.rows[name]
        if row.warm_start is not None and row.warm_start not in found:
            add(row.warm_start)
        if name not in found:
            found.append(name)
        if row.against is not None and row.against not in found:
            add(row.against)

    for name in rows:
        add(name)
    return found


def row_options(recipe: Recipe, name: str, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The options of a row: the recipe's, those of its settings, its own, and what the user changes for all rows.

    A change that the row's method does not have is left out: `check_changes` refuses one that no row has.
    """
    row = recipe.rows[name]
    options = dict(recipe.options)
    for setting in sorted(recipe.settings, key=len):  # the more specific wins
        if name.startswith(f"{setting}/"):
            options |= recipe.settings[setting]
    known = _known(row.method)
    own = {key: value for key, value in (changes or {}).items() if key in known}
    return {**with_names({**options, **row.options}), **own}


def check_changes(recipe: Recipe, rows: Collection[str], changes: Mapping[str, Any]) -> None:
    """Refuse a change that no row takes."""
    known = set().union(*(_known(recipe.rows[name].method) for name in rows))
    if unknown := sorted(set(changes) - known):
        raise unknown_name("option of these rows", unknown[0], known)


def _known(method: str) -> set[str]:
    return {*OPTIONS, *row_of(parse_method(method)[0])[1].model_fields}


def can_run(method: str) -> bool:
    """Whether a method can be run; of some only the costs are known."""
    return methods.find(parse_method(method)[0]) is not None


def data_of(method: str, options: Mapping[str, Any]) -> str:
    """The data set of a run with these options."""
    if "data" in options:
        return str(options["data"])
    row = row_of(parse_method(method)[0])[0]
    published = methods.published(row, options)
    return str({**row.engine, **published}.get("data", OPTIONS["data"].default))


def is_here(recipe: Recipe, row: str, data: str, data_dir: str | None = None) -> bool:
    """Whether the files of a row's data set are on this machine, as far as can be told without reading them.

    Sheets are images in a split of one's own. Where a recipe says that a set cannot be had as it was published, they
    are there for the rows that stand in for it, and for no others.
    """
    found = spec.parse("data set", data)
    if found.name in OWN:
        return found.argument is not None and Path(found.argument).expanduser().exists()
    card = SOURCES[found.name]
    if not card.files:
        return True  # it comes with the package
    own = [Path(data_dir).expanduser()] if data_dir else []
    named = [place for place in list_places(card.folders, own) if place not in (cache_folder(), *own)]
    if found.name in recipe.absent and not recipe.rows[row].stand_in:
        named = [place for place in named if not (place / SHEET).exists()]
    if any(place.is_dir() and any(place.iterdir()) for place in named):
        return True
    return any((top / f"{card.name}.npz").exists() for top in (cache_folder(), *own)) or _has_files(own)


def _has_files(folders: Collection[Path]) -> bool:
    """Whether a folder that the user names for the data has files, which a reader will look at."""
    return any(folder.is_dir() and any(path.is_file() for path in folder.iterdir()) for folder in folders)


def why_absent(recipe: Recipe, data: str) -> str:
    """How data that is not here can be had, or why it cannot."""
    name = spec.parse("data set", data).name
    if data in recipe.absent or name in recipe.absent:
        return recipe.absent.get(data) or recipe.absent[name]
    if name in SOURCES and SOURCES[name].mirrors:
        return f"`sparsona data get {name}`"
    return f"see {SOURCES[name].address}" if name in SOURCES else f"there is no '{data}'"


def folder_of(row: str, seed: int) -> str:
    """The name of a run's folder."""
    return f"{re.sub('[^A-Za-z0-9.+=-]+', '_', row)}-seed{seed}"


def check_folders(rows: Collection[str]) -> None:
    """Refuse rows whose folders would have one name."""
    taken: dict[str, str] = {}
    for row in rows:
        if (other := taken.setdefault(folder_of(row, 0).lower(), row)) != row:
            raise SparsonaError(
                f"the rows '{other}' and '{row}' would have one folder", expected="names that differ in their letters"
            )


def scaled(config: RunConfig, scale: float) -> dict[str, Any]:
    """What a scale changes in a run: fewer rounds and clients, with as many examples each.

    Args:
        config: the run at full size.
        scale: from above 0 to 1.

    Returns:
        Options to set over those of the run.

    Example:
        >>> scaled(RunConfig(method="fedavg", clients=100, per_round=10, rounds=1000), 0.1)["rounds"]
        100
    """

    def shrink(number: float, least: int = 1) -> int:
        return min(int(number), max(least, round(number * scale)))

    found: dict[str, Any] = {"rounds": shrink(config.rounds, FEWEST_ROUNDS), "eval_every": shrink(config.eval_every)}
    partition = spec.parse("partition", config.partition).name
    novel = shrink(config.novel) if config.novel >= 1 else config.novel
    sampled = None if config.per_round is None else shrink(config.per_round, FEWEST_SAMPLED)
    if config.clients is None and partition == "natural":  # as many as the data has, which only its files tell
        found["clients"] = max(FEWEST_CLIENTS + int(novel), 2 * (sampled or 0))
    elif config.clients is not None:
        clients = shrink(config.clients, FEWEST_CLIENTS + int(novel))
        found["clients"] = clients
        if partition != "natural":
            found["data_rate"] = config.data_rate * clients / config.clients
            found["min_size"] = min(config.min_size or FEWEST_EXAMPLES, FEWEST_EXAMPLES)
        graph = spec.parse("graph", config.graph or "")
        if graph.name == "random" and graph.args:
            degree = min(int(graph.args[0]), clients - int(novel) - 1)
            found["graph"] = ":".join(("random", str(degree), *graph.args[1:]))
    if config.novel >= 1:
        found["novel"] = novel
    if sampled is not None:
        found["per_round"] = sampled
    if config.eval_clients is not None:
        found["eval_clients"] = shrink(config.eval_clients, FEWEST_SAMPLED)
    schedule = spec.parse("lr_schedule", config.lr_schedule)
    if schedule.name == "halving":
        found["lr_schedule"] = f"halving:{shrink(int(schedule.args[0]))}"
    return found


def check_scale(scale: float) -> None:
    """Refuse a scale that is no share."""
    if not 0 < scale <= 1:
        raise SparsonaError(
            f"a scale of {scale}", expected="a share above 0, at most 1", hint="for example --scale 0.1"
        )
