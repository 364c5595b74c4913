"""How a figure of a paper is drawn from the runs of its recipe: by the figures of analysis/figures.py, by setting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sparsona.analysis.figures import FIGURES
from sparsona.analysis.partition import PARTS, Partition
from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.report.page import Chart
from sparsona.report.pictures import draw
from sparsona.report.pictures.figure import Inline

if TYPE_CHECKING:
    from sparsona.analysis.view import RunView
    from sparsona.experiment.run import Run
    from sparsona.reproduce.runner import Reproduction


def _similarity(run: Run) -> Any:
    return run.similarity()


def _tree(run: Run) -> Any:
    return run.similarity("phi")


def _gates(run: Run) -> Any:
    return run.gates()


def _sizes(run: Run) -> Any:
    view = run.view
    return Partition(view.name, dict(zip(PARTS, view.sizes.T, strict=True)), view.label_counts)


# Pictures of single runs, beside those of several in FIGURES: a title, and what is drawn of a run.
OF_RUNS: dict[str, tuple[str, Callable[[Run], Any]]] = {
    "similarity": ("distances of clients' masks or gates beside the likeness of their labels", _similarity),
    "tree": ("clients by the weights of their gates, clustered by Ward's method, over their classes", _tree),
    "gate-histogram": ("how many blocks of the clients that trained have which gate, over the rounds", _gates),
    "client-sizes": ("who holds how many examples", _sizes),
}


def text_of(name: str) -> str:
    """What the picture of this name shows."""
    if name in OF_RUNS:
        return OF_RUNS[name][0]
    if name in FIGURES:
        return FIGURES[name].text
    raise unknown_name("picture", name, [*FIGURES, *OF_RUNS])


def charts(result: Reproduction) -> list[Chart]:
    """The recipe's picture and learning curves, as far as there are runs for them."""
    wanted = [result.recipe.picture] * (result.recipe.picture is not None) + ["accuracy-by-rounds"]
    found = []
    for name in dict.fromkeys(map(str, wanted)):
        drawn = _of_runs(result, name) if name in OF_RUNS else _of_settings(result, name)
        if drawn:
            text = text_of(name)
            found.append(Chart(name, name.replace("-", " ").capitalize(), f"{text[0].upper()}{text[1:]}.", {}, drawn))
    return found


def _of_runs(result: Reproduction, name: str) -> dict[str, Inline]:
    found = {}
    for row in result.rows:
        for run in result.runs.get(row, ()):
            try:
                found[f"{row}, seed {run.config['seed']}"] = draw(OF_RUNS[name][1](run)).inline()
            except SparsonaError:  # clients of this row have neither masks nor gates
                continue
    return found


def _of_settings(result: Reproduction, name: str) -> dict[str, Inline]:
    """One picture for the rows of each setting; where they are compared with several others, one for each of those."""
    found = {}
    for setting, rows in _by_setting(result).items():
        of = {row: result.recipe.rows[row].against for row in rows}
        others = [row for row in dict.fromkeys(of.values()) if row is not None and result.runs.get(row)]
        if not FIGURES[name].compares or not others:
            parts: dict[str, tuple[list[str], list[str]]] = {"": (rows, [])}
        elif len(others) == 1:
            parts = {"": ([row for row in rows if row not in others], others)}
        else:
            parts = {f", over {one}": ([row for row in rows if of[row] == one], [one]) for one in others}
        for suffix, (own, compared) in parts.items():
            made = FIGURES[name].make(views(result, own), views(result, compared)) if own else None
            if made is not None:
                found[f"{setting or result.name}{suffix}"] = draw(made).inline()
    return found


def views(result: Reproduction, rows: Sequence[str]) -> list[RunView]:
    """The runs of these rows as plain data, titled by row, so that rows are told apart."""
    return [replace(run.view, title=row) for row in rows for run in result.runs.get(row, ())]


def _by_setting(result: Reproduction) -> Mapping[str, list[str]]:
    """The rows that have runs, by their setting; by the part of the name before the first slash if they have none."""
    settings = sorted(result.recipe.settings, key=len, reverse=True)
    found: dict[str, list[str]] = {}
    for row in result.rows:
        if result.runs.get(row):
            setting = next((one for one in settings if row.startswith(f"{one}/")), row.rpartition("/")[0])
            found.setdefault(setting, []).append(row)
    return found
