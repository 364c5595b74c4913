"""Values checked against a class of options, once, with every mistake in one error. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from sparsona.core.errors import SparsonaError, unknown_name


def check(kind: type[BaseModel], values: Mapping[str, Any], where: str) -> tuple[Any, list[SparsonaError]]:
    """Build `kind` from plain values.

    Args:
        kind: the class of the options.
        values: by name.
        where: whose options they are, for messages.

    Returns:
        The validated value and no errors, or None and everything that is wrong.

    Example:
        >>> class Tea(BaseModel):
        ...     cups: int = 2
        >>> check(Tea, {"cups": 3}, "tea")
        (Tea(cups=3), [])
    """
    try:
        return kind(**values), []
    except ValidationError as error:
        found: list[SparsonaError] = []
        unions: dict[str, list[Any]] = {}
        for item in error.errors():
            # A value that fits no type of a union is reported once for each of them, and is one mistake.
            if len(item["loc"]) > 1 and _is_union(kind, name := str(item["loc"][0])):
                unions.setdefault(name, []).append(item)
            else:
                found.append(_error(kind, item, where))
        return None, [*found, *(_union_error(kind, name, items, values[name]) for name, items in unions.items())]


def validate(kind: type[BaseModel], values: Mapping[str, Any], where: str) -> Any:
    """Build `kind` from plain values, or raise one error that lists all that is wrong."""
    found, errors = check(kind, values, where)
    if errors:
        raise merge_errors(errors)
    return found


def merge_errors(errors: list[SparsonaError]) -> SparsonaError:
    """One error that names all of them, so that a config is corrected once and not once per mistake."""
    if len(errors) == 1:
        return errors[0]
    lines = [f"{number}. {str(error).replace(chr(10), chr(10) + '   ')}" for number, error in enumerate(errors, 1)]
    return SparsonaError(f"{len(errors)} mistakes\n  " + "\n".join(lines).replace("\n", "\n  "))


def _is_union(kind: type[BaseModel], name: str) -> bool:
    """Whether an option takes values of several types; None beside one is not another."""
    field = kind.model_fields.get(name)
    if field is None or get_origin(field.annotation) not in (Union, UnionType):
        return False
    return len([one for one in get_args(field.annotation) if one is not NoneType]) > 1


def _union_error(kind: type[BaseModel], name: str, items: list[Any], value: Any) -> SparsonaError:
    expected = " or ".join(dict.fromkeys(_expected(item) for item in items))
    return SparsonaError(
        f"{name} = {value!r}{_about(kind, name)}", expected=expected, hint=f"give {name} another value"
    )


def _about(kind: type[BaseModel], name: str) -> str:
    field = kind.model_fields.get(name)
    return f" ({field.description})" if field is not None and field.description else ""


def _expected(item: Any) -> str:
    if item["type"] == "value_error":  # our own message: what is expected
        return str(item["ctx"]["error"])
    return str(item["msg"].removeprefix("Input should be ").lower())


def _error(kind: type[BaseModel], item: Any, where: str) -> SparsonaError:
    key = ".".join(str(place) for place in item["loc"])
    if item["type"] == "extra_forbidden":
        return unknown_name(f"option of {where}", key, kind.model_fields)
    if item["type"] == "missing":
        return SparsonaError(f"{key} is missing from {where}", expected="a config as sparsona writes it")
    if not item["loc"]:  # each is right by itself, but not together: the rule says what is wrong
        rule = item["msg"].removeprefix("Value error, ")
        return SparsonaError(f"options of {where} that cannot be combined", expected=rule, hint="change one of them")
    if item["type"] == "value_error" and isinstance(cause := item["ctx"]["error"].__cause__, SparsonaError):
        return cause  # it says all that there is to say
    about = _about(kind, str(item["loc"][0]))
    return SparsonaError(
        f"{key} = {item['input']!r}{about}", expected=_expected(item), hint=f"give {key} another value"
    )
