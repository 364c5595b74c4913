"""Ditto: FedAvg's model, and a personal one beside it that is pulled towards what was received."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from lenet5 import SIZE
from line_by_hand import Line, weight

import sparsona as sp
from sparsona.experiment import build
from sparsona.methods import card
from sparsona.methods.ditto import DittoConfig, ditto
from sparsona.testing import PROPERTIES, Case

BATTERY = {"ditto": {"options": {"prox": 0.1}, "accuracy": 0.35}}
# Its own model, the one received, the same after training, and a gradient of each that is trained at once.
MEMORY = [
    ("ditto", {}, SIZE, 2 * SIZE, 5 * SIZE, 0),
    ("ditto", {"schedule": "sequential"}, SIZE, 2 * SIZE, 4 * SIZE, 0),
    ("ditto", {"schedule": "tuning"}, 0, SIZE, 3 * SIZE, 0),
]
SEQUENTIAL = {"schedule": "sequential", "prox_step": "decoupled"}
by_hand = partial(Line, ditto, DittoConfig, prox=1.0)


def test_interleaved_by_hand():
    """`line_by_hand` with prox = 1, client 0. The first step has no pull, v = 1.4; then v + 0.1 * (3.2 - (1.4 - 1)) =
    1.68. The second round begins with w = 0.46: v = 1.68 + 0.1 * (2.64 - 1.22) = 1.822, + 0.1 * (2.356 - 1.362) =
    1.9214. For a client that is new then: v = 0.46 + 0.1 * 5.08 = 0.968, + 0.1 * (4.064 - 0.508) = 1.3236.
    """
    line = by_hand().play()
    assert line.w == pytest.approx(0.46)
    assert weight(line.states[0].personal) == pytest.approx(1.68)
    assert line.deployed(line.turn()[0]) == pytest.approx(1.9214)
    del line.states[0]  # it forgets: the personal model starts from what is received
    assert line.deployed(line.turn()[0]) == pytest.approx(1.3236)
    assert by_hand(weight="equal").play().w == pytest.approx(0.88)


@pytest.mark.parametrize("schedule", ["interleaved", "sequential"])
@pytest.mark.parametrize(
    ("start", "before", "v", "v_if_new", "before_if_new"),
    [
        ("received", 1.68, 1.9214, 1.3236, 0.46),
        ("initial", 1.68, 1.9214, 1.5882, 1.0),
        ("restart", 1.68, 1.3236, 1.3236, 0.46),
    ],
)
def test_where_the_personal_model_starts_by_hand(schedule, start, before, v, v_if_new, before_if_new):
    """The second round, as above, with w = 0.46. From the initial weight of 1: 1 + 0.1 * (4 - 0.54) = 1.346, + 0.1 *
    (3.308 - 0.886) = 1.5882. From w in every turn: 1.3236 for all, and until the turn the kept 1.68 is used.
    """
    line = by_hand(schedule=schedule, personal_start=start).play()
    assert line.deployed(line.turn(phases=[])[0]) == pytest.approx(before)
    assert line.deployed(line.turn()[0]) == pytest.approx(v)
    del line.states[0]
    assert line.deployed(line.turn(phases=[])[0]) == pytest.approx(before_if_new)
    assert line.deployed(line.turn()[0]) == pytest.approx(v_if_new)


def test_the_published_codes_start_from_the_initial_weights():
    starts = {name: found.options.get("personal_start") for name, found in card("ditto").presets.items()}
    assert starts == {"authors": "initial", "fedspa": "initial", "dispfl": "initial", "pfedgate": None, "fedalt": None}
    with pytest.raises(sp.SparsonaError, match="personal_start=initial with schedule=tuning"):
        by_hand(schedule="tuning", personal_start="initial")


@pytest.mark.parametrize(
    ("options", "v"),
    [
        ({"schedule": "sequential"}, 1.68),
        (SEQUENTIAL, 1.6192),
        ({"prox_step": "decoupled"}, 1.6192),
        ({**SEQUENTIAL, "prox_to": "trained"}, 1.74304),
        ({**SEQUENTIAL, "personal_epochs": 1}, 1.36),
        ({**SEQUENTIAL, "clip_norm": 1.0}, 1.171),
        ({"clip_norm": 1.0}, 1.2),
        ({"personal_lr": 0.2, "epochs": 1}, 1.8),
        ({"personal_lr": 0.2, "epochs": 1, "prox_step": "decoupled"}, 1.64),
    ],
)
def test_variants_by_hand(options, v):
    """Decoupled: 1.4, pulled by 0.1 * 0.4 to 1.36; 1.36 + 0.1 * 3.28 = 1.688, pulled by 0.1 * 0.688 to 1.6192. Clipped
    to a norm of 1: 1.1, pulled to 1.09; 1.19, pulled to 1.171. In the loss, the pull is clipped with it: 1.1, 1.2. A
    personal rate of 0.2: 1.8, pulled by 0.2 * 0.8 to 1.64. Towards the trained copy, which is at 1.72: 1.4, pulled to
    1.432; + 0.1 * 3.136 = 1.7456, pulled to 1.74304.
    """
    work, *_ = by_hand(**options).turn()
    assert weight(work.personal) == pytest.approx(v, abs=2e-6)


def test_pulled_tuning_by_hand():
    """The rounds are FedAvg's; two epochs of tuning take v to 1.68, as above."""
    line = by_hand(schedule="tuning")
    assert line.deployed(line.turn()[0]) == pytest.approx(1.72)
    assert line.deployed(line.turn(phases=[line.method.tune])[0]) == pytest.approx(1.68, abs=2e-6)


@pytest.mark.parametrize("schedule", ["interleaved", "tuning"])
def test_only_sequential_training_has_epochs_of_its_own_and_a_trained_copy(schedule):
    with pytest.raises(sp.SparsonaError, match="personal_epochs"):
        by_hand(schedule=schedule, personal_epochs=3)
    with pytest.raises(sp.SparsonaError, match="prox_to=trained"):
        by_hand(schedule=schedule, prox_to="trained")


def test_tuning_alone_needs_epochs_of_tuning():
    """Without any it would be FedAvg by another name."""
    with pytest.raises(sp.SparsonaError, match="ditto with schedule=tuning, and tune_epochs is 0"):
        build.make_config("ditto:schedule=tuning", {})
    assert build.make_config("ditto:schedule=tuning", {"tune_epochs": 1}).tune_epochs == 1
    assert build.make_config("ditto", {"preset": "fedalt"}).tune_epochs == 5


@cache
def sequential() -> Case:
    own = {"personal_epochs": 1, "momentum": 0.5, "optimizer_memory": "keep", "clip_norm": 1.0}
    return Case(card("ditto"), {**SEQUENTIAL, **own})


def test_its_shared_model_is_fedavgs():
    """To the bit, in every round: personal training draws nothing that the shared model meets."""
    plain = {"momentum": 0.5, "optimizer_memory": "keep", "clip_norm": 1.0}
    fedavg = Case(card("fedavg"), plain).history
    for ours in (Case(card("ditto"), plain).history, sequential().history):
        for one, other in zip(ours.populations[1:], fedavg.populations[1:], strict=True):
            assert torch.equal(one.server.params.flat, other.server.params.flat)
        assert not torch.equal(ours.work(0).personal.flat, fedavg.work(0).params.flat)


@pytest.mark.parametrize(
    "name",
    ["costs_equal_the_ledger", "costs_say_what_is_kept", "clients_run_together_as_alone", "loss_and_update_are_pure"],
)
def test_one_model_after_the_other(name):
    PROPERTIES[name](sequential())
