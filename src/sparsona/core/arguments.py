"""Arguments of Python functions, checked: a wrong one is the caller's, and is named. Free of torch."""

from __future__ import annotations

from typing import Any

from sparsona.core.errors import SparsonaError


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
    plain = value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
    if type(plain) is not int or not least <= plain <= most:
        raise _wrong(name, value, f"a whole number from {least:,} to {most:,}" + ", or None" * none)
    return plain


def number(name: str, value: Any) -> float:
    """A number that is finite.

    Args:
        name: of the argument.
        value: what was passed.

    Returns:
        The number.
    """
    plain = value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
    if type(plain) not in (int, float) or not -1e300 < plain < 1e300:
        raise _wrong(name, value, "a number")
    return float(plain)


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


def _wrong(name: str, value: Any, expected: str) -> SparsonaError:
    try:
        shown = repr(value)
    except Exception:  # of the caller's class, or a number of thousands of digits
        shown = f"a {type(value).__name__}"
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return SparsonaError(f"{name} = {shown}", expected=expected, hint=f"give {name} another value")
