"""Sizes by hand, and what a sender may not say."""

import math
import subprocess
import sys

import pytest

from sparsona.core.errors import SparsonaError
from sparsona.core.layout import Layout, Slot
from sparsona.core.update import PartSize, Support
from sparsona.wire.format import (
    MAX_ENTRIES,
    Head,
    PartHead,
    message_size,
    padded,
    paper_size,
    payload_size,
    write_head,
)

LAYOUT = Layout((Slot("weight", (5, 2)), Slot("bias", (5,))))  # 15 entries


def test_needs_no_torch() -> None:
    modules = "sparsona.wire.format, sparsona.wire.compact, sparsona.wire.ledger"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_padding_reaches_the_next_multiple_of_four() -> None:
    assert [padded(n) for n in range(6)] == [0, 4, 4, 4, 4, 8]


def test_smallest_message_is_a_head_and_a_checksum() -> None:
    """24 bytes of head, 4 of checksum."""
    assert message_size(()) == 28


@pytest.mark.parametrize(
    ("part", "size"),
    [
        # head 24 + 16 + 1; slots 3 + 6 + 8 and 3 + 4 + 4: 69, padded 72; checksum 4; then the payload
        (PartSize("p", LAYOUT, 15), 76 + 60),
        (PartSize("p", LAYOUT, 15, is_mask=True), 76 + 4),
        # a digest makes 77, padded 80; then a bitmap of 2 bytes, padded 4
        (PartSize("p", LAYOUT, 7, Support.BITS), 84 + 4 + 28),
        (PartSize("p", LAYOUT, 7, Support.BITS, is_mask=True), 84 + 4 + 4),
        (PartSize("p", LAYOUT, 7, Support.KNOWN), 84 + 28),
        # and a seed 93, padded 96
        (PartSize("p", LAYOUT, 7, Support.SEED), 100 + 28),
        # two bytes for one letter: 24 + 16 + 2, padded 44
        (PartSize("ö", Layout(()), 0), 48),
        (PartSize("p", LAYOUT, 15, bits=16), 76 + 32),
        (PartSize("p", LAYOUT, 15, bits=16, is_bfloat=True), 76 + 32),
        # Two tensors: a scale of four bytes and a count of eight each; 15 values of 3 bits are 6 bytes.
        (PartSize("p", LAYOUT, 15, bits=3), 76 + 24 + 8),
        (PartSize("p", LAYOUT, 7, Support.KNOWN, bits=8), 84 + 24 + 8),
    ],
)
def test_message_size_by_hand(part: PartSize, size: int) -> None:
    assert message_size((part,)) == size


def test_paper_counts_floats_alone() -> None:
    parts = (
        PartSize("params", LAYOUT, 7, Support.BITS),
        PartSize("buffers", LAYOUT, 15),
        PartSize("mask", LAYOUT, 15, is_mask=True),
    )
    assert paper_size(parts) == 4 * (7 + 15)
    assert paper_size(()) == 0
    assert paper_size((PartSize("p", LAYOUT, 15, bits=16), PartSize("q", LAYOUT, 7, Support.BITS, bits=3))) == 30 + 3


def test_sizes_of_a_vast_layout_are_arithmetic() -> None:
    vast = Layout((Slot("w", (2**20, 2**20)),))
    part = PartSize("p", vast, 3, Support.KNOWN)
    assert payload_size(part) == (0, 12)
    assert message_size((part,)) < 100
    assert message_size((PartSize("p", vast, 3, Support.BITS),)) > 2**37


def refused(parts: tuple[PartSize, ...], sender: int = 0, round_: int = 0, weight: float = 1.0) -> str:
    heads = tuple(PartHead(part, bytes(0 if part.support is Support.DENSE else 8)) for part in parts)
    with pytest.raises(SparsonaError) as caught:
        write_head(Head(sender, round_, weight, heads))
    return str(caught.value)


@pytest.mark.parametrize("sender", [-2, 2**31])
def test_refuses_senders_out_of_range(sender: int) -> None:
    assert f"sender {sender}" in refused((), sender=sender)


@pytest.mark.parametrize("round_", [-1, 2**32])
def test_refuses_rounds_out_of_range(round_: int) -> None:
    assert f"round {round_}" in refused((), round_=round_)


@pytest.mark.parametrize("weight", [math.nan, math.inf, -1.0])
def test_refuses_weights_that_would_poison_a_mean(weight: float) -> None:
    assert f"weight {weight}" in refused((), weight=weight)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (PartSize("p", LAYOUT, 14), "14 values with support DENSE"),
        (PartSize("p", LAYOUT, 15, bits=9), "9 bits a value"),
        (PartSize("p", LAYOUT, 16, Support.KNOWN), "16 values with support KNOWN"),
        (PartSize("p", LAYOUT, -1, Support.KNOWN), "-1 values"),
        (PartSize("p", Layout((Slot("w", (-1,)),)), 0), "shape (-1,)"),
        (PartSize("p", Layout((Slot("w", (2**32, 0)),)), 0), "shape (4294967296, 0)"),
        (PartSize("p", Layout((Slot("w", (1,) * 33),)), 1), "33 dimensions"),
        (PartSize("p", Layout((Slot("w", (MAX_ENTRIES >> 16, 0, 2**17)),)), 0), "entries"),
        (PartSize("p", Layout((Slot("w", ()), Slot("w", ()))), 2), "same name"),
        (PartSize("p" * 2**16, Layout(()), 0), "too long"),
        (PartSize("p", Layout((Slot("w" * 2**16, ()),)), 1), "too long"),
        (PartSize("\ud800", Layout(()), 0), "not text"),
    ],
)
def test_sender_and_cost_refuse_alike(part: PartSize, message: str) -> None:
    text = refused((part,))
    assert message in text
    assert len(text) < 400, "a long name must not flood the log"
    with pytest.raises(SparsonaError):
        message_size((part,))


def test_refuses_two_parts_of_one_name() -> None:
    part = PartSize("p", Layout(()), 0)
    assert "same name" in refused((part, part))


def test_refuses_more_parts_than_an_update_can_need() -> None:
    assert "256 parts" in refused(tuple(PartSize(str(n), Layout(()), 0) for n in range(256)))


def test_refuses_heads_that_would_fill_memory() -> None:
    names = Layout(tuple(Slot(f"{n:060}", (0,)) for n in range(2**13)))
    assert "names and shapes of" in refused((PartSize("p", names, 0),))


def test_refuses_more_tensors_than_models_have() -> None:
    parts = tuple(PartSize(name, Layout(tuple(Slot(str(n), ()) for n in range(4097))), 4097) for name in "pq")
    assert "8194 tensors" in refused(parts)


def test_refuses_digest_and_seed_of_the_wrong_length() -> None:
    for support, digest, seed in (
        (Support.KNOWN, b"", b""),
        (Support.SEED, bytes(8), bytes(15)),
        (Support.DENSE, bytes(8), b""),
    ):
        part = PartHead(PartSize("p", LAYOUT, 15, support), digest, seed)
        with pytest.raises(SparsonaError, match=f"for support {support.name}"):
            write_head(Head(0, 0, 1.0, (part,)))
