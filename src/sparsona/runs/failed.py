"""The runs of a comparison that failed, and why: a file in its folder, until they are retried. Free of torch."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from sparsona.core.errors import SparsonaError
from sparsona.runs.folder import reached, read_json, write_atomically

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
    if not (path / NAME).exists():
        return {}
    try:
        found = [FailedRun(**entry) for entry in read_json(path / NAME, list)]
        if not all(isinstance(value, str) for one in found for value in (one.method, one.folder, one.error, one.trace)):
            raise TypeError
    except TypeError:
        raise SparsonaError(
            f"'{path / NAME}' is damaged",
            expected="the file as sparsona wrote it",
            hint="delete it: `sparsona resume` retries what is missing",
        ) from None
    return {one.folder: one for one in found if not reached(path / Path(one.folder).name).finished}


def write_failed(path: Path, found: Mapping[str, FailedRun]) -> None:
    """Note the runs that failed; without any, there is no file."""
    if found:
        write_atomically(path / NAME, (json.dumps([asdict(one) for one in found.values()], indent=1) + "\n").encode())
    else:
        (path / NAME).unlink(missing_ok=True)
