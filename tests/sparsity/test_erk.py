"""Densities and counts: properties that must hold for any layout, and floors that floats must not spoil."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from math import floor, nan

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparsona.core.errors import SparsonaError
from sparsona.core.layout import Layout, Slot
from sparsona.sparsity.erk import erk_densities, kept_counts, uniform_densities


def layout_of(*shapes: tuple[int, ...]) -> Layout:
    return Layout(tuple(Slot(f"t{position}", shape) for position, shape in enumerate(shapes)))


shapes = st.lists(st.integers(1, 40), max_size=4).map(tuple)
layouts = st.lists(shapes, min_size=1, max_size=8).map(lambda many: layout_of(*many))
fractions = st.floats(0.001, 1.0)


@settings(deadline=None)
@given(layouts, fractions)
def test_kept_entries_add_up_to_the_budget(layout: Layout, density: float) -> None:
    kept = sum(kept_counts(layout, erk_densities(layout, density)))
    budget = density * layout.size
    assert budget - len(layout.slots) < kept + 1e-9
    assert kept <= budget + 1e-9


@settings(deadline=None)
@given(layouts, fractions)
def test_densities_are_between_zero_and_one(layout: Layout, density: float) -> None:
    assert all(0 < value <= 1 for value in erk_densities(layout, density))


@settings(deadline=None)
@given(layouts, fractions, fractions)
def test_more_density_keeps_no_less_anywhere(layout: Layout, one: float, other: float) -> None:
    low, high = sorted((one, other))
    pairs = zip(erk_densities(layout, low), erk_densities(layout, high), strict=True)
    assert all(a <= b * (1 + 1e-12) for a, b in pairs)
    counts = zip(
        kept_counts(layout, erk_densities(layout, low)), kept_counts(layout, erk_densities(layout, high)), strict=True
    )
    assert all(a <= b for a, b in counts)


@settings(deadline=None)
@given(layouts)
@example(layout_of((), (1, 1)))
def test_density_one_keeps_everything(layout: Layout) -> None:
    assert erk_densities(layout, 1.0) == (1.0,) * len(layout.slots)
    assert kept_counts(layout, uniform_densities(layout, 1)) == layout.sizes


@settings(deadline=None)
@given(st.integers(1, 10**6), st.integers(1, 10**7))
def test_a_density_of_six_decimals_gets_its_exact_floor(millionths: int, size: int) -> None:
    assert kept_counts(layout_of((size,)), (millionths / 10**6,)) == (floor(Fraction(millionths, 10**6) * size),)


@pytest.mark.parametrize(
    ("density", "size", "kept"),
    [(0.3, 10, 3), (0.29, 100, 29), (0.57, 100, 57), (2 / 3, 3, 2), (0.999999, 10, 9), (0.5, 1, 0), (0.0, 7, 0)],
)
def test_floors_are_those_of_the_number_meant(density: float, size: int, kept: int) -> None:
    assert kept_counts(layout_of((size,)), (density,)) == (kept,)


def test_a_scalar_is_a_bias_of_one_entry() -> None:
    scalar, vector = layout_of((), (9, 9)), layout_of((1,), (9, 9))
    assert erk_densities(scalar, 0.5) == erk_densities(vector, 0.5)
    assert kept_counts(scalar, erk_densities(scalar, 0.5))[0] == 1
    assert erk_densities(layout_of(()), 0.5) == (0.5,)


def test_degenerate_layouts_have_densities() -> None:
    assert erk_densities(Layout(()), 0.5) == uniform_densities(Layout(()), 0.5) == kept_counts(Layout(()), ()) == ()
    assert kept_counts(layout_of((0, 5), (4, 4)), erk_densities(layout_of((0, 5), (4, 4)), 0.5)) == (0, 8)


@pytest.mark.parametrize("density", [0, -0.1, 1.0001, nan])
def test_a_density_that_is_none_is_refused(density: float) -> None:
    for densities in (erk_densities, uniform_densities):
        with pytest.raises(SparsonaError, match="above 0 and at most 1"):
            densities(layout_of((2, 2)), density)


def test_counts_that_make_no_sense_are_refused() -> None:
    with pytest.raises(SparsonaError, match="1 densities for 2 tensors"):
        kept_counts(layout_of((2,), (2,)), (0.5,))
    with pytest.raises(SparsonaError, match="tensor 't0'"):
        kept_counts(layout_of((2,)), (1.5,))


def test_the_room_imports_without_torch() -> None:
    code = (
        "import sys, sparsona.sparsity.erk, sparsona.sparsity.masks, sparsona.sparsity.evolve;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
