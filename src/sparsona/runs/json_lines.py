"""A log that other programs read: one line of JSON for the start, each round, each evaluation and the end."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparsona.runs.folder import explain_disk_errors
from sparsona.runs.observers import ClientEvaluation, EvaluationResult, RoundResult, RunEnd, RunStart

LARGE = ("sizes", "label_counts")  # a number for every client and class; they are in about.json


class JsonLines:
    """Appends to a file. A resumed run starts with a line "start" that says how many rounds were completed;
    lines before it that report later rounds are of a part that was lost and is played again."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._run = ""
        self._append("")  # a place that cannot be written to is refused before anything is trained

    def on_start(self, start: RunStart) -> None:
        self._run = str(start.path)
        facts = {key: value for key, value in start.facts.as_json().items() if key not in LARGE}
        self._write("start", completed=start.completed, rounds=start.rounds, facts=facts, options=dict(start.options))

    def on_round(self, result: RoundResult) -> None:
        self._write("round", **asdict(result), loss=result.loss)

    def on_evaluation(self, result: EvaluationResult) -> None:
        clients = [_plain(one) for one in result.clients]
        sent = {"bytes_up": result.bytes_up, "bytes_down": result.bytes_down} if result.sent_to else {}
        self._write("evaluation", completed=result.completed, clients=clients, **sent)

    def on_end(self, end: RunEnd) -> None:
        self._write("end", **asdict(end))

    def _write(self, event: str, **values: Any) -> None:
        self._append(json.dumps({"event": event, "run": self._run, **values}) + "\n")

    def _append(self, line: str) -> None:
        # Opened for each line: nothing is held open, or lost, if the process is killed.
        with explain_disk_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(line)


def _plain(one: ClientEvaluation) -> dict[str, Any]:
    found = {name: getattr(one, name) for name in ("client", "point", "correct", "count", "loss")}
    return {**found, "metrics": dict(one.metrics)} if one.metrics else found
