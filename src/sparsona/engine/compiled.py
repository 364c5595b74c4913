"""Pure functions of tensors, traced once, compiled, and on a GPU captured, so that a call costs no Python.

Tracing (make_fx) records what a function does to tensors, whatever Python it is made of: methods stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Program = Callable[[Sequence[Tensor]], list[Tensor]]
FORCE_CHANNELS_LAST = True  # cuDNN would turn each convolution around


def compile_program(function: Callable[..., list[Tensor]], examples: Sequence[Tensor]) -> Program:
    """`function` of these tensors (and of any others of the same shapes), traced and compiled; on a CPU as it is."""
    if examples[0].device.type != "cuda":
        return lambda tensors: function(*tensors)
    from torch._inductor import compile as compile_graph
    from torch._inductor import config
    from torch.fx.experimental.proxy_tensor import make_fx

    from sparsona.engine.fused_norm import fuse_group_norms

    graph = fuse_group_norms(make_fx(function, tracing_mode="real")(*examples))
    with config.patch(force_layout_optimization=FORCE_CHANNELS_LAST):
        compiled: Any = compile_graph(graph, list(examples))
    return lambda tensors: list(compiled(*tensors))


class Captured:
    """A function without arguments that works on fixed tensors, replayed as one CUDA graph.

    The tensors it works on must stay alive as long as this does. Without a GPU it is simply called.
    """

    def __init__(self, function: Callable[[], None], device: torch.device) -> None:
        self._function, self._graph = function, None
        self.stream = None
        if device.type != "cuda":
            return
        self.stream = torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.stream):
            for _ in range(3):  # libraries choose their algorithms in the first calls
                function()
        torch.cuda.current_stream(device).wait_stream(self.stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self.stream):
            function()

    def replay(self) -> None:
        """Once more, on this graph's own stream."""
        if self._graph is None or self.stream is None:
            self._function()
            return
        with torch.cuda.stream(self.stream):
            self._graph.replay()

    def begin(self) -> None:
        """What was done so far on the caller's stream comes before what is replayed now."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def end(self) -> None:
        """What was replayed comes before what the caller does next."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
