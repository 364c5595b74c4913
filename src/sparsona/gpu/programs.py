"""Pure functions of tensors, traced once, compiled, and on a GPU captured, so that a call runs no Python.

Tracing (make_fx) records what a function does to tensors, whatever its Python code: methods need no changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsona.core.kernels import have_triton

if TYPE_CHECKING:
    from torch.fx import GraphModule

Program = Callable[[Sequence[Tensor]], list[Tensor]]
_underway: list[Thread] = []  # what runs in the background


def compile_program(
    function: Callable[..., list[Tensor]],
    examples: Sequence[Tensor],
    decompositions: Mapping[Any, Any] | None = None,
    compiles: bool = True,
) -> Program:
    """`function` of these tensors (and of any others of the same shapes), traced and compiled; unchanged on a CPU.

    Kernels of our own cover what networks of convolutions and norms do, as fast as torch's compiler and without its
    start, which takes longer than many a run. It is used for what they leave, and, without `compiles`, for nothing.
    """
    if examples[0].device.type != "cuda":
        return lambda tensors: function(*tensors)
    from sparsona.gpu.fused_norm import fuse_group_norms
    from sparsona.gpu.pad_channels import pad_few_channels
    from sparsona.gpu.step_graph import build_kernels, fuse_step, is_covered

    traced = trace(function, examples, decompositions)
    if not have_triton():  # kernels cannot be built: the traced function is captured unchanged
        return lambda tensors: list(traced(*tensors))
    graph = pad_few_channels(fuse_group_norms(traced))
    if not compiles or is_covered(graph):
        step = fuse_step(graph)
        build_kernels(step, examples[0].device)
        return lambda tensors: list(step(*tensors))
    # Kernels of our own are built, and libraries loaded, while the compiler works: copies, since steps write in place.
    copies = [tensor.clone() for tensor in examples]
    in_background(lambda: graph(*copies), examples[0].device)
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile as compile_graph
    from torch._inductor import config
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # The next run finds compiled programs only if there is a shape environment, though all shapes are known here.
    known = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)
    # Channels last: otherwise cuDNN would convert the layout for each convolution.
    with config.patch(force_layout_optimization=True), tracing(TracingContext(known)):
        compiled: Any = compile_graph(graph, list(examples))
    return lambda tensors: list(compiled(*tensors))


def trace(
    function: Callable[..., list[Tensor]], examples: Sequence[Tensor], decompositions: Mapping[Any, Any] | None = None
) -> GraphModule:
    """The operations of `function` on these tensors, as a graph."""
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    # Shapes of results are noted in this mode. Without it torch makes one for each result: half of the time.
    with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
        return make_fx(function, decomposition_table=decompositions, tracing_mode="real")(*examples)


def in_background(function: Callable[[], object], device: torch.device) -> None:
    """Call a function beside the caller: something that the caller will do as well, and then need not wait for.

    It builds kernels, or imports modules. If it fails, so will the caller, who reports it.
    """

    def run() -> None:
        here = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        with contextlib.suppress(Exception), here:
            function()

    _underway.append(Thread(target=run, daemon=True))
    _underway[-1].start()


def join_background() -> None:
    """Wait for what runs in the background: nothing else may use the GPU while a graph is captured."""
    while _underway:
        _underway.pop().join()


class Captured:
    """A function without arguments on fixed tensors, replayed as one CUDA graph.

    Its tensors must stay alive as long as this object. Without a GPU it is called directly.
    """

    def __init__(self, function: Callable[[], None], device: torch.device) -> None:
        self._function, self._graph = function, None
        self.stream: Any = None
        if device.type != "cuda":
            return
        join_background()
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
        """Run the function once, on this graph's own stream."""
        if self._graph is None or self.stream is None:
            self._function()
            return
        with torch.cuda.stream(self.stream):
            self._graph.replay()

    def begin(self) -> None:
        """Make the next replays wait for the caller's stream."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def end(self) -> None:
        """Make the caller's stream wait for the replays."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
