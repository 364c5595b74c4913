"""Images as bytes, and how a model sees them: mean and spread of each set, crops, flips."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparsona.core.errors import SparsonaError
from sparsona.data import SOURCES
from sparsona.data.pool import Array, Pool, View
from sparsona.data.readers.files import Request, damaged

PAD = 4


@dataclass(frozen=True)
class Look:
    """Mean and spread of a set's training pixels, from 0 to 1, and whether it is augmented unless told otherwise."""

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augments: bool = False


LOOKS = {
    "cifar10": Look((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), augments=True),
    "cifar100": Look((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), augments=True),
    "tiny-imagenet": Look((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821), augments=True),
    "gldv2": Look((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), augments=True),  # ImageNet's: weights come from there
    "mnist": Look((0.1307,), (0.3081,)),
    "fashion-mnist": Look((0.2860,), (0.3530,)),
    "emnist-letters": Look((0.1722,), (0.3309,)),
    "emnist-byclass": Look((0.1736,), (0.3317,)),
    "femnist": Look((0.9637,), (0.1592,)),  # black on white
}


def image_pool(
    request: Request, path: Path, x: Array, y: Array, num_train: int | None, owners: Array | None = None
) -> Pool:
    """A named set's images, checked against its card; `path` is the file to blame."""
    card = SOURCES[request.name]
    shape = (card.input_shape[0], request.resize, request.resize) if request.resize else card.input_shape
    if x.shape[1:] != shape:
        raise damaged(path, f"its images have the shape {x.shape[1:]}", f"{shape}: channels, height, width")
    if not len(x) or len(x) != len(y):
        raise damaged(path, f"{len(x)} images and {len(y)} labels", "as many labels as images, and at least one")
    if y.min() < 0 or y.max() >= card.num_classes:
        raise damaged(path, f"its labels go from {y.min()} to {y.max()}", f"0 to {card.num_classes - 1}")
    view = make_view(request, x.shape[1:], LOOKS[request.name])
    return Pool(request.name, x, y.astype(np.int64), card.num_classes, num_train, owners, view)


def make_view(request: Request, shape: tuple[int, ...], look: Look) -> View:
    """Padding by 4 and flips where the set is augmented; with `crop`, random squares of that side instead of padding.

    Without augmentation there is nothing random, so that a crop makes no sense.
    """
    augments = look.augments if request.augment is None else request.augment
    crop = request.crop
    if crop is not None and request.augment is False:
        raise SparsonaError(
            f"crop {crop} without augmentation",
            expected="augmentation with a crop, which is random in training",
            mend="leave out one of them; `resize` changes the size without chance",
        )
    if crop is not None and crop > min(shape[1:]):
        raise SparsonaError(
            f"crop {crop} of images of {shape[1]} x {shape[2]}",
            expected=f"at most {min(shape[1:])}",
            mend="resize them",
        )
    return View(look.mean, look.std, PAD if augments and crop is None else 0, crop, flip=augments)


def channels_first(x: Array) -> Array:
    """Bytes (N, height, width) or (N, height, width, 1 or 3) as (N, channels, height, width)."""
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[-1] in (1, 3) and x.shape[1] not in (1, 3):
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    return x
