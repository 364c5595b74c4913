"""Text and LEAF's files in every published form, as tiny files written here; and files that are damaged."""

import json
import sqlite3
from contextlib import closing

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsona.core.errors import SparsonaError
from sparsona.core.tokens import BEGIN, END, NUM_SPECIAL, PAD, UNKNOWN
from sparsona.data.read import read
from sparsona.data.readers import stackoverflow
from sparsona.data.readers.text import cut

PLAY = """\
Anna:
Abba!

BEN:

Anna:
Ab, baa
Bb.

Carl:
b
"""


def spell(pool, row, characters):
    """What an example says, inputs and then targets."""
    names = {PAD: "_", BEGIN: "<", END: ">", UNKNOWN: "?"} | dict(enumerate(characters, NUM_SPECIAL))
    return "".join(names[token] for token in pool.x[row]), "".join(names[token] for token in pool.y[row])


def test_speakers_by_character(tmp_path):
    (tmp_path / "input.txt").write_text(PLAY)
    pool = read("shakespeare", [tmp_path], sequence_length=4)
    counts = {c: "Abba!Ab, baa\nBb.b".count(c) for c in set("Abba!Ab, baa\nBb.b")}
    ranked = sorted(counts, key=lambda c: (-counts[c], c))
    assert pool.num_classes == len(ranked) + NUM_SPECIAL
    assert (pool.x.dtype, pool.y.dtype, pool.num_train) == (np.int32, np.int32, None)
    assert pool.owners.tolist() == [0, 0, 0, 0, 0, 1]  # Ben says nothing
    said = [spell(pool, row, ranked) for row in range(6)]
    assert said == [
        ("<Abb", "Abba"),
        ("a!>_", "!>__"),
        ("<Ab,", "Ab, "),
        (" baa", "baa\n"),
        ("\nBb.", "Bb.>"),
        ("<b>_", "b>__"),
    ]


def test_speakers_by_word(tmp_path):
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "input.txt").write_text("A:\nTo be, or not to be:\nthat's well-known.\n\nB:\nBe!\n")
    pool = read("shakespeare-words", [tmp_path], sequence_length=12, vocabulary_size=2)
    be, to = NUM_SPECIAL, NUM_SPECIAL + 1
    rest = [UNKNOWN] * 4
    assert pool.num_classes == 2 + NUM_SPECIAL
    # to be , or not to be : that's well-known . END
    assert pool.y[0].tolist() == [to, be, UNKNOWN, UNKNOWN, UNKNOWN, to, be, *rest, END]
    assert pool.x[0].tolist() == [BEGIN, *pool.y[0][:-1]]
    assert pool.y[1].tolist() == [be, UNKNOWN, END] + [PAD] * 9
    assert pool.owners.tolist() == [0, 1]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(4, 50), min_size=2, max_size=60), st.integers(1, 25))
def test_cutting_asks_for_every_token_once(tokens, length):
    rows = np.array(list(cut(tokens, length)))
    assert rows.shape[1] == length + 1
    targets = rows[:, 1:].reshape(-1)
    assert targets[targets != PAD].tolist() == tokens[1:]
    inputs = rows[:, :-1].reshape(-1)[: len(tokens)]
    assert inputs[inputs != PAD].tolist() in (tokens, tokens[:-1])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "begins with|no turn with text"),
        (b"just prose\nwithout names\n", "begins with 'just prose'"),
        (b"A:\n\xff\xfe\n", "UTF-8"),
    ],
)
def test_plays_that_will_not_do(tmp_path, content, said):
    (tmp_path / "input.txt").write_bytes(content)
    with pytest.raises(SparsonaError, match=said):
        read("shakespeare", [tmp_path])


def write_leaf(root, train, test):
    """`train` and `test`: for each file, user -> (x, y)."""
    for part, contents in (("train", train), ("test", test)):
        (root / part).mkdir(parents=True, exist_ok=True)
        for number, users in enumerate(contents):
            content = {
                "users": list(users),
                "num_samples": [len(y) for _, y in users.values()],
                "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
            }
            (root / part / f"all_data_{number}.json").write_text(json.dumps(content))


@pytest.mark.parametrize("sub", [".", "femnist", "femnist/data"])
def test_femnist(tmp_path, sub):
    images = [[value] * 784 for value in (1.0, 0.0, 0.5, 0.25, 1.0)]
    train = [{"w2": (images[:2], [61, 0])}, {"w1": (images[2:3], [5]), "empty": ([], [])}]
    write_leaf(tmp_path / sub, train, [{"w1": (images[3:4], [6]), "w2": (images[4:], [7])}])
    pool = read("femnist", [tmp_path])
    assert pool.x.shape == (5, 1, 28, 28)
    assert pool.x[:, 0, 0, 0].tolist() == [255, 0, 128, 64, 255]
    assert pool.y.tolist() == [61, 0, 5, 6, 7]
    assert pool.owners.tolist() == [1, 1, 0, 0, 1]
    assert (pool.num_train, pool.num_classes) == (3, 62)


GOOD = {"w": ([[1.0] * 784], [3])}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "cannot be read"),
        ('{"users": ["w"]', "cannot be read"),
        ("[1, 2]", "cannot be read"),
        ('{"users": ["w"]}', "lacks the key 'user_data'"),
        ('{"users": ["w"], "user_data": {}}', "lacks the key 'w'"),
        ('{"users": ["w"], "user_data": {"w": {"x": [[1.0]]}}}', "lacks the key 'y'"),
        ('{"users": ["w"], "user_data": {"w": {"x": [[1.0]], "y": [1, 2]}}}', "equal length"),
        ('{"users": ["w"], "user_data": {"w": {"x": [[1.0, 2.0]], "y": [1]}}}', "user 'w'"),
        ('{"users": ["w"], "user_data": {"w": {"x": ["abc"], "y": [1]}}}', "user 'w'"),
        (json.dumps({"users": ["w"], "user_data": {"w": {"x": [[2.0] * 784], "y": [1]}}}), "outside 0 to 1"),
        (json.dumps({"users": ["w"], "user_data": {"w": {"x": [[1.0] * 784], "y": [62]}}}), "3 to 62"),
        ('{"users": [], "user_data": {}}', "no examples"),
        (json.dumps({"users": ["w"], "user_data": {"w": {"x": [[1.0] * 784], "y": [1.5]}}}), "classes of float64"),
        (json.dumps({"users": ["w"], "user_data": {"w": {"x": [[1.0] * 784], "y": ["3"]}}}), "classes of <U1"),
        (json.dumps({"users": ["w"], "user_data": {"w": {"x": [["1.0"] * 784], "y": [3]}}}), "images of <U3"),
        (json.dumps({"users": ["w", "w"], "user_data": {"w": {"x": [[1.0] * 784], "y": [3]}}}), "listed twice"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_femnist_damaged(tmp_path, content, said):
    write_leaf(tmp_path, [GOOD], [GOOD])
    (tmp_path / "test" / "all_data_0.json").write_text(content)
    with pytest.raises(SparsonaError, match=said):
        read("femnist", [tmp_path])


def test_shakespeare_from_leaf(tmp_path):
    train = [{"ROMEO": (["abab", "baba"], ["a", "b"])}, {"JULIET": (["aaab"], ["c"])}]
    write_leaf(tmp_path, train, [{"ROMEO": (["abzé"], ["a"]), "JULIET": (["cccc"], ["z"])}])
    pool = read("shakespeare", [tmp_path])
    ranked = "abc"
    assert [spell(pool, row, ranked) for row in range(5)] == [
        ("abab", "___a"),
        ("baba", "___b"),
        ("aaab", "___c"),
        ("ab??", "___a"),  # the vocabulary is that of the training examples
        ("cccc", "___?"),
    ]
    assert (pool.num_train, pool.num_classes, pool.owners.tolist()) == (3, 3 + NUM_SPECIAL, [1, 1, 0, 1, 0])
    short = read("shakespeare", [tmp_path], sequence_length=2)
    assert np.array_equal(short.x, pool.x[:, 2:])
    assert np.array_equal(short.y, pool.y[:, 2:])
    with pytest.raises(SparsonaError, match=r"sequence_length 5(.|\n)*at most 4"):
        read("shakespeare", [tmp_path], sequence_length=5)


@pytest.mark.parametrize("bad", [(["abc"], ["a"]), (["abab"], ["ab"]), ([1], ["a"]), ([[1]], [2])])
def test_shakespeare_from_leaf_damaged(tmp_path, bad):
    write_leaf(tmp_path, [{"R": (["abab"], ["a"])}, {"J": bad}], [{"R": (["abab"], ["a"])}])
    with pytest.raises(SparsonaError, match=r"all_data_1\.json' cannot be read: user 'J'"):
        read("shakespeare", [tmp_path])


SENTENCES = {
    "train": {"10": ["how do i do that ?", "i do"], "2": ["that is how i do it here now"]},
    "test": {"2": ["do that"], "77": ["nothing"]},
}


def write_hdf5(root):
    for part in ("train", "test", "held_out"):
        with h5py.File(root / f"stackoverflow_{part}.h5", "w") as file:
            for user, sentences in SENTENCES.get(part, {"1": ["held out words"]}).items():
                tokens = [sentence.encode() for sentence in sentences]
                file.create_dataset(f"examples/{user}/tokens", data=tokens, dtype=h5py.string_dtype("utf-8"))
                file.create_dataset(f"examples/{user}/score", data=[0] * len(sentences))


def field(number, content):
    size, head = len(content), bytes([number << 3 | 2])
    while size > 127:
        head, size = head + bytes([size & 127 | 128]), size >> 7
    return head + bytes([size]) + content


def example(sentence):
    """A serialized tf.train.Example with a number, a long text and the tokens."""
    score = field(1, field(1, b"score") + field(2, field(3, field(1, b"\x05"))))
    title = field(1, field(1, b"title") + field(2, field(1, field(1, b"t" * 300))))
    tokens = field(1, field(1, b"tokens") + field(2, field(1, field(1, sentence.encode()))))
    return field(1, score + title + tokens)


def write_sqlite(root, blob=None, null=False):
    base = sqlite3.connect(root / "stackoverflow.sqlite")
    base.execute("CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)")
    for split, users in (*SENTENCES.items(), ("heldout", {"1": ["held out words"]})):
        for user, sentences in users.items():
            rows = [
                (split, user, None if null else example(sentence) if blob is None else blob) for sentence in sentences
            ]
            base.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
    base.commit()
    base.close()


@pytest.mark.parametrize("write", [write_hdf5, write_sqlite])
def test_stackoverflow(tmp_path, write):
    write(tmp_path)
    heard = []
    pool = read("stackoverflow", [tmp_path], sequence_length=4, vocabulary_size=3, listen=lambda *at: heard.append(at))
    do, i, how = range(NUM_SPECIAL, NUM_SPECIAL + 3)  # four times, three times, twice (before "that" by the alphabet)
    assert (pool.num_classes, pool.num_train) == (3 + NUM_SPECIAL, 3)
    assert pool.owners.tolist() == [0, 0, 1, 1, 2]
    assert pool.y.tolist() == [
        [how, do, i, do],  # cut: no end
        [i, do, END, PAD],
        [UNKNOWN, UNKNOWN, how, i],
        [do, UNKNOWN, END, PAD],
        [UNKNOWN, END, PAD, PAD],
    ]
    assert pool.x.tolist() == [[BEGIN, *row[:-1]] for row in pool.y.tolist()]
    assert heard[-1] == (5, 5)
    assert isinstance(pool.x, np.memmap)
    assert read("stackoverflow", [tmp_path]).x.shape == (5, 20)


@pytest.mark.parametrize("write", [write_hdf5, write_sqlite])
def test_both_passes_over_stackoverflow_are_told(tmp_path, monkeypatch, write):
    monkeypatch.setattr(stackoverflow, "REPORT_EVERY", 2)
    write(tmp_path)
    heard = []
    read("stackoverflow", [tmp_path], listen=lambda *at: heard.append(at))
    assert heard[:2] == [(2, 0), (4, 0)]  # how many there are is not known yet
    assert heard[2:] == [(number, 5) for number in range(1, 6)]


def test_a_sentence_of_nobody_is_refused(tmp_path):
    write_sqlite(tmp_path)
    with closing(sqlite3.connect(tmp_path / "stackoverflow.sqlite")) as base:
        base.execute("UPDATE examples SET client_id = NULL WHERE client_id = '77'")
        base.commit()
    with pytest.raises(SparsonaError, match="user None"):
        read("stackoverflow", [tmp_path])


def test_stackoverflow_damaged(tmp_path):
    write_hdf5(tmp_path)
    path = tmp_path / "stackoverflow_train.h5"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(SparsonaError, match=r"stackoverflow_train\.h5' cannot be read"):
        read("stackoverflow", [tmp_path])
    with h5py.File(path, "w") as file:
        file.create_group("examples/user")
    with pytest.raises(SparsonaError, match="examples/USER/tokens"):
        read("stackoverflow", [tmp_path])


@pytest.mark.parametrize(
    "blob",
    [
        10**12,  # a number of so many bytes
        None,
        "text",
        field(1, field(1, field(1, b"tokens"))),  # no value
        field(1, field(1, field(1, b"tokens") + field(2, field(3, field(1, b"\x05"))))),  # numbers
        b"",
        b"\x0a",
        b"\x0a\xff",
        b"\xff" * 30,
        example("x")[:-1],
        b"\x0b\x00",
        field(1, b""),
    ],
)
def test_stackoverflow_with_damaged_examples(tmp_path, blob):
    write_sqlite(tmp_path, *([] if blob is None else [blob]), null=blob is None)
    with pytest.raises(SparsonaError, match=r"stackoverflow\.sqlite' cannot be read"):
        read("stackoverflow", [tmp_path])


def test_stackoverflow_that_is_no_database(tmp_path):
    (tmp_path / "stackoverflow.sqlite").write_bytes(b"no database at all" * 100)
    with pytest.raises(SparsonaError, match=r"stackoverflow\.sqlite' cannot be read"):
        read("stackoverflow", [tmp_path])
