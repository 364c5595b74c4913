"""Data sets by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.data import SOURCES
from sparsona.data.pool import Pool
from sparsona.data.readers import cifar, idx, leaf, npz, pictures, stackoverflow, text
from sparsona.data.readers.files import Listen, Request, find, list_places
from sparsona.data.readers.images import LOOKS
from sparsona.data.readers.landmarks import read_landmarks

if TYPE_CHECKING:
    from torch import Tensor

# Far more than anybody has trained on: beyond it is a slip, which would be told by a lack of memory or not at all.
MOST = {"sequence_length": 10_000, "vocabulary_size": 10_000_000, "resize": 4_096}
# One's own data: how it is written, and which options it can use.
OWN = {"arrays": ("crop", "augment"), "folder": ("resize", "crop", "augment")}

READERS: dict[str, tuple[Callable[[Request], Pool | None], ...]] = {
    "cifar10": (cifar.read_cifar,),
    "cifar100": (cifar.read_cifar,),
    "mnist": (idx.read_mnist,),
    "fashion-mnist": (idx.read_mnist,),
    "emnist-letters": (idx.read_emnist,),
    "emnist-byclass": (idx.read_emnist,),
    "femnist": (leaf.read_femnist,),
    "tiny-imagenet": (pictures.read_tiny_imagenet,),
    "shakespeare": (text.read_shakespeare, leaf.read_shakespeare),
    "shakespeare-words": (text.read_shakespeare,),
    "stackoverflow": (stackoverflow.read_stackoverflow,),
    "gldv2": (read_landmarks,),
}


def read(
    spec: str,
    folders: Sequence[Path] = (),
    *,
    sequence_length: int | None = None,
    vocabulary_size: int | None = None,
    resize: int | None = None,
    crop: int | None = None,
    augment: bool | None = None,
    listen: Listen | None = None,
) -> Pool:
    """A data set: a name of `SOURCES`, `arrays:PATH.npz` or `folder:PATH`.

    Its files are looked for in each folder, there first in a subfolder called like the set, and then in the cache.
    Text comes in sequences of `sequence_length` (20) with the `vocabulary_size` (10,000) most frequent words. Pictures
    are made squares of side `resize`; in training, random squares of side `crop` are cut out of them. `augment` turns
    chance off or on, where the set is not augmented by default. An option that a set cannot use is an error.
    `listen(done, total)` hears of the progress (total 0: unknown) if the set must be decoded first.
    """
    name, _, path = spec.partition(":")
    if name not in SOURCES and (name not in OWN or not path):
        raise unknown_name("data set", spec, [*SOURCES, "arrays:PATH.npz", "folder:PATH"])
    numbers = {"sequence_length": sequence_length, "vocabulary_size": vocabulary_size, "resize": resize, "crop": crop}
    given = [key for key, value in numbers.items() if value is not None] + ["augment"] * bool(augment)
    can_use = OWN[name] if name in OWN else SOURCES[name].options
    if useless := [key for key in given if key not in can_use]:
        raise SparsonaError(
            f"'{useless[0]}' with the data set '{spec}'",
            expected=f"only what it can use: {', '.join(can_use) or 'no option'}",
            mend=f"leave out '{useless[0]}'",
        )
    if wrong := [key for key, value in numbers.items() if value is not None and value < 1]:
        raise SparsonaError(f"{wrong[0]} is {numbers[wrong[0]]}", expected="1 or more")
    if wrong := [key for key, most in MOST.items() if (numbers[key] or 0) > most]:
        raise SparsonaError(f"{wrong[0]} is {numbers[wrong[0]]}", expected=f"at most {MOST[wrong[0]]:,}")
    if path and name in SOURCES:
        raise unknown_name("data set", spec, [*SOURCES, "arrays:PATH.npz", "folder:PATH"])
    places = list_places(SOURCES[name].folders, folders) if name in SOURCES else ()
    request = Request(name, places, sequence_length, vocabulary_size, resize, crop, augment, listen)
    if name == "digits":
        return _read_digits()
    if name in OWN:
        return {"arrays": npz.read_arrays, "folder": pictures.read_folder}[name](request, Path(path).expanduser())
    for reader in READERS[name]:
        if (pool := reader(request)) is not None:
            return pool
    if name in LOOKS and not resize and (saved := find(places, f"{name}.npz")):
        return npz.read_named(request, saved[0])
    raise _absent(name, places)


def load(name: str) -> tuple[Tensor, Tensor]:
    """Inputs and labels of the embedded digits: float32 (N, channels, height, width) from 0 to 1, and int64 (N)."""
    import torch

    pool = read(name)
    if pool.x.dtype != np.float32:
        raise SparsonaError(f"'{name}' as tensors", expected="digits", mend="use sparsona.data.read.read")
    return torch.from_numpy(pool.x), torch.from_numpy(pool.y)


def _read_digits() -> Pool:
    with (
        resources.files("sparsona.data").joinpath("digits.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        images, labels = arrays["images"], arrays["labels"]
    # A pixel counts the ink in a 4 x 4 square of the scan: 16 is all black.
    x = images[:, None].astype(np.float32) / np.float32(16)
    return Pool("digits", x, labels.astype(np.int64), SOURCES["digits"].num_classes)


def _absent(name: str, places: Sequence[Path]) -> SparsonaError:
    card = SOURCES[name]
    forms = "\n            or ".join(card.files)
    looked = "\n            ".join(f"'{place}'" for place in places)
    get = f"`sparsona data get {name}` downloads it" if card.is_obtainable else f"see {card.address}"
    return SparsonaError(
        f"the files of '{name}' are not there; they were looked for in\n            {looked}",
        expected=forms,
        mend=f"{get}; or name the folder where they are (--data-dir)",
    )
