"""Processes that end with the one that started them, however that ended. Free of torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl


def parent_to_die_with() -> int | None:
    """What a new child process is to pass to `end_with_parent`: this process, or None.

    None in a thread other than the main one: Linux takes the end of the thread that started a process for the end of
    its parent, and other threads end before their process does.
    """
    return os.getpid() if threading.current_thread() is threading.main_thread() else None


def end_with_parent(parent: int | None) -> None:
    """In a child process: have the kernel kill it when its parent ends, even while it is stopped.

    Only Linux can. Elsewhere, and for None, nothing happens; `exit_when_closed` does the same for a child that runs.
    """
    if parent is None or not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):  # a C library without prctl
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before that
        os._exit(1)


def exit_when_closed(descriptor: int) -> None:
    """In a child process: exit as soon as the other end of this pipe is closed, whatever the main thread is doing."""
    if not hasattr(select, "poll"):
        return

    def watch() -> None:
        poll = select.poll()
        poll.register(descriptor, 0)  # no event but those that cannot be declined: hang-up and error
        poll.poll()
        os._exit(0)  # nobody would read what is done here

    threading.Thread(target=watch, name="sparsona-parent", daemon=True).start()
