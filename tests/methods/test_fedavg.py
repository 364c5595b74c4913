"""FedAvg: one model for all, and the rows that tune it."""

from __future__ import annotations

import torch
from lenet5 import SIZE

from sparsona.core.method import dense, message
from sparsona.experiment import build

BATTERY = {
    "fedavg": {"accuracy": 0.35},
    "fedadam": {"accuracy": 0.35},
    "fedyogi": {"accuracy": 0.35},
    "fedadagrad": {"accuracy": 0.35},
    "fedavg-ft": {"options": {"tune_epochs": 2}, "accuracy": 0.5},
    "fedavg-ft-part": {
        "options": {"tune_epochs": 2, "server_optimizer": "adam", "server_lr": 0.01},
        "accuracy": 0.35,
    },
}
MEMORY = [
    ("fedavg", {}, 0, SIZE, 2 * SIZE, 0),
    *((name, {}, 0, SIZE, 2 * SIZE, 0) for name in ("fedadam", "fedyogi", "fedadagrad")),
    ("fedavg-ft-part", {}, 0, SIZE, 2 * SIZE, 0),
]


def test_the_mean_is_by_examples():
    """Models of all ones from 30 examples and all fives from 10: (30 * 1 + 10 * 5) / 40 = 2."""
    options = {"clients": 3, "rounds": 1, "data_rate": 0.3, "executor": "serial"}
    context = build.make_context(build.make_config("fedavg", options))
    half, round_ = context.method.server, context.plan.round_at(0)
    server = half.init(context.params, context.clients, context.plan.seeds)
    ones = context.params.like(torch.ones_like(context.params.flat))
    fives = context.params.like(5 * ones.flat)
    total = half.zero(server, round_)
    for tree, weight in ((ones, 30), (fives, 10)):
        total = half.add(server, total, message(round_, {"model": dense(tree)}, weight=weight))
    assert torch.equal(half.global_model(half.step(server, total, round_)).flat, 2 * ones.flat)
