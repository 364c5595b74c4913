"""How many entries of each tensor a mask keeps."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from sparsona.core.errors import SparsonaError
from sparsona.core.layout import Layout
from sparsona.sparsity.erk import erk_densities, kept_counts, uniform_densities


@lru_cache(maxsize=64)  # asked for every client, though few capacities differ
def mask_counts(layout: Layout, density: float, allocation: Literal["erk", "uniform"]) -> tuple[int, ...]:
    """One number per tensor. A density that keeps nothing is refused."""
    allocate = erk_densities if allocation == "erk" else uniform_densities
    counts = kept_counts(layout, allocate(layout, density))
    if not any(counts):
        raise SparsonaError(
            f"a density of {density:g} keeps no parameter at all", expected="more", mend="raise --density or capacities"
        )
    return counts
