"""What the catalog says of a network. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sparsona.core.outline import Outline
from sparsona.models.options import Option, Value


@dataclass(frozen=True)
class ModelCard:
    """A row of `sparsona models`.

    `build` is the file in this folder and the function in it that builds the module, `outline` its twin here. Both take
    the input shape, the number of classes, the `architecture` and the options. `input_shape` and `num_classes` are what
    the papers gave the network; `takes_any_shape`: examples may have another number of dimensions.
    """

    name: str
    title: str
    summary: str
    build: str
    outline: Callable[..., Outline]
    input_shape: tuple[int, ...]
    num_classes: int
    architecture: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Option] = field(default_factory=dict)
    takes_any_shape: bool = False

    @property
    def input(self) -> str:
        """The input and the number of classes in words."""
        if self.takes_tokens:
            return f"{self.input_shape[0]} tokens, vocabulary of {self.num_classes:,}"
        shape = "x".join(map(str, self.input_shape))
        return f"{shape}{' numbers' * (len(self.input_shape) == 1)}, {self.num_classes:,} classes"

    @property
    def num_parameters(self) -> int:
        """The number of parameters for that input."""
        return self.draw(self.input_shape, self.num_classes).layout.size

    @property
    def takes_tokens(self) -> bool:
        """Whether inputs are sequences of tokens."""
        return self.draw(self.input_shape, self.num_classes).takes_tokens

    def draw(self, input_shape: tuple[int, ...], num_classes: int, **options: Value) -> Outline:
        """The outline for this input; options left out have their defaults."""
        defaults = {key: option.default for key, option in self.options.items()}
        return self.outline(input_shape, num_classes, **self.architecture, **defaults | options)
