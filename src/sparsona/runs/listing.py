"""Lists runs, read from their folders. Free of torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparsona.core.errors import SparsonaError
from sparsona.core.reading import expand
from sparsona.core.spec import shorten
from sparsona.core.targets import TITLES, headline_metric
from sparsona.runs.comparison import (
    COMPARISON_FILE,
    REFIT,
    REPRODUCTION_FILE,
    SEARCH_FILE,
    TUNED_FILE,
    comparison_in,
    read_comparison,
)
from sparsona.runs.facts import MEANS
from sparsona.runs.failed import FailedRun, read_failed
from sparsona.runs.files import read_file, read_json
from sparsona.runs.folder import SUMMARY_FILE, is_used, parse_summary, reached
from sparsona.runs.manifest import find_manifest

GROUPS = (COMPARISON_FILE, SEARCH_FILE, REPRODUCTION_FILE)  # in folders that runs are in


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


def full_name(run: Path) -> str:
    """A run's name among others, by which commands find it where these are: its folder, after those of its comparison
    and search, as "both/local-seed0"."""
    run = Path(os.path.abspath(run))  # "." has no name, and a link keeps its own
    names = [run.name]
    while any((run.parent / file).exists() for file in GROUPS):
        run = run.parent
        names.insert(0, run.name)
    return "/".join(names)


def list_runs(where: Path) -> list[dict[str, Any]]:
    """One row per run below a folder, those of comparisons included, and one per search; newest first."""
    if not where.is_dir():
        return []
    below = ("*/config.json", "*/*/config.json", f"*/{REFIT}/*/config.json", f"*/{SEARCH_FILE}")
    configs = [path for pattern in below for path in where.glob(pattern)]
    for depth in ("*/*", "*/*/*"):  # reproductions are in `reproduce/PAPER`
        configs += [
            path for note in where.glob(f"{depth}/{REPRODUCTION_FILE}") for path in note.parent.glob("*/config.json")
        ]
    newest = sorted(configs, key=lambda path: path.stat().st_mtime, reverse=True)
    failed: dict[Path, dict[str, FailedRun]] = {}
    for place in {path.parent.parent for path in newest} - {where}:
        with suppress(SparsonaError):  # of a damaged note `resume` and `verify` tell
            failed[place] = read_failed(place)
    return [
        _search_row(path.parent, where)
        if path.name == SEARCH_FILE
        else _row(path.parent, where, failed.get(path.parent.parent, {}))
        for path in newest
    ]


def _search_row(folder: Path, where: Path) -> dict[str, Any]:
    """What was searched, and how far it got; the runs with the chosen options have rows of their own."""
    row: dict[str, Any] = {"run": str(folder.relative_to(where)), "path": str(folder)}
    row |= dict.fromkeys(("method", "seed", "rounds", "steps", "accuracy"), "–")
    try:
        request, trained = read_json(folder / SEARCH_FILE), comparison_in(folder)
        is_over = (folder / TUNED_FILE).exists()
        if request["refit_seeds"]:
            is_over &= trained != folder and all(reached(run).finished for run, _ in read_comparison(trained))
        state = "finished" if is_over else "running" if is_used(folder) else "unfinished: resume it"
        return row | {"method": f"search: {', '.join(request['names'])}", "seed": request["seed"], "state": state}
    except (SparsonaError, OSError, LookupError, TypeError, ValueError) as error:
        return row | {"state": f"damaged: {str(error).splitlines()[0]}"}


def _row(folder: Path, where: Path, failed: Mapping[str, FailedRun]) -> dict[str, Any]:
    row: dict[str, Any] = {"run": str(folder.relative_to(where)), "path": str(folder)}
    try:
        config = read_json(folder / "config.json")
        found = find_manifest(folder)
        completed, finished, seal = (0, False, None) if found is None else (found.completed, found.finished, found.seal)
        path, summary = folder / SUMMARY_FILE, None
        if path.exists() and (seal is None or SUMMARY_FILE in seal.files):
            data = read_file(path)
            if seal is not None:
                seal.check(path, data, "the run was finished" if finished else f"round {completed}")
            summary = parse_summary(data, path)
        figure = MEANS[config.get("headline_weight", "clients")]
        mean = summary["accuracy"][figure] if summary else None
        accuracy = "–" if mean is None else f"{mean:.1%}{' weighted' * (figure == 'weighted')}"
        if summary and "error" in summary:
            metrics = {key: one["mean"] for key, one in summary.get("metrics", {}).items() if one["mean"] is not None}
            name = headline_metric(metrics)
            score = summary["error"]["loss"] if name is None else metrics[name]
            accuracy = "–" if score is None else f"{TITLES.get(name or '', 'loss')} {score:.4g}"
        steps = summary["steps"]["total"] if summary and "steps" in summary else None  # older summaries lack them
        stopped = f"failed: {failed[folder.name].what}" if folder.name in failed else "unfinished: resume it"
        return row | {
            "method": config["method"],
            "seed": config["seed"],
            "rounds": f"{completed}/{config['rounds']}",
            "steps": "–" if steps is None else f"{steps:,}",
            "accuracy": accuracy,
            "state": "finished" if finished else "running" if is_used(folder) else stopped,
        }
    except (SparsonaError, OSError, LookupError, TypeError, ValueError) as error:
        blank = dict.fromkeys(("method", "seed", "rounds", "steps", "accuracy"), "–")
        return row | blank | {"state": f"damaged: {str(error).splitlines()[0]}"}
