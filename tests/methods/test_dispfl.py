"""DisPFL: peers with masks. Its arithmetic is in tests/golden."""

from __future__ import annotations

import pytest
from lenet5 import HALF, MASK, SIZE, UNCLIPPED, UNIFORM

import sparsona as sp

BATTERY = {"dispfl": {"options": {"density": 0.6, "graph": "random:2"}, "accuracy": 0.35}}
MEMORY = [
    # The mask of what it has, and the next.
    ("dispfl", UNIFORM, HALF + 2 * MASK, 3 * HALF + 2 * MASK, *2 * [2 * HALF + 2 * MASK + SIZE]),
    ("dispfl", UNCLIPPED, HALF + 2 * MASK, *2 * [3 * HALF + 2 * MASK], 2 * HALF + 2 * MASK + SIZE),
]


def test_peers_have_no_global_model(tmp_path):
    with pytest.raises(sp.SparsonaError, match="dispfl"):
        sp.train("dispfl", clients=4, rounds=1, data_rate=0.3, points=["global"], out=tmp_path / "run")
