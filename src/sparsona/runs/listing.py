"""Lists runs, read from their folders. Free of torch."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import filelock

from sparsona.core.errors import SparsonaError
from sparsona.core.reading import expand
from sparsona.core.spec import shorten
from sparsona.runs.folder import reached, read_json


def find_run(text: str | Path) -> Path:
    """A run by its path, or by its name in ./runs."""
    with suppress(OSError, ValueError):  # a name that no file can have
        for path in (expand(text), Path("runs") / text):
            if path.exists():
                return path
    raise SparsonaError(
        f"there is no run '{shorten(str(text))}'",
        expected="a folder, or a name in ./runs",
        hint="`sparsona runs` lists those names",
    )


def list_runs(where: Path) -> list[dict[str, Any]]:
    """One row per run below a folder, those of comparisons included; newest first."""
    if not where.is_dir():
        return []
    configs = [*where.glob("*/config.json"), *where.glob("*/*/config.json")]
    return [_row(path.parent, where) for path in sorted(configs, key=lambda path: path.stat().st_mtime, reverse=True)]


def is_used(folder: Path) -> bool | None:
    """Whether a process holds the run's lock; None: this user may not find out."""
    if not (folder / "lock").exists():  # looking must not make it
        return False
    try:
        with filelock.FileLock(str(folder / "lock"), timeout=0):
            return False
    except filelock.Timeout:
        return True
    except OSError:  # no permission to write: no process of this user runs it, but another's may
        return None


def _row(folder: Path, where: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"run": str(folder.relative_to(where)), "path": str(folder)}
    try:
        config = read_json(folder / "config.json")
        found = reached(folder)
        summary = read_json(folder / "summary.json") if (folder / "summary.json").exists() else None
        mean = summary["accuracy"]["mean"] if summary else None
        accuracy = "–" if mean is None else f"{mean:.1%}"
        if mean is None and summary and (metrics := summary.get("metrics")):  # of a regression, its first metric
            name = next(iter(metrics))
            accuracy = "–" if metrics[name]["mean"] is None else f"{name} {metrics[name]['mean']:.4g}"
        steps = summary["steps"]["total"] if summary and "steps" in summary else None  # older summaries lack them
        return row | {
            "method": config["method"],
            "seed": config["seed"],
            "rounds": f"{found.completed}/{config['rounds']}",
            "steps": "–" if steps is None else f"{steps:,}",
            "accuracy": accuracy,
            "state": "finished" if found.finished else "running" if is_used(folder) else "unfinished: resume it",
        }
    except (SparsonaError, KeyError, TypeError) as error:
        blank = dict.fromkeys(("method", "seed", "rounds", "steps", "accuracy"), "–")
        return row | blank | {"state": f"damaged: {str(error).splitlines()[0]}"}
