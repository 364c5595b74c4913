"""Examples with a gate each: one forward pass gives what a model for each of them gives, and the same gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsona.core.task import Task
from sparsona.methods.pfedgate.blocks import channels, chunks, filters, spread
from sparsona.methods.pfedgate.rows import forward_rows, rows_of


def net():
    layers = (nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24, 5, bias=False))
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(5, 1))


def task_of(model=net):
    return Task(model, input_shape=(2, 4, 4), num_classes=1)


CUTS = {
    "operators": lambda layout: chunks(layout, 5, 0.2, by_operator=True),
    "tensors": lambda layout: chunks(layout, 5, 0.2),
    "many in a row": lambda layout: chunks(layout, 30, 0.05, by_operator=True),
    "filters": lambda layout: filters(layout, 3, 0.1),
}


@pytest.mark.parametrize("name", CUTS)
def test_one_pass_is_a_model_for_each_example(name):
    task = task_of()
    blocks = CUTS[name](task.layout)
    rows = rows_of(task, blocks)
    assert rows is not None
    random = torch.Generator().manual_seed(1)
    params, buffers = task.init(0)
    # An input layer whose bias is 0 would hide a bias of the wrong row.
    flat = torch.randn(len(params.flat), generator=random).double().requires_grad_()
    inputs = torch.randn(3, 2, 4, 4, generator=random).double()
    gates = torch.randn(3, len(blocks), generator=random).double().requires_grad_()
    pull = torch.randn(3, 1, generator=random).double()
    together = forward_rows(task, rows, params.like(flat), buffers, inputs, gates)
    alone = torch.cat(
        [
            task.forward(params.like(flat * spread(blocks, gate)), buffers, x[None], train=False)[0]
            for x, gate in zip(inputs, gates, strict=True)
        ]
    )
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-12)
    for found, expected in zip(
        torch.autograd.grad((together * pull).sum(), [flat, gates]),
        torch.autograd.grad((alone * pull).sum(), [flat, gates]),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


class Borrowed(nn.Module):
    """Uses a layer's weight without calling the layer."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(32, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(nn.functional.linear(x.flatten(1), self.body.weight, self.body.bias))


def half_frozen():
    model = nn.Sequential(nn.Flatten(), nn.Linear(32, 4), nn.Linear(4, 1))
    model[1].weight.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("model", "cut"),
    [
        (net, lambda layout: channels(layout, 3, 0.1)),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(32, 4), nn.LayerNorm(4), nn.Linear(4, 1)), CUTS["operators"]),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(32, 4), nn.Dropout(), nn.Linear(4, 1)), CUTS["operators"]),
        (lambda: nn.Sequential(nn.Conv2d(2, 4, 4, groups=2), nn.Flatten(), nn.Linear(4, 1)), CUTS["operators"]),
        (Borrowed, CUTS["operators"]),
        (half_frozen, CUTS["operators"]),
    ],
    ids=["columns", "norm", "noise", "groups", "borrowed", "frozen"],
)
def test_other_networks_have_a_model_for_each_example(model, cut):
    task = task_of(model)
    assert rows_of(task, cut(task.layout)) is None
