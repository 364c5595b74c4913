"""Whether Triton kernels can be built here, and where they are kept."""

from __future__ import annotations

import contextlib
import os
import shutil
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

# Both variables are read whenever something is compiled. Set together and first: torch sets the second to a folder
# inside the first, but only when it compiles itself, so that the next run would look for other kernels elsewhere.
FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "", "TRITON_CACHE_DIR": "triton"}


@lru_cache(maxsize=1)
def have_triton() -> bool:
    """Whether Triton is installed, and the C compiler that it needs; what is built is then kept for later runs."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    is_here = find_spec("triton") is not None and compiler is not None
    if is_here:
        keep_compiled()
    return is_here


def keep_compiled() -> None:
    """Name folders where kernels and programs are kept, unless the user has: the defaults are a temporary folder and
    one that depends on which of the two compiles first."""
    folder = Path("~/.cache/sparsona/compiled").expanduser()
    with contextlib.suppress(OSError):  # the home folder is not writable: the defaults are used
        folder.mkdir(parents=True, exist_ok=True)
        for variable, name in FOLDERS.items():
            os.environ.setdefault(variable, str(folder / name))
