"""What many clients cost: memory when all have been touched, seconds by how many are sampled, and the start-up.

FedSpa and LeNet5 on made-up 28x28 images, four to a client, one epoch of one step. Every size runs in a process of its
own through `sparsona.train`, checkpoints and records included; one client is tested after rounds. Start-up is all until
the first round begins, making the federation of arrays that are already there included.

    python benchmarks/scale.py [--executor serial] [--only memory] [--tiny] [--out scale.json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from record import surroundings

import sparsona as sp
from sparsona.data.pool import View

SIZES = {
    "memory": (10, 100, 1_000, 10_000),  # clients, all of them sampled in one round
    "round": (10, 100, 1_000),  # clients sampled, of as many as the largest
    "start": (100, 1_000, 10_000, 100_000),  # clients registered, 100 of them sampled
}
TINY = {"memory": (3, 6), "round": (2,), "start": (5,)}


def federation_of(num_clients: int) -> sp.Federation:
    draws = np.random.default_rng(0)
    x = draws.integers(0, 256, (5 * num_clients, 1, 28, 28), dtype=np.uint8)
    y = draws.integers(0, 10, 5 * num_clients)
    # Four to train on and one to be tested on.
    starts = range(0, len(x), 5)
    clients = [(x[k : k + 4], y[k : k + 4], x[k + 4 : k + 5], y[k + 4 : k + 5]) for k in starts]
    return sp.Federation.from_clients(clients, validation_rate=0.0, num_classes=10, view=View())


def measure(kind: str, size: int, largest: int, executor: str) -> dict[str, float]:
    """One run, in this process."""
    torch.set_num_threads(1)
    registered = largest if kind == "round" else size
    began = time.perf_counter()
    federation = federation_of(registered)
    found: dict[str, float] = {"clients": size, "federation_seconds": time.perf_counter() - began}
    sampled = min(100, size) if kind == "start" else size
    rounds = 1 if kind == "memory" else 3
    ends: list[float] = []
    ready: list[float] = []
    peaks: list[float] = []

    class Watch:
        def on_progress(self, progress) -> None:
            peaks.append(workers_peak())
            if progress.completed == 0 and not progress.doing.endswith("trained"):
                ready.append(time.perf_counter() - began)  # the last of these is just before the first round

        def on_round(self, result) -> None:
            peaks.append(workers_peak())
            ends.append(time.perf_counter() - began)

    began = time.perf_counter()
    options = {"rounds": rounds, "per_round": sampled, "epochs": 1, "batch_size": 4, "eval_clients": 1}
    with tempfile.TemporaryDirectory() as folder:
        sp.train("fedspa", federation, "lenet5", out=f"{folder}/run", observers=[Watch()], executor=executor, **options)
    found["start_seconds"] = found["federation_seconds"] + ready[-1]
    found["round_seconds"] = min(after - before for before, after in itertools.pairwise([ready[-1], *ends]))
    found["ms_per_client"] = 1e3 * found["round_seconds"] / sampled
    found["peak_mib_here"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found["peak_mib_workers"] = max(peaks)  # of all together; memory that they share is counted in each
    return found


def workers_peak() -> float:
    """MiB. Asked of the system while they live: what it says of dead children counts their parent's memory, too."""
    total = 0
    for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
        status = Path(f"/proc/{pid}/status").read_text()
        total += next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), 0)
    return total / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executor", default="serial")
    parser.add_argument("--only", choices=SIZES, help="one of the three")
    parser.add_argument("--tiny", action="store_true", help="see that it runs")
    parser.add_argument("--out", type=Path, help="also write the figures here, as JSON")
    parser.add_argument("--one", nargs=3, metavar=("KIND", "SIZE", "LARGEST"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], int(args.one[1]), int(args.one[2]), args.executor)))
        return
    results: dict[str, list[dict[str, float]]] = {}
    for kind, sizes in (TINY if args.tiny else SIZES).items():
        if args.only in (None, kind):
            results[kind] = []
            for size in sizes:
                one = ["--one", kind, str(size), str(max(sizes)), "--executor", args.executor]
                told = subprocess.run([sys.executable, __file__, *one], check=True, stdout=subprocess.PIPE, text=True)
                results[kind].append(json.loads(told.stdout))
                print(kind, "  ".join(f"{key} {value:.4g}" for key, value in results[kind][-1].items()), flush=True)
    if args.out:
        args.out.write_text(json.dumps({"environment": surroundings(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
