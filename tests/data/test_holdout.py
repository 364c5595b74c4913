"""Clients are tested on what they train on: on their own label shares, or on their own owner's examples."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sparsona.core.errors import SparsonaError
from sparsona.data.holdout import draw_by_shares
from sparsona.data.partition import partition


@settings(deadline=None, max_examples=60)
@given(
    counts=hnp.arrays(np.int64, st.tuples(st.integers(1, 6), st.integers(1, 5)), elements=st.integers(0, 500)),
    per_class=st.integers(1, 40),
    per_client=st.none() | st.integers(1, 60),
    seed=st.integers(0, 2**63 - 1),
)
def test_label_shares_of_test_match_train(counts, per_class, per_client, seed):
    num_classes = counts.shape[1]
    labels = np.random.default_rng(seed).permutation(np.arange(per_class * num_classes) % num_classes)
    chosen = draw_by_shares(counts, labels, per_client, seed)
    assert len(chosen) == len(counts)
    wanted = per_client or -(-len(labels) // len(counts))
    for row, mine in zip(counts, chosen, strict=True):
        assert mine.dtype == np.int64
        assert (np.diff(mine) > 0).all()  # sorted, none twice
        exact = row / max(1, row.sum()) * wanted
        found = np.bincount(labels[mine], minlength=num_classes)
        is_short = exact > per_class
        assert (found[is_short] == per_class).all()
        assert (found >= np.minimum(exact, per_class) - 1e-9).all()
        assert (found < exact + 1).all()
        assert not found[row == 0].any()


def test_by_hand():
    """Shares 1/2, 1/3 and 1/6 of 10 are 5, 3.33 and 1.67: 5, 4 and 2; of the last class there is but one."""
    labels = np.array([0] * 8 + [1] * 8 + [2])
    (mine,) = draw_by_shares(np.array([[30, 20, 10]]), labels, 10, 0)
    assert np.bincount(labels[mine]).tolist() == [5, 4, 1]
    # 0.07 * 100 is 7.000000000000001 in floating point.
    (mine,) = draw_by_shares(np.array([[7, 93]]), np.arange(400) % 2, 100, 0)
    assert np.bincount(mine % 2).tolist() == [7, 93]


def test_every_test_example_is_as_likely_and_clients_draw_by_themselves():
    """5 of 20 examples for each of 2,000 clients: each in a quarter of them, give or take 0.01."""
    chosen = draw_by_shares(np.ones((2000, 1)), np.zeros(20), 5, 0)
    assert np.bincount(np.concatenate(chosen)) / 2000 == pytest.approx(np.full(20, 0.25), abs=0.05)
    assert len({tuple(mine) for mine in chosen}) > 1000


def test_a_client_is_tested_on_the_same_whatever_the_others_have():
    counts, labels = np.array([[3, 1], [2, 2], [0, 5]]), np.arange(100) % 2
    all_three = draw_by_shares(counts, labels, 10, 7)
    first_two = draw_by_shares(counts[:2], labels, 10, 7)
    assert all(np.array_equal(a, b) for a, b in zip(all_three[:2], first_two, strict=True))
    other = draw_by_shares(counts, labels, 10, 8)
    assert not any(np.array_equal(a, b) for a, b in zip(all_three, other, strict=True))


@pytest.mark.parametrize(
    ("spec", "num_classes", "mean", "tolerance"),
    [
        ("dirichlet-equal:0.3", 10, 103.5, 0.5),
        ("dirichlet-equal:0.2", 100, 124, 1.5),
        ("dirichlet-equal:0.3", 100, 129, 1.5),
        ("pathological-refill:2", 10, 100.8, 0.2),  # two shares are rounded up in 4 of 5 cases
        ("pathological-refill:10", 100, 104, 0.4),
    ],
)
def test_clients_of_the_papers_are_tested_on_a_little_over_a_hundred(spec, num_classes, mean, tolerance):
    """CIFAR10 and CIFAR100, 100 clients, shared out as DisPFL does it: its own code gives these means."""
    labels, test_labels = np.arange(50_000) % num_classes, np.arange(10_000) % num_classes
    counts = np.array([np.bincount(labels[mine], minlength=num_classes) for mine in partition(spec, labels, 100, 0)])
    sizes = [len(mine) for mine in draw_by_shares(counts, test_labels, None, 0)]
    assert np.mean(sizes) == pytest.approx(mean, abs=tolerance)
    if spec == "dirichlet-equal:0.3" and num_classes == 10:
        assert min(sizes) >= 100
        assert max(sizes) <= 107


def test_what_has_no_shares_is_told():
    with pytest.raises(SparsonaError, match=r"labels of shape \(4, 5\)\n(.*)one label per example"):
        draw_by_shares(np.ones((2, 3)), np.zeros((4, 5)), None, 0)
    with pytest.raises(SparsonaError, match="0 test examples per client"):
        draw_by_shares(np.ones((2, 3)), np.zeros(4), 0, 0)
