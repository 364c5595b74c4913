"""Where clients' states lie between their turns: on the device, on the host when it is full, then in files."""

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

SHARE = 0.5  # of a memory that resting trees may fill: the other half is for those at work
SMALL = 1024  # bytes below which moving a tree saves nothing
PREFIX = "sparsona-rest-"


class _Row:
    """What lies in one kind of memory, the longest untouched first. Holds nothing alive: what is dropped is gone."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0
        self._things: OrderedDict[int, tuple[weakref.ref[Stored], int]] = OrderedDict()

    def put(self, rest: Stored) -> None:
        key = id(rest)
        if key in self._things:
            self._things.move_to_end(key)
            return
        self._things[key] = (weakref.ref(rest, lambda _gone: self._forget(key)), rest.num_bytes)
        self.used += rest.num_bytes

    def overflow(self) -> Stored | None:
        """What has to go first, while there is too much."""
        while self.used > self.limit and self._things:
            key, (ref, _) = next(iter(self._things.items()))
            rest = ref()
            if rest is not None:
                return rest
            self._forget(key)
        return None

    def take(self, rest: Stored) -> None:
        self._forget(id(rest))

    def _forget(self, key: int) -> None:
        found = self._things.pop(key, None)
        if found is not None:
            self.used -= found[1]


class SpillStore:
    """Puts trees to rest, and moves those that rested longest when a memory fills up.

    Masks are packed at once. `device_bytes` and `host_bytes` are how much may rest in each memory; a CPU has one.
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
        """Let every tree inside a State, Server or Work rest. Nobody who holds one sees a difference."""
        for _, tree in parts(value):
            if isinstance(tree, Tree) and tree.layout.size:
                rest = tree.store()
                if rest.num_bytes >= SMALL and rest.where == "device":
                    self._device.put(rest)
        self._make_room()

    def _make_room(self) -> None:
        while (rest := self._device.overflow()) is not None:
            if self._host is None:
                self._to_file(rest)
            else:
                rest.move_to_host()
                self._host.put(rest)
            self._device.take(rest)
        while self._host is not None and (rest := self._host.overflow()) is not None:
            self._to_file(rest)
            self._host.take(rest)

    def _to_file(self, rest: Stored) -> None:
        try:
            if self._folder is None:
                self._folder = _Folder()
            rest.move_to_file(self._folder.new_path(), self._folder)
        except OSError as error:
            raise SparsonaError(
                f"what the clients keep fills the memory and cannot be put into files: {error}",
                expected=f"free space in '{tempfile.gettempdir()}'",
                hint="free some space or set TMPDIR to a larger disk, then `sparsona resume` this run",
            ) from error


class _Folder:
    """A folder that is removed when neither a shelf nor anything in it is left, and at the end of the process."""

    def __init__(self) -> None:
        self._path = make_folder(PREFIX)
        weakref.finalize(self, shutil.rmtree, self._path, ignore_errors=True)
        claim(self._path)
        self._numbers = count()

    def new_path(self) -> Path:
        return self._path / f"{next(self._numbers)}.rest"


def _host_memory() -> int:
    """Bytes of memory this process may use: the machine's, or less if it was told so (a container)."""
    try:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on every system
        whole = 8 * 2**30
    try:
        return min(whole, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    except (OSError, ValueError):  # no such limit
        return whole
