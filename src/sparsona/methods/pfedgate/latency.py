"""Measured latency as a budget: layers are timed once, into a file that runs read, so that results are reproducible."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from sparsona.core.errors import SparsonaError
from sparsona.core.layout import Layout
from sparsona.core.reading import parse_json, read_text
from sparsona.methods.pfedgate.blocks import Blocks

if TYPE_CHECKING:
    from torch import Tensor

    from sparsona.core.task import Task

NANOSECONDS = 1_000_000  # in a millisecond
MOST = 1_000_000_000  # milliseconds of a layer: eleven days


def measure_latency(task: Task, inputs: Tensor, repeats: int = 20) -> dict[str, float]:
    """Milliseconds that each tensor's layer takes in a forward pass over `inputs`, on their device: medians.

    A layer's time is shared among its tensors by their FLOPs, or by their sizes where these are not known.
    """
    import torch

    from sparsona.core.task import with_channels_last

    params, buffers = task.init(0)
    module = task.module(params, buffers).to(inputs.device)
    if task.takes_channels_last and inputs.device.type == "cpu":  # as a run has them
        module, inputs = module.to(memory_format=torch.channels_last), with_channels_last(inputs)  # type: ignore[call-overload]
    names = {id(value): name for name, value in module.named_parameters()}
    layers = [
        (layer, own)
        for layer in module.modules()
        if (
            own := [
                name for value in layer.parameters(recurse=False) if (name := names[id(value)]) in task.layout.place
            ]
        )
    ]
    passes: list[list[float]] = []

    def now() -> float:
        if inputs.is_cuda:
            torch.cuda.synchronize(inputs.device)
        return time.perf_counter()

    def watch(place: int, layer: Any) -> None:
        def begin(*_: Any) -> None:
            passes[-1][place] -= now()

        def end(*_: Any) -> None:
            passes[-1][place] += now()

        layer.register_forward_pre_hook(begin)
        layer.register_forward_hook(end)

    for place, (layer, _) in enumerate(layers):
        watch(place, layer)
    with torch.no_grad():
        for _ in range(repeats + 3):  # the first ones warm up
            passes.append([0.0] * len(layers))
            module(inputs)
    found = dict.fromkeys(task.layout.names, 0.0)
    slots = {slot.name: slot for slot in task.layout.slots}
    for (_, own), times in zip(layers, zip(*passes[3:], strict=True), strict=True):
        shares = [slots[name].size * slots[name].flops_per_weight for name in own]
        if not sum(shares):
            shares = [slots[name].size for name in own]
        for name, share in zip(own, shares, strict=True):
            found[name] += 1e3 * median(times) * share / sum(shares)
    return found


def read_latency(path: Path | str, layout: Layout) -> dict[str, float]:
    """Milliseconds for each tensor of a layout, from a file of `sparsona latency`: {"0.weight": 1.5, ...}."""
    try:
        read = parse_json(read_text(path))
        found = {name: float(read[name]) for name in layout.names}
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise SparsonaError(
            f"no latencies of this model in '{path}' ({type(error).__name__}: {error})",
            expected="a number of milliseconds for each of its tensors",
            hint="`sparsona latency --model NAME --out FILE` measures them",
        ) from None
    if bad := [name for name, value in found.items() if not 0 <= value <= MOST]:
        raise SparsonaError(
            f"{found[bad[0]]} ms for '{bad[0]}' in '{path}'",
            expected=f"a number from 0 to {MOST:,}",
            hint="`sparsona latency --model NAME --out FILE` measures them",
        )
    return found


def block_latencies(blocks: Blocks, milliseconds: Mapping[str, float]) -> tuple[int, ...]:
    """What each block takes, in whole nanoseconds, which a knapsack counts exactly: its share of each tensor's time."""
    found = [0.0] * len(blocks)
    for slot, strip in zip(blocks.layout.slots, blocks.strips, strict=True):
        for block, length in enumerate(strip.lengths, start=strip.first):
            found[block] += milliseconds[slot.name] * NANOSECONDS * strip.repeats * length / slot.size
    return tuple(math.ceil(value) for value in found)
