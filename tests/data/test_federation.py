"""Federations: disjoint splits with equal label shares, one pooled storage, checks that tell what is wrong."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsona.core.errors import SparsonaError
from sparsona.core.round import Client
from sparsona.core.seeds import Seeds
from sparsona.data.client_index import PARTS, Split
from sparsona.data.federate import federate
from sparsona.data.federation import Federation
from sparsona.data.holdout import take_stratified
from sparsona.data.partition import partition


def numbered(labels):
    """Example i is (i, i)."""
    labels = np.asarray(labels)
    return np.arange(len(labels), dtype=np.float32)[:, None].repeat(2, axis=1), labels


def indices(federation, client):
    return {part: getattr(federation.splits[client], part).tolist() for part in PARTS}


def same(a, b):
    return [indices(a, k) for k in range(a.num_clients)] == [indices(b, k) for k in range(b.num_clients)]


labelled = st.lists(st.integers(0, 5), min_size=20, max_size=150)


@settings(deadline=None, max_examples=60)
@given(
    labels=labelled,
    clients=st.integers(1, 6),
    seed=st.integers(0, 2**40),
    validation_rate=st.sampled_from([0.0, 0.1, 0.3]),
    test_rate=st.sampled_from([0.01, 0.25, 0.6]),
)
def test_splits_are_disjoint_complete_and_have_equal_label_shares(labels, clients, seed, validation_rate, test_rate):
    x, y = numbered(labels)
    rates = {"validation_rate": validation_rate, "test_rate": test_rate}
    f = federate(x, y, clients=clients, partition="iid", seed=seed, num_classes=6, min_size=3, **rates)
    parts = partition("iid", y, clients, Seeds(seed).shared("partition"), min_size=3)
    for k, mine in enumerate(parts):
        split = indices(f, k)
        assert sorted(i for part in split.values() for i in part) == mine.tolist()
        assert all(part == sorted(part) for part in split.values())
        assert split["train"]
        assert split["test"]
        assert bool(split["validation"]) == (validation_rate > 0)
        if all(len(part) > 1 for part in split.values()):  # else a minimum of one decided
            assert abs(len(split["test"]) - len(mine) * test_rate) <= 0.5
            assert abs(len(split["validation"]) - len(mine) * validation_rate) <= 0.5
        have, test, validation = (np.bincount(y[i], minlength=6) for i in (mine, split["test"], split["validation"]))
        # Each class is within one of its exact quota: of all for test, of what is left for validation.
        assert (np.abs(test - have * test.sum() / have.sum()) < 1).all()
        rest = have - test
        assert (np.abs(validation - rest * validation.sum() / rest.sum()) < 1).all()


def test_a_split_by_hand():
    """Eight of class 0 and four of class 1: a quarter is 2 + 1 for test, 2 + 1 for validation, and 4 + 2 remain."""
    x, y = numbered([0] * 8 + [1] * 4)
    f = federate(x, y, clients=1, partition="iid", validation_rate=0.25)
    assert f.label_counts("test").tolist() == [[2, 1]]
    assert f.label_counts("validation").tolist() == [[2, 1]]
    assert f.label_counts("train").tolist() == [[4, 2]]


def test_the_largest_remainder_by_hand():
    """Six, three and one, a half for test: quotas 3, 1.5 and 0.5, so that one of the last two classes gives one more,
    sometimes this, sometimes that."""
    x, y = numbered([0] * 6 + [1] * 3 + [2])
    counts = {
        tuple(
            federate(x, y, clients=1, partition="iid", seed=s, validation_rate=0, test_rate=0.5)
            .label_counts("test")[0]
            .tolist()
        )
        for s in range(20)
    }
    assert counts == {(3, 2, 0), (3, 1, 1)}


def test_tiny_clients_train_and_test():
    """Two examples: train and test. Three: one of each. More than that is up to the rates."""
    x, y = numbered([0] * 5)
    f = federate(x, y, clients=2, partition="iid", test_rate=0.85, min_size=2)
    assert [[len(part) for part in indices(f, k).values()] for k in (0, 1)] == [[1, 1, 1], [1, 0, 1]]


@pytest.mark.parametrize("spec", ["iid", "dirichlet:0.5", "dirichlet-equal:0.5", "shards:2"])
def test_same_seed_same_federation_and_no_global_generator(spec, digits):
    x, y = digits
    numpy_before, torch_before = np.random.get_state()[1].copy(), torch.get_rng_state()
    first, again, other = (federate(x, y, clients=8, partition=spec, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(np.random.get_state()[1], numpy_before)
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert same(first, again)
    assert first.digest() == again.digest()
    assert not same(first, other)
    assert first.digest() != other.digest()
    assert sum(len(part) for k in range(8) for part in indices(first, k).values()) == 1797


def test_the_partition_seed_replaces_the_seed(digits):
    x, y = digits
    fixed = [federate(x, y, clients=5, seed=seed, partition_seed=7) for seed in (0, 1)]
    assert same(*fixed)
    assert same(fixed[0], federate(x, y, clients=5, seed=7))
    assert not same(fixed[0], federate(x, y, clients=5, seed=0))


def test_a_clients_split_does_not_depend_on_the_other_clients(tmp_path):
    x, y = numbered(np.arange(60) % 3)
    owners = np.repeat([0, 1], 30)
    np.save(tmp_path / "two.npy", owners)
    np.save(tmp_path / "three.npy", np.where(np.arange(60) < 45, owners, 2))
    two = federate(x, y, clients=2, partition=f"file:{tmp_path}/two.npy")
    three = federate(x, y, clients=3, partition=f"file:{tmp_path}/three.npy")
    assert indices(two, 0) == indices(three, 0)


def test_draws_come_from_the_seeds_named_partition_and_split():
    x, y = numbered(np.arange(80) % 4)
    f = federate(x, y, clients=2, partition="iid", seed=9, validation_rate=0)
    for k, mine in enumerate(partition("iid", y, 2, Seeds(9).shared("partition"))):
        rng = np.random.Generator(np.random.PCG64(Seeds(9).of(k).own("split")))
        test, train = take_stratified(mine, y, 10, rng)
        assert indices(f, k) == {"train": train.tolist(), "validation": [], "test": test.tolist()}


def test_what_a_federation_says_of_itself(digits):
    x, y = digits
    f = federate(x, y, clients=6, name="digits")
    assert (f.num_clients, f.num_classes, f.input_shape, f.name) == (6, 10, (1, 8, 8), "digits")
    assert f.x.data_ptr() == x.data_ptr()  # one pool, not copied
    counts = f.label_counts("train")
    assert counts.shape == (6, 10)
    assert counts.dtype == torch.int64
    assert [client.num_examples for client in f.clients()] == counts.sum(dim=1).tolist()
    assert {client.most_examples for client in f.clients()} == {int(counts.sum(dim=1).max())}
    assert sum(f.label_counts(part) for part in PARTS).sum(dim=0).tolist() == y.bincount().tolist()
    held = int(f.label_counts("validation")[2].sum())
    assert f.clients()[2] == Client(2, int(counts[2].sum()), 1.0, held, 6, int(counts.sum(dim=1).max()))
    assert [client.capacity for client in f.clients([0.2, 0.5])] == [0.2, 0.5] * 3
    for part in PARTS:
        examples = f.examples(4, part)
        index = getattr(f.splits[4], part)
        assert torch.equal(examples.inputs, x[index])
        assert torch.equal(examples.targets, y[index])
        assert examples.inputs.is_contiguous()


def test_arrays_and_tensors_of_any_number_type_are_taken():
    x, y = numbered(np.arange(40) % 2)
    expected = federate(x, y, clients=2)
    frozen = x.copy()
    frozen.flags.writeable = False
    variants = (x.astype(np.uint8), x.astype(np.float64), torch.from_numpy(x).half(), torch.from_numpy(x).bfloat16())
    for other in (*variants, frozen, x.tolist(), np.asfortranarray(x), torch.from_numpy(x).requires_grad_()):
        got = federate(other, torch.from_numpy(y).to(torch.uint8), clients=2)
        assert got.x.dtype == torch.float32
        assert not got.x.requires_grad
        assert got.digest() == expected.digest()
    images = federate(np.zeros((40, 8, 8), dtype=np.uint8), y.tolist(), clients=2)
    assert images.input_shape == (8, 8)
    assert federate(np.arange(40).reshape(-1, 1), y, clients=2).input_shape == (1,)


def test_the_digest_tells_data_labels_and_splits_apart():
    x, y = numbered(np.arange(40) % 2)
    plain = federate(x, y, clients=2, partition="iid")
    pixel, label = x.copy(), y.copy()
    pixel[17, 1] += 1
    label[0], label[1] = label[1], label[0]
    others = [
        federate(pixel, y, clients=2, partition="iid"),
        federate(x, label, clients=2, partition="iid"),
        federate(x, y, clients=2, partition="iid", num_classes=3),
        federate(x, y, clients=2, partition="iid", test_rate=0.5),
        federate(x[:, :, None], y, clients=2, partition="iid"),
        Federation(plain.x, plain.y, plain.splits[::-1], 2),
    ]
    assert len({f.digest() for f in (plain, *others)}) == 1 + len(others)
    assert federate(x, y, clients=2, partition="iid", name="other").digest() == plain.digest()
    assert len(plain.digest()) == 32


def test_a_saved_federation_opens_equal_and_memory_mapped(tmp_path, digits):
    x, y = digits
    f = federate(x, y, clients=6, name="digits", validation_rate=0)
    f.save(tmp_path / "new" / "folder")
    g = Federation.open(str(tmp_path / "new" / "folder"))
    assert (g.name, g.num_classes) == ("digits", 10)
    assert torch.equal(f.x, g.x)
    assert torch.equal(f.y, g.y)
    assert same(f, g)
    assert f.digest() == g.digest()
    assert all(index.dtype == torch.int64 for index in (g.splits[0].train, g.splits[0].validation))
    assert not list((tmp_path / "new" / "folder").glob("*.part"))
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(tmp_path / "new" / "folder" / "x.npy") in maps.read_text()
    # Mapped: neither what is written to the tensor nor a new save reaches the other.
    g.x[0] = 5
    assert Federation.open(tmp_path / "new" / "folder").digest() == f.digest()
    federate(x * 0, y, clients=2).save(tmp_path / "new" / "folder")
    assert torch.equal(g.x[1:], x[1:])
    assert Federation.open(tmp_path / "new" / "folder").num_clients == 2


def test_a_federation_can_be_pickled():
    f = federate(*numbered(np.arange(40) % 2), clients=2)
    assert pickle.loads(pickle.dumps(f)).digest() == f.digest()


def test_a_folder_without_a_federation_is_told(tmp_path):
    with pytest.raises(SparsonaError, match=r"holds no federation that can be read(.|\n)*written by Federation.save"):
        Federation.open(tmp_path)
    federate(*numbered(np.arange(40) % 2), clients=2).save(tmp_path)
    np.save(tmp_path / "y.npy", np.zeros(3, dtype=np.int64))
    with pytest.raises(SparsonaError, match="its files do not belong together"):
        Federation.open(tmp_path)
    (tmp_path / "federation.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(SparsonaError, match="format 99 instead of 2"):
        Federation.open(tmp_path)


def client_arrays(count, offset, classes=2):
    x, y = numbered(np.arange(count) % classes)
    return x + offset, y


def test_clients_already_apart_stay_apart():
    """Ten to train, of which a fifth, one per class, is for validation; five to test, kept in order."""
    clients = [(*client_arrays(10, 100 * k), *client_arrays(5, 100 * k + 50)) for k in range(3)]
    f = Federation.from_clients(clients, validation_rate=0.2, name="mine")
    assert (f.num_clients, f.num_classes, f.input_shape, f.name) == (3, 2, (2,), "mine")
    assert f.label_counts("validation").tolist() == [[1, 1]] * 3
    assert f.label_counts("train").tolist() == [[4, 4]] * 3
    for k in range(3):
        kept = torch.cat([f.examples(k, "train").inputs, f.examples(k, "validation").inputs])
        assert sorted(kept[:, 0].tolist()) == [100 * k + i for i in range(10)]
        assert f.examples(k, "test").inputs[:, 0].tolist() == [100 * k + 50 + i for i in range(5)]
        assert f.examples(k, "test").targets.tolist() == [0, 1, 0, 1, 0]
    assert same(f, Federation.from_clients(clients, validation_rate=0.2))
    assert not same(f, Federation.from_clients(clients, validation_rate=0.2, seed=1))


def test_validation_data_may_be_given():
    train, validation, test = client_arrays(6, 0), client_arrays(3, 20), client_arrays(4, 40)
    empty = (np.zeros((0, 2)), np.zeros(0))
    f = Federation.from_clients([(*train, *validation, *test), (*train, *empty, *test), (*train, *test)])
    assert [len(part) for part in indices(f, 0).values()] == [6, 3, 4]
    assert f.examples(0, "validation").inputs[:, 0].tolist() == [20, 21, 22]
    assert [len(part) for part in indices(f, 1).values()] == [6, 0, 4]
    assert [len(part) for part in indices(f, 2).values()] == [5, 1, 4]
    one = Federation.from_clients([(*client_arrays(1, 0), *client_arrays(1, 1))])
    assert [len(part) for part in indices(one, 0).values()] == [1, 0, 1]


X, Y = numbered(np.arange(40) % 4)
HOLED = X.copy()
HOLED[[7, 9], 1] = np.nan


@pytest.mark.parametrize(
    ("x", "y", "options", "message"),
    [
        (X[:39], Y, {}, r"x has 39 examples and y has 40 labels\n  expected: one label per example"),
        (HOLED, Y, {}, "x holds NaN or infinity in 2 of 40 examples, the first is example 7"),
        (X.astype(np.float64) * 1e300, Y, {}, "x holds NaN or infinity in 39 of 40 examples, the first is example 1"),
        (X.astype(str), Y, {}, r"x is an array of <U\d+ of shape \(40, 2\)(.|\n)*astype"),
        (X.astype(complex), Y, {}, "x is an array of complex128"),
        (np.float32(3), Y, {}, r"of shape \(\)"),
        ([[1.0, 2.0], [3.0]], [0, 1], {}, r"x is not an array: (.|\n)*rows of equal shape"),
        (X, Y[:, None], {}, r"y has shape \(40, 1\)\n  expected: one label per example"),
        (X, Y * 1.0, {}, r"labels of type float64: all 40 are whole(.|\n)*astype"),
        (X, Y + 0.5, {}, "goes by class, but these examples have numbers for targets"),
        (X, Y - 1, {}, r"labels -1 are outside the range\n  expected: whole numbers from 0 to 2(.|\n)*numpy.unique"),
        (X, Y - 9, {}, r"labels -9, -8, -7, -6 are outside"),
        (X, np.arange(40), {"num_classes": 3}, r"labels from 3 to 39 are outside(.|\n)*from 0 to 2"),
        (X, 2 * Y, {}, r"3 of the labels from 0 to 6 never occur, the first is 1(.|\n)*return_inverse=True"),
        (X, Y + 10**12, {}, r"1000000000000 of the labels from 0 to 1000000000003 never occur, the first is 0"),
        (X, Y, {"num_classes": 0}, "num_classes is 0"),
        (X[:0], Y[:0], {}, "no examples"),
        (X, Y, {"clients": 0}, r"0 clients\n  expected: at least 1 client"),
        (X, Y, {"clients": 5}, "40 examples cannot give 5 clients 10 each"),
        (X, Y, {"clients": 40, "min_size": 1, "partition": "iid"}, "client 0 has only one example\n"),
        (X, Y, {"clients": 41, "min_size": 0, "partition": "iid"}, "client 0 has only one example\n"),
        (X, Y, {"clients": 3, "min_size": 0, "partition": "dirichlet:1e-9", "seed": 1}, r"client \d has no examples\n"),
        (X, Y, {"validation_rate": -0.1}, "validation_rate is -0.1"),
        (X, Y, {"validation_rate": 1}, "validation_rate is 1"),
        (X, Y, {"validation_rate": float("nan")}, "validation_rate is nan"),
        (X, Y, {"test_rate": 0}, r"test_rate is 0\n  expected: between 0 and 1"),
        (X, Y, {"test_rate": 1.5}, "test_rate is 1.5"),
        (X, Y, {"test_rate": 0.5, "validation_rate": 0.5}, r"leave nothing to train on\n  expected: a sum below 1"),
    ],
)
def test_what_is_wrong_with_data_is_told(x, y, options, message):
    with pytest.raises(SparsonaError, match=message):
        federate(x, y, **{"clients": 2, **options})


def test_a_client_that_a_file_leaves_empty_is_named(tmp_path):
    (tmp_path / "clients.json").write_text(json.dumps([[0, 1, 2], [], [4, 5]]))
    with pytest.raises(SparsonaError, match=r"client 1 has no examples\n  expected: at least one to train"):
        federate(X, Y, clients=3, partition=f"file:{tmp_path}/clients.json")


GOOD = (X, Y, X, Y)


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([], "no clients"),
        ([GOOD, (X, Y, X)], "client 1 has 3 arrays"),
        ([GOOD, (X, Y, X[:3], Y)], "client 1, test: x has 3 examples and y has 40 labels"),
        ([GOOD, (HOLED, Y, X, Y)], "client 1, train: x holds NaN or infinity in 2 of 40 examples"),
        ([GOOD, (X, Y, X, Y * 1.0)], "client 1, test: labels of type float64"),
        ([GOOD, (X, Y, X, Y + 0.5)], "client 1, test: targets of another kind"),
        ([GOOD, (X[:0], Y[:0], X, Y)], "client 1 has no train examples"),
        ([(X, Y, X[:0], Y[:0])], "no client has test examples"),
        ([GOOD, (X[:, :1], Y, X, Y)], r"client 1, train: examples of shape \(1,\)\n  expected: \(2,\)"),
        ([GOOD, (X, Y, X, Y + 5)], "1 of the labels from 0 to 8 never occur, the first is 4"),
    ],
)
def test_what_is_wrong_with_a_client_is_told(clients, message):
    with pytest.raises(SparsonaError, match=message):
        Federation.from_clients(clients)


def test_what_is_wrong_with_a_question_is_told():
    f = federate(X, Y, clients=2)
    with pytest.raises(SparsonaError, match=r"unknown part of the data 'tset'(.|\n)*did you mean 'test'"):
        f.examples(0, "tset")
    for client in (-1, 2):
        with pytest.raises(SparsonaError, match=rf"there is no client {client}\n  expected: 0 to 1"):
            f.examples(client, "test")
    for capacities in ([], [0.5, 0], [1.5]):
        with pytest.raises(SparsonaError, match=r"capacities (.|\n)*each greater than 0 and at most 1"):
            f.clients(capacities)
    with pytest.raises(SparsonaError, match="validation_rate is 1"):
        Federation.from_clients([GOOD], validation_rate=1)


def test_splits_are_cut_where_they_are_looked_at():
    """Splits handed in one by one are kept as one index; all that is asked of them stays as it was."""
    parts = [([4, 5], [], [6]), ([0], [1], [2, 3])]
    splits = tuple(Split(*(torch.tensor(part, dtype=torch.int64) for part in client)) for client in parts)
    x, y = torch.arange(14.0).view(7, 2), torch.tensor([0, 1, 1, 0, 1, 1, 0])
    f = Federation(x, y, splits, 2)
    assert [[getattr(split, part).tolist() for part in PARTS] for split in f.splits] == [list(c) for c in parts]
    assert f.splits[-1].test.tolist() == [2, 3]
    with pytest.raises(IndexError):
        f.splits[2]
    assert f.sizes().tolist() == [[2, 0, 1], [1, 1, 2]]
    assert f.label_counts("train").tolist() == [[0, 2], [1, 0]]
    assert f.label_counts("test").tolist() == [[1, 0], [1, 1]]
    assert [(c.num_examples, c.num_validation) for c in f.clients()] == [(2, 0), (1, 1)]
    assert f.examples(1, "test").inputs.tolist() == [[4.0, 5.0], [6.0, 7.0]]
