"""A round of FedAvg on a CPU: ours against what people would use instead, on the same work.

Every contender has a fresh process of its own, one after another (A B C, A B C, ...), which plays one round and then
the timed ones; the best round counts, the spread is told. What is not installed is said to be missing. They count
their steps: all must do the same.

    python benchmarks/compare.py [--repeats 5] [--rounds 3] [--out FILE] [--python flower=PATH]

Some contenders cannot be installed side by side: --python NAME=PATH runs one with another interpreter
(benchmarks/requirements.txt says how to make it).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from contenders import BATCH, CLIENTS, CONTENDERS, WORKS, cores
from record import NAMES, surroundings
from rich.console import Console
from rich.progress import Progress

HERE = Path(__file__).resolve().parent
THREADED = ("naive", "pfl", "fedlab")  # one process: tried with one thread, and with one a core


def sgemm_rate(seconds: float) -> float:
    """FLOP/s of one core in products of large float32 matrices, at its best."""
    size, times = 1024, [time.perf_counter()]
    a, b = torch.rand(size, size), torch.rand(size, size)
    while len(times) < 3 or times[-1] - times[0] < seconds:
        torch.mm(a, b)
        times.append(time.perf_counter())
    return 2 * size**3 / min(after - before for before, after in itertools.pairwise(times))


def sgemm_limit(seconds: float) -> float:
    """FLOP/s of all cores, one process each, at the same time."""
    code = f"import compare, torch; torch.set_num_threads(1); print(compare.sgemm_rate({seconds}))"
    words = [sys.executable, "-c", code]
    running = [subprocess.Popen(words, cwd=HERE, stdout=subprocess.PIPE, text=True) for _ in range(cores())]
    return sum(float(process.communicate()[0]) for process in running)


def run_once(python: str, contender: str, threads: int, work: str, rounds: int, tiny: bool) -> dict[str, Any] | None:
    """What the contender told, or None if it is not installed."""
    words = [python, str(HERE / "contenders.py"), contender, work, "--rounds", str(rounds), "--threads", str(threads)]
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    done = subprocess.run([*words, *["--tiny"] * tiny], capture_output=True, text=True, env=env)
    if done.returncode == 3:
        return None
    if done.returncode:
        raise SystemExit(f"{contender} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def counts(name: str, tiny: bool) -> list[int]:
    """Numbers of threads to try a contender with."""
    return sorted({1, cores()}) if name in THREADED and not tiny else [1]


def measure(work: str, contenders: list[str], pythons: dict[str, str], args: argparse.Namespace) -> dict[str, Any]:
    """All contenders on one piece of work, in turns."""
    rows: dict[str, dict[str, Any]] = {}
    runs = [(name, threads) for name in contenders for threads in counts(name, args.tiny)]
    missing: set[str] = set()
    turns = [run for _ in range(args.repeats) for run in runs]
    with Progress(console=Console(stderr=True)) as bar:
        for name, threads in bar.track(turns, description=work):
            if name in missing:
                continue
            told = run_once(pythons.get(name, sys.executable), name, threads, work, args.rounds, args.tiny)
            if told is None:
                missing.add(name)
                print(f"{NAMES[name]} is not installed: left out", flush=True)
                continue
            row = rows.setdefault(f"{name}/{threads}", {"contender": name, "threads": threads, "seconds": []})
            row["seconds"].append(told.pop("seconds"))
            row |= told
    steps = {row["steps"] for row in rows.values()}
    if len(steps) > 1:
        raise SystemExit(f"not the same work: { ({key: row['steps'] for key, row in rows.items()}) } steps a round")
    flops = rows["sparsona/1"]["flops"]  # a forward pass, and twice as much for the backward pass
    for row in rows.values():
        row |= {"best_s": min(map(min, row["seconds"])), "worst_s": max(map(max, row["seconds"]))}
        row["median_s"] = statistics.median(second for run in row["seconds"] for second in run)
        row["share_of_limit"] = flops / row["best_s"] / args.limit
    ours = rows["sparsona/1"]
    for row in rows.values():
        row["times_ours"] = row["best_s"] / ours["best_s"]
        # Run against run of the same repeat: what the ratio would have been in any one of them.
        pairs = [min(theirs) / min(own) for theirs, own in zip(row["seconds"], ours["seconds"], strict=True)]
        row |= {"times_ours_low": min(pairs), "times_ours_high": max(pairs)}
    return {"flops_a_round": flops, "missing": sorted(missing), "rows": list(rows.values())}


def tell(work: str, found: dict[str, Any]) -> None:
    print(f"\n{work}: {CLIENTS} clients, batch {BATCH}, {found['flops_a_round'] / 1e9:.1f} GFLOP a round")
    head = ("", "best s", "median", "worst", "x ours", "low - high", "% of sgemm", "loss")
    print(f"{head[0]:34}{head[1]:>8}{head[2]:>8}{head[3]:>8}{head[4]:>8}{head[5]:>14}{head[6]:>12}  {head[7]}")
    for row in found["rows"]:
        name = NAMES[row["contender"]] + (f", {row['threads']} threads" if row["threads"] > 1 else "")
        name += f" ({row['note']})" if row["note"] else ""
        spread = f"{row['times_ours_low']:.2f} - {row['times_ours_high']:.2f}"
        print(
            f"{name:34}{row['best_s']:8.3f}{row['median_s']:8.3f}{row['worst_s']:8.3f}{row['times_ours']:8.2f}{spread:>14}"
            f"{100 * row['share_of_limit']:12.1f}  {row['loss_before']:.2f} to {row['loss_after']:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds in each process")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="ours is always there")
    parser.add_argument("--work", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument(
        "--python", action="append", default=[], metavar="NAME=PATH", help="another interpreter for one"
    )
    parser.add_argument("--tiny", action="store_true", help="few images, to see that it runs")
    parser.add_argument("--out", type=Path, help="also write the figures here, as JSON")
    args = parser.parse_args()
    pythons = dict(pair.split("=", 1) for pair in args.python)
    args.limit = cores() * sgemm_rate(0.1) if args.tiny else sgemm_limit(3.0)
    print(f"limit: {args.limit / 1e9:.0f} GFLOP/s in products on {cores()} cores; load {os.getloadavg()[0]:.1f}")
    contenders = [name for name in CONTENDERS if name in args.only or name == "sparsona"]
    results = {}
    for work in args.work:
        results[work] = measure(work, contenders, pythons, args)
        tell(work, results[work])
        if args.out:  # after each piece of work: what was measured is not lost if the next is cut short
            about = {"environment": surroundings(), "sgemm_flops": args.limit, "cores": cores()}
            about |= {"repeats": args.repeats, "rounds": args.rounds}
            args.out.write_text(json.dumps(about | {"results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
