"""Packages that not everybody has, imported where they are first needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from sparsona.core.errors import SparsonaError


def import_extra(module: str, purpose: str, install: str = "'sparsona[report]'") -> Any:
    """A module that only an extra installs, or that people have where they want it.

    Args:
        module: its full name, such as "matplotlib.figure".
        purpose: what needs it, as the subject of "need it": "pictures".
        install: what pip is told to install.

    Returns:
        The module.

    Raises:
        SparsonaError: the package is not installed; the error says how to install it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise SparsonaError(
            f"{module.partition('.')[0]} is not installed; {purpose} need it", hint=f"pip install {install}"
        ) from error
