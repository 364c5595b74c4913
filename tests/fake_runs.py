"""Runs that never happened but look as if they had."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sparsona.analysis.statistics import accuracy_summary, mean_of_last
from sparsona.analysis.view import RunView

# title -> headline point, final accuracy, pace in rounds, bytes per round, share of a dense model's FLOPs
METHODS: dict[str, tuple[str, float, float, int, float]] = {
    "Local": ("received", 0.91, 3.0, 0, 1.0),
    "FedAvg": ("received", 0.86, 9.0, 2_480_000, 1.0),
    "FedAvg-FT": ("tuned", 0.935, 9.0, 2_480_000, 1.0),
    "FedSpa (DST)": ("received", 0.945, 6.0, 1_290_000, 0.62),
    "FedSpa (RSM)": ("received", 0.94, 7.0, 1_290_000, 0.62),
}


def make_view(
    title: str = "FedSpa (RSM)",
    seed: int = 1,
    *,
    clients: int = 20,
    classes: int = 10,
    rounds: int = 50,
    **config: object,
) -> RunView:
    """One fake run; the data depend on the seed alone, so that runs of one seed are paired as real ones are."""
    point, final, pace, per_round, share = METHODS[title]
    method = title.lower().replace(" (", "-").rstrip(")")
    data = np.random.default_rng(seed)
    label_counts = _partition(data, clients, classes)
    count = np.maximum(label_counts.sum(axis=1) // 5, 4)
    luck = np.random.default_rng([seed, list(METHODS).index(title)])
    skill = np.clip(final + luck.normal(0, 0.05, clients) - 0.10 * (data.random(clients) < 0.15), 0.2, 1)
    correct = luck.binomial(count, skill)
    confusion = np.diag(np.full(classes, int(correct.sum()) // classes)) + luck.integers(0, 4, (classes, classes))
    accuracy = accuracy_summary(correct, count)

    def curve(end: float) -> list[tuple[int, float]]:
        steps = range(1, rounds + 1)
        noise = luck.normal(0, 0.006, rounds) * (np.arange(rounds) < rounds - 1)
        return [(r, float(end - (end - 0.1) * np.exp(-r / pace) + noise[r - 1])) for r in steps]

    curves = {"received": curve(accuracy["mean"] - 0.06)}
    curves[point] = [(rounds, accuracy["mean"])] if point == "tuned" else curve(accuracy["mean"])
    up = per_round * rounds // 2
    return RunView(
        name=f"{method}-seed{seed}",
        path=f"runs/{method}-seed{seed}",
        method=method,
        title=title,
        seed=seed,
        protocol=f"model: The {point} model of every client.\ntest data: {count.min()} to {count.max()} examples.\n"
        f"result: Each client weighted alike, after round {rounds}.",
        point=point,
        config={"data": "digits", "partition": "dirichlet:0.3", "lr": 0.1, "seed": seed, "method": {"name": method}}
        | {"rounds": rounds}
        | config,
        environment={"python": "3.11.9", "torch": "2.11.0", "processor": "2 cores"},
        summary={
            "run": f"{method}-seed{seed}",
            "method": method,
            "protocol": "as above",
            "accuracy": accuracy | {"last10": mean_of_last(curves[point])},
            "bytes": {
                "up": up,
                "down": up,
                "total": 2 * up,
                "busiest_node": 2 * up,
                "paper_total": int(1.9 * up),
            },
            "flops": {"train": 3.1e11 * share * rounds, "mask_search": 4.2e8 if "Spa" in title else 0},
            "rounds": rounds,
            "seconds": 14.2 + seed,
        },
        curves=curves,
        train_loss=[(r, float(0.05 + 2.2 * np.exp(-r / pace) + luck.normal(0, 0.01))) for r in range(1, rounds + 1)],
        correct=correct,
        count=count,
        confusion=confusion,
        label_counts=label_counts,
        sizes=np.stack([label_counts.sum(axis=1), count, count], axis=1),
        cumulative_bytes=[(r, per_round * r) for r in range(1, rounds + 1)],
    )


def make_comparison(seeds: int = 3, **options: int) -> list[RunView]:
    """Every fake method with every seed, method by method."""
    return [make_view(title, seed, **options) for title in METHODS for seed in range(1, seeds + 1)]


def _partition(data: np.random.Generator, clients: int, classes: int) -> np.ndarray:
    shares = data.dirichlet(np.full(clients, 0.3), classes)
    return np.floor(shares * 150).astype(np.int64).T + np.eye(clients, classes, dtype=np.int64) * 3


@pytest.fixture(name="make_view")
def make_view_fixture() -> Callable[..., RunView]:
    return make_view


@pytest.fixture(name="make_comparison")
def make_comparison_fixture() -> Callable[..., list[RunView]]:
    return make_comparison
