"""Data sets by name, as tensors ready for a model."""

from __future__ import annotations

from importlib import resources

import numpy as np
import torch
from torch import Tensor

from sparsona.core.errors import unknown_name
from sparsona.data import SOURCES


def load(name: str) -> tuple[Tensor, Tensor]:
    """Inputs and labels of a data set: float32 (N, channels, height, width) from 0 to 1, and int64 (N).

    `SOURCES` lists the names. The order of the examples is the published one.
    """
    if name not in SOURCES:
        raise unknown_name("data set", name, SOURCES)
    with (
        resources.files("sparsona.data").joinpath("digits.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        images, labels = arrays["images"], arrays["labels"]
    # A pixel counts the ink in a 4 x 4 square of the scan: 16 is all black.
    return torch.from_numpy(images).unsqueeze(1).float() / 16, torch.from_numpy(labels).long()
