"""When ours agrees with the paper's, by hand; measures; means over settings; and what a scale changes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sparsona.cli.reproduce import named_once
from sparsona.core.errors import SparsonaError
from sparsona.experiment.build import make_config
from sparsona.reproduce.measures import MEASURES, Figure, find, of_runs
from sparsona.reproduce.recipe import Column, Printed, Recipe
from sparsona.reproduce.rows import scaled, select, with_needed
from sparsona.reproduce.table import Known, _agreement, cells, format_ours, format_printed, lines, row_cost
from sparsona.runs.options import RunConfig

ACCURACY = Column(measure="accuracy", title="accuracy", digits=1)
GB = Column(measure="traffic_gb", title="GB", digits=1)


@pytest.mark.parametrize(
    ("paper", "ours", "agrees"),
    [
        ((80.0, 3.0), (84.9, 4.0), True),  # 5 is the root of 9 + 16
        ((80.0, 3.0), (85.1, 4.0), False),
        ((80.0, 3.0), (75.1, 4.0), True),
        ((80.0, None), (83.9, 4.0), True),
        ((80.0, 3.0), (83.1, None), False),
        ((80.0, None), (80.0, None), None),
    ],
)
def test_a_figure_agrees_within_both_spreads_together(paper, ours, agrees):
    printed, found = Printed(value=paper[0], spread=paper[1]), Figure(ours[0], ours[1])
    difference, decided, _ = _agreement(printed, found, ACCURACY, False, "")
    assert (difference, decided) == (pytest.approx(ours[0] - paper[0]), agrees)
    assert _agreement(printed, found, ACCURACY, False, "scaled to 0.1") == (None, None, "scaled to 0.1")


@pytest.mark.parametrize(
    ("value", "agrees", "why"),
    [
        (369.24, True, "to the digit"),
        (369.29, True, "in the last digit"),
        (369.31, False, "in the last digit"),
        (369.0, False, "in the last digit"),
    ],
)
def test_a_cost_agrees_to_a_unit_of_the_last_digit(value, agrees, why):
    assert _agreement(Printed(value=369.2), Figure(value), GB, True, "")[1:] == (agrees, why)


def test_a_cost_that_is_denied_is_shown_with_the_digit_that_decides():
    """45.8 and 45.9 are a unit apart, which is allowed; 45.92 is more."""
    recipe = Recipe(
        title="Costs",
        where="table 3",
        columns={"gb": GB},
        rows={
            "denied": {"method": "local", "printed": {"gb": 45.8}},
            "far": {"method": "local", "printed": {"gb": 45.2}},
            "allowed": {"method": "local", "printed": {"gb": 45.87}},
            "not printed": {"method": "local"},
        },
    )
    known = SimpleNamespace(figure=lambda *_: Figure(45.92), no_claim=lambda *_: "")
    found = lines(recipe, cells(recipe, list(recipe.rows), known))
    assert [(line["ours"], line["difference"], line["agrees"]) for line in found] == [
        ("45.92", "+0.12", "NO"),
        ("45.9", "+0.7", "NO"),
        ("45.9", "+0.1", "yes (to the digit)"),  # 0.05
        ("45.9", "–", "–"),  # of a row without printed figures all are shown
    ]


@pytest.mark.parametrize(
    ("paper", "ours", "agrees"),
    [
        ((1000, True), (1000, True), True),
        ((1000, True), (300, True), None),
        ((1000, True), (700, False), False),
        ((700, False), (1000, True), False),
        ((700, False), (600, True), None),  # it may still get there
        ((1000, True), (1200, False), None),
    ],
)
def test_targets_that_were_not_reached(paper, ours, agrees):
    printed, found = Printed(value=paper[0], is_bound=paper[1]), Figure(ours[0], is_bound=ours[1])
    assert _agreement(printed, found, ACCURACY, False, "")[:2] == (None, agrees)


def test_a_bound_is_judged_beyond_the_spread_and_over_all_seeds():
    def agrees(paper, ours):
        return _agreement(paper, ours, ACCURACY, False, "")[1:]

    printed = Printed(value=700, spread=50)
    assert agrees(printed, Figure(740, None, 3, True, 2))[0] is None
    assert agrees(printed, Figure(760, None, 3, True, 2))[0] is False
    assert agrees(Printed(value=1000, is_bound=True), Figure(1000, None, 3, True, 1))[0] is None  # one got there
    for early in (Figure(1000, None, 1, True, 0, is_early=True), Figure(900, 1.0, 2, is_early=True)):
        assert agrees(printed, early) == (None, "stopped early")
    assert format_ours(Figure(556.3, None, 3, True, 2), 1) == ">556.3 (2 of 3 seeds)"


def test_a_run_that_stopped_early_says_so():
    short = run(0, [(1, 0.5)], mean=0.5)
    short.config["rounds"] = 3
    assert of_runs("accuracy", [short], {}).is_early
    short.config["rounds"] = 1
    assert not of_runs("accuracy", [short], {}).is_early


def test_figures_that_depend_on_evaluated_rounds_need_the_recipes():
    columns = {"to": {"measure": "rounds_to:70", "title": "x"}, "accuracy": ACCURACY}
    printed = {"to": [2, 1], "accuracy": [70, 10]}
    own = recipe(columns=columns, rows={"m": {"method": "fedavg", "printed": printed}}, averages={}, settings={})
    often, seldom = (run(seed, [(1, 0.5), (2, 0.7)], mean=0.7) for seed in (0, 1))
    often.config["eval_every"], seldom.config["eval_every"] = 1, 2

    def found(*runs):
        return {one.column: one for one in cells(own, ["m"], Known({"m": runs}, {}, {}, {"m": 1}))}

    both = found(seldom, often)
    assert (both["to"].ours.seeds, both["accuracy"].ours.seeds) == (1, 2)  # seeds are not mixed
    assert both["to"].agrees
    other = found(seldom)
    assert (other["to"].agrees, other["to"].why) == (None, "evaluated every 2 rounds, not 1")
    assert other["accuracy"].agrees


def test_what_is_never_judged():
    columns = {
        "gain": {"measure": "gain", "title": "x"},
        "accuracy": {"measure": "accuracy", "title": "x", "comparable": False},
    }
    row = {"method": "fedavg", "against": "m", "printed": {"gain": [0, 1], "accuracy": [70, 1]}}
    own = recipe(columns=columns, rows={"m": row}, averages={}, settings={})
    found = cells(own, ["m"], Known({"m": [run(0, [], mean=0.7)]}, {}, {}))
    assert [(one.agrees, one.why) for one in found] == [(None, "compared with itself"), (None, "not comparable")]
    assert all(one.ours is not None for one in found)


def test_the_spread_over_turns_is_shown_where_there_is_one_seed():
    timed = run(0, [], mean=0.7)
    timed.view.search_time = {"ratio": 0.1, "ratio_sd": 0.02, "train_seconds": 2.0, "train_sd": None}
    assert of_runs("search_time_ratio", [timed], {}) == Figure(pytest.approx(10.0), pytest.approx(2.0))
    assert of_runs("train_time", [timed], {}) == Figure(2.0)
    assert of_runs("search_time_ratio", [timed, timed], {}).spread == 0


def test_a_printed_figure_may_have_its_own_digits():
    column, rows = (
        Column(measure="traffic_gb", title="GB", digits=4),
        {"m": {"method": "fedavg", "printed": {"gb": "0.8"}}},
    )
    read = recipe(columns={"gb": column}, rows=rows, averages={}, settings={}).rows["m"].printed["gb"]
    assert (read.value, read.digits) == (0.8, 1)
    assert format_printed(read, 4) == "0.8"
    assert _agreement(read, Figure(0.7887), column, True, "")[1:] == (True, "to the digit")
    assert _agreement(read, Figure(0.69), column, True, "")[1] is False
    assert _agreement(Printed(value=0.8), Figure(0.7887), column, True, "")[1] is False  # 0.8000


def test_figures_as_text():
    assert format_printed(Printed(value=1000, is_bound=True), 0) == ">1,000"
    assert format_printed(Printed(value=88.2, spread=0.4), 1) == "88.2 ± 0.4"
    assert format_ours(Figure(88.24, 0.36, 3), 1) == "88.2 ± 0.4 (3 seeds)"
    assert format_ours(Figure(10, None, 2, is_bound=True), 0) == ">10 (2 seeds)"
    assert format_ours(None, 1) == "–"


def run(seed, curve, **accuracy):
    """What measures read of a run."""
    summary = {"accuracy": accuracy, "rounds": curve[-1][0] if curve else 0}
    view = SimpleNamespace(point="received", seed=seed, weighted_curves={"received": curve}, summary=summary)
    return SimpleNamespace(config={"seed": seed}, view=view, curve=lambda point: curve, summary=summary)


def test_rounds_to_a_target_are_a_bound_if_a_seed_does_not_get_there():
    quick, slow = run(0, [(1, 0.5), (2, 0.7), (3, 0.6)]), run(1, [(1, 0.5), (2, 0.6), (3, 0.65)])
    assert of_runs("rounds_to:70", [quick], {}) == Figure(2.0)
    assert of_runs("rounds_to:70", [quick, slow], {}) == Figure(2.5, None, 2, is_bound=True, reached=1)
    assert of_runs("accuracy_best", [quick, slow], {}).value == pytest.approx(67.5)


def test_relative_measures_pair_runs_by_seed():
    own = [run(0, [], mean=0.8, weighted=0.7), run(1, [], mean=0.9, weighted=0.8)]
    other = {1: run(1, [], mean=0.6, weighted=0.9)}
    assert of_runs("gain", own, other) == Figure(pytest.approx(30.0))  # seed 0 has no partner
    assert of_runs("weighted_gain", own, other) == Figure(pytest.approx(-10.0))
    assert of_runs("drop", own, other) == Figure(pytest.approx(10.0))
    assert of_runs("gain", own, {}) is None


def test_relative_rounds_are_to_a_share_of_each_runs_own_final_accuracy():
    own = run(0, [(1, 0.2), (2, 0.4), (3, 0.41), (4, 0.5)])
    other = run(0, [(1, 0.8), (2, 0.9), (4, 1.0)])
    assert of_runs("relative_rounds:0.8", [own], {0: other}) == Figure(2.0)


def test_measures_are_found_and_refused():
    assert find("flops:1e14")[1] == "1e14"
    assert find("parameters")[1] == ""
    assert find("parameters:1e6")[1] == "1e6"
    for wrong in ("flops", "flops:x", "accuracy:3", "rounds_to", "acuracy"):
        with pytest.raises(SparsonaError):
            find(wrong)
    for name, measure in MEASURES.items():
        assert sum(one is not None for one in (measure.of_cost, measure.of_options, measure.of_run)) == 1, name


def recipe(**changes):
    values = {
        "title": "x",
        "where": "table 9",
        "columns": {"gb": GB, "accuracy": ACCURACY},
        "settings": {"a": {"data": "cifar10"}, "b": {"data": "cifar100"}, "c": {"data": "digits"}},
        "rows": {f"{setting}/m": {"method": "fedavg"} for setting in "ab"}
        | {"c/m": {"method": "fedavg", "stand_in": "b"}},
        "averages": {"m": {"accuracy": 50.0}},
    }
    return Recipe(**{**values, **changes})


def test_a_mean_over_settings_needs_all_of_them_and_leaves_stand_ins_out():
    own, runs = recipe(), {"a/m": [run(0, [], mean=0.4)], "b/m": [run(0, [], mean=0.5)], "c/m": [run(0, [], mean=0.9)]}
    (found,) = (one for one in cells(own, list(own.rows), Known(runs, {}, {})) if one.row == "average/m")
    assert found.ours == Figure(pytest.approx(45.0))
    assert found.difference == pytest.approx(-5)
    assert lines(own, [found])[0]["row"] == "average/m"
    del runs["b/m"]
    (found,) = (one for one in cells(own, list(own.rows), Known(runs, {}, {})) if one.row == "average/m")
    assert found.ours is None
    assert not [one for one in cells(own, ["c/m"], Known(runs, {}, {})) if one.row == "average/m"]


def test_printed_costs_of_fedspa_to_the_digit():
    """Table 1, CIFAR-10, IID; a client's examples follow from what is held back."""
    options = {"data": "cifar10", "model": "vgg11", "clients": 100, "per_round": 10, "rounds": 1000, "batch_size": 128}
    columns = {"gb": GB, "flops": {"measure": "flops:1e14", "title": "FLOPs", "digits": 1}}
    rows = {
        "fedspa": {"method": "fedspa", "printed": {"gb": 369.2, "flops": 172.9}},
        "rsm": {"method": "fedspa-rsm", "quirks": ["phantom-screening"], "printed": {"gb": 369.2, "flops": 172.9}},
        "held": {"method": "fedspa", "options": {"validation_rate": 0.5}, "printed": {"gb": 369.2, "flops": 172.9}},
    }
    own = recipe(options={**options, "validation_rate": 0.0}, columns=columns, rows=rows, averages={})
    costs = {name: row_cost(own, name, {}) for name in own.rows}
    found = {(one.row, one.column): one.agrees for one in cells(own, list(own.rows), Known({}, costs, {}))}
    assert found == {(row, column): (row, column) != ("held", "flops") for row in rows for column in columns}
    assert (costs["fedspa"]["samples"], costs["held"]["samples"]) == (500, 250)


def test_flops_are_unknown_where_clients_sizes_are():
    own = recipe(rows={"x": {"method": "fedavg", "options": {"data": "femnist"}}}, averages={})
    report = row_cost(own, "x", {})
    assert report["total"]["flops"] is None
    assert report["total"]["comm_gb"] > 0


def test_rows_are_selected_as_files_are():
    own = recipe()
    assert select(own, "*/m", "x") == ["a/m", "b/m", "c/m"]
    assert select(own, "[ab]/*", "x") == ["a/m", "b/m"]
    with pytest.raises(SparsonaError, match=r"(?s)called 'A/m'.*a/m, b/m, c/m"):
        select(own, "A/m", "x")


def test_rows_come_after_those_they_start_from():
    chain = {
        "a": {"method": "fedavg", "warm_start": "b", "against": "d"},
        "b": {"method": "fedavg", "warm_start": "c"},
        "c": {"method": "fedavg"},
        "d": {"method": "fedavg"},
    }
    assert with_needed(recipe(rows=chain, averages={}), ["a"]) == ["c", "b", "a", "d"]
    with pytest.raises(ValueError, match="names another row"):
        recipe(rows={"a": {"method": "fedavg", "against": "z"}})


def test_what_a_scale_changes():
    full = {"method": "fedavg", "clients": 100, "per_round": 10, "rounds": 1000, "eval_every": 50}
    assert scaled(RunConfig(**full), 0.1) == {
        "rounds": 100,
        "eval_every": 5,
        "clients": 10,
        "data_rate": 0.1,
        "min_size": 5,
        "per_round": 2,
    }
    least = scaled(RunConfig(**full, lr_schedule="halving:300", novel=20, eval_clients=50), 0.001)
    assert (least["rounds"], least["clients"], least["per_round"]) == (2, 5, 2)
    assert (least["lr_schedule"], least["novel"], least["eval_clients"]) == ("halving:1", 1, 2)
    peers = scaled(RunConfig(method="dispfl", clients=100, rounds=500, graph="random:10:bounded"), 0.01)
    assert (peers["graph"], peers["clients"], peers["rounds"]) == ("random:3:bounded", 4, 5)
    writers = scaled(RunConfig(method="fedavg", data="femnist", partition="natural", per_round=50), 0.1)
    assert (writers["clients"], writers["per_round"]) == (10, 5)
    assert "data_rate" not in writers
    everybody = scaled(make_config("fedavg", {"preset": "pfedgate", "data": "femnist"}), 0.1)
    assert everybody["clients"] == 54
    assert "per_round" not in everybody  # all of them, also where some are novel


def test_training_is_counted_over_the_examples_that_are_trained_on():
    """The preset leaves out a last batch that is not full: 104 of 360 examples."""
    options = {"data": "cifar10", "model": "pfedgate-cifar10", "preset": "pfedgate"}
    report = row_cost(recipe(rows={"x": {"method": "fedavg", "options": options}}, averages={}), "x", {})
    assert (report["samples"], report["trained"]) == (360, 256)
    assert MEASURES["dense_multiple"].of_cost(report, None, "train") == pytest.approx(2.0)


def test_people_read_a_row_s_name_once():
    found = [{"row": row, "figure": figure} for row, figure in [("a", "GB"), ("a", "%"), ("b", "GB"), ("a", "GB")]]
    assert [line["row"] for line in named_once(found)] == ["a", "", "b", "a"]
    assert [line["figure"] for line in named_once(found)] == ["GB", "%", "GB", "GB"]
    assert named_once([]) == []
