"""The clients of a run on several machines, as its server, or who gathers it, knows them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, overload

import numpy as np

from sparsona.core.round import Client
from sparsona.deploy.federation_file import Member
from sparsona.deploy.greeting import differing, names_head, read_class_names, read_environment
from sparsona.engine.pace import with_conditions
from sparsona.engine.plan import Plan
from sparsona.experiment.terms import Terms
from sparsona.runs.facts import RunFacts
from sparsona.runs.folder import GUESTS_FILE, read_json, write_atomically


@dataclass
class Guest:
    """What the server knows of one client."""

    sizes: tuple[int, int, int] = (0, 0, 0)
    data: str = ""
    label_counts: tuple[int, ...] | None = None  # FEW for a count from 1 to 4
    environment: Mapping[str, str] = field(default_factory=dict)
    class_names: tuple[str, ...] | None = None


def joint_digest(digests: Sequence[str]) -> str:
    """A digest of the clients' digests of their data, "" for those that were not there."""
    return hashlib.blake2b(json.dumps(list(digests)).encode(), digest_size=16).hexdigest()


def agreed_names(terms: Terms, guests: Iterable[Guest]) -> tuple[str, ...]:
    """What classes are called in a run, by its file or by the clients that have names; empty: nobody has any."""
    named = {guest.class_names for guest in guests if guest.class_names}
    return terms.class_names or (named.pop() if len(named) == 1 else ())


def with_guests(
    facts: RunFacts, terms: Terms, guests: Sequence[Guest], environment: Mapping[str, Any] | None = None
) -> RunFacts:
    """The facts of a run, with what its clients said of their data, and in what they and the server differ."""
    counts = [guest.label_counts for guest in guests]
    return replace(
        facts,
        federation=joint_digest([guest.data for guest in guests]),
        client_digest="",
        targets=terms.kind.targets,
        sizes=np.array([guest.sizes for guest in guests], dtype=np.int64),
        label_counts=None if None in counts else np.array(counts, dtype=np.int64),
        client_names=tuple(one.name for one in terms.file.clients),
        class_names=agreed_names(terms, guests),
        differing=differing([*(guest.environment for guest in guests), environment or {}]),
    )


def write_guests(path: Path, guests: Mapping[int, Guest], since: Mapping[int, int]) -> None:
    """Note who takes part in a run, since how many rounds, with what data: a server that is started again knows them.

    Args:
        path: the run's folder.
        guests: all that are known.
        since: with how many completed rounds those who take part began.
    """
    found = [
        {
            "client": client,
            "since": rounds,
            "sizes": guests[client].sizes,
            "data": guests[client].data,
            "label_counts": guests[client].label_counts,
            "environment": guests[client].environment,
            **names_head(guests[client].class_names),
        }
        for client, rounds in since.items()
    ]
    write_atomically(path / GUESTS_FILE, (json.dumps(found, indent=1) + "\n").encode())


def read_guests(path: Path) -> dict[int, tuple[int, Guest]]:
    """What `write_guests` wrote into a run's folder: since when clients took part, and what they said."""
    found = {}
    for row in read_json(path / GUESTS_FILE, list):
        counts = None if row["label_counts"] is None else tuple(row["label_counts"])
        about = read_environment(row.get("environment"))  # runs of older versions lack it
        guest = Guest(tuple(row["sizes"]), row["data"], counts, about, read_class_names(row))
        found[row["client"]] = (row["since"], guest)
    return found


def guests_at_start(path: Path) -> list[int]:
    """Those who took part from the first round of a run on."""
    return [client for client, (since, _) in read_guests(path).items() if since == 0]


class Cards(Sequence[Client]):
    """The clients of a run as methods see them. Cards of late clients are filled in here when they come.

    A run depends on when that is, for methods know how many examples the largest client has.

    Args:
        members: the roster. Nothing is known of their data yet.
        plan: the run's, which may give clients learning rates and epochs of their own.
    """

    def __init__(self, members: Sequence[Member], plan: Plan) -> None:
        cards = [Client(one.index, 0, one.capacity, 0, len(members), 0) for one in members]
        self._cards = list(with_conditions(plan, cards))

    def fill(self, sizes: Mapping[int, Sequence[int]]) -> None:
        """From now on these clients take part, and no others.

        Args:
            sizes: of each its training, validation and test examples.
        """
        most = max((counts[0] for counts in sizes.values()), default=0)
        for client, (train, validation, _) in sizes.items():
            self._cards[client] = replace(
                self._cards[client], num_examples=train, num_validation=validation, most_examples=most
            )

    @overload
    def __getitem__(self, index: int) -> Client: ...

    @overload
    def __getitem__(self, index: slice) -> list[Client]: ...

    def __getitem__(self, index: int | slice) -> Client | list[Client]:
        return self._cards[index]

    def __len__(self) -> int:
        return len(self._cards)
