"""How long a client's step takes on a GPU, by executor, on made-up images. Absolute times count there.

python benchmarks/gpu.py [--out FILE]            on a GPU: minutes
python benchmarks/gpu.py --device cpu --tiny     to see that it runs
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import surroundings

import sparsona as sp
from sparsona.engine.context import ClientContext
from sparsona.engine.jobs import Executor
from sparsona.engine.rounds import simulate
from sparsona.executors import numeric_mode
from sparsona.executors.graphed import Graphed
from sparsona.executors.serial import Serial
from sparsona.executors.stacked import Stacked
from sparsona.experiment.build import make_config, make_context

PER_CLIENT = 500


def federation_of(shape: tuple[int, ...], classes: int, clients: int, augmented: bool) -> sp.Federation:
    rng = np.random.default_rng(0)
    count = clients * (PER_CLIENT + 20)
    x = rng.integers(256, size=(count, *shape), dtype=np.uint8)
    y = np.arange(count) % classes
    look = sp.View((0.5,) * shape[0], (0.25,) * shape[0], pad=4 if augmented else 0, flip=augmented)
    options = {"num_train": clients * PER_CLIENT, "validation_rate": 0.0, "num_classes": classes}
    return sp.federate(x, y, clients=clients, partition="iid", view=look, **options)


def measure(
    method: str,
    model: str,
    federation: sp.Federation,
    open_executor: Callable[[ClientContext], Executor],
    rounds: int,
    **more: Any,
) -> dict[str, float]:
    """Seconds of the first round, which compiles, of the best other, of testing everybody; ms a step, everything in."""
    config = make_config(method, {"rounds": 1000, "eval_every": 1000, **more}, federation, model)
    context = make_context(config, federation, model)
    with numeric_mode(context):
        star = simulate(context, open_executor(context))
        population, seconds, steps = star.start(), [], 0

        def timed(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
            began = time.perf_counter()
            found = function(*args)
            if context.device.type == "cuda":
                torch.cuda.synchronize()
            return found, time.perf_counter() - began

        for index in range(1 + rounds):
            (population, record), took = timed(star.play, population, index)
            seconds.append(took)
            steps = sum(turn.tally.steps for turn in record.turns)
        star.evaluate(population, 1 + rounds)
        _, testing = timed(star.evaluate, population, 1 + rounds)
    best = min(seconds[1:])
    return {
        "first_round_s": seconds[0],
        "round_s": best,
        "ms_per_client_step": 1e3 * best / steps,
        "testing_all_s": testing,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="few clients and a small model, to see that it runs")
    parser.add_argument("--out", type=Path, help="also write the figures here, as JSON")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("a GPU is needed; `--device cpu --tiny` shows that it runs")
    clients = 4 if args.tiny else 100
    grey, colour = federation_of((1, 28, 28), 26, clients, False), federation_of((3, 32, 32), 10, clients, True)
    small = {"device": args.device, "per_round": clients, "batch_size": 50, "epochs": 1 if args.tiny else 5}
    large = {"device": args.device, "per_round": min(10, clients), "batch_size": 128, "epochs": 1 if args.tiny else 5}
    if args.device == "cuda":
        large["precision"] = "bf16"
    found = {}
    for method in ("fedavg", "fedspa"):
        for name, executor in (("serial", Serial), ("stacked", Stacked)):
            found[f"{method}, lenet5, {name}"] = measure(method, "lenet5", grey, executor, 1, **small)
    for model in ("pfedgate-cifar10",) if args.tiny else ("vgg11", "resnet18"):
        for method in ("fedavg", "fedspa"):
            found[f"{method}, {model}, graphed"] = measure(method, model, colour, Graphed, 2, **large)
    for name, row in found.items():
        print(f"{name:32}", "  ".join(f"{key} {value:.3f}" for key, value in row.items()))
    for method in ("fedavg", "fedspa"):
        ratio = found[f"{method}, lenet5, serial"]["round_s"] / found[f"{method}, lenet5, stacked"]["round_s"]
        print(f"{method}, lenet5: stacked is {ratio:.1f} times as fast as serial")
    if args.out:
        args.out.write_text(json.dumps({"environment": surroundings(), "results": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
