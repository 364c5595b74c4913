"""Values checked against a class of options, once, with every mistake in one error. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
        return None, [_error(kind, item, where) for item in error.errors()]


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


def _error(kind: type[BaseModel], item: Any, where: str) -> SparsonaError:
    key = ".".join(str(place) for place in item["loc"])
    if item["type"] == "extra_forbidden":
        return unknown_name(f"option of {where}", key, kind.model_fields)
    if item["type"] == "missing":
        return SparsonaError(f"{key} is missing from {where}", expected="a config as sparsona writes it")
    if not item["loc"]:  # each is right by itself, but not together: the rule says what is wrong
        rule = item["msg"].removeprefix("Value error, ")
        return SparsonaError(f"options of {where} that cannot be combined", expected=rule, hint="change one of them")
    field = kind.model_fields.get(str(item["loc"][0]))
    about = f" ({field.description})" if field is not None and field.description else ""
    if item["type"] == "value_error":
        error = item["ctx"]["error"]
        if isinstance(error.__cause__, SparsonaError):  # it says all that there is to say
            return error.__cause__
        expected = str(error)  # our own message: what is expected
    else:
        expected = item["msg"].removeprefix("Input should be ").lower()
    return SparsonaError(f"{key} = {item['input']!r}{about}", expected=expected, hint=f"give {key} another value")
