"""What a program has set in torch for all of its code changes no run, and is there again afterwards."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

import sparsona as sp
from sparsona.core.torch_state import usual_torch

mkldnn = torch.backends.mkldnn
SETTINGS = {
    "float64": (torch.set_default_dtype, torch.float64, torch.float32, torch.get_default_dtype),
    "bfloat16": (torch.set_default_dtype, torch.bfloat16, torch.float32, torch.get_default_dtype),
    "no gradients": (torch.set_grad_enabled, False, True, torch.is_grad_enabled),
    "device": (torch.set_default_device, "meta", None, lambda: torch.get_default_device().type),
    "oneDNN": (lambda on: setattr(mkldnn, "enabled", on), False, True, lambda: mkldnn.enabled),
    "precision": (torch.set_float32_matmul_precision, "medium", "highest", torch.get_float32_matmul_precision),
}


def run_of(federation, path) -> tuple[list[float], dict]:
    run = sp.train(
        "fedavg", federation, lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), out=path,
        rounds=1, epochs=1, batch_size=8, executor="serial",
    )  # fmt: skip
    return [*run.accuracies(), *run.personal_model(0)[0].weight.flatten().tolist()], json.loads(
        (path / "environment.json").read_text()
    )


@pytest.fixture(scope="module")
def federation():
    x = np.random.default_rng(0).random((60, 4), dtype=np.float32)
    return sp.federate(x, np.arange(60) % 3, clients=3, partition="iid", min_size=2)


@pytest.fixture(scope="module")
def usual(federation, tmp_path_factory):
    return run_of(federation, tmp_path_factory.mktemp("usual") / "run")


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_change_nothing(federation, usual, tmp_path, name):
    change, value, before, now = SETTINGS[name]
    change(value)
    kept = now()
    try:
        assert run_of(federation, tmp_path / "run") == usual
        assert now() == kept
    finally:
        change(before)


def test_settings_of_a_with_block(federation, usual, tmp_path):
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert run_of(federation, tmp_path / "run") == usual
    with torch.device("meta"), pytest.raises(sp.SparsonaError, match="a call inside"), usual_torch():
        pass


def test_the_record_says_what_changes_bits(usual):
    found = usual[1]
    assert found["mkldnn"] is mkldnn.enabled
    assert found["matmul_precision"] == "highest"
    assert found["default_dtype"] == "float32"
    assert found["deterministic"] is False
