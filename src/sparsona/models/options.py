"""Options of a network: `resnet18:stem=7x7,adapters=true`. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sparsona.core.errors import SparsonaError, unknown_name

Value = bool | int | float | str


@dataclass(frozen=True)
class Option:
    """What a network lets one choose: one of `choices`, or else anything of the default's kind.

    An option that is a number is a whole number from 0 on if its default is one, and a rate in [0, 1) otherwise.
    """

    default: Value
    summary: str
    choices: tuple[Value, ...] = ()

    def read(self, text: str) -> Value:
        """The value that this text stands for; ValueError if it is none."""
        for choice in self.choices:
            if text.lower() == _written(choice):
                return choice
        if self.choices:
            raise ValueError(" | ".join(map(_written, self.choices)))
        if isinstance(self.default, str):
            return text
        if isinstance(self.default, int):
            if not text.isascii() or not text.isdigit():
                raise ValueError("a whole number, 0 or more")
            return int(text)
        try:
            rate = float(text)
        except ValueError:
            rate = math.nan
        if not 0 <= rate < 1:
            raise ValueError("a number from 0 up to, but without, 1")
        return rate


def _written(value: Value) -> str:
    return str(value).lower()


def read_options(name: str, text: str, known: Mapping[str, Option]) -> dict[str, Value]:
    """The options of the network `name`: the defaults, with those in `text` (key=value,key=value) put in."""
    found = {key: option.default for key, option in known.items()}
    for pair in text.split(",") if text.strip() else []:
        key, equals, value = (part.strip() for part in pair.partition("="))
        key = key.replace("-", "_")
        if not equals or not key:
            raise SparsonaError(
                f"'{pair}' is not an option of model '{name}'",
                expected="key=value, with commas between several",
                mend=f"options of {name}: {', '.join(known) or 'none'}",
            )
        if not known:
            raise SparsonaError(f"model '{name}' has no options, but '{pair}' was given", mend=f"write just {name}")
        if key not in known:
            raise unknown_name(f"option of model '{name}'", key, known)
        try:
            found[key] = known[key].read(value)
        except ValueError as error:
            raise SparsonaError(
                f"option {key} of model '{name}' cannot be '{value}'",
                expected=str(error),
                mend=f"{key}: {known[key].summary}",
            ) from None
    return found
