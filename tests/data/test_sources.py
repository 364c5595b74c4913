"""The embedded data set, and the tables that describe what there is."""

import hashlib
import subprocess
import sys

import pytest
import torch

from sparsona.core.errors import SparsonaError
from sparsona.data import PARTITIONS, SOURCES
from sparsona.data.sources import load


def test_digits_are_what_their_card_says():
    card = SOURCES["digits"]
    x, y = load("digits")
    assert x.shape == (card.num_examples, *card.input_shape)
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    assert (x.min(), x.max()) == (0.0, 1.0)
    assert torch.equal(x * 16, (x * 16).round())
    assert y.unique().tolist() == list(range(card.num_classes))
    # The published test part: 178 zeros, 182 ones, and so on.
    assert y.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_digits_are_scikit_learns_byte_for_byte():
    """The digest is of load_digits() of scikit-learn 1.9.1: images, then target, as unsigned bytes."""
    x, y = load("digits")
    content = (x * 16).byte().numpy().tobytes() + y.byte().numpy().tobytes()
    assert hashlib.blake2b(content, digest_size=16).hexdigest() == "3add1ae1fa53cc89d7599167a31c4e88"


def test_loading_twice_gives_separate_tensors():
    first, _ = load("digits")
    first.zero_()
    assert load("digits")[0].sum() > 0


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(SparsonaError, match=r"unknown data set 'digit'(.|\n)*did you mean 'digits'"):
        load("digit")


def test_tables_are_keyed_by_name():
    assert all(name == card.name for name, card in SOURCES.items())
    assert all(name == card.form.partition(":")[0] for name, card in PARTITIONS.items())
    assert all(card.summary.endswith(".") for card in (*SOURCES.values(), *PARTITIONS.values()))


def test_tables_need_neither_torch_nor_numpy_and_partitions_no_torch():
    check = (
        "import sys, sparsona.data; assert not {'torch', 'numpy'} & set(sys.modules);"
        "import sparsona.data.partition; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
