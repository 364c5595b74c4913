# ruff: noqa: N803  (Triton: what is known when a kernel is compiled is written in capitals)
"""Triton kernels for max pooling without overlap on channels-last tensors.

Needs Triton: only pool_ops imports this, where it meets a CUDA tensor. A program takes a few results and a run of their
channels; sizes of images are arguments, so that all layers of a network share two kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

PLACES, CHANNELS = 16, 64  # of a program


@triton.jit
def _squares(count, height, width, channels, SIZE: tl.constexpr, PLACES: tl.constexpr, CHANNELS: tl.constexpr):
    """Where each result of this program is, where its square begins, and which of them there are."""
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    across, down = width // SIZE, height // SIZE
    sample, row, column = place // (across * down), place // across % down, place % across
    corner = ((sample * height + row * SIZE) * width + column * SIZE).to(tl.int64)
    there = (place < count)[:, None] & (channel < channels)[None, :]
    result = place.to(tl.int64)[:, None] * channels + channel[None, :]
    return result, corner[:, None] * channels + channel[None, :], there


@triton.jit
def _largest(x, corner, there, width, channels, SIZE: tl.constexpr):
    """The largest value of each square, and its number: the first of equal ones. What is not a number wins."""
    best = tl.load(x + corner, mask=there, other=0.0)
    winner = tl.zeros(best.shape, tl.int32)
    for k in tl.static_range(1, SIZE * SIZE):
        value = tl.load(x + corner + (k // SIZE * width + k % SIZE) * channels, mask=there, other=0.0)
        wins = (value > best) | (value != value)
        best = tl.where(wins, value, best)
        winner = tl.where(wins, k, winner)
    return best, winner


@triton.jit(do_not_specialize=["count", "height", "width"])
def _forward(x, y, count, height, width, channels, SIZE: tl.constexpr, PLACES: tl.constexpr, CHANNELS: tl.constexpr):
    result, corner, there = _squares(count, height, width, channels, SIZE, PLACES, CHANNELS)
    best, _ = _largest(x, corner, there, width, channels, SIZE)
    tl.store(y + result, best, mask=there)


@triton.jit(do_not_specialize=["count", "height", "width"])
def _backward(
    dy, x, dx, count, height, width, channels, SIZE: tl.constexpr, PLACES: tl.constexpr, CHANNELS: tl.constexpr
):
    result, corner, there = _squares(count, height, width, channels, SIZE, PLACES, CHANNELS)
    _, winner = _largest(x, corner, there, width, channels, SIZE)
    arrived = tl.load(dy + result, mask=there, other=0.0)
    for k in tl.static_range(SIZE * SIZE):
        share = tl.where(winner == k, arrived, 0.0).to(dx.dtype.element_ty)
        tl.store(dx + corner + (k // SIZE * width + k % SIZE) * channels, share, mask=there)


def forward(x: Tensor, y: Tensor, size: int) -> None:
    """Fill y with the largest of each square."""
    _launch(_forward, (x, y), x, size)


def backward(dy: Tensor, x: Tensor, dx: Tensor, size: int) -> None:
    """Fill the squares of dx."""
    _launch(_backward, (dy, x, dx), x, size)


def _launch(kernel, tensors: tuple[Tensor, ...], x: Tensor, size: int) -> None:
    samples, channels, height, width = x.shape
    count = samples * (height // size) * (width // size)
    grid = (triton.cdiv(count, PLACES), triton.cdiv(channels, CHANNELS))
    kernel[grid](*tensors, count, height, width, channels, SIZE=size, PLACES=PLACES, CHANNELS=CHANNELS)
