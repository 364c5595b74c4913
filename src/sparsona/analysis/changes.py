"""What several methods do to each client, over the same model: figures 4 and 6 to 10 of FedSim and FedAlt's paper.

`analysis/clients.py` has the same for one run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from sparsona.analysis.clients import Change, names_at
from sparsona.analysis.format import signed
from sparsona.analysis.groups import Group, group_views, one_method, pairs
from sparsona.analysis.view import RunView
from sparsona.core.points import on

SHARED = "the shared model of the same run"
Kind = Literal["violins", "samples", "differences"]


@dataclass(frozen=True, eq=False)
class MethodChanges:
    """The changes of a method's clients, by kind of data ("train", "test"), those of all seeds together.

    `place` is that of the method among those of the runs, after what they are compared with: its colour.
    """

    label: str
    changes: Mapping[str, Change]
    place: int = 0


@dataclass(frozen=True, eq=False)
class ClientChanges:
    """The changes of several methods. `kind` is how they are drawn: violins, against samples, or sorted bars."""

    title: str
    kind: Kind
    methods: tuple[MethodChanges, ...]
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """The kinds of data that any method has, training data first."""
        found = {name for method in self.methods for name in method.changes}
        return [name for name in ("train", "test") if name in found]

    def rows(self) -> list[dict[str, str]]:
        """A line per method and kind of data; figures are percentage points of accuracy."""
        return [
            {"method": method.label, **method.changes[name].row()}
            for name in self.names
            for method in self.methods
            if name in method.changes
        ]

    def sentences(self) -> list[str]:
        return list(self.notes)

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        methods = [
            {"method": one.label, "changes": [change.as_dict() for change in one.changes.values()]}
            for one in self.methods
        ]
        return {"title": self.title, "methods": methods, "notes": list(self.notes)}


@dataclass(frozen=True, eq=False)
class Band:
    """Each client's change over several seeds, in ascending order of the mean; percentage points."""

    label: str
    name: str
    clients: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    seeds: int
    labels: tuple[str, ...] = ()

    @property
    def num_undecided(self) -> int:
        """Clients that are helped with one seed and hurt with another."""
        return int(((self.low < -1e-9) & (self.high > 1e-9)).sum())

    def row(self) -> dict[str, str]:
        always = {"always helped": (self.low > 1e-9).sum(), "always hurt": (self.high < -1e-9).sum()}
        counts = {name: str(int(count)) for name, count in always.items()}
        widest = {"widest band": f"{float((self.high - self.low).max()):.2f}"}
        about = {"method": self.label, "on": self.name, "clients": str(len(self.clients)), "seeds": str(self.seeds)}
        undecided = f"{self.num_undecided} ({100 * self.num_undecided / len(self.clients):.0f}%)"
        return {
            **about,
            "mean": signed(float(self.mean.mean())),
            **counts,
            "helped or hurt by seed": undecided,
            **widest,
        }


@dataclass(frozen=True, eq=False)
class ClientBands:
    """Each client's change, from the lowest to the highest seed, by method and kind of data (figure 10)."""

    title: str
    bands: tuple[Band, ...]
    notes: tuple[str, ...] = ()

    def rows(self) -> list[dict[str, str]]:
        """A line per method and kind of data; figures are percentage points of accuracy."""
        return [band.row() for band in self.bands]

    def sentences(self) -> list[str]:
        return list(self.notes)

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        names = ("clients", "mean", "low", "high")
        bands = [
            {"method": one.label, "on": one.name, "seeds": one.seeds}
            | {name: getattr(one, name).tolist() for name in names}
            for one in self.bands
        ]
        return {"title": self.title, "bands": bands, "notes": list(self.notes)}


def client_changes(views: Sequence[RunView], kind: Kind, against: Sequence[RunView] = ()) -> ClientChanges | None:
    """What each method does to each client, over a reference.

    Args:
        views: the runs.
        kind: how they are to be drawn.
        against: the runs of one method to compare with, by seed. None given: the shared model that every run evaluated
            (a warm start, the global model); where some run has none, the first method of `views`.

    Returns:
        None where nothing can be compared.
    """
    over, by_method = _by_seed(views, against)
    # A method that the others are compared with has the first place.
    order = list(dict.fromkeys((over, *by_method) if over else by_method))
    methods = [MethodChanges(name, _joined(seeds), order.index(name)) for name, seeds in by_method.items() if seeds]
    if not methods:
        return None
    notes = [f"Change of each client's accuracy, over {over or SHARED}."]
    if any(len(seeds) > 1 for seeds in by_method.values()):
        notes.append("Clients of all seeds together.")
    return ClientChanges("What methods do to each client", kind, tuple(methods), tuple(notes))


def client_bands(views: Sequence[RunView], against: Sequence[RunView] = ()) -> ClientBands | None:
    """Each client's change over seeds, where its data stays the same and the seed alone differs.

    Args:
        views: the runs, with `partition_seed` fixed or clients that are the data's own.
        against: as for `client_changes`.

    Returns:
        None where no method has several seeds on the same clients.
    """
    over, by_method = _by_seed(views, against)
    bands = []
    for label, seeds in by_method.items():
        for name in ("train", "test"):
            found = [changes[name] for changes in seeds if name in changes]
            if len(found) > 1 and (band := _band(label, name, found)) is not None:
                bands.append(band)
    if not bands:
        return None
    notes = (
        f"Change of each client's accuracy, over {over or SHARED}, in the order of the mean over seeds.",
        "A band reaches from the lowest to the highest seed; clients whose band crosses 0 depend on the seed.",
    )
    return ClientBands("What methods do to each client, by seed", tuple(bands), notes)


def _band(label: str, name: str, found: Sequence[Change]) -> Band | None:
    """None where a client has other data under another seed."""
    first = found[0]
    same = all(
        np.array_equal(one.clients, first.clients) and np.array_equal(one.samples, first.samples) for one in found
    )
    if not same:
        return None
    gains = np.stack([one.gains for one in found])
    order = np.argsort(gains.mean(axis=0), kind="stable")
    mean, low, high = (figure[order] for figure in (gains.mean(axis=0), gains.min(axis=0), gains.max(axis=0)))
    labels = tuple(first.labels[place] for place in order) if first.labels else ()
    return Band(label, name, first.clients[order], mean, low, high, len(found), labels)


def _by_seed(views: Sequence[RunView], against: Sequence[RunView]) -> tuple[str, dict[str, list[dict[str, Change]]]]:
    """The method that is compared with ("": `SHARED`), and by method and seed the changes by kind of data."""
    groups = group_views(views)
    if against:
        reference = one_method(against)
        return reference.label, {group.label: [*_over(reference, group)] for group in groups}
    if all(view.effects for view in views):
        found = {
            group.label: [
                {change.name: change for change in view.effects.changes if change.name in ("train", "test")}
                for view in group.views
                if view.effects
            ]
            for group in groups
        }
        return "", found
    return groups[0].label, {group.label: [*_over(groups[0], group)] for group in groups[1:]}


def _over(reference: Group, group: Group) -> Iterator[dict[str, Change]]:
    for before, after in pairs(reference, group):
        found = {}
        for name in ("train", "test"):
            old, new = (view.results.get(on(view.point, name)) for view in (before, after))
            if old is None or new is None:
                continue
            clients = np.flatnonzero((old[1] > 0) & (new[1] > 0))
            was, now = (correct[clients] / count[clients] for correct, count in (old, new))
            names = names_at(after.client_names, clients.tolist())
            found[name] = Change(name, clients, was, now, after.sizes[clients, 0], names)
        if found:
            yield found


def _joined(seeds: Sequence[Mapping[str, Change]]) -> dict[str, Change]:
    """One change of all seeds' clients for each kind of data."""
    names = [name for name in ("train", "test") if all(name in changes for changes in seeds)]
    found = {}
    for name in names:
        each = [changes[name] for changes in seeds]
        clients, before, after, samples = (
            np.concatenate([getattr(one, part) for one in each]) for part in ("clients", "before", "after", "samples")
        )
        labels = tuple(label for one in each for label in one.labels) if all(one.labels for one in each) else ()
        found[name] = Change(name, clients, before, after, samples, labels)
    return found
