"""The smallest or largest magnitudes of every tensor of a flat buffer, exactly as a stable sort would pick them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sparsona.core.kernels import have_triton

if TYPE_CHECKING:
    from types import ModuleType

    import torch
    from torch import Tensor


def select(
    values: Tensor, among: Tensor, sizes: tuple[int, ...], numbers: tuple[int, ...], largest: bool = False
) -> Tensor:
    """Flags of the numbers[l] entries of smallest |value| of each tensor l where `among` is true; ties to the first.

    With `largest`, of largest |value|; ties go to the first as well. `sizes` are those of the tensors in the buffer. No
    number may exceed the entries among which to choose, and no value may be NaN.
    """
    import torch

    kernels = kernels_for(values)
    if kernels is not None:
        wanted = torch.tensor(numbers, dtype=torch.int32).to(values.device)
        chosen: Tensor = kernels.choose(values, among, sizes, wanted, largest=largest)
        return chosen
    flags = torch.zeros_like(among)
    pick = _by_threshold if values.device.type == "cpu" else _by_sorting
    end = 0
    for size, number in zip(sizes, numbers, strict=True):
        start, end = end, end + size
        if number:
            magnitudes = values[start:end].detach().abs()
            flags[start:end] = pick(magnitudes.neg_() if largest else magnitudes, among[start:end], number)
    return flags


def kernels_for(*values: Tensor) -> ModuleType | None:
    """The kernels that select on these tensors' GPU, or None: no GPU, no triton, or an unsupported type or size."""
    import torch

    narrow = (torch.float32, torch.bfloat16, torch.float16)
    if not all(value.is_cuda and value.dtype in narrow for value in values) or not have_triton():
        return None
    from sparsona.sparsity import selection_kernels

    return selection_kernels if all(value.numel() <= selection_kernels.MOST_ENTRIES for value in values) else None


def build_kernels(sizes: tuple[int, ...], device: torch.device) -> None:
    """Build the kernels that evolve masks of these sizes, by evolving one: the first search then need not wait."""
    import torch

    values = torch.zeros(sum(sizes), device=device)
    kernels = kernels_for(values)
    if kernels is not None:
        kernels.evolve(values, values == 0, values, sizes, 0.5, 0.0)


def _by_sorting(values: Tensor, among: Tensor, number: int) -> Tensor:
    """A GPU sorts faster than it selects, and sorting needs no synchronisation."""
    import torch

    order = values.argsort(stable=True)
    taking = among[order]
    return torch.zeros_like(among).scatter_(0, order, taking & (taking.cumsum(0) <= number))


def _by_threshold(values: Tensor, among: Tensor, number: int) -> Tensor:
    """Finding the threshold and then counting off its ties is several times faster on a CPU than a sort."""
    import torch

    if values.dtype not in (torch.float32, torch.float64):
        values = values.float()  # NumPy has no bfloat16; order and ties stay
    at_most_zero = among & (values <= 0)
    below_zero = at_most_zero & (values < 0)
    if int(below_zero.count_nonzero()) < number <= int(at_most_zero.count_nonzero()):
        # Gradients and weights are often zero by the thousand, and a partition is slow inside so many ties.
        threshold = 0.0
    else:
        # Entries that do not take part are infinity: it cannot lower the threshold, and ties are taken from `among`.
        ordered = values.where(among, math.inf).numpy()
        ordered.partition(number - 1)
        threshold = float(ordered[number - 1])
    chosen = among & (values < threshold)
    ties = (among & (values == threshold)).nonzero().squeeze(1)
    chosen[ties[: number - int(chosen.count_nonzero())]] = True
    return chosen
