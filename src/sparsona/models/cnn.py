"""Small convolutional networks."""

from __future__ import annotations

from torch import nn

from sparsona.core.errors import SparsonaError


def digits_cnn(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Two padded 3x3 convolutions with pooling, then two linear layers."""
    channels, height, width = input_shape
    if min(height, width) < 4:
        raise SparsonaError(f"digits-cnn cannot take {height}x{width} images", expected="at least 4x4 pixels")
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), 64),
        nn.ReLU(),
        nn.Linear(64, num_classes),
    )
