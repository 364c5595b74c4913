"""Partitions lose and duplicate nothing, and are shaped as their papers say."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsona.core.errors import SparsonaError
from sparsona.data.partition import partition
from sparsona.data.partition.by_class import _dirichlet_counts

DRAWN = (
    "iid",
    "dirichlet:0.5",
    "dirichlet:1e-9",
    "dirichlet-uncapped:0.5",
    "dirichlet-uncapped:1e-9",
    "dirichlet-equal:0.3",
    "dirichlet-equal:1e-9",
    "groups:1:0.3",
    "shards:2",
)


def cycle(count, classes):
    return np.arange(count) % classes


def owners(parts, count):
    """One client number per example, checked: every example exactly once, every client sorted."""
    flat = np.concatenate(parts)
    assert np.array_equal(np.sort(flat), np.arange(count))
    assert all((np.diff(part) > 0).all() for part in parts)
    result = np.empty(count, dtype=np.int64)
    for client, part in enumerate(parts):
        result[part] = client
    return result


labelled = st.lists(st.integers(0, 6), min_size=20, max_size=120).map(np.array)


@settings(deadline=None, max_examples=60)
@given(labels=labelled, clients=st.integers(1, 8), seed=st.integers(0, 2**63 - 1), spec=st.sampled_from(DRAWN))
def test_no_example_is_lost_or_duplicated(labels, clients, seed, spec):
    parts = partition(spec, labels, clients, seed, min_size=0)
    assert len(parts) == clients
    assert all(part.dtype == np.int64 for part in parts)
    owners(parts, len(labels))
    again = partition(spec, labels, clients, seed, min_size=0)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@settings(deadline=None, max_examples=40)
@given(labels=labelled, clients=st.integers(1, 8), seed=st.integers(0, 1000))
def test_equal_partitions_differ_by_at_most_one(labels, clients, seed):
    for spec in ("iid", "dirichlet-equal:0.1"):
        sizes = [len(part) for part in partition(spec, labels, clients, seed, min_size=0)]
        assert max(sizes) - min(sizes) <= 1


@settings(deadline=None, max_examples=30)
@given(clients=st.integers(2, 10), seed=st.integers(0, 1000), min_size=st.integers(0, 15))
def test_dirichlet_keeps_the_minimum_size(clients, seed, min_size):
    parts = partition("dirichlet:1", cycle(400, 10), clients, seed, min_size=min_size)
    assert min(map(len, parts)) >= min_size
    owners(parts, 400)


@pytest.mark.parametrize("spec", DRAWN)
def test_the_seed_decides_and_the_global_generator_is_untouched(spec):
    labels = cycle(200, 5)
    before = np.random.get_state()
    first, other = (owners(partition(spec, labels, 4, seed, min_size=1), 200) for seed in (1, 2))
    after = np.random.get_state()
    assert not np.array_equal(first, other)
    assert np.array_equal(before[1], after[1])
    assert before[2:] == after[2:]


def test_iid_deals_evenly():
    assert [len(part) for part in partition("iid", cycle(10, 2), 3, 0, min_size=1)] == [4, 3, 3]


def test_one_client_gets_everything():
    for spec in DRAWN:
        (all_of_it,) = partition(spec, cycle(30, 3), 1, 0)
        assert np.array_equal(all_of_it, np.arange(30))


def test_a_full_client_gets_no_more():
    """Two clients, two classes of ten, a share of 0 or 1: the first class fills one client, the second the other.

    With the shares of full clients zeroed after the draw, half of all draws would divide by zero here.
    """
    for seed in range(20):
        parts = partition("dirichlet:1e-9", np.repeat([0, 1], 10), 2, seed, min_size=10)
        assert sorted(part.tolist() for part in parts) == [list(range(10)), list(range(10, 20))]


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    clients=st.integers(1, 9),
    concentration=st.sampled_from([1e-9, 0.1, 1.0, 1e6]),
    seed=st.integers(0, 2**40),
)
def test_each_class_goes_whole_to_clients_below_the_mean(sizes, clients, concentration, seed):
    counts = _dirichlet_counts(sizes, clients, concentration, np.random.Generator(np.random.PCG64(seed)))
    assert counts.min() >= 0
    assert counts.sum(axis=1).tolist() == sizes
    before = np.cumsum(counts, axis=0) - counts
    assert not counts[before >= sum(sizes) / clients].any()


def test_dirichlet_rounds_down_and_the_last_open_client_takes_the_rest():
    """Shares of a third each of ten examples end at 3.33, 6.67 and 10."""
    parts = partition("dirichlet:1e6", np.zeros(10, dtype=int), 3, 0, min_size=0)
    assert [len(part) for part in parts] == [3, 3, 4]


def test_dirichlet_shares_have_the_right_moments():
    """The first class meets no full client: its shares p are Dir(A), so E p = 1/K and E sum p^2 = (A+1)/(KA+1)."""
    labels = np.repeat([0, 1], [1000, 9000])
    shares = np.array(
        [[(part < 1000).sum() / 1000 for part in partition("dirichlet:0.5", labels, 5, s, 0)] for s in range(400)]
    )
    assert shares.mean(axis=0) == pytest.approx(np.full(5, 0.2), abs=0.04)
    assert (shares**2).sum(axis=1).mean() == pytest.approx(1.5 / 3.5, abs=0.03)


def test_equal_dirichlet_priors_have_about_the_right_moments():
    """With many classes left most of the time, client shares have E sum p^2 = (A+1)/(CA+1), less for late draws."""
    labels = cycle(20_000, 10)

    def concentration(value):
        parts = partition(f"dirichlet-equal:{value}", labels, 100, 3)
        shares = np.array([np.bincount(labels[part], minlength=10) for part in parts]) / 200
        assert shares.mean(axis=0) == pytest.approx(np.full(10, 0.1))
        return (shares**2).sum(axis=1).mean()

    assert concentration(0.3) == pytest.approx(1.3 / 4, rel=0.2)
    assert concentration(100) == pytest.approx(0.1, rel=0.1)
    assert concentration(0.03) > concentration(0.3) > concentration(3)


def test_shards_by_hand():
    """Sorted by label the order is 1, 3, 0, 2: shards (1, 3) and (0, 2)."""
    parts = partition("shards:1", np.array([1, 0, 1, 0]), 2, 0, min_size=1)
    assert sorted(part.tolist() for part in parts) == [[0, 2], [1, 3]]
    # Examples of one class keep their order: writers or days that follow each other end up in one shard.
    parts = partition("shards:1", cycle(400, 2), 4, 0)
    expected = [range(0, 200, 2), range(1, 200, 2), range(200, 400, 2), range(201, 400, 2)]
    assert sorted(part.tolist() for part in parts) == list(map(list, expected))


def test_shards_give_few_classes_to_each_client():
    labels = cycle(1000, 10)
    for part in partition("shards:2", labels, 10, 0):
        assert len(part) == 100
        assert len(np.unique(labels[part])) <= 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dirichlett:0.3", r"unknown partition 'dirichlett'(.|\n)*did you mean 'dirichlet:A'"),
        ("shard:2", r"unknown partition 'shard'(.|\n)*did you mean 'shards:C'"),
        ("", r"unknown partition ''(.|\n)*one of dirichlet-equal:A, (.*), file:PATH, groups:G:A, iid, natural, "),
        ("iid:3", r"partition 'iid:3' has an argument\n  expected: iid alone"),
        ("natural:3", r"has an argument\n  expected: natural alone"),
        ("dirichlet", r"'dirichlet' lacks its argument\n  expected: dirichlet:A\n(.*)write for example dirichlet:0.3"),
        ("dirichlet-equal:", r"lacks its argument\n  expected: dirichlet-equal:A"),
        ("shards", r"lacks its argument\n  expected: shards:C\n(.*)shards:2"),
        ("file:", r"lacks its argument\n  expected: file:PATH"),
        ("dirichlet:0", r"'0' is not a concentration\n  expected: dirichlet:A with A greater than 0"),
        ("dirichlet:-1", "'-1' is not a concentration"),
        ("dirichlet:nan", "'nan' is not a concentration"),
        ("dirichlet:inf", r"'inf' is not a concentration(.|\n)*or iid"),
        ("dirichlet-equal:much", "'much' is not a concentration"),
        ("shards:0", r"'0' is not a number of shards\n  expected: shards:C with C a positive whole number"),
        ("shards:-2", "'-2' is not a number of shards"),
        ("shards:1.5", "'1.5' is not a number of shards"),
        ("dirichlet-uncapped:0", r"'0' is not a concentration(.|\n)*dirichlet-uncapped:0.3"),
        ("pathological", r"lacks its argument\n  expected: pathological:C\n(.*)pathological:2"),
        ("pathological:0", r"'0' is not a number of classes\n  expected: pathological:C with C a positive"),
        ("pathological-refill:x", r"'x' is not a number of classes\n  expected: pathological-refill:C with C a"),
        ("groups", r"lacks its argument\n  expected: groups:G:A\n(.*)groups:4:0.3"),
        ("groups:4", r"lacks one of its arguments\n  expected: groups:G:A"),
        ("groups:4:", "lacks one of its arguments"),
        ("groups::0.3", "lacks one of its arguments"),
        ("groups:0:0.3", r"'0' is not a number of groups\n  expected: groups:G:A with G a positive whole number"),
        ("groups:2:0", r"'0' is not a concentration\n  expected: groups:G:A with A greater than 0"),
        ("groups:2:0.3:1", "'0.3:1' is not a concentration"),
    ],
)
def test_what_cannot_be_parsed_is_told(spec, message):
    with pytest.raises(SparsonaError, match=message):
        partition(spec, cycle(100, 2), 2, 0)


def test_too_few_examples_are_told_at_once():
    with pytest.raises(SparsonaError, match=r"100 examples cannot give 11 clients 10 each(.|\n)*at most 10 clients"):
        partition("iid", cycle(100, 2), 11, 0)


def test_a_minimum_size_out_of_reach_is_told(monkeypatch):
    monkeypatch.setattr("sparsona.data.partition.by_class.MAX_TRIES", 200)
    message = (
        r"no draw of dirichlet:1e-09 in 200 gave each of 5 clients 2 examples; the best left a client with 0"
        r"(.|\n)*min_size(.|\n)*larger A, fewer clients or a smaller min_size"
    )
    with pytest.raises(SparsonaError, match=message):
        partition("dirichlet:1e-9", cycle(100, 2), 5, 0, min_size=2)


def test_shards_that_come_out_too_small_are_told():
    message = r"shards:3 for 10 clients cuts 100 examples into 30 shards of 3, 9 for some clients(.|\n)*smaller C"
    with pytest.raises(SparsonaError, match=message):
        partition("shards:3", cycle(100, 2), 10, 0)
    with pytest.raises(SparsonaError, match="into 200 shards of 0"):
        partition("shards:100", cycle(100, 2), 2, 0, min_size=0)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (f"pathological:{'9' * 5_000}", "not a number of classes"),
        (f"shards:{'9' * 5_000}", "not a number of shards"),
        (f"groups:{'9' * 5_000}:1", "not a number of groups"),
        (f"dirichlet:{'9' * 5_000}", "not a concentration"),
        ("dirichlet:1_0", "'1_0' is not a concentration"),
        ("dirichlet:٠.٣", "'٠.٣' is not a concentration"),
        ("pathological:1_0", "'1_0' is not a number of classes"),
        ("pathological:٢", "'٢' is not a number of classes"),
    ],
)
def test_numbers_are_written_in_plain_digits_and_told_in_one_line(spec, message):
    with pytest.raises(SparsonaError, match=message) as caught:
        partition(spec, cycle(100, 10), 5, 0)
    assert all(len(line) < 250 for line in str(caught.value).splitlines())


def test_no_clients_or_no_labels_are_told():
    with pytest.raises(SparsonaError, match=r"0 clients\n  expected: at least 1 client"):
        partition("iid", cycle(10, 2), 0, 0)
    with pytest.raises(SparsonaError, match=r"labels of shape \(0,\)"):
        partition("iid", np.array([], dtype=int), 1, 0)
    with pytest.raises(SparsonaError, match=r"labels of shape \(2, 2, 2\)"):
        partition("iid", np.zeros((2, 2, 2), dtype=int), 1, 0)
    with pytest.raises(SparsonaError, match=r"iid without a number of clients\n(.*)only natural and file:PATH"):
        partition("iid", cycle(10, 2), None, 0)


def test_sequences_have_no_class_to_go_by(tmp_path):
    tokens = np.zeros((40, 5), dtype=np.int32)
    np.save(tmp_path / "a.npy", np.arange(40) % 2)
    for spec in ("iid", "natural", f"file:{tmp_path}/a.npy"):
        owners(partition(spec, tokens, 2, 0, owners=np.arange(40) // 20), 40)
    for spec in (*DRAWN[1:], "pathological:1", "pathological-refill:1"):
        with pytest.raises(SparsonaError, match=rf"{spec} goes by class(.|\n)*natural \(by owner\), iid or file:PATH"):
            partition(spec, tokens, 2, 0)


@pytest.fixture
def from_file(tmp_path):
    def run(content, clients=2, count=5, name="clients"):
        """Partition 5 examples among 2 clients by a file of this content."""
        path = tmp_path / (f"{name}.npy" if isinstance(content, np.ndarray) else f"{name}.json")
        if isinstance(content, np.ndarray):
            np.save(path, content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        return [part.tolist() for part in partition(f"file:{path}", cycle(count, 2), clients, 0)]

    return run


def test_a_file_says_how_many_clients_there_are(from_file):
    assert from_file([[4, 1], [0], [2]], clients=None) == [[1, 4], [0], [2]]


def test_files_by_hand(from_file):
    assert from_file(np.array([1, 0, 1, 0, 0])) == [[1, 3, 4], [0, 2]]
    assert from_file([[4, 1], [0]]) == [[1, 4], [0]]
    assert from_file({"1": [0], "0": [4, 1]}) == [[1, 4], [0]]


def test_examples_may_go_unused_and_clients_may_be_empty(from_file):
    assert from_file(np.array([1, -1, -1, 0, 0], dtype=np.int8)) == [[3, 4], [0]]
    assert from_file([[], [0, 1]]) == [[], [0, 1]]
    assert from_file(np.array([1, 1, 1, -1, 1])) == [[], [0, 1, 2, 4]]


@settings(deadline=None, max_examples=25)
@given(labels=labelled, seed=st.integers(0, 100))
def test_a_partition_survives_its_file(labels, seed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    parts = partition("iid", labels, 4, seed, min_size=1)
    np.save(folder / "a.npy", owners(parts, len(labels)))
    (folder / "a.json").write_text(json.dumps([part.tolist() for part in parts]))
    for path in folder.iterdir():
        read = partition(f"file:{path}", labels, 4, 0)
        assert all(np.array_equal(a, b) for a, b in zip(parts, read, strict=True))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.array([0, 1, 0]), "has 3 entries, but the data set has 5 examples"),
        (np.array([0, 1, 2, 0, 0]), r"is for 3 clients, but 2 were requested\n(.|\n)*ask for 3 clients"),
        (np.array([0, 0, 0, 0, 0]), "is for 1 clients, but 2 were requested"),
        (np.array([0, 1, -2, 0, 0]), "has client numbers from -2 to 1"),
        (np.full(5, -1), "has client numbers from -1 to -1"),
        (np.array([0, 1, 10**12, 0, 0]), "has client number 1000000000000"),
        (np.array([0.0, 1, 1, 0, 0]), r"holds float64 of shape \(5,\)\n  expected: one whole number per example"),
        (np.zeros((5, 1), dtype=int), r"holds int64 of shape \(5, 1\)"),
        (np.array([{}, {}], dtype=object), "cannot be read"),
        ([[0, 1], [5]], r"client 1 has example 5\n  expected: example numbers from 0 to 4"),
        ([[0, -1], [2]], "client 0 has example -1"),
        ([[0, 1], [10**30]], f"client 1 has example {10**30}"),
        ([[0, 1], [1, 0]], "names 2 examples more than once, the first is 0"),
        ([[0, 3, 3], [1]], "names 1 example more than once, the first is 3"),
        ([[0], [1], [2]], "is for 3 clients, but 2 were requested"),
        ([[0], [1.0]], "client 1 is not a list of whole numbers"),
        ([[0], [True]], "client 1 is not a list of whole numbers"),
        ([0, 1, 0], "client 0 is not a list of whole numbers"),
        ({"0": [0], "2": [1]}, r"has a client '2' among 2\n  expected: clients numbered '0' to '1' without gaps"),
        ({"anna": [0], "1": [1]}, "has a client 'anna'"),
        ([], "holds no clients"),
        ("3", "holds no clients"),
        ("[[0], [1]", "cannot be read"),
        ('{"0": [0, 1], "0": [2, 3], "1": [4]}', "'0' occurs more than once"),
        ("[" * 100_000, "cannot be read"),
        ("[[" + "1" * 5_000 + "]]", "cannot be read"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(from_file, content, message):
    with pytest.raises(SparsonaError, match=message):
        from_file(content)


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(SparsonaError, match=r"'.*nowhere.npy' does not exist"):
        partition(f"file:{tmp_path}/nowhere.npy", cycle(5, 2), 2, 0)
    with pytest.raises(SparsonaError, match=r"has the ending '.csv'\n  expected: .npy or .json"):
        partition("file:clients.csv", cycle(5, 2), 2, 0)
    head = "{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000000,), }".ljust(117) + "\n"
    (tmp_path / "huge.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode())
    with pytest.raises(SparsonaError, match="cannot be read"):
        partition(f"file:{tmp_path}/huge.npy", cycle(5, 2), 2, 0)
    (tmp_path / "empty.npy").touch()
    with pytest.raises(SparsonaError, match="cannot be read"):
        partition(f"file:{tmp_path}/empty.npy", cycle(5, 2), 2, 0)
    with (tmp_path / "several.npy").open("wb") as file:
        np.savez(file, a=np.zeros(5), b=np.zeros(5))
    with pytest.raises(SparsonaError, match="holds several arrays"):
        partition(f"file:{tmp_path}/several.npy", cycle(5, 2), 2, 0)
