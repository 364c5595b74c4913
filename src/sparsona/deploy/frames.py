"""Frames: what travels between server, clients and peers, and how a receiver knows who made one and for what.

A frame is, one after the other, without gaps:

    magic, version, size of the signature | signature
    sender, size of the head, number of blobs | head, in JSON | length and SHA-256 of every blob
    blobs

The signature covers the magic, the version and the second line, so also the contents of the blobs, which are not copied
for that. Numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from sparsona.core.errors import SparsonaError
from sparsona.core.update import SERVER

MAGIC = b"SPFR"
VERSION = 1
MAX_HEAD = 1 << 20  # bytes of JSON: what is larger belongs into a blob
MAX_BLOBS = 4096
MAX_DEPTH = 16  # of lists and tables in a head
MAX_TEXT = 128  # characters of run, kind and job

START = struct.Struct("<4sH")  # magic, version
SIZE = struct.Struct("<H")  # of the signature
PREFIX = struct.Struct("<iII")  # sender, size of the head, number of blobs
ROW = struct.Struct("<Q32s")  # length and SHA-256 of a blob
_TEXTS, _NUMBERS = ("run", "kind", "job"), ("receiver", "round")
_FIXED = START.size + SIZE.size + PREFIX.size
_MAX_INT, _MAX_INDEX = 2**63, 2**31


@dataclass(frozen=True)
class Frame:
    """A message between two parties of a run.

    Args:
        run: the run's identity: the hex digest of the federation file.
        kind: what it is: "hello", "job", "answer", "pull", ...
        sender: a client's index, or `SERVER`.
        receiver: likewise.
        round: the round that it belongs to.
        job: identifies the job that this frame is, or answers.
        head: plain JSON values, specific to the kind. Tuples arrive as lists.
        blobs: bytes, such as encoded updates. Those of a frame that was received are views of the data received.
    """

    run: str
    kind: str
    sender: int
    receiver: int
    round: int
    job: str
    head: Mapping[str, Any] = field(default_factory=dict)
    blobs: tuple[bytes | memoryview, ...] = ()


def printable(text: str) -> str:
    """The first line of what somebody else wrote, without what a terminal would obey."""
    return "".join(one if one.isprintable() else "?" for one in (text.splitlines() or [""])[0][:200])


class Signer(Protocol):
    """Signs frames as one party."""

    def sign(self, data: bytes) -> bytes:
        """The signature of `data`."""
        ...


class Verifier(Protocol):
    """Knows the keys of all parties."""

    def verify(self, sender: int, data: bytes, signature: bytes) -> None:
        """Raise a SparsonaError unless `signature` is that of `sender` under `data`."""
        ...


class Unsigned:
    """Signer and Verifier of frames without a signature: within one process, where nobody can lie about the sender."""

    def sign(self, data: bytes) -> bytes:
        return b""

    def verify(self, sender: int, data: bytes, signature: bytes) -> None:
        if signature:
            raise SparsonaError("a frame with a signature", expected="none: signatures are not checked here")


UNSIGNED = Unsigned()


def seal(frame: Frame, signer: Signer) -> bytes:
    """A frame as signed bytes.

    Args:
        frame: what to send.
        signer: signs as the frame's sender.

    Returns:
        The bytes, for `unseal`.

    Example:
        >>> frame = Frame("5eed", "job", SERVER, 3, 0, "a1", {"epochs": 2}, (b"weights",))
        >>> unseal(seal(frame, UNSIGNED), UNSIGNED, run="5eed", receiver=3) == frame
        True
    """
    for key in (*_TEXTS, "sender", *_NUMBERS):
        _check_field(key, getattr(frame, key))
    _check_plain(frame.head, MAX_DEPTH)
    head = _canonical({"head": dict(frame.head), **{key: getattr(frame, key) for key in (*_TEXTS, *_NUMBERS)}})
    if len(head) > MAX_HEAD or len(frame.blobs) > MAX_BLOBS:
        _refuse(
            f"its head has {len(head):,} bytes, and there are {len(frame.blobs):,} blobs",
            f"at most {MAX_HEAD:,} bytes and {MAX_BLOBS:,} blobs",
        )
    blobs = [memoryview(blob).cast("B") for blob in frame.blobs]
    table = b"".join(ROW.pack(len(blob), hashlib.sha256(blob).digest()) for blob in blobs)
    start = START.pack(MAGIC, VERSION)
    signed = PREFIX.pack(frame.sender, len(head), len(blobs)) + head + table
    signature = signer.sign(start + signed)
    return b"".join((start, SIZE.pack(len(signature)), signature, signed, *blobs))


def unseal(data: bytes | memoryview, verifier: Verifier, *, run: str, receiver: int, limit: int | None = None) -> Frame:
    """The frame in bytes that arrived. Time and memory are proportional to their length.

    Args:
        data: the bytes, from anybody. They must not change afterwards: blobs are views of them.
        verifier: knows the keys of all who may send.
        run: the run's identity; frames of other runs are refused.
        receiver: who received the bytes; frames for others are refused.
        limit: most bytes a frame may have; None: any number.

    Returns:
        The frame, as its sender sealed it. Whether its round and job are those waited for is the caller's concern.

    Raises:
        SparsonaError: for whatever is wrong with them.
    """
    view = memoryview(data).cast("B").toreadonly()
    if limit is not None and len(view) > limit:
        _refuse(f"it has {len(view):,} bytes", f"at most {limit:,}")
    if len(view) < _FIXED:
        _refuse(f"it has {len(view)} bytes", f"at least {_FIXED}")
    magic, version = START.unpack_from(view)
    if magic != MAGIC:
        _refuse("it is something else", f"bytes that begin with {MAGIC!r}")
    if version != VERSION:
        _refuse(f"it has version {version}", f"version {VERSION}", "use the same version of sparsona on all sides")
    signature_at = START.size + SIZE.size
    signed_at = signature_at + SIZE.unpack_from(view, START.size)[0]
    if len(view) < signed_at + PREFIX.size:
        _refuse(f"it ends after {len(view):,} bytes", f"at least {signed_at + PREFIX.size:,}")
    sender, head_size, num_blobs = PREFIX.unpack_from(view, signed_at)
    if head_size > MAX_HEAD or num_blobs > MAX_BLOBS or sender < SERVER:
        _refuse(f"a head of {head_size:,} bytes, {num_blobs:,} blobs, sender {sender}")
    head_at = signed_at + PREFIX.size
    table_at = head_at + head_size
    blobs_at = table_at + ROW.size * num_blobs
    if len(view) < blobs_at:
        _refuse(f"it ends after {len(view):,} bytes", f"at least {blobs_at:,}")
    signed = b"".join((view[: START.size], view[signed_at:blobs_at]))
    verifier.verify(sender, signed, bytes(view[signature_at:signed_at]))

    values = _read_head(bytes(view[head_at:table_at]))
    if values["run"] != run:
        _refuse(f"it belongs to run '{values['run']}'", f"run '{run}'", "all sides must use the same federation file")
    if values["receiver"] != receiver:
        _refuse(f"it is for {_name(values['receiver'])}", f"one for {_name(receiver)}")
    blobs: list[memoryview] = []
    start = blobs_at
    for length, digest in ROW.iter_unpack(view[table_at:blobs_at]):
        if length > len(view) - start:
            _refuse(f"blob {len(blobs)} of {length:,} bytes is incomplete")
        blob = view[start : start + length]
        if hashlib.sha256(blob).digest() != digest:
            _refuse(f"blob {len(blobs)} is not what its sender signed")
        blobs.append(blob)
        start += length
    if start != len(view):
        _refuse(f"{len(view) - start:,} bytes follow it")
    return Frame(sender=sender, blobs=tuple(blobs), **values)


def _read_head(data: bytes) -> dict[str, Any]:
    try:
        values = json.loads(data.decode(), parse_constant=_refuse)
        # There is one way to write a head: that also excludes keys that appear twice, infinities and lone surrogates.
        # Numbers of thousands of digits are a ValueError of Python's.
        is_canonical = _canonical(values) == data
    except (ValueError, RecursionError) as error:
        _refuse(f"its head cannot be read: {str(error)[:80]}")
    if not is_canonical:
        _refuse("its head is not in canonical form")
    if not isinstance(values, dict) or values.keys() != {"head", *_TEXTS, *_NUMBERS}:
        _refuse("its head has other fields")
    for key in (*_TEXTS, *_NUMBERS):
        _check_field(key, values[key])
    _check_plain(values["head"], MAX_DEPTH)
    return values


def _canonical(values: Any) -> bytes:
    try:
        text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        _refuse(f"its head cannot be written: {str(error)[:80]}")


def _check_field(key: str, value: Any) -> None:
    if key in _TEXTS:
        is_right = isinstance(value, str) and 0 < len(value) <= MAX_TEXT
    elif key == "round":
        is_right = type(value) is int and -1 <= value < _MAX_INT
    else:
        is_right = type(value) is int and SERVER <= value < _MAX_INDEX
    if not is_right:
        wanted = f"a text of 1 to {MAX_TEXT} characters" if key in _TEXTS else "a whole number from -1"
        _refuse(f"its {key} is {str(value)[:40]!r}", wanted)


def _check_plain(value: Any, depth: int) -> None:
    """Check that a head is a table of what JSON has, as it has it: keys are text, numbers fit 64 bits."""
    if depth == MAX_DEPTH and not isinstance(value, Mapping):
        _refuse("its head is not a table")
    if isinstance(value, Mapping | list | tuple):
        if depth == 0:
            _refuse("its head is too deep", f"lists and tables in each other to a depth of {MAX_DEPTH}")
        if isinstance(value, Mapping) and not all(isinstance(key, str) for key in value):
            _refuse("a key in its head is not text")
        for one in value.values() if isinstance(value, Mapping) else value:
            _check_plain(one, depth - 1)
    elif type(value) is int and not -_MAX_INT <= value < _MAX_INT:
        _refuse("a number in its head does not fit", "at most 64 bits")


def _name(party: int) -> str:
    return "the server" if party == SERVER else f"client {party}"


def _refuse(what: str, expected: str = "a frame as sparsona makes them", hint: str = "") -> NoReturn:
    raise SparsonaError(f"bad frame: {what}", expected=expected, hint=hint)
