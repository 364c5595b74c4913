"""The folder of a reproduction: where it is, and the file that says what was asked for. Free of torch."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from sparsona.core.errors import SparsonaError
from sparsona.core.version import VERSION
from sparsona.runs.folder import read_json
from sparsona.runs.validation import validate

FILE = "reproduction.json"
ROOT = Path("runs") / "reproduce"


class Record(BaseModel):
    """What was asked for last, and the source that each run was started or resumed with, by its folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: str
    rows: str
    seeds: list[int]
    scale: float
    changes: dict[str, Any] = Field(default_factory=dict)
    commits: dict[str, list[str]] = Field(default_factory=dict)


def default_path(name: str, scale: float) -> Path:
    """Where the runs of a recipe are; scaled ones have a folder of their own."""
    return ROOT / (name if scale == 1 else f"{name}-scale-{scale:g}")


def read_record(path: Path) -> Record:
    """The file of a folder."""
    if not (path / FILE).is_file():
        raise SparsonaError(
            f"'{path}' is not a reproduction",
            expected=f"a folder made by `sparsona reproduce`, with a {FILE} inside",
            hint="`sparsona reproduce` lists what can be reproduced",
        )
    return validate(Record, read_json(path / FILE), f"'{path / FILE}'")


def source_commit() -> str:
    """The commit of this source, with "-dirty" if it was changed since; the version, if it is no working copy."""
    here = Path(__file__).parent
    try:
        known = ["git", "-C", str(here), "ls-files", "--error-unmatch", Path(__file__).name]
        subprocess.run(known, capture_output=True, check=True, timeout=10)
        described = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=10"]
        return subprocess.run(described, capture_output=True, check=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return f"version {VERSION}"
