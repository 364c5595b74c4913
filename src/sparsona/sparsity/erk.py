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


def erk_densities(layout: Layout, density: float) -> tuple[float, ...]:
    """Erdos-Renyi-kernel density of each tensor, such that `density` of all entries are kept.

    A tensor's density is proportional to (sum of its dimensions / product of its dimensions), and at most 1; the excess
    of a dense tensor goes to the others. Every tensor of the layout takes part: to leave biases or norms out, select a
    layout without them. A 0-dim tensor counts as one of shape (1,).

    Args:
        layout: names and shapes of the tensors.
        density: the share of all entries to keep.

    Returns:
        One density for each tensor, in the layout's order.

    Example:
        >>> erk_densities(Layout((Slot("weight", (10, 10)), Slot("bias", (10,)))), 0.5)
        (0.45, 1.0)
    """
    _check_density(density)
    if density == 1:
        return (1.0,) * len(layout.slots)  # not the 0.9999999999999999 that rounding may make of it
    raw = [_raw(slot) for slot in layout.slots]
    sizes = layout.sizes
    result = [1.0] * len(sizes)  # dense, unless changed below
    sparse = [position for position, size in enumerate(sizes) if size > 0]
    while sparse:
        # As published: eps = rhs / sum(raw * size), and the tensor of the largest raw is dense if eps * raw > 1. Here
        # raw is relative to the largest; and rhs = d * (all entries) - (dense entries), which rounds once and not once
        # per tensor.
        top = max(raw[position] for position in sparse)
        relative = {position: raw[position] / top for position in sparse}
        rhs = density * layout.size - (layout.size - sum(sizes[position] for position in sparse))
        share = rhs / math.fsum(relative[position] * sizes[position] for position in sparse)
        if share <= 1:
            for position in sparse:
                result[position] = share * relative[position]
            break
        sparse = [position for position in sparse if relative[position] < 1]
    return tuple(result)


def uniform_densities(layout: Layout, density: float) -> tuple[float, ...]:
    """The same density for every tensor, biases and norms included.

    Args:
        layout: names and shapes of the tensors.
        density: the share of all entries to keep.

    Returns:
        One density for each tensor.
    """
    _check_density(density)
    return (float(density),) * len(layout.slots)


def kept_counts(layout: Layout, densities: tuple[float, ...]) -> tuple[int, ...]:
    """The number of entries kept of each tensor: floor(density * size), where 0.29 of 100 is 29.

    Args:
        layout: names and shapes of the tensors.
        densities: one density for each tensor.

    Returns:
        One count for each tensor.

    Example:
        >>> kept_counts(Layout((Slot("weight", (10, 10)),)), (0.29,))
        (29,)
    """
    if len(densities) != len(layout.slots):
        raise SparsonaError(
            f"{len(densities)} densities for {len(layout.slots)} tensors",
            expected="one density for each tensor of the layout",
            hint="compute them from the same layout",
        )
    for slot, density in zip(layout.slots, densities, strict=True):
        if not 0 <= density <= 1:
            raise SparsonaError(f"a density of {density} for tensor '{slot.name}'", expected="a number from 0 to 1")
    return tuple(kept_count(size, density) for size, density in zip(layout.sizes, densities, strict=True))


def kept_count(size: int, density: float) -> int:
    """The number of entries kept of so many: floor(density * size), where 0.29 of 100 is 29.

    Args:
        size: the number of entries.
        density: the share to keep.

    Returns:
        The count.

    Example:
        >>> kept_count(100, 0.29)
        29
    """
    return min(size, math.floor(density * size * (1 + ROUNDING_SLACK)))


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
