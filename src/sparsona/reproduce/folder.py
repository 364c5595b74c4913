"""The folder of a reproduction: where it is, and the file that says what was asked for. Free of torch."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sparsona.core.errors import SparsonaError
from sparsona.core.version import VERSION
from sparsona.runs.comparison import REPRODUCTION_FILE
from sparsona.runs.folder import reached, read_json
from sparsona.runs.validation import validate

State = Literal["done", "unfinished", "new"]
ROOT = Path("runs") / "reproduce"


class Record(BaseModel):
    """What was asked for last, and the source that each run was started or resumed with, by its folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: str
    own: dict[str, Any] | None = None  # a recipe that is not in a file
    rows: str
    seeds: list[int]
    scale: float
    changes: dict[str, Any] = Field(default_factory=dict)
    commits: dict[str, list[str]] = Field(default_factory=dict)


def default_path(name: str, scale: float, changes: Mapping[str, Any] | None = None) -> Path:
    """Where the runs of a recipe are; scaled ones have a folder of their own, and so have those of another experiment.

    Args:
        name: the recipe's name.
        scale: the size of the runs.
        changes: options that make another experiment.
    """
    listed = ",".join(f"{key}={value}" for key, value in sorted((changes or {}).items()))
    words = [name, *[f"scale-{scale:g}"] * (scale != 1), *[_file_name(listed)] * bool(listed)]
    return ROOT / "-".join(words)


def own_name(title: str, where: str) -> str:
    """The name of a recipe that is not in a file."""
    return f"own/{_file_name(f'{title} {where}'.lower())}"


def _file_name(text: str) -> str:
    """A text as the name of a file: what is too long or has other characters is told apart by a digest."""
    plain = re.sub("[^A-Za-z0-9.,+=-]+", "-", text).strip("-.")
    if len(plain) <= 80 and (plain == text or not set(text) - set(plain) - {" "}):
        return plain
    return f"{plain[:80]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def run_state(folder: Path) -> State:
    """Whether the run in a folder is still to be started or resumed."""
    if not (folder / "config.json").exists():
        return "new"
    return "done" if reached(folder).finished and (folder / "summary.json").exists() else "unfinished"


def read_record(path: Path) -> Record:
    """The file of a folder."""
    if not (path / REPRODUCTION_FILE).is_file():
        raise SparsonaError(
            f"'{path}' is not a reproduction",
            expected=f"a folder made by `sparsona reproduce`, with a {REPRODUCTION_FILE} inside",
            hint="`sparsona reproduce` lists what can be reproduced",
        )
    return validate(Record, read_json(path / REPRODUCTION_FILE), f"'{path / REPRODUCTION_FILE}'")


def source_commit() -> str:
    """The commit of this source, with "-dirty" if it was changed since; the version, if it is no working copy."""
    here = Path(__file__).parent
    try:
        git = ["git", "-c", "core.fsmonitor=false"]  # which names a program that git would run
        known = [*git, "ls-files", "--error-unmatch", Path(__file__).name]
        subprocess.run(known, cwd=here, capture_output=True, check=True, timeout=10)
        described = [*git, "describe", "--always", "--dirty", "--abbrev=10"]
        done = subprocess.run(described, cwd=here, capture_output=True, check=True, text=True, timeout=10)
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return f"version {VERSION}"
