"""Knapsacks worked by hand: three walks and the best choice, on one table.

block    0    1    2    3    4
score    6   10   12    7    7
cost     1    2    3    2    4
for 1    6    5    4  3.5 1.75

Budget 5.
- By score: block 2 (3 of 5, 2 left); 1 (2, none left). Nothing else fits. Sum 22.
- By score for cost: block 0 (1, 4 left); 1 (2, 2 left); 2 costs 3 and does not fit; 3 (2, none left). Sum 23.
- Best: pairs and triples of cost 5 or less: {1,2} 22, {0,1,3} 23, {0,4} 13, {2,3} 19, {0,2} 18. So {0,1,3}: 23.

Budget 6.
- By score: 2 (3 left), 1 (1 left), 3 and 4 (score 7, in that order) do not fit, 0 (none left). Sum 28.
- By score for cost: 0 (5 left), 1 (3 left), 2 (none left). The same. So is the best: {0,1,2} has the three best
  ratios and leaves nothing over.

Budget 4: by score 2 (1 left), 1, 3 and 4 do not fit, 0: sum 18. By score for cost 0, 1 (1 left): sum 16.
Best: {0,2} 18, {1,3} 17, {0,1} 16, {4} 7. So {0,2}.
"""

import pytest
import torch

from sparsona.methods.pfedgate.knapsack import best_of_all, exact, greedy

SCORES = torch.tensor([6.0, 10.0, 12.0, 7.0, 7.0])
COSTS = torch.tensor([1, 2, 3, 2, 4])


@pytest.mark.parametrize(
    ("budget", "by_score", "by_density", "best"),
    [
        (4, [1, 0, 1, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0]),
        (5, [0, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 0]),
        (6, [1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0]),
    ],
)
def test_by_hand(budget, by_score, by_density, best):
    assert greedy(SCORES, COSTS, torch.tensor(budget)).tolist() == by_score
    assert greedy(SCORES, COSTS, torch.tensor(budget), by="density").tolist() == by_density
    assert exact(SCORES, COSTS, torch.tensor(budget)).tolist() == best
    assert best_of_all(SCORES, COSTS, torch.tensor(budget), [[0], [1, 3], [2], [4]]).tolist() == best


def test_ties_by_hand():
    """Scores 2, 2, 2, 4 of costs 3, 3, 3, 6 under 6: {0,1}, {0,2}, {1,2} and {3} are all worth 4. More of the class
    that was named first, and in it the lowest indices: {0,1}; with the last block's class first, {3}."""
    scores, costs, budget = torch.tensor([2.0, 2.0, 2.0, 4.0]), torch.tensor([3, 3, 3, 6]), torch.tensor(6)
    assert best_of_all(scores, costs, budget, [[0, 1, 2], [3]]).tolist() == [1, 1, 0, 0]
    assert best_of_all(scores, costs, budget, [[3], [0, 1, 2]]).tolist() == [0, 0, 0, 1]


def test_three_buckets_by_hand():
    """Budget 5 in 3 buckets, of 5/3 each: costs 1, 2, 3, 2, 4 become 1, 2, 2, 2, 3.

    Best in 3 buckets: {0,2} 18, {0,1} 16, {0,3} 13, {4} 7: so 18. The walk by score finds {1,2} with 22, which costs 5
    and fits: it is taken.
    """
    assert exact(SCORES, COSTS, torch.tensor(5), buckets=3).tolist() == [0, 1, 1, 0, 0]


def test_two_buckets_by_hand():
    """Scores 5, 4, 4 of costs 6, 5, 5 under 10 in 2 buckets of 5: costs become 2, 1, 1, and {1,2} is the best with 8.
    The walk takes the first and then nothing fits: 5."""
    scores, costs, budget = torch.tensor([5.0, 4.0, 4.0]), torch.tensor([6, 5, 5]), torch.tensor(10)
    assert exact(scores, costs, budget, buckets=2).tolist() == [0, 1, 1]
    assert greedy(scores, costs, budget).tolist() == [1, 0, 0]
