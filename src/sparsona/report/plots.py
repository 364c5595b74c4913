"""Plotly figures of runs.

Backgrounds are transparent and text has no colour of its own, so that a page may put its light or dark under them.
Names come from users: they are escaped, because plotly reads a subset of HTML in every text it draws.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from sparsona.analysis.charts import accuracy_by_bytes
from sparsona.analysis.curves import common_rounds, curves_of, drawn_measure, drawn_point, spent_by
from sparsona.analysis.extra import import_extra
from sparsona.analysis.format import cut, human_bytes
from sparsona.analysis.groups import Group, group_views, pairs
from sparsona.analysis.measure import Measure, measure_of_metric
from sparsona.analysis.partition import drawn_counts
from sparsona.analysis.view import RunView
from sparsona.core.points import POINTS, TUNED
from sparsona.data.names import name_of
from sparsona.report.palette import BETTER, HEAT, WORSE, colour_at, dash_at, mark_at

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


WIDTH = 2.5  # of a line
COINCIDE = 0.3  # percentage points by which lines may differ that a reader cannot tell apart

# What curves are drawn against besides rounds, and where a run has it.
SPENT = {
    "bytes": "cumulative_bytes",
    "paper bytes": "cumulative_paper_bytes",
    "steps": "cumulative_steps",
    "time": "cumulative_time",
}


def learning_curves(
    views: Sequence[RunView],
    against: Literal["rounds", "bytes", "paper bytes", "steps", "time"] = "rounds",
    metric: str | None = None,
) -> Figure:
    """The mean of a figure over clients against completed rounds, bytes sent, local steps or simulated time so far.

    One line per method, the mean over its seeds, in a band from the lowest to the highest seed. A method whose headline
    is measured once, after the last round (fine-tuning), is a line of the model before that and a star.
    A method that sends nothing is a level dotted line against bytes. Every other point that was evaluated over the
    rounds (the global model, the peers' consensus) is a thin dotted line, and so is what patience goes by on validation
    data: of several methods a click in the legend shows it.

    Args:
        views: the runs.
        against: what is across; "paper bytes" are counted as the papers count: four a parameter, masks free.
        metric: what is drawn: "accuracy", "loss", or a metric of the runs, over the clients that it is defined for.
            None: what they stop by (`patience_metric`), and otherwise what they are judged by.
    """
    figure = _figure(height=400)
    measure = drawn_measure(views, metric)
    views = [curves_of(view, measure) for view in views]
    groups = group_views(views)
    is_traffic = against in ("bytes", "paper bytes")
    most = max((sent for view in views for _, sent in getattr(view, SPENT[against])), default=0) if is_traffic else 0
    lines: list[tuple[int, list[float], np.ndarray, list[str], bool]] = []
    for index, group in enumerate(groups):
        point = drawn_point(group)
        curves = [dict(view.curves.get(point, [])) for view in group.views]
        rounds = common_rounds(curves)
        if not rounds:
            continue
        level = most > 0 and _abscissa(group, rounds[-1:], against) == [0]
        if level:  # no traffic: all its rounds are at 0 bytes, so its last accuracy is drawn across
            curves, rounds = [{rounds[-1]: curve[rounds[-1]]} for curve in curves], [rounds[-1]] * 2
        x: list[float] = [0, most] if level else _abscissa(group, rounds, against)
        values = measure.scale * np.array([[curve[r] for r in rounds] for curve in curves])
        sent = _sent(group, rounds)
        notes = [f"{point}, round {r}, {human_bytes(b)} sent" for r, b in zip(rounds, sent, strict=True)]
        lines.append((index, x, values, notes, level))
    widths = _widths([(x, values.mean(axis=0)) for _, x, values, _, _ in lines])
    for (index, x, values, notes, level), width in zip(lines, widths, strict=True):
        group, point = groups[index], drawn_point(groups[index])
        _add_line(figure, group, index, x, values, notes, level, measure.unit, width=width)
        if point != group.views[0].point:
            _add_headline(figure, group, index, measure, [view.curves for view in group.views], against)
        for other in group.views[0].curves:
            if other not in (point, group.views[0].point):
                _add_point(figure, group, index, other, against)
        _add_patience(figure, group, index, measure, against, hidden=len(groups) > 1)
    figure.update_yaxes(title_text=html.escape(measure.mean_title), ticksuffix=measure.unit)
    if is_traffic:
        counted = "" if against == "bytes" else " (parameters × 4, masks free)"
        figure.update_xaxes(
            title_text=f"bytes sent, both directions{counted}", tickformat="~s", ticksuffix="B", rangemode="tozero"
        )
    elif against == "steps":
        figure.update_xaxes(title_text="local steps, of all clients together", rangemode="tozero")
    elif against == "time":
        figure.update_xaxes(title_text="simulated time, in turns of a client of speed 1", rangemode="tozero")
    else:
        figure.update_xaxes(title_text="completed rounds", rangemode="tozero", **_round_ticks(views))
    return figure


def tradeoff(views: Sequence[RunView], counting: Literal["encoded", "paper"] = "encoded") -> Figure | None:
    """Where each method ends in bytes sent and accuracy: up and to the left is better.

    A thin dotted line is how a method got there; a level line is a method that sends nothing.

    Args:
        views: the runs; those of one method that differ in density are one series.
        counting: bytes as encoded, or as the papers count.

    Returns:
        The figure; None where nobody sends anything.
    """
    chart = accuracy_by_bytes(views, counting)
    if chart is None:
        return None
    figure = _figure(height=420)
    ends = [series for series in chart.series if not series.is_faint]
    most = max(mark.x for series in chart.series for mark in series.marks)
    for series in chart.series:
        index = series.place or 0
        colour, name = colour_at(index), html.escape(series.label)
        if series.is_faint:
            figure.add_scatter(
                x=[mark.x for mark in series.marks],
                y=[mark.y for mark in series.marks],
                mode="lines",
                line={"color": colour, "width": 1.2, "dash": "dot"},
                opacity=0.6,
                hoverinfo="skip",
                legendgroup=str(index),
                showlegend=False,
            )
            continue
        level = series.style == "level"
        marks = [replace(series.marks[0], x=x) for x in (0, most)] if level else list(series.marks)
        name += f" {html.escape(marks[0].text)}" if len(marks) == 1 and marks[0].text else ""
        figure.add_scatter(
            x=[mark.x for mark in marks],
            y=[mark.y for mark in marks],
            error_y=None if level else {"type": "data", "array": [mark.spread or 0 for mark in marks]},
            name=name,
            mode="lines" if level else "lines+markers" if len(marks) > 1 else "markers",
            line={"color": colour, "width": 1.5, "dash": "dash" if level else "solid"},
            marker={"color": colour, "size": 13, "symbol": mark_at(index)[0]},
            customdata=[chart.write_y(mark) + f"<br>{human_bytes(mark.x)} sent" * (not level) for mark in marks],
            hovertemplate=f"<b>{_literal(name)}</b><br>%{{customdata}}<extra></extra>",
            legendgroup=str(index),
            cliponaxis=False,
        )
    # Methods differ by points where their first rounds are tens of points below.
    reached = [mark.y for series in ends for mark in series.marks]
    is_share = chart.y_unit == "%"
    room = max(0.25 * (max(reached) - min(reached)), 2.0 if is_share else 0.02 * max(map(abs, reached)))
    spreads = [(mark.y - (mark.spread or 0), mark.y + (mark.spread or 0)) for series in ends for mark in series.marks]
    bounds = [min(reached) - room, max(reached) + room]
    bounds = [min(bounds[0], *(low for low, _ in spreads)), max(bounds[1], *(high for _, high in spreads))]
    if is_share:  # beyond them there is nothing
        bounds = [max(bounds[0], 0.0), min(bounds[1], 100.0)]
    figure.update_yaxes(title_text=html.escape(chart.y_title), ticksuffix="%" if is_share else "", range=bounds)
    figure.update_xaxes(title_text=chart.x_title, tickformat="~s", ticksuffix="B", rangemode="tozero")
    return figure


def train_loss(views: Sequence[RunView]) -> Figure:
    """Mean training loss against rounds, one line per method, with the band of its seeds."""
    figure = _figure(height=340)
    for index, group in enumerate(group_views(views)):
        curves = [dict(view.train_loss) for view in group.views]
        if rounds := common_rounds(curves):
            values = np.array([[curve[r] for r in rounds] for curve in curves])
            _add_line(figure, group, index, rounds, values, [f"round {r}" for r in rounds], unit="")
    figure.update_xaxes(title_text="round", rangemode="tozero")
    figure.update_yaxes(title_text="training loss", rangemode="tozero")
    return figure


def client_accuracies(views: Sequence[RunView]) -> Figure:
    """Every client's accuracy at the headline: a box per method and a dot per client and seed."""
    groups = group_views(views)
    figure = _figure(height=110 + 64 * len(groups), showlegend=False)
    for index, group in enumerate(groups):
        dots = [dot for view in group.views for dot in _client_dots(view)]
        colour = colour_at(index)
        figure.add_box(
            x=[accuracy for accuracy, _ in dots],
            y=[html.escape(group.label)] * len(dots),
            customdata=[note for _, note in dots],
            name=html.escape(group.label),
            orientation="h",
            boxpoints="all",
            pointpos=0,
            jitter=0.7,
            hoveron="points",
            hovertemplate="%{customdata}<extra></extra>",
            marker={"color": colour, "size": 6, "opacity": 0.75},
            line={"color": colour, "width": 1.5},
            fillcolor=fade(colour),
        )
    measure = views[0].measure
    figure.update_xaxes(title_text=f"client {html.escape(measure.title)}", ticksuffix=measure.unit)
    figure.update_yaxes(autorange="reversed", automargin=True, showgrid=False)
    return figure


def client_metrics(views: Sequence[RunView], name: str) -> Figure:
    """Every client's value of a metric at the headline: a box per method and a dot per client and seed."""
    shown = [
        replace(view, measure=measure_of_metric(name), scores=view.metrics[name])
        for view in views
        if name in view.metric_curves
    ]
    return client_accuracies(shown) if shown else _figure(height=110)


def client_differences(views: Sequence[RunView], method: int) -> Figure | None:
    """The `method`-th method against the first, client by client, from the biggest loss to the biggest gain.

    None where the two share no seed on the same clients: there is nothing to pair then.
    """
    groups = group_views(views)
    reference, group = groups[0], groups[method]
    bars: list[tuple[float, str]] = []
    measure = reference.views[0].measure
    form, unit = (".1f", "%") if measure.unit else (".4g", "")
    for before, after in pairs(reference, group):
        for client in np.flatnonzero(np.isfinite(before.scores) & np.isfinite(after.scores)):
            old, new = (measure.scale * view.scores[client] for view in (before, after))
            who = html.escape(name_of(after.client_names, int(client)))
            note = f"<b>client {who}</b>, seed {after.seed}<br>{html.escape(group.label)}: {new:{form}}{unit}"
            note += f"<br>{html.escape(reference.label)}: {old:{form}}{unit}"
            note += f"<br>{int(before.count[client])} test examples"
            bars.append((float(measure.sign * (new - old)), note))
    if not bars:
        return None
    bars.sort(key=lambda bar: bar[0])
    gains = [gain for gain, _ in bars]
    figure = _figure(height=340, showlegend=False, bargap=0.15 if len(bars) <= 60 else 0)
    figure.add_bar(
        y=gains,
        customdata=[note for _, note in bars],
        hovertemplate="%{customdata}<br><b>%{y:+.1f} percentage points</b><extra></extra>"
        if unit
        else "%{customdata}<br><b>better by %{y:.4~g}</b><extra></extra>",
        marker={"color": [BETTER if gain > 0 else WORSE for gain in gains], "line": {"width": 0}},
    )
    better, worse = sum(gain > 1e-9 for gain in gains), sum(gain < -1e-9 for gain in gains)
    text = f"better for <b>{better}</b>, worse for <b>{worse}</b>, equal for <b>{len(gains) - better - worse}</b>"
    figure.add_annotation(
        text=text, x=0, y=1.0, xref="paper", yref="paper", xanchor="left", yanchor="bottom", showarrow=False
    )
    what = "clients" if len(group.views) == 1 else "clients of all seeds"
    figure.update_xaxes(title_text=f"{what}, sorted", showticklabels=False, showgrid=False)
    gained = "percentage points" if unit else f"better {html.escape(measure.title)}"
    figure.update_yaxes(title_text=f"{gained} over {html.escape(reference.label)}", zeroline=True)
    return figure


def confusion(views: Sequence[RunView], method: int) -> Figure | None:
    """What the `method`-th method takes for what, summed over clients and seeds; None where it was not recorded."""
    group = group_views(views)[method]
    matrices = [np.asarray(view.confusion) for view in group.views if view.confusion is not None]
    if not matrices or any(matrix.shape != matrices[0].shape for matrix in matrices):
        return None
    counts = np.sum(matrices, axis=0)
    shares = 100 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    classes = len(counts)
    figure = _figure(height=440, showlegend=False)
    figure.add_heatmap(
        z=shares.tolist(),
        text=counts.tolist(),
        zmin=0,
        zmax=100,
        colorscale=HEAT,
        xgap=_gap(classes),
        ygap=_gap(classes),
        texttemplate="%{text}" if classes <= 12 else None,
        hovertemplate="true %{y}, predicted %{x}<br><b>%{text}</b>, %{z:.1f}% of its class<extra></extra>",
        colorbar={"ticksuffix": "%", "thickness": 10, "outlinewidth": 0},
    )
    ticks = _index_ticks(classes)
    if names := [html.escape(cut(name, 30)) for name in group.views[0].class_names]:
        ticks = {"tickmode": "array", "tickvals": list(range(classes)), "ticktext": names} if classes <= 25 else ticks
        figure.update_traces(
            customdata=[[f"true {true}, predicted {guess}" for guess in names] for true in names],
            hovertemplate="%{customdata}<br><b>%{text}</b>, %{z:.1f}% of its class<extra></extra>",
        )
    figure.update_xaxes(title_text="predicted class", showgrid=False, **ticks)
    figure.update_yaxes(title_text="true class", autorange="reversed", showgrid=False, **ticks)
    return figure


def gate_histogram(views: Sequence[RunView], method: int) -> Figure | None:
    """How many blocks of the `method`-th method's clients have which gate, round by round (pFedGate, figure 7).

    All seeds together, in the rounds that all of them recorded. None where the method has no gates.
    """
    group = group_views(views)[method]
    found = [view.gates.histogram() for view in group.views if view.gates is not None]
    if not found or any(not np.array_equal(edges, found[0][1]) for _, edges, _ in found):
        return None
    rounds = sorted(set.intersection(*(set(own) for own, _, _ in found)))
    edges = found[0][1]
    counts = np.sum([dense[[own.index(r) for r in rounds]] for own, _, dense in found], axis=0)
    figure = _figure(height=380, showlegend=False)
    figure.add_heatmap(
        x=[str(r) for r in rounds],
        y=((edges[:-1] + edges[1:]) / 2).tolist(),
        z=(100 * counts / counts.sum(axis=1, keepdims=True)).T.tolist(),
        zmin=0,
        colorscale=HEAT,
        hovertemplate="round %{x}, gate about %{y:.2f}<br><b>%{z:.1f}%</b> of the blocks<extra></extra>",
        colorbar={"ticksuffix": "%", "thickness": 10, "outlinewidth": 0},
    )
    figure.update_xaxes(title_text="completed rounds", type="category", showgrid=False)
    figure.update_yaxes(title_text="gate of a block", showgrid=False)
    return figure


def _add_line(
    figure: Figure,
    group: Group,
    index: int,
    x: Sequence[float],
    values: np.ndarray,
    notes: Sequence[str],
    level: bool = False,
    unit: str = "%",
    width: float = WIDTH,
) -> None:
    colour, name = colour_at(index), html.escape(group.label)
    if len(values) > 1:
        low, high = values.min(axis=0), values.max(axis=0)
        figure.add_scatter(
            x=[*x, *reversed(x)],
            y=[*high.tolist(), *low[::-1].tolist()],
            fill="toself",
            fillcolor=fade(colour),
            line={"width": 0},
            mode="lines",
            hoverinfo="skip",
            legendgroup=str(index),
            showlegend=False,
        )
    dash = "dot" if level else dash_at(index)[0]
    figure.add_scatter(
        x=list(x),
        y=values.mean(axis=0).tolist(),
        name=name,
        mode="lines" if len(x) > 1 else "markers",
        line={"color": colour, "width": width, "dash": dash},
        opacity=1 if width == WIDTH else 0.6,
        marker={"color": colour, "size": 9},
        customdata=["sends nothing"] * len(x) if level else list(notes),
        hovertemplate=f"<b>{_literal(name)}</b>: %{{y:.4~g}}{unit}<br>%{{customdata}}<extra></extra>",
        legendgroup=str(index),
    )


def _widths(lines: Sequence[tuple[Sequence[float], np.ndarray]]) -> list[float]:
    """Of each line: wider for every later one that lies on it, so that its colour is seen on both sides of that one."""
    found = []
    for place, (x, y) in enumerate(lines):
        later = lines[place + 1 :]
        covered = sum(x == other_x and float(np.abs(y - other).max()) < COINCIDE for other_x, other in later)
        found.append(WIDTH + 4 * covered)
    return found


def _add_headline(
    figure: Figure,
    group: Group,
    index: int,
    measure: Measure,
    curves: Sequence[Mapping[str, Sequence[tuple[int, float]]]],
    against: str = "rounds",
) -> None:
    """A star where the headline was measured once; `curves` are those of each seed, by point."""
    point = group.views[0].point
    last = [found[point][-1] for found in curves if found.get(point)]
    if not last:
        return
    value = measure.scale * float(np.mean([accuracy for _, accuracy in last]))
    figure.add_scatter(
        # Final tuning is recorded as one more round, whose bytes and steps led to this point.
        x=_abscissa(group, [last[0][0] + (against != "rounds" and point == TUNED)], against),
        y=[value],
        name=html.escape(group.label),
        mode="markers",
        marker={"color": colour_at(index), "size": 13, "symbol": "star"},
        hovertemplate=f"<b>{_literal(html.escape(group.label))}</b>, {point}: {value:.4g}{measure.unit}<extra></extra>",
        legendgroup=str(index),
        showlegend=False,
        cliponaxis=False,
    )


def _add_point(figure: Figure, group: Group, index: int, point: str, against: str) -> None:
    """Another model beside the headline's, where it was evaluated over the rounds (FedSpa, figure 8)."""
    curves = [dict(view.curves.get(point, [])) for view in group.views]
    rounds = common_rounds(curves)
    if len(rounds) < 2:
        return
    _add_thin_line(figure, group, index, point, POINTS[point].text, curves, rounds, against)


def _add_patience(figure: Figure, group: Group, index: int, measure: Measure, against: str, hidden: bool) -> None:
    """What patience goes by on validation data, where that is the figure that is drawn."""
    curves = [dict(view.patience_curve) for view in group.views if view.patience_name == measure.name]
    if len(curves) == len(group.views) and len(rounds := common_rounds(curves)) > 1:
        alike = " (each client counting the same)" * (measure.weight == "examples")
        title = f"{measure.title} on validation data{alike}, by which a run with patience stops"
        _add_thin_line(figure, group, index, "validation", title, curves, rounds, against, hidden)


def _add_thin_line(
    figure: Figure,
    group: Group,
    index: int,
    label: str,
    title: str,
    curves: Sequence[Mapping[int, float]],
    rounds: Sequence[int],
    against: str,
    hidden: bool = False,
) -> None:
    """A dotted line of something beside a group's headline, the mean over its seeds."""
    name, measure = f"{html.escape(group.label)}, {label}", group.views[0].measure
    figure.add_scatter(
        x=_abscissa(group, rounds, against),
        y=[measure.scale * float(np.mean([curve[r] for curve in curves])) for r in rounds],
        name=name,
        mode="lines",
        line={"color": colour_at(index), "width": 1.5, "dash": "dot"},
        customdata=[f"{title}, round {r}" for r in rounds],
        hovertemplate=f"<b>{_literal(name)}</b>: %{{y:.4~g}}{measure.unit}<br>%{{customdata}}<extra></extra>",
        visible="legendonly" if hidden else True,
    )


def trait_distances(views: Sequence[RunView]) -> Figure:
    """How far apart clients' masks or gates are, and how far each has come from its first, round by round."""
    figure = _figure(height=340)
    for index, group in enumerate(group_views(views)):
        for place, what in ((1, "between clients"), (2, "to its own start")):
            curves = [{row[0]: row[place] for row in view.distances} for view in group.views]
            if rounds := common_rounds(curves):
                name = f"{html.escape(group.label)}, {what}"
                figure.add_scatter(
                    x=rounds,
                    y=[float(np.mean([curve[r] for curve in curves])) for r in rounds],
                    name=name,
                    mode="lines" if len(rounds) > 1 else "markers",
                    line={"color": colour_at(index), "width": WIDTH, "dash": "solid" if place == 1 else "dot"},
                    marker={"color": colour_at(index), "size": 9},
                    hovertemplate=f"<b>{_literal(name)}</b>: %{{y:.4~g}}<br>round %{{x}}<extra></extra>",
                )
    figure.update_xaxes(title_text="completed rounds", rangemode="tozero", **_round_ticks(views))
    figure.update_yaxes(title_text="mean distance", rangemode="tozero")
    return figure


def _abscissa(group: Group, rounds: Sequence[int], against: str) -> list[float]:
    return list(rounds) if against == "rounds" else spent_by(group, rounds, SPENT[against])


def _sent(group: Group, rounds: Sequence[int]) -> list[float]:
    """Bytes sent up to each of these rounds, the mean over the group's seeds."""
    return spent_by(group, rounds, SPENT["bytes"])


def _client_dots(view: RunView) -> list[tuple[float, str]]:
    dots = []
    measure = view.measure
    for client in np.flatnonzero(np.isfinite(view.scores)):
        accuracy = measure.scale * float(view.scores[client])
        shown = f"{accuracy:.1f}%" if measure.unit else f"{measure.title} {accuracy:.4g}"
        who = html.escape(name_of(view.client_names, int(client)))
        note = f"<b>client {who}: {html.escape(shown)}</b>, seed {view.seed}<br>{int(view.count[client])} test"
        if view.label_counts is not None:
            labels = drawn_counts(view.label_counts[client])
            note += f", {int(labels.sum())} training examples<br>{_label_mix(labels, view.class_names)}"
        dots.append((accuracy, note))
    return dots


def _label_mix(labels: np.ndarray, names: Sequence[str], shown: int = 4) -> str:
    held = [int(c) for c in np.argsort(-labels, kind="stable") if labels[c] > 0]
    mix = [
        f"{'' if names else 'class '}{html.escape(name_of(names, c))}: {100 * labels[c] / labels.sum():.0f}%"
        for c in held[:shown]
    ]
    return ", ".join(mix + ([f"{len(held) - shown} more"] if len(held) > shown else []))


def _index_ticks(n: int) -> dict[str, object]:
    """Ticks at whole numbers: all of them where they fit."""
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, n) if n / step <= 25)
    return {"tickmode": "linear", "tick0": 0, "dtick": step}


def _round_ticks(views: Sequence[RunView]) -> dict[str, int]:
    """Ticks at whole numbers where rounds are so few that there would be some between them."""
    most: int = max((done for view in views for done, _ in view.cumulative_bytes), default=0)
    return {"dtick": 1} if 0 < most <= 5 else {}


def _gap(n: int) -> int:
    return 1 if n <= 50 else 0  # between cells so small that a gap would hide them


def _figure(height: int, **layout: object) -> Figure:
    graph_objects = import_extra("plotly.graph_objects", "reports")
    figure: Figure = graph_objects.Figure()
    figure.update_layout(
        template=graph_objects.layout.Template(),  # plotly's own would set colours for a white page
        height=height,
        margin={"l": 64, "r": 12, "t": 36, "b": 40},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "xanchor": "left"},
        hoverlabel={"align": "left"},
        **layout,
    )
    axis = {"zeroline": False, "automargin": True, "title": {"font": {"size": 13}, "standoff": 8}}
    figure.update_layout(xaxis=axis, yaxis=axis)
    return figure


def _literal(name: str) -> str:
    """A name inside a hover template, where %{ would start a placeholder."""
    return name.replace("%{", "%&#123;")


def fade(colour: str) -> str:
    """A colour of areas, through which lines are seen."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"
