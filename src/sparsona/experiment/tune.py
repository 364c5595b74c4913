"""Search a method's options on data held out of training: as many trials for every method.

Test data has no part in it: in a trial each client is tested on a part of its training data (`holdout_rate`), and its
test data is not read. Trials have another seed than the results that are reported later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import filelock

from sparsona import methods
from sparsona.core.arguments import number, place, text, truth, whole
from sparsona.core.errors import SparsonaError
from sparsona.core.printable import printable, warn
from sparsona.core.rows import html_table, text_table
from sparsona.core.torch_state import usual_torch
from sparsona.data.federation import Federation
from sparsona.data.split_plan import MOST_SEED
from sparsona.executors import choose_device
from sparsona.experiment.build import make_configs, name_functions, options_taken_by, start_path
from sparsona.experiment.compare import MOST_SEEDS, Named, compare, planned_options, resume_comparison
from sparsona.experiment.parallel import check_jobs, usual_jobs
from sparsona.experiment.run import Comparison
from sparsona.experiment.search import (
    Listen,
    Search,
    Space,
    Trial,
    play_all,
    read_file,
    size_of,
    write_file,
    written,
    written_options,
    written_value,
)
from sparsona.experiment.train import find_rows, free_path, given_methods, hint_resume
from sparsona.methods import MethodCard
from sparsona.runs.comparison import COMPARISON_FILE, REFIT, SEARCH_FILE, TUNED_FILE
from sparsona.runs.declaration import options_of
from sparsona.runs.files import check_plain
from sparsona.runs.folder import make_empty_folder, write_atomically
from sparsona.runs.observers import ObserverList
from sparsona.runs.options import MOST_ROUNDS, OPTIONS
from sparsona.runs.request import as_stored, parse_method, write_toml

LEARNING_RATES = (0.005, 0.01, 0.03, 0.05, 0.1, 0.3, 0.5)  # pFedGate, appendix: for each method on each data set
CHANGE_WORK = {"epochs", "personal_epochs", "tune_epochs", "batch_size", "inner_steps", "num_models", "density"}
CURVE_POINTS = 10  # evaluations in a trial, at which it may be pruned
MOST_TRIALS = 1_000_000
FORMAT = 1  # of tune.json
SEED_STRIDE = 1000  # trials have seeds this far from those that are reported


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is searched; stored in tune.json."""

    names: list[str]
    options: dict[str, Any]
    search: dict[str, list[Any]]
    trials: int
    holdout_rate: float
    seed: int
    refit_seeds: int
    prune: bool
    match: str
    planned: dict[str, dict[str, Any]]  # what a comparison sets for each method: its rounds, its size
    model: str | None  # its name, if it has one
    given: list[str]  # what came from Python and has no name: federation, model
    format: int = FORMAT


@dataclass(frozen=True)
class Tuned:
    """The trials of one method, and the best of them."""

    name: str
    space: Space
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial | None:
        """The complete trial of the highest value, the first of equal ones; None: none could be completed."""
        complete = [one for one in self.trials if one.state == "complete" and one.value is not None]
        return max(complete, key=lambda one: one.value or 0.0) if complete else None


class Tuning:
    """The result of a search, read from its folder. `tune` returns it.

    Args:
        path: the folder of the search.
        methods: the trials of each method, by the name it was given.
        match: what trials and results have in common.
        comparison: the methods with the options that were chosen, trained again on all training data; None: not done.

    Example:
        >>> import sparsona as sp
        >>> found = sp.tune(["fedavg"], clients=4, rounds=1, data_rate=0.1, trials=2, refit_seeds=0, jobs=1)
        >>> len(found.methods["fedavg"].trials), sorted(found.best["fedavg"])
        (2, ['lr'])
    """

    def __init__(self, path: Path, methods: dict[str, Tuned], match: str, comparison: Comparison | None) -> None:
        self.path, self.methods, self.match, self.comparison = path, methods, match, comparison

    def __repr__(self) -> str:
        return f"{self._head}\n{text_table(self.table())}"

    def _repr_html_(self) -> str:
        return html_table(self.table(), self._head)

    @property
    def _head(self) -> str:
        trials = sum(len(tuned.trials) for tuned in self.methods.values())
        return printable(f"Tuning({', '.join(self.methods)}, {trials} trials, '{self.path}')", kept="")

    @property
    def config(self) -> Path:
        """The file of options that `sparsona run METHOD --config` and `sparsona compare --config` take."""
        return self.path / TUNED_FILE

    @property
    def best(self) -> dict[str, dict[str, Any]]:
        """The options that were chosen, by method; without methods of which no trial could be completed."""
        return {name: tuned.best.options for name, tuned in self.methods.items() if tuned.best is not None}

    def with_trials(self) -> dict[str, dict[str, Any]]:
        """The options that were chosen and, where there was something to search, by how many trials."""
        return {
            name: {**options, **({"tuned_with": len(self.methods[name].trials)} if options else {})}
            for name, options in self.best.items()
        }

    def table(self) -> list[dict[str, str]]:
        """One row per method, ready to print.

        Returns:
            What was chosen among how much, and its accuracy on held-out data.
        """
        rows = []
        for name, tuned in self.methods.items():
            best, states = tuned.best, [one.state for one in tuned.trials]
            options = "no trial was completed" if best is None else written_options(best.options)
            rows.append(
                {
                    "method": name,
                    "chosen": options or "nothing to search",
                    "held-out": "–" if best is None or best.value is None else written_value(best.value),
                    "trials": str(len(states)),
                    "pruned": str(states.count("pruned")),
                    "failed": str(states.count("failed")),
                    "of": str(size_of(tuned.space)),
                }
            )
        return rows

    def failures(self) -> list[str]:
        """In words, how many trials of each method failed, and the first error."""
        found = []
        for name, tuned in self.methods.items():
            if errors := [one.error for one in tuned.trials if one.state == "failed"]:
                found.append(f"{len(errors)} of {len(tuned.trials)} trials of {name}: {errors[0]}")
        return found

    def at_the_edge(self) -> list[str]:
        """Chosen values that are the least or the greatest of those tried, in words: better ones may lie beyond."""
        found = []
        for name, options in self.best.items():
            for key, value in options.items():
                values = [
                    one
                    for one in self.methods[name].space[key]
                    if isinstance(one, int | float) and not isinstance(one, bool)
                ]
                if len(values) > 2 and value in (min(values), max(values)):
                    found.append(f"{name}: {key}={written(value)} is the {'least' if value == min(values) else 'most'}")
        return found

    def to_json(self) -> dict[str, Any]:
        """Everything that was tried, ready for JSON."""
        return {
            "path": str(self.path),
            "config": str(self.config),
            "methods": {
                name: {"best": self.best.get(name), "trials": [asdict(one) for one in tuned.trials]}
                for name, tuned in self.methods.items()
            },
        }


@usual_torch()
def tune(
    names: Sequence[Named],
    federation: Federation | None = None,
    model: Any = None,
    *,
    trials: int = 10,
    search: Mapping[str, Sequence[Any]] | None = None,
    trial_rounds: int | None = None,
    holdout_rate: float = 0.2,
    prune: bool = True,
    refit_seeds: int = 1,
    match: str = "rounds",
    jobs: int | None = None,
    out: str | Path | None = None,
    listen: Listen | None = None,
    observers: Sequence[object] = (),
    **options: Any,
) -> Tuning:
    """Search each method's options on data held out of training, with as many trials for every method.

    Args:
        names: rows of `sparsona methods`, each with options of its own after a colon if needed, and methods of your
            own, as for `train`.
        federation: your own data, as for `train`.
        model: a network, as for `train`.
        trials: for each method; fewer only where all combinations of its space have been tried.
        search: values to try, by option, for the methods that have it; other options keep their space. None: learning
            rates, and what the method's row has (`sparsona methods NAME`). Options that are given are not searched.
        trial_rounds: rounds of a trial; None: as many as a run has.
        holdout_rate: the share of each client's training data that trials are judged by.
        prune: stop a trial that is below the median of the earlier ones at the same round.
        refit_seeds: train every method with its chosen options on all training data, under this many seeds; 0: not.
        match: what trials and results have in common, as for `compare`; in trials, by so many times fewer rounds.
        jobs: trials at a time, each in a process of its own; None: one a core, on a GPU up to four.
        out: the folder of the search, which must not exist yet. None: a new one in ./runs.
        listen: called with the number of finished trials, of all trials, and what was found last.
        observers: as for `compare`, of the runs with the chosen options.
        options: as for `compare`. `seed` is that of the reported results: trials have another one.

    Returns:
        The trials, the chosen options and, unless `refit_seeds` is 0, the comparison of the methods with them.

    Example:
        >>> import sparsona as sp
        >>> quick = {"clients": 4, "rounds": 1, "data_rate": 0.1, "trials": 2, "refit_seeds": 1, "jobs": 1}
        >>> found = sp.tune(["fedavg", "local"], **quick, search={"lr": [0.1, 0.3]})
        >>> [row["method"] for row in found.table()], [row["method"] for row in found.comparison.table()]
        (['fedavg', 'local'], ['FedAvg', 'Local'])
    """
    _check_numbers(trials, trial_rounds, holdout_rate, refit_seeds, jobs)
    ObserverList(observers)  # what is none is refused before the trials
    if functions := name_functions(options)[1]:
        option, _, name = next(iter(functions)).partition("/")
        raise SparsonaError(
            f"the function '{name}' as {option} of a search",
            expected="a name: a search stores its options, to be resumed",
            hint="sparsona.compare takes functions",
        )
    seed = whole("seed", options.pop("seed", 0), 0, MOST_SEED)
    truth("prune", prune)
    text("match", match, "rounds")
    if search is not None and not (
        isinstance(search, Mapping) and all(isinstance(v, Sequence) for v in search.values())
    ):
        raise SparsonaError(
            "search as something else than a dict of lists",
            expected="values to try, by option",
            hint='search={"lr": [0.01, 0.1]}',
        )
    if (
        isinstance(names, str)
        or not isinstance(names, Sequence)
        or not all(isinstance(one, str | MethodCard) or callable(one) for one in names)
    ):
        raise SparsonaError(
            "methods to tune that are no list of methods",
            expected="a list of rows of `sparsona methods`, or of methods of your own",
            hint='tune(["fedavg", mine]); options for one method follow a colon: "fedavg:momentum=0.9"',
        )
    rows = given_methods(one for one in names if not isinstance(one, str))
    written = [one if isinstance(one, str) else methods.as_card(one).name for one in names]
    settled = _settle(written, rows, options, federation, seed)
    request = Request(
        names=written,
        options=settled,
        search={key: [*dict.fromkeys(map(_plain, values))] for key, values in (search or {}).items()},
        trials=trials,
        holdout_rate=holdout_rate,
        seed=seed,
        refit_seeds=refit_seeds,
        prune=prune,
        match=match,
        planned=_plan_trials(names, federation, model, match, settled, trial_rounds),
        model=model if isinstance(model, str) else None,
        given=[
            *(["federation"] if federation is not None else []),
            *(["model"] if model is not None and not isinstance(model, str) else []),
        ],
    )
    _check_optuna()
    spaces = _spaces(request, rows)
    for name, space in spaces.items():  # errors in options are raised before a folder is made
        usual = {**_trial_options(request, name, rows, federation)}
        usual |= {key: values[0] for key, values in space.items()}
        for key, values in space.items() or {"": (None,)}.items():
            for value in values:
                make_configs(rows.get(name, name), {**usual, **({key: value} if key else {})}, federation, model)
    if settled.get("privacy") is not None or any(parse_method(name)[1].get("privacy") is not None for name in written):
        warn("every trial spends privacy of the same clients, and so does the choice: no epsilon counts that")
    path = place("out", out) if out is not None else free_path("tune")
    make_empty_folder(path)
    write_file(path / SEARCH_FILE, request)
    with hint_resume(path, jobs), _locked(path):
        return _tune(path, request, rows, spaces, federation, model, jobs, listen, observers)


@usual_torch()
def resume_tuning(
    path: str | Path,
    federation: Federation | None = None,
    model: Any = None,
    *,
    methods: Sequence[MethodCard | Callable[..., Any]] = (),
    jobs: int | None = None,
    listen: Listen | None = None,
    observers: Sequence[object] = (),
) -> Tuning:
    """Resume a search: finished trials are kept, the others are resumed or started.

    Args:
        path: the folder of the search.
        federation: the data, again, if it was started with a federation.
        model: the model, again, if it was started with a module or function.
        methods: the methods, again, that were passed as a MethodCard or factory.
        jobs: as for `tune`.
        listen: as for `tune`.
        observers: as for `tune`.

    Returns:
        The finished search; the same as without the interruption.
    """
    check_jobs(jobs, can_measure=False, none=True)
    path, rows = Path(path), given_methods(methods)
    request = read_file(Request, path / SEARCH_FILE, "start the search again in another folder")
    if request.format != FORMAT:
        raise SparsonaError(f"'{path}' was written in format {request.format}", expected=f"format {FORMAT}")
    for what, value in (("federation", federation), ("model", model)):
        if what in request.given and value is None:
            raise SparsonaError(
                f"'{path}' was started from Python with its own {what}",
                expected=f"that {what} again",
                hint=f"call sparsona.experiment.tune.resume_tuning with {what}=",
            )
    find_rows(path, [parse_method(one)[0] for one in request.names], rows, "sparsona.experiment.tune.resume_tuning")
    _check_optuna()
    with hint_resume(path, jobs), _locked(path):
        spaces = _spaces(request, rows)
        return _tune(path, request, rows, spaces, federation, model or request.model, jobs, listen, observers)


def _row(name: str, rows: Mapping[str, MethodCard]) -> MethodCard:
    """The row of a method by how it was written; `rows` are those that were passed from Python."""
    return rows.get(name) or methods.card(parse_method(name)[0])


def _plain(value: Any) -> Any:
    """A number of numpy as one of Python."""
    return value.item() if hasattr(value, "item") else value


def _check_numbers(
    trials: int, trial_rounds: int | None, holdout_rate: float, refit_seeds: int, jobs: int | None
) -> None:
    check_jobs(jobs, can_measure=False, none=True)
    whole("trials", trials, 1, MOST_TRIALS)
    whole("refit_seeds", refit_seeds, 0, MOST_SEEDS)
    whole("trial_rounds", trial_rounds, 1, MOST_ROUNDS, none=True)
    if not 0 < number("holdout_rate", holdout_rate) < 1:
        raise SparsonaError(
            f"holdout_rate is {holdout_rate}", expected="more than 0 and less than 1", hint="0.2 is usual"
        )


def _check_optuna() -> None:
    try:
        import optuna
    except ImportError as error:
        raise SparsonaError(
            "tune needs optuna, which is not installed",
            expected="the extra `tune`",
            hint="pip install 'sparsona[tune]'",
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def _settle(
    names: Sequence[str],
    rows: Mapping[str, MethodCard],
    options: Mapping[str, Any],
    federation: Federation | None,
    seed: int,
) -> dict[str, Any]:
    """The options of trials and results alike, as a run stores them.

    Nobody holds validation data back unless some method needs it or a preset has it. One partition serves trials and
    results: under another, what is tested later could be what a trial was trained on.
    """
    own = {key: one for name in names for key, one in options_of(methods.factory(_row(name, rows))[1]).items()}
    settled = as_stored(options, own)
    if settled.get("warm_start") is not None:
        settled["warm_start"] = start_path(settled["warm_start"])
    if "holdout_rate" in settled:
        raise SparsonaError("holdout_rate as an option of a run", expected="the parameter of `tune`")
    if federation is None:
        settled.setdefault("partition_seed", seed)
        has_preset = any({**settled, **parse_method(name)[1]}.get("preset") for name in names)
        if not has_preset and not _needs_validation(names, rows, settled):
            settled.setdefault("validation_rate", 0.0)
    return settled


def _needs_validation(names: Sequence[str], rows: Mapping[str, MethodCard], options: Mapping[str, Any]) -> bool:
    return bool(options.get("guard")) or any(_row(name, rows).needs_validation for name in names)


def _plan_trials(
    names: Sequence[Named],
    federation: Federation | None,
    model: Any,
    match: str,
    options: Mapping[str, Any],
    asked: int | None,
) -> dict[str, dict[str, Any]]:
    """What a comparison would set for each method, with rounds shortened by the same factor."""
    found, usual = planned_options(names, federation, model, match, options)
    if asked and not usual:
        raise SparsonaError(
            f"trial_rounds is {asked}, and rounds is 0",
            expected="trials that tune the stored model as runs do",
            hint="leave trial_rounds out",
        )
    for own in found.values():
        if usual:  # a stored model is tuned for as long as in a run
            own["rounds"] = max(1, round(own["rounds"] * (asked or usual) / usual))
    return found


def _spaces(request: Request, rows: Mapping[str, MethodCard]) -> dict[str, Space]:
    """What is searched for each method: the papers' grids, and what the user adds."""
    found: dict[str, Space] = {}
    used: set[str] = set()
    known = set(OPTIONS).union(*(methods.factory(_row(name, rows))[1].model_fields for name in request.names))
    if unknown := sorted(set(request.options) - known):
        raise methods.unknown_option([parse_method(name)[0] for name in request.names], unknown[0], known)
    for name in request.names:
        row = _row(name, rows)
        fields = methods.factory(row)[1].model_fields
        fixed = {*parse_method(name)[1], *request.options} - set(request.search)
        space: dict[str, tuple[Any, ...]] = {"lr": LEARNING_RATES} if "lr" in fields else {}
        preset = str(request.options.get("preset"))
        published = methods.preset(row, preset).grid if preset in row.presets else {}
        space |= {key: tuple(values) for key, values in {**row.grid, **published}.items()}
        for key, values in request.search.items():
            if key in fields or key in OPTIONS:
                space[key] = tuple(values)
                used.add(key)
        found[name] = {key: values for key, values in space.items() if key not in fixed}
    if unused := sorted(set(request.search) - used):
        raise methods.unknown_option([parse_method(name)[0] for name in request.names], unused[0], known)
    if conditions := sorted(key for key in request.search if key in OPTIONS and OPTIONS[key].condition):
        raise SparsonaError(
            f"a search over {conditions[0]}",
            expected="options of methods: all share the same data, clients and rounds, or they would not compare",
            hint=f"set it for all instead: --set {conditions[0]}=...",
        )
    if request.match != "rounds" and (costly := sorted(CHANGE_WORK & set(request.search))):
        raise SparsonaError(
            f"a search over {costly[0]} with --match {request.match}",
            expected="options that do not change how much a round costs: the number of rounds is set before the search",
            hint="tune without --match, or set it for all",
        )
    if empty := sorted(key for key, values in request.search.items() if not values):
        raise SparsonaError(f"no values of {empty[0]} to try", expected="one or more", hint="--search lr=0.01,0.1")
    return found


def _trial_options(
    request: Request, name: str, rows: Mapping[str, MethodCard], federation: Federation | None
) -> dict[str, Any]:
    options = options_taken_by(_row(name, rows), request.options, [_row(one, rows) for one in request.names])
    options["seed"] = request.seed + SEED_STRIDE
    if federation is None:
        options["holdout_rate"] = request.holdout_rate
    options |= request.planned[name]
    options["eval_every"] = max(1, math.ceil(options["rounds"] / CURVE_POINTS))
    return options


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time: two would take each other's trials for failures."""
    try:
        with filelock.FileLock(str(path / "lock"), timeout=0):
            yield
    except filelock.Timeout:
        raise SparsonaError(
            f"'{path}' is in use by another process", expected="one process for a search", hint="wait until it ends"
        ) from None


def _tune(
    path: Path,
    request: Request,
    rows: Mapping[str, MethodCard],
    spaces: Mapping[str, Space],
    federation: Federation | None,
    model: Any,
    jobs: int | None,
    listen: Listen | None,
    observers: Sequence[object],
) -> Tuning:
    jobs = jobs or usual_jobs(choose_device(str(request.options.get("device", "auto")), "fp32").type == "cuda")
    held = None
    if federation is not None:
        train, validation, _ = federation.sizes().sum(0).tolist()
        share = validation / (train + validation)
        if not _needs_validation(request.names, rows, request.options):
            federation, share = federation.without_validation(), 0.0
        held = federation.hold_out(request.holdout_rate, share, seed=request.seed)
    found = {}
    for name, space in spaces.items():
        options = _trial_options(request, name, rows, federation)
        # A model that is tuned at the end is not judged by what it was before.
        config, own = make_configs(rows.get(name, name), options, federation, model)
        prunes = request.prune and not config.tune_epochs
        defaults = {**config.model_dump(), **own.model_dump()}
        found[name] = Search(path, name, space, options, defaults, request.trials, request.seed, prunes)
    play_all(found.values(), rows, held, model, jobs, listen)
    tuned = {name: Tuned(name, one.space, tuple(one.trials)) for name, one in found.items()}
    result = Tuning(path, tuned, request.match, None)
    if lost := [name for name in tuned if name not in result.best]:
        error = SparsonaError(
            f"no trial could be completed of {', '.join(lost)}: {tuned[lost[0]].trials[0].error}",
            expected="options in its space that train",
            hint="narrow the space, for example --search lr=0.001,0.01, or leave the method out",
        )
        if not result.best:
            raise error
        warn(f"left out: {error}")
    searched = {name: size_of(one.space) for name, one in tuned.items() if one.space}
    if len({min(size, request.trials) for size in searched.values()}) > 1:
        few = ", ".join(f"{name} {size}" for name, size in searched.items() if size < request.trials)
        warn(f"fewer than {request.trials} trials where there are no more combinations to try: {few}")
    _write_config(result, request)
    if request.refit_seeds:
        refit = path / REFIT
        check_plain(refit, is_folder=True)
        if listen is not None:
            done = sum(len(one.trials) for one in tuned.values())
            listen(done, done, "now training the chosen options on all training data")
        if (refit / COMPARISON_FILE).exists():
            given = [row for name, row in rows.items() if name in result.best]
            result.comparison = resume_comparison(
                refit, federation, model, methods=given, jobs=jobs, observers=observers, progress=False
            )
        else:
            pairs = [(rows.get(name, name), options) for name, options in result.with_trials().items()]
            trained = {**request.options, "seed": request.seed}
            result.comparison = compare(
                pairs,
                federation,
                model,
                seeds=request.refit_seeds,
                match=request.match,
                jobs=jobs,
                out=refit,
                observers=observers,
                progress=False,
                **trained,
            )
    return result


def _write_config(result: Tuning, request: Request) -> None:
    text = (
        "# Options chosen by `sparsona tune` on data held out of training: for `run METHOD` and `compare`, --config.\n"
    )
    named = {} if request.model is None else {"model": request.model}
    values = {**request.options, **named, "seed": request.seed, "methods": result.with_trials()}
    write_atomically(result.config, (text + write_toml(values)).encode())
