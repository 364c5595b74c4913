# ruff: noqa: N803  (Triton: what is known when a kernel is compiled is written in capitals)
"""Triton kernels that change layout and type of weights, and sum the shares of samples in a gradient.

Needs Triton: only weight_ops imports this, where it meets a CUDA tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import triton
import triton.language as tl
from torch import Tensor

WIDTH = 64  # input channels of a program: 128 bytes of bf16
COLUMNS, SAMPLES = 32, 128  # of a tile of shares


# Where a weight begins is not worth a kernel of its own for each residue.
@triton.jit(do_not_specialize=["start"])
def _turn(
    source,
    target,
    start,
    inputs,
    AREA: tl.constexpr,
    PIXELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TO_CHANNELS_LAST: tl.constexpr,
):
    chunks = tl.cdiv(inputs, WIDTH)
    row = (tl.program_id(0) // chunks).to(tl.int64) * (inputs * AREA)
    channel = tl.program_id(0) % chunks * WIDTH + tl.arange(0, WIDTH)[:, None]
    pixel = tl.arange(0, PIXELS)[None, :]
    there = (channel < inputs) & (pixel < AREA)
    by_channel = channel * AREA + pixel
    by_pixel = pixel * inputs + channel
    if TO_CHANNELS_LAST:
        values = tl.load(source + row + by_channel, mask=there)
        tl.store(target + row + by_pixel, values.to(target.dtype.element_ty), mask=there)
    else:
        values = tl.load(source + row + by_pixel, mask=there)
        tl.store(target + start + row + by_channel, values.to(target.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["first", "second", "third", "samples"])
def _sum_samples(
    shares,
    flat,
    first,
    second,
    third,
    samples,
    channels,
    columns,
    COLUMNS: tl.constexpr,
    SAMPLES: tl.constexpr,
    TILES: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for tile in range(TILES):
        sample = tile * SAMPLES + tl.arange(0, SAMPLES)
        there = (sample < samples)[:, None] & (column < columns)[None, :]
        total += tl.sum(tl.load(shares + sample[:, None] * columns + column[None, :], mask=there, other=0.0), axis=0)
    row = column // channels
    start = tl.where(row == 0, first, tl.where(row == 1, second, third))
    # A row that nobody asked for has a negative start.
    tl.store(flat + start + column % channels, total, mask=(column < columns) & (start >= 0))


def turn(source: Tensor, target: Tensor, shape: Sequence[int], start: int, to_channels_last: bool) -> None:
    """Copy a weight of this shape to channels last, or from it to a flat buffer, where it begins at `start`."""
    outputs, inputs, *pixels = shape
    area = pixels[0] * pixels[1]
    _turn[(outputs * triton.cdiv(inputs, WIDTH),)](
        source,
        target,
        start,
        inputs,
        AREA=area,
        PIXELS=triton.next_power_of_2(area),
        WIDTH=WIDTH,
        TO_CHANNELS_LAST=to_channels_last,
    )


def sum_samples(shares: Tensor, flat: Tensor, starts: Mapping[int, int]) -> None:
    """Sum [samples, rows, channels] over the samples; each row goes to its start in the flat buffer, if it has one."""
    samples, rows, channels = shares.shape
    first, second, third = (starts.get(row, -1) for row in range(3))
    columns = rows * channels
    _sum_samples[(triton.cdiv(columns, COLUMNS),)](
        shares.contiguous(),
        flat,
        first,
        second,
        third,
        samples,
        channels,
        columns,
        COLUMNS=COLUMNS,
        SAMPLES=SAMPLES,
        TILES=triton.cdiv(samples, SAMPLES),
    )
