"""Compact messages: the same blocks in fewer bytes, bit for bit. Free of torch.

A message that is compact has streams in place of blocks: floats are split into the planes of their bytes, because the
highest bytes (sign and exponent) repeat and the lowest do not, and each stream is compressed where that pays.
docs/wire-format.md has the byte table.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from sparsona.core.errors import SparsonaError
from sparsona.wire.format import (
    CHECKSUM,
    MAX_RATIO,
    STREAM_WINDOW,
    Encoding,
    Head,
    blocks_of,
    malformed,
    message_size,
    padded,
    read_streams,
    write_head,
    write_streams,
)

# A long stream is compressed if that shortens a sample of it, 16 slices of 2 KiB, by 3%: less is not worth the time.
SLICES, SLICE_BYTES = 16, 2**11
WORTH = 0.97
# Bits of which fewer than this share are set are also tried as the gaps between these: most of their bytes are zero,
# and a byte of a frame takes one bit at least. Gaps are then at most twice as many bytes as the bits.
SPARSE = 0.15
MAX_GAP = 255
READ_GAPS = 2**14  # at once: they cover at most half a mebibyte of bits


def shrink(head: Head, blocks: Sequence[bytes | memoryview]) -> list[bytes | memoryview] | None:
    """A message in compact form, or None if that is not shorter.

    Args:
        head: the head of the message.
        blocks: the blocks of its payloads, without padding.

    Returns:
        The head, the table of streams and the streams: all but the checksum.
    """
    widths = [width for part in head.parts for _, width in blocks_of(part.size)]
    compressor = _compressor()
    table: list[tuple[Encoding, int]] = []
    streams: list[bytes | memoryview] = []
    for block, width in zip(blocks, widths, strict=True):
        for plane in _planes(np.frombuffer(block, np.uint8), width):
            encoding, stream = _shortest(np.ascontiguousarray(plane).view(np.uint8), compressor, width == 1)
            table.append((encoding, len(stream)))
            streams.append(stream)
    start = [write_head(Head(head.sender, head.round, head.weight, head.parts, compact=True)), write_streams(table)]
    size = sum(map(len, start)) + sum(num_bytes for _, num_bytes in table) + CHECKSUM.size
    return [*start, *streams] if size < message_size(tuple(part.size for part in head.parts)) else None


class Expanded:
    """The payloads of a compact message, at the offsets that they would have if it were not, from 0.

    Args:
        message: the message.
        head: its head.
        start: where its head ends.
    """

    def __init__(self, message: memoryview, head: Head, start: int) -> None:
        self._message = message
        self._streams: dict[tuple[int, int], list[tuple[Encoding, int, int, int]]] = {}
        streams = iter(read_streams(message, head, start))
        at = 0
        for part in head.parts:
            for size, width in blocks_of(part.size):
                self._streams[at, size] = [next(streams) for _ in _planes(np.empty(0, np.uint8), width)]
                at += padded(size)

    def block(self, start: int, num_bytes: int) -> np.ndarray:
        """A block that is not of floats."""
        (found,) = self.planes(start, num_bytes)
        return found

    def planes(self, start: int, num_bytes: int) -> list[np.ndarray]:
        """The streams of a block, each as bytes."""
        return [self._content(*stream) for stream in self._streams[start, num_bytes]]

    def _content(self, encoding: Encoding, start: int, sent: int, size: int) -> np.ndarray:
        stream = self._message[start : start + sent]
        if encoding is Encoding.RAW:
            return np.frombuffer(stream, np.uint8)
        if encoding is Encoding.ZSTD:
            return _decompress(stream, range(size, size + 1))
        return _read_gaps(_decompress(stream, range(1, 2 * size + 1)), size)


def write_planes(planes: Sequence[np.ndarray], out: np.ndarray, width: int) -> None:
    """Put the streams of floats of so many bytes together in `out`, as bytes."""
    for found, plane in zip(planes, _planes(out, width), strict=True):
        plane[:] = found.view(plane.dtype)


def _planes(block: np.ndarray, width: int) -> tuple[np.ndarray, ...]:
    """Views of a block's streams. The two lowest bytes of a float32 stay together: neither repeats."""
    if width == 4:
        return block[3::4], block[2::4], block.view(np.uint16)[0::2]
    return (block,) if width == 1 else (block[1::2], block[0::2])


def _shortest(stream: np.ndarray, compressor: Any, may_be_bits: bool) -> tuple[Encoding, bytes | memoryview]:
    frame = _compress(stream.data, compressor)
    found: tuple[Encoding, bytes | memoryview] = (Encoding.ZSTD, frame) if frame else (Encoding.RAW, stream.data)
    if may_be_bits and 0 < int(np.bitwise_count(stream).sum(dtype=np.int64)) < SPARSE * 8 * len(stream):
        gaps: bytes = compressor.compress(_gaps(stream))
        if len(gaps) < len(found[1]) and len(gaps) * MAX_RATIO >= len(stream):
            return Encoding.GAPS, gaps
    return found


def _gaps(packed: np.ndarray) -> np.ndarray:
    """For each bit that is set, how many before it are not: in one byte, after a byte of 255 for each 255 of them."""
    zeros = np.diff(np.flatnonzero(np.unpackbits(packed, bitorder="little").view(np.bool_)), prepend=-1) - 1
    more = zeros // MAX_GAP
    if not more.any():
        return zeros.astype(np.uint8)
    out = np.full(len(zeros) + int(more.sum()), MAX_GAP, np.uint8)
    out[np.cumsum(more + 1) - 1] = zeros - MAX_GAP * more
    return out


def _read_gaps(gaps: np.ndarray, num_bytes: int) -> np.ndarray:
    """The bits that these gaps stand for, packed."""
    if gaps[-1] == MAX_GAP:
        raise malformed("gaps that end before the bit that they lead to", f"a last byte below {MAX_GAP}")
    out, at = np.zeros(num_bytes, np.uint8), 0
    for first in range(0, len(gaps), READ_GAPS):
        some = gaps[first : first + READ_GAPS]
        ends = some != MAX_GAP
        places = at + np.cumsum(some + ends, dtype=np.int64)  # after each bit that is set, itself included
        at, places = int(places[-1]), places[ends] - 1
        if at > 8 * num_bytes:
            raise malformed(f"gaps that lead to bit {at - 1}", f"fewer than {8 * num_bytes} bits")
        if len(places):
            start, end = int(places[0]) // 8, int(places[-1]) // 8 + 1
            flags = np.zeros(8 * (end - start), np.uint8)
            flags[places - 8 * start] = 1
            out[start:end] |= np.packbits(flags, bitorder="little")
    return out


def _compress(stream: memoryview, compressor: Any) -> bytes | None:
    """The stream as a frame, or None if that does not pay."""
    if len(stream) > 2 * SLICES * SLICE_BYTES:
        starts = [index * (len(stream) - SLICE_BYTES) // (SLICES - 1) for index in range(SLICES)]
        sample = b"".join(stream[start : start + SLICE_BYTES] for start in starts)
        if len(compressor.compress(sample)) > WORTH * len(sample):
            return None
    found: bytes = compressor.compress(stream)
    return found if len(found) < len(stream) else None


def _compressor() -> Any:
    zstandard = _zstandard()
    # Entropy coding next to alone: matches of exponents or of random flags are chance and only cost time and bytes.
    # A small hash table finds few of them, and runs all the same.
    params = zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST,
        window_log=STREAM_WINDOW.bit_length() - 1,
        hash_log=6,
        chain_log=6,
        search_log=1,
        min_match=7,
        target_length=0,
    )
    return zstandard.ZstdCompressor(compression_params=params)


def _decompress(frame: memoryview, sizes: range) -> np.ndarray:
    """The content of a frame, which must have one of these sizes and no more than its bytes can hold."""
    zstandard = _zstandard()
    try:
        # A frame that states its size is given that much memory, whatever the caller allows: so it is compared first.
        is_frame = bytes(frame[:4]) == zstandard.FRAME_HEADER
        size = zstandard.get_frame_parameters(frame).content_size if is_frame else -1
        if size not in sizes or size > MAX_RATIO * len(frame):
            most = sizes[-1]
            raise malformed("a stream that is not a Zstandard frame of its content", f"one that states {most} bytes")
        reader = zstandard.ZstdDecompressor(max_window_size=STREAM_WINDOW)
        found = reader.decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise malformed(f"a stream cannot be decompressed ({error})", "one whole Zstandard frame") from None
    except MemoryError:
        raise malformed(f"a content of {size} bytes", "no more than there is memory for") from None
    if len(found) != size:
        raise malformed(f"a stream of {len(found)} bytes of content", f"{size}")
    return np.frombuffer(found, np.uint8)


def _zstandard() -> Any:
    try:
        return import_module("zstandard")
    except ImportError:
        raise SparsonaError(
            "compact messages need the package zstandard, which is not installed",
            expected="the extra 'peers' at every sender and receiver",
            hint="pip install 'sparsona[peers]', or leave the transform 'compact' out",
        ) from None
