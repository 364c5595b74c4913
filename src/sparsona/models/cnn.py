"""Small convolutional networks: convolutions with pooling and ReLU, then linear layers; biases everywhere."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sparsona.models.catalog import cnn_roles, split_rows

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "group": lambda width: nn.GroupNorm(width // 4, width),  # groups of four channels
    "batch": nn.BatchNorm2d,
}


def conv_net(
    input_shape: tuple[int, ...],
    num_classes: int,
    channels: tuple[int, ...],
    hidden: tuple[int, ...],
    kernel: int = 5,
    padding: int = 0,
    split: bool = False,
    adapters: bool = False,
    norm: str = "none",
) -> nn.Module:
    """Convolutions of these channels, each with a norm if wanted, then hidden linear layers of these widths."""
    inputs, height, width = input_shape
    layers: list[nn.Module] = []
    for outputs in channels:
        layer: nn.Module = nn.Conv2d(inputs, outputs, kernel, padding=padding)
        if split and not layers:
            layer = SplitInput(layer, nn.Conv2d(inputs, outputs, kernel, padding=padding), split_rows(height)[0])
            height += 2 * padding - kernel + 1  # each of the two loses its own edges
        norms = [] if norm == "none" else [NORMS[norm](outputs)]
        # The largest of four, then ReLU: the same numbers and gradients as the other way round, on a quarter of them.
        layers += [layer, *norms, AdaptedPool(outputs) if adapters else nn.MaxPool2d(2), nn.ReLU()]
        height, width = ((side + 2 * padding - kernel + 1) // 2 for side in (height, width))
        inputs = outputs
    layers.append(nn.Flatten())
    inputs *= height * width
    for outputs in hidden:
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        inputs = outputs
    net = nn.Sequential(*layers, nn.Linear(inputs, num_classes))
    net.roles = cnn_roles(tuple(name for name, _ in net.named_parameters()), len(channels), norm)  # type: ignore[assignment]
    return net


def signal_cnn(
    input_shape: tuple[int, ...], num_classes: int, channels: tuple[int, ...], kernel: int, hidden: int
) -> nn.Module:
    """Convolutions over time of these channels, each halving the length by pooling, then a hidden linear layer."""
    inputs, length = input_shape
    layers: list[nn.Module] = []
    for outputs in channels:
        layers += [nn.Conv1d(inputs, outputs, kernel, padding=kernel // 2), nn.MaxPool1d(2), nn.ReLU()]
        inputs, length = outputs, length // 2
    layers += [nn.Flatten(), nn.Linear(inputs * length, hidden), nn.ReLU(), nn.Linear(hidden, num_classes)]
    net = nn.Sequential(*layers)
    net.roles = cnn_roles(tuple(name for name, _ in net.named_parameters()))  # type: ignore[assignment]
    return net


class SplitInput(nn.Module):
    """Two first layers side by side: one for the upper rows of an image, one for the lower. What they make of them is
    put together again."""

    def __init__(self, upper: nn.Module, lower: nn.Module, rows: int) -> None:
        super().__init__()
        self.upper, self.lower, self.rows = upper, lower, rows

    def forward(self, images: Tensor) -> Tensor:
        upper, lower = images.split((self.rows, images.shape[2] - self.rows), dim=2)
        return torch.cat((self.upper(upper), self.lower(lower)), dim=2)


class AdaptedPool(nn.Module):
    """Pooling, and a residual adapter of what is left: x + conv1x1(x), nearly the identity at first. In the place of
    plain pooling, so that all other layers have the same names with and without adapters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2)
        self.adapter = nn.Conv2d(width, width, 1, bias=False)
        nn.init.normal_(self.adapter.weight, std=1e-4)  # as in the paper's residual adapters

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(images)
        return x + self.adapter(x)
