"""Tables 3, 4 and 10 to 12 of the partial-personalisation paper (FedAlt, FedSim) on data that can be had.

    python benchmarks/partial.py mnist [--data-dir FOLDER] [--jobs 4] [--out runs/partial-mnist]
    python benchmarks/partial.py shakespeare ...
    python benchmarks/partial.py digits --seeds 2 --rounds 4 2

The paper's three steps: (a) FedAvg, once; (b) personal training from there, under each seed; (c) five epochs of tuning,
which is all of FT (part.), Finetune and Ditto. As in the paper the clients and their data are the same under all seeds,
nothing is held back, gradients are not clipped, and accuracies are weighted by test size. Data, networks, rounds and
rates are this program's: its figures stand beside no figure of the paper. Called again with the same folder it goes on
where it was.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from record import surroundings

import sparsona as sp
from sparsona.analysis.statistics import mean_and_spread

COMMON: Mapping[str, Any] = {
    "partition_seed": 0,
    "epochs": 1,
    "weight_decay": 0.0,
    "momentum": 0.0,
    "clip_norm": None,
    "validation_rate": 0.0,
    "lr_schedule": "constant",
    "tune_epochs": 5,
    "eval_every": 1000,  # besides the last ten rounds
}
# Data and how it is shared out, the network without and with adapters, rounds and client rates of steps (a) and (b).
SETS: Mapping[str, tuple[Mapping[str, Any], str, str, tuple[int, int], tuple[float, float]]] = {
    "digits": (
        {"data": "digits", "clients": 8, "per_round": 4, "batch_size": 16},
        "digits-cnn",
        "digits-cnn:adapters=true",
        (60, 20),
        (0.1, 0.01),
    ),
    "mnist": (  # in place of EMNIST by writer
        {"data": "mnist", "partition": "natural", "per_round": 10, "batch_size": 32},
        "cnn28",
        "cnn28:adapters=true",
        (500, 100),
        (0.1, 0.01),
    ),
    "shakespeare": (  # in place of StackOverflow
        {
            "data": "shakespeare",
            "clients": 50,
            "min_train": 100,
            "max_examples": 400,
            "per_round": 10,
            "batch_size": 64,
        },
        "transformer",
        "transformer:adapters=16",
        (200, 50),
        (0.2, 0.1),  # at 0.5, without clipping, all that is learnt is which character is frequent
    ),
}
PARTS = ("input", "output", "adapter")
DITTO, PFEDME = "ditto:schedule=tuning,prox=0.2", "pfedme:prox=0.1,inner_steps=3,shared_lr=0.01"  # 0.1 ||v - w||²


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=SETS)
    parser.add_argument("--data-dir")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--clients", type=int, help="fewer of them")
    parser.add_argument("--rounds", type=int, nargs=2, metavar=("A", "B"), help="of steps (a) and (b)")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    out = given.out or Path("runs") / f"partial-{given.data}"
    shared, plain, adapted, rounds, rates = SETS[given.data]
    options = {**COMMON, **shared, **({"data_dir": given.data_dir} if given.data_dir else {})}
    if given.clients:
        options |= {"clients": given.clients, "per_round": min(given.clients, shared["per_round"])}
    of_a, of_b = given.rounds or rounds
    start = train(out / "a", {**options, "model": plain, "rounds": of_a, "lr": rates[0], "tune_epochs": 0})
    options |= {"lr": rates[1], "warm_start": start}

    def runs(name: str, names: Sequence[str], **more: Any) -> list[sp.Run]:
        return compare(out / name, names, given.seeds, given.jobs, {**options, **more})

    both, alone = (("fedalt", "fedsim"), {"model": plain, "rounds": 0})
    split = [f"{method}:personal={part}" for method in both for part in PARTS[:2]]
    tuned = ["fedavg-ft", DITTO, *(f"fedavg-ft-part:personal={part}" for part in PARTS[:2])]
    adapters = {"model": adapted, "personal": "adapter"}
    kept = runs("tuned", tuned, **alone) + runs("tuned-adapter", ["fedavg-ft-part"], **adapters, rounds=0)
    kept += runs("b", [*split, PFEDME], model=plain, rounds=of_b) + runs("b-adapter", both, **adapters, rounds=of_b)
    forgot = runs("stateless", split, model=plain, rounds=of_b, stateless=True)
    forgot += runs("stateless-adapter", both, **adapters, rounds=of_b, stateless=True)
    tables = {
        "3: full and partial personalisation": {
            "FedAvg": [kept[0].summary["pipeline"]["weighted"]["start"]],
            **{name: at(kept, name) for name in ("fedavg-ft", "ditto", "pfedme")},
            **{f"fedalt, {part}": at(kept, "fedalt", part) for part in PARTS},
        },
        "4: FT (part.), FedAlt, FedSim": by_part(kept, ("fedavg-ft-part", *both)),
        "10: change by final tuning": by_part(kept, both, change=True),
        "11: table 4 with stateless clients": by_part(kept, ("fedavg-ft-part",)) | by_part(forgot, both),
        "12: change by final tuning, stateless clients": by_part(forgot, both, change=True),
    }
    found = {title: {name: mean_and_spread(values) for name, values in rows.items()} for title, rows in tables.items()}
    for title, rows in found.items():
        print(f"\ntable {title} ({given.data}, {given.seeds} seeds, % weighted by test size)")
        for name, (mean, spread) in rows.items():
            print(f"  {name:24} {100 * mean:6.2f}" + ("" if spread is None else f" ± {100 * spread:.2f}"))
    about = {"surroundings": surroundings(), "data": given.data, "rounds": [of_a, of_b], "tables": found}
    (out / "tables.json").write_text(json.dumps(about, indent=1) + "\n")


def train(path: Path, options: Mapping[str, Any]) -> sp.Run:
    """Step (a), or what is missing of it."""
    return sp.resume(path) if path.exists() else sp.train("fedavg", out=path, **options)


def compare(path: Path, names: Sequence[str], seeds: int, jobs: int, options: Mapping[str, Any]) -> list[sp.Run]:
    """The runs of a comparison, or what is missing of them."""
    from sparsona.experiment.compare import resume_comparison

    if path.exists():
        return resume_comparison(path, jobs=jobs).runs
    return sp.compare(names, seeds=seeds, jobs=jobs, out=path, **options).runs


def at(runs: Sequence[sp.Run], method: str, part: str | None = None, change: bool = False) -> list[float]:
    """Weighted accuracies after tuning of one method's runs, or how much tuning changed them."""
    steps = [
        run.summary["pipeline"]["weighted"]
        for run in runs
        if run.config["method"] == method and (part is None or run.config["options"]["personal"] == [part])
    ]
    return [step["tuned"] - (step["received"] if change else 0.0) for step in steps]


def by_part(runs: Sequence[sp.Run], methods: Sequence[str], change: bool = False) -> dict[str, list[float]]:
    return {f"{method}, {part}": at(runs, method, part, change) for part in PARTS for method in methods}


if __name__ == "__main__":
    main()
