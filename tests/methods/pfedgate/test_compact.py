"""A narrowed network computes what the masked one does, forwards and backwards."""

import pytest
import torch
from torch import nn

from sparsona.core.errors import SparsonaError
from sparsona.core.task import Task
from sparsona.methods.pfedgate.blocks import channels, chunks, filters, spread
from sparsona.methods.pfedgate.compact import chain, compact
from sparsona.models import builder


def small_task():
    return Task(builder("digits-cnn", (1, 8, 8), 10), (1, 8, 8), 10)


def drawn(task, blocks, seed):
    draws = torch.Generator().manual_seed(seed)
    params, buffers = task.init(seed)
    params = params.like(torch.randn(params.flat.shape, generator=draws) / 5)
    kept = (torch.tensor(blocks.always) | (torch.rand(len(blocks), generator=draws) < 0.4)).float()
    return params, buffers, kept, torch.rand(len(blocks), generator=draws), torch.rand((6, 1, 8, 8), generator=draws)


@pytest.mark.parametrize("split", [filters, channels])
@pytest.mark.parametrize("num_blocks", [None, 3])
def test_outputs_and_gradients_of_the_masked_network(split, num_blocks):
    task = small_task()
    blocks = split(task.layout, num_blocks, 0.2)
    found = chain(task, blocks)
    for seed in range(3):
        params, buffers, kept, scale, images = drawn(task, blocks, seed)
        flat, scale = params.flat.requires_grad_(), scale.requires_grad_()
        assert 0 < kept.sum() < len(blocks)
        masked, _ = task.forward(params.like(flat * spread(blocks, kept * scale)), buffers, images, True)
        narrow, _ = task.forward(compact(found, params.like(flat), kept, scale), buffers, images, True)
        torch.testing.assert_close(narrow, masked)
        expected = torch.autograd.grad(masked.square().sum(), [flat, scale])
        grads = torch.autograd.grad(narrow.square().sum(), [flat, scale])
        torch.testing.assert_close(grads[0], expected[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(grads[1], expected[1] * kept, rtol=1e-4, atol=1e-3)  # what was kept alone
        assert not (grads[0] * (1 - spread(blocks, kept))).any()


def test_tensors_are_as_small_as_what_is_kept():
    task = small_task()
    blocks = filters(task.layout)
    found = chain(task, blocks)
    params, _, _, _, _ = drawn(task, blocks, 0)
    kept = torch.tensor(blocks.always).float()
    kept[[1, 2]] = 1  # three filters of the first convolution, one of each other hidden layer
    shapes = {name: tuple(value.shape) for name, value in compact(found, params, kept).items()}
    assert shapes == {
        "0.weight": (3, 1, 3, 3),
        "0.bias": (3,),
        "3.weight": (1, 3, 3, 3),
        "3.bias": (1,),
        "7.weight": (1, 4),  # 2x2 positions of one channel
        "7.bias": (1,),
        "9.weight": (10, 1),
        "9.bias": (10,),
    }
    whole = compact(found, params, torch.ones(len(blocks)))
    assert all(torch.equal(whole[name], params[name]) for name in params)
    with pytest.raises(SparsonaError, match="every unit"):
        compact(found, params, torch.zeros(len(blocks)))


class Branches(nn.Module):
    """Two layers that both see the input: their sum needs both whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(torch.relu(self.first(x) + self.second(x)))


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2)), "no convolution"),
        (lambda: nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 2)), "something else"),
        (Branches, "does not run"),
    ],
)
def test_other_networks_are_refused(model, what):
    task = Task(model, (4,), 2)
    with pytest.raises(SparsonaError, match=what):
        chain(task, filters(task.layout))


def test_blocks_that_cut_through_filters_are_refused():
    task = small_task()
    with pytest.raises(SparsonaError, match="no whole filters"):
        chain(task, chunks(task.layout, 5, 0.2))
