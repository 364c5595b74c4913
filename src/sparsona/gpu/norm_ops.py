"""GroupNorm with shortcut and ReLU as two custom operations of torch, which a compiler does not take apart.

Images are [N, C, H, W], bf16 or float32, and stored channels last. Sums and arithmetic are float32. On a GPU Triton
kernels do the work; elsewhere plain torch does, slowly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Inductor passes tensors with the strides of the graph: channels last arrives as channels last, without copies.
_TAGS = (torch.Tag.needs_exact_strides,)


@torch.library.custom_op("sparsona::group_norm_act", mutates_args=(), tags=_TAGS)
def group_norm_act(
    x: Tensor,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    groups: int,
    eps: float,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """relu(norm(x + shift) * weight + bias + residual) in x's type, and each group's mean and 1 / deviation.

    `shift` has one value a channel: the bias of the convolution before.
    """
    values = x.float() if shift is None else x.float() + shift.float()[:, None, None]
    mean, rstd = _statistics(values, groups, eps)
    out = _normed(values, mean, rstd) * weight.float()[:, None, None] + bias.float()[:, None, None]
    if residual is not None:
        out = out + residual.float()
    return _channels_last((out.relu() if relu else out).to(x.dtype)), mean, rstd


@torch.library.custom_op("sparsona::group_norm_act_backward", mutates_args=(), tags=_TAGS)
def group_norm_act_backward(
    dy: Tensor,
    dy2: Tensor | None,
    x: Tensor,
    shift: Tensor | None,
    y: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    relu: bool,
    has_residual: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of x, that of the residual (or nothing), and each sample's share in those of the parameters.

    The incoming gradient is dy + dy2. `y` is the result of the forward pass; without a residual it may be left out. The
    shares are [N, 2 or 3, C] for weight, bias and, where there is one, shift: the caller sums them over the samples.
    """
    arrived = dy.float() if dy2 is None else dy.float() + dy2.float()
    values = x.float() if shift is None else x.float() + shift.float()[:, None, None]
    normed = _normed(values, mean, rstd)
    gamma = weight.float()[:, None, None]
    if relu:
        out = y.float() if y is not None else normed * gamma + bias.float()[:, None, None]
        arrived = torch.where(out > 0, arrived, 0.0)
    count = values[0].numel() // mean.shape[1]
    level = _spread((arrived * gamma).reshape(*mean.shape, -1).sum(2) / count, values)
    along = _spread((arrived * gamma * normed).reshape(*mean.shape, -1).sum(2) / count, values)
    dx = _spread(rstd, values) * (arrived * gamma - level - normed * along)
    shares = [(arrived * normed).sum((2, 3)), arrived.sum((2, 3))] + ([] if shift is None else [dx.sum((2, 3))])
    dresidual = _channels_last(arrived.to(x.dtype, copy=True)) if has_residual else x.new_empty(0)
    return _channels_last(dx.to(x.dtype)), dresidual, torch.stack(shares, 1)


@group_norm_act.register_fake
def _(x, shift, weight, bias, residual, groups, eps, relu):
    return _like(x), *(x.new_empty((x.shape[0], groups), dtype=torch.float32) for _ in range(2))


@group_norm_act_backward.register_fake
def _(dy, dy2, x, shift, y, weight, bias, mean, rstd, relu, has_residual):
    rows = 2 if shift is None else 3
    shares = x.new_empty((x.shape[0], rows, x.shape[1]), dtype=torch.float32)
    return _like(x), _like(x) if has_residual else x.new_empty(0), shares


@group_norm_act.register_kernel("cuda")
def forward_by_triton(x, shift, weight, bias, residual, groups, eps, relu) -> tuple[Tensor, Tensor, Tensor]:
    """The same by the kernels."""
    from sparsona.gpu import norm_kernels

    x, residual = _channels_last(x), _channels_last(residual)
    y, (mean, rstd) = _like(x), (x.new_empty((x.shape[0], groups), dtype=torch.float32) for _ in range(2))
    with torch.cuda.device_of(x):  # Triton starts kernels on the current GPU
        norm_kernels.forward(x, shift, weight.contiguous(), bias.contiguous(), residual, y, mean, rstd, eps, relu)
    return y, mean, rstd


@group_norm_act_backward.register_kernel("cuda")
def backward_by_triton(
    dy, dy2, x, shift, y, weight, bias, mean, rstd, relu, has_residual
) -> tuple[Tensor, Tensor, Tensor]:
    """The same by the kernels."""
    from sparsona.gpu import norm_kernels

    dy, dy2, x, y = (_channels_last(image) for image in (dy, dy2, x, y))
    dx, dresidual = _like(x), _like(x) if has_residual else None
    shares = x.new_empty((x.shape[0], 2 if shift is None else 3, x.shape[1]), dtype=torch.float32)
    fixed = (weight.contiguous(), bias.contiguous(), mean, rstd)
    with torch.cuda.device_of(x):
        norm_kernels.backward(dy, dy2, x, shift, y, *fixed, dx, dresidual, shares, relu)
    return dx, x.new_empty(0) if dresidual is None else dresidual, shares


FORWARD = torch.ops.sparsona.group_norm_act.default
BACKWARD = torch.ops.sparsona.group_norm_act_backward.default


def _statistics(values: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    grouped = values.reshape(len(values), groups, -1)
    return grouped.mean(2), (grouped.var(2, correction=0) + eps).rsqrt()


def _normed(values: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    return (values - _spread(mean, values)) * _spread(rstd, values)


def _spread(by_group: Tensor, images: Tensor) -> Tensor:
    """Each group's value at each of its channels."""
    return by_group.repeat_interleave(images.shape[1] // by_group.shape[1], dim=1)[:, :, None, None]


def _channels_last(images: Any) -> Any:
    return None if images is None else images.contiguous(memory_format=torch.channels_last)


def _like(x: Tensor) -> Tensor:
    """Room for images of this shape and type, channels last and dense."""
    return torch.empty_like(x, memory_format=torch.channels_last)
