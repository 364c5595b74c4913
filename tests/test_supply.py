"""The lock, constraints.txt and pyproject.toml agree; and what is said of what is installed."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
# Below these are known holes.
SAFE = {"filelock": "3.20.1", "jinja2": "3.1.6", "pillow": "11.3", "torch": "2.11", "cryptography": "45"}


def module(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "supply" / f"{name}.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def locked(name: str = "requirements.lock") -> dict[str, tuple[str, list[str]]]:
    """Versions and hashes, by package."""
    text = (ROOT / name).read_text().replace(" \\\n", " ")
    found = {}
    for line in text.splitlines()[1:]:
        entry = re.fullmatch(r"([a-z0-9-]+)==(\S+)(?: ; [^-]+?)?((?: +--hash=sha256:[0-9a-f]{64})+)", line)
        assert entry, line
        found[entry[1]] = entry[2], entry[3].split()
    return found


def test_the_lock_has_the_versions_of_constraints():
    pins = module("lock").pins((ROOT / "constraints.txt").read_text())
    assert {name: version for name, (version, _) in locked().items()}.items() <= pins.items()
    assert locked("pip.lock") == {"pip": (pins["pip"], locked("pip.lock")["pip"][1])}
    assert "torch" not in locked()
    assert not [name for name in locked() if name.startswith(("nvidia", "cuda", "triton"))]


def test_the_lock_has_what_the_project_requires():
    """If this fails, pyproject.toml or constraints.txt changed: `make lock`."""
    lock = module("lock")
    pins, found = lock.pins((ROOT / "constraints.txt").read_text()), locked()
    for requirement in lock.roots(tomllib.loads((ROOT / "pyproject.toml").read_text())):
        name = canonicalize_name(requirement.name)
        assert requirement.specifier.contains(pins[name]), f"{requirement} with {name}=={pins[name]}: `make lock`"
        assert name == lock.BY_HAND or name in found, f"{requirement} is not in requirements.lock: `make lock`"


def test_no_address_is_written_down():
    for name in ("requirements.lock", "pip.lock", "constraints.txt"):
        assert "://" not in (ROOT / name).read_text()


def test_lower_bounds_are_free_of_known_holes():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    seen = set()
    for requirement in map(Requirement, texts):
        if lowest := SAFE.get(requirement.name):
            seen.add(requirement.name)
            (bound,) = (one.version for one in requirement.specifier if one.operator == ">=")
            assert Version(bound) >= Version(lowest), requirement
    assert seen == set(SAFE)


@pytest.mark.parametrize("body", ["html", "json"])
def test_hashes_are_those_of_every_file_of_a_version(body, tmp_path):
    lock, page = module("lock"), tmp_path / "simple" / "one"
    page.mkdir(parents=True)
    files = {"one-1.0-py3-none-any.whl": "a" * 64, "one-1.0.tar.gz": "b" * 64, "one-1.0.1.tar.gz": "c" * 64}
    links = "".join(f'<a href="../../{file}#sha256={digest}">{file}</a>' for file, digest in files.items())
    found = lock.files_of("text/html", links, "http://127.0.0.1/simple/one/")
    if body == "json":
        entries = ",".join(
            f'{{"filename":"{file}","hashes":{{"sha256":"{digest}"}}}}' for file, digest in files.items()
        )
        found = lock.files_of("application/vnd.pypi.simple.v1+json", f'{{"files":[{entries}]}}', "")
    assert found == files
    assert [file for file in found if lock.version_of(file) == "1.0"] == list(files)[:2]


def test_a_bill_of_materials_names_everything_once():
    made = module("sbom").make_bom()
    assert (made["bomFormat"], made["specVersion"], made["version"]) == ("CycloneDX", "1.6", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", made["serialNumber"])
    own = made["metadata"]["component"]
    assert (own["type"], own["name"]) == ("application", "sparsona")
    references = [own["bom-ref"], *(one["bom-ref"] for one in made["components"])]
    assert len(references) == len(set(references))
    assert {one["ref"] for one in made["dependencies"]} == set(references)
    assert {below for one in made["dependencies"] for below in one["dependsOn"]} <= set(references)
    by_name = {one["name"]: one for one in made["components"]}
    assert by_name["click"]["purl"] == f"pkg:pypi/click@{by_name['click']['version']}"
    (ours,) = (one for one in made["dependencies"] if one["ref"] == own["bom-ref"])
    assert by_name["click"]["bom-ref"] in ours["dependsOn"]
    assert own["bom-ref"] not in ours["dependsOn"]
