"""The papers' tables and figures: one recipe (TOML) each, and what runs them.

This package is also the function `sparsona.reproduce` (see runner.py): Python binds a package's name in its parent as
soon as any module of it is imported, and would hide a function of that name.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from sparsona.reproduce.runner import reproduce

        return reproduce(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
