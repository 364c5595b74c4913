"""Arrays saved with numpy: the user's own, or a published set in that form."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from sparsona.core.errors import SparsonaError
from sparsona.core.packing import Packing
from sparsona.data.partition.by_owner import number_owners
from sparsona.data.pool import Array, Pool, View
from sparsona.data.readers.files import Request, damaged, find
from sparsona.data.readers.images import channels_first, image_pool, make_view

MAX_TOKENS = 10_000_000  # each has a vector in the model
NOT_SAVED = (ValueError, OSError, EOFError, AttributeError, TypeError, MemoryError, zipfile.BadZipFile, zlib.error)
EXPECTED = (
    "x and y; or x_train, y_train, x_test and y_test; and perhaps owners, or owners_train and owners_test; for several "
    "inputs x_NAME in place of x, and x_NAME_train in place of x_train"
)


def read_npy(path: Path) -> Array:
    """The one array of a file."""
    try:
        with path.open("rb") as file:
            return np.lib.format.read_array(file, allow_pickle=False)
    except (ValueError, OSError, EOFError, MemoryError) as error:
        raise damaged(path, error, "an array saved with numpy.save") from error


def read_arrays(request: Request) -> Pool:
    """The user's own examples: images as bytes with channels first or last, tokens, or any numbers.

    Whole numbers (N, length) whose labels have the same shape are tokens; anything else becomes float32 unchanged. They
    are checked as `federate` checks arrays from Python.
    """
    from sparsona.data import validate  # needs torch

    path = request.path
    assert path is not None
    x, y, num_train, owners, packing = _read(path)
    where = f"'{path}': "
    if not x.size:
        raise SparsonaError(f"{where}x has shape {x.shape}", expected="at least one number in each example")
    has_tokens = (
        request.task in ("auto", "classification")
        and x.dtype.kind in "iu"
        and y.dtype.kind in "iu"
        and y.ndim == 2
        and x.shape == y.shape
    )
    if has_tokens and (highest := max(int(x.max()), int(y.max()))) >= MAX_TOKENS:
        raise SparsonaError(f"{where}a token {highest}", expected=f"token numbers below {MAX_TOKENS:,}")
    is_image = x.dtype == np.uint8 and x.ndim in (3, 4) and not has_tokens
    inputs = validate.check_inputs(channels_first(x) if is_image else x, where, as_bytes=is_image, as_tokens=has_tokens)
    task = validate.find_task([y], request.task)
    labels = validate.check_targets(y, where, as_tokens=has_tokens, task=request.task)
    num_classes = validate.count_outputs(labels, request.num_classes, inputs, task)
    if is_image:
        view = make_view(request, tuple(inputs.shape[1:]))
    else:
        view = View()
        _refuse_views(request, path)
    y = labels.numpy()
    if y.dtype != np.float32:
        y = y.astype(np.int32 if has_tokens else np.int64)
    return Pool(path.stem, inputs.numpy(), y, num_classes, num_train, owners, view, task=task, packing=packing)


def read_pair(path: Path) -> tuple[Any, Array]:
    """Examples to evaluate a model on: x and y of a file, or x_test and y_test where it has these; several inputs as a
    dict."""
    import torch

    x, y, num_train, _, packing = _read(path)
    x, y = x[num_train or 0 :], y[num_train or 0 :]
    if packing is None:
        return x, y
    found = packing.unpack(torch.from_numpy(x))
    assert isinstance(found, dict), "inputs in a file have names"
    return {name: value.numpy() for name, value in found.items()}, y


def read_published(request: Request) -> Pool | None:
    """A published set of images that was saved as NAME.npz; it has the published size."""
    paths = None if request.resize else find(request.places, f"{request.name}.npz")
    if paths is None:
        return None
    path = paths[0]
    x, y, num_train, owners, _ = _read(path)
    if x.dtype != np.uint8 or y.ndim != 1 or y.dtype.kind not in "iu":
        raise damaged(
            path, f"x is {x.dtype} and y is {y.dtype} of shape {y.shape}", "images as bytes, and their classes"
        )
    return image_pool(request, path, channels_first(x), y, num_train, owners)


def _read(path: Path) -> tuple[Array, Array, int | None, Array | None, Packing | None]:
    if not path.is_file():
        raise SparsonaError(
            f"'{path}' does not exist",
            expected=f"a file saved with numpy.savez that has {EXPECTED}",
            hint=f"from here it would be '{path.resolve()}'",
        )
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as saved:
            arrays = {name: saved[name] for name in saved.files}
        if junk := [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]:
            raise ValueError(f"'{junk[0]}' is not an array")
    except NOT_SAVED as error:
        raise damaged(path, error, "a file saved with numpy.savez, without objects in it") from error
    packing = _pack_inputs(arrays, path)
    parts = [""] if "x" in arrays else ["_train", "_test"]
    if absent := [name for part in parts for name in (f"x{part}", f"y{part}") if name not in arrays]:
        raise damaged(path, f"it lacks '{absent[0]}'", EXPECTED)
    for part in parts:
        x, y = arrays[f"x{part}"], arrays[f"y{part}"]
        if not x.ndim or not y.ndim or len(x) != len(y) or not len(x):
            raise damaged(path, f"x{part} has shape {x.shape} and y{part} {y.shape}", "as many labels as examples")
        for key, array in (("x", x), ("y", y)):
            if array.shape[1:] != arrays[f"{key}{parts[0]}"].shape[1:]:
                raise damaged(path, f"{key}{part} has rows of shape {array.shape[1:]}", f"those of {key}_train")
    x, y = (np.concatenate([arrays[f"{key}{part}"] for part in parts]) for key in "xy")
    owners = None
    if each := [array for part in parts if (array := arrays.get(f"owners{part}")) is not None]:
        shapes = [array.shape for array in each]
        owners = np.concatenate([array.reshape(-1) for array in each])
        if shapes != [(len(arrays[f"x{part}"]),) for part in parts] or owners.dtype.kind not in "iuUS":
            raise damaged(path, f"owners is {owners.dtype} of shape {shapes}", "a number or name per example")
        owners = number_owners(owners)
    return x, y, len(arrays["x_train"]) if len(parts) == 2 else None, owners, packing


def _pack_inputs(arrays: dict[str, Array], path: Path) -> Packing | None:
    """Several inputs in a file, x_NAME or x_NAME_train and x_NAME_test, packed into x or x_train and x_test; None where
    there is one."""
    if "x" in arrays or "x_train" in arrays or "x_test" in arrays:
        return None
    packing = None
    for part in [""] if "y" in arrays else ["_train", "_test"]:
        names = [
            name for name in arrays if name.startswith("x_") and name.endswith(part) and name not in ("x_", "x" + part)
        ]
        inputs = {name[2 : len(name) - len(part)]: arrays[name] for name in names}
        if inputs:
            from sparsona.data.packing import pack  # needs torch

            rows, packing = pack(inputs, f"'{path}', " + (f"{part[1:]}, " if part else ""), packing)
            arrays[f"x{part}"] = rows.numpy()
    return packing


def _refuse_views(request: Request, path: Path) -> None:
    if request.crop is not None or request.augment:
        raise SparsonaError(
            f"'{path}' cannot be cropped or augmented", expected="images as bytes, (N, channels, height, width)"
        )
