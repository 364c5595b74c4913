"""Values checked against a class of options, once, with every mistake in one error. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from sparsona.core.arguments import plain
from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.spec import shorten

MOST = 10**9  # of whole numbers whose declaration has no limit: rounds, examples, widths
MOST_NUMBER = 10**300  # of others: floats end soon after
LIMITS = {"gt": "above {:,}", "ge": "{:,} or more", "lt": "below {:,}", "le": "at most {:,}"}
PARSED = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "bool_parsing": "true or false",
}


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
    values = {key: plain(value) for key, value in values.items()}
    refused = wrong_kinds(kind, values)
    try:
        made = kind(**{key: value for key, value in values.items() if key not in refused})
        return (None, [*refused.values()]) if refused else (made, [])
    except ValidationError as error:
        found = []
        unions: dict[str, list[Any]] = {}
        for item in error.errors():
            # A value that fits no type of a union is reported once for each of them, and is one mistake.
            if item["type"] == "missing" and item["loc"][0] in refused:
                continue
            if len(item["loc"]) > 1 and _is_union(kind, name := str(item["loc"][0])):
                unions.setdefault(name, []).append(item)
            else:
                found.append(_error(kind, item, where))
        return None, [
            *refused.values(),
            *found,
            *(_union_error(kind, name, items, values[name]) for name, items in unions.items()),
        ]


def wrong_kinds(kind: type[BaseModel], values: Mapping[str, Any]) -> dict[str, SparsonaError]:
    """The errors of values that are of another type than their option, or too large to be meant.

    Args:
        kind: the class of the options.
        values: by name; names that are none of its options are passed over.

    Returns:
        The errors by name.
    """
    found = ((key, _strict(kind, str(key), value)) for key, value in values.items())
    return {key: error for key, error in found if error is not None}


def _strict(kind: type[BaseModel], name: str, value: Any) -> SparsonaError | None:
    """The error for what pydantic would convert in silence, or accept although nothing of that size can be: a truth
    value is no number, 2.0 is no count, and there are no 10^20 rounds. A number that is written as a text is one."""
    field = kind.model_fields.get(name)
    if field is None or value is None:
        return None
    kinds, is_plain = _scalars(field.annotation), not _has_containers(field.annotation)
    expected = ""
    if isinstance(value, bool):
        if kinds == {str} and is_plain:
            expected = "a text"
        elif bool not in kinds and kinds & {int, float}:
            expected = "a whole number" if float not in kinds else "a number"
    elif kinds == {bool}:
        expected = "true or false"
    elif kinds == {str} and is_plain and not isinstance(value, str):
        expected = "a text"
    elif isinstance(value, float) and kinds == {int} and is_plain:
        expected = "a whole number"
    elif kinds & {int, float}:
        numbers = [one for one in _each(value) if isinstance(one, int)]
        most = MOST_NUMBER if float in kinds else next((one.le for one in field.metadata if hasattr(one, "le")), MOST)
        if bool not in kinds and any(isinstance(one, bool) for one in numbers):
            expected = "numbers"
        elif any(abs(one) > most for one in numbers):
            expected = f"at most {most:,}" if most < MOST_NUMBER else "a smaller number"
    if not expected:
        return None
    what = f"{name} = {shorten(_repr(value))}{_about(kind, name)}"
    return SparsonaError(what, expected=expected, hint=_hint(kind, name))


def _repr(value: Any) -> str:
    """A value in a message; Python refuses to write numbers of thousands of digits."""
    try:
        return repr(value)
    except (ValueError, RecursionError):
        return "..."


def _scalars(annotation: Any) -> set[type]:
    """The types of plain values in an annotation, also inside tuples and of choices."""
    if isinstance(annotation, type):
        return {annotation} & {int, float, bool, str}
    if get_origin(annotation) is Literal:
        return {type(one) for one in get_args(annotation)}
    return set().union(*(_scalars(one) for one in get_args(annotation)))


def _has_containers(annotation: Any) -> bool:
    origin = get_origin(annotation)
    return origin in (tuple, list, dict) or any(_has_containers(one) for one in get_args(annotation))


def _each(value: Any) -> list[Any]:
    """The values of a list or a dict, or the one value that there is."""
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else [value]


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
        f"{name} = {shorten(_repr(value))}{_about(kind, name)}", expected=expected, hint=_hint(kind, name)
    )


def _about(kind: type[BaseModel], name: str) -> str:
    field = kind.model_fields.get(name)
    return f" ({field.description})" if field is not None and field.description else ""


def _hint(kind: type[BaseModel], name: str) -> str:
    """What to do about a wrong value: of a number, which ones are allowed."""
    field = kind.model_fields.get(name)
    kinds = set() if field is None else _scalars(field.annotation)
    if field is not None and kinds <= {int, float} and not _has_containers(field.annotation):
        limits = [
            words.format(getattr(one, key))
            for one in field.metadata
            for key, words in LIMITS.items()
            if getattr(one, key, None) is not None
        ]
        if limits:
            return f"give {name} a {'number' if float in kinds else 'whole number'}: {', '.join(limits)}"
    return f"give {name} another value"


def _expected(item: Any) -> str:
    if item["type"] in PARSED:  # pydantic's words are about parsing
        return PARSED[item["type"]]
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
        f"{key} = {shorten(_repr(item['input']))}{about}", expected=_expected(item), hint=_hint(kind, key)
    )
