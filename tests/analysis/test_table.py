"""Units, columns, groups and differences."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from sparsona.analysis.answer import differing
from sparsona.analysis.columns import COLUMNS, columns_for
from sparsona.analysis.format import UNKNOWN, cut, human_bytes, human_flops, human_seconds, plural
from sparsona.analysis.groups import group_views, pairs
from sparsona.analysis.numbers import numbers, to_latex, to_markdown, to_text
from sparsona.analysis.table import class_rows, differences, figures, notes, round_notes, rows, table
from sparsona.analysis.view import RunView
from sparsona.report.notebook import results_html
from sparsona.runs.failed import FailedRun


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.6, "1.00 kB"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_996, "10.0 kB"),
        (99_960, "100 kB"),
        (999_600, "1.00 MB"),
        (61_300_000, "61.3 MB"),
        (4.2e18, "4200 PB"),
    ],
)
def test_bytes(value: float, text: str) -> None:
    assert human_bytes(value) == text


def test_flops() -> None:
    assert [human_flops(v) for v in (0, 4.2e8, 9.61e12)] == ["0 FLOP", "420 MFLOP", "9.61 TFLOP"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.25, "0.25 s"),
        (12.34, "12.3 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599.7, "1 h 00 min"),
        (3720, "1 h 02 min"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert human_seconds(value) == text


def with_accuracy(view: RunView, **accuracy: float | None) -> RunView:
    summary = view.summary | {"accuracy": view.summary["accuracy"] | accuracy}
    return dataclasses.replace(view, summary=summary)


def test_rows_have_a_text_for_every_column(make_comparison: Callable[..., list[RunView]]) -> None:
    found = rows(make_comparison(seeds=2))
    assert [row["method"] for row in found] == ["Local", "FedAvg", "FedAvg-FT", "FedSpa (DST)", "FedSpa (RSM)"]
    # The clients of these runs differ in their number of test examples; all were run alike.
    kinds = ("always", "if uneven", "if alike")
    always = [column.title for column in COLUMNS if column.shown in kinds and column.task != "numbers"]
    hurt = ["hurt vs Local", "hurt vs FedAvg"]
    assert all([title for title in row if title not in hurt] == ["method", *always] for row in found)
    assert all(set(hurt) < set(row) for row in found)
    assert found[2]["last 10"] == "–"  # tuned once, at the end
    assert found[3]["bytes up"] == "32.2 MB"


def test_clients_hurt_are_those_below_the_baseline(make_view: Callable[..., RunView]) -> None:
    views = [make_view(title, seed) for title in ("Local", "FedSpa (DST)") for seed in (1, 2)]
    hurt = [
        int((b.correct / b.count < a.correct / a.count - 1e-9).sum()) for a, b in zip(views, views[2:], strict=False)
    ]
    local, fedspa = figures(views)
    assert local["hurt_against_local"]["mean"] is None
    assert fedspa["hurt_against_local"]["mean"] == sum(hurt) / 2
    assert "hurt_against_fedavg" not in fedspa  # not in this comparison
    others = dataclasses.replace(views[2], sizes=views[2].sizes + 1)
    assert "hurt vs Local" not in rows([views[0], others])[0]  # not the same clients


def test_unequal_work_is_noted_where_nothing_was_matched(make_view: Callable[..., RunView]) -> None:
    def with_steps(title: str, steps: int, **config: object) -> RunView:
        view = make_view(title, **config)
        return dataclasses.replace(view, summary=view.summary | {"steps": {"total": steps}})

    equal = [with_steps("Local", 100), with_steps("FedAvg", 120)]
    assert notes(equal) == []
    (note,) = notes([*equal, with_steps("FedSpa (DST)", 1210)])
    assert "in local steps: FedSpa (DST) 1,210, but Local 100." in note
    (note,) = notes([*equal, with_steps("FedSpa (DST)", 1210), with_steps("FedAvg-FT", 2000)])
    assert "FedAvg-FT 2,000 and FedSpa (DST) 1,210, but Local 100." in note
    matched = {"by": "flops", "to": "Local", "rounds": 9, "budget": 7, "exact": True}
    assert notes([equal[0], with_steps("FedAvg", 1210, matched=matched)]) == []
    # Ditto takes a step of two models where FedAvg takes one of one.
    by_steps = [make_view(title, matched=matched | {"by": "steps"}) for title in ("Local", "FedAvg", "FedSpa (DST)")]
    flops = (1e9, 1.1e9, 2e9)
    views = [
        dataclasses.replace(
            view, summary=view.summary | {"flops": {"train": spent, "mask_search": 0}, "steps": {"total": 9}}
        )
        for view, spent in zip(by_steps, flops, strict=True)
    ]
    (note,) = notes(views)
    assert "not equal work. Training took Local 1.00 GFLOP, FedAvg 1.10 GFLOP, FedSpa (DST) 2.00 GFLOP." in note
    assert notes(views[:2]) == []
    assert notes([make_view("Local"), make_view("FedAvg")]) == []  # not known
    assert notes([dataclasses.replace(equal[0], unfinished_at=7), with_steps("FedAvg", 1210)]) == [
        "Local has not finished: round 7 of 50."  # it was to train longer
    ]


def test_clients_that_never_trained_are_noted(make_view: Callable[..., RunView]) -> None:
    def with_untrained(title: str, num: int, seed: int = 0) -> RunView:
        view = make_view(title, seed=seed)
        block = {"untrained": {"clients": num, "of": 30}} if num else {}
        return dataclasses.replace(view, summary=view.summary | block)

    end = "trained in no round (not sampled, or their turns were lost): they are scored with the model that they "
    end += "received or began with."
    both = [with_untrained("Local", 6), with_untrained("FedAvg", 6)]
    assert notes(both) == [f"6 of 30 clients {end}"]
    assert notes([both[0], with_untrained("FedAvg-FT", 0)]) == [f"6 of 30 clients (Local) {end}"]
    assert notes([both[0], with_untrained("Local", 4, seed=1)]) == [f"Up to 6 of 30 clients {end}"]


def test_every_form_of_the_table_says_what_its_reader_must_know(make_view: Callable[..., RunView]) -> None:
    views = [
        dataclasses.replace(view, summary=view.summary | {"steps": {"total": steps}})
        for view, steps in ((make_view("Local"), 9_175), (make_view("FedAvg"), 18_350))
    ]
    failed = FailedRun("Ditto", 1, "ditto-1", "training diverged\nin round 3")
    assert notes(views, [failed]) == ["Ditto (ditto-1) failed: training diverged.", *notes(views)]
    said = "did not train equally long, in local steps: FedAvg 18,350, but Local 9,175."
    text, page = to_text(views, missing=[failed]), results_html(views, [failed])
    assert said in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 100
    assert said in page
    assert "`" not in page
    assert said in to_markdown(views, missing=[failed]).replace("\\", "")
    latex = to_latex(views, missing=[failed]).splitlines()
    assert latex[0] == ("% digits, dirichlet:0.3; the data's usual network; 2 methods; 1 seed; 20 clients; 50 rounds")
    assert said in latex[2]
    assert latex[1] == "% Ditto (ditto-1) failed: training diverged."
    assert latex[3] == r"% This table needs \usepackage{booktabs}."
    assert latex[4].startswith(r"\begin{tabular}")
    assert "Ditto (ditto-1) failed" in text + page
    assert r"Ditto (ditto-1) failed" in to_markdown(views, missing=[failed])


def test_it_is_said_why_there_is_no_column_of_seconds(make_view: Callable[..., RunView]) -> None:
    """As after resuming with other --jobs: what chooses an executor by itself goes by what runs beside it."""
    alike = [make_view("Local", executor="serial"), make_view("FedAvg", executor="serial")]
    assert "seconds" in rows(alike)[0]
    assert notes(alike) == []
    different = [alike[0], make_view("FedAvg", executor="workers", device="cpu")]
    assert "seconds" not in rows(different)[0]
    said = "There is no column of seconds: runs were executed in different ways (serial, workers on cpu)."
    assert notes(different) == [said]


def test_accuracy_is_mean_and_spread_in_percent(make_view: Callable[..., RunView]) -> None:
    views = [with_accuracy(make_view(seed=seed), mean=mean) for seed, mean in ((1, 0.90), (2, 0.92))]
    assert rows(views)[0]["accuracy"] == "91.00 ± 1.41%"
    assert rows(views[:1])[0]["accuracy"] == "90.00%"


def test_figures_of_a_column_have_as_many_decimals(make_view: Callable[..., RunView]) -> None:
    def shown(*means: float) -> list[str]:
        views = []
        for title, mean in zip(("Local", "FedAvg", "FedSpa (RSM)"), means, strict=True):
            view, judged = make_view(title), {"rmse": {"mean": mean, "clients": 20, "tested": 20}}
            views.append(dataclasses.replace(view, summary=view.summary | {"metrics": judged}))
        return [row["RMSE"] for row in rows(views)]

    assert shown(10.2, 10.88, 8.922) == ["10.20", "10.88", "8.92"]
    assert shown(10.2, 1018, 0.5) == ["10.2", "1018", "0.5"]  # of so different sizes each has digits of its own
    assert shown(0.00031234, 0.0002, 0.0001) == ["0.0003123", "0.0002", "0.0001"]
    assert shown(21_234.5, 10_000, 9_999.5) == ["21234", "10000", "10000"]


def test_the_best_is_marked_and_ties_share_it(make_view: Callable[..., RunView]) -> None:
    def best(*means: float) -> list[bool]:
        titles = ["Local", "FedAvg", "FedSpa (RSM)"]
        views = [with_accuracy(make_view(title), mean=mean) for title, mean in zip(titles, means, strict=False)]
        return [row.cells[0].best for row in table(views)]

    assert best(0.9, 0.8, 0.7) == [True, False, False]
    assert best(0.9, 0.90000001, 0.7) == [True, True, False]
    assert best(0.9, 0.9, 0.9) == [False, False, False]
    assert best(0.9) == [False]


def test_what_has_not_finished_is_said_and_is_never_the_best(make_view: Callable[..., RunView]) -> None:
    first, second = make_view("FedAvg-FT", 1), make_view("FedAvg-FT", 2)
    cheap = dataclasses.replace(make_view("FedSpa (DST)", 1), unfinished_at=3)
    views = [first, second, cheap, dataclasses.replace(make_view("FedSpa (DST)", 2), unfinished_at=5)]
    sent = {column.name: place for place, column in enumerate(columns_for(views))}["bytes_total"]
    over = [dataclasses.replace(view, unfinished_at=None) for view in views]
    assert [row.cells[sent].best for row in table(over)] == [False, True]
    assert [row.cells[sent].best for row in table(views)] == [False, False]
    assert notes(views)[0] == "FedSpa (DST): 2 of 2 runs have not finished: rounds 3 of 50, 5 of 50."
    assert notes([first, cheap])[0] == "FedSpa (DST) has not finished: round 3 of 50."
    assert "\n% FedSpa (DST): 2 of 2 runs have not finished" in to_latex(views)
    for per in ("method", "client"):
        assert {line["method"]: line["unfinished"] > 0 for line in numbers(views, per)} == {
            "FedAvg-FT": False,
            "FedSpa (DST)": True,
        }
        assert not any("unfinished" in line for line in numbers(over, per))
    assert round_notes(over) == []
    assert to_latex(over).count("%") == 2 + to_latex(over).count(r"\%")  # what it is of, and its package


def test_unequal_numbers_of_rounds_are_said(make_view: Callable[..., RunView]) -> None:
    """Unless the work of a round was matched, so that rounds differ on purpose."""
    views = [make_view("FedAvg", 1, rounds=30), make_view("FedAvg", 2, rounds=34), make_view("FedSpa (DST)", rounds=34)]
    said = "Not all runs had the same number of rounds: FedAvg 30 and 34, FedSpa (DST) 34."
    assert round_notes(views) == notes(views)[:1] == [said]
    assert f"\n% {said}\n% This table needs" in to_latex(views)
    assert to_markdown(views).endswith(f" |\n\n{said}\n")
    matched = [
        dataclasses.replace(view, config={**view.config, "matched": {"by": "flops", "budget": None}}) for view in views
    ]
    assert round_notes(matched) == []
    assert to_markdown(matched).endswith(" |\n")


def test_gaps_have_a_sign_and_their_spread_has_none(make_view: Callable[..., RunView]) -> None:
    def with_gap(title: str, seed: int, right: int) -> RunView:
        view = make_view(title, seed)
        train, test = (np.full(len(view.count), num) for num in (right, 50))
        count = np.full(len(view.count), 100)
        novel = (np.array([60 - seed]), np.array([100]))
        results = {view.point: (test, count), f"{view.point}/train": (train, count), "novel": novel}
        return dataclasses.replace(view, results=results)

    views = [with_gap("FedAvg", 0, 48), with_gap("FedAvg", 1, 49), with_gap("Local", 0, 50)]
    first, second = rows(views)
    assert (first["train − test"], second["train − test"]) == ("−1.50 ± 0.71", "0.00")
    assert first["novel gap"] == "−9.50 ± 0.71"
    places = [i for i, column in enumerate(columns_for(views)) if column.name in ("train_test_gap", "novel_gap")]
    assert len(places) == 2
    # A gap below 0 is no better than one of 0.
    assert not any(row.cells[place].best for row in table(views) for place in places)


def test_fewer_bytes_are_better(make_comparison: Callable[..., list[RunView]]) -> None:
    up = [column.title for column in columns_for(make_comparison(seeds=1))].index("bytes up")
    assert [row.cells[up].best for row in table(make_comparison(seeds=1)[1:])] == [False, False, True, True]


def test_differences_are_paired_by_seed(make_view: Callable[..., RunView]) -> None:
    local = [with_accuracy(make_view("Local", seed), mean=mean) for seed, mean in ((1, 0.80), (2, 0.70), (3, 0.60))]
    # Given in another order, and with a seed that Local lacks: 0.82 - 0.80, 0.72 - 0.70.
    spa = [with_accuracy(make_view("FedSpa (RSM)", seed), mean=mean) for seed, mean in ((2, 0.72), (4, 0.1), (1, 0.82))]
    (found,) = differences([with_even_tests(view) for view in local + spa])
    assert found == {"method": "FedSpa (RSM)", "difference": "+2.00", "interval": "+2.00 to +2.00", "seeds": "2"}


def with_even_tests(view: RunView) -> RunView:
    return dataclasses.replace(view, count=np.full(len(view.count), 10))


def test_accuracy_weighted_by_test_size_is_printed_where_it_matters(make_view: Callable[..., RunView]) -> None:
    """And always there for programs. The difference is that of the weighted figures, which may point the other way."""
    local = [with_accuracy(make_view("Local", seed), mean=0.80, weighted=0.70) for seed in (1, 2)]
    spa = [
        with_accuracy(make_view("FedSpa (RSM)", seed), mean=0.82, weighted=weighted)
        for seed, weighted in ((1, 0.66), (2, 0.68))
    ]
    assert [row["weighted"] for row in rows(local + spa)] == ["70.00 ± 0.00%", "67.00 ± 1.41%"]
    (found,) = differences(local + spa)
    assert (found["difference"], found["weighted"]) == ("+2.00", "−3.00")
    assert found["weighted interval"] == "−15.71 to +9.71"
    even = [with_even_tests(view) for view in local + spa]
    assert "weighted" not in rows(even)[0]
    assert "weighted" not in differences(even)[0]
    assert rows(even, in_print=False)[1]["weighted"] == "67.00 ± 1.41%"
    assert differences(even, in_print=False)[0]["weighted"] == "−3.00"
    assert figures(even)[1]["accuracy_weighted"]["mean"] == pytest.approx(0.67)
    untested = dataclasses.replace(even[0], count=np.array([10] * (len(even[0].count) - 1) + [0]))
    assert "weighted" not in rows([untested])[0]  # a client that is not tested has no size


def test_one_seed_has_no_interval(make_view: Callable[..., RunView]) -> None:
    (found,) = differences([make_view("Local"), make_view("FedAvg")])
    assert found["interval"] == "one seed: no interval"


def test_runs_on_other_clients_are_not_paired(make_view: Callable[..., RunView]) -> None:
    other = dataclasses.replace(make_view("FedAvg"), label_counts=make_view(seed=9).label_counts)
    (found,) = differences([make_view("Local"), other])
    assert found["difference"] == "–"
    assert "same clients" in found["interval"]


def test_a_sweep_is_not_taken_for_seeds(make_view: Callable[..., RunView]) -> None:
    views = [make_view(seed=s, options={"density": d}) for s, d in ((1, 0.5), (2, 0.5), (1, 0.2), (3, 0.2))]
    groups = group_views(views)
    assert [group.label for group in groups] == ["FedSpa (RSM), density=0.5", "FedSpa (RSM), density=0.2"]
    assert [[view.seed for view in group.views] for group in groups] == [[1, 2], [1, 3]]
    assert [a.seed for a, _ in pairs(*groups)] == [1]


def test_what_came_from_python_is_named_in_words(make_view: Callable[..., RunView]) -> None:
    first = make_view("Local")
    changes = ({"model": "cnn", "loss": None}, {"model": "given", "loss": "given:focal"})
    views = [dataclasses.replace(first, config=first.config | change) for change in changes]
    labels = [group.label for group in group_views(views)]
    assert labels == ["Local, model=cnn", "Local, own model, loss=focal"]


def test_means_and_attackers_are_named_as_a_reader_knows_them(make_view: Callable[..., RunView]) -> None:
    first = make_view("FedAvg")
    changes = ({"mean": "mean", "attack": None}, {"mean": "median", "attack": "sign-flip:0.2"})
    views = [dataclasses.replace(first, config=first.config | change) for change in changes]
    labels = [group.label for group in group_views(views)]
    assert labels == ["FedAvg", "FedAvg, median, attack sign-flip:0.2"]
    assert differing(views) == [f"median ({labels[1]}), otherwise plain mean"]
    sent = [{"transform": []}, {"transform": ["half", "top-k:0.1"], "privacy": "central:noise=1"}]
    views = [dataclasses.replace(first, config=first.config | change) for change in sent]
    assert [group.label for group in group_views(views)] == [
        "FedAvg",
        "FedAvg, transform half + top-k:0.1, privacy central:noise=1",
    ]
    # Of a version that had no such option.
    older = [first, dataclasses.replace(first, config=first.config | {"mean": "median"})]
    assert [group.label for group in group_views(older)] == ["FedAvg", "FedAvg, median"]


def test_labels_name_what_is_set_and_what_differs_has_privacy(make_view: Callable[..., RunView]) -> None:
    usual = {"mean": "mean", "transform": [], "privacy": None, "availability": None}
    changes = ({}, {"mean": "median"}, {"transform": ["half"]}, {"privacy": "central:noise=1"}, {"availability": "x:1"})
    first = dataclasses.replace(make_view("FedAvg"), config=make_view("FedAvg").config | usual)
    local = dataclasses.replace(make_view("Local"), config=make_view("Local").config | usual)
    views = [local, *(dataclasses.replace(first, config=first.config | change) for change in changes)]
    assert [group.label for group in group_views(views)] == [
        "Local",
        "FedAvg",
        "FedAvg, median",
        "FedAvg, transform half",
        "FedAvg, privacy central:noise=1",
        "FedAvg, availability x:1",
    ]
    found = differing(views)
    assert "privacy central:noise=1 (FedAvg, privacy central:noise=1), otherwise no privacy noise" in found
    assert not any(" and " in phrase for phrase in found)
    # Two rows without a mean of their own, one of a version that had none: what is not set is named too.
    older = {name: value for name, value in first.config.items() if name != "tune_epochs"}
    alike = [dataclasses.replace(first, config=older | {"tune_epochs": one}) for one in (None, [])]
    assert [group.label for group in group_views(alike)] == ["FedAvg, tune_epochs=none", "FedAvg, tune_epochs=[]"]


def test_where_and_how_a_run_was_made_is_no_setting(make_view: Callable[..., RunView]) -> None:
    views = [make_view(seed=1, executor="serial", partition_seed=1), make_view(seed=2, executor="workers")]
    assert [group.label for group in group_views(views)] == ["FedSpa (RSM)"]


def test_the_same_seed_twice_is_two_rows(make_view: Callable[..., RunView]) -> None:
    again = dataclasses.replace(make_view(), name="again", path="elsewhere/again")
    assert [group.label for group in group_views([make_view(), again])] == [
        "FedSpa (RSM), fedspa-rsm-seed1",
        "FedSpa (RSM), again",
    ]
    namesake = dataclasses.replace(make_view(), path="elsewhere/fedspa-rsm-seed1")
    assert len({group.label for group in group_views([make_view(), namesake])}) == 2


def test_optional_columns_are_there_where_a_run_has_them(make_view: Callable[..., RunView]) -> None:
    plain, gated = make_view("FedAvg"), make_view("FedSpa (RSM)")
    gated.summary["bytes"] |= {"upload_share": 0.4567, "busiest_round_in": 1_300_000, "busiest_round_out": 2_600_000}
    without, row = rows([plain, gated])
    assert (row["uploaded"], row["busiest in"], row["busiest out"]) == ("45.67%", "1.30 MB", "2.60 MB")
    assert (without["uploaded"], without["busiest in"]) == (UNKNOWN, UNKNOWN)


def test_classes_seen_and_unseen_by_hand(make_view: Callable[..., RunView]) -> None:
    views = [make_view("FedAvg", seed) for seed in (1, 2)]
    assert class_rows(views) == []
    for view, mean in zip(views, (0.5, 0.7), strict=True):
        seen = {"mean": 0.9, "weighted": 0.8, "clients": 20, "examples": 1000}
        view.summary["classes"] = {"seen": seen, "unseen": {"mean": mean, "weighted": 0.1, "clients": 3, "examples": 8}}
    (printed,) = rows(views)
    assert (printed["seen"], printed["unseen"]) == ("90.00 ± 0.00%", "60.00 ± 14.14%")
    (row,) = class_rows(views)
    assert row["seen"] == "90.00 ± 0.00% (2,000 examples of 40 clients)"
    assert row["unseen"] == "60.00 ± 14.14% (16 examples of 6 clients)"
    nobody = {"mean": None, "weighted": None, "clients": 0, "examples": 0}
    views[0].summary["classes"]["unseen"] = views[1].summary["classes"]["unseen"] = nobody
    assert class_rows(views) == []
    assert not {"seen", "unseen"} & set(rows(views)[0])


def test_a_column_is_read_by_text_and_by_json_alike(make_view: Callable[..., RunView]) -> None:
    views = [with_accuracy(make_view(seed=seed), mean=mean) for seed, mean in ((1, 0.90), (2, 0.92))]
    (found,) = figures(views)
    assert found["accuracy_mean"] == pytest.approx({"mean": 0.91, "spread": 0.02 / 2**0.5})
    assert (found["method"], found["seeds"]) == ("FedSpa (RSM)", 2)
    shown = columns_for(views)
    assert list(found)[3:] == [column.name for column in shown]
    assert list(rows(views)[0])[1:] == [column.title for column in shown]
    assert len({column.name for column in COLUMNS}) == len(COLUMNS)


def test_counts_and_cuts() -> None:
    assert [plural(n, noun) for n, noun in ((1, "client"), (2, "client"), (3, "class"))] == [
        "1 client",
        "2 clients",
        "3 classes",
    ]
    assert [cut("abcdef", most) for most in (6, 5)] == ["abcdef", "abcd…"]
    assert human_bytes(446_861_000, digits=4) == "446.9 MB"
