"""What is slow to decode is decoded once, into files that are mapped into memory from then on."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparsona.core.errors import SparsonaError
from sparsona.data.pool import Array
from sparsona.data.readers.files import cache_folder, sweep

VERSION = 1  # of the readers: raise it when they decode the same files differently


def decode_once(
    name: str,
    options: Mapping[str, Any],
    root: Path,
    files: Sequence[Path],
    decode: Callable[[Callable[[str, Any, tuple[int, ...]], Array]], None],
) -> dict[str, Array]:
    """The arrays that `decode` makes of `files`, by name, mapped copy-on-write.

    `decode` is handed a function `(name, dtype, shape) -> array to be filled`. What it fills is kept in the cache for
    as long as the options and the files' names below `root`, sizes and times stay the same. It appears there whole or
    not at all.
    """
    marks = [(path.relative_to(root).as_posix(), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files]
    state = json.dumps([VERSION, name, dict(options), marks], sort_keys=True)
    folder = cache_folder() / "decoded" / f"{name}-{hashlib.blake2b(state.encode(), digest_size=12).hexdigest()}"
    if not folder.is_dir():
        _decode(folder, decode)
    return {path.stem: np.load(path, mmap_mode="c", allow_pickle=False) for path in sorted(folder.glob("*.npy"))}


def _decode(folder: Path, decode: Callable[[Callable[[str, Any, tuple[int, ...]], Array]], None]) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        sweep(folder.parent)
        aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.part-", dir=folder.parent))
    except OSError as error:
        raise SparsonaError(
            f"decoded data cannot be kept: {error}",
            expected=f"a folder that can be written, '{folder.parent}'",
            mend="set SPARSONA_DATA to a folder with room",
        ) from error
    arrays: list[np.memmap[Any, Any]] = []

    def new(name: str, dtype: Any, shape: tuple[int, ...]) -> Array:
        array = np.lib.format.open_memmap(aside / f"{name}.npy", mode="w+", dtype=dtype, shape=shape)
        arrays.append(array)
        return array

    try:
        decode(new)
        for array in arrays:
            array.flush()
        try:
            os.replace(aside, folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was quicker, with the same result
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
