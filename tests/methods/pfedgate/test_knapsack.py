"""Knapsacks as tensor operations against solvers that share no line with them."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from sparsona.methods.pfedgate.blocks import chunks
from sparsona.methods.pfedgate.config import PFedGateConfig, alike, cut, make_budget, select
from sparsona.methods.pfedgate.knapsack import best_of_all, exact, greedy, in_groups
from sparsona.models import outline


def by_trying_all(scores, costs, budget):
    best = 0.0
    for chosen in itertools.product((0, 1), repeat=len(scores)):
        if sum(c for c, take in zip(costs, chosen, strict=True) if take) <= budget:
            best = max(best, sum(s for s, take in zip(scores, chosen, strict=True) if take))
    return best


def by_table(scores, costs, budget):
    best = [0.0] * (budget + 1)
    for score, cost in zip(scores, costs, strict=True):
        for money in range(budget, cost - 1, -1):
            best[money] = max(best[money], best[money - cost] + score)
    return best[budget]


def by_walking(scores, costs, budget, key):
    kept = [0.0] * len(scores)
    for place in sorted(range(len(scores)), key=key):
        if costs[place] <= budget:
            budget -= costs[place]
            kept[place] = 1.0
    return kept


def problem(seed, most=14, dearest=60):
    draw = random.Random(seed)
    number = draw.randint(1, most)
    # Quarters: float sums are exact, and ties are common.
    scores = [draw.randint(1, 40) / 4 for _ in range(number)]
    costs = [draw.randint(0, dearest) for _ in range(number)]
    return scores, costs, draw.randint(0, sum(costs) + 5)


def solve(solver, scores, costs, budget, **options):
    kept = solver(torch.tensor(scores), torch.tensor(costs), torch.tensor(budget), **options)
    assert set(kept.tolist()) <= {0.0, 1.0}
    return kept


def by_cost(costs):
    """Blocks of one cost, together."""
    return [[place for place, other in enumerate(costs) if other == cost] for cost in dict.fromkeys(costs)]


@pytest.mark.parametrize("seed", range(20))
def test_trying_all_counts_is_trying_all_subsets(seed):
    scores, costs, budget = problem(seed, most=10, dearest=4)
    kept = solve(best_of_all, scores, costs, budget, classes=by_cost(costs))
    assert float(kept @ torch.tensor(costs).float()) <= budget
    assert float(kept @ torch.tensor(scores)) == by_trying_all(scores, costs, budget)


def test_trying_all_for_many_clients_and_traced():
    random_ = torch.Generator().manual_seed(3)
    scores, budgets = torch.rand(5, 8, generator=random_), torch.tensor([0, 3, 7, 12, 90])
    costs = torch.tensor([2, 3, 2, 5, 3, 2, 7, 3])
    classes = by_cost(costs.tolist())
    rows = [best_of_all(row, costs, budget, classes) for row, budget in zip(scores, budgets, strict=True)]
    over = torch.func.vmap(lambda row, budget: best_of_all(row, costs, budget, classes))
    assert torch.equal(over(scores, budgets), torch.stack(rows))
    assert torch.equal(best_of_all(scores, costs, budgets, classes), torch.stack(rows))
    assert torch.equal(make_fx(over)(scores, budgets)(scores, budgets), torch.stack(rows))
    assert rows[0].sum() == 0
    assert rows[-1].sum() == 8


@pytest.mark.parametrize("density", [0.5, 0.3])
@pytest.mark.parametrize(("model", "shape", "classes"), [("pfedgate-cifar10", (3, 32, 32), 10)])
def test_the_maximum_on_the_papers_network(model, shape, classes, density):
    """Blocks by operators: the maximum to the entry, where the walk by score is below it and buckets may be."""
    config = PFedGateConfig(solver="exact", blocks_of="operators", density=density)
    blocks = cut(outline(model, shape, classes).layout, config, 0.2)
    assert len(blocks) == 25
    budget = make_budget(blocks, config, density, 0.2, torch.zeros(1))
    free = [b for b in range(25) if not blocks.always[b]]
    costs, below = [blocks.sizes[b] for b in free], 0
    random_ = torch.Generator().manual_seed(0)
    for _ in range(10):
        scores = (0.4 + 0.2 * torch.rand(25, generator=random_)) * 2**16
        scores = scores.round() / 2**16
        kept = select(budget, scores, config, alike(blocks, config))
        assert float(kept.double() @ torch.tensor(blocks.sizes).double()) <= density * sum(blocks.sizes)
        best = best_value([float(scores[b]) for b in free], costs, int(budget.left[0]))
        assert sum(float(scores[b]) for b in free if kept[b]) == best
        walked = select(budget, scores, PFedGateConfig(blocks_of="operators", density=density))
        below += sum(float(scores[b]) for b in free if walked[b]) < best
    assert below >= 5


def best_value(scores, costs, budget):
    """A table over every single entry of the budget, in numpy for the sake of time."""
    best = np.zeros(budget + 1)
    for score, cost in zip(scores, costs, strict=True):
        if cost <= budget:
            best[cost:] = np.maximum(best[cost:], best[: budget + 1 - cost] + score)
    return best[budget]


def test_too_many_choices_are_not_tried():
    layout = outline("pfedgate-cifar10", (3, 32, 32), 10).layout
    config = PFedGateConfig(solver="exact")
    assert alike(cut(layout, config, 0.2), config) is None  # ten tensors
    operators = PFedGateConfig(solver="exact", blocks_of="operators")
    (found,) = alike(cut(layout, operators, 0.2), operators)
    assert sorted(block for one in found for block in one) == [b for b in range(25) if b % 5]


@pytest.mark.parametrize("seed", range(20))
def test_exact_is_the_best_there_is(seed):
    scores, costs, budget = problem(seed, most=10)
    kept = solve(exact, scores, costs, budget)
    assert float(kept @ torch.tensor(costs).float()) <= budget
    assert float(kept @ torch.tensor(scores)) == by_trying_all(scores, costs, budget)


@pytest.mark.parametrize("seed", range(12))
def test_exact_with_whole_buckets_of_any_width(seed):
    scores, costs, budget = problem(seed, most=25)
    wide = 1_000_003  # one bucket
    budget = max(1, min(budget, 200))
    kept = solve(exact, scores, [wide * cost for cost in costs], wide * budget, buckets=budget)
    assert float(kept @ torch.tensor(scores)) == by_table(scores, costs, budget)


@pytest.mark.parametrize("seed", range(40))
def test_rounded_costs_keep_the_budget(seed):
    draw = random.Random(seed)
    scores = [draw.random() for _ in range(30)]
    costs = [draw.randint(1, 2_000_000_000) for _ in scores]
    budget = draw.randint(0, sum(costs))
    kept = solve(exact, scores, costs, budget, buckets=draw.choice([3, 16, 128])).long()
    assert int((kept * torch.tensor(costs)).sum()) <= budget
    if budget:  # at least as good as the best with costs rounded up
        coarse = [-(-cost * 128 // budget) for cost in costs]
        fine = solve(exact, scores, costs, budget, buckets=128)
        assert float(fine.double() @ torch.tensor(scores).double()) > by_table(scores, coarse, 128) - 1e-6


@pytest.mark.parametrize("seed", range(20))
def test_costs_that_are_no_whole_numbers(seed):
    draw = random.Random(seed)
    scores = [draw.random() for _ in range(9)]
    costs = [draw.random() * 1e-3 for _ in scores]
    budget = draw.random() * sum(costs)
    for solver in (exact, greedy):
        kept = solver(torch.tensor(scores), torch.tensor(costs).double(), torch.tensor(budget).double()).double()
        assert float(kept @ torch.tensor(costs).double()) <= budget * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(30))
def test_greedy_walks_by_score_or_by_density(seed):
    scores, costs, budget = problem(seed)
    kept = solve(greedy, scores, costs, budget)
    assert kept.tolist() == by_walking(scores, costs, budget, lambda i: (-scores[i], i))
    costs = [cost + 1 for cost in costs]
    dense = solve(greedy, scores, costs, budget, by="density")
    in_float32 = (torch.tensor(scores) / torch.tensor(costs)).tolist()
    assert dense.tolist() == by_walking(scores, costs, budget, lambda i: (-in_float32[i], i))
    best = solve(exact, scores, costs, budget) @ torch.tensor(scores)
    assert best >= dense @ torch.tensor(scores)


@pytest.mark.parametrize("seed", range(30))
def test_exact_is_never_worse_than_greedy(seed):
    scores, costs, budget = problem(seed)
    values = torch.tensor(scores)
    for buckets in (1024, 4):  # with four, rounding up makes almost everything too large
        found = solve(exact, scores, costs, budget, buckets=buckets)
        assert found @ values >= solve(greedy, scores, costs, budget) @ values
        assert float(found @ torch.tensor(costs).float()) <= budget


@pytest.mark.parametrize("solver", [greedy, exact])
def test_edges(solver):
    assert solve(solver, [3.0, 2.0, 1.0], [4, 5, 6], 0).tolist() == [0, 0, 0]
    assert solve(solver, [3.0, 2.0, 1.0], [4, 0, 6], 0).tolist() == [0, 1, 0]
    assert solve(solver, [3.0, 2.0, 1.0], [4, 5, 6], 10**12).tolist() == [1, 1, 1]
    assert solve(solver, [3.0, 2.0, 1.0], [4, 5, 6], 15).tolist() == [1, 1, 1]
    assert solve(solver, [1.0, 1.0, 1.0], [2, 2, 2], 5).tolist() == [1, 1, 0]  # ties: the lowest index
    assert solve(solver, [3.0, 2.0], [4, 5], -1).tolist() == [0, 0]
    assert solve(solver, [3.0, 2.0], [0.5, 0.25], 0.0).tolist() == [0, 0]
    assert solve(solver, [3.0, 2.0], [0.5, 0.25], 0.75).tolist() == [1, 1]


@pytest.mark.parametrize("solver", [greedy, exact])
def test_no_gradient_and_the_dtype_of_the_scores(solver):
    scores = torch.rand(5, dtype=torch.float64, requires_grad=True)
    kept = solver(scores, torch.arange(5), torch.tensor(6))
    assert kept.dtype == torch.float64
    assert not kept.requires_grad


@pytest.mark.parametrize("solver", [greedy, exact])
def test_stacked_and_traced(solver):
    draws = torch.Generator().manual_seed(0)
    scores, costs = torch.rand(4, 7, generator=draws), torch.randint(1, 5000, (7,), generator=draws)
    budgets = torch.tensor([0, 4000, 8000, 40_000])
    alone = torch.stack([solver(s, costs, b) for s, b in zip(scores, budgets, strict=True)])
    assert 0 < alone.sum() < alone.numel()
    assert torch.equal(torch.func.vmap(solver, in_dims=(0, None, 0))(scores, costs, budgets), alone)
    assert torch.equal(solver(scores, costs, budgets), alone)
    traced = make_fx(lambda s, c, b: solver(s, c, b))(scores[0], costs, budgets[0])
    assert torch.equal(traced(scores[2], costs, budgets[2]), alone[2])


@pytest.mark.parametrize("solver", [greedy, exact])
def test_groups_have_budgets_of_their_own(solver):
    scores = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0])
    costs, groups = torch.tensor([3, 3, 3, 3, 3]), torch.tensor([1, 0, 1, 0, 0])
    kept = in_groups(solver, scores, costs, torch.tensor([6, 3]), groups)
    assert kept.tolist() == [1, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("model", "shape", "classes", "densities"),
    [
        ("pfedgate-emnist", (1, 28, 28), 62, {0.5: 0.434, 0.3: 0.246}),
        ("pfedgate-cifar10", (3, 32, 32), 10, {0.5: 0.432, 0.3: 0.242}),
        ("pfedgate-cifar100", (3, 32, 32), 100, {0.5: 0.436, 0.3: 0.247}),
    ],
)
def test_the_authors_rule_gives_the_published_densities(model, shape, classes, densities):
    """Whatever the scores: the large chunks decide (table 1 prints s' = 0.43 and 0.25)."""
    layout = outline(model, shape, classes).layout
    blocks = chunks(layout, 5, 0.2, equal=True)
    costs, always = torch.tensor(blocks.sizes), torch.tensor(blocks.always)
    groups = torch.tensor(blocks.groups)
    for s, density in densities.items():
        free = torch.stack([(costs * ~always * (groups == group)).sum() for group in (0, 1)])
        budgets = (free * (s - 0.2)).round().long()
        for seed in range(3):
            scores = torch.rand(len(blocks), generator=torch.Generator().manual_seed(seed)).mul(10).round()
            kept = in_groups(greedy, scores, torch.where(always, layout.size, costs), budgets, groups).bool()
            assert not (kept & always).any()
            assert int(((kept | always) * costs).sum()) / layout.size == pytest.approx(density, abs=2e-3)
