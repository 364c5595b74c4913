"""Text of others, made safe for a terminal. Free of torch."""

from __future__ import annotations

import multiprocessing
import re
import sys
from functools import cache

_BEYOND_ASCII = re.compile("[^ -~]")


def printable(text: object, kept: str = "\n\t") -> str:
    """A text in which no character moves a cursor, changes a colour or the direction of what follows.

    Args:
        text: anything that has a text: a name, a path, a message.
        kept: characters that stay although they cannot be printed.

    Returns:
        The same, with what cannot be printed written as Python escapes it. What cannot be encoded, such as a byte of a
        file's name that is no UTF-8, is among that.

    Example:
        >>> print(printable("run\\x1b[2J"))
        run\\x1b[2J
    """

    def shown(found: re.Match[str]) -> str:
        one = found[0]
        return one if one.isprintable() or one in kept else ascii(one)[1:-1]

    return _BEYOND_ASCII.sub(shown, str(text))


def warn(text: str) -> None:
    """Print a warning, on stderr so that --json stays clean."""
    print(f"warning: {printable(text)}", file=sys.stderr)


@cache
def warn_once(text: str) -> None:
    """Print a warning about data: a comparison reads the same data for every run, and in every process."""
    if multiprocessing.parent_process() is None:
        warn(text)
