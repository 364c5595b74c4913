"""Local training against torch's own."""

from __future__ import annotations

import pytest
import torch

from sparsona.core.round import Tick
from sparsona.core.tree import Tree
from sparsona.methods.training import Training, sgd


@pytest.mark.parametrize("scale", [0.01, 100.0])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_sgd_equals_torch(scale, clip):
    draws = torch.Generator().manual_seed(0)
    params = Tree.of({"a": torch.randn(3, 4, generator=draws), "b": torch.randn(5, generator=draws)})
    grads = params.like(torch.randn(17, generator=draws) * scale)
    config = Training(lr=0.2, weight_decay=0.01, clip_norm=clip)
    found = sgd(params, grads, Tick(torch.tensor(0.5), torch.tensor(0)), config)
    own = [torch.nn.Parameter(params[name].clone()) for name in params]
    for parameter, name in zip(own, params, strict=True):
        parameter.grad = grads[name].clone()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(own, clip)
    torch.optim.SGD(own, lr=0.1, weight_decay=0.01).step()
    for parameter, name in zip(own, params, strict=True):
        torch.testing.assert_close(found[name], parameter.detach())


def test_sgd_stays_inside_the_mask_and_leaves_its_arguments_alone():
    params, grads = (Tree.of({"a": torch.arange(1.0, 4.0) * sign}) for sign in (1, -1))
    mask = params.like(torch.tensor([1.0, 0.0, 1.0]))
    found = sgd(params, grads, Tick(torch.tensor(1.0), torch.tensor(0)), Training(lr=0.5, weight_decay=0.0), mask)
    assert found.flat.tolist() == [1.5, 0.0, 4.5]
    assert params.flat.tolist() == [1.0, 2.0, 3.0]
    assert grads.flat.tolist() == [-1.0, -2.0, -3.0]
    assert mask.flat.tolist() == [1.0, 0.0, 1.0]
