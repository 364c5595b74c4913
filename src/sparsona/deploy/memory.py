"""How a process that handles many large messages treats its memory."""

from __future__ import annotations

import contextlib
import ctypes

LARGE = 1 << 18  # bytes
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # of glibc's <malloc.h>


def return_large_buffers() -> None:
    """Have large buffers go back to the system as soon as they are freed, in this process from now on.

    By default glibc learns from the first large buffers that are freed to keep later ones. Where those of many clients
    are taken and freed in another order, they leave gaps: the process grows with the number of clients although few
    messages are held at a time. Where there is no glibc, nothing happens.
    """
    _set(_M_MMAP_THRESHOLD, LARGE)


def share_memory_among_threads() -> None:
    """Have all threads of this process take memory from one place, from now on.

    A client trains in a thread that answers frames. By default glibc gives such a thread memory of its own, in pieces
    too small for a model: they are fetched from the system and given back with every step. Where there is no glibc,
    nothing happens.
    """
    _set(_M_ARENA_MAX, 1)


def _set(parameter: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(parameter, value)
