"""Data sets by name: the embedded one, options, what is said of absent files, and real data where it is."""

import hashlib
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsona.core.errors import SparsonaError
from sparsona.data import SOURCES
from sparsona.data.cache import cache_folder
from sparsona.data.partition import PARTITIONS
from sparsona.data.pool import View
from sparsona.data.read import read


def test_digits_are_what_their_card_says(digits):
    card = SOURCES["digits"]
    x, y = digits
    assert x.shape == (card.num_examples, *card.input_shape)
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    assert (x.min(), x.max()) == (0.0, 1.0)
    assert torch.equal(x * 16, (x * 16).round())
    assert y.unique().tolist() == list(range(card.num_classes))
    # The published test part: 178 zeros, 182 ones, and so on.
    assert y.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_digits_are_scikit_learns_byte_for_byte(digits):
    """The digest is of load_digits() of scikit-learn 1.9.1: images, then target, as unsigned bytes."""
    x, y = digits
    content = (x * 16).byte().numpy().tobytes() + y.byte().numpy().tobytes()
    assert hashlib.blake2b(content, digest_size=16).hexdigest() == "3add1ae1fa53cc89d7599167a31c4e88"


def test_reading_twice_gives_separate_arrays():
    read("digits").x[:] = 0
    assert read("digits").x.sum() > 0


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(SparsonaError, match=r"unknown data set 'digit'(.|\n)*did you mean 'digits'"):
        read("digit")


def test_tables_are_keyed_by_name():
    assert all(name == card.name for name, card in SOURCES.items())
    assert all(name == card.form.partition(":")[0] for name, card in PARTITIONS.items())
    assert all(card.summary.endswith(".") for card in (*SOURCES.values(), *PARTITIONS.values()))


def test_tables_need_neither_torch_nor_numpy_and_partitions_no_torch():
    check = (
        "import sys, sparsona.data; assert not {'torch', 'numpy'} & set(sys.modules);"
        "import sparsona.data.download, sparsona.data.split_plan; assert not {'torch', 'numpy'} & set(sys.modules);"
        "import sparsona.data.partition, sparsona.data.read; sparsona.data.read.read('digits');"
        "assert not {'torch', 'PIL', 'h5py'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


def test_digits_as_a_pool():
    pool = read("digits")
    assert pool.x.dtype == np.float32
    assert (pool.num_train, pool.owners, pool.view) == (None, None, View())


def test_every_card_has_a_reader_and_says_what_it_reads():
    for card in SOURCES.values():
        for reader in card.readers:
            module, _, function = reader.partition(":")
            assert callable(getattr(import_module(f"sparsona.data.readers.{module}"), function))
        if card.name != "digits":
            assert card.files
            assert card.folders[0] == card.name
            assert card.address.startswith("http")


@pytest.mark.parametrize("name", sorted(set(SOURCES) - {"digits"}))
def test_absent_data_is_one_message(name, tmp_path, monkeypatch):
    """Which files, where they were looked for, how to get them."""
    monkeypatch.setenv("SPARSONA_DATA", str(tmp_path / "cache"))
    with pytest.raises(SparsonaError) as caught:
        read(name, [tmp_path / "mine", tmp_path / "yours"])
    said = str(caught.value)
    for top in ("mine", "yours", "cache"):
        assert f"'{tmp_path / top}'" in said
        assert f"'{tmp_path / top / name}'" in said
    assert all(form in said for form in SOURCES[name].files)
    assert (f"sparsona data get {name}" if SOURCES[name].mirrors else SOURCES[name].address) in said


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("digits", {"resize": 8}),
        ("digits", {"augment": True}),
        ("mnist", {"augment": True}),
        ("cifar10", {"sequence_length": 20}),
        ("cifar10", {"resize": 64}),
        ("shakespeare", {"vocabulary_size": 100}),
        ("stackoverflow", {"crop": 3}),
        ("arrays:some.npz", {"resize": 3}),
    ],
)
def test_an_option_that_a_set_cannot_use_is_an_error(spec, options):
    with pytest.raises(SparsonaError, match=f"'{next(iter(options))}' with the data set '{spec}'"):
        read(spec, **options)


def test_no_augmentation_is_what_a_set_without_it_has_anyway():
    assert read("digits", augment=False).view == View()


@pytest.mark.parametrize("spec", ["nonsense", "arrays", "folder:", "digits:3", ""])
def test_unknown_specs(spec):
    with pytest.raises(SparsonaError, match=f"unknown data set '{spec}'"):
        read(spec)


def test_numbers_below_one_are_refused():
    with pytest.raises(SparsonaError, match="sequence_length is 0"):
        read("shakespeare", sequence_length=0)


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("shakespeare", {"sequence_length": 10**6}),
        ("stackoverflow", {"vocabulary_size": 10**9}),
        ("folder:x", {"resize": 10**6}),
    ],
)
def test_numbers_beyond_reason_are_refused(spec, options):
    with pytest.raises(SparsonaError, match=r"is 10+\n(.|\n)*at most"):
        read(spec, **options)


def test_where_the_cache_is(monkeypatch, tmp_path):
    for name in ("SPARSONA_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "sparsona"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder() == tmp_path / "x" / "sparsona"
    monkeypatch.setenv("SPARSONA_DATA", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "mnist", "fashion-mnist", "shakespeare", "shakespeare-words"])
def test_real_data_is_what_its_card_says(name):
    """Where it is: in the cache, or in the folder that $SPARSONA_TEST_DATA names."""
    folders = [Path(folder) for folder in os.environ.get("SPARSONA_TEST_DATA", "").split(os.pathsep) if folder]
    try:
        pool = read(name, folders)
    except SparsonaError as error:
        if "were not found in" not in error.what:
            raise
        pytest.skip(f"{name} is not here; SPARSONA_TEST_DATA may name its folder")
    card = SOURCES[name]
    assert pool.num_classes == card.num_classes
    assert pool.x.shape == (card.num_examples, *card.input_shape)
    if pool.x.dtype == np.uint8:
        train = pool.x[: pool.num_train : 10].astype(np.float32) / 255
        assert np.allclose(train.mean((0, 2, 3)), pool.view.mean, atol=0.01)
        assert np.allclose(train.std((0, 2, 3)), pool.view.std, atol=0.01)
    if name == "mnist" and pool.owners is not None:  # QMNIST's labels are there, too
        sizes = np.bincount(pool.owners[: pool.num_train])
        assert (np.count_nonzero(sizes), sizes[sizes > 0].min(), sizes.max()) == (539, 19, 131)
    if pool.has_tokens:
        assert len(np.unique(pool.owners)) == 299
