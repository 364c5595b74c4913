"""VGG11 with GroupNorm: the network of FedSpa's CIFAR-10 experiment."""

from __future__ import annotations

from torch import nn

from sparsona.models.catalog import VGG_WIDTHS


def vgg11(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """9,231,114 parameters for 3x32x32 and 10 classes: convolutions with bias, GroupNorm(32), one linear layer.

    A 32x32 image ends as one pixel of 512 channels; of a larger one the average over the pixels is taken.
    """
    inputs = input_shape[0]
    layers: list[nn.Module] = []
    for widths in VGG_WIDTHS:
        for outputs in widths:
            layers += [_conv(inputs, outputs), nn.GroupNorm(32, outputs), nn.ReLU()]
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    last = nn.Linear(inputs, num_classes)
    nn.init.normal_(last.weight, std=0.01)
    nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), last)


def _conv(inputs: int, outputs: int) -> nn.Conv2d:
    conv = nn.Conv2d(inputs, outputs, 3, padding=1)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    nn.init.zeros_(conv.bias)  # type: ignore[arg-type]  # there is one
    return conv
