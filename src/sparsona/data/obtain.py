"""Downloads a data set into a folder, checked. Free of torch and numpy."""

from __future__ import annotations

import base64
import hashlib
import json
import lzma
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO

from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.data import SOURCES
from sparsona.data.downloads import EXTRAS, WAYS, Download
from sparsona.data.readers.files import sweep

CHUNK = 1 << 20
TIMEOUT = 60.0  # seconds without an answer
Member = tuple[str, Callable[[], IO[bytes] | None]]


class _NotThisWayError(Exception):
    """This way to get a set does not work here; another may."""


def obtain(
    name: str,
    folder: Path,
    listen: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> list[Path]:
    """Download a data set into the subfolder called `name`; its files, or the folder if they are very many.

    What is there already and whole is not downloaded again. `listen(done, total)` hears of the bytes of each download
    (total 0: unknown), and `say` what a person may want to know: a way that does not work, what is there already.
    Nothing appears under its name before it was checked.
    """
    say = say or (lambda text: None)
    listen = listen or (lambda done, total: None)
    if name not in SOURCES:
        raise unknown_name("data set", name, SOURCES)
    card = SOURCES[name]
    if name not in WAYS:
        raise SparsonaError(
            f"'{name}' cannot be downloaded for you",
            expected="\n            or ".join(card.files) or "nothing to download: it comes with the package",
            mend=f"follow {card.address} and put the files into '{Path(folder) / name}'"
            if card.address
            else f"use it as it is: --data {name}",
        )
    target = Path(folder).expanduser() / name
    whole = next((found for way in WAYS[name] if (found := _present(target, way))), None)
    if whole:
        say(f"{name} is there already, in {target}")
    else:
        whole = _try_ways(name, target, listen, say)
    for extra in EXTRAS.get(name, ()):
        whole += _present(target, (extra,)) or _obtain_extra(extra, target, listen, say)
    return whole


def _try_ways(name: str, target: Path, listen: Callable[[int, int], None], say: Callable[[str], None]) -> list[Path]:
    failures = []
    for way in WAYS[name]:
        try:
            return _obtain_way(way, target, listen)
        except _NotThisWayError as error:
            failures.append(str(error))
            say(f"{way[0].address}: {error}")
    raise SparsonaError(
        f"'{name}' could not be downloaded: " + "; ".join(failures),
        expected=f"one of {', '.join(way[0].address for way in WAYS[name])} to answer",
        mend=f"try again later, or see {SOURCES[name].address} and put into '{target}': {SOURCES[name].files[0]}",
    )


def _obtain_extra(
    extra: Download, target: Path, listen: Callable[[int, int], None], say: Callable[[str], None]
) -> list[Path]:
    try:
        return _obtain_way((extra,), target, listen)
    except _NotThisWayError as error:
        say(f"without {', '.join(extra.files)}: {error}")
        return []


def _present(target: Path, way: tuple[Download, ...]) -> list[Path]:
    """What this way would bring, if all of it is there and whole."""
    if any(download.tree for download in way):
        return [target] if target.is_dir() else []
    wanted = {name: md5 for download in way for name, md5 in download.files.items()}
    paths = [target / name for name in wanted]
    if all(path.is_file() and (not md5 or _md5(path) == md5) for path, md5 in zip(paths, wanted.values(), strict=True)):
        return paths
    return []


def _obtain_way(way: tuple[Download, ...], target: Path, listen: Callable[[int, int], None]) -> list[Path]:
    """Everything of a way, gathered aside and then moved to its place."""
    with _aside(target) as aside:
        for download in way:
            _fetch(download, aside / "kept", listen)
        kept = aside / "kept"
        names = sorted(path.name for path in kept.iterdir())
        is_tree = any(download.tree for download in way)
        if not target.exists():
            os.replace(kept, target)  # at once
        elif is_tree:
            raise SparsonaError(f"'{target}' is in the way", expected="no such folder yet", mend="move it elsewhere")
        else:
            for name in names:
                os.replace(kept / name, target / name)
    return [target] if is_tree else [target / name for name in names]


@contextmanager
def _aside(target: Path) -> Iterator[Path]:
    """A folder beside the target, gone afterwards."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f"{target.name}.part-", dir=target.parent))
        sweep(target.parent)
        (aside / "kept").mkdir()
    except OSError as error:
        raise _cannot_keep(target.parent, error) from error
    try:
        yield aside
    except OSError as error:  # a full disk, most likely
        raise _cannot_keep(target.parent, error) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _cannot_keep(folder: Path, error: OSError) -> SparsonaError:
    return SparsonaError(
        f"nothing can be kept in '{folder}': {error}",
        expected="a folder with room that can be written",
        mend="set SPARSONA_DATA to another",
    )


def _fetch(download: Download, kept: Path, listen: Callable[[int, int], None]) -> None:
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
        except (
            tarfile.TarError,
            zipfile.BadZipFile,
            zlib.error,
            lzma.LZMAError,
            EOFError,
            ValueError,
            OSError,
        ) as error:
            raise _NotThisWayError(f"the archive cannot be unpacked: {error}") from error
        part.unlink()
    for file, md5 in download.files.items():
        _check(kept / file, ("md5", md5) if md5 else None, address)


def _locate(download: Download) -> tuple[str, tuple[str, str] | None]:
    """The web address, and the digest that the download must have."""
    kind, _, name = download.address.partition(":")
    if kind == "npm":
        return _ask_npm(name)
    if kind == "debian":
        return _ask_debian(name)
    return download.address, ("md5", download.md5) if download.md5 else None


def _ask_npm(package: str) -> tuple[str, tuple[str, str]]:
    answer = _run("npm", "view", package, "dist", "--json")
    try:
        dist = json.loads(answer)
        algorithm, _, digest = dist["integrity"].split()[0].partition("-")
        return str(dist["tarball"]), (algorithm, base64.b64decode(digest).hex())
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise _NotThisWayError(f"npm's answer is not understood: {error!r}") from error


def _ask_debian(package: str) -> tuple[str, tuple[str, str]]:
    answer = _run("apt-get", "download", "--print-uris", package)
    found = re.search(r"^'([^']+)' \S+ \d+ (\w+):([0-9a-fA-F]+)\s*$", answer, re.MULTILINE)
    if not found:
        raise _NotThisWayError(f"apt-get does not know the package {package}")
    address, algorithm, digest = found.groups()
    return address, (algorithm.lower().removesuffix("sum"), digest.lower())


def _run(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT, check=False, env={**os.environ, "LC_ALL": "C"}
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _NotThisWayError(f"{command[0]} cannot be asked: {error}") from error
    if done.returncode:
        raise _NotThisWayError(f"{command[0]} answered with an error: {done.stderr.strip()[-200:]}")
    return done.stdout


def _stream(address: str, part: Path, listen: Callable[[int, int], None]) -> None:
    if not address.startswith(("http://", "https://")):
        raise _NotThisWayError(f"'{address}' is not a web address")
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
    except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError, ValueError) as error:
        raise _NotThisWayError(f"{address} does not answer: {error}") from error
    if total and done != total:
        raise _NotThisWayError(f"{address} stopped after {done:,} of {total:,} bytes")


def _check(path: Path, digest: tuple[str, str] | None, address: str) -> None:
    """A file that is not what it should be is removed."""
    if not path.is_file():
        raise _NotThisWayError(f"{address} does not hold '{path.name}'")
    if digest is None:
        return
    algorithm, wanted = digest
    if algorithm not in hashlib.algorithms_available:
        raise _NotThisWayError(f"{address} comes with a digest of an unknown kind, {algorithm}")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, algorithm).hexdigest()
    if found != wanted:
        path.unlink()
        raise _NotThisWayError(
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
