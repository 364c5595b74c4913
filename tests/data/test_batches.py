"""Batches: every example once, in an order that only the seed decides."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsona.core.errors import SparsonaError
from sparsona.data.batches import Examples, in_order, shuffled


def numbered(count):
    """Example i is all i, its target is 10 i."""
    return Examples(torch.arange(count).float().reshape(-1, 1, 1).expand(-1, 2, 2), 10 * torch.arange(count))


@settings(deadline=None, max_examples=50)
@given(count=st.integers(0, 40), batch_size=st.integers(1, 50), seed=st.integers(0, 2**63 - 1))
def test_every_example_comes_once_with_its_target(count, batch_size, seed):
    for batches in (list(shuffled(numbered(count), batch_size, seed)), list(in_order(numbered(count), batch_size))):
        sizes = [len(batch.targets) for batch in batches]
        assert sum(sizes) == count
        assert all(size == batch_size for size in sizes[:-1])
        assert sorted(i for batch in batches for i in batch.index.tolist()) == list(range(count))
        for batch in batches:
            assert torch.equal(batch.targets, 10 * batch.index)
            assert torch.equal(batch.inputs[:, 0, 0].long(), batch.index)
            assert batch.inputs.shape[1:] == (2, 2)
            assert batch.weight.dtype == torch.float32
            assert torch.equal(batch.weight, torch.ones(len(batch.index)))
            assert batch.noise.shape == ()
            assert batch.noise.dtype == torch.int64


@pytest.mark.parametrize(("count", "sizes"), [(12, [4, 4, 4]), (13, [4, 4, 4]), (15, [4, 4, 4]), (4, [4])])
def test_an_incomplete_last_batch_is_left_out(count, sizes):
    whole = list(shuffled(numbered(count), 4, 3))
    for no_single in (False, True):
        found = list(shuffled(numbered(count), 4, 3, no_single, drop_last=True))
        assert [len(batch.targets) for batch in found] == sizes
        assert [batch.index.tolist() for batch in found] == [batch.index.tolist() for batch in whole[: len(sizes)]]


def test_the_seed_alone_decides_the_order():
    def order(seed):
        return [(batch.index.tolist(), int(batch.noise)) for batch in shuffled(numbered(30), 7, seed)]

    torch.manual_seed(1)
    first = order(5)
    torch.manual_seed(2)
    assert order(5) == first
    assert order(6) != first
    assert [index for index, _ in first] != [batch.index.tolist() for batch in in_order(numbered(30), 7)]


def test_noise_differs_by_batch_and_is_zero_in_order():
    noise = [int(batch.noise) for batch in shuffled(numbered(64), 1, 3)]
    assert len(set(noise)) == 64
    assert min(noise) >= 0
    assert {int(batch.noise) for batch in in_order(numbered(6), 2)} == {0}


def test_the_global_generator_is_untouched():
    before = torch.get_rng_state()
    list(shuffled(numbered(10), 3, 0))
    list(in_order(numbered(10), 3))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_shuffled_epoch_is_gathered_once_and_a_pass_in_order_is_not_copied():
    examples = numbered(10)
    batches = list(shuffled(examples, 4, 0))
    assert len({batch.inputs.untyped_storage().data_ptr() for batch in batches}) == 1
    assert batches[0].inputs.untyped_storage().data_ptr() != examples.inputs.untyped_storage().data_ptr()
    assert all(batch.inputs.is_contiguous() for batch in batches)
    (whole,) = in_order(examples, 10)
    assert whole.inputs.data_ptr() == examples.inputs.data_ptr()


@pytest.mark.parametrize("make", [lambda examples: shuffled(examples, 0, 1), lambda examples: in_order(examples, 0)])
def test_a_bad_batch_size_is_told_before_the_first_batch(make):
    with pytest.raises(SparsonaError, match=r"a batch size of 0\n  expected: 1 or more"):
        make(numbered(3))
