"""Train, resume, load and compare, for Python and for the command line alike."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from sparsona import methods
from sparsona.analysis import summary as summaries
from sparsona.core import spec
from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.data.federation import Federation
from sparsona.engine.context import ClientContext
from sparsona.engine.plan import novel_clients
from sparsona.engine.profiler import OFF, START, Clock
from sparsona.engine.rounds import check_plan, shared_model
from sparsona.executors import choose
from sparsona.experiment.build import (
    GIVEN,
    graph_digest,
    ignores_capacity,
    latency_digest,
    make_configs,
    make_context,
    start_digest,
)
from sparsona.experiment.run import Comparison, Run, planned_runs, views_in
from sparsona.methods import MethodCard
from sparsona.runs.facts import RunFacts
from sparsona.runs.folder import RunFolder, environment, make_empty_folder, warn, write_atomically
from sparsona.runs.observers import ObserverList, ProgressUpdate
from sparsona.runs.options import CONDITIONS, OPTIONS, RunConfig, dump
from sparsona.runs.profile import is_profiled
from sparsona.runs.request import parse_method
from sparsona.runs.session import Session
from sparsona.runs.validation import validated
from sparsona.runs.warm_start import WarmStart, leave_global_model, stored_start, warm_start_from

__all__ = ["Comparison", "Run", "compare", "load", "resume", "resume_comparison", "train", "views_in"]

RUNS = Path("runs")


def train(
    method: str | MethodCard | Callable[..., Any],
    federation: Federation | None = None,
    model: Any = None,
    *,
    out: str | Path | None = None,
    observers: Sequence[object] = (),
    profile: bool | Clock = False,
    **options: Any,
) -> Run:
    """Train a method and return the finished run.

    `method` is a row of `sparsona methods`, with options after a colon if you like, or a method of your own: a
    MethodCard, or a factory `f(task, config)`; see docs/add-a-method.md.
    `federation` and `model` are a person's own data and network; left out, `data=` and `model=` name built-in ones.
    `model` may be an nn.Module (its present weights are the start) or a function that builds one (called under the
    seed). `options` are those of the run and of the method, as `sparsona run --help` and `sparsona methods` list them.
    `out` is the run's folder, made anew. `observers` get typed records of what happens: objects with
    `on_round` and the like, functions, or texts such as "run.jsonl" (docs/observers.md); `observers=[print]` shows that
    it is alive.
    `profile` measures where the time goes, for `run.profile()`: the run takes longer, its result is the same. A Clock
    in place of True has begun earlier.
    """
    clock = _clock(profile)
    row = None if isinstance(method, str) else methods.given(method)
    config, own = make_configs(row or str(method), options, federation, model)
    path = Path(out) if out else _new_path(config)
    with _hint_resume(path):
        return _train(config, federation, model, path, ObserverList(observers), clock, own, row)


def _clock(profile: bool | Clock) -> Clock:
    if isinstance(profile, Clock):
        return profile
    return Clock() if profile else OFF


@contextmanager
def _hint_resume(path: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        if path.exists():
            warn(f"`sparsona resume {path}` goes on where it was stopped")
        raise


def _train(
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
        start = _start_of(config)
        context = make_context(config, federation, model, clock, start, method_config, row)
        session = Session(context, observers)
        config, facts = _described(config, context, row, start)
    with RunFolder.create(path, dump(config), facts, None if start is None else start.file) as folder:
        return _play(folder, session, config)


def _first_progress(config: RunConfig, federation: Federation | None, row: MethodCard) -> ProgressUpdate:
    doing = f"reading {config.data}" if federation is None else "preparing"
    return ProgressUpdate(row.title, config.seed, 0, config.rounds, doing, 0.0)


def _start_of(config: RunConfig) -> WarmStart | None:
    return None if config.warm_start is None else warm_start_from(config.warm_start)


def _described(
    config: RunConfig, context: ClientContext, row: MethodCard, start: WarmStart | None = None
) -> tuple[RunConfig, RunFacts]:
    """The config with what was left to be found out, and the facts of the run."""
    found = {"clients": context.federation.num_clients, "device": context.device.type}
    found["novel"] = context.plan.num_novel
    found["executor"] = choose(config.executor, context)
    config = config.model_copy(update=found)
    method, federation, task = context.method, context.federation, context.task
    counts, digest = federation.label_counts("train"), federation.digest()
    facts = RunFacts(
        method=config.method,
        title=row.title,
        point=(None if config.tune_epochs else row.headline) or config.headline,
        alone=method.server is None and method.peer is None,
        peers=method.peer is not None,
        partial_global=method.server is not None and method.server.is_partial,
        graph=graph_digest(context),
        latency=latency_digest(config),
        has_batch_statistics=task.moves_buffers,
        federation=digest,
        layout=task.layout.digest.hex(),
        start=start_digest(context),
        ignores_capacity=ignores_capacity(context),
        transductive=method.transductive,
        num_parameters=task.layout.size,
        tested_on=federation.tested_on,
        left_out=dict(federation.left_out),
        augments=federation.view.augments,
        novel=tuple(sorted(novel_clients(context.plan, context.clients))),
        is_regression=task.is_regression,
        sizes=federation.sizes().numpy(),
        label_counts=None if counts is None else counts.numpy(),
        warm_start=None if start is None else start.described(task.layout, digest),
    )
    if (known := facts.warm_start) is not None:
        if not known.same_data:
            warn(
                f"'{known.run}' was trained on clients other than these (another seed, partition or data set): what "
                "is tested here may be what it was trained on"
            )
        if known.taken < known.of:
            warn(f"{known.taken} of {known.of} parameters are taken from '{known.run}', the others are new")
    return config, facts


def _play(folder: RunFolder, session: Session, config: RunConfig) -> Run:
    context = session.context
    try:
        played = session.play(folder, config.executor, config)
        if played.progress.finished:
            leave_global_model(folder.path, shared_model(context.server_side, played.progress.population))
        summary = summaries.summarize(folder, played.progress.seconds)
        folder.write_summary(summary)
    except BaseException as error:
        session.fail(error)
        raise
    session.end(played, summary)
    if played.stopped_by is not None:
        reached = f"after round {played.progress.completed} of {config.rounds}"
        warn(f"stopped by {played.stopped_by} {reached}; resume goes on")
    return Run(folder, lambda: context)


def resume(
    path: str | Path,
    federation: Federation | None = None,
    model: Any = None,
    *,
    method: MethodCard | Callable[..., Any] | None = None,
    observers: Sequence[object] = (),
    profile: bool | Clock = False,
) -> Run:
    """Go on with a run from its last checkpoint; the result is what it would have been without the interruption.

    A run of a person's own data, model or method needs them again. A profiled run goes on being profiled.
    """
    with _hint_resume(Path(path)):
        return _resume(Path(path), federation, model, ObserverList(observers), profile, method)


def _resume(
    path: Path,
    federation: Federation | None,
    model: Any,
    observers: ObserverList,
    profile: bool | Clock = False,
    method: Any = None,
) -> Run:
    clock = _clock(profile or is_profiled(path))
    folder = RunFolder.open(path)
    folder.check_resumable()
    config = validated(RunConfig, folder.config, f"'{folder.path / 'config.json'}'")
    row = _row_again(folder, config.method, method)
    with folder:
        if folder.summary is None:
            observers.on_progress(_first_progress(config, federation, row))
        with clock.measure(f"{START}build"):
            session = Session(_rebuild_context(folder, config, federation, model, row, clock), observers)
        now, then = environment(), folder.environment
        changed = [f"{key} {then.get(key)} -> {now[key]}" for key in now if now[key] != then.get(key)]
        if changed:
            warn("not the environment this run began in, so its last bits may differ: " + ", ".join(changed))
        return _play(folder, session, config)


def load(
    path: str | Path,
    federation: Federation | None = None,
    model: Any = None,
    *,
    method: MethodCard | Callable[..., Any] | None = None,
) -> Run:
    """A run's result as it stands, without going on with it."""
    folder = RunFolder.open(Path(path))
    config = validated(RunConfig, folder.config, f"'{folder.path / 'config.json'}'")

    def context() -> ClientContext:
        return _rebuild_context(folder, config, federation, model, _row_again(folder, config.method, method))

    return Run(folder, context)


def _row_again(folder: RunFolder, name: str, method: Any) -> MethodCard:
    """The row of a run's method, which must be passed again if it was passed in Python."""
    row = methods.find(name) if method is None else methods.given(method)
    if row is None:
        raise SparsonaError(
            f"'{folder.path}' is a run of '{name}', which is no method of this installation",
            expected="that method again: it was passed from Python, or its package is not installed",
            hint=f"call sparsona.resume or sparsona.load with method={name}, or install its package",
        )
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
    """A run's context rebuilt, and checked to be the same."""
    for what, value, given in (("data", config.data, federation), ("model", config.model, model)):
        if value == GIVEN and given is None:
            raise SparsonaError(
                f"'{folder.path}' was started from Python on its own {what}",
                expected=f"that {what} again",
                hint=f"call sparsona.resume or sparsona.load with the same {'federation' if what == 'data' else what}",
            )
    start = None if config.warm_start is None else stored_start(folder)
    context = make_context(config, federation, model, clock, start, row=row)
    facts = folder.facts
    if context.federation.digest() != facts.federation:
        raise SparsonaError(f"the data is not that of '{folder.path}'", expected="the same examples, labels and splits")
    if context.task.layout.digest.hex() != facts.layout:
        raise SparsonaError(f"the model is not that of '{folder.path}'", expected="the same parameters")
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
    if start_digest(context) != facts.start:
        raise SparsonaError(
            f"the model does not start with the weights that '{folder.path}' started with",
            expected="the same initial weights",
            hint="pass a function that builds the model (it is called under the seed), or the module as it was then",
        )
    return context


def _new_path(config: RunConfig) -> Path:
    source = spec.parse("data set", config.data)
    own = re.sub("[^A-Za-z0-9._+]+", "-", Path(source.argument or "").stem).strip("-.")
    return RUNS / f"{config.method}-{own or source.name}-seed{config.seed}-{_stamp()}"


def _stamp() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def compare(
    names: Sequence[str],
    federation: Federation | None = None,
    model: Any = None,
    *,
    seeds: int | Sequence[int] = 1,
    out: str | Path | None = None,
    observers: Sequence[object] = (),
    **options: Any,
) -> Comparison:
    """Train several methods under the same seeds: same partition, split, initial weights and sampled clients.

    An option that only some of the methods have, or a preset, is given to those. `seeds` is a number of seeds, counted
    from `seed`, or a list of them. `observers` are those of `train`; they get the records of one run after another.
    """
    watching = ObserverList(observers)
    if not names:
        raise SparsonaError("no method to compare", expected="one or more rows of `sparsona methods`")
    if unnamed := [name for name in names if not isinstance(name, str)]:
        raise SparsonaError(
            f"a {type(unnamed[0]).__name__} among the methods to compare",
            expected="names of rows of `sparsona methods`: a comparison is resumed by them",
            hint=f"give your method an entry point in the group '{methods.ENTRY_POINTS}', or train it by itself",
        )
    if len(set(names)) < len(names):
        raise SparsonaError(
            f"a method twice in {', '.join(names)}",
            expected="methods that differ",
            hint="give one of them other options: fedspa:density=0.2",
        )
    first = options.pop("seed", 0)
    if not isinstance(first, int):
        raise SparsonaError(f"seed = {first!r}", expected="a whole number, 0 or more", hint="for example --seed 1")
    numbers = list(range(first, first + seeds)) if isinstance(seeds, int) else [int(seed) for seed in seeds]
    if not numbers or len(set(numbers)) < len(numbers):
        raise SparsonaError(
            f"seeds {numbers}" if numbers else "no seeds", expected="at least one, all different", hint="--seeds 3"
        )
    planned: list[tuple[str, RunConfig, BaseModel]] = []
    used: set[str] = set()
    cards = [methods.card(parse_method(name)[0]) for name in names]
    has_peers, has_presets = any(card.peers for card in cards), any(card.presets for card in cards)
    for name in names:
        row, own = parse_method(name)
        _, kind = methods.factory(row)
        # All peers take part where a server samples some: that is the method.
        if common := sorted((CONDITIONS - ({"per_round"} if methods.card(row).peers else set())) & set(own)):
            raise SparsonaError(
                f"'{name}' sets {', '.join(common)} for one method alone",
                expected="the same data, clients, model and seeds for all, or their results would not compare",
                hint=f"set it for all: --{common[0].replace('_', '-')} or --set {common[0]}=...",
            )
        mine = {key: value for key, value in options.items() if key in OPTIONS or key in kind.model_fields}
        used |= set(mine)
        if has_peers and not methods.card(row).peers:
            mine.pop("graph", None)
        if has_presets and not methods.card(row).presets:
            mine.pop("preset", None)
        for seed in numbers:
            planned.append((name, *make_configs(name, {**mine, "seed": seed}, federation, model)))
    if unused := set(options) - used:
        known = set(OPTIONS).union(*(methods.factory(parse_method(n)[0])[1].model_fields for n in names))
        raise unknown_name(f"option of {', '.join(names)}", sorted(unused)[0], known)
    alike = [name for name, config, _ in planned if sum(config == other for _, other, _ in planned) > 1]
    if alike:
        raise SparsonaError(
            f"{' and '.join(dict.fromkeys(alike))} are the same method with the same options",
            expected="methods that differ",
            hint="leave one of them out, or give it other options: fedspa:density=0.2",
        )
    # What is wrong with the data, the model or the executor is told before a folder is made.
    for name in names:
        config, of_method = next((config, own) for planned_name, config, own in planned if planned_name == name)
        context = make_context(config, federation, model, start=_start_of(config), method_config=of_method)
        choose(config.executor, context)
        check_plan(context.server_side)
    path = Path(out) if out else RUNS / f"compare-{_stamp()}"
    make_empty_folder(path)
    entries = [
        {
            "folder": f"{re.sub('[^a-z0-9.+-]+', '_', name.lower().replace('=', '-'))}-seed{config.seed}",
            "config": config.model_dump(mode="json"),
        }
        for name, config, _ in planned
    ]
    write_atomically(path / "comparison.json", (json.dumps(entries, indent=1) + "\n").encode())
    folders = [path / str(entry["folder"]) for entry in entries]
    runs = [(folder, config, own) for folder, (_, config, own) in zip(folders, planned, strict=True)]
    with _hint_resume(path):
        return _compare(path, runs, federation, model, watching)


def resume_comparison(
    path: str | Path,
    federation: Federation | None = None,
    model: Any = None,
    *,
    observers: Sequence[object] = (),
) -> Comparison:
    """Go on with a comparison: finished runs are kept, the others go on or start."""
    path = Path(path)
    with _hint_resume(path):
        where = f"'{path / 'comparison.json'}'"
        runs = [(folder, validated(RunConfig, values, where), None) for folder, values in planned_runs(path)]
        return _compare(path, runs, federation, model, ObserverList(observers))


def _compare(
    path: Path,
    planned: Sequence[tuple[Path, RunConfig, BaseModel | None]],
    federation: Federation | None,
    model: Any,
    observers: ObserverList,
) -> Comparison:
    runs = []
    for folder, config, method_config in planned:
        if (folder / "config.json").exists():
            runs.append(_resume(folder, federation, model, observers))
        else:
            runs.append(_train(config, federation, model, folder, observers, method_config=method_config))
    reached = {run.summary["rounds"] for run in runs}
    if len(reached) > 1:
        warn(f"these runs stopped at different rounds ({sorted(reached)}): their results do not compare")
    return Comparison(path, runs)
