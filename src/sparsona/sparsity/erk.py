"""How many entries of each tensor are kept. Free of torch, so that costs need none."""

from __future__ import annotations

import math

from sparsona.core.errors import SparsonaError
from sparsona.core.layout import Layout, Slot

# Relative slack before a floor or a ceil. A density or rate stands for a number that binary floats only approximate
# (0.29 * 100 is 28.999999999999996), so a product this close to an integer is that integer. It is wide enough for the
# rounding of the sums in `erk_densities`, and narrow enough that a density written with six decimals gets its exact
# floor on tensors of up to ten million entries (one with three decimals: up to ten thousand million).
ROUNDING_SLACK = 1e-13


def erk_densities(layout: Layout, density: float, power: float = 1.0) -> tuple[float, ...]:
    """Erdos-Renyi-kernel density of each tensor, in the layout's order, such that `density` of all entries are kept.

    A tensor's density is proportional to (sum of its dimensions / product of its dimensions) ** power, and at most 1;
    what a dense tensor cannot take goes to the others. Every tensor of the layout takes part: to leave biases or norms
    out, select a layout without them. Power 0 is `uniform_densities`. A 0-dim tensor counts as one of shape (1,).
    """
    _check_density(density)
    if not 0 <= power < math.inf:
        raise SparsonaError(
            f"an ERK power of {power}", expected="a number that is at least 0", hint="use 1, as ERK does"
        )
    if density == 1:
        return (1.0,) * len(layout.slots)  # not the 0.9999999999999999 that rounding may make of it
    raw = [_raw(slot) for slot in layout.slots]
    sizes = layout.sizes
    result = [1.0] * len(sizes)  # what nothing below changes is dense
    sparse = [position for position, size in enumerate(sizes) if size > 0]
    while sparse:
        # As published: eps = rhs / sum(raw * size), and what has the largest raw is dense if eps * raw > 1. Here raw is
        # taken relative to that largest, so that no power underflows; and rhs = d * (all entries) - (dense entries),
        # which rounds once and not once per tensor.
        top = max(raw[position] for position in sparse)
        relative = {position: (raw[position] / top) ** power for position in sparse}
        rhs = density * layout.size - (layout.size - sum(sizes[position] for position in sparse))
        share = rhs / math.fsum(relative[position] * sizes[position] for position in sparse)
        if share <= 1:
            for position in sparse:
                result[position] = share * relative[position]
            break
        sparse = [position for position in sparse if relative[position] < 1]
    return tuple(result)


def uniform_densities(layout: Layout, density: float) -> tuple[float, ...]:
    """The same density for every tensor, biases and norms included."""
    _check_density(density)
    return (float(density),) * len(layout.slots)


def kept_counts(layout: Layout, densities: tuple[float, ...]) -> tuple[int, ...]:
    """Number of entries kept of each tensor: floor(density * size), where 0.29 of 100 is 29."""
    if len(densities) != len(layout.slots):
        raise SparsonaError(
            f"{len(densities)} densities for {len(layout.slots)} tensors",
            expected="one density for each tensor of the layout",
            hint="compute them from the same layout",
        )
    for slot, density in zip(layout.slots, densities, strict=True):
        if not 0 <= density <= 1:
            raise SparsonaError(f"a density of {density} for tensor '{slot.name}'", expected="a number from 0 to 1")
    return tuple(
        min(size, math.floor(density * size * (1 + ROUNDING_SLACK)))
        for size, density in zip(layout.sizes, densities, strict=True)
    )


def _raw(slot: Slot) -> float:
    # A scalar has no dimension to sum: as shape (1,) it gets 1, like any bias, and not 0, which would switch it off.
    shape = slot.shape or (1,)
    return sum(shape) / max(1, math.prod(shape))


def _check_density(density: float) -> None:
    if not 0 < density <= 1:
        raise SparsonaError(
            f"a density of {density}",
            expected="a number above 0 and at most 1",
            hint="0.5 keeps half of all entries, 1 keeps all of them",
        )
