"""Statistics against figures worked out by hand and against printed tables."""

from __future__ import annotations

import math
import statistics as stdlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsona.analysis.statistics import (
    accuracy_summary,
    mean_and_spread,
    mean_of_last,
    paired_difference,
    student_t_quantile,
)
from sparsona.core.errors import SparsonaError


def test_accuracy_summary_by_hand() -> None:
    # Accuracies 1/2, 3/4, 10/10: mean 0.75; weighted 14/16; population variance (1/16 + 0 + 1/16) / 3.
    found = accuracy_summary(np.array([1, 3, 10]), np.array([2, 4, 10]))
    assert found["mean"] == pytest.approx(0.75)
    assert found["weighted"] == pytest.approx(0.875)
    assert found["worst"] == 0.5
    assert found["std"] == pytest.approx(math.sqrt(1 / 24))


@pytest.mark.parametrize(("clients", "rank"), [(1, 1), (9, 1), (10, 1), (19, 1), (20, 2), (100, 10), (105, 10)])
def test_bottom_decile_is_the_tenth_from_below_and_at_least_the_worst(clients: int, rank: int) -> None:
    correct = np.random.default_rng(0).permutation(np.arange(1, clients + 1))
    found = accuracy_summary(correct, np.full(clients, clients))
    assert found["bottom_decile"] == pytest.approx(rank / clients)


def test_clients_without_test_data_do_not_count() -> None:
    found = accuracy_summary(np.array([0, 3]), np.array([0, 4]))
    assert (found["mean"], found["worst"]) == (0.75, 0.75)
    with pytest.raises(SparsonaError, match="no client has test data"):
        accuracy_summary(np.array([0]), np.array([0]))


def test_shapes_must_agree() -> None:
    with pytest.raises(SparsonaError, match="one number per client"):
        accuracy_summary(np.array([1, 2]), np.array([2]))


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=60))
def test_accuracy_summary_stays_in_order(clients: list[tuple[int, int]]) -> None:
    correct = np.array([right for right, _ in clients])
    found = accuracy_summary(correct, correct + np.array([wrong for _, wrong in clients]) + 1)
    assert 0 <= found["worst"] <= found["bottom_decile"] <= 1
    assert found["worst"] <= found["mean"] + 1e-12
    assert all(0 <= value <= 1 for value in found.values())


def test_mean_of_last_ten() -> None:
    curve = [(r, float(r)) for r in range(1, 31)]
    assert mean_of_last(curve) == pytest.approx(25.5)
    assert mean_of_last(curve[::-1]) == pytest.approx(25.5)
    assert mean_of_last(curve, n=1) == 30
    # A sparse beginning does not matter; the end does.
    assert mean_of_last([(5, 0.1), (10, 0.2), *curve[20:]]) == pytest.approx(25.5)


@pytest.mark.parametrize(
    "rounds",
    [
        [],
        range(1, 10),  # nine rounds
        range(10),  # nine rounds and the untrained start
        range(5, 105, 5),  # every fifth round
        [*range(1, 21), 25],  # the last one apart
    ],
)
def test_mean_of_last_ten_is_unknown(rounds: list[int]) -> None:
    assert mean_of_last([(r, 0.5) for r in rounds]) is None


def test_mean_and_spread() -> None:
    values = [0.91, 0.93, 0.955]
    mean, spread = mean_and_spread(values)
    assert mean == pytest.approx(stdlib.mean(values))
    assert spread == pytest.approx(stdlib.stdev(values))
    assert mean_and_spread([0.5]) == (0.5, None)
    with pytest.raises(SparsonaError, match="no values"):
        mean_and_spread([])


@pytest.mark.parametrize(
    ("probability", "freedom", "printed"),
    [
        (0.975, 1, 12.706205),
        (0.975, 2, 4.302653),
        (0.975, 4, 2.776445),
        (0.975, 9, 2.262157),
        (0.975, 30, 2.042272),
        (0.975, 1000, 1.962339),
        (0.95, 5, 2.015048),
        (0.995, 3, 5.840909),
        (0.9995, 1, 636.619249),
        (0.75, 1, 1.0),
        (0.5, 7, 0.0),
    ],
)
def test_t_quantiles_as_printed_in_tables(probability: float, freedom: int, printed: float) -> None:
    assert student_t_quantile(probability, freedom) == pytest.approx(printed, rel=1e-6, abs=1e-9)
    assert student_t_quantile(1 - probability, freedom) == pytest.approx(-printed, rel=1e-6, abs=1e-9)


@given(st.floats(0.001, 0.999))
def test_t_quantile_has_closed_forms_for_one_and_two_degrees(probability: float) -> None:
    centred = 2 * probability - 1
    one, two = math.tan(math.pi * centred / 2), centred * math.sqrt(2 / (1 - centred**2))
    assert student_t_quantile(probability, 1) == pytest.approx(one, rel=1e-9, abs=1e-9)
    assert student_t_quantile(probability, 2) == pytest.approx(two, rel=1e-9, abs=1e-9)


def test_paired_difference_by_hand() -> None:
    # Differences 1, 2, 3: mean 2, standard deviation 1, half-width 4.302653 / sqrt(3).
    found = paired_difference([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert (found.mean, found.n) == (2.0, 3)
    assert found.low == pytest.approx(2 - 4.302653 / math.sqrt(3), abs=1e-6)
    assert found.high == pytest.approx(2 + 4.302653 / math.sqrt(3), abs=1e-6)


def test_paired_difference_of_one_seed_has_no_interval() -> None:
    found = paired_difference([0.9], [0.8])
    assert found.mean == pytest.approx(0.1)
    assert (found.low, found.high, found.n) == (None, None, 1)


def test_equal_differences_have_an_interval_of_no_width() -> None:
    found = paired_difference([1.5, 2.5, 3.5], [1.0, 2.0, 3.0])
    assert (found.mean, found.low, found.high) == (0.5, 0.5, 0.5)


def test_what_cannot_be_paired() -> None:
    with pytest.raises(SparsonaError, match="cannot be paired"):
        paired_difference([1.0], [1.0, 2.0])
    with pytest.raises(SparsonaError, match="between 0 and 1"):
        paired_difference([1.0], [1.0], confidence=95)
    with pytest.raises(SparsonaError, match="no t quantile"):
        student_t_quantile(1.0, 3)
