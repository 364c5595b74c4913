"""How a process that handles many large messages treats its memory."""

from __future__ import annotations

import contextlib
import ctypes

LARGE = 1 << 18  # bytes
_M_MMAP_THRESHOLD = -3  # of glibc's <malloc.h>


def return_large_buffers() -> None:
    """Have large buffers go back to the system as soon as they are freed, in this process from now on.

    By default glibc learns from the first large buffers that are freed to keep later ones. Where those of many clients
    are taken and freed in another order, they leave gaps: the process grows with the number of clients although few
    messages are held at a time. Where there is no glibc, nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE)
