"""LeNet5 as Caffe has it: the network of FedSpa's EMNIST experiment."""

from __future__ import annotations

from torch import nn

from sparsona.core.errors import SparsonaError


def lenet5(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """439,096 parameters for one channel of 28x28 and 26 classes; biases everywhere, no padding, no norm."""
    channels, height, width = input_shape
    side = tuple(((length - 4) // 2 - 4) // 2 for length in (height, width))
    if min(side) < 1:
        raise SparsonaError(
            f"lenet5 cannot take {height}x{width} images", expected="at least 16x16 pixels", mend="use digits-cnn"
        )
    return nn.Sequential(
        nn.Conv2d(channels, 20, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(50 * side[0] * side[1], 500),
        nn.ReLU(),
        nn.Linear(500, num_classes),
    )
