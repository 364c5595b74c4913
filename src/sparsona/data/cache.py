"""The folder of downloads and decoded data, and how something appears in it: complete or not at all."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparsona.core.errors import SparsonaError
from sparsona.core.reading import expand

ABANDONED_AFTER = 86_400.0  # seconds
MARK = ".sparsona-part"  # in every folder that may be swept: users have folders called *.part-* themselves


def cache_folder() -> Path:
    """Where downloads and decoded data are kept: $SPARSONA_DATA, else `sparsona` in the user's cache folder."""
    if own := os.environ.get("SPARSONA_DATA"):
        return expand(own)
    return expand(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparsona"


@contextmanager
def work_aside(target: Path, name: str) -> Iterator[Path]:
    """An empty folder beside `target`, to be filled and then moved there; it is removed at the end.

    Such folders that killed processes left of the same data set, more than a day ago, are removed as well.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent, name)
        aside = Path(tempfile.mkdtemp(prefix=f"{target.name}.part-", dir=target.parent))
    except OSError as error:
        raise cannot_write(target.parent, error) from error
    try:
        try:
            (aside / MARK).touch()
            (aside / "kept").mkdir()
        except OSError as error:
            raise cannot_write(target.parent, error) from error
        yield aside / "kept"
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _sweep(folder: Path, name: str) -> None:
    ours = re.compile(re.escape(name) + r"(-[0-9a-f]{24})?\.part-[a-z0-9_]{8}")
    for path in [path for path in folder.iterdir() if ours.fullmatch(path.name)]:
        try:
            is_abandoned = time.time() - (path / MARK).stat().st_mtime > ABANDONED_AFTER
        except OSError:  # not ours, or another process has just removed it
            continue
        if is_abandoned:
            shutil.rmtree(path, ignore_errors=True)


def cannot_write(folder: Path, error: OSError) -> SparsonaError:
    """An error for a folder that is full or cannot be written."""
    is_cache = folder.is_relative_to(cache_folder())
    return SparsonaError(
        f"'{folder}' cannot be written: {error}",
        expected="a folder that can be written, on a disk with free space",
        hint="set SPARSONA_DATA to another" if is_cache else "give another folder with --to",
    )
