"""Methods by name. Rows are plain data: listing them imports neither torch nor a method.

The rows of this package are in `table`. Rows of other packages are found by their entry points, and a row may be passed
in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from inspect import signature
from typing import TYPE_CHECKING, Any, Protocol

from sparsona.core.errors import SparsonaError, nearest, unknown_name
from sparsona.methods.card import FAMILIES as FAMILIES
from sparsona.methods.card import MethodCard as MethodCard
from sparsona.methods.card import Preset as Preset
from sparsona.methods.table import ROWS

if TYPE_CHECKING:
    from sparsona.core.layout import Layout
    from sparsona.core.round import Client, Round
    from sparsona.core.update import Cost

ENTRY_POINTS = "sparsona.methods"  # the group in which another package names its rows


class Published(Protocol):
    """What `preset` reads of a row."""

    @property
    def name(self) -> str: ...
    @property
    def presets(self) -> Mapping[str, Preset | Mapping[str, Any]]: ...


# The methods of this package by name: `METHODS["fedspa"].paper`. `card` also finds those of installed packages.
METHODS = {row.name: row for row in ROWS}

# Methods with a rule in costs/rules.py only; a name is removed when its method is added.
COST_ONLY = ("pfedhn", "pfedgate-table")


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
    if all(find(one.strip()) is not None for one in name.split(",")):
        raise SparsonaError(f"several methods in '{name}'", expected="one name", hint="separate them by spaces")
    raise unknown_name("method", name, names())


def option_owners() -> dict[str, list[str]]:
    """The methods of this table that have an option of their own, by the option's name."""
    owners: dict[str, list[str]] = {}
    for name in METHODS:
        for key in factory(name)[1].model_fields:
            owners.setdefault(key, []).append(name)
    return owners


def unknown_option(names: Sequence[str], option: str, known: Iterable[str]) -> SparsonaError:
    """An error for an option that none of these methods has, which says what was probably meant, or who has it.

    Args:
        names: of the methods' rows.
        option: what was given.
        known: the options that one of them has.

    Returns:
        The error.

    Example:
        >>> print(unknown_option(["fedavg"], "num_model", ["rounds", "lr"]))
        unknown option of fedavg 'num_model'
          expected: what `sparsona methods fedavg` lists
          hint:     did you mean 'num_models'? fedavg has none: it is an option of fedem
    """
    names = [*dict.fromkeys(names)]
    who, known, owners = ", ".join(names), set(known), option_owners()
    near = nearest(option, sorted({*known, *owners}))
    hint = "" if near is None or near == option else f"did you mean '{near}'?"
    if near is not None and near not in known:
        lack = f"{who} has none" if len(names) == 1 else f"none of {who} has it"
        hint = f"{hint} {lack}: it is an option of {', '.join(owners[near])}".strip()
    if find(names[0]) is None:  # it was passed from Python
        return SparsonaError(f"unknown option of {who} '{option}'", expected=", ".join(sorted(known)), hint=hint)
    listed = f"what `sparsona methods {names[0] if len(names) == 1 else 'NAME'}` lists"
    return SparsonaError(f"unknown option of {who} '{option}'", expected=listed, hint=hint)


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
            f"{_a_kind(method)} where a method is expected",
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
    try:
        parameters = [*signature(make).parameters.values()]
    except ValueError:  # a class of Python's own, such as int
        parameters = []
    kind = parameters[1].annotation if len(parameters) > 1 else None
    if isinstance(kind, str):
        kind = getattr(make, "__globals__", {}).get(kind)
    if not isinstance(kind, type) or not hasattr(kind, "model_fields"):
        raise SparsonaError(
            f"the options of '{getattr(make, '__name__', type(make).__name__)}' are not known",
            expected="a factory f(task, config: MyConfig), where MyConfig extends a class of options such as Training",
            hint="annotate its second parameter, or pass a MethodCard with config=MyConfig",
        )
    return kind


def preset(row: Published, name: str) -> Preset:
    """The preset of this name of a method."""
    if not row.presets:
        raise SparsonaError(
            f"{row.name} has no presets", expected="a method of one of the papers", hint="leave --preset out"
        )
    if name not in row.presets:
        raise unknown_name(f"preset of {row.name}", name, row.presets)
    found = row.presets[name]
    return found if isinstance(found, Preset) else Preset(found)


def published(row: Published, given: Mapping[str, Any]) -> dict[str, Any]:
    """What the preset among these options sets beside them; nothing if there is none.

    Args:
        row: the method's row.
        given: the user's options, of which `preset`, `data` and `density` matter.

    Returns:
        Options of the run and of the method. Those that are in `given`, too, are as published.

    Example:
        >>> published(card("dispfl"), {"preset": "paper", "data": "tiny-imagenet"})["rounds"]
        300
    """
    return preset(row, str(given["preset"])).resolve(given) if given.get("preset") else {}


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
    from sparsona.core.method import Method  # imports torch, as every factory does

    method = factory(row)[0](task, config)
    if not isinstance(method, Method):
        raise SparsonaError(
            f"the factory of {row.name} returned {_a_kind(method)}",
            expected="a sparsona.core.method.Method",
            hint="end it with `return Method(...)` or `return replace(base, ...)`",
        )
    method = replace(method, name=row.name)
    if (method.peer is not None) != row.peers:
        raise SparsonaError(
            f"{row.name} is {'a' if method.peer is not None else 'no'} method of peers, but its card disagrees",
            expected="peers=True in the cards of methods whose clients send to each other, and of no others",
            hint=f"pass a MethodCard with peers={method.peer is not None}",
        )
    return method


def _a_kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def has_one_size(cost: Callable[[Layout, Client, Round], Cost], layout: Layout, client: Client, round_: Round) -> bool:
    """Whether all clients have models of one size, whatever their capacity, by the cost of a turn."""
    try:
        one, other = (cost(layout, replace(client, capacity=share), round_) for share in (1.0, 1 / 16))
    except (SparsonaError, ArithmeticError, ValueError):  # that little is not enough: it depends on capacity
        return False
    return one == other


def check_subnetwork(name: str, cost: Callable[[Layout, Client, Round], Cost], layout: Layout) -> None:
    """Raise SparsonaError if a method cannot train a sub-network; `layout` is that of the whole network."""
    from sparsona.core.round import Client, Round  # lists of methods do without
    from sparsona.core.seeds import Seeds

    if not has_one_size(cost, layout, Client(0, 100, num_validation=10, num_clients=10), Round(0, 1, 1, 10, Seeds(0))):
        raise SparsonaError(
            f"a sub-network for {name}, whose models are of the size that each client can hold",
            expected="a method that gives all clients models of one size",
            hint="leave subnetwork out, and set capacities or the method's own density",
        )
