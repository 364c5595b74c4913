"""What the catalog says of a data set. Free of torch and numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Download:
    """One file or archive to download, and what to keep of it.

    `address` is a web address; or npm:NAME@VERSION or debian:NAME, a package whose address and digest that system's
    own tool reports. `files` are kept by name, wherever they are in the archive (or the download is that file itself),
    each with its MD5 sum ("": covered by the sum of the archive); `tree` is a folder of the archive that is kept whole.
    """

    address: str
    files: Mapping[str, str] = field(default_factory=dict)
    md5: str = ""
    tree: str = ""


Mirror = tuple[Download, ...]  # all of its downloads are needed


@dataclass(frozen=True)
class Normalisation:
    """Mean and standard deviation of the training pixels, from 0 to 1, by channel."""

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


@dataclass(frozen=True)
class SourceCard:
    """A data set: what it is, where it comes from, which files it is read from and how.

    `num_examples`, `num_classes` and `input_shape` are those of the whole set as published, read without options.
    `num_train` of them were published to train on (None: there is no published test set). `readers` are tried in
    order, each a module of `readers/` and a function in it. `files` has a line for each accepted format, `needed` the
    files of each as patterns (all of one format, each perhaps with .gz), `folders` the names of the subfolders that are
    searched, `options` those of `read` that apply to the set. `mirrors` are tried in
    order (none: the set cannot be downloaded); `extras` are downloaded too, and may be missing. `is_natural`: clients
    are the owners of the data. `normalisation` is that of images stored as bytes; `augments`: training crops and
    flips them unless `augment=False`.
    """

    name: str
    title: str
    summary: str
    num_examples: int
    num_classes: int
    input_shape: tuple[int, ...]
    origin: str
    licence: str
    readers: tuple[str, ...]
    num_train: int | None = None
    default_model: str = "digits-cnn"
    files: tuple[str, ...] = ()
    needed: tuple[tuple[str, ...], ...] = ()
    folders: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    address: str = ""
    mirrors: tuple[Mirror, ...] = ()
    extras: Mirror = ()
    is_natural: bool = False
    normalisation: Normalisation | None = None
    augments: bool = False

    @property
    def has_tokens(self) -> bool:
        """Whether examples are sequences of tokens."""
        return len(self.input_shape) == 1


@dataclass(frozen=True)
class OwnData:
    """A format of the user's own data: `form` is how it is written in place of a name."""

    form: str
    summary: str
    readers: tuple[str, ...]
    options: tuple[str, ...]
