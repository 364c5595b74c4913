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
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from sparsona.core.errors import SparsonaError
from sparsona.core.version import VERSION

FORMAT = 1
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
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise SparsonaError(
                f"'{path}' cannot be written: {error.strerror}", mend="choose another folder with --out"
            ) from error
        raise
    except sqlite3.Error as error:
        text = str(error)
        full = "full" in text or "disk I/O" in text
        raise SparsonaError(
            f"the records in '{path}' could not be {'written: the disk is full' if full else 'used'} ({text})",
            mend="free some space, then `sparsona resume` this run" if full else "restore the folder from a copy",
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


def read_json(path: Path) -> Any:
    """A file of ours, or an error that says what is wrong with it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SparsonaError(f"'{path}' is missing", expected="a run folder made by sparsona") from None
    except (OSError, ValueError) as error:
        raise SparsonaError(
            f"'{path}' cannot be read: {error}", mend="restore it from a copy, or start the run again"
        ) from None


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
    def create(cls, path: Path, config: str, protocol: dict[str, Any]) -> RunFolder:
        """A new folder with its config. Refuses one that holds anything already."""
        with telling_disk_errors(path):
            try:
                path.mkdir(parents=True, exist_ok=False)
            except FileExistsError:
                if not path.is_dir() or any(path.iterdir()):
                    raise SparsonaError(
                        f"'{path}' is already used",
                        expected="a folder that does not exist yet, or an empty one",
                        mend="choose another --out, or `sparsona resume` the run that is there",
                    ) from None
            except NotADirectoryError:
                raise SparsonaError(f"'{path}' lies inside a file, not a folder", mend="choose another --out") from None
        folder = cls(path)
        write_atomically(path / "environment.json", _json(environment()))
        write_atomically(path / "about.json", _json({"format": FORMAT, **protocol}))
        write_atomically(path / "config.json", config.encode())  # last: a folder with a config is a run
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run."""
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
        try:
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            raise SparsonaError(
                f"'{self.path}' is in use by another process",
                expected="a run that nobody is working on",
                mend="wait for it, or stop the other process",
            ) from None
        except OSError as error:
            raise SparsonaError(f"'{self.path}' cannot be locked: {error}", mend="choose a writable folder") from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._db is not None:
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
        return read_json(path) if path.is_file() else None

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_atomically(self.path / "summary.json", _json(summary))

    @property
    def db(self) -> sqlite3.Connection:
        if self._db is None:
            path = self.path / "records.sqlite"
            with telling_disk_errors(path):
                self._db = sqlite3.connect(path, isolation_level=None)
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = NORMAL")
                self._db.executescript(SCHEMA)
        return self._db

    def forget_from(self, completed: int) -> None:
        """Drop rows that the checkpoint does not know of: they will be made again, the same."""
        with self.writing():
            self.db.execute("DELETE FROM rounds WHERE round >= ?", (completed,))
            self.db.execute("DELETE FROM turns WHERE round >= ?", (completed,))
            self.db.execute("DELETE FROM evaluations WHERE completed > ?", (completed,))
            self.db.execute(
                "DELETE FROM evaluations WHERE completed = ? AND point NOT IN ('received', 'global', 'trained')",
                (completed,),
            )

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """One transaction: all rows of a round, or none."""
        with telling_disk_errors(self.path / "records.sqlite"):
            self.db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self.db.execute("ROLLBACK")
                raise
            self.db.execute("COMMIT")

    def insert(self, table: str, rows: Iterable[tuple[Any, ...]]) -> None:
        rows = list(rows)
        if rows:
            marks = ", ".join("?" * len(rows[0]))
            self.db.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", rows)

    def select(self, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        with telling_disk_errors(self.path / "records.sqlite"):
            return self.db.execute(query, values).fetchall()


def pack_confusion(confusion: Any) -> bytes | None:
    """A small integer matrix as bytes."""
    return None if confusion is None else zlib.compress(np.asarray(confusion, dtype="<i4").tobytes(), 1)


def unpack_confusion(blob: bytes | None) -> np.ndarray | None:
    if blob is None:
        return None
    flat = np.frombuffer(zlib.decompress(blob), dtype="<i4")
    side = int(len(flat) ** 0.5)
    return flat.reshape(side, side)


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def warn(text: str) -> None:
    """A line a person should see, on stderr so that --json stays clean."""
    print(f"warning: {text}", file=sys.stderr)
