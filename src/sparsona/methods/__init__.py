"""Methods by name. Rows are plain data: listing them imports neither torch nor a method.

A row is a method file with some of its options set, and engine options that belong to the method as published: several
rows may share a file. Rows of other packages are found by their entry points, and a row may be passed in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from inspect import signature
from typing import Any, Literal, Protocol

from sparsona.core.errors import SparsonaError, unknown_name

ENTRY_POINTS = "sparsona.methods"  # the group in which another package names its rows


@dataclass(frozen=True)
class MethodCard:
    """A row of `sparsona methods`, which describes a method before it is built.

    Args:
        module: where the factory `f(task, config)` is: a file in this folder, whose factory has the file's name;
            elsewhere "package.module" likewise, or "package.module:factory"; or the factory itself.
        config: the class of its options: its name in that module, or the class itself.
        headline: the evaluation point whose accuracy is the result; None: `tuned` after final tuning, else `received`.
        density_bounds: the directions in which no message has more values than the option `density` allows.

    Example:
        >>> MethodCard("mine", "Mine", "unpublished", "nothing", "the model", "mypackage.mine", "MineConfig").peers
        False
    """

    name: str
    title: str
    paper: str
    kept: str  # what stays on the client between rounds
    travels: str  # what is sent, and which way
    module: str | Callable[..., Any]
    config: str | type[Any]
    options: Mapping[str, Any] = field(default_factory=dict)  # of the method
    engine: Mapping[str, Any] = field(default_factory=dict)  # of the engine: see sparsona.runs.options
    # What `--preset NAME` sets, of the method and the engine alike; options that the user gives override it.
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    peers: bool = False  # clients send to each other: along `graph`; all take part unless per_round is given
    headline: str | None = None
    density_bounds: tuple[Literal["up", "down"], ...] = ()


class Published(Protocol):
    """What `preset` reads of a row."""

    @property
    def name(self) -> str: ...
    @property
    def presets(self) -> Mapping[str, Mapping[str, Any]]: ...


_STEPS = {"epochs": 1, "weight_decay": 0.0, "clip_norm": None, "lr_decay": 1.0, "tune_epochs": 5}
_PARTIAL: Mapping[str, Mapping[str, Any]] = {
    "paper": {**_STEPS, "weight": "equal"},
    "authors": {**_STEPS, "weight": "batches", "max_personal_steps": 1000, "clip_stale": True},
}
PFEDGATE_AUTHORS = {
    "batch_size": 128,
    "lr_schedule": "steps:0.75",
    "epochs": 1,
    "gate_start": 0.5,
    "equal_chunks": True,
    "split_budget": True,
    "score_steps": 10,
    "floors_scores": True,
    "straight_through": "kept",
    "steps": "all",
    "optimizer_memory": "keep",
    "logits_relu": True,
    "aggregation": "dense",
    "deploy_gate": "transductive",
}

# The methods of this package by name: `METHODS["fedspa"].paper`. `card` also finds those of installed packages.
METHODS = {
    card.name: card
    for card in (
        MethodCard(
            "local",
            "Local",
            "the baseline of every paper: each client alone",
            "its own model",
            "nothing",
            "local",
            "LocalConfig",
        ),
        MethodCard(
            "fedavg",
            "FedAvg",
            "McMahan et al., AISTATS 2017",
            "nothing (BatchNorm statistics, if any)",
            "the dense model, both ways",
            "fedavg",
            "FedAvgConfig",
        ),
        MethodCard(
            "fedavg-ft",
            "FedAvg-FT",
            "FedAvg, then every client tunes the last model on its own data",
            "nothing until the end, then its tuned model",
            "the dense model, both ways; once more down for tuning",
            "fedavg",
            "FedAvgConfig",
            engine={"tune_epochs": 5},
        ),
        MethodCard(
            "fedavg-ft-part",
            "FedAvg-FT (part.)",
            "FedAvg, then every client tunes a part of the last model: FT (part.) of Pillutla et al., 2022",
            "nothing until the end, then its tuned model",
            "the dense model, both ways; once more down for tuning",
            "fedavg",
            "FedAvgPartConfig",
            engine={"tune_epochs": 5},
        ),
        MethodCard(
            "fedalt",
            "FedAlt",
            "Pillutla et al., Federated Learning with Partial Model Personalization, ICML 2022",
            "the personal part of the model",
            "the shared part of the model, both ways",
            "fedalt",
            "FedAltConfig",
            presets=_PARTIAL,
        ),
        MethodCard(
            "fedsim",
            "FedSim",
            "the same paper; both parts are trained at once",
            "the personal part of the model",
            "the shared part of the model, both ways",
            "fedalt",
            "FedAltConfig",
            options={"updates": "simultaneous"},
            presets=_PARTIAL,
        ),
        MethodCard(
            "fedspa",
            "FedSpa (DST)",
            "Huang et al., Achieving Personalized Federated Learning with Sparse Local Models, 2022",
            "its mask",
            "down: the model inside the mask; up: the change inside the mask, and the new mask as bits",
            "fedspa",
            "FedSpaConfig",
            presets={"paper": {"batch_size": 128}, "authors": {"batch_size": 128, "anneal": "family"}},
            density_bounds=("up", "down"),
        ),
        MethodCard(
            "fedspa-rsm",
            "FedSpa (RSM)",
            "the same paper with one random static mask for all",
            "its mask, which never changes",
            "down: the model inside the mask; up: the change inside the mask",
            "fedspa",
            "FedSpaConfig",
            options={"search": "rsm"},
            presets={"paper": {"batch_size": 128}, "authors": {"batch_size": 128, "anneal": "family"}},
            density_bounds=("up", "down"),
        ),
        MethodCard(
            "dispfl",
            "DisPFL",
            "Dai et al., DisPFL: Towards Communication-Efficient Personalized Federated Learning, ICML 2022",
            "its model inside its mask, and the next mask",
            "between peers: the model inside its mask, and masks as bits",
            "dispfl",
            "DisPFLConfig",
            presets={
                "paper": {"batch_size": 128},
                "authors": {"batch_size": 128, "regrowth": "random", "divide_by": "used"},
            },
            peers=True,
            density_bounds=("up",),
        ),
        MethodCard(
            "pfedgate",
            "pFedGate",
            "Chen et al., Efficient Personalized Federated Learning via Sparse Model-Adaptation, ICML 2023",
            "its gate, and the scores of its last training",
            "down: the dense model; up: the change of the blocks that training used, and which they are",
            "pfedgate",
            "PFedGateConfig",
            presets={
                "paper": {
                    "batch_size": 128,
                    "lr_schedule": "constant",
                    "epochs": 1,
                    "gate_start": 0.5,
                    "paths": 2,
                    "gating": "sample",
                    "deploy_gate": "sample",
                },
                "authors": PFEDGATE_AUTHORS,
            },
        ),
    )
}


# Methods with a rule in costs/rules.py only; a name is removed when its method is added.
COST_ONLY = (*("ditto", "pfedhn", "subsampling", "sub-fedavg", "dpsgd", "dpsgd-ft", "fomo", "fedem", "pfedgate-table"),)


def card(name: str) -> MethodCard:
    """The row of this name: of this table, or of an installed package.

    Args:
        name: such as "fedavg".

    Returns:
        The row. An unknown name is an error that suggests the nearest one.

    Example:
        >>> card("fedavg").title
        'FedAvg'
    """
    if (found := find(name)) is not None:
        return found
    if name in COST_ONLY:
        raise SparsonaError(
            f"'{name}' cannot be run yet: only its costs are known",
            expected=f"one of {', '.join(names())}",
            hint=f"`sparsona cost {name}` shows what it would cost",
        )
    raise unknown_name("method", name, names())


def find(name: str) -> MethodCard | None:
    """The row of this name, or None."""
    return METHODS.get(name) or (_load(name, found) if (found := _installed().get(name)) else None)


def names() -> list[str]:
    """Names of all rows, of this table and of installed packages; no package is imported."""
    return [*METHODS, *_installed()]


def _installed() -> dict[str, EntryPoint]:
    """Entry points of other packages, by the name of their row."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=ENTRY_POINTS):
        other = found.get(point.name)
        if point.name in METHODS or (other is not None and other.value != point.value):
            raise SparsonaError(
                f"the entry point '{point.name} = {point.value}' has the name of another method",
                expected=f"one method of each name in the group '{ENTRY_POINTS}', and none of this table's",
                hint=f"rename it, or uninstall {point.dist.name if point.dist else 'its package'}",
            )
        found[point.name] = point
    return found


def _load(name: str, point: EntryPoint) -> MethodCard:
    try:
        row = point.load()
    except (ImportError, AttributeError) as error:
        raise SparsonaError(
            f"method '{name}' cannot be imported from '{point.value}': {error}",
            expected="a package that is installed whole",
            hint=f"reinstall {point.dist.name if point.dist else 'its package'}",
        ) from error
    if not isinstance(row, MethodCard) or row.name != name:
        what = f"a card named '{row.name}'" if isinstance(row, MethodCard) else f"a {type(row).__name__}"
        raise SparsonaError(
            f"the entry point '{name} = {point.value}' leads to {what}",
            expected=f"a sparsona.methods.MethodCard whose name is '{name}'",
            hint="correct the package's entry point",
        )
    return row


def as_card(method: Any) -> MethodCard:
    """The row of a method passed from Python: a card, or a factory `f(task, config)`.

    A factory's options are of the class that its second parameter is annotated with. It must not have
    the name of a row: a run is identified by its method's name, also when it is resumed.
    """
    if not isinstance(method, MethodCard) and not callable(method):
        raise SparsonaError(
            f"a {type(method).__name__} where a method is expected",
            expected="the name of a row of `sparsona methods`, a MethodCard, or a factory f(task, config)",
        )
    row = method if isinstance(method, MethodCard) else None
    name = getattr(method, "__name__", type(method).__name__) if row is None else row.name
    if (known := find(name)) is not None:
        if known == row or (row is None and factory(known)[0] is method):
            return known
        raise SparsonaError(
            f"a method passed from Python is named '{name}'",
            expected="a name that is no row of `sparsona methods`",
            hint="rename it, or pass a MethodCard with another name",
        )
    if row is not None:
        return row
    about = (method.__doc__ or "a method passed from Python").strip().splitlines()[0]
    return MethodCard(name, name, about, "as its factory says", "as its factory says", method, _config_of(method))


def _config_of(make: Callable[..., Any]) -> type[Any]:
    """The class that a factory's second parameter is annotated with. Only this annotation is evaluated: those of other
    parameters may be imported for type checking alone."""
    parameters = [*signature(make).parameters.values()]
    kind = parameters[1].annotation if len(parameters) > 1 else None
    if isinstance(kind, str):
        kind = getattr(make, "__globals__", {}).get(kind)
    if not isinstance(kind, type) or not hasattr(kind, "model_fields"):
        raise SparsonaError(
            f"the options of '{make.__name__}' are not known",
            expected="a factory f(task, config: MyConfig), where MyConfig extends a class of options such as Training",
            hint="annotate its second parameter, or pass a MethodCard with config=MyConfig",
        )
    return kind


def preset(row: Published, name: str) -> Mapping[str, Any]:
    """The options that this preset of a method sets."""
    if not row.presets:
        raise SparsonaError(
            f"{row.name} has no presets", expected="a method of one of the papers", hint="leave --preset out"
        )
    if name not in row.presets:
        raise unknown_name(f"preset of {row.name}", name, row.presets)
    return row.presets[name]


def factory(row: str | MethodCard) -> tuple[Callable[..., Any], Any]:
    """The function that makes this method for a task, and the class of its options."""
    row = card(row) if isinstance(row, str) else row
    if not isinstance(row.module, str):
        return row.module, _config_of(row.module) if isinstance(row.config, str) else row.config
    place, _, function = row.module.partition(":")
    module = import_module(place if function or "." in place else f"{__name__}.{place}")
    found = getattr(module, function or place.rpartition(".")[2])
    return found, getattr(module, row.config) if isinstance(row.config, str) else row.config


def make(task: Any, *, row: MethodCard, config: Any) -> Any:
    """The Method of a row for this task. Its name is the row's, also where rows share a file."""
    method = replace(factory(row)[0](task, config), name=row.name)
    if (method.peer is not None) != row.peers:
        raise SparsonaError(
            f"{row.name} is {'a' if method.peer is not None else 'no'} method of peers, but its card disagrees",
            expected="peers=True in the cards of methods whose clients send to each other, and of no others",
            hint=f"pass a MethodCard with peers={method.peer is not None}",
        )
    return method
