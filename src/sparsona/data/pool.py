"""A data set as it was read, before it is shared out among clients. Needs numpy alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sparsona.core.errors import SparsonaError
from sparsona.core.packing import Packing
from sparsona.core.tokens import NUM_SPECIAL
from sparsona.data.names import Names

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class View:
    """How stored examples become a model's inputs. `View()` leaves them as they are.

    Stored bytes are divided by 255. In training, a square is cut out of the padded image at random; in testing, it is
    cut from the middle, or is the whole image in its size.

    Args:
        mean: For each channel, subtracted from values from 0 to 1.
        std: For each channel, the divisor after that.
        pad: Black pixels added on each side, in training.
        crop: The side of the square; None: the image's own size.
        flip: Whether images are mirrored at random, in training.
        test_resize: Whether the whole image is resized to the square in testing, in place of a cut from the middle.

    Example:
        >>> import sparsona as sp
        >>> sp.View(mean=(0.5,), std=(0.25,), pad=4, flip=True).augments
        True
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    pad: int = 0
    crop: int | None = None
    flip: bool = False
    test_resize: bool = field(default=False, repr=False)  # the text is part of the digests of federations

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not all(math.isfinite(value) for value in (*self.mean, *self.std)):
            raise SparsonaError(
                f"mean {self.mean} and std {self.std}", expected="a finite number of each for every channel"
            )
        if not all(spread > 0 for spread in self.std):
            raise SparsonaError(
                f"std {self.std}", expected="more than 0 for every channel", hint="leave out mean and std"
            )
        if self.pad < 0 or (self.crop is not None and self.crop < 1):
            raise SparsonaError(f"pad {self.pad} and crop {self.crop}", expected="pad 0 or more, crop 1 or more")

    def check(self, stored: tuple[int, ...]) -> None:
        """Raise an error if the view does not apply to examples of this shape."""
        if self == View():
            return
        if len(stored) != 3 or len(self.mean) not in (0, stored[0]) or (self.crop or 0) > min(stored[1:]):
            raise SparsonaError(
                f"{self} of examples of shape {stored}",
                expected="images (channels, height, width) at least as large as the crop, and a mean for each channel",
            )

    @property
    def augments(self) -> bool:
        """Whether an example is transformed at random each time it is trained on."""
        return bool(self.pad or self.flip or self.crop is not None)

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a model's input, given that of a stored example."""
        return stored if self.crop is None else (*stored[:-2], self.crop, self.crop)


@dataclass(frozen=True, eq=False)
class Pool:
    """All examples, which of them were published for testing, and whose they are.

    `x` holds images as uint8 (N, channels, height, width), tokens as int32 (N, length), or anything as float32. `y`
    holds one class per example, int64 (N,); or, where the next token is predicted at each position, int32 (N, length)
    with PAD where nothing is predicted. Both may be mapped files. `num_train`: the first so many examples are the
    published training set and the others the published test set; None: there is no published split. `owners`: the
    number of the person (writer, user, speaker) each example comes from, int64 (N,), counted from 0; -1: unknown.
    `overlap`: an owner's examples are in order, and each has content in common with so many that follow it (windows
    that slide over a text): a model trained on one has seen the others in part. `task`: as in Federation. `packing`: a
    row of `x` is several inputs, packed. `owner_names` and `class_names` are the names of owners 0, 1, ... and of
    classes 0, 1, ...; None: they have none. `owner_numbers`: what owners 0, 1, ... without names were numbered by the
    user.
    """

    name: str
    x: Array
    y: Array
    num_classes: int
    num_train: int | None = None
    owners: Array | None = None
    view: View = field(default_factory=View)
    overlap: int = 0
    task: str = "auto"
    packing: Packing | None = None
    owner_names: Names = None
    class_names: Names = None
    owner_numbers: Array | None = None

    def __post_init__(self) -> None:
        self.view.check(self.x.shape[1:])

    @property
    def has_tokens(self) -> bool:
        """Whether inputs are tokens: indices into a vocabulary, which are never scaled."""
        return self.x.dtype == np.int32


def has_scored_token(y: Array) -> npt.NDArray[np.bool_]:
    """Which sequences of targets hold one that is scored: neither padding, nor an end, nor an unknown word."""
    if y.dtype.kind == "f":  # of a regression every target is scored
        return np.ones(len(y), dtype=bool)
    return np.asarray((y >= NUM_SPECIAL).any(axis=1))
