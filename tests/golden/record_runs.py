"""What every method gives on the embedded digits: accuracies, bytes, FLOPs, and digests of records and final states.

`python tests/golden/record_runs.py --write` records them in runs.json; without `--write` the runs are made again and
compared with that file. Each case is run by `serial`, by `workers`, and by a process that is killed after its third
round and resumed: all three must leave the same records and the same bits. Bits depend on the processor and on torch,
so the file names both.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import platform
import signal
import sqlite3
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("runs.json")
SMALL = {"clients": 6, "per_round": 3, "rounds": 4, "epochs": 1, "batch_size": 16, "seed": 7}
PEERS = {**SMALL, "per_round": 5}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "local": ("local", {"points": ["trained"], "tune_epochs": 1}),
    "fedavg": ("fedavg", {"points": ["trained", "global"], "drop_rate": 0.3}),
    "fedavg-ft": ("fedavg-ft", {"tune_epochs": 2, "novel": 2, "guard": True, "train_accuracy": True}),
    "fedavg-ft-part": ("fedavg-ft-part", {"tune_epochs": 1}),
    "fedavg-adam": ("fedavg", {"server_optimizer": "adam", "server_lr": 0.01, "everyone_trains": True}),
    "fedalt": ("fedalt", {"points": ["trained"], "drop_rate": 0.3, "tune_epochs": 1}),
    "fedalt-authors": ("fedalt", {"preset": "authors", "clip_norm": 0.25, "novel": 1, "validation_rate": 0.1}),
    "fedsim-norms": ("fedsim", {"model": "batch-norm", "personal": "norm", "points": ["trained"]}),
    "fedspa-norms": ("fedspa", {"model": "batch-norm", "points": ["global"], "tune_epochs": 1}),
    "fedsim": ("fedsim", {"points": ["trained"], "server_optimizer": "adam"}),
    "fedsim-additive": ("fedsim", {"personal": "additive"}),
    "fedspa": ("fedspa", {"points": ["trained", "global"], "drop_rate": 0.3, "capacities": [0.2, 1.0]}),
    "fedspa-random": ("fedspa", {"regrowth": "random", "initial_masks": "different", "anneal": "family"}),
    "fedspa-stateless": ("fedspa", {"stateless": True, "tune_epochs": 1}),
    "fedspa-rsm": ("fedspa-rsm", {"allocation": "uniform", "density": 0.3}),
    "dispfl": ("dispfl", {"points": ["trained", "consensus"], "drop_rate": 0.3}),
    "dispfl-ring": ("dispfl", {"graph": "ring", "divide_by": "used", "novel": 1, "tune_epochs": 1, "guard": True}),
    "pfedgate": ("pfedgate", {"points": ["trained", "global"], "drop_rate": 0.3, "capacities": [0.3, 1.0]}),
    "pfedgate-authors": (
        "pfedgate",
        {
            "preset": "authors",
            "rounds": 4,
            "validation_rate": 0.1,
            "test": "auto",
            "test_rate": 0.25,
            "headline": "received",
        },
    ),
    "pfedgate-exact": ("pfedgate", {"solver": "exact", "updates": "alternating", "paths": 2, "tune_epochs": 1}),
}


def batch_norm() -> Any:
    """A network whose examples see each other, and which keeps statistics."""
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


def model_of(case: str) -> Any:
    """A network of the case's own; None: the usual one."""
    return batch_norm if CASES[case][1].get("model") == "batch-norm" else None


def options_of(case: str) -> tuple[str, dict[str, Any]]:
    method, own = CASES[case]
    options = {**(PEERS if method == "dispfl" else SMALL), **own}
    return method, {**options, "model": model_of(case)}


def play(case: str, folder: Path, executor: str) -> Path:
    import sparsona as sp

    method, options = options_of(case)
    return sp.train(method, out=folder, executor=executor, **options).path


def _play_and_die(case: str, folder: Path) -> None:
    """A run that is killed when its third round is done; the first two are in its checkpoint."""
    import sparsona as sp
    from sparsona.runs import session
    from sparsona.runs.observers import RoundResult

    session.CHECKPOINT_SECONDS, session.CHECKPOINT_SHARE = 0.0, 1e9

    def watch(record: Any) -> None:
        if isinstance(record, RoundResult) and record.index == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    method, options = options_of(case)
    sp.train(method, out=folder, executor="serial", observers=[watch], **options)


def play_killed(case: str, folder: Path) -> Path:
    import sparsona as sp

    process = multiprocessing.get_context("spawn").Process(target=_play_and_die, args=(case, folder))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL, f"{case}: the run ended by itself ({process.exitcode})"
    return sp.resume(folder, model=model_of(case)).path


def trace(run: Path) -> dict[str, Any]:
    """What is kept of a run: figures to read, and digests of all the rest."""
    from safetensors import safe_open

    summary = json.loads((run / "summary.json").read_text())
    manifest = json.loads((run / "checkpoint" / "manifest.json").read_text())
    states = []
    for owner, entry in sorted(manifest["files"].items()):
        if owner.startswith("message/"):
            continue  # what peers sent last: their bytes are in the records, their trees in the states
        with safe_open(run / "checkpoint" / entry.split()[0], framework="np") as file:
            tensors = (file.get_tensor(key) for key in file.keys())  # noqa: SIM118
            # By value: a renamed field is the same state.
            states.append(f"{owner} " + " ".join(sorted(_digest(t.tobytes()) for t in tensors if t.size)))
    with contextlib.closing(sqlite3.connect(run / "records.sqlite")) as db:
        rounds = "round, lr_scale, num_trained, num_aggregated, num_dropped, loss, bytes_up, bytes_down, paper_up, "
        rounds += "paper_down, train_flops, search_flops"
        turns = "round, client, loss, examples, steps, aggregated, dropped, bytes_up, bytes_down, paper_up, paper_down,"
        turns += " train_flops, search_flops"
        tests = "completed, client, point, correct, count, loss"
        rows = {
            name: db.execute(f"SELECT {columns} FROM {name} ORDER BY 1, 2, 3").fetchall()
            for name, columns in (("rounds", rounds), ("turns", turns), ("evaluations", tests))
        }
        last = db.execute(
            "SELECT point, SUM(correct), SUM(count) FROM evaluations e WHERE completed = "
            "(SELECT MAX(completed) FROM evaluations WHERE point = e.point) GROUP BY point ORDER BY point"
        ).fetchall()
    return {
        "correct": {point: [correct, count] for point, correct, count in last},
        "accuracy": summary["accuracy"]["mean"],
        "bytes": summary["bytes"],
        "flops": summary["flops"],
        "records": {name: _digest(repr(values).encode()) for name, values in rows.items()},
        "states": _digest("\n".join(states).encode()),
    }


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def machine() -> dict[str, str]:
    """What bits depend on besides the code."""
    import torch

    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {"processor": processor, "torch": torch.__version__}


def record(case: str, ways: tuple[str, ...] = ("serial", "workers", "killed")) -> dict[str, Any]:
    """The trace of a case, which must be the same in all ways."""
    found = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for way in ways:
            path = Path(folder) / way
            found[way] = trace(play_killed(case, path) if way == "killed" else play(case, path, way))
    first = found[ways[0]]
    for way in ways[1:]:
        if differs := difference(first, found[way]):
            raise AssertionError(f"{case}: {way} is not {ways[0]}: {differs}")
    return first


def difference(one: Any, other: Any, where: str = "") -> str:
    """The first place where two traces differ, or nothing."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            if found := difference(one.get(key), other.get(key), f"{where}.{key}" if where else key):
                return found
        return ""
    return "" if one == other else f"{where}: {one} and {other}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), help="some of the cases; none: all")
    parser.add_argument("--write", action="store_true", help="record them instead of comparing")
    parser.add_argument("--ways", default="serial,workers,killed", help="which ways to run each case")
    args = parser.parse_args()
    stored = json.loads(FILE.read_text()) if FILE.exists() else {"cases": {}}
    if not args.write and stored["machine"] != machine():
        sys.exit(f"recorded on {stored['machine']}, this is {machine()}: bits cannot be compared")
    failed = []
    for case in args.cases:
        found = record(case, tuple(args.ways.split(",")))
        differs = "" if args.write else difference(stored["cases"][case], found)
        failed += [case] if differs else []
        print(f"{case:18} {found['accuracy']:.4f} {found['states']} {differs or 'same'}", flush=True)
        stored["cases"][case] = found
    if args.write:
        FILE.write_text(json.dumps({"machine": machine(), "cases": stored["cases"]}, indent=1) + "\n")
    if failed:
        sys.exit(f"{len(failed)} of {len(args.cases)} differ: {', '.join(failed)}")


if __name__ == "__main__":
    main()
