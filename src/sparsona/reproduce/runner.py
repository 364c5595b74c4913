"""Runs what is missing of a recipe, and shows it beside what the paper prints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from sparsona.core.errors import SparsonaError
from sparsona.core.printable import warn
from sparsona.costs import QUIRKS
from sparsona.engine.profiler import OFF, Clock
from sparsona.experiment.build import make_config, make_configs
from sparsona.experiment.compare import play_in_processes, seed_numbers
from sparsona.experiment.parallel import AUTO, Jobs, check_jobs
from sparsona.experiment.run import Run
from sparsona.experiment.train import load, resume_run, start_run
from sparsona.reproduce import recipe as recipes
from sparsona.reproduce.folder import Record, State, default_path, own_name, read_record, run_state, source_commit
from sparsona.reproduce.measures import find, measures_time
from sparsona.reproduce.pictures import text_of
from sparsona.reproduce.recipe import Recipe
from sparsona.reproduce.rows import (
    MAKES_RESULT,
    check_changes,
    check_folders,
    check_scale,
    data_of,
    experiment_changes,
    folder_of,
    is_here,
    needs_owners,
    row_options,
    scaled,
    select,
    why_absent,
    why_not_run,
    with_needed,
)
from sparsona.reproduce.table import Cell, Known, aligned, cells, costs_of, lines
from sparsona.runs.comparison import REPRODUCTION_FILE
from sparsona.runs.folder import RunFolder, explain_disk_errors, read_json, write_atomically
from sparsona.runs.observers import ObserverList
from sparsona.runs.options import BEFORE, CIRCUMSTANCES, RunConfig
from sparsona.runs.validation import validate

# Of a run's options, what another machine or a later call may have chosen otherwise without another result.
_LIMITS = {"max_seconds", "max_bytes", "max_steps", "max_flops"}
_FREE = {*CIRCUMSTANCES - MAKES_RESULT, "device", "data_dir", *_LIMITS}
_FAILURES = (SparsonaError, RuntimeError, MemoryError)  # RuntimeError: what torch raises, such as on a full GPU


@dataclass(frozen=True)
class Planned:
    """One run of a recipe: a row under a seed."""

    row: str
    seed: int
    folder: Path
    config: RunConfig
    own: BaseModel
    after: str | None = None  # the row whose model it starts from
    share_of_full_size: float = 1.0  # of the work: rounds times clients

    @property
    def state(self) -> State:
        """Whether the run is still to be started or resumed."""
        return run_state(self.folder)


class Reproduction:
    """A table of a paper and what came out here. `reproduce` returns it.

    Args:
        name: the recipe's name.
        recipe: the recipe.
        rows: the selected rows.
        planned: the runs of these rows and of those they need.
        scale: the size of the runs, 1 for that of the paper.
        changes: options that were set for all rows.
        path: the folder of the runs.
        costs_only: why a row is not run, by row.
        record: what reproduction.json says of it.

    `failures` has the errors of runs that could not be played, by row and seed.
    """

    def __init__(
        self,
        name: str,
        recipe: Recipe,
        rows: Sequence[str],
        planned: Sequence[Planned],
        scale: float,
        changes: Mapping[str, Any],
        path: Path,
        costs_only: Mapping[str, str],
        record: Record,
    ) -> None:
        self.name, self.recipe, self.rows, self.planned = name, recipe, list(rows), list(planned)
        self.scale, self.changes, self.path, self.costs_only = scale, dict(changes), path, dict(costs_only)
        self.record = record
        self.failures: dict[tuple[str, int], str] = {}

    def __repr__(self) -> str:
        done = sum(one.state == "done" for one in self.planned)
        return f"Reproduction({self.name}, {len(self.rows)} rows, {done} of {len(self.planned)} runs, '{self.path}')"

    @cached_property
    def runs(self) -> dict[str, list[Run]]:
        """The finished runs of each row, in the order of their seeds."""
        found: dict[str, list[Run]] = {}
        for one in self.planned:
            if one.state == "done":
                found.setdefault(one.row, []).append(load(one.folder))
        return found

    @cached_property
    def _costs(self) -> tuple[dict[str, dict[str, Any] | None], dict[str, str]]:
        return costs_of(self.recipe, with_needed(self.recipe, self.rows), self.changes)

    @cached_property
    def _options(self) -> dict[str, dict[str, Any]]:
        """What each row is run with at full size, where a column prints it."""
        if all(find(column.measure)[0].of_options is None for column in self.recipe.columns.values()):
            return {}
        found = {}
        for row in self.rows:
            options = row_options(self.recipe, row, self.changes)
            config, _ = _make_row(self.recipe, row, options, 1.0)
            found[row] = {**config.model_dump(), **config.options}
        return found

    @cached_property
    def _eval_every(self) -> dict[str, int]:
        """How often the recipe evaluates each row, where a column depends on it."""
        if not any(find(column.measure)[0].by_evaluation for column in self.recipe.columns.values()):
            return {}
        own = {key: value for key, value in self.changes.items() if key != "eval_every"}
        rows = dict.fromkeys(one.row for one in self.planned)
        return {row: self._recipe_config(row, own).eval_every for row in rows}

    def _recipe_config(self, row: str, changes: Mapping[str, Any]) -> RunConfig:
        return _make_row(self.recipe, row, row_options(self.recipe, row, changes), self.scale)[0]

    @property
    def mark(self) -> str:
        """Why the runs are not comparable with the paper's figures: they are scaled, or changed; "": they are."""
        return "; ".join(filter(None, (f"scaled to {self.scale:g}" if self.scale < 1 else "", self._changed)))

    @property
    def _changed(self) -> str:
        """Why costs are not comparable either: those of a scaled row are of its full size."""
        changed = sorted(experiment_changes(self.recipe, self.changes))
        return f"changed: {', '.join(changed)}" if changed else ""

    def cells(self) -> list[Cell]:
        """Every figure that is printed or was measured, with the difference and whether the two agree."""
        known = Known(self.runs, self._costs[0], self._options, self._eval_every)
        return cells(self.recipe, self.rows, known, self.mark, self._changed)

    def table(self) -> list[dict[str, str]]:
        """The table as text.

        Returns:
            A dict per figure: row, figure, paper, ours (mean ± sample standard deviation over seeds), difference, and
            whether it is within the combined spread (of costs: to the last digit printed).
        """
        return lines(self.recipe, self.cells())

    def figures(self) -> list[dict[str, Any]]:
        """The table as numbers, unrounded."""
        return [
            {
                "row": cell.row,
                "figure": cell.column,
                "measure": self.recipe.columns[cell.column].measure,
                "stand_in": self.recipe.rows[cell.row].stand_in if cell.row in self.recipe.rows else None,
                "paper": None if cell.paper is None else cell.paper.model_dump(),
                "ours": None if cell.ours is None else vars(cell.ours),
                "difference": cell.difference,
                "agrees": cell.agrees,
                "why": cell.why,
            }
            for cell in self.cells()
        ]

    def notes(self) -> list[str]:
        """What a reader of the table must know: its scale, rows that were not run, and known differences."""
        found = []
        if self.scale < 1:
            found.append(
                f"SCALED to {self.scale:g}: fewer rounds and clients than in the paper, so that accuracies do not "
                "compare with it; costs are those of the full size, but for those that are counted in runs"
            )
        if changed := experiment_changes(self.recipe, self.changes):
            listed = ", ".join(f"{key}={value}" for key, value in changed.items())
            found.append(f"CHANGED by {listed}: not the paper's experiment")
        reasons: dict[str, list[str]] = {}
        for row in self.rows:
            if row in self.costs_only:
                reasons.setdefault(self.costs_only[row], []).append(row)
        found += [f"costs only, {reason}: {', '.join(rows)}" for reason, rows in reasons.items()]
        found += [f"FAILED, row '{row}', seed {seed}: {what}" for (row, seed), what in self.failures.items()]
        shown = [one for one in self.planned if one.row in self.rows]
        if missing := sum(one.state != "done" for one in shown):
            found.append(f"{missing} of {len(shown)} runs are not done")
        reasons = {}
        for row, reason in self._costs[1].items():
            reasons.setdefault(reason, []).append(row)
        found += [f"no cost ({reason}): {', '.join(rows)}" for reason, rows in reasons.items()]
        quirks = dict.fromkeys(quirk for row in self.rows for quirk in self.recipe.rows[row].quirks)
        found += [f"the paper's counting ({quirk}): {QUIRKS[quirk]}" for quirk in quirks if quirk in QUIRKS]
        return found

    def differs(self) -> list[str]:
        """What is known to differ from the paper, in all rows and in single ones."""
        return [
            *self.recipe.differs,
            *(f"{row}: {what}" for row in self.rows for what in self.recipe.rows[row].differs),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "recipe": self.name,
            "title": self.recipe.title,
            "where": self.recipe.where,
            "scale": self.scale,
            "changes": self.changes,
            "path": str(self.path),
            "runs": [
                {"row": one.row, "seed": one.seed, "path": str(one.folder), "state": one.state} for one in self.planned
            ],
            "costs_only": self.costs_only,
            "failures": [{"row": row, "seed": seed, "error": what} for (row, seed), what in self.failures.items()],
            "figures": self.figures(),
            "notes": self.notes(),
            "differs": self.differs(),
        }

    def show(self) -> None:
        """Print the table and its notes."""
        print(f"{self.name}, {self.recipe.where}: {self.recipe.title}{f'  [{self.mark}]' if self.mark else ''}")
        for line in aligned(self.table()):
            print(line)
        for note in (*self.notes(), *(f"known to differ: {what}" for what in self.differs())):
            print(note)

    def report(self, path: str | Path | None = None) -> Path:
        """Write a self-contained HTML page: table, pictures, known differences, commands; needs the extra `report`.

        Args:
            path: the file to write. None: report.html in the folder of the runs.

        Returns:
            The path.
        """
        from sparsona.reproduce.page import write

        return write(self, path or self.path / "report.html")


def reproduce(
    name: str | Recipe,
    *,
    rows: str = "*",
    seeds: int | Sequence[int] = 1,
    scale: float = 1.0,
    jobs: Jobs = 1,
    out: str | Path | None = None,
    dry_run: bool = False,
    observers: Sequence[object] = (),
    **options: Any,
) -> Reproduction:
    """Run what is missing of a table of a paper; finished runs are kept, interrupted ones resumed.

    Args:
        name: a recipe, such as "fedspa/table1" (`sparsona reproduce` lists them), or a Recipe of your own.
        rows: which of its rows, with wildcards as in file names: "cifar10/B/*". Rows that these start from or are
            compared with are run, too.
        seeds: a number of seeds, counted from 0, or a list of seeds.
        scale: shrinks rounds and clients, so that a laptop is enough; the result is marked, and compared with nothing.
        jobs: runs at a time, each in a process of its own. 1: all in this process, where compiled programs are shared.
            "auto": as many rows of one network as get faster by it all together, as for `compare`.
        out: the folder of the runs. None: runs/reproduce/PAPER/NAME, with the scale after it if there is one.
        dry_run: train nothing: costs, and what is done already.
        observers: as for `train`; they receive the records of one run after another, titled by row.
        options: set for all rows that have them, such as `precision="bf16"`; those that make another experiment are
            marked in the result.

    Returns:
        The table: paper, ours, difference, and whether they agree. A run that fails does not keep the others from
        being run; its error is in `failures` and in the notes.

    Example:
        >>> import sparsona as sp
        >>> from sparsona.reproduce.recipe import Recipe
        >>> tiny = {"clients": 4, "rounds": 1, "data_rate": 0.2}
        >>> accuracy = {"measure": "accuracy", "title": "accuracy, %"}
        >>> own = Recipe(title="Ours", where="table 1", columns={"accuracy": accuracy}, options=tiny,
        ...     rows={"alone": {"method": "local"}, "together": {"method": "fedavg"}})
        >>> [line["row"] for line in sp.reproduce(own).table()]
        ['alone', 'together']
    """
    jobs = check_jobs(jobs)
    plan = _plan(name, rows, seeds, scale, out, options)
    if not dry_run and plan.planned:
        _play(plan, ObserverList(observers), jobs)
    return plan


def open_reproduction(path: str | Path) -> Reproduction:
    """The reproduction in a folder, as it was last asked for; nothing is trained."""
    record = read_record(Path(path))
    recipe = (
        record.recipe if record.own is None else validate(Recipe, record.own, f"'{Path(path) / REPRODUCTION_FILE}'")
    )
    return _plan(recipe, record.rows, record.seeds, record.scale, path, record.changes)


def _plan(
    name: str | Recipe,
    pattern: str,
    seeds: int | Sequence[int],
    scale: float,
    out: str | Path | None,
    changes: Mapping[str, Any],
) -> Reproduction:
    """All runs, checked before anything is trained."""
    check_scale(scale)
    recipe = recipes.load(name) if isinstance(name, str) else name
    called = name if isinstance(name, str) else own_name(recipe.title, recipe.where)
    changes = {key.replace("-", "_"): value for key, value in changes.items()}
    for key in ("seed", "preset", "warm_start"):
        if key in changes:
            hint = "--seeds sets them" if key == "seed" else "leave it out"
            raise SparsonaError(f"'{key}' for all rows", expected="options that rows may share", hint=hint)
    for column in recipe.columns.values():
        find(column.measure)
    if recipe.picture is not None:
        text_of(recipe.picture)
    selected = select(recipe, pattern, called)
    needed = with_needed(recipe, selected)
    check_changes(recipe, needed, changes)
    check_folders(recipe.rows)
    path = Path(out) if out else default_path(called, scale, experiment_changes(recipe, changes))
    own = None if isinstance(name, str) else recipe.model_dump(mode="json")
    record = Record(
        recipe=called, own=own, rows=pattern, seeds=seed_numbers(0, seeds), scale=scale, changes=dict(changes)
    )
    _check_folder(path, record)
    costs_only: dict[str, str] = {}
    planned: list[Planned] = []
    for row in needed:
        options = row_options(recipe, row, changes)
        entry = recipe.rows[row]
        if reason := why_not_run(recipe, row, options):
            costs_only[row] = reason
        elif not is_here(recipe, row, options):
            data = data_of(entry.method, options)
            what = f"writers of {data}" if needs_owners(entry.method, options) else data
            costs_only[row] = f"no {what} here ({why_absent(recipe, row, options)})"
        elif entry.warm_start in costs_only:
            costs_only[row] = f"it starts from '{entry.warm_start}', which cannot be run"
        else:
            planned += [_planned_run(recipe, row, seed, scale, path, options) for seed in record.seeds]
    for one in planned:
        _check_same(one)
    return Reproduction(called, recipe, selected, planned, scale, changes, path, costs_only, record)


def _planned_run(recipe: Recipe, row: str, seed: int, scale: float, path: Path, options: Mapping[str, Any]) -> Planned:
    config, own = _make_row(recipe, row, {**options, "seed": seed}, scale)
    share = 1.0
    if scale < 1:
        full, _ = _make_row(recipe, row, options, 1.0)
        sampled = scale if config.clients is None or full.clients is None else config.sampled / full.sampled
        share = config.rounds / max(1, full.rounds) * sampled
    start = recipe.rows[row].warm_start
    if start is not None:
        config = config.model_copy(update={"warm_start": str((path / folder_of(start, seed)).absolute())})
    return Planned(row, seed, path / folder_of(row, seed), config, own, start, share)


def _make_row(recipe: Recipe, row: str, options: Mapping[str, Any], scale: float) -> tuple[RunConfig, BaseModel]:
    """The checked options of a row; where it starts from another row's model, that is still to be set."""
    method = recipe.rows[row].method
    given = dict(options)
    if recipe.rows[row].warm_start is not None:
        given["warm_start"] = str(Path.cwd())  # a folder that exists: the run to start from may not, yet
    try:
        if scale < 1:
            given |= scaled(make_config(method, given), scale)
        return make_configs(method, given)
    except SparsonaError as error:
        raise SparsonaError(f"row '{row}': {error.what}", expected=error.expected, hint=error.hint) from error


def _check_folder(path: Path, record: Record) -> None:
    """Refuse a folder of another recipe or scale."""
    if not (path / REPRODUCTION_FILE).exists():
        return
    found = read_record(path)
    if (found.recipe, found.scale) != (record.recipe, record.scale):
        raise SparsonaError(
            f"'{path}' has runs of {found.recipe} at scale {found.scale:g}",
            expected=f"a folder of {record.recipe} at scale {record.scale:g}, or a new one",
            hint="choose another --out, or leave it out",
        )


def _check_same(one: Planned) -> None:
    """Refuse a run that was made with other options: its result is not that of this row."""
    if not (one.folder / "config.json").exists():
        return
    now = one.config.model_dump(mode="json")
    # A run of an older version was made as if options that came later had their defaults.
    usual = RunConfig(method=one.config.method, options={}, matched=None).model_dump(mode="json") | BEFORE
    then = {**usual, **read_json(one.folder / "config.json")}

    def differs(key: str) -> bool:
        old, new = then[key], now[key]
        if key in ("clients", "novel") and (new is None or 0 < new < 1):
            return False  # the data determined it
        if key == "per_round" and now["clients"] is None and old == then["clients"] - then["novel"]:
            return False  # so many are all
        if key == "warm_start" and old and new:  # folders are moved
            return Path(old).name != Path(new).name
        return bool(old != new)

    if changed := [key for key in now if key not in _FREE and differs(key)]:
        listed = ", ".join(f"{key} {then[key]} -> {now[key]}" for key in changed[:3])
        raise SparsonaError(
            f"'{one.folder}' was run with other options than the row '{one.row}' has now: {listed}",
            expected="the same options: the recipe, a preset or --set has changed since",
            hint="choose another --out, or move that folder away to run the row again",
        )


def _play(plan: Reproduction, observers: ObserverList, jobs: Jobs) -> None:
    """Run what is not done: rows that others start from first, rows of one network one after another."""
    left = [one for one in plan.planned if one.state != "done"]
    _write_record(plan, left)
    is_timed = measures_time(plan.recipe)
    if is_timed and jobs != 1:
        warn("a column of this recipe is about time: runs follow each other, since they would slow each other down")
        jobs = 1
    try:
        while left:
            waiting = {(one.row, one.seed) for one in left}
            ready = [one for one in left if (one.after, one.seed) not in waiting]
            left = [one for one in left if one not in ready]
            ready.sort(key=_network)  # stable: else in the recipe's order
            if jobs != 1:
                # How many fit side by side depends on the network; a fixed number takes what comes next.
                groups = [list(one) for _, one in groupby(ready, key=_network)] if jobs == AUTO else [ready]
                for group in groups:
                    _play_in_processes(plan, group, observers, jobs)
            else:
                for one in ready:
                    try:
                        _play_one(one, observers.titled(one.row), Clock() if is_timed else OFF)
                    except _FAILURES as error:
                        plan.failures[one.row, one.seed] = _said(error)
            for one in [one for one in left if (one.after, one.seed) in plan.failures]:
                left.remove(one)
                plan.failures[one.row, one.seed] = f"it starts from '{one.after}', which failed"
    except KeyboardInterrupt:
        warn(f"the same command continues it; what is done is in '{plan.path}'")
        raise


def _network(one: Planned) -> tuple[str, str]:
    return one.config.data, str(one.config.model)


def _play_in_processes(plan: Reproduction, ready: Sequence[Planned], observers: ObserverList, jobs: Jobs) -> None:
    for one in ready:
        _set_limits(one)
    titles = {one.folder: one.row for one in ready}
    runs = [(one.folder, one.config, one.own) for one in ready]
    failed = play_in_processes(runs, titles, None, None, observers, jobs)
    for one in ready:
        if (error := failed.get(one.folder)) is not None:
            plan.failures[one.row, one.seed] = _said(error)


def _play_one(one: Planned, observers: ObserverList, clock: Clock) -> None:
    if one.state == "new":
        start_run(one.config, None, None, one.folder, observers, clock, method_config=one.own)
    else:
        _set_limits(one)
        resume_run(one.folder, None, None, observers)


def _set_limits(one: Planned) -> None:
    """Let a run that was stopped go on to the limits that are asked for now: those it has may be used up."""
    if (one.folder / "config.json").exists():
        with RunFolder.open(one.folder) as folder:
            folder.set_limits(one.config.model_dump(mode="json", include=_LIMITS))


def _said(error: BaseException) -> str:
    if isinstance(error, SparsonaError):
        return "; ".join(part for part in (error.what, error.expected, error.hint) if part)
    return str(error) or type(error).__name__


def _write_record(plan: Reproduction, left: Sequence[Planned]) -> None:
    """Note what was asked for, and which source each run was made with."""
    with explain_disk_errors(plan.path):
        plan.path.mkdir(parents=True, exist_ok=True)
    made = read_record(plan.path).commits if (plan.path / REPRODUCTION_FILE).exists() else {}
    commit = source_commit()
    made |= {one.folder.name: [*made.get(one.folder.name, []), commit] for one in left}
    plan.record = plan.record.model_copy(update={"commits": {key: sorted(set(value)) for key, value in made.items()}})
    write_atomically(plan.path / REPRODUCTION_FILE, (json.dumps(plan.record.model_dump(), indent=1) + "\n").encode())
