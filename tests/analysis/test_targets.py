"""Rounds to a target, counted by hand on curves written by hand."""

from __future__ import annotations

import dataclasses
import json

import pytest
from fake_runs import make_view

import sparsona as sp
from sparsona.analysis.charts import targets_chart
from sparsona.analysis.targets import Reached, first_reached, relative_rounds, rounds_to, targets_of
from sparsona.core.errors import SparsonaError


def with_curve(title, seed, values, every=1, rounds=None, weighted=None, **config):
    """A run evaluated after each `every` rounds with these accuracies."""
    curve = [(every * (place + 1), value) for place, value in enumerate(values)]
    weights = curve if weighted is None else [(r, value) for (r, _), value in zip(curve, weighted, strict=True)]
    view = make_view(title, seed, rounds=rounds or curve[-1][0], **config)
    point = view.point
    return dataclasses.replace(view, curves={point: curve}, weighted_curves={point: weights})


def test_the_first_round_at_or_above_counts():
    curve = [(3, 0.9), (1, 0.5), (2, 0.7)]
    assert first_reached(curve, 0.7) == 2  # at the target, and rounds in any order
    assert sum([0.6, 0.7, 0.8]) / 3 < 0.7  # by a rounding
    assert first_reached([(1, sum([0.6, 0.7, 0.8]) / 3)], 0.7) == 1
    assert first_reached(curve, 0.71) == 3
    assert first_reached(curve, 0.91) is None
    assert first_reached([(1, 0.8), (2, 0.6)], 0.7) == 1  # that it falls again does not matter
    assert first_reached([], 0.1) is None


def test_mean_and_spread_over_seeds():
    found = Reached((130, 134, 138), (1000, 1000, 1000))
    assert (found.mean, found.spread, found.is_bound) == (134, 4, False)  # sqrt((16 + 0 + 16) / 2)
    assert found.text == "134.0 ± 4.0"
    assert Reached((130,), (1000,)).text == "130"
    assert Reached((130, 131), (9, 9)).text == "130.5 ± 0.7"


def test_a_seed_that_fails_makes_the_mean_a_bound():
    some = Reached((100, None, 300), (1000, 1000, 1000))
    assert some.mean == pytest.approx(1400 / 3)
    assert (some.spread, some.is_bound, some.num_reached) == (None, True, 2)
    assert some.text == ">466.7 (2 of 3 seeds)"
    none = Reached((None, None), (1000, 1000))
    assert none.text == ">1000"
    assert Reached((None, None), (10, 20)).text == ">15"


def test_rounds_of_a_method():
    views = [with_curve("FedAvg", 1, [0.5, 0.6, 0.8]), with_curve("FedAvg", 2, [0.5, 0.7, 0.6])]
    assert rounds_to(views, 70) == Reached((3, 2), (3, 3))
    assert rounds_to(views, 80) == Reached((3, None), (3, 3))
    assert rounds_to([make_view("FedAvg-FT")], 50) is None  # measured once, after the end
    received = rounds_to([make_view("FedAvg-FT")], 50, "received")
    assert received is not None
    assert not received.is_bound


def test_a_share_is_of_the_own_weighted_accuracy():
    """0.8 * 0.5 = 0.4 is reached after 2 rounds by the weighted curve, and after 1 by the other one."""
    slow = with_curve("FedAvg", 1, [0.9, 0.9, 0.9, 1.0], weighted=[0.1, 0.4, 0.45, 0.5])
    fast = with_curve("FedSpa (RSM)", 1, [0.1, 0.1, 0.1, 0.1], weighted=[0.8, 0.9, 0.9, 1.0])
    found = relative_rounds([slow], [fast])
    assert found.rounds.rounds == (2,)
    assert (found.mean, found.spread) == (2, None)
    assert relative_rounds([fast], [slow]).mean == 0.5
    # The best round is no final accuracy: 0.8 * 0.5 is passed in the first round, 0.8 * 0.9 never is.
    assert relative_rounds([with_curve("FedAvg", 1, [0.45, 0.9, 0.5])], [fast]).rounds.rounds == (1,)


def test_ratios_are_of_one_seed():
    own = [with_curve("FedAvg", seed, values) for seed, values in ((1, [0.1, 0.9]), (2, [0.9, 0.9]), (3, [0.9, 0.9]))]
    other = [with_curve("FedSpa (RSM)", seed, values) for seed, values in ((1, [0.9, 0.9]), (2, [0.1, 0.9]))]
    found = relative_rounds(own, other)  # 2 / 1 and 1 / 2; seed 3 has no partner
    assert found.mean == pytest.approx(1.25)
    assert found.spread == pytest.approx(1.125**0.5)  # 2 * 0.75^2 / 1
    assert found.text == "1.25 ± 1.06"
    assert relative_rounds(own[2:], other).text == "–"
    assert relative_rounds([make_view("FedAvg-FT")], other) is None


def test_the_table_and_its_notes():
    views = [
        with_curve("FedAvg", 1, [0.5, 0.75], every=5, rounds=10),
        with_curve("FedAvg", 2, [0.72, 0.75], every=5, rounds=10),
        with_curve("FedSpa (RSM)", 1, [0.5, 0.6]),
        make_view("FedAvg-FT", 1),
    ]
    found = targets_of(views, [70, 75, 99.5], share=0.9)
    assert found.rows() == [
        {"method": "FedAvg", "to 70%": "7.5 ± 3.5", "to 75%": "10.0 ± 0.0", "to 99.5%": ">10", "T_0.9": "7.5 ± 3.5"}
        | {"relative": "1.00 ± 0.00"},
        {"method": "FedSpa (RSM)", "to 70%": ">2", "to 75%": ">2", "to 99.5%": ">2", "T_0.9": "2", "relative": "0.20"},
        {"method": "FedAvg-FT", **dict.fromkeys(["to 70%", "to 75%", "to 99.5%", "T_0.9", "relative"], "–")},
    ]
    seldom, unknown, hint, meaning = found.sentences()
    assert seldom.startswith("Clients were evaluated every 5 rounds (FedAvg): a target is seen up to 4 rounds late")
    assert unknown == "FedAvg-FT: 'tuned' was not evaluated over the rounds, and has no curve."
    assert hint.startswith("--point received reads the curve")
    # A chart is for readers of a page, who have no command line, and says of marks what there are.
    assert targets_chart(found).notes == (
        seldom,
        unknown,
        "Means over seeds; error bars: one standard deviation.",
        "Targets that were not reached by all seeds are not drawn.",
    )
    assert targets_chart(targets_of(views[:1], [70])).notes == (seldom.replace(" (FedAvg)", ""),)
    assert "relative: over that of FedAvg" in meaning
    plain = json.loads(json.dumps(found.as_dict()))
    assert plain["methods"][0]["targets"][0]["rounds"] == [10, 5]
    assert plain["methods"][1]["targets"][1] == {"target": 75, "mean": 2, "spread": None, "is_bound": True} | {
        "rounds": [None],
        "limits": [2],
    }
    assert "share" not in plain["methods"][2]


def test_refusals():
    views = [make_view()]
    with pytest.raises(SparsonaError, match=r"target 0\.7"):
        targets_of(views, [0.7])
    with pytest.raises(SparsonaError, match="share 80"):
        targets_of(views, [], share=80)
    with pytest.raises(SparsonaError, match="no target"):
        targets_of(views, [])


def test_a_comparison_knows_its_rounds(tmp_path):
    both = sp.compare(["local", "fedavg"], clients=4, rounds=2, epochs=1, data_rate=0.2, out=tmp_path / "both")
    found = both.rounds_to([100], point="received")
    assert [list(row) for row in found.rows()] == [["method", "to 100%"]] * 2
    assert [one.limits for (one,) in found.reached.values()] == [(2,), (2,)]
    assert [run.view.weighted_curves["received"][-1][1] for run in both.runs] == pytest.approx(
        [run.summary["accuracy"]["weighted"] for run in both.runs]
    )
