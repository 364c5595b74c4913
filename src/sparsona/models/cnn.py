"""Small convolutional networks: convolutions with pooling and ReLU, then linear layers; biases everywhere, no norm."""

from __future__ import annotations

from torch import nn


def digits_cnn(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Two padded 3x3 convolutions, then two linear layers."""
    return _conv_net(input_shape, num_classes, channels=(16, 32), hidden=(64,), kernel=3, padding=1)


def cnn28(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """46,730 parameters for one channel of 28x28 and 10 classes."""
    return _conv_net(input_shape, num_classes, channels=(16, 32), hidden=(64,))


def lenet5(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """LeNet5 as Caffe has it: 439,096 parameters for one channel of 28x28 and 26 classes."""
    return _conv_net(input_shape, num_classes, channels=(20, 50), hidden=(500,))


def pfedgate_one_hidden(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """pFedGate's network for EMNIST (2,278,334 parameters for 62 classes) and for CIFAR-100 (3,537,444)."""
    return _conv_net(input_shape, num_classes, channels=(32, 64), hidden=(2048,))


def pfedgate_two_hidden(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """pFedGate's network for CIFAR-10: 256,830 parameters."""
    return _conv_net(input_shape, num_classes, channels=(32, 64), hidden=(120, 84))


def _conv_net(
    input_shape: tuple[int, ...],
    num_classes: int,
    channels: tuple[int, ...],
    hidden: tuple[int, ...],
    kernel: int = 5,
    padding: int = 0,
) -> nn.Module:
    inputs, height, width = input_shape
    layers: list[nn.Module] = []
    for outputs in channels:
        # The largest of four, then ReLU: the same numbers and gradients as the other way round, on a quarter of them.
        layers += [nn.Conv2d(inputs, outputs, kernel, padding=padding), nn.MaxPool2d(2), nn.ReLU()]
        height, width = ((side + 2 * padding - kernel + 1) // 2 for side in (height, width))
        inputs = outputs
    layers.append(nn.Flatten())
    inputs *= height * width
    for outputs in hidden:
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        inputs = outputs
    return nn.Sequential(*layers, nn.Linear(inputs, num_classes))
