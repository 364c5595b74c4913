"""Names become objects: train, resume, load and compare, for Python and for the command line alike."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsona import data, methods, models
from sparsona.analysis import summary as summaries
from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.task import Task
from sparsona.data.federation import Federation, federate
from sparsona.data.sources import load as load_source
from sparsona.engine.executors import choose
from sparsona.engine.jobs import Setting
from sparsona.engine.plan import Plan
from sparsona.engine.serial import Serial
from sparsona.engine.star import Star, received_work
from sparsona.runs import config as configs
from sparsona.runs.checkpoint import Checkpoints
from sparsona.runs.config import RunConfig
from sparsona.runs.session import Event, Listener, play
from sparsona.runs.store import RunFolder, environment, read_json, warn, write_atomically

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

RUNS = Path("runs")
GIVEN = "given"  # in a config: the data, partition or model came from Python and has no name
Model = "str | nn.Module | Callable[[], nn.Module] | None"


class Run:
    """A run's result, read from its folder."""

    def __init__(self, folder: RunFolder, setting: Callable[[], Setting]) -> None:
        self._folder, self._make_setting = folder, setting
        self.path = folder.path
        self.config: dict[str, Any] = folder.config
        self.summary: dict[str, Any] = folder.summary or summaries.view(folder).summary

    def __repr__(self) -> str:
        accuracy = self.summary["accuracy"]["mean"]
        return f"Run({self.summary['method']}, {self.summary['rounds']} rounds, accuracy {accuracy:.1%}, '{self.path}')"

    @property
    def protocol(self) -> str:
        """How the accuracies were obtained, in words."""
        return self.summary["protocol"]

    def accuracies(self) -> np.ndarray:
        """Each client's accuracy on its own test data at the headline point, from 0 to 1."""
        _, _, correct, count = summaries.headline(self._folder)
        return correct / count

    def curve(self, point: str = "received") -> list[tuple[int, float]]:
        """Mean accuracy against completed rounds."""
        return summaries.curve(self._folder, point)

    def personal_model(self, client: int) -> nn.Module:
        """A client's own model as a plain nn.Module in evaluation mode, its mask applied."""
        setting = self._make_setting()
        if not 0 <= client < len(setting.clients):
            raise SparsonaError(f"there is no client {client}", expected=f"0 to {len(setting.clients) - 1}")
        initial = Star(setting, Serial(setting)).start()
        progress = Checkpoints(self.path).load(setting, initial)
        if progress is None:
            raise SparsonaError(f"'{self.path}' has no checkpoint yet", mend="resume the run first")
        work = progress.tuned.get(client) or received_work(setting, progress.population, client)
        if setting.method.deploy is None:
            raise SparsonaError(f"{setting.method.name} deploys no plain model: its prediction takes more than weights")
        return setting.task.module(*setting.method.deploy(work))

    def report(self, path: str | Path) -> Path:
        """Write a self-contained HTML page."""
        from sparsona.analysis.report import write_report

        return write_report([summaries.view(self._folder)], path)


class Comparison:
    """Several runs of the same experiment, method by method and seed by seed."""

    def __init__(self, path: Path, runs: list[Run]) -> None:
        self.path, self.runs = path, runs

    def report(self, path: str | Path | None = None) -> Path:
        """Write one self-contained HTML page about all of them."""
        from sparsona.analysis.report import write_report

        return write_report(self.views(), path or self.path / "report.html")

    def views(self) -> list[Any]:
        return [summaries.view(run._folder) for run in self.runs]

    def table(self) -> list[dict[str, str]]:
        """One row per method: mean ± spread over seeds, ready to print."""
        from sparsona.analysis.table import rows

        return rows(self.views())

    def differences(self) -> list[dict[str, str]]:
        """Differences to the first method, paired by seed, with an interval."""
        from sparsona.analysis.table import differences

        return differences(self.views())


def train(
    method: str,
    federation: Federation | None = None,
    model: Any = None,
    *,
    out: str | Path | None = None,
    listen: Listener = lambda event: None,
    **options: Any,
) -> Run:
    """Train a method and return the finished run.

    `federation` and `model` are a person's own data and network; left out, `data=` and `model=` name built-in ones.
    `model` may be an nn.Module (its present weights are the start) or a function that builds one (called under the
    seed). `options` are those of the run and of the method, as `sparsona run --help` and `sparsona methods` list them.
    `out` is the run's folder, made anew.
    """
    config = make_config(method, options, federation, model)
    return _train(config, federation, model, Path(out) if out else _new_path(config), listen)


def _train(config: RunConfig, federation: Federation | None, model: Any, path: Path, listen: Listener) -> Run:
    setting = _setting(config, federation, model)
    config = config.model_copy(update={"executor": choose(config.executor, setting)})
    row = methods.card(config.method)
    about = {
        "method": config.method,
        "title": row.title,
        "point": config.headline,
        "alone": setting.method.server is None and setting.method.peer is None,
        "has_batch_statistics": setting.task.mixes_examples,
        "federation": setting.federation.digest(),
        "layout": setting.task.layout.digest.hex(),
        "num_parameters": setting.task.layout.size,
        "label_counts": setting.federation.label_counts("train").tolist(),
    }
    with RunFolder.create(path, configs.dump(config), about) as folder:
        return _play(folder, setting, config, listen)


def _play(folder: RunFolder, setting: Setting, config: RunConfig, listen: Listener) -> Run:
    progress = play(folder, setting, config.executor, config.max_seconds, listen)
    folder.write_summary(summaries.summarize(folder, progress.seconds))
    if not progress.finished:
        warn(f"stopped by max_seconds after round {progress.completed} of {config.rounds}; resume goes on")
    return Run(folder, lambda: setting)


def resume(
    path: str | Path,
    federation: Federation | None = None,
    model: Any = None,
    *,
    listen: Listener = lambda event: None,
) -> Run:
    """Go on with a run from its last checkpoint; the result is what it would have been without the interruption.

    A run on a person's own data or model needs them again.
    """
    folder = RunFolder.open(Path(path))
    config = configs.validated(RunConfig, folder.config, f"'{folder.path / 'config.json'}'")
    with folder:
        setting = _setting_again(folder, config, federation, model)
        now, then = environment(), folder.environment
        changed = [f"{key} {then.get(key)} -> {now[key]}" for key in now if now[key] != then.get(key)]
        if changed:
            warn("not the environment this run began in, so its last bits may differ: " + ", ".join(changed))
        return _play(folder, setting, config, listen)


def load(path: str | Path, federation: Federation | None = None, model: Any = None) -> Run:
    """A run's result as it stands, without going on with it."""
    folder = RunFolder.open(Path(path))
    config = configs.validated(RunConfig, folder.config, f"'{folder.path / 'config.json'}'")
    return Run(folder, lambda: _setting_again(folder, config, federation, model))


def views_in(path: str | Path) -> list[Any]:
    """What a report needs of the run in this folder, or of every run of a comparison that has results."""
    path = Path(path)
    if not (path / "comparison.json").exists():
        return [summaries.view(RunFolder.open(path))]
    folders = [path / entry["folder"] for entry in read_json(path / "comparison.json")]
    return [summaries.view(RunFolder.open(folder)) for folder in folders if (folder / "records.sqlite").exists()]


def _setting_again(folder: RunFolder, config: RunConfig, federation: Federation | None, model: Any) -> Setting:
    """A run's setting rebuilt, and checked to be the same."""
    for what, value, given in (("data", config.data, federation), ("model", config.model, model)):
        if value == GIVEN and given is None:
            raise SparsonaError(
                f"'{folder.path}' was started from Python on its own {what}",
                mend=f"call sparsona.resume or sparsona.load with the same {'federation' if what == 'data' else what}",
            )
    setting = _setting(config, federation, model)
    about = folder.about
    if setting.federation.digest() != about["federation"]:
        raise SparsonaError(f"the data is not that of '{folder.path}'", expected="the same examples, labels and splits")
    if setting.task.layout.digest.hex() != about["layout"]:
        raise SparsonaError(f"the model is not that of '{folder.path}'", expected="the same parameters")
    return setting


def make_config(
    method: str, options: Mapping[str, Any], federation: Federation | None = None, model: Any = None
) -> RunConfig:
    """The checked config of one run. `method` is a row's name, with options of its own after a colon if need be."""
    name, own = parse_method(method)
    row = methods.card(name)
    _, kind = methods.factory(name)
    keys = set(kind.model_fields)
    run_options, method_options = configs.split_options({**options, **own}, keys, name)
    if federation is not None:
        for key in ("data", "clients", "partition"):
            if key in run_options:
                raise SparsonaError(f"'{key}' together with a federation", mend="leave one of the two out")
        run_options |= {"data": GIVEN, "clients": federation.num_clients, "partition": GIVEN}
    if model is not None:
        run_options["model"] = model if isinstance(model, str) else GIVEN
    checked = configs.validated(kind, {**row.options, **method_options}, name)
    values = {**row.engine, **run_options, "method": name, "options": checked.model_dump(mode="json")}
    config = configs.validated(RunConfig, values, "a run")
    config.check_together()
    return config


def parse_method(text: str) -> tuple[str, dict[str, Any]]:
    """'fedspa:density=0.2,search=rsm' is a row and options for it alone."""
    name, _, rest = text.partition(":")
    return name, parse_pairs(rest.split(",") if rest else [])


def parse_pairs(pairs: Sequence[str]) -> dict[str, Any]:
    """key=value texts."""
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise SparsonaError(f"'{pair}' is not an option", expected="key=value", mend="for example density=0.5")
        found[key.strip().replace("-", "_")] = configs.parse_value(value.strip())
    return found


def _setting(config: RunConfig, federation: Federation | None, model: Any) -> Setting:
    if federation is None:
        if config.data not in data.SOURCES:
            raise unknown_name("data set", config.data, data.SOURCES)
        x, y = load_source(config.data)
        federation = federate(
            x,
            y,
            clients=config.clients,
            partition=config.partition,
            seed=config.seed,
            partition_seed=config.partition_seed,
            validation_rate=config.validation_rate,
            test_rate=config.test_rate,
            min_size=config.min_size,
            num_classes=data.SOURCES[config.data].num_classes,
            name=config.data,
        )
    if model is None or isinstance(model, str):
        name = config.model or (data.SOURCES[config.data].default_model if config.data in data.SOURCES else None)
        if name is None:
            raise SparsonaError(
                "no model", expected="a torch.nn.Module or a row of `sparsona models`", mend="model=net"
            )
        model = models.builder(name, federation.input_shape, federation.num_classes)
    task = Task(model, federation.input_shape, federation.num_classes)
    make, kind = methods.factory(config.method)
    make_method = partial(make, config=kind(**config.options))
    plan = Plan(
        rounds=config.rounds,
        per_round=config.sampled,
        batch_size=config.batch_size,
        seed=config.seed,
        lr_decay=config.lr_decay,
        eval_every=config.eval_every,
        points=config.all_points,
        tune_epochs=config.tune_epochs,
        tune_lr_scale=config.tune_lr_scale,
        drop_rate=config.drop_rate,
        everyone_trains=config.everyone_trains,
        stateless=config.stateless,
        num_novel=config.novel,
    )
    return Setting(task, make_method, federation, plan, config.capacities)


def _new_path(config: RunConfig) -> Path:
    return RUNS / f"{config.method}-{config.data}-seed{config.seed}-{_stamp()}"


def _stamp() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def compare(
    names: Sequence[str],
    federation: Federation | None = None,
    model: Any = None,
    *,
    seeds: int | Sequence[int] = 1,
    out: str | Path | None = None,
    listen: Callable[[str, int, Event], None] = lambda title, seed, event: None,
    **options: Any,
) -> Comparison:
    """Train several methods under the same seeds: same partition, split, initial weights and sampled clients.

    An option that only some of the methods have is given to those. `seeds` is a number of seeds, counted from `seed`,
    or a list of them.
    """
    if not names:
        raise SparsonaError("no method to compare", expected="one or more rows of `sparsona methods`")
    if len(set(names)) < len(names):
        raise SparsonaError(
            f"a method twice in {list(names)}", mend="give one of them other options: fedspa:density=0.2"
        )
    first = int(options.pop("seed", 0))
    numbers = list(range(first, first + seeds)) if isinstance(seeds, int) else [int(seed) for seed in seeds]
    if not numbers:
        raise SparsonaError("no seeds", expected="at least one")
    planned = []
    used: set[str] = set()
    for name in names:
        _, kind = methods.factory(parse_method(name)[0])
        mine = {
            key: value for key, value in options.items() if key in RunConfig.model_fields or key in kind.model_fields
        }
        used |= set(mine)
        for seed in numbers:
            planned.append((name, make_config(name, {**mine, "seed": seed}, federation, model)))
    if unused := set(options) - used:
        known = set(RunConfig.model_fields).union(*(methods.factory(parse_method(n)[0])[1].model_fields for n in names))
        raise unknown_name(f"option of {', '.join(names)}", sorted(unused)[0], known - {"options", "method"})
    path = Path(out) if out else RUNS / f"compare-{_stamp()}"
    _check_free(path)
    path.mkdir(parents=True, exist_ok=True)
    entries = [
        {
            "folder": f"{name.replace(':', '_').replace('=', '-').replace(',', '_')}-seed{config.seed}",
            "config": config.model_dump(mode="json"),
        }
        for name, config in planned
    ]
    write_atomically(path / "comparison.json", (json.dumps(entries, indent=1) + "\n").encode())
    return _compare(path, federation, model, listen)


def resume_comparison(path: str | Path, listen: Callable[[str, int, Event], None]) -> Comparison:
    """Go on with a comparison: finished runs are kept, the others go on or start."""
    return _compare(Path(path), None, None, listen)


def _compare(
    path: Path, federation: Federation | None, model: Any, listen: Callable[[str, int, Event], None]
) -> Comparison:
    runs = []
    for entry in read_json(path / "comparison.json"):
        config = configs.validated(RunConfig, entry["config"], "a run")
        folder = path / entry["folder"]
        hear = partial(listen, methods.card(config.method).title, config.seed)
        if (folder / "config.json").exists():
            runs.append(resume(folder, federation, model, listen=hear))
        else:
            runs.append(_train(config, federation, model, folder, hear))
    return Comparison(path, runs)


def _check_free(path: Path) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise SparsonaError(
            f"'{path}' is already used",
            expected="a folder that does not exist yet, or an empty one",
            mend="choose another --out, or `sparsona resume` what is there",
        )
