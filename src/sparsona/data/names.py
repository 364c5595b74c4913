"""Names of clients and classes, made safe to print. Free of torch and numpy.

A name is the user's text: it may hold markup, control characters or a direction override. Nothing that is not
printable gets past `clean_names`; markup of terminals and pages is escaped where a name is shown.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.printable import printable

MAX_LENGTH = 200
LISTED = 5  # names in a message
MAX_FILE_BYTES = 120  # of a name in that of a file: file systems take 255 bytes in all

Names = tuple[str, ...] | None


def clean_name(name: Any) -> str:
    """A name as text; characters that cannot be printed are written as Python escapes them.

    Args:
        name: a text, bytes, a number, or anything that has a text.

    Returns:
        Printable characters only.

    Example:
        >>> clean_name("ward\\t7"), clean_name(b"north"), clean_name(17)
        ('ward\\\\t7', 'north', '17')
    """
    text = name.decode("utf-8", "backslashreplace") if isinstance(name, bytes) else str(name)
    if len(text) > MAX_LENGTH:
        raise SparsonaError(
            f"a name of {len(text):,} characters", expected=f"at most {MAX_LENGTH}", hint="choose a shorter one"
        )
    return printable(text, kept="")


def clean_names(names: Iterable[Any], what: str, count: int | None = None) -> tuple[str, ...]:
    """Names that can be printed and told apart.

    Args:
        names: of all clients, or of all classes, in order.
        what: whose names they are: "clients" or "classes".
        count: how many there must be; None: any number.

    Returns:
        A name for each.
    """
    if isinstance(names, str | bytes) or not isinstance(names, Iterable):
        raise SparsonaError(f"'{names!r}' as the names of {what}", expected="a list of names", hint="write ['a', 'b']")
    found = tuple(clean_name(name) for name in names)
    if count is not None and len(found) != count:
        raise SparsonaError(f"{len(found)} names for {count} {what}", expected="one name for each")
    if "" in found:
        raise SparsonaError(f"an empty name among those of {what}", expected="at least one character in each")
    if len(set(found)) < len(found):
        twice = next(name for place, name in enumerate(found) if name in found[:place])
        raise SparsonaError(f"two {what} are called '{twice}'", expected="a name of its own for each")
    return found


def name_of(names: Sequence[str] | None, index: int) -> str:
    """The name of a client or class, or its number where there are no names.

    Args:
        names: of all, in order; None or empty: they have none.
        index: its number.

    Returns:
        What tables and messages call it.

    Example:
        >>> name_of(("north", "south"), 1), name_of(None, 1)
        ('south', '1')
    """
    return names[index] if names else str(index)


def listed(names: Sequence[str]) -> str:
    """Names for a message, of many the first.

    Args:
        names: of clients or owners.

    Returns:
        Those names.

    Example:
        >>> listed(["ana", "bo"]), listed(list("abcdefg"))
        ('ana, bo', 'a, b, c, d, e and 2 more')
    """
    more = f" and {len(names) - LISTED:,} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def find_client(key: Any, names: Sequence[str] | None, count: int) -> int:
    """The number of the client that is meant.

    Args:
        key: its number or name.
        names: of all clients, in order; None: they have none.
        count: how many clients there are.

    Returns:
        Its number, from 0.

    Example:
        >>> find_client("south", ("north", "south"), 2)
        1
    """
    if isinstance(key, str):
        if not names:
            raise SparsonaError(
                f"there is no client '{clean_name(key)}'",
                expected=f"a number from 0 to {count - 1}: these have no names",
            )
        if (name := clean_name(key)) not in names:
            raise unknown_name("client", name, names)
        return names.index(name)
    if hasattr(key, "__index__") and not isinstance(key, bool):
        if 0 <= (index := key.__index__()) < count:
            return int(index)
        raise SparsonaError(f"there is no client {index}", expected=f"0 to {count - 1}")
    raise SparsonaError(
        f"a client by a {type(key).__name__}",
        expected=f"its number, from 0 to {count - 1}" + ", or its name" * bool(names),
    )


def file_names(names: Sequence[str]) -> tuple[str, ...]:
    """Names as parts of the names of files, all different, also where a file system does not tell cases apart.

    Letters, digits, dots, hyphens and underscores stay. Names that are the same then have their number after them.

    Args:
        names: of all clients, in order.

    Returns:
        A part for each: no path, no hidden file on its own, and not too long.

    Example:
        >>> file_names(["hospital-3", "../../x", "Ward 1", "ward_1"])
        ('hospital-3', 'x', 'Ward_1-2', 'ward_1-3')
    """
    parts = [_file_part(name) for name in names]
    counts = Counter(map(str.casefold, parts))
    taken = {key for key, num in counts.items() if num == 1}
    for index, part in enumerate(parts):
        if counts[part.casefold()] > 1 or not part:
            numbered = f"{part}-{index}" if part else str(index)
            while numbered.casefold() in taken:  # the name of another
                numbered += "-"
            parts[index] = numbered
            taken.add(numbered.casefold())
    return tuple(parts)


def _file_part(name: str) -> str:
    kept = re.sub(r"[^\w.-]+", "_", unicodedata.normalize("NFKC", name))
    return kept.encode(errors="ignore")[:MAX_FILE_BYTES].decode(errors="ignore").strip("._-")
