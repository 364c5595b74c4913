"""CPU seconds of `--executor auto` against serial and stacked, for nine networks on a CPU.

CPU seconds rather than seconds on the clock: they can be compared on a machine that does other things, and what
`workers` spends is what `serial` spends, on more cores.

    python benchmarks/executors.py [--method fedavg] [--rounds 3] [--only mlp,...] [--unequal]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import sparsona as sp


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def signal_cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv1d(9, 16, 5), nn.ReLU(), nn.MaxPool1d(4), nn.Conv1d(16, 32, 5), nn.ReLU(), nn.AdaptiveAvgPool1d(4)),
        *(nn.Flatten(), nn.Linear(128, 6)),
    )


class Tokens(nn.Module):
    """One block of attention over a row of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.block = nn.Linear(9, 32), nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
        self.leave = nn.Linear(32, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.block(self.enter(x.transpose(1, 2)[:, ::4])).mean(1))


# The shape of an example, classes, and the network: a name, or a function that builds it.
NETWORKS = {
    "linear, 64": ((1, 8, 8), 10, lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))),
    "mlp, 64-32": ((1, 8, 8), 10, lambda: mlp(64, 32, 10)),
    "mlp, 561-64": ((561,), 6, lambda: mlp(561, 64, 6)),
    "mlp, 561-256": ((561,), 6, lambda: mlp(561, 256, 6)),
    "1-D CNN, 9x128": ((9, 128), 6, signal_cnn),
    "attention, 9x32": ((9, 128), 6, Tokens),
    "digits-cnn, 8x8": ((1, 8, 8), 10, "digits-cnn"),
    "cnn28, 28x28": ((1, 28, 28), 10, "cnn28"),
    "lenet5, 28x28": ((1, 28, 28), 10, "lenet5"),
}


def federation_of(shape: tuple[int, ...], classes: int, unequal: bool) -> sp.Federation:
    """Twenty clients of 40 to 120 examples, or of 27 to 366: people wear a sensor for as long as they like."""
    draws = np.random.default_rng(0)
    clients = []
    for size in np.geomspace(27, 366, 20).astype(int) if unequal else draws.integers(40, 120, 20):
        x, y = draws.random((size, *shape), dtype=np.float32), draws.integers(0, classes, size)
        clients.append((x, y, x[:10], y[:10]))
    return sp.Federation.from_clients(clients, validation_rate=0.0, num_classes=classes)


def measure(executor: str, federation: sp.Federation, model, method: str, rounds: int) -> tuple[float, str]:
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        run = sp.train(
            method,
            federation,
            model,
            rounds=rounds,
            per_round=10,
            epochs=2,
            executor=executor,
            device="cpu",
            progress=False,
            eval_every=rounds,
            out=Path(folder) / "run",
        )
        return time.process_time() - began, run.config["executor"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--unequal", action="store_true", help="clients of 27 to 366 examples")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"| network | parameters | MFLOP a step | serial, CPU s | stacked, CPU s | ratio | auto, {options.method} |")
    print("|---|---|---|---|---|---|---|")
    for name, (shape, classes, model) in NETWORKS.items():
        if options.only and not any(part in name for part in options.only.split(",")):
            continue
        federation = federation_of(shape, classes, options.unequal)
        found = {}
        for executor in ("serial", "stacked"):
            measure(executor, federation, model, options.method, 1)  # the first run in a process pays for imports
            found[executor], _ = measure(executor, federation, model, options.method, options.rounds)
        from sparsona.experiment.build import make_config, make_context

        given = {"rounds": 1, "device": "cpu"}
        context = make_context(make_config(options.method, given, federation, model), federation, model)
        _, chosen = measure("auto", federation, model, options.method, 1)
        step = 3 * 16 * context.task.layout.forward_flops() / 1e6
        ratio = found["serial"] / found["stacked"]
        print(
            f"| {name} | {context.task.layout.size:,} | {step:.2f} | {found['serial']:.2f} | {found['stacked']:.2f} | "
            f"{ratio:.2f} | {chosen} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
