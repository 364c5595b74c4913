"""The tables of docs/results/robustness.md: what attackers cost is counted on the same clients."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MEANS = ("mean", "median", "trimmed:0.2", "norm-bound", "krum:0.2", "multi-krum:0.2", "geometric-median")
OPTIONS = ("", ",factor=5", ",factor=10", ",factor=10", ",value=1", ",z=1.5")
NAMES = ("label-flip", "sign-flip", "scaled", "random", "same-value", "little")


def test_points_are_those_of_the_same_clients(tmp_path: Path) -> None:
    attacks = ["", *(f"{name}:{rate}{more}" for name, more in zip(NAMES, OPTIONS, strict=True) for rate in (0.1, 0.2))]
    rows = []
    for attack in attacks:
        for mean in MEANS:
            honest = 0.9 if not attack else 0.85 if mean == "median" else 0.8
            found = {"method": "fedavg", "attack": attack, "mean": mean, "seed": 0, "rounds": 2, "protocol": ""}
            rows.append(found | {"accuracies": [honest, None if attack else 0.5]})
            if attack.startswith("same-value"):
                rows[-1]["protocol"] = "2 of 4 turns diverged and were left out"
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    words = [sys.executable, str(ROOT / "benchmarks" / "robustness.py"), "table", str(path)]
    page = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    # Without attackers the mean is over both clients; the attacker is not among those that lose 10 points.
    assert "| none | **70.0 (0.0)** |" in page
    assert "| scaled:0.2,factor=10 | 80.0 (10.0) | **85.0 (5.0)** |" in page
    assert "| fedavg | scaled | median | 5.0 | **no** |" in page
    assert "| fedavg | same-value | median | 5.0 | not counted: the divergence filter left out every lie |" in page
    assert "The goal holds in 0 of 5 cases." in page
