"""Every owner's examples with one client."""

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsona.core.errors import SparsonaError
from sparsona.data.partition import by_owner as whose
from sparsona.data.partition import partition


def natural(owners, num_clients=None, seed=0, min_size=1):
    owners = np.array(owners)
    return [part.tolist() for part in partition("natural", np.zeros(len(owners)), num_clients, seed, min_size, owners)]


def test_by_hand():
    owners = [7, 2, -1, 7, 2, 5, 7, -1]
    assert natural(owners) == [[1, 4], [5], [0, 3, 6]]  # owners 2, 5, 7
    assert natural(owners, min_size=2) == [[1, 4], [0, 3, 6]]
    assert natural(owners, min_size=0) == [[1, 4], [5], [0, 3, 6]]
    assert natural(owners, 3) == natural(owners)


@settings(deadline=None, max_examples=60)
@given(
    owners=st.lists(st.integers(-1, 9), min_size=1, max_size=80).filter(lambda drawn: max(drawn) >= 0),
    min_size=st.integers(0, 6),
    seed=st.integers(0, 2**63 - 1),
    data=st.data(),
)
def test_owners_keep_what_is_theirs(owners, min_size, seed, data):
    owners = np.array(owners)
    sizes = np.bincount(owners[owners >= 0])
    able = np.flatnonzero(sizes >= max(1, min_size))
    if not len(able):
        with pytest.raises(SparsonaError, match=f"0 of {np.count_nonzero(sizes)} owners have {min_size} examples"):
            natural(owners, None, seed, min_size)
        return
    num_clients = data.draw(st.none() | st.integers(1, len(able)))
    parts = natural(owners, num_clients, seed, min_size)
    found = [set(owners[part].tolist()) for part in parts]
    assert all(len(each) == 1 for each in found)
    chosen = [each.pop() for each in found]
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(able.tolist())
    assert len(chosen) == (num_clients or len(able))
    assert all(part == np.flatnonzero(owners == owner).tolist() for part, owner in zip(parts, chosen, strict=True))


def test_the_seed_chooses_among_owners():
    owners = np.arange(200) % 20
    assert natural(owners, 5, seed=1) == natural(owners, 5, seed=1)
    assert natural(owners, 5, seed=1) != natural(owners, 5, seed=2)
    # Each of 20 owners is among 5 in a quarter of 400 draws, give or take 0.022.
    often = np.bincount([part[0] for seed in range(400) for part in natural(owners, 5, seed)], minlength=20) / 400
    assert often == pytest.approx(np.full(20, 0.25), abs=0.1)


def test_too_few_owners_are_told():
    message = r"2 of 3 owners have 2 examples or more, but 3 clients were requested\n(.*)at least 3 of them"
    with pytest.raises(SparsonaError, match=message):
        natural([7, 2, -1, 7, 2, 5, 7, -1], 3, min_size=2)
    with pytest.raises(SparsonaError, match=r"0 of 3 owners have 9 examples or more\n(.|\n)*smaller min_size"):
        natural([7, 2, -1, 7, 2, 5, 7, -1], min_size=9)
    with pytest.raises(SparsonaError, match="0 of 0 owners"):
        natural([-1, -1])


def test_data_without_owners_is_told():
    with pytest.raises(
        SparsonaError, match=r"these examples have no owners(.|\n)*femnist, shakespeare(.|\n)*owners=, a name"
    ):
        partition("natural", np.zeros(5), None, 0)
    with pytest.raises(SparsonaError, match=r"owners are int64 of shape \(3,\)\n(.*)shape \(5,\)"):
        partition("natural", np.zeros(5), None, 0, owners=np.zeros(3, dtype=int))
    with pytest.raises(SparsonaError, match=r"owners are float64"):
        partition("natural", np.zeros(5), None, 0, owners=np.zeros(5))


numbered = hnp.arrays(np.int64, st.integers(1, 60), elements=st.integers(-1, 6))


@settings(deadline=None, max_examples=40)
@given(owners=numbered, chosen=st.lists(st.integers(0, 8), max_size=6), piece=st.integers(1, 70), data=st.data())
def test_what_is_whose_is_found_piece_by_piece(owners, chosen, piece, data):
    start = data.draw(st.integers(0, len(owners)))
    y = data.draw(hnp.arrays(np.int32, (len(owners), 2), elements=st.integers(0, 6)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whose, "PIECE", piece)
        found = whose.find_by_owner(owners, chosen, start)
        counts, scored = whose.count_by_owner(owners, 7), whose.count_by_owner(owners, 7, y)
    expected = [[i for i, owner in enumerate(owners) if owner == mine and i >= start] for mine in chosen]
    assert [part.tolist() for part in found] == expected
    assert counts.tolist() == [(owners == owner).sum() for owner in range(7)]
    assert scored.tolist() == [((owners == owner) & (y.max(axis=1) > 3)).sum() for owner in range(7)]


def test_owners_are_numbered_without_gaps():
    assert whose.number_owners(np.array([70, -5, 10**12, 70, -1, 3])).tolist() == [1, -1, 2, 1, -1, 0]


def test_people_are_left_out_for_the_first_thing_they_lack():
    people = np.array([3, 5, 8, 9])
    has = {"no arms": np.array([True, False, True, True]), "no legs": np.array([True, False, False, True])}
    able, left_out = whose.keep_eligible(people, has, None)
    assert able.tolist() == [3, 9]
    assert {lack: who.tolist() for lack, who in left_out.items()} == {"no arms": [5], "no legs": [8]}
    assert whose.describe_left_out({"no arms": 1, "no legs": 1}, "but ") == "but 1 with no arms, 1 with no legs"
    assert whose.describe_left_out({}, "but ") == ""
    message = r"2 of 4 owners can be clients, but 3 clients were requested; left out: 1 with no arms, 1 with no legs"
    with pytest.raises(SparsonaError, match=message) as caught:
        whose.keep_eligible(people, has, 3)
    each = "lower --clients (clients=) to 2, or leave it out: each of these owners is a client then"
    assert caught.value.hint == each
    with pytest.raises(SparsonaError, match="but 4 clients") as caught:
        whose.keep_eligible(people, {"fewer than 9 (min_size)": has["no arms"]} | has, 4)
    assert caught.value.hint == f"lower the options named; or {each}"
    with pytest.raises(SparsonaError, match="0 of 4 owners") as caught:
        whose.keep_eligible(people, {"no arms": people > 9}, 3)
    assert "--clients" not in caught.value.hint
