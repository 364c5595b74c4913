"""Writes requirements.lock and pip.lock: what `make setup` installs, each file by its hash.

constraints.txt is the one place where versions are chosen. This follows the requirements of the extras `dev` and `docs`
and of the build through those versions, for every platform and Python in ENVIRONMENTS, and asks the index that pip
uses for the hashes of all files of each version. torch is left out: which build suits is the machine's affair, and
what it needs besides is here. `make lock` runs it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from email.parser import HeaderParser
from html.parser import HTMLParser
from importlib import metadata
from pathlib import Path
from urllib.parse import urldefrag, urljoin, urlsplit

from packaging.requirements import Requirement
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)

ROOT = Path(__file__).parents[1]
EXTRAS = ("dev", "docs")
BY_HAND = "torch"  # installed after the lock, without hashes
BUILD = ("hatchling", "editables")  # with an editable install
SYSTEMS = {"linux": ("Linux", "posix"), "darwin": ("Darwin", "posix")}
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
ENVIRONMENTS = [
    {
        "sys_platform": system,
        "platform_system": name,
        "os_name": kind,
        "platform_machine": "x86_64" if system == "linux" else "arm64",
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    for system, (name, kind) in SYSTEMS.items()
    for python in PYTHONS
]
HEAD = "# Made by `make lock` of constraints.txt and pyproject.toml: not to be edited.\n"


def pins(text: str) -> dict[str, str]:
    """The versions in constraints.txt, by normalized name."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines if line)}


def roots(project: dict) -> list[Requirement]:
    """What a checkout needs: the package's own requirements, those of the extras, and those of its build."""
    found, waiting = list(project["project"]["dependencies"]), list(EXTRAS)
    extras = project["project"]["optional-dependencies"]
    for extra in waiting:
        for text in extras[extra]:
            if (requirement := Requirement(text)).name == project["project"]["name"]:
                waiting += [name for name in sorted(requirement.extras) if name not in waiting]
            else:
                found.append(text)
    return [Requirement(text) for text in (*found, *project["build-system"]["requires"], *BUILD)]


def closure(wanted: Iterable[Requirement], versions: dict[str, str], known: Requires, environment: dict) -> set[str]:
    """The packages that these requirements come to in an environment."""
    found: set[str] = set()
    waiting = [(requirement, "") for requirement in wanted]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({**environment, "extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name not in versions:
            raise SystemExit(f"{requirement} is needed, and {name} is not in constraints.txt")
        if not requirement.specifier.contains(versions[name], prereleases=True):
            raise SystemExit(f"constraints.txt has {name}=={versions[name]}, and {requirement} is needed")
        found.add(name)
        for wanted_extra in ("", *requirement.extras):
            if (name, wanted_extra) not in seen:
                seen.add((name, wanted_extra))
                waiting += [(below, wanted_extra) for below in known(name, versions[name])]
    return found


class Requires:
    """What packages require: of those installed here, and otherwise of a wheel that pip downloads."""

    def __init__(self) -> None:
        self._known: dict[str, list[Requirement]] = {}

    def __call__(self, name: str, version: str) -> list[Requirement]:
        if name not in self._known:
            self._known[name] = [Requirement(text) for text in self._read(name, version)]
        return self._known[name]

    def _read(self, name: str, version: str) -> list[str]:
        try:
            installed = metadata.distribution(name)
            if installed.version.partition("+")[0] == version:
                # torch names its CUDA libraries by marker: a machine's affair, as torch is.
                texts = installed.requires or []
                return [
                    text for text in texts if name != BY_HAND or not text.startswith(("nvidia-", "cuda-", "triton"))
                ]
        except metadata.PackageNotFoundError:
            pass
        if name == BY_HAND:
            raise SystemExit(f"{name}=={version} is to be installed first")
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            subprocess.run([*command, "--dest", folder, f"{name}=={version}"], check=True)
            (wheel,) = Path(folder).iterdir()
            with zipfile.ZipFile(wheel) as archive:
                (path,) = (path for path in archive.namelist() if path.endswith(".dist-info/METADATA"))
                return HeaderParser().parsestr(archive.read(path).decode()).get_all("Requires-Dist") or []


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a" and (address := dict(attrs).get("href")):
            self.found.append(address)


def index_address() -> str:
    """The index that pip uses here, as it was told, or its own."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    found = re.findall(r"^(?:global|install|:env:)\.index-url='(.*)'$", listed.stdout, re.MULTILINE)
    from pip._internal.models.index import PyPI

    return found[-1] if found else PyPI.simple_url


def hashes(index: str, name: str, version: str) -> list[str]:
    """The SHA-256 of every file of a version, whatever the platform."""
    page = f"{index.rstrip('/')}/{name}/"
    request = urllib.request.Request(page, headers={"Accept": "application/vnd.pypi.simple.v1+json, text/html;q=0.5"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        kind, body = answer.headers.get_content_type(), answer.read().decode()
    files = files_of(kind, body, page)
    found = sorted({digest for file, digest in files.items() if digest and version_of(file) == version})
    if not found:
        raise SystemExit(f"the index has no file of {name}=={version}")
    return found


def files_of(kind: str, body: str, page: str) -> dict[str, str | None]:
    """The files that an index lists, as JSON or as HTML, and their SHA-256."""
    if kind.endswith("json"):
        return {one["filename"]: one["hashes"].get("sha256") for one in json.loads(body)["files"]}
    (links := _Links()).feed(body)
    return dict(_file_and_hash(urljoin(page, link)) for link in links.found)


def _file_and_hash(address: str) -> tuple[str, str | None]:
    plain, fragment = urldefrag(address)
    kind, _, digest = fragment.partition("=")
    return Path(urlsplit(plain).path).name, digest if kind == "sha256" else None


def version_of(file: str) -> str | None:
    """The version in the name of a file."""
    try:
        parsed = parse_wheel_filename(file)[1] if file.endswith(".whl") else parse_sdist_filename(file)[1]
    except (InvalidWheelFilename, InvalidSdistFilename):
        return None
    return str(parsed)


def marker(where: list[dict]) -> str:
    """The condition under which a package is needed, or "" if it always is."""
    if len(where) == len(ENVIRONMENTS):
        return ""
    systems = {one["sys_platform"] for one in where}
    pythons = sorted({one["python_version"] for one in where}, key=lambda text: int(text.split(".")[1]))
    parts = []
    if systems != set(SYSTEMS):
        parts.append(" or ".join(f"sys_platform == '{system}'" for system in sorted(systems)))
    if pythons != list(PYTHONS):
        parts.append(
            f"python_version <= '{pythons[-1]}'" if pythons[0] == PYTHONS[0] else f"python_version >= '{pythons[0]}'"
        )
    return " ; " + " and ".join(parts)


def lines(name: str, version: str, condition: str, digests: list[str]) -> Iterator[str]:
    """The entry of a package."""
    yield " \\\n    ".join([f"{name}=={version}{condition}", *(f"--hash=sha256:{digest}" for digest in digests)]) + "\n"


def main() -> None:
    versions = pins((ROOT / "constraints.txt").read_text())
    project, known = tomllib.loads((ROOT / "pyproject.toml").read_text()), Requires()
    needed: dict[str, list[dict]] = {}
    for environment in ENVIRONMENTS:
        for name in closure(roots(project), versions, known, environment):
            needed.setdefault(name, []).append(environment)
    needed.pop(BY_HAND)
    index = index_address()
    with ThreadPoolExecutor(8) as pool:
        names = sorted(needed)
        found = dict(zip(names, pool.map(lambda name: hashes(index, name, versions[name]), names), strict=True))
    body = [line for name in names for line in lines(name, versions[name], marker(needed[name]), found[name])]
    (ROOT / "requirements.lock").write_text(HEAD + "".join(body))
    (ROOT / "pip.lock").write_text(
        HEAD + "".join(lines("pip", versions["pip"], "", hashes(index, "pip", versions["pip"])))
    )
    print(f"requirements.lock: {len(names)} packages, {sum(map(len, found.values()))} hashes")


if __name__ == "__main__":
    main()
