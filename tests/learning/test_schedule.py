"""Learning-rate schedules: what each round's factor is, and what is no schedule."""

from __future__ import annotations

import pytest

from sparsona.core.errors import SparsonaError
from sparsona.engine.plan import Plan
from sparsona.experiment.build import make_config
from sparsona.learning.schedule import lr_schedule


def factors(text, rounds, decay=0.9):
    return [lr_schedule(text)(index, rounds, decay) for index in range(rounds)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("decay", [0.9**index for index in range(8)]),
        ("constant", [1.0] * 8),
        ("halving:3", [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25]),
        ("linear:0", [1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
        ("linear:0.5", [0.2, 0.4, 0.6, 0.8, 1, 0.75, 0.5, 0.25]),  # no round trains with 0
        ("linear:0.5,from-zero", [0, 0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25]),  # as the authors have it
        ("steps:0.5,0.75", [1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01]),
    ],
)
def test_factors(text, expected):
    assert factors(text, 8) == pytest.approx(expected, abs=1e-15)


def test_a_step_comes_where_the_share_is_a_whole_round_also_if_floats_say_a_little_less():
    assert factors("steps:0.29", 100).index(0.1) == 29


def test_after_the_last_round_nothing_is_negative():
    assert lr_schedule("linear:0.1")(10, 10, 1.0) == 0


@pytest.mark.parametrize(
    "text",
    [
        *("cosine", "", "decay:3", "constant:1", "halving", "halving:0", "halving:1.5", "halving:2,3", "linear"),
        *("linear:1", "linear:x", "linear:0.1,x", "linear:-0.1", "steps:", "steps:0.75,0.5", "steps:0.5,1"),
        "steps:0.5,nan",
    ],
)
def test_what_is_no_schedule(text):
    with pytest.raises(SparsonaError):
        lr_schedule(text)


def test_rounds_of_a_plan_follow_it():
    plan = Plan(rounds=4, per_round=1, batch_size=1, seed=0, lr_decay=0.5)
    assert [plan.round_at(index).lr_scale for index in range(4)] == [1, 0.5, 0.25, 0.125]
    plan = Plan(rounds=4, per_round=1, batch_size=1, seed=0, lr_schedule="halving:2")
    assert [plan.round_at(index).lr_scale for index in range(4)] == [1, 1, 0.5, 0.5]


def test_decay_and_another_schedule_are_refused_together():
    with pytest.raises(SparsonaError, match="lr_decay together with the schedule 'constant'"):
        make_config("fedavg", {"lr_decay": 0.9, "lr_schedule": "constant"})
    assert make_config("fedavg", {"lr_decay": 0.9, "lr_schedule": "decay"}).lr_decay == 0.9
    assert make_config("fedavg", {"lr_schedule": "constant"}).lr_decay == 1.0
    with pytest.raises(SparsonaError, match="cosine"):
        make_config("fedavg", {"lr_schedule": "cosine"})
