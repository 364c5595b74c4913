"""Random masks: exact counts, uniform positions, a function of the seed alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsona.core.errors import SparsonaError
from sparsona.core.layout import Layout, Slot
from sparsona.core.tree import counts
from sparsona.sparsity.masks import random_mask

LAYOUT = Layout((Slot("weight", (3, 4)), Slot("scale", ()), Slot("bias", (5,))))


@settings(deadline=None)
@given(st.integers(0, 12), st.integers(0, 1), st.integers(0, 5), st.integers(0, 2**63 - 1))
def test_counts_are_exact(weight: int, scale: int, bias: int, seed: int) -> None:
    mask = random_mask(LAYOUT, (weight, scale, bias), seed)
    assert counts(mask) == (weight, scale, bias)
    assert mask.flat.dtype is torch.bool
    assert int(mask.flat.count_nonzero()) == weight + scale + bias


def test_same_seed_same_mask_and_other_seed_another() -> None:
    one, again, other = (random_mask(LAYOUT, (6, 1, 2), seed).flat for seed in (7, 7, 8))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_a_smaller_mask_lies_inside_a_larger_one() -> None:
    small, large = random_mask(LAYOUT, (3, 0, 2), 7), random_mask(LAYOUT, (12, 1, 4), 7)
    assert not (small.flat & ~large.flat).any()


def test_positions_are_equally_likely() -> None:
    draws = 2000
    hits = torch.stack([random_mask(LAYOUT, (3, 0, 2), seed).flat for seed in range(draws)]).sum(0)
    # Five standard deviations of a binomial around the expected share.
    for part, share in ((hits[:12], 3 / 12), (hits[13:], 2 / 5)):
        assert (part - draws * share).abs().max() < 5 * (draws * share * (1 - share)) ** 0.5


def test_the_global_generator_is_untouched() -> None:
    before = torch.random.get_rng_state()
    random_mask(LAYOUT, (6, 1, 2), 7)
    assert torch.equal(before, torch.random.get_rng_state())


def test_an_empty_layout_has_masks() -> None:
    assert len(random_mask(Layout(()), (), 0)) == 0


@pytest.mark.parametrize(
    ("kept", "what"), [((6, 1), "2 counts for 3"), ((13, 1, 2), "'weight'"), ((6, -1, 2), "'scale'")]
)
def test_counts_that_do_not_fit_are_refused(kept: tuple[int, ...], what: str) -> None:
    with pytest.raises(SparsonaError, match=what):
        random_mask(LAYOUT, kept, 0)
