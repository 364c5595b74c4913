"""MNIST and its relatives: idx files, plain or gzipped, and the writers that QMNIST found."""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sparsona.core.errors import SparsonaError
from sparsona.data.pool import Array, Pool
from sparsona.data.readers.decoded import decode_once
from sparsona.data.readers.files import Request, damaged, find
from sparsona.data.readers.images import image_pool

CHUNK = 1 << 20
# MNIST and Fashion-MNIST have files of the same names: digests of the labels to train on.
KNOWN = {"c142f118bb9591d78225d991fff0988b": "mnist", "372ac19362f2425103e5082d13e71e66": "fashion-mnist"}
TYPES: dict[int, np.dtype[Any]] = {0x08: np.dtype(">u1"), 0x0C: np.dtype(">i4")}


def read_idx(path: Path, num_dimensions: int) -> Array:
    """The array of an idx file: two zero bytes, type, number of dimensions, sizes, values."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            zeros, kind, dimensions = int.from_bytes(file.read(2)), *file.read(2)
            if zeros or kind not in TYPES or dimensions != num_dimensions:
                raise damaged(path, "it does not begin as an idx file", f"an idx file of {num_dimensions} dimensions")
            shape = tuple(int(size) for size in np.frombuffer(file.read(4 * dimensions), ">u4"))
            wanted = math.prod(shape) * TYPES[kind].itemsize
            # Neither all there is (a small .gz may hold any number of zeros) nor at once what the head promises.
            values = bytearray()
            while len(values) <= wanted and (chunk := file.read(min(CHUNK, wanted + 1 - len(values)))):
                values += chunk
    except (EOFError, OSError, ValueError, zlib.error) as error:
        raise damaged(path, error) from error
    if len(shape) != dimensions or len(values) != wanted:
        raise damaged(
            path, f"{len(values):,} bytes of values {'or more ' * (len(values) > wanted)}instead of {wanted:,}"
        )
    return np.frombuffer(values, TYPES[kind]).reshape(shape)


def read_mnist(request: Request) -> Pool | None:
    """MNIST, with writers as owners if QMNIST's label files are there; or Fashion-MNIST, which has none."""
    parts = _find_parts(request, "train", "t10k")
    if parts is None:
        return None
    x, y, num_train = _read_parts(parts)
    digest = hashlib.blake2b(y[:num_train].astype(np.uint8).tobytes(), digest_size=16).hexdigest()
    if (other := KNOWN.get(digest, request.name)) != request.name:
        raise SparsonaError(
            f"'{parts[1]}' is that of {other}",
            expected=f"{request.name}, whose files have the same names",
            hint="keep each in a folder called like it, and name the one that has both (--data-dir)",
        )
    owners = _read_writers(request, y, num_train) if request.name == "mnist" else None
    return image_pool(request, parts[0], x, y, num_train, owners)


def read_emnist(request: Request) -> Pool | None:
    """EMNIST, decoded once: it is published with rows and columns exchanged, and the letters counted from 1."""
    parts = _find_parts(request, f"{request.name}-train", f"{request.name}-test")
    if parts is None:
        return None

    def decode(new: Callable[..., Array]) -> None:
        x, y, num_train = _read_parts(parts)
        new("x", np.uint8, x.shape)[:] = x.swapaxes(2, 3)
        new("y", np.int64, y.shape)[:] = y - 1 if request.name == "emnist-letters" else y
        new("num_train", np.int64, (1,))[:] = num_train

    arrays = decode_once(request.name, {}, parts[0].parent, parts, decode)
    return image_pool(request, parts[1], arrays["x"], arrays["y"], int(arrays["num_train"][0]))


def _find_parts(request: Request, train: str, test: str) -> list[Path] | None:
    ends = ("images-idx3-ubyte", "labels-idx1-ubyte")
    return find(request.places, *(f"{part}-{end}" for part in (train, test) for end in ends))


def _read_parts(parts: list[Path]) -> tuple[Array, Array, int]:
    images, labels, test_images, test_labels = parts
    train, test = read_idx(images, 3), read_idx(test_images, 3)
    if train.shape[1:] != test.shape[1:]:
        raise damaged(test_images, f"images of {test.shape[1:]} beside {train.shape[1:]} in '{images.name}'")
    counts = []
    for pictures, path in ((train, labels), (test, test_labels)):
        counts.append(read_idx(path, 1).astype(np.int64))
        if len(counts[-1]) != len(pictures):
            raise damaged(path, f"{len(counts[-1]):,} labels for {len(pictures):,} images")
    return np.concatenate([train, test])[:, None], np.concatenate(counts), len(train)


def _read_writers(request: Request, y: Array, num_train: int) -> Array | None:
    """Who wrote each digit, numbered from 0; no writer is in both parts."""
    paths = find(request.places, "qmnist-train-labels-idx2-int", "qmnist-test-labels-idx2-int")
    if paths is None:
        return None
    tables = []
    for path, labels in zip(paths, (y[:num_train], y[num_train:]), strict=True):
        table = read_idx(path, 2)[: len(labels)]  # QMNIST has 50,000 more test digits than MNIST
        if table.shape[1] < 3 or not np.array_equal(table[:, 0], labels):
            raise damaged(path, "its labels are not those of the MNIST beside it", "QMNIST's labels of the same digits")
        tables.append(table[:, 2])
    return np.unique(np.concatenate(tables), return_inverse=True)[1].astype(np.int64)
