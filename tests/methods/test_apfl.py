"""APFL: FedAvg's model, and a personal one that is mixed with it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from lenet5 import SIZE
from line_by_hand import Line, weight

import sparsona as sp
from sparsona.methods import card
from sparsona.methods.apfl import APFLConfig, apfl
from sparsona.testing import Case

BATTERY = {"apfl": {"options": {"learn_mix": True, "mix_lr": 0.01}, "accuracy": 0.35}}
# Its own model, the shared one, their mixture, a gradient of each; the share of the mixture is one number.
MEMORY = [
    ("apfl", {}, SIZE, 2 * SIZE, 5 * SIZE + 4, 0),
    ("apfl", {"learn_mix": True}, SIZE + 4, 2 * SIZE + 4, 5 * SIZE + 4, 0),
]
by_hand = partial(Line, apfl, APFLConfig, mix=0.25)


def test_the_mixture_by_hand():
    """`line_by_hand` with a mix of 0.25, client 0. The mixture is 1, its gradient -4, a quarter of which is v's: v =
    1.1, while w = 1.4. Now the mixture is 0.275 + 1.05 = 1.325, its gradient -3.35: v = 1.1 + 0.1 * 0.8375 = 1.18375,
    and w = 1.72. After the round w = 0.46 is received: the mixture is 0.2959375 + 0.345 = 0.6409375.
    """
    line = by_hand()
    work, *_ = line.turn()
    assert weight(work.personal) == pytest.approx(1.18375)
    assert line.deployed(work) == pytest.approx(0.25 * 1.18375 + 0.75 * 1.72)
    line.play()
    assert line.w == pytest.approx(0.46)
    assert line.deployed(line.turn(phases=[])[0]) == pytest.approx(0.6409375)
    del line.states[0]  # a new client's personal model is the one it receives
    assert line.deployed(line.turn(phases=[])[0]) == pytest.approx(0.46)


def test_the_share_by_hand():
    """In the first step v = w, and the share stays. In the second its gradient is (1.1 - 1.4) * -3.35 = 1.005: at a
    rate of 0.1 it becomes 0.25 - 0.1005 = 0.1495, at a rate of 0.5 it would be negative."""
    assert by_hand(learn_mix=True, mix_lr=0.1).turn()[0].mix.item() == pytest.approx(0.1495)
    assert by_hand(learn_mix=True).turn()[1].mix.item() == pytest.approx(0.1495)
    assert by_hand(learn_mix=True, mix_lr=0.5).turn()[0].mix.item() == 0.0
    assert by_hand().turn()[1].mix is None


def test_a_rate_of_a_constant_share_is_refused():
    with pytest.raises(sp.SparsonaError, match=r"mix_lr=0\.1 without learn_mix"):
        by_hand(mix_lr=0.1)


def test_tuning_leaves_the_shared_model_alone():
    """The mixture is 1, 0.25 * 1.1 + 0.75 = 1.025: v = 1.1 + 0.1 * 0.25 * 3.95 = 1.19875."""
    line = by_hand()
    work, *_ = line.turn(phases=[line.method.tune])
    assert (weight(work.personal), weight(work.shared)) == (pytest.approx(1.19875), 1.0)


def test_its_shared_model_is_fedavgs():
    """To the bit, in every round."""
    plain = {"momentum": 0.5, "optimizer_memory": "keep", "clip_norm": 1.0}
    ours = Case(card("apfl"), {**plain, "learn_mix": True}).history
    theirs = Case(card("fedavg"), plain).history
    for one, other in zip(ours.populations[1:], theirs.populations[1:], strict=True):
        assert torch.equal(one.server.params.flat, other.server.params.flat)
