"""COMPARISON/comparison.json: the runs that a comparison consists of, begun or not. Free of torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsona.core.errors import SparsonaError
from sparsona.runs.files import check_plain, checksum, read_json, write_atomically
from sparsona.runs.folder import RunFolder
from sparsona.runs.stopping import MEASURES

COMPARISON_FILE, SEARCH_FILE, REPRODUCTION_FILE = "comparison.json", "tune.json", "reproduction.json"
TUNED_FILE = "tuned.toml"  # in the folder of a search: the options that were chosen
REFIT = "refit"  # likewise: its methods with these options, trained on all training data
_RESOLVED = {"clients", "novel", "model"}  # by the data, where a comparison leaves them open
_CHOSEN = {"device", "executor", *MEASURES}  # by what is there when a run begins


def write_comparison(path: Path, runs: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Write the file of a new comparison: the names of its runs' folders, and their options."""
    found = [{"folder": name, "config": dict(config)} for name, config in runs]
    for place, entry in enumerate(found):
        entry["checksum"] = _checksum(entry, place, len(found))
    write_atomically(path / COMPARISON_FILE, (json.dumps(found, indent=1) + "\n").encode())


def read_comparison(path: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The runs of a comparison: folder and options. Folders are inside that of the comparison, and no links."""
    file = path / COMPARISON_FILE
    found, entries = [], read_json(file, list)
    if not entries:
        raise _damaged(file, "it names no run")
    for place, entry in enumerate(entries):
        if not isinstance(entry, dict) or not isinstance(entry.get("config"), dict):
            raise _damaged(file, "an entry is no run")
        name = entry.get("folder")
        if not isinstance(name, str) or not name.isprintable() or name != Path(name).name or name in ("", ".", ".."):
            raise _damaged(file, f"{name!r} is no folder in that of the comparison")
        # Older versions wrote none.
        if "checksum" in entry and entry["checksum"] != _checksum(entry, place, len(entries)):
            raise _damaged(file, f"the entry of '{name}' was edited since the comparison was started")
        check_plain(path / name, is_folder=True)
        found.append((path / name, entry["config"]))
    if len({folder for folder, _ in found}) < len(found):
        raise _damaged(file, "two runs have one folder")
    return found


def comparison_in(path: Path) -> Path:
    """The folder of the comparison that this folder is or, if it is a search's, has in it.

    Args:
        path: the folder of a comparison, a search, or anything else.

    Returns:
        That folder; `path` itself where there is no comparison in it.
    """
    if not (path / SEARCH_FILE).exists():
        return path
    check_plain(path / REFIT, is_folder=True)
    return path / REFIT if (path / REFIT / COMPARISON_FILE).exists() else path


def check_member(folder: RunFolder, planned: Mapping[str, Any]) -> None:
    """Raise SparsonaError if this run was made with other options than its comparison has for it."""

    def is_open(key: str) -> bool:
        value = planned[key]
        if key == "rounds" and folder.facts.extensions:
            return True
        return key in _CHOSEN or (key in _RESOLVED and (value is None or (type(value) is float and 0 < value < 1)))

    differing = [key for key in planned if not is_open(key) and folder.config.get(key, planned[key]) != planned[key]]
    if differing:
        raise SparsonaError(
            f"'{folder.path}' is not the run that its comparison was started with: {', '.join(differing)}",
            expected=f"the options in '{folder.path.parent / COMPARISON_FILE}'",
            hint="restore the folder that was there, or remove it: `sparsona resume` makes the run anew",
        )


def _checksum(entry: Mapping[str, Any], place: int, count: int) -> str:
    return checksum({"place": [place, count], "folder": entry["folder"], "config": entry["config"]})


def _damaged(file: Path, what: str) -> SparsonaError:
    return SparsonaError(
        f"'{file}' is damaged: {what}",
        expected="the file as sparsona wrote it",
        hint="restore it from a copy, or start the comparison again in another folder",
    )
