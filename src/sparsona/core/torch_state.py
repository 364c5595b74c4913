"""What a program has set in torch for all of its code, and a run must not depend on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from sparsona.core.errors import SparsonaError


@contextmanager
def usual_torch() -> Iterator[None]:
    """Have torch's defaults inside: float32, gradients, the CPU, no autocast, oneDNN's kernels as it chooses them.

    A caller's settings would otherwise change results, or end a run in the middle. Worker processes have the defaults
    anyway. All is restored at the end. Not here: threads and the precision of a GPU, which executors set.

    Yields:
        Nothing. SparsonaError: the call is inside `with torch.device(...)`, which cannot be left.
    """
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    precision = torch.get_float32_matmul_precision()
    with ExitStack() as stack:
        if device.type != "cpu":
            torch.set_default_device(None)
            stack.callback(torch.set_default_device, device)
            if torch.get_default_device().type != "cpu":
                raise SparsonaError(
                    f"a call inside `with torch.device('{device}')`",
                    expected="the default device, the CPU, from which a run moves what it trains",
                    hint="call it outside; device='cuda' is the option of a run",
                )
        if dtype != torch.float32:
            torch.set_default_dtype(torch.float32)
            stack.callback(torch.set_default_dtype, dtype)
        if precision != "highest":
            torch.set_float32_matmul_precision("highest")
            stack.callback(torch.set_float32_matmul_precision, precision)
        mkldnn = torch.backends.mkldnn
        for name, usual in (("enabled", True), ("deterministic", False)):
            if (before := getattr(mkldnn, name)) is not usual:
                setattr(mkldnn, name, usual)
                stack.callback(setattr, mkldnn, name, before)
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        yield


def numeric_settings() -> dict[str, Any]:
    """The settings of torch on which the last bits of results depend, for the record of a run.

    Returns:
        Names and plain values.
    """
    return {
        "mkldnn": bool(torch.backends.mkldnn.enabled),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "flushes_denormals": _flushes_denormals(),
    }


def _flushes_denormals() -> bool:
    return not bool(torch.tensor(1e-310, dtype=torch.float64) * 1.0 != 0)
