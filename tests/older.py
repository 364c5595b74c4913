"""Run folders as versions wrote them that did not seal runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sparsona.runs.manifest import read_manifest


def unseal(path: Path) -> None:
    """Take the seal out of a run's manifest."""
    manifest = read_manifest(path)
    assert manifest is not None
    replace(manifest, seal=None).write(path)
