"""What a GPU would be given, seen without one: whether steps need torch's compiler, and whether kernels build."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from by_triton import needs_triton

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(torch.version.cuda is not None, reason="the stub is for a torch without CUDA"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="the stub has to be compiled: no g++"),
]


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    built = tmp_path_factory.mktemp("stub") / "cuda_stub.so"
    include, lib = (Path(torch.__file__).parent / name for name in ("include", "lib"))
    options = ["-std=c++20", "-fPIC", "-shared", f"-I{include}", f"-L{lib}", f"-Wl,-rpath,{lib}"]
    subprocess.run(["g++", *options, HERE / "cuda_stub.cpp", "-lc10", "-ltorch_cpu", "-o", built], check=True)
    return built


def on_paper(stub, *more, **variables):
    command = [sys.executable, "on_paper.py", stub, *more]
    path = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_large_networks_start_without_the_compiler(stub):
    """Its import and look-up take longer than a start may: all phases of these are covered by our kernels."""
    found = on_paper(stub)
    assert len(found) == 4  # FedAlt has two phases
    for step in found:
        assert step["covered"], step["case"]
        assert step["ours"] > 20, step["case"]


@needs_triton
def test_kernels_are_built_for_a_gpu(stub, tmp_path):
    sizes = on_paper(stub, "compile", TRITON_CACHE_DIR=str(tmp_path))[-1]["kernels"]
    assert {"_forward", "_backward", "_turn", "_sum_samples", "fused"} <= {name.split()[0] for name in sizes}
    assert min(sizes.values()) > 0
