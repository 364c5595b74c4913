"""Large buffers that are freed between others go back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

CODE = """
import os, sys
from pathlib import Path
from sparsona.deploy.memory import return_large_buffers, share_memory_among_threads
share_memory_among_threads()
if sys.argv[1] == "returned":
    return_large_buffers()
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
bytearray(20_000_000)  # from this glibc learns to keep buffers of that size
buffers = [bytearray(1_000_000) for _ in range(100)]
full = resident()
del buffers[:-1]  # the last one is above them all
print((full - resident()) // 1_000_000)
"""


def test_freed_buffers_are_returned() -> None:
    def returned(how: str) -> int:
        return int(subprocess.run([sys.executable, "-c", CODE, how], check=True, capture_output=True, text=True).stdout)

    usual, changed = returned("as usual"), returned("returned")
    if platform.libc_ver()[0] == "glibc":  # elsewhere nothing is changed, and nothing breaks
        assert usual < 50
        assert changed > 90
