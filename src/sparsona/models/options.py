"""Options of a network: `resnet18:stem=7x7,adapters=true`. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.spec import Spec

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
            if text.lower() == _format(choice):
                return choice
        if self.choices:
            raise ValueError(" | ".join(map(_format, self.choices)))
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


def _format(value: Value) -> str:
    return str(value).lower()


def read_options(found: Spec, known: Mapping[str, Option]) -> dict[str, Value]:
    """The options of a network: the defaults, with those that its spec has put in."""
    name, values = found.name, {key: option.default for key, option in known.items()}
    # No value of a network holds a comma: what follows one is an option that lacks its key.
    stray = [*found.args, *(text for value in found.options.values() for text in value.split(",")[1:])]
    if stray:
        raise SparsonaError(
            f"'{stray[0]}' is not an option of model '{name}'",
            expected="key=value, with commas between several",
            hint=f"options of {name}: {', '.join(known) or 'none'}",
        )
    for key, text in found.options.items():
        if not known:
            raise SparsonaError(
                f"model '{name}' has no options, but '{key}={text}' was given", hint=f"write just {name}"
            )
        if key not in known:
            raise unknown_name(f"option of model '{name}'", key, known)
        try:
            values[key] = known[key].read(text)
        except ValueError as error:
            raise SparsonaError(
                f"option {key} of model '{name}' cannot be '{text}'",
                expected=str(error),
                hint=f"{key}: {known[key].summary}",
            ) from None
    return values
