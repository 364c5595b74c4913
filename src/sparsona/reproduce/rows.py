"""The rows of a recipe: which are selected, with which options each is run, at full size or scaled. Free of torch."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from sparsona import methods
from sparsona.core import spec
from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.reading import expand
from sparsona.costs import row_of
from sparsona.data.cache import cache_folder
from sparsona.data.card import SourceCard
from sparsona.data.catalog import OWN, SHEET_FILES, SHEETS, SOURCES
from sparsona.data.readers.files import list_places
from sparsona.reproduce.measures import measures_time, needs_runs
from sparsona.reproduce.recipe import Recipe
from sparsona.runs.options import OPTIONS, RunConfig
from sparsona.runs.request import all_owners, parse_method, with_names

MAKES_RESULT = {"headline"}  # a circumstance of training alone: it says which figure is the result
# What may be set for all rows without making it another experiment: where, how fast and how often things happen.
HARMLESS = (
    frozenset(
        name
        for name, one in OPTIONS.items()
        if one.circumstance or one.group in ("place", "stop") or name == "data_dir"
    )
    - MAKES_RESULT
)
_AFFECTS_TIME = frozenset(name for name, one in OPTIONS.items() if one.group == "place")
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
    for name in rows if changes.get("rounds") else ():
        row = recipe.rows[name]
        if with_published(row.method, row_options(recipe, name)).get("rounds") == 0:
            raise SparsonaError(
                f"'rounds' for the row '{name}', which only tunes the model of '{row.warm_start}'",
                expected="rows that train",
                hint="select those with --rows, or give --scale, which leaves tuning as it is",
            )


def experiment_changes(recipe: Recipe, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the user's changes that make another experiment; where seconds are measured, also where it is run."""
    kept = HARMLESS - _AFFECTS_TIME if measures_time(recipe) else HARMLESS
    return {key: value for key, value in changes.items() if key not in kept}


def has_gpu() -> bool:
    """Whether a GPU can be used, by torch if it was imported already, else by the driver's tool."""
    if (torch := sys.modules.get("torch")) is not None:
        return bool(torch.cuda.is_available())
    return shutil.which("nvidia-smi") is not None


def _known(method: str) -> set[str]:
    return {*OPTIONS, *row_of(parse_method(method)[0])[1].model_fields}


def can_run(method: str) -> bool:
    """Whether a method can be run; of some only the costs are known."""
    return methods.find(parse_method(method)[0]) is not None


def why_not_run(recipe: Recipe, row: str, options: Mapping[str, Any]) -> str:
    """Why a row is not trained whatever data is here; "": it is."""
    method = recipe.rows[row].method
    if not needs_runs(recipe):
        return "all its figures follow from its options"
    if not can_run(method):
        return f"{method} cannot be run yet"
    if str(options.get("device")).startswith("cuda") and not has_gpu():
        return "it needs a GPU, and there is none here"
    return ""


def with_published(method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a run over those that its method and its preset set."""
    name, own = parse_method(method)
    row = row_of(name)[0]
    return {**row.engine, **methods.published(row, {**options, **own}), **options, **own}


def data_of(method: str, options: Mapping[str, Any]) -> str:
    """The data set of a run with these options."""
    if "data" in options:
        return str(options["data"])
    return str(with_published(method, options).get("data", OPTIONS["data"].default))


def is_here(recipe: Recipe, row: str, options: Mapping[str, Any]) -> bool:
    """Whether the files of a row's data set are on this machine, as far as can be told without reading them.

    Sheets are images in a split of one's own. Where a recipe says that a set cannot be had as it was published, they
    are there for the rows that stand in for it, and for no others.

    Args:
        recipe: the recipe.
        row: one of its rows.
        options: the row's, of `row_options`.
    """
    entry = recipe.rows[row]
    found = spec.parse("data set", data_of(entry.method, options))
    if found.name in OWN:
        return found.argument is not None and expand(found.argument).exists()
    if found.name not in SOURCES:
        return False
    card = SOURCES[found.name]
    if not card.files:
        return True  # it comes with the package
    own = [Path(options["data_dir"])] if options.get("data_dir") else []
    places = list_places(card.folders, own)
    published_only = found.name in recipe.absent and not entry.stand_in
    formats = [one for one in card.needed if not (published_only and one == SHEET_FILES)]
    if not any(_has(place, one) for one in formats for place in places):
        return False
    return not needs_owners(entry.method, options) or find_owners(card, places)


def needs_owners(method: str, options: Mapping[str, Any]) -> bool:
    """Whether clients are the owners of data that names them in further files: MNIST by writer."""
    card = SOURCES.get(spec.parse("data set", data_of(method, options)).name)
    partition = with_published(method, options).get("partition", OPTIONS["partition"].default)
    return bool(card and card.extras) and spec.parse("partition", str(partition)).name == "natural"


def find_owners(card: SourceCard, places: Collection[Path]) -> bool:
    """Whether one of these folders has the files that name the owners of a data set."""
    names = tuple(name.removesuffix(".gz") for download in card.extras for name in download.files)
    return any(_has(place, names) for place in places)


def _has(place: Path, names: Collection[str]) -> bool:
    """Whether a folder has all of these files, plain or with .gz."""
    found = _files_in(place, place.stat().st_mtime_ns) if place.is_dir() else ()

    def has(name: str) -> bool:
        if "/" in name:  # in folders inside
            return any(path.is_file() for pattern in (name, f"{name}.gz") for path in place.glob(pattern))
        return any(fnmatchcase(one, name) or fnmatchcase(one, f"{name}.gz") for one in found)

    return all(has(name) for name in names)


@lru_cache(maxsize=256)  # a listing asks for every row
def _files_in(place: Path, changed: int) -> tuple[str, ...]:
    """The names of the files in a folder as of its last change."""
    return tuple(path.name for path in place.iterdir() if path.is_file())


def why_absent(recipe: Recipe, row: str, options: Mapping[str, Any]) -> str:
    """How data that is not here can be had, or why it cannot."""
    entry = recipe.rows[row]
    data = data_of(entry.method, options)
    name = spec.parse("data set", data).name
    if (data in recipe.absent or name in recipe.absent) and not entry.stand_in:
        return recipe.absent.get(data) or recipe.absent[name]
    if name not in SOURCES:
        return f"there is no '{data}'"
    card = SOURCES[name]
    if entry.stand_in and name in recipe.absent:
        where = f"into {cache_folder() / card.folders[0]} or the folder of --set data_dir="
        return f"put its images in a split of your own {where}: {SHEETS}"
    return f"`sparsona data get {name}`" if card.mirrors else f"see {card.address}"


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
        published = methods.published(row_of(config.method)[0], {**config.model_dump(), **config.options})
        takes_all = all_owners(published) and config.per_round == published["per_round"]
        found["clients"] = max(FEWEST_CLIENTS + int(novel), (sampled or 0) * (1 if takes_all else 2))
        sampled = None if takes_all else sampled  # the preset's: all of them
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
