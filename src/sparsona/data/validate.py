"""Arrays from the user, checked and converted to the types in which data is stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.printable import warn_once
from sparsona.core.targets import TASKS
from sparsona.core.tokens import NUM_SPECIAL
from sparsona.data.names import Names, clean_name, listed, name_of
from sparsona.data.pool import Array

SOME = 5  # classes that an error lists
# Labels are taken for quantities, such as ages, where so many values occur, each in few examples.
MANY_VALUES, FEW_EXAMPLES = 30, 20
# Columns of a table are far from 0, or wide, for a network that is made for inputs of about 1.
FAR, FAR_IN_SPREADS, WIDE = 10, 5, 100
SAMPLED = 10_000_000  # numbers that are looked at for it
AS_NUMBERS = 'task="regression"'  # in errors, the command line makes an option of it

Owners = tuple[Array, Names] | None  # of examples, as `owner_names` returns them; None: not known


def check_inputs(
    x: Any,
    where: str = "",
    *,
    as_bytes: bool = False,
    as_tokens: bool = False,
    owners: Owners = None,
    columns: Names = None,
    is_one_of_several: bool = False,
) -> Tensor:
    """Inputs as a contiguous float32 tensor without NaN; not copied if they are that already.

    With `as_bytes`, uint8 stays uint8; with `as_tokens`, whole numbers become int32. An example may be a single number
    if `x` is one of several inputs. An error says whose examples are wrong, and in which of the `columns`.
    """
    array = as_array("x", x, where)
    if array.dtype.kind not in "fiub" or not array.ndim:
        raise SparsonaError(
            f"{where}x is an array of {array.dtype} of shape {array.shape}",
            expected="one row of real numbers per example",
            hint="convert it with x.astype(numpy.float32)",
        )
    if array.ndim == 1 and array.size and not is_one_of_several:
        raise SparsonaError(
            f"{where}x has shape {array.shape}: an example is a single number, without a dimension",
            expected="one row per example, shape (N, ...)",
            hint="x and y may be swapped; if each example is one number, pass x.reshape(-1, 1)",
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
    _check_finite("x", array, where, owners, columns)
    return torch.from_numpy(array)


def _check_finite(name: str, array: Array, where: str, owners: Owners, columns: Names = None) -> None:
    is_finite = np.isfinite(array)
    if is_finite.all():
        return
    rows = np.flatnonzero(~is_finite.all(axis=tuple(range(1, array.ndim))))
    place, hint = "", "drop these examples or fill the gaps"
    if array.ndim == 2 and array.shape[1] > 1:  # a table
        found = np.flatnonzero(~is_finite.all(axis=0)).tolist()
        names = [str(one) if columns is None else f"'{clean_name(columns[one])}'" for one in found]
        place = f", in column{'s' * (len(found) > 1)} {listed(names)}"
        if 2 * len(rows) > len(array):
            hint = "fill the gaps, or leave these columns out"
    raise SparsonaError(
        f"{where}{name} holds NaN or infinity in {describe_rows(rows, len(array), owners)}{place}",
        expected="finite numbers, none beyond 3.4e38",  # the largest in float32
        hint=hint,
    )


def describe_rows(rows: Array, count: int, owners: Owners) -> str:
    """'2 of 24 examples, of owner p04, the first is example 5': how many, whose, and where to look."""
    whose = ""
    if owners is not None and len(owners[0]) == count:  # otherwise refused later
        found = [name_of(owners[1], owner) for owner in np.unique(owners[0][rows]).tolist() if owner >= 0]
        whose = f", of owner{'s' * (len(found) > 1)} {listed(found)}" if found else ""
    return f"{len(rows)} of {count} examples{whose}, the first is example {rows[0]}"


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


def what_is_in(array: Array) -> str:
    """': 3 of 24 are not whole', for after a type: it says of what kind values are, and none of them, which may be
    people's."""
    if array.dtype.kind == "f":
        found = {"not whole": array != np.round(array), "infinite": np.isinf(array)}
        counts = {what: np.count_nonzero(those) for what, those in found.items()}
        said = [f"{count:,} of {array.size:,} are {what}" for what, count in counts.items() if count]
        return f": {', '.join(said) or f'all {array.size:,} are whole'}"
    if array.dtype.kind == "O":
        return f": {', '.join(sorted({type(value).__name__ for value in array.reshape(-1).tolist()}))}"
    return ""


def check_labels(y: Any, where: str = "", *, as_tokens: bool = False) -> Tensor:
    """Labels as an int64 tensor of one dimension; with `as_tokens`, of two dimensions if they have two."""
    y = as_array("y", y, where)
    if y.ndim != 1 and not (as_tokens and y.ndim == 2):
        raise SparsonaError(
            f"{where}y has shape {y.shape}",
            expected="one label per example, shape (N,)",
            hint="y.reshape(-1), perhaps"
            if y.ndim != 2 or y.shape[1] < 2
            else 'task="multilabel": each column is a label'
            if y.dtype.kind == "b"
            else 'task="multilabel" if each column is a label that is 0 or 1, task="regression" if it is a number, '
            "y.argmax(1) if rows are one-hot",
        )
    if y.dtype.kind not in "iu" and len(y):
        hint = f"y.astype(numpy.int64) if they are classes, {AS_NUMBERS} if they are quantities"
        if y.dtype.kind == "b":
            hint = 'task="binary" for a model with one logit, y.astype(numpy.int64) for one with two'
        elif y.dtype.kind != "f":
            hint = "number them with numpy.unique(y, return_inverse=True)[1]"
        raise SparsonaError(
            f"{where}labels of type {y.dtype}{what_is_in(y)}",
            expected="whole numbers from 0, one per class",
            hint=hint,
        )
    return torch.from_numpy(y.astype(np.int64))


def find_task(targets: Sequence[Any], task: str = "auto") -> str:
    """The task that arrays of targets are of, those of all clients together.

    Args:
        targets: the arrays.
        task: a key of TASKS, which is returned; "auto": numbers with a fraction anywhere are a regression, rows of 0.0
            and 1.0 are labels, and anything else are classes or tokens.

    Returns:
        A key of TASKS.
    """
    if task in TASKS:
        return task
    if task != "auto":
        raise unknown_name("task", task, ("auto", *TASKS))
    arrays = [as_array("y", y, "") for y in targets]
    if not all(array.dtype.kind == "f" and array.ndim in (1, 2) for array in arrays):
        # A mixture is found out when each is checked.
        arrays = [array for array in arrays if array.dtype.kind == "f" and array.ndim in (1, 2)]
        return "regression" if any(_has_fraction(array) for array in arrays) else "classification"
    if any(_has_fraction(array) for array in arrays):
        return "regression"
    rows = all(array.ndim == 2 and array.shape[1] > 1 and _is_zero_or_one(array) for array in arrays)
    return "multilabel" if rows else "classification"


def task_of(y: Any, requested: str, found: str) -> str:
    """The task that one client's targets are checked as, where `found` is that of the targets of all clients.

    Whole numbers that are floats are a regression's if other clients have fractions. Integers may be classes that were
    mixed up with numbers.
    """
    return (
        found
        if requested == "auto" and found != "classification" and as_array("y", y, "").dtype.kind == "f"
        else requested
    )


def _has_fraction(array: Array) -> bool:
    return not (array == np.round(array)).all()  # NaN counts as one


def _is_zero_or_one(array: Array) -> bool:
    return bool(((array == 0) | (array == 1)).all())


def check_targets(
    y: Any, where: str = "", *, as_tokens: bool = False, task: str = "auto", owners: Owners = None
) -> Tensor:
    """Targets as they are stored: int64 (N,) of classes, (N, length) of tokens, float32 (N, outputs) of labels and of
    numbers."""
    array = as_array("y", y, where)
    requested, task = task, find_task([array], task)
    if task == "regression":
        if requested == "auto" and array.dtype.kind != "f":
            return check_labels(array, where, as_tokens=as_tokens)
        return _check_numbers(array, where, owners)
    if task == "multilabel":
        if array.ndim != 2 or array.dtype.kind not in "fiub" or not _is_zero_or_one(array):
            raise SparsonaError(
                f"{where}labels of type {array.dtype} and shape {array.shape}",
                expected="a column for each label and 0 or 1 in it, shape (N, labels)",
                hint='task="classification" for one class per example',
            )
        return torch.from_numpy(array.astype(np.float32))
    if task == "binary":
        if array.ndim == 2 and array.shape[1] == 1:
            array = array[:, 0]
        if array.ndim != 1 or array.dtype.kind not in "fiub" or not _is_zero_or_one(array):
            raise SparsonaError(
                f"{where}targets of type {array.dtype} and shape {array.shape}",
                expected="0 or 1 for each example, shape (N,)",
                hint='task="classification" for more classes, task="multilabel" for several labels',
            )
        return torch.from_numpy(array.astype(np.int64))
    if requested == "classification" and array.dtype.kind in "fb" and array.ndim == 1 and not _has_fraction(array):
        array = array.astype(np.int64)
    return check_labels(array, where, as_tokens=as_tokens)  # also refuses 0.0, 1.0, 2.0: classes, or a regression?


def _check_numbers(array: Array, where: str, owners: Owners) -> Tensor:
    if array.ndim not in (1, 2) or array.dtype.kind not in "fiub":
        raise SparsonaError(
            f"{where}targets of type {array.dtype} and shape {array.shape}",
            expected="numbers, shape (N,) or (N, outputs)",
        )
    with np.errstate(over="ignore"):  # raised below
        array = array.astype(np.float32)
    array = array[:, None] if array.ndim == 1 else array
    _check_finite("y", array, where, owners)
    return torch.from_numpy(array)


def count_outputs(
    y: Tensor,
    num_classes: int | None,
    x: Tensor | None,
    task: str = "classification",
    names: Names = None,
    requested: str = "classification",
) -> int:
    """The size of a model's output for an example: a number for each class, token, label or target.

    Classes that have names are as many as these, unless `num_classes` is given. Warns of classes that may be quantities
    if nobody said that they are classes; `requested` is the task as it was given, which may be "auto".
    """
    if task == "binary" or y.is_floating_point():
        found = 1 if task == "binary" else y.shape[1]
        if num_classes not in (None, found, 2 if task == "binary" else found):
            raise SparsonaError(f"num_classes is {num_classes}, task is {task}", expected=f"{found}, or None")
        return found
    if num_classes is None and names and y.dim() == 1:
        return count_classes(y, len(names), change="name every class in class_names")
    found = count_classes(y, num_classes, x if y.dim() == 2 else None)
    if num_classes is None and requested == "auto" and y.dim() == 1 and _may_be_quantities(found, len(y)):
        warn_once(
            f"{found} classes in {len(y):,} examples: if these are quantities, such as ages, use {AS_NUMBERS} (--set "
            'task=regression); task="classification" says that they are classes'
        )
    return found


def _or_numbers(as_classes: str, values: Array, num_examples: int) -> str:
    """A hint for labels that are classes, and one for quantities; the likelier one first."""
    hints = [as_classes, f"{AS_NUMBERS} if they are quantities, such as ages"]
    return "; ".join(reversed(hints) if _may_be_quantities(len(values), num_examples) else hints)


def _may_be_quantities(num_values: int, num_examples: int) -> bool:
    """Whether labels have more values than classes of so few examples could be told apart: 80 ages of 900 people."""
    return num_values >= MANY_VALUES and num_examples < FEW_EXAMPLES * num_values


def warn_of_one_class(name: str, task: str, y: Array | Tensor, num_classes: int) -> None:
    """Say that a result will mean nothing, where every example has the same class."""
    if task in ("auto", "classification") and y.ndim == 1 and num_classes == 1:
        warn_once(f"{name}: all examples are of one class, so that every model has an accuracy of 100%")


def warn_of_scale(name: str, x: Array) -> None:
    """Say which columns of a table networks learn badly from as they are: measured with the default network and
    optimizer, a mean of ten spreads is never learnt, and a column a hundred times as wide as others hides them."""
    if x.ndim != 2 or x.dtype != np.float32:
        return
    rows = np.asarray(x[:: x.size // SAMPLED + 1], np.float64)
    mean, spread = rows.mean(axis=0), rows.std(axis=0)
    is_far = (abs(mean) >= FAR) & (abs(mean) >= FAR_IN_SPREADS * spread)
    odd = np.flatnonzero(is_far | (spread >= WIDE))
    if len(odd):
        first = odd[0]
        warn_once(
            f"{name}: {len(odd)} of {x.shape[1]} inputs are large or far from 0 compared with how they vary, the first "
            f"is column {first} (mean {mean[first]:.3g}, spread {spread[first]:.3g}): networks learn badly from such "
            "numbers; standardise them (docs/data.md, Scaling)"
        )


def count_classes(
    y: Tensor, num_classes: int | None, x: Tensor | None = None, change: str = "pass another num_classes"
) -> int:
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
            hint=_or_numbers("number the classes from 0 with numpy.unique(y, return_inverse=True)[1]", found, len(y))
            if num_classes is None
            else f"number the classes from 0 with numpy.unique(y, return_inverse=True)[1], or {change}",
        )
    if num_classes is None and len(found) == last and found[0] == 1:
        raise SparsonaError(
            f"labels from 1 to {last}",
            expected="whole numbers from 0",
            hint=_or_numbers("subtract 1 from them: y - 1", found, len(y)),
        )
    if num_classes is None and len(found) <= last:
        raise SparsonaError(
            f"{last + 1 - len(found)} of the labels from 0 to {last} never occur, the first is "
            f"{int(np.flatnonzero(found != np.arange(len(found)))[0])}",
            expected=f"every whole number from 0 to {last}, or num_classes if that is as it should be",
            hint=_or_numbers(
                "number the classes without gaps with numpy.unique(y, return_inverse=True)[1]", found, len(y)
            ),
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
    """A few classes, or of many the range alone: they may be quantities, and people's."""
    found = values.tolist()
    return ", ".join(map(str, found)) if len(found) <= SOME else f"from {found[0]} to {found[-1]}"


def check_lengths(x: Tensor, y: Tensor, where: str = "") -> None:
    if x.shape[:1] != y.shape[:1]:  # len() of a tensor is slow
        raise SparsonaError(
            f"{where}x has {len(x)} examples and y has {len(y)} labels", expected="one label per example"
        )
