"""Inputs of several arrays, checked and packed: one row of float32 per example."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsona.core.errors import SparsonaError
from sparsona.core.packing import EXACT, Field, Packing
from sparsona.data import validate
from sparsona.data.pool import View


def is_several(x: Any) -> bool:
    """Whether inputs are several arrays: a dict of them, or a tuple of arrays with a row per example each.

    A tuple of numbers or of lists is one array, as it is for numpy.
    """
    if isinstance(x, Mapping):
        return True
    return isinstance(x, tuple) and bool(x) and all(hasattr(one, "shape") and len(one.shape) for one in x)


def pack(
    x: Any, where: str = "", expected: Packing | None = None, owners: validate.Owners = None
) -> tuple[Tensor, Packing]:
    """Several inputs as one tensor.

    Args:
        x: a tuple of arrays, or a dict of them by name. Real numbers become float32; whole numbers, which reach the
            model as int64, and bools must be exact in float32.
        where: whose inputs they are, for errors.
        expected: the inputs of other examples of this data, which these must agree with.
        owners: whose each example is, for errors.

    Returns:
        float32 [N, numbers of an example], and where each input is in it.

    Example:
        >>> import numpy as np
        >>> rows, packing = pack({"image": np.zeros((3, 1, 8, 8)), "age": np.array([30, 41, 52])})
        >>> rows.shape, packing.describe()
        (torch.Size([3, 65]), 'image (1, 8, 8), age ()')
    """
    names = _names(x, where) if isinstance(x, Mapping) else [""] * len(x)
    given = list(x.values() if isinstance(x, Mapping) else x)
    if expected is not None and expected.has_names and isinstance(x, Mapping) and {*names} == {*_named(expected)}:
        given, names = [x[name] for name in _named(expected)], _named(expected)  # a dict has no order that matters
    fields: list[Field] = []
    columns: list[Tensor] = []
    for place, (name, array) in enumerate(zip(names, given, strict=True)):
        label = f"{where}input '{name}': " if name else f"{where}input {place}: "
        values, kind = _numbers(array, label, owners)
        if columns and len(values) != len(columns[0]):
            raise SparsonaError(
                f"{label}{len(values)} examples", expected=f"{len(columns[0])}, as the input before it has"
            )
        fields.append(Field(name, tuple(values.shape[1:]), kind))
        columns.append(values.reshape(len(values), fields[-1].size))
    found = Packing(tuple(fields))
    if not found.size:
        raise SparsonaError(f"{where}inputs of shape {found.describe()}", expected="at least one number in an example")
    if expected is not None and found != expected:
        raise SparsonaError(
            f"{where}inputs {_in_words(found)}",
            expected=f"{_in_words(expected)}, as in the examples before",
            hint="give every client the same inputs: names, shapes, and whole or real numbers",
        )
    return torch.cat(columns, dim=1), found


def refuse_other(packing: Packing | None, view: View | None, tokens: bool, where: str = "") -> None:
    """Raise SparsonaError for what only one array of inputs can have."""
    if packing is not None and (tokens or view not in (None, View())):
        raise SparsonaError(
            f"{where}{'tokens' if tokens else 'a view'} of several inputs",
            expected="one array of inputs",
            hint="whole numbers among several inputs reach the model as int64; scale images before"
            if tokens
            else "scale and crop the images before",
        )


def _numbers(array: Any, label: str, owners: validate.Owners) -> tuple[Tensor, str]:
    values = validate.as_array("x", array, label)
    if not values.ndim:
        raise SparsonaError(f"{label}one number", expected="an array with one row per example")
    found = validate.check_inputs(values, label, owners=owners, is_one_of_several=True)
    if values.dtype.kind == "f":
        return found, "float32"
    if values.dtype.kind == "b":
        return found, "bool"
    if values.size and max(abs(int(values.min())), abs(int(values.max()))) > EXACT:
        raise SparsonaError(
            f"{label}whole numbers from {values.min()} to {values.max()}",
            expected=f"{-EXACT:,} to {EXACT:,}, which float32 holds exactly",
            hint="number them anew: numpy.unique(x, return_inverse=True)[1]; or pass real numbers",
        )
    return found, "int64"


def _names(x: Mapping[Any, Any], where: str) -> list[str]:
    if not x:
        raise SparsonaError(f"{where}a dict without inputs", expected="arrays by name")
    if bad := [name for name in x if not isinstance(name, str) or not name.isidentifier()]:
        raise SparsonaError(
            f"{where}an input called {bad[0]!r}",
            expected="names of arguments of the model's forward",
            hint="inputs are passed as model(**inputs)",
        )
    return list(x)


def _named(packing: Packing) -> list[str]:
    return [field.name for field in packing.fields]


def _in_words(packing: Packing) -> str:
    return ", ".join(f"{one.name or place} {one.shape} of {one.kind}" for place, one in enumerate(packing.fields))
