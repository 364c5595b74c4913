"""From a pool to clients: which examples are trained on and which tested on, in every way the papers have."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsona.core.errors import SparsonaError
from sparsona.data.federation import PARTS, Federation
from sparsona.data.pool import Pool, View
from sparsona.data.sharing import federate, share

NUM_TRAIN, NUM_TEST, CLASSES = 600, 200, 5


def pool_of(owners=None, num_train=NUM_TRAIN, tokens=False):
    """Every example's input is its own number."""
    count = NUM_TRAIN + NUM_TEST
    rng = np.random.default_rng(0)
    x = np.arange(count, dtype=np.float32).reshape(-1, 1)
    y = rng.integers(CLASSES, size=count)
    if tokens:
        x = np.arange(count * 3, dtype=np.int32).reshape(count, 3)
        y = rng.integers(1, 9, size=(count, 3)).astype(np.int32)
    return Pool("made-up", x, y, 9 if tokens else CLASSES, num_train, owners)


def writers(num=12, same_in_test=True):
    """Writer w has 20 + 5 w training examples; in the test set the same writers, or others."""
    sizes = 20 + 5 * np.arange(num)
    train = np.repeat(np.arange(num), sizes)[:NUM_TRAIN]
    train = np.concatenate([train, np.full(NUM_TRAIN - len(train), -1)])
    test = np.arange(NUM_TEST) % num + (0 if same_in_test else num)
    return np.concatenate([train, test])


def everything(federation: Federation, part: str) -> torch.Tensor:
    return torch.cat([getattr(split, part) for split in federation.splits])


@pytest.mark.parametrize(
    ("test", "partition", "expected"),
    [
        ("auto", "iid", "shares"),
        ("shares:30", "iid", "shares:30"),
        ("auto", "natural", "natural"),
        ("split", "natural", "split"),
        ("split-train", "iid", "split-train"),
        ("split", "iid", "split"),
    ],
)
def test_a_client_is_tested_on_what_was_asked_for(test, partition, expected):
    clients = None if partition == "natural" else 6
    f = share(pool_of(writers()), clients=clients, partition=partition, test=test, seed=3)
    assert f.tested_on == expected
    trained, tested = torch.cat([everything(f, "train"), everything(f, "validation")]), everything(f, "test")
    assert len(trained.unique()) == len(trained)
    if expected == "split":
        assert tested.max() >= NUM_TRAIN > tested.min()  # all is pooled
    elif expected == "split-train":
        assert max(trained.max(), tested.max()) < NUM_TRAIN
    else:
        assert trained.max() < NUM_TRAIN <= tested.min()
    for split in f.splits:  # no client is tested on what it has seen
        parts = [set(getattr(split, part).tolist()) for part in PARTS]
        assert len(set.union(*parts)) == sum(map(len, parts))
        assert all(parts[i] for i in (0, 2))


def test_tests_by_shares_have_the_clients_own_shares():
    f = share(pool_of(), clients=6, partition="dirichlet-equal:0.3", test="shares:20", validation_rate=0, seed=1)
    train, test = f.label_counts("train"), f.label_counts("test")
    assert torch.equal(test, -(-train * 20 // train.sum(dim=1, keepdim=True)))
    assert len(everything(f, "test").unique()) < len(everything(f, "test"))  # clients share some


def test_natural_clients_are_tested_on_their_own_examples():
    owners = writers()
    f = share(pool_of(owners), clients=None, partition="natural")
    assert f.num_clients == 12
    for k, split in enumerate(f.splits):
        assert {int(owner) for part in PARTS for owner in owners[getattr(split, part).numpy()]} == {k}
        assert len(split.test) == (owners[NUM_TRAIN:] == k).sum()


def test_writers_who_wrote_no_test_examples_are_split():
    f = share(pool_of(writers(same_in_test=False)), clients=None, partition="natural")
    assert (f.tested_on, f.num_clients) == ("split-train", 12)
    assert everything(f, "test").max() < NUM_TRAIN
    pooled = share(pool_of(writers(same_in_test=False)), clients=None, partition="natural", test="split")
    assert pooled.num_clients == 24


def test_people_with_too_little_are_left_out_and_those_with_too_much_keep_some():
    owners = writers()
    f = share(pool_of(owners), clients=None, partition="natural", min_train=40, max_examples=60, validation_rate=0.1)
    who = [int(owners[split.train[0]]) for split in f.splits]
    sizes = {w: (owners[:NUM_TRAIN] == w).sum() for w in range(12)}
    for writer, size in sizes.items():
        left = min(size, 60) - int(min(size, 60) * 0.1 + 0.5)
        assert (writer in who) == (left >= 40)
    assert int(f.sizes()[:, :2].sum(dim=1).max()) == 60
    few = share(pool_of(owners), clients=3, partition="natural", min_train=40)
    assert few.num_clients == 3
    assert share(pool_of(owners), clients=None, partition="natural", data_rate=0.25).num_clients == 3
    with pytest.raises(SparsonaError, match="min_train"):
        share(pool_of(), clients=20, partition="iid", min_train=40)


def test_a_share_of_the_data_is_used():
    f = share(pool_of(), clients=4, partition="iid", test="split", data_rate=0.1)
    assert sum(len(everything(f, part)) for part in PARTS) == 80
    other = share(pool_of(), clients=4, partition="iid", test="split", data_rate=0.1, seed=1)
    assert f.digest() != other.digest()
    assert share(pool_of(), clients=4, partition="iid", max_examples=50).sizes()[:, :2].sum(dim=1).tolist() == [50] * 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"test": "share"}, "shares:N"),
        ({"test": "shares:0"}, "shares:100"),
        ({"test": "split:3"}, "shares:N"),
        ({"test": "natural"}, "partition natural"),
        ({"partition": "natural", "clients": None}, "natural"),
        ({"partition": "pathological-refill:2", "test": "split"}, "test=shares"),
        ({"data_rate": 0.0}, "data_rate"),
        ({"validation_rate": 1.0}, "validation_rate"),
    ],
)
def test_what_cannot_be_done_is_told(options, words):
    with pytest.raises(SparsonaError) as error:
        share(pool_of(), **{"clients": 4, "partition": "iid"} | options)
    assert words in str(error.value)


def test_without_a_published_test_set_there_is_only_the_split():
    assert share(pool_of(num_train=None), clients=4, partition="iid").tested_on == "split"
    with pytest.raises(SparsonaError, match="no published test set"):
        share(pool_of(num_train=None), clients=4, partition="iid", test="shares")


def test_tokens_are_kept_and_asked_for_per_position(tmp_path):
    f = share(pool_of(tokens=True), clients=4, partition="iid")
    assert f.has_tokens
    assert f.asks_per_token
    assert f.tested_on == "split-train"
    assert f.label_counts("train") is None
    examples = f.examples(0, "train")
    assert (examples.inputs.dtype, examples.targets.dtype) == (torch.int64, torch.int64)
    assert examples.targets.shape == examples.inputs.shape == (f.client(0).num_examples, 3)
    f.save(tmp_path)
    again = Federation.open(tmp_path)
    assert again.digest() == f.digest()
    assert again.has_tokens
    with pytest.raises(SparsonaError, match="tokens"):
        share(pool_of(tokens=True), clients=4, partition="iid", test="shares")


def test_images_of_bytes_stay_bytes_until_they_are_seen(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.integers(256, size=(90, 3, 6, 6), dtype=np.uint8)
    y = np.arange(90) % 3
    view = View((0.5,) * 3, (0.25,) * 3, pad=2, flip=True)
    f = federate(x, y, clients=3, partition="iid", view=view)
    assert f.x.dtype == torch.uint8
    assert f.examples(0, "train").inputs.dtype == torch.uint8  # augmented batch by batch, then scaled
    assert f.examples(0, "train").view == view
    test = f.examples(0, "test")
    torch.testing.assert_close(test.inputs, (torch.from_numpy(x)[f.splits[0].test] / 255 - 0.5) / 0.25)
    assert test.view == View()
    f.save(tmp_path)
    again = Federation.open(tmp_path)
    assert (again.view, again.tested_on) == (view, "split")
    assert again.digest() == f.digest()
    assert federate(x, y, clients=3, partition="iid", view=View()).digest() != f.digest()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), partition=st.sampled_from(["iid", "dirichlet:0.5", "shards:2", "pathological:2"]))
def test_training_shares_and_test_shares_agree(seed, partition):
    f = share(pool_of(), clients=5, partition=partition, test="shares:50", validation_rate=0.2, seed=seed)
    train = f.label_counts("train") + f.label_counts("validation")
    wanted = -(-train * 50 // train.sum(dim=1, keepdim=True))  # rounded up, in whole numbers
    limits = torch.tensor(np.bincount(pool_of().y[NUM_TRAIN:], minlength=CLASSES))
    assert torch.equal(f.label_counts("test"), torch.minimum(wanted, limits))
