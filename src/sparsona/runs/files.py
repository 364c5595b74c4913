"""Files of a run folder: written whole or not at all, read only where they are plain files, known by their digests.

A run folder may come from somebody else. What has a name of ours and is a link, a folder or a pipe is not followed,
read or replaced.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from sparsona.core import reading
from sparsona.core.errors import MachineError, SparsonaError
from sparsona.core.files import replace_file

RESTORE = "restore it from a copy, or start the run again in another folder"
WRITTEN = "the file as sparsona wrote it"
# What a file's values are: one of these types, or a dict by key. "name?" need not be there; "*": all other keys.
Shape: TypeAlias = "tuple[type, ...] | Mapping[str, Shape]"
FIGURE = (int, float, type(None))
_NOTHING = object()


@contextlib.contextmanager
def explain_disk_errors(path: Path) -> Iterator[None]:
    """Turn operating system errors into messages that a user can act on."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise MachineError(
                f"the disk is full: '{path}' could not be written",
                expected="free space",
                hint="free some space, then `sparsona resume` this run: what was written before is intact",
            ) from error
        raise MachineError(
            f"'{path}' cannot be written: {error.strerror or error}",
            expected="a place where files can be made",
            hint="choose another folder with --out, or change the permissions of this one",
        ) from error


def write_atomically(path: Path, data: bytes) -> None:
    """All of it or nothing, also if power fails: temporary file, fsync, rename, fsync of the folder."""
    with explain_disk_errors(path), replace_file(path, is_durable=True) as file:
        file.write(data)


def check_plain(path: Path, *, is_folder: bool = False) -> None:
    """Refuse what has a name of ours and is something else: a link, a folder, a pipe. What is not there is fine."""
    try:
        mode = os.lstat(path).st_mode
    except (OSError, ValueError):
        return
    if (stat.S_ISDIR if is_folder else stat.S_ISREG)(mode):
        return
    names = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFREG: "a file"}
    raise SparsonaError(
        f"'{path}' is {names.get(stat.S_IFMT(mode), 'no plain file')}",
        expected="a folder" if is_folder else "a plain file",
        hint="put there what belongs there, or remove it: in a run folder links are not followed",
    )


def read_file(path: Path) -> bytes:
    """The content of a plain file; links and pipes are refused, so that nothing is waited for or read elsewhere."""
    check_plain(path)
    return path.read_bytes()


def read_json(path: Path, kind: type | tuple[type, ...] = dict) -> Any:
    """Read a file that sparsona wrote, or raise an error that says what is wrong with it."""
    try:
        if (size := path.stat().st_size) > reading.MOST_BYTES:
            raise SparsonaError(
                f"'{path}' has {size:,} bytes", expected=f"at most {reading.MOST_BYTES:,}", hint=RESTORE
            )
        return parse_json(read_file(path), path, kind)
    except FileNotFoundError:
        raise SparsonaError(f"'{path}' is missing", expected="a run folder made by sparsona", hint=RESTORE) from None
    except OSError as error:
        raise SparsonaError(f"'{path}' cannot be read: {error}", expected=WRITTEN, hint=RESTORE) from None


def parse_json(data: bytes, path: Path, kind: type | tuple[type, ...] = dict) -> Any:
    """The value of a file that sparsona wrote; `path` is for errors."""
    try:
        value = reading.parse_json(data.decode("utf-8"))
    except ValueError as error:
        raise SparsonaError(f"'{path}' cannot be read: {error}", expected=WRITTEN, hint=RESTORE) from None
    if not isinstance(value, kind):
        names = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
        raise SparsonaError(f"'{path}' holds no {names}", expected=WRITTEN, hint=RESTORE)
    return value


def check_shape(values: Any, shape: Shape, path: Path) -> Any:
    """The values of a file, or SparsonaError if some are not what is used: `path` is for errors."""
    if odd := sorted(_odd(values, shape, "")):
        raise SparsonaError(f"'{path}' is damaged: {', '.join(odd)}", expected=WRITTEN, hint=RESTORE)
    return values


def _odd(value: Any, shape: Shape, where: str) -> Iterator[str]:
    if isinstance(shape, tuple):
        may_be_large = type(value) is float and type(None) in shape  # a loss may be infinite, a sum is not
        is_large = type(value) in (int, float) and not abs(value) < 1 << 63
        if type(value) not in shape or (is_large and not may_be_large):
            yield where
    elif not isinstance(value, dict):
        yield where
    else:
        named = {key.removesuffix("?"): one for key, one in shape.items() if key != "*"}
        for key, one in named.items():
            if key in value or key in shape:
                yield from _odd(value.get(key, _NOTHING), one, f"{where}.{key}".lstrip("."))
        for key in value.keys() - named.keys() if "*" in shape else ():
            yield from _odd(value[key], shape["*"], f"{where}.{key}".lstrip("."))


def checksum(values: Mapping[str, Any]) -> str:
    """A checksum of values that can be written as JSON."""
    return f"{zlib.crc32(json.dumps(values, sort_keys=True).encode()):08x}"


def with_checksum(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with their checksum, for a file that nothing else vouches for."""
    return {**values, "checksum": checksum(values)}


def without_checksum(values: Mapping[str, Any], path: Path, *, is_needed: bool = True) -> dict[str, Any]:
    """The inverse of `with_checksum`, or SparsonaError. Where it is not needed, a file of an older version has none."""
    found = dict(values)
    known = found.pop("checksum", None)
    if (known is not None or is_needed) and known != checksum(found):
        raise SparsonaError(
            f"'{path}' is damaged: its checksum does not match", expected="the file as it was written", hint=RESTORE
        )
    return found


def digest(data: bytes) -> str:
    """Identifies the content of a file."""
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def file_digest(path: Path) -> str:
    """The same of a file that need not fit into memory."""
    state = hashlib.blake2b(digest_size=12)
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            state.update(part)
    return state.hexdigest()
