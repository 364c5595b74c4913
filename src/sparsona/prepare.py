"""Names become objects: a checked config, the data it names shared out, and everything a run needs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sparsona import data, methods, models
from sparsona.core.errors import SparsonaError
from sparsona.core.losses import argmax_score, cross_entropy, no_score, squared_error, token_cross_entropy, token_score
from sparsona.core.method import Method
from sparsona.core.round import client_kinds
from sparsona.core.task import Task
from sparsona.data.federation import Federation
from sparsona.data.sharing import share
from sparsona.data.sources import read
from sparsona.engine.clock import OFF, START, Clock
from sparsona.engine.context import Setting
from sparsona.engine.executors import choose_device
from sparsona.engine.graphs import read_graph
from sparsona.engine.plan import Plan
from sparsona.runs import config as configs
from sparsona.runs.config import RunConfig
from sparsona.runs.listing import find_run
from sparsona.runs.warm_start import WarmStart, check_layout

GIVEN = "given"  # in a config: the data, partition or model came from Python and has no name
# What is read of a data set, and how it is shared out; a federation made in Python has been through both.
READING = ("sequence_length", "vocabulary_size", "resize", "crop", "augment")
SHARING = (
    *("clients", "partition", "partition_seed", "test", "validation_rate", "test_rate", "data_rate"),
    *("min_size", "min_train", "min_test", "max_examples"),
)
OF_DATA = ("data", "data_dir", *READING, *SHARING)


def make_config(
    method: str, options: Mapping[str, Any], federation: Federation | None = None, model: Any = None
) -> RunConfig:
    """The checked config of one run. `method` is a row's name, with options of its own after a colon if need be."""
    name, own = configs.parse_method(method)
    row = methods.card(name)
    _, kind = methods.factory(name)
    keys = set(kind.model_fields)
    chosen = {**options, **own}
    as_published = dict(methods.preset(row, str(chosen["preset"]))) if chosen.get("preset") else {}
    if chosen.get("lr_schedule", "decay") != "decay":
        as_published.pop("lr_decay", None)  # the person's schedule in place of the published one
    elif "lr_decay" in chosen:
        as_published.pop("lr_schedule", None)
    run_options, method_options, mistakes = configs.split_options({**as_published, **chosen}, keys, name)
    if (schedule := run_options.get("lr_schedule", "decay")) != "decay":
        if "lr_decay" in run_options:
            mistakes.append(
                SparsonaError(
                    f"lr_decay together with the schedule '{schedule}'",
                    expected="one of them: lr_decay belongs to the schedule 'decay'",
                    mend="leave --lr-decay out, or say --lr-schedule decay",
                )
            )
        run_options["lr_decay"] = 1.0  # so is it recorded: nothing decays
    if federation is not None:
        if not isinstance(federation, Federation):
            raise SparsonaError(
                f"a {type(federation).__name__} where a federation is expected",
                expected="what sparsona.federate(x, y, clients=20) or Federation.from_clients([...]) returns",
                mend="make one of your data first",
            )
        for key in OF_DATA:
            if key in run_options:
                raise SparsonaError(
                    f"'{key}' together with a federation",
                    expected="one of the two: the federation has its clients and splits already",
                    mend=f"leave '{key}' out, or give it to sparsona.federate",
                )
        run_options |= {"data": GIVEN, "clients": federation.num_clients, "partition": GIVEN, "test": GIVEN}
    source = str(run_options.get("data", "")).strip()
    if "partition" not in run_options and source in data.SOURCES and data.SOURCES[source].is_natural:
        run_options["partition"] = "natural"  # such data is nobody else's
    if model is not None:
        run_options["model"] = model if isinstance(model, str) else GIVEN
    method_values = {**row.options, **method_options}
    method_values = _with_whole_paths(method_values)
    run_values = {**row.engine, **_with_whole_paths(run_options), "method": name}
    mistakes += [*configs.mistakes(kind, method_values, name), *configs.mistakes(RunConfig, run_values, "a run")]
    if not mistakes:
        config = RunConfig(**run_values, options=kind(**method_values).model_dump(mode="json"))
        mistakes = config.conflicts()
    if mistakes:
        raise configs.all_of(mistakes)
    return config


def _with_whole_paths(options: dict[str, Any]) -> dict[str, Any]:
    """Paths as they are from anywhere: a run may be resumed from another folder than it was started in."""
    found = dict(options)
    if (source := options.get("warm_start")) is not None:
        found["warm_start"] = str(find_run(getattr(source, "path", source)).absolute())
    for key, forms in (
        ("data", ("arrays:", "folder:")),
        ("partition", ("file:",)),
        ("data_dir", ("",)),
        ("graph", ("file:",)),
        ("budget", ("latency:",)),
    ):
        text = options[key].strip() if isinstance(options.get(key), str) else ""
        for form in forms:
            if text.startswith(form) and (path := text.removeprefix(form)):
                found[key] = f"{form}{Path(path).expanduser().absolute()}"
    return found


def read_data(config: RunConfig, listen: Callable[[int, int], None] | None = None) -> Federation:
    """The data set that a config names, shared out as it says; `listen(done, total)` hears of decoding it."""
    options = {key: value for key in READING if (value := getattr(config, key)) is not None}
    if config.data_dir and not Path(config.data_dir).expanduser().is_dir():
        raise SparsonaError(
            f"there is no folder '{config.data_dir}'",
            expected="the folder of the data's files",
            mend="check --data-dir",
        )
    pool = read(config.data, [Path(config.data_dir).expanduser()] if config.data_dir else [], listen=listen, **options)
    return share(pool, seed=config.seed, **{key: getattr(config, key) for key in SHARING})


def make_setting(
    config: RunConfig,
    federation: Federation | None = None,
    model: Any = None,
    clock: Clock = OFF,
    start: WarmStart | None = None,
) -> Setting:
    """Everything a run needs. Only now, if the data says how many clients there are, is that number known."""
    if federation is None:
        with clock.measure(f"{START}read data"):
            federation = read_data(config)
        config = config.model_copy(update={"clients": federation.num_clients})
        if found := config.conflicts():
            raise configs.all_of(found)
    if model is None or isinstance(model, str):
        source = config.data.partition(":")[0]
        name = config.model or (data.SOURCES[source].default_model if source in data.SOURCES else None)
        if name is None:
            raise SparsonaError(
                f"no model for {config.data}",
                expected="a torch.nn.Module or a row of `sparsona models`",
                mend="model=net in Python, --model NAME on the command line",
            )
        model = models.builder(name, federation.input_shape, federation.num_classes)
    losses, score = cross_entropy, argmax_score
    if federation.asks_per_token:
        losses, score = token_cross_entropy, token_score
    if federation.is_regression:
        losses, score = squared_error, no_score
    shape, tokens = federation.input_shape, federation.has_tokens
    task = Task(model, shape, federation.num_classes, losses=losses, score=score, tokens=tokens)
    if start is not None:
        check_layout(start.weights, task.layout, f"'{start.about['run']}'")
        task.begin_with(start.weights)
    device = choose_device(config.device, config.precision)
    task.half = torch.bfloat16 if config.precision == "bf16" else None
    make, kind = methods.factory(config.method)
    make_method = partial(_named, make, configs.validated(kind, config.options, config.method), config.method)
    plan = Plan(
        rounds=config.rounds,
        per_round=_sampled(config),
        batch_size=config.batch_size,
        seed=config.seed,
        lr_decay=config.lr_decay,
        lr_schedule=config.lr_schedule,
        eval_every=config.eval_every,
        eval_clients=config.eval_clients,
        points=config.all_points,
        tune_epochs=config.tune_epochs,
        tune_lr_scale=config.tune_lr_scale,
        drop_rate=config.drop_rate,
        everyone_trains=config.everyone_trains,
        stateless=config.stateless,
        num_novel=config.num_novel,
        novel_epochs=config.novel_epochs,
        starts_warm=config.warm_start is not None,
        train_accuracy=config.train_accuracy,
        guard=config.guard,
        graph=None if config.graph is None else read_graph(config.graph, federation.num_clients),
    )
    setting = Setting(task, make_method, federation, plan, config.capacities, device, config.precision, clock)
    smallest = min(client.num_examples for client in setting.clients)
    if task.mixes_examples and min(smallest, config.batch_size) < 2:
        raise SparsonaError(
            f"a BatchNorm model with batches of {config.batch_size} and a client of {smallest} training examples",
            expected="two or more of both: one example has no statistics",
            mend="raise --batch-size or --set min_size=..., or use GroupNorm",
        )
    return setting


def _named(make: Callable[[Task, Any], Method], config: Any, name: str, task: Task) -> Method:
    """A method under the name of its row: several rows may share a file."""
    return replace(make(task, config), name=name)


def _sampled(config: RunConfig) -> int:
    """Clients per round, the default worked out: half of them, or every peer."""
    if config.per_round is None and methods.card(config.method).peers:
        assert config.clients is not None
        return config.clients - config.num_novel
    return config.sampled


def start_digest(setting: Setting) -> str:
    """Tells apart initial weights, which a module from Python brings along."""
    state = hashlib.blake2b(digest_size=16)
    for tree in (setting.params, setting.buffers):
        state.update(tree.flat.cpu().numpy().tobytes())
    return state.hexdigest()


def graph_digest(setting: Setting) -> str | None:
    """Tells apart graphs of one's own: a file may change between a run and its resumption."""
    edges = () if setting.plan.graph is None else setting.plan.graph.heard
    return hashlib.blake2b(repr(edges).encode(), digest_size=16).hexdigest() if edges else None


def latency_digest(config: RunConfig) -> str | None:
    """Tells apart files of latencies that a method's budget is counted by; None without one, or where it is gone."""
    kind, _, path = str(config.options.get("budget")).partition(":")
    if kind != "latency" or not Path(path).is_file():
        return None
    return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()


def ignores_capacity(setting: Setting) -> bool:
    """Whether any client is handed, or keeps, more than its device is said to hold."""
    size, round_ = setting.task.layout.size, setting.plan.round_at(0)
    for client, _ in client_kinds(setting.clients):
        cost = setting.method.cost(setting.task.layout, client, round_)
        held = [part.num_values for part in (*cost.kept, *(cost.down or ())) if not part.is_mask]
        if max(held, default=0) > client.capacity * size:
            return True
    return False
