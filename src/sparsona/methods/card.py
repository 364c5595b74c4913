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
class Preset:
    """A published experiment: options of the method and of the run alike. Options that the user gives override it.

    Args:
        options: whatever the data.
        by_data: further options with this data set.
        by_density: further options with this data set and this `density` of the method.
        exceptions: conditions that other methods of the same experiment have otherwise, and why: a comparison in which
            all have this preset lets them differ.
        grid: the values that the paper searched, for `sparsona tune`; of options without any, the method's own are.

    Example:
        >>> found = Preset({"rounds": 500}, by_data={"tiny-imagenet": {"rounds": 300}})
        >>> found.resolve({"data": "tiny-imagenet"}), found.resolve({})
        ({'rounds': 300}, {'rounds': 500})
    """

    options: Mapping[str, Any]
    by_data: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    by_density: Mapping[str, Mapping[float, Mapping[str, Any]]] = field(default_factory=dict)
    exceptions: Mapping[str, str] = field(default_factory=dict)
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def resolve(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What it sets beside these options of the user, which it may also set otherwise: those win."""
        data = str(given.get("data", "")).strip()
        found = {**self.options, **self.by_data.get(data, {})}
        try:
            density = float(given.get("density", found.get("density", 0.0)))
        except (TypeError, ValueError):  # refused with all other options
            return found
        return found | dict(self.by_density.get(data, {}).get(density, {}))

    def plus(
        self,
        options: Mapping[str, Any] | None = None,
        by_data: Mapping[str, Mapping[str, Any]] | None = None,
        by_density: Mapping[str, Mapping[float, Mapping[str, Any]]] | None = None,
        exceptions: Mapping[str, str] | None = None,
        grid: Mapping[str, tuple[Any, ...]] | None = None,
    ) -> Preset:
        """The same with further options, which replace those of the same name and place."""
        also = by_data or {}
        return Preset(
            {**self.options, **(options or {})},
            {name: {**self.by_data.get(name, {}), **also.get(name, {})} for name in {**self.by_data, **also}},
            {**self.by_density, **(by_density or {})},
            {**self.exceptions, **(exceptions or {})},
            {**self.grid, **(grid or {})},
        )


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
    presets: Mapping[str, Preset | Mapping[str, Any]] = field(default_factory=dict)  # a mapping: a preset's `options`
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
