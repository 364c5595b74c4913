"""The page of a run or comparison while it trains, for `sparsona watch`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from sparsona.analysis.format import plural
from sparsona.analysis.summary import has_results
from sparsona.analysis.view import RunView, read_view
from sparsona.core.errors import SparsonaError
from sparsona.report.page import render_report
from sparsona.runs.comparison import COMPARISON_FILE, comparison_in, read_comparison
from sparsona.runs.failed import read_failed
from sparsona.runs.folder import RunFolder, is_used, reached


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
    path, asked = comparison_in(path), path
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
    word = f"Stopped; `sparsona resume {asked}` continues it" if stopped and not is_played else "Running"
    state = "" if is_final else f"{word}. {finished} of {plural(planned, 'run')} finished. {'; '.join(states)}"
    if not views:
        text = (
            "There is no run in this folder yet." if path.exists() else f"Waiting for '{path}', which is not there yet."
        )
        text = state if planned else text
        return LivePage(render_report([], asked.name, status=text), False)
    return LivePage(render_report(views, status=state, missing=[*failed.values()]), is_final)


IDLE = 15.0  # seconds after which a page that nobody asked for is too old to be shown first


class Pages:
    """The page of a folder's runs: the last one that was made, at once, while a newer one is made behind it.

    Args:
        folder: returns where the runs are now.
        every: the fewest seconds from the end of making one page to the beginning of the next.
    """

    def __init__(self, folder: Callable[[], Path], every: float) -> None:
        self._folder, self._every = folder, every
        self._lock = threading.Lock()
        self._page: LivePage | None = None
        self._of: object = None  # the state of the folder that the page shows
        self._is_making = False
        self._made_at = 0.0

    def current(self) -> LivePage:
        """The last page that was made; the first is waited for, and one after a time in which nobody asked."""
        with self._lock:  # several windows, one page
            folder = self._folder()
            state = (folder, last_change(folder))
            if self._page is None:
                self._page, self._of, self._made_at = live_page(folder), state, time.monotonic()
            age = time.monotonic() - self._made_at
            is_due = state != self._of and age >= self._every and not self._is_making
            if is_due and age >= IDLE:
                with suppress(SparsonaError, OSError):
                    self._page, self._of = live_page(folder), state
                self._made_at = time.monotonic()
            elif is_due:
                self._is_making = True
                threading.Thread(target=self._make, args=(folder, state), daemon=True).start()
            # While there is something newer, the page asks to be loaded again.
            return self._page if state == self._of else replace(self._page, is_final=False)

    def _make(self, folder: Path, state: object) -> None:
        made = None
        try:
            with suppress(SparsonaError, OSError):  # in the middle of a write: a later request tries again
                made = live_page(folder)
        finally:
            with self._lock:
                if made is not None:
                    self._page, self._of = made, state
                self._is_making, self._made_at = False, time.monotonic()


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
    path = comparison_in(path)
    if (path / COMPARISON_FILE).exists():
        planned = read_comparison(path)
        return [folder for folder, _ in planned], len(planned)
    return ([path], 1) if (path / "config.json").exists() else ([], 0)
