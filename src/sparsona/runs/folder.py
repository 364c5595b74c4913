"""A run's folder: made once, locked while used, written so that a crash at any moment loses nothing written before."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from sparsona.core.errors import SparsonaError
from sparsona.core.files import replace_file
from sparsona.core.printable import printable
from sparsona.core.reading import MOST_BYTES, parse_json, read_text
from sparsona.core.version import VERSION
from sparsona.runs import records
from sparsona.runs.facts import FORMAT, RunFacts
from sparsona.runs.records import Records
from sparsona.runs.stopping import MEASURES

START_FILE = "start.safetensors"  # the weights that a run begins with, if they come from another run
INITIAL_FILE = "initial.safetensors"  # those of a module that was passed from Python
# What the machines of a run on several of them agreed on, and which of them took part.
FEDERATION_FILE, GUESTS_FILE, SERVER_FILE = "federation.toml", "guests.json", "server.json"
MANIFEST = Path("checkpoint") / "manifest.json"  # what it does not name does not exist


@contextlib.contextmanager
def explain_disk_errors(path: Path) -> Iterator[None]:
    """Turn operating system errors into messages that a user can act on."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SparsonaError(
                f"the disk is full: '{path}' could not be written",
                expected="free space",
                hint="free some space, then `sparsona resume` this run: what was written before is intact",
            ) from error
        raise SparsonaError(
            f"'{path}' cannot be written: {error.strerror or error}",
            expected="a place where files can be made",
            hint="choose another folder with --out, or change the permissions of this one",
        ) from error


def write_atomically(path: Path, data: bytes) -> None:
    """All of it or nothing, also if power fails: temporary file, fsync, rename, fsync of the folder."""
    with explain_disk_errors(path), replace_file(path, is_durable=True) as file:
        file.write(data)


def read_json(path: Path, kind: type = dict) -> Any:
    """Read a file that sparsona wrote, or raise an error that says what is wrong with it."""
    hint = "restore it from a copy, or start the run again in another folder"
    try:
        value = parse_json(read_text(path, MOST_BYTES))
    except FileNotFoundError:
        raise SparsonaError(f"'{path}' is missing", expected="a run folder made by sparsona", hint=hint) from None
    except (OSError, ValueError) as error:
        raise SparsonaError(
            f"'{path}' cannot be read: {error}", expected="the file as sparsona wrote it", hint=hint
        ) from None
    if not isinstance(value, kind):
        raise SparsonaError(f"'{path}' holds no {kind.__name__}", expected="the file as sparsona wrote it", hint=hint)
    return value


def environment() -> dict[str, Any]:
    """What exactness depends on: recorded at the start, compared at resume."""
    import torch

    from sparsona.core.torch_state import numeric_settings

    return {
        "sparsona": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
        "processor": processor(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        **numeric_settings(),
    }


def processor() -> str:
    """The name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


@dataclass(frozen=True)
class Reached:
    """How far a run's checkpoint has got."""

    completed: int
    finished: bool


def reached(path: Path) -> Reached:
    """How far the run in this folder has got, by its manifest."""
    if not (path / MANIFEST).exists():
        return Reached(0, False)
    manifest = read_json(path / MANIFEST)
    try:
        return Reached(manifest["completed"], manifest["finished"])
    except KeyError as error:
        raise SparsonaError(
            f"'{path / MANIFEST}' has no {error}",
            expected="the file as sparsona wrote it",
            hint="restore it from a copy, or start the run again in another folder",
        ) from None


class RunFolder:
    """The files of one run. Use as a context manager to hold its lock.

    Facts, options and environment are read once: they do not change while a run exists, but for what `learn` adds.
    """

    def __init__(self, path: Path, facts: RunFacts) -> None:
        self.path, self.facts = path, facts
        self.records = Records(path / records.NAME)
        self._lock = filelock.FileLock(str(path / "lock"))

    @classmethod
    def create(
        cls, path: Path, config: str, facts: RunFacts, start: bytes | None = None, initial: bytes | None = None
    ) -> RunFolder:
        """A new folder with its config, START_FILE and INITIAL_FILE, locked. Refuses one that holds anything."""
        make_empty_folder(path)
        folder = cls(path, facts)
        folder._acquire()
        try:
            _check_unused(path)  # again, now that no other process can write to it
            write_atomically(path / "environment.json", _json(environment()))
            folder.learn(replace(facts, config=config_digests(json.loads(config))))
            for name, data in ((START_FILE, start), (INITIAL_FILE, initial)):
                if data is not None:
                    write_atomically(path / name, data)
            write_atomically(path / "config.json", config.encode())  # last: a folder with a config is a run
        except BaseException:
            folder.__exit__()
            raise
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run."""
        if (path / "comparison.json").is_file():
            inside = sorted(str(found.parent) for found in path.glob("*/config.json"))
            raise SparsonaError(
                f"'{path}' is a comparison",
                expected=f"a run, such as {inside[0]}" if inside else "a run",
                hint="`sparsona resume` and `sparsona report` take it as it is; its runs are the folders in it"
                + (f": {', '.join(Path(one).name for one in inside)}" if inside else ""),
            )
        if not (path / "config.json").is_file():
            raise SparsonaError(
                f"'{path}' is not a run",
                expected="a folder made by `sparsona run`, with a config.json inside",
                hint="`sparsona runs` lists the runs in ./runs",
            )
        return cls(path, RunFacts.from_json(read_json(path / "about.json"), str(path)))

    def check_config(self) -> None:
        """Raise SparsonaError if config.json is not what the run was made with; older runs have no digest."""
        made, now = self.facts.config, config_digests(self.config)
        changed = sorted(key for key in {*made, *now} if made.get(key) != now.get(key)) if made else []
        if (
            changed == ["rounds"]
            and self.facts.extensions
            and self.config["rounds"] == self.facts.extensions[-1].rounds
        ):
            return  # rounds were being added when the process was killed: they were not yet
        if changed:
            raise SparsonaError(
                f"'{self.path / 'config.json'}' was edited after the run was made: {', '.join(changed)}",
                expected="the options that the run was made with",
                hint="undo the edit; `sparsona resume RUN --rounds N` adds rounds, other options need another run",
            )

    def extend(self, rounds: int, facts: RunFacts) -> None:
        """Give the run more rounds. Facts first: a config that nothing vouches for would be taken for an edited one."""
        config = {**self.config, "rounds": rounds}
        self.learn(replace(facts, config=config_digests(config)))
        write_atomically(self.path / "config.json", (json.dumps(config, indent=2) + "\n").encode())
        self.__dict__.pop("config", None)  # read again

    @property
    def last_round(self) -> int:
        """After how many rounds the run ends, or ended: final tuning is recorded as the round of this index."""
        found = reached(self.path)
        return found.completed if found.finished else self.config["rounds"]

    def learn(self, facts: RunFacts) -> None:
        """Write facts that became known while the run was played: how much data clients have that came late."""
        self.facts = facts
        write_atomically(self.path / "about.json", _json(facts.as_json()))

    def check_resumable(self) -> None:
        """Refuse to resume what another version wrote and this one only reads."""
        if self.facts.format != FORMAT:
            version = self.environment.get("sparsona", "of another version")
            raise SparsonaError(
                f"'{self.path}' was written in format {self.facts.format} by sparsona {version}: it can be read, not "
                "resumed",
                expected=f"a run in format {FORMAT}",
                hint="resume it with the version that wrote it, or start the run again in another folder",
            )

    def __enter__(self) -> RunFolder:
        if not self._lock.is_locked:  # a folder just made is locked already
            self._acquire()
        return self

    def _acquire(self) -> None:
        try:
            # `is_used` holds it for a moment, which is no other run.
            self._lock.acquire(timeout=0.2, poll_interval=0.02)
        except filelock.Timeout:
            raise SparsonaError(
                f"'{self.path}' is in use by another process",
                expected="a run that no other process uses",
                hint="wait for it, or stop the other process",
            ) from None
        except OSError as error:
            raise SparsonaError(
                f"'{self.path}' cannot be locked: {error.strerror or error}",
                expected="a folder that can be written",
                hint="change its permissions, or copy it to where you may write",
            ) from error

    def __exit__(self, *_: object) -> None:
        self.records.close()
        self._lock.release()

    @cached_property
    def config(self) -> dict[str, Any]:
        """The options of the run."""
        return read_json(self.path / "config.json")

    @cached_property
    def environment(self) -> dict[str, Any]:
        """The environment that the run started in."""
        return read_json(self.path / "environment.json")

    @property
    def summary(self) -> dict[str, Any] | None:
        """The result, or None while the run is unfinished."""
        path = self.path / "summary.json"
        return read_json(path) | {"run": str(self.path)} if path.is_file() else None  # folders are moved

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Keep the result."""
        write_atomically(self.path / "summary.json", _json(summary))

    def drop_summary(self) -> None:
        """Remove the result of an earlier stop; it can be computed again."""
        with explain_disk_errors(self.path):
            (self.path / "summary.json").unlink(missing_ok=True)


def config_digests(config: dict[str, Any]) -> dict[str, str]:
    """A digest of each option of a config, by name; of the method's options as `options.NAME`."""
    own = config.get("options")
    # Limits are for one session: they stop a run where it can be resumed, and change nothing of its result.
    flat = {key: value for key, value in config.items() if key not in (*MEASURES, "options")}
    flat |= {f"options.{key}": value for key, value in (own if isinstance(own, dict) else {}).items()}
    return {
        key: hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=6).hexdigest()
        for key, value in flat.items()
    }


def make_empty_folder(path: Path) -> None:
    """Make it, or refuse one that holds anything."""
    with explain_disk_errors(path):
        with contextlib.suppress(FileExistsError):  # a file of that name is reported below
            path.mkdir(parents=True, exist_ok=True)
        _check_unused(path)


# Files written before the config: what a killed process may leave of a run that never started.
_BEFORE_CONFIG = {
    "lock",
    "environment.json",
    "about.json",
    START_FILE,
    INITIAL_FILE,
    FEDERATION_FILE,
    GUESTS_FILE,
    *(f".{name}.part" for name in (START_FILE, INITIAL_FILE, FEDERATION_FILE, GUESTS_FILE)),
    *(f".{name}.json.part" for name in ("environment", "about", "config")),
}


def _check_unused(path: Path) -> None:
    if not path.is_dir() or not {entry.name for entry in path.iterdir()} <= _BEFORE_CONFIG:
        raise SparsonaError(
            f"'{path}' is already used",
            expected="a folder that does not exist yet, or an empty one",
            hint="choose another --out, or `sparsona resume` what is there",
        )


def _json(value: dict[str, Any]) -> bytes:
    """An entry a line. Not indented further: that takes Python half a minute for 100,000 clients."""
    lines = (f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items())
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def warn(text: str) -> None:
    """Print a warning, on stderr so that --json stays clean."""
    print(f"warning: {printable(text)}", file=sys.stderr)
