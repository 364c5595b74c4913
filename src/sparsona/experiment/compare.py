"""Compare methods under equal conditions, and resume a comparison."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from pydantic import BaseModel

from sparsona import methods
from sparsona.analysis import summary as summaries
from sparsona.core.arguments import place, text, whole
from sparsona.core.errors import SparsonaError
from sparsona.core.printable import warn
from sparsona.core.torch_state import usual_torch
from sparsona.data.federation import Federation
from sparsona.data.split_plan import MOST_SEED
from sparsona.engine.context import ClientContext, ServerContext
from sparsona.engine.pace import with_conditions
from sparsona.engine.rounds import check_plan
from sparsona.executors import choose, choose_device
from sparsona.experiment.build import (
    fit_weakest,
    make_configs,
    make_context,
    make_plan,
    options_taken_by,
    read_data,
    with_clients,
)
from sparsona.experiment.match import amounts, check_match, rounds_for
from sparsona.experiment.packing import Timer, read_rounds
from sparsona.experiment.parallel import (
    AUTO,
    Jobs,
    check_jobs,
    is_of_machine,
    is_out_of_memory,
    pack_given,
    packing_of,
    processes,
    unless_stopped,
)
from sparsona.experiment.run import Comparison, missing_in
from sparsona.experiment.train import (
    find_rows,
    folder_name,
    free_path,
    given_functions,
    given_methods,
    hint_resume,
    load_run,
    load_warm_start,
    resume_run,
    start_run,
)
from sparsona.methods import MethodCard
from sparsona.runs.comparison import COMPARISON_FILE, check_member, comparison_in, read_comparison, write_comparison
from sparsona.runs.failed import failed_run, read_failed, write_failed
from sparsona.runs.folder import RunFolder, make_empty_folder
from sparsona.runs.listing import find_run
from sparsona.runs.manifest import read_manifest
from sparsona.runs.observers import ObserverList, ProgressUpdate
from sparsona.runs.options import BEFORE, CONDITIONS, MATCHES, OF_DATA, OPTIONS, Matched, RunConfig
from sparsona.runs.progress import shown_progress
from sparsona.runs.relay import Keeper, pass_on
from sparsona.runs.request import parse_method
from sparsona.runs.session import PROGRESS_SECONDS
from sparsona.runs.validation import merge_errors, validate

Named = str | MethodCard | Callable[..., Any]  # a method: the name of its row, or one passed from Python

FAR = 0.2  # off the budget: worth a warning
MANY = 10  # times the rounds that were asked for: worth a warning


MOST_SEEDS = 100_000


@dataclass(frozen=True)
class Entry:
    """A method of a comparison: how it was written, its row, and its own options."""

    text: str
    row: MethodCard
    own: Mapping[str, Any]


@usual_torch()
def compare(
    names: Sequence[Named | tuple[Named, Mapping[str, Any]]],
    federation: Federation | None = None,
    model: Any = None,
    *,
    seeds: int | Sequence[int] = 1,
    match: str = "rounds",
    jobs: Jobs = 1,
    out: str | Path | None = None,
    observers: Sequence[object] = (),
    progress: bool | None = None,
    **options: Any,
) -> Comparison:
    """Train several methods under the same seeds: same partition, split, initial weights and sampled clients.

    Args:
        names: rows of `sparsona methods`, each with options of its own after a colon if needed, or in a pair:
            ("fedspa", {"density": 0.2}); and methods of your own, as for `train`, alone or in such a pair.
        federation: your own data, as for `train`.
        model: a network, as for `train`.
        seeds: a number of seeds, counted from the option `seed`, or a list of seeds.
        match: what is the same for all: "rounds", or "steps", "flops" or "bytes". The budget is what the first method
            that spends any of it spends in `rounds` rounds; each other one gets the number of rounds that comes
            nearest to it, final tuning included.
        jobs: runs at a time, each in a process of its own; the results are the same. "auto": one, and another one for
            as long as the rounds of all together get a tenth faster by it.
        out: the folder of the comparison, which must not exist yet. None: a new one in ./runs.
        observers: as for `train`; they receive the records of one run after another.
        progress: whether to show progress, as for `train`.
        options: as for `train`. An option, or a preset, that only some of the methods have is given to those.

    Returns:
        The runs, with tables of their results. A run that fails does not end the others: `missing` says which did, and
        `sparsona.resume_comparison` retries them. SparsonaError: all failed.

    Example:
        >>> import sparsona as sp
        >>> both = sp.compare(["local", "fedavg"], clients=4, rounds=1)
        >>> [row["method"] for row in both.table()]
        ['Local', 'FedAvg']
    """
    jobs = check_jobs(jobs)
    text("match", match, "rounds")
    path = None if out is None else place("out", out)
    with shown_progress(progress, observers, has_seeds=not isinstance(seeds, int) or seeds != 1) as everyone:
        return _start(names, federation, model, seeds, match, jobs, path, ObserverList(everyone), options)


def _start(
    names: Sequence[Named | tuple[Named, Mapping[str, Any]]],
    federation: Federation | None,
    model: Any,
    seeds: int | Sequence[int],
    match: str,
    jobs: Jobs,
    out: Path | None,
    observers: ObserverList,
    options: Mapping[str, Any],
) -> Comparison:
    entries, planned = _plan(names, federation, model, seeds, match, options)
    if jobs != 1:
        pack_given(
            model, [config.functions for config, _ in planned.values()], _rows(entries)
        )  # before a folder is made
    path = out or free_path("compare")
    make_empty_folder(path)
    names_of = [f"{folder_name(text)}-seed{seed}" for text, seed in planned]
    options_of_runs = [config.model_dump(mode="json") for config, _ in planned.values()]
    write_comparison(path, list(zip(names_of, options_of_runs, strict=True)))
    folders = [path / name for name in names_of]
    runs = [(folder, config, own) for folder, (config, own) in zip(folders, planned.values(), strict=True)]
    with hint_resume(path, _named(jobs)):
        return _compare(path, runs, _rows(entries), federation, model, observers, jobs)


def _named(jobs: Jobs) -> Jobs | None:
    """As a command has it: one at a time is what it does by itself."""
    return None if jobs == 1 else jobs


Planned = dict[tuple[str, int], tuple[RunConfig, BaseModel]]  # by how a method was written, and seed


def _reader(federation: Federation | None) -> Callable[[RunConfig], Federation]:
    """A function that returns the data of a run. Methods have the same but for a preset's exceptions."""
    read: dict[str, Federation] = {}

    def data_of(config: RunConfig) -> Federation:
        if federation is not None:
            return federation
        key = repr([getattr(config, name) for name in ("seed", *OF_DATA)])
        if key not in read:
            read.clear()  # one at a time: a data set may be large
            read[key] = read_data(config)
        return read[key]

    return data_of


def _plan(
    names: Sequence[Named | tuple[Named, Mapping[str, Any]]],
    federation: Federation | None,
    model: Any,
    seeds: int | Sequence[int],
    match: str,
    options: Mapping[str, Any],
) -> tuple[list[Entry], Planned]:
    """Every run of a comparison, checked."""
    check_match(match)
    entries = _entries(names)
    options = dict(options)
    numbers = seed_numbers(options.pop("seed", 0), seeds)
    rows = _rows(entries)
    planned = _plan_runs(entries, numbers, options, federation, model)
    # Errors in the data, the model or the executor are raised before a folder is made.
    sides: dict[str, ServerContext] = {}
    data_of = _reader(federation)

    def build(config: RunConfig, of_method: BaseModel) -> ClientContext:
        data = data_of(config)
        config = with_clients(config, rows[config.method], data.num_clients)
        if found := config.conflicts():
            raise merge_errors(found)
        start = load_warm_start(config)
        return make_context(config, data, model, start=start, method_config=of_method, row=rows[config.method])

    for entry in entries:
        config, of_method = planned[entry.text, numbers[0]]

        if min(config.capacities) < 1:
            fitted, of_method = fit_weakest(config, of_method, build)
            changed = {"options": fitted.options, "subnetwork": fitted.subnetwork}
            for seed in numbers:
                planned[entry.text, seed] = planned[entry.text, seed][0].model_copy(update=changed), of_method
            config = fitted
        context = build(config, of_method)
        choose(config.executor, context)
        check_plan(context.server_side)
        sides[entry.text] = context.server_side
    if match != "rounds":
        planned = _match_rounds(match, entries, planned, sides, data_of)
    return entries, planned


def planned_options(
    names: Sequence[Named], federation: Federation | None, model: Any, match: str, options: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Any]], int]:
    """What a comparison with one seed would set for each method: its rounds and, with weak clients, its size.

    The number is that of the rounds before anything was matched.
    """
    entries, planned = _plan(names, federation, model, 1, match, options)
    found: dict[str, dict[str, Any]] = {}
    first = next(iter(planned.values()))[0]
    for entry, (config, _) in zip(entries, planned.values(), strict=True):
        found[entry.text] = {"rounds": config.rounds}
        if min(config.capacities) < 1:
            size = {"subnetwork": config.subnetwork, "density": config.options.get("density")}
            found[entry.text] |= {key: value for key, value in size.items() if value is not None}
    return found, first.rounds if first.matched is None else first.matched.rounds


def _entries(names: Sequence[Named | tuple[Named, Mapping[str, Any]]]) -> list[Entry]:
    """The methods to compare, each different."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise SparsonaError(
            f"methods to compare as a {type(names).__name__}",
            expected="a list of rows of `sparsona methods`",
            hint='compare(["fedavg", "fedspa"])',
        )
    if not (names := list(names)):
        raise SparsonaError("no method to compare", expected="one or more rows of `sparsona methods`")
    entries = []
    for name in names:
        method, pair = name if isinstance(name, tuple) and len(name) == 2 else (name, {})
        if not (isinstance(method, str | MethodCard) or callable(method)) or not isinstance(pair, Mapping):
            raise SparsonaError(
                f"a {type(name).__name__} among the methods to compare",
                expected="names of rows of `sparsona methods`, methods of your own, or pairs of one and a dict of its "
                "options",
                hint='compare(["fedavg", mine, ("fedspa", {"density": 0.2})])',
            )
        if isinstance(method, str):
            text, (row_name, own) = method, parse_method(method)
            row = methods.card(row_name)
        else:
            row, own = methods.as_card(method), {}
            text = row.name
        own = {**own, **{str(key).replace("-", "_"): value for key, value in pair.items()}}
        if pair:
            text = f"{row.name}:{','.join(f'{key}={value}' for key, value in own.items())}"
        entries.append(Entry(text, row, own))
    given_methods(one.row for one in entries)  # each name is one method's
    texts = [entry.text for entry in entries]
    if len(set(texts)) < len(texts):
        raise SparsonaError(
            f"a method twice in {', '.join(texts)}",
            expected="methods that differ",
            hint="give one of them other options: fedspa:density=0.2",
        )
    return entries


def _rows(entries: Sequence[Entry]) -> dict[str, MethodCard]:
    """The rows of the methods to compare, by name."""
    return {one.row.name: one.row for one in entries}


def seed_numbers(first: Any, seeds: int | Sequence[int]) -> list[int]:
    """The seeds of a number of runs, counted from the first, or those that are listed; all different."""
    first = whole("seed", first, -MOST_SEED, MOST_SEED - MOST_SEEDS)  # below 0 as for one run
    if isinstance(seeds, Sequence) and not isinstance(seeds, str | bytes) and len(seeds) <= MOST_SEEDS:
        numbers = [whole("seeds", seed, 0, MOST_SEED) for seed in seeds]
    elif isinstance(seeds, np.ndarray) and seeds.ndim == 1:
        return seed_numbers(first, seeds.tolist())
    else:
        numbers = list(range(first, first + whole("seeds", seeds, 0, MOST_SEEDS)))
    if not numbers or len(set(numbers)) < len(numbers):
        raise SparsonaError(
            f"seeds {numbers}" if numbers else "no seeds", expected="at least one, all different", hint="--seeds 3"
        )
    return numbers


def _plan_runs(
    entries: Sequence[Entry],
    numbers: Sequence[int],
    options: Mapping[str, Any],
    federation: Federation | None,
    model: Any,
) -> Planned:
    """Every run with its options, under the same conditions."""
    planned: Planned = {}
    used: set[str] = set()
    given: dict[str, dict[str, Any]] = {}
    for entry in entries:
        mine = options_taken_by(entry.row, options, [one.row for one in entries])
        used |= set(mine)
        _check_own(entry)
        given[entry.text] = {**mine, **entry.own}
    _share_conditions(entries, given, options.get("preset"), federation, model)
    for entry in entries:
        for seed in numbers:
            planned[entry.text, seed] = make_configs(entry.row, {**given[entry.text], "seed": seed}, federation, model)
    trials = {one.text: given[one.text].get("tuned_with") for one in entries}
    if len(set(trials.values())) > 1:
        rows = [one.row.name for one in entries]
        called = {one.text: one.row.name if rows.count(one.row.name) == 1 else one.text for one in entries}
        tried = ", ".join(f"{called[text]} {number or 'not tuned'}" for text, number in trials.items())
        warn(f"options were tuned with different numbers of trials: {tried}")
    if unused := set(options) - used:
        known = set(OPTIONS).union(*(methods.factory(entry.row)[1].model_fields for entry in entries))
        raise methods.unknown_option([entry.row.name for entry in entries], sorted(unused)[0], known)
    _check_conditions(entries, {one.text: planned[one.text, numbers[0]][0] for one in entries}, given)
    configs = [config for config, _ in planned.values()]
    if alike := [text for (text, _), (config, _) in planned.items() if configs.count(config) > 1]:
        raise SparsonaError(
            f"{' and '.join(dict.fromkeys(alike))} are the same method with the same options",
            expected="methods that differ",
            hint="leave one of them out, or give it other options: fedspa:density=0.2",
        )
    return planned


def _share_conditions(
    entries: Sequence[Entry],
    given: dict[str, dict[str, Any]],
    preset: Any,
    federation: Federation | None,
    model: Any,
) -> None:
    """Give the conditions of a preset to the methods that do not have it, and say so: it is one experiment for all."""
    without = [one for one in entries if "preset" not in given[one.text]]
    if not preset or not without:
        return
    shared: dict[str, Any] = {}
    for one in entries:
        if one not in without:
            config = make_configs(one.row, given[one.text], federation, model)[0]
            published = methods.published(one.row, given[one.text]).keys() & _conditions(one, given, entries)
            if federation is not None:
                published -= set(OF_DATA)
            shared = {key: getattr(config, key) for key in sorted(published)} | shared
    for one in without:
        mine = {key: value for key, value in shared.items() if key in _conditions(one, given, entries)}
        given[one.text] = {**mine, **given[one.text]}
    conditions = ", ".join(f"{key}={value}" for key, value in shared.items())
    warn(
        f"{', '.join(one.text for one in without)} without the preset '{preset}', which they do not have"
        + (f", but under its conditions: {conditions}" if conditions else "")
    )


def _exceptions(entry: Entry, given: Mapping[str, Mapping[str, Any]], entries: Sequence[Entry]) -> Mapping[str, str]:
    """Conditions in which this method differs from others of one published experiment, and why."""
    name = given[entry.text].get("preset")
    if not name or any(given[one.text].get("preset") != name and name in one.row.presets for one in entries):
        return {}
    return methods.preset(entry.row, str(name)).exceptions


def _conditions(entry: Entry, given: Mapping[str, Mapping[str, Any]], entries: Sequence[Entry]) -> frozenset[str]:
    """What this method must have in common with the others."""
    found = CONDITIONS - _exceptions(entry, given, entries).keys()
    return found - {"per_round"} if entry.row.peers else found  # all peers take part where a server samples some


def _unequal(what: str, key: str) -> SparsonaError:
    return SparsonaError(
        f"{what} for one method alone",
        expected="the same data, clients, model and seeds for all, or their results would not compare",
        hint=f"set it for all: --{key.replace('_', '-')} or --set {key}=...",
    )


def _check_own(entry: Entry) -> None:
    """Refuse conditions among the options of one method."""
    conditions = CONDITIONS - ({"per_round"} if entry.row.peers else set())
    if common := sorted(conditions & set(entry.own)):
        raise _unequal(f"'{entry.text}' sets {', '.join(common)}", common[0])


def _check_conditions(
    entries: Sequence[Entry], configs: Mapping[str, RunConfig], given: Mapping[str, Mapping[str, Any]]
) -> None:
    """Refuse conditions that a preset, or a row itself, sets to another value than the other methods have."""
    unequal: dict[str, str] = {}
    for entry in entries:
        name, published = given[entry.text].get("preset"), methods.published(entry.row, given[entry.text])
        for key in {**entry.row.engine, **published}:
            if key in given[entry.text] or key not in CONDITIONS:
                continue
            others = [one for one in entries if key in _conditions(one, given, entries)]
            if key not in _conditions(entry, given, entries):
                here, there = (getattr(configs[one.text], key) for one in (entry, others[0] if others else entry))
                if (why := _exceptions(entry, given, entries).get(key)) and here != there:
                    warn(f"{entry.text} has {key}={here}, the others {there}, as in the preset '{name}': {why}")
            elif len({repr(getattr(configs[one.text], key)) for one in others}) > 1:
                unequal[key] = f"{key} ({', '.join(f'{one.text} {getattr(configs[one.text], key)}' for one in others)})"
    if unequal:
        presets = sorted({f"'{given[one.text]['preset']}'" for one in entries if given[one.text].get("preset")})
        source = f"the preset {' or '.join(presets)}" if presets else "a row"
        first = next(iter(unequal))
        raise SparsonaError(
            f"{source} sets conditions that differ between methods: {'; '.join(unequal.values())}",
            expected="the same data, clients, model and seeds for all, or their results would not compare",
            hint=f"set them for all (--{first.replace('_', '-')} ...), or name one paper's experiment: --preset fedspa",
        )


def _match_rounds(
    by: str,
    entries: Sequence[Entry],
    planned: Planned,
    sides: Mapping[str, ServerContext],
    data_of: Callable[[RunConfig], Federation],
) -> Planned:
    """The same runs, each method with as many rounds as spend what the first one does.

    `sides` are those of the first seed.
    """
    if not all(config.rounds for config, _ in planned.values()):
        raise SparsonaError(
            f"--match {by} with rounds = 0",
            expected="methods that all have rounds: their number is what a match chooses",
            hint="leave --match out",
        )
    first = next(iter(planned.values()))[0]
    for name, is_open in (
        ("sampler=loss", first.sampler == "loss"),
        ("patience", first.patience is not None),
        ("a trace", (first.availability or "").startswith("file")),
    ):
        if is_open:
            raise SparsonaError(
                f"--match {by} with {name}",
                expected="rounds whose clients are known before training, and go on as long as needed",
                hint="leave one of them out",
            )
    seeds = list(dict.fromkeys(seed for _, seed in planned))
    of_method: dict[str, list[ServerContext]] = {entry.text: [] for entry in entries}
    for seed in seeds:
        for entry in entries:
            shared = data_of(planned[entry.text, seed][0])
            config = with_clients(planned[entry.text, seed][0], entry.row, shared.num_clients)
            plan = make_plan(config, shared.num_clients, entry.row.peers)
            clients = tuple(with_conditions(plan, shared.clients(config.capacities)))
            of_method[entry.text].append(replace(sides[entry.text], plan=plan, clients=clients))
    spends = {entry.text: amounts(of_method[entry.text], by) for entry in entries}
    reference = next((entry for entry in entries if any(spends[entry.text][0])), None)
    if reference is None:
        raise SparsonaError(
            f"--match {by}: none of these methods spends any {MATCHES[by]}",
            expected="a method that does",
            hint="--match steps",
        )
    budgets, is_exact = spends[reference.text]
    found: Planned = {}
    for entry in entries:
        rounds = planned[entry.text, seeds[0]][0].rounds
        chosen = rounds if entry is reference else rounds_for(of_method[entry.text], by, sum(budgets))
        if chosen is not None and entry is not reference:
            share = sum(amounts(of_method[entry.text], by, chosen)[0]) / sum(budgets)
            if abs(share - 1) > FAR:
                warn(
                    f"{entry.text} is matched only roughly: in {chosen:,} round{'s' * (chosen > 1)}, the nearest, it "
                    f"spends {share:.0%} of the {MATCHES[by]} of {reference.text}; more --rounds would bring it nearer"
                )
        if chosen is not None and chosen > MANY * rounds:
            warn(f"{entry.text} gets {chosen:,} rounds to spend as many {MATCHES[by]} as {reference.text} in {rounds}")
        for seed, budget in zip(seeds, budgets, strict=True):
            config, own = planned[entry.text, seed]
            matched = Matched(
                by=by,
                to=reference.row.title,
                rounds=rounds,
                budget=None if chosen is None else budget,
                exact=is_exact and spends[entry.text][1],
            )
            found[entry.text, seed] = config.model_copy(update={"rounds": chosen or rounds, "matched": matched}), own
    return found


@usual_torch()
def resume_comparison(
    path: str | Path,
    federation: Federation | None = None,
    model: Any = None,
    *,
    methods: Sequence[MethodCard | Callable[..., Any]] = (),
    loss: Callable[..., Any] | None = None,
    metrics: Sequence[Callable[..., Any]] = (),
    jobs: Jobs = 1,
    observers: Sequence[object] = (),
    progress: bool | None = None,
    sampler: Callable[..., Any] | None = None,
) -> Comparison:
    """Resume a comparison: finished runs are kept, the others are resumed or started.

    Args:
        path: the comparison's folder, or its name in ./runs.
        federation: the data, again, if it was started with a federation.
        model: the model, again, if it was started with a module or function.
        methods: the methods, again, that were passed as a MethodCard or factory.
        loss: the function, again, if it was started with one.
        metrics: the functions, again, that it was started with.
        jobs: as for `compare`.
        observers: as for `train`.
        progress: as for `train`.
        sampler: the function that samples clients, again, if it was started with one.

    Returns:
        The finished comparison; the same as without the interruption.

    Example:
        >>> import sparsona as sp
        >>> both = sp.compare(["local", "fedavg"], clients=4, rounds=1, data_rate=0.1, out="runs/both")
        >>> sp.resume_comparison("runs/both").table() == both.table()
        True
    """
    path, jobs = find_run(path), check_jobs(jobs)
    functions, given = given_functions(loss, metrics, sampler), given_methods(methods)
    with hint_resume(path, _named(jobs)), shown_progress(progress, observers, has_seeds=True) as everyone:
        where = f"'{path / COMPARISON_FILE}'"
        planned = read_comparison(path)
        for folder, values in planned:
            if (folder / "config.json").exists():
                check_member(RunFolder.open(folder), values)
        runs = [
            (folder, validate(RunConfig, {**BEFORE, **values}, where).with_functions(functions), None)
            for folder, values in planned
        ]
        rows = find_rows(path, [config.method for _, config, _ in runs], given, "sparsona.resume_comparison")
        return _compare(path, runs, rows, federation, model, ObserverList(everyone), jobs)


def load_comparison(
    path: str | Path,
    federation: Federation | None = None,
    model: Any = None,
    *,
    methods: Sequence[MethodCard | Callable[..., Any]] = (),
    loss: Callable[..., Any] | None = None,
    metrics: Sequence[Callable[..., Any]] = (),
) -> Comparison:
    """Load the results of a comparison without resuming it; its tables and figures need the path alone.

    Args:
        path: the comparison's folder, or its name in ./runs; a search has a comparison of its methods with the chosen
            options.
        federation: as for `load`, of its runs.
        model: as for `load`.
        methods: the methods, again, that were passed as a MethodCard or factory; needed for their models only.
        loss: as for `load`.
        metrics: as for `load`.

    Returns:
        The comparison, with the runs that have evaluated a round, finished or not.

    Example:
        >>> import sparsona as sp
        >>> both = sp.compare(["local", "fedavg"], clients=4, rounds=1, data_rate=0.1, out="runs/stored")
        >>> sp.load_comparison("runs/stored").table() == both.table()
        True
    """
    path, functions = comparison_in(find_run(path)), given_functions(loss, metrics)
    given = given_methods(methods)
    missing = missing_in(path)
    lost = {one.folder for one in missing}
    folders = [(folder, values) for folder, values in read_comparison(path) if folder.name not in lost]
    there = [(folder, values["method"]) for folder, values in folders if summaries.has_results(RunFolder.open(folder))]
    runs = [load_run(folder, federation, model, given.get(name), functions) for folder, name in there]
    return Comparison(path, runs, missing)


def _compare(
    path: Path,
    planned: Sequence[tuple[Path, RunConfig, BaseModel | None]],
    rows: Mapping[str, MethodCard],
    federation: Federation | None,
    model: Any,
    observers: ObserverList,
    jobs: Jobs,
) -> Comparison:
    titles = {folder: rows[config.method].title for folder, config, _ in planned}
    shown = _shown_titles(planned, titles)
    failures: Mapping[Path, BaseException] = {}
    if jobs != 1:
        failures = play_in_processes(planned, shown, federation, model, observers, jobs, rows)
    runs, failed = [], read_failed(path)
    errors: list[Exception] = []
    for folder, config, method_config in planned:
        row, functions, observing = (
            rows[config.method],
            config.functions,
            observers.titled(shown[folder]),
        )
        try:
            if (error := failures.get(folder)) is not None:
                raise error
            if jobs != 1:
                runs.append(load_run(folder, federation, model, row, functions))
            elif (folder / "config.json").exists():
                runs.append(resume_run(folder, federation, model, observing, method=row, functions=functions))
            else:
                run = start_run(config, federation, model, folder, observing, method_config=method_config, row=row)
                runs.append(run)
            failed.pop(folder.name, None)
        except Exception as error:  # a method's fault, or one of a person's model, must not cost the others their runs
            if is_of_machine(error):
                raise
            errors.append(error)
            failed[folder.name] = failed_run(folder, titles[folder], config.seed, error)
            warn(f"{failed[folder.name].sentence}; the comparison goes on without it")
        write_failed(path, failed)
    if not runs:
        others = len(errors) - 1
        errors[0].add_note(f"{others} other runs failed as well" if others else "there is no other run")
        raise errors[0]
    # Runs that their validation data ended are as long as they are meant to be.
    stopped = [run for run in runs if run.summary["rounds"] < run.config["rounds"] and "early_stop" not in run.summary]
    if (stopped and len(stopped) < len(runs)) or len({run.summary["rounds"] for run in stopped}) > 1:
        reached = sorted({run.summary["rounds"] for run in runs})
        warn(f"these runs stopped at different rounds ({reached}): their results do not compare")
    return Comparison(path, runs, tuple(failed.values()))


def _shown_titles(
    planned: Sequence[tuple[Path, RunConfig, BaseModel | None]], titles: Mapping[Path, str]
) -> dict[Path, str]:
    """What progress calls each run: the title of its method or, of several with the same one, as the method was written
    in the name of the folder."""
    written = {folder: folder.name.removesuffix(f"-seed{config.seed}") for folder, config, _ in planned}
    namesakes: dict[str, set[str]] = {}
    for folder, title in titles.items():
        namesakes.setdefault(title, set()).add(written[folder])
    return {folder: title if len(namesakes[title]) == 1 else written[folder] for folder, title in titles.items()}


def play_in_processes(
    planned: Sequence[tuple[Path, RunConfig, BaseModel | None]],
    titles: Mapping[Path, str],
    federation: Federation | None,
    model: Any,
    observers: ObserverList,
    jobs: Jobs,
    rows: Mapping[str, MethodCard] | None = None,
) -> dict[Path, BaseException]:
    """All runs, each in a process; observers receive when one begins, what it has saved, and, when it is over, its
    records.

    Args:
        planned: folder, options, and the method's own options if they were validated.
        titles: what observers call the run in a folder.
        federation: as for `compare`.
        model: as for `compare`.
        observers: receive the progress and the records.
        jobs: runs at a time, as for `compare`.
        rows: of the methods, by name, where some were passed from Python. None: all are installed.

    Returns:
        The errors of those that failed, by folder; the others are finished.
    """
    functions = {key: value for _, config, _ in planned for key, value in config.functions.items()}
    given = pack_given(federation, model, functions, rows or {})
    reported: dict[Path, ProgressUpdate] = {}
    failures: dict[Path, BaseException] = {}
    waiting = deque((folder, config) for folder, config, _ in planned if not _is_finished(folder))
    running: dict[Future[None], tuple[Path, RunConfig]] = {}
    packing = packing_of(jobs, jobs == AUTO and any(_is_on_gpu(config) for _, config in waiting))

    def report(folder: Path, config: RunConfig, doing: str | None = None, is_over: bool = False) -> None:
        if doing is None:
            is_one_of = jobs == AUTO and len(running) > 1
            doing = f"one of {len(running)} at a time" if is_one_of else "in a process of its own"
        found = _saved(folder, config, titles[folder], doing, is_over)
        if found != reported.get(folder):
            reported[folder] = found
            observers.on_progress(found)

    receivers = observers.of_records()
    with TemporaryDirectory(prefix="sparsona-") as kept:
        # Records may be large: they are kept only if somebody receives them. Rounds are timed only while it matters.
        heard = [] if receivers.is_empty else [folder for folder, _, _ in planned]
        records = {folder: Path(kept) / f"{place}.pickle" for place, folder in enumerate(heard)}
        timed = [] if packing.is_settled else [folder for folder, _, _ in planned]
        times = {folder: Path(kept) / f"{place}.rounds" for place, folder in enumerate(timed)}
        try:
            with processes(packing.most) as pool:
                while waiting or running:
                    # None waits inside the pool: what is reported has begun.
                    while waiting and len(running) < packing.limit:
                        folder, config = waiting.popleft()
                        values = config.model_dump(mode="json")
                        files = records.get(folder), times.get(folder)
                        future = pool.submit(unless_stopped, _play_run, str(folder), values, given, *files)
                        running[future] = folder, config
                        report(folder, config)
                    for future in wait(running, PROGRESS_SECONDS, FIRST_COMPLETED).done:
                        folder, config = running.pop(future)
                        if isinstance(error := future.exception(), BrokenProcessPool):
                            raise error
                        try:
                            if folder in records:
                                pass_on(records[folder], receivers)
                        except Exception as other:  # as with one job, an observer's error is that of its run
                            error = error or other
                        if jobs == AUTO and is_out_of_memory(error) and packing.give_way(len(running)):
                            waiting.appendleft((folder, config))  # with fewer beside it, it goes on where it was
                            report(folder, config, "waits for memory")
                            continue
                        if error is not None:
                            failures[folder] = error
                        report(folder, config, "" if error is None else "failed", is_over=True)
                    for folder, config in running.values():
                        report(folder, config)
                    if waiting and not packing.is_settled:
                        found = {folder: read_rounds(times[folder]) for folder, _ in running.values()}
                        packing.update(found, time.time())
        except BaseException as error:
            for path in records.values():  # of runs that were stopped with this one
                try:
                    pass_on(path, receivers)
                except Exception as other:
                    error.add_note(f"an observer failed at the end, too: {other!r}")
            raise
    return failures


def _is_on_gpu(config: RunConfig) -> bool:
    return choose_device(config.device, config.precision).type == "cuda"


def _is_finished(folder: Path) -> bool:
    with suppress(SparsonaError, OSError):  # damage is an error where the run is loaded
        return (found := read_manifest(folder)) is not None and found.finished
    return False


def _saved(folder: Path, config: RunConfig, title: str, doing: str, is_over: bool) -> ProgressUpdate:
    """How far a run in another process has got, by its manifest."""
    completed, seconds = 0, 0.0
    with suppress(SparsonaError, OSError):  # a folder that is damaged is an error of that process, which plays the run
        if (found := read_manifest(folder)) is not None:
            completed, seconds = found.completed, found.seconds
            if is_over and not doing and completed < config.rounds:
                doing = "stopped early" if found.finished else "stopped"
    return ProgressUpdate(title, config.seed, completed, config.rounds, doing, seconds, is_over)


def _play_run(path: str, values: dict[str, Any], given: bytes, records: Path | None, times: Path | None) -> None:
    """One run of a comparison, in a process; `records` is the file in which they are kept for observers, if any, and
    `times` that of the times of its rounds."""
    import cloudpickle

    federation, model, functions, rows = cloudpickle.loads(given)
    folder, config = Path(path), validate(RunConfig, values, path).with_functions(functions)
    kept = [] if records is None else [Keeper(records)]
    observers = ObserverList([*kept, *([] if times is None else [Timer(times)])])
    row = rows.get(config.method)
    if (folder / "config.json").exists():
        resume_run(folder, federation, model, observers, method=row, functions=functions)
    else:
        start_run(config, federation, model, folder, observers, row=row)
