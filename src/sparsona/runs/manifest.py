"""RUN/checkpoint/manifest.json: the seal of a run folder. What it does not name does not exist.

It says how far the run has got, which files of the checkpoint are its own, and the digests of the other files and of
the records, so that files of two runs, or of one run at two times, are not taken for one run. It is written last,
whole. Free of torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sparsona.core.errors import SparsonaError
from sparsona.runs.files import (
    RESTORE,
    WRITTEN,
    check_plain,
    digest,
    read_json,
    with_checksum,
    without_checksum,
    write_atomically,
)
from sparsona.runs.records import NAME as RECORDS
from sparsona.runs.records import RecordSeal

FORMAT = 1
FOLDER = "checkpoint"
MANIFEST = Path(FOLDER) / "manifest.json"
_LATER = (RECORDS, "summary.json")  # what no run has before its first manifest
_OWNER = re.compile(r"server|(?:server|client|message|tuned)/(?:0|[1-9][0-9]{0,8})")
_ENTRY = re.compile(r"(?P<owner>server|(?:server|client|message|tuned)-[0-9]{1,9})\.[0-9]{1,12}\.safetensors")


@dataclass(frozen=True)
class Seal:
    """What belongs to a run besides its checkpoint.

    Args:
        files: the digests of files by name. Several while one is being replaced: a killed process leaves either.
        limits: of the session, in config.json: the options that may be edited.
        records: the digests of records.
    """

    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    records: RecordSeal = field(default_factory=RecordSeal)

    def with_file(self, name: str, *digests: str) -> Seal:
        """The same with these digests of a file; none: the file is no part of the run."""
        others = {key: value for key, value in self.files.items() if key != name}
        return replace(self, files={**others, name: digests} if digests else others)

    def check(self, path: Path, data: bytes, since: str = "the run was started") -> None:
        """Raise SparsonaError if this is not the content of a file of the run."""
        known = self.files.get(path.name)
        if known is None:
            raise SparsonaError(
                f"'{path}' is no file of this run: its manifest does not name it",
                expected="the files that the run wrote",
                hint="remove it, or move it elsewhere",
            )
        if digest(data) not in known:
            raise SparsonaError(
                f"'{path}' differs since {since}: it is not what this run wrote",
                expected="the file that belongs to this run's checkpoint",
                hint=RESTORE,
            )

    def as_json(self) -> dict[str, Any]:
        files = {name: list(digests) for name, digests in self.files.items()}
        return {"files": files, "limits": dict(self.limits), "records": self.records.as_json()}

    @classmethod
    def from_json(cls, values: Any) -> Seal:
        """What `as_json` wrote; ValueError, TypeError, KeyError or AttributeError: it did not."""
        files = {str(name): tuple(map(str, digests)) for name, digests in values["files"].items()}
        return cls(files, dict(values["limits"]), RecordSeal.from_json(values["records"]))


@dataclass(frozen=True)
class Manifest:
    """The content of the file.

    Args:
        completed: rounds in the checkpoint.
        finished: whether the run is over.
        seconds: that it took.
        number: of this checkpoint, counted from 1.
        files: of the checkpoint, by owner: name and CRC-32.
        losses: the last training losses of clients, where a sampler needs them.
        seal: what else belongs to the run. None: it was written by a version that did not say.
    """

    completed: int
    finished: bool
    seconds: float
    number: int
    files: Mapping[str, str]
    losses: Mapping[int, float] = field(default_factory=dict)
    seal: Seal | None = None

    def clients(self, kind: str) -> list[tuple[int, str]]:
        """Clients and their files, for one kind of owner."""
        start = f"{kind}/"
        return [(int(owner[len(start) :]), entry) for owner, entry in self.files.items() if owner.startswith(start)]

    def write(self, folder: Path) -> None:
        """Write it into a run folder; what it names must be there."""
        values: dict[str, Any] = {
            "format": FORMAT,
            "completed": self.completed,
            "finished": self.finished,
            "seconds": self.seconds,
            "number": self.number,
            "files": dict(self.files),
        }
        if self.losses:
            values["losses"] = {str(client): loss for client, loss in self.losses.items()}
        if self.seal is not None:
            values["sealed"] = self.seal.as_json()
        write_atomically(folder / MANIFEST, (json.dumps(with_checksum(values)) + "\n").encode())


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a run folder; None: it has no checkpoint yet."""
    check_plain(folder / FOLDER, is_folder=True)
    path = folder / MANIFEST
    check_plain(path)
    if not path.exists():
        return None
    values = read_json(path)
    if values.get("format") != FORMAT:
        raise SparsonaError(
            f"'{path}' is a checkpoint of format {values.get('format')}",
            expected=f"format {FORMAT}",
            hint="use the version of sparsona named in the run's environment.json",
        )
    values = without_checksum(values, path)
    try:
        return _parse(values)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise SparsonaError(f"'{path}' is damaged: {error!r}", expected=WRITTEN, hint=RESTORE) from None


def find_manifest(folder: Path) -> Manifest | None:
    """The same of a folder that may be anybody's: without its manifest, nothing vouches for records and a result."""
    found = read_manifest(folder)
    if found is None and any((folder / name).exists() for name in _LATER):
        found = read_manifest(folder)  # it may have been written while we looked
        if found is None:
            raise SparsonaError(
                f"'{folder / MANIFEST}' is missing",
                expected="the manifest that belongs to the records and the result of this run",
                hint=RESTORE,
            )
    return found


def is_checkpoint_file(name: str) -> bool:
    """Whether a file in the checkpoint's folder has a name that a checkpoint gives."""
    return _ENTRY.fullmatch(name) is not None


def _parse(values: Mapping[str, Any]) -> Manifest:
    files = values["files"]
    for owner, entry in files.items():
        name, _, crc = entry.partition(" ")
        found = _ENTRY.fullmatch(name)
        if not _OWNER.fullmatch(owner) or found is None or found["owner"] != owner.replace("/", "-"):
            raise ValueError(f"a file '{entry}' of '{owner}'")
        if not re.fullmatch("[0-9a-f]{8}", crc):
            raise ValueError(f"a checksum '{crc}'")
    completed, finished, number = values["completed"], values["finished"], values["number"]
    if type(completed) is not int or type(number) is not int or type(finished) is not bool or completed < 0:
        raise ValueError(f"{completed!r} rounds, finished {finished!r}, number {number!r}")
    losses = {int(client): float(loss) for client, loss in values.get("losses", {}).items()}
    sealed = values.get("sealed")
    seal = None if sealed is None else Seal.from_json(sealed)
    return Manifest(completed, finished, float(values["seconds"]), number, files, losses, seal)
