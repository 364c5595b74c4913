"""Temporary folders that do not outlive their process for long, however it ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from pathlib import Path

from sparsona.core.files import replace_file

OWNER = "owner"  # the file that says whose a folder is


def make_folder(prefix: str) -> Path:
    """A new folder, to be claimed at once; those of processes that were killed are removed."""
    for owner in Path(tempfile.gettempdir()).glob(f"{prefix}*/{OWNER}"):
        with contextlib.suppress(OSError, ValueError, OverflowError):  # somebody else's, just gone, or none of ours
            host, pid = owner.read_text(encoding="utf-8").split()
            if host == socket.gethostname() and not _is_alive(int(pid)):
                shutil.rmtree(owner.parent, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=prefix))


def claim(folder: Path) -> None:
    """Say whose it is, at one stroke: half a number would be somebody else's."""
    with replace_file(folder / OWNER) as file:
        file.write(f"{socket.gethostname()} {os.getpid()}".encode())


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # asks, and does nothing
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
