"""From a pool to clients: which examples are trained on and which tested on, in every way the papers have."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsona.core.errors import SparsonaError
from sparsona.data.federate import federate, share_out
from sparsona.data.federation import PARTS, Federation
from sparsona.data.pool import Pool, View
from sparsona.data.split_plan import SplitPlan

NUM_TRAIN, NUM_TEST, CLASSES = 600, 200, 5


def share(pool, **options):
    return share_out(pool, SplitPlan(**options))


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
        assert (writer in who) == (size >= 40)  # before some are held for decisions, as the papers count
    assert int(f.sizes()[:, :2].sum(dim=1).max()) == 60
    assert int(f.sizes()[:, 0].min()) == 36
    assert f.left_out == {"fewer than 40 to train on (min_train)": 4}
    tested = share(pool_of(owners), clients=None, partition="natural", min_test=17)
    assert (tested.num_clients, tested.left_out) == (8, {"fewer than 17 to test on (min_test)": 4})
    few = share(pool_of(owners), clients=3, partition="natural", min_train=40)
    assert few.num_clients == 3
    assert share(pool_of(owners), clients=None, partition="natural", data_rate=0.25).num_clients == 3
    with pytest.raises(SparsonaError, match="min_train"):
        share(pool_of(), clients=20, partition="iid", min_train=40)


def test_people_need_no_more_than_can_be_split():
    """One to nine examples of nine people: all but the first can be split, unless more is asked for."""
    owners = np.repeat(np.arange(9), np.arange(1, 10))
    x, y = np.eye(len(owners), dtype=np.float32), np.arange(len(owners)) % 2
    options = {"clients": None, "partition": "natural", "owners": owners}
    f = federate(x, y, **options)
    assert f.num_clients == 8
    assert f.left_out == {"fewer than 2 examples, too few to be split": 1}
    assert f.sizes().sum(dim=1).tolist() == [*range(2, 10)]
    assert federate(x, y, **options, min_size=5).left_out == {"fewer than 5 examples (min_size)": 4}
    with pytest.raises(
        SparsonaError, match=r"0 of 9 owners can be clients; left out: 9 with (.*)10 examples \(min_size"
    ):
        federate(x, y, **options, min_size=10)
    with pytest.raises(SparsonaError, match=r"1 of 9(.*)but 2 clients(.*)1 with (.*)be split, 7 with (.*)min_train"):
        federate(x, y, **options | {"clients": 2}, min_train=7)
    with pytest.raises(SparsonaError, match="0 of 0 owners can be clients"):
        federate(x, y, **options | {"owners": owners * 0 - 1})
    with pytest.raises(SparsonaError, match="45 examples cannot give 5 clients 10 each"):
        federate(x, y, clients=5, partition="iid")


def test_people_who_are_left_out_are_named_once(capsys):
    names = ["ana"] + ["bo"] * 9 + [f"p{number:02d}" for number in range(9)] + ["zoe"] * 2
    x, y = np.eye(len(names), dtype=np.float32), np.arange(len(names)) % 2
    for _ in range(2):
        f = federate(x, y, owners=names, name="people")
    assert f.client_names == ("bo", "zoe")
    assert capsys.readouterr().err == (
        "warning: people: owners left out: 10 with fewer than 2 examples, too few to be split: "
        "ana, p00, p01, p02, p03 and 5 more\n"
    )
    federate(x, y, owners=names, name="several", min_train=5, min_size=2)
    assert capsys.readouterr().err.endswith("and 5 more; 1 with fewer than 5 to train on (min_train): zoe\n")
    federate(x, y, owners=np.unique(names, return_inverse=True)[1], name="numbers")
    assert capsys.readouterr().err.endswith("owners left out: 10 with fewer than 2 examples, too few to be split\n")
    federate(x[1:10], y[1:10], owners=names[1:10], name="all are there")
    assert capsys.readouterr().err == ""


def test_people_without_published_test_examples_are_left_out():
    owners = writers()
    owners[NUM_TRAIN:][owners[NUM_TRAIN:] == 3] = 4
    f = share(pool_of(owners), clients=None, partition="natural")
    assert f.left_out == {"no published test examples": 1}
    assert f.num_clients == 11


def windows(length=4, sizes=(30, 11, 6, 5)):
    """Texts of several people, cut into windows that slide by one; every character occurs once."""
    rows, owners, start = [], [], 10
    for owner, size in enumerate(sizes):
        text = np.arange(start, start + size + length)
        rows += [text[i : i + length + 1] for i in range(size)]
        owners += [owner] * size
        start = text[-1] + 1
    rows = np.array(rows, dtype=np.int32)
    return Pool("windows", rows[:, :-1], rows[:, 1:], int(rows.max()) + 1, None, np.array(owners), overlap=length)


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 6),
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    validation_rate=st.sampled_from([0.0, 0.1, 0.3]),
    test_rate=st.sampled_from([0.1, 0.5]),
    max_examples=st.sampled_from([None, 20]),
)
def test_windows_that_overlap_leak_nothing(length, sizes, validation_rate, test_rate, max_examples):
    pool = windows(length, sizes)
    options = {"validation_rate": validation_rate, "test_rate": test_rate, "max_examples": max_examples}
    if max(sizes) < length + 2:
        with pytest.raises(SparsonaError, match="0 of"):
            share(pool, clients=None, partition="natural", **options)
        return
    f = share(pool, clients=None, partition="natural", **options)
    assert f.num_clients == sum(size >= length + 2 for size in sizes)
    for k in range(f.num_clients):
        texts = []
        for part in PARTS:
            examples = f.examples(k, part)
            texts.append({*examples.inputs.flatten().tolist(), *examples.targets.flatten().tolist()})
        train, validation, test = texts
        assert train
        assert test
        assert not train & validation
        assert not train & test
        assert not validation & test
        assert not validation or max(train) < min(validation)
        assert max(train | validation) < min(test)
        count = int(f.sizes()[k].sum())
        if validation_rate and count > 3 * length + 3:
            assert validation


def test_published_tests_of_windows_stay_and_validation_keeps_its_distance():
    pool = windows(4, (30, 30))
    order = np.concatenate([np.arange(25), np.arange(30, 55), np.arange(25, 30), np.arange(55, 60)])
    published = Pool("w", pool.x[order], pool.y[order], pool.num_classes, 50, pool.owners[order], overlap=4)
    f = share(published, clients=None, partition="natural")
    assert f.tested_on == "natural"
    assert f.sizes().tolist() == [[19, 2, 5]] * 2
    assert f.splits[1].train.tolist() == [*range(25, 44)]
    assert f.splits[1].validation.tolist() == [48, 49]
    assert f.splits[1].test.tolist() == [*range(55, 60)]


@pytest.mark.parametrize("partition", ["iid", "file:some.npy"])
def test_windows_that_overlap_are_not_torn_apart(partition):
    with pytest.raises(SparsonaError, match=r"whose examples overlap(.|\n)*natural: an example and the 4 after it"):
        share(windows(), clients=2, partition=partition)


def test_a_pool_of_which_little_is_used_becomes_small():
    owners = np.arange(NUM_TRAIN + NUM_TEST) % 40
    pool = pool_of(owners)
    all_of_it = share(pool, clients=None, partition="natural", seed=2)
    assert all_of_it.x.data_ptr() == torch.from_numpy(pool.x).data_ptr()
    few = share(pool, clients=10, partition="natural", seed=2)
    assert len(few.x) == len(few.y) == few.sizes().sum() == 200
    for k in range(10):
        rows = {part: few.examples(k, part).inputs[:, 0].int() for part in PARTS}
        assert {int(owner) for part in PARTS for owner in owners[rows[part].numpy()]} == {int(owners[rows["test"][0]])}
        assert rows["train"].max() < NUM_TRAIN <= rows["test"].min()
        for part in PARTS:
            assert few.examples(k, part).targets.tolist() == pool.y[rows[part].numpy()].tolist()


def test_a_natural_partition_reads_only_its_clients_examples():
    """What StackOverflow needs: neither inputs nor targets of a hundred million sentences fit into memory."""
    read = []

    class Watched(np.ndarray):
        def __getitem__(self, key):
            if isinstance(key, np.ndarray):
                read.append(len(key))
            return super().__getitem__(key)

    pool = pool_of(np.arange(NUM_TRAIN + NUM_TEST) % 40)
    watched = Pool(pool.name, pool.x.view(Watched), pool.y.view(Watched), CLASSES, NUM_TRAIN, pool.owners)
    f = share(watched, clients=4, partition="natural")
    assert len(f.x) == 80
    assert max(read) == 80


def test_a_share_of_the_data_is_used():
    odd = federate(np.zeros((1005, 1)), np.arange(1005) % 2, clients=2, partition="iid", data_rate=0.1)
    assert int(odd.sizes().sum()) == 100  # rounded down, as pFedGate's 81,425 of 814,255
    tenths = federate(np.zeros((100, 1)), np.arange(100) % 2, clients=2, partition="iid", data_rate=0.29)
    assert int(tenths.sizes().sum()) == 29  # 0.29 * 100 is a little less
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
        ({"partition": " pathological-refill:2", "test": "split"}, "test=shares"),
        ({"test": "shares:201"}, "at most 200"),
        ({"test": "shares:" + "9" * 20}, "at most 200"),
        ({"test": "shares:" + "9" * 5000}, "at most 200"),
        ({"test": "split", "max_examples": 1}, "2 or more: something to train on and to test on"),
        ({"max_examples": 0}, "1 or more: something to train on"),
        ({"data_rate": 0.0}, "data_rate"),
        ({"validation_rate": 1.0}, "validation_rate"),
    ],
)
def test_what_cannot_be_done_is_told(options, words):
    with pytest.raises(SparsonaError) as error:
        share(pool_of(), **{"clients": 4, "partition": "iid"} | options)
    assert words in str(error.value)


def test_data_of_ones_own_without_owners_is_told_how_to_name_them():
    whose = r"'made-up' does not say whose(.|\n)*a name or a number\n(.|\n)*array `owners`(.|\n)*owners= in Python"
    with pytest.raises(SparsonaError, match=whose):
        share(pool_of(), partition="natural")
    x, y = np.zeros((40, 2), np.float32), np.arange(40) % 2
    with pytest.raises(
        SparsonaError, match=r"neither owners nor a number of clients\n(.|\n)*hint: +owners= (.)*clients="
    ):
        federate(x, y)
    with pytest.raises(SparsonaError, match="partition iid without a number of clients"):
        federate(x, y, partition="iid")


def test_without_a_published_test_set_there_is_only_the_split():
    assert share(pool_of(num_train=None), clients=4, partition="iid").tested_on == "split"
    with pytest.raises(SparsonaError, match="no published test set"):
        share(pool_of(num_train=None), clients=4, partition="iid", test="shares")


def test_tokens_are_kept_and_asked_for_per_position(tmp_path):
    f = share(pool_of(tokens=True), clients=4, partition="iid")
    assert f.has_tokens
    assert f.predicts_tokens
    assert f.tested_on == "split-train"
    assert f.label_counts("train") is None
    examples = f.examples(0, "train")
    assert (examples.inputs.dtype, examples.targets.dtype) == (torch.int64, torch.int64)
    assert examples.targets.shape == examples.inputs.shape == (f.clients()[0].num_examples, 3)
    f.save(tmp_path)
    again = Federation.open(tmp_path)
    assert again.digest() == f.digest()
    assert again.has_tokens
    with pytest.raises(SparsonaError, match="tokens"):
        share(pool_of(tokens=True), clients=4, partition="iid", test="shares")


def test_clients_are_tested_on_tokens_that_are_scored():
    """Padding, begin, end and unknown words, 0 to 3, are not. Writer 0 has them alone, 1 one sequence with others."""
    y = np.full((60, 3), 3)
    y[20:] = 5
    y[21:40] = 2
    x = np.full((60, 3), 9)
    owners = np.repeat([0, 1, 2], 20)
    options = {"tokens": True, "owners": owners, "clients": None, "partition": "natural"}
    f = federate(x, y, **options)
    assert f.num_classes == 10  # of x, which a model looks up
    assert f.left_out == {"no test sequence with a token that is scored": 1}
    assert f.splits[0].test.tolist() == [20]
    assert f.sizes().tolist() == [[17, 2, 1], [13, 2, 5]]
    two = federate(x, y, **options, min_test=2)
    assert two.left_out == f.left_out | {"fewer than 2 to test on (min_test)": 1}
    published = federate(x, y, **options | {"owners": np.arange(60) % 2}, num_train=20, validation_rate=0)
    assert published.left_out == {}
    y[20::2] = 1
    published = federate(x, y, **options | {"owners": np.arange(60) % 2}, num_train=20)
    assert (published.tested_on, published.left_out) == ("natural", f.left_out)
    y[20] = 5
    with pytest.raises(
        SparsonaError, match=r"client \d has test sequences, but no token(.|\n)*number your tokens from 4"
    ):
        federate(x[:40], y[:40], tokens=True, clients=4, partition="iid", seed=1)


@pytest.mark.parametrize(
    ("x", "y", "options", "message"),
    [
        (np.full((9, 3), 5), np.full((9, 3), 3), {}, r"no next token above 3(.|\n)*a vocabulary from 4 on"),
        (np.full((9, 3), 9), np.full((9, 3), 5), {"num_classes": 9}, r"tokens from 5 to 9(.|\n)*from 0 to 8"),
        (np.full((9, 3), 9), np.full((9, 3), -5), {}, r"tokens from -5 to 9"),
        (np.full((9, 3), 9), np.full((9, 2), 5), {}, r"the same shape"),
    ],
)
def test_what_is_wrong_with_tokens_is_told(x, y, options, message):
    with pytest.raises(SparsonaError, match=message):
        federate(x, y, clients=1, partition="iid", min_size=2, tokens=True, **options)
    with pytest.raises(SparsonaError, match=message):
        Federation.from_clients([(x, y, x, y)], tokens=True, **options)


def test_clients_given_apart_need_a_token_that_is_scored():
    x, y = np.full((9, 3), 9), np.full((9, 3), 5)
    assert Federation.from_clients([(x, y, x, y)], tokens=True).num_classes == 10
    with pytest.raises(SparsonaError, match="client 1 has test sequences, but no token"):
        Federation.from_clients([(x, y, x, y), (x, y, x, y * 0 + 2)], tokens=True)


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
