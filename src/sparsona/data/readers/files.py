"""Files of data sets: where a reader searches for them, and the error for one that is damaged."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from sparsona.core.errors import SparsonaError
from sparsona.core.reading import expand
from sparsona.data.cache import cache_folder

Listen = Callable[[int, int], None]


@dataclass(frozen=True)
class Request:
    """What to read: a data set, the folders to search in order, or the `path` of the user's own data; and options."""

    name: str
    places: tuple[Path, ...]
    path: Path | None = None
    sequence_length: int | None = None
    vocabulary_size: int | None = None
    resize: int | None = None
    crop: int | None = None
    augment: bool | None = None
    listen: Listen | None = None
    num_classes: int | None = None
    task: str = "auto"
    class_names: tuple[str, ...] | None = None

    def report(self, done: int, total: int) -> None:
        """Report progress; total 0: unknown."""
        if self.listen is not None:
            self.listen(done, total)


def list_places(names: Sequence[str], folders: Sequence[Path]) -> tuple[Path, ...]:
    """The subfolders called so, and the folder itself, of each folder and then of the cache.

    A subfolder comes first: MNIST and Fashion-MNIST have files of the same names.
    """
    tops = [*(expand(folder) for folder in folders), cache_folder()]
    return tuple(dict.fromkeys(place for top in tops for place in (*(top / name for name in names), top)))


def find(places: Sequence[Path], *names: str) -> list[Path] | None:
    """These files, plain or with .gz, from the first folder that has them all."""
    for place in places:
        found = [
            next((path for path in (place / name, place / f"{name}.gz") if path.is_file()), None) for name in names
        ]
        if all(found):
            return [path for path in found if path]
    return None


def damaged(path: Path, why: object, expected: str = "", hint: str = "") -> SparsonaError:
    """An error for a file that exists but does not hold what its name says; `hint` is for one of the user's own."""
    is_own = (hint or path.suffix in (".npz", ".npy")) and cache_folder() not in path.parents
    return SparsonaError(
        f"'{path}' cannot be read: {why}",
        expected=expected or "a whole file, as it was published",
        hint=(hint or "correct the arrays, and save them again")
        if is_own
        else "download it again; it may be truncated",
    )


def require(module: str, extra: str, what: str) -> ModuleType:
    """An optional package; its absence is an error that names the extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SparsonaError(
            f"{what} needs the package '{module.partition('.')[0]}', which is not installed",
            expected=f"the extra '{extra}'",
            hint=f"pip install 'sparsona[{extra}]'",
        ) from error
