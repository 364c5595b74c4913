"""Arguments of Python functions, checked: a wrong one is the caller's, and is named. Free of torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sparsona.core.errors import SparsonaError


def plain(value: Any) -> Any:
    """Numbers of numpy and torch as Python's, arrays of them as lists; anything else as it is.

    Args:
        value: of an argument or an option.

    Returns:
        A plain value.

    Example:
        >>> import numpy as np
        >>> plain(np.int64(3)), plain(np.array([0.5, 1.0]))
        (3, [0.5, 1.0])
    """
    return value.tolist() if hasattr(value, "tolist") and hasattr(value, "shape") else value


def whole(name: str, value: Any, least: int = 0, most: int = 10**9, none: bool = False) -> Any:
    """A whole number.

    Args:
        name: of the argument.
        value: what was passed; also a number of numpy.
        least: the smallest that is accepted.
        most: the largest.
        none: whether None is accepted.

    Returns:
        The number, or None.

    Example:
        >>> whole("clients", 5, least=1)
        5
    """
    if value is None and none:
        return None
    found = plain(value)
    if type(found) is not int or not least <= found <= most:
        raise _wrong(name, value, f"a whole number from {least:,} to {most:,}" + ", or None" * none)
    return found


def number(name: str, value: Any) -> Any:
    """A number; whether it is in a range is checked where that is known.

    Args:
        name: of the argument.
        value: what was passed.

    Returns:
        The number.
    """
    found = plain(value)
    if type(found) not in (int, float) or (type(found) is int and abs(found) > 10**300):
        raise _wrong(name, value, "a number")
    return found


def text(name: str, value: Any, example: str) -> str:
    """A text.

    Args:
        name: of the argument.
        value: what was passed.
        example: one that is accepted.

    Returns:
        The text.
    """
    if not isinstance(value, str):
        raise _wrong(name, value, f"a text, for example {example!r}")
    return value


def truth(name: str, value: Any, none: bool = False) -> Any:
    """True or False.

    Args:
        name: of the argument.
        value: what was passed.
        none: whether None is accepted.

    Returns:
        The value.
    """
    if not isinstance(plain(value), bool) and not (value is None and none):
        raise _wrong(name, value, "True or False" + ", or None" * none)
    return plain(value)


def place(name: str, value: Any) -> Path:
    """The path of a file or a folder.

    Args:
        name: of the argument.
        value: what was passed.

    Returns:
        The path.
    """
    if not isinstance(value, str | os.PathLike):
        raise _wrong(name, value, "a path, as a text or a pathlib.Path")
    return Path(value)


def _wrong(name: str, value: Any, expected: str) -> SparsonaError:
    try:
        shown = repr(value)
    except Exception:  # of the caller's class, or a number of thousands of digits
        shown = f"a {type(value).__name__}"
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return SparsonaError(f"{name} = {shown}", expected=expected, hint=f"give {name} another value")
