"""Bit-exact round trips, a message that must never change, and bytes that mean harm."""

import math
import struct
import tracemalloc
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsona.core.errors import SparsonaError
from sparsona.core.layout import Layout, Slot
from sparsona.core.tree import Tree, counts
from sparsona.core.update import (
    SERVER,
    Levels,
    Part,
    PartSize,
    Support,
    Update,
    bits_digest,
    dense,
    mask_digest,
    masked,
)
from sparsona.wire.codec import decode, encode
from sparsona.wire.format import HEAD, PART, SLOT, message_size, sizes_of

SLOTS = st.builds(Slot, st.text(max_size=6), st.lists(st.integers(0, 4), max_size=4).map(tuple))
LAYOUTS = st.lists(SLOTS, max_size=4, unique_by=lambda slot: slot.name).map(lambda slots: Layout(tuple(slots)))
QUICK = settings(max_examples=100, deadline=None)


@st.composite
def parts(draw: st.DrawFn) -> Part:
    """A part with values of any bit pattern, so NaN payloads, infinities and negative zeros as well."""
    layout = draw(LAYOUTS)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    bits = rng.integers(0, 2**32, layout.size, dtype=np.uint32)
    bits[rng.random(layout.size) < 0.2] = 0x80000000
    bits[rng.random(layout.size) < 0.2] = 0x7F800001
    flat = torch.from_numpy(bits.view(np.float32))
    if draw(st.booleans()):
        flat = torch.from_numpy(bits % 2 == 1)
    support = draw(st.sampled_from(Support))
    if support is Support.DENSE:
        return in_some_form(draw, dense(Tree(layout, flat)), rng)
    mask = Tree(layout, torch.from_numpy(rng.random(layout.size) < draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))))
    part = masked(Tree(layout, flat), mask, support, rng.bytes(16) if support is Support.SEED else b"")
    return in_some_form(draw, part, rng)


def in_some_form(draw: st.DrawFn, part: Part, rng: np.random.Generator) -> Part:
    """As a method made it, or as a transform left it: in half precision, or as levels."""
    bits = draw(st.sampled_from([32, 32, 16, 16, *range(1, 9)]))
    if part.is_mask or bits == 32:
        return part
    if bits == 16:
        halves = rng.integers(0, 2**16, part.num_values, dtype=np.uint16)
        kind = draw(st.sampled_from([torch.float16, torch.bfloat16]))
        return part.carrying(torch.from_numpy(halves.view(np.int16)).view(kind))
    numbers = part.layout.sizes if part.mask is None else counts(part.mask)
    scales = torch.from_numpy(rng.integers(0, 2**32, len(numbers), dtype=np.uint32).view(np.float32))
    values = torch.from_numpy(rng.integers(0, max(2, 2**bits - 1), part.num_values, dtype=np.uint8))
    return part.carrying(values, Levels(bits, scales, numbers))


UPDATES = st.builds(
    Update,
    st.integers(SERVER, 2**31 - 1),
    st.integers(0, 2**32 - 1),
    st.floats(0, allow_nan=False, allow_infinity=False),
    st.dictionaries(st.text(max_size=6), parts(), max_size=3),
    st.booleans(),
)


def bits_of(values: torch.Tensor) -> bytes:
    bits = values.view(torch.int16) if values.dtype is torch.bfloat16 else values  # which numpy lacks
    return bits.numpy().tobytes()


def assert_same(got: Update, sent: Update) -> None:
    assert (got.sender, got.round, struct.pack("d", got.weight)) == (
        sent.sender,
        sent.round,
        struct.pack("d", sent.weight),
    )
    assert list(got.parts) == list(sent.parts)
    for part, original in zip(got.parts.values(), sent.parts.values(), strict=True):
        assert part.layout == original.layout
        assert part.support is original.support
        assert part.values.dtype is original.values.dtype
        assert part.values.shape == original.values.shape
        assert bits_of(part.values) == bits_of(original.values)
        assert part.proof == original.proof
        assert part.seed == original.seed
        if original.levels is not None:
            assert part.levels is not None
            assert (part.levels.bits, part.levels.counts) == (original.levels.bits, original.levels.counts)
            assert bits_of(part.levels.scales) == bits_of(original.levels.scales)
        assert bits_of(part.plain().values) == bits_of(original.plain().values)
        if part.support is Support.BITS:
            assert part.mask is not None
            assert original.mask is not None
            assert part.mask.flat.dtype is torch.bool
            assert bits_of(part.mask.flat) == bits_of(original.mask.flat)
            assert bits_of(part.plain().tree().flat) == bits_of(original.plain().tree().flat)
        else:
            assert part.mask is None
        if original.mask is not None:
            read = part.plain().tree(original.mask)
            assert bits_of(read.flat) == bits_of(original.plain().tree(original.mask).flat)


@given(UPDATES)
@QUICK
def test_round_trip_is_exact_and_its_size_was_known(update: Update) -> None:
    data = encode(update)
    assert type(data) is bytes
    size = message_size(sizes_of(update))
    assert len(data) == size or (update.compact and len(data) < size)
    got = decode(data)
    assert got.compact == (len(data) < size)
    assert_same(got, update)
    assert encode(got) == data


def seal(body: bytes) -> bytes:
    """Give any bytes a valid checksum."""
    return body + struct.pack("<I", zlib.crc32(body))


def head(num_parts: int = 1, sender: int = 0, round_: int = 0, weight: float = 1.0, form: int = 0) -> bytes:
    return HEAD.pack(b"SPNA", 1, form, num_parts, sender, round_, weight)


LEVELS = head() + PART.pack(0, 18, 0, 1, 1) + SLOT.pack(0, 0) + b"\0"  # and a scale, a count, and one level
LAYOUT = Layout((Slot("w", (3, 4)), Slot("b", ())))
MASK = Tree(LAYOUT, torch.arange(13) % 3 == 0)
SMALL = Update(
    5,
    2,
    4.0,
    {
        "params": masked(Tree(LAYOUT, torch.randn(13)), MASK, Support.BITS),
        "known": masked(Tree(LAYOUT, torch.randn(13)), MASK),
        "mask": dense(MASK),
    },
)


class TestGolden:
    """The bytes of a message, so that the format cannot change unnoticed. A change here is a new VERSION."""

    def test_tiny_message(self) -> None:
        """Two parts, derived by hand from docs/wire-format.md.

        ```
        head    53504e41 "SPNA", 01 version, 00, 0200 two parts, 02000000 sender 2, 02010000 round 258,
                000000000000f83f weight 1.5 (sign 0, exponent 1023, fraction 0.5)
        part p  0100 name of one byte, 00 float32, 03 KNOWN, 02000000 two tensors, 0200000000000000 two values,
                70 "p", 0102030405060708 digest
                tensor w: 0100 name, 01 dimension, 77 "w", 02000000;  tensor s: 0100 name, 00 dimensions, 73 "s"
        part m  0100 name, 01 bool, 00 DENSE, 01000000 one tensor, 0300000000000000 three values, 6d "m"
                tensor b: 0100 name, 01 dimension, 62 "b", 03000000
        0000    padding: 24 + (16 + 1 + 8 + 8 + 4) + (16 + 1 + 8) = 86, next multiple of four 88
        p       0000803f 1.0, 00000080 -0.0
        m       true, false, true: bits 0 and 2 = 05, padding 000000
        ```
        and the CRC-32 of all that, computed here bit by bit.
        """
        layout = Layout((Slot("w", (2,)), Slot("s", ())))
        known = Part(layout, torch.tensor([1.0, -0.0]), Support.KNOWN, digest=bytes(range(1, 9)))
        mask = Tree(Layout((Slot("b", (3,)),)), torch.tensor([True, False, True]))
        golden = bytes.fromhex(
            "53504e41 01 00 0200 02000000 02010000 000000000000f83f"
            "0100 00 03 02000000 0200000000000000 70 0102030405060708 0100 01 77 02000000 0100 00 73"
            "0100 01 00 01000000 0300000000000000 6d 0100 01 62 03000000"
            "0000 0000803f 00000080 05 000000"
        )
        crc = 0xFFFFFFFF
        for byte in golden:
            crc ^= byte
            for _ in range(8):
                crc = crc >> 1 ^ (0xEDB88320 if crc & 1 else 0)
        golden += (crc ^ 0xFFFFFFFF).to_bytes(4, "little")
        assert golden[-4:].hex() == "7077db07"
        update = Update(2, 258, 1.5, {"p": known, "m": dense(mask)})
        assert encode(update).hex() == golden.hex()
        assert_same(decode(golden), update)

    def test_bitmap_comes_before_values_and_digest_before_seed(self) -> None:
        """Thirteen entries, every third one set: bits 0, 3, 6 = 49, bits 9, 12 = 12; two bytes of padding."""
        values = Tree(LAYOUT, torch.ones(13))
        bits = encode(Update(0, 0, 1.0, {"p": masked(values, MASK, Support.BITS)}))
        assert bits[-28:-4].hex() == "49120000" + "0000803f" * 5
        seeded = encode(Update(0, 0, 1.0, {"p": masked(values, MASK, Support.SEED, b"0123456789abcdef")}))
        assert b"p" + mask_digest(MASK) + b"0123456789abcdef" + SLOT.pack(1, 2) + b"w" in seeded

    def test_half_precision_and_levels(self) -> None:
        """Halves 1.0 = 3c00 and -2.0 = c000. Levels of 3 bits 6, 3, 0 for the tensors w (two values) and s (one):
        scales 2.0 and 0.5, counts 2 and 1, then bits 110 011 000 from the lowest: 0b011110 = 1e, padded."""
        layout = Layout((Slot("w", (2,)), Slot("s", ())))
        halves = Part(layout.select(["w"]), torch.tensor([1.0, -2.0]).half())
        data = encode(Update(0, 0, 1.0, {"p": halves}))
        assert data[26] == 2
        assert data[-8:-4].hex() == "003c00c0"
        levels = Levels(3, torch.tensor([2.0, 0.5]), (2, 1))
        data = encode(Update(0, 0, 1.0, {"p": Part(layout, torch.tensor([6, 3, 0], dtype=torch.uint8), levels=levels)}))
        assert data[26] == 19
        assert data[-32:-4].hex() == "000000400000003f020000000000000001000000000000001e000000"
        assert decode(data).parts["p"].plain().values.tolist() == [2.0, 0.0, -0.5]

    def test_bfloat16(self) -> None:
        """The upper halves of 1.0 = 3f800000 and -2.0 = c0000000."""
        part = Part(Layout((Slot("w", (2,)),)), torch.tensor([1.0, -2.0]).bfloat16())
        data = encode(Update(0, 0, 1.0, {"p": part}))
        assert data[26] == 3
        assert data[-8:-4].hex() == "803f00c0"
        assert decode(data).parts["p"].plain().values.tolist() == [1.0, -2.0]

    def test_signs(self) -> None:
        """A level of one bit is a sign: 1, 0, 1 are plus and minus 2.0, and plus 0.5; bits 101, padded."""
        layout = Layout((Slot("w", (2,)), Slot("s", ())))
        levels = Levels(1, torch.tensor([2.0, 0.5]), (2, 1))
        data = encode(Update(0, 0, 1.0, {"p": Part(layout, torch.tensor([1, 0, 1], dtype=torch.uint8), levels=levels)}))
        assert data[26] == 17
        assert data[-8:-4].hex() == "05000000"
        assert decode(data).parts["p"].plain().values.tolist() == [2.0, -2.0, 0.5]


class TestDecoded:
    def test_reads_any_contiguous_bytes(self) -> None:
        data = encode(SMALL)
        assert encode(decode(bytearray(data))) == data
        assert encode(decode(memoryview(b"x" + data)[1:])) == data, "also at odd addresses"

    def test_tensors_are_its_own_and_writable(self) -> None:
        data = bytearray(encode(SMALL))
        got = decode(data)
        before = bits_of(got.parts["params"].values)
        data[:] = bytes(len(data))
        assert bits_of(got.parts["params"].values) == before
        for part in got.parts.values():
            part.values.zero_()

    def test_empty_update_and_empty_tree(self) -> None:
        assert decode(encode(Update(0, 0, 0.0, {}))).parts == {}
        got = decode(encode(Update(0, 0, 0.0, {"buffers": dense(Tree(Layout(()), torch.zeros(0)))})))
        assert got.parts["buffers"].layout == Layout(())

    def test_costs_of_slots_stay_at_home(self) -> None:
        layout = Layout((Slot("w", (2,), flops_per_weight=9, bias_counts_dense=True),))
        got = decode(encode(Update(0, 0, 0.0, {"p": dense(Tree(layout, torch.ones(2)))}))).parts["p"].layout
        assert got.digest == layout.digest
        assert got.forward_flops() == 0

    def test_fallback_to_the_bitmap_survives(self) -> None:
        part = masked(Tree(LAYOUT, torch.randn(13)), MASK, Support.SEED, bytes(16))
        got = decode(encode(Update(0, 0, 1.0, {"p": part}).with_bitmaps())).parts["p"]
        assert bits_of(got.tree().flat) == bits_of(part.tree(MASK).flat)

    def test_values_need_not_be_contiguous_or_detached(self) -> None:
        strided = torch.arange(6.0, requires_grad=True)[::2]
        layout = Layout((Slot("w", (3,)),))
        got = decode(encode(Update(0, 0, 1.0, {"p": Part(layout, strided)})))
        assert got.parts["p"].values.tolist() == [0.0, 2.0, 4.0]


class TestEncodeRefuses:
    @pytest.mark.parametrize(
        "values", [torch.zeros(13, dtype=torch.float64), torch.zeros(13, dtype=torch.int64), torch.zeros(1, 13)]
    )
    def test_values_it_cannot_write(self, values: torch.Tensor) -> None:
        with pytest.raises(SparsonaError, match="float32 or bool in one dimension"):
            encode(Update(0, 0, 1.0, {"p": Part(LAYOUT, values)}))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"mask": None}, "no bool mask"),
            ({"mask": Tree(LAYOUT, MASK.flat.float())}, "no bool mask"),
            ({"mask": Tree(Layout((Slot("w", (13,)),)), MASK.flat)}, "different layouts"),
            ({"mask": Tree(LAYOUT, ~MASK.flat)}, "values for a mask"),
            ({"digest": bytes(8)}, "does not match its digest"),
            ({"arrived": torch.zeros(14)}, "14 values"),
        ],
    )
    def test_masks_that_do_not_fit(self, change: dict, message: str) -> None:
        sound = masked(Tree(LAYOUT, torch.zeros(13)), MASK, Support.BITS)
        part = replace(Part(LAYOUT, sound.values, Support.BITS, MASK), **change)
        with pytest.raises(SparsonaError, match=message):
            encode(Update(0, 0, 1.0, {"p": part}))

    @pytest.mark.parametrize(
        ("levels", "value"),
        [
            (Levels(2, torch.ones(1), (12, 1)), 0),
            (Levels(2, torch.ones(2), (13,)), 0),
            (Levels(2, torch.ones(2), (13, 0)), 0),
            (Levels(2, torch.ones(2), (12, 1)), 3),
            (Levels(1, torch.ones(2), (12, 1)), 2),
            (Levels(9, torch.ones(2), (12, 1)), 0),
        ],
    )
    def test_levels_that_do_not_fit(self, levels: Levels, value: int) -> None:
        part = Part(LAYOUT, torch.full((13,), value, dtype=torch.uint8), levels=levels)
        with pytest.raises(SparsonaError, match="malformed"):
            encode(Update(0, 0, 1.0, {"p": part}))


class TestHostile:
    def test_cut_short_anywhere(self) -> None:
        data = encode(SMALL)
        for end in range(len(data)):
            with pytest.raises(SparsonaError):
                decode(data[:end])
        # Someone who can cut can also repair the checksum.
        for end in range(len(data) - 4):
            with pytest.raises(SparsonaError):
                decode(seal(data[:end]))

    def test_every_byte_and_bit_matters(self) -> None:
        data = encode(SMALL)
        for position in range(len(data)):
            for change in (1, 2, 4, 8, 16, 32, 64, 128, 255):
                damaged = bytearray(data)
                damaged[position] ^= change
                with pytest.raises(SparsonaError):
                    decode(damaged)

    def test_too_long(self) -> None:
        data = encode(SMALL)
        for extra in (b"\0", b"\0\0\0\0", data):
            with pytest.raises(SparsonaError):
                decode(data + extra)
            with pytest.raises(SparsonaError, match="declares"):
                decode(seal(data[:-4] + extra))

    def test_another_version_says_so(self) -> None:
        data = bytearray(encode(SMALL))
        data[4] = 2
        with pytest.raises(SparsonaError, match="version 2"):
            decode(data)

    def test_another_file_says_so(self) -> None:
        with pytest.raises(SparsonaError, match="not a Sparsona message"):
            decode(b"PK\3\4" + bytes(100))

    def test_not_contiguous(self) -> None:
        with pytest.raises(SparsonaError, match="contiguous"):
            decode(memoryview(encode(SMALL) * 2)[::2])

    @given(st.binary(max_size=200))
    @QUICK
    def test_random_bytes(self, data: bytes) -> None:
        for attack in (data, seal(data), seal(head() + data), seal(head(3) + data)):
            self.refused_or_canonical(attack)

    @given(UPDATES, st.data())
    @QUICK
    def test_changed_bytes_with_a_repaired_checksum(self, update: Update, data: st.DataObject) -> None:
        body = bytearray(encode(update)[:-4])
        for _ in range(data.draw(st.integers(1, 3))):
            body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
        self.refused_or_canonical(seal(bytes(body)))

    @staticmethod
    def refused_or_canonical(data: bytes) -> None:
        """What is not refused means exactly one update, whose message it is; others may compress in another way."""
        try:
            update = decode(data)
        except SparsonaError:
            return
        assert encode(update) == data or (update.compact and encode(decode(encode(update))) == encode(update))
        for part in update.parts.values():
            # No tensor may be a trap that springs when it is first looked at.
            if part.support in (Support.DENSE, Support.BITS):
                tree = part.plain().tree()
                assert [tuple(tree[name].shape) for name in tree] == [slot.shape for slot in part.layout.slots]

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            (head(form=2), "the byte of the form is 2"),
            (head(0, sender=-2), "sender -2"),
            (head(0, weight=math.nan), "weight nan"),
            (head(0, weight=-math.inf), "weight -inf"),
            (head(2**16 - 1), "65535 parts"),
            (head(255), "goes on"),
            (head() + PART.pack(65535, 0, 0, 0, 0), "goes on"),
            (head() + PART.pack(0, 4, 0, 0, 0), "unknown dtype 4"),
            (head() + PART.pack(0, 0, 4, 0, 0), "unknown support 4"),
            (head() + PART.pack(0, 0, 0, 2**32 - 1, 0), "4294967295 tensors"),
            (head(2) + (PART.pack(0, 0, 3, 0, 0) + bytes(8)) + PART.pack(1, 0, 0, 8193, 0) + b"p", "8193 tensors"),
            (head() + PART.pack(0, 0, 0, 8192, 0), "goes on"),
            (head() + PART.pack(0, 0, 0, 0, 2**64 - 1), "values with support DENSE"),
            (head() + PART.pack(0, 0, 3, 0, 1) + bytes(8), "values with support KNOWN"),
            (head() + PART.pack(1, 0, 0, 0, 0) + b"\xff", "not text"),
            (head() + PART.pack(0, 0, 0, 1, 0) + SLOT.pack(1, 0) + b"\xff", "not text"),
            (head() + PART.pack(0, 0, 0, 1, 0) + SLOT.pack(0, 255), "goes on"),
            (head() + PART.pack(0, 0, 0, 1, 0) + SLOT.pack(0, 33) + bytes(132), "33 dimensions"),
            (head() + PART.pack(0, 0, 0, 2, 2) + SLOT.pack(0, 0) * 2, "same name"),
            (head(2) + PART.pack(0, 0, 0, 0, 0) * 2, "same name"),
            # What a reader of signed numbers would take for -1.
            (head() + PART.pack(0, 0, 0, 1, 0) + SLOT.pack(0, 2) + b"\xff" * 8, "entries"),
            (head() + PART.pack(0, 0, 0, 1, 0) + SLOT.pack(0, 4) + bytes(4) + b"\xff" * 12, "entries"),
            (head() + PART.pack(0, 0, 0, 1, 2**39) + SLOT.pack(0, 2) + struct.pack("<II", 2**20, 2**19), "declares"),
            (head() + PART.pack(0, 1, 0, 1, 2**39) + SLOT.pack(0, 2) + struct.pack("<II", 2**20, 2**19), "declares"),
            (
                head() + PART.pack(0, 0, 1, 1, 0) + bytes(8) + SLOT.pack(0, 1) + struct.pack("<I", 2**32 - 1),
                "declares",
            ),
            (head() + PART.pack(1, 0, 0, 0, 0) + b"p" + b"\0\0\1", "padding"),
            (head() + PART.pack(0, 1, 0, 1, 1) + SLOT.pack(0, 0) + b"\0" + b"\1\0\1\0", "padding"),
            (head() + PART.pack(0, 1, 0, 1, 1) + SLOT.pack(0, 0) + b"\0" + b"\2\0\0\0", "spare bits"),
            (head() + PART.pack(0, 16, 0, 0, 0), "unknown dtype 16"),
            (head() + PART.pack(0, 25, 0, 0, 0), "unknown dtype 25"),
            # Levels of two bits, 0 to 2: a fourth; one too few; more values for a tensor than it has; spare bits.
            (LEVELS + struct.pack("<fq", 1.0, 1) + b"\3\0\0\0", "a level of 3"),
            (LEVELS + struct.pack("<fq", 1.0, 0) + b"\2\0\0\0", "of which its tensors have"),
            (LEVELS + struct.pack("<fq", 1.0, -1) + b"\2\0\0\0", "of which its tensors have"),
            (LEVELS + struct.pack("<fq", 1.0, 1) + b"\6\0\0\0", "spare bits"),
            (head() + PART.pack(0, 0, 1, 1, 1) + bytes(8) + SLOT.pack(0, 0) + b"\0" + bytes(8), "for a mask of 0"),
            (head() + PART.pack(0, 0, 1, 1, 0) + bytes(8) + SLOT.pack(0, 0) + b"\0" + bytes(4), "digest"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_absurd_heads_with_a_good_checksum(self, body: bytes, message: str) -> None:
        data = seal(body)
        tracemalloc.start()
        try:
            with pytest.raises(SparsonaError, match=message):
                decode(data)
            assert tracemalloc.get_traced_memory()[1] < 64_000
        finally:
            tracemalloc.stop()

    def test_a_vast_known_part_allocates_nothing(self) -> None:
        shape = struct.pack("<II", 2**20, 2**20 - 1)
        data = seal(head() + PART.pack(1, 0, 3, 1, 0) + b"p" + bytes(8) + SLOT.pack(0, 2) + shape)
        assert len(data) == 64
        update, peak = decode_peak(data)
        assert update.parts["p"].layout.size == 2**20 * (2**20 - 1)
        assert peak < 64_000
        with pytest.raises(SparsonaError):
            update.parts["p"].tree()

    def test_a_long_head_is_given_up_early(self) -> None:
        """Megabytes of names and shapes would become hundreds of megabytes of objects."""
        slots = b"".join(SLOT.pack(60_000, 0) + f"{n:060000}".encode() for n in range(20))
        data = seal(head() + PART.pack(0, 0, 3, 20, 0) + bytes(8) + slots)
        with pytest.raises(SparsonaError, match="goes on"):
            decode(data)

    def test_memory_follows_the_length_of_the_message(self) -> None:
        """Masks stay packed, also while they are checked. Names become objects: some hundred bytes each."""
        size = 800_000
        layout = Layout((Slot("w", (size,)),))
        mask = Tree(layout, torch.arange(size) % 1000 == 0)
        names = Layout(tuple(Slot(chr(256 + n), ()) for n in range(4_000)))
        for part, multiple in (
            (dense(Tree(layout, torch.zeros(size))), 1.2),
            (dense(mask), 2),
            (masked(Tree(layout, torch.zeros(size)), mask, Support.BITS), 2),
            (masked(mask, Tree(layout, mask.flat | True)), 2),
            (masked(mask, mask, Support.BITS), 2),
            (Part(names, torch.zeros(0), Support.KNOWN, digest=bytes(8)), 100),
        ):
            data = encode(Update(0, 0, 1.0, {"p": part}))
            assert decode_peak(data)[1] < multiple * len(data) + 128_000


class TestSlowInputs:
    """What took seconds and hundreds of megabytes once, a mebibyte of it: refused or read in proportion to its length.
    Work is counted in tensors that become objects."""

    @pytest.fixture
    def slots(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        made: list[str] = []

        def count(name: str, *args: object) -> Slot:
            made.append(name)
            return Slot(name, *args)

        monkeypatch.setattr("sparsona.wire.format.Slot", count)
        return made

    def refused(self, number: int, slots: bytes, message: str, expected: tuple[PartSize, ...] | None = None) -> None:
        data = seal(head() + PART.pack(0, 0, 3, number, 0) + bytes(8) + slots)
        tracemalloc.start()
        try:
            with pytest.raises(SparsonaError, match=message):
                decode(data, expected)
            assert tracemalloc.get_traced_memory()[1] < 2 * len(data)
        finally:
            tracemalloc.stop()

    def test_nameless_tensors(self, slots: list[str]) -> None:
        number = 2**20 // SLOT.size
        self.refused(number, SLOT.pack(0, 0) * number, f"{number} tensors")
        assert slots == []
        self.refused(8192, SLOT.pack(0, 0) * number, "same name")
        assert slots == ["", ""]

    def test_names(self, slots: list[str]) -> None:
        some = [SLOT.pack(13, 0) + f"{n:013}".encode() for n in range(2**16)]
        self.refused(2**16, b"".join(some), "65536 tensors")
        assert slots == []

    def test_expected_layouts_are_compared_and_not_parsed(self, slots: list[str]) -> None:
        layout = Layout(tuple(Slot(f"{n:013}", (n,)) for n in range(1000)))
        expected = (PartSize("", layout, 0, Support.KNOWN),)
        some = [SLOT.pack(13, 1) + f"{n:013}".encode() + struct.pack("<I", n) for n in range(1000)]
        data = head() + PART.pack(0, 0, 3, 1000, 0) + bytes(8) + b"".join(some)
        found = decode(seal(data + bytes(-len(data) % 4)), expected)
        assert found.parts[""].layout is layout
        for number, text in (
            (1000, some[:-1] + some[:1]),
            (999, some[:-1]),
            (999, some),
            (1000, some[:-1]),
            (1001, [*some, SLOT.pack(0, 0)]),
        ):
            self.refused(number, b"".join(text), "other names or shapes", expected)
        self.refused(1000, b"".join(some), "part ''", (PartSize("p", layout, 0, Support.KNOWN),))
        whole = encode(Update(0, 0, 1.0, {"": dense(Tree(layout, torch.zeros(layout.size)))}))
        with pytest.raises(SparsonaError, match="contents of"):
            decode(whole, (PartSize("", layout, layout.size - 9, Support.KNOWN),))
        assert slots == []

    @pytest.mark.parametrize("dtype", [0, 1], ids=["bitmap", "flags"])
    @pytest.mark.parametrize("is_sound", [True, False])
    def test_bitmaps_stay_packed(self, dtype: int, is_sound: bool) -> None:
        """4 MiB of bits: as a bitmap without values, and as KNOWN flags; sound, or with one bit too many."""
        size = 2**25
        layout = Layout((Slot("", (size,)),))
        packed = np.zeros(size // 8, np.uint8)
        slot = SLOT.pack(0, 1) + struct.pack("<I", size)
        if dtype:
            body = head() + PART.pack(0, 1, 3, 1, size - is_sound) + bytes(8) + slot
            packed[-1] = 0x80  # a spare bit where there is one value less
            is_sound = not is_sound
        else:
            body = head() + PART.pack(0, 0, 1, 1, 0) + bits_digest(layout, packed) + slot
            packed[0] = not is_sound
        data = seal(body + bytes(-len(body) % 4) + packed.tobytes())
        del packed
        before, _ = reset_peak_memory(), tracemalloc.start()
        try:
            if is_sound:
                decode(data)
            else:
                with pytest.raises(SparsonaError):
                    decode(data)
            assert tracemalloc.get_traced_memory()[1] < 2 * len(data)
        finally:
            tracemalloc.stop()
        assert peak_memory() - before < 3 * len(data), "torch's memory, which tracemalloc does not see"

    def test_levels_become_bytes_and_nothing_more(self) -> None:
        size = 2**20 + 3
        layout = Layout((Slot("w", (size,)),))
        values = torch.arange(size, dtype=torch.int64) * 7919 % 7
        part = Part(layout, values.to(torch.uint8), levels=Levels(3, torch.ones(1), (size,)))
        update, peak = decode_peak(encode(Update(0, 0, 1.0, {"p": part})))
        assert torch.equal(update.parts["p"].values, part.values)
        assert peak < 1.5 * size


def peak_memory() -> int:
    """The most memory of this process in bytes since it was reset; 0 where there is no such figure."""
    try:
        with open("/proc/self/status") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    except OSError:
        return 0


def reset_peak_memory() -> int:
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass
    return peak_memory()


def decode_peak(data: bytes) -> tuple[Update, int]:
    tracemalloc.start()
    try:
        return decode(data), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
