"""Tells whether a function from Python is the one that a run was started with, by its code. Free of torch."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import CodeType
from typing import Any

PLAIN = (bool, int, float, complex, str, bytes, type(None))


def function_digest(function: Callable[..., Any]) -> str:
    """A digest of a function's code, of the plain values that it closes over, and of the Python that compiled it.

    Best effort: functions that it calls and objects that it refers to are not looked into.

    Args:
        function: a function, a method, a partial, or an object with `__call__`.

    Returns:
        The digest after the version of Python; "" where there is no code, as of built-in functions.

    Example:
        >>> def twice(x): return 2 * x
        >>> def thrice(x): return 3 * x
        >>> function_digest(twice) == function_digest(twice), function_digest(twice) == function_digest(thrice)
        (True, False)
    """
    values: list[Any] = []
    while isinstance(function, partial):
        values += [*function.args, *sorted(function.keywords.items())]
        function = function.func
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if not isinstance(code, CodeType):
        return ""
    values += getattr(function, "__defaults__", None) or ()
    values += sorted((getattr(function, "__kwdefaults__", None) or {}).items())
    for cell in getattr(function, "__closure__", None) or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # a variable that has no value yet
            values.append(None)
    state = hashlib.blake2b(digest_size=16)
    state.update(
        "\n".join((*_of_code(code, function.__doc__), *map(_plain, values))).encode("utf-8", "backslashreplace")
    )
    return f"{_python()}:{state.hexdigest()}"


def changed_functions(stored: Mapping[str, str], now: Mapping[str, Callable[..., Any]]) -> list[str]:
    """The functions whose code is not what it was; those that another Python compiled cannot be compared.

    Args:
        stored: digests by "option/name".
        now: functions by the same.

    Returns:
        Their names, each with its option.
    """
    found = []
    for key, function in now.items():
        old, new = stored.get(key, ""), function_digest(function)
        if old.startswith(f"{_python()}:") and new and new != old:
            option, _, name = key.partition("/")
            found.append(f"{name} ({option})")
    return found


def _python() -> str:
    return f"{sys.implementation.cache_tag}"


def _of_code(code: CodeType, doc: str | None = None) -> Iterable[str]:
    yield code.co_code.hex()
    yield repr(code.co_names)
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _of_code(value)
        elif doc is None or value != doc:
            yield _plain(value)


def _plain(value: Any) -> str:
    """A text that is the same in every process: objects are named by their type alone, sets are sorted."""
    if isinstance(value, tuple | frozenset):
        parts = [_plain(one) for one in value]
        return f"({','.join(parts if isinstance(value, tuple) else sorted(parts))})"
    return repr(value) if isinstance(value, PLAIN) else type(value).__name__
