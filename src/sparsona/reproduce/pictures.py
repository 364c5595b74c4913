"""How a figure of a paper is drawn from the runs of its recipe. A picture is one row here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.report import plots
from sparsona.report.page import Chart
from sparsona.report.pictures import draw

if TYPE_CHECKING:
    from sparsona.analysis.view import RunView
    from sparsona.experiment.run import Run
    from sparsona.reproduce.runner import Reproduction

Runs = Mapping[str, Sequence["Run"]]


@dataclass(frozen=True)
class Picture:
    """A row of `PICTURES`.

    Args:
        title: above it.
        caption: what is drawn.
        figures: Plotly figures by label, of the rows of one setting or of all.
        svg: the same as SVG, where it is drawn for files, too.
    """

    title: str
    caption: str
    figures: Callable[[Reproduction], Mapping[str, Any]] = lambda result: {}
    svg: Callable[[Reproduction], Mapping[str, str]] = lambda result: {}


def find(name: str) -> Picture:
    """The picture that a recipe names."""
    if name not in PICTURES:
        raise unknown_name("picture", name, PICTURES)
    return PICTURES[name]


def charts(result: Reproduction) -> list[Chart]:
    """The recipe's picture and learning curves, as far as there are runs for them."""
    wanted = [result.recipe.picture] * (result.recipe.picture is not None) + ["accuracy-by-rounds"]
    found = []
    for name in dict.fromkeys(wanted):
        picture = find(str(name))
        chart = Chart(
            str(name), picture.title, picture.caption, dict(picture.figures(result)), dict(picture.svg(result))
        )
        if chart.pictures or any(figure.data for figure in chart.figures.values()):
            found.append(chart)
    return found


def views(runs: Runs, rows: Sequence[str]) -> list[RunView]:
    """The runs of these rows as plain data, titled by row, so that rows are told apart."""
    return [replace(run.view, title=row) for row in rows for run in runs.get(row, ())]


def by_setting(result: Reproduction) -> dict[str, list[str]]:
    """The rows that have runs, by the part of their name before the last slash: one setting is drawn together."""
    found: dict[str, list[str]] = {}
    for row in result.rows:
        if result.runs.get(row):
            found.setdefault(row.rpartition("/")[0], []).append(row)
    return found


def _curves(against: Any) -> Callable[[Reproduction], Mapping[str, Any]]:
    def draw_all(result: Reproduction) -> Mapping[str, Any]:
        return {
            setting: plots.learning_curves(views(result.runs, rows), against=against)
            for setting, rows in by_setting(result).items()
        }

    return draw_all


def _differences(result: Reproduction) -> Mapping[str, Any]:
    """Each row over the one that it is compared with."""
    found = {}
    for row in result.rows:
        against = result.recipe.rows[row].against
        if against is not None and result.runs.get(row) and result.runs.get(against):
            figure = plots.client_differences(views(result.runs, [against, row]), 1)
            if figure is not None:
                found[row] = figure
    return found


def _effects(result: Reproduction) -> Mapping[str, str]:
    """What a row does to each client, over the one that it is compared with, under each seed."""
    found = {}
    for row in result.rows:
        others = {run.config["seed"]: run for run in result.runs.get(result.recipe.rows[row].against or "", ())}
        for run in result.runs.get(row, ()):
            if (other := others.get(run.config["seed"])) is not None:
                found[f"{row}, seed {run.config['seed']}"] = draw(run.clients(other)).inline()
    return found


def _similarity(result: Reproduction) -> Mapping[str, str]:
    found = {}
    for row in result.rows:
        for run in result.runs.get(row, ()):
            try:
                found[f"{row}, seed {run.config['seed']}"] = draw(run.similarity()).inline()
            except SparsonaError:  # a method without masks or gates
                continue
    return found


PICTURES: dict[str, Picture] = {
    "accuracy-by-rounds": Picture(
        "Accuracy by rounds", "Mean accuracy over clients, the mean over seeds in their band.", _curves("rounds")
    ),
    "accuracy-by-bytes": Picture(
        "Accuracy by bytes", "Mean accuracy over clients against all bytes sent so far.", _curves("bytes")
    ),
    "client-differences": Picture(
        "Client by client", "The difference for each client to the row it is compared with, sorted.", _differences
    ),
    "change-by-samples": Picture(
        "Change by samples",
        "What a row does to each client, over the row it is compared with, against its training examples.",
        svg=_effects,
    ),
    "similarity": Picture(
        "Similarity", "Distances of clients' masks or gates beside the likeness of their labels.", svg=_similarity
    ),
    "tree": Picture("Tree", "Clients by their gates, clustered by Ward's method, over their classes.", svg=_similarity),
}
