"""Which runs are seeds of the same experiment, and what sets the others apart."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sparsona.core.errors import SparsonaError
from sparsona.core.targets import given_name
from sparsona.robust import PLAIN
from sparsona.runs.options import CIRCUMSTANCES

if TYPE_CHECKING:
    from sparsona.analysis.view import RunView

FROM_PYTHON = ("data", "partition", "test", "model", "loss", "sampler")
UNSET = "unset"  # the value of a setting that a run does not have
# Options whose value says enough without the option's name, or needs words where it is empty.
WITHOUT = {
    "mean": "plain mean",
    "attack": "no attackers",
    "privacy": "no privacy noise",
    "transform": "no transforms",
    "availability": "all clients available",
}


@dataclass(frozen=True, eq=False)
class Group:
    """The runs of one method under one set of settings: they differ in their seed only."""

    label: str
    views: tuple[RunView, ...]


def group_views(views: Sequence[RunView]) -> list[Group]:
    """Runs with the same title and settings are one group, in order of first appearance.

    Runs of one title whose settings differ (a sweep over density, say) are kept apart and named by the difference,
    because a mean over them would be taken for a mean over seeds. The same seed twice is kept apart too, by run name.
    """
    members: dict[tuple[str, str, int], list[RunView]] = {}
    for view in views:
        settings = json.dumps(settings_of(view), sort_keys=True)
        copy = 0
        while any(other.seed == view.seed for other in members.get((view.title, settings, copy), [])):
            copy += 1
        members.setdefault((view.title, settings, copy), []).append(view)
    groups = list(members.values())
    labels = [_label(group, groups) for group in groups]
    twice = {label for label in labels if labels.count(label) > 1}  # by what is set alone
    labels = [
        _label(group, groups, whole=True) if label in twice else label
        for label, group in zip(labels, groups, strict=True)
    ]
    if len(set(labels)) < len(labels):  # runs of one name from different folders
        labels = [f"{label}, {group[0].path}" for label, group in zip(labels, groups, strict=True)]
    return [
        Group(label, tuple(sorted(group, key=lambda view: view.seed)))
        for label, group in zip(labels, groups, strict=True)
    ]


def one_method(views: Sequence[RunView]) -> Group:
    """Runs to compare with as one group; SparsonaError where they are of several methods."""
    groups = group_views(views)
    if len(groups) > 1:
        raise SparsonaError(
            f"to compare with {len(groups)} methods at once: {'; '.join(group.label for group in groups)}",
            expected="the runs of one method, which differ in their seed alone",
            hint="give --against the folder of one run; with several seeds, once for each",
        )
    return groups[0]


def same_clients(a: RunView, b: RunView) -> bool:
    """Whether client i of one run is client i of the other: same training labels, same numbers of examples."""
    both = ((a.sizes, b.sizes), (a.count, b.count), (a.label_counts, b.label_counts))
    return all(x is y if x is None or y is None else np.array_equal(x, y) for x, y in both)


def pairs(reference: Group, other: Group) -> list[tuple[RunView, RunView]]:
    """Runs of two groups with the same seed and the same clients, so that they differ in the method alone."""
    by_seed = {view.seed: view for view in reference.views}
    matched = [(by_seed[view.seed], view) for view in other.views if view.seed in by_seed]
    return [(a, b) for a, b in matched if same_clients(a, b)]


def flatten(values: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted names with printable values."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return flat


def shared_and_differing(tables: Sequence[Mapping[str, str]]) -> tuple[dict[str, str], list[str]]:
    """Entries that are equal in all tables, and the names of those that are not (or are missing from some)."""
    names = list(dict.fromkeys(name for table in tables for name in table))
    shared = {name: tables[0][name] for name in names if len({table.get(name) for table in tables}) == 1}
    return shared, [name for name in names if name not in shared]


def settings_of(view: RunView) -> dict[str, str]:
    """What sets a run apart from others: its options, but not its seeds, nor how it was run; and the result's point."""

    def matters(name: str) -> bool:
        last = name.rpartition(".")[2]
        # A budget is that of a seed; what it led to, the number of rounds, is a setting.
        return last not in CIRCUMSTANCES and not last.endswith("seed") and not name.startswith("matched")

    return {name: value for name, value in flatten(view.config).items() if matters(name)} | {"point": view.point}


def _label(group: list[RunView], groups: Iterable[list[RunView]], whole: bool = False) -> str:
    """A title and, of the settings in which its runs differ, those that are set; `whole`: also those that are not."""
    title = group[0].title
    namesakes = [other for other in groups if other[0].title == title]
    if len(namesakes) == 1:
        return title
    own = settings_of(group[0])
    _, differing = shared_and_differing([settings_of(other[0]) for other in namesakes])
    alike = [other for other in namesakes if settings_of(other[0]) == own]
    named = {name: own.get(name, UNSET) for name in differing}
    named = {name: value for name, value in named.items() if whole or not is_unset(name, value)}
    if len(alike) > 1 or len(named) > 3:
        return f"{title}, {group[0].name}"
    return ", ".join([title, *(setting_label(name, value) for name, value in named.items())])


def is_unset(name: str, value: str) -> bool:
    """Whether a setting, as `flatten` has it, is that of a run in which nobody chose any."""
    return value in ("null", "[]", UNSET) or (name, value) == ("mean", PLAIN)


def setting_label(name: str, value: str) -> str:
    """A setting as a reader understands it in the label of a row: "density=0.2", "median", "no attackers".

    Args:
        name: the dotted name, as `flatten` has it.
        value: the printable value.
    """
    last = name.rpartition(".")[2]
    if name in WITHOUT:
        if is_unset(name, value):
            return WITHOUT[name]
        if name == "mean":
            return value
        values = json.loads(value) if value.startswith("[") else [value]
        return f"{name} {' + '.join(map(str, values))}"
    # What came from Python has no text of its own, or the name of a function.
    if last not in FROM_PYTHON or (own := given_name(value)) is None:
        return f"{last}={'none' if value == 'null' else value}"
    return f"{last}={own}" if own else f"own {last}"
