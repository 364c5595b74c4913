"""What a figure depends on: machine, versions and commit, recorded beside it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from sparsona.runs.store import environment


def surroundings() -> dict[str, Any]:
    words = ["git", "describe", "--always", "--dirty"]
    told = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True)
    return environment() | {"commit": told.stdout.strip() or "unknown"}
