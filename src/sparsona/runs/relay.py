"""Records of a run in another process, which are kept in a file until the run is over.

Observers receive one run after another, as they do where runs follow each other: trackers and logs could not tell
the records of two runs apart.
"""

from __future__ import annotations

import pickle
from pathlib import Path

from sparsona.runs.observers import EvaluationResult, ObserverList, RoundResult, RunEnd, RunStart


class Keeper:
    """The observer that keeps the records of a run, for `pass_on`. Progress is not among them: it is of the moment.

    Args:
        path: the file. What is in it stays.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_start(self, start: RunStart) -> None:
        self._keep("on_start", start)

    def on_round(self, result: RoundResult) -> None:
        self._keep("on_round", result)

    def on_evaluation(self, result: EvaluationResult) -> None:
        self._keep("on_evaluation", result)

    def on_end(self, end: RunEnd) -> None:
        self._keep("on_end", end)

    def _keep(self, event: str, record: object) -> None:
        with self._path.open("ab") as file:  # closed at once: the process may be killed
            pickle.dump((event, record), file)


def pass_on(path: Path, observers: ObserverList) -> None:
    """Give observers the records that were kept, and remove the file, also if one of them fails.

    Args:
        path: the file of a `Keeper`, written by a process of ours; it need not exist.
        observers: receive them.
    """
    if not path.exists():
        return
    try:
        with path.open("rb") as file:
            while True:
                try:
                    event, record = pickle.load(file)
                except (EOFError, pickle.UnpicklingError):  # the end, or a record that a killed process was writing
                    break
                getattr(observers, event)(record)
    finally:
        path.unlink()
