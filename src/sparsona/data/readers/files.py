"""Files of data sets: where they are looked for, and what is said of those that are absent or damaged."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from sparsona.core.errors import SparsonaError

Listen = Callable[[int, int], None]
ABANDONED_AFTER = 86_400.0  # seconds
MARK = ".sparsona-part"  # in every folder that may be swept: people have folders called *.part-* themselves


@dataclass(frozen=True)
class Request:
    """What a reader is asked for: a data set, the folders to look in, best first, and `sources.read`'s options."""

    name: str
    places: tuple[Path, ...]
    sequence_length: int | None = None
    vocabulary_size: int | None = None
    resize: int | None = None
    crop: int | None = None
    augment: bool | None = None
    listen: Listen | None = None

    def tell(self, done: int, total: int) -> None:
        """Progress; total 0: unknown."""
        if self.listen is not None:
            self.listen(done, total)


def cache_folder() -> Path:
    """Where downloads and decoded data are kept: $SPARSONA_DATA, else `sparsona` in the user's cache folder."""
    if own := os.environ.get("SPARSONA_DATA"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "sparsona"


def list_places(names: Sequence[str], folders: Sequence[Path]) -> tuple[Path, ...]:
    """The subfolders called so, and the folder itself, of each folder and then of the cache.

    A subfolder comes first: MNIST and Fashion-MNIST have files of the same names.
    """
    tops = [*(Path(folder).expanduser() for folder in folders), cache_folder()]
    return tuple(dict.fromkeys(place for top in tops for place in (*(top / name for name in names), top)))


def find(places: Sequence[Path], *names: str) -> list[Path] | None:
    """These files, plain or with .gz, from the first place that has them all."""
    for place in places:
        found = [
            next((path for path in (place / name, place / f"{name}.gz") if path.is_file()), None) for name in names
        ]
        if all(found):
            return [path for path in found if path]
    return None


def damaged(path: Path, why: object, expected: str = "") -> SparsonaError:
    """An error for a file that is there but cannot be what it is called."""
    return SparsonaError(
        f"'{path}' cannot be read: {why}",
        expected=expected or "a whole file, as it was published",
        mend="obtain it again; it may have been cut short",
    )


def require(module: str, extra: str, what: str) -> ModuleType:
    """An optional package; its absence is an error that names the extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SparsonaError(
            f"{what} needs the package '{module.partition('.')[0]}', which is not installed",
            expected=f"the extra '{extra}'",
            mend=f"pip install 'sparsona[{extra}]'",
        ) from error


@contextmanager
def work_aside(target: Path, name: str) -> Iterator[Path]:
    """An empty folder on the disk of `target`, to be filled and then moved there; what is left of it goes afterwards.

    What processes that were killed left half done of the same data set, long ago, is removed as well.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent, name)
        aside = Path(tempfile.mkdtemp(prefix=f"{target.name}.part-", dir=target.parent))
    except OSError as error:
        raise cannot_keep(target.parent, error) from error
    try:
        try:
            (aside / MARK).touch()
            (aside / "kept").mkdir()
        except OSError as error:
            raise cannot_keep(target.parent, error) from error
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


def cannot_keep(folder: Path, error: OSError) -> SparsonaError:
    """An error for a folder that is full or cannot be written."""
    is_cache = folder.is_relative_to(cache_folder())
    return SparsonaError(
        f"nothing can be kept in '{folder}': {error}",
        expected="a folder with room that can be written",
        mend="set SPARSONA_DATA to another" if is_cache else "give another folder with --to",
    )
