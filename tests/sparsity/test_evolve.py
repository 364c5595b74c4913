"""Mask evolution against a plain Python reference, and what it must never do."""

from __future__ import annotations

from decimal import ROUND_CEILING, Decimal
from math import inf, nan, pi

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsona.core.errors import SparsonaError
from sparsona.core.layout import Layout, Slot
from sparsona.core.tree import Tree, counts
from sparsona.sparsity.evolve import cosine_rate, evolve, random_scores

# Few distinct values of either sign: nearly every case has ties at the threshold.
TIED = [0.0, -0.0, 1.0, -1.0, 2.0, -2.0, inf, -inf]
percents = st.integers(0, 100)
Case = tuple[list[float], list[bool], list[float]]


def tree_of(*tensors: list[float] | list[bool]) -> Tree:
    return Tree.of({f"t{position}": torch.tensor(values) for position, values in enumerate(tensors)})


def reference(params: list[float], mask: list[bool], percent: int, scores: list[float]) -> list[bool]:
    """Section 3.2 of the methods reference, word for word, for one tensor. Python's sort is stable."""
    active = [i for i, flag in enumerate(mask) if flag]
    moved = int((Decimal(percent) * len(active) / 100).to_integral_value(ROUND_CEILING))
    pruned = sorted(active, key=lambda i: abs(params[i]))[:moved]
    inactive = [i for i, flag in enumerate(mask) if not flag or i in pruned]
    grown = sorted(inactive, key=lambda i: -abs(scores[i]))[:moved]
    return [(flag and i not in pruned) or i in grown for i, flag in enumerate(mask)]


@st.composite
def tensors(draw: st.DrawFn, values: st.SearchStrategy[float]) -> Case:
    size = draw(st.integers(1, 24))

    def sized(kind: st.SearchStrategy) -> st.SearchStrategy:
        return st.lists(kind, min_size=size, max_size=size)

    return draw(sized(values)), draw(sized(st.booleans())), draw(sized(values))


any_tensors = st.one_of(tensors(st.sampled_from(TIED)), tensors(st.floats(width=32, allow_nan=False)))


@settings(deadline=None)
@given(any_tensors, any_tensors, percents)
def test_agrees_with_the_reference(one: Case, two: Case, percent: int) -> None:
    params, mask, scores = tree_of(one[0], two[0]), tree_of(one[1], two[1]), tree_of(one[2], two[2])
    expected = [flag for tensor in (one, two) for flag in reference(tensor[0], tensor[1], percent, tensor[2])]
    assert evolve(params, mask, percent / 100, scores, seed=0).flat.tolist() == expected


@settings(deadline=None)
@given(any_tensors, any_tensors, percents, st.integers(0, 2**63 - 1))
def test_counts_stay_and_inputs_are_unchanged(one: Case, two: Case, percent: int, seed: int) -> None:
    params, mask, scores = tree_of(one[0], two[0]), tree_of(one[1], two[1]), tree_of(one[2], two[2])
    before = [tree.flat.clone() for tree in (params, mask, scores)]
    state = torch.random.get_rng_state()
    for by in (scores, None):
        evolved = evolve(params, mask, percent / 100, by, seed)
        assert counts(evolved) == counts(mask)
        assert evolved.flat.dtype is torch.bool
        assert torch.equal(evolved.flat, evolve(params, mask, percent / 100, by, seed).flat)
        # What stays is a matter of pruning alone, and at most the pruned number of entries is new.
        moved = sum(-(-count * percent // 100) for count in counts(mask))
        assert int((evolved.flat & ~mask.flat).count_nonzero()) <= moved
    assert all(torch.equal(a, b.flat) for a, b in zip(before, (params, mask, scores), strict=True))
    assert torch.equal(state, torch.random.get_rng_state())


def test_agrees_with_a_stable_sort_on_a_large_tensor() -> None:
    random = torch.Generator().manual_seed(0)
    size = 100_000
    # Coarse values: hundreds of ties at either threshold.
    params, scores = (tree_of((torch.randn(size, generator=random) * 50).round().tolist()) for _ in range(2))
    mask = tree_of((torch.rand(size, generator=random) < 0.4).tolist())
    active = mask.flat.nonzero().squeeze(1)
    moved = -(-len(active) * 3 // 10)
    expected = mask.flat.clone()
    expected[active[params.flat[active].abs().sort(stable=True).indices[:moved]]] = False
    free = (~expected).nonzero().squeeze(1)
    expected[free[(-scores.flat[free].abs()).sort(stable=True).indices[:moved]]] = True
    assert torch.equal(evolve(params, mask, 0.3, scores, seed=0).flat, expected)


def test_random_growth_is_uniform_over_all_free_positions() -> None:
    """Active 0-3, of which 0 and 1 are pruned: two of the eight free positions 0, 1, 4-9 are grown."""
    params = tree_of([0.1, 0.2, 3.0, 4.0] + [9.0] * 6)
    mask = tree_of([True] * 4 + [False] * 6)
    draws = 2000
    hits = torch.stack([evolve(params, mask, 0.5, None, seed).flat for seed in range(draws)]).sum(0)
    assert hits[2:4].tolist() == [draws, draws]
    free = torch.cat([hits[:2], hits[4:]])
    assert int(free.sum()) == 2 * draws
    assert (free - draws / 4).abs().max() < 5 * (draws * 3 / 16) ** 0.5


@pytest.mark.parametrize(
    ("rate", "active", "moved"),
    [(0.1, 30, 3), (0.07, 100, 7), (0.55, 100, 55), (0.0, 30, 0), (1e-12, 30, 1), (5e-324, 30, 1), (1.0, 30, 30)],
)
def test_ceils_are_those_of_the_number_meant(rate: float, active: int, moved: int) -> None:
    params = tree_of([1.0] * active + [0.0] * active)
    mask = tree_of([True] * active + [False] * active)
    scores = tree_of([0.0] * active + [1.0] * active)
    evolved = evolve(params, mask, rate, scores, seed=0)
    assert evolved["t0"].tolist() == [False] * moved + [True] * (active - moved) + [True] * moved + [False] * (
        active - moved
    )


def test_dense_empty_and_scalar_tensors_stay() -> None:
    layout = Layout((Slot("dense", (2, 3)), Slot("none", (4,)), Slot("on", ()), Slot("off", ()), Slot("void", (0, 2))))
    mask = Tree(layout, torch.tensor([True] * 6 + [False] * 4 + [True, False]))
    params = Tree(layout, torch.arange(12.0))
    for scores in (params, None):
        assert torch.equal(evolve(params, mask, 1.0, scores, seed=0).flat, mask.flat)
    nothing = Tree(Layout(()), torch.zeros(0))
    assert len(evolve(nothing, Tree(Layout(()), torch.zeros(0, dtype=torch.bool)), 0.5, None, seed=0)) == 0


def test_scores_make_the_seed_irrelevant_and_their_absence_does_not() -> None:
    params, mask = tree_of([1.0] * 40), tree_of([True] * 20 + [False] * 20)
    by_score = [evolve(params, mask, 0.5, params, seed).flat for seed in (1, 2)]
    at_random = [evolve(params, mask, 0.5, None, seed).flat for seed in (1, 2)]
    assert torch.equal(*by_score)
    assert not torch.equal(*at_random)


def test_what_cannot_be_ranked_is_refused() -> None:
    fine, broken, mask = tree_of([1.0, inf, -inf]), tree_of([1.0, nan, 2.0]), tree_of([True, False, False])
    evolve(fine, mask, 0.5, fine, seed=0)
    with pytest.raises(SparsonaError, match=r"params are not a number .* t0"):
        evolve(broken, mask, 0.5, fine, seed=0)
    with pytest.raises(SparsonaError, match="scores are not a number"):
        evolve(fine, mask, 0.5, broken, seed=0)
    with pytest.raises(SparsonaError, match="different layouts"):
        evolve(tree_of([1.0]), mask, 0.5, None, seed=0)
    with pytest.raises(SparsonaError, match="bool mask"):
        evolve(fine, fine, 0.5, None, seed=0)
    for rate in (-0.1, 1.1, nan):
        with pytest.raises(SparsonaError, match="a rate of"):
            evolve(fine, mask, rate, None, seed=0)


def test_cosine_rate_starts_at_the_initial_and_decays() -> None:
    for zero in (True, False):
        rates = [cosine_rate(0.5, index, 10, zero) for index in range(10)]
        assert rates[0] == 0.5
        assert rates == sorted(rates, reverse=True)
        assert cosine_rate(0.5, 0, 1, zero) == 0.5
    assert cosine_rate(0.5, 9, 10, decays_to_zero=True) == 0.0
    # 1 + cos(pi - x) = x**2 / 2 to first order.
    assert cosine_rate(0.5, 999, 1000, decays_to_zero=False) == pytest.approx(0.5 / 4 * (pi / 1000) ** 2, rel=1e-5)
    assert cosine_rate(0.4, 1, 2, decays_to_zero=False) == pytest.approx(0.2)
    # A third of the way the rate is 3/4 of 0.5; of 8 entries that is 3, not the 4 that a bare ceil would make of it.
    params, mask = tree_of([1.0] * 16), tree_of([True] * 8 + [False] * 8)
    swapped = evolve(params, mask, cosine_rate(0.5, 1, 3, False), tree_of([0.0] * 8 + [1.0] * 8), seed=0)
    assert int((swapped.flat & ~mask.flat).count_nonzero()) == 3


@pytest.mark.parametrize(("initial", "index", "total"), [(1.5, 0, 2), (0.5, 2, 2), (0.5, -1, 2), (0.5, 0, 0)])
def test_rounds_outside_the_run_are_refused(initial: float, index: int, total: int) -> None:
    with pytest.raises(SparsonaError):
        cosine_rate(initial, index, total, decays_to_zero=False)


def test_random_scores_are_those_of_splitmix64():
    """Written out with Python's whole numbers, which have no sign and no end."""

    def number(index: int, seed: int) -> int:
        all_bits = (1 << 64) - 1
        z = (index + seed) * 0x9E3779B97F4A7C15 & all_bits
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & all_bits
        z = (z ^ z >> 27) * 0x94D049BB133111EB & all_bits
        return (z ^ z >> 31) >> 40

    for seed in (0, 987654321987654321, (1 << 63) - 1000):
        found = random_scores(100, seed, torch.device("cpu")).tolist()
        assert found == [number(index, seed) for index in range(100)]
