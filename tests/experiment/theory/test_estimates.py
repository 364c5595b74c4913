"""Estimates against quadratics, whose constants are known in closed form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sparsona.core.seeds import generator
from sparsona.experiment.theory import estimates
from sparsona.experiment.theory.estimates import Objective


def with_eigenvalues(values: list[float], seed: int = 0) -> Tensor:
    basis, _ = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator(seed), dtype=torch.float64))
    return basis @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ basis.T


def quadratic(matrix: Tensor, split: int | None = None) -> Objective:
    """x^T A x / 2 + b^T x, where a batch is b; of two blocks, if it is split."""

    def loss(x: tuple[Tensor, ...], batch: Tensor) -> Tensor:
        whole = torch.cat(x)
        return whole @ matrix @ whole / 2 + batch @ whole

    return Objective(loss, [torch.zeros(len(matrix), dtype=torch.float64)], [1])


def test_smoothness_is_the_largest_eigenvalue_in_absolute_value() -> None:
    x = (torch.ones(4, dtype=torch.float64),)
    objective = quadratic(with_eigenvalues([-7.0, 3.0, 1.0, 0.5]))
    assert estimates.block_norm(objective, x, 0, 0, generator(1)) == pytest.approx(7, rel=1e-3)
    objective = quadratic(with_eigenvalues([0.0, 9.0, 1.0, 0.5]))
    assert estimates.block_norm(objective, x, 0, 0, generator(1)) == pytest.approx(9, rel=1e-3)


def test_blocks_of_the_hessian_have_norms_of_their_own() -> None:
    mixed = torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.5, 0.0]], dtype=torch.float64)
    matrix = torch.zeros(5, 5, dtype=torch.float64)
    matrix[:2, :2], matrix[2:, 2:] = torch.diag(torch.tensor([4.0, 1.0])), torch.diag(torch.tensor([9.0, 2.0, 1.0]))
    matrix[:2, 2:], matrix[2:, :2] = mixed, mixed.T
    objective, x = quadratic(matrix), (torch.ones(2, dtype=torch.float64), torch.ones(3, dtype=torch.float64))
    found = [estimates.block_norm(objective, x, *pair, generator(2)) for pair in ((0, 0), (1, 1), (0, 1), (1, 0))]
    assert found == pytest.approx([4, 9, 3, 3], rel=1e-3)
    lu, lv, cross, _ = found
    assert cross / np.sqrt(lu * lv) == pytest.approx(0.5, rel=1e-3)  # chi


def test_a_linear_function_has_no_curvature() -> None:
    objective = Objective(lambda x, batch: x[0].sum() * batch, [torch.tensor(2.0)], [1])
    assert estimates.block_norm(objective, (torch.ones(3),), 0, 0, generator(0)) == 0
    assert estimates.least_curvature(objective, (torch.ones(3),), 0.0, generator(0)) == 0


@pytest.mark.parametrize(("values", "least"), [([5.0, 2.0, 1.0], 1.0), ([5.0, 2.0, -3.0], -3.0)])
def test_least_curvature_is_the_least_eigenvalue(values, least) -> None:
    objective, x = quadratic(with_eigenvalues(values)), (torch.zeros(3, dtype=torch.float64),)
    assert estimates.least_curvature(objective, x, 5.0, generator(3)) == pytest.approx(least, abs=0.02)


def test_gradients_and_values_are_means_over_examples_not_over_batches() -> None:
    objective = Objective(lambda x, b: (x[0] * b).mean(), [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0])], [3, 1])
    x = (torch.tensor([2.0]),)
    assert objective.gradient(x)[0].tolist() == [4.0]
    assert objective.value(x) == 8.0


def test_variance_of_batches_drawn_without_replacement() -> None:
    """E ||g - mean||^2 = s^2 / b (n - b) / (n - 1), where s^2 is the variance of examples."""
    data = torch.randn(40, 3, generator=generator(4), dtype=torch.float64)
    random, size = generator(5), 8
    draws = [data[torch.randperm(40, generator=random)[:size]] for _ in range(4000)]
    mean = (data.mean(0),)
    (errors,) = estimates.squared_errors(lambda x, b: (b.mean(0) * x[0]).sum(), (torch.zeros(3).double(),), mean, draws)
    variance = float((data - data.mean(0)).square().sum(1).mean())
    assert np.mean(errors) == pytest.approx(variance / size * (40 - size) / 39, rel=0.05)


def test_jacobian_norm_and_diameter() -> None:
    matrix = torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]])
    assert estimates.jacobian_norm(lambda x: matrix @ x, torch.ones(2)) == pytest.approx(4)
    assert estimates.diameter(torch.tensor([[0.0, 0.0], [3.0, 4.0], [1.0, 0.0]])) == pytest.approx(5)
