"""Arrays that somebody saved with numpy: one's own, or a published set in that form."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from sparsona.core.errors import SparsonaError
from sparsona.data.pool import Array, Pool, View
from sparsona.data.readers.files import Request, damaged
from sparsona.data.readers.images import Look, channels_first, image_pool, make_view

EXPECTED = "x and y; or x_train, y_train, x_test and y_test; and perhaps owners, or owners_train and owners_test"


def read_arrays(request: Request, path: Path) -> Pool:
    """One's own examples: images as bytes with channels first or last, tokens, or any numbers.

    Whole numbers (N, length) whose labels are as many are tokens; all that is neither becomes float32 as it is.
    """
    x, y, num_train, owners = _read(path)
    if y.dtype.kind not in "iu" or y.ndim not in (1, 2) or (y.size and y.min() < 0):
        raise SparsonaError(
            f"'{path}': y is {y.dtype} of shape {y.shape}", expected="whole numbers from 0, one per class"
        )
    view = View()
    if x.dtype.kind in "iu" and y.ndim == 2 and x.shape == y.shape:
        x, y = x.astype(np.int32), y.astype(np.int32)
        _refuse_views(request, path)
        return Pool(path.stem, x, y, int(max(x.max(), y.max())) + 1, num_train, owners, view)
    if y.ndim != 1 or x.dtype.kind not in "fiub":
        raise SparsonaError(
            f"'{path}': x is {x.dtype} of shape {x.shape} and y has shape {y.shape}",
            expected="numbers, and one label per example; or tokens, and the next token at each position",
        )
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        x = channels_first(x)
        view = make_view(request, x.shape[1:], Look())
    else:
        x = x.astype(np.float32)
        _refuse_views(request, path)
    return Pool(path.stem, x, y.astype(np.int64), int(y.max()) + 1, num_train, owners, view)


def read_named(request: Request, path: Path) -> Pool:
    """A named set of images that somebody saved in this form."""
    x, y, num_train, owners = _read(path)
    if x.dtype != np.uint8 or y.ndim != 1 or y.dtype.kind not in "iu":
        raise damaged(
            path, f"x is {x.dtype} and y is {y.dtype} of shape {y.shape}", "images as bytes, and their classes"
        )
    return image_pool(request, path, channels_first(x), y, num_train, owners)


def _read(path: Path) -> tuple[Array, Array, int | None, Array | None]:
    if not path.is_file():
        raise SparsonaError(
            f"'{path}' does not exist",
            expected=f"a file saved with numpy.savez that has {EXPECTED}",
            mend=f"from here it would be '{path.resolve()}'",
        )
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as saved:
            arrays = {name: saved[name] for name in saved.files}
    except (ValueError, OSError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise damaged(path, error, "a file saved with numpy.savez, without objects in it") from error
    parts = [""] if "x" in arrays else ["_train", "_test"]
    if absent := [name for part in parts for name in (f"x{part}", f"y{part}") if name not in arrays]:
        raise damaged(path, f"it lacks '{absent[0]}'", EXPECTED)
    for part in parts:
        x, y = arrays[f"x{part}"], arrays[f"y{part}"]
        if not x.ndim or not y.ndim or len(x) != len(y) or not len(x):
            raise damaged(path, f"x{part} has shape {x.shape} and y{part} {y.shape}", "as many labels as examples")
        if x.shape[1:] != arrays[f"x{parts[0]}"].shape[1:]:
            raise damaged(path, f"x{part} has examples of shape {x.shape[1:]}", "the same shape as in x_train")
    x, y = (np.concatenate([arrays[f"{key}{part}"] for part in parts]) for key in "xy")
    owners = None
    if all(f"owners{part}" in arrays for part in parts):
        owners = np.concatenate([arrays[f"owners{part}"] for part in parts])
        if owners.shape != (len(x),) or owners.dtype.kind not in "iuUS":
            raise damaged(path, f"owners is {owners.dtype} of shape {owners.shape}", "a number or name per example")
        names, numbers = np.unique(owners, return_inverse=True)
        num_unknown = int((names < 0).sum()) if owners.dtype.kind == "i" else 0
        owners = np.maximum(numbers - num_unknown, -1).astype(np.int64)
    return x, y, len(arrays["x_train"]) if len(parts) == 2 else None, owners


def _refuse_views(request: Request, path: Path) -> None:
    if request.crop is not None or request.augment:
        raise SparsonaError(
            f"'{path}' cannot be cropped or augmented", expected="images as bytes, (N, channels, height, width)"
        )
