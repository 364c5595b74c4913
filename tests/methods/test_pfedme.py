"""pFedMe: personal models around a shared one, which descends the Moreau envelopes of the clients' losses."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from lenet5 import SIZE
from line_by_hand import Line, weight

import sparsona as sp
from sparsona.methods import card
from sparsona.methods.pfedme import PFedMeConfig, pfedme
from sparsona.testing import PROPERTIES, Case

BATTERY = {"pfedme": {"options": {"max_batches": 6, "inner_steps": 2}, "accuracy": 0.35}}
# Its own model, the shared one, and a gradient.
MEMORY = [
    ("pfedme", {}, SIZE, 2 * SIZE, 3 * SIZE, 0),
    ("pfedme", {"variant": "detached"}, 0, SIZE, 3 * SIZE, 0),
    ("pfedme", {"variant": "aggregator"}, SIZE, 2 * SIZE, 3 * SIZE, 0),
]
by_hand = partial(Line, pfedme, PFedMeConfig, prox=2.0, inner_steps=2, epochs=1)


def test_a_round_by_hand():
    """`line_by_hand` with prox = 2 and two steps on a batch; w then moves half way to theta.

    Client 0: theta = 1.4, then 1.4 + 0.1 * (2 * 1.6 - 2 * 0.4) = 1.64, w = 1.32. Client 1: theta = 0.2, where the
    gradient 8 * 0.2 and the pull 2 * 0.8 are equal, w = 0.6. The mean by examples is (1.32 + 1.8) / 4 = 0.78, the
    plain one 0.96; a server that goes half way reaches 0.98. At shared_lr = 0.1, client 0's w = 1 + 0.2 * 0.64 = 1.128.

    In the second round theta starts from w = 0.78: 0.78 + 0.2 * 2.22 = 1.224, then 1.224 + 0.1 * (3.552 - 0.888) =
    1.4904, and w = 1.1352.
    """
    line = by_hand().play()
    assert line.w == pytest.approx(0.78)
    assert weight(line.states[0].personal) == pytest.approx(1.64)
    work, *_ = line.turn()
    assert (weight(work.personal), weight(work.shared)) == pytest.approx((1.4904, 1.1352))
    assert by_hand(weight="equal").play().w == pytest.approx(0.96)
    assert by_hand(weight="equal", server_lr=0.5).play().w == pytest.approx(0.98)
    assert weight(by_hand(shared_lr=0.1).turn()[0].shared) == pytest.approx(1.128)


def test_theta_goes_on_from_batch_to_batch():
    """The second batch begins with w = 1.32 and theta = 1.64: 1.64 + 0.1 * (2.72 - 0.64) = 1.848, then 1.848 + 0.1 *
    (2.304 - 1.056) = 1.9728, and w = 1.6464. `max_batches` stops before it."""
    work, *_ = by_hand(epochs=2).turn()
    assert (weight(work.personal), weight(work.shared)) == pytest.approx((1.9728, 1.6464))
    assert weight(by_hand(epochs=2, max_batches=1).turn()[0].shared) == pytest.approx(1.32)


def test_a_client_uses_its_last_theta_and_a_new_one_the_shared_model():
    line = by_hand().play()
    assert line.deployed(line.turn(phases=())[0]) == pytest.approx(1.64)
    tuned, *_ = line.turn(phases=[line.method.tune])
    assert (line.deployed(tuned), weight(tuned.shared)) == pytest.approx((1.4904, 0.78))  # around w, which stays
    del line.states[0]
    assert line.deployed(line.turn(phases=())[0]) == pytest.approx(0.78)


def test_it_follows_the_gradient_of_the_envelope_to_its_fixed_point():
    """f = a/2 (theta - b)^2, a and b being 2 and 3 for client 0, 8 and 0 for client 1. The minimum of f plus the
    pull is at (a b + prox w) / (a + prox), so the envelope is m/2 (w - b)^2 with m = a prox / (a + prox): 1 and 1.6.

    At w = 1 client 0's theta is 2 and the envelope's gradient -2: at shared_lr = 0.3 a step leads to 1.6. The sum of
    the envelopes is least at the mean of b weighted by m: 3 / 2.6 = 15/13, where theta is 27/13 and 3/13; if client 1
    counts three times, at 3 / 5.8. (The mean weighted by a, where FedAvg's gradients cancel, is 0.6.)
    """
    exact = {"inner_steps": 12, "lr": 0.14}
    work, *_ = by_hand(**exact, shared_lr=0.3).turn()
    assert (weight(work.personal), weight(work.shared)) == pytest.approx((2.0, 1.6), abs=2e-4)
    line = by_hand(**exact, shared_lr=0.5, weight="equal")
    for _ in range(10):
        line.play()
    assert line.w == pytest.approx(15 / 13, abs=2e-4)
    assert [weight(line.states[client].personal) for client in (0, 1)] == pytest.approx([27 / 13, 3 / 13], abs=2e-4)
    line = by_hand(**exact, shared_lr=0.5)
    for _ in range(10):
        line.play()
    assert line.w == pytest.approx(3 / 5.8, abs=2e-4)


def test_a_detached_penalty_by_hand():
    """Plain steps: 1, 1.4, 1.72, 1.976. At shared_lr = 0.05 w goes a tenth of the way, to 1.0976, and theta starts from
    there: 1.0976, 1.47808, 1.782464, 2.0259712, a tenth of the way 1.19043712. Tuning takes plain steps from w, one
    a batch."""
    line = by_hand(variant="detached", inner_steps=3, shared_lr=0.05, epochs=2)
    work, state, _ = line.turn()
    assert (line.deployed(work), weight(work.shared)) == pytest.approx((1.19043712, 1.19043712))
    assert state.personal is None
    assert line.deployed(line.turn(phases=[line.method.tune])[0]) == pytest.approx(1.72)


def test_the_aggregator_by_hand():
    """One step on a batch, pulled to the model received: 1.4, 1.64 and 0.2, 0.2, whose mean by examples is 0.56. Client
    0 goes on from 1.64: 1.64 + 0.1 * (2.72 - 2.16) = 1.696, then 1.696 + 0.1 * (2.608 - 2.272) = 1.7296."""
    line = by_hand(variant="aggregator", inner_steps=5, epochs=2).play()  # as by default: it takes one
    assert line.w == pytest.approx(0.56)
    assert line.deployed(line.turn(phases=())[0]) == pytest.approx(1.64)
    assert line.deployed(line.turn()[0]) == pytest.approx(1.7296)


def test_one_inner_step_that_w_follows_is_fedavg():
    """Theta starts at w, where the pull is nothing, and a step of 1/prox takes w to theta: the same bits."""
    options = {"lr_schedule": "constant"}
    ours = Case(card("pfedme"), {**options, "inner_steps": 1, "prox": 0.5, "shared_lr": 2.0}).history
    fedavg = Case(card("fedavg"), options).history
    for one, other in zip(ours.populations[1:], fedavg.populations[1:], strict=True):
        assert torch.equal(one.server.params.flat, other.server.params.flat)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shared_lr": 0.51}, r"(?s)shared_lr=0.51 with prox=2.0.*at most 1/prox, which is 0.5"),
        ({"shared_lr": 0.51, "variant": "detached"}, "shared_lr=0.51 with prox=2.0"),
        ({"variant": "aggregator"}, "inner_steps=2 with variant=aggregator"),
        ({"variant": "aggregator", "inner_steps": 5, "shared_lr": 0.1}, "shared_lr=0.1 with variant=aggregator"),
    ],
)
def test_what_would_be_ignored_or_overshoot_is_refused(options, words):
    with pytest.raises(sp.SparsonaError, match=words):
        by_hand(**options)
    by_hand(shared_lr=0.5)
    by_hand(prox=3.0, shared_lr=1 / 3)


@cache
def case(variant: str) -> Case:
    own = {"momentum": 0.5, "optimizer_memory": "keep"}
    steps = {} if variant == "aggregator" else {"inner_steps": 2}
    return Case(card("pfedme"), {"variant": variant, "rounds": 2, **steps, **own})


@pytest.mark.parametrize("name", ["costs_equal_the_ledger", "costs_say_what_is_kept", "costs_say_what_training_holds"])
@pytest.mark.parametrize("variant", ["detached", "aggregator"])
def test_variants(variant, name):
    PROPERTIES[name](case(variant))
