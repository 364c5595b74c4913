"""Compare methods under equal conditions, and resume a comparison."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from sparsona import methods
from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.data.federation import Federation
from sparsona.engine.rounds import check_plan
from sparsona.executors import choose
from sparsona.experiment.build import make_configs, make_context
from sparsona.experiment.run import Comparison, planned_runs
from sparsona.experiment.train import RUNS, hint_resume, load_warm_start, resume_run, start_run, timestamp
from sparsona.runs.folder import make_empty_folder, warn, write_atomically
from sparsona.runs.observers import ObserverList
from sparsona.runs.options import CONDITIONS, OPTIONS, RunConfig
from sparsona.runs.request import parse_method
from sparsona.runs.validation import validate


def compare(
    names: Sequence[str],
    federation: Federation | None = None,
    model: Any = None,
    *,
    seeds: int | Sequence[int] = 1,
    out: str | Path | None = None,
    observers: Sequence[object] = (),
    **options: Any,
) -> Comparison:
    """Train several methods under the same seeds: same partition, split, initial weights and sampled clients.

    Args:
        names: rows of `sparsona methods`, each with options of its own after a colon if needed.
        federation: your own data, as for `train`.
        model: a network, as for `train`.
        seeds: a number of seeds, counted from the option `seed`, or a list of seeds.
        out: the folder of the comparison, which must not exist yet. None: a new one in ./runs.
        observers: as for `train`; they receive the records of one run after another.
        options: as for `train`. An option, or a preset, that only some of the methods have is given to those.

    Returns:
        The runs, with tables of their results.

    Example:
        >>> import sparsona as sp
        >>> both = sp.compare(["local", "fedavg"], clients=4, rounds=1)
        >>> [row["method"] for row in both.table()]
        ['Local', 'FedAvg']
    """
    observer_list = ObserverList(observers)
    if not names:
        raise SparsonaError("no method to compare", expected="one or more rows of `sparsona methods`")
    if unnamed := [name for name in names if not isinstance(name, str)]:
        raise SparsonaError(
            f"a {type(unnamed[0]).__name__} among the methods to compare",
            expected="names of rows of `sparsona methods`: a comparison is resumed by them",
            hint=f"give your method an entry point in the group '{methods.ENTRY_POINTS}', or train it by itself",
        )
    if len(set(names)) < len(names):
        raise SparsonaError(
            f"a method twice in {', '.join(names)}",
            expected="methods that differ",
            hint="give one of them other options: fedspa:density=0.2",
        )
    first = options.pop("seed", 0)
    if not isinstance(first, int):
        raise SparsonaError(f"seed = {first!r}", expected="a whole number, 0 or more", hint="for example --seed 1")
    numbers = list(range(first, first + seeds)) if isinstance(seeds, int) else [int(seed) for seed in seeds]
    if not numbers or len(set(numbers)) < len(numbers):
        raise SparsonaError(
            f"seeds {numbers}" if numbers else "no seeds", expected="at least one, all different", hint="--seeds 3"
        )
    planned: list[tuple[str, RunConfig, BaseModel]] = []
    used: set[str] = set()
    cards = [methods.card(parse_method(name)[0]) for name in names]
    has_peers, has_presets = any(card.peers for card in cards), any(card.presets for card in cards)
    for name in names:
        row, own = parse_method(name)
        _, kind = methods.factory(row)
        # All peers take part where a server samples some: that is the method.
        if common := sorted((CONDITIONS - ({"per_round"} if methods.card(row).peers else set())) & set(own)):
            raise SparsonaError(
                f"'{name}' sets {', '.join(common)} for one method alone",
                expected="the same data, clients, model and seeds for all, or their results would not compare",
                hint=f"set it for all: --{common[0].replace('_', '-')} or --set {common[0]}=...",
            )
        mine = {key: value for key, value in options.items() if key in OPTIONS or key in kind.model_fields}
        used |= set(mine)
        if has_peers and not methods.card(row).peers:
            mine.pop("graph", None)
            mine.pop("tune_from", None)
        if has_presets and not methods.card(row).presets:
            mine.pop("preset", None)
        for seed in numbers:
            planned.append((name, *make_configs(name, {**mine, "seed": seed}, federation, model)))
    if unused := set(options) - used:
        known = set(OPTIONS).union(*(methods.factory(parse_method(n)[0])[1].model_fields for n in names))
        raise unknown_name(f"option of {', '.join(names)}", sorted(unused)[0], known)
    alike = [name for name, config, _ in planned if sum(config == other for _, other, _ in planned) > 1]
    if alike:
        raise SparsonaError(
            f"{' and '.join(dict.fromkeys(alike))} are the same method with the same options",
            expected="methods that differ",
            hint="leave one of them out, or give it other options: fedspa:density=0.2",
        )
    # Errors in the data, the model or the executor are raised before a folder is made.
    for name in names:
        config, of_method = next((config, own) for planned_name, config, own in planned if planned_name == name)
        context = make_context(config, federation, model, start=load_warm_start(config), method_config=of_method)
        choose(config.executor, context)
        check_plan(context.server_side)
    path = Path(out) if out else RUNS / f"compare-{timestamp()}"
    make_empty_folder(path)
    entries = [
        {
            "folder": f"{re.sub('[^a-z0-9.+-]+', '_', name.lower().replace('=', '-'))}-seed{config.seed}",
            "config": config.model_dump(mode="json"),
        }
        for name, config, _ in planned
    ]
    write_atomically(path / "comparison.json", (json.dumps(entries, indent=1) + "\n").encode())
    folders = [path / str(entry["folder"]) for entry in entries]
    runs = [(folder, config, own) for folder, (_, config, own) in zip(folders, planned, strict=True)]
    with hint_resume(path):
        return _compare(path, runs, federation, model, observer_list)


def resume_comparison(
    path: str | Path,
    federation: Federation | None = None,
    model: Any = None,
    *,
    observers: Sequence[object] = (),
) -> Comparison:
    """Resume a comparison: finished runs are kept, the others are resumed or started."""
    path = Path(path)
    with hint_resume(path):
        where = f"'{path / 'comparison.json'}'"
        runs = [(folder, validate(RunConfig, values, where), None) for folder, values in planned_runs(path)]
        return _compare(path, runs, federation, model, ObserverList(observers))


def _compare(
    path: Path,
    planned: Sequence[tuple[Path, RunConfig, BaseModel | None]],
    federation: Federation | None,
    model: Any,
    observers: ObserverList,
) -> Comparison:
    runs = []
    for folder, config, method_config in planned:
        if (folder / "config.json").exists():
            runs.append(resume_run(folder, federation, model, observers))
        else:
            runs.append(start_run(config, federation, model, folder, observers, method_config=method_config))
    reached = {run.summary["rounds"] for run in runs}
    if len(reached) > 1:
        warn(f"these runs stopped at different rounds ({sorted(reached)}): their results do not compare")
    return Comparison(path, runs)
