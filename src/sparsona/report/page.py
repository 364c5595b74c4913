"""One HTML file that shows a comparison: no network, no server, nothing beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsona.analysis.answer import UNNAMED, answer, differing, scope
from sparsona.analysis.clients import ClientEffects
from sparsona.analysis.columns import columns_for
from sparsona.analysis.curves import curves_of, drawn_measure, drawn_point
from sparsona.analysis.extra import import_extra
from sparsona.analysis.figures import FIGURES
from sparsona.analysis.glossary import plain_words
from sparsona.analysis.groups import Group, flatten, group_views, same_clients, shared_and_differing
from sparsona.analysis.measure import ACCURACY, check_one_measure, measure_called
from sparsona.analysis.partition import PARTS, Partition
from sparsona.analysis.protocol import compare_protocols
from sparsona.analysis.similarity import Similarity
from sparsona.analysis.table import class_rows, difference_unit, differences, notes, table
from sparsona.analysis.view import RunView
from sparsona.core.errors import SparsonaError
from sparsona.core.files import replace_file
from sparsona.core.points import POINTS
from sparsona.core.points import point as point_of
from sparsona.core.targets import GIVEN, TITLES
from sparsona.report import plots
from sparsona.report.palette import COLOURS, DARK
from sparsona.report.pictures import draw
from sparsona.report.pictures.figure import Inline
from sparsona.runs.failed import FailedRun

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

TEMPLATE = Path(__file__).with_name("report.html.jinja")


@dataclass(frozen=True)
class Chart:
    """A section of the page: figures (or SVG pictures) of which one is shown at a time, by the buttons' labels."""

    key: str
    title: str
    caption: str
    figures: dict[str, Figure] = field(default_factory=dict)
    pictures: dict[str, Inline] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """A section of text before the results: paragraphs, a table (by the titles of its columns), and lines of code."""

    key: str
    title: str
    paragraphs: Sequence[str] = ()
    rows: Sequence[Mapping[str, str]] = ()
    code: Sequence[str] = ()


def write_report(
    views: Sequence[RunView],
    path: str | os.PathLike[str],
    title: str | None = None,
    sections: Sequence[Section] = (),
    charts: Sequence[Chart] = (),
    missing: Sequence[FailedRun] = (),
) -> Path:
    """Write the report of one or many runs to `path` and return it; the first run's method is the reference.

    The file is complete or absent: it is written beside `path` and then renamed over it. What is in `sections` and
    `charts` comes first; with sections, there need not be a run. `missing` are runs that failed.
    """
    if not views and not sections:
        raise SparsonaError("there is no run to report", expected="at least one run")
    check_one_measure(views, "a report", "write a report of each")
    page = render_report(views, title, sections, charts, missing=missing)
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as file:
            file.write(page.encode(errors="backslashreplace"))
    except OSError as error:
        raise SparsonaError(
            f"the report could not be written to {path}: {error.strerror or error}",
            expected="the path of a file in a folder that can be written",
            hint="choose another path",
        ) from error
    return path


def render_report(
    views: Sequence[RunView],
    title: str | None = None,
    sections: Sequence[Section] = (),
    charts: Sequence[Chart] = (),
    status: str = "",
    missing: Sequence[FailedRun] = (),
) -> str:
    """The report's HTML; `status` says how far runs are that still train, `missing` are those that failed."""
    jinja2 = import_extra("jinja2", "reports")
    plotly = import_extra("plotly.offline", "reports")
    groups = group_views(views)
    drawn = _charts(views, groups) if views else []
    first = [chart for chart in drawn if chart.key == "traffic"]  # with the answer, before the table
    charts = [*charts, *(chart for chart in drawn if chart not in first)]
    columns = columns_for(views) if views else ()
    shared, own = compare_protocols(
        {group.label: {view.seed: view.protocol for view in group.views} for group in groups}
    )
    figures = {
        chart.key: [_dump(figure) for figure in chart.figures.values()] for chart in (*first, *charts) if chart.figures
    }
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return page.render(
        title=title or _title(groups),
        facts=scope(views) if views else [],
        answer=answer(views),
        status=status,
        first=first,
        sections=sections,
        shared=shared,
        own=own,
        columns=columns,
        first_columns=[i for i, column in enumerate(columns) if column.is_first],
        rows=table(views),
        missing=missing,
        many_seeds=any(len(group.views) > 1 for group in groups),
        unfinished=any(view.unfinished_at is not None for view in views),
        reference=groups[0].label if groups else "",
        # One seed has no interval, and the table has the differences themselves.
        differences=differences(views) if len({view.seed for view in views}) > 1 else (),
        difference_unit=difference_unit(views) if views else "",
        notes=notes(views),
        unequal=differing(views),
        classes=class_rows(views),
        charts=charts,
        figures=figures,
        settings=[
            ("Configuration", *_settings(views, [flatten(view.config) for view in views])),
            ("Environment", *_settings(views, [flatten(view.environment) for view in views])),
        ]
        if views
        else [],
        points={view.point: point_of(view.point).text for view in views},
        words=plain_words(),
        dark=_on_dark(),
        plotly=_inline_script(plotly.get_plotlyjs()) if figures else "",
    )


def _charts(views: Sequence[RunView], groups: Sequence[Group]) -> list[Chart]:
    many = any(len(group.views) > 1 for group in groups)
    band = " Lines are means over seeds; bands reach from the lowest to the highest seed." if many else ""
    measure, drawn_by = views[0].measure, drawn_measure(views)
    drawn_groups = group_views([curves_of(view, drawn_by) for view in views])
    starred = [group for group in drawn_groups if drawn_point(group) != group.views[0].point]
    star = ""
    if starred:
        which = ", ".join(f"{group.label}: {group.views[0].point}" for group in starred)
        drawn = sorted({drawn_point(group) for group in starred})
        star = f" Stars are headlines measured once, after the last round ({which}); their lines show "
        star += ", ".join(f"{point} ({POINTS[point].text})" for point in drawn) + "."
    some = [view for view in views if view.config.get("evaluate") == "participants"]
    changing = " Before the last round, over the clients sampled in it: see the protocol." if some else ""
    few = " Counts that clients tell as few (1 to 4) are left out." if any(view.has_few for view in views) else ""
    lower = " Lower is better." if drawn_by.better == "low" else ""
    watched = {view.patience_name: "" for view in views if view.patience_name}
    stop = ""
    if watched:
        titles = " or ".join(measure_called(name).title for name in watched)
        stop = f" Patience goes by the {titles} on validation data: the thin dotted line"
        stop += ", which a click in the legend shows" if len(groups) > 1 else ""
        stop += ". Other curves are on test data."
    curves = {"by rounds": plots.learning_curves(views)}
    if any(sent for view in views for _, sent in view.cumulative_bytes):
        curves["by bytes sent"] = plots.learning_curves(views, against="bytes")
    if any(sent for view in views for _, sent in view.cumulative_paper_bytes):
        curves["by bytes as papers count"] = plots.learning_curves(views, against="paper bytes")
    if any(taken for view in views for _, taken in view.cumulative_steps):
        curves["by local steps"] = plots.learning_curves(views, against="steps")
    if any(view.cumulative_time for view in views):
        curves["by simulated time"] = plots.learning_curves(views, against="time")
    if drawn_by.name != measure.name:
        curves[f"{measure.title} by rounds"] = plots.learning_curves(views, metric=measure.name)
    traffic = {
        "bytes as encoded": plots.tradeoff(views),
        "bytes as papers count": plots.tradeoff(views, "paper"),
    }
    charts = [
        Chart(
            "traffic",
            f"{measure.title[0].upper()}{measure.title[1:]} against traffic",
            f"Where each method ends: {'down' if measure.better == 'low' else 'up'} is better for clients, left is "
            "cheaper. Dotted: how it got there.",
            _drop_missing(traffic) if len(groups) > 1 else {},
        ),
        Chart(
            "curves",
            "Learning curves",
            f"Mean {drawn_by.title} over {drawn_by.over} after each round.{lower}{stop}{changing}{band}{star}",
            curves,
        ),
        Chart(
            "clients",
            "Client by client",
            f"One dot per client{' and seed' if many else ''}; the box holds the middle half, its line is the median. "
            "Hover over a dot for the client's data.",
            {"": plots.client_accuracies(views)},
        ),
        Chart(
            "differences",
            f"Who gains over {groups[0].label}",
            f"The difference for each client, in {'percentage points of ' * bool(measure.unit)}{measure.title}, "
            "sorted; above 0 it is better off. A mean can improve while some clients lose.",
            _drop_missing({group.label: plots.client_differences(views, i) for i, group in enumerate(groups) if i}),
        ),
        *_metric_charts(views, drawn_by.name, many, star),
        Chart(
            "partition",
            "Who holds what",
            "The clients' examples, by class and in all. Hover over a client for its numbers.",
            pictures=_partitions(views),
        ),
        Chart(
            "confusion",
            "What is taken for what",
            f"Test examples by true and predicted class, summed over clients{' and seeds' if many else ''}. "
            f"Colour is the share of the true class.{few}",
            _drop_missing({group.label: plots.confusion(views, i) for i, group in enumerate(groups)}),
        ),
        Chart(
            "effects",
            "What personalization does",
            f"What each client's own model does to its {measure.title}, over a model that clients share: in all (dot: "
            "median, bar: middle half) and against the client's number of training examples. Hover over a dot for its "
            "client.",
            pictures=_pictures([(view, view.effects) for view in views if view.effects]),
        ),
        Chart(
            "similarity",
            "Similarity",
            "Clients' masks or gates beside their labels, after the last evaluation. Hover over a row for the nearest.",
            pictures=_pictures([(view, view.similarity) for view in views if view.similarity]),
        ),
        Chart(
            "distances",
            "How far apart clients are",
            "Mean distance between clients' masks (share of positions that differ) or gates (Euclidean), and of each "
            f"to its own at the start.{' Means over seeds.' if many else ''}",
            {"": plots.trait_distances(views)},
        ),
        *_figures(views, is_comparison=len(groups) > 1),
        Chart(
            "gates",
            "Gates over the rounds",
            "How many blocks of the clients that trained have which gate, M': the mean over a turn's examples, 0 where "
            f"the block was dropped.{' All seeds together.' if many else ''}",
            _drop_missing({group.label: plots.gate_histogram(views, i) for i, group in enumerate(groups)}),
        ),
        Chart("loss", "Training loss", f"Mean over the clients that trained.{band}", {"": plots.train_loss(views)}),
    ]
    return [chart for chart in charts if chart.pictures or any(figure.data for figure in chart.figures.values())]


def _metric_charts(views: Sequence[RunView], drawn: str, many: bool, star: str) -> list[Chart]:
    """Metrics over the rounds, without the one that is `drawn` already, and client by client."""
    names = dict.fromkeys(name for view in views for name in view.metric_curves if name != view.measure.name)
    titles = {name: TITLES.get(name, name) for name in names}
    each = f"One dot per client{' and seed' if many else ''} that the metric is defined for, at the headline."
    return [
        Chart(
            "metrics",
            "Metrics",
            f"The mean over the clients that a metric is defined for, after each round.{star}",
            {title: plots.learning_curves(views, metric=name) for name, title in titles.items() if name != drawn},
        ),
        Chart(
            "client-metrics",
            "Metrics client by client",
            each,
            {title: plots.client_metrics(views, name) for name, title in titles.items()},
        ),
    ]


# The papers' figures that have a section of their own: title, caption, and the figures by the names of their buttons.
SECTIONS = {
    "targets": (
        "Rounds to a target",
        "How many rounds it took until the accuracy that is the result reached a target.",
        {"": "rounds-to-target"},
    ),
    "density": (
        "Results by density",
        "One method at several densities.",
        {"accuracy": "accuracy-by-density", "train less test": "gap-by-density"},
    ),
    "capacity": (
        "Accuracy by capacity",
        "The mean accuracy of clients by how much of a model they can hold.",
        {"": "accuracy-by-capacity"},
    ),
    "personal": (
        "Gain by personal parameters",
        "What personal models gain, against how many of their parameters are a client's own.",
        {"": "gain-by-personal-parameters"},
    ),
    "changes": (
        "What methods do to each client",
        "Methods side by side: the change of every client's accuracy.",
        {"violins": "violins", "against samples": "change-by-samples", "by seed": "client-bands"},
    ),
}


def _figures(views: Sequence[RunView], is_comparison: bool) -> list[Chart]:
    """The sections that these runs have the data for. One method alone has no more than its clients' capacities."""
    charts: list[Chart] = []
    # The papers draw accuracies; of some runs, nothing was evaluated.
    if views[0].measure.name != ACCURACY.name or not all(view.count.any() for view in views):
        return charts
    for key, (title, caption, names) in SECTIONS.items():
        if is_comparison or key == "capacity":
            found = {label: FIGURES[name].make(views, ()) for label, name in names.items()}
            # The section's heading is the title.
            drawn = {label: replace(draw(one).inline(), title="") for label, one in found.items() if one is not None}
            charts.append(Chart(key, title, caption, pictures=drawn))
    return charts


def _partitions(views: Sequence[RunView]) -> dict[str, Inline]:
    """The different partitions among the runs; one needs no name, several go by seed."""
    different: list[RunView] = []
    for view in views:
        title = _partition(view).title
        if not any(_partition(other).title == title and same_clients(view, other) for other in different):
            different.append(view)
    names = [f"seed {view.seed}" for view in different]
    if len(set(names)) < len(names):
        names = [view.name for view in different]
    return {name: draw(_partition(view)).inline() for name, view in zip(names, different, strict=True)}


def _pictures(found: Sequence[tuple[RunView, ClientEffects | Similarity]]) -> dict[str, Inline]:
    """Pictures of single runs, by unique names."""
    titles = [view.title for view, _ in found]
    names = [view.title if titles.count(view.title) == 1 else f"{view.title}, {view.name}" for view, _ in found]
    if len(set(names)) < len(names):  # runs of one name from different folders
        names = [f"{view.title}, {view.path}" for view, _ in found]
    return {name: draw(analysis).inline() for name, (_, analysis) in zip(names, found, strict=True)}


def _partition(view: RunView) -> Partition:
    shared = str(view.config.get("partition", ""))
    data = view.data or str(view.config.get("data", ""))
    title = ", ".join(filter(None, (data, "" if shared == GIVEN else shared)))
    title = "Data of the clients' own" if title in (GIVEN, UNNAMED) else title
    sizes = dict(zip(PARTS, view.sizes.T, strict=True))
    return Partition(title or view.name, sizes, view.label_counts, view.client_names, view.class_names)


def _drop_missing(figures: dict[str, Figure | None]) -> dict[str, Figure]:
    return {name: figure for name, figure in figures.items() if figure is not None}


def _dump(figure: Figure) -> dict[str, Any]:
    found: dict[str, Any] = figure.to_plotly_json()
    found["layout"].pop("template", None)
    return found


def _title(groups: Sequence[Group]) -> str:
    labels = [group.label for group in groups]
    if len(labels) == 1:
        return labels[0]
    return f"{', '.join(labels[:-1])} and {labels[-1]}" if len(labels) <= 4 else f"{len(labels)} methods compared"


def _settings(
    views: Sequence[RunView], tables: Sequence[dict[str, str]]
) -> tuple[dict[str, str], list[str], list[tuple[RunView, list[str]]]]:
    """What all runs share, and what is each run's own: (shared, names of the others, their values per run)."""
    shared, differing = shared_and_differing(tables)
    own = [(view, [entries.get(name, "") for name in differing]) for view, entries in zip(views, tables, strict=True)]
    return shared, differing, own


def _on_dark() -> dict[str, str]:
    """What charts have on a dark page in place of their colours, whole and faded."""
    different = {light: DARK[light] for light in COLOURS if light in DARK}
    return different | {plots.fade(light): plots.fade(dark) for light, dark in different.items()}


def _inline_script(script: str) -> str:
    # A literal end tag inside a string of the library would end the page's script element.
    return script.replace("</script", "<\\/script")
