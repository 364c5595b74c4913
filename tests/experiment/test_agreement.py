"""What sides of a run agree on: complete, and enough to make the same config again."""

from __future__ import annotations

import pytest

from sparsona.experiment.agreement import agree
from sparsona.experiment.build import make_config
from sparsona.methods import METHODS, card
from sparsona.runs.options import OPTIONS


@pytest.mark.parametrize("method", METHODS)
def test_what_is_agreed_on_makes_the_same_config_again(method):
    needed = {"tune_epochs": 2} if card(method).needs_tuning else {}
    run = agree(method, needed, model="cnn28", classes=10)
    others = {key: value for key, value in run.items() if key in OPTIONS and key != "model"}
    again = agree(run["method"], {**others, **run["options"]}, model=run["model"], classes=10)
    assert {**again, "points": None} == {**run, "points": None}  # the headline is one of them, perhaps twice
    assert set(again["points"]) == set(run["points"])
    config = make_config(run["method"], {**others, **run["options"], "clients": 7, "model": run["model"]})
    assert (config.options, config.rounds, config.model) == (run["options"], run["rounds"], "cnn28")


def test_agreements_of_other_kinds():
    run = agree("fedavg", {"lr_schedule": "constant"}, model="transformer", classes=10_004)
    assert (run["predicts"], run["input"]) == ("tokens", [20])
    assert "lr_decay" not in run
    again = {key: value for key, value in run.items() if key in OPTIONS and key != "model"}
    assert agree("fedavg", again, model="transformer", classes=10_004)["lr_schedule"] == "constant"
    many = agree("fedavg", {"per_round": 500}, model="mlp", classes=1, input_shape=(7,), predicts="numbers")
    assert (many["per_round"], many["predicts"], many["input"]) == (500, "numbers", [7])  # of clients yet to come
