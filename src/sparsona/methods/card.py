"""What a row of the table of methods says. Plain data: neither torch nor a method is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# Families by name, in the order in which `sparsona methods` lists them.
FAMILIES = {
    "general": "one shared model, or each client alone",
    "whole": "a whole model for each client",
    "split": "a part of the model is personal",
    "sub": "each client has a part of a shared model",
    "peers": "clients exchange models without a server",
}


@dataclass(frozen=True)
class MethodCard:
    """A row of `sparsona methods`, which describes a method before it is built.

    Args:
        module: where the factory `f(task, config)` is: a file in this folder, whose factory has the file's name;
            elsewhere "package.module" likewise, or "package.module:factory"; or the factory itself.
        config: the class of its options: its name in that module, or the class itself.
        headline: the evaluation point whose accuracy is the result; None: `tuned` after final tuning, else `received`.
        family: a row of `FAMILIES`; empty for methods outside this package, which are listed last.
        density_bounds: the directions in which no message has more values than the option `density` allows.
        needs_validation: training decides something by validation data, so a run without any is refused; a mapping:
            only with these options of the method.
        needs_tuning: with these options of the method, what is its own happens in final tuning, so a run without
            `tune_epochs` is refused.

    Example:
        >>> MethodCard("mine", "Mine", "unpublished", "nothing", "the model", "mypackage.mine", "MineConfig").peers
        False
    """

    name: str
    title: str
    paper: str
    kept: str  # what stays on the client between rounds
    travels: str  # what is sent, and which way
    module: str | Callable[..., Any]
    config: str | type[Any]
    options: Mapping[str, Any] = field(default_factory=dict)  # of the method
    engine: Mapping[str, Any] = field(default_factory=dict)  # of the engine: see sparsona.runs.options
    # What `--preset NAME` sets, of the method and the engine alike; options that the user gives override it.
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    peers: bool = False  # clients send to each other: along `graph`; all take part unless per_round is given
    headline: str | None = None
    density_bounds: tuple[Literal["up", "down"], ...] = ()
    needs_validation: bool | Mapping[str, Any] = False
    needs_tuning: Mapping[str, Any] = field(default_factory=dict)
    family: str = ""
    # Values of its own options that `sparsona tune` tries; every method's learning rates are in experiment/tune.py.
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def decides_by_validation(self, options: Mapping[str, Any]) -> bool:
        """Whether it needs validation data with these options of the method."""
        needs = self.needs_validation
        return needs if isinstance(needs, bool) else all(options.get(key) == value for key, value in needs.items())

    def learns_in_tuning(self, options: Mapping[str, Any]) -> bool:
        """Whether it needs final tuning with these options of the method."""
        return bool(self.needs_tuning) and all(options.get(key) == value for key, value in self.needs_tuning.items())
