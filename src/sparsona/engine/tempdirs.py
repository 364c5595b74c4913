"""Temporary folders that are removed soon after their process, however it ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from pathlib import Path

from sparsona.core.files import replace_file

OWNER = "owner"  # the file that names the process of a folder


def make_folder(prefix: str) -> Path:
    """Make a new folder, to be claimed immediately; those of processes that were killed are removed."""
    for owner in Path(tempfile.gettempdir()).glob(f"{prefix}*/{OWNER}"):
        with contextlib.suppress(OSError, ValueError, OverflowError):  # another user's, just removed, or not ours
            host, pid = owner.read_text(encoding="utf-8").split()
            if host == socket.gethostname() and not _is_alive(int(pid)):
                shutil.rmtree(owner.parent, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=prefix))


def claim(folder: Path) -> None:
    """Write the process to the folder, atomically: half a number would name another process."""
    with replace_file(folder / OWNER) as file:
        file.write(f"{socket.gethostname()} {os.getpid()}".encode())


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # signal 0 only checks that the process exists
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
