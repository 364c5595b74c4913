"""The small CNNs and VGG11 against restatements of them, from their weights alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsona import models


def images(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def net(spec: str) -> nn.Module:
    """With weights that matter everywhere: norms start as 1 and 0, and VGG's last layer small."""
    row = models.read_spec(spec)[0]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = models.builder(spec, row.input_shape, row.num_classes)()
    with torch.no_grad():
        for seed, value in enumerate(module.parameters()):
            value.add_(0.05 * images(*value.shape, seed=seed))
    return module


def pairs(module: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Weight and bias of each layer, in order."""
    values = list(module.parameters())
    return list(zip(values[::2], values[1::2], strict=True))


def small_cnn(module: nn.Module, x: Tensor, padding: int) -> Tensor:
    """Twice convolution, ReLU, the largest of 2x2; then linear layers with ReLU between them."""
    layers = pairs(module)
    for weight, bias in layers[:2]:
        x = F.conv2d(x, weight, bias, padding=padding).clamp(min=0)
        height, width = x.shape[2] // 2, x.shape[3] // 2
        x = x[:, :, : 2 * height, : 2 * width].unflatten(2, (height, 2)).unflatten(4, (width, 2)).amax((3, 5))
    x = x.flatten(1)
    for weight, bias in layers[2:-1]:
        x = (x @ weight.T + bias).clamp(min=0)
    weight, bias = layers[-1]
    return x @ weight.T + bias


@pytest.mark.parametrize(
    ("spec", "padding", "hidden"),
    [
        ("digits-cnn", 1, [64]),
        ("cnn28", 0, [64]),
        ("lenet5", 0, [500]),
        ("pfedgate-emnist", 0, [2048]),
        ("pfedgate-cifar10", 0, [120, 84]),
        ("pfedgate-cifar100", 0, [2048]),
    ],
)
def test_small_cnns(spec, padding, hidden):
    module, x = net(spec), images(3, *models.MODELS[spec].input_shape)
    assert [len(bias) for _, bias in pairs(module)[2:-1]] == hidden
    with torch.no_grad():
        torch.testing.assert_close(module(x), small_cnn(module, x, padding), rtol=1e-4, atol=1e-4)


def test_vgg11():
    """Configuration A of Simonyan and Zisserman, GroupNorm(32) before each ReLU, and one linear layer."""
    module, x = net("vgg11"), images(2, 3, 32, 32)
    layers = pairs(module)
    with torch.no_grad():
        y = x
        for number in range(8):
            y = F.conv2d(y, *layers[2 * number], padding=1)
            y = F.group_norm(y, 32, *layers[2 * number + 1]).clamp(min=0)
            if number in (0, 1, 3, 5, 7):
                y = F.max_pool2d(y, 2)
        assert y.shape == (2, 512, 1, 1)
        torch.testing.assert_close(module(x), F.linear(y.flatten(1), *layers[-1]), rtol=1e-4, atol=1e-4)


def test_split_input_layers():
    """Upper and lower rows go through layers of their own, which do not see each other's edge."""
    module, x = net("digits-cnn:split=true"), images(3, 1, 7, 8)
    upper, lower = pairs(module)[:2]
    with torch.no_grad():
        found = module[0](x)
        assert found.shape == (3, 16, 7, 8)
        torch.testing.assert_close(found[:, :, :4], F.conv2d(x[:, :, :4], *upper, padding=1))
        torch.testing.assert_close(found[:, :, 4:], F.conv2d(x[:, :, 4:], *lower, padding=1))
