"""Images as bytes, and the view that a model has of them: normalisation, crops, flips."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sparsona.core.errors import SparsonaError
from sparsona.data.card import Normalisation, SourceCard
from sparsona.data.catalog import get
from sparsona.data.pool import Array, Pool, View
from sparsona.data.readers.files import Request, damaged

PAD = 4


def image_pool(
    request: Request, path: Path, x: Array, y: Array, num_train: int | None, owners: Array | None = None
) -> Pool:
    """A named set's images, checked against the catalog; `path` is the file that errors name."""
    card = get(request.name)
    shape = (card.input_shape[0], request.resize, request.resize) if request.resize else card.input_shape
    if x.shape[1:] != shape:
        raise damaged(path, f"its images have the shape {x.shape[1:]}", f"{shape}: channels, height, width")
    if not len(x) or len(x) != len(y):
        raise damaged(path, f"{len(x)} images and {len(y)} labels", "as many labels as images, and at least one")
    if y.min() < 0 or y.max() >= card.num_classes:
        raise damaged(path, f"its labels go from {y.min()} to {y.max()}", f"0 to {card.num_classes - 1}")
    view = make_view(request, x.shape[1:], card)
    return Pool(request.name, x, y.astype(np.int64), card.num_classes, num_train, owners, view)


def make_view(request: Request, shape: tuple[int, ...], card: SourceCard | None = None) -> View:
    """Padding by 4 and flips where the set is augmented; with `crop`, random squares of that side instead of padding.

    A crop without augmentation is refused: a crop is random in training. Without a card, as for the user's own images,
    there is no normalisation, and augmentation only on request.
    """
    normalisation = (card.normalisation if card else None) or Normalisation()
    augments = bool(card and card.augments) if request.augment is None else request.augment
    crop = request.crop
    if crop is not None and request.augment is False:
        raise SparsonaError(
            f"crop {crop} without augmentation",
            expected="augmentation with a crop, which is random in training",
            hint="leave out one of them; `resize` changes the size without randomness",
        )
    if crop is not None and crop > min(shape[1:]):
        raise SparsonaError(
            f"crop {crop} of images of {shape[1]} x {shape[2]}",
            expected=f"at most {min(shape[1:])}",
            hint="resize them",
        )
    return View(normalisation.mean, normalisation.std, PAD if augments and crop is None else 0, crop, flip=augments)


def channels_first(x: Array) -> Array:
    """Bytes (N, height, width) or (N, height, width, 1 or 3) as (N, channels, height, width)."""
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[-1] in (1, 3) and x.shape[1] not in (1, 3):
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    return x
