"""What is slow to decode is decoded once, into files that are mapped into memory from then on."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparsona.core.errors import SparsonaError
from sparsona.core.reading import parse_json, read_text
from sparsona.data.cache import cache_folder, cannot_write, work_aside
from sparsona.data.pool import Array

VERSION = 1  # of the readers: raise it when they decode the same files differently
SIZES = "sizes.json"  # of the files beside it, which is how a damaged folder is known
Decode = Callable[[Callable[[str, Any, tuple[int, ...]], Array]], None]


def decode_once(
    name: str, options: Mapping[str, Any], root: Path, files: Sequence[Path], decode: Decode
) -> dict[str, Array]:
    """The arrays that `decode` makes of `files`, by name, mapped copy-on-write.

    `decode` is handed a function `(name, dtype, shape) -> array to be filled`. What it fills is kept in the cache for
    as long as the options, `root`, and the files' names below it, sizes and times stay the same; where it was damaged
    it is decoded again. It appears there whole or not at all.
    """
    marks: list[tuple[str, int, int, int, int]] = []
    for path in files:
        stat = path.stat()
        # The time of modification can be set, and copying often does; that of the last change cannot.
        times = stat.st_mtime_ns, stat.st_ctime_ns
        marks.append((path.relative_to(root).as_posix(), stat.st_size, stat.st_ino, *times))
    state = json.dumps([VERSION, name, dict(options), str(root.resolve()), marks], sort_keys=True)
    digest = hashlib.blake2b(state.encode(errors="surrogateescape"), digest_size=12).hexdigest()
    folder = cache_folder() / "decoded" / f"{name}-{digest}"
    arrays = _load(folder)
    if arrays is None:
        _decode(name, folder, decode)
        arrays = _load(folder)
    if arrays is None:
        raise SparsonaError(f"'{folder}' is damaged right away", expected="what was decoded", hint="try again")
    return arrays


def _load(folder: Path) -> dict[str, Array] | None:
    """What was decoded into a folder, which is removed if that is not whole any more."""
    if not folder.is_dir():
        return None
    try:
        sizes = parse_json(read_text(folder / SIZES))
        if all((folder / file).stat().st_size == size for file, size in sizes.items()):
            return {Path(file).stem: np.load(folder / file, mmap_mode="c", allow_pickle=False) for file in sizes}
    except (OSError, ValueError, EOFError, AttributeError):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    return None


def _decode(name: str, folder: Path, decode: Decode) -> None:
    with work_aside(folder, name) as kept:
        arrays: dict[Path, np.memmap[Any, Any]] = {}

        def new(name: str, dtype: Any, shape: tuple[int, ...]) -> Array:
            path = kept / f"{name}.npy"
            try:
                arrays[path] = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
                _reserve(path)
            except OSError as error:
                raise cannot_write(folder.parent, error) from error
            return arrays[path]

        decode(new)
        try:
            for array in arrays.values():
                array.flush()
            sizes = {path.name: path.stat().st_size for path in arrays}
            (kept / SIZES).write_text(json.dumps(sizes), encoding="utf-8")
            os.replace(kept, folder)
        except OSError as error:
            if not folder.is_dir():  # otherwise another process was quicker, with the same result
                raise cannot_write(folder.parent, error) from error


def _reserve(path: Path) -> None:
    """Room on the disk for the whole file: to write into a mapped file on a full disk ends the process."""
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # those: a file system that cannot do it
                    raise
