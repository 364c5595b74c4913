"""What a comparison says in one sentence, and what its methods were not given alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from sparsona.analysis.answer import answer, differing
from sparsona.analysis.view import RunView

MakeView = Callable[..., RunView]


def with_result(view: RunView, accuracy: float | None, sent: int) -> RunView:
    summary = view.summary | {"accuracy": view.summary["accuracy"] | {"mean": accuracy}, "bytes": {"total": sent}}
    return dataclasses.replace(view, summary=summary)


def test_the_best_and_who_comes_near_with_less(make_view: MakeView) -> None:
    views = [
        with_result(make_view("Local"), 0.80, 0),
        with_result(make_view("FedAvg-FT"), 0.949, 1000),
        with_result(make_view("FedSpa (RSM)"), 0.90, 300),
        with_result(make_view("FedSpa (DST)"), 0.911, 540),
    ]
    assert answer(views) == (
        "FedAvg-FT serves clients best, 94.9%; FedSpa (DST) reaches 91.1% with 54% of the traffic "
        "(one seed: no spread is known)."
    )
    assert answer(views[::-1]) == answer(views)


def test_a_best_method_that_sends_nothing_or_least(make_view: MakeView) -> None:
    local, spa = with_result(make_view("Local"), 0.95, 0), with_result(make_view("FedSpa (DST)"), 0.9, 500)
    assert answer([local, spa]).startswith("Local serves clients best, 95.0%, and sends nothing; next is FedSpa (DST)")
    local = with_result(local, 0.8, 0)
    assert answer([local, spa]).startswith("FedSpa (DST) serves clients best, 90.0%; next is Local, 80.0%")


def test_less_traffic_is_no_merit_where_sending_nothing_does_better(make_view: MakeView) -> None:
    views = [
        with_result(make_view("Local"), 0.882, 0),
        with_result(make_view("FedAvg-FT"), 0.999, 1000),
        with_result(make_view("FedSpa (DST)"), 0.801, 490),
    ]
    assert answer(views) == (
        "FedAvg-FT serves clients best, 99.9%; Local reaches 88.2% and sends nothing (one seed: no spread is known)."
    )


def test_seeds_that_leave_it_open(make_view: MakeView) -> None:
    views = [
        with_result(make_view(title, seed), mean, sent)
        for title, sent, means in (("FedAvg-FT", 1000, (0.92, 0.90, 0.91)), ("FedSpa (DST)", 500, (0.90, 0.92, 0.90)))
        for seed, mean in zip((1, 2, 3), means, strict=True)
    ]
    assert answer(views) == (
        "FedAvg-FT serves clients best, 91.0%, though not clearly better than FedSpa (DST), "
        "which reaches 90.7% with 50% of the traffic."
    )
    clear = [with_result(view, 0.5 + 0.001 * view.seed, 500) if "Spa" in view.title else view for view in views]
    assert "not clearly" not in answer(clear)


def test_equal_results_are_said_to_be_equal(make_view: MakeView) -> None:
    views = [
        with_result(make_view("FedAvg"), 0.8, 1000),
        with_result(make_view("FedAvg-FT"), 0.9, 1000),
        with_result(make_view("FedSpa (DST)"), 0.9, 500),
    ]
    one_seed = " (one seed: no spread is known)."
    text = "FedSpa (DST) and FedAvg-FT serve clients equally well, 90.0%; FedSpa (DST) sends the least of these, 500 B"
    assert answer(views) == answer(views[::-1]) == text + one_seed
    alike = [*views[:1], with_result(views[1], 0.90003, 1000), views[2]]  # as the table prints them
    assert answer(alike) == text + one_seed
    near = [*views[:1], with_result(views[1], 0.9003, 1000), views[2]]  # the table prints 90.03 and 90.00
    assert answer(near).startswith("FedAvg-FT serves clients best, 90.03%; FedSpa (DST) reaches 90.00% with 50% of")
    same = [with_result(view, view.summary["accuracy"]["mean"], 1000) for view in views]
    assert answer(same).endswith("equally well, 90.0%; next is FedAvg, 80.0%" + one_seed)
    assert answer([with_result(view, 0.9, 0) for view in views[:2]]).endswith("equally well, 90.0%" + one_seed)


def test_runs_that_have_not_finished_are_said_first(make_view: MakeView) -> None:
    best = with_result(make_view("FedAvg-FT"), 0.9, 1000)
    other = dataclasses.replace(with_result(make_view("FedSpa (DST)", rounds=40), 0.5, 300), unfinished_at=7)
    assert answer([other]).startswith("Not finished (round 7 of 40): FedSpa (DST) serves clients with 50.0%")
    assert answer([best, other]).startswith("Not finished (1 of 2 runs): FedAvg-FT serves clients best so far, 90.0%")


def test_one_run_and_none(make_view: MakeView) -> None:
    text = answer([with_result(make_view("FedAvg"), 0.5, 2000)])
    assert text == "FedAvg serves clients with 50.0% on average, 2.00 kB sent."
    assert answer([with_result(make_view("FedAvg"), None, 0)]) == ""


def test_what_differs_in_training(make_view: MakeView) -> None:
    one = make_view("Local", options={"lr": 0.1, "epochs": 5, "gate_lr": 0.2}, batch_size=16, eval_every=1)
    other = make_view("FedAvg", options={"lr": 0.01, "epochs": 5}, batch_size=32, eval_every=5)
    assert differing([one, other]) == ["lr 0.1 (Local), 0.01 (FedAvg)", "batch_size 16 (Local), 32 (FedAvg)"]
    assert differing([one]) == []
