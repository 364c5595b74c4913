"""How an option is declared: once, as a pydantic field. The command line, config files, Python, costs and listings read
the declarations through `options_of`. Free of torch.

A run's own options are declared with `option`. Options of a method are plain pydantic fields, which may set in
`json_schema_extra` that they have a flag of their own (`{"flag": True}`) or that they name files (`paths`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

from sparsona.core import spec
from sparsona.core.reading import expand

GROUPS = {  # in the order in which they are listed
    "data": "which data",
    "reading": "how it is read",
    "sharing": "how it is shared out among clients",
    "plan": "what is done",
    "evaluation": "what is evaluated, and when",
    "place": "where it runs",
    "stop": "when it stops early",
}


@dataclass(frozen=True)
class Option:
    """An option as declared; validation itself is pydantic's."""

    name: str
    type: Any  # of one value on a command line: int, float, bool or str
    default: Any
    text: str
    none: str  # what None stands for
    choices: tuple[Any, ...]
    group: str  # a key of GROUPS; "" for an option of a method
    flag: bool | str  # has a flag of its own on the command line; a text says how it is written: "--quirk NAME ..."
    condition: bool  # must be the same for all runs of a comparison
    circumstance: bool  # where a run is made or what is evaluated: it does not define the experiment
    cost: bool | str  # whether costs depend on it; a text: they do but are not counted, and this is the hint
    paths: tuple[str, ...]  # names after which a path follows; "": the value is a path


def option(
    default: Any,
    text: str,
    *,
    group: str,
    none: str = "",
    flag: bool | str = False,
    condition: bool = False,
    circumstance: bool = False,
    cost: bool | str = False,
    paths: tuple[str, ...] = (),
    **constraints: Any,
) -> Any:
    """Declare an option of a run: a pydantic field whose other properties `Option` lists.

    Args:
        default: its value if none is given.
        text: a short description.
        group: a key of `GROUPS`.
        none: what None stands for, where that is the default.
        flag, condition, circumstance, cost, paths: see `Option`.
        constraints: of the value, as pydantic's Field takes them.

    Returns:
        The field.

    Example:
        >>> class Tea(BaseModel):
        ...     cups: int = option(2, "number of cups", group="plan", flag=True, ge=1)
        >>> options_of(Tea)["cups"].default
        2
    """
    extra: dict[str, Any] = {"text": text, "none": none, "group": group, "flag": flag, "condition": condition}
    extra |= {"circumstance": circumstance, "cost": cost, "paths": paths}
    description = f"{text}; none: {none}" if none else text
    return Field(default, description=description, json_schema_extra=extra, **constraints)


def options_of(kind: type[BaseModel]) -> dict[str, Option]:
    """Every option that a class of options declares, by name, in the order of the groups."""
    found = [_option(name, field) for name, field in kind.model_fields.items()]
    order = ["", *GROUPS]
    return {one.name: one for one in sorted(found, key=lambda one: order.index(one.group))}


def _option(name: str, field: FieldInfo) -> Option:
    extra: Mapping[str, Any] = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    kinds = [field.annotation]
    if get_origin(field.annotation) in (Union, UnionType):
        kinds = [kind for kind in get_args(field.annotation) if kind is not NoneType]
    plain = kinds[0] if len(kinds) == 1 and kinds[0] in (int, float, bool) else str
    choices = get_args(kinds[0]) if get_origin(kinds[0]) is Literal else ()
    texts = {"text": extra.get("text", field.description or ""), "none": extra.get("none", "")}
    return Option(
        name,
        plain,
        field.get_default(call_default_factory=True),
        **texts,
        choices=choices,
        group=extra.get("group", ""),
        flag=extra.get("flag", False),
        condition=extra.get("condition", False),
        circumstance=extra.get("circumstance", False),
        cost=extra.get("cost", True),
        paths=tuple(extra.get("paths", ())),
    )


def with_absolute_paths(options: Mapping[str, Option], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with absolute paths: a run may be resumed in another working folder."""
    found = dict(values)
    for name in values.keys() & options.keys():
        value, paths = values[name], options[name].paths
        if not isinstance(value, str) or not paths or not value.strip():
            continue
        parsed = spec.parse(name, value)
        if "" in paths:
            found[name] = str(expand(value.strip()).absolute())
        elif parsed.name in paths and parsed.argument:
            found[name] = f"{parsed.name}:{expand(parsed.argument).absolute()}"
    return found


def as_tuple(value: Any) -> Any:
    """A single value as a tuple of one; tuples and lists stay."""
    return (value,) if isinstance(value, str | float | int) else value


def as_int(value: float) -> float:
    """A whole number without its decimal point."""
    return int(value) if value == int(value) else value
