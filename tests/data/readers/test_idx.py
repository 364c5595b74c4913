"""MNIST and its relatives: tiny idx files written here, and files that are damaged or hostile."""

import gzip
import hashlib
import struct
import tracemalloc

import numpy as np
import pytest
from sample_pixels import random_bytes

from sparsona.core.errors import SparsonaError
from sparsona.data.pool import View
from sparsona.data.read import read
from sparsona.data.readers import idx as readers


def idx(array, kind=0x08):
    head = struct.pack(f">HBB{array.ndim}I", 0, kind, array.ndim, *array.shape)
    return head + array.astype({0x08: ">u1", 0x0C: ">i4"}[kind]).tobytes()


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_mnist(folder, end="", train="train", test="t10k", first=0):
    images = random_bytes(7, 28, 28)
    labels = np.arange(7) % 5 + first
    for part, rows in ((train, slice(0, 4)), (test, slice(4, 7))):
        write(folder / f"{part}-images-idx3-ubyte{end}", idx(images[rows]))
        write(folder / f"{part}-labels-idx1-ubyte{end}", idx(labels[rows]))
    return images[:, None], labels - first


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("sub", ["", "mnist", "MNIST/raw"])
def test_mnist(tmp_path, end, sub):
    x, y = write_mnist(tmp_path / sub, end)
    pool = read("mnist", [tmp_path])
    assert np.array_equal(pool.x, x)
    assert np.array_equal(pool.y, y)
    assert (pool.name, pool.num_train, pool.num_classes, pool.owners) == ("mnist", 4, 10, None)
    assert pool.view == View((0.1307,), (0.3081,))


def test_a_subfolder_of_the_sets_name_comes_first(tmp_path):
    """MNIST and Fashion-MNIST have files of the same names."""
    write_mnist(tmp_path)
    x, _ = write_mnist(tmp_path / "fashion-mnist")
    write(tmp_path / "train-images-idx3-ubyte", idx(np.zeros((4, 28, 28))))
    assert np.array_equal(read("fashion-mnist", [tmp_path]).x, x)


def write_writers(folder, y, writers, end=".gz"):
    table = np.zeros((len(y) + 2, 8), dtype=np.int64)  # QMNIST's test part is longer than MNIST's
    table[: len(y), 0], table[: len(y), 2] = y, writers
    for part, rows in (("train", slice(0, 4)), ("test", slice(4, None))):
        write(folder / f"qmnist-{part}-labels-idx2-int{end}", idx(table[rows], 0x0C))


@pytest.mark.parametrize("sub", ["mnist", "qmnist"])
def test_mnist_by_writer(tmp_path, sub):
    _, y = write_mnist(tmp_path / "mnist")
    write_writers(tmp_path / sub, y, [300, 7, 300, 9, 2000, 2001, 2000])
    assert read("mnist", [tmp_path]).owners.tolist() == [2, 0, 2, 1, 3, 4, 3]


def test_writers_of_other_digits_are_refused(tmp_path):
    _, y = write_mnist(tmp_path)
    write_writers(tmp_path, y[::-1], range(7))
    with pytest.raises(SparsonaError, match="qmnist-train-labels-idx2-int"):
        read("mnist", [tmp_path])


@pytest.mark.parametrize(("name", "first"), [("emnist-letters", 1), ("emnist-byclass", 0)])
def test_emnist_is_turned_and_letters_are_counted_from_zero(tmp_path, name, first):
    x, y = write_mnist(tmp_path, ".gz", f"{name}-train", f"{name}-test", first)
    pool = read(name, [tmp_path])
    assert np.array_equal(pool.x, x.swapaxes(2, 3))
    assert np.array_equal(pool.y, y)
    assert pool.num_train == 4
    assert isinstance(pool.x, np.memmap)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not begin|not enough"),
        (idx(np.zeros((4, 28, 28)))[:-1], "3,135 bytes of values instead of 3,136"),
        (idx(np.zeros((4, 28, 28))) + b"x", "instead of 3,136"),
        (b"\x00\x01" + idx(np.zeros((4, 28, 28)))[2:], "does not begin as an idx file"),
        (idx(np.zeros(4)), "does not begin as an idx file"),
        (struct.pack(">HBB3I", 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1), "0 bytes of values"),
        (idx(np.zeros((5, 28, 28))), "4 labels for 5 images"),
        (idx(np.zeros((4, 9, 9))), "images of"),
    ],
)
@pytest.mark.parametrize("end", ["", ".gz"])
def test_damaged_idx_files_are_named(tmp_path, content, said, end):
    write_mnist(tmp_path, end)
    write(tmp_path / f"train-images-idx3-ubyte{end}", content)
    with pytest.raises(SparsonaError, match=said) as caught:
        read("mnist", [tmp_path])
    assert "idx" in str(caught.value)


def test_a_gz_file_cut_short_is_named(tmp_path):
    write_mnist(tmp_path, ".gz")
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(SparsonaError, match=r"train-images-idx3-ubyte\.gz' cannot be read"):
        read("mnist", [tmp_path])


def test_a_small_gz_file_of_many_zeros_is_not_unpacked_into_memory(tmp_path):
    write_mnist(tmp_path, ".gz")
    write(tmp_path / "train-images-idx3-ubyte.gz", idx(np.zeros((4, 28, 28))) + bytes(40_000_000))
    tracemalloc.start()
    try:
        with pytest.raises(SparsonaError, match="3,137 bytes of values or more instead of 3,136"):
            read("mnist", [tmp_path])
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_one_set_is_not_taken_for_another_whose_files_are_called_the_same(tmp_path, monkeypatch):
    _, y = write_mnist(tmp_path)
    digest = hashlib.blake2b(y[:4].astype(np.uint8).tobytes(), digest_size=16).hexdigest()
    monkeypatch.setitem(readers.KNOWN, digest, "fashion-mnist")
    with pytest.raises(SparsonaError, match="train-labels-idx1-ubyte' is that of fashion-mnist"):
        read("mnist", [tmp_path])
    assert read("fashion-mnist", [tmp_path]).num_train == 4
