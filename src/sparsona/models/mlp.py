"""A network for plain vectors: one hidden layer, or none."""

from __future__ import annotations

from math import prod

from torch import nn


def mlp(input_shape: tuple[int, ...], num_classes: int, hidden: int = 64) -> nn.Module:
    """A linear layer, ReLU, a linear layer; a linear model if `hidden` is 0. Whatever comes in is made a vector."""
    if not hidden:
        return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), num_classes))
    first = nn.Linear(prod(input_shape), hidden)
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Linear(hidden, num_classes))
