"""ResNet18 with GroupNorm, with or without residual adapters. Parameters are named as torchvision names them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from sparsona.models.catalog import GROUPS_BY_WIDTH, resnet_roles, split_rows
from sparsona.models.cnn import SplitInput


def resnet18(
    input_shape: tuple[int, ...],
    num_classes: int,
    groups: int | str = 32,
    stem: str = "3x3",
    adapters: bool = False,
    adapter_form: str = "paper",
    dropout: float = 0.0,
    weights: str = "",
    split: bool = False,
) -> nn.Module:
    """11,173,962 parameters for 3x32x32 and 10 classes; adapters add 1,400,320.

    PyTorch's own initialisation, but for the adapters. `weights` names a file of ImageNet weights to start from.
    """
    net = ResNet18(input_shape[0], num_classes, groups, stem == "7x7", adapters, adapter_form == "authors", dropout)
    if weights:
        from sparsona.models.imagenet import load_weights  # which takes safetensors along

        load_weights(net, weights)
    if split:
        net.split_input(split_rows(input_shape[1])[0], both_alike=bool(weights))
    return net


class ResNet18(nn.Module):
    """Four stages of two blocks, 64 to 512 channels wide, then the average over the pixels and a linear layer."""

    def __init__(
        self,
        channels: int,
        num_classes: int,
        groups: int | str,
        large_stem: bool,
        adapters: bool,
        doubled: bool,
        dropout: float,
    ) -> None:
        super().__init__()

        def norm(width: int) -> nn.GroupNorm:
            return nn.GroupNorm(GROUPS_BY_WIDTH[width] if groups == "width" else int(groups), width)

        def adapter(width: int) -> nn.Module:
            return ResidualAdapter(norm(width), dropout, doubled) if adapters else nn.Identity()

        def stage(inputs: int, outputs: int, stride: int) -> nn.Sequential:
            first = Block(inputs, outputs, stride, norm, adapter)
            return nn.Sequential(first, Block(outputs, outputs, 1, norm, adapter))

        if large_stem:
            self.conv1: nn.Module = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        else:
            self.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        self.bn1 = norm(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if large_stem else nn.Identity()
        self.layer1 = stage(64, 64, stride=1)
        self.layer2 = stage(64, 128, stride=2)
        self.layer3 = stage(128, 256, stride=2)
        self.layer4 = stage(256, 512, stride=2)
        self.dropout = nn.Dropout(0.0 if adapters else dropout)
        self.fc = nn.Linear(512, num_classes)
        self.roles = resnet_roles(tuple(name for name, _ in self.named_parameters()))

    def split_input(self, rows: int, both_alike: bool) -> None:
        """Put two first layers side by side: one for so many upper rows of an image, one for the others."""
        first = self.conv1
        assert isinstance(first, nn.Conv2d)
        width, side, stride = first.out_channels, first.kernel_size[0], first.stride[0]
        second = nn.Conv2d(first.in_channels, width, side, stride=stride, padding=side // 2, bias=False)
        if both_alike:
            second.load_state_dict(first.state_dict())
        self.conv1 = SplitInput(first, second, rows)
        self.roles = resnet_roles(tuple(name for name, _ in self.named_parameters()))

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.dropout(x.mean(dim=(2, 3))))


class Block(nn.Module):
    """Two 3x3 convolutions, each with its norm (and adapter), around which the input takes a shortcut."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        stride: int,
        norm: Callable[[int], nn.Module],
        adapter: Callable[[int], nn.Module],
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.adapter1 = adapter(outputs)
        self.bn1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.adapter2 = adapter(outputs)
        self.bn2 = norm(outputs)
        self.downsample = nn.Sequential()  # hands on what it gets
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.adapter1(self.conv1(x))))
        y = self.bn2(self.adapter2(self.conv2(y)))
        return F.relu(y + self.downsample(x))


class ResidualAdapter(nn.Module):
    """x + conv1x1(dropout(norm(x))), nearly the identity at first (weights of deviation 1e-4).

    `doubled` is the authors' code, where the block adds its input once more: 2x + conv1x1(dropout(norm(x))). A norm
    follows, which takes the factor out again but halves what the adapter adds.
    """

    def __init__(self, norm: nn.GroupNorm, dropout: float, doubled: bool) -> None:
        super().__init__()
        self.norm = norm
        self.dropout = nn.Dropout(dropout)
        self.conv = nn.Conv2d(norm.num_channels, norm.num_channels, 1, bias=False)
        nn.init.normal_(self.conv.weight, std=1e-4)
        self.doubled = doubled

    def forward(self, x: Tensor) -> Tensor:
        change = self.conv(self.dropout(self.norm(x)))
        return 2 * x + change if self.doubled else x + change
