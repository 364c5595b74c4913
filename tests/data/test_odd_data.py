"""Data as people bring it, a row for each kind: what becomes of it, or what they are told."""

import datetime
import re
import types

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, SubsetRandomSampler, TensorDataset

import sparsona as sp
from sparsona.core.errors import SparsonaError
from sparsona.core.printable import warn_once
from sparsona.data.federate import federate, share_out
from sparsona.data.federation import Federation
from sparsona.data.pool import Pool
from sparsona.data.split_plan import SplitPlan

RNG = np.random.default_rng(0)
X, Y = RNG.random((24, 3)).astype(np.float32), np.arange(24) % 3
NAMES = np.array(["ant", "bee", "cow"])


def two(x, y):
    """Two clients with twelve examples each."""
    return {"north": (x[:12], y[:12]), "south": (x[12:], y[12:])}


class Items(Dataset):
    """A map-style dataset; `make` is what an item is."""

    def __init__(self, make, count=24):
        self.make, self.count, self.calls = make, count, 0

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.calls += 1
        return self.make(index)


class Stream(IterableDataset):
    def __iter__(self):
        return ((torch.from_numpy(X[i]), int(Y[i])) for i in range(24))


class Series(list):
    """A column of a data frame as pandas has it, as far as it is used: an array with a dtype."""

    def __init__(self, values, dtype=None):
        super().__init__(values)
        self.dtype = np.asarray(values).dtype if dtype is None else dtype

    def __array__(self, dtype=None, copy=None):
        return np.asarray(list(self), dtype=dtype or (object if self.dtype.kind == "O" else None))


class Frame:
    """A stand-in for pandas.DataFrame: columns, dtypes, to_numpy and frame[name]."""

    def __init__(self, **columns):
        self._columns = {name: one if isinstance(one, Series) else Series(one) for name, one in columns.items()}

    columns = property(lambda self: list(self._columns))
    dtypes = property(lambda self: [one.dtype for one in self._columns.values()])

    def __getitem__(self, name):
        return self._columns[name]

    def __len__(self):
        return len(next(iter(self._columns.values())))

    def to_numpy(self):
        return np.stack([np.asarray(one) for one in self._columns.values()], axis=1)


class HuggingFace:
    """A stand-in for datasets.Dataset: column_names, features, rows by number and columns by name."""

    def __init__(self, table, names=()):
        self._table = table
        self.features = dict.fromkeys(table)
        if len(names):
            self.features["label"] = types.SimpleNamespace(names=list(names))

    column_names = property(lambda self: list(self._table))

    def __len__(self):
        return len(next(iter(self._table.values())))

    def __getitem__(self, key):
        if isinstance(key, str):
            return list(self._table[key])
        return {name: column[key] for name, column in self._table.items()}


def frame(**more):
    return Frame(a=X[:, 0].tolist(), b=X[:, 1].tolist(), is_old=(Y > 1).tolist(), **more)


def same_examples(federation, x, y):
    """All examples are there, each once, with their labels."""
    seen = [(tuple(row), int(label)) for row, label in zip(federation.x.tolist(), federation.y.tolist(), strict=True)]
    assert sorted(seen) == sorted(
        (tuple(np.float32(row).tolist()), int(label)) for row, label in zip(x, y, strict=True)
    )


TAKEN = {
    "float64": lambda: two(X.astype(np.float64), Y),
    "lists": lambda: two(X.tolist(), Y.tolist()),
    "(x, y) in a list of clients": lambda: list(two(X, Y).values()),
    "torch tensors": lambda: two(torch.from_numpy(X), torch.from_numpy(Y)),
    "string labels": lambda: two(X, NAMES[Y]),
    "bytes as labels": lambda: two(X, NAMES[Y].astype("S")),
    "TensorDatasets": lambda: [
        TensorDataset(torch.from_numpy(X[:12]), torch.from_numpy(Y[:12])),
        TensorDataset(torch.from_numpy(X[12:]), torch.from_numpy(Y[12:])),
    ],
    "Datasets of numpy": lambda: [Subset(Items(lambda i: (X[i], Y[i])), range(k, k + 12)) for k in (0, 12)],
    "Datasets of dicts": lambda: {
        "all": Items(lambda i: {"signal": X[i], "label": int(Y[i])}),
    },
    "iterable Dataset": lambda: {"all": Stream()},
    "DataLoader": lambda: {
        "all": DataLoader(Items(lambda i: (X[i], Y[i])), batch_size=7, shuffle=True, drop_last=True)
    },
    "DataLoader of an iterable": lambda: {"all": DataLoader(Stream(), batch_size=5)},
    "DataLoader of a subset": lambda: [
        DataLoader(Items(lambda i: (X[i], Y[i])), sampler=SubsetRandomSampler(range(k, k + 12))) for k in (0, 12)
    ],
    "Hugging Face": lambda: {"all": HuggingFace({"signal": X.tolist(), "label": Y.tolist()}, NAMES)},
    "dict of columns": lambda: {"all": {"signal": X, "label": Y}},
    "train and test": lambda: {"a": {"train": (X[:20], Y[:20]), "test": (X[20:], Y[20:])}},
    "Datasets for train and test": lambda: [
        (Subset(Items(lambda i: (X[i], Y[i])), range(20)), Subset(Items(lambda i: (X[i], Y[i])), range(20, 24)))
    ],
}


@pytest.mark.parametrize("kind", TAKEN)
def test_what_is_taken(kind):
    federation = Federation.from_clients(TAKEN[kind]())
    same_examples(federation, X, Y)
    assert federation.num_classes == 3
    assert federation.digest() == Federation.from_clients(TAKEN[kind]()).digest()


def test_a_transform_is_applied_once_and_the_same_each_time():
    def noisy(index):
        return torch.from_numpy(X[index]) + torch.randn(3), Y[index]

    dataset, before = Items(noisy), torch.get_rng_state()
    first = Federation.from_clients([DataLoader(dataset, batch_size=4)], seed=3)
    assert dataset.calls == 24
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert first.digest() == Federation.from_clients([dataset], seed=3).digest()
    assert not torch.equal(first.x, Federation.from_clients([dataset], seed=4).x)


def test_a_collate_function_makes_the_inputs():
    def collate(items):
        return torch.stack([2 * torch.as_tensor(x) for x, _ in items]), torch.tensor([int(y) for _, y in items])

    federation = Federation.from_clients([DataLoader(Items(lambda i: (X[i], Y[i])), batch_size=5, collate_fn=collate)])
    same_examples(federation, 2 * X, Y)


def test_pictures_become_bytes_with_channels_first():
    pixels = RNG.integers(0, 256, (24, 6, 5, 3), dtype=np.uint8)
    federation = Federation.from_clients([Items(lambda i: (Image.fromarray(pixels[i]), Y[i]))])
    assert (federation.x.dtype, federation.input_shape) == (torch.uint8, (3, 6, 5))
    assert float(federation.examples(0, "test").inputs.max()) <= 1.0


def test_a_data_frame():
    """Features are the other columns, owners and labels are texts: clients and classes with names."""
    table = frame(species=NAMES[Y], ward=np.array(["east", "west"])[(np.arange(24) // 3) % 2])
    federation = federate(table, target="species", owner="ward")
    assert (federation.client_names, federation.class_names) == (("east", "west"), ("ant", "bee", "cow"))
    assert (federation.input_shape, federation.num_clients) == ((3,), 2)
    one = federate(table, target="species", owner="ward", inputs=["b", "a"])
    assert one.input_shape == (2,)
    assert set(one.x[:, 0].tolist()) == set(X[:, 1].tolist())
    apart = Federation.from_clients({"x": table, "y": {"train": table, "test": table}}, target="species", inputs=["a"])
    assert apart.input_shape == (1,)


def test_a_data_frame_and_its_labels_apart():
    """As scikit-learn takes them: all columns are inputs."""
    table = frame(c=X[:, 2].tolist())
    expected = np.stack([X[:, 0], X[:, 1], (Y > 1), X[:, 2]], axis=1)
    same_examples(federate(table, Series(NAMES[Y]), clients=2, partition="iid"), expected, Y)
    same_examples(Federation.from_clients({"a": (table, Series(Y.tolist()))}), expected, Y)
    with pytest.raises(SparsonaError, match=r"columns that are no numbers: 'sex'(.|\n)*get_dummies"):
        federate(Frame(sex=Series(["f", "m"] * 12, np.dtype(object))), Y, clients=2)


def test_columns_of_a_frame_whose_labels_are_apart():
    """As where they are in it: inputs= chooses, and owner= is no input."""
    table = frame(ward=["east", "west"] * 12)
    federation = federate(table, Series(Y.tolist()), owner="ward")
    assert (federation.client_names, federation.input_shape) == (("east", "west"), (3,))
    assert federate(table, Y, clients=2, partition="iid", inputs=["a"]).input_shape == (1,)
    assert Federation.from_clients([(table, Y)], inputs=["a", "b"]).input_shape == (2,)


@pytest.mark.parametrize(
    "owners",
    [
        pandas.Series([3, 4, 5] * 8),
        pandas.Series(["east", "west", None] * 8),
        pandas.Series(["east", "west", None] * 8, dtype="string"),
        pandas.Series(["east", "west"] * 12, dtype="category"),
        pandas.Series([3.0, 4.0, 5.0] * 8),
        pandas.Series([2**60, 2**60 + 1, None] * 8, dtype="Int64"),
    ],
    ids=["numbers", "texts", "texts with NA", "categories", "floats", "large numbers with NA"],
)
def test_owners_that_are_a_column_are_no_input(owners):
    """A model would learn who somebody is."""
    table = pandas.DataFrame({"age": X[:, 0], "ward": owners, "y": Y})
    for data in ((table,), (table[["age", "ward"]], Y), ({"age": X[:, 0], "ward": np.asarray(owners), "y": Y},)):
        for given in (owners, owners.tolist(), [str(one) for one in owners]):
            with pytest.raises(SparsonaError, match=r"'ward' has the owners(.|\n)*owner='ward' in place"):
                federate(*data, owners=given)
    assert federate(table[["age", "ward"]], Y, owner="ward").input_shape == (1,)


@pytest.mark.parametrize("owners", [[3, 4, 5] * 8, [0.5, 1.5, 2.5] * 8, [True, False] * 12, ["east", "west"] * 12])
def test_owners_that_are_a_column_of_a_published_split_are_no_input(owners):
    table = pandas.DataFrame({"age": X[:, 0], "ward": owners, "y": Y})
    for given in (table.ward, owners, [str(one) for one in owners]):
        with pytest.raises(SparsonaError, match=r"'ward' has the owners(.|\n)*owner='ward' in place"):
            federate({"test": table[16:], "train": table[:16]}, owners=given)
    as_names = table.assign(ward=[str(one) for one in owners])
    assert federate({"train": as_names[:16], "test": as_names[16:]}, owner="ward").input_shape == (1,)


def test_a_column_that_is_no_owner_or_is_named_is_an_input():
    table = pandas.DataFrame({"age": X[:, 0], "ward": [3, 4, 5] * 8, "y": Y})
    assert federate(table, owners=[4, 5, 3] * 8).input_shape == (2,)
    assert federate(table, owners=table.ward, inputs=["age", "ward"]).input_shape == (2,)


def test_columns_of_texts_that_are_no_categories():
    """Names and times are to be left out; a column for each of them would be as many as there are rows."""
    columns = {
        "name": [f"patient {place}" for place in range(24)],
        "visit": np.arange(24).astype("datetime64[D]"),
        "born": [datetime.date(1950 + place % 3, 1, 1) for place in range(24)],
        "sex": ["f", "m"] * 12,
    }
    with pytest.raises(SparsonaError) as caught:
        federate(pandas.DataFrame({"age": X[:, 0], **columns}), Y, clients=2)
    assert caught.value.hint == (
        "leave out 'name', 'visit', 'born', times or texts that nearly every row has its own of: inputs=[...] names "
        "the columns to use; frame = pandas.get_dummies(frame, columns=['sex']) makes numbers of categories"
    )
    assert "patient" not in str(caught.value)


def test_a_column_of_the_libraries_own_numbers():
    ages = Series([None if i == 5 else i for i in range(24)], types.SimpleNamespace(kind="i"))
    with pytest.raises(SparsonaError, match="x holds NaN or infinity in 1 of 24 examples, the first is example 5"):
        federate(Frame(age=ages, y=Y.tolist()), clients=2)


def test_gaps_in_a_table_are_said_to_be_in_which_column():
    gaps = [float("nan") if place in (5, 6) else 1.0 for place in range(24)]
    frame = Frame(a=[0.0] * 24, b=[1.0] * 24, c=gaps, y=Y.tolist())
    with pytest.raises(SparsonaError, match="in 2 of 24 examples, the first is example 5, in column 'c'\n") as caught:
        federate(frame, clients=2)
    assert caught.value.expected == "finite numbers, none beyond 3.4e38"
    assert caught.value.hint == "drop these examples or fill the gaps"
    with pytest.raises(SparsonaError, match=r"client north: (.)*example 5, in column 'c'"):
        sp.Federation.from_clients({"north": frame, "south": frame})
    with pytest.raises(SparsonaError, match="in 2 of 48 examples, the first is example 29, in column 'c'"):
        federate({"train": Frame(a=[0.0] * 24, b=[1.0] * 24, c=[1.0] * 24, y=Y.tolist()), "test": frame}, clients=2)
    rows = {"a": np.zeros(24), "b": np.array(gaps), "y": Y}
    with pytest.raises(SparsonaError, match="in column 'b'"):
        federate(rows, clients=2)
    x = np.zeros((24, 9), np.float32)
    x[:, [1, 7]] = np.inf
    with pytest.raises(
        SparsonaError, match="in 24 of 24 examples, the first is example 0, in columns 1, 7\n"
    ) as caught:
        federate(x, Y, clients=2)
    assert caught.value.hint == "fill the gaps, or leave these columns out"


def test_gaps_are_said_to_be_whose():
    x, y = np.zeros((24, 2), np.float32), np.linspace(0, 1, 24)
    x[[5, 6, 13]] = np.nan
    names = [f"p{place // 2:02d}" for place in range(24)]
    said = "x holds NaN or infinity in 3 of 24 examples, of owners p02, p03, p06, the first is example 5"
    with pytest.raises(SparsonaError, match=said):
        federate(x, Y, owners=names)
    with pytest.raises(SparsonaError, match="in 3 of 24 examples, of owner 40, the first"):
        federate(x, Y, owners=[-1 if place == 5 else 40 if place in (6, 13) else 7 for place in range(24)])
    with pytest.raises(SparsonaError, match="in 24 of 24 examples, of owners p00, p01, p02, p03, p04 and 7 more, the"):
        federate(x * 0 + np.inf, Y, owners=names)
    with pytest.raises(SparsonaError, match=r"input 'b': x holds NaN or infinity in 3 of 24 examples, of owners p02,"):
        federate({"a": x * 0 == 0, "b": x}, Y, owners=names)
    y[[8, 9]] = np.nan
    with pytest.raises(SparsonaError, match="y holds NaN or infinity in 2 of 24 examples, of owner p04, the first is"):
        federate(X, y, owners=names, task="regression")
    for wrong in (names[:5], [-1] * 24):  # of whom, is not known
        with pytest.raises(SparsonaError, match="in 3 of 24 examples, the first is example 5"):
            federate(x, Y, owners=wrong)


@pytest.mark.parametrize("missing", [None, float("nan"), ""])
def test_missing_labels_are_counted_and_said_to_be_whose(missing):
    labels = [missing if place in (5, 13) else f"class {place % 3}" for place in range(24)]
    said = "y has no label in 2 of 24 examples, of owners p02, p06, the first is example 5\n.*\n.*drop these examples"
    with pytest.raises(SparsonaError, match=said):
        federate(X, np.array(labels, dtype=object), owners=[f"p{place // 2:02d}" for place in range(24)])
    with pytest.raises(SparsonaError, match="client 0: y has no label in 2 of 24 examples, the first is example 5"):
        Federation.from_clients([(X, labels)], class_names=["class 0", "class 1", "class 2"])


def test_hugging_face_columns_names_and_published_split():
    table = HuggingFace({"signal": X.tolist(), "label": Y.tolist(), "who": ["p", "q"] * 12}, NAMES)
    by_owner = federate(table, owner="who")
    assert (by_owner.client_names, by_owner.class_names) == (("p", "q"), tuple(NAMES))
    both = {"train": table, "test": table}
    published = federate(both, clients=2, partition="iid", inputs="signal")
    assert (published.tested_on, len(published.x)) == ("shares", 48)


SEVERAL = {
    "dict x": (({"image": X, "age": np.arange(24)}, Y), ("age", "image")),
    "tuple x": (((X, np.arange(24)), Y), (0, 1)),
    "items with a dict x": (Items(lambda i: ({"image": X[i], "age": i}, Y[i])), ("age", "image")),
    "items with a tuple x": (Items(lambda i: ((X[i], np.int64(i)), Y[i])), (0, 1)),
    "columns of several shapes": ({"image": X, "age": np.arange(24), "label": Y}, ("age", "image")),
}


@pytest.mark.parametrize("kind", SEVERAL)
def test_several_inputs(kind):
    """They reach the model apart, as a tuple or by name."""
    source, keys = SEVERAL[kind]
    federation = Federation.from_clients({"n": source, "s": {"train": source}})
    inputs = federation["n"].examples("test").inputs
    assert sorted(inputs if isinstance(inputs, dict) else range(len(inputs))) == list(keys)
    image, age = (inputs["image"], inputs["age"]) if isinstance(inputs, dict) else inputs
    assert image.tolist() == X[age.numpy()].tolist()
    with pytest.raises(SparsonaError, match="no network fits examples of several inputs"):
        sp.train("local", federation, rounds=1)


def test_a_class_nobody_else_has():
    """Absent at one client, present at the other: classes are those of all."""
    y = np.array(["a", "b"])[np.arange(12) % 2]
    federation = Federation.from_clients({"n": (X[:12], y), "s": (X[12:], np.array(["a", "z"])[np.arange(12) % 2])})
    assert federation.class_names == ("a", "b", "z")
    assert federation["s"].label_counts("train")[1] == 0
    assert federation["n"].label_counts("train")[2] == 0


def test_a_client_of_one_example():
    """It can train; it cannot be split, unless it says that it only trains."""
    with pytest.raises(SparsonaError, match=r'client s has only one example\n(.|\n)*{"train": '):
        Federation.from_clients({"n": (X, Y), "s": (X[:1], Y[:1])})
    federation = Federation.from_clients({"n": (X, Y), "s": {"train": (X[:1], Y[:1])}})
    assert federation["s"].sizes == {"train": 1, "validation": 0, "test": 0}


HOLED = X.copy()
HOLED[7, 1] = np.nan
REFUSED = {
    "labels from 1": (two(X, Y + 1), r"labels from 1 to 3(.|\n)*y - 1"),
    "float labels": (two(X, Y * 1.0), r"client north: labels of type float64(.|\n)*astype\(numpy.int64\)"),
    "(N, 1)": (two(X, Y[:, None]), r"client north: y has shape \(12, 1\)(.|\n)*y.reshape\(-1\)"),
    "NaN": (two(HOLED, Y), "client north: x holds NaN or infinity in 1 of 12 examples, the first is example 7"),
    "texts and numbers": ([(X, Y), (X, NAMES[Y])], "client 0: labels are numbers, and texts elsewhere"),
    "ragged lists": ([([[1.0], [2.0, 3.0]], [0, 1])], r"client 0: x is not an array: its rows differ in length"),
    "items of three": (
        [Items(lambda i: (X[i], Y[i], 1))],
        r"client 0: items of the dataset are tuples of 3(.|\n)*\(x, y\)",
    ),
    "bare items": ([Items(lambda i: X[i])], "client 0: items of the dataset are a ndarray"),
    "several shapes": (
        [Items(lambda i: (X[i][: 1 + i % 2], 0))],
        r"client 0: x has examples of several shapes: \(1,\), \(2,\)",
    ),
    "which is the target": (
        [{"a": X[:, 0], "b": Y}],
        r"client 0: no column is named as the target(.|\n)*one of a, b\n.*'b'",
    ),
    "two likely targets": (
        [{"a": X[:, 0], "label": Y, "y": Y}],
        r"client 0: targets may be in label or y\n(.|\n)*target='y'",
    ),
    "labels that differ in white space": (
        {"n": (X, NAMES[Y]), "s": (X, np.array(["ant\u00a0", "bee", "cow"])[Y])},
        r"labels that differ in white space alone: 'ant' and 'ant.*xa0'\n(.|\n)*text.strip\(\)",
    ),
    "a column of text": ([{"a": NAMES[Y], "b": X[:, 0], "y": Y}], "client 0: columns that are no numbers: 'a'"),
    "object columns": (
        [Frame(a=X[:, 0].tolist(), sex=Series(["f", "m"] * 12, np.dtype(object)), y=Y.tolist())],
        r"columns that are no numbers: 'sex' \(object\)(.|\n)*pandas.get_dummies\(frame, columns=\['sex'\]\)",
    ),
    "x and y swapped": (
        two(Y, X),
        r"client north: x has shape \(12,\): an example is a single number(.|\n)*x and y may be swapped",
    ),
    "a number": ([3], "client 0: a int in place of examples"),
    "three arrays": ([(X, Y, X)], "client 0 has 3 arrays"),
    "an unknown part": (
        {"n": {"train": (X, Y), "tset": (X, Y)}},
        r"unknown part of client n 'tset'(.|\n)*did you mean 'test'",
    ),
    "test alone": ({"n": {"test": (X, Y)}}, "client n has no train examples"),
    "nobody is tested": ({"n": {"train": (X, Y)}}, "no client has test examples"),
    "an empty client": ({"n": (X, Y), "s": (X[:0], Y[:0])}, "client s has no examples"),
    "another shape": (
        {"n": (X, Y), "s": (X[:, :1], Y)},
        r"client s: examples of shape \(1,\)\n  expected: \(3,\), as of client n",
    ),
    "drawn with repetition": (
        [
            DataLoader(
                Items(lambda i: (X[i], Y[i])), sampler=torch.utils.data.RandomSampler(range(24), replacement=True)
            )
        ],
        r"client 0: a DataLoader with a RandomSampler(.|\n)*Subset",
    ),
    "names twice": ({1: (X, Y), "1": (X, Y)}, "two clients are called '1'"),
    "an endless name": ({"n" * 300: (X, Y)}, "a name of 300 characters"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused(kind):
    clients, message = REFUSED[kind]
    with pytest.raises(SparsonaError, match=message):
        Federation.from_clients(clients)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((X,), {"clients": 2}, "x without y"),
        ((Stream(), Y), {"clients": 2}, "a Stream together with y"),
        ((frame(y=Y.tolist()),), {"target": "yy"}, r"unknown column of the data: 'yy'(.|\n)*did you mean 'y'"),
        ((two(X, Y),), {"clients": 2}, "'clients' together with a dict of clients"),
        ((two(X, Y),), {"min_size": 2}, "unknown option for a dict of clients 'min_size'"),
        ((X, Y), {"owners": [0.5] * 24}, r"owners are float64(.|\n)*a name, or a whole number from 0"),
        ((X, Y), {"owners": ["a", "b"]}, "2 owners for 24 examples"),
        ((X, Y), {"owners": ["a", "b", "b "] * 8}, r"owners that differ in white space alone: 'b' and 'b '"),
        ((frame(y=Y.tolist()),), {"owners": "ward"}, r"owners = 'ward', a text(.|\n)*owner='ward'"),
        (
            (frame(y=Y.tolist(), ward=["e", "w"] * 12),),
            {"owner": "ward", "owners": [0, 1] * 12},
            "owner='ward' together with owners=",
        ),
        ((X, Y), {"owner": "ward"}, r"owner= names a column, and x is a ndarray(.|\n)*owners="),
        ((frame(), Y), {"target": "a"}, "target='a' together with y"),
        ((X, NAMES[Y]), {"clients": 2, "class_names": ["ant", "bee", "cows"]}, r"label in y: 'cow'(.|\n)*did you mean"),
        (
            (X, Y),
            {"clients": 2, "class_names": ["ant", "bee"]},
            r"labels 2 are outside(.|\n)*every class in class_names",
        ),
        (({"train": (X, Y), "validation": (X, Y)},), {"clients": 2}, 'expected: "train" and "test"'),
    ],
)
def test_what_federate_refuses(arguments, options, message):
    with pytest.raises(SparsonaError, match=message):
        federate(*arguments, **options)


def test_owners_by_name_are_the_clients():
    """Sorted; who has no name is nobody's."""
    owners = [["ana", "bo", "cy", None][(i // 3) % 4] for i in range(24)]
    federation = sp.federate(X, Y, owners=owners)
    assert federation.client_names == ("ana", "bo", "cy")
    assert sorted(
        federation["bo"].examples("train").inputs.tolist()
        + federation["bo"].examples("test").inputs.tolist()
        + federation["bo"].examples("validation").inputs.tolist()
    ) == sorted(X[[3, 4, 5, 15, 16, 17]].tolist())
    drawn = sp.federate(X, Y, owners=owners, clients=2, seed=1)
    assert drawn.num_clients == 2
    for client in drawn:
        rows = X[[i for i in range(24) if owners[i] == client.name]].tolist()
        assert all(row in rows for row in client.examples("train").inputs.tolist())
    assert sp.federate(X, Y, owners=owners, clients=2, partition="iid").client_names is None


def test_examples_without_an_owner_are_counted(capsys):
    """Whole numbers with gaps are floats or objects in a frame."""
    numbers = [[7, 9, None][i % 3] for i in range(24)]
    for name, owners in {
        "texts": [None if one is None else f"p{one}" for one in numbers],
        "texts and NaN": [float("nan") if one is None else f"p{one}" for one in numbers],
        "floats": np.array(numbers, dtype=np.float64),
        "objects": np.array(numbers, dtype=object),
        "whole": [-1 if one is None else one for one in numbers],
    }.items():
        for _ in range(2):  # said once
            assert sp.federate(X, Y, owners=owners, name=name).num_clients == 2
        said = f"warning: {name}: 8 of 24 examples have no owner and belong to no client\n"
        assert capsys.readouterr().err == said
        sp.federate(X, Y, owners=owners, name=f"{name}, iid", clients=2, partition="iid")
        assert capsys.readouterr().err == ""
    published = sp.federate(X, Y, owners=numbers, name="published", num_train=12, test="natural")
    assert published.num_clients == 2
    assert "published: 8 of 24 examples have no owner" in capsys.readouterr().err


def test_owners_that_are_whole_are_numbers_of_any_type():
    numbers = [i % 3 for i in range(24)]
    for whole in (
        np.array(numbers, np.float32),
        [float(one) for one in numbers],
        np.array(numbers, np.uint64),
        torch.tensor(numbers, dtype=torch.float64),
        pandas.Series(numbers, dtype="Float64"),
        np.array(numbers, dtype=object),
    ):
        assert sp.federate(X, Y, owners=whole).client_owners == (0, 1, 2)
    assert sp.federate(X, Y, owners=np.array(numbers) * 1.0 - 1).client_owners == (0, 1)  # below 0: unknown
    gaps = [None if i == 3 else one for i, one in enumerate(numbers)]
    for wrong, said in (
        ([0.5, *gaps[1:]], r"object of shape \(24,\): 1 of 1 are not whole\n"),
        ([np.inf, *gaps[1:]], r"object of shape \(24,\): 1 of 1 are infinite\n"),
        (np.array([np.inf, *numbers[1:]]), r"float64 of shape \(24,\): 1 of 24 are infinite\n"),
        (np.array([np.inf, 0.5, np.nan, *numbers[3:]]), "1 of 23 are not whole, 1 of 23 are infinite\n"),
        ([True, None] * 12, "object of shape .*: NoneType, bool\n"),
    ):
        with pytest.raises(SparsonaError, match=f"owners are .*{said}"):
            sp.federate(X, Y, owners=wrong)


def test_numbers_of_owners_are_exact_or_refused():
    """Rounded, different people would be one client."""
    first = 1234567890123456789
    people = [None if i == 3 else first + i % 3 for i in range(24)]
    column = pandas.Series(people, dtype="Int64")
    table = pandas.DataFrame({"age": X[:, 0], "y": Y, "who": column})
    expected = (first, first + 1, first + 2)
    for owners in (
        people,
        [np.nan if one is None else one for one in people],
        column,
        column.astype("category"),
        column.fillna(-1).to_numpy(),
    ):
        assert sp.federate(X, Y, owners=owners).client_owners == expected
    assert sp.federate(table, owner="who").client_owners == expected
    assert sp.federate({"train": table[:12], "test": table[12:]}, owner="who").client_owners == expected
    largest = 2**63 - 1 - np.arange(24, dtype=np.uint64) % 3
    assert sp.federate(X, Y, owners=largest).client_owners == (2**63 - 3, 2**63 - 2, 2**63 - 1)
    for rounded, count in (
        (column.astype("float64"), 23),
        (2.0**53 - np.arange(24) % 2, 12),
        (np.float32(2**24 - np.arange(24) % 2), 12),
    ):
        said = f"owners are float.*, and {count} of 24 are floats so large that they are rounded(.|\n)*Int64"
        with pytest.raises(SparsonaError, match=said):
            sp.federate(X, Y, owners=rounded)
        with pytest.raises(SparsonaError, match=said):
            sp.federate(table.assign(who=rounded), owner="who")
    for owners in (largest + np.uint64(1), (largest + np.uint64(1)).tolist()):
        with pytest.raises(SparsonaError, match=r"owners are .*, and 8 of 24 are 2\*\*63 or more(.|\n)*names of them"):
            sp.federate(X, Y, owners=owners)


def test_a_dict_given_to_federate_is_clients():
    one, other = sp.federate(two(X, NAMES[Y])), Federation.from_clients(two(X, NAMES[Y]))
    assert one.digest() == other.digest()
    assert one.client_names == ("north", "south")


def test_labels_that_may_be_quantities(capsys):
    """Eighty ages of 900 people are hardly classes; a hundred classes of 2,000 pictures are."""
    rng = np.random.default_rng(0)
    ages = np.arange(900) % 80
    x = rng.random((2000, 2))
    said = 'warning: 80 classes in 900 examples: if these are quantities, such as ages, use task="regression" '
    for make in (
        lambda y, **options: federate(x[: len(y)], y, clients=3, partition="iid", **options),
        lambda y, **options: Federation.from_clients([(x[: len(y)], y)], **options),
    ):
        warn_once.cache_clear()
        for _ in range(2):  # said once
            assert make(ages).num_classes == 80
        assert capsys.readouterr().err.startswith(said + '(--set task=regression); task="classification" says')
        assert make(ages, task="regression").is_regression
        for y, options in (
            (ages, {"task": "classification"}),
            (ages, {"num_classes": 80}),
            (ages, {"class_names": [f"c{n}" for n in range(80)]}),
            (np.array([f"c{age}" for age in ages]), {}),
            (np.arange(2000) % 100, {}),
            (np.arange(100) % 25, {}),
        ):
            make(y, **options)
        assert capsys.readouterr().err == ""
    for y in (ages * 2, ages + 1, ages - 40):
        with pytest.raises(SparsonaError) as caught:
            federate(x[:900], y, clients=3)
        assert caught.value.hint.startswith('task="regression" if they are quantities')
    with pytest.raises(SparsonaError) as caught:
        federate(X, Y * 2, clients=3)
    assert caught.value.hint.startswith("number the classes without gaps")
    assert 'task="regression"' in caught.value.hint


def test_values_of_examples_are_in_no_error():
    """Labels may be people's: how many and of what kind they are is enough."""
    values = [41.5, 43.0, 47.25] * 8
    objects = np.array([43.0, None, "47"] * 8, dtype=object)
    for arguments, options, said in (
        ((X, np.array(values)), {"task": "classification"}, "labels of type float64: 16 of 24 are not whole"),
        ((X, np.array([43.0, 47.0] * 12)), {}, "labels of type float64: all 24 are whole"),
        ((X, np.array([43.0, np.inf] * 12)), {}, "labels of type float64: 12 of 24 are infinite"),
        ((X, objects), {}, "labels of type object: NoneType, float, str\n"),
        ((X, np.arange(41, 65)), {"num_classes": 3}, r"labels from 41 to 64 are outside the range"),
        ((X, Y), {"owners": values}, r"owners are float64 of shape \(24,\): 16 of 24 are not whole"),
        ((X, Y), {"owners": objects}, r"owners are object of shape \(24,\): NoneType, float, str"),
    ):
        with pytest.raises(SparsonaError, match=said) as caught:
            federate(*arguments, clients=2, **options)
        assert not any(value in str(caught.value) for value in ("43", "47", "41.5"))


def test_how_test_examples_were_chosen():
    split, given = (X, Y), {"train": (X, Y), "test": (X, Y)}
    for clients, expected in (
        ([split, split], "split"),
        ([given, (X, Y, X, Y)], "given"),
        ([split, given], "given, for some clients split"),
        ([given, {"train": split}], "given"),
    ):
        federation = Federation.from_clients(clients)
        assert federation.tested_on == expected
        assert f"test examples: {expected}<" in federation._repr_html_()


def test_one_class_is_no_result(capsys):
    for place, make in enumerate(
        (
            lambda name: federate(X, Y * 0, clients=2, partition="iid", name=name),
            lambda name: Federation.from_clients([(X, ["walking"] * 24)], name=name),
            lambda name: share_out(
                Pool(name, X, Y * 0, 1), SplitPlan(clients=2, partition="iid")
            ),  # a folder of one class
        )
    ):
        make(f"mine{place}")
        said = f"warning: mine{place}: all examples are of one class, so that every model has an accuracy of 100%\n"
        assert capsys.readouterr().err == said
    federate(X, X[:, 0], clients=2, partition="iid")
    federate(X, Y * 0, clients=2, partition="iid", task="binary")
    assert capsys.readouterr().err == ""


def test_inputs_that_need_scaling_are_told(capsys):
    rng = np.random.default_rng(0)
    table = np.stack([rng.normal(0, 1, 240), rng.normal(130, 15, 240), np.full(240, 2020), rng.normal(0, 400, 240)], 1)
    y = np.arange(240) % 3
    said = (
        r"3 of 4 inputs are large or far from 0 compared with how they vary, the first is column 1 \(mean 1..?, spread "
        r"1.*standardise them \(docs/data.md, Scaling\)\n"
    )
    for name, make in (
        ("mine", lambda: federate(table, y, clients=3, partition="iid", name="mine")),
        ("theirs", lambda: Federation.from_clients([(table, y)], name="theirs")),
    ):
        for _ in range(2):  # said once
            make()
        assert re.fullmatch(f"warning: {name}: {said}", capsys.readouterr().err)
    for x in (
        (table - table.mean(0)) / [1, 15, 1, 400],
        rng.random((240, 4)) * 255,  # as bytes are
        rng.integers(18, 90, (240, 4)),
        (rng.random((240, 4)) < 0.01) * 1.0,
        np.ones((240, 4)),
        {"image": table[:, None, :], "age": table[:, 1]},
        table[:, None, :],  # a signal
    ):
        federate(x, y, clients=3, partition="iid")
    assert capsys.readouterr().err == ""
