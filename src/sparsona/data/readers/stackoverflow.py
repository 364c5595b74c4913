"""StackOverflow by user, from the files that TensorFlow Federated exports: HDF5, or SQLite."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np

from sparsona.core.tokens import BEGIN, END, NUM_SPECIAL, PAD
from sparsona.data.pool import Array, Pool
from sparsona.data.readers.decoded import decode_once
from sparsona.data.readers.files import Request, damaged, find, require
from sparsona.data.readers.text import SEQUENCE_LENGTH, VOCABULARY_SIZE, encode, make_vocabulary

REPORT_EVERY = 10_000  # sentences, while their number is unknown
Sentences = Iterator[tuple[str, list[str]]]  # a user, and a sentence in words


def read_stackoverflow(request: Request) -> Pool | None:
    """Sentences of the training users and, as test set, what they wrote later; the held-out users are left out.

    A sentence is BEGIN and its first `sequence_length` words, and END if it has fewer. The vocabulary is the
    `vocabulary_size` most frequent words of the training sentences.
    """
    if paths := find(request.places, "stackoverflow_train.h5", "stackoverflow_test.h5"):
        parts = [lambda path=path: _read_hdf5(path) for path in paths]
    elif paths := find(request.places, "stackoverflow.sqlite"):
        parts = [lambda split=split: _read_sqlite(paths[0], split) for split in ("train", "test")]
    else:
        return None
    length = request.sequence_length or SEQUENCE_LENGTH
    size = request.vocabulary_size or VOCABULARY_SIZE

    def decode(new: Callable[..., Array]) -> None:
        counts: Counter[str] = Counter()
        users: dict[str, int] = {}
        sizes = [0, 0]
        for part, sentences in enumerate(parts):
            for user, words in sentences():
                users.setdefault(user, len(users))
                sizes[part] += 1
                if sum(sizes) % REPORT_EVERY == 0:
                    request.report(sum(sizes), 0)
                if part == 0:
                    counts.update(words)
        if not all(sizes):
            raise damaged(paths[-1], "there are no sentences")
        vocabulary, total = make_vocabulary(counts, size), sum(sizes)
        x, y = (new(name, np.int32, (total, length)) for name in ("x", "y"))
        owners = new("owners", np.int64, (total,))
        new("counts", np.int64, (2,))[:] = sizes[0], len(vocabulary) + NUM_SPECIAL
        every = max(1, total // 1000)
        for row, (user, words) in enumerate(pair for sentences in parts for pair in sentences()):
            tokens = [BEGIN, *encode(words[:length], vocabulary), *[END] * (len(words) < length)]
            tokens += [PAD] * (length + 1 - len(tokens))
            x[row], y[row], owners[row] = tokens[:-1], tokens[1:], users[user]
            if row % every == 0 or row + 1 == total:
                request.report(row + 1, total)

    options = {"sequence_length": length, "vocabulary_size": size}
    arrays = decode_once(request.name, options, paths[0].parent, paths, decode)
    num_train, num_classes = map(int, arrays["counts"])
    return Pool(request.name, arrays["x"], arrays["y"], num_classes, num_train, arrays["owners"])


def _read_hdf5(path: Path) -> Sentences:
    """Groups examples/USER with the sentences, words between spaces, in `tokens`."""
    h5py = require("h5py", "hdf5", "StackOverflow in HDF5 files")
    try:
        with h5py.File(path, "r") as file:
            for user, group in file["examples"].items():
                for sentence in group["tokens"][()]:
                    yield user, sentence.decode("utf-8").split()
    except (OSError, KeyError, AttributeError, TypeError, ValueError, RuntimeError, MemoryError) as error:
        raise damaged(path, error, "HDF5 with examples/USER/tokens") from error


def _read_sqlite(path: Path, split: str) -> Sentences:
    """A table `examples` with a serialized tf.train.Example in each row, whose feature `tokens` is the sentence."""
    query = "SELECT client_id, serialized_example_proto FROM examples WHERE split_name = ? ORDER BY client_id, rowid"
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as base:
            for user, example in base.execute(query, (split,)):
                if user is None or not isinstance(example, bytes):
                    raise ValueError(f"an example of user {user} that is {type(example).__name__}")
                yield str(user), _feature(example, b"tokens").decode("utf-8").split()
    except (sqlite3.Error, ValueError, TypeError, IndexError) as error:
        raise damaged(
            path, error, "SQLite with a table examples(split_name, client_id, serialized_example_proto)"
        ) from error


def _feature(example: bytes, name: bytes) -> bytes:
    """The first bytes value of a tf.train.Example's feature: Example.features(1).feature(1){key(1), value(2)}."""
    for number, features in _fields(example):
        for entry_number, entry in _fields(features) if number == 1 else ():
            pair = dict(_fields(entry)) if entry_number == 1 else {}
            if pair.get(1) == name:
                for kind, values in _fields(pair.get(2, b"")):
                    if kind == 1:  # Feature.bytes_list
                        return next((value for _, value in _fields(values)), b"")
    raise ValueError(f"an example without the feature {name.decode()}")


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and content of a protocol buffer's length-delimited fields; the others are passed over."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            _, at = _varint(message, at)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        elif kind == 2:
            size, at = _varint(message, at)
            if at + size > len(message):
                raise ValueError("an example that is cut short")
            yield key >> 3, message[at : at + size]
            at += size
        else:
            raise ValueError(f"an example with wire type {kind}")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("an example with a number of more than ten bytes")
