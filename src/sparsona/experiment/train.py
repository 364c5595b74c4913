"""Train, resume and load a run, for Python and for the command line alike."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from torch import Tensor, nn

from sparsona import methods
from sparsona.analysis import summary as summaries
from sparsona.analysis.privacy import accountant
from sparsona.core import spec
from sparsona.core.arguments import place, truth
from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.printable import warn
from sparsona.core.targets import LOSSES, given_name
from sparsona.core.task import Task
from sparsona.core.torch_state import usual_torch
from sparsona.data import SOURCES
from sparsona.data.federation import Federation
from sparsona.engine.context import ClientContext
from sparsona.engine.final import has_partial_global
from sparsona.engine.plan import attackers, novel_clients
from sparsona.engine.profiler import OFF, START, Clock
from sparsona.engine.rounds import shared_model
from sparsona.executors import choose
from sparsona.experiment.build import (
    GIVEN,
    ExampleKind,
    count_personal,
    default_model,
    describe_examples,
    graph_digest,
    has_one_size,
    headline_of,
    ignores_capacity,
    latency_digest,
    make_configs,
    make_context,
    name_functions,
    outline,
    unknown_loss,
    with_clients,
)
from sparsona.experiment.run import Run
from sparsona.experiment.stored_models import models_elsewhere
from sparsona.learning.schedule import lr_schedule
from sparsona.methods import MethodCard
from sparsona.runs.checkpoint import reopen
from sparsona.runs.facts import Extension, RunFacts, WarmStartFacts
from sparsona.runs.folder import CONFIG_FILE, GLOBAL_FILE, NETWORK, SUMMARY_FILE, RunFolder, environment, reached
from sparsona.runs.functions import changed_functions, function_digest
from sparsona.runs.listing import find_run
from sparsona.runs.observers import ObserverList, ProgressUpdate
from sparsona.runs.options import BEFORE, OF_DATA, RunConfig, dump
from sparsona.runs.profile import is_profiled
from sparsona.runs.progress import shown_progress
from sparsona.runs.request import samples_all
from sparsona.runs.session import Session, dropped_evaluations
from sparsona.runs.simulation import Simulation
from sparsona.runs.validation import validate
from sparsona.runs.warm_start import (
    WarmStart,
    initial_file,
    other_model,
    save_global_model,
    stored_start,
    warm_start_from,
    with_initial_weights,
)
from sparsona.transforms.privacy import sent_in_the_clear

RUNS = Path("runs")


@usual_torch()
def train(
    method: str | MethodCard | Callable[..., Any],
    federation: Federation | None = None,
    model: Any = None,
    *,
    out: str | Path | None = None,
    observers: Sequence[object] = (),
    profile: bool | Clock = False,
    progress: bool | None = None,
    **options: Any,
) -> Run:
    """Train a method and return the finished run.

    Args:
        method: a row of `sparsona methods`, with options after a colon if needed ("fedspa:density=0.2"); or a method of
            your own, as a MethodCard or a factory `f(task, config)`: see docs/add-a-method.md.
        federation: your own data. None: the data set that the option `data` names.
        model: an nn.Module (its current weights are the start), a function that builds one (called under the seed), or
            the name of a built-in network. None: the default of the data set; for your own data one that fits the
            shape of its examples (docs/data.md).
        out: the run's folder, which must not exist yet. None: a new one in ./runs.
        observers: receive typed records of what happens: objects with `on_round` and the like, functions, or texts
            such as "run.jsonl" (docs/observers.md). `observers=[print]` shows progress.
        profile: measure where the time goes, for `run.profile()`: the run takes longer, its result is the same. Pass a
            Clock instead of True to include time before this call.
        progress: whether to show progress: a bar or, where stderr is no terminal, a line now and then. None: in
            notebooks and terminals.
        options: those of the run and of the method, as `sparsona run --help` and `sparsona methods` list them. `loss`
            and the `metrics` may be functions of outputs and targets (docs/experiments.md).

    Returns:
        The finished (or stopped) run.

    Example:
        >>> import sparsona as sp
        >>> run = sp.train("fedavg", clients=4, rounds=1, out="runs/first")
        >>> run.summary["rounds"], len(run.accuracies())
        (1, 4)
    """
    clock = _make_clock(profile)
    path = None if out is None else place("out", out)
    row = None if isinstance(method, str) else methods.as_card(method)
    config, own = make_configs(row or str(method), options, federation, model)
    path = path or _new_path(config, federation)
    title = method if isinstance(method, str) else None
    with hint_resume(path), shown_progress(progress, observers, title) as everyone:
        return start_run(config, federation, model, path, ObserverList(everyone), clock, own, row)


def _make_clock(profile: bool | Clock) -> Clock:
    if isinstance(profile, Clock):
        return profile
    return Clock() if truth("profile", profile) else OFF


@contextmanager
def hint_resume(path: Path, jobs: int | str | None = None) -> Iterator[None]:
    """Say how what is interrupted is continued, with as many runs at a time as it was begun with."""
    try:
        yield
    except KeyboardInterrupt:
        if path.exists():
            warn(f"`sparsona resume {path}{f' --jobs {jobs}' if jobs else ''}` continues it")
        raise


def start_run(
    config: RunConfig,
    federation: Federation | None,
    model: Any,
    path: Path,
    observers: ObserverList,
    clock: Clock = OFF,
    method_config: BaseModel | None = None,
    row: MethodCard | None = None,
) -> Run:
    row = row or methods.card(config.method)
    observers.on_progress(_first_progress(config, federation, row))
    with clock.measure(f"{START}build"):
        start = load_warm_start(config)
        context = make_context(config, federation, model, clock, start, method_config, row)
        session = Session(Simulation(context), observers)
        config, facts = describe_run(config, context, row, start)
    initial = initial_file(model) if isinstance(model, nn.Module) else None
    with RunFolder.create(path, dump(config), facts, None if start is None else start.file, initial) as folder:
        return play(folder, session, config, lambda: context, context.task.frozen)


def _first_progress(config: RunConfig, federation: Federation | None, row: MethodCard) -> ProgressUpdate:
    doing = f"reading {config.data}" if federation is None else "preparing"
    return ProgressUpdate(row.title, config.seed, 0, config.rounds, doing, 0.0)


def load_warm_start(config: RunConfig) -> WarmStart | None:
    return None if config.warm_start is None else warm_start_from(config.warm_start)


def describe_run(
    config: RunConfig,
    context: ClientContext,
    row: MethodCard,
    start: WarmStart | None = None,
    executor: str | None = None,
) -> tuple[RunConfig, RunFacts]:
    """The config with its defaults resolved, and the facts of the run; `executor` None: what suits it here."""
    if config.privacy is not None:
        accountant()  # before training: without it, nobody would learn what was spent
    config = with_clients(config, row, context.federation.num_clients)
    resolved: dict[str, Any] = {"device": ",".join(context.devices) or context.device.type}
    resolved["novel"] = context.plan.num_novel
    resolved["executor"] = executor or choose(config.executor, context)
    config = config.model_copy(update=resolved)
    method, federation, task = context.method, context.federation, context.task
    if config.model is None and config.data not in SOURCES:
        config = config.model_copy(update={"model": default_model(config, federation)})
    counts = federation.label_counts("train")
    facts = RunFacts(
        method=config.method,
        title=row.title,
        point=headline_of(config, row),
        headline_weight=config.headline_weight,
        alone=method.server is None and method.peer is None,
        peers=method.peer is not None,
        # Peers on several machines do not make their mean.
        leaves_model=method.shared_point is not None and (method.peer is None or config.executor != NETWORK),
        partial_global=has_partial_global(context),
        graph=graph_digest(context),
        latency=latency_digest(config),
        availability=None if context.plan.availability is None else context.plan.availability.digest,
        has_batch_statistics=task.moves_buffers,
        federation=federation.digest(),
        # Data sets of the catalog are stored in one order.
        client_digest=federation.client_digest() if federation.has_examples and config.data not in SOURCES else "",
        layout=task.layout.digest.hex(),
        start=context.start_digest,
        ignores_capacity=ignores_capacity(context),
        has_one_size=min(config.capacities) < 1 and has_one_size(context),
        transductive=method.transductive,
        num_parameters=task.whole_layout.size,
        tested_on=federation.tested_on,
        left_out=dict(federation.left_out),
        augments=federation.view.augments,
        novel=tuple(sorted(novel_clients(context.plan, context.clients))),
        is_regression=task.is_regression,
        needs_validation=row.decides_by_validation(config.options),
        sizes=federation.sizes().numpy(),
        label_counts=None if counts is None else counts.numpy(),
        preset=_preset_in_words(config, row),
        num_personal=count_personal(config, context),
        targets=ExampleKind.of(federation).targets,
        loss=config.loss or LOSSES[task.targets][0],
        class_weights=_known_weights(task),
        metrics=tuple(task.metrics),
        examples=describe_examples(federation),
        num_frozen=task.layout.frozen.size,
        data=federation.name,
        client_names=federation.client_names or (),
        class_names=federation.class_names or (),
        client_owners=federation.client_owners or (),
        drawn_by=federation.drawn_by,
        functions={key: function_digest(one) for key, one in config.functions.items()},
        attackers=tuple(sorted(attackers(context.plan, len(context.clients)))),
        in_the_clear=() if config.privacy is None else sent_in_the_clear(method, task.layout),
    )
    if start is not None:
        facts = replace(facts, warm_start=start.describe(task.layout, facts))
    if task.gives_probabilities:
        warn(
            "the model's outputs are probabilities that sum to 1, as of a softmax, and the loss applies one itself: "
            "remove it from the model, or training is slow"
        )
    if (known := facts.warm_start) is not None:
        if config.privacy is not None:
            _check_private_start(known, facts.data)
        if not known.same_data:
            warn(
                f"'{known.run}' was trained on clients other than these (another seed, partition or data set): what "
                "is tested here may be what it was trained on"
            )
        if known.taken < known.of and "personal" not in config.options:  # a personal part is meant to be new
            warn(f"{known.taken} of {known.of} parameters are taken from '{known.run}', the others are new")
    return config, facts


def _check_private_start(known: WarmStartFacts, data: str) -> None:
    """Raise SparsonaError if the model that a private run begins with may tell what epsilon would not count."""
    if known.same_data or known.data in ("", data):
        raise SparsonaError(
            f"--privacy with a warm start from '{known.run}', which was trained on the same data, or may have been",
            expected="a start from another data set: what that model tells of this one is not in epsilon",
            hint="leave --warm-start out; `sparsona resume RUN --rounds N` gives a private run more rounds",
        )


def _known_weights(task: Task) -> tuple[float, ...] | None:
    """The weights of classes that a task has, as numbers."""
    weights = getattr(task.losses, "weights", None)
    return None if weights is None else tuple(weights.tolist())


def _preset_in_words(config: RunConfig, row: MethodCard) -> str:
    """What the preset of a run set, and what of it the run has otherwise."""
    if config.preset is None:
        return ""
    now = {**config.model_dump(), **config.options}
    found = methods.published(row, now)
    if "headline" in found:
        now["headline"] = headline_of(config, row)  # which may have fallen back to another
    if samples_all(found):
        assert config.clients is not None
        found["per_round"] = config.clients - config.num_novel
    if config.data == GIVEN:  # the federation has its clients and splits
        found = {key: value for key, value in found.items() if key not in OF_DATA}
    same = {key: _same(now[key], value) for key, value in found.items()}
    parts = [
        ", ".join(f"{key}={_word(found[key])}" for key in found if same[key]),
        ", ".join(f"{key}={_word(now[key])} ({_word(found[key])})" for key in found if not same[key]),
    ]
    text = "; not as published: ".join(parts) if parts[1] else parts[0]
    open_rates = [f"{key}={_word(now[key])}" for key in ("lr", "gate_lr") if key in now and key not in found]
    return text + (f"; rates that it leaves open: {', '.join(open_rates)}" if open_rates else "")


def _same(one: Any, other: Any) -> bool:
    """Whether two values of an option are the same: a tuple is a list in the records."""
    return (
        list(one) == list(other) if isinstance(one, list | tuple) and isinstance(other, list | tuple) else one == other
    )


def _word(value: Any) -> str:
    return "none" if value is None else str(value)


def play(
    folder: RunFolder,
    session: Session,
    config: RunConfig,
    context: Callable[[], ClientContext],
    frozen: Mapping[str, Tensor],
) -> Run:
    """Play a session to its end; `frozen` are the frozen parameters of its model, which are stored with the others."""
    try:
        played = session.play(folder, config.executor, config)
        summary = summaries.summarize(folder, played.progress.seconds)
        if played.progress.finished:
            model = shared_model(session.context, played.progress.population)
            wrong = folder.wrong_results()
            for what in wrong.values():
                warn(f"{what}; the run is finished, so the file is written again from its records and checkpoint")
            save_global_model(folder, model, frozen, again=GLOBAL_FILE in wrong)
        folder.write_summary(summary)
    except BaseException as error:
        session.fail(error)
        raise
    session.end(played, summary)
    where = f"after round {played.progress.completed} of {config.rounds}"
    if played.stopped_by is not None:
        lift = f"to lift it, write \"{played.stopped_by}\": null into '{folder.path / CONFIG_FILE}'"
        warn(f"stopped by {played.stopped_by} {where}; `sparsona resume` continues it, with the same limit: {lift}")
    return Run(folder, context)


@usual_torch()
def resume(
    path: str | Path,
    federation: Federation | None = None,
    model: Any = None,
    *,
    method: MethodCard | Callable[..., Any] | None = None,
    loss: Callable[..., Any] | None = None,
    metrics: Sequence[Callable[..., Any]] = (),
    observers: Sequence[object] = (),
    profile: bool | Clock = False,
    progress: bool | None = None,
    rounds: int | None = None,
    sampler: Callable[..., Any] | None = None,
) -> Run:
    """Resume a run from its last checkpoint; the result is the same as without the interruption.

    Args:
        path: the run's folder, or its name in ./runs.
        federation: the data, again, if the run was started with a federation.
        model: the model, again, if the run was started with a module or function.
        method: the method, again, if the run was started with a MethodCard or factory.
        loss: the function, again, if the run was started with one.
        metrics: the functions, again, that the run was started with.
        observers: as for `train`.
        profile: as for `train`. A profiled run stays profiled.
        progress: as for `train`.
        rounds: a new, larger number of rounds, for a run that is finished or stopped. Where nothing follows a run's
            progress, the result is that of a run which had them from the start; otherwise a warning says what does.
        sampler: the function that samples clients, again, if the run was started with one.

    Returns:
        The finished (or stopped) run.

    Example:
        >>> import sparsona as sp
        >>> run = sp.train("local", clients=4, rounds=3, data_rate=0.2, max_seconds=1e-9, out="runs/stopped")
        >>> run.summary["rounds"], sp.resume("runs/stopped").summary["rounds"]  # the limit counts anew
        (1, 2)
    """
    functions = given_functions(loss, metrics, sampler)
    path = find_run(place("path", path))
    with hint_resume(path), shown_progress(progress, observers) as everyone:
        return resume_run(path, federation, model, ObserverList(everyone), profile, method, functions, rounds)


def resume_run(
    path: Path,
    federation: Federation | None,
    model: Any,
    observers: ObserverList,
    profile: bool | Clock = False,
    method: Any = None,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    rounds: int | None = None,
) -> Run:
    clock = _make_clock(profile or is_profiled(path))
    folder = RunFolder.open(path)
    folder.check_resumable()
    if folder.config.get("executor") == NETWORK:
        raise SparsonaError(
            f"'{path}' is a run on several machines",
            expected="a simulated run",
            hint="`sparsona peer` goes on where it is played, and `sparsona gather` makes a run of it anew"
            if folder.facts.peers
            else f"`sparsona resume {path}`, or sparsona.experiment.server_side.resume_served",
        )
    config = validate(RunConfig, {**BEFORE, **folder.config}, f"'{folder.path / 'config.json'}'").with_functions(
        functions or {}
    )
    row = _find_row(folder, config.method, method)
    if folder.seal is None and reached(path).completed:
        warn(f"'{path}' was made by a version that did not seal runs: its files are taken as they are")
    if edited := folder.edited_limits:
        warn(f"'{path / CONFIG_FILE}' was edited: {', '.join(edited)}, which may be; the run goes on with that")
    with folder:
        if rounds is not None:
            config = _check_rounds(folder, config, rounds)
        if not folder.has(SUMMARY_FILE) or rounds is not None:
            observers.on_progress(_first_progress(config, federation, row))
        with clock.measure(f"{START}build"):
            context = _rebuild_context(folder, config, federation, model, row, clock)
            session = Session(Simulation(context), observers)
        if rounds is not None:
            _add_rounds(folder, config, context, row)
        now, then = environment(), folder.environment
        changed = [f"{key} {then.get(key)} -> {now[key]}" for key in now if now[key] != then.get(key, now[key])]
        if changed:
            warn("not the environment this run began in, so its last bits may differ: " + ", ".join(changed))
        if edited := changed_functions(folder.facts.functions, config.functions):
            warn(
                f"not the code this run began with: {', '.join(edited)}; the rounds so far had another function of "
                "that name"
            )
        return play(folder, session, config, lambda: context, context.task.frozen)


def _check_rounds(folder: RunFolder, config: RunConfig, rounds: int) -> RunConfig:
    """The options of a run that is given more rounds, or SparsonaError if it cannot have them."""
    path, found = folder.path, reached(folder.path)
    if config.rounds == 0:
        raise SparsonaError(
            f"rounds for '{path}', which has none: a stored model was tuned or evaluated",
            expected="a run with rounds",
            hint="start another with the same --warm-start",
        )
    if rounds <= config.rounds:
        raise SparsonaError(
            f"--rounds {rounds} for '{path}', which has {config.rounds} already",
            expected=f"the new total, more than {config.rounds}",
            hint=f"--rounds {2 * config.rounds} doubles it; leave it out to finish the run as it is",
        )
    if config.matched is not None:
        raise SparsonaError(
            f"more rounds for '{path}', whose number of rounds a comparison chose to match {config.matched.to}",
            expected="a run that was not matched",
            hint="make the comparison anew with more --rounds",
        )
    if found.finished and found.completed < config.rounds:
        raise SparsonaError(
            f"more rounds for '{path}', which its validation data ended after round {found.completed}",
            expected="a run that played all its rounds, or was stopped by a limit",
            hint="start it anew with more patience, or without",
        )
    return config.model_copy(update={"rounds": rounds})


def _add_rounds(folder: RunFolder, config: RunConfig, context: ClientContext, row: MethodCard) -> None:
    """Give a run the rounds of `config`, with which its context was built; say what follows a run's progress."""
    before, total = folder.config["rounds"], config.rounds
    factor = lr_schedule(config.lr_schedule)
    played = range(reached(folder.path).completed)
    changed = list(context.method.annealed)
    if any(factor(one, before, config.lr_decay) != factor(one, total, config.lr_decay) for one in played):
        changed.insert(0, "lr_schedule")
    for what in folder.wrong_results().values():
        warn(f"{what}; the run goes on, and the file is written anew at its end")
    # The manifest first: a finished run with rounds that are not played would be one that stopped early.
    reopen(folder, dropped_evaluations(context.plan, len(played)))
    folder.drop(SUMMARY_FILE, GLOBAL_FILE)
    added = Extension(before, total, tuple(changed))
    facts = replace(folder.facts, extensions=(*folder.facts.extensions, added), preset=_preset_in_words(config, row))
    folder.extend(total, facts)
    if changed:
        verb = "follows" if len(changed) == 1 else "follow"
        warn(
            f"{' and '.join(changed)} {verb} a run's progress: rounds so far went as in a run of {before}, others go "
            f"as in one of {total}, and the result is not that of a run which had {total} from the start"
        )


def load(
    path: str | Path,
    federation: Federation | None = None,
    model: Any = None,
    *,
    method: MethodCard | Callable[..., Any] | None = None,
    loss: Callable[..., Any] | None = None,
    metrics: Sequence[Callable[..., Any]] = (),
) -> Run:
    """Load a run's result without resuming it.

    Args:
        path: the run's folder, or its name in ./runs.
        federation: the data, again, if the run was started with a federation; needed for similarity and bounds, and for
            the few personal models that are made with a client's data.
        model: the model, again, if the run was started with a module or function; needed for its models only. Of a
            module any weights will do: those that the run started with are in its folder.
        method: the method, again, if the run was started with a MethodCard or factory; needed for its models only.
        loss: the function, again, if the run was started with one; needed for `Run.evaluate` to report it.
        metrics: the functions, again, that the run was started with; likewise.

    Returns:
        The run, finished or not; it must have evaluated a round.

    Example:
        >>> import sparsona as sp
        >>> run = sp.train("fedavg", clients=4, rounds=1, data_rate=0.2, out="runs/loaded")
        >>> sp.load("runs/loaded").curve() == run.curve()
        True
    """
    return load_run(find_run(place("path", path)), federation, model, method, given_functions(loss, metrics))


def load_run(
    path: Path,
    federation: Federation | None,
    model: Any,
    method: Any = None,
    functions: Mapping[str, Callable[..., Any]] | None = None,
) -> Run:
    folder = RunFolder.open(path)
    config = validate(RunConfig, {**BEFORE, **folder.config}, f"'{folder.path / 'config.json'}'").with_functions(
        functions or {}
    )

    def context() -> ClientContext:
        if config.executor == NETWORK:
            raise models_elsewhere(folder.path)
        return _rebuild_context(folder, config, federation, model, _find_row(folder, config.method, method))

    def model_context() -> ClientContext:
        return _model_context(folder, config, model, _find_row(folder, config.method, method))

    return Run(folder, context, context if folder.facts.examples is None else model_context)


def given_functions(
    loss: Callable[..., Any] | None,
    metrics: Sequence[Callable[..., Any]],
    sampler: Callable[..., Any] | None = None,
) -> dict[str, Callable[..., Any]]:
    """Functions that are passed again to a run, as RunConfig keeps them."""
    return name_functions({"loss": loss, "metrics": metrics, "sampler": sampler})[1]


def given_methods(given: Iterable[MethodCard | Callable[..., Any]]) -> dict[str, MethodCard]:
    """Methods that are passed from Python, as rows by name. Runs are told apart by it, so each has another one."""
    if isinstance(given, str | MethodCard) or not isinstance(given, Iterable):
        raise SparsonaError(f"methods = {given!r}", expected="a list of methods", hint="methods=[mine]")
    found: dict[str, MethodCard] = {}
    for row in map(methods.as_card, given):
        if found.setdefault(row.name, row) != row:
            raise SparsonaError(
                f"two methods called '{row.name}'",
                expected="a name for each, by which its runs are found again",
                hint="rename one, or pass it as a MethodCard with a name of its own",
            )
    return found


def find_rows(path: Path, names: Iterable[str], given: Mapping[str, MethodCard], call: str) -> dict[str, MethodCard]:
    """The rows of a comparison's or search's methods, by name; those that were passed from Python must be passed again.

    Args:
        path: its folder.
        names: of the methods.
        given: those that are passed.
        call: what is called to go on with it.
    """
    names = [*dict.fromkeys(names)]
    found = {name: row for name in names if (row := given.get(name) or methods.find(name)) is not None}
    if missing := ", ".join(name for name in names if name not in found):
        raise _not_installed(path, missing, f"{call} with methods=[{missing}]")
    if others := sorted(given.keys() - found.keys()):
        raise unknown_name(f"method of '{path}'", others[0], names)
    return found


def _not_installed(path: Path, name: str, call: str) -> SparsonaError:
    return SparsonaError(
        f"'{path}' was made with {name}, which is not installed",
        expected="the method again: it was passed from Python, or its package is not installed",
        hint=f"call {call}, or install its package",
    )


def _find_row(folder: RunFolder, name: str, method: Any) -> MethodCard:
    """The row of a run's method, which must be passed again if it was passed from Python."""
    row = methods.find(name) if method is None else methods.as_card(method)
    if row is None:
        raise _not_installed(folder.path, name, f"sparsona.resume or sparsona.load with method={name}")
    if row.name != name:
        raise SparsonaError(
            f"'{folder.path}' is a run of '{name}', not of '{row.name}'",
            expected="the method that it was started with",
            hint="leave method= out" if methods.find(name) else "pass that one",
        )
    return row


def _rebuild_context(
    folder: RunFolder,
    config: RunConfig,
    federation: Federation | None,
    model: Any,
    row: MethodCard,
    clock: Clock = OFF,
) -> ClientContext:
    """Rebuild a run's context, and check that it is the same."""
    _check_given(folder, "data", config.data, federation)
    _check_given(folder, "model", config.model, model)
    start = None if config.warm_start is None else stored_start(folder)
    early, played = _ended_after(folder), reached(folder.path).completed
    given = with_initial_weights(folder, model)
    context = make_context(config, federation, given, clock, start, row=row, ends_after=early, is_resumed=bool(played))
    if not _is_data_of(folder.facts, context.federation):
        raise SparsonaError(f"the data is not that of '{folder.path}'", expected="the same examples, labels and splits")
    trace = context.plan.availability
    if (None if trace is None else trace.digest) != folder.facts.availability:
        raise SparsonaError(
            f"the trace of who is available is not that of '{folder.path}'",
            expected="the same rounds for each client",
            hint=f"restore '{config.availability}' as it was when the run was started",
        )
    _check_same(folder, config, context)
    return context


def _is_data_of(facts: RunFacts, federation: Federation) -> bool:
    """Whether data is that of a run: the same examples in the same order, or at least the same on each client."""
    if facts.federation == federation.digest():
        return True
    return bool(facts.client_digest) and facts.client_digest == federation.client_digest()


def _ended_after(folder: RunFolder) -> int | None:
    """Where a run ended that its validation data ended early; None: it did not."""
    found = reached(folder.path)
    return found.completed if found.finished and found.completed < folder.config["rounds"] else None


def _model_context(folder: RunFolder, config: RunConfig, model: Any, row: MethodCard) -> ClientContext:
    """The same without any data, on the CPU: what a run's models need."""
    _check_given(folder, "model", config.model, model)
    start = None if config.warm_start is None else stored_start(folder)
    # Balanced weights were counted in data that is not needed here.
    weights = config.class_weights if folder.facts.class_weights is None else folder.facts.class_weights
    # Nor are functions that judged its models, nor a trace, which may be gone.
    functions, metrics = dict(config.functions), config.metrics
    if config.loss is not None and (own := given_name(config.loss)) is not None:
        functions.setdefault(f"loss/{own}", unknown_loss)
    if metrics is not None:
        names = {one: given_name(one) for one in metrics}
        metrics = tuple(one for one, own in names.items() if own is None or f"metrics/{own}" in functions)
    update = {"device": "cpu", "precision": "fp32", "class_weights": weights, "availability": None, "metrics": metrics}
    here = config.model_copy(update=update).with_functions(functions)
    given, early = with_initial_weights(folder, model), _ended_after(folder)
    context = make_context(here, outline(folder.facts), given, OFF, start, row=row, ends_after=early)
    _check_same(folder, config, context)
    return context


def _check_given(folder: RunFolder, what: str, value: str | None, given: Any) -> None:
    if value == GIVEN and given is None:
        raise SparsonaError(
            f"'{folder.path}' was started from Python on its own {what}",
            expected=f"that {what} again",
            hint=f"call sparsona.resume or sparsona.load with the same {'federation' if what == 'data' else what}",
        )


def _check_same(folder: RunFolder, config: RunConfig, context: ClientContext) -> None:
    """Raise SparsonaError if model, graph, latencies or initial weights are not those of the run."""
    facts = folder.facts
    if context.task.layout.digest.hex() != facts.layout:
        raise other_model(folder, context.task.module(context.params, context.buffers))
    if graph_digest(context) != facts.graph:
        raise SparsonaError(
            f"the graph is not that of '{folder.path}'",
            expected="the same edges",
            hint=f"restore '{config.graph}' as it was when the run was started",
        )
    if latency_digest(config) != facts.latency:
        file = spec.parse("budget", config.options["budget"]).argument
        raise SparsonaError(
            f"the latencies are not those of '{folder.path}'",
            expected="the same milliseconds for each tensor, or budgets would change in the middle of a run",
            hint=f"restore '{file}' as it was when the run was started",
        )
    if context.start_digest != facts.start:
        raise SparsonaError(
            f"the model does not start with the weights that '{folder.path}' started with",
            expected="the same initial weights",
            hint="pass a function that builds the model (it is called under the seed), or the module as it was then",
        )


def _new_path(config: RunConfig, federation: Federation | None) -> Path:
    source = spec.parse("data set", config.data)
    name = Path(source.argument or "").stem if federation is None else federation.name
    own = re.sub("[^A-Za-z0-9._+]+", "-", name).strip("-.")[:60]
    return free_path(f"{config.method}-{own or source.name}-seed{config.seed}")


def folder_name(method: str) -> str:
    """A method as it was written, options and all, as the name of a folder."""
    return re.sub("[^a-z0-9.+-]+", "_", method.lower().replace("=", "-"))


def free_path(name: str) -> Path:
    """A folder in ./runs of this name, the time, and four digits: many that begin in one second would share these."""
    while (path := RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}").exists():
        pass
    return path
