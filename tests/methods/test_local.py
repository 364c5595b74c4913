"""Local: each client alone."""

from __future__ import annotations

from lenet5 import SIZE

import sparsona as sp

BATTERY = {"local": {"accuracy": 0.35}}
MEMORY = [("local", {}, SIZE, SIZE, 2 * SIZE, 0)]


def test_nothing_travels(tmp_path):
    options = {"clients": 4, "rounds": 2, "epochs": 1, "data_rate": 0.3, "executor": "serial"}
    run = sp.train("local", out=tmp_path / "run", **options)
    assert not any(run.summary["bytes"].values())
