"""Files that others wrote, read within limits. Free of torch.

Everything that is wrong with a file is an OSError or a ValueError, whose message says what: callers name the file and
say what they expected.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparsona.core.errors import SparsonaError

MOST_BYTES = 256 << 20  # of a file that sparsona wrote: facts of a million clients have less
MOST_BYTES_TYPED = 4 << 20  # of one that somebody typed or made, of options or of edges
MOST_DEPTH = 32  # of lists and tables in each other
MOST_NUMBER = 10**40
MOST_DOTS = 2_000  # in a line: tomllib takes time by the square of the parts of a key

_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'')


def expand(path: str | Path) -> Path:
    """A path in which ~ stands for a home folder.

    Args:
        path: as a user wrote it.

    Returns:
        The path. SparsonaError: there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise SparsonaError(
            f"the path '{path}': there is no such home folder",
            expected="a path",
            hint="write ./~name for a file whose name begins so",
        ) from None


def read_text(path: str | Path, most: int = MOST_BYTES_TYPED) -> str:
    """The text of a file.

    Args:
        path: any file, also a pipe.
        most: how many bytes it may have.

    Returns:
        Its content, which is UTF-8.

    Raises:
        OSError: It cannot be read.
        ValueError: It is too large, or no text.
    """
    with Path(path).open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return data.decode("utf-8")


def parse_json(text: str | bytes, **options: Any) -> Any:
    """The value of a JSON text, as `json.loads` with these options.

    Args:
        text: of a file or a message.
        options: of `json.loads`.

    Returns:
        The value.

    Raises:
        ValueError: It is no JSON, nests too deep, or has a number that is too large.

    Example:
        >>> parse_json('{"edges": [[0, 1]]}')
        {'edges': [[0, 1]]}
    """
    return _parse(lambda: json.loads(text, **options))


def parse_toml(text: str) -> dict[str, Any]:
    """The values of a TOML text.

    Args:
        text: of a file.

    Returns:
        The values by key.

    Raises:
        ValueError: It is no TOML, nests too deep, or has a number that is too large.

    Example:
        >>> parse_toml("rounds = 3")
        {'rounds': 3}
    """
    for number, line in enumerate(text.splitlines(), 1):
        # Dots outside of texts are those of keys and of numbers; telling them apart takes the parser.
        if _TEXT.sub("", line).count(".") > MOST_DOTS:
            raise ValueError(f"line {number} has more than {MOST_DOTS:,} dots outside of texts")
    found: dict[str, Any] = _parse(lambda: tomllib.loads(text))
    return found


def _parse(parse: Callable[[], Any]) -> Any:
    try:
        value = parse()
    except RecursionError:
        raise ValueError(f"it nests deeper than {MOST_DEPTH} levels") from None
    except ValueError as error:
        if "integer string conversion" in str(error):
            raise ValueError("it has a number of thousands of digits") from None
        raise
    level, depth = [value], 0
    while level:
        below: list[Any] = []
        for one in level:
            if type(one) is int and not -MOST_NUMBER < one < MOST_NUMBER:
                raise ValueError(f"it has a number of {len(str(abs(one)))} digits")
            if type(one) is dict:
                below += one.values()
            elif type(one) is list:
                below += one
        level, depth = below, depth + 1
        if depth > MOST_DEPTH + 1:
            raise ValueError(f"it nests deeper than {MOST_DEPTH} levels")
    return value
