"""Selection picks what a stable sort picks, whichever way it is done."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from math import inf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsona.core.layout import Layout, Slot
from sparsona.core.tree import Tree
from sparsona.sparsity.erk import ROUNDING_SLACK
from sparsona.sparsity.evolve import evolve
from sparsona.sparsity.selection import _by_sorting, _by_threshold, kernels_for, select

# Mostly ties, and zeros above all; both signs of everything.
TIED = [0.0, 0.0, 0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3e38, inf, -inf]
values = st.one_of(st.sampled_from(TIED), st.floats(width=32, allow_nan=False))
Tensors = list[tuple[list[float], list[bool], int]]


@st.composite
def one_tensor(draw: st.DrawFn) -> tuple[list[float], list[bool], int]:
    size = draw(st.integers(0, 12))
    kind = draw(st.sampled_from([values, st.sampled_from(TIED), st.just(0.0)]))
    numbers = draw(st.lists(kind, min_size=size, max_size=size))
    flags = draw(st.one_of(st.just([True] * size), st.lists(st.booleans(), min_size=size, max_size=size)))
    return numbers, flags, draw(st.integers(0, sum(flags)))


def sorted_out(tensors: Tensors, largest: bool) -> list[bool]:
    """The definition: a stable sort of those that take part."""
    chosen: list[bool] = []
    for numbers, flags, wanted in tensors:
        order = sorted(
            (place for place, flag in enumerate(flags) if flag),
            key=lambda place: -abs(numbers[place]) if largest else abs(numbers[place]),
        )
        chosen += [place in order[:wanted] for place in range(len(flags))]
    return chosen


@settings(deadline=None, max_examples=60)
@given(st.lists(one_tensor(), max_size=4), st.booleans(), st.sampled_from([torch.float32, torch.float64]))
def test_every_way_is_a_stable_sort(tensors: Tensors, largest: bool, dtype: torch.dtype) -> None:
    numbers = torch.tensor([value for tensor in tensors for value in tensor[0]], dtype=dtype)
    among = torch.tensor([flag for tensor in tensors for flag in tensor[1]], dtype=torch.bool)
    sizes, wanted = tuple(len(tensor[1]) for tensor in tensors), tuple(tensor[2] for tensor in tensors)
    expected = sorted_out(tensors, largest)
    before = numbers.clone()
    assert select(numbers, among, sizes, wanted, largest).tolist() == expected
    assert torch.equal(numbers, before)
    for pick in (_by_sorting, _by_threshold):
        start = 0
        for size, number in zip(sizes, wanted, strict=True):
            place = slice(start, start + size)
            start += size
            if number:
                magnitudes = -numbers[place].abs() if largest else numbers[place].abs()
                assert pick(magnitudes, among[place], number).tolist() == expected[place]


def test_narrow_numbers_are_selected_as_they_are() -> None:
    # 1 and 1.001 are one number in bfloat16: the first is taken.
    numbers = torch.tensor([2.0, 1.001, 1.0, 3.0], dtype=torch.bfloat16)
    assert select(numbers, torch.ones(4, dtype=torch.bool), (4,), (1,)).tolist() == [False, True, False, False]


def test_a_cpu_needs_no_kernels() -> None:
    assert kernels_for(torch.zeros(3)) is None


def check_kernels(device: str) -> None:
    """Evolution by kernels against evolution on the CPU, and against the definition."""
    from sparsona.sparsity import selection_kernels as kernels

    if device == "cpu":
        kernels.BLOCK = 64  # several programs for a tensor, and a tile that several tensors share
    random = torch.Generator().manual_seed(0)
    sizes = (130, 1, 0, 1, 9, 20, 12)
    layout = Layout(tuple(Slot(f"t{place}", (size,)) for place, size in enumerate(sizes)))
    weights, scores = (torch.randn(sum(sizes), generator=random) for _ in range(2))
    mask = torch.rand(sum(sizes), generator=random) < 0.5
    weights[:130] = weights[:130].round()  # ties in several programs
    scores[:130] = scores[:130].mul(0.7).round()
    mask[130:132] = torch.tensor([True, False])  # alone: dense and empty
    mask[132:141] = True
    weights[141:161], scores[141:161] = 0.0, -0.0  # nothing but ties
    weights[161::2], scores[162::3] = inf, -inf
    trees = [Tree(layout, flat) for flat in (weights, mask, scores)]
    flat = [tensor.to(device) for tensor in (weights, mask, scores)]
    expected = evolve(trees[0], trees[1], 0.4, trees[2], seed=0)
    evolved, broken = kernels.evolve(*flat, sizes, 0.4, ROUNDING_SLACK)
    assert evolved.tolist() == expected.flat.tolist()
    assert broken.tolist() == [0, 0]
    assert not torch.equal(expected.flat, mask)
    # More than there are, none and all: in one tensor each.
    few, parts = (3, 4, 5), [torch.tensor([True, False, True]), torch.ones(4).bool(), torch.ones(5).bool()]
    some = torch.tensor([inf, 0.0, 1.0, 1.0, -1.0, 1.0, -1.0, 2.0, torch.nan, 2.0, 2.0, 2.0])
    broken = torch.zeros(1, dtype=torch.int32, device=device)
    chosen = kernels.choose(
        some.to(device), torch.cat(parts).to(device), few, torch.tensor([9, 0, 3]).int().to(device), broken=broken
    )
    assert chosen.int().tolist() == [1, 0, 1, 0, 0, 0, 0, 1, 0, 1, 1, 0]
    assert broken.item() == 1
    # What the host computes in float64, where a product in float32 would round to another number.
    assert kernels.shares(torch.ones(9).bool().to(device), (9, 0), 0.1, 0.0).tolist() == [0, 0]
    half = (torch.arange(60) < 30).to(device)
    assert kernels.shares(half, (60,), 0.1, ROUNDING_SLACK).tolist() == [3]
    assert kernels.shares(half, (60,), 5e-324, ROUNDING_SLACK).tolist() == [1]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton comes with torch for GPUs")
def test_the_kernels_evolve_as_the_cpu_does() -> None:
    if torch.cuda.is_available():
        check_kernels("cuda")
        return
    # Without a GPU Triton interprets them, which it must be told before anybody imports it.
    subprocess.run([sys.executable, __file__], env={**os.environ, "TRITON_INTERPRET": "1"}, check=True)


if __name__ == "__main__":
    check_kernels("cpu")
