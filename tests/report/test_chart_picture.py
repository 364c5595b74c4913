"""Pictures of several runs: colours that belong to methods, names beside marks, one scale, and lines that fit."""

from __future__ import annotations

import dataclasses
import re

import fake_runs
import numpy as np
import pytest
from fake_runs import make_comparison, make_view

from sparsona.analysis.changes import client_changes
from sparsona.analysis.charts import LineChart, Mark, Series, accuracy_by_capacity, accuracy_by_density, targets_chart
from sparsona.analysis.figures import figure_of
from sparsona.analysis.targets import targets_of
from sparsona.core.errors import SparsonaError
from sparsona.report import plots
from sparsona.report.page import SECTIONS, render_report
from sparsona.report.palette import COLOURS, mark_at
from sparsona.report.pictures import draw
from sparsona.report.pictures.figure import new_picture, style

METHODS = ("Local", "FedAvg", "FedSpa (RSM)")


def views_of(*titles, **config):
    found = [make_view(title, seed) for title in titles for seed in (1, 2)]
    return [
        dataclasses.replace(
            view, config={**view.config, **config}, results={view.point: (view.correct, view.count)}, effects=None
        )
        for view in found
    ]


def colours_of(picture):
    colors = pytest.importorskip("matplotlib.colors")
    (axes,) = picture.figure.axes
    return {colors.to_hex(line.get_color()) for line in axes.lines}


def test_a_method_has_one_colour_on_a_page():
    views = views_of(*METHODS)
    curves = figure_of("accuracy-by-rounds", views)
    assert {one.label.split(", ")[0]: one.place for one in curves.series} == dict(zip(METHODS, range(3), strict=True))
    # The reference is not drawn, and the others keep their colours.
    assert [(one.label, one.place) for one in client_changes(views, "violins").methods] == [
        ("FedAvg", 1),
        ("FedSpa (RSM)", 2),
    ]
    over = client_changes(views[2:], "violins", views[:2])
    assert [one.place for one in over.methods] == [1, 2]
    body = draw(over).figure.axes[0].collections[0]
    colors = pytest.importorskip("matplotlib.colors")
    assert colors.to_hex(body.get_facecolor()[0]) == COLOURS[1]


def test_methods_without_marks_take_no_colour_away():
    slow, fast = views_of("Local"), views_of("FedAvg")
    slow = [dataclasses.replace(view, curves={view.point: [(1, 0.01)]}, summary={**view.summary}) for view in slow]
    (series,) = targets_chart(targets_of([*slow, *fast], [30.0])).series
    assert (series.label, series.place) == ("FedAvg", 1)
    with_groups = [*views_of("Local"), *views_of("FedAvg", capacities=[0.2, 1.0])]
    assert [one.place for one in accuracy_by_capacity(with_groups).series] == [1]
    sweep = [view for d in (0.6, 0.3) for view in views_of("FedSpa (RSM)", options={"density": d})]
    assert {one.label: one.place for one in accuracy_by_density([*views_of("Local"), *sweep]).series} == {
        "Local": 0,
        "FedSpa (RSM)": 1,
    }


def test_a_colour_is_that_of_the_place():
    marks = (Mark(0, 1), Mark(1, 2))
    chart = LineChart("a", "x", "y", (Series("b", marks, "line", place=2), Series("c", marks, "line", place=1)))
    assert colours_of(draw(chart)) == {COLOURS[2], COLOURS[1]}


def test_a_method_has_one_mark_in_both_kinds_of_charts():
    traces = plots.tradeoff(make_comparison(1)).data
    plotly = {one.name: one.marker.symbol for one in traces if one.name}
    assert [plotly[name] for name in fake_runs.METHODS if name != "Local"] == ["square", "diamond", "cross", "x"]
    markers = pytest.importorskip("matplotlib.markers")
    drawn = {"circle": "o", "square": "s", "diamond": "D", "cross": "P", "x": "X", "triangle-up": "^"}
    drawn |= {"triangle-down": "v", "pentagon": "p", "hexagon": "h", "star": "*"}
    for place in range(10):
        chart = LineChart("a", "x", "y", (Series("b", (Mark(0, 1),), "points", place=place),))
        (axes,) = draw(chart).figure.axes
        style = markers.MarkerStyle(drawn[mark_at(place)[0]])
        expected = style.get_path().transformed(style.get_transform())
        np.testing.assert_array_equal(axes.collections[0].get_paths()[0].vertices, expected.vertices)


def test_no_axis_goes_beyond_all_and_none():
    views = [dataclasses.replace(view, summary=view.summary | {}) for view in make_comparison(1)]
    for view, mean in zip(views, (0.995, 0.99, 0.98, 0.2, 0.005), strict=True):
        view.summary["accuracy"] = view.summary["accuracy"] | {"mean": mean}
    assert tuple(plots.tradeoff(views).layout.yaxis.range) == (0, 100)
    assert plots.tradeoff(views[:3]).layout.yaxis.range[0] == pytest.approx(96)


def test_error_bars_fit_into_the_picture():
    """0.5 and 0.9 are 70 with a spread of 28.3 points."""
    views = [dataclasses.replace(view, summary=view.summary | {}) for view in make_comparison(2)]
    for view in views:
        mean = 0.5 if view.seed == views[0].seed else 0.9
        view.summary["accuracy"] = view.summary["accuracy"] | {"mean": mean}
    low, high = plots.tradeoff(views).layout.yaxis.range
    assert low <= 70 - 28.28
    assert high >= 70 + 28.28


@pytest.mark.parametrize("slope", [1, -1, 0])
def test_names_beside_marks_are_not_written_across_lines(slope):
    x = np.linspace(1, 9, 9)
    path = Series("path", tuple(Mark(a, 50 + 4 * slope * (a - 5)) for a in x.tolist()), "line", place=0)
    ends = Series("ends", tuple(Mark(a, 50 + 4 * slope * (a - 5), text=f"density {a}") for a in (2, 5, 8)), place=1)
    picture = draw(LineChart("a", "x", "y", (path, ends)))
    picture.figure.draw_without_rendering()
    (axes,) = picture.figure.axes
    dense = np.linspace(1, 9, 2000)
    line = axes.transData.transform(np.stack([dense, 50 + 4 * slope * (dense - 5)], axis=1))
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 3
    for box in boxes:
        assert not ((line >= box.min) & (line <= box.max)).all(axis=1).any()
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_violins_have_one_scale():
    views = [
        dataclasses.replace(view, results={view.point: both, f"{view.point}/train": (both[1] * (i % 2), both[1])})
        for i, view in enumerate(views_of("Local", "FedAvg"))
        if (both := (view.correct, view.count))
    ]
    train, test = draw(client_changes(views, "violins")).figure.axes
    assert train.get_ylim() == test.get_ylim()


def test_a_picture_says_what_it_shows_and_no_more():
    found = targets_of(views_of("Local", "FedAvg"), [20.0, 30.0], share=0.8)
    assert "T_0.8" in found.sentences()[-1]
    assert "T_0.8" in found.as_dict()["notes"][-1]
    assert not any("T_0.8" in text for text in targets_chart(found).sentences())
    with pytest.raises(SparsonaError, match="no target to draw"):
        draw(targets_of(views_of("Local"), [], share=0.8))


def test_long_lines_are_broken_and_none_is_cut():
    sentence = "Means over seeds and widely measured numbers of rounds, " * 6
    with style():
        picture = new_picture("title", [sentence, "end"], 3)
    picture.figure.draw_without_rendering()
    lines = picture.figure.texts
    assert " ".join(line.get_text() for line in lines[1:]) == f"{sentence.strip()} end"
    width, height = picture.figure.bbox.width, picture.figure.bbox.height
    boxes = [line.get_window_extent() for line in lines]
    assert all(box.x1 <= width and box.y1 <= height for box in boxes)
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_a_section_and_its_picture_have_one_heading():
    page = render_report(views_of(*METHODS))
    for key, (title, _, _) in SECTIONS.items():
        if f'<section id="{key}">' in page:
            section = page.split(f'<section id="{key}">')[1].split("</section>")[0]
            shown = re.sub(r"<(\w+)[^>]*>", r"<\1>", section)
            assert shown.count(f">{title}<") == 1, key
            assert 'aria-label="' in section
