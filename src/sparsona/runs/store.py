"""A run's folder: made once, locked while used, written so that a crash at any moment loses nothing written before."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import sqlite3
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from sparsona.core.errors import SparsonaError
from sparsona.core.version import VERSION

FORMAT = 1
START_FILE = "start.safetensors"  # the weights that a run begins with, if they come from another run
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
CREATE TABLE IF NOT EXISTS evaluations (
  completed INTEGER, client INTEGER, point TEXT, correct INTEGER, count INTEGER, loss REAL, confusion BLOB,
  PRIMARY KEY (completed, client, point)
);
CREATE TABLE IF NOT EXISTS traits (
  completed INTEGER PRIMARY KEY, kind TEXT, apart REAL, moved REAL, clients BLOB, pairs BLOB
);
"""


@contextlib.contextmanager
def telling_disk_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals into messages a person can act on."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SparsonaError(
                f"the disk is full: '{path}' could not be written",
                expected="free space",
                mend="free some space, then `sparsona resume` this run: what was written before is intact",
            ) from error
        raise SparsonaError(
            f"'{path}' cannot be written: {error.strerror or error}",
            expected="a place where files can be made",
            mend="choose another folder with --out, or mend the permissions of this one",
        ) from error
    except sqlite3.Error as error:
        text = str(error)
        full = "full" in text or "disk I/O" in text
        raise SparsonaError(
            f"the records in '{path}' could not be {'written: the disk is full' if full else 'used'} ({text})",
            expected="free space" if full else "the file as sparsona wrote it",
            mend="free some space, then `sparsona resume` this run: what was written before is intact"
            if full
            else "restore the file from a copy, or start the run again in another folder",
        ) from error


def write_atomically(path: Path, data: bytes) -> None:
    """All of it or nothing, also if power fails: temporary file, fsync, rename, fsync of the folder."""
    aside = path.with_name(f".{path.name}.part")
    with telling_disk_errors(path):
        try:
            with aside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError:
            aside.unlink(missing_ok=True)
            raise


def read_json(path: Path, kind: type = dict) -> Any:
    """A file of ours, or an error that says what is wrong with it."""
    mend = "restore it from a copy, or start the run again in another folder"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SparsonaError(f"'{path}' is missing", expected="a run folder made by sparsona", mend=mend) from None
    except (OSError, ValueError) as error:
        raise SparsonaError(
            f"'{path}' cannot be read: {error}", expected="the file as sparsona wrote it", mend=mend
        ) from None
    if not isinstance(value, kind):
        raise SparsonaError(f"'{path}' holds no {kind.__name__}", expected="the file as sparsona wrote it", mend=mend)
    return value


def environment() -> dict[str, Any]:
    """What exactness depends on: recorded at the start, compared at resume."""
    import torch

    return {
        "sparsona": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
        "processor": _processor(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


class RunFolder:
    """The files of one run. Use as a context manager to hold its lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = filelock.FileLock(str(path / "lock"))
        self._db: sqlite3.Connection | None = None

    @classmethod
    def create(cls, path: Path, config: str, protocol: dict[str, Any], start: bytes | None = None) -> RunFolder:
        """A new folder with its config and START_FILE, locked. Refuses one that holds anything already."""
        make_empty_folder(path)
        folder = cls(path)
        folder._acquire()
        try:
            _check_unused(path)  # again, now that nobody else can be at it
            write_atomically(path / "environment.json", _json(environment()))
            write_atomically(path / "about.json", _json({"format": FORMAT, **protocol}))
            if start is not None:
                write_atomically(path / START_FILE, start)
            write_atomically(path / "config.json", config.encode())  # last: a folder with a config is a run
        except BaseException:
            folder.__exit__()
            raise
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run."""
        if (path / "comparison.json").is_file():
            raise SparsonaError(
                f"'{path}' is a comparison",
                expected="a run",
                mend="`sparsona resume` and `sparsona report` take it as it is; its runs are the folders in it",
            )
        if not (path / "config.json").is_file():
            raise SparsonaError(
                f"'{path}' is not a run",
                expected="a folder made by `sparsona run`, with a config.json inside",
                mend="`sparsona runs` lists the runs in ./runs",
            )
        folder = cls(path)
        if folder.about.get("format") != FORMAT:
            raise SparsonaError(
                f"'{path}' was written in format {folder.about.get('format')}",
                expected=f"format {FORMAT}",
                mend="use the version of sparsona named in its environment.json",
            )
        return folder

    def __enter__(self) -> RunFolder:
        if not self._lock.is_locked:  # a folder just made is locked already
            self._acquire()
        return self

    def _acquire(self) -> None:
        try:
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            raise SparsonaError(
                f"'{self.path}' is in use by another process",
                expected="a run that nobody is working on",
                mend="wait for it, or stop the other process",
            ) from None
        except OSError as error:
            raise SparsonaError(
                f"'{self.path}' cannot be locked: {error.strerror or error}",
                expected="a folder that can be written",
                mend="mend its permissions, or copy it to where you may write",
            ) from error

    def __exit__(self, *_: object) -> None:
        if self._db is not None:
            # Without a journal beside it the file can be copied alone, and read from where nothing can be written.
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("PRAGMA journal_mode = DELETE")
            self._db.close()
            self._db = None
        self._lock.release()

    @property
    def about(self) -> dict[str, Any]:
        return read_json(self.path / "about.json")

    @property
    def config(self) -> dict[str, Any]:
        return read_json(self.path / "config.json")

    @property
    def environment(self) -> dict[str, Any]:
        return read_json(self.path / "environment.json")

    @property
    def summary(self) -> dict[str, Any] | None:
        """The result, or None while the run is unfinished."""
        path = self.path / "summary.json"
        return read_json(path) | {"run": str(self.path)} if path.is_file() else None  # folders are moved

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_atomically(self.path / "summary.json", _json(summary))

    @property
    def has_records(self) -> bool:
        return (self.path / "records.sqlite").exists()

    @property
    def db(self) -> sqlite3.Connection:
        """The records, to be written. Only for the holder of the lock."""
        if self._db is None:
            path = self.path / "records.sqlite"
            with telling_disk_errors(path):
                db = sqlite3.connect(path, isolation_level=None)
                try:
                    db.execute("PRAGMA journal_mode = WAL")
                    db.execute("PRAGMA synchronous = NORMAL")
                    db.executescript(SCHEMA)
                except BaseException:
                    db.close()
                    raise
                self._db = db
        return self._db

    def flush(self) -> None:
        """Bring the records to the disk itself, before a manifest says that they are there."""
        with telling_disk_errors(self.path / "records.sqlite"):
            self.db.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def rewind(self, completed: int, points: Sequence[str]) -> None:
        """Drop what the checkpoint does not know of: it will be made again, the same. Of the round that was reached,
        the evaluations at `points` stay."""
        with self.writing():
            self.db.execute("DELETE FROM rounds WHERE round >= ?", (completed,))
            self.db.execute("DELETE FROM turns WHERE round >= ?", (completed,))
            self.db.execute("DELETE FROM evaluations WHERE completed > ?", (completed,))
            self.db.execute("DELETE FROM traits WHERE completed > ?", (completed,))
            self.db.execute(
                f"DELETE FROM evaluations WHERE completed = ? AND point NOT IN ({', '.join('?' * len(points))})",
                (completed, *points),
            )
        with telling_disk_errors(self.path):
            (self.path / "summary.json").unlink(missing_ok=True)  # of an earlier stop; it can be worked out again

    def check_records(self, completed: int) -> None:
        """Refuse records that lack rounds the checkpoint has: what is summed over them would be too little."""
        path = self.path / "records.sqlite"
        with telling_disk_errors(path):
            (state,) = self.db.execute("PRAGMA quick_check(1)").fetchone()
            (found,) = self.db.execute("SELECT COUNT(*) FROM rounds WHERE round < ?", (completed,)).fetchone()
        if state != "ok" or found != completed:
            what = (
                f"has {found} of the {completed} rounds its checkpoint has" if state == "ok" else f"is damaged: {state}"
            )
            raise SparsonaError(
                f"'{path}' {what}",
                expected="the file as sparsona wrote it",
                mend="restore it from a copy, or start the run again in another folder",
            )

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """One transaction: all rows of a round, or none."""
        with telling_disk_errors(self.path / "records.sqlite"):
            self.db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self.db.execute("ROLLBACK")
                raise

    def insert(self, table: str, rows: Iterable[tuple[Any, ...]]) -> None:
        rows = list(rows)
        if rows:
            marks = ", ".join("?" * len(rows[0]))
            self.db.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", rows)

    def select(self, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Rows of the records; none if the run has not begun. Writes nothing, so anybody may ask at any time."""
        path = self.path / "records.sqlite"
        if not path.exists():
            return []
        with telling_disk_errors(path):
            try:
                with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
                    return db.execute(query, values).fetchall()
            except sqlite3.OperationalError as error:
                if str(error).startswith("no such table"):  # killed while the file was made
                    return []
                raise


def make_empty_folder(path: Path) -> None:
    """Make it, or refuse one that holds anything."""
    with telling_disk_errors(path):
        with contextlib.suppress(FileExistsError):  # a file of that name is told below
            path.mkdir(parents=True, exist_ok=True)
        _check_unused(path)


# What making a run writes before its config: what a kill may leave of a run that never was.
_UNBORN = {
    "lock",
    "environment.json",
    "about.json",
    START_FILE,
    f".{START_FILE}.part",
    *(f".{name}.json.part" for name in ("environment", "about", "config")),
}


def _check_unused(path: Path) -> None:
    if not path.is_dir() or not {entry.name for entry in path.iterdir()} <= _UNBORN:
        raise SparsonaError(
            f"'{path}' is already used",
            expected="a folder that does not exist yet, or an empty one",
            mend="choose another --out, or `sparsona resume` what is there",
        )


def pack_confusion(confusion: Any) -> bytes | None:
    """A small integer matrix as bytes."""
    return None if confusion is None else zlib.compress(np.asarray(confusion, dtype="<i4").tobytes(), 1)


def unpack_confusion(blob: bytes | None) -> np.ndarray | None:
    if blob is None:
        return None
    flat = np.frombuffer(zlib.decompress(blob), dtype="<i4")
    side = int(len(flat) ** 0.5)
    return flat.reshape(side, side)


def pack_numbers(values: Any, kind: str) -> bytes:
    """Numbers of a numpy type such as '<f8' as bytes."""
    return zlib.compress(np.asarray(values, dtype=kind).tobytes(), 1)


def unpack_numbers(blob: bytes, kind: str) -> np.ndarray:
    return np.frombuffer(zlib.decompress(blob), dtype=kind)


def _json(value: dict[str, Any]) -> bytes:
    """An entry a line. Not indented further: that takes Python half a minute for 100,000 clients."""
    lines = (f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items())
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def warn(text: str) -> None:
    """A line a person should see, on stderr so that --json stays clean."""
    print(f"warning: {text}", file=sys.stderr)
