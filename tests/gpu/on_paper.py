"""Steps as a GPU would have them, traced where there is none, and their kernels compiled for it.

    python on_paper.py STUB [compile]

STUB is cuda_stub.cpp, built: it must be loaded before torch is, so this is a process of its own. Tensors have shapes
and layouts but no data. Writes a line of JSON for each phase of each case. With `compile`, which needs Triton, each
kernel is built for an H100 or H200, down to machine code. Nothing is run, so results of kernels are not seen.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

CASES: tuple[tuple[str, str, Mapping[str, Any], bool], ...] = (  # method, network, options, bf16
    ("fedspa", "vgg11", {}, True),
    ("fedspa", "resnet18", {"momentum": 0.9}, False),
    ("fedalt", "resnet18", {}, True),
)
BATCH, IMAGE = 128, (3, 32, 32)


def main(stub: str, compiles: bool) -> None:
    ctypes.CDLL(stub, ctypes.RTLD_GLOBAL)
    import torch

    # Asked of the driver before an autocast to bf16 may begin.
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    sizes = None
    if compiles:
        from by_triton import build_for

        sizes = build_for(90)
    for case in CASES:
        for phase, graph in traces(*case):
            found, ours = facts(graph)
            for node in ours if compiles else ():
                call(node)
            print(json.dumps({"case": f"{case} {phase}", **found, "kernels": sizes}), flush=True)


def traces(method: str, model: str, options: Mapping[str, Any], half: bool) -> Iterator[tuple[str, Any]]:
    """Each phase's step on a GPU, after the passes that come before the choice of a compiler."""
    import numpy as np
    import torch
    from test_programs import first_job
    from torch._subclasses.fake_tensor import FakeTensorMode

    import sparsona as sp
    from sparsona.engine.turn import begin
    from sparsona.experiment import build
    from sparsona.gpu.fused_norm import fuse_group_norms
    from sparsona.gpu.lanes import Lane, Programs
    from sparsona.gpu.pad_channels import pad_few_channels
    from sparsona.gpu.programs import trace

    x, y = np.zeros((3 * BATCH, *IMAGE), dtype=np.uint8), np.arange(3 * BATCH) % 10
    view = sp.View((0.5,) * 3, (0.25,) * 3, pad=4, flip=True)
    federation = sp.federate(x, y, clients=2, partition="iid", view=view, num_train=2 * BATCH, validation_rate=0.0)
    given = {"batch_size": BATCH, "device": "cpu", "per_round": 2, **options}
    context = build.make_context(build.make_config(method, given, federation, model), federation, model)
    context.task.channels_last = context.task.takes_channels_last  # as the executor for a GPU has it
    context.task.half = torch.bfloat16 if half else None
    turn = begin(context, first_job(context))
    for phase in context.method.phases:
        lane = Lane(context, phase, turn.work, Programs(), None)
        with FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=True):
            given_there = [
                torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="cuda") for one in lane._inputs()
            ]
            yield phase.name, pad_few_channels(fuse_group_norms(trace(lane._take, given_there)))


def facts(graph: Any) -> tuple[dict[str, Any], list[Any]]:
    """Whether our kernels cover a step, and how many of its operations are ours; and these operations."""
    from sparsona.gpu.step_graph import _is_ours, fuse_step, is_covered

    covered = is_covered(graph)
    ours = [node for node in fuse_step(graph).graph.nodes if _is_ours(node.target)]
    return {"covered": covered, "ours": len(ours)}, ours


def call(node: Any) -> None:
    """Call an operation of ours as on a GPU, on memory with nothing in it."""
    import torch
    from by_triton import BY_TRITON

    from sparsona.gpu.flat_fusion import load_kernel
    from sparsona.gpu.weight_ops import LAY_OUT

    def empty(one: Any) -> torch.Tensor:
        value = one.meta["val"]
        found = torch.zeros(value.shape, dtype=value.dtype)
        is_image = value.dim() == 4 and node.target is not LAY_OUT
        return found.contiguous(memory_format=torch.channels_last) if is_image else found

    if hasattr(node.target, "source"):
        node.target.kernel.append(load_kernel(node.target.source))
    BY_TRITON.get(node.target, node.target)(*torch.fx.map_arg(node.args, empty))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] == ["compile"])
