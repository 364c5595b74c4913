"""How kernels are tested where there is no GPU, and where there is one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch.utils._pytree import tree_map

from sparsona.gpu import norm_ops, pool_ops, weight_ops

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
# Our operations, and what runs on a GPU for them.
BY_TRITON = {
    weight_ops.LAY_OUT: weight_ops.lay_out_by_triton,
    weight_ops.COLLECT: weight_ops.collect_by_triton,
    pool_ops.POOL: pool_ops.pool_by_triton,
    pool_ops.POOL_BACKWARD: pool_ops.backward_by_triton,
    norm_ops.FORWARD: norm_ops.forward_by_triton,
    norm_ops.BACKWARD: norm_ops.backward_by_triton,
}


def check_in_interpreter(module):
    """Call a test module's `check_kernels` in a process of its own: Triton asks for its interpreter when imported."""
    if torch.cuda.is_available():
        pytest.skip("the kernels are meant for the GPU there: see test_kernels_on_a_gpu")
    command = [sys.executable, "-c", f"import {module}; {module}.check_kernels()"]
    where = {"cwd": os.path.dirname(__file__), "env": {**os.environ, "TRITON_INTERPRET": "1"}}
    done = subprocess.run(command, **where, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def on_gpu(operation):
    """The operation on a GPU, for tensors that are here."""

    def move(values, device):
        return tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, values)

    return lambda *args: move(operation(*move(args, "cuda")), "cpu")


def build_for(capability):
    """From here on calls of kernels build them for such a GPU and run nothing; the bytes of code of each, as they come.

    It stays so: for a process of its own.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class NoDriver:
        """What Triton asks about the GPU when it compiles."""

        def get_current_target(self):
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, _device):
            return 0

    sizes = {}

    def build(kernel, grid):
        def call(*args, **options):
            built = kernel.run(*args, grid=grid, warmup=True, **options)
            sizes[f"{kernel.__name__} {built.hash}"] = len(built.asm["cubin"])

        return call

    driver.set_active(NoDriver())
    JITFunction.__getitem__ = build
    return sizes
