"""Tensors stored until their next use: masks as bits, and large ones on the host or in files."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sparsona.core.errors import SparsonaError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Stored:
    """A tensor stored without loss: a bool tensor takes one bit an entry.

    It stays on the tensor's device until it is moved. Its file belongs to this value alone and is deleted with it.
    """

    __slots__ = ("__weakref__", "_folder", "_kept", "_path", "_shares_blocks", "device", "dtype", "is_bits", "shape")

    def __init__(self, tensor: Tensor) -> None:
        import torch

        tensor = tensor.detach()
        self.is_bits = tensor.dtype is torch.bool
        self.shape, self.dtype, self.device = tuple(tensor.shape), tensor.dtype, tensor.device
        self._kept: Tensor | None = tensor if not self.is_bits else _pooled(pack_there(tensor.reshape(-1)))
        self._shares_blocks = self.is_bits
        self._path: Path | None = None
        self._folder: object = None

    @classmethod
    def of_bits(cls, packed: Tensor, shape: tuple[int, ...], shares_blocks: bool = True) -> Stored:
        """A bool tensor that was packed elsewhere.

        Args:
            packed: its bits.
            shape: its shape.
            shares_blocks: False for a length that nobody else has: blocks are kept for the next one of that length.

        Returns:
            The stored tensor.
        """
        import torch

        stored = cls(torch.zeros(0, dtype=torch.bool))
        stored.shape, stored._shares_blocks = tuple(shape), shares_blocks
        stored._kept = _pooled(packed) if shares_blocks else packed
        return stored

    def __del__(self) -> None:
        self._release()

    def _release(self) -> None:
        """Return the memory of bits on the host to the pool; no other object has a reference to it."""
        kept, self._kept = getattr(self, "_kept", None), None
        if (
            kept is not None
            and self._shares_blocks
            and kept.device.type == "cpu"
            and len(kept) > SMALL
            and _FREE is not None
        ):
            _FREE.setdefault(len(kept), []).append(kept)

    @property
    def num_bytes(self) -> int:
        entries = prod(self.shape)
        return -(-entries // 8) if self.is_bits else entries * self.dtype.itemsize

    @property
    def where(self) -> Literal["device", "host", "file"]:
        if self._kept is None:
            return "file"
        return "device" if self._kept.device == self.device else "host"

    def load(self) -> Tensor:
        """The tensor, on the device it came from. A tensor that had to be unpacked, moved or read is not cached."""
        stored = self._stored()
        if self.is_bits:
            return unpack_there(stored.to(self.device), prod(self.shape)).view(self.shape)
        return stored.to(self.device)

    def bits(self) -> Tensor:
        """A bool tensor's bits, packed, on the host."""
        return self._stored().to("cpu", copy=True)

    def counts(self, sizes: Iterable[int]) -> tuple[int, ...]:
        """How many of a bool tensor's entries are true, in pieces of these sizes; nothing is unpacked."""
        return count_bits(self._stored().cpu(), sizes)

    def move_to_host(self) -> None:
        if self._kept is not None and self._kept.device.type != "cpu":
            self._kept = _pooled(self._kept.cpu()) if self._shares_blocks else self._kept.cpu()

    def move_to_file(self, path: Path, folder: object = None) -> None:
        """Write the tensor to a new file and free its memory; after an error nothing has changed.

        Args:
            path: the file, which must not exist.
            folder: an object to keep alive as long as the file is needed.
        """
        stored = self._stored().cpu()
        import torch

        try:
            with path.open("xb") as file:
                file.write(stored.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        except BaseException:
            _remove(path)
            raise
        self._release()
        self._path, self._folder = path, folder
        weakref.finalize(self, _remove, path)

    def _stored(self) -> Tensor:
        if self._kept is not None:
            return self._kept
        import torch

        assert self._path is not None
        # Into memory that torch aligned: the alignment of a buffer can change the order in which a product is summed.
        raw = torch.empty(self.num_bytes, dtype=torch.uint8)
        try:
            with self._path.open("rb") as file:
                found = file.readinto(raw.numpy().data)
        except OSError as error:
            raise _lost(self._path, str(error)) from None
        if found != self.num_bytes:
            raise _lost(self._path, f"it has {found} bytes instead of {self.num_bytes}")
        return raw if self.is_bits else raw.view(self.dtype).view(self.shape)


# Bits of idle clients are allocated side by side in large blocks. Allocated singly, between the large temporary tensors
# of training, they would fragment the heap: it would hold ten times their own size.
BLOCK = 4 * 2**20
SMALL = 4096  # bytes up to which bits are allocated singly: too small to fragment the heap
_FREE: dict[int, list[Tensor]] = {}
COUNTED = 2**18  # bytes whose set bits are counted at once: the counts take as much memory again


def _pooled(packed: Tensor) -> Tensor:
    """A copy of these bits in a block of bits of the same length."""
    import torch

    size = len(packed)
    if packed.device.type != "cpu" or size <= SMALL:
        return packed
    free = _FREE.setdefault(size, [])
    if not free:
        room = max(1, BLOCK // size)
        block = torch.empty(room * size, dtype=torch.uint8)
        free.extend(reversed(block.split(size)))  # type: ignore[no-untyped-call]
    return free.pop().copy_(packed)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # gone with its folder
        os.unlink(path)


def _lost(path: Path, why: str) -> SparsonaError:
    return SparsonaError(
        f"a client's state was stored in '{path}' and cannot be read again: {why}",
        expected="the file as it was written",
        hint="leave that folder alone during a run; `sparsona resume` continues from the last checkpoint",
    )


def pack_bits(flags: Tensor) -> Tensor:
    """A bool tensor as bytes on the host, lowest index in the lowest bit."""
    import numpy as np
    import torch

    return torch.from_numpy(np.packbits(flags.detach().cpu().numpy(), bitorder="little"))


def unpack_bits(packed: Tensor, size: int) -> Tensor:
    """The inverse of pack_bits."""
    import numpy as np
    import torch

    bits = np.unpackbits(packed.detach().cpu().numpy(), count=size, bitorder="little")
    return torch.from_numpy(bits.view(np.bool_))


def count_bits(packed: Tensor, sizes: Iterable[int]) -> tuple[int, ...]:
    """How many bits are set among the first sizes[0], among the next sizes[1], and so on; nothing is unpacked."""
    import numpy as np

    raw = packed.detach().cpu().numpy()

    def before(place: int) -> int:
        """Of the bits of its own byte."""
        return (int(raw[place // 8]) & ((1 << place % 8) - 1)).bit_count() if place % 8 else 0

    found, start = [], 0
    for size in sizes:
        end = start + size
        whole = raw[start // 8 : end // 8]
        pieces = (whole[at : at + COUNTED] for at in range(0, len(whole), COUNTED))
        ones = sum(int(np.bitwise_count(piece).sum(dtype=np.int64)) for piece in pieces)
        found.append(ones + before(end) - before(start))
        start = end
    return tuple(found)


def pack_there(flags: Tensor) -> Tensor:
    """pack_bits on the tensor's own device."""
    if flags.device.type == "cpu":
        return pack_bits(flags)
    return _pack(flags)


def unpack_there(packed: Tensor, size: int) -> Tensor:
    """unpack_bits on the tensor's own device."""
    if packed.device.type == "cpu":
        return unpack_bits(packed, size)
    return _unpack(packed, size)


def _pack(flags: Tensor) -> Tensor:
    import torch

    filled = torch.nn.functional.pad(flags.to(torch.uint8), (0, -len(flags) % 8))
    return (filled.view(-1, 8) * _powers(flags.device)).sum(1, dtype=torch.uint8)


def _unpack(packed: Tensor, size: int) -> Tensor:
    return ((packed.unsqueeze(1) & _powers(packed.device)) != 0).view(-1)[:size]


def _powers(device: torch.device) -> Tensor:
    import torch

    return 2 ** torch.arange(8, dtype=torch.uint8, device=device)
