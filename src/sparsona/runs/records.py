"""RUN/records.sqlite: rounds, turns, evaluations and traits as typed rows. All of the SQL is here.

The holder of a folder's lock writes; any process may read at any time, and leaves no trace. The file may come from
somebody else: it is opened as data, with the tables of SCHEMA and nothing else in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sparsona.core.errors import MachineError, SparsonaError
from sparsona.engine.failures import DIVERGED, WITHHELD
from sparsona.runs.files import RESTORE, WRITTEN, check_plain, file_digest

NAME = "records.sqlite"
SCHEMA = """
CREATE TABLE IF NOT EXISTS rounds (
  round INTEGER PRIMARY KEY, lr_scale REAL, num_trained INTEGER, num_aggregated INTEGER, num_dropped INTEGER,
  loss REAL, bytes_up INTEGER, bytes_down INTEGER, paper_up INTEGER, paper_down INTEGER,
  train_flops INTEGER, search_flops INTEGER, seconds REAL
);
CREATE TABLE IF NOT EXISTS turns (
  round INTEGER, client INTEGER, loss REAL, examples INTEGER, steps INTEGER, aggregated INTEGER, dropped INTEGER,
  bytes_up INTEGER, bytes_down INTEGER, paper_up INTEGER, paper_down INTEGER,
  train_flops INTEGER, search_flops INTEGER, PRIMARY KEY (round, client)
);
CREATE TABLE IF NOT EXISTS failures (round INTEGER, client INTEGER, reason TEXT, PRIMARY KEY (round, client));
CREATE TABLE IF NOT EXISTS conditions (round INTEGER PRIMARY KEY, time REAL, num_awake INTEGER, num_late INTEGER);
CREATE TABLE IF NOT EXISTS measures (
  round INTEGER, client INTEGER, name TEXT, numbers BLOB, PRIMARY KEY (round, client, name)
);
CREATE TABLE IF NOT EXISTS evaluations (
  completed INTEGER, client INTEGER, point TEXT, correct INTEGER, count INTEGER, loss REAL, confusion BLOB,
  PRIMARY KEY (completed, client, point)
);
CREATE TABLE IF NOT EXISTS classes (
  completed INTEGER, client INTEGER, point TEXT, seen_correct INTEGER, seen_count INTEGER, unseen_correct INTEGER,
  unseen_count INTEGER, PRIMARY KEY (completed, client, point)
);
CREATE TABLE IF NOT EXISTS client_metrics (
  completed INTEGER, client INTEGER, point TEXT, name TEXT, value REAL, PRIMARY KEY (completed, client, point, name)
);
CREATE TABLE IF NOT EXISTS evaluation_traffic (
  completed INTEGER, is_final INTEGER, clients INTEGER, bytes_up INTEGER, bytes_down INTEGER,
  PRIMARY KEY (completed, is_final)
);
CREATE TABLE IF NOT EXISTS evaluation_failures (
  completed INTEGER, is_final INTEGER, client INTEGER, reason TEXT, PRIMARY KEY (completed, is_final, client)
);
CREATE TABLE IF NOT EXISTS traits (
  completed INTEGER PRIMARY KEY, kind TEXT, apart REAL, moved REAL, clients BLOB, pairs BLOB
);
"""


@dataclass(frozen=True, slots=True)
class RoundRow:
    """A round: sums over its turns. Final tuning is one row more, after the last round."""

    round: int
    lr_scale: float
    num_trained: int
    num_aggregated: int
    num_dropped: int
    loss: float | None
    bytes_up: int
    bytes_down: int
    paper_up: int
    paper_down: int
    train_flops: int
    search_flops: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TurnRow:
    """What one client did in one round."""

    round: int
    client: int
    loss: float
    examples: int
    steps: int
    aggregated: bool
    dropped: bool
    bytes_up: int
    bytes_down: int
    paper_up: int
    paper_down: int
    train_flops: int
    search_flops: int


@dataclass(frozen=True, slots=True)
class FailureRow:
    """Why one client was not heard in one round: it did not answer in time, its answer was refused, or its training
    diverged."""

    round: int
    client: int
    reason: str


@dataclass(frozen=True, slots=True)
class ConditionRow:
    """What was simulated of a round: its time, how many clients were available, how many that trained were late.

    None: not simulated. Rounds of runs that simulate none of them have no row.
    """

    round: int
    time: float | None
    num_awake: int | None
    num_late: int | None


@dataclass(frozen=True, slots=True)
class MeasureRow:
    """What a method measured of one client's turn: one number or several, packed (`pack_numbers`, '<f4')."""

    round: int
    client: int
    name: str
    numbers: bytes


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """One client's result at one point after `completed` rounds; `correct` is None in a regression.

    `confusion` is packed (`pack_confusion`), and is left out, as None, where rows are read for their figures.
    """

    completed: int
    client: int
    point: str
    correct: int | None
    count: int
    loss: float
    confusion: bytes | None = None


@dataclass(frozen=True, slots=True)
class ClassesRow:
    """An evaluation by whether the client has the class among its training data, where no matrix tells."""

    completed: int
    client: int
    point: str
    seen_correct: int
    seen_count: int
    unseen_correct: int
    unseen_count: int


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric of an evaluation; there is no row where it is undefined for the client."""

    completed: int
    client: int
    point: str
    name: str
    value: float


@dataclass(frozen=True, slots=True)
class EvaluationTrafficRow:
    """What was sent for evaluations alone after `completed` rounds; `is_final`: for those at the end of a run.

    It is no part of the bytes of rounds and turns. `bytes_up` is None where answers were not encoded, as in a
    simulation. Evaluations on a message that a client trains on have no row: nothing is sent for them.
    """

    completed: int
    is_final: bool
    clients: int
    bytes_up: int | None
    bytes_down: int


@dataclass(frozen=True, slots=True)
class EvaluationFailureRow:
    """Why a client has no result after `completed` rounds: it was not heard, or has too few examples to tell."""

    completed: int
    is_final: bool
    client: int
    reason: str


@dataclass(frozen=True, slots=True)
class TraitsRow:
    """How far apart clients' traits were: `apart` between two, `moved` of each from its start, both in the mean.

    `clients` and `pairs` are packed (`pack_numbers`): the clients compared, and the distance of every two.
    """

    completed: int
    kind: str
    apart: float | None
    moved: float
    clients: bytes
    pairs: bytes


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all rounds; None where there is none."""

    bytes_up: int | None
    bytes_down: int | None
    paper_up: int | None
    paper_down: int | None
    train_flops: int | None
    search_flops: int | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Effort:
    """Training done by clients: turns in which one trained, and local steps in all of them."""

    turns: int
    steps: int


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """Bytes through the busiest node in all rounds, and the most that went into and out of one in one round.

    `most_paper` is the larger of those two as the papers count.
    """

    total: int
    most_in: int
    most_out: int
    most_paper: int


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A mean over clients after `completed` rounds."""

    completed: int
    mean: float


_TABLES = {
    RoundRow: "rounds",
    TurnRow: "turns",
    EvaluationRow: "evaluations",
    ClassesRow: "classes",
    ConditionRow: "conditions",
    MetricRow: "client_metrics",
    MeasureRow: "measures",
    FailureRow: "failures",
    EvaluationTrafficRow: "evaluation_traffic",
    EvaluationFailureRow: "evaluation_failures",
    TraitsRow: "traits",
}
Row = (
    RoundRow
    | TurnRow
    | FailureRow
    | ConditionRow
    | MeasureRow
    | EvaluationRow
    | EvaluationTrafficRow
    | EvaluationFailureRow
    | ClassesRow
    | MetricRow
    | TraitsRow
)
BY_POINT = ("evaluations", "classes", "client_metrics")  # the tables of what was found at points

# Rows belong together by their first column, the round or the number of completed rounds: these are made in a round,
# those after it. Measures are taken where models are evaluated, and go where evaluations go.
IN_ROUND = ("rounds", "turns", "failures", "conditions")
AFTER = (*BY_POINT, "evaluation_traffic", "evaluation_failures", "traits", "measures")
_SHIFT = {"measures": 1}  # what is added to the first column: the round after which evaluations are
_KEYS = {
    found[1]: found[2].count(",") + 1
    for found in re.finditer(r"EXISTS (\w+) \((?:(?!CREATE).)*?PRIMARY KEY(?: \(([^)]*)\))?", SCHEMA.replace("\n", " "))
    if found[2]
}  # columns of primary keys that have several

# How each table is made, as SQLite keeps it: older versions have fewer of them, and none has another.
_MADE = {
    found[1]: f"CREATE TABLE {found[0]}"
    for text in SCHEMA.split(";")
    if (found := re.search(r"(?<=EXISTS )(\w+).*", text.strip(), re.DOTALL))
}
_SUPER = bytes.fromhex("d9d505f920a163d7")  # ends a journal that names another file, which SQLite would delete
LOCKED_SECONDS = 15.0  # to wait for another program that has the file open
_STEPS = 100_000  # of SQLite's machine between two looks at how many a query has taken
_FIGURES = "completed, client, point, correct, count, loss"  # of an evaluation, without its matrix
_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class Kept:
    """What of the evaluations after the last round of a checkpoint stays when a run is resumed from it: those at
    `points`; what was sent for them, where `everyone` was tested there; and `traits`."""

    points: tuple[str, ...]
    everyone: bool
    traits: bool

    def condition(self, table: str) -> tuple[str, tuple[str, ...]]:
        """The rows of this table that stay, in SQL."""
        if table in BY_POINT:
            return f"point IN ({', '.join('?' * len(self.points))})", self.points
        if table == "traits":
            return ("1" if self.traits else "0"), ()
        if table == "evaluation_traffic":
            return ("NOT is_final" if self.everyone else "0"), ()
        if table == "evaluation_failures":
            # What clients withheld in a turn before this point was evaluated with the turn, and is not made again.
            return ("NOT is_final", ()) if self.everyone else ("NOT is_final AND reason = ?", (WITHHELD,))
        return "1", ()

    def sealed_condition(self, table: str) -> tuple[str, tuple[str, ...]]:
        """Those of them that no later round adds to, as it does what clients withhold in their next turn."""
        if table == "evaluation_failures":
            return ("NOT is_final AND reason != ?", (WITHHELD,)) if self.everyone else ("0", ())
        return self.condition(table)


Digests = Mapping[int, str | None]


@dataclass(frozen=True)
class RecordSeal:
    """Digests of records, in the manifest: of what was made in each round, and of what was evaluated after it.

    None: not known, since rows are about to be dropped. `kept` applies to what was evaluated after the last round;
    None: all of it counts. `file` is the digest of the file itself, of a run that no process plays.
    """

    rounds: Digests = field(default_factory=dict)
    evaluations: Digests = field(default_factory=dict)
    kept: Kept | None = None
    file: str | None = None

    def as_json(self) -> dict[str, Any]:
        kept = None if self.kept is None else [list(self.kept.points), self.kept.everyone, self.kept.traits]
        of = {name: {str(key): one for key, one in getattr(self, name).items()} for name in ("rounds", "evaluations")}
        return {**of, "kept": kept, "file": self.file}

    @classmethod
    def from_json(cls, values: Any) -> RecordSeal:
        """What `as_json` wrote; ValueError, TypeError or KeyError: it did not."""
        kept = values["kept"]
        of = [{int(key): one for key, one in values[name].items()} for name in ("rounds", "evaluations")]
        return cls(
            of[0], of[1], None if kept is None else Kept(tuple(map(str, kept[0])), *map(bool, kept[1:])), values["file"]
        )


@dataclass(frozen=True)
class Bounds:
    """What the rows and blobs of a run can be: clients below this number, and bytes of one blob when it is unpacked."""

    clients: int = 1 << 31
    confusion: int = 1 << 24
    numbers: int = 1 << 24


class Records:
    """The records of one run folder.

    A connection is opened for a query and closed after it. `reading` keeps one open for many; `open_for_writing` until
    `close`, and then queries use it, too.

    Args:
        path: the file, which need not exist yet.
        bounds: of what is in it.
        check: is called once, with the first connection that reads: raises SparsonaError if they are other records.
    """

    def __init__(
        self, path: Path, bounds: Bounds | None = None, check: Callable[[sqlite3.Connection], None] | None = None
    ) -> None:
        self.path, self.bounds = path, bounds or Bounds()
        self._check: Callable[[sqlite3.Connection], None] | None = check
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        self._changed: dict[tuple[str, ...], set[int]] = {IN_ROUND: set(), AFTER: set()}
        self._steps = 0

    @property
    def exist(self) -> bool:
        """Whether anything was ever written."""
        return self.path.exists()

    def is_file(self, known: str | None) -> bool:
        """Whether the file is the one with this digest, and nothing beside it adds rows to it."""
        beside = (self.path.with_name(f"{self.path.name}{suffix}") for suffix in ("-wal", "-journal"))
        return known is not None and known == file_digest(self.path) and not any(map(os.path.lexists, beside))

    # Writing: only for the holder of the folder's lock.

    @property
    def writer(self) -> sqlite3.Connection:
        """The connection that writes, opened when it is first used."""
        if self._writer is None:
            with explain_record_errors(self.path):
                db = self._connect(isolation_level=None)
                try:
                    db.execute("PRAGMA journal_mode = WAL")
                    db.execute("PRAGMA synchronous = NORMAL")
                    db.executescript(SCHEMA)
                except BaseException:
                    db.close()
                    raise
                self._writer = db
        return self._writer

    def _connect(self, mode: str = "rwc", **options: Any) -> sqlite3.Connection:
        """A connection to a file that holds our tables and nothing else."""
        for suffix in ("", "-wal", "-shm", "-journal"):
            check_plain(self.path.with_name(self.path.name + suffix))
        self._check_journal()
        address = f"{self.path.absolute().as_uri()}?mode={mode}"
        db = sqlite3.connect(address, uri=True, timeout=LOCKED_SECONDS, **options)
        try:
            db.execute("PRAGMA trusted_schema = OFF")
            self._check_schema(db)
        except BaseException:
            db.close()
            raise
        return db

    def _connect_to_read(self) -> sqlite3.Connection:
        """A connection that cannot write. What a killed writer had begun is taken back first, as SQLite does for those
        who can: it has a journal only while it opens or closes the file."""
        try:
            return self._connect("ro")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_READONLY_ROLLBACK:
                raise
        self._connect("rw").close()
        return self._connect("ro")

    def _check_journal(self) -> None:
        path = self.path.with_name(f"{self.path.name}-journal")
        try:
            names_another = path.read_bytes()[-len(_SUPER) :] == _SUPER
        except OSError:
            return
        if names_another:
            raise SparsonaError(f"'{path}' names another file", expected="no such journal", hint="remove it")

    def _check_schema(self, db: sqlite3.Connection) -> None:
        """Refuse triggers, views, virtual tables and whatever else is not ours, before it can do anything."""
        for kind, name, table, text in db.execute("SELECT type, name, tbl_name, sql FROM sqlite_master"):
            is_own = table in _TABLES.values() and str(name).startswith("sqlite_autoindex_")
            if kind == "index" and text is None and is_own:
                continue
            if kind != "table" or _MADE.get(name) != text or table != name:
                raise SparsonaError(
                    f"'{self.path}' holds {kind} '{name}', which is not one of a run's tables",
                    expected=WRITTEN,
                    hint="use a copy of the run from where it was made",
                )

    def _count_steps(self) -> int:
        """Ends a query that takes more steps than rows can need that fit into the file, as one of a forged file may."""
        self._steps += _STEPS
        size = self.path.stat().st_size if self.path.exists() else 0
        return int(self._steps > 500_000_000 + 500 * size)

    @property
    def is_writing(self) -> bool:
        """Whether the connection that writes is open."""
        return self._writer is not None

    def close(self) -> None:
        """Close the connection that writes."""
        if self._writer is not None:
            # Without a journal beside it the file can be copied alone, and read from where nothing can be written.
            with contextlib.suppress(sqlite3.Error):
                self._writer.execute("PRAGMA journal_mode = DELETE")
            self._writer.close()
            self._writer = None

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """One transaction: all rows or none. Inside another it is part of that one."""
        db = self.writer
        if db.in_transaction:
            yield
            return
        with explain_record_errors(self.path):
            db.execute("BEGIN IMMEDIATE")
            try:
                yield
                db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
                raise

    def add(self, rows: Iterable[Row]) -> None:
        """Write rows of one kind; a row with the same key is replaced."""
        found = list(rows)
        if not found:
            return
        kind = type(found[0])
        names = [one.name for one in fields(kind)]
        table = _TABLES[kind]
        query = f"INSERT OR REPLACE INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
        shift = _SHIFT.get(table, 0)
        self._changed[IN_ROUND if table in IN_ROUND else AFTER] |= {
            key + shift for key in set(map(attrgetter(names[0]), found))
        }
        with self.writing():
            self.writer.executemany(query, map(attrgetter(*names), found))

    def flush(self) -> None:
        """Bring the rows to the disk itself, before a manifest says that they are there."""
        with explain_record_errors(self.path):
            self.writer.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def rewind(self, completed: int, kept: Kept) -> None:
        """Drop rows past the checkpoint: they will be made again, the same. Of what was evaluated after the round that
        was reached, what `kept` says stays; none is evaluated there without an interruption where it has no points."""
        db = self.writer
        with self.writing():
            for table in IN_ROUND:
                db.execute(f"DELETE FROM {table} WHERE round >= ?", (completed,))
            for table in AFTER:
                key = _key(table)
                db.execute(f"DELETE FROM {table} WHERE {key} > ?", (completed,))
                stays, values = kept.condition(table)
                db.execute(f"DELETE FROM {table} WHERE {key} = ? AND NOT ({stays})", (completed, *values))
        self._changed = {IN_ROUND: set(), AFTER: {completed}}

    def drop_evaluations(self, completed: Sequence[int]) -> None:
        """Drop what was evaluated after these numbers of rounds: a run that goes on does not evaluate there."""
        db = self.writer
        with self.writing():
            for number in completed:
                for table in AFTER:
                    db.execute(f"DELETE FROM {table} WHERE {_key(table)} = ?", (number,))
        self._changed[AFTER] |= set(completed)

    # Digests: what a manifest says of records.

    def sealed(self, before: RecordSeal | None, completed: int, kept: Kept | None) -> RecordSeal:
        """The digests of records of which `completed` rounds are in a checkpoint; only what changed is read again.

        Args:
            before: those of the last manifest; None: everything is read.
            completed: the rounds in the checkpoint.
            kept: what a resumed run keeps of the last evaluations; None: the run is finished.
        """
        if not self.exist:  # a manifest precedes the first record
            return RecordSeal(kept=kept)
        db, found, last = self.writer, [], (completed, kept)
        known = [None, None] if before is None else [before.rounds, before.evaluations]
        with explain_record_errors(self.path):
            for family, there in zip((IN_ROUND, AFTER), known, strict=True):
                digests: dict[int, str | None] = dict(_digests(db, family, last) if there is None else there)
                for key in self._changed[family] if there is not None else ():
                    digests.pop(key, None)
                    digests |= _digests(db, family, last, key)
                past = completed if family is IN_ROUND else completed + 1
                found.append({key: one for key, one in digests.items() if kept is None or key < past})
        return RecordSeal(found[0], found[1], kept)

    def settle(self, completed: int | None) -> None:
        """The digests of all that was written are in the manifest; of what follows `completed` rounds in part."""
        self._changed = {IN_ROUND: set(), AFTER: set() if completed is None else {completed}}

    def compare(
        self, seal: RecordSeal, completed: int, is_finished: bool, db: sqlite3.Connection | None = None
    ) -> None:
        """Refuse records that are not those of a manifest, and say from which round on. Reads everything."""
        if db is None:
            with self.reading():
                db = self._writer or self._reader
                if db is not None:
                    self.compare(seal, completed, is_finished, db)
            return
        with explain_record_errors(self.path):
            (state,) = db.execute("PRAGMA integrity_check(1)").fetchone()
            if state != "ok":
                raise SparsonaError(f"'{self.path}' is damaged: {state}", expected=WRITTEN, hint=RESTORE)
            wrong = []
            for family, known, what in (
                (IN_ROUND, seal.rounds, "the rows of round {0}"),
                (AFTER, seal.evaluations, "what was evaluated after round {1}"),
            ):
                past = None if is_finished else completed if family is IN_ROUND else completed + 1
                there = _digests(db, family, (completed, None if is_finished else seal.kept))
                for key in sorted({*known, *there}):
                    if (past is None or key < past) and known.get(key, "") not in (None, there.get(key)):
                        wrong.append((key + (family is IN_ROUND), what.format(key + 1, key)))
        if wrong:
            first = min(wrong)
            raise SparsonaError(
                f"'{self.path}' differs since round {first[0]}: {first[1]} are not those of this run's checkpoint",
                expected="the rows that were recorded",
                hint="restore the file that belongs to this run, or start the run again in another folder",
            )

    def check_values(self, db: sqlite3.Connection) -> None:
        """Refuse values that no row of ours has: texts for numbers, clients that do not exist."""
        with explain_record_errors(self.path):
            there = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            for kind, table in _TABLES.items():
                if table in there and db.execute(*_odd_values(kind, table, self.bounds.clients)).fetchone():
                    raise SparsonaError(
                        f"'{self.path}' has values in '{table}' that no run records", expected=WRITTEN, hint=RESTORE
                    )

    def check(self, completed: int) -> None:
        """Refuse records that lack rounds the checkpoint has: what is summed over them would be too little."""
        db = self.writer
        with explain_record_errors(self.path):
            (state,) = db.execute("PRAGMA quick_check(1)").fetchone()
            (found,) = db.execute("SELECT COUNT(*) FROM rounds WHERE round < ?", (completed,)).fetchone()
        if state != "ok" or found != completed:
            what = (
                f"has {found} of the {completed} rounds its checkpoint has" if state == "ok" else f"is damaged: {state}"
            )
            raise SparsonaError(
                f"'{self.path}' {what}",
                expected="the file as sparsona wrote it",
                hint="restore it from a copy, or start the run again in another folder",
            )

    # Reading: for any process, at any time.

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """One connection for all queries inside. It is closed afterwards: an open one would keep the journal there."""
        if self._writer is not None or self._reader is not None or not self.exist:
            yield
            return
        with explain_record_errors(self.path):
            self._reader = self._connect_to_read()
            self._reader.set_progress_handler(self._count_steps, _STEPS)
        try:
            if self._check is not None:
                self._steps = 0
                self._check(self._reader)
                self._check = None
            yield
        finally:
            self._reader.close()
            self._reader = None

    def _rows(self, kind: Callable[..., _Kind], query: str, values: Sequence[Any] = ()) -> list[_Kind]:
        """Rows by the names of their columns; none if the run has not begun."""
        with self.reading(), explain_record_errors(self.path):
            db = self._writer or self._reader
            if db is None:
                return []
            self._steps = 0
            try:
                found = db.execute(query, values)
            except sqlite3.OperationalError as error:
                if str(error).startswith("no such table"):  # killed while the file was made
                    return []
                raise
            names = [column[0] for column in found.description]
            return [kind(**dict(zip(names, row, strict=True))) for row in found.fetchall()]

    def _value(self, query: str, values: Sequence[Any] = ()) -> Any:
        """The value called `value` of the first row; None if there is none."""
        found: list[dict[str, Any]] = self._rows(dict, query, values)
        return found[0]["value"] if found else None

    def rounds(self) -> list[RoundRow]:
        """Every round, in order."""
        return self._rows(RoundRow, "SELECT * FROM rounds ORDER BY round")

    def turns(self, round_: int | None = None) -> list[TurnRow]:
        """The turns of one round, or all of them, in the order of rounds and clients."""
        which = "" if round_ is None else "WHERE round = ?"
        values = () if round_ is None else (round_,)
        return self._rows(TurnRow, f"SELECT * FROM turns {which} ORDER BY round, client", values)

    def failures(self) -> list[FailureRow]:
        """Who was not heard, and why, in the order of rounds and clients."""
        return self._rows(FailureRow, "SELECT * FROM failures ORDER BY round, client")

    def fruitless(self) -> list[str]:
        """Of the last rounds in a row in which training diverged and nobody trained, how the first turn of each went,
        the last round first."""
        reasons: dict[int, list[str]] = {}
        for row in self.failures():
            reasons.setdefault(row.round, []).append(row.reason)
        found = []
        for one in reversed(self.rounds()):
            why = reasons.get(one.round, [])
            if one.num_trained or not why or not all(reason.startswith(DIVERGED) for reason in why):
                break
            found.append(why[0])
        return found

    def conditions(self) -> list[ConditionRow]:
        """What was simulated of rounds, in order; none where nothing was."""
        return self._rows(ConditionRow, "SELECT * FROM conditions ORDER BY round")

    def evaluation_traffic(self) -> list[EvaluationTrafficRow]:
        """What was sent for evaluations alone, in order; none where an older version made the run."""
        found = self._rows(EvaluationTrafficRow, "SELECT * FROM evaluation_traffic ORDER BY completed, is_final")
        return [replace(row, is_final=bool(row.is_final)) for row in found]

    def evaluation_failures(self) -> list[EvaluationFailureRow]:
        """Who has no result, and why, in the order of rounds and clients."""
        query = "SELECT * FROM evaluation_failures ORDER BY completed, is_final, client"
        return [replace(row, is_final=bool(row.is_final)) for row in self._rows(EvaluationFailureRow, query)]

    def measures(self) -> list[MeasureRow]:
        """What methods measured of turns, in the order of rounds, clients and names."""
        return self._rows(MeasureRow, "SELECT * FROM measures ORDER BY round, client, name")

    def evaluations(self, completed: int | None = None, point: str | None = None) -> list[EvaluationRow]:
        """Evaluations after so many rounds, at this point, or all; in the order of rounds, clients and points."""
        wanted = {"completed": completed, "point": point}
        given = {name: value for name, value in wanted.items() if value is not None}
        which = f"WHERE {' AND '.join(f'{name} = ?' for name in given)}" if given else ""
        query = f"SELECT {_FIGURES} FROM evaluations {which} ORDER BY completed, client, point"
        return self._rows(EvaluationRow, query, tuple(given.values()))

    def confusions(self, completed: int, point: str) -> dict[int, np.ndarray]:
        """Each client's matrix of true and predicted classes, where one was kept."""
        query = "SELECT * FROM evaluations WHERE completed = ? AND point = ? AND confusion IS NOT NULL ORDER BY client"
        rows = self._rows(EvaluationRow, query, (completed, point))
        most = self.bounds.confusion
        found = {row.client: unpack_confusion(row.confusion, most) for row in rows if row.confusion is not None}
        if len(shapes := {matrix.shape for matrix in found.values()}) > 1:
            raise _damaged(f"matrices of {' and '.join(map(str, sorted(shapes)))} entries")
        return found

    def classes(self, completed: int, point: str) -> list[ClassesRow]:
        """Each client's counts on classes that it has and has not, where no matrix was kept."""
        query = "SELECT * FROM classes WHERE completed = ? AND point = ? ORDER BY client"
        return self._rows(ClassesRow, query, (completed, point))

    def metrics(self, completed: int | None = None, point: str | None = None) -> list[MetricRow]:
        """Metrics of clients after so many rounds, at this point, or all; none where an older version made the run."""
        wanted = {"completed": completed, "point": point}
        given = {name: value for name, value in wanted.items() if value is not None}
        which = f"WHERE {' AND '.join(f'{name} = ?' for name in given)}" if given else ""
        query = f"SELECT * FROM client_metrics {which} ORDER BY completed, client, point, name"
        return self._rows(MetricRow, query, tuple(given.values()))

    def metric_curve(self, name: str, point: str) -> list[CurvePoint]:
        """The mean of a metric over the clients that it is defined for against completed rounds."""
        query = "SELECT completed, AVG(value) AS mean FROM client_metrics WHERE name = ? AND point = ? "
        return self._rows(CurvePoint, query + "GROUP BY completed ORDER BY completed", (name, point))

    def has_evaluations(self) -> bool:
        """Whether any round was evaluated yet."""
        return self.last_evaluated() is not None

    def last_evaluated(self, point: str | None = None) -> int | None:
        """The number of rounds after the last evaluation, at this point or at any."""
        which, values = ("", ()) if point is None else ("WHERE point = ?", (point,))
        return self._value(f"SELECT MAX(completed) AS value FROM evaluations {which}", values)

    def points(self) -> list[str]:
        """Every point at which clients were evaluated."""
        found: list[dict[str, Any]] = self._rows(dict, "SELECT DISTINCT point FROM evaluations ORDER BY point")
        return [row["point"] for row in found]

    def accuracy_curve(self, point: str) -> list[CurvePoint]:
        """Mean accuracy over clients against completed rounds."""
        return self._curve("AVG(CAST(correct AS REAL) / count)", point)

    def weighted_curve(self, point: str) -> list[CurvePoint]:
        """Mean accuracy over clients, weighted by their examples, against completed rounds."""
        return self._curve("CAST(SUM(correct) AS REAL) / SUM(count)", point)

    def loss_curve(self, point: str) -> list[CurvePoint]:
        """Mean loss over clients against completed rounds."""
        return self._curve("AVG(loss)", point)

    def _curve(self, figure: str, point: str) -> list[CurvePoint]:
        query = f"SELECT completed, {figure} AS mean FROM evaluations WHERE point = ? "
        return self._rows(CurvePoint, query + "GROUP BY completed ORDER BY completed", (point,))

    def totals(self) -> Totals:
        """Sums over all rounds."""
        names = [one.name for one in fields(Totals)]
        query = f"SELECT {', '.join(f'SUM({name}) AS {name}' for name in names)} FROM rounds"
        found = self._rows(Totals, query)
        return found[0] if found else Totals(**dict.fromkeys(names))

    def effort(self, rounds: int) -> tuple[Effort, Effort]:
        """What clients trained in the `rounds` of the run, and in its final tuning."""
        query = "SELECT COALESCE((SELECT SUM(num_trained) FROM rounds WHERE {0}), 0) AS turns, "
        query += "COALESCE((SELECT SUM(steps) FROM turns WHERE {0}), 0) AS steps"
        of_rounds, of_tuning = (
            self._rows(Effort, query.format(which), (rounds, rounds)) for which in ("round < ?", "round >= ?")
        )
        return (of_rounds or [Effort(0, 0)])[0], (of_tuning or [Effort(0, 0)])[0]

    def steps_by_round(self) -> list[int]:
        """Local steps in each round, in order; final tuning is the last of them."""
        query = "SELECT COALESCE((SELECT SUM(steps) FROM turns WHERE turns.round = rounds.round), 0) AS value"
        found: list[dict[str, Any]] = self._rows(dict, f"{query} FROM rounds ORDER BY round")
        return [row["value"] for row in found]

    def server_load(self) -> NodeLoad:
        """The load of a server, through which everything passes."""
        query = "SELECT SUM(bytes_up + bytes_down) AS total, MAX(bytes_up) AS most_in, MAX(bytes_down) AS most_out, "
        return self._load(query + "MAX(MAX(paper_up, paper_down)) AS most_paper FROM rounds")

    def peer_load(self) -> NodeLoad:
        """The load of the busiest peer."""
        by_client = "SELECT SUM(bytes_up + bytes_down) AS through FROM turns GROUP BY client"
        query = f"SELECT (SELECT MAX(through) FROM ({by_client})) AS total, "
        query += "MAX(bytes_down) AS most_in, MAX(bytes_up) AS most_out, MAX(MAX(paper_up, paper_down)) AS most_paper "
        return self._load(query + "FROM turns")

    def _load(self, query: str) -> NodeLoad:
        """Of a run without rounds, nothing."""
        found: list[dict[str, int | None]] = self._rows(dict, query)
        return NodeLoad(**{name: value or 0 for name, value in found[0].items()})

    def mean_upload(self) -> float | None:
        """The mean upload of the turns in which one was sent, as the papers count; None: in none."""
        return self._value("SELECT AVG(paper_up) AS value FROM turns WHERE paper_up > 0")

    def trained_clients(self) -> set[int]:
        """Clients that made a step in any turn."""
        return self._clients("steps")

    def kept_clients(self) -> set[int]:
        """Clients whose work was not lost in every turn."""
        return self._clients("NOT dropped")

    def _clients(self, condition: str) -> set[int]:
        found: list[dict[str, Any]] = self._rows(dict, f"SELECT DISTINCT client FROM turns WHERE {condition}")
        return {row["client"] for row in found}

    def traits(self) -> list[TraitsRow]:
        """What was recorded of clients' traits, in order."""
        return self._rows(TraitsRow, "SELECT * FROM traits ORDER BY completed")


def _key(table: str) -> str:
    """The round after which rows of this table were made, in SQL."""
    return "round + 1" if table in _SHIFT else "completed"


def _digests(
    db: sqlite3.Connection, family: Sequence[str], last: tuple[int, Kept | None], only: int | None = None
) -> dict[int, str]:
    """A digest of the rows of a family for each round, or `only` one. Of those after the round `last`, what is kept."""
    there = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    completed, kept = last
    states: dict[int, Any] = {}
    for table in family:
        if table not in there:  # of an older version
            continue
        shift, order = _SHIFT.get(table, 0), ", ".join(str(i + 1) for i in range(_KEYS.get(table, 1)))
        key = "round" if table in IN_ROUND or shift else "completed"
        terms: list[str] = ["1"]
        values: list[Any] = []
        if only is not None:
            terms.append(f"{key} = ?")
            values.append(only - shift)
        if kept is not None and family is AFTER and only in (None, completed):
            stays, names = kept.sealed_condition(table)
            terms.append(f"({key} != ? OR ({stays}))")
            values += [completed - shift, *names]
        rows = db.execute(f"SELECT * FROM {table} WHERE {' AND '.join(terms)} ORDER BY {order}", values)
        for number, group in groupby(rows, itemgetter(0)):
            if not isinstance(number, int):
                raise sqlite3.DatabaseError(f"a row of '{table}' has no round")
            state = states.setdefault(number + shift, hashlib.blake2b(digest_size=6))
            state.update(table.encode())
            for row in group:
                state.update(repr(row).encode())
    return {number: state.hexdigest() for number, state in states.items()}


_TYPES = {
    "int": "'integer'",
    "bool": "'integer'",
    "float": "'real', 'integer', 'null'",
    "str": "'text'",
    "bytes": "'blob'",
}


def _odd_values(kind: type[Any], table: str, clients: int) -> tuple[str, tuple[int, ...]]:
    """A query for a row with a value that is not of its column's type, or of a client or round that cannot be."""
    odd, values = [], []
    for one in fields(kind):
        name, _, rest = str(one.type).partition(" | ")
        allowed = _TYPES[name] + (", 'null'" if rest else "")
        odd.append(f"typeof({one.name}) NOT IN ({allowed})")
        if one.name in ("client", "round", "completed"):
            odd.append(f"{one.name} NOT BETWEEN 0 AND ?")
            values.append(clients - 1 if one.name == "client" else 1 << 31)
        if one.name in ("seconds", "time", "lr_scale"):
            odd.append(f"{one.name} NOT BETWEEN 0 AND ?")
            values.append(1 << 53)  # infinitely many are none
    return f"SELECT 1 FROM {table} WHERE {' OR '.join(odd)} LIMIT 1", tuple(values)


@contextlib.contextmanager
def explain_record_errors(path: Path) -> Iterator[None]:
    """Turn SQLite errors into messages that a user can act on."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:  # a damaged file may have names that are no text
        text = str(error)
        full, locked = "full" in text or "disk I/O" in text, "locked" in text or "busy" in text
        what, expected, hint = "used", WRITTEN, "restore the file from a copy, or start the run again in another folder"
        if full:
            what, expected = "written: the disk is full", "free space"
            hint = "free some space, then `sparsona resume` this run: what was written before is intact"
        elif locked:
            what, expected = "written: another program has them open", "a file that no other program writes to"
            hint = "close it, then `sparsona resume` this run: what was written before is intact"
        elif "readonly" in text:
            what, expected = "read: their writer was killed, and left a journal", "a folder that can be written to"
            hint = "copy the folder to where it can be, and use the copy: what was not finished is taken back there"
        elif "interrupted" in text:
            what = "read: a query took longer than any file of this size needs"
        kind = MachineError if full or locked else SparsonaError
        raise kind(f"the records in '{path}' could not be {what} ({text})", expected=expected, hint=hint) from error


def pack_confusion(confusion: Any) -> bytes | None:
    """A small integer matrix as bytes."""
    return None if confusion is None else zlib.compress(np.asarray(confusion, dtype="<i4").tobytes(), 1)


def unpack_confusion(blob: bytes, most: int = Bounds.confusion) -> np.ndarray:
    """The inverse of pack_confusion."""
    flat = unpack_numbers(blob, "<i4", most)
    side = int(len(flat) ** 0.5)
    if side * side != len(flat) or not side:
        raise _damaged(f"a matrix of {len(flat)} entries")
    return flat.reshape(side, side)


def pack_numbers(values: Any, kind: str) -> bytes:
    """Numbers of a numpy type such as '<f8' as bytes."""
    return zlib.compress(np.asarray(values, dtype=kind).tobytes(), 1)


def unpack_numbers(blob: bytes, kind: str, most: int = Bounds.numbers) -> np.ndarray:
    """The inverse of pack_numbers. More than `most` bytes are refused before they are unpacked."""
    unpacking = zlib.decompressobj()
    try:
        data = unpacking.decompress(blob, most + 1)
        if len(data) > most:
            raise _damaged(f"numbers of more than {most:,} bytes")
        if not unpacking.eof or unpacking.unused_data:
            raise _damaged("numbers that are cut off")
        return np.frombuffer(data, dtype=kind)
    except (zlib.error, ValueError, TypeError) as error:
        raise _damaged(str(error)) from None


def _damaged(what: str) -> SparsonaError:
    return SparsonaError(f"the records are damaged: {what}", expected=WRITTEN, hint=RESTORE)
