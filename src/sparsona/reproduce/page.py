"""The page of a reproduction: its table, its pictures, what is known to differ, and how it was made."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from sparsona.analysis.format import human_seconds
from sparsona.report.page import Section, write_report
from sparsona.reproduce.folder import default_path, read_record
from sparsona.reproduce.pictures import charts
from sparsona.reproduce.recipe import PAPERS
from sparsona.reproduce.rows import experiment_changes
from sparsona.runs.comparison import REPRODUCTION_FILE

if TYPE_CHECKING:
    from sparsona.reproduce.runner import Reproduction


def write(result: Reproduction, path: str | Path) -> Path:
    """Write the page and return its path."""
    recipe = result.recipe
    title = f"{result.name}: {recipe.title}{f' [{result.mark}]' if result.mark else ''}"
    paper = PAPERS.get(result.name.partition("/")[0])
    head = [f"{paper}, {recipe.where}."] if paper else [f"{recipe.where}."]
    how = (
        "Ours is the mean over seeds ± their sample standard deviation. A figure agrees if it differs from the paper's "
        "by no more than both spreads together (root of the sum of squares), a cost if by no more than a unit of the "
        "last digit printed."
    )
    sections = [
        Section("table", "Paper and ours", [*head, *result.notes(), how], result.table()),
        Section("differs", "Known to differ", result.differs()),
        Section("made", "How it was made", rows=_runs(result), code=[command(result)]),
    ]
    return write_report([], path, title, [one for one in sections if one.paragraphs or one.rows], charts(result))


def command(result: Reproduction) -> str:
    """The command that makes these runs, or the call where there is no such command."""
    record = result.record
    usual = default_path(result.name, result.scale, experiment_changes(result.recipe, result.changes))
    if record.own is not None or record.seeds != list(range(len(record.seeds))):
        first = "recipe" if record.own is not None else repr(result.name)
        given = {"rows": record.rows, "seeds": record.seeds, "scale": result.scale}
        given |= {"out": str(result.path)} if result.path != usual else {}
        return (
            f"sp.reproduce({first}, {', '.join(f'{key}={value!r}' for key, value in (given | result.changes).items())})"
        )
    words = ["sparsona", "reproduce", result.name]
    words += ["--rows", record.rows] if record.rows != "*" else []
    words += ["--seeds", str(len(record.seeds))] if len(record.seeds) > 1 else []
    words += ["--scale", f"{result.scale:g}"] if result.scale < 1 else []
    words += ["--out", str(result.path)] if result.path != usual else []
    for key, value in result.changes.items():
        words += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    return shlex.join(words)


def _runs(result: Reproduction) -> list[dict[str, str]]:
    """Every finished run: what made it, and on what."""
    commits = read_record(result.path).commits if (result.path / REPRODUCTION_FILE).exists() else {}
    found = []
    for row, runs in result.runs.items():
        for run in runs:
            machine = run.view.environment
            on = machine.get("gpu") if run.config["device"].startswith("cuda") else machine.get("processor")
            found.append(
                {
                    "run": f"{row}, seed {run.config['seed']}",
                    "rounds": f"{run.summary['rounds']:,}",
                    "clients": f"{run.config['clients']:,}",
                    "time": human_seconds(run.summary["seconds"]),
                    "on": f"{on}, {run.config['precision']}, {run.config['executor']}",
                    "torch": str(machine.get("torch")),
                    "commit": ", ".join(commits.get(run.path.name, ["unknown"])),
                }
            )
    return found
