"""Arrays from the user, checked and converted to the types in which data is stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsona.core.errors import SparsonaError
from sparsona.core.tokens import NUM_SPECIAL
from sparsona.data.pool import Array


def check_inputs(x: Any, where: str = "", *, as_bytes: bool = False, as_tokens: bool = False) -> Tensor:
    """Inputs as a contiguous float32 tensor without NaN; not copied if they are that already.

    With `as_bytes`, uint8 stays uint8; with `as_tokens`, whole numbers become int32.
    """
    array = as_array("x", x, where)
    if array.dtype.kind not in "fiub" or not array.ndim:
        raise SparsonaError(
            f"{where}x is an array of {array.dtype} of shape {array.shape}",
            expected="one row of real numbers per example",
            hint="convert it with x.astype(numpy.float32)",
        )
    if as_tokens:
        if array.dtype.kind not in "iu" or array.ndim != 2 or (array.size and array.min() < 0):
            raise SparsonaError(
                f"{where}x is an array of {array.dtype} of shape {array.shape}",
                expected="one row of tokens per example: whole numbers from 0, shape (N, length)",
            )
        return torch.from_numpy(np.require(array, np.int32, ["C", "W"]))
    # Writable, since torch warns of arrays that are not (a file mapped for reading is copied here).
    if as_bytes and array.dtype == np.uint8:
        return torch.from_numpy(np.require(array, requirements=["C", "W"]))
    with np.errstate(over="ignore"):  # raised below
        array = np.require(array, np.float32, ["C", "W"])
    is_finite = np.isfinite(array).all(axis=tuple(range(1, array.ndim)))
    if not is_finite.all():
        bad = np.flatnonzero(~is_finite)
        raise SparsonaError(
            f"{where}x holds NaN or infinity in {len(bad)} of {len(array)} examples, the first is example {bad[0]}",
            expected="finite numbers that fit into float32",
            hint="drop these examples or fill the gaps",
        )
    return torch.from_numpy(array)


def as_array(name: str, value: Any, where: str) -> Array:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        # numpy has no bfloat16
        array: Array = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
        return array
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as error:
        rows = list(value)[:100] if isinstance(value, list | tuple) else []
        shapes = list(dict.fromkeys(str(np.shape(row)) for row in rows if hasattr(row, "shape")))
        if len(shapes) > 1:
            raise SparsonaError(
                f"{where}{name} is a {type(value).__name__} of {len(value)} arrays of shapes {', '.join(shapes[:4])}",
                expected="one array with a row for each example, rows of equal shape",
                hint="pad or crop examples to one shape",
            ) from error
        raise SparsonaError(
            f"{where}{name} is not an array: its rows differ in length",
            expected="a numpy array or a torch tensor, rows of equal shape",
            hint="pad or crop examples to one shape",
        ) from error


def check_labels(y: Any, where: str = "", *, as_tokens: bool = False) -> Tensor:
    """Labels as an int64 tensor of one dimension; with `as_tokens`, of two dimensions if they have two."""
    y = as_array("y", y, where)
    if y.ndim != 1 and not (as_tokens and y.ndim == 2):
        raise SparsonaError(
            f"{where}y has shape {y.shape}", expected="one label per example, shape (N,)", hint="y.reshape(-1), perhaps"
        )
    if y.dtype.kind not in "iu" and len(y):
        some = ", ".join(map(repr, y[:3].tolist()))
        hint = "convert them with y.astype(numpy.int64) if they are whole numbers"
        if y.dtype.kind not in "fb":
            hint = "number them with numpy.unique(y, return_inverse=True)[1]"
        raise SparsonaError(
            f"{where}labels of type {y.dtype}: {some}, ...", expected="whole numbers from 0, one per class", hint=hint
        )
    return torch.from_numpy(y.astype(np.int64))


def check_owners(owners: Any) -> Tensor:
    """Owners as an int64 tensor of one dimension."""
    array = as_array("owners", owners, "")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        some = ", ".join(map(repr, array.reshape(-1)[:3].tolist()))
        raise SparsonaError(
            f"owners are {array.dtype} of shape {array.shape}: {some}, ...",
            expected="one for each example: a name, or a whole number from 0 (below 0: unknown)",
            hint="owners=[str(one) for one in owners] makes names of them",
        )
    return torch.from_numpy(array.astype(np.int64))


def check_targets(y: Any, where: str = "", *, as_tokens: bool = False) -> Tensor:
    """Classes or tokens as by `check_labels`; numbers with a fraction as float32 (N, outputs), for a regression."""
    array = as_array("y", y, where)
    if array.dtype.kind != "f" or array.ndim not in (1, 2) or (array == np.round(array)).all():
        return check_labels(array, where, as_tokens=as_tokens)  # also 0.0, 1.0, 2.0: classes stored as floats
    with np.errstate(over="ignore"):  # raised below
        array = array.astype(np.float32).reshape(len(array), -1)
    if not np.isfinite(array).all():
        raise SparsonaError(f"{where}y holds NaN or infinity", expected="finite numbers that fit into float32")
    return torch.from_numpy(array)


def count_outputs(y: Tensor, num_classes: int | None, x: Tensor | None) -> int:
    """The size of a model's output for an example: a number for each class, token or target."""
    if y.is_floating_point():
        return y.shape[1]
    return count_classes(y, num_classes, x if y.dim() == 2 else None)


def count_classes(y: Tensor, num_classes: int | None, x: Tensor | None = None) -> int:
    """The number of classes, checked against the labels; with `x`, the size of the vocabulary that both are from."""
    if num_classes is not None and num_classes < 1:
        raise SparsonaError(f"num_classes is {num_classes}", expected="1 or more, or None to count the labels")
    if x is not None:
        return _count_tokens(x, y, num_classes)
    found = np.unique(y.numpy())
    last = int(found[-1]) if num_classes is None else num_classes - 1
    outside = found[(found < 0) | (found > last)]
    if len(outside):
        raise SparsonaError(
            f"labels {_some(outside)} are outside the range",
            expected=f"whole numbers from 0 to {max(last, 0)}",
            hint="number the classes from 0 with numpy.unique(y, return_inverse=True)[1], or pass another num_classes",
        )
    if num_classes is None and len(found) <= last:
        raise SparsonaError(
            f"{last + 1 - len(found)} of the labels from 0 to {last} never occur, the first is "
            f"{int(np.flatnonzero(found != np.arange(len(found)))[0])}",
            expected=f"every whole number from 0 to {last}, or num_classes if that is as it should be",
            hint="number the classes without gaps with numpy.unique(y, return_inverse=True)[1]",
        )
    return last + 1


def _count_tokens(x: Tensor, y: Tensor, num_classes: int | None) -> int:
    if x.shape != y.shape:
        raise SparsonaError(
            f"tokens of shape {tuple(x.shape)}, and next tokens of shape {tuple(y.shape)}",
            expected="the same shape: what follows at each position",
        )
    lowest, highest = int(y.min()), int(max(x.max(), y.max()))
    if lowest < 0 or highest >= (num_classes or highest + 1):
        raise SparsonaError(
            f"tokens from {lowest} to {highest}", expected=f"whole numbers from 0 to {(num_classes or highest + 1) - 1}"
        )
    if int(y.max()) < NUM_SPECIAL:
        raise SparsonaError(
            f"no next token above {int(y.max())}: nothing could be scored",
            expected=f"a vocabulary from {NUM_SPECIAL} on; 0 to {NUM_SPECIAL - 1} are padding, begin, end, unknown",
            hint=f"add {NUM_SPECIAL} to every token that is none of these",
        )
    return num_classes or highest + 1


def _some(values: Array) -> str:
    return ", ".join(map(str, values[:5].tolist())) + (", ..." if len(values) > 5 else "")


def check_lengths(x: Tensor, y: Tensor, where: str = "") -> None:
    if x.shape[:1] != y.shape[:1]:  # len() of a tensor is slow
        raise SparsonaError(
            f"{where}x has {len(x)} examples and y has {len(y)} labels", expected="one label per example"
        )
