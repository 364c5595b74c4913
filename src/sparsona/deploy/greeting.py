"""What the sides of a run tell each other before it begins: the model, which must be the same, and what may differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparsona.core.errors import SparsonaError
from sparsona.data.names import clean_names
from sparsona.deploy.frames import printable

# On what the last bits of results depend: versions, and the machine.
VERSIONS, MACHINE = ("sparsona", "python", "torch", "numpy"), ("system", "machine", "processor", "gpu")
LAST_BITS = "results may differ from a simulation's in the last bits"


class OtherModelError(SparsonaError):
    """A side of the run whose model or initial weights are not this one's."""


class OtherNamesError(OtherModelError):
    """A side of the run whose classes have other names, or the same ones in another order."""


@dataclass(frozen=True)
class Greeting:
    """What a client tells the server about itself, and what both must agree on.

    Args:
        layout: a digest of the model's names and shapes.
        start: a digest of its initial weights.
        sizes: its training, validation and test examples.
        capacity: the highest density that it can hold.
        environment: versions and machine, on which the last bits of results depend.
        data: a digest of its examples.
        label_counts: of its training examples, if it agrees to share them; None for a count from 1 to 4.
        class_names: what its classes 0, 1, ... are called; None: they are numbers alone.
    """

    layout: str
    start: str
    sizes: tuple[int, int, int]
    capacity: float
    environment: Mapping[str, Any]
    data: str
    label_counts: tuple[int | None, ...] | None = None
    class_names: tuple[str, ...] | None = None

    def as_plain(self) -> dict[str, Any]:
        """Values that JSON can write."""
        return {
            **opening_head(self.layout, self.start, self.environment),
            "sizes": list(self.sizes),
            "capacity": float(self.capacity).hex(),
            "data": self.data,
            "label_counts": None if self.label_counts is None else list(self.label_counts),
            **names_head(self.class_names),
        }


def opening_head(layout: str, start: str, environment: Mapping[str, Any]) -> dict[str, Any]:
    """What every side tells of itself, in the head of a frame."""
    return {
        "layout": layout,
        "start": start,
        "environment": {str(key): str(value) for key, value in environment.items()},
    }


def check_model(head: Mapping[str, Any], layout: str, start: str, whose: str) -> None:
    """Refuse a side whose model is another, before anything is trained.

    Args:
        head: what it reported.
        layout: of the model here.
        start: of the initial weights here.
        whose: who it is, for the message.

    Raises:
        OtherModelError: says which of the two differs.
    """
    for name, mine, what in (("layout", layout, "names and shapes of its model"), ("start", start, "initial weights")):
        if head.get(name) != mine:
            raise OtherModelError(
                f"{whose} has other {what}",
                expected="the same federation file, versions of sparsona and torch, and seed on all sides",
            )


def names_head(names: Sequence[str] | None) -> dict[str, Any]:
    """What the head of a greeting says of the names of classes: nothing where they have none."""
    return {"class_names": list(names)} if names else {}


def read_class_names(head: Mapping[str, Any], num_labels: int | None = None) -> tuple[str, ...] | None:
    """The names of classes that somebody reported; None: none, as older versions do.

    Args:
        head: what was reported.
        num_labels: how many there must be; None: any number.

    Returns:
        The names, safe to print.
    """
    found = head.get("class_names")
    if found is None:
        return None
    if not (isinstance(found, list) and found and all(isinstance(name, str) for name in found)):
        raise SparsonaError("its class names are none", expected="a list of texts")
    if num_labels is not None and len(found) != num_labels:
        raise SparsonaError(f"it has {len(found)} class names", expected=f"{num_labels}, one for each class")
    return clean_names(found, "classes")


def check_class_names(theirs: Sequence[str] | None, known: Sequence[str] | None, who: str, where: str) -> None:
    """Refuse data whose classes are others. Classes without names are taken as they are numbered.

    Args:
        theirs: the names of one side; None or empty: it has none.
        known: those that it must have, likewise.
        who: the side, for the message.
        where: who has the known ones.

    Raises:
        OtherNamesError: names the first difference, and both lists.

    Example:
        >>> try:
        ...     check_class_names(["sit", "walk"], ["walk", "sit"], "site-1", "site-0")
        ... except OtherNamesError as error:
        ...     error.what
        "site-1 calls class 0 'sit', and site-0 'walk'"
    """
    one, other = ([printable(name) for name in names or ()] for names in (theirs, known))
    if not one or not other or one == other:
        return
    place = next(place for place in range(len(one) + 1) if one[place : place + 1] != other[place : place + 1])
    mine, yours = (f"'{names[place]}'" if place < len(names) else "nothing" for names in (one, other))
    raise OtherNamesError(
        f"{who} calls class {place} {mine}, and {where} {yours}",
        expected=f"the class names {_listed(other)}, in this order, and not {_listed(one)}",
        hint="save the data with class_names in the order of the others, and its labels numbered by it; `sparsona "
        "federation new --class-names` fixes one order for all",
    )


def _listed(names: Sequence[str], most: int = 20) -> str:
    return ", ".join(names[:most]) + ", ..." * (len(names) > most)


def read_environment(value: Any) -> dict[str, str]:
    """Versions and machine that somebody reported, as far as they are of interest; {} if it is none."""
    found = value if isinstance(value, Mapping) else {}
    return {key: printable(str(found[key])) for key in (*VERSIONS, *MACHINE) if key in found}


def differing(environments: Iterable[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """In what sides of a run differ: for each such version or part of the machine, what is in use.

    Args:
        environments: of the sides. What one does not tell is not compared.

    Returns:
        The values in use, sorted, of each that has several.

    Example:
        >>> differing([{"torch": "2.11.0", "python": "3.12.1"}, {"torch": "2.12.0"}, {"torch": "2.11.0"}])
        {'torch': ('2.11.0', '2.12.0')}
    """
    reported = list(environments)
    values = {key: sorted({str(one[key]) for one in reported if key in one}) for key in (*VERSIONS, *MACHINE)}
    return {key: tuple(found) for key, found in values.items() if len(found) > 1}


def other_environment(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    """In words what another side has otherwise; "" if nothing.

    Example:
        >>> other_environment({"torch": "2.12.0"}, {"torch": "2.11.0"}).partition(":")[0]
        'torch 2.12.0 (here 2.11.0)'
    """
    found = [f"{key} {theirs[key]} (here {mine[key]})" for key in differing([theirs, mine])]
    return f"{', '.join(found)}: {LAST_BITS}" if found else ""
