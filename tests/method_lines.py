"""What tests/methods/test_*.py say of the methods' rows: their lines for the battery, and their memory by hand.

BATTERY = {"fedlc": {"options": {"margin": 0.5}, "accuracy": 0.35}}  # arguments of sparsona.testing.check
MEMORY = [("fedlc", {}, 0, SIZE, 2 * SIZE + 4 * 26, 0)]  # options; bytes kept, at hand, in training, in mask search
ANYWHERE = {"fedbn": {"personal": "output"}}  # what a row needs to run quickly on any network, if it needs anything
WITH_MEMORY = {"fedrolex": None}  # what a row needs for momentum or Adam, if it needs anything; None: keeps no memory
INNER_GRADIENTS = ("perfedavg",)  # rows whose loss takes a gradient itself, whose norms are not fused on a GPU
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from sparsona.methods import METHODS

FOLDER = Path(__file__).parent / "methods"


def _modules() -> list[Any]:
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return [import_module(path.stem) for path in sorted(FOLDER.glob("test_*.py"))]


def battery() -> dict[str, dict[str, Any]]:
    """By row, in the order of the files."""
    found: dict[str, dict[str, Any]] = {}
    for module in _modules():
        own = getattr(module, "BATTERY", {})
        assert not own.keys() & found.keys(), f"{module.__name__} has a line for a row that has one"
        found |= own
    return found


def memory() -> list[tuple[Any, ...]]:
    return [line for module in _modules() for line in getattr(module, "MEMORY", [])]


def anywhere(name: str) -> dict[str, Any]:
    """Options for tests that run every row on a network of their own."""
    return {key: value for module in _modules() for key, value in getattr(module, "ANYWHERE", {}).get(name, {}).items()}


def with_memory(name: str) -> dict[str, Any] | None:
    """Options for optimizers that have a memory; None: the method refuses to keep it."""
    found = {key: value for module in _modules() for key, value in getattr(module, "WITH_MEMORY", {}).items()}
    return found.get(name, {})


def further_rows_are_slow(names: Iterable[str]) -> list[Any]:
    """Parameters of a test: a file's further rows differ in options, and are for `make test-all`."""
    first = {row.module: row.name for row in reversed(METHODS.values())}.values()
    return [pytest.param(name, marks=[] if name in first else [pytest.mark.slow]) for name in names]


def takes_inner_gradients(name: str) -> bool:
    return any(name in getattr(module, "INNER_GRADIENTS", ()) for module in _modules())
