"""The byte layout of a message, and its length. Free of torch, so that costs need none.

A message is a head (who, when, and what each part holds), then every part's payload, then a checksum. All lengths
follow from the head, so a reader knows the exact size of a message before it allocates anything. docs/wire-format.md
has the byte table.
"""

from __future__ import annotations

import enum
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from sparsona.core.errors import SparsonaError
from sparsona.core.layout import Layout, Slot
from sparsona.core.update import SERVER, PartSize, Support

if TYPE_CHECKING:
    from sparsona.core.update import Part, Update

MAGIC = b"SPNA"
VERSION = 1
DIGEST_BYTES = 8
SEED_BYTES = 16
# Blocks start at multiples of four, so that a reader can use the floats without a copy.
ALIGN = 4
MAX_LEVEL_BITS = 8

# Names and shapes become Python objects some fifty times their size, and each takes microseconds. A ResNet-152 has 467
# tensors, whose names and shapes take 20 kB; an update has a few such parts (FedEM one for each component).
MAX_HEAD_BYTES = 2**19
MAX_TENSORS = 2**13
MAX_PARTS = 255
MAX_NAME_BYTES = 2**16 - 1
MAX_DIMS = 32
MAX_DIM = 2**32 - 1
# Far more than any model has, and products of this size still fit the 64-bit strides of a tensor.
MAX_ENTRIES = 2**40

HEAD = struct.Struct("<4sBBHiId")  # magic, version, form, number of parts, sender, round, weight
PART = struct.Struct("<HBBIQ")  # bytes of the name, dtype, support, number of tensors, number of values
SLOT = struct.Struct("<HB")  # bytes of the name, number of dimensions
STREAM = struct.Struct("<BQ")  # of a compact message: encoding, bytes
CHECKSUM = struct.Struct("<I")
# Frames have blocks of at most 16 KiB, each of four bytes at least: no stream claims more than this for a byte.
STREAM_WINDOW = 2**14
MAX_RATIO = STREAM_WINDOW // 4

E = TypeVar("E", bound=enum.IntEnum)

_RESEND = "ask the sender for the message again"
_SENDER = "correct the sender, or leave its messages out: parts are made with `dense` and `masked`"


class Dtype(enum.IntEnum):
    """How values are written: as floats of four or two bytes, one bit each, or as levels of one to eight bits."""

    FLOAT32 = 0
    BOOL = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    LEVELS1 = 17
    LEVELS2 = 18
    LEVELS3 = 19
    LEVELS4 = 20
    LEVELS5 = 21
    LEVELS6 = 22
    LEVELS7 = 23
    LEVELS8 = 24


class Encoding(enum.IntEnum):
    """How a stream of a compact message is written."""

    RAW = 0
    ZSTD = 1
    GAPS = 2


# A mask has a bit for each value; the other numbers are those of PartSize.bits.
_DTYPES = {32: Dtype.FLOAT32, 16: Dtype.FLOAT16} | {bits: Dtype(16 + bits) for bits in range(1, MAX_LEVEL_BITS + 1)}
_BITS = {dtype: bits for bits, dtype in _DTYPES.items()} | {Dtype.BFLOAT16: 16}


@dataclass(frozen=True)
class PartHead:
    """What a message says about one part before its payload."""

    size: PartSize
    digest: bytes = b""
    seed: bytes = b""


@dataclass(frozen=True)
class Head:
    """What a message says before its payloads."""

    sender: int
    round: int
    weight: float
    parts: tuple[PartHead, ...]
    compact: bool = False


def padded(num_bytes: int) -> int:
    """Rounded up to the alignment of blocks."""
    return -(-num_bytes // ALIGN) * ALIGN


def payload_size(part: PartSize) -> tuple[int, int]:
    """Bytes of a part's bitmap and of its values, each before padding. The scales of levels are not included."""
    bitmap = -(-part.layout.size // 8) if part.support is Support.BITS else 0
    return bitmap, -(-part.num_values * _value_bits(part) // 8)


def scales_size(part: PartSize) -> tuple[int, int]:
    """Bytes of the scales of levels, and of the number of values of each scale."""
    num_scales = len(part.layout.slots) if has_levels(part) else 0
    return 4 * num_scales, 8 * num_scales


def has_levels(part: PartSize) -> bool:
    """Whether values are sent as levels with a scale for each tensor."""
    return not part.is_mask and part.bits <= MAX_LEVEL_BITS


def blocks_of(part: PartSize) -> tuple[tuple[int, int], ...]:
    """The blocks of a part's payload: the bytes of each before padding, and of each float in it (1: no floats)."""
    bitmap, values = payload_size(part)
    blocks = [(bitmap, 1)] if part.support is Support.BITS else []
    if has_levels(part):
        blocks += [(size, 1) for size in scales_size(part)]
    return (*blocks, (values, 1 if part.is_mask or has_levels(part) else part.bits // 8))


def stream_sizes(part: PartSize) -> tuple[int, ...]:
    """The bytes of a part's streams in a compact message, each before it is compressed. A block is one stream; one of
    floats has a stream for their highest bytes, one for the second, and with four bytes one for the two others."""
    splits = {1: (1,), 2: (1, 1), 4: (1, 1, 2)}
    return tuple(size // width * share for size, width in blocks_of(part) for share in splits[width])


def _value_bits(part: PartSize) -> int:
    return 1 if part.is_mask else part.bits


def message_size(parts: tuple[PartSize, ...]) -> int:
    """The exact length of a message with these parts, without encoding it."""
    _check_parts(parts)
    return _message_size(parts)


def paper_size(parts: tuple[PartSize, ...]) -> int:
    """Bytes as the papers count them: four for each float value, or fewer after a transform; masks, seeds, scales and
    heads are not counted."""
    return sum(-(-part.num_values * part.bits // 8) for part in parts if not part.is_mask)


def sizes_of(update: Update) -> tuple[PartSize, ...]:
    """The sizes of an update's parts, for `message_size` and `paper_size`."""
    return tuple(
        PartSize(
            name,
            part.layout,
            part.num_values,
            part.support,
            part.is_mask,
            _bits_of(part),
            part.is_change,
            is_bfloat=part.is_bfloat,
        )
        for name, part in update.parts.items()
    )


def _bits_of(part: Part) -> int:
    if part.levels is not None:
        return part.levels.bits
    return 8 * part.dtype.itemsize if part.dtype.is_floating_point else 32


def write_head(head: Head) -> bytes:
    """The head of a message, padded. Raises an error wherever `read_head` would."""
    _check_envelope(head.sender, head.round, head.weight)
    _check_parts([part.size for part in head.parts])
    out = [HEAD.pack(MAGIC, VERSION, head.compact, len(head.parts), head.sender, head.round, head.weight)]
    for part in head.parts:
        size, name = part.size, _utf8(part.size.name)
        dtype = Dtype.BOOL if size.is_mask else Dtype.BFLOAT16 if size.is_bfloat else _DTYPES[size.bits]
        digest_bytes, seed_bytes = _proof_size(size.support)
        if len(part.digest) != digest_bytes or len(part.seed) != seed_bytes:
            raise SparsonaError(
                f"part {short(size.name)} has a digest of {len(part.digest)} and a seed of {len(part.seed)} bytes",
                expected=f"{digest_bytes} and {seed_bytes} for support {size.support.name}",
                hint="make parts with `dense` or `masked`",
            )
        out += [PART.pack(len(name), dtype, size.support, len(size.layout.slots), size.num_values), name]
        out += [part.digest, part.seed, _write_layout(size.layout)]
    packed = b"".join(out)
    return packed.ljust(padded(len(packed)), b"\0")


def read_head(message: memoryview, expected: Sequence[PartSize] | None = None) -> tuple[Head, int]:
    """The head of a whole message and the offset of its first payload.

    Checks everything that can be checked without reading payloads: checksum, limits, and that the message has exactly
    the length that its head declares.

    Args:
        message: the whole message.
        expected: the parts that it may have. Their names and shapes are then compared as bytes and become no objects: a
            message with other parts or layouts, or with more in it, is refused in the time of a comparison, and the
            layouts of one that is accepted are those given here.

    Returns:
        The head, and the offset.
    """
    if len(message) < HEAD.size + CHECKSUM.size:
        raise SparsonaError(
            f"a message of {len(message)} bytes is too short",
            expected=f"at least {HEAD.size + CHECKSUM.size} bytes",
            hint=_RESEND,
        )
    magic, version, form, num_parts, sender, round_, weight = HEAD.unpack_from(message)
    if magic != MAGIC:
        raise SparsonaError(f"not a Sparsona message: it begins with {magic!r}", expected=f"{MAGIC!r}")
    # Before the checksum: another version may have a different one.
    if version != VERSION:
        raise SparsonaError(
            f"a message of format version {version}",
            expected=f"version {VERSION}",
            hint="run the same version of Sparsona on both sides",
        )
    end = len(message) - CHECKSUM.size
    if zlib.crc32(message[:end]) != CHECKSUM.unpack_from(message, end)[0]:
        raise SparsonaError("the checksum of a message does not match: it was damaged or cut short", hint=_RESEND)
    if form > 1:
        raise malformed(f"the byte of the form is {form}", "0, or 1 for a compact message")
    _check_envelope(sender, round_, weight)
    _check_count(num_parts)
    reader = _Reader(message, HEAD.size, min(end, MAX_HEAD_BYTES))
    known = None if expected is None else {part.name: part.layout for part in expected}
    parts = tuple(_read_part(reader, known) for _ in range(num_parts))
    sizes = [part.size for part in parts]
    _check_parts(sizes)
    size = _message_size(sizes)
    if form and len(message) >= size:
        raise malformed(f"a compact message of {len(message)} bytes that takes {size} otherwise", "a shorter one")
    if not form and len(message) != size:
        raise malformed(f"a message of {len(message)} bytes whose head declares {size}", "equal lengths")
    if expected is not None and size > (most := _message_size(expected)):
        raise malformed(f"contents of {size} bytes", f"at most {most}")
    start = padded(reader.at)
    if any(message[reader.at : start]):
        raise malformed("the padding after the head is not zero", "zero bytes")
    return Head(sender, round_, weight, parts, bool(form)), start


def write_streams(streams: Sequence[tuple[Encoding, int]]) -> bytes:
    """The table of a compact message's streams, which follows its head."""
    return b"".join(STREAM.pack(*stream) for stream in streams)


def read_streams(message: memoryview, head: Head, start: int) -> list[tuple[Encoding, int, int, int]]:
    """The streams of a compact message: encoding, offset, bytes as sent, and bytes of its content.

    Checks that they fill the message, and that none claims more content than its bytes can hold.
    """
    sizes = [size for part in head.parts for size in stream_sizes(part.size)]
    at, end = start + STREAM.size * len(sizes), len(message) - CHECKSUM.size
    if at > end:
        raise malformed(f"a table of {len(sizes)} streams that goes on to byte {at}", f"an end at byte {end}")
    streams = []
    for index, size in enumerate(sizes):
        number, sent = STREAM.unpack_from(message, start + STREAM.size * index)
        encoding = _member(Encoding, number, "a stream")
        shortest = size if encoding is Encoding.RAW else -(-size // MAX_RATIO)
        longest = size if encoding is Encoding.RAW else size - 1
        if not shortest <= sent <= longest:
            raise malformed(
                f"a stream of {sent} bytes, {encoding.name}, for a content of {size}",
                f"{shortest} to {longest}" if shortest <= longest else "an empty one, RAW",
            )
        streams.append((encoding, at, sent, size))
        at += sent
    if at != end:
        raise malformed(f"streams that end at byte {at} of a message", f"an end at byte {end}")
    return streams


def _read_part(reader: _Reader, known: Mapping[str, Layout] | None) -> PartHead:
    name_bytes, dtype, how, num_tensors, num_values = reader.unpack(PART)
    kind, support = _member(Dtype, dtype), _member(Support, how)
    name = reader.text(name_bytes)
    digest_bytes, seed_bytes = _proof_size(support)
    digest, seed = reader.take(digest_bytes), reader.take(seed_bytes)
    if known is None:
        layout = Layout(_read_slots(reader, num_tensors, name))
    elif name not in known:
        raise malformed(f"part {short(name)}", f"parts {', '.join(map(short, known))}")
    else:
        layout = known[name]
        reader.match(len(layout.slots) == num_tensors, _packed_layout(layout), name)
    is_bfloat = kind is Dtype.BFLOAT16
    size = PartSize(name, layout, num_values, support, kind is Dtype.BOOL, _BITS.get(kind, 32), is_bfloat=is_bfloat)
    return PartHead(size, digest, seed)


def _member(kind: type[E], number: int, what: str = "a part") -> E:
    try:
        return kind(number)
    except ValueError:
        known = ", ".join(f"{member.value} ({member.name})" for member in kind)
        raise malformed(f"{what} of unknown {kind.__name__.lower()} {number}", known) from None


def _read_slots(reader: _Reader, number: int, part: str) -> tuple[Slot, ...]:
    reader.num_tensors += number
    _check_tensors(reader.num_tensors)
    found: dict[str, Slot] = {}
    for _ in range(number):
        slot = _read_slot(reader)
        if slot.name in found:  # given up at the first one: a mebibyte of nameless tensors is not read on
            raise _same_name(f"tensors in part {short(part)}")
        found[slot.name] = slot
    return tuple(found.values())


def _read_slot(reader: _Reader) -> Slot:
    name_bytes, num_dims = reader.unpack(SLOT)
    name = reader.text(name_bytes)
    return Slot(name, struct.unpack(f"<{num_dims}I", reader.take(4 * num_dims)))


def _write_layout(layout: Layout) -> bytes:
    out = []
    for slot in layout.slots:
        name = _utf8(slot.name)
        out += [SLOT.pack(len(name), len(slot.shape)), name, struct.pack(f"<{len(slot.shape)}I", *slot.shape)]
    return b"".join(out)


_packed_layout = lru_cache(maxsize=64)(_write_layout)  # only of layouts that a receiver expects


class _Reader:
    """Reads forward through a head and never past its end."""

    def __init__(self, message: memoryview, start: int, end: int) -> None:
        self.message, self.at, self.end = message, start, end
        self.num_tensors = 0

    def match(self, may: bool, text: bytes, part: str) -> None:
        """Go past the names and shapes of a part, if they are these."""
        start, self.at = self.at, self.at + len(text)
        if not may or self.at > self.end or self.message[start : self.at] != text:
            raise malformed(f"part {short(part)} has other names or shapes", "those of the receiver's model")

    def take(self, num_bytes: int) -> bytes:
        start, self.at = self.at, self.at + num_bytes
        if self.at > self.end:
            expected = f"a head inside the message, of at most {MAX_HEAD_BYTES} bytes"
            raise malformed(f"the head must end at byte {self.end} but goes on to {self.at}", expected)
        return bytes(self.message[start : self.at])

    def unpack(self, fields: struct.Struct) -> tuple[int, ...]:
        return fields.unpack(self.take(fields.size))

    def text(self, num_bytes: int) -> str:
        try:
            return self.take(num_bytes).decode()
        except UnicodeDecodeError:
            raise malformed("a name that is not text", "UTF-8") from None


def _proof_size(support: Support) -> tuple[int, int]:
    """Bytes of the digest and of the seed that a message has for a support."""
    return 0 if support is Support.DENSE else DIGEST_BYTES, SEED_BYTES if support is Support.SEED else 0


def _head_size(parts: Sequence[PartSize]) -> int:
    size = HEAD.size
    for part in parts:
        size += PART.size + len(part.name.encode()) + sum(_proof_size(part.support))
        size += sum(SLOT.size + len(slot.name.encode()) + 4 * len(slot.shape) for slot in part.layout.slots)
    return size


def _message_size(parts: Sequence[PartSize]) -> int:
    payloads = sum(padded(size) for part in parts for size in (*payload_size(part), *scales_size(part)))
    return padded(_head_size(parts)) + payloads + CHECKSUM.size


# Sender and receiver make the same checks: every message that can be encoded can be decoded.


def _check_envelope(sender: int, round_: int, weight: float) -> None:
    if not SERVER <= sender < 2**31:
        raise malformed(f"sender {sender}", f"{SERVER} for the server or a client's index below 2**31")
    if not 0 <= round_ < 2**32:
        raise malformed(f"round {round_}", "0 to 2**32 - 1")
    if not (math.isfinite(weight) and weight >= 0):
        raise malformed(f"weight {weight}", "a finite number, not negative")


def _check_count(num_parts: int) -> None:
    if num_parts > MAX_PARTS:
        raise malformed(f"{num_parts} parts", f"at most {MAX_PARTS}")


def _check_tensors(number: int) -> None:
    if number > MAX_TENSORS:
        raise malformed(f"{number} tensors", f"at most {MAX_TENSORS} in a message")


def _check_parts(parts: Sequence[PartSize]) -> None:
    _check_count(len(parts))
    _check_tensors(sum(len(part.layout.slots) for part in parts))
    _check_names([part.name for part in parts], "parts")
    for part in parts:
        _check_names(part.layout.names, f"tensors in part {short(part.name)}")
        if part.bits not in _DTYPES or (part.is_bfloat and part.bits != 16):
            raise malformed(f"part {short(part.name)} with {part.bits} bits a value", "32, 16, or 1 to 8")
        # A dimension of zero must not hide absurd ones beside it: strides are products of the others.
        entries = 0
        for slot in part.layout.slots:
            if len(slot.shape) > MAX_DIMS:
                raise malformed(f"tensor {short(slot.name)} of {len(slot.shape)} dimensions", f"at most {MAX_DIMS}")
            if not all(0 <= dim <= MAX_DIM for dim in slot.shape):
                raise malformed(f"tensor {short(slot.name)} of shape {slot.shape}", f"dimensions of 0 to {MAX_DIM}")
            entries += math.prod(dim or 1 for dim in slot.shape)
        if entries > MAX_ENTRIES:
            raise malformed(f"part {short(part.name)} of {entries} entries", f"at most {MAX_ENTRIES}")
        size, dense = part.layout.size, part.support is Support.DENSE
        if not (size if dense else 0) <= part.num_values <= size:
            raise malformed(
                f"part {short(part.name)} has {part.num_values} values with support {part.support.name}",
                f"{'exactly' if dense else 'at most'} {size}, the entries of its layout",
            )
    if (head := _head_size(parts)) > MAX_HEAD_BYTES:
        raise malformed(f"names and shapes of {head} bytes", f"at most {MAX_HEAD_BYTES}")


def _check_names(names: Sequence[str], what: str) -> None:
    if len(set(names)) != len(names):
        raise _same_name(what)
    for name in names:
        if len(_utf8(name)) > MAX_NAME_BYTES:
            raise malformed(f"the name {short(name)} is too long", f"at most {MAX_NAME_BYTES} bytes")


def _same_name(what: str) -> SparsonaError:
    return malformed(f"two {what} have the same name", "names that differ")


def _utf8(name: str) -> bytes:
    try:
        return name.encode()
    except UnicodeEncodeError:
        raise malformed(f"the name {short(name)} is not text", "something that UTF-8 can write") from None


def short(name: str) -> str:
    """A name for an error message, however long the sender made it."""
    return repr(name if len(name) <= 40 else name[:40] + "…")


def malformed(what: str, expected: str) -> SparsonaError:
    """The error for a message that arrived undamaged but is invalid."""
    return SparsonaError(f"malformed message: {what}", expected=expected, hint=_SENDER)
