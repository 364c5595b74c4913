"""CIFAR-10 and CIFAR-100: the published pickles and binary files, and lossless WebP sheets."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sparsona.data.pool import Array, Pool
from sparsona.data.readers.decoded import decode_once
from sparsona.data.readers.files import Request, damaged, find
from sparsona.data.readers.images import image_pool
from sparsona.data.readers.npz import read_npy
from sparsona.data.readers.pictures import open_picture

SHAPE = (3, 32, 32)
SIZE = 3 * 32 * 32
COLUMNS = 25  # pictures side by side in a sheet
BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
FILES = {"cifar10": BATCHES, "cifar100": ("train", "test")}
RECORDS = {"cifar10": (10_000,) * 6, "cifar100": (50_000, 10_000)}  # in each of the binary files


def read_cifar(request: Request) -> Pool | None:
    """Either set in any form; the last file, or the last sixth of the sheets, is the test set."""
    names = FILES[request.name]
    if paths := find(request.places, *(f"{name}.bin" for name in names)):
        counts = RECORDS[request.name]
        parts = (_read_binary(path, request.name, count) for path, count in zip(paths, counts, strict=True))
    elif paths := find(request.places, *names):
        parts = (_read_pickle(path, request.name) for path in paths)
    elif paths := find(request.places, "shape.npy", "labels.npy", "sheet-0000.webp"):
        return _read_sheets(request, paths[0].parent)
    else:
        return None
    # One array for all, at least as large as needed: the parts and their concatenation would need twice the memory.
    x = np.empty((sum(path.stat().st_size for path in paths) // SIZE, SIZE), np.uint8)
    labels: list[Array] = []
    start = done = 0
    for path, (pixels, found) in zip(paths, parts, strict=True):
        start, done = done, done + len(pixels)
        if done > len(x):
            raise damaged(path, f"{len(pixels):,} images", "as many as fit into the file")
        x[start:done] = pixels
        labels.append(found.astype(np.int64))  # not a view, which would keep the pixels
    return image_pool(request, paths[0], x[:done].reshape(-1, *SHAPE), np.concatenate(labels), start)


def _read_binary(path: Path, name: str, count: int) -> tuple[Array, Array]:
    """Records of the label (CIFAR-100: coarse and fine) and the three colour planes."""
    num_labels = 1 if name == "cifar10" else 2
    values = np.fromfile(path, np.uint8)
    if len(values) != count * (num_labels + SIZE):
        raise damaged(path, f"{len(values):,} bytes", f"{count * (num_labels + SIZE):,}: {count:,} images as published")
    records = values.reshape(-1, num_labels + SIZE)
    return records[:, num_labels:], records[:, num_labels - 1]


class _Unpickler(pickle.Unpickler):
    """Makes arrays of what CIFAR's pickles hold and nothing else: a pickle may call any function."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {
            ("multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
            ("numpy", "ndarray"): np.ndarray,
            # numpy warns of the published files, which say 0 for False.
            ("numpy", "dtype"): lambda kind, align, copy: np.dtype(kind, align=bool(align), copy=bool(copy)),
            ("_codecs", "encode"): _encode,
            ("numeric", "_frombuffer"): _from_buffer,
        }
        place = module.rpartition(".")[2] if module.startswith("numpy") else module
        if (place, name) not in allowed:
            raise pickle.UnpicklingError(f"it uses {module}.{name}, which a data set does not need")
        return allowed[place, name]


def _encode(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes into the old form of a pickle."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it uses the encoding {encoding}")
    return text.encode("latin1")


def _from_buffer(buffer: bytes | bytearray, dtype: Any, shape: tuple[int, ...], order: Any) -> Array:
    """How numpy writes arrays into the newest form of a pickle."""
    return np.frombuffer(buffer, dtype).reshape(shape, order=order)


def _read_pickle(path: Path, name: str) -> tuple[Array, Array]:
    """A dictionary with `data` (N, 3072) and `labels` or `fine_labels`, its keys text or bytes."""
    try:
        with path.open("rb") as file:
            content = _Unpickler(file, encoding="bytes").load()
        content = {key.decode() if isinstance(key, bytes) else key: value for key, value in content.items()}
        x = content["data"]
        y = np.asarray(content["labels" if name == "cifar10" else "fine_labels"])
        if (
            not isinstance(x, np.ndarray)
            or x.dtype != np.uint8
            or x.shape != (len(y), SIZE)
            or y.dtype.kind not in "iu"
        ):
            raise ValueError("its arrays have other types or shapes")
    except Exception as error:  # a damaged pickle can raise anything
        raise damaged(path, repr(error), f"a pickle as published, with data (N, {SIZE}) and labels") from error
    return x, y


def _read_sheets(request: Request, folder: Path) -> Pool:
    """Pictures row by row in large ones, 25 to a row, in the order of labels.npy."""
    paths = sorted(folder.glob("sheet-*.webp"))
    shape, labels = read_npy(folder / "shape.npy"), read_npy(folder / "labels.npy")
    if labels.dtype.kind not in "iu" or shape.tolist() != [labels.size, 32, 32, 3] or labels.ndim != 1:
        found = f"{shape.tolist()}, beside {labels.dtype} labels of shape {labels.shape}"
        raise damaged(folder / "shape.npy", found, "[N, 32, 32, 3], and N whole numbers in labels.npy")

    def decode(new: Callable[..., Array]) -> None:
        x, done = new("x", np.uint8, (len(labels), *SHAPE)), 0
        for path in paths:
            sheet = open_picture(path)
            if sheet.shape[0] % 32 or sheet.shape[1] != 32 * COLUMNS:
                raise damaged(path, f"a sheet of {sheet.shape[1]} x {sheet.shape[0]}", f"{COLUMNS} pictures in a row")
            tiles = sheet.reshape(-1, 32, COLUMNS, 32, 3).transpose(0, 2, 4, 1, 3).reshape(-1, *SHAPE)[: len(x) - done]
            x[done : done + len(tiles)] = tiles
            done += len(tiles)
            request.report(done, len(x))
        if done != len(x):
            raise damaged(folder, f"sheets of {done:,} pictures", f"{len(x):,}, as shape.npy says")

    x = decode_once(request.name, {"count": len(labels)}, folder, paths, decode)["x"]
    return image_pool(request, folder / "labels.npy", x, labels, len(x) - len(x) // 6)
