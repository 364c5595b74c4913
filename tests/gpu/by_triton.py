"""How kernels are tested where there is no GPU, and where there is one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch.utils._pytree import tree_map

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


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
