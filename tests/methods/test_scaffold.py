"""SCAFFOLD: FedAvg whose clients correct their steps by control variates."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from lenet5 import SIZE
from line_by_hand import CLIENTS, Line, weight

import sparsona as sp
from sparsona.core.errors import SparsonaError
from sparsona.core.method import Client
from sparsona.core.seeds import Seeds
from sparsona.methods import card
from sparsona.methods.fedavg import FedAvgConfig, fedavg
from sparsona.methods.scaffold import ScaffoldConfig, scaffold
from sparsona.testing import PROPERTIES, Case

BATTERY = {"scaffold": {"accuracy": 0.35}}
# c_i; the model and c as received; the model in training, and its gradient.
WITH_MEMORY = {"scaffold": {"variates": "gradient"}}
MEMORY = [("scaffold", {}, SIZE, 3 * SIZE, 5 * SIZE, 0)]
by_hand = partial(Line, scaffold, ScaffoldConfig)


def test_option_two_by_hand():
    """`line_by_hand`. The first round is FedAvg's: client 0 goes from 1 to 1.72, client 1 to 0.04, by two steps of 0.1
    each, so that c_0 = (1 - 1.72) / 0.2 = -3.6 and c_1 = 0.96 / 0.2 = 4.8: the means of its gradients -4 and -3.2, 8
    and 1.6. By examples w = 1 + (0.72 - 3 * 0.96) / 4 = 0.46, and c = (-3.6 + 3 * 4.8) / 4 = 2.7.

    Second round, client 0, corrected by 2.7 + 3.6 = 6.3: 0.46 - 0.1 * (-5.08 + 6.3) = 0.338, - 0.1 * (-5.324 + 6.3) =
    0.2404. New c_0 = -3.6 - 2.7 + (0.46 - 0.2404) / 0.2 = -5.202, the mean of -5.08 and -5.324. If client 0 alone took
    part: w = 0.2404, and c = 2.7 + (-5.202 + 3.6) / 4 = 2.2995, the mean of -5.202 and three times 4.8.
    """
    line = by_hand().play()
    assert (line.w, weight(line.server.variate)) == pytest.approx((0.46, 2.7))
    assert [weight(line.states[client].variate) for client in (0, 1)] == pytest.approx([-3.6, 4.8])
    line.play(0)
    assert (line.w, weight(line.server.variate)) == pytest.approx((0.2404, 2.2995))
    assert weight(line.states[0].variate) == pytest.approx(-5.202)


@pytest.mark.parametrize("name", ["scaffold", "sub-fedavg", "sub-fedavg-hy", "lotteryfl"])
def test_clients_that_train_unheard_are_refused(name):
    """c would not be the mean of all c_i any more, and a mask that the server does not know would grow again."""
    with pytest.raises(SparsonaError, match=f"'everyone_trains' for {name}: its server must hear"):
        sp.train(name, clients=4, per_round=2, rounds=1, everyone_trains=True, validation_rate=0.2)


def test_plain_means_and_a_global_step_by_hand():
    """w = 1 + 0.5 * (0.72 - 0.96) / 2 = 0.94; c = (-3.6 + 4.8) / 2 = 0.6."""
    line = by_hand(weight="equal", server_lr=0.5).play()
    assert (line.w, weight(line.server.variate)) == pytest.approx((0.94, 0.6))


@pytest.mark.parametrize("mean", ["equal", "examples"])
def test_clients_that_join_at_the_end_count_for_nothing(mean):
    """The engine shows them to the server without examples: c is the mean of those that take part."""
    line = by_hand(weight=mean)
    params, clients = line.server.params, (*CLIENTS, Client(2, 0, num_clients=3))
    known, all_ = (line.method.server.init(params, shown, Seeds(0)).weight for shown in (CLIENTS, clients))
    assert float(known) == float(all_) == {"equal": 2, "examples": 4}[mean]


def test_a_client_without_a_variate():
    """In the second round: zero is corrected by 2.7: 0.46 + 0.1 * 2.38 = 0.698, + 0.1 * (4.604 - 2.7) = 0.8884. The
    server's corrects nothing: 0.968, 1.3744; c_0 goes from 2.7 to the mean of -5.08 and -4.064, which is -4.572."""
    for first, trained, change in (("zero", 0.8884, -4.842), ("server", 1.3744, -7.272)):
        line = by_hand(first_variate=first).play()
        del line.states[0]
        work, _, update = line.turn()
        assert weight(work.params) == pytest.approx(trained)
        assert float(update.parts["variate"].tree()["weight"]) == pytest.approx(change)


def test_option_one_by_hand():
    """The gradient at the received model, with decay of weights: -4 + 0.5 * 1, and 8 + 0.5 * 1."""
    line = by_hand(variates="gradient", weight_decay=0.5).play()
    assert [weight(line.states[client].variate) for client in (0, 1)] == pytest.approx([-3.5, 8.5])
    assert weight(line.server.variate) == pytest.approx((-3.5 + 3 * 8.5) / 4)


@pytest.mark.parametrize("variates", ["steps", "gradient"])
def test_it_ends_where_all_examples_would(variates):
    """The loss over all examples, ((3 - w)^2 + 3 * 4 * w^2) / 4, is least at w = 3 / 13. FedAvg ends elsewhere."""
    line = by_hand(variates=variates, lr=0.02)
    for _ in range(40):
        line.play()
    assert line.w == pytest.approx(3 / 13, abs=1e-4)
    plain = Line(fedavg, FedAvgConfig, lr=0.02)
    for _ in range(40):
        plain.play()
    assert abs(plain.w - 3 / 13) > 0.01


def test_both_parts_of_the_update_are_changes():
    update = by_hand().turn()[2]
    assert {name: part.is_change for name, part in update.parts.items()} == {"model": True, "variate": True}


def test_the_first_round_is_fedavgs():
    """Control variates are zero, and the mean of changes is that of models, up to rounding."""
    ours, theirs = (Case(card(name)).history for name in ("scaffold", "fedavg"))
    one, other = (history.populations[1].server.params.flat for history in (ours, theirs))
    assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
    one, other = (history.populations[2].server.params.flat for history in (ours, theirs))
    assert not torch.allclose(one, other, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["costs_equal_the_ledger", "clients_run_together_as_alone"])
def test_option_one(name):
    PROPERTIES[name](Case(card("scaffold"), {"variates": "gradient", "momentum": 0.5, "first_variate": "server"}))


def test_what_cannot_be_is_refused():
    with pytest.raises(sp.SparsonaError, match="variates=gradient"):
        by_hand(momentum=0.9)
    with pytest.raises(sp.SparsonaError, match="weight=batches"):
        by_hand(weight="batches")
