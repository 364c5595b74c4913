"""RUN/profile.json: where the time went, one part for each time a profiled run was started or resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparsona.core.errors import SparsonaError
from sparsona.engine.profiler import Clock
from sparsona.runs.files import read_json, with_checksum, without_checksum, write_atomically

NAME, FORMAT = "profile.json", 1


class ProfileFile:
    """The profile of a run folder, its last part being measured now. With a clock that is off it writes nothing."""

    def __init__(self, folder: Path, clock: Clock, completed: int, **about: Any) -> None:
        self._path, self._clock, self._first, self._about = folder / NAME, clock, completed, about
        self._before = read_profile(folder)["parts"] if clock.is_on and is_profiled(folder) else []

    def write(self, completed: int) -> None:
        """What was measured until now; `completed` rounds are done."""
        if self._clock.is_on:
            part = {"rounds": {"from": self._first, "to": completed}, **self._about, **self._clock.profile()}
            value = json.loads(json.dumps({"format": FORMAT, "parts": [*self._before, part]}))  # as it is read
            write_atomically(self._path, (json.dumps(with_checksum(value), indent=1) + "\n").encode())


def is_profiled(folder: Path) -> bool:
    """Whether this run is one that is measured."""
    return (folder / NAME).is_file()


def read_profile(folder: Path) -> dict[str, Any]:
    """The file's content."""
    if not is_profiled(folder):
        raise SparsonaError(
            f"'{folder}' has no profile",
            expected="a run that was measured",
            hint="run with --profile, or train(..., profile=True)",
        )
    value = read_json(folder / NAME)
    without_checksum(value, folder / NAME, is_needed=False)
    if value.get("format") != FORMAT or not isinstance(value.get("parts"), list):
        raise SparsonaError(
            f"'{folder / NAME}' is not a profile of this version",
            expected=f"format {FORMAT}, as sparsona wrote it",
            hint="remove it: the run itself does not need it",
        )
    return value


def search_time(folder: Path) -> dict[str, Any] | None:
    """What mask search took beside training, in the last part that has it; None: not profiled, or nothing searched."""
    parts = read_profile(folder)["parts"] if is_profiled(folder) else []
    return next((part["search"] for part in reversed(parts) if part.get("search")), None)
