"""Tensors put away until somebody asks for them: masks as bits, and whatever does not fit on the host or in a file."""

from __future__ import annotations

import contextlib
import os
import weakref
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sparsona.core.errors import SparsonaError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Stored:
    """A tensor put away, without a loss of bits: a bool tensor takes one bit an entry.

    It lies where the tensor was until it is moved. A file belongs to this value alone and goes with it.
    """

    __slots__ = ("__weakref__", "_folder", "_kept", "_path", "device", "dtype", "is_bits", "shape")

    def __init__(self, tensor: Tensor) -> None:
        import torch

        tensor = tensor.detach()
        self.is_bits = tensor.dtype is torch.bool
        self.shape, self.dtype, self.device = tuple(tensor.shape), tensor.dtype, tensor.device
        self._kept: Tensor | None = tensor if not self.is_bits else _shelved(pack_there(tensor.reshape(-1)))
        self._path: Path | None = None
        self._folder: object = None

    @classmethod
    def of_bits(cls, packed: Tensor, shape: tuple[int, ...]) -> Stored:
        """A bool tensor that was packed elsewhere."""
        import torch

        rest = cls(torch.zeros(0, dtype=torch.bool))
        rest.shape, rest._kept = tuple(shape), _shelved(packed)
        return rest

    def __del__(self) -> None:
        self._let_go()

    def _let_go(self) -> None:
        """Give back the place of bits on the host; nobody else has seen that memory."""
        kept, self._kept = getattr(self, "_kept", None), None
        if kept is not None and self.is_bits and kept.device.type == "cpu" and len(kept) > SMALL and _FREE is not None:
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
        """The tensor, on the device it came from. What had to be unpacked, moved or read is not kept."""
        stored = self._stored()
        if self.is_bits:
            return unpack_there(stored.to(self.device), prod(self.shape)).view(self.shape)
        return stored.to(self.device)

    def bits(self) -> Tensor:
        """A bool tensor's bits, packed, on the host."""
        return self._stored().to("cpu", copy=True)

    def move_to_host(self) -> None:
        if self._kept is not None and self._kept.device.type != "cpu":
            self._kept = _shelved(self._kept.cpu()) if self.is_bits else self._kept.cpu()

    def move_to_file(self, path: Path, folder: object = None) -> None:
        """Into a new file; `folder` is kept alive as long as it is needed. If that fails, all stays as it was."""
        stored = self._stored().cpu()
        import torch

        try:
            with path.open("xb") as file:
                file.write(stored.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        except BaseException:
            _remove(path)
            raise
        self._let_go()
        self._path, self._folder = path, folder
        weakref.finalize(self, _remove, path)

    def _stored(self) -> Tensor:
        if self._kept is not None:
            return self._kept
        import torch

        assert self._path is not None
        # Into memory that torch aligned: where a buffer starts may decide how a product is summed.
        raw = torch.empty(self.num_bytes, dtype=torch.uint8)
        try:
            with self._path.open("rb") as file:
                found = file.readinto(raw.numpy().data)
        except OSError as error:
            raise _lost(self._path, str(error)) from None
        if found != self.num_bytes:
            raise _lost(self._path, f"it has {found} bytes instead of {self.num_bytes}")
        return raw if self.is_bits else raw.view(self.dtype).view(self.shape)


# Bits of idle clients lie side by side in large blocks. On their own, between the large tensors that come and go while
# clients train, each would keep a hole of the heap open: ten times what they hold themselves.
BLOCK = 4 * 2**20
SMALL = 4096  # bytes up to which bits lie on their own: no hole of the heap is that small
_FREE: dict[int, list[Tensor]] = {}


def _shelved(packed: Tensor) -> Tensor:
    """A copy of these bits in a place among others of their length."""
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
        f"what a client keeps was put away in '{path}' and cannot be read again: {why}",
        expected="the file as it was written",
        hint="leave that folder alone while the run lasts; `sparsona resume` goes on from the last checkpoint",
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


def pack_there(flags: Tensor) -> Tensor:
    """pack_bits without leaving the device."""
    if flags.device.type == "cpu":
        return pack_bits(flags)
    return _pack(flags)


def unpack_there(packed: Tensor, size: int) -> Tensor:
    """unpack_bits without leaving the device."""
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
