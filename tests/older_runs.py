"""Run folders as older versions of sparsona wrote them."""

from __future__ import annotations

import json
from pathlib import Path

from sparsona.runs.files import with_checksum


def unseal(folder: Path) -> None:
    """Remove the digests of a run's files, which older versions did not write: its files can then be edited."""
    path = folder / "checkpoint" / "manifest.json"
    values = json.loads(path.read_text())
    del values["checksum"], values["sealed"]
    path.write_text(json.dumps(with_checksum(values)) + "\n")
