"""Compact messages: the same content bit for bit, as short as its entropy allows, and streams that mean harm."""

import math
import struct
import sys
import tracemalloc
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsona.core.errors import SparsonaError
from sparsona.core.layout import Layout, Slot
from sparsona.core.tree import Tree, counts
from sparsona.core.update import Levels, Part, Support, Update, dense, masked
from sparsona.wire.codec import decode, encode
from sparsona.wire.format import HEAD, PART, SLOT, STREAM, message_size, sizes_of

QUICK = settings(max_examples=60, deadline=None)
# Negative zero, both infinities, NaNs with payloads, denormals, the largest and the smallest.
ODD = np.array(
    [0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFF812345, 1, 0x807FFFFF, 0x7F7FFFFF, 0x00800000], np.uint32
)


def bits_of(values: torch.Tensor) -> bytes:
    bits = values.view(torch.int16) if values.dtype is torch.bfloat16 else values  # which numpy lacks
    return bits.numpy().tobytes()


def seal(body: bytes) -> bytes:
    return body + struct.pack("<I", zlib.crc32(body))


def normal(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 0.05


@st.composite
def updates(draw: st.DrawFn) -> Update:
    """Compact, with contents that shrink a little, much, or not at all."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    layout = Layout((Slot("w", (draw(st.integers(0, 3000)),)), Slot("b", (draw(st.integers(0, 40)),))))
    kind = draw(st.sampled_from(["normal", "few", "any"]))
    flat = (rng.standard_normal(layout.size) * 0.05).astype(np.float32)
    if kind == "few":
        flat[rng.random(layout.size) < 0.9] = 0
    bits = flat.view(np.uint32)
    if kind == "any":
        bits = rng.integers(0, 2**32, layout.size, dtype=np.uint32)
    odd = rng.random(layout.size) < 0.05
    bits[odd] = rng.choice(ODD, int(odd.sum()))
    tree = Tree(layout, torch.from_numpy(bits.view(np.float32).copy()))
    mask = Tree(layout, torch.from_numpy(rng.random(layout.size) < draw(st.sampled_from([0.0, 0.02, 0.5, 1.0]))))
    support = draw(st.sampled_from(Support))
    part = dense(tree) if support is Support.DENSE else masked(tree, mask, support, bytes(16))
    form = draw(st.sampled_from(["float32", "float16", "bfloat16", "levels"]))
    values = part.values
    if form == "float16":
        part = part.carrying(torch.from_numpy((values.numpy().view(np.uint32) >> 16).astype(np.int16)).view(torch.half))
    elif form == "bfloat16":
        top = (values.numpy().view(np.uint32) >> 16).astype(np.int16)
        part = part.carrying(torch.from_numpy(top).view(torch.bfloat16))
    elif form == "levels":
        numbers = layout.sizes if part.mask is None else counts(part.mask)
        found = torch.from_numpy(rng.integers(0, draw(st.sampled_from([2, 15])), len(values), dtype=np.uint8))
        part = part.carrying(found, Levels(4, torch.ones(2), numbers))
    return Update(1, 2, 3.0, {"p": part, "mask": dense(mask)}, compact=True)


@given(updates())
@QUICK
def test_every_bit_comes_back(update: Update) -> None:
    data = encode(update)
    plain = encode(replace(update, compact=False))
    assert len(plain) == message_size(sizes_of(update))
    assert len(data) < len(plain) or data == plain
    got = decode(data)
    assert encode(got) == data
    assert encode(replace(got, compact=False)) == plain, "all of the content, as it is without compaction"
    for name, part in update.parts.items():
        assert bits_of(got.parts[name].values) == bits_of(part.values)


@given(updates(), st.data())
@QUICK
def test_damaged_or_cut_it_is_refused_or_read(update: Update, data: st.DataObject) -> None:
    """With a checksum that fits: a SparsonaError, or an update whose values can be looked at."""
    body = bytearray(encode(update)[:-4])
    if data.draw(st.booleans()):
        del body[data.draw(st.integers(0, len(body))) :]
    for _ in range(data.draw(st.integers(0, 3))):
        if body:
            body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        got = decode(seal(bytes(body)))
    except SparsonaError:
        return
    for part in got.parts.values():
        if part.support in (Support.DENSE, Support.BITS):
            part.plain().tree().flat.sum()


class TestShort:
    def test_masks_take_their_entropy(self) -> None:
        """Tensors of different densities: within 2%."""
        sizes = {0.3: 400_000, 0.45: 300_000, 0.7: 200_000, 1.0: 50_000}
        layout = Layout(tuple(Slot(str(share), (size,)) for share, size in sizes.items()))
        draws = np.random.default_rng(0)
        flags = np.concatenate([draws.random(size) < share for share, size in sizes.items()])
        data = encode(Update(0, 0, 1.0, {"mask": dense(Tree(layout, torch.from_numpy(flags)))}, compact=True))
        shares = [(p, n) for p, n in sizes.items() if p < 1]
        entropy = -sum(n * (p * math.log2(p) + (1 - p) * math.log2(1 - p)) for p, n in shares) / 8
        assert entropy < len(data) < 1.02 * entropy

    @pytest.mark.parametrize(("share", "over"), [(0.1, 1.04), (0.03, 1.05), (0.002, 1.12)])
    def test_sparse_masks_come_near_it(self, share: float, over: float) -> None:
        size = 1_000_000
        flags = np.random.default_rng(0).random(size) < share
        mask = Tree(Layout((Slot("w", (size,)),)), torch.from_numpy(flags))
        entropy = -size * (share * math.log2(share) + (1 - share) * math.log2(1 - share)) / 8
        data = encode(Update(0, 0, 1.0, {"mask": dense(mask)}, compact=True))
        assert 0.97 * entropy < len(data) < over * entropy + 100

    @pytest.mark.parametrize("places", [[0], [7, 8], [254, 255], [256], [255, 510, 511, 999_999], [999_999]])
    def test_gaps_of_any_length(self, places: list[int]) -> None:
        flags = torch.zeros(1_000_000, dtype=torch.bool)
        flags[places] = True
        data = encode(Update(0, 0, 1.0, {"m": dense(Tree(Layout((Slot("w", (1_000_000,)),)), flags))}, compact=True))
        assert decode(data).parts["m"].values.nonzero().flatten().tolist() == places

    @pytest.mark.parametrize(
        ("kind", "share"), [(torch.float32, 0.85), (torch.float16, 0.9), (torch.bfloat16, 0.7)], ids=str
    )
    def test_exponents_repeat(self, kind: torch.dtype, share: float) -> None:
        part = Part(Layout((Slot("w", (200_000,)),)), normal(200_000).to(kind))
        update = Update(0, 0, 1.0, {"p": part})
        assert len(encode(replace(update, compact=True))) < share * len(encode(update))

    def test_zeros_take_next_to_nothing(self) -> None:
        update = Update(0, 0, 1.0, {"p": Part(Layout((Slot("w", (200_000,)),)), torch.zeros(200_000))}, compact=True)
        assert len(encode(update)) < 4_000

    def test_what_does_not_shrink_stays_the_same_message(self) -> None:
        bits = np.random.default_rng(0).integers(0, 2**32, 40_000, dtype=np.uint32)
        part = Part(Layout((Slot("w", (40_000,)),)), torch.from_numpy(bits.view(np.float32)))
        update = Update(0, 0, 1.0, {"p": part})
        assert encode(replace(update, compact=True)) == encode(update)
        assert encode(Update(0, 0, 1.0, {}, compact=True)) == encode(Update(0, 0, 1.0, {}))


# One tensor of 4,000 flags, all true, and how a sender may write it.
FLAGS = b"\xff" * 500
START = HEAD.pack(b"SPNA", 1, 1, 1, 0, 0, 1.0) + PART.pack(1, 1, 0, 1, 4000) + b"m" + SLOT.pack(0, 1)
START += struct.pack("<I", 4000)


def frame(content: bytes, level: int = 3, **options: int) -> bytes:
    params = zstandard.ZstdCompressionParameters.from_level(level, window_log=14, **options)
    return zstandard.ZstdCompressor(compression_params=params).compress(content)


def stating(made: bytes, size: int) -> bytes:
    """A frame whose header states another size of its content: one segment, two bytes of size, then the blocks."""
    params = zstandard.get_frame_parameters(made)
    blocks = made[zstandard.frame_header_size(made) :]
    assert params.content_size != size
    return zstandard.FRAME_HEADER + b"\x60" + struct.pack("<H", size - 256) + blocks


def flags_message(stream: bytes, encoding: int = 1, sent: int | None = None, start: bytes = START) -> bytes:
    return seal(start + STREAM.pack(encoding, len(stream) if sent is None else sent) + stream)


class TestTable:
    """By hand, from docs/wire-format.md."""

    def test_a_mask(self) -> None:
        assert len(START) == 24 + 16 + 1 + 3 + 4 == 48
        for level in (-5, 1, 19):
            got = decode(flags_message(frame(FLAGS, level)))
            assert got.compact
            assert got.parts["m"].values.all()

    def test_gaps(self) -> None:
        """0 zeros, a one; 255 + 3 zeros, a one; 0 zeros, a one: bits 0, 259 and 260."""
        got = decode(flags_message(frame(bytes([0, 255, 3, 0])), encoding=2))
        assert got.parts["m"].values.nonzero().flatten().tolist() == [0, 259, 260]

    def test_planes_from_the_highest_byte(self) -> None:
        """Floats of bytes 00 11 22 3f, lowest first: streams of 3f and 22 as frames, and of 00 11 as they are."""
        count = 100
        start = HEAD.pack(b"SPNA", 1, 1, 1, 0, 0, 1.0) + PART.pack(1, 0, 0, 1, count) + b"p" + SLOT.pack(0, 1)
        top, second, low = frame(b"\x3f" * count), frame(b"\x22" * count), b"\x00\x11" * count
        table = STREAM.pack(1, len(top)) + STREAM.pack(1, len(second)) + STREAM.pack(0, len(low))
        got = decode(seal(start + struct.pack("<I", count) + table + top + second + low))
        assert got.parts["p"].values.view(torch.int32).tolist() == [0x3F221100] * count

    def test_two_planes_of_two_bytes(self) -> None:
        count = 200
        start = HEAD.pack(b"SPNA", 1, 1, 1, 0, 0, 1.0) + PART.pack(1, 3, 0, 1, count) + b"p" + SLOT.pack(0, 1)
        top, low = frame(b"\x3f" * count), b"\x80" * count
        table = STREAM.pack(1, len(top)) + STREAM.pack(0, count)
        got = decode(seal(start + struct.pack("<I", count) + table + top + low))
        assert got.parts["p"].plain().values.tolist() == [1.0] * count


class TestHostile:
    @pytest.mark.parametrize(
        ("data", "words"),
        [
            (flags_message(b"", encoding=3), "a stream of unknown encoding 3"),
            (flags_message(frame(b"\xff" * 15 + b"\xb0"), encoding=2), "gaps that lead to bit 4001"),
            (flags_message(frame(b"\xfe" * 900), encoding=2), "gaps that lead to bit 229499"),
            (flags_message(frame(b"\3\xff"), encoding=2), "gaps that end before the bit"),
            (flags_message(frame(b""), encoding=2), "not a Zstandard frame of its content"),
            (flags_message(frame(bytes(1001)), encoding=2), "not a Zstandard frame of its content"),
            (flags_message(FLAGS, encoding=0), "a compact message of 561 bytes that takes 552 otherwise"),
            (flags_message(FLAGS[:100], encoding=0), "a stream of 100 bytes, RAW, for a content of 500"),
            (flags_message(b""), "a stream of 0 bytes, ZSTD"),
            (flags_message(frame(FLAGS), sent=2**63), "a stream of 9223372036854775808 bytes"),
            (flags_message(frame(FLAGS), sent=3), "streams that end at byte 60"),
            (flags_message(frame(FLAGS), sent=300), "streams that end at byte 357"),
            (seal(START + b"\1"), "a table of 1 streams that goes on to byte 57"),
            (flags_message(b"\x07" * 20), "not a Zstandard frame of its content"),
            (flags_message(frame(FLAGS + b"\xff")), "not a Zstandard frame of its content"),
            (flags_message(frame(FLAGS[:-1])), "not a Zstandard frame of its content"),
            (flags_message(frame(FLAGS)[:-1]), "cannot be decompressed"),
            (flags_message(frame(FLAGS) + b"\0"), "unused data"),
            (flags_message(frame(FLAGS) + frame(FLAGS)), "unused data"),
            (flags_message(frame(FLAGS, write_content_size=0)), "not a Zstandard frame of its content"),
            (flags_message(b"\x50\x2a\x4d\x18" + struct.pack("<I", 12) + bytes(12)), "not a Zstandard frame"),
            # A frame that states 500 bytes and holds 2^24 zeros, and one that holds 499.
            (flags_message(stating(frame(bytes(2**24))[:480], 500)), "cannot be decompressed"),
            (flags_message(stating(frame(b"\xff" * 499), 500)), "cannot be decompressed"),
            (flags_message(frame(bytes(2**24))[:480]), "not a Zstandard frame of its content"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_streams(self, data: bytes, words: str) -> None:
        tracemalloc.start()
        try:
            with pytest.raises(SparsonaError, match=words):
                decode(data)
            assert tracemalloc.get_traced_memory()[1] < 128_000
        finally:
            tracemalloc.stop()

    def test_spare_bits_and_digests_are_checked_after_decompression(self) -> None:
        start = START[:-20] + START[-20:].replace(struct.pack("<I", 4000), struct.pack("<I", 3999))
        start = start.replace(struct.pack("<Q", 4000), struct.pack("<Q", 3999))
        with pytest.raises(SparsonaError, match="spare bits"):
            decode(flags_message(frame(FLAGS), start=start))
        layout = Layout((Slot("w", (9000,)),))
        mask = Tree(layout, torch.ones(9000, dtype=torch.bool))
        data = encode(
            Update(0, 0, 1.0, {"p": masked(Tree(layout, torch.ones(9000)), mask, Support.BITS)}, compact=True)
        )
        assert len(data) < 1000
        at = data.index(decode(data).parts["p"].proof)
        with pytest.raises(SparsonaError, match="digest"):
            decode(seal(data[:at] + bytes(8) + data[at + 8 : -4]))

    def test_no_more_is_claimed_than_a_stream_can_hold(self) -> None:
        """Of 2^39 flags, nothing is allocated."""
        start = HEAD.pack(b"SPNA", 1, 1, 1, 0, 0, 1.0) + PART.pack(1, 1, 0, 1, 2**39) + b"m" + SLOT.pack(0, 2)
        data = flags_message(bytes(2**16), start=start + struct.pack("<II", 2**20, 2**19))
        tracemalloc.start()
        try:
            with pytest.raises(SparsonaError, match="a stream of 65536 bytes, ZSTD, for a content of 68719476736"):
                decode(data)
            assert tracemalloc.get_traced_memory()[1] < 64_000
        finally:
            tracemalloc.stop()

    def test_memory_is_twice_the_content(self) -> None:
        layout = Layout((Slot("w", (2**20,)),))
        for values in (torch.zeros(2**20), normal(2**20)):
            update = Update(0, 0, 1.0, {"p": Part(layout, values)}, compact=True)
            data, most = encode(update), message_size(sizes_of(update))
            tracemalloc.start()
            try:
                decode(data)
                peak = tracemalloc.get_traced_memory()[1]  # of what numpy and Python allocate; a tensor is not traced
            finally:
                tracemalloc.stop()
            assert peak < most + 64_000

    def test_without_the_package_the_error_names_the_extra(self, monkeypatch) -> None:
        data = flags_message(frame(FLAGS))
        monkeypatch.setitem(sys.modules, "zstandard", None)
        with pytest.raises(SparsonaError, match=r"sparsona\[peers\]"):
            decode(data)
        with pytest.raises(SparsonaError, match=r"sparsona\[peers\]"):
            encode(replace(decode(encode(Update(0, 0, 1.0, {}))), compact=True))

    def test_what_is_expected_limits_the_content_before_it_is_expanded(self) -> None:
        layout = Layout((Slot("w", (2**22,)),))
        mask = Tree(layout, torch.ones(2**22, dtype=torch.bool))
        update = Update(0, 0, 1.0, {"p": masked(Tree(layout, torch.zeros(2**22)), mask)}, compact=True)
        data, (size,) = encode(update), sizes_of(update)
        assert len(data) < message_size((size,)) / 500
        assert decode(data, (size,)).parts["p"].num_values == 2**22
        tracemalloc.start()
        try:
            with pytest.raises(SparsonaError, match="contents of"):
                decode(data, (replace(size, num_values=2**22 - 1),))
            assert tracemalloc.get_traced_memory()[1] < 64_000
        finally:
            tracemalloc.stop()
