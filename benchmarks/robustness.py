"""What attackers cost under each robust mean: the table of docs/results/robustness.md.

    python benchmarks/robustness.py run --out results.jsonl [--shard 0/8] [--seeds 3] [--rounds 30] [--attacks random]
    python benchmarks/robustness.py table results.jsonl [more.jsonl ...]

Every run is a line of the file; a run that is there already is not made again, and several processes share the list
with `--shard`. Parameters of means and attacks are fixed here, before any result: means expect a fifth of the updates
to be lies, whatever the share of attackers is. `table` prints Markdown: accuracies of the honest clients, and the
points that the same clients lost against the run without attackers and with the method's own mean. Rows have other
honest clients: points can be compared from row to row, accuracies cannot.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

METHODS = ("fedavg", "fedspa", "fedalt", "dispfl")
MEANS = ("mean", "median", "trimmed:0.2", "norm-bound", "krum:0.2", "multi-krum:0.2", "geometric-median")
ATTACKS = {  # with the options that they have in all runs
    "label-flip": "",
    "sign-flip": ",factor=5",
    "scaled": ",factor=10",
    "random": ",factor=10",
    "same-value": ",value=1",
    "little": ",z=1.5",
    "forged-mask": "",
}
RATES = (0.1, 0.2)
SPARSE = ("fedspa", "dispfl")  # whose clients send masks
GOAL = 3.0  # points that a fifth of the clients may cost
SETTING: dict[str, Any] = {
    "clients": 20,
    "partition": "dirichlet:0.3",
    "data_rate": 0.2,
    "epochs": 1,
    "batch_size": 32,
    "lr": 0.05,
    "eval_every": 1000,  # besides the last ten rounds
}
Key = tuple[str, str, str, int]


def attacks_of(method: str) -> Iterator[str]:
    """The attacks that a method is run under, the empty one first."""
    yield ""
    for name, options in ATTACKS.items():
        if name != "forged-mask" or method in SPARSE:
            yield from (f"{name}:{rate}{options}" for rate in RATES)


def rows(seeds: int, methods: Sequence[str]) -> list[Key]:
    """All runs, those of the first seed first; what is compared stands together, so that shards end together."""
    return [
        (method, attack, mean, seed)
        for seed in range(seeds)
        for method in methods
        for attack in attacks_of(method)
        for mean in MEANS
    ]


def is_wanted(key: Key, attacks: Sequence[str] | None) -> bool:
    """Whether a run is of these attacks, or what they are compared with: no attack, the method's own mean."""
    _, attack, mean, _ = key
    return attacks is None or attack.partition(":")[0] in attacks or (attack == "" and mean == "mean")


def read(paths: Sequence[Path]) -> dict[Key, dict[str, Any]]:
    """The runs in these files."""
    lines = [line for path in paths if path.exists() for line in path.read_text().splitlines() if line.strip()]
    found = [json.loads(line) for line in lines]
    return {(row["method"], row["attack"], row["mean"], row["seed"]): row for row in found}


def run(args: argparse.Namespace) -> None:
    """Make the runs of this shard that the file lacks."""
    import sparsona as sp
    from sparsona.experiment.build import make_config, read_data

    shard, num = (int(part) for part in args.shard.split("/"))
    wanted = [key for key in rows(args.seeds, args.methods) if is_wanted(key, args.attacks)][shard::num]
    done, out = read([args.out]), args.out
    setting = {**SETTING, **({} if args.data_rate is None else {"data_rate": args.data_rate})}
    federations: dict[int, Any] = {}
    of_data = ("clients", "partition", "data_rate")
    training = {key: value for key, value in setting.items() if key not in of_data}
    for method, attack, mean, seed in wanted:
        if (method, attack, mean, seed) in done:
            continue
        if seed not in federations:
            named = {key: setting[key] for key in of_data} | {"data": args.data, "seed": seed}
            federations[seed] = read_data(make_config("fedavg", named))
        everyone = {} if method == "dispfl" else {"per_round": setting["clients"]}
        begun, row = time.perf_counter(), {"method": method, "attack": attack, "mean": mean, "seed": seed}
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = sp.train(
                    method,
                    federations[seed],
                    args.model,
                    out=Path(folder) / "run",
                    progress=False,
                    rounds=args.rounds,
                    seed=seed,
                    mean=mean,
                    attack=attack or None,
                    executor=args.executor,
                    **training,
                    **everyone,
                )
                accuracies = [None if math.isnan(one) else round(float(one), 6) for one in found.accuracies()]
                row |= {"accuracies": accuracies, "bytes": found.summary["bytes"]["total"]}
                row |= {"protocol": found.protocol}
            except sp.SparsonaError as error:  # training diverged: a result, and the list goes on
                row |= {"accuracies": None, "error": str(error).splitlines()[0]}
        row |= {"seconds": round(time.perf_counter() - begun, 2), "rounds": args.rounds, "data": args.data}
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(method, attack or "no attack", mean, seed, _shown(row), f"{row['seconds']} s", flush=True)


def _shown(row: dict[str, Any]) -> str:
    known = [one for one in row["accuracies"] or () if one is not None]
    return f"{100 * sum(known) / len(known):.1f}%" if known else row.get("error", "")


def loss(found: dict[Key, dict[str, Any]], method: str, attack: str, mean: str) -> tuple[float | None, float | None]:
    """Accuracy of honest clients and what the attack costs them, in points, mean over seeds; None: a run diverged, or
    is missing."""
    scores, costs = [], []
    for key, row in found.items():
        if key[:3] != (method, attack, mean):
            continue
        before = found.get((method, "", "mean", key[3]))
        if row["accuracies"] is None or before is None or before["accuracies"] is None:
            return None, None
        pairs = [
            (one, other)
            for one, other in zip(row["accuracies"], before["accuracies"], strict=True)
            if one is not None and other is not None
        ]
        scores.append(100 * sum(one for one, _ in pairs) / len(pairs))
        costs.append(100 * sum(other - one for one, other in pairs) / len(pairs))
    if not scores:
        return None, None
    return sum(scores) / len(scores), sum(costs) / len(costs)


def is_filtered(found: dict[Key, dict[str, Any]], method: str, attack: str, mean: str) -> bool:
    """Whether every lie was left out as divergent, under all seeds: then no mean had anything to do."""
    rows_ = [row for key, row in found.items() if key[:3] == (method, attack, mean) and row["accuracies"] is not None]
    lies = [row["accuracies"].count(None) * row["rounds"] for row in rows_]
    left_out = [re.search(r"(\d+) of \d+ turns diverged and were left out", row["protocol"]) for row in rows_]
    return all(one is not None and int(one[1]) >= num for one, num in zip(left_out, lies, strict=True))


def complete(found: dict[Key, dict[str, Any]], method: str) -> list[int]:
    """The seeds under which every run of a method is there: others would change some rows of a table and not others."""
    seeds = sorted({seed for name, _, _, seed in found if name == method})
    return [
        seed
        for seed in seeds
        if all((method, attack, mean, seed) in found for attack in attacks_of(method) for mean in MEANS)
    ]


def table(args: argparse.Namespace) -> None:
    """Print the tables and what became of the goal, as Markdown."""
    everything, verdicts = read(args.files), []
    for method in METHODS:
        if not (seeds := complete(everything, method)):
            continue
        found = {key: row for key, row in everything.items() if key[0] == method and key[3] in seeds}
        print(f"\n## {method}\n")
        print(
            "Accuracy of honest clients, %, and in brackets the points that they lost, "
            f"{'seed' if len(seeds) == 1 else 'mean of seeds'} {_listed(seeds)}.\n"
        )
        print("| attack | " + " | ".join(MEANS) + " |\n|---" + "|---:" * len(MEANS) + "|")
        for attack in attacks_of(method):
            cells = [loss(found, method, attack, mean) for mean in MEANS]
            best = min((cost for _, cost in cells if cost is not None), default=None)
            texts = [_cell(score, cost, best) for score, cost in cells]
            print(f"| {attack or 'none'} | " + " | ".join(texts) + " |")
            if f":{RATES[-1]}" in attack and best is not None:
                name = MEANS[[cost for _, cost in cells].index(best)]
                verdicts.append(
                    (method, attack.partition(":")[0], name, best, is_filtered(found, method, attack, name))
                )
        print(f"\nThe worst that {100 * RATES[-1]:.0f}% attackers cost under one mean, over all attacks, in points:\n")
        for mean in MEANS:
            costs = [loss(found, method, attack, mean)[1] for attack in attacks_of(method) if f":{RATES[-1]}" in attack]
            worst = "a run failed" if None in costs else _points(max(cost for cost in costs if cost is not None))
            print(f"- {mean}: {worst}")
        if gaps := _gaps(found, method, seeds):
            print(
                f"\nPoints lost in a cell differ between seeds by {gaps[len(gaps) // 2]:.1f} in the median of the "
                f"cells and by {gaps[-1]:.1f} at most."
            )
    print(f"\n## {100 * RATES[-1]:.0f}% attackers cost at most {GOAL:g} points with the best mean\n")
    print("The best mean is the best of its row in the tables above: chosen afterwards, by test accuracy.\n")
    print("| method | attack | best mean | points lost | holds |\n|---|---|---|---:|---|")
    for method, attack, mean, cost, filtered in verdicts:
        holds = "yes" if cost <= GOAL else "**no**"
        holds = "not counted: the divergence filter left out every lie" if filtered else holds
        print(f"| {method} | {attack} | {mean} | {_points(cost)} | {holds} |")
    counted = [cost for *_, cost, filtered in verdicts if not filtered]
    print(f"\nThe goal holds in {sum(cost <= GOAL for cost in counted)} of {len(counted)} cases.")


def _gaps(found: dict[Key, dict[str, Any]], method: str, seeds: Sequence[int]) -> list[float]:
    """By how much the points lost in each cell differ between seeds, in order; empty for one seed."""
    gaps = []
    for attack in attacks_of(method):
        for mean in MEANS:
            costs = [
                loss({key: row for key, row in found.items() if key[3] == seed}, method, attack, mean)[1]
                for seed in seeds
            ]
            known = [cost for cost in costs if cost is not None]
            gaps += [max(known) - min(known)] if len(known) > 1 else []
    return sorted(gaps)


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


def _cell(score: float | None, cost: float | None, best: float | None) -> str:
    if score is None or cost is None:
        return "failed"
    text = f"{score:.1f} ({_points(cost)})"
    return f"**{text}**" if cost == best else text


def _points(cost: float) -> str:
    return f"{round(cost, 1) + 0.0:.1f}"  # and no -0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--out", type=Path, required=True)
    runs.add_argument("--shard", default="0/1", help="this process's part of the list: 0/8 to 7/8")
    runs.add_argument("--seeds", type=int, default=1)
    runs.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    runs.add_argument("--attacks", nargs="+", choices=tuple(ATTACKS), help="default: all, and none")
    runs.add_argument("--data", default="fashion-mnist")
    runs.add_argument("--data-rate", type=float)
    runs.add_argument("--model", help="default: the data set's")
    runs.add_argument("--rounds", type=int, default=30)
    runs.add_argument("--executor", default="auto")
    runs.set_defaults(do=run)
    tables = commands.add_parser("table")
    tables.add_argument("files", type=Path, nargs="+")
    tables.set_defaults(do=table)
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
