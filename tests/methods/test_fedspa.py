"""FedSpa: masks that move, or one that stays. Its arithmetic is in tests/golden."""

from __future__ import annotations

from lenet5 import HALF, MASK, SIZE, UNCLIPPED, UNIFORM

import sparsona as sp

BATTERY = {
    "fedspa": {"options": {"density": 0.6}, "accuracy": 0.35},
    "fedspa-rsm": {"options": {"density": 0.6}, "accuracy": 0.35},
}
MEMORY = [
    # The model, where it started, and a gradient: a dense one, since its norm is taken over all entries.
    ("fedspa", UNIFORM, MASK, MASK + HALF, MASK + 2 * HALF + SIZE, MASK + 2 * HALF + SIZE),
    ("fedspa", UNCLIPPED, MASK, MASK + HALF, MASK + 3 * HALF, MASK + 2 * HALF + SIZE),
    ("fedspa-rsm", UNCLIPPED, MASK, MASK + HALF, MASK + 3 * HALF, 0),
]


def test_a_static_mask_is_never_searched_for(tmp_path):
    options = {"clients": 4, "rounds": 2, "epochs": 1, "data_rate": 0.3, "executor": "serial"}
    searched = {}
    for name in ("fedspa", "fedspa-rsm"):
        searched[name] = sp.train(name, out=tmp_path / name, **options).summary["flops"]["mask_search"]
    assert searched["fedspa"] > searched["fedspa-rsm"] == 0
