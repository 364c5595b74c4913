"""Means as sums that add: one tree at a time, or from partial sums."""

from __future__ import annotations

import pytest
import torch

from sparsona.core.errors import SparsonaError
from sparsona.core.tree import Tree
from sparsona.learning.means import IndexedSum, WeightedSum, count_mean


def tree(*values: float) -> Tree:
    return Tree.of({"a": torch.tensor(values)})


def mask(*values: int) -> Tree:
    return Tree.of({"a": torch.tensor(values, dtype=torch.bool)})


def test_weighted_mean():
    zero = tree(0.0, 0.0)
    total = WeightedSum().add(tree(1.0, 1.0), 2.0).add(tree(4.0, 1.0), 1.0)
    assert total.mean(otherwise=zero).flat.tolist() == [2.0, 1.0]
    assert WeightedSum().mean(otherwise=zero) is zero


def test_weights_that_make_no_mean():
    """Of 0 in all there is no mean, and finite ones may add up to infinity."""
    one, before = tree(1.0, 2.0), tree(5.0, 5.0)
    assert WeightedSum().add(one, 0.0).mean(otherwise=before) is before
    assert WeightedSum().add(one, 0.0).add(one, 1.0).mean(otherwise=before).flat.tolist() == [1.0, 2.0]
    assert IndexedSum().add(one, mask(1, 1), 0.0).mean(otherwise=before).flat.tolist() == [0.0, 0.0]
    for total in (WeightedSum().add(one, 1.7e308).add(one, 1.7e308), WeightedSum().add(one, float("inf"))):
        with pytest.raises(SparsonaError, match="add up to inf"):
            total.mean(otherwise=before)
    covered_twice = IndexedSum().add(tree(0.0, 2.0), mask(0, 1), 1.7e308).add(one, mask(1, 1), 1.7e308)
    with pytest.raises(SparsonaError, match="add up to inf"):
        covered_twice.mean(otherwise=before)


def test_the_mean_of_one_is_that_one_to_the_bit():
    odd = Tree.of({"a": torch.rand(1000, generator=torch.Generator().manual_seed(3))})
    assert torch.equal(WeightedSum().add(odd, 7.3).mean(otherwise=odd).flat, odd.flat)
    below_zero = tree(-0.0)
    assert torch.signbit(WeightedSum().add(below_zero, 1.0).mean(otherwise=below_zero).flat).all()


def test_adding_leaves_what_is_added_alone_and_takes_one_sum_of_memory():
    first, second = tree(1.0, 2.0), tree(3.0, 4.0)
    one = WeightedSum().add(first, 1.0)
    two = one.add(second, 1.0)
    assert two.total.flat.data_ptr() == one.total.flat.data_ptr()
    assert (first.flat.tolist(), second.flat.tolist()) == ([1.0, 2.0], [3.0, 4.0])


def test_an_indexed_mean_is_over_those_whose_mask_covers_an_entry():
    total = IndexedSum().add(tree(6.0, 1.0, 0.0), mask(1, 1, 0), 1.0).add(tree(3.0, 0.0, 0.0), mask(1, 0, 0), 2.0)
    assert total.mean(otherwise=tree(9.0, 9.0, 9.0)).flat.tolist() == [4.0, 1.0, 0.0]
    nothing = tree(9.0)
    assert IndexedSum().mean(otherwise=nothing) is nothing


@pytest.mark.parametrize("kind", [WeightedSum, IndexedSum])
def test_partial_sums_merge(kind):
    def part(*values):
        total = kind()
        for value in values:
            what = (tree(value, 1.0),) if kind is WeightedSum else (tree(value, 1.0), mask(1, value > 2))
            total = total.add(*what, value)
        return total

    like = tree(0.0, 0.0)
    together = part(1.0, 2.0, 4.0).mean(otherwise=like).flat
    assert torch.equal(part(1.0).merge(part(2.0, 4.0)).mean(otherwise=like).flat, together)
    assert torch.equal(part().merge(part(1.0, 2.0, 4.0)).mean(otherwise=like).flat, together)
    assert torch.equal(part(1.0, 2.0, 4.0).merge(part()).mean(otherwise=like).flat, together)


def test_other_layouts_are_refused():
    with pytest.raises(ValueError, match="different layouts"):
        WeightedSum().add(tree(1.0), 1.0).add(tree(1.0, 2.0), 1.0)


def test_count_mean():
    found = count_mean([(tree(1.0, 2.0, 5.0), mask(1, 1, 0)), (tree(3.0, 0.0, 0.0), mask(1, 0, 0))])
    assert found.flat.tolist() == [2.0, 2.0, 5.0]
