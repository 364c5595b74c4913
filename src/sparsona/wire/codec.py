"""Updates to bytes and back, bit for bit."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sparsona.core.errors import SparsonaError
from sparsona.core.storage import Stored, count_bits, pack_bits
from sparsona.core.tree import Tree
from sparsona.core.tree import counts as ones_of
from sparsona.core.update import Levels, Part, PartSize, Support, Update, bits_digest, mask_digest
from sparsona.wire.compact import Expanded, shrink, write_planes
from sparsona.wire.format import (
    ALIGN,
    CHECKSUM,
    Head,
    PartHead,
    has_levels,
    malformed,
    padded,
    payload_size,
    read_head,
    scales_size,
    short,
    sizes_of,
    write_head,
)

UNPACKED = 2**15  # levels that are unpacked at once


def encode(update: Update) -> bytes:
    """Encode an update as a message. Raises an error for every update that `decode` would reject.

    Args:
        update: the update.

    Returns:
        The bytes of the message.

    Example:
        >>> from sparsona.core.update import dense
        >>> update = Update(0, 0, 1.0, {"model": dense(Tree.of({"w": torch.ones(3)}))})
        >>> decode(encode(update)).parts["model"].values.tolist()
        [1.0, 1.0, 1.0]
    """
    parts = [(part, part.values) for part in update.parts.values()]  # gathered once
    heads = tuple(_part_head(*part, size) for part, size in zip(parts, sizes_of(update), strict=True))
    top = Head(update.sender, update.round, update.weight, heads)
    blocks: list[bytes | memoryview] = [write_head(top)]
    for head, (part, values) in zip(heads, parts, strict=True):
        if part.support is Support.BITS:
            blocks += _block(pack_bits(_sendable_mask(head, part).flat))
        if part.levels is not None:
            _check_levels(head.size, part.levels, part.mask if part.support is Support.BITS else None, values)
            blocks += _block(part.levels.scales)
            blocks += _block(torch.tensor(part.levels.counts, dtype=torch.int64))
            values = _pack_levels(values, part.levels.bits)
        blocks += _block(pack_bits(values) if values.dtype is torch.bool else values)
    if update.compact and (shorter := shrink(top, blocks[1::2])) is not None:
        blocks = shorter
    checksum = 0
    for block in blocks:
        checksum = zlib.crc32(block, checksum)
    # The join is the only copy of the values.
    return b"".join([*blocks, CHECKSUM.pack(checksum)])


def decode(data: bytes | bytearray | memoryview, expected: Sequence[PartSize] | None = None) -> Update:
    """Decode a message. Its tensors are copies, so `data` can be reused.

    Memory grows with the length of `data` (of a compact message: with its content), never with what it claims: a KNOWN
    or SEED part may describe a vast layout, for which nothing is allocated, and masks stay packed until they are read.
    Layouts are decoded without the costs of their slots.

    Args:
        data: the bytes of one message.
        expected: the parts that it may have, such as `Cost.up`: a message with other names or shapes is refused before
            these become objects, and decoded layouts are those given here, costs included. What the values are is for
            `engine.gate` to check.

    Returns:
        The update.

    Raises:
        SparsonaError: the data is not a valid message of this version.
    """
    try:
        message = memoryview(data).cast("B")
    except TypeError as error:
        raise SparsonaError(f"not a message: {error}", expected="contiguous bytes") from None
    head, at = read_head(message, expected)
    raw: np.ndarray | Expanded = np.frombuffer(message, np.uint8)
    if head.compact:
        raw, at = Expanded(message, head, at), 0
    parts = {}
    for part in head.parts:
        size = part.size
        bitmap_bytes, value_bytes = payload_size(size)
        mask = None
        if size.support is Support.BITS:
            packed = _read_packed(raw, at, size.layout.size)
            _check_bits(part, sum(count_bits(packed, (size.layout.size,))), bits_digest(size.layout, packed.numpy()))
            mask = Tree(size.layout, Stored.of_bits(packed, (size.layout.size,)))
            mask.identity.digest = part.digest
            at += padded(bitmap_bytes)
        values: Tensor | Stored | None = None
        whole = levels = None
        if has_levels(size):
            scale_bytes, count_bytes = scales_size(size)
            scales = _read_floats(raw, at, len(size.layout.slots), in_planes=False)
            at += padded(scale_bytes)
            counts = _read_block(raw, at, count_bytes).view("<i8").tolist()
            at += padded(count_bytes)
            levels = Levels(size.bits, scales, tuple(counts))
            values = _read_levels(raw, at, size.num_values, size.bits)
            _check_levels(size, levels, mask, values)
        elif not size.is_mask:
            values = _read_floats(raw, at, size.num_values, size.bits, size.is_bfloat)
        elif size.support is Support.DENSE:
            # Left as bits: a receiver usually stores the mask.
            whole = Tree(size.layout, Stored.of_bits(_read_packed(raw, at, size.num_values), (size.num_values,)))
        else:
            packed = _read_packed(raw, at, size.num_values)
            values = Stored.of_bits(packed, (size.num_values,), shares_blocks=False)
        at += padded(value_bytes)
        parts[size.name] = Part(size.layout, values, size.support, mask, part.digest, part.seed, whole, levels)
    return Update(head.sender, head.round, head.weight, parts, head.compact)


def _part_head(part: Part, values: Tensor, size: PartSize) -> PartHead:
    floats = (torch.float32, torch.float16, torch.bfloat16)
    kinds = (*floats, torch.bool) if part.levels is None else (torch.uint8,)
    if values.dim() != 1 or values.dtype not in kinds:
        raise SparsonaError(
            f"part {short(size.name)} holds {values.dtype} values of shape {tuple(values.shape)}",
            expected="float32 or bool in one dimension (or what a transform makes of float32)",
            hint="send one client's flat buffer, as float32 or as a bool mask",
        )
    mask = part.mask
    if part.support is Support.BITS and (mask is None or mask.flat.dtype is not torch.bool or mask.flat.dim() != 1):
        raise SparsonaError(
            f"part {short(size.name)} is to send a bitmap but holds no bool mask",
            hint="make the part with `masked`; one that arrived as KNOWN or SEED has no mask to pass on",
        )
    # Only what the support needs is sent: a SEED part that fell back to BITS still holds its seed.
    return PartHead(
        size,
        digest=b"" if part.support is Support.DENSE else part.proof,
        seed=part.seed if part.support is Support.SEED else b"",
    )


def _sendable_mask(head: PartHead, part: Part) -> Tree:
    mask = part.mask
    assert mask is not None
    if mask.layout.digest != part.layout.digest:
        raise SparsonaError(f"part {short(head.size.name)} and its mask have different layouts", expected="one layout")
    _check_mask(head, mask)
    return mask


def _check_mask(head: PartHead, mask: Tree) -> None:
    _check_bits(head, int(np.count_nonzero(mask.flat.detach().cpu().numpy())), mask_digest(mask))


def _check_bits(head: PartHead, ones: int, digest: bytes) -> None:
    name, num_values = short(head.size.name), head.size.num_values
    if ones != num_values:
        raise malformed(f"part {name} has {num_values} values for a mask of {ones} entries", "as many of both")
    if digest != head.digest:
        raise malformed(f"the mask of part {name} does not match its digest", "the digest of that mask")


def _block(values: Tensor) -> list[bytes | memoryview]:
    """A tensor's memory, little endian, and the padding behind it."""
    values = values.view(torch.int16) if values.dtype is torch.bfloat16 else values  # which numpy lacks
    array = values.detach().cpu().contiguous().numpy()
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return [array.view(np.uint8).data, bytes(-array.nbytes % ALIGN)]


def _read_block(raw: np.ndarray | Expanded, start: int, num_bytes: int) -> np.ndarray:
    if isinstance(raw, Expanded):
        return raw.block(start, num_bytes)
    end = start + num_bytes
    if raw[end : start + padded(num_bytes)].any():
        raise malformed("padding is not zero", "zero bytes")
    return raw[start:end]


def _read_floats(
    raw: np.ndarray | Expanded, start: int, count: int, bits: int = 32, is_bfloat: bool = False, in_planes: bool = True
) -> Tensor:
    width, num_bytes = bits // 8, bits // 8 * count
    planes = raw.planes(start, num_bytes) if isinstance(raw, Expanded) and in_planes else None  # before it is trusted
    # Into memory that torch aligned: the alignment of a buffer can change the order in which a product is summed.
    dtype = torch.float32 if bits == 32 else torch.bfloat16 if is_bfloat else torch.float16
    values = torch.empty(count, dtype=dtype)
    out = values.view(torch.uint8).numpy()
    if planes is None:
        out.view(f"i{width}")[:] = _read_block(raw, start, num_bytes).view(f"<i{width}")  # numpy has no bfloat16
    else:
        write_planes(planes, out, width)
    return values


def _pack_levels(values: Tensor, bits: int) -> Tensor:
    """Levels packed as `bits` bits each, the lowest first, without gaps."""
    each = np.unpackbits(values.detach().cpu().numpy()[:, None], axis=1, count=bits, bitorder="little")
    return torch.from_numpy(np.packbits(each, bitorder="little"))


def _read_levels(raw: np.ndarray | Expanded, start: int, count: int, bits: int) -> Tensor:
    packed, values = _check_spare(raw, start, count * bits), np.empty(count, np.uint8)
    for first in range(0, count, UNPACKED):  # whole bytes: a multiple of eight levels
        some = values[first : first + UNPACKED]
        piece = packed[first * bits // 8 :][: -(-len(some) * bits // 8)]
        each = np.unpackbits(piece, count=len(some) * bits, bitorder="little").reshape(-1, bits)
        some[:] = np.packbits(each, axis=1, bitorder="little").reshape(-1)
    return torch.from_numpy(values)


def _check_levels(size: PartSize, levels: Levels, mask: Tree | None, values: Tensor) -> None:
    name, counts, sizes = short(size.name), levels.counts, size.layout.sizes
    if not len(levels.scales) == len(counts) == len(sizes):
        raise malformed(
            f"part {name} has {len(levels.scales)} scales and {len(counts)} counts", f"{len(sizes)} of both"
        )
    if mask is not None:
        sizes = ones_of(mask)
    fits = all(0 <= number <= most for number, most in zip(counts, sizes, strict=True))
    if not fits or sum(counts) != size.num_values:
        raise malformed(f"part {name} has {size.num_values} levels, of which its tensors have {counts}", f"{sizes}")
    if size.num_values and (highest := int(values.max())) > 2 * levels.top:
        raise malformed(f"part {name} has a level of {highest}", f"at most {2 * levels.top} with {levels.bits} bits")


def _read_packed(raw: np.ndarray | Expanded, start: int, count: int) -> Tensor:
    return torch.from_numpy(_check_spare(raw, start, count).copy())


def _check_spare(raw: np.ndarray | Expanded, start: int, count: int) -> np.ndarray:
    packed = _read_block(raw, start, -(-count // 8))
    # Each mask has exactly one encoding: the spare bits of the last byte must be zero.
    if count % 8 and packed[-1] >> (count % 8):
        raise malformed("spare bits are not zero", "zero bits")
    return packed
