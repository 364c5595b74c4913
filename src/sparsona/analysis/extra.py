"""Packages of the extra `report`, imported where they are first needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from sparsona.core.errors import SparsonaError


def import_extra(module: str, purpose: str) -> Any:
    """A module that only the extra `report` installs.

    Args:
        module: its full name, such as "matplotlib.figure".
        purpose: what needs it, as the subject of "need it": "pictures".

    Returns:
        The module.

    Raises:
        SparsonaError: the package is not installed; the error names the extra.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise SparsonaError(
            f"{module.partition('.')[0]} is not installed; {purpose} need it", hint="pip install 'sparsona[report]'"
        ) from error
