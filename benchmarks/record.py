"""What benchmarks share: what a figure depends on, recorded beside it, and its place in a page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from sparsona.runs.folder import environment

# Contenders as people know them.
NAMES = {
    "sparsona": "Sparsona",
    "naive": "deepcopy + DataLoader",
    "pfl": "pfl-research",
    "flower": "Flower simulation",
    "fedlab": "FedLab",
}


def surroundings() -> dict[str, Any]:
    words = ["git", "describe", "--always", "--dirty"]
    told = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True)
    return environment() | {"commit": told.stdout.strip() or "unknown"}


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Put the text between two marks of a page, in place of what is there."""
    before, begun, rest = page.read_text().partition(begin)
    _, ended, after = rest.partition(end)
    if not ended:
        sys.exit(f"{page} lacks the marks {begin} and {end}")
    page.write_text(f"{before}{begun}\n{text}\n{ended}{after}")
