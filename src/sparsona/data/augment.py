"""Stored examples become the inputs of a model: normalised, and for training cropped and flipped at random."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsona.data.pool import View


class Draws(NamedTuple):
    """How each of some images is cropped and mirrored: whole numbers (N,), and whether (N,)."""

    top: Tensor
    left: Tensor
    mirrored: Tensor

    def narrow(self, start: int, size: int) -> Draws:
        return Draws(*(values.narrow(0, start, size) for values in self))

    def to(self, device: torch.device) -> Draws:
        return Draws(*(values.to(device) for values in self))


def draw(inputs: Tensor, view: View, random: torch.Generator) -> Draws:
    """Crops and mirrors for these images, on the CPU, so that the draws are the same for every device."""
    count, (height, width) = len(inputs), _cut(inputs, view)
    top, left = (
        torch.randint(stored + 2 * view.pad - side + 1, (count,), generator=random)
        for stored, side in zip(inputs.shape[-2:], (height, width), strict=True)
    )
    mirrored = torch.rand(count, generator=random) < (0.5 if view.flip else 0.0)
    return Draws(top, left, mirrored)


def augment(inputs: Tensor, view: View, draws: Draws) -> Tensor:
    """Images as inputs for training. The padding is black: it is added before normalisation."""
    height, width = _cut(inputs, view)
    rows = draws.top[:, None] + torch.arange(height, device=inputs.device)
    across = torch.arange(width, device=inputs.device)
    columns = draws.left[:, None] + torch.where(draws.mirrored[:, None], across.flip(0), across)
    padded = F.pad(inputs, (view.pad,) * 4)
    # One gather for crop and mirror. Rows first: it then copies runs of a row, not single pixels from everywhere.
    image = torch.arange(len(inputs), device=inputs.device)[:, None, None, None]
    channel = torch.arange(inputs.shape[1], device=inputs.device)[:, None, None]
    return scale(padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]], view)


def as_inputs(inputs: Tensor, view: View) -> Tensor:
    """Stored examples as inputs for testing: the middle of an image, or all of it resized; nothing random."""
    if view.crop is not None and view.test_resize:
        inputs = _resize(inputs, view.crop)
    elif view.crop is not None:
        top, left = ((stored - view.crop) // 2 for stored in inputs.shape[-2:])
        inputs = inputs[..., top : top + view.crop, left : left + view.crop]
    return scale(inputs, view)


def _resize(inputs: Tensor, side: int) -> Tensor:
    """Images as squares of this side: bilinear with a wider support where they shrink, as pictures are when read."""
    resized = F.interpolate(inputs.float(), size=(side, side), mode="bilinear", antialias=True)
    return resized.round().clamp(0, 255).to(torch.uint8) if inputs.dtype == torch.uint8 else resized


def scale(inputs: Tensor, view: View) -> Tensor:
    """Bytes as floats from 0 to 1, tokens as indices; then the channels' mean and spread taken out."""
    if inputs.dtype == torch.int32:
        return inputs.long()
    factor = 1 / 255 if inputs.dtype == torch.uint8 else 1.0
    if view.mean:
        mean, std = _statistics(view, inputs.device)
        return inputs.float().mul_(factor / std).sub_(mean / std) if factor != 1.0 else (inputs - mean) / std
    return inputs.float().mul_(factor) if factor != 1.0 else inputs


@lru_cache(maxsize=16)
def _statistics(view: View, device: torch.device) -> tuple[Tensor, Tensor]:
    """The channels' mean and spread; cached, since a copy to a device is synchronous."""
    mean, std = (torch.tensor(values, device=device).view(-1, 1, 1) for values in (view.mean, view.std))
    return mean, std


def _cut(inputs: Tensor, view: View) -> tuple[int, int]:
    return (view.crop, view.crop) if view.crop is not None else (inputs.shape[-2], inputs.shape[-1])
