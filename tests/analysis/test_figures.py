"""The papers' figures, with numbers worked out by hand on runs that never happened."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from fake_runs import make_view

from sparsona.analysis.changes import client_bands, client_changes
from sparsona.analysis.charts import (
    accuracy_by_bytes,
    accuracy_by_capacity,
    accuracy_by_density,
    gain,
    gain_by_personal,
    gap_by_density,
    novel_gap,
    sweeps,
    train_test_gap,
)
from sparsona.analysis.figures import FIGURES, figure_of
from sparsona.analysis.outcomes import capacities
from sparsona.analysis.table import rows
from sparsona.core.errors import SparsonaError
from sparsona.report.page import render_report
from sparsona.report.pictures import draw, save_picture

SIZES = np.array([[10, 1, 4], [20, 1, 4], [30, 1, 4], [40, 1, 8]])
COUNT = np.array([4, 4, 4, 8])


def run(title="FedAvg", seed=1, right=(1, 2, 3, 4), train=None, points=None, curve=None, sent=0, counted=0, **changes):
    """Four clients with 4, 4, 4 and 8 test examples, of which so many are right; `train` is of as many examples."""
    options = changes.pop("options", {})
    config = {"rounds": 2, "seed": seed, "options": options, **changes.pop("config", {})}
    view = make_view(title, seed)
    correct = np.array(right)
    results = {"received": (correct, COUNT)}
    if train is not None:
        results["received/train"] = (np.array(train), COUNT)
    for point, values in (points or {}).items():
        results[point] = (np.array(values), COUNT)
    mean, weighted = float((correct / COUNT).mean()), float(correct.sum() / 20)
    accuracy = {"mean": mean, "weighted": weighted, "bottom_decile": 0.0, "worst": 0.0, "std": 0.0, "last10": None}
    return dataclasses.replace(
        view,
        config=config,
        correct=correct,
        count=COUNT,
        sizes=SIZES,
        results=results,
        label_counts=None,
        confusion=None,
        point="received",
        curves={"received": curve or [(1, 0.1), (2, mean)]},
        cumulative_bytes=[(1, sent // 2), (2, sent)],
        cumulative_paper_bytes=[(1, counted // 2), (2, counted)],
        summary={**view.summary, "accuracy": accuracy, "rounds": 2},
        **changes,
    )


def marks(chart):
    return {
        one.label: [(mark.x, pytest.approx(mark.y)) for mark in one.marks] for one in chart.series if not one.is_faint
    }


def test_clients_by_capacity():
    config = {"capacities": [0.2, 1.0]}
    # Accuracies 1/4, 2/4, 3/4, 4/8: capacities alternate, so that 0.2 has the first and the third.
    assert capacities(config, np.array([1, 2, 3, 4]), COUNT) == {
        0.2: {"clients": 2, "mean": 0.5},
        1.0: {"clients": 2, "mean": 0.5},
    }
    assert capacities(config, np.array([1, 2, 0, 4]), np.array([4, 4, 0, 8]))[0.2] == {"clients": 1, "mean": 0.25}
    assert capacities({"capacities": [0.5, 0.5]}, np.array([1]), np.array([4])) == {}
    views = [run(right=(4, 1, 2, 0), config=config), run(seed=2, right=(4, 1, 4, 0), config=config)]
    found = accuracy_by_capacity(views)
    assert marks(found) == {"FedAvg": [(0.2, 87.5), (1.0, 12.5)]}  # (100 + 50) / 2 and (100 + 100) / 2; (25 + 0) / 2
    assert found.series[0].marks[0].spread == pytest.approx(312.5**0.5)  # 2 * 12.5^2 / 1
    assert found.rows()[0]["accuracy, mean over clients"] == "87.50 ± 17.68%"
    assert accuracy_by_capacity([run()]) is None


def test_densities_are_one_series():
    views = [
        run("FedSpa (RSM)", options={"density": 0.8, "lr": 0.1}, right=(4, 4, 4, 8)),
        run("FedSpa (RSM)", options={"density": 0.2, "lr": 0.3}, right=(2, 2, 2, 4)),
        run("FedAvg", options={"lr": 0.1}, right=(1, 1, 1, 2)),
    ]
    found = accuracy_by_density(views)
    assert marks(found) == {"FedSpa (RSM)": [(0.2, 50), (0.8, 100)], "FedAvg": [(1.0, 25)]}
    assert [one.style for one in found.series] == ["joined", "level"]
    assert accuracy_by_density(views[1:]) is None
    # Another rate at a density that is there already is another method.
    more = [*views, run("FedSpa (RSM)", options={"density": 0.8, "lr": 0.3}, right=(0, 0, 0, 0))]
    assert [(label, len(members)) for label, members in sweeps(more)] == [
        ("FedSpa (RSM), density=0.8, lr=0.1", 1),
        ("FedSpa (RSM), lr=0.3", 2),
        ("FedAvg", 1),
    ]


def test_the_gap_between_training_and_test_data():
    view = run(right=(1, 2, 3, 4), train=(4, 4, 4, 8))  # mean of 25, 50, 75, 50 against 100
    assert train_test_gap(view) == pytest.approx(50)
    assert train_test_gap(run()) is None
    assert rows([view])[0]["train − test"] == "+50.00"
    assert "train − test" not in rows([run()])[0]
    sweep = [
        run(options={"density": 0.2}, train=(1, 2, 3, 4)),
        run(options={"density": 0.5}, train=(4, 4, 4, 8)),
    ]
    assert marks(gap_by_density(sweep)) == {"FedAvg": [(0.2, 0), (0.5, 50)]}
    assert gap_by_density([run(options={"density": 0.2}), run(options={"density": 0.5})]) is None


def test_gaps_and_gains_are_weighted():
    # 10 of 20 are right; of the novel clients 4 of 20: 50% less 20%. Unweighted it would be another number.
    view = run(points={"novel": (4, 0, 0, 0), "global": (0, 0, 0, 8)})
    assert novel_gap(view) == pytest.approx(30)
    tuned = run(points={"novel": (4, 0, 0, 0), "novel_tuned": (4, 4, 0, 0)})
    assert novel_gap(tuned) == pytest.approx(10)
    assert rows([view])[0]["novel gap"] == "+30.00"
    assert novel_gap(run()) is None
    assert gain(view) == pytest.approx(10)  # 50% less 8 of 20
    assert gain(run()) is None
    assert gain(run(right=(4, 4, 4, 8)), view) == pytest.approx(50)
    warm = run(points={"global": (0, 0, 0, 8), "start": (0, 0, 0, 0)})
    assert gain(warm) == pytest.approx(50)  # over what it started from


def test_gain_by_personal_parameters():
    base = [run("Local", seed, right=(0, 0, 0, 0)) for seed in (1, 2)]
    views = [
        run("FedAvg", 1, right=(0, 0, 0, 2), num_personal=10, num_parameters=100),
        run("FedAvg", 2, right=(0, 0, 0, 4), num_personal=10, num_parameters=100),
        run("FedAvg-FT", 1, right=(0, 0, 0, 8), num_personal=100, num_parameters=100),
        run("FedSpa (RSM)", 1, right=(4, 4, 4, 8), num_parameters=100),  # nobody knows
    ]
    found = gain_by_personal(views, base)
    assert marks(found) == {"part of the model": [(10, 15)], "whole model": [(100, 40)]}
    assert found.series[0].marks[0].text == "FedAvg"
    assert "over Local." in found.sentences()[0]
    # Without runs to compare with, and with runs that have no shared model, the first method is the reference.
    found = gain_by_personal(views)
    assert marks(found) == {"whole model": [(100, 30)]}  # 8 less 2 of 20, with the seed that both have
    assert "over FedAvg." in found.sentences()[0]
    assert gain_by_personal(views[:2]) is None
    # Where every run has a shared model, that is it, and the first method has a gain, too.
    shared = [dataclasses.replace(view, results={**view.results, "global": (0 * COUNT, COUNT)}) for view in views[:3]]
    found = gain_by_personal(shared)
    assert marks(found) == {"part of the model": [(10, 15)], "whole model": [(100, 40)]}
    assert "the shared model of the same run" in found.sentences()[0]


@pytest.mark.parametrize("name", [name for name, row in FIGURES.items() if row.compares])
def test_runs_are_compared_with_one_method(name):
    """With several, the last run of a seed would be taken for the first method."""
    base = [run("FedAvg", s, right=(1, 1, 1, 2)) for s in (1, 2)]
    views = [run("FedSpa (RSM)", s, right=(2, 2, 2, 2), num_personal=5, num_parameters=9) for s in (1, 2)]
    assert figure_of(name, views, base).rows()
    with pytest.raises(SparsonaError, match="2 methods at once: FedAvg; FedSpa") as told:
        figure_of(name, views, [*base, *views])
    assert "one method" in told.value.expected
    assert "--against" in told.value.hint


def test_end_points_in_both_countings():
    views = [run(sent=1000, counted=800, right=(4, 4, 4, 8)), run("Local", right=(1, 1, 1, 2))]
    assert marks(accuracy_by_bytes(views)) == {"FedAvg": [(1000, 100)], "Local, sends nothing": [(0, 25)]}
    assert marks(accuracy_by_bytes(views, "paper"))["FedAvg"] == [(800, 100)]
    (path,) = [one for one in accuracy_by_bytes(views, "paper").series if one.is_faint]
    assert [(mark.x, mark.y) for mark in path.marks] == [(400, pytest.approx(10)), (800, pytest.approx(100))]
    assert accuracy_by_bytes(views[1:]) is None
    tuned = dataclasses.replace(  # the line goes on to the result, which final tuning led to
        run(sent=1000, right=(4, 4, 4, 8)),
        point="tuned",
        curves={"received": [(1, 0.1), (2, 0.3)], "tuned": [(2, 1.0)]},
        cumulative_bytes=[(1, 500), (2, 800), (3, 1000)],
    )
    (path,) = [one for one in accuracy_by_bytes([tuned]).series if one.is_faint]
    assert [(mark.x, round(mark.y)) for mark in path.marks] == [(500, 10), (800, 30), (1000, 100)]


def test_changes_of_several_methods():
    base = run("Local", right=(1, 1, 1, 2), train=(1, 1, 1, 2))
    views = [run("FedAvg", right=(2, 0, 1, 2), train=(2, 2, 2, 4)), run("FedSpa (RSM)", right=(4, 4, 4, 8))]
    found = client_changes([base, *views], "violins")  # the first method is the reference
    assert [method.label for method in found.methods] == ["FedAvg", "FedSpa (RSM)"]
    fedavg, fedspa = found.methods
    assert fedavg.changes["test"].gains.tolist() == [25, -25, 0, 0]
    assert fedavg.changes["train"].gains.tolist() == [25, 25, 25, 25]
    assert list(fedspa.changes) == ["test"]
    assert fedspa.changes["test"].samples.tolist() == [10, 20, 30, 40]
    assert [(row["method"], row["on"], row["hurt"]) for row in found.rows()] == [
        ("FedAvg", "train", "0 (0%)"),
        ("FedAvg", "test", "1 (25%)"),
        ("FedSpa (RSM)", "test", "0 (0%)"),
    ]
    assert found.as_dict() == json.loads(json.dumps(client_changes(views, "violins", [base]).as_dict()))
    assert client_changes(views[:1], "violins") is None
    assert client_changes(views[:1], "violins", [run("Local", seed=2)]) is None  # another seed is no partner


def test_bands_over_seeds():
    base = [run("Local", seed, right=(1, 1, 1, 2)) for seed in (1, 2, 3)]
    views = [run("FedAvg", s, right=r) for s, r in ((1, (2, 4, 0, 2)), (2, (0, 4, 0, 2)), (3, (2, 4, 0, 2)))]
    (band,) = client_bands(views, base).bands
    # Gains: client 0: 25, -25, 25; client 1: 75; client 2: -25; client 3: 0. In the order of means: 2, 3, 0, 1.
    assert band.clients.tolist() == [2, 3, 0, 1]
    assert band.mean.tolist() == pytest.approx([-25, 0, 25 / 3, 75])
    assert (band.low.tolist(), band.high.tolist()) == ([-25, 0, -25, 75], [-25, 0, 25, 75])
    row = band.row()
    assert row["helped or hurt by seed"] == "1 (25%)"
    assert (row["always helped"], row["always hurt"], row["seeds"]) == ("1", "1", "3")
    assert client_bands(views[:1], base) is None
    other = dataclasses.replace(views[1], sizes=SIZES + 1)
    moved = dataclasses.replace(base[1], sizes=SIZES + 1)
    assert client_bands([views[0], other], [base[0], moved]) is None  # clients with other data are other clients


def test_every_figure_can_be_drawn(tmp_path):
    config = {"capacities": [0.2, 1.0]}
    base = [run("Local", s, right=(1, 1, 1, 2), train=(1, 1, 1, 3)) for s in (1, 2)]
    views = [
        run("FedSpa (RSM)", s, right=(3, 4, s, 8), train=(4, 4, 4, 8), options={"density": d}, config=config)
        for s in (1, 2)
        for d in (0.2, 0.5)
    ]
    views = [
        dataclasses.replace(
            v, num_personal=5, num_parameters=9, cumulative_bytes=[(2, 9)], cumulative_paper_bytes=[(2, 8)]
        )
        for v in views
    ]
    for name, row in FIGURES.items():
        found = figure_of(name, views, base if row.compares else ())
        assert found.rows(), name
        assert json.dumps(found.as_dict()), name
        picture = draw(found)
        svg = picture.svg()
        assert "nan" not in svg, name
        assert "FedSpa" in svg, name
    assert save_picture(found, tmp_path / "a.svg").exists()


def test_refusals():
    with pytest.raises(SparsonaError, match="voilins"):
        figure_of("voilins", [run()])
    with pytest.raises(SparsonaError, match="nothing to draw as accuracy-by-capacity") as told:
        figure_of("accuracy-by-capacity", [run()])
    assert "capacities" in told.value.hint
    with pytest.raises(SparsonaError, match="compares runs with no other"):
        figure_of("accuracy-by-rounds", [run()], [run()])


def test_the_page_has_no_section_without_data():
    config = {"capacities": [0.2, 1.0]}
    page = render_report([run("Local", sent=0), run("FedAvg", sent=10, config=config)])
    assert 'data-chart="capacity"' in page
    assert 'data-chart="traffic"' in page
    assert 'data-chart="density"' not in page
    assert 'data-chart="personal"' not in page
