"""The handwritten digits that come with the package."""

from __future__ import annotations

from importlib import resources

import numpy as np

from sparsona.data.catalog import get
from sparsona.data.pool import Pool
from sparsona.data.readers.files import Request


def read_digits(request: Request) -> Pool:
    """Images as float32 from 0 to 1."""
    with (
        resources.files("sparsona.data").joinpath("digits.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        images, labels = arrays["images"], arrays["labels"]
    # A pixel counts the ink in a 4 x 4 square of the scan: 16 is all black.
    x = images[:, None].astype(np.float32) / np.float32(16)
    return Pool(request.name, x, labels.astype(np.int64), get(request.name).num_classes)
