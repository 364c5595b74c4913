"""Partitions by class: a few classes each, priors in groups, and how far Dirichlet shares spread."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsona.core.errors import SparsonaError
from sparsona.data.partition import partition
from sparsona.data.partition.by_class import _by_class


def counts_of(parts, labels):
    """How many examples of each class each client has: (clients, classes)."""
    return np.array([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])


def check_given_out_once(parts, count):
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(count))


# Pathological: exactly C classes each, nothing lost, nothing shared.


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    clients=st.integers(1, 9),
    per_client=st.integers(1, 8),
    seed=st.integers(0, 2**63 - 1),
)
def test_pathological_clients_have_their_classes_and_nothing_is_lost(sizes, clients, per_client, seed):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    reach = np.minimum(sizes, clients).sum()
    if per_client > len(sizes) or not len(sizes) <= per_client * clients <= reach:
        with pytest.raises(SparsonaError, match=f"pathological:{per_client}"):
            partition(f"pathological:{per_client}", labels, clients, seed, min_size=0)
        return
    parts = partition(f"pathological:{per_client}", labels, clients, seed, min_size=0)
    check_given_out_once(parts, len(labels))
    counts = counts_of(parts, labels)
    assert ((counts > 0).sum(axis=1) == per_client).all()
    assert all(np.ptp(row[row > 0]) <= 1 for row in counts.T)  # dealt evenly among its holders
    holders = (counts > 0).sum(axis=0)
    roomy = holders[np.array(sizes) > holders]  # the others have as many holders as examples
    assert roomy.size == 0 or holders.max() - roomy.min() <= 1


def test_pathological_classes_have_equally_many_holders():
    labels = np.arange(6000) % 10
    for seed in range(5):
        parts = partition("pathological:2", labels, 50, seed)
        assert ((counts_of(parts, labels) > 0).sum(axis=0) == 10).all()
        assert {len(part) for part in parts} == {120}


def test_pathological_hands_are_as_likely_as_each_other():
    """Of 4 classes, 2 to each of 6 clients: 6 hands, each client's hand each of them in a sixth of all deals.

    2,000 deals: a share of 1/6 has a standard error of 0.0083, so that 0.04 is nearly five of them.
    """
    labels = np.arange(48) % 4
    deals = np.array([counts_of(partition("pathological:2", labels, 6, s, 1), labels) > 0 for s in range(2000)])
    codes = deals @ np.array([1, 2, 4, 8])
    for client in (0, 3, 5):
        hands, times = np.unique(codes[:, client], return_counts=True)
        assert hands.tolist() == [3, 5, 6, 9, 10, 12]
        assert times / 2000 == pytest.approx(np.full(6, 1 / 6), abs=0.04)


def test_odd_examples_go_to_those_who_have_least():
    """Every client holds all of 4 classes of 25: four odd examples, one to each of 4 clients (by chance, in 9%)."""
    for seed in range(10):
        parts = partition("pathological:4", np.arange(100) % 4, 4, seed)
        assert [len(part) for part in parts] == [25] * 4


@pytest.mark.parametrize(
    ("spec", "clients", "message"),
    [
        ("pathological:11", 20, r"pathological:11 needs 11 classes per client, but there are 10(.|\n)*at most 10"),
        ("pathological-refill:11", 20, "pathological-refill:11 needs 11 classes per client, but there are 10"),
        (
            "pathological:1",
            4,
            r"gives 4 clients 4 classes in all, but there are 10: some classes would have no client(.|\n)*use 3 class",
        ),
        ("pathological-refill:1", 4, r"4 clients of 250 examples: the classes of client 0 have only 100"),
        ("groups:5:0.3", 4, r"5 groups of 4 clients(.|\n)*at most 4 groups"),
    ],
)
def test_what_cannot_be_done_is_told(spec, clients, message):
    with pytest.raises(SparsonaError, match=message):
        partition(spec, np.arange(1000) % 10, clients, 0)


def test_classes_too_small_for_their_holders_are_told():
    labels = np.repeat([0, 1, 2], [98, 1, 1])
    message = r"5 clients cannot have 2 classes each, since 2 classes have fewer(.|\n)*at most 1 classes per client"
    with pytest.raises(SparsonaError, match=message):
        partition("pathological:2", labels, 5, 0, min_size=1)


@pytest.mark.parametrize("spec", ["pathological:1", "dirichlet-uncapped:1e-9"])
def test_a_minimum_size_out_of_reach_is_told(spec, monkeypatch):
    """One class of 90 and one of 10: among 10 clients, five share the small one at best."""
    monkeypatch.setattr("sparsona.data.partition.by_class.MAX_TRIES", 50)
    message = rf"no draw of {spec.replace('1e-9', '1e-09')} in 50 gave each of 10 clients 5 examples; the best left"
    with pytest.raises(SparsonaError, match=message):
        partition(spec, np.repeat([0, 1], [90, 10]), 10, 0, min_size=5)


# DisPFL's variant, in which clients share examples.


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=8),
    clients=st.integers(1, 9),
    per_client=st.integers(1, 8),
    seed=st.integers(0, 2**63 - 1),
)
def test_refilled_classes_give_no_example_twice_to_one_client(sizes, clients, per_client, seed):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    try:
        parts = partition(f"pathological-refill:{per_client}", labels, clients, seed, min_size=0)
    except SparsonaError:
        # Too many classes, or a client whose classes have too little: with so much in the smallest there is none.
        assert per_client > len(sizes) or sum(sorted(sizes)[:per_client]) < -(-len(labels) // clients)
        return
    assert [len(part) for part in parts] == [len(part) for part in np.array_split(labels, clients)]
    assert all((np.diff(part) > 0).all() for part in parts)
    counts = counts_of(parts, labels)
    assert ((counts > 0).sum(axis=1) <= per_client).all()
    given_out = np.bincount(np.concatenate(parts), minlength=len(labels))
    for members, total in zip(_by_class(labels), counts.sum(axis=0), strict=True):
        if total <= len(members):
            assert given_out[members].max() <= 1  # nothing is given out again before all is given out


def test_refilled_classes_are_shared():
    """Ten clients of 200 with 2 of 10 classes of 200: some class is drawn by three or more, and runs out."""
    labels = np.arange(2000) % 10
    given_out = np.bincount(np.concatenate(partition("pathological-refill:2", labels, 10, 0)), minlength=2000)
    assert given_out.max() > 1
    assert given_out.min() == 0
    assert given_out.sum() == 2000


def test_clients_that_need_a_whole_class_get_it():
    """Two classes of 30, two clients of 30 with one class each: the same or not, each has the whole of it."""
    labels = np.repeat([0, 1], 30)
    found = {
        tuple(tuple(np.unique(labels[p])) for p in partition("pathological-refill:1", labels, 2, s)) for s in range(20)
    }
    assert found == {((a,), (b,)) for a in (0, 1) for b in (0, 1)}


@pytest.mark.parametrize("spec", ["pathological:2", "pathological-refill:2", "groups:3:0.3"])
def test_the_seed_decides(spec):
    labels = np.arange(400) % 5
    first, again, other = (partition(spec, labels, 6, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


# How far shares spread. For p ~ Dir(A) over N, the variance of a share is (1/N)(1-1/N)/(NA+1), so that E sum p^2 is
# (A+1)/(NA+1). With counts c of n drawn by p, E sum c(c-1) is n(n-1) E sum p^2. An A wrong by a factor of 1.5 changes
# it by 18% or more here, and the tolerances are half of that.


def expected_squares(concentration, over):
    return (concentration + 1) / (over * concentration + 1)


def squares(counts):
    """An unbiased estimate of E sum p^2 from rows of counts."""
    sizes = counts.sum(axis=1)
    return ((counts * (counts - 1)).sum(axis=1) / (sizes * (sizes - 1))).mean()


@pytest.mark.parametrize("concentration", [0.1, 0.4, 2.0])
def test_uncapped_shares_have_the_right_mean_and_spread(concentration):
    """1,600 classes, each shared out among 10 clients by a draw of its own."""
    labels = np.arange(160_000) % 1600
    counts = counts_of(partition(f"dirichlet-uncapped:{concentration}", labels, 10, 0), labels).T
    assert (counts / 100).mean(axis=0) == pytest.approx(np.full(10, 0.1), abs=0.04)
    tolerance = 0.07
    assert squares(counts) == pytest.approx(expected_squares(concentration, 10), rel=tolerance)
    for wrong in (concentration * 1.5, concentration / 1.5):
        assert squares(counts) != pytest.approx(expected_squares(wrong, 10), rel=tolerance)


@pytest.mark.parametrize("spec", ["dirichlet-equal:{}", "groups:500:{}"])
@pytest.mark.parametrize("concentration", [0.2, 0.45])
def test_equal_sized_clients_have_the_right_mean_and_spread(spec, concentration):
    """1,000 clients: so many that classes run out late, and few clients deviate from their prior (by 2 to 5% here)."""
    labels = np.arange(50_000) % 10
    rows = [counts_of(partition(spec.format(concentration), labels, 1000, seed), labels) for seed in (0, 1, 2)]
    counts = np.concatenate(rows)
    assert (counts.sum(axis=1) == 50).all()
    assert (counts / 50).mean(axis=0) == pytest.approx(np.full(10, 0.1))
    tolerance = 0.08
    assert squares(counts) == pytest.approx(expected_squares(concentration, 10), rel=tolerance)
    for wrong in (concentration * 1.5, concentration / 1.5):
        assert squares(counts) != pytest.approx(expected_squares(wrong, 10), rel=tolerance)


def test_uncapped_sizes_spread_further_than_capped_ones():
    labels = np.arange(10_000) % 10
    spread = [
        np.std([len(p) for p in partition(f"{name}:0.4", labels, 20, 0)])
        for name in ("dirichlet-uncapped", "dirichlet")
    ]
    assert spread[0] > 1.3 * spread[1]


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**63 - 1), clients=st.integers(1, 12), groups=st.integers(1, 12))
def test_groups_lose_nothing_and_have_equal_sizes(seed, clients, groups):
    labels = np.arange(300) % 7
    if groups > clients:
        with pytest.raises(SparsonaError, match=f"{groups} groups of {clients} clients"):
            partition(f"groups:{groups}:0.3", labels, clients, seed)
        return
    parts = partition(f"groups:{groups}:0.3", labels, clients, seed)
    check_given_out_once(parts, 300)
    assert np.ptp([len(part) for part in parts]) <= 1


def test_clients_of_a_group_follow_each_other_and_are_alike():
    """DisPFL section 4.4: 20 clients in 4 groups. A group's clients differ by chance, groups by their priors."""
    labels = np.arange(20_000) % 10
    shares = counts_of(partition("groups:4:0.3", labels, 20, 0), labels) / 1000
    distance = np.abs(shares[:, None] - shares[None]).sum(axis=2) / 2
    is_same = np.arange(20)[:, None] // 5 == np.arange(20)[None] // 5
    assert distance[is_same].max() < 0.15
    assert distance[~is_same].min() > 0.3


def test_as_many_groups_as_clients_are_clients_of_their_own():
    labels = np.arange(600) % 10
    pairs = zip(partition("groups:6:0.3", labels, 6, 4), partition("dirichlet-equal:0.3", labels, 6, 4), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)
