"""Builds a run from names: its checked config, its data shared out among clients, and its context."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from sparsona import data, methods, models
from sparsona.core import points as eval_points
from sparsona.core import spec
from sparsona.core.arguments import place, plain
from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.losses import check_losses, make_losses
from sparsona.core.method import Method
from sparsona.core.metrics import make_metrics
from sparsona.core.packing import Packing
from sparsona.core.printable import printable
from sparsona.core.reading import expand
from sparsona.core.round import client_kinds
from sparsona.core.seeds import Seeds
from sparsona.core.targets import GIVEN, USUAL_METRICS, given_name, task_of
from sparsona.core.task import Task
from sparsona.core.transform import with_chain
from sparsona.data.federate import share_out
from sparsona.data.federation import Federation
from sparsona.data.names import clean_name, find_client, name_of
from sparsona.data.pool import Pool, View
from sparsona.data.read import read
from sparsona.data.readers.npz import has_owners
from sparsona.data.split_plan import SplitPlan
from sparsona.engine.availability import read_availability
from sparsona.engine.context import ClientContext, Placement
from sparsona.engine.graphs import read_graph
from sparsona.engine.plan import Plan, attackers
from sparsona.engine.profiler import OFF, START, Clock
from sparsona.executors import choose_device, several_devices
from sparsona.learning.partial import split_model
from sparsona.methods import MethodCard
from sparsona.robust import LABEL_FLIP, read_attack, read_mean
from sparsona.robust.attacks import check_attack, flip_labels, with_attackers
from sparsona.robust.means import check_mean, with_robust_mean
from sparsona.runs.declaration import as_tuple
from sparsona.runs.facts import DTYPES, ExampleFacts, RunFacts
from sparsona.runs.listing import find_run
from sparsona.runs.options import OF_DATA, OPTIONS, RunConfig, in_groups
from sparsona.runs.request import Chosen, all_owners, choose, fit_clients, parse_method
from sparsona.runs.stopping import check_computed, validation_point
from sparsona.runs.validation import check, merge_errors, validate, wrong_kinds
from sparsona.runs.warm_start import WarmStart, check_layout
from sparsona.sparsity.masks import random_mask
from sparsona.sparsity.search import mask_counts
from sparsona.transforms import read_transforms
from sparsona.transforms.privacy import private_maker, read_privacy

BY_CLIENT = ("client_lr_scale", "client_epochs", "speeds")  # options that a dict may give by client


def name_functions(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Callable[..., Any]]]:
    """Options with names in place of functions from Python, and the functions, as RunConfig keeps them."""
    found, functions = dict(options), dict[str, Callable[..., Any]]()

    def name(option: str, value: Any) -> Any:
        if not callable(value):
            return value
        own = str(getattr(value, "__name__", type(value).__name__))
        if functions.setdefault(f"{option}/{own}", value) is not value:
            raise SparsonaError(f"two functions called '{own}'", expected="a name for each")
        return f"{GIVEN}:{own}"

    for option in ("loss", "sampler"):
        if callable(found.get(option)):
            found[option] = name(option, found[option])
    if callable(metrics := found.get("metrics")):
        metrics = (metrics,)
    if isinstance(metrics, Iterable) and not isinstance(metrics, str | Mapping):
        found["metrics"] = tuple(name("metrics", one) for one in metrics)
    return found, functions


def by_number(
    option: str, values: Mapping[Any, Any], names: Sequence[str] | None, num_clients: int | None
) -> dict[Any, Any]:
    """Values of clients by their numbers; texts of digits that are no names are numbers, as JSON has them.

    Args:
        option: whose values they are.
        values: by number or name.
        names: of all clients, in order; None: they have none.
        num_clients: how many there are; None: they are not known yet.

    Returns:
        The values by number.
    """
    found: dict[Any, Any] = {}
    for key, value in values.items():
        client = key
        if isinstance(key, str) and key not in (names or ()) and key.isdecimal() and len(key) < 10:
            client = int(key)
        elif isinstance(key, str):
            if num_clients is None:
                raise SparsonaError(
                    f"{option} of client '{clean_name(key)}'",
                    expected="clients by number, from 0: names are known where a federation is passed",
                    hint=f"by number: {option}={{0: ...}} in Python, --set '{option}={{0 = ...}}' in a shell; "
                    "`sparsona data show` lists the clients",
                )
            client = find_client(key, names, num_clients)
        if client in found:
            raise SparsonaError(f"{option} of client {clean_name(key)} twice", expected="one value for each client")
        found[client] = value
    return found


# Options that are looked into before all are validated, when every mistake is reported at once.
LOOKED_INTO = ("data", "partition", "preset", "lr_schedule", "headline", "points", "tune_epochs", "patience")


def make_config(
    method: str | MethodCard, options: Mapping[str, Any], federation: Federation | None = None, model: Any = None
) -> RunConfig:
    """The checked config of one run. `method` is a row, or its name with options after a colon if need be."""
    return make_configs(method, options, federation, model)[0]


def make_configs(
    method: str | MethodCard, options: Mapping[str, Any], federation: Federation | None = None, model: Any = None
) -> tuple[RunConfig, BaseModel]:
    """The same, and the method's own options as they were validated: `make_context` takes them as they are."""
    name, own = parse_method(method) if isinstance(method, str) else (method.name, {})
    row = methods.card(name) if isinstance(method, str) else method
    _, kind = methods.factory(row)
    named, functions = name_functions(options)
    given = {key: plain(value) for key, value in {**named, **own}.items()}
    if refused := wrong_kinds(RunConfig, {key: given[key] for key in LOOKED_INTO if key in given}):
        raise merge_errors([*refused.values()])
    experiment = methods.published(row, given)
    # A federation has its clients and splits already.
    published = {key: value for key, value in experiment.items() if federation is None or key not in OF_DATA}
    chosen = choose(row, kind, published, given)
    values = chosen.run | {"method": name}
    if values.get("tune_epochs") and (values.get("headline") == eval_points.TUNED or _tuned_by_user(chosen)):
        values["headline"] = None  # that is the result then
    if values.get("warm_start") is not None:
        values["warm_start"] = start_path(values["warm_start"])
    if federation is not None:
        if not isinstance(federation, Federation):
            raise SparsonaError(
                f"a {type(federation).__name__} where a federation is expected",
                expected="what sparsona.federate(x, y, clients=20) or Federation.from_clients([...]) returns",
                hint="make one of your data first",
            )
        for key in OF_DATA:
            if key in values:
                raise SparsonaError(
                    f"'{key}' together with a federation",
                    expected="one of the two: the federation has its clients and splits already",
                    hint=f"leave '{key}' out, or give it to sparsona.federate",
                )
        values |= {"data": GIVEN, "clients": federation.num_clients, "partition": GIVEN, "test": GIVEN}
    names, num = (None, None) if federation is None else (federation.client_names, federation.num_clients)
    values |= {
        key: by_number(key, values[key], names, num) for key in BY_CLIENT if isinstance(values.get(key), Mapping)
    }
    source = str(values.get("data", "")).strip()
    if "partition" not in values and source in data.SOURCES and data.SOURCES[source].is_natural:
        values["partition"] = "natural"  # each example belongs to its owner
    file = spec.parse("data set", source)
    if "partition" not in values and file.name == "arrays" and file.argument and has_owners(Path(file.argument)):
        values["partition"] = "natural"
    if model is not None:
        values["model"] = model if isinstance(model, str) else GIVEN
    if (headline := values.get("headline") or row.headline) is not None:
        eval_points.check_headline(str(headline))
        values["points"] = (*as_tuple(values.get("points", ())), headline)
    if values.get("patience") is not None:
        values["points"] = (*as_tuple(values.get("points", ())), *_validation_points(headline))
    of_method, errors = check(kind, chosen.method, name)
    dumped = {} if of_method is None else of_method.model_dump(mode="json")
    config, of_run = check(RunConfig, values | {"options": dumped}, "a run")
    if config and all_owners(published) and {"clients", "partition"} <= chosen.published:
        config = config.model_copy(update={"clients": None})  # there may be more or fewer than published
    config = config and fit_clients(config, chosen.published, experiment).with_functions(functions)
    known = {*OPTIONS, *kind.model_fields}
    unknown = [methods.unknown_option([row.name], option, known) for option in chosen.unknown]
    if errors := [*unknown, *chosen.errors, *errors, *of_run] or config.conflicts():
        raise merge_errors(errors)
    if row.decides_by_validation(config.options) and federation is None and not config.validation_rate:
        raise _lacks_validation(row, "validation_rate is 0")
    if config.patience is None and (config.min_delta or config.patience_metric is not None):
        given_without = "min_delta" if config.min_delta else "patience_metric"
        raise SparsonaError(f"{given_without} without patience", expected="patience", hint="--set patience=10")
    if row.learns_in_tuning(config.options) and not config.tune_epochs:
        causes = ", ".join(f"{key}={value}" for key, value in row.needs_tuning.items())
        raise SparsonaError(
            f"{row.name} with {causes}, and tune_epochs is 0",
            expected="tune_epochs above 0: what is the method's own happens in final tuning",
            hint="--set tune_epochs=5",
        )
    if not config.rounds and config.warm_start is None and not _is_trained(config.model):
        raise SparsonaError(
            "rounds = 0 without a model to tune or evaluate",
            expected="the model of a finished run, one passed in Python, or a network with weights=FILE",
            hint="--warm-start RUN, or --rounds 1 or more",
        )
    return config, of_method


def start_path(given: Any) -> str:
    """The folder that a warm start names, as a run stores it; `given` is a Run, a path, or a name in ./runs."""
    return str(find_run(place("warm_start", getattr(given, "path", given))).absolute())


def _validation_points(headline: str | None) -> tuple[str, ...]:
    """The points that patience may go by."""
    # `trained` becomes `received` where not all clients take part in every round; how many there are may be unknown.
    return tuple(dict.fromkeys(map(validation_point, (headline or eval_points.RECEIVED, eval_points.RECEIVED))))


def _tuned_by_user(chosen: Chosen) -> bool:
    """Whether a preset names the result's point and the user tunes its models further."""
    return "headline" in chosen.published and "tune_epochs" not in chosen.published


def _is_trained(model: str | None) -> bool:
    """Whether a network may have been trained before: it is passed from Python, or its weights are in a file."""
    return model == GIVEN or (model is not None and "weights" in spec.parse("model", model).options)


def _lacks_validation(row: MethodCard, what: str) -> SparsonaError:
    return SparsonaError(
        f"{row.name} decides by validation data, and {what}",
        expected="validation data on every client, which is neither trained nor tested on",
        hint="--set validation_rate=0.1, and --set min_size=10 where clients have few examples",
    )


def options_taken_by(row: MethodCard, options: Mapping[str, Any], rows: Sequence[MethodCard]) -> dict[str, Any]:
    """Those of the options given to several methods that this one takes: what only some have is given to those."""
    fields = methods.factory(row)[1].model_fields
    mine = {key: value for key, value in options.items() if key in OPTIONS or key in fields}
    if any(other.peers for other in rows) and not row.peers:
        for key in ("graph", "tune_from"):
            mine.pop(key, None)
    if any(mine.get("preset") in other.presets for other in rows) and mine["preset"] not in row.presets:
        del mine["preset"]
    return mine


def read_data(
    config: RunConfig,
    listen: Callable[[int, int], None] | None = None,
    num_classes: int | None = None,
    class_names: tuple[str, ...] | None = None,
) -> Federation:
    """The data set that a config names, shared out among clients; `listen(done, total)` is called while decoding."""
    return share(read_pool(config, listen, num_classes, class_names), config)


def share(pool: Pool, config: RunConfig) -> Federation:
    """A data set that was read, shared out among clients as a config says."""
    try:
        return share_out(
            pool, SplitPlan(seed=config.seed, **{key: getattr(config, key) for key in in_groups("sharing")})
        )
    except SparsonaError as error:
        row = methods.find(config.method)
        published = methods.published(row, {**config.model_dump(), **config.options}) if row else {}
        if published.get("clients") != config.clients or f"{config.clients} clients" not in error.what:
            raise
        count = f"{config.clients} clients are those of --preset {config.preset}: --clients sets fewer"
        hint = "; ".join(filter(None, (error.hint, count)))
        raise type(error)(error.what, expected=error.expected, hint=hint) from None


def read_pool(
    config: RunConfig,
    listen: Callable[[int, int], None] | None = None,
    num_classes: int | None = None,
    class_names: tuple[str, ...] | None = None,
) -> Pool:
    """The data set that a config names; see `read_data`."""
    options = {key: value for key in in_groups("reading") if (value := getattr(config, key)) is not None}
    if config.data_dir and not expand(config.data_dir).is_dir():
        raise SparsonaError(
            f"there is no folder '{config.data_dir}'",
            expected="the folder of the data's files",
            hint="check --data-dir",
        )
    folders = [expand(config.data_dir)] if config.data_dir else []
    return read(config.data, folders, listen=listen, num_classes=num_classes, class_names=class_names, **options)


@dataclass(frozen=True)
class ExampleKind:
    """What examples look like to a model, whoever has them.

    Args:
        shape: of one input.
        num_classes: the number of outputs: of classes, tokens in the vocabulary, labels or numbers; one for one logit.
        targets: what is predicted: one class per example ("classes", or "binary" by one logit), "labels", "numbers", or
            the next token at each position ("tokens").
        has_tokens: inputs are tokens.
        packing: an example is several inputs, packed.
    """

    shape: tuple[int, ...]
    num_classes: int
    targets: str = "classes"
    has_tokens: bool = False
    packing: Packing | None = None

    @classmethod
    def of(cls, federation: Federation) -> ExampleKind:
        """That of a federation's examples."""
        shape, outputs = federation.input_shape, federation.num_classes
        return cls(shape, outputs, federation.targets, federation.has_tokens, federation.packing)

    @property
    def num_labels(self) -> int:
        """The number of classes that examples have: two where one logit tells them apart."""
        return 2 if self.targets == "binary" else self.num_classes

    @property
    def task(self) -> str:
        """The option `task` with which such examples are read."""
        return task_of(self.targets)


def describe_examples(federation: Federation) -> ExampleFacts | None:
    """What a run keeps of its examples, for its models to be used without them; None: they are of no known type."""
    view, dtype = federation.view, str(federation.x.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        return None
    return ExampleFacts(
        shape=tuple(federation.x.shape[1:]),
        dtype=dtype,
        num_outputs=federation.num_classes,
        mean=view.mean,
        std=view.std,
        crop=view.crop,
        test_resize=view.test_resize,
        name=federation.name,
        packing=federation.packing,
    )


def view_of(examples: ExampleFacts) -> View:
    """How a test example of such a run becomes a model's input."""
    return View(examples.mean, examples.std, crop=examples.crop, test_resize=examples.test_resize)


def outline(facts: RunFacts) -> Federation:
    """The federation of a run without its examples; only of facts that describe them."""
    examples = facts.examples
    assert examples is not None
    has_columns = facts.targets in ("numbers", "labels")
    width = examples.shape if facts.targets == "tokens" else (examples.num_outputs,) if has_columns else ()
    kind = torch.float32 if has_columns else torch.int64
    x = torch.zeros((0, *examples.shape), dtype=getattr(torch, examples.dtype))
    y = torch.zeros((0, *width), dtype=kind)
    view, counts = view_of(examples), facts.label_counts
    found = Federation.outline(facts.sizes, x, y, examples.num_outputs, examples.name, view, counts)
    return replace(
        found,
        packing=examples.packing,
        task=task_of(facts.targets),
        client_names=facts.client_names or None,
        class_names=facts.class_names or None,
        client_owners=facts.client_owners or None,
    )


def make_task(
    model: Any,
    kind: ExampleKind,
    config: RunConfig,
    federation: Federation | None = None,
    device: torch.device | None = None,
) -> Task:
    """The task of a model, or of a network's name, on such examples, with the loss and metrics of a config.

    Args:
        model: the model.
        kind: what examples look like.
        config: the options of the run.
        federation: what balanced weights are counted in; None: they are refused, for the data is elsewhere.
        device: where weights of classes are kept.
    """
    if isinstance(model, str):
        model = models.builder(model, kind.shape, kind.num_classes)
    own = None if config.loss is None else given_name(config.loss)
    losses, score = make_losses(
        kind.targets,
        config.loss if own is None else own,
        class_weights=_class_weights(config, kind, federation),
        label_smoothing=config.label_smoothing,
        function=None if own is None else _function(config, "loss", own),
        device=device,
    )
    task = Task(
        model,
        kind.shape,
        kind.num_classes,
        losses=losses,
        score=score,
        tokens=kind.has_tokens,
        targets=kind.targets,
        metrics=_metrics(config, kind),
        packing=kind.packing,
    )
    if own is not None:
        outputs = torch.zeros(2, kind.num_classes)
        has_columns = kind.targets in ("labels", "numbers")
        check_losses(losses, outputs, torch.zeros(2, kind.num_classes) if has_columns else torch.tensor([0, 0]))
    return task


def _class_weights(config: RunConfig, kind: ExampleKind, federation: Federation | None) -> tuple[float, ...] | None:
    weights = config.class_weights
    if weights is None or kind.targets in ("numbers", "tokens"):
        return None if weights is None else (1.0,)  # refused where losses are made
    if weights == "balanced":
        if federation is None:
            raise SparsonaError(
                "class_weights = balanced, where clients' data is on other machines",
                expected="a number for each class, which all sides know",
                hint="--set class_weights=1,2.5",
            )
        return federation.balanced_weights()
    what = "label" if kind.targets == "labels" else "class"
    names = None if federation is None else federation.class_names
    order = [name_of(names, number) for number in range(kind.num_labels)]
    listed = ", ".join(order[:20]) + (", ..." if len(order) > 20 else "")
    if isinstance(weights, dict):
        weights = {printable(key, kept=""): value for key, value in weights.items()}  # as names of classes are kept
        for key in weights:
            if key not in order:
                error = unknown_name(what, key, order)
                raise SparsonaError(
                    f"class_weights of '{key}', which is no {what}", expected=f"any of {listed}", hint=error.hint
                )
        if not any(found := tuple(float(weights.get(name, 1.0)) for name in order)):
            raise SparsonaError("class_weights that are all 0", expected="one that is more")
        return found
    if len(weights) != kind.num_labels:
        raise SparsonaError(
            f"{len(weights)} class_weights",
            expected=f"{kind.num_labels}, one for each {what}, in this order: {listed}",
            hint=f"by name: class_weights={{'{order[0]}': 2.0}}, others have 1",
        )
    return weights


def _metrics(config: RunConfig, kind: ExampleKind) -> dict[str, Any]:
    names = USUAL_METRICS.get(kind.targets, ()) if config.metrics is None else config.metrics
    functions = {own: _function(config, "metrics", own) for name in names if (own := given_name(name)) is not None}
    return make_metrics(kind.targets, tuple(given_name(name) or name for name in names), functions)


def _function(config: RunConfig, option: str, name: str) -> Callable[..., Any]:
    if (found := config.functions.get(f"{option}/{name}")) is None:
        what = "loss" if option == "loss" else "metric"
        raise SparsonaError(
            f"the {what} '{name}' is a function from Python",
            expected=f"that function again, as {option}=",
            hint=f"call sparsona.resume or sparsona.load with {option}={name if what == 'loss' else f'[{name}]'}",
        )
    return found


def unknown_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """In place of a loss from Python that was not passed again, which a run's models do not need: no other loss is
    reported under its name."""
    return outputs.new_full((len(outputs),), torch.nan)


def default_model(config: RunConfig, federation: Federation) -> str:
    """The network of a run that names none: the data set's, or of the user's own data the one that fits its shape."""
    source = spec.parse("data set", config.data).name
    if source in data.SOURCES:
        return data.SOURCES[source].default_model
    kind = ExampleKind.of(federation)
    found = None
    what = f"examples of shape {kind.shape}" + " of tokens, with one class each" * kind.has_tokens
    if kind.packing is None:
        found = models.suggest(kind.shape, kind.num_classes, kind.targets, kind.has_tokens)
    else:
        what = f"examples of several inputs: {kind.packing.describe()}"
    if found is None:
        raise SparsonaError(
            f"no network fits {what}",
            expected="a torch.nn.Module or a row of `sparsona models`",
            hint="model=net in Python, --model NAME on the command line",
        )
    return found


def method_maker(
    config: RunConfig, row: MethodCard, method_config: BaseModel, lying: frozenset[int] = frozenset()
) -> Callable[[Task], Method]:
    """A function that makes the method of a run for a task, with its mean, its privacy, the transforms of its messages,
    and the clients that lie. Lies go through privacy and transforms as what is true does; a mean is of what the method
    would have read."""
    make: Callable[[Task], Method] = partial(methods.make, row=row, config=method_config)
    if lying and config.attack is not None:
        make = with_attackers(make, read_attack(config.attack), lying)
    make = with_robust_mean(make, read_mean(config.mean))
    if config.privacy is not None:
        # Before transforms: what they do to noised changes tells nobody more, and a sum is of what arrived.
        make = private_maker(make, read_privacy(config.privacy), _sampled(config, row.peers))
    return with_chain(make, read_transforms(config.transform))


def make_context(
    config: RunConfig,
    federation: Federation | None = None,
    model: Any = None,
    clock: Clock = OFF,
    start: WarmStart | None = None,
    method_config: BaseModel | None = None,
    row: MethodCard | None = None,
    ends_after: int | None = None,
    is_resumed: bool = False,
) -> ClientContext:
    """Everything a run needs. The number of clients is known only now if the data determines it.

    `method_config` are the method's options where they were validated already, by `make_configs`. `row` is that of a
    method which was passed in Python, and has no name by which it would be found. `ends_after` is where a run ended
    that was stopped early, `is_resumed` whether rounds of it were played.
    """
    row = row or methods.card(config.method)
    if federation is None:
        with clock.measure(f"{START}read data"):
            federation = read_data(config)
        config = with_clients(config, row, federation.num_clients)
        if found := config.conflicts():
            raise merge_errors(found)
    if model is None or isinstance(model, str):
        model = config.model or default_model(config, federation)
    device = choose_device(config.device, config.precision)
    task = make_task(model, ExampleKind.of(federation), config, federation, device)
    if method_config is None:
        method_config = validate(methods.factory(row)[1], config.options, config.method)
    if start is not None:
        check_layout(start.weights, task.layout, f"'{start.facts.run}'", task.frozen)
        _check_new_parameters(start, task, getattr(method_config, "personal", None), config.rounds)
        task.begin_with(start.weights)
    if config.subnetwork is not None:
        methods.check_subnetwork(row.name, methods.make(task, row=row, config=method_config).cost, task.layout)
        counts = mask_counts(task.layout, config.subnetwork, "erk")
        task.restrict(Placement(device)(random_mask(task.layout, counts, Seeds(config.seed).shared("mask"))))
    task.half = torch.bfloat16 if config.precision == "bf16" else None
    plan = make_plan(config, federation.num_clients, row.peers)
    plan = replace(plan, ends_after=ends_after, is_resumed=is_resumed)
    lying = attackers(plan, federation.num_clients)
    make_method = method_maker(config, row, method_config, lying)
    if plan.attack is not None and plan.attack.name == LABEL_FLIP and federation.has_examples:
        federation = flip_labels(federation, plan.attack, lying)
    context = ClientContext(
        task,
        make_method,
        federation,
        plan,
        config.capacities,
        device,
        config.precision,
        clock,
        sampler=config.functions.get(f"sampler/{given_name(config.sampler)}"),
        devices=several_devices(config.device),
    )
    if row.decides_by_validation(config.options) and (
        without := [one.index for one in context.clients if not one.num_validation]
    ):
        first = name_of(federation.client_names, without[0])
        raise _lacks_validation(row, f"{len(without)} clients have none (client {first} is the first)")
    if config.patience is not None:
        check_computed(config.patience_metric, tuple(task.metrics), task.is_regression)
    _check_batches(context, config.batch_size)
    _check_robustness(context, config)
    return context


def _check_robustness(context: ClientContext, config: RunConfig) -> None:
    """Raise SparsonaError if a robust mean or an attack does not fit the method."""
    mean, attack, method, plan = read_mean(config.mean), context.plan.attack, context.method, context.plan
    if mean is None and attack is None:
        return
    cost = method.cost(context.task.layout, context.clients[0], plan.round_at(0))
    if mean is not None:
        check_mean(mean, cost, config.method, plan.per_round, method.peer is not None)
    if attack is not None:
        check_attack(attack, cost, config.method, bool(config.transform))
        num, taking_part = len(attackers(plan, len(context.clients))), len(context.clients) - plan.num_novel
        if num >= taking_part:
            raise SparsonaError(
                f"attack={config.attack}: {num} of {taking_part} clients attack",
                expected="at least one honest client",
                hint="lower the share or raise --clients",
            )


def network_name(model: str | None, source: str) -> str | None:
    """The network of a run by its options: the one that is named, or the default of the data set."""
    name = spec.parse("data set", source).name
    return model or (data.SOURCES[name].default_model if name in data.SOURCES else None)


def _check_new_parameters(start: WarmStart, task: Task, personal: tuple[str, ...] | None, rounds: int) -> None:
    """Raise SparsonaError if a warm start lacks parameters that are not to be personal.

    A personal part may be new: fresh adapters beside the stored model, drawn from the seed. A shared one would be
    random among trained ones, which only a method without a personal part is let train in its rounds.
    """
    missing = [name for name in task.layout.names if name not in start.weights]
    if not missing or (personal is None and rounds):
        return
    own = () if personal is None else split_model(task, personal, 0).own.names
    if other := [name for name in missing if name not in own]:
        more = f" and {len(other) - 1} more" * (len(other) > 1)
        raise SparsonaError(
            f"a warm start from '{start.facts.run}': it has no '{other[0]}'{more}",
            expected="all of this model but its personal part"
            + (f", which is {', '.join(personal)}" if personal else "; this method has none to tune"),
            hint="train that run with this --model, or name what is new with --personal (fedavg-ft-part, fedalt)",
        )


def _check_batches(context: ClientContext, batch_size: int) -> None:
    """Raise SparsonaError if a model that mixes examples would be trained on one, which has no statistics."""
    method, smallest = context.method, min(client.num_examples for client in context.clients)
    for phase in method.phases if method.tune is None else (*method.phases, method.tune):
        is_mixed = context.task.mixes_examples or phase.mixes_examples
        if is_mixed and phase.batch_size(smallest, batch_size) < 2:
            needed = 2 * phase.batches_per_step
            raise SparsonaError(
                "a model that mixes the examples of a batch, as BatchNorm does, with batches of "
                f"{batch_size} and a client of {smallest} training examples",
                expected="batches of two or more, as one example has no statistics, and "
                f"{needed} or more training examples on every client for the batches of one step",
                hint=f"raise --batch-size, --set min_size={max(10, 2 * needed)}, or use GroupNorm",
            )


def with_clients(config: RunConfig, row: MethodCard, num_clients: int) -> RunConfig:
    """The options with the number of clients that the data has; all are sampled where the preset samples all."""
    found = config.model_copy(update={"clients": num_clients})
    if config.clients is not None or config.preset is None:
        return found
    published = methods.published(row, {**config.model_dump(), **config.options})
    in_force = all_owners(published) and config.per_round == published["per_round"]
    return fit_clients(found, frozenset({"per_round"} if in_force else ()), published)


def make_plan(config: RunConfig, num_clients: int, peers: bool) -> Plan:
    """The plan of a run: its options of the same names, and those that are derived."""
    worked_out: dict[str, Any] = {
        "per_round": _sampled(config, peers),
        "points": config.all_points,
        "num_novel": config.num_novel,
        "starts_warm": config.warm_start is not None,
        "graph": None if config.graph is None else read_graph(config.graph, num_clients),
        "availability": None if config.availability is None else read_availability(config.availability, num_clients),
        "ends_after": None,
        "is_resumed": False,
        "attack": None if config.attack is None else read_attack(config.attack),
    }
    if config.privacy is not None and read_privacy(config.privacy).kind == "central":
        # Leaving out whom the others' median makes an outlier would let one client change more than its clipped update.
        worked_out["divergence_factor"] = None
    return Plan(
        **{
            field.name: worked_out[field.name] if field.name in worked_out else getattr(config, field.name)
            for field in fields(Plan)
        }
    )


def _sampled(config: RunConfig, peers: bool) -> int:
    """Clients per round, or the default: half of them, or every peer."""
    if config.per_round is None and peers:
        assert config.clients is not None
        return config.clients - config.num_novel
    return config.sampled


def headline_of(config: RunConfig, row: MethodCard) -> str:
    """The evaluation point whose accuracy is the result; the number of clients must be known.

    Where some clients are not in the last round, their last local training was earlier and was not evaluated with the
    others': then it is no `trained` model, but the received one.
    """
    named = config.headline or (None if config.tune_epochs else row.headline)
    if named == eval_points.TRAINED:
        assert config.clients is not None
        all_sampled = config.everyone_trains or _sampled(config, row.peers) == config.clients - config.num_novel
        if not all_sampled or config.availability is not None:
            named = None
    return named or eval_points.headline(config.tune_epochs)


def graph_digest(context: ClientContext) -> str | None:
    """A digest of a graph from a file, which may change before a run is resumed."""
    edges = () if context.plan.graph is None else context.plan.graph.sources
    return hashlib.blake2b(repr(edges).encode(), digest_size=16).hexdigest() if edges else None


def latency_digest(config: RunConfig) -> str | None:
    """A digest of the latency file that a method's budget is counted by; None without one, or if it is gone."""
    budget = spec.parse("budget", str(config.options.get("budget")))
    if budget.name != "latency" or not budget.argument or not Path(budget.argument).is_file():
        return None
    return hashlib.blake2b(Path(budget.argument).read_bytes(), digest_size=16).hexdigest()


def ignores_capacity(context: ClientContext) -> bool:
    """Whether any client is sent, or keeps, more than its capacity."""
    size, round_ = context.task.whole_layout.size, context.plan.round_at(0)
    for client, _ in client_kinds(context.clients):
        cost = context.method.cost(context.task.layout, client, round_)
        held = [part.num_values for part in (*cost.kept, *(cost.down or ())) if not part.is_mask]
        if max(held, default=0) > client.capacity * size:
            return True
    return False


def count_personal(config: RunConfig, context: ClientContext) -> int | None:
    """How many parameters of a client's model are its own: the dimension of v_i in FedSim and FedAlt's paper.

    The part that a method calls personal; the whole model where final tuning trains it or clients keep one. None for
    clients that keep something else, such as masks or gates, and 0 for those that use the shared model as it is.
    """
    task, options = context.task, config.options
    if personal := options.get("personal"):
        return split_model(task, tuple(personal), options.get("additive_hidden", 0)).personal.size
    is_alone = context.method.server is None and context.method.peer is None
    if config.tune_epochs or is_alone:
        return task.whole_layout.size
    cost = context.method.cost(task.layout, context.clients[0], context.plan.round_at(0))
    kept = {part.name: part.num_values for part in cost.kept if "memory" not in part.name}
    return kept.get("personal", kept.get("model")) if kept else 0


def has_one_size(context: ClientContext) -> bool:
    """Whether all clients have models of one size, whatever their capacity."""
    return methods.has_one_size(context.method.cost, context.task.layout, context.clients[0], context.plan.round_at(0))


def fit_weakest(
    config: RunConfig, of_method: BaseModel, build: Callable[[RunConfig, BaseModel], ClientContext]
) -> tuple[RunConfig, BaseModel]:
    """The options with which every client can hold its model, for a method whose models have one size.

    Args:
        config: the options of a run.
        of_method: the method's own options.
        build: makes the context of such options.

    Returns:
        The same options where nothing has to change. Otherwise its `density` is lowered to the capacity of the weakest
        client; where that does not help, a sub-network of that density is trained.
    """
    context = build(config, of_method)
    if not (ignores_capacity(context) and has_one_size(context)):
        return config, of_method
    weakest = min(client.capacity for client in context.clients)
    if getattr(of_method, "density", 0.0) > weakest:
        lowered = validate(type(of_method), {**of_method.model_dump(mode="json"), "density": weakest}, config.method)
        denser = config.model_copy(update={"options": lowered.model_dump(mode="json")})
        if not ignores_capacity(build(denser, lowered)):
            return denser, lowered
    return config.model_copy(update={"subnetwork": min(weakest, config.subnetwork or 1.0)}), of_method
