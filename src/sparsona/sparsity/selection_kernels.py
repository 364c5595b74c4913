"""Selection on a GPU: the smallest or largest magnitudes of every tensor at once, without a sort and without a wait.

A magnitude orders as its 31 bits do. They are fixed from the top, a few at a time: one pass over the buffer counts, for
each tensor, how often each next digit occurs among the entries that agree so far; the next pass picks the digit in
which the last wanted entry lies. When all bits are known, entries below that threshold are taken, and of those at it
the first ones. All of it is integer counts, and their sums do not depend on the order in which programs add to them.

A program never reads what another one of the same launch wrote: what a pass finds is read by the next.
Importing this needs triton, which comes with torch for GPUs.
"""

# ruff: noqa: N803 - Triton's compile-time constants are written in capitals

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

# How many bits each pass fixes; 31 in all. A histogram of 64 bins costs about what reading the entries does; one of 256
# several times that, and 16 would double the number of passes.
WIDTHS = (7, 6, 6, 6, 6)
BINS = 2 ** max(WIDTHS)
# Measured on an H200 for VGG11: 0.54 ms an evolution; blocks of 4,096 take 0.57, with eight warps 0.62.
BLOCK = 2048
WARPS = 4
# Entries are numbered in 32 bits.
MOST_ENTRIES = 2**31 - 2 * BLOCK


@dataclass(frozen=True)
class Blocks:
    """Which stretch of the buffer each program reads: [start, stop) within one aligned tile and one tensor."""

    table: Tensor  # a row per program: tensor, start, stop, and the first program of that tensor
    sizes: Tensor  # entries per tensor
    entries: int

    @property
    def num_programs(self) -> int:
        return self.table.shape[0]

    @property
    def num_tensors(self) -> int:
        return self.sizes.shape[0]


@lru_cache(maxsize=64)
def blocks_of(sizes: tuple[int, ...], device: torch.device) -> Blocks:
    """The programs for tensors of these sizes. Made once per layout: the copy to the device is waited for."""
    rows: list[tuple[int, int, int, int]] = []
    start = 0
    for tensor, size in enumerate(sizes):
        first, stop = len(rows), start + size
        while start < stop:
            end = min(stop, (start // BLOCK + 1) * BLOCK)
            rows.append((tensor, start, end, first))
            start = end
    table = torch.tensor(rows, dtype=torch.int32).reshape(-1, 4).to(device)
    return Blocks(table, torch.tensor(sizes, dtype=torch.int32).to(device), start)


def evolve(
    params: Tensor, mask: Tensor, scores: Tensor, sizes: tuple[int, ...], rate: float, slack: float
) -> tuple[Tensor, Tensor]:
    """The mask after pruning by |params| and growing by |scores|, and whether each of the two has a NaN (not 0).

    The mask is good for nothing if one has; nothing is waited for to say so. This can be part of a CUDA graph.
    """
    broken = torch.zeros(2, dtype=torch.int32, device=mask.device)
    numbers = shares(mask, sizes, rate, slack)
    kept = choose(params, mask, sizes, numbers, flip=True, broken=broken[:1])
    return choose(scores, kept, sizes, numbers, among=False, largest=True, flip=True, broken=broken[1:]), broken


def shares(mask: Tensor, sizes: tuple[int, ...], rate: float, slack: float) -> Tensor:
    """For each tensor min(active, ceil(rate * active * (1 - slack))), 0 if it is dense; what the host would compute."""
    mask = mask.contiguous()
    blocks = blocks_of(sizes, mask.device)
    active = torch.zeros_like(blocks.sizes)
    numbers = torch.empty_like(active)
    if not blocks.num_programs:
        return numbers.zero_()
    with torch.cuda.device_of(mask):
        _count_active[(blocks.num_programs,)](
            mask.view(torch.uint8), blocks.table, active, blocks.entries, BLOCK=BLOCK, num_warps=WARPS
        )
        _share[(triton.cdiv(blocks.num_tensors, 128),)](
            active, blocks.sizes, numbers, blocks.num_tensors, _bits(rate), _bits(1 - slack), TENSORS=128, num_warps=4
        )
    return numbers


def choose(
    values: Tensor,
    flags: Tensor,
    sizes: tuple[int, ...],
    numbers: Tensor,
    *,
    among: bool = True,
    largest: bool = False,
    flip: bool = False,
    broken: Tensor | None = None,
) -> Tensor:
    """Flags of the numbers[l] smallest |values| of each tensor l where `flags` equals `among`; ties to the first.

    `numbers` are int32 on the device; where a number exceeds the entries there are, all are taken. With `flip` the
    result is `flags` with the chosen entries inverted. `broken`, an int32 tensor of one entry, is added to if any value
    is not a number. Nothing waits, and no shape depends on a value: this can be part of a CUDA graph, once it has
    run outside of one for the same sizes.
    """
    values = values.detach().to(torch.float32).contiguous()  # exact for the narrower kinds; float64 is not for here
    flags = flags.contiguous()
    blocks = blocks_of(sizes, values.device)
    result = torch.empty_like(flags)
    if not blocks.num_programs:
        return result
    num_tensors, grid = blocks.num_tensors, (blocks.num_programs,)
    histograms = torch.zeros((len(WIDTHS), num_tensors, BINS), dtype=torch.int32, device=values.device)
    # After each pass, for each tensor: the bits known, how many of the entries that have them are wanted, and how many
    # there are.
    found = torch.empty((len(WIDTHS) + 1, 3, num_tensors), dtype=torch.int32, device=values.device)
    ties = torch.empty(blocks.num_programs, dtype=torch.int32, device=values.device)
    bits, before, after = values.view(torch.int32), flags.view(torch.uint8), result.view(torch.uint8)
    looked_at = (bits, before, blocks.table, numbers, histograms, found)
    kind = {"AMONG": among, "LARGEST": largest, "BLOCK": BLOCK, "BINS": BINS, "num_warps": WARPS}
    with torch.cuda.device_of(values):
        shift = 31
        for position, width in enumerate(WIDTHS):
            shift -= width
            _count_digits[grid](
                *looked_at,
                numbers if broken is None else broken,
                blocks.entries,
                num_tensors,
                PASS=position,
                SHIFT=shift,
                WIDTH=width,
                LAST_WIDTH=WIDTHS[position - 1],
                CHECK=position == 0 and broken is not None,
                **kind,
            )
        rest = {"PASSES": len(WIDTHS), "LAST_WIDTH": WIDTHS[-1], **kind}
        _count_ties[grid](*looked_at, ties, blocks.entries, num_tensors, **rest)
        del rest["LAST_WIDTH"], rest["BINS"]
        _mark[grid](bits, before, after, blocks.table, found, ties, blocks.entries, num_tensors, FLIP=flip, **rest)
    return result


def _bits(number: float) -> int:
    """The bits of a float64: as a number it would reach a kernel with 32."""
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


@triton.jit
def _stretch(table, program, BLOCK: tl.constexpr):
    """The tensor of a program, its first program, the positions it reads, and which of those are its own."""
    tensor = tl.load(table + 4 * program)
    start = tl.load(table + 4 * program + 1)
    stop = tl.load(table + 4 * program + 2)
    first = tl.load(table + 4 * program + 3)
    places = start // BLOCK * BLOCK + tl.arange(0, BLOCK)
    return tensor, first, places, (places >= start) & (places < stop)


@triton.jit
def _keys(bits, flags, places, own, entries, AMONG: tl.constexpr, LARGEST: tl.constexpr):
    """What to order by, smallest first, the flags, and which entries take part."""
    inside = places < entries
    keys = tl.load(bits + places, mask=inside, other=0) & 0x7FFFFFFF  # without the sign
    flagged = tl.load(flags + places, mask=inside, other=0)
    if LARGEST:
        keys = 0x7FFFFFFF - keys
    if AMONG:
        taking = own & (flagged != 0)
    else:
        taking = own & (flagged == 0)
    return keys, flagged, taking


@triton.jit
def _descend(histograms, found, tensor, num_tensors, PASS: tl.constexpr, LAST_WIDTH: tl.constexpr, BINS: tl.constexpr):
    """What the last pass found: the known bits, how many of the entries that have them are wanted, how many exist."""
    known = tl.load(found + (3 * PASS - 3) * num_tensors + tensor)
    wanted = tl.load(found + (3 * PASS - 2) * num_tensors + tensor)
    bins = tl.arange(0, BINS)
    counts = tl.load(histograms + ((PASS - 1) * num_tensors + tensor) * BINS + bins)
    if PASS == 1:
        wanted = tl.minimum(wanted, tl.sum(counts, 0))
    # The first digit up to which there are enough.
    digit = tl.sum((tl.cumsum(counts, 0) < wanted).to(tl.int32), 0)
    wanted -= tl.sum(tl.where(bins < digit, counts, 0), 0)
    return (known << LAST_WIDTH) | digit, wanted, tl.sum(tl.where(bins == digit, counts, 0), 0)


@triton.jit
def _note(found, known, wanted, existing, tensor, num_tensors, PASS: tl.constexpr):
    tl.store(found + (3 * PASS) * num_tensors + tensor, known)
    tl.store(found + (3 * PASS + 1) * num_tensors + tensor, wanted)
    tl.store(found + (3 * PASS + 2) * num_tensors + tensor, existing)


@triton.jit
def _count_digits(
    bits,
    flags,
    table,
    numbers,
    histograms,
    found,
    broken,
    entries,
    num_tensors,
    PASS: tl.constexpr,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    LAST_WIDTH: tl.constexpr,
    CHECK: tl.constexpr,
    AMONG: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    """One pass: how often each digit occurs among the entries whose bits above it are the known ones."""
    program = tl.program_id(0)
    tensor, first, places, own = _stretch(table, program, BLOCK)
    if PASS == 0:
        known = 0
        wanted = tl.load(numbers + tensor)
        existing = 0
    else:
        known, wanted, existing = _descend(histograms, found, tensor, num_tensors, PASS, LAST_WIDTH, BINS)
    if program == first:
        _note(found, known, wanted, existing, tensor, num_tensors, PASS)
    if CHECK:
        magnitudes = tl.load(bits + places, mask=places < entries, other=0) & 0x7FFFFFFF
        wrong = tl.sum((own & (magnitudes > 0x7F800000)).to(tl.int32), 0)
        if wrong > 0:
            tl.atomic_add(broken, 1, sem="relaxed")
    if wanted > 0:
        keys, _flagged, taking = _keys(bits, flags, places, own, entries, AMONG, LARGEST)
        taking = taking & ((keys >> (SHIFT + WIDTH)) == known)
        number = tl.sum(taking.to(tl.int32), 0)
        if number > 0:
            # The others are counted as the last digit and taken off again.
            digits = tl.where(taking, (keys >> SHIFT) & (2**WIDTH - 1), 2**WIDTH - 1)
            bins = tl.arange(0, 2**WIDTH)
            counts = tl.histogram(digits, 2**WIDTH) - tl.where(bins == 2**WIDTH - 1, BLOCK - number, 0)
            row = histograms + (PASS * num_tensors + tensor) * BINS
            tl.atomic_add(row + bins, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _count_ties(
    bits,
    flags,
    table,
    numbers,
    histograms,
    found,
    ties,
    entries,
    num_tensors,
    PASSES: tl.constexpr,
    LAST_WIDTH: tl.constexpr,
    AMONG: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    """How many entries of each stretch are at the threshold; not read where all of the tensor's are wanted."""
    program = tl.program_id(0)
    tensor, first, places, own = _stretch(table, program, BLOCK)
    threshold, wanted, existing = _descend(histograms, found, tensor, num_tensors, PASSES, LAST_WIDTH, BINS)
    if program == first:
        _note(found, threshold, wanted, existing, tensor, num_tensors, PASSES)
    if wanted < existing:
        keys, _flagged, taking = _keys(bits, flags, places, own, entries, AMONG, LARGEST)
        tl.store(ties + program, tl.sum((taking & (keys == threshold)).to(tl.int32), 0))


@triton.jit
def _mark(
    bits,
    flags,
    result,
    table,
    found,
    ties,
    entries,
    num_tensors,
    PASSES: tl.constexpr,
    FLIP: tl.constexpr,
    AMONG: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Flag the entries below the threshold and the first ones at it."""
    program = tl.program_id(0)
    tensor, first, places, own = _stretch(table, program, BLOCK)
    threshold = tl.load(found + (3 * PASSES) * num_tensors + tensor)
    wanted = tl.load(found + (3 * PASSES + 1) * num_tensors + tensor)
    existing = tl.load(found + (3 * PASSES + 2) * num_tensors + tensor)
    keys, flagged, taking = _keys(bits, flags, places, own, entries, AMONG, LARGEST)
    tied = taking & (keys == threshold) & (wanted > 0)
    if wanted < existing:
        earlier = tl.zeros([1024], dtype=tl.int32)
        while first < program:  # not a range: the interpreter of Triton 3.6 cannot count from a loaded number
            others = first + tl.arange(0, 1024)
            earlier += tl.load(ties + others, mask=others < program, other=0)
            first += 1024
        tied = tied & (tl.sum(earlier, 0) + tl.cumsum(tied.to(tl.int32), 0) <= wanted)
    chosen = ((taking & (keys < threshold)) | tied).to(tl.uint8)
    if FLIP:
        chosen = chosen ^ flagged
    tl.store(result + places, chosen, mask=own)


@triton.jit
def _count_active(flags, table, active, entries, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    tensor, _first, places, own = _stretch(table, program, BLOCK)
    flagged = tl.load(flags + places, mask=places < entries, other=0) != 0
    tl.atomic_add(active + tensor, tl.sum((own & flagged).to(tl.int32), 0), sem="relaxed")


@triton.jit(do_not_specialize=["rate_bits", "share_bits"])
def _share(active, sizes, numbers, num_tensors, rate_bits, share_bits, TENSORS: tl.constexpr):
    """The products are those of the host, in the same order and in float64: the numbers are the same to the last."""
    tensors = tl.program_id(0) * TENSORS + tl.arange(0, TENSORS)
    inside = tensors < num_tensors
    count = tl.load(active + tensors, mask=inside, other=0)
    size = tl.load(sizes + tensors, mask=inside, other=0)
    rate = rate_bits.to(tl.int64).to(tl.float64, bitcast=True)
    share = rate * count.to(tl.float64) * share_bits.to(tl.int64).to(tl.float64, bitcast=True)
    floor = share.to(tl.int32)
    ceiling = floor + (floor.to(tl.float64) < share).to(tl.int32)
    # In a dense tensor the pruned entries are the only candidates and would all grow again.
    tl.store(numbers + tensors, tl.where(count == size, 0, tl.minimum(count, ceiling)), mask=inside)
