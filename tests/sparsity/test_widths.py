"""Narrow networks: which can be narrowed, what is refused, and that a narrow one is a part of the wide one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsona import models
from sparsona.core.errors import SparsonaError
from sparsona.core.task import Task
from sparsona.sparsity.widths import check_widths, find_widths

NAMED = [
    *("digits-cnn", "mlp", "cnn28", "lenet5", "pfedgate-emnist", "pfedgate-cifar10", "pfedgate-cifar100", "vgg11"),
    *(
        "resnet18",
        "resnet18-emnist:adapters=true",
        "resnet18:split=true",
        "digits-cnn:split=true",
        "cnn28:split=true,adapters=true",
    ),
    *("digits-cnn:norm=group,adapters=true", "cnn28:norm=batch"),
]


@pytest.mark.parametrize("spec", NAMED)
def test_named_networks_can_be_narrowed(spec):
    """And their outlines, which costs are counted by, agree. `check_widths` compares with the wide network."""
    shape, classes = models.read_spec(spec)[0].input_shape, models.read_spec(spec)[0].num_classes
    shape = (shape[0], 16, 16) if "resnet" in spec else shape
    task = Task(models.builder(spec, shape, classes), shape, classes)
    widths = find_widths(task)
    check_widths(task, widths)
    drawn = find_widths(models.outline(spec, shape, classes))
    assert (drawn.axes, drawn.buffer_axes) == (widths.axes, widths.buffer_axes)
    assert widths.narrow(widths.layout, 1.0) == widths.layout
    assert set(widths.output + widths.hidden) | {n for n in widths.layout.names if len(widths.axes[n]) == 1} == set(
        widths.layout.names
    )


class Fixed(nn.Module):
    """A layer that only takes eight numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 8)


def _image(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), *layers)


@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (
            lambda: _image(nn.BatchNorm2d(8, affine=False), nn.Flatten(), nn.BatchNorm1d(288), nn.Linear(288, 3)),
            (1, 8, 8),
        ),
        (lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3)), (4,)),
        (
            lambda: _image(nn.GroupNorm(1, 8), nn.Conv2d(8, 6, 1), nn.GroupNorm(2, 6), nn.Flatten(), nn.Linear(216, 3)),
            (1, 8, 8),
        ),
        (
            lambda: nn.Sequential(nn.BatchNorm2d(2), nn.Conv2d(2, 4, 1), nn.PReLU(), nn.Flatten(), nn.Linear(16, 3)),
            (2, 2, 2),
        ),
    ],
)
def test_norms_of_every_kind(net, shape):
    task = Task(net, shape, 3)
    check_widths(task, find_widths(task))


@pytest.mark.parametrize(
    ("net", "shape", "words"),
    [
        (lambda: nn.Linear(4, 3), (4,), "no hidden layer"),
        (lambda: _image(nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(128, 3)), (1, 8, 8), "does not run"),
        (lambda: nn.Sequential(nn.ConvTranspose2d(1, 8, 3), nn.Flatten(), nn.Linear(800, 3)), (1, 8, 8), "narrow"),
        (lambda: nn.Sequential(nn.Linear(4, 8), nn.Softmax(1), nn.Linear(8, 3)), (4,), "something else"),
        (lambda: nn.Sequential(nn.Linear(4, 8), Fixed(), nn.Linear(8, 3)), (4,), "does not run|something else"),
    ],
)
def test_other_networks_are_refused(net, shape, words):
    task = Task(net, shape, 3)
    with pytest.raises(SparsonaError, match=words):
        check_widths(task, find_widths(task))


def test_tokens_are_refused():
    with pytest.raises(SparsonaError, match="tokens"):
        find_widths(models.outline("transformer", (20,), 50))


def test_sizes_grow_with_the_rate_and_fit_takes_the_last_that_fits():
    widths = find_widths(models.outline("vgg11", (3, 32, 32), 10))
    sizes = [widths.narrow(widths.layout, units / 32).size for units in range(1, 33)]
    assert sizes == sorted(sizes)
    for density in (0.01, 0.1, 0.5, 0.9, 1.0):
        fitting = sum(size <= density * sizes[-1] for size in sizes)
        assert widths.fit(density) == fitting / 32
