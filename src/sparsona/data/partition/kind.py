"""What a partition is: a function, how it is written, and its help text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsona.core.errors import SparsonaError
from sparsona.data.pool import Array, Indices

MAX_CONCENTRATION = 1e6  # beyond it shares are even to a millionth, and far beyond it they overflow


@dataclass(frozen=True)
class PartitionInput:
    """The input of a partition: one label (or row of tokens) per example, and the owner of each.

    `num_clients` is None if the partition determines the clients. Clients get `min_size` examples or more.
    """

    labels: Array
    num_clients: int | None
    rng: np.random.Generator
    min_size: int = 0
    owners: Array | None = None

    @property
    def num(self) -> int:
        """The number of clients, where it is given."""
        assert self.num_clients is not None
        return self.num_clients


@dataclass(frozen=True)
class Argument:
    """One argument of a partition: `read` raises ValueError for a text that is not one."""

    letter: str
    example: str
    read: Callable[[str], Any]
    what: str = ""
    expected: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Partition:
    """A row of `sparsona data`: `deal` gives the examples of each client, in any order.

    `by_class`: it needs one class per example. `finds_clients`: it determines the clients, so that their number
    may be left out. `repeats_examples`: some examples are given to several clients.
    """

    name: str
    summary: str
    deal: Callable[..., list[Indices]]
    arguments: tuple[Argument, ...] = ()
    by_class: bool = True
    finds_clients: bool = False
    repeats_examples: bool = False

    @property
    def form(self) -> str:
        """How it is written, for example groups:G:A."""
        return ":".join([self.name, *(argument.letter for argument in self.arguments)])

    def read(self, spec: str, text: str) -> list[Any]:
        """The values of its arguments, checked; `spec` is what was written, `text` what follows its name."""
        texts = text.split(":", len(self.arguments) - 1) if text else []
        example = ":".join([self.name, *(argument.example for argument in self.arguments)])
        if len(texts) < len(self.arguments) or not all(texts):
            raise SparsonaError(
                f"partition '{spec}' lacks {'one of its arguments' if text else 'its argument'}",
                expected=self.form,
                hint=f"write for example {example}",
            )
        values = []
        for argument, part in zip(self.arguments, texts, strict=True):
            try:
                values.append(argument.read(part))
            except ValueError:
                raise SparsonaError(
                    f"partition '{_shorten(spec)}': '{_shorten(part)}' is not a {argument.what}",
                    expected=f"{self.form} with {argument.letter} {argument.expected}",
                    hint=f"write for example {example}{argument.hint}",
                ) from None
        return values


def count(what: str, letter: str = "C", example: str = "2") -> Argument:
    """An argument that is a number of something."""
    return Argument(letter, example, _read_count, f"number of {what}", "a positive whole number of at most nine digits")


def _read_count(text: str) -> int:
    if not (re.fullmatch("[0-9]{1,9}", text) and int(text) > 0):
        raise ValueError
    return int(text)


def _read_concentration(text: str) -> float:
    concentration = float(text) if text.isascii() and "_" not in text else float("nan")
    if not 0 < concentration <= MAX_CONCENTRATION:
        raise ValueError
    return concentration


CONCENTRATION = Argument(
    "A",
    "0.3",
    _read_concentration,
    "concentration",
    f"greater than 0 and at most {MAX_CONCENTRATION:,.0f}",
    " (small A: clients differ much), or iid for clients that do not differ",
)


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
