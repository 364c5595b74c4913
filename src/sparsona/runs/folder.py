"""A run's folder: made once, locked while used, written so that a crash at any moment loses nothing written before.

Its files are bound to each other by the manifest: what was exchanged, edited or damaged since is refused when read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from sparsona.core.errors import SparsonaError
from sparsona.core.files import drafted_name
from sparsona.core.version import VERSION
from sparsona.runs import records
from sparsona.runs.facts import FORMAT, RunFacts
from sparsona.runs.files import (
    FIGURE,
    RESTORE,
    WRITTEN,
    Shape,
    check_plain,
    check_shape,
    digest,
    explain_disk_errors,
    file_digest,
    parse_json,
    read_file,
    read_json,
    write_atomically,
)
from sparsona.runs.manifest import Seal, find_manifest, read_manifest
from sparsona.runs.records import Bounds, Kept, Records
from sparsona.runs.stopping import MEASURES

START_FILE = "start.safetensors"  # the weights that a run begins with, if they come from another run
INITIAL_FILE = "initial.safetensors"  # those of a module that was passed from Python
NETWORK = "network"  # the executor of a run whose clients are on other machines
# What the machines of a run on several of them agreed on, and which of them took part.
FEDERATION_FILE, GUESTS_FILE, SERVER_FILE = "federation.toml", "guests.json", "server.json"
CONFIG_FILE, FACTS_FILE, ENVIRONMENT_FILE = "config.json", "about.json", "environment.json"
SUMMARY_FILE = "summary.json"
GLOBAL_FILE = "global.safetensors"  # a finished run's shared model, by the names of its parameters, frozen ones too
# What a run is started with, and what it ends with; the manifest has digests of them.
STARTED = (FACTS_FILE, ENVIRONMENT_FILE, START_FILE, INITIAL_FILE, FEDERATION_FILE)
ENDED = (SUMMARY_FILE, GLOBAL_FILE)
# What is used of options and results where no seal vouches for them, as `check_shape` has it.
_CONFIG: Shape = {"method?": (str,), "seed?": (int,), "rounds?": (int,), "options?": {}}
_EFFORT: Shape = {"total": (int,), "*": FIGURE}
_OF_CLASSES: Shape = {"mean": FIGURE, "clients": (int,), "examples": (int,), "*": FIGURE}
_SUMMARY: Shape = {
    "method": (str,),
    "protocol": (str,),
    "rounds": (int,),
    "seconds?": (int, float),
    "accuracy": {"mean": FIGURE, "*": FIGURE},
    "bytes": _EFFORT,
    "flops?": {"*": FIGURE},
    "turns?": _EFFORT,
    "steps?": _EFFORT,
    "error?": {"*": FIGURE},
    "metrics?": {"*": {"mean": FIGURE, "clients": (int,), "tested": (int,), "*": (*FIGURE, str)}},
    "classes?": {"seen": _OF_CLASSES, "unseen": _OF_CLASSES},
    "diverged?": {"turns": (int,), "of": (int,), "receivers": (int,), "first": (str,)},
    "early_stop?": {"after": FIGURE, "of": FIGURE, "best": FIGURE},
    **{key: {} for key in ("heard?", "conditions?", "privacy?", "novel?", "guard?")},
}


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
    manifest = read_manifest(path)
    return Reached(0, False) if manifest is None else Reached(manifest.completed, manifest.finished)


def is_used(folder: Path) -> bool | None:
    """Whether a process holds the run's lock; None: this user may not find out."""
    if not (folder / "lock").exists():  # looking must not make it
        return False
    check_plain(folder / "lock")
    try:
        with filelock.FileLock(str(folder / "lock"), timeout=0):
            return False
    except filelock.Timeout:
        return True
    except OSError:  # no permission to write: no process of this user runs it, but another's may
        return None


def _not_one_run(path: Path, what: str, inside: Sequence[Path]) -> SparsonaError:
    hint = "name one of its runs" + (f": {', '.join(str(one) for one in inside)}" if inside else "")
    takers = "`report`, `table`, `targets`, `figure`, `verify` and `resume`"
    hint += f"; {takers} take the {what} itself, in Python load_comparison"
    if what == "search" and not inside:
        options = path / "tuned.toml"
        made = f"`sparsona compare --config {options}`" if options.exists() else f"`sparsona resume {path}`"
        hint = f"it has none yet: {made} makes some, with the options that were chosen"
    return SparsonaError(
        f"'{path}' is a {what}", expected=f"a run, such as {inside[0]}" if inside else "a run", hint=hint
    )


class RunFolder:
    """The files of one run. Use as a context manager to hold its lock.

    Facts, options and environment are read once: they do not change while a run exists, but for what `learn` adds.
    """

    def __init__(self, path: Path, facts: RunFacts, seal: Seal | None = None) -> None:
        self.path, self.facts = path, facts
        self.seal = seal  # as the manifest has it, and what was written since; None: there is none, or none in it
        self._is_stale = False  # the manifest lacks what was written since
        self.records = Records(path / records.NAME, _bounds(facts), self._check_records)
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
            options = json.loads(config)
            own = {FACTS_FILE, ENVIRONMENT_FILE}
            own |= {name for name, data in ((START_FILE, start), (INITIAL_FILE, initial)) if data is not None}
            # Of a run on several machines these two are there before it.
            own |= {FEDERATION_FILE, GUESTS_FILE} if options.get("executor") == NETWORK else set()
            _check_unused(path, own)  # what it does not write it does not seal
            write_atomically(path / ENVIRONMENT_FILE, _json(environment()))
            folder.learn(replace(facts, config=config_digests(options)))
            for name, data in ((START_FILE, start), (INITIAL_FILE, initial)):
                if data is not None:
                    write_atomically(path / name, data)
            write_atomically(path / CONFIG_FILE, config.encode())  # last: a folder with a config is a run
        except BaseException:
            folder.__exit__()
            raise
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run."""
        for what, file, place in (("search", "tune.json", path / "refit"), ("comparison", "comparison.json", path)):
            if (path / file).is_file():
                raise _not_one_run(path, what, sorted(found.parent for found in place.glob("*/config.json")))
        for name in (*STARTED, *ENDED, CONFIG_FILE, "lock"):
            check_plain(path / name)
        if not (path / CONFIG_FILE).is_file():
            raise SparsonaError(
                f"'{path}' is not a run",
                expected="a folder made by `sparsona run`, with a config.json inside",
                hint="`sparsona runs` lists the runs in ./runs",
            )
        manifest = find_manifest(path)
        about, seal = _read(path / FACTS_FILE), None if manifest is None else manifest.seal
        folder = cls(path, RunFacts.from_json(parse_json(about, path / FACTS_FILE), str(path)), seal)
        if seal is not None:
            seal.check(path / FACTS_FILE, about)
            seal.check(path / ENVIRONMENT_FILE, _read(path / ENVIRONMENT_FILE))
        folder.check_config()
        if seal is not None and seal.records.rounds and not folder.records.exist:
            raise SparsonaError(f"'{folder.records.path}' is missing", expected=WRITTEN, hint=RESTORE)
        return folder

    def check_config(self) -> None:
        """Raise SparsonaError if config.json is not what the run was made with; older runs have no digest."""
        made, now = self.facts.config, config_digests(self.config)
        changed = sorted(key for key in {*made, *now} if made.get(key) != now.get(key)) if made else []
        if changed == ["rounds"] and self.facts.extensions:
            added = self.facts.extensions[-1]
            before, after = ({"rounds": number} for number in (added.rounds, added.total))
            is_before = (
                now["rounds"] == config_digests(before)["rounds"] and reached(self.path).completed <= added.rounds
            )
            if is_before and made.get("rounds") == config_digests(after)["rounds"]:
                return  # rounds were being added when the process was killed: they were not yet
        if changed:
            raise SparsonaError(
                f"'{self.path / CONFIG_FILE}' was edited after the run was made: {', '.join(changed)}",
                expected="the options that the run was made with",
                hint="undo the edit; `sparsona resume RUN --rounds N` adds rounds, other options need another run",
            )

    @property
    def edited_limits(self) -> list[str]:
        """The limits of a session in config.json that are not as the manifest has them: they may be edited."""
        known = None if self.seal is None else self.seal.limits
        return [] if known is None else [name for name in MEASURES if known.get(name) != self.config.get(name)]

    def set_limits(self, limits: Mapping[str, Any]) -> None:
        """Give the run other limits of a session."""
        if any(self.config.get(name) != value for name, value in limits.items()):
            write_atomically(self.path / CONFIG_FILE, (json.dumps({**self.config, **limits}, indent=2) + "\n").encode())
            self.__dict__.pop("config", None)  # read again
        if self.seal is not None:
            self._reseal(replace(self.seal, limits={name: self.config.get(name) for name in MEASURES}))

    # The seal: what the manifest says of the other files.

    def next_seal(self, completed: int, kept: Kept | None) -> Seal:
        """The seal for a checkpoint after so many rounds; `kept` None: of a finished run.

        A run without any is sealed with the files that are there.
        """
        seal, limits = self.seal, {name: self.config.get(name) for name in MEASURES}
        known = None if seal is None else seal.records
        if seal is None:
            paths = [self.path / name for name in STARTED]
            seal = Seal({path.name: (digest(_read(path)),) for path in paths if path.exists()})
        return replace(seal, limits=limits, records=self.records.sealed(known, completed, kept))

    def sealed(self, seal: Seal, completed: int | None) -> None:
        """The manifest has this seal now; `completed` None: of a finished run."""
        self.seal, self._is_stale = seal, False
        self.records.settle(completed)

    def _reseal(self, seal: Seal) -> None:
        """Write the manifest anew with another seal."""
        manifest = read_manifest(self.path)
        if manifest is not None and seal != manifest.seal:
            replace(manifest, seal=seal).write(self.path)
        self.seal, self._is_stale = seal, False

    def read(self, name: str) -> bytes:
        """The content of a file that the run wrote, or SparsonaError if it is another."""
        data = _read(self.path / name)
        if self.seal is not None:
            self.seal.check(self.path / name, data, self._since(name))
        return data

    def _since(self, name: str) -> str:
        if name in STARTED:
            return "the run was started"
        found = reached(self.path)
        return "the run was finished" if found.finished else f"round {found.completed}"

    def has(self, name: str) -> bool:
        """Whether the run wrote this file: one that was being written when a process was killed does not count."""
        return (self.path / name).exists() and (self.seal is None or name in self.seal.files)

    def write(self, name: str, data: bytes) -> None:
        """Write a file that belongs to the run's end. The manifest gets its digest when the folder is released. Where
        it has that of another content, either will do until then."""
        made, seal = digest(data), self.seal
        if seal is not None and made not in (known := seal.files.get(name, (made,))):
            self._reseal(seal.with_file(name, *known[-1:], made))
        write_atomically(self.path / name, data)
        if self.seal is not None:
            self.seal, self._is_stale = self.seal.with_file(name, made), True

    def wrong_results(self) -> dict[str, str]:
        """What is wrong with files that a finished run ended with, by name; they can be made again from the others."""
        found: dict[str, str] = {}
        if self.seal is None or not reached(self.path).finished:
            return found
        for name in ENDED:
            if name not in self.seal.files:
                continue
            try:
                self.seal.check(self.path / name, read_file(self.path / name), "the run was finished")
            except FileNotFoundError:
                found[name] = f"'{self.path / name}' is missing"
            except SparsonaError as error:
                found[name] = error.what
        return found

    def drop(self, *names: str) -> None:
        """Remove files of an end that is not the end; the manifest first."""
        if self.seal is not None:
            seal = self.seal
            for name in names:
                seal = seal.with_file(name)
            self._reseal(replace(seal, records=replace(seal.records, file=None)))
        with explain_disk_errors(self.path):
            for name in names:
                check_plain(self.path / name)
                (self.path / name).unlink(missing_ok=True)

    def check_records(self) -> None:
        """Raise SparsonaError if the records are not those of the checkpoint."""
        with self.records.reading():  # the first time that they are read
            pass

    def _check_records(self, db: sqlite3.Connection) -> None:
        """While another process plays the run its records change, and are not compared until it is finished."""
        manifest = read_manifest(self.path)
        seal = None if manifest is None or manifest.seal is None else manifest.seal.records
        same = seal is not None and self.records.is_file(seal.file)
        used = False if same or self._lock.is_locked else is_used(self.path)
        if used and (manifest is None or not manifest.finished):
            return
        if manifest is not None and seal is not None and not same:
            try:
                self.records.compare(seal, manifest.completed, manifest.finished, db)
            except SparsonaError:
                if used is False or read_manifest(self.path) == manifest:
                    raise
        self.records.check_values(db)

    def extend(self, rounds: int, facts: RunFacts) -> None:
        """Give the run more rounds. Facts first: a config that nothing vouches for would be taken for an edited one."""
        config = {**self.config, "rounds": rounds}
        self.learn(replace(facts, config=config_digests(config)))
        write_atomically(self.path / CONFIG_FILE, (json.dumps(config, indent=2) + "\n").encode())
        self.__dict__.pop("config", None)  # read again

    @property
    def last_round(self) -> int:
        """After how many rounds the run ends, or ended: final tuning is recorded as the round of this index."""
        found = reached(self.path)
        return found.completed if found.finished else self.config["rounds"]

    def learn(self, facts: RunFacts) -> None:
        """Write facts that became known while the run was played: how much data clients have that came late."""
        data = _json(facts.as_json())
        if (seal := self.seal) is not None:  # either will do until the file is there
            self._reseal(seal.with_file(FACTS_FILE, *seal.files[FACTS_FILE][-1:], digest(data)))
        write_atomically(self.path / FACTS_FILE, data)
        if seal is not None:
            self.seal, self._is_stale = seal.with_file(FACTS_FILE, digest(data)), True
        self.facts = facts

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
        check_plain(self.path / "lock")  # it is emptied when it is locked
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

    def __exit__(self, kind: object = None, *_: object) -> None:
        try:
            was_written = self.records.is_writing
            self.records.close()
            if self.seal is not None and (was_written or self._is_stale):
                path = self.records.path
                found = replace(self.seal.records, file=file_digest(path) if path.exists() else None)
                self._reseal(replace(self.seal, records=found))
        except (SparsonaError, OSError):
            if kind is None:  # else that error is the cause; without the last digests everything is compared
                raise
        finally:
            self._lock.release()

    @cached_property
    def config(self) -> dict[str, Any]:
        """The options of the run."""
        return check_shape(read_json(self.path / CONFIG_FILE), _CONFIG, self.path / CONFIG_FILE)

    @cached_property
    def environment(self) -> dict[str, Any]:
        """The environment that the run started in."""
        return read_json(self.path / ENVIRONMENT_FILE)

    @property
    def summary(self) -> dict[str, Any] | None:
        """The result, or None while the run is unfinished."""
        if not self.has(SUMMARY_FILE):
            return None
        found = parse_summary(self.read(SUMMARY_FILE), self.path / SUMMARY_FILE)
        return found | {"run": str(self.path)}  # folders are moved

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Keep the result."""
        self.write(SUMMARY_FILE, _json(summary))


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


def parse_summary(data: bytes, path: Path) -> dict[str, Any]:
    """The result in a file, with figures where figures are used; `path` is for errors."""
    return check_shape(parse_json(data, path), _SUMMARY, path)


def make_empty_folder(path: Path) -> None:
    """Make it, or refuse one that holds anything."""
    with explain_disk_errors(path):
        with contextlib.suppress(FileExistsError):  # a file of that name is reported below
            path.mkdir(parents=True, exist_ok=True)
        _check_unused(path)


# Files written before the config: what a killed process may leave of a run that never started.
_BEFORE_CONFIG = {"lock", *STARTED, GUESTS_FILE, CONFIG_FILE}


def _check_unused(path: Path, own: Collection[str] = _BEFORE_CONFIG) -> None:
    """Refuse a folder that holds anything but what the run writes, which `own` names, or a draft of it."""
    names = {drafted_name(entry.name) or entry.name for entry in path.iterdir()} if path.is_dir() else {""}
    if not names <= {"lock", CONFIG_FILE, *own} or (path / CONFIG_FILE).exists():
        raise SparsonaError(
            f"'{path}' is already used",
            expected="a folder that does not exist yet, or an empty one",
            hint="choose another --out (`out=` in Python), or `sparsona resume` what is there",
        )
    for name in _BEFORE_CONFIG:
        check_plain(path / name)


def _read(path: Path) -> bytes:
    """The content of a file that a run cannot do without."""
    try:
        return read_file(path)
    except FileNotFoundError:
        raise SparsonaError(f"'{path}' is missing", expected="a run folder made by sparsona", hint=RESTORE) from None
    except OSError as error:
        raise SparsonaError(f"'{path}' cannot be read: {error}", expected=WRITTEN, hint=RESTORE) from None


def _bounds(facts: RunFacts) -> Bounds:
    """What the records of a run can hold."""
    classes = 0 if facts.label_counts is None else facts.label_counts.shape[1]
    if facts.examples is not None:
        classes = max(classes, facts.examples.num_outputs)
    numbers = max(1 << 16, 8 * (facts.num_parameters + facts.num_frozen))
    # The facts may be a stranger's, too: no run needs more than the default of a matrix, or this of numbers.
    matrix = min(4 * classes**2, Bounds.confusion) if classes else Bounds.confusion
    return Bounds(len(facts.sizes), matrix, min(numbers, 1 << 28))


def _json(value: dict[str, Any]) -> bytes:
    """An entry a line. Not indented further: that takes Python half a minute for 100,000 clients."""
    lines = (f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items())
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()
