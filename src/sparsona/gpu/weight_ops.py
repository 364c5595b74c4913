"""Weights and their gradients on the way between a flat float32 buffer and convolutions, as custom operations of torch.

A model is one flat buffer, in which the pixels of a filter are neighbours. A GPU's fast convolutions want weights (and
give gradients) with the channels of a pixel side by side, in bf16 under autocast. Torch converts type and layout one
after the other, for each use again; here both happen in one pass. On a GPU Triton kernels do the work; elsewhere plain
torch does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.library.custom_op("sparsona::lay_out", mutates_args=())
def lay_out(weight: Tensor, half: bool) -> Tensor:
    """A copy of a weight [outputs, inputs, height, width], channels last; with `half` in bf16."""
    kind = torch.bfloat16 if half else weight.dtype
    return weight.to(kind, copy=True).contiguous(memory_format=torch.channels_last)


@torch.library.custom_op("sparsona::collect", mutates_args=())
def collect(parts: Sequence[Tensor], rows: Sequence[int], size: int) -> Tensor:
    """One flat float32 gradient of `size` entries out of its parts, in their order.

    A part whose row is -1 is copied. Of one with another row, [samples, rows, channels] as `group_norm_act_backward`
    gives it, that row is summed over the samples.
    """
    found = [
        part.float().reshape(-1) if row < 0 else part[:, row].sum(0) for part, row in zip(parts, rows, strict=True)
    ]
    return torch.cat(found)


@lay_out.register_fake
def _(weight, half):
    return torch.empty_like(weight, dtype=torch.bfloat16 if half else weight.dtype, memory_format=torch.channels_last)


@collect.register_fake
def _(parts, rows, size):
    return parts[0].new_empty(size, dtype=torch.float32)


@lay_out.register_kernel("cuda")
def lay_out_by_triton(weight: Tensor, half: bool) -> Tensor:
    """The same by the kernels."""
    from sparsona.gpu import weight_kernels

    kind = torch.bfloat16 if half else weight.dtype
    if weight.shape[2:].numel() == 1 or not weight.is_contiguous():
        return weight.to(kind, copy=True).contiguous(memory_format=torch.channels_last)
    found = torch.empty_like(weight, dtype=kind, memory_format=torch.channels_last)
    with torch.cuda.device_of(weight):  # Triton starts kernels on the current GPU
        weight_kernels.turn(weight, found, weight.shape, 0, to_channels_last=True)
    return found


@collect.register_kernel("cuda")
def collect_by_triton(parts: Sequence[Tensor], rows: Sequence[int], size: int) -> Tensor:
    """The same by the kernels."""
    from sparsona.gpu import weight_kernels

    flat = parts[0].new_empty(size, dtype=torch.float32)
    start = 0
    summed: dict[int, tuple[Tensor, dict[int, int]]] = {}  # parts to sum, and where each row goes
    with torch.cuda.device_of(flat):
        for part, row in zip(parts, rows, strict=True):
            if row >= 0:
                starts = summed.setdefault(id(part), (part, {}))[1]
                if starts.setdefault(row, start) != start:  # asked for twice
                    flat[start : start + part.shape[2]] = part[:, row].sum(0)
                start += part.shape[2]
                continue
            turned = part.dim() == 4 and part.shape[2:].numel() > 1
            if turned and part.is_contiguous(memory_format=torch.channels_last):
                weight_kernels.turn(part, flat, part.shape, start, to_channels_last=False)
            else:
                flat[start : start + part.numel()].view(part.shape).copy_(part)
            start += part.numel()
        for part, starts in summed.values():
            weight_kernels.sum_samples(part, flat, starts)
    return flat


LAY_OUT = torch.ops.sparsona.lay_out.default
COLLECT = torch.ops.sparsona.collect.default
