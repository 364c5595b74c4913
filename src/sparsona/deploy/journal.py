"""What a peer writes down of a run: a line when it starts, one for each round, and one for each evaluation.

A line is on the disk before anybody is sent what it tells of. So a peer that is killed goes on after its last line, and
plays again what was under way.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sparsona.core.errors import SparsonaError
from sparsona.core.reading import parse_json
from sparsona.deploy.greeting import Greeting, read_class_names
from sparsona.deploy.jobs import answer_head, read_outcome
from sparsona.engine.jobs import Outcome
from sparsona.wire.ledger import Traffic

FORMAT = 1
NAME = "journal.jsonl"
KINDS = ("turn", "evaluation", "end")


@dataclass(frozen=True)
class Opening:
    """The first line: whose journal of which run it is.

    Args:
        run: the run's identity.
        client: the peer.
        greeting: what it tells the others about itself.
    """

    run: str
    client: int
    greeting: Greeting


@dataclass(frozen=True)
class Entry:
    """A line.

    Args:
        kind: a round's turn, an evaluation after a round, or the end of the run.
        round: the round; of an evaluation, how many were completed.
        outcome: what this peer counted and evaluated.
        trained: whether it trained.
        dropped: whether it dropped out of the round, by the plan.
        traffic: what this peer received: charged to it, and to those that sent it.
        lost: whose messages it should have mixed and did not, and why.
        note: what else happened to it.
        ticket: of its State afterwards; "": none.
        message: whether it made a message.
        jobs: how many evaluations took messages that were fetched for them alone.
        down: the bytes of these messages, which are no part of training.
        seconds: how long it took, without waiting for others.
    """

    kind: Literal["turn", "evaluation", "end"]
    round: int
    outcome: Outcome
    trained: bool = False
    dropped: bool = False
    traffic: Mapping[int, Traffic] = field(default_factory=dict)
    lost: Mapping[int, str] = field(default_factory=dict)
    note: str = ""
    ticket: str = ""
    message: bool = False
    jobs: int = 0
    down: int = 0
    seconds: float = 0.0


class Journal:
    """A peer's journal.

    Args:
        folder: its vault.
        shares_labels: whether confusions are written down, which tell its label counts.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     journal = Journal(Path(folder))
        ...     journal.open(Opening("5eed", 0, Greeting("a", "b", (9, 0, 3), 1.0, {}, "c")))
        ...     journal.append(Entry("turn", 0, Outcome(0), trained=True))
        ...     Journal(Path(folder)).read()[1][0].trained
        True
    """

    def __init__(self, folder: Path, shares_labels: bool = False) -> None:
        self.path, self._shares_labels = folder / NAME, shares_labels
        self._length: int | None = None  # of the finished lines; None: not known yet

    def open(self, opening: Opening) -> None:
        """Write the first line of a new journal."""
        first = {"format": FORMAT, "run": opening.run, "client": opening.client}
        self._write(first | opening.greeting.as_plain())

    def append(self, entry: Entry) -> None:
        """Write a line, on the disk itself when this returns."""
        values = {
            "kind": entry.kind,
            "round": entry.round,
            "outcome": answer_head(entry.outcome, self._shares_labels),
            "trained": entry.trained,
            "dropped": entry.dropped,
            "traffic": {
                str(client): [sent.up, sent.down, sent.paper_up, sent.paper_down]
                for client, sent in entry.traffic.items()
            },
            "lost": {str(client): why for client, why in entry.lost.items()},
            "note": entry.note,
            "ticket": entry.ticket,
            "message": entry.message,
            "jobs": entry.jobs,
            "down": entry.down,
            "seconds": float(entry.seconds),
        }
        self._write(values)

    def read(self) -> tuple[Opening | None, list[Entry]]:
        """The journal so far. A last line that was not finished does not count, and is removed when one is written.

        Returns:
            The first line, None if there is none yet, and the others. SparsonaError: the file is not as it was written.
        """
        lines, _ = self._lines()
        if not lines:
            return None, []
        try:
            opening = _read_opening(parse_json(lines[0]))
            entries = [_read_entry(parse_json(line), opening.client) for line in lines[1:]]
            turns = [entry.round for entry in entries if entry.kind == "turn"]
            if turns != list(range(len(turns))):
                raise ValueError("rounds are missing")
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError, SparsonaError) as error:
            what = error.what if isinstance(error, SparsonaError) else str(error)
            raise SparsonaError(
                f"'{self.path}' cannot be read: {what[:200]}",
                expected="the journal as a peer wrote it",
                hint="restore it from a copy",
            ) from None
        return opening, entries

    def _lines(self) -> tuple[list[bytes], int]:
        """The finished lines, and how many bytes they have."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return [], 0
        except OSError as error:
            raise SparsonaError(
                f"'{self.path}' cannot be read: {error.strerror}", expected="the journal of a peer"
            ) from None
        whole = data[: data.rfind(b"\n") + 1]
        return whole.splitlines(), len(whole)

    def _write(self, values: Mapping[str, Any]) -> None:
        is_new = not self.path.exists()
        if self._length is None:
            self._length = self._lines()[1]
        line = json.dumps(values, allow_nan=False).encode() + b"\n"
        try:
            with self.path.open("ab") as file:
                file.truncate(self._length)
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
            if is_new:
                self.path.chmod(0o600)
                folder = os.open(self.path.parent, os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
        except OSError as error:
            raise SparsonaError(
                f"'{self.path}' cannot be written: {error.strerror or error}",
                expected="room for a line",
                hint="free some space: what was written before is intact, and the same command goes on",
            ) from error
        self._length += len(line)


def _read_opening(values: dict[str, Any]) -> Opening:
    if values["format"] != FORMAT:
        raise ValueError(f"it has format {values['format']}, and {FORMAT} is read")
    train, validation, test = (_count(number) for number in values["sizes"])
    counts = values["label_counts"]
    return Opening(
        _text(values["run"]),
        _count(values["client"]),
        Greeting(
            _text(values["layout"]),
            _text(values["start"]),
            (train, validation, test),
            float.fromhex(values["capacity"]),
            {_text(key): _text(value) for key, value in values["environment"].items()},
            _text(values["data"]),
            None if counts is None else tuple(None if number is None else _count(number) for number in counts),
            read_class_names(values),
        ),
    )


def _read_entry(values: dict[str, Any], client: int) -> Entry:
    if values["kind"] not in KINDS:
        raise ValueError(f"a line of kind {str(values['kind'])[:40]!r}")
    flags = {name: values[name] for name in ("trained", "dropped", "message")}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise ValueError("a flag that is none")
    return Entry(
        values["kind"],
        _count(values["round"]),
        read_outcome(values["outcome"], client),
        traffic={int(one): Traffic(*(_count(number) for number in sent)) for one, sent in values["traffic"].items()},
        lost={int(one): _text(why) for one, why in values["lost"].items()},
        note=_text(values["note"]),
        ticket=_text(values["ticket"]),
        jobs=_count(values["jobs"]),
        down=_count(values["down"]),
        seconds=float(values["seconds"]),
        **flags,
    )


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{str(value)[:40]!r} where a count should be")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:40]!r} where a text should be")
    return value
