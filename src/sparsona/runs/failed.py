"""The runs of a comparison that failed, and why: a file in its folder, until they are retried. Free of torch."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from sparsona.core.errors import SparsonaError
from sparsona.runs.comparison import COMPARISON_FILE, read_comparison
from sparsona.runs.files import check_plain, read_json, with_checksum, without_checksum, write_atomically
from sparsona.runs.folder import reached

NAME = "failed.json"
NOT_PLAYED = "it was not begun: the comparison was stopped before"


@dataclass(frozen=True)
class FailedRun:
    """A run of a comparison without a result.

    Args:
        method: the title of its method.
        seed: its seed.
        folder: the name of its folder, which says how the method was written.
        error: the error, all of it.
        trace: where it was raised, if it is no error of Sparsona's.
    """

    method: str
    seed: int
    folder: str
    error: str
    trace: str = ""

    @property
    def label(self) -> str:
        """For a row of a table."""
        return f"{self.method} ({self.folder})"

    @property
    def what(self) -> str:
        """The error in a line."""
        return (self.error.splitlines() or ["no reason was given"])[0]

    @property
    def sentence(self) -> str:
        """For a terminal, a page and a report."""
        return f"{self.label}: {self.what}" if self.error == NOT_PLAYED else f"{self.label} failed: {self.what}"


def failed_run(folder: Path, method: str, seed: int, error: Exception) -> FailedRun:
    """What is noted of an error that ended a run."""
    if isinstance(error, SparsonaError):
        return FailedRun(method, seed, folder.name, str(error))
    trace = "".join(traceback.format_exception(error))
    return FailedRun(method, seed, folder.name, f"{type(error).__name__}: {error}", trace)


def read_failed(path: Path) -> dict[str, FailedRun]:
    """The runs of the comparison in this folder that failed and have not been finished since, by their folders."""
    found, _ = _read(path)
    return {one.folder: one for one in found if not reached(path / one.folder).finished}


def check_failed(path: Path) -> str | None:
    """Raise SparsonaError if the note in this comparison's folder is not what was written; why nothing is known."""
    _, is_sealed = _read(path)
    return None if is_sealed else "made by a version that wrote no checksum"


def _read(path: Path) -> tuple[list[FailedRun], bool]:
    """What is noted of runs of the comparison, and whether a checksum vouches for it: older versions wrote a list."""
    file = path / NAME
    check_plain(file)
    if not file.exists():
        return [], True
    values = read_json(file, (dict, list))
    is_sealed = isinstance(values, dict)
    entries = without_checksum(values, file).get("failed", 0) if isinstance(values, dict) else values
    planned = {folder.name for folder, _ in read_comparison(path)} if (path / COMPARISON_FILE).exists() else None
    try:
        found = [FailedRun(**entry) for entry in entries]
    except TypeError:
        raise _damaged(file) from None
    for one in found:
        texts = (one.method, one.folder, one.error, one.trace)
        if not all(isinstance(text, str) for text in texts) or type(one.seed) is not int:
            raise _damaged(file)
        if one.folder not in planned if planned is not None else one.folder != Path(one.folder).name:
            raise _damaged(file, f": {one.folder!r} is no run of the comparison")
    return found, is_sealed


def _damaged(file: Path, what: str = "") -> SparsonaError:
    return SparsonaError(
        f"'{file}' is damaged{what}",
        expected="the file as sparsona wrote it",
        hint="delete it: `sparsona resume` retries what is missing",
    )


def write_failed(path: Path, found: Mapping[str, FailedRun]) -> None:
    """Note the runs that failed; without any, there is no file."""
    if found:
        values = with_checksum({"failed": [asdict(one) for one in found.values()]})
        write_atomically(path / NAME, (json.dumps(values, indent=1) + "\n").encode())
    else:
        (path / NAME).unlink(missing_ok=True)
