"""The page of a run or comparison while it trains, for `sparsona watch`."""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path

from sparsona.analysis.format import plural
from sparsona.analysis.summary import has_results
from sparsona.analysis.view import RunView, read_view
from sparsona.report.page import render_report
from sparsona.runs.comparison import COMPARISON_FILE, read_comparison
from sparsona.runs.failed import read_failed
from sparsona.runs.folder import RunFolder, is_used, reached

WAITING = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{title}</title></head>
<body style="font: 16px/1.5 system-ui, sans-serif; max-width: 60ch; margin: 15vh auto; padding: 0 20px">
<h1 style="font-size: 22px">{title}</h1><p>{text}</p></body></html>
"""


@dataclass(frozen=True)
class LivePage:
    """A page as of now, and whether there will be no other."""

    html: str
    is_final: bool


def live_page(path: Path) -> LivePage:
    """The report of what a run, or the runs of a comparison, have recorded so far.

    Args:
        path: the folder of a run or of a comparison; it need not exist yet.

    Returns:
        The report, or a page that says what is waited for.
    """
    folders, planned = _folders(path)
    failed = read_failed(path)
    views: list[RunView] = []
    states: list[str] = []
    finished, is_played, stopped = 0, False, 0
    for one in folders:
        if not (one / "config.json").exists():
            continue
        # Before what it reached: a run that ends in between is finished.
        used = is_used(one)
        folder = RunFolder.open(one)
        finished += reached(one).finished
        if not reached(one).finished:
            done, rounds = len(folder.records.rounds()), folder.config["rounds"]
            states.append(f"{folder.facts.title}: {min(done, rounds)} of {plural(rounds, 'round')}")
            is_played, stopped = is_played or used is not False, stopped + (used is False)
        if one.name not in failed and has_results(folder):
            views.append(read_view(folder))
    is_final = planned > 0 and finished == planned
    word = f"Stopped; `sparsona resume {path}` continues it" if stopped and not is_played else "Running"
    state = "" if is_final else f"{word}. {finished} of {plural(planned, 'run')} finished. {'; '.join(states)}"
    if not views:
        text = (
            "There is no run in this folder yet." if path.exists() else f"Waiting for '{path}', which is not there yet."
        )
        text = state if planned else text
        return LivePage(WAITING.format(title=html.escape(path.name), text=html.escape(text)), False)
    return LivePage(render_report(views, status=state, missing=[*failed.values()]), is_final)


def last_change(path: Path) -> tuple[object, ...]:
    """When a file of these runs was last written, and which are played: a page is made again only where that is new."""
    folders, _ = _folders(path)
    there = [one for one in folders if one.is_dir()]
    # Looking at a lock touches it.
    found = [
        file.stat().st_mtime_ns for one in there for file in one.iterdir() if file.is_file() and file.name != "lock"
    ]
    return path.exists(), max(found, default=0), *map(is_used, there)


def _folders(path: Path) -> tuple[list[Path], int]:
    """The folders of the runs, and how many there will be."""
    if (path / COMPARISON_FILE).exists():
        planned = read_comparison(path)
        return [folder for folder, _ in planned], len(planned)
    return ([path], 1) if (path / "config.json").exists() else ([], 0)
