"""Downloads a data set into a folder and checks it. Free of torch and numpy."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import lzma
import os
import re
import shutil
import subprocess
import tarfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO

from sparsona.core.errors import SparsonaError
from sparsona.core.reading import expand, parse_json, read_text
from sparsona.data.cache import cannot_write, work_aside
from sparsona.data.card import Download, Mirror, SourceCard
from sparsona.data.catalog import get

CHUNK = 1 << 20
TIMEOUT = 60.0  # seconds without an answer
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}  # no other mirror helps
NOT_AN_ARCHIVE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, ValueError, RuntimeError)
NOTE = ".sparsona.json"  # sizes of the files without a published sum of their own, when their archive was checked
Member = tuple[str, Callable[[], IO[bytes] | None]]
Listen = Callable[[int, int], None]
Notify = Callable[[str], None]


class _MirrorError(Exception):
    """This mirror does not work; another may."""


def download(name: str, folder: Path, listen: Listen | None = None, notify: Notify | None = None) -> list[Path]:
    """Download a data set into the subfolder called `name`.

    Files that are present already are not downloaded again, unless they are known to be damaged. Nothing appears under
    its name before it was checked.

    Args:
        name: A data set of the catalog that has mirrors.
        folder: Where to put it; `sparsona.data.cache.cache_folder()` is where `read` finds it.
        listen: Called with the bytes done and the total (0: unknown) of each download.
        notify: Called with messages for the user: a mirror that fails, files that are present already.

    Returns:
        Its files; or the folder, if they are very many.

    Raises:
        SparsonaError: If no mirror works, or the folder cannot be written.

    Example:
        >>> from pathlib import Path
        >>> from sparsona.data.download import download
        >>> download("digits", Path("."))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        sparsona.core.errors.SparsonaError: 'digits' has no mirror to download from...
    """
    notify = notify or (lambda text: None)
    listen = listen or (lambda done, total: None)
    card = get(name)
    if not card.mirrors:
        raise SparsonaError(
            f"'{name}' has no mirror to download from",
            expected="\n            or ".join(card.files) or "nothing to download: it comes with the package",
            hint=f"follow {card.address} and put the files into '{Path(folder) / name}'"
            if card.address
            else f"use it as it is: --data {name}",
        )
    target = expand(folder) / name
    found, is_checked = next((seen for mirror in card.mirrors if (seen := _find_files(target, mirror))[0]), ([], False))
    if not found:
        found = _try_mirrors(card, target, listen, notify)
    elif is_checked:
        notify(f"{name} is there already, in {target}")
    else:
        notify(f"{name} is there, in {target}, but was not checked: move it away to download it")
    for extra in card.extras:
        found += _find_files(target, (extra,))[0] or _download_extra(extra, target, listen, notify)
    return found


def _try_mirrors(card: SourceCard, target: Path, listen: Listen, notify: Notify) -> list[Path]:
    failures = []
    for mirror in card.mirrors:
        try:
            return _download_mirror(mirror, target, listen)
        except _MirrorError as error:
            failures.append(str(error))
            notify(f"{mirror[0].address}: {error}")
    raise SparsonaError(
        f"'{card.name}' could not be downloaded: " + "; ".join(failures),
        expected=f"one of {', '.join(mirror[0].address for mirror in card.mirrors)} to answer",
        hint=f"try again later, or see {card.address} and put into '{target}': {card.files[0]}",
    )


def _download_extra(extra: Download, target: Path, listen: Listen, notify: Notify) -> list[Path]:
    try:
        return _download_mirror((extra,), target, listen)
    except _MirrorError as error:
        notify(f"without {', '.join(extra.files)}: {error}")
        return []


def _find_files(target: Path, mirror: Mirror) -> tuple[list[Path], bool]:
    """The files of this mirror, if all are present and not known to be damaged; and whether they were checked."""
    noted = _read_note(target)
    if any(download.tree for download in mirror):
        if noted:
            return [target] if all(_weigh(target / name) == size for name, size in noted.items()) else [], True
        return [target] if target.is_dir() and any(target.iterdir()) else [], False
    wanted = {name: md5 for download in mirror for name, md5 in download.files.items()}
    paths, is_checked = [target / name for name in wanted], True
    for path, md5 in zip(paths, wanted.values(), strict=True):
        if not path.is_file() or (_md5(path) != md5 if md5 else _weigh(path) != noted.get(path.name, _weigh(path))):
            return [], True
        is_checked &= bool(md5 or path.name in noted)
    return paths, is_checked


def _read_note(target: Path) -> dict[str, int]:
    try:
        noted = parse_json(read_text(target / NOTE))
    except (OSError, ValueError):
        return {}
    return noted if isinstance(noted, dict) else {}


def _weigh(path: Path) -> int:
    """The bytes of a file, or of all files below a folder; -1 if there is neither."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size if path.is_file() else -1


def _download_mirror(mirror: Mirror, target: Path, listen: Listen) -> list[Path]:
    """Download everything of a mirror aside, then move it to its place."""
    is_tree = any(download.tree for download in mirror)
    try:
        is_taken = target.exists() and not (target.is_dir() and not any(target.iterdir()))
        if is_tree and is_taken:
            raise SparsonaError(
                f"'{target}' exists, but not as it was downloaded",
                expected="no such folder, or an empty one",
                hint="move it elsewhere to download it again",
            )
        with work_aside(target, target.name) as kept:
            for download in mirror:
                _fetch(download, kept, listen)
            names = sorted(path.name for path in kept.iterdir())
            has_sum = {name for download in mirror for name, md5 in download.files.items() if md5}
            if unsummed := {name: _weigh(kept / name) for name in names if name not in has_sum}:
                note = json.dumps(_read_note(target) | unsummed)
                (kept / NOTE).write_text(note, encoding="utf-8")
            if is_taken:
                for path in list(kept.iterdir()):
                    os.replace(path, target / path.name)
            else:
                if target.is_dir():
                    target.rmdir()  # an empty one
                os.replace(kept, target)  # at once
    except OSError as error:
        raise cannot_write(target.parent, error) from error
    return [target] if is_tree else [target / name for name in names]


def _fetch(download: Download, kept: Path, listen: Listen) -> None:
    address, digest = _locate(download)
    part = kept.parent / "download.part"
    _stream(address, part, listen)
    _check(part, digest, address)
    name = next(iter(download.files), "")
    if not download.tree and len(download.files) == 1 and PurePosixPath(address).name == name:
        os.replace(part, kept / name)
    else:
        try:
            _unpack(part, download, kept)
        except NOT_AN_ARCHIVE as error:
            raise _MirrorError(f"the archive cannot be unpacked: {error}") from error
        except OSError as error:
            if error.errno in DISK_ERRORS:
                raise
            raise _MirrorError(f"the archive cannot be unpacked: {error}") from error
        part.unlink()
    for file, md5 in download.files.items():
        _check(kept / file, ("md5", md5) if md5 else None, address)


def _locate(download: Download) -> tuple[str, tuple[str, str] | None]:
    """The web address, and the digest that the download must have."""
    kind, _, name = download.address.partition(":")
    if kind == "npm":
        return _locate_npm(name)
    if kind == "debian":
        return _locate_debian(name)
    return download.address, ("md5", download.md5) if download.md5 else None


def _locate_npm(package: str) -> tuple[str, tuple[str, str]]:
    answer = _run("npm", "view", package, "dist", "--json")
    try:
        dist = json.loads(answer)
        algorithm, _, digest = dist["integrity"].split()[0].partition("-")
        return str(dist["tarball"]), (algorithm, base64.b64decode(digest).hex())
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise _MirrorError(f"npm's answer cannot be parsed: {error!r}") from error


def _locate_debian(package: str) -> tuple[str, tuple[str, str]]:
    answer = _run("apt-get", "download", "--print-uris", package)
    found = re.search(r"^'([^']+)' \S+ \d+ (\w+):([0-9a-fA-F]+)\s*$", answer, re.MULTILINE)
    if not found:
        raise _MirrorError(f"apt-get does not know the package {package}")
    address, algorithm, digest = found.groups()
    return address, (algorithm.lower().removesuffix("sum"), digest.lower())


def _run(*command: str) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
            cwd=os.path.abspath(os.sep),  # npm is told by files in the current folder what to ask and what to run
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _MirrorError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        raise _MirrorError(f"{command[0]} answered with an error: {done.stderr.strip()[-200:]}")
    return done.stdout


def _stream(address: str, part: Path, listen: Listen) -> None:
    if not address.startswith(("http://", "https://")):
        raise _MirrorError(f"'{address}' is not a web address")
    done = 0
    try:
        request = urllib.request.Request(address, headers={"User-Agent": "sparsona"})
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer, part.open("wb") as file:
            total = int(answer.headers.get("Content-Length") or 0)
            listen(0, total)
            while chunk := answer.read(CHUNK):
                file.write(chunk)
                done += len(chunk)
                listen(done, total)
    except (OSError, HTTPException, ValueError) as error:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            raise
        raise _MirrorError(f"{address} does not answer: {error}") from error
    if total and done != total:
        raise _MirrorError(f"{address} stopped after {done:,} of {total:,} bytes")


def _check(path: Path, digest: tuple[str, str] | None, address: str) -> None:
    """A file that is not what it should be is removed."""
    if not path.is_file():
        raise _MirrorError(f"{address} does not hold '{path.name}'")
    if digest is None:
        return
    algorithm, wanted = digest
    if algorithm not in hashlib.algorithms_available:
        raise _MirrorError(f"{address} comes with a digest of an unknown kind, {algorithm}")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, algorithm).hexdigest()
    if found != wanted:
        path.unlink()
        raise _MirrorError(
            f"{address}: the {algorithm} of '{path.name}' is {found} instead of {wanted}; it was removed"
        )


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def _unpack(part: Path, download: Download, kept: Path) -> None:
    """Keep the files or the tree; no name in an archive decides where a file goes outside of `kept`."""
    with part.open("rb") as file:
        for name, open_member in _members(file):
            path = PurePosixPath(name)
            if download.tree:
                if path.is_absolute() or ".." in path.parts:
                    raise ValueError(f"it holds a file called '{name}'")
                if path.parts[0] != download.tree:
                    continue
                target = kept.joinpath(*path.parts[1:])
            elif path.name in download.files:
                target = kept / path.name
            else:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            if (source := open_member()) is not None:
                with source, target.open("xb") as copy:
                    shutil.copyfileobj(source, copy, CHUNK)


def _members(file: BinaryIO) -> Iterator[Member]:
    """Name of each file in a zip, a tar or a Debian package, and how to open it."""
    head = file.read(8)
    file.seek(0)
    if head.startswith(b"PK"):
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                if not info.is_dir():
                    yield info.filename, partial(archive.open, info)
        return
    if head == b"!<arch>\n":
        _seek_data(file)
    with tarfile.open(fileobj=file, mode="r|*") as stream:
        for member in stream:
            if member.isfile():
                yield member.name, partial(stream.extractfile, member)


def _seek_data(file: BinaryIO) -> None:
    """Go to data.tar.* of a Debian package: an ar archive, 60 bytes of header before each even-sized member."""
    file.seek(8)
    while header := file.read(60):
        if header[:16].startswith(b"data.tar"):
            return
        size = int(header[48:58])
        file.seek(size + size % 2, os.SEEK_CUR)
    raise ValueError("a Debian package without data")
