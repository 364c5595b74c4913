"""Storage of clients' states between their turns: on the device, on the host when that is full, then in files."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections import OrderedDict
from itertools import count
from pathlib import Path
from typing import Any

import torch

from sparsona.core.errors import SparsonaError
from sparsona.core.storage import Stored
from sparsona.core.tree import Tree, parts
from sparsona.engine.tempdirs import claim, make_folder

SHARE = 0.5  # of a memory that stored trees may fill: the other half is for training
SMALL = 1024  # bytes below which moving a tree saves nothing
PREFIX = "sparsona-spill-"


class _Row:
    """The stored trees in one kind of memory, least recently used first, by weak references."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0
        self._things: OrderedDict[int, tuple[weakref.ref[Stored], int]] = OrderedDict()

    def put(self, stored: Stored) -> None:
        key = id(stored)
        if key in self._things:
            self._things.move_to_end(key)
            return
        self._things[key] = (weakref.ref(stored, lambda _gone: self._forget(key)), stored.num_bytes)
        self.used += stored.num_bytes

    def overflow(self) -> Stored | None:
        """The least recently used tree while the limit is exceeded, otherwise None."""
        while self.used > self.limit and self._things:
            key, (ref, _) = next(iter(self._things.items()))
            stored = ref()
            if stored is not None:
                return stored
            self._forget(key)
        return None

    def take(self, stored: Stored) -> None:
        self._forget(id(stored))

    def _forget(self, key: int) -> None:
        found = self._things.pop(key, None)
        if found is not None:
            self.used -= found[1]


class SpillStore:
    """Stores trees, and moves the least recently used ones when a memory fills up.

    Masks are packed immediately. `device_bytes` and `host_bytes` limit what is stored in each memory; a CPU has one.
    """

    def __init__(self, device: torch.device, device_bytes: int | None = None, host_bytes: int | None = None) -> None:
        if host_bytes is None:
            host_bytes = int(SHARE * _host_memory())
        if device_bytes is None and device.type == "cuda":
            device_bytes = int(SHARE * torch.cuda.get_device_properties(device).total_memory)
        self._device = _Row(host_bytes if device_bytes is None else device_bytes)
        self._host = None if device.type == "cpu" else _Row(host_bytes)
        self._folder: _Folder | None = None

    def store(self, value: Any) -> None:
        """Store every tree inside a State, Server or Work. Its users see no difference: a tree loads on access."""
        for _, tree in parts(value):
            if isinstance(tree, Tree) and tree.layout.size:
                stored = tree.store()
                if stored.num_bytes >= SMALL and stored.where == "device":
                    self._device.put(stored)
        self._make_room()

    def _make_room(self) -> None:
        while (stored := self._device.overflow()) is not None:
            if self._host is None:
                self._to_file(stored)
            else:
                stored.move_to_host()
                self._host.put(stored)
            self._device.take(stored)
        while self._host is not None and (stored := self._host.overflow()) is not None:
            self._to_file(stored)
            self._host.take(stored)

    def _to_file(self, stored: Stored) -> None:
        try:
            if self._folder is None:
                self._folder = _Folder()
            stored.move_to_file(self._folder.new_path(), self._folder)
        except OSError as error:
            raise SparsonaError(
                f"the clients' states fill the memory and cannot be written to files: {error}",
                expected=f"free space in '{tempfile.gettempdir()}'",
                hint="free some space or set TMPDIR to a larger disk, then `sparsona resume` this run",
            ) from error


class _Folder:
    """A folder that is removed when neither the store nor any of its files is in use, and at the end of the process."""

    def __init__(self) -> None:
        self._path = make_folder(PREFIX)
        weakref.finalize(self, shutil.rmtree, self._path, ignore_errors=True)
        claim(self._path)
        self._numbers = count()

    def new_path(self) -> Path:
        return self._path / f"{next(self._numbers)}.tree"


def _host_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or less in a container with a limit."""
    try:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on every system
        whole = 8 * 2**30
    try:
        return min(whole, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    except (OSError, ValueError):  # no such limit
        return whole
