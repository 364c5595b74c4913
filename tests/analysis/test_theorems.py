"""The papers' bounds against numbers worked out by hand, or against formulas written down once more."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from sparsona.analysis import theorems
from sparsona.analysis.theorems import PartialProblem, SparseProblem

SPARSE = SparseProblem(
    smoothness=1,
    variance=4,
    dissimilarity=2,
    gradient=3,
    steps=1,
    sampled=2,
    size=3,
    dropped=1,
    start_gap=1,
    optimal_apart=0.5,
)
PARTIAL = PartialProblem(
    smooth_u=2,
    smooth_v=8,
    cross=2,
    variance_u=1,
    variance_v=4,
    diversity=3,
    clients=10,
    sampled=5,
    steps_u=4,
    steps_v=2,
    start_gap=6,
)


def test_fedspa_iclr_by_hand() -> None:
    step = 1 / 16
    assert theorems.iclr_largest_step(1, 1) == step
    assert theorems.iclr_kappa(step, 1, 1) == pytest.approx(0.5 - 150 / 4096 - 15 / 256 - 5 / 16)
    assert theorems.iclr_phi(SPARSE, apart=0.5, away=0.25) == 2 * 4 + 9 * 0.75
    # (25/16^4 + 5/(2 16^3)) (4 + 18 * 14.75) + (4/16^2 + 1/16) / 2 * 0.25 * 9 + 9/16^2 * 14.75 + 4 / (16^2 * 2)
    assert theorems.iclr_round_term(SPARSE, step, 0.5, 0.25) == pytest.approx(0.8815536, abs=1e-6)
    terms = theorems.iclr_bound(SPARSE, step, [(0.5, 0.25)] * 2)
    assert terms is not None
    assert list(terms.values()) == pytest.approx([260.0635, 3 * 0.8815536, 24, 27, 13.5], rel=1e-5)
    derived = theorems.iclr_bound(SPARSE, step, [(0.5, 0.25)] * 2, as_derived=True)
    assert derived is not None
    assert list(derived.values())[1] == pytest.approx(3 * 0.8815536 * 16 / 0.0922852, rel=1e-4)


def test_fedspa_iclr_counts_local_steps_as_the_proof_does() -> None:
    """N and eta enter as N eta, but for the noise of batches: N^2 eta^3, N^3 eta^4 and N eta^2 times sigma^2."""
    noisy = replace(SPARSE, dissimilarity=0, gradient=0, steps=3, sampled=7, smoothness=2)
    expected = (25 * 27 * 1e-4 * 8 + 2.5 * 9 * 1e-3 * 4) * 4 + 3 * 1e-2 * 2 * 4 / 7
    assert theorems.iclr_round_term(noisy, 0.1, 0, 0) == pytest.approx(expected)


def test_there_is_no_fedspa_bound_with_large_steps() -> None:
    assert theorems.iclr_bound(SPARSE, 0.08, [(0, 0)]) is None
    assert theorems.iclr_bound(SPARSE, 0.07, [(0, 0)]) is not None


def test_fedspa_journal_by_hand() -> None:
    terms = theorems.journal_bound(
        smoothness=2, variance=3, dissimilarity=2, gradient=1, steps=2, sampled=5, start_gap=0.5, ratios=[4, 1, 1, 4]
    )
    assert terms is not None
    noise = 3 + 6 * 2 * 4
    c1 = 25 / (32 * 2 * 4) * noise + 75 / 64 + 6 + 3 / 20 + 2.5
    c2 = 5 / (16 * 2 * 2) * noise + 15 / 16
    assert list(terms.values()) == pytest.approx([2 * 8 / 2, 0.75 * c1 / 2, c2 / 2])
    assert theorems.journal_step(2, 2, 4, 4) == pytest.approx(math.sqrt(1 / (16 * 4 * 4 * 4 * 4)))
    nothing = {"smoothness": 1, "variance": 1, "dissimilarity": 1, "gradient": 1, "steps": 1, "sampled": 1}
    assert theorems.journal_bound(**nothing, start_gap=1, ratios=[1, math.inf]) is None
    assert theorems.journal_bound(**nothing, start_gap=1, ratios=[1, 0]) is None


def test_dispfl_by_hand() -> None:
    per_step = theorems.dispfl_per_step(0.5, 2, 1, math.exp(-2), examples=10, batch=5)
    assert per_step == pytest.approx(math.log(0.5 + 0.5 * math.exp(0.22)))
    total = theorems.dispfl_total(per_step, math.exp(-2), 100)
    assert total == pytest.approx(20 * per_step + 100 * per_step * math.expm1(per_step) / (math.exp(per_step) + 1))
    e, t, d = per_step, 100, math.exp(-2)
    first = math.exp(-(total + t * e) / 2) * (1 / (1 + math.exp(e)) * 2 * t * e / (t * e - total)) ** t
    first *= ((t * e + total) / (t * e - total)) ** (-(total + t * e) / (2 * e))
    rest, grown, many = 1 - d / (1 + math.exp(e)), 1 - math.exp(e) * d / (1 + math.exp(e)), math.ceil(total / e)
    expected = first + 2 - grown**many * rest ** (t - many) - rest**t
    assert theorems.dispfl_failure(per_step, total, d, t) == pytest.approx(expected)


def test_dispfl_is_better_with_fewer_entries_and_says_nothing_without_noise() -> None:
    common = {"diameter": 5.0, "delta": 1e-5, "examples": 500, "batch": 50, "iterations": 1000}
    half, whole = (theorems.dispfl_generalization(union=u, noise=20.0, **common) for u in (0.5, 1.0))
    assert half.gap < whole.gap
    assert math.isinf(theorems.dispfl_generalization(union=0.5, noise=0.0, **common).gap)
    enough = theorems.dispfl_noise_for(1.0, union=0.5, **common)
    assert theorems.dispfl_generalization(union=0.5, noise=enough, **common).gap == pytest.approx(1)
    loud = theorems.dispfl_per_step(1, 1e6, 1, 1e-5, examples=10, batch=1)  # exp of it would overflow
    assert math.isfinite(loud)
    assert loud > 1e11


def test_pfedgate_by_hand() -> None:
    bound = theorems.gate_distance_bound(8, 2, 4, (3, 2), (0.5, 0.25))
    assert bound == pytest.approx(8 / (4 * 16) * 6 / 0.125)
    assert theorems.gate_distance_bound(8, 2, 4, (3, 2), (0.5, 0.25), as_derived=True) == pytest.approx(4 * bound)
    assert theorems.gate_distance_bound(8, -0.1, 4, (3, 2), (0.5, 0.25)) is None
    assert theorems.gate_distance_bound(8, 2, 4, (3, 2), (0, 0.25)) == math.inf
    constants = {"delta": 0.1, "clients": 4, "size": 100, "gate_size": 10, "radius": 2.0, "lipschitz": 3.0, "gate": 5.0}
    log = math.log(2 * 3 * (2 * 5 + 1) / 0.5)
    examples = theorems.pfedgate_examples(epsilon=0.5, **constants)
    assert examples == pytest.approx((100 / 4 * log + 10 * log - math.log(0.1) / 4) / 0.25)
    assert theorems.pfedgate_gap(examples, **constants) == pytest.approx(0.5)
    assert theorems.upload_share([0.5, 0.2, 0.1]) == pytest.approx(1 - 0.5 * 0.8 * 0.9)


def test_fedsim_and_fedalt_by_hand() -> None:
    assert PARTIAL.chi == 0.5
    shared = (1 + 3 * 0.5) / (5 * 2)
    sim = theorems.fedsim_bound(PARTIAL, 0.1, 12)
    assert list(sim.values()) == pytest.approx(
        [5, 0.1 * 1.25 * (shared + 0.5 * 4 / 8), 0.01 * 0.75 * 1.25 * (4 / 2 + 4 / 8)]
    )
    alt = theorems.fedalt_bound(PARTIAL, 0.1, 12)
    noise, drift = shared + 4 / 8 * (5 + 0.25 * 5) / 10, 4 / 2 * 0.75 + 4 / 8 * 0.5 * 0.5 + 0.25 * 4 / 8
    assert list(alt.values()) == pytest.approx([5, 0.1 * noise, 0.01 * drift])
    assert theorems.fedsim_largest_step(PARTIAL) == pytest.approx(min(1 / 15, math.sqrt(0.5 / (196 * 0.75 * 1.25))))
    assert theorems.fedalt_largest_step(PARTIAL) == pytest.approx(min(1 / 24, 5 / (32 * 5), math.sqrt(0.5 / 16)))
    assert theorems.fedalt_beats_fedsim(PARTIAL) == pytest.approx((0, shared))


def test_corollaries_3_and_10_give_the_rounds_to_epsilon() -> None:
    for updates, bound, largest in (
        ("simultaneous", theorems.fedsim_bound, theorems.fedsim_largest_step(PARTIAL)),
        ("alternating", theorems.fedalt_bound, theorems.fedalt_largest_step(PARTIAL)),
    ):
        for epsilon in (1e-6, 1e-3, 10.0):
            step, rounds = theorems.partial_rounds(PARTIAL, epsilon, updates)
            first, *others = bound(PARTIAL, step, rounds).values()
            assert first == pytest.approx(epsilon)
            assert max(others) <= epsilon * (1 + 1e-9)
            # No larger eta would do: it is the largest allowed, or one of the terms is epsilon.
            assert step == largest or max(others) == pytest.approx(epsilon)
    # By hand: Delta F_0 (1 + chi^2)(...) / epsilon^2 where noise rules, Delta F_0 / (eta epsilon) where eta does.
    noise = 1.25 * ((1 + 3 * 0.5) / 10 + 0.5 * 4 / 8)
    assert theorems.partial_rounds(PARTIAL, 1e-6, "simultaneous")[1] == pytest.approx(6 * noise / 1e-12)
    assert theorems.partial_rounds(PARTIAL, 10.0, "simultaneous") == pytest.approx(
        (theorems.fedsim_largest_step(PARTIAL), 6 / (theorems.fedsim_largest_step(PARTIAL) * 10))
    )
    calm = replace(PARTIAL, variance_u=0, variance_v=0, diversity=0)
    assert theorems.partial_rounds(calm, 1e-6, "alternating")[0] == theorems.fedalt_largest_step(calm)


def test_table_1_has_three_regimes() -> None:
    regime, eta, rate = theorems.partial_rate(PARTIAL, 16, "simultaneous")
    shared = (1 + 3 * 0.5) / 10
    assert (regime, eta) == ("general", 0.25)
    assert rate == pytest.approx((6 + 1.25 * (shared + 0.25)) / 4)
    assert theorems.partial_rate(PARTIAL, 16, "alternating")[2] == pytest.approx((6 + shared + 0.5 * 6.25 / 10) / 4)
    quiet = replace(PARTIAL, variance_u=0, variance_v=0, sampled=10)
    assert theorems.partial_rate(quiet, 8, "simultaneous")[2] == pytest.approx((6 + 3 * 0.75 * 1.25 / 2) / 4)
    assert theorems.partial_rate(quiet, 8, "alternating")[2] == pytest.approx((6 + 3 * 0.75 / 2) / 4)
    assert theorems.partial_rate(replace(quiet, steps_u=1), 8, "alternating")[1:] == (1.0, 0.75)


def test_without_coupling_and_noise_of_the_personal_part_the_two_methods_have_one_rate() -> None:
    apart = replace(PARTIAL, cross=0, variance_v=0)
    assert theorems.fedsim_bound(apart, 0.1, 5) != {}
    rates = [theorems.partial_rate(apart, 9, updates)[2] for updates in ("simultaneous", "alternating")]
    assert rates[0] == rates[1]
