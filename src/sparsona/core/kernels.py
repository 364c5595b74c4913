"""Whether Triton kernels can be built here."""

from __future__ import annotations

import os
import shutil
from functools import lru_cache
from importlib.util import find_spec


@lru_cache(maxsize=1)
def have_triton() -> bool:
    """Whether Triton is installed, and the C compiler that it needs."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return find_spec("triton") is not None and compiler is not None
