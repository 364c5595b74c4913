"""How long runs may take: by long runs of the network, else by a product of matrices on a CPU."""

from __future__ import annotations

import json
import os

import pytest

from sparsona.reproduce import listing
from sparsona.reproduce.listing import Speeds
from sparsona.reproduce.recipe import Recipe
from sparsona.reproduce.table import row_cost
from sparsona.runs.folder import processor

OWN = Recipe(
    title="x", where="table 9", options={"data": "cifar10", "model": "vgg11"}, rows={"m": {"method": "fedavg"}}
)


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    monkeypatch.setattr(listing, "has_gpu", lambda: False)
    monkeypatch.setattr(listing, "seconds_of_a_flop", lambda: 1e-11)


def write(folder, seconds, flops, model="vgg11", device="cpu"):
    folder.mkdir(parents=True)
    found = {
        "summary.json": {"flops": {"train": flops, "mask_search": 0}, "seconds": seconds},
        "config.json": {"device": device, "model": model},
        "environment.json": {"processor": processor(), "cores": os.cpu_count()},
    }
    for name, content in found.items():
        (folder / name).write_text(json.dumps(content))


def test_short_runs_do_not_tell(tmp_path):
    flops = row_cost(OWN, "m", {})["total"]["flops"]
    write(tmp_path / "short", 1.0, 1e6)
    write(tmp_path / "other", 100.0, 1e6, model="lenet5")
    speeds = Speeds.measured(tmp_path)
    assert speeds.estimate(OWN, "m") == pytest.approx(flops * 2e-11)  # half the speed of a product
    write(tmp_path / "long", 40.0, 4e11)
    write(tmp_path / "slow", 40.0, 1e11)
    assert Speeds.measured(tmp_path).estimate(OWN, "m") == pytest.approx(flops * 1e-10)


def test_nothing_is_known_of_a_gpu_without_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(listing, "has_gpu", lambda: True)
    write(tmp_path / "cpu", 40.0, 4e11)
    assert Speeds.measured(tmp_path).estimate(OWN, "m") is None
    assert Speeds.measured(tmp_path).estimate(OWN, "m", {"device": "cpu"}) is not None
    write(tmp_path / "gpu", 40.0, 4e13, device="cuda")
    assert Speeds.measured(tmp_path).estimate(OWN, "m") is not None


def test_a_product_of_matrices_is_measured(monkeypatch):
    monkeypatch.undo()
    assert 1e-14 < listing.seconds_of_a_flop() < 1e-7
