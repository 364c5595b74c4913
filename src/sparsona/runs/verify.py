"""Checks that the files of a run, a comparison or a search belong together. Reads everything; free of torch."""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sparsona.core.errors import SparsonaError
from sparsona.core.files import drafted_name
from sparsona.runs.comparison import COMPARISON_FILE, REFIT, SEARCH_FILE, check_member, read_comparison
from sparsona.runs.failed import NAME as FAILED
from sparsona.runs.failed import check_failed
from sparsona.runs.files import RESTORE, check_plain, read_file, read_json, without_checksum
from sparsona.runs.folder import (
    CONFIG_FILE,
    ENDED,
    FACTS_FILE,
    GLOBAL_FILE,
    GUESTS_FILE,
    NETWORK,
    SERVER_FILE,
    STARTED,
    SUMMARY_FILE,
    RunFolder,
    is_used,
)
from sparsona.runs.manifest import FOLDER, MANIFEST, Manifest, Seal, find_manifest, is_checkpoint_file
from sparsona.runs.profile import NAME as PROFILE
from sparsona.runs.profile import read_profile
from sparsona.runs.records import NAME as RECORDS

OTHERS = {"lock", GUESTS_FILE, SERVER_FILE, "report.html"}  # written by us, and no part of a run's result
NO_CHECKSUM = "no checksum of it was written, as by older versions"
FINISHED = "finished"
MISSING = "it is missing"
PLAYED = "a process is running this run: verify it again when it has stopped"
_TRIES = 10  # to check a run between two of its checkpoints
State = Literal["right", "wrong", "unknown"]


@dataclass(frozen=True)
class Finding:
    """What is known of one file.

    Args:
        file: its path in the folder that was checked.
        state: right, wrong, or unknown: nothing vouches for it.
        what: why it is wrong or unknown, or what was checked.
        hint: what to do about a file that is wrong.
    """

    file: str
    state: State
    what: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Verification:
    """What was found in a folder.

    Args:
        path: the folder.
        findings: one for each file, or for several of one kind.
    """

    path: Path
    findings: tuple[Finding, ...]

    @property
    def is_right(self) -> bool:
        """Whether nothing is wrong."""
        return all(one.state != "wrong" for one in self.findings)

    @property
    def sentence(self) -> str:
        """What was found, for a person: how many files are right, and whether the runs are finished."""
        num = {state: sum(one.state == state for one in self.findings) for state in ("right", "wrong", "unknown")}
        if num["wrong"]:
            text = (
                f"WRONG: {num['wrong']} of {len(self.findings)} files are missing, are not what was written, or do not"
                " belong here."
            )
        elif num["unknown"]:
            text = f"nothing is wrong; {num['unknown']} of {len(self.findings)} files cannot be checked."
        else:
            text = f"right: all {len(self.findings)} files are what was written, and belong together."
        ends = [one.what for one in self.findings if Path(one.file).name == MANIFEST.name and one.state == "right"]
        if len(ends) == 1:
            text += f" The run is {ends[0]}."
        elif ends:
            text += f" {ends.count(FINISHED)} of {len(ends)} runs are {FINISHED}."
        return text

    def rows(self) -> list[dict[str, str]]:
        """A line for each finding."""
        return [{"file": one.file, "state": one.state, "what": one.what} for one in self.findings]

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {"path": str(self.path), "right": self.is_right, "findings": [asdict(one) for one in self.findings]}


def verify(path: str | Path) -> Verification:
    """Check that all files of a run, a comparison or a search are those that were written, and of one run.

    Args:
        path: the folder.

    Returns:
        What is right, what is wrong, and what nothing vouches for.

    Example:
        >>> import sparsona as sp
        >>> run = sp.train("local", clients=4, rounds=1, data_rate=0.1, out="runs/verified")
        >>> verify("runs/verified").is_right
        True
    """
    path = Path(path)
    if (path / SEARCH_FILE).exists():
        return Verification(path, tuple(_search(path)))
    if (path / COMPARISON_FILE).exists():
        return Verification(path, tuple(_comparison(path)))
    return Verification(path, tuple(_run(path)))


def _search(path: Path) -> Iterator[Finding]:
    def read(file: Path) -> str:
        return "" if "checksum" in without_checksum_or_none(file) else NO_CHECKSUM

    def without_checksum_or_none(file: Path) -> dict[str, Any]:
        values = read_json(file)
        without_checksum(values, file, is_needed=False)
        return values

    yield _find(SEARCH_FILE, lambda: read(path / SEARCH_FILE))
    for file in sorted(path.glob("*/trial-*.json")):
        yield _find(str(file.relative_to(path)), lambda file=file: read(file))  # type: ignore[misc]  # bound at once
    for config in sorted(path.glob("*/trial-*/config.json")):
        yield from _inside(config.parent, path, _run(config.parent))
    if os.path.lexists(refit := path / REFIT):
        place = _find(REFIT, lambda: check_plain(refit, is_folder=True))
        yield from [place] if place.state == "wrong" else _inside(refit, path, _comparison(refit))


def _comparison(path: Path) -> Iterator[Finding]:
    try:
        planned = read_comparison(path)
    except SparsonaError as error:
        yield Finding(COMPARISON_FILE, "wrong", error.what, error.hint)
        return
    has_checksums = all("checksum" in entry for entry in read_json(path / COMPARISON_FILE, list))
    yield Finding(COMPARISON_FILE, "right" if has_checksums else "unknown", f"{len(planned)} runs")
    if os.path.lexists(path / FAILED):
        yield _find(FAILED, lambda: check_failed(path))
    for folder, config in planned:
        if not (folder / CONFIG_FILE).exists():
            yield Finding(folder.name, "unknown", "not begun yet")
            continue
        found = _run(folder)
        yield from _inside(folder, path, found)
        if all(one.state != "wrong" for one in found):
            yield _find(folder.name, lambda: check_member(RunFolder.open(folder), config))  # noqa: B023  # called at once


def _inside(folder: Path, path: Path, findings: Iterable[Finding]) -> Iterator[Finding]:
    name = folder.relative_to(path)
    for one in findings:
        yield Finding(str(name / one.file), one.state, one.what, one.hint)


def _find(file: str, check: Callable[[], str | None]) -> Finding:
    """What a check says of a file: it raises, or returns why nothing is known of it."""
    try:
        why = check()
    except SparsonaError as error:
        return Finding(file, "wrong", error.what, error.hint)
    except FileNotFoundError:
        return Finding(file, "wrong", MISSING, RESTORE)
    except OSError as error:
        return Finding(file, "wrong", f"it cannot be read: {error.strerror or error}")
    except Exception as error:  # of a file that is damaged in a way that nobody thought of
        return Finding(file, "wrong", f"it cannot be read: {type(error).__name__}: {error}")
    return Finding(file, "unknown", why) if why else Finding(file, "right")


def _write_again(path: Path) -> str:
    """What writes a result again that is wrong: results are made from the rest of a run."""
    how = "writes it again from the run's records and checkpoint"
    with suppress(SparsonaError, OSError):
        if read_json(path / CONFIG_FILE).get("executor") != NETWORK:
            return f"`sparsona resume` {how}"
        if read_json(path / FACTS_FILE).get("peers"):
            return "`sparsona gather` makes the run anew, in another folder, from the journals of its peers"
        if (path / SERVER_FILE).is_file() and "flower" in read_json(path / SERVER_FILE):
            return f"`flwr run`, which starts the same app again, {how}"
        return f"`sparsona resume`, while the run's clients can be reached, {how}"
    return RESTORE


def _run(path: Path) -> list[Finding]:
    """What is found in a run's folder. Where its manifest is another afterwards, files were written meanwhile, and what
    seems wrong may be right."""
    found: list[Finding] = []
    for _ in range(_TRIES):
        before = _content(path / MANIFEST)
        found = _once_each(_once(path))
        if all(one.state != "wrong" for one in found) or _content(path / MANIFEST) == before:
            return found
    return [Finding(one.file, "unknown", PLAYED) if one.state == "wrong" else one for one in found]


def _once_each(findings: Iterable[Finding]) -> list[Finding]:
    """Of a file that is wrong, the first thing that is, and nothing else."""
    found = list(findings)
    wrong: dict[str, Finding] = {}
    for one in found:
        if one.state == "wrong":
            wrong.setdefault(one.file, one)
    return [one for one in found if wrong.get(one.file, one) is one]


def _content(path: Path) -> bytes | None:
    with suppress(OSError, SparsonaError):
        return read_file(path)
    return None


def _once(path: Path) -> Iterator[Finding]:
    if not (path / CONFIG_FILE).exists():
        yield Finding(
            CONFIG_FILE,
            "wrong",
            f"it is missing: '{path}' is not a run",
            "name the folder of a run, a comparison or a search",
        )
        return
    manifest: Manifest | None = None
    try:
        manifest = find_manifest(path)
    except SparsonaError as error:
        yield Finding(str(MANIFEST), "wrong", error.what, error.hint)
        return
    seal = None if manifest is None else manifest.seal
    if manifest is None:
        yield Finding(str(MANIFEST), "unknown", "there is no checkpoint yet")
    elif seal is None:
        yield Finding(
            str(MANIFEST), "unknown", "it has no checksums of the other files: the run was made by an older version"
        )
    else:
        at = FINISHED if manifest.finished else f"not finished: its checkpoint is that of round {manifest.completed}"
        yield Finding(str(MANIFEST), "right", at)
    folder: RunFolder | None = None
    try:
        folder = RunFolder.open(path)
    except SparsonaError as error:
        named = [name for name in (*STARTED, *ENDED, RECORDS) if str(path / name) in error.what]
        if not named or named[0] == RECORDS or seal is None or named[0] not in seal.files:  # else it is said below
            yield Finding(named[0] if named else CONFIG_FILE, "wrong", error.what, error.hint)
        elif all(one.state == "right" for one in _sealed(path, seal, named)):  # sealed, and not to be read still
            yield Finding(named[0], "wrong", error.what, error.hint)
    else:
        edited = folder.edited_limits
        what = f"edited limits: {', '.join(edited)}; limits may be edited" if edited else ""
        yield Finding(CONFIG_FILE, "right" if folder.facts.config else "unknown", what)
    if seal is not None:
        yield from _sealed(path, seal, [name for name in (*STARTED, *ENDED) if name in seal.files])
    for name in (*STARTED, *ENDED):
        if (path / name).exists() and (seal is None or name not in seal.files):
            is_left = seal is not None and name in ENDED
            yield Finding(name, "unknown", "left by a process that was killed: not used" if is_left else NO_CHECKSUM)
    if folder is not None and manifest is not None and manifest.finished and seal is not None:
        yield from _unwritten(folder, seal)
    if manifest is not None:
        yield from _checkpoint(path, manifest)
    if folder is not None and folder.records.exist:
        yield _records(folder, manifest)
    if (path / PROFILE).exists():
        yield _find(PROFILE, lambda: None if "checksum" in read_profile(path) else NO_CHECKSUM)
    yield from _others(path)


def _sealed(path: Path, seal: Seal, names: Sequence[str]) -> Iterator[Finding]:
    for name in names:
        since = "the run was started" if name in STARTED else "it was written"
        found = _find(name, lambda: seal.check(path / name, read_file(path / name), since))  # noqa: B023
        # What is no plain file has a hint of its own: nothing is written over it.
        is_made = name in ENDED and found.hint == RESTORE
        yield replace(found, hint=_write_again(path)) if is_made else found


def _unwritten(folder: RunFolder, seal: Seal) -> Iterator[Finding]:
    """Results that a finished run should have, and of which there is nothing: its process was killed at the end."""
    path = folder.path
    for name in (SUMMARY_FILE, GLOBAL_FILE) if folder.facts.leaves_model else (SUMMARY_FILE,):
        if name in seal.files or os.path.lexists(path / name):
            continue
        if is_used(path):
            yield Finding(name, "unknown", PLAYED)
        else:
            yield Finding(name, "wrong", MISSING, _write_again(path))


def _checkpoint(path: Path, manifest: Manifest) -> Iterator[Finding]:
    wrong = 0
    for entry in manifest.files.values():
        name, _, crc = entry.partition(" ")
        file = f"{FOLDER}/{name}"

        def check(name: str = name, crc: str = crc) -> None:
            if f"{zlib.crc32(read_file(path / FOLDER / name)):08x}" != crc:
                raise SparsonaError(f"it is not what was written in round {manifest.completed}", hint=RESTORE)

        found = _find(file, check)
        if found.state == "wrong":
            wrong += 1
            yield found
    if len(manifest.files) > wrong:
        yield Finding(f"{FOLDER}/", "right", f"{len(manifest.files) - wrong} files")


def _records(folder: RunFolder, manifest: Manifest | None) -> Finding:
    seal = None if manifest is None or manifest.seal is None else manifest.seal.records
    if not (manifest is not None and manifest.finished) and is_used(folder.path):
        return Finding(RECORDS, "unknown", PLAYED)

    def check() -> str | None:
        if seal is None or manifest is None:
            folder.check_records()
            return NO_CHECKSUM
        folder.records.compare(seal, manifest.completed, manifest.finished)
        return None

    found = _find(RECORDS, check)
    if found.state != "right" or seal is None:
        return found
    same = folder.records.is_file(seal.file)
    return Finding(RECORDS, "right", "all rows" if same else "all rows; the file itself was written again since")


def _others(path: Path) -> Iterator[Finding]:
    """What is in the folder and not of the run: left alone, and said."""
    known = {CONFIG_FILE, FOLDER, RECORDS, PROFILE, SUMMARY_FILE, *STARTED, *ENDED, *OTHERS}
    known |= {f"{RECORDS}{suffix}" for suffix in ("-wal", "-shm", "-journal")}
    for place in (path, path / FOLDER):
        if not place.is_dir():
            continue
        with os.scandir(place) as entries:
            for entry in sorted(entries, key=lambda one: one.name):
                name = drafted_name(entry.name) or entry.name
                ours = name in known if place == path else name == MANIFEST.name or is_checkpoint_file(name)
                shown = ascii(entry.name)[1:-1] if place == path else f"{FOLDER}/{ascii(entry.name)[1:-1]}"
                if not ours:
                    yield Finding(shown, "unknown", "not part of this run: it is neither read nor removed")
                    continue
                with suppress(FileNotFoundError):  # a process that plays the run has removed it
                    if not stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode) and name != FOLDER:
                        yield _find(shown, lambda: check_plain(Path(entry.path)))  # noqa: B023
