"""Frames: round trips, who made one and for what, and bytes that mean harm."""

import hashlib
import json
import time
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsona.core.errors import SparsonaError
from sparsona.core.update import SERVER
from sparsona.deploy.frames import MAGIC, MAX_BLOBS, MAX_HEAD, PREFIX, ROW, SIZE, START, UNSIGNED, Frame, seal, unseal

QUICK = settings(max_examples=150, deadline=None)
RUN = "ab" * 16
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('aé"\\', max_size=3), inner, max_size=3),
    max_leaves=8,
)
FRAMES = st.builds(
    Frame,
    run=st.just(RUN),
    kind=st.sampled_from(["hello", "job", "answer"]),
    sender=st.integers(SERVER, 5),
    receiver=st.integers(SERVER, 5),
    round=st.integers(0, 2**40),
    job=st.text("0123456789abcdef", min_size=1, max_size=32),
    head=st.dictionaries(st.text("abc", max_size=3), JSON_VALUES, max_size=3),
    blobs=st.lists(st.binary(max_size=40), max_size=3).map(tuple),
)
JOB = Frame(RUN, "job", SERVER, 2, 7, "a1", {"epochs": 2}, (b"weights", b""))


class Keys:
    """Signatures with one secret per party, which all know: enough to see what is signed and checked."""

    def __init__(self, own: int = SERVER, secret: bytes = b"") -> None:
        self.own, self.secret = own, secret

    def sign(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, key=b"%d" % self.own + self.secret).digest()

    def verify(self, sender: int, data: bytes, signature: bytes) -> None:
        if signature != hashlib.blake2b(data, key=b"%d" % sender).digest():
            raise SparsonaError("wrong signature")


def sealed(frame: Frame) -> bytes:
    return seal(frame, Keys(frame.sender))


def opened(data: bytes | memoryview, frame: Frame = JOB, **options: Any) -> Frame:
    return unseal(data, Keys(), **{"run": frame.run, "receiver": frame.receiver, **options})


def with_head(text: bytes, blobs: bytes = b"", num_blobs: int = 0) -> bytes:
    """A frame whose signature is right and whose head is any bytes."""
    signed = PREFIX.pack(SERVER, len(text), num_blobs) + text
    signature = Keys().sign(START.pack(MAGIC, 1) + signed)
    return START.pack(MAGIC, 1) + SIZE.pack(len(signature)) + signature + signed + blobs


def head_of(head: str, **changed: Any) -> bytes:
    """The JSON of a frame with `head` inserted as it stands."""
    fields = {"head": "HEAD", "job": "a1", "kind": "job", "receiver": 2, "round": 7, "run": RUN, **changed}
    return json.dumps(fields, separators=(",", ":")).replace('"HEAD"', head).encode()


@QUICK
@given(FRAMES)
def test_a_frame_survives_the_way(frame: Frame) -> None:
    found = opened(sealed(frame), frame)
    assert found == frame
    assert sealed(found) == sealed(frame)
    assert unseal(seal(frame, UNSIGNED), UNSIGNED, run=RUN, receiver=frame.receiver) == frame


def test_blobs_are_views_of_what_arrived() -> None:
    data = sealed(replace(JOB, blobs=(bytes(1 << 20),)))
    tracemalloc.start()
    found = opened(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000
    assert isinstance(found.blobs[0], memoryview)
    assert found.blobs[0].readonly
    assert opened(memoryview(bytearray(data))).blobs[0].readonly


@QUICK
@given(FRAMES, st.data())
def test_no_changed_bit_is_accepted(frame: Frame, data: st.DataObject) -> None:
    whole = bytearray(sealed(frame))
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    whole[bit // 8] ^= 1 << bit % 8
    with pytest.raises(SparsonaError):
        opened(bytes(whole), frame)


def test_no_bit_of_a_frame_can_change_unsigned_or_not() -> None:
    for data, verifier in ((sealed(JOB), Keys()), (seal(JOB, UNSIGNED), UNSIGNED)):
        for bit in range(8 * len(data)):
            whole = bytearray(data)
            whole[bit // 8] ^= 1 << bit % 8
            try:
                found = unseal(bytes(whole), verifier, run=RUN, receiver=2)
            except SparsonaError:
                continue
            assert verifier is UNSIGNED, bit  # nothing protects the sender's words there, only their form
            assert found != JOB


@QUICK
@given(FRAMES, st.data())
def test_a_cut_or_longer_frame_is_refused(frame: Frame, data: st.DataObject) -> None:
    whole = sealed(frame)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    for other in (cut, whole + data.draw(st.binary(min_size=1, max_size=9))):
        with pytest.raises(SparsonaError):
            opened(other, frame)


@QUICK
@given(st.binary(max_size=200))
def test_any_bytes_behind_a_right_signature_raise_our_error_or_are_canonical(text: bytes) -> None:
    for head in (text, head_of(text.decode("latin-1"))):
        data = with_head(head)
        try:
            found = opened(data)
        except SparsonaError:
            continue
        assert sealed(found) == data


@pytest.mark.parametrize(
    "head",
    [
        "[" * 500_000,
        "[" * 17 + "]" * 17,
        '{"a":' * 17 + "1" + "}" * 17,
        "[" * 400 + "]" * 400,
        '{"a":NaN}',
        '{"a":-Infinity}',
        '{"a":1e999}',
        '{"a":1,"a":1}',
        '{"b":1,"a":1}',
        '{"a":9223372036854775808}',
        '{"a":-9223372036854775809}',
        '{"a":%s}' % ("9" * 500_000),
        '{"a":"\\ud800"}',
        '{"a":1.50}',
        '{"a": 1}',
        '{"a":-0}',
        "[]",
        "null",
        "7",
        '"text"',
        "",
        "{}}",
        '{},"more":1',
    ],
)
def test_heads_that_are_not_ours_are_refused_in_time(head: str) -> None:
    start = time.process_time()
    with pytest.raises(SparsonaError, match="bad frame"):
        opened(with_head(head_of(head)))
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    "changed",
    [
        {"run": 7},
        {"run": ""},
        {"kind": None},
        {"kind": "x" * 129},
        {"job": ["a1"]},
        {"receiver": True},
        {"receiver": 2.0},
        {"receiver": -2},
        {"receiver": 2**31},
        {"round": "7"},
        {"round": -2},
        {"sender": 3},
    ],
)
def test_fields_of_other_types_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(SparsonaError, match="bad frame"):
        opened(with_head(head_of("{}", **changed)))
    if "sender" not in changed:
        with pytest.raises(SparsonaError, match=f"its {next(iter(changed))} is"):
            sealed(replace(JOB, **changed))


def test_a_frame_of_another_run_or_for_another_receiver_is_refused() -> None:
    with pytest.raises(SparsonaError, match="belongs to run"):
        opened(sealed(JOB), run="cd" * 16)
    with pytest.raises(SparsonaError, match="is for client 2"):
        opened(sealed(JOB), receiver=3)
    with pytest.raises(SparsonaError, match="is for the server"):
        opened(sealed(replace(JOB, sender=1, receiver=SERVER)), receiver=3)


def test_a_frame_in_anothers_name_or_under_anothers_key_is_refused() -> None:
    with pytest.raises(SparsonaError, match="wrong signature"):
        opened(seal(replace(JOB, sender=1), Keys(0)))
    with pytest.raises(SparsonaError, match="wrong signature"):
        opened(seal(JOB, Keys(SERVER, b"another secret")))
    with pytest.raises(SparsonaError, match="wrong signature"):
        opened(seal(JOB, UNSIGNED))
    with pytest.raises(SparsonaError, match="a frame with a signature"):
        unseal(sealed(JOB), UNSIGNED, run=RUN, receiver=2)


def test_blobs_cannot_be_exchanged() -> None:
    one, other = sealed(replace(JOB, blobs=(b"aaaa", b"bbbb"))), sealed(replace(JOB, blobs=(b"bbbb", b"aaaa")))
    with pytest.raises(SparsonaError, match="blob 0 is not what its sender signed"):
        opened(one[:-8] + b"bbbbaaaa")
    assert opened(other).blobs == (b"bbbb", b"aaaa")


def test_a_replay_is_told_apart_by_its_round_and_job() -> None:
    earlier = sealed(JOB)
    found = opened(earlier)
    assert (found.round, found.job) == (7, "a1")
    for later in (replace(JOB, round=8), replace(JOB, job="a2")):
        assert opened(sealed(later)) != found
        assert sealed(later) != earlier


def test_nothing_is_parsed_before_the_signature_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(*args: object, **options: object) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr(json, "loads", parse)
    with pytest.raises(SparsonaError, match="wrong signature"):
        opened(seal(JOB, Keys(0)))


def test_lengths_are_bounded_before_anything_else() -> None:
    data = sealed(JOB)
    assert opened(data, limit=len(data)) == JOB
    with pytest.raises(SparsonaError, match=f"it has {len(data)} bytes"):
        opened(data, limit=len(data) - 1)
    start = START.pack(MAGIC, 1) + SIZE.pack(0)
    for prefix in (
        PREFIX.pack(SERVER, MAX_HEAD + 1, 0),
        PREFIX.pack(SERVER, 0, MAX_BLOBS + 1),
        PREFIX.pack(SERVER - 1, 0, 0),
    ):
        with pytest.raises(SparsonaError, match="a head of"):
            opened(start + prefix + bytes(MAX_HEAD + 2))
    with pytest.raises(SparsonaError, match="its head has"):
        sealed(replace(JOB, head={"a": "x" * MAX_HEAD}))
    with pytest.raises(SparsonaError, match="blobs"):
        sealed(replace(JOB, blobs=(b"",) * (MAX_BLOBS + 1)))
    assert len(opened(sealed(replace(JOB, blobs=(b"",) * MAX_BLOBS))).blobs) == MAX_BLOBS


def test_a_blob_that_claims_to_be_huge_is_refused() -> None:
    row = ROW.pack(2**63, hashlib.sha256(b"").digest())
    signed = PREFIX.pack(SERVER, len(head_of("{}")), 1) + head_of("{}") + row
    data = START.pack(MAGIC, 1) + SIZE.pack(64) + Keys().sign(START.pack(MAGIC, 1) + signed) + signed
    with pytest.raises(SparsonaError, match="is incomplete"):
        opened(data)


def test_another_version_says_so() -> None:
    with pytest.raises(SparsonaError, match="version 2"):
        opened(START.pack(MAGIC, 2) + sealed(JOB)[START.size :])
    with pytest.raises(SparsonaError, match="something else"):
        opened(b"GET / HTTP/1.1" + bytes(40))


@pytest.mark.parametrize(
    "head", [{1: 2}, {"a": {3: 4}}, {"a": float("nan")}, {"a": b"bytes"}, {"a": 2**63}, {"a": "\ud800"}]
)
def test_a_head_that_json_does_not_have_is_not_sealed(head: dict[Any, Any]) -> None:
    with pytest.raises(SparsonaError, match="bad frame"):
        sealed(replace(JOB, head=head))


def test_tuples_arrive_as_lists() -> None:
    assert opened(sealed(replace(JOB, head={"counts": (1, 2)}))).head == {"counts": [1, 2]}
