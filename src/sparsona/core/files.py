"""Files that are complete or absent. Free of torch."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from sparsona.core.errors import SparsonaError

# What a killed process may leave of a file; those of older versions have no number.
_DRAFT = re.compile(r"\.(.+?)(\.[0-9a-f]{8})?\.part")


def check_replaceable(path: Path) -> None:
    """Raise SparsonaError if there is something at a path that is no regular file.

    Args:
        path: where a file is to be written.
    """
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe or a device"
        raise SparsonaError(
            f"'{path}' is {kind}",
            expected="a new file, or one to be replaced",
            hint="choose another name; /dev/stdout and the like cannot be written",
        )


@contextmanager
def replace_file(path: Path, *, is_durable: bool = False) -> Iterator[BinaryIO]:
    """Write a file under a temporary name beside `path`, then rename it to `path`.

    A reader, or a process that has the old file mapped, sees the old content or the new one, never a part. After an
    error nothing has changed. With `is_durable` that also holds after a power failure, but calls wait for the disk. A
    file or a link that has the temporary name already is not written to, and what is at `path` and is no file, such as
    a folder, a pipe or a device, is not replaced: SparsonaError.
    """
    check_replaceable(path)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    with draft.open("xb") as file:
        try:
            yield file
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
            file.close()
            os.replace(draft, path)
            if is_durable:
                folder = os.open(path.parent, os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise


def drafted_name(name: str) -> str | None:
    """The name of the file that `replace_file` was writing under this temporary name; None: it is none.

    Args:
        name: of a file.

    Returns:
        The other name.

    Example:
        >>> drafted_name(".config.json.0123abcd.part"), drafted_name("notes.part")
        ('config.json', None)
    """
    found = _DRAFT.fullmatch(name)
    return None if found is None else found[1]
