"""Facts of runs that never happened."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsona.runs.facts import RunFacts


def make_facts(clients: int = 3, **changes: Any) -> RunFacts:
    """Facts of a run of FedAvg on a few clients."""
    values: dict[str, Any] = {
        "method": "fedavg",
        "title": "FedAvg",
        "point": "received",
        "federation": "data",
        "layout": "model",
        "start": "weights",
        "num_parameters": 10,
        "sizes": np.full((clients, 3), 2),
        "label_counts": np.ones((clients, 2), dtype=int),
        "alone": False,
        "has_batch_statistics": False,
        "ignores_capacity": False,
        "tested_on": "split",
        "left_out": {},
        "augments": False,
    }
    return RunFacts(**{**values, **changes})
