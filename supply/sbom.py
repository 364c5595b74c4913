"""Writes what this environment has installed for Sparsona as CycloneDX 1.6. `make sbom` runs it."""

from __future__ import annotations

import json
import sys
import uuid
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NAME = "sparsona"


def reference(distribution: metadata.Distribution) -> str:
    """The package URL, which is the name of a component here as well."""
    return f"pkg:pypi/{canonicalize_name(distribution.name)}@{distribution.version.replace('+', '%2B')}"


def component(distribution: metadata.Distribution, kind: str = "library") -> dict[str, Any]:
    """One package."""
    found: dict[str, Any] = {
        "type": kind,
        "bom-ref": reference(distribution),
        "name": canonicalize_name(distribution.name),
        "version": distribution.version,
        "purl": reference(distribution),
    }
    about = distribution.metadata
    if expression := about.get("License-Expression"):
        found["licenses"] = [{"expression": expression}]
    elif named := [
        line.split(" :: ")[-1] for line in about.get_all("Classifier") or () if line.startswith("License ::")
    ]:
        found["licenses"] = [{"license": {"name": name}} for name in named]
    return found


def below(distribution: metadata.Distribution, installed: dict[str, metadata.Distribution]) -> list[str]:
    """The references of the packages that it requires and that are installed, those of extras among them."""
    names = {canonicalize_name(Requirement(text).name) for text in distribution.requires or ()} - {NAME}
    return sorted(reference(installed[name]) for name in names if name in installed)


def make_bom() -> dict[str, Any]:
    """The document."""
    found = {canonicalize_name(one.name): one for one in metadata.distributions()}
    own = found.pop(NAME)
    every = [own, *(found[name] for name in sorted(found))]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "component": component(own, "application"),
        },
        "components": [component(one) for one in every[1:]],
        "dependencies": [{"ref": reference(one), "dependsOn": below(one, found)} for one in every],
    }


if __name__ == "__main__":
    made = make_bom()
    Path(sys.argv[1]).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(f"{sys.argv[1]}: {len(made['components'])} packages")
