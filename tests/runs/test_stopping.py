"""When a run stops early: each limit by itself, the first that is reached, and that a resumed run goes on."""

from __future__ import annotations

import pytest

import sparsona as sp
from sparsona.runs.stopping import MEASURES, Spent, Stopping, reached


def test_every_limit_is_measured():
    assert set(MEASURES) == set(Stopping.model_fields) - {"patience", "min_delta", "patience_metric"}


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        ({}, None),
        ({"max_seconds": 2.5}, None),
        ({"max_seconds": 2}, "max_seconds"),
        ({"max_bytes": 101}, None),
        ({"max_bytes": 100}, "max_bytes"),
        ({"max_seconds": 3, "max_bytes": 99}, "max_bytes"),
        ({"max_steps": 8}, None),
        ({"max_steps": 7}, "max_steps"),
        ({"max_flops": 1001}, None),
        ({"max_flops": 1e3}, "max_flops"),
    ],
)
def test_limits(limits, name):
    assert reached(Stopping(**limits), Spent(seconds=2.0, bytes=100, steps=7, flops=1000)) == name


def test_a_run_stops_when_so_many_bytes_are_sent_and_goes_on_when_resumed(say, tmp_path):
    options = {"clients": 4, "rounds": 4, "epochs": 1, "data_rate": 0.1, "executor": "serial", "device": "cpu"}
    whole = sp.train("fedavg", out=tmp_path / "whole", **options)
    a_round = whole.summary["bytes"]["total"] // 4
    args = [word for key, value in options.items() for word in ("--set", f"{key}={value}")]
    said = say("run", "fedavg", *args, "--out", "run", "--set", f"max_bytes={a_round - 1}", "--json")
    assert said.code == 0
    assert "stopped by max_bytes after round 1 of 4; `sparsona resume` continues it, with the same limit" in said.err
    said = say("resume", "run", "--json")
    assert "stopped by max_bytes after round 2 of 4" in said.err
    config = tmp_path / "run" / "config.json"
    assert "to lift it, write \"max_bytes\": null into 'run/config.json'" in said.err
    config.write_text(config.read_text().replace(f'"max_bytes": {a_round - 1}', '"max_bytes": null'))
    assert "stopped" not in say("resume", "run", "--json").err
    assert sp.load(tmp_path / "run").summary["accuracy"] == whole.summary["accuracy"]
