"""Several inputs of one example as one row of numbers, so that whatever moves examples moves one tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sparsona.core.errors import SparsonaError

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("float32", "int64", "bool")  # what a model is passed
EXACT = 2**24  # float32 holds whole numbers exactly up to here
Inputs = tuple[Any, ...] | dict[str, Any]


@dataclass(frozen=True)
class Field:
    """One input: its name ("" in a tuple), the shape of one example, and its type, one of `KINDS`."""

    name: str
    shape: tuple[int, ...]
    kind: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if self.kind not in KINDS:
            raise SparsonaError(f"an input of type '{self.kind}'", expected=f"one of {', '.join(KINDS)}")

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Packing:
    """Where each input is in a packed row.

    Args:
        fields: the inputs, side by side. With names they are passed as `model(**inputs)`, otherwise as
            `model(*inputs)`.

    Example:
        >>> import torch
        >>> packing = Packing((Field("age", ()), Field("words", (2,), "int64")))
        >>> packing.unpack(torch.tensor([[40.5, 7.0, 9.0]]))
        {'age': tensor([40.5000]), 'words': tensor([[7, 9]])}
    """

    fields: tuple[Field, ...]

    @property
    def has_names(self) -> bool:
        return bool(self.fields[0].name)

    @property
    def size(self) -> int:
        """The length of a packed row."""
        return sum(field.size for field in self.fields)

    def describe(self) -> str:
        """The inputs in words: age (), words (2,)."""
        return ", ".join(f"{field.name or place} {field.shape}" for place, field in enumerate(self.fields))

    def unpack(self, rows: Tensor) -> Inputs:
        """The inputs that packed rows hold, as a model is passed them.

        Args:
            rows: float32 [N, size].

        Returns:
            A tuple, or a dict by name, of tensors [N, ...].
        """
        import torch

        parts = rows.split([field.size for field in self.fields], dim=1)  # type: ignore[no-untyped-call]
        found = [
            part.reshape(len(part), *field.shape).to(getattr(torch, field.kind))
            for field, part in zip(self.fields, parts, strict=True)
        ]
        if self.has_names:
            return {field.name: value for field, value in zip(self.fields, found, strict=True)}
        return tuple(found)

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """A module's forward pre-hook, which unpacks the rows that it is called with."""
        found = self.unpack(*args)
        return ((), found) if isinstance(found, dict) else (found, {})

    def as_json(self) -> list[dict[str, Any]]:
        """Plain values."""
        return [asdict(field) for field in self.fields]

    @classmethod
    def from_json(cls, values: list[Mapping[str, Any]]) -> Packing:
        """What `as_json` wrote."""
        return cls(tuple(Field(**value) for value in values))
