"""Convolutions of a stack of models as batched matrix products.

A stack's convolution has as many groups as clients, for which libraries have no fast kernels on a GPU: as matrix
products it takes two thirds of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten


def as_products(num_models: int) -> dict[Any, Any]:
    """Decompositions (of make_fx) for convolutions over images of a stack of `num_models` models."""

    def suits(weight: Tensor, dilation: Sequence[int], transposed: bool, groups: int) -> bool:
        return weight.dim() == 4 and groups == num_models and not transposed and set(dilation) == {1}

    def convolution(
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        output_padding: Sequence[int],
        groups: int,
    ) -> Any:
        if not suits(weight, dilation, transposed, groups):
            return NotImplemented
        columns, height, width = _columns(inputs, groups, weight.shape[2:], stride, padding)
        found = columns @ weight.view(groups, len(weight) // groups, -1).transpose(1, 2)
        if bias is not None:
            found = found + bias.view(groups, 1, -1)
        found = found.view(groups, len(inputs), height, width, -1)
        return found.permute(1, 0, 4, 2, 3).reshape(len(inputs), len(weight), height, width)

    def backward(
        grad: Tensor,
        inputs: Tensor,
        weight: Tensor,
        bias_sizes: Any,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        output_padding: Sequence[int],
        groups: int,
        wanted: Sequence[bool],
    ) -> Any:
        if not suits(weight, dilation, transposed, groups):
            return NotImplemented
        batch, outputs = len(inputs), len(weight) // groups
        height, width = grad.shape[2:]
        flat = grad.reshape(batch, groups, outputs, height, width).permute(0, 1, 3, 4, 2).transpose(0, 1)
        flat = flat.reshape(groups, batch * height * width, outputs)
        to_inputs = to_weight = to_bias = None
        if wanted[0]:
            spread = (flat @ weight.view(groups, outputs, -1)).view(groups, batch, height * width, -1)
            spread = spread.permute(1, 0, 3, 2).reshape(batch, -1, height * width)
            size, kernel = tuple(inputs.shape[2:]), tuple(weight.shape[2:])
            to_inputs = F.fold(spread, size, kernel, padding=tuple(padding), stride=tuple(stride))
        if wanted[1]:
            columns, _, _ = _columns(inputs, groups, weight.shape[2:], stride, padding)
            to_weight = (flat.transpose(1, 2) @ columns).view(weight.shape)
        if wanted[2]:
            to_bias = flat.sum(1).reshape(-1)
        return to_inputs, to_weight, to_bias

    return {aten.convolution.default: convolution, aten.convolution_backward.default: backward}


def _columns(
    inputs: Tensor, groups: int, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[Tensor, int, int]:
    """The inputs of each output position: [groups, batch * positions, channels * kernel]; and height and width."""
    if any(padding):
        inputs = F.pad(inputs, (padding[1], padding[1], padding[0], padding[0]))
    batch, _, *sides = inputs.shape
    windows = inputs.reshape(batch, groups, -1, *sides).unfold(3, kernel[0], stride[0]).unfold(4, kernel[1], stride[1])
    height, width = windows.shape[3:5]
    return windows.permute(1, 0, 3, 4, 2, 5, 6).reshape(groups, batch * height * width, -1), height, width
