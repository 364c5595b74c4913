"""A task without its network: enough to compute what a method costs. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sparsona.core.layout import Layout


@dataclass(frozen=True)
class Roles:
    """Names of the parameters that partial personalisation refers to.

    Args:
        input: those of the first layer.
        output: those of the last layer.
        norm: those of normalisation layers.
        adapter: those of adapters.
        split: those of the personal one of two first layers side by side.
    """

    input: tuple[str, ...] = ()
    output: tuple[str, ...] = ()
    norm: tuple[str, ...] = ()
    adapter: tuple[str, ...] = ()
    split: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outline:
    """What is known of a model before it is built. A factory accepts it in place of a Task if only `cost` is needed."""

    layout: Layout
    input_shape: tuple[int, ...]
    num_classes: int
    roles: Roles = field(default_factory=Roles)
    buffer_layout: Layout = field(default_factory=lambda: Layout(()))
    mixes_examples: bool = False
    draws_noise: bool = False
    takes_tokens: bool = False
    targets: str = "classes"  # as Task.targets
    uncounted: tuple[str, ...] = ()  # matrices whose FLOPs are not known
    norm_groups: Mapping[str, int] = field(default_factory=dict)  # as Task.norm_groups
    half: None = None  # as Task.half: nothing is computed
    frozen: tuple[str, ...] = ()  # of no outline: networks by name are trained whole

    @property
    def is_regression(self) -> bool:
        """Whether numbers are predicted, as Task has it."""
        return self.targets == "numbers"

    @property
    def whole_layout(self) -> Layout:
        """That of the whole model, as Task has it: an outline is never that of a sub-network."""
        return self.layout
