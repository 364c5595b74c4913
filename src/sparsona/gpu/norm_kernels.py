# ruff: noqa: N803, N806  (Triton: what is known when a kernel is compiled is written in capitals)
"""Triton kernels for GroupNorm + shortcut + ReLU on channels-last tensors, forward and backward.

Needs Triton: only norm_ops imports this, where it meets a CUDA tensor.

A program takes one sample and a few whole groups of channels, so it needs no sums of others. These tensors are small
beside the memory's speed (16 MB and less), so traffic is all that counts: where pixels x channels of a program fit into
its registers, everything is read once and written once; where they do not (large images, one group of everything), it
goes over the pixels in tiles, twice. Sums are taken in a fixed order: the same bits each time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Tiling(NamedTuple):
    """How a tensor is cut among programs."""

    groups: int  # of a program
    lanes: int  # channels of a group, up to a power of two
    pixels: int  # of a tile, a power of two
    chunks: int  # programs of a sample
    num_warps: int


def choose_tiling(samples: int, channels: int, pixels: int, groups: int, largest: int, per_warp: int) -> Tiling:
    """At most `largest` elements a tile, runs of 32 to 64 channels, and four programs for each multiprocessor.

    Runs of 32 bf16 channels are 64 bytes, what the memory hands out at once; 16 still fill the sectors of the cache.
    512 programs keep the 132 multiprocessors of an H100 busy. `largest` and `per_warp`, the elements of a tile for
    each warp, are the best of a search over the shapes of ResNet18 on an H200.
    """
    lanes = triton.next_power_of_2(channels // groups)
    rows = triton.next_power_of_2(pixels)
    fits = rows * max(16, lanes) <= largest  # if not, it is read twice anyway, and wide runs are better
    together = triton.next_power_of_2(groups)  # as many groups as there are, then fewer
    while together > 1:
        width = together * lanes
        too_large = width > 64 or (fits and rows * width > largest)
        too_few = samples * -(-groups // together) < 512 and width > 32
        if not (too_large or too_few):
            break
        together //= 2
    width = together * lanes
    rows = min(rows, max(1, triton.next_power_of_2(largest // width + 1) // 2))
    num_warps = min(16, max(4, rows * width // per_warp))
    return Tiling(together, lanes, rows, -(-groups // together), num_warps)


@triton.jit
def _channels(chunk, GROUPS: tl.constexpr, PER_GROUP: tl.constexpr, TOGETHER: tl.constexpr, LANES: tl.constexpr):
    """The channels of this program, and which of them there are; groups start at powers of two."""
    lane = tl.arange(0, TOGETHER * LANES)
    if PER_GROUP == LANES:
        channel = chunk * (TOGETHER * LANES) + lane  # seen to be contiguous: loads are vectors
        real = channel < GROUPS * PER_GROUP
    else:
        channel = (chunk * TOGETHER + lane // LANES) * PER_GROUP + lane % LANES
        real = (lane % LANES < PER_GROUP) & (chunk * TOGETHER + lane // LANES < GROUPS)
    return channel, real


@triton.jit
def _by_group(values, TOGETHER: tl.constexpr, LANES: tl.constexpr):
    """Sums over the channels of each group."""
    return tl.sum(tl.reshape(values, (TOGETHER, LANES)), axis=1)


@triton.jit
def _to_channels(values, TOGETHER: tl.constexpr, LANES: tl.constexpr):
    """Each group's value at each of its channels."""
    return tl.reshape(tl.broadcast_to(values[:, None], (TOGETHER, LANES)), (TOGETHER * LANES,))


@triton.jit
def _place(tile, channel, real, C: tl.constexpr, PIXELS: tl.constexpr, ROWS: tl.constexpr):
    """Offsets of a tile within its sample, and which of them there are."""
    pixel = tile * ROWS + tl.arange(0, ROWS)
    return pixel[:, None] * C + channel[None, :], (pixel < PIXELS)[:, None] & real[None, :]


@triton.jit
def _shifted(x, places, there, offset, SHIFTED: tl.constexpr):
    values = tl.load(x + places, mask=there, other=0.0).to(tl.float32)
    if SHIFTED:
        values += offset[None, :]
    return values


@triton.jit
def _moments(values, there, count, TOGETHER: tl.constexpr, LANES: tl.constexpr):
    """A tile without its groups' means, these means, and the sums of squares around them."""
    mean = _by_group(tl.sum(tl.where(there, values, 0.0), axis=0), TOGETHER, LANES) / count
    values = tl.where(there, values - _to_channels(mean, TOGETHER, LANES)[None, :], 0.0)
    return values, mean, _by_group(tl.sum(values * values, axis=0), TOGETHER, LANES)


@triton.jit
def _finish(normed, gamma, beta, residual, y, places, there, RELU: tl.constexpr, SHORTCUT: tl.constexpr):
    out = normed * gamma[None, :] + beta[None, :]
    if SHORTCUT:
        out += tl.load(residual + places, mask=there, other=0.0).to(tl.float32)
    if RELU:
        out = tl.where(out < 0, 0.0, out)  # what is not a number stays so
    tl.store(y + places, out.to(y.dtype.element_ty), mask=there)


@triton.jit
def _forward(
    x,
    shift,
    weight,
    bias,
    residual,
    y,
    mean_out,
    rstd_out,
    eps,
    C: tl.constexpr,
    PIXELS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOGETHER: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILES: tl.constexpr,
    RELU: tl.constexpr,
    SHIFTED: tl.constexpr,
    SHORTCUT: tl.constexpr,
):
    PER_GROUP: tl.constexpr = C // GROUPS
    sample = (tl.program_id(0) // CHUNKS).to(tl.int64)
    chunk = tl.program_id(0) % CHUNKS
    channel, real = _channels(chunk, GROUPS, PER_GROUP, TOGETHER, LANES)
    start = sample * (C * PIXELS)
    x += start
    y += start
    if SHORTCUT:
        residual += start
    gamma = tl.load(weight + channel, mask=real, other=0.0).to(tl.float32)
    beta = tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)
    offset = beta
    if SHIFTED:
        offset = tl.load(shift + channel, mask=real, other=0.0).to(tl.float32)

    # Mean and sum of squares around it, tile by tile, put together as Chan et al. (1979) do: a mean far from zero
    # costs no digits, as it would in the difference of E[x^2] and E[x]^2.
    places, there = _place(0, channel, real, C, PIXELS, ROWS)
    values = _shifted(x, places, there, offset, SHIFTED)
    first: tl.constexpr = (PIXELS if TILES == 1 else ROWS) * PER_GROUP
    values, mean, squares = _moments(values, there, first, TOGETHER, LANES)
    for tile in range(1, TILES):
        more, still = _place(tile, channel, real, C, PIXELS, ROWS)
        new = tl.minimum(PIXELS - tile * ROWS, ROWS) * (PER_GROUP * 1.0)
        old = tile * (ROWS * PER_GROUP * 1.0)
        _, own, around = _moments(_shifted(x, more, still, offset, SHIFTED), still, new, TOGETHER, LANES)
        apart = own - mean
        mean += apart * (new / (old + new))
        squares += around + apart * apart * (old * new / (old + new))
    rstd = tl.rsqrt(squares / (PIXELS * PER_GROUP) + eps)
    group = chunk * TOGETHER + tl.arange(0, TOGETHER)
    tl.store(mean_out + sample * GROUPS + group, mean, mask=group < GROUPS)
    tl.store(rstd_out + sample * GROUPS + group, rstd, mask=group < GROUPS)

    scale = _to_channels(rstd, TOGETHER, LANES)
    if TILES == 1:  # the tile is still in registers, the mean taken off
        _finish(values * scale[None, :], gamma, beta, residual, y, places, there, RELU, SHORTCUT)
    else:
        middle = _to_channels(mean, TOGETHER, LANES)
        for tile in range(TILES):
            more, still = _place(tile, channel, real, C, PIXELS, ROWS)
            normed = (_shifted(x, more, still, offset, SHIFTED) - middle[None, :]) * scale[None, :]
            _finish(normed, gamma, beta, residual, y, more, still, RELU, SHORTCUT)


@triton.jit
def _gradient(
    dy,
    dy2,
    x,
    y,
    offset,
    middle,
    scale,
    gamma,
    beta,
    places,
    there,
    TWO: tl.constexpr,
    SHIFTED: tl.constexpr,
    RELU: tl.constexpr,
    FROM_Y: tl.constexpr,
):
    """What arrives before the ReLU, and x normalised, of one tile. Zero where there is nothing."""
    arrived = tl.load(dy + places, mask=there, other=0.0).to(tl.float32)
    if TWO:
        arrived += tl.load(dy2 + places, mask=there, other=0.0).to(tl.float32)
    values = _shifted(x, places, there, offset, SHIFTED)
    normed = tl.where(there, (values - middle[None, :]) * scale[None, :], 0.0)
    if RELU:
        if FROM_Y:
            passed = tl.load(y + places, mask=there, other=0.0).to(tl.float32) > 0
        else:  # what y was, without reading it
            passed = normed * gamma[None, :] + beta[None, :] > 0
        arrived = tl.where(passed, arrived, 0.0)
    return arrived, normed


@triton.jit
def _leave(arrived, normed, scale, gamma, level, along, dx, dresidual, places, there, SHORTCUT: tl.constexpr):
    found = scale[None, :] * (gamma[None, :] * arrived - level[None, :] - normed * along[None, :])
    tl.store(dx + places, found.to(dx.dtype.element_ty), mask=there)
    if SHORTCUT:
        tl.store(dresidual + places, arrived.to(dresidual.dtype.element_ty), mask=there)


@triton.jit
def _backward(
    dy,
    dy2,
    x,
    shift,
    y,
    weight,
    bias,
    mean_in,
    rstd_in,
    dx,
    dresidual,
    sums,
    C: tl.constexpr,
    PIXELS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOGETHER: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILES: tl.constexpr,
    TWO: tl.constexpr,
    SHIFTED: tl.constexpr,
    RELU: tl.constexpr,
    FROM_Y: tl.constexpr,
    SHORTCUT: tl.constexpr,
):
    PER_GROUP: tl.constexpr = C // GROUPS
    sample = (tl.program_id(0) // CHUNKS).to(tl.int64)
    chunk = tl.program_id(0) % CHUNKS
    channel, real = _channels(chunk, GROUPS, PER_GROUP, TOGETHER, LANES)
    start = sample * (C * PIXELS)
    dy += start
    x += start
    dx += start
    if TWO:
        dy2 += start
    if FROM_Y:
        y += start
    if SHORTCUT:
        dresidual += start
    gamma = tl.load(weight + channel, mask=real, other=0.0).to(tl.float32)
    beta = tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)
    offset = gamma
    if SHIFTED:
        offset = tl.load(shift + channel, mask=real, other=0.0).to(tl.float32)
    group = sample * GROUPS + channel // PER_GROUP
    middle = tl.load(mean_in + group, mask=real, other=0.0)
    scale = tl.load(rstd_in + group, mask=real, other=0.0)

    places, there = _place(0, channel, real, C, PIXELS, ROWS)
    arrived, normed = _gradient(
        dy, dy2, x, y, offset, middle, scale, gamma, beta, places, there, TWO, SHIFTED, RELU, FROM_Y
    )
    bias_sum = tl.sum(arrived, axis=0)
    weight_sum = tl.sum(arrived * normed, axis=0)
    normed_sum = tl.sum(normed, axis=0)  # goes unused, and is left out, without a shift
    for tile in range(1, TILES):
        more, still = _place(tile, channel, real, C, PIXELS, ROWS)
        arrived2, normed2 = _gradient(
            dy, dy2, x, y, offset, middle, scale, gamma, beta, more, still, TWO, SHIFTED, RELU, FROM_Y
        )
        bias_sum += tl.sum(arrived2, axis=0)
        weight_sum += tl.sum(arrived2 * normed2, axis=0)
        normed_sum += tl.sum(normed2, axis=0)
    count: tl.constexpr = PIXELS * PER_GROUP
    along = _to_channels(_by_group(gamma * weight_sum, TOGETHER, LANES) / count, TOGETHER, LANES)
    level = _to_channels(_by_group(gamma * bias_sum, TOGETHER, LANES) / count, TOGETHER, LANES)
    row = sums + sample * (C * (3 if SHIFTED else 2)) + channel
    tl.store(row, weight_sum, mask=real)
    tl.store(row + C, bias_sum, mask=real)
    if SHIFTED:  # what dx adds up to, without rounding it first
        tl.store(row + 2 * C, scale * (gamma * bias_sum - PIXELS * level - along * normed_sum), mask=real)

    if TILES == 1:
        _leave(arrived, normed, scale, gamma, level, along, dx, dresidual, places, there, SHORTCUT)
    else:
        for tile in range(TILES):
            more, still = _place(tile, channel, real, C, PIXELS, ROWS)
            arrived2, normed2 = _gradient(
                dy, dy2, x, y, offset, middle, scale, gamma, beta, more, still, TWO, SHIFTED, RELU, FROM_Y
            )
            _leave(arrived2, normed2, scale, gamma, level, along, dx, dresidual, more, still, SHORTCUT)


FORWARD_TILE, FORWARD_WARP = 16384, 2048  # elements; one float of each is kept
BACKWARD_TILE, BACKWARD_WARP = 8192, 1024  # two are: the gradient, and x normalised


def forward(
    x: Tensor,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    y: Tensor,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    relu: bool,
) -> None:
    """Fill y, mean and rstd. All images are dense and channels last."""
    grid, options = _launch(x, mean.shape[1], FORWARD_TILE, FORWARD_WARP)
    _forward[grid](
        x,
        x if shift is None else shift,
        weight,
        bias,
        x if residual is None else residual,
        y,
        mean,
        rstd,
        eps,
        RELU=relu,
        SHIFTED=shift is not None,
        SHORTCUT=residual is not None,
        **options,
    )


def backward(
    dy: Tensor,
    dy2: Tensor | None,
    x: Tensor,
    shift: Tensor | None,
    y: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    dx: Tensor,
    dresidual: Tensor | None,
    sums: Tensor,
    relu: bool,
) -> None:
    """Fill dx, dresidual and the sums of each sample. All images are dense and channels last."""
    grid, options = _launch(x, mean.shape[1], BACKWARD_TILE, BACKWARD_WARP)
    _backward[grid](
        dy,
        x if dy2 is None else dy2,
        x,
        x if shift is None else shift,
        x if y is None else y,
        weight,
        bias,
        mean,
        rstd,
        dx,
        dx if dresidual is None else dresidual,
        sums,
        TWO=dy2 is not None,
        SHIFTED=shift is not None,
        RELU=relu,
        FROM_Y=relu and y is not None,
        SHORTCUT=dresidual is not None,
        **options,
    )


def _launch(x: Tensor, groups: int, largest: int, per_warp: int) -> tuple[tuple[int], dict[str, Any]]:
    samples, channels = x.shape[:2]
    pixels = x.shape[2] * x.shape[3]
    tiling = choose_tiling(samples, channels, pixels, groups, largest, per_warp)
    options = {
        "C": channels,
        "PIXELS": pixels,
        "GROUPS": groups,
        "TOGETHER": tiling.groups,
        "LANES": tiling.lanes,
        "ROWS": tiling.pixels,
        "CHUNKS": tiling.chunks,
        "TILES": -(-pixels // tiling.pixels),
        "num_warps": tiling.num_warps,
        "enable_fp_fusion": True,  # said, since Triton's default is about to change
    }
    return (samples * tiling.chunks,), options
