"""Mutated messages: each is refused with this package's own error, or is the one encoding of what it means.

The suite tries a few thousand; `make fuzz` a million, or as many as `make fuzz FUZZ=10000000` says.
"""

from __future__ import annotations

import contextlib
import random
import resource
import struct
import sys
import time
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from sparsona.core.errors import SparsonaError
from sparsona.core.layout import Layout, Slot
from sparsona.core.round import Client
from sparsona.core.tree import Tree, counts
from sparsona.core.update import Levels, Part, Support, Update, dense, masked
from sparsona.engine.gate import check_update
from sparsona.wire.codec import decode, encode
from sparsona.wire.format import HEAD, PART, SLOT, sizes_of

FEW = 6_000
LAYOUT = Layout((Slot("conv.weight", (4, 3, 2)), Slot("conv.bias", (4,)), Slot("scale", ()), Slot("none", (0, 7))))
OTHER = Layout((Slot("w", (3, 5)),))
SEALED = 0.9  # the share of messages whose checksum is repaired, where a kind leaves it open


def seal(body: bytes) -> bytes:
    return body + struct.pack("<I", zlib.crc32(body))


def honest() -> list[Update]:
    """Every support with every type of value."""
    rng, random_ = np.random.default_rng(3), torch.Generator().manual_seed(3)

    def tree(layout: Layout) -> Tree:
        return Tree(layout, torch.randn(layout.size, generator=random_))

    def mask(layout: Layout) -> Tree:
        return Tree(layout, torch.rand(layout.size, generator=random_) < 0.5)

    def levels(part: Part, bits: int) -> Part:
        numbers = part.layout.sizes if part.mask is None else counts(part.mask)
        values = torch.from_numpy(rng.integers(0, max(2, 2**bits - 1), part.num_values, dtype=np.uint8))
        return part.carrying(values, Levels(bits, torch.rand(len(numbers), generator=random_), numbers))

    seed = bytes(range(16))
    known, bits = masked(tree(LAYOUT), mask(LAYOUT)), masked(tree(LAYOUT), mask(LAYOUT), Support.BITS)
    seeded = masked(tree(LAYOUT), mask(LAYOUT), Support.SEED, seed)
    sets = [
        {"model": dense(tree(LAYOUT))},
        {"update": known, "mask": dense(mask(LAYOUT))},
        {"model": bits, "mask": dense(mask(LAYOUT))},
        {"update": seeded},
        {"model": dense(tree(OTHER)), "labels": dense(mask(OTHER))},
        {"half": bits.carrying(bits.values.half()), "plain": dense(tree(OTHER))},
        {"levels": levels(known, 3), "signs": levels(dense(tree(OTHER)), 1), "bytes": levels(bits, 8)},
        {"flags": masked(mask(LAYOUT), mask(LAYOUT)), "more": masked(mask(OTHER), mask(OTHER), Support.BITS)},
        {"brain": known.carrying(known.values.bfloat16()), "plain": dense(tree(OTHER))},
        {},
    ]
    updates = [Update(number, number, 1.0 + number, parts) for number, parts in enumerate(sets)]
    # Compact messages are shorter, or they would not be compact: they need something to leave out.
    wide = Layout((Slot("w", (40, 40)),))
    few = Tree(wide, torch.arange(wide.size) % 50 == 0)
    long = {"model": masked(tree(wide), few, Support.BITS), "mask": dense(few), "half": dense(tree(wide))}
    long["half"] = long["half"].carrying(long["half"].values.half())
    return [*updates, Update(len(updates), 1, 2.0, long, compact=True)]


UPDATES = honest()
SOUND = [encode(update) for update in UPDATES]
HUGE = [0, 1, 2**7, 2**8 - 1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
ODD_FLOATS = [float("nan"), float("inf"), -float("inf"), -0.0, 5e-324, -1.0]


def from_random_bytes(draw: random.Random) -> bytes:
    body = draw.randbytes(draw.randrange(120))
    return draw.choice([body, seal(body), seal(SOUND[0][:4] + body), seal(SOUND[0][: HEAD.size] + body)])


def flipped(draw: random.Random, data: bytes) -> bytearray:
    body = bytearray(data)
    for _ in range(draw.randrange(1, 4)):
        body[draw.randrange(len(body))] ^= 1 << draw.randrange(8)
    return body


def with_flips(draw: random.Random) -> bytes:
    return bytes(flipped(draw, draw.choice(SOUND)))


def with_flips_and_a_checksum(draw: random.Random) -> bytes:
    return seal(bytes(flipped(draw, draw.choice(SOUND)[:-4])))


def closed(draw: random.Random, body: bytes) -> bytes:
    return seal(body) if draw.random() < SEALED else body


def cut(draw: random.Random) -> bytes:
    data = draw.choice(SOUND)
    start = draw.randrange(len(data)) if draw.random() < 0.3 else 0
    return closed(draw, data[start : draw.randrange(start, len(data))])


def longer(draw: random.Random) -> bytes:
    data = draw.choice(SOUND)[:-4]
    more = draw.choice([bytes(draw.randrange(1, 9)), draw.randbytes(draw.randrange(1, 40)), draw.choice(SOUND)])
    at = draw.choice([len(data), draw.randrange(len(data))])
    return closed(draw, data[:at] + more + data[at:])


def with_huge_integers(draw: random.Random) -> bytes:
    body = bytearray(draw.choice(SOUND)[:-4])
    for _ in range(draw.randrange(1, 3)):
        size = draw.choice([1, 2, 4, 8])
        at = draw.randrange(4, max(5, min(len(body) - size, 160)))
        body[at : at + size] = (draw.choice(HUGE) % 2 ** (8 * size)).to_bytes(size, "little")
    return seal(bytes(body))


def with_odd_floats(draw: random.Random) -> bytes:
    body = bytearray(draw.choice(SOUND)[:-4])
    value = draw.choice(ODD_FLOATS)
    if draw.random() < 0.3:
        body[16:24] = struct.pack("<d", value)
    else:
        at = 4 * draw.randrange(len(body) // 4)
        body[at : at + 4] = struct.pack("<f", value)
    return seal(bytes(body))


def spliced(draw: random.Random) -> bytes:
    one, other = draw.choice(SOUND)[:-4], draw.choice(SOUND)[:-4]
    at, to = draw.randrange(len(one)), draw.randrange(len(other))
    return closed(draw, one[:at] + other[to:])


def written(draw: random.Random, fault: str) -> bytes:
    """A message written from scratch, which keeps most of the rules."""
    names = ["p", "q", "", "ö", "p"] if fault == "names" else ["p", "q", "", "ö", "model"]
    number = draw.randrange(1, 4)
    chosen = [draw.choice(names) for _ in range(number)] if fault == "names" else draw.sample(names, number)
    head, payload = HEAD.pack(b"SPNA", 1, 0, number, draw.randrange(-1, 9), draw.randrange(9), 1.0), b""
    for name in chosen:
        tensors = ["w", "b", "w"] if fault == "names" else ["w", "b", "c"]
        tensors = tensors[: draw.randrange(4)]
        shapes = [tuple(draw.randrange(4) for _ in range(draw.randrange(3))) for _ in tensors]
        entries = sum(int(np.prod(shape)) for shape in shapes)
        dtype, support = draw.choice([0, 1, 2]), draw.choice([0, 0, 1, 2, 3])
        if fault == "types":
            dtype, support = draw.choice([*range(30), 255]), draw.choice([*range(6), 255])
        values = entries if support == 0 else draw.randrange(entries + 1)
        stated = values
        if fault == "counts":
            stated = draw.choice([values, values + 1, max(0, values - 1), *HUGE])
        text = name.encode()
        head += PART.pack(len(text), dtype, support, len(tensors), stated) + text
        head += bytes(8) * (support != 0) + bytes(16) * (support == 2)
        for tensor, shape in zip(tensors, shapes, strict=True):
            head += SLOT.pack(len(tensor), len(shape)) + tensor.encode() + struct.pack(f"<{len(shape)}I", *shape)
        blocks = [-(-entries // 8)] * (support == 1) + [{1: -(-values // 8), 2: 2 * values}.get(dtype, 4 * values)]
        for size in blocks:
            payload += draw.randbytes(size) + bytes(-size % 4)
    return seal(head + bytes(-len(head) % 4) + payload)


KINDS: dict[str, Callable[[random.Random], bytes]] = {
    "random bytes": from_random_bytes,
    "bit flips": with_flips,
    "bit flips, checksum repaired": with_flips_and_a_checksum,
    "cut": cut,
    "longer": longer,
    "huge integers": with_huge_integers,
    "NaN, infinities": with_odd_floats,
    "splices": spliced,
    "names twice": lambda draw: written(draw, "names"),
    "unknown types and supports": lambda draw: written(draw, "types"),
    "wrong counts": lambda draw: written(draw, "counts"),
}


def read(data: bytes) -> bool:
    """Whether a message is accepted. All that is raised is a SparsonaError, also by reading it later."""
    accepted = None
    with contextlib.suppress(SparsonaError):
        accepted = decode(data)
    if accepted is not None:
        if not accepted.compact:
            assert encode(accepted) == data, "two messages for one update"
        else:  # which may have been compressed otherwise; what it means has one message without that
            plain = encode(replace(accepted, compact=False))
            assert encode(decode(plain)) == plain == encode(replace(decode(encode(accepted)), compact=False))
        for part in accepted.parts.values():
            if part.support in (Support.DENSE, Support.BITS):
                tree = part.plain().tree()
                assert [tuple(tree[name].shape) for name in tree] == [slot.shape for slot in part.layout.slots]
    # As a server reads it, that expects a message of this client: the gate refuses, and nothing else is raised.
    update = UPDATES[data[8] % len(UPDATES)] if len(data) > 8 else UPDATES[0]
    expected = sizes_of(update)
    try:
        arrived = decode(data, expected)
        assert accepted is not None, "accepted with expected parts, and refused without"
        check_update(arrived, expected, client=Client(update.sender, 9), round=update.round, exact=True)
    except SparsonaError:
        pass
    return accepted is not None


def attacks(number: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """As many messages of each kind in turn."""
    draw, kinds = random.Random(seed), [*KINDS.items()]
    for place in range(number):
        name, make = kinds[place % len(kinds)]
        yield name, make(draw)


def test_mutated_messages() -> None:
    accepted, of = Counter[str](), Counter[str]()
    for name, data in attacks(FEW, seed=1):
        accepted[name] += read(data)
        of[name] += 1
    assert len(of) == 11
    # A fuzzer whose messages are all refused at the door tests nothing behind it.
    for name in KINDS.keys() - {"random bytes", "cut", "longer", "bit flips", "names twice"}:
        assert accepted[name] > 0, name
    # A flip is noticed, unless another one takes it back.
    assert accepted["bit flips"] < of["bit flips"] / 100


def large() -> dict[str, Update]:
    """Messages of which a quarter of a megabyte or more is numbers: what a head makes of objects does not matter."""
    draws, wide = torch.Generator().manual_seed(5), Layout((Slot("w", (1000, 250)), Slot("b", (1000,))))
    tree, half = Tree(wide, torch.randn(wide.size, generator=draws)), torch.rand(wide.size, generator=draws) < 0.5
    mask, bits = Tree(wide, half), Layout((Slot("m", (1500, 1500)),))
    values = torch.randint(0, 7, (wide.size,), generator=draws, dtype=torch.uint8)
    few = masked(tree, Tree(wide, torch.rand(wide.size, generator=draws) < 0.02), Support.BITS)
    parts = {
        "dense": dense(tree),
        "known": masked(tree, mask),
        "bits": masked(tree, mask, Support.BITS),
        "seed": masked(tree, mask, Support.SEED, bytes(range(16))),
        "half": dense(tree).carrying(tree.flat.half()),
        "mask": dense(Tree(bits, torch.rand(bits.size, generator=draws) < 0.5)),
        "levels": dense(tree).carrying(values, Levels(3, torch.rand(2, generator=draws), wide.sizes)),
    }
    found = {name: Update(1, 2, 3.0, {"part": part}) for name, part in parts.items()}
    return {**found, "compact": Update(1, 2, 3.0, {"part": dense(tree), "few": few}, compact=True)}


def damaged(draw: random.Random, data: bytes) -> bytes:
    """The message with bits, lengths or counts changed, mostly at its head, and a checksum that fits."""
    body, kind = bytearray(data[:-4]), draw.randrange(5)
    if kind == 0:
        return data
    if kind == 1:
        body[draw.randrange(len(body))] ^= 1 << draw.randrange(8)
    elif kind == 2:
        size, at = draw.choice([1, 2, 4, 8]), draw.randrange(4, 80)
        body[at : at + size] = (draw.choice(HUGE) % 2 ** (8 * size)).to_bytes(size, "little")
    elif kind == 3:
        del body[draw.randrange(len(body) // 2, len(body)) :]
    else:
        body += draw.randbytes(draw.randrange(1, 9))
    return seal(bytes(body))


LARGE = large()


@pytest.mark.parametrize("name", LARGE)
def test_memory_is_within_twice_the_message(name: str) -> None:
    """Sound or damaged. Levels of few bits become bytes, one each; what is compact becomes what it was before, and
    masks in it bytes for a moment: what a message of the same parts may take is known before it is expanded."""
    update, draw = LARGE[name], random.Random(name)
    sound, expected = encode(update), sizes_of(update)
    assert len(sound) > 90_000
    most = 2 * len(sound)
    if name == "levels":
        most = 2 * update.parts["part"].num_values
    elif name == "compact":
        most = len(encode(replace(update, compact=False))) + 2 * update.parts["few"].layout.size
    accepted = 0
    for _ in range(30):
        data = damaged(draw, sound)
        for known in (expected, None):
            if known is None and name == "compact":
                continue  # whoever reads what may be compact says what it may become
            tracemalloc.start()
            try:
                decode(data, known)
                accepted += 1
            except SparsonaError:
                pass
            finally:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
            assert peak <= most, (peak, len(data))
    assert accepted


@pytest.mark.parametrize("data", SOUND)
def test_the_messages_that_are_mutated_are_sound(data: bytes) -> None:
    assert read(data)


def peak_memory() -> float:
    """The most memory that this process had so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def main(number: int, seed: int) -> None:
    """`make fuzz`."""
    torch.set_num_threads(1)
    accepted, start, first = 0, time.monotonic(), 0.0
    for place, (name, data) in enumerate(attacks(number, seed), 1):
        try:
            accepted += read(data)
        except BaseException:
            print(f"\n{name}, message {place} of seed {seed}: {data.hex()}", flush=True)
            raise
        if place % 10_000 == 0 or place == number:
            first = first or peak_memory()
            rate = place / (time.monotonic() - start)
            text = f"{place:,} of {number:,} messages, {accepted:,} accepted, {rate:,.0f} a second, "
            print(f"\r{text}{peak_memory():,.0f} MB (at first {first:,.0f})", end="", flush=True)
            if peak_memory() > first + 100:
                sys.exit("\nmemory grows")
    print()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else int(time.time()))
