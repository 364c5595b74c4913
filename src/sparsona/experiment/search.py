"""The trials of a search: which options are tried next, and how trials are run, judged, pruned and kept.

Options are drawn in batches of `BATCH` trials, each by the results of the batches before it and a seed of its own.
So neither the number of processes nor their timing decides what is tried, and a search that was killed goes on as
if nothing had happened: every finished trial is a file, and a trial under way is a run that can be resumed.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import shutil
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from sparsona.analysis import summary as summaries
from sparsona.core.errors import SparsonaError
from sparsona.core.points import RECEIVED
from sparsona.data.federation import Federation
from sparsona.experiment.build import make_configs
from sparsona.experiment.parallel import is_of_machine, pack_given, processes, unless_stopped
from sparsona.experiment.train import folder_name, resume_run, start_run
from sparsona.methods import MethodCard
from sparsona.runs.facts import MEANS
from sparsona.runs.files import (
    check_plain,
    explain_disk_errors,
    read_json,
    with_checksum,
    without_checksum,
    write_atomically,
)
from sparsona.runs.folder import RunFolder
from sparsona.runs.observers import EvaluationResult, ObserverList

BATCH = 4
Space = Mapping[str, tuple[Any, ...]]
Listen = Callable[[int, int, str], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Trial:
    """One trial of one method: its options, and what came of it."""

    number: int
    options: dict[str, Any]
    state: Literal["complete", "pruned", "failed"]
    value: float | None = None  # the result on held-out data, after the last round; of a pruned one, so far
    curve: dict[int, float] = field(default_factory=dict)  # by completed rounds
    error: str = ""


def write_file(path: Path, value: Any) -> None:
    """Write a file of a search: a dataclass, with a checksum."""
    plain = json.loads(json.dumps(asdict(value)))  # as it is read: keys are texts
    write_atomically(path, (json.dumps(with_checksum(plain), indent=1) + "\n").encode())


def read_file(kind: type[T], path: Path, hint: str) -> T:
    """A file that a search wrote."""
    try:
        return TypeAdapter(kind).validate_python(without_checksum(read_json(path), path, is_needed=False))
    except (ValidationError, SparsonaError) as error:
        what = str(error).splitlines()[0]
        raise SparsonaError(
            f"'{path}' is damaged: {what}", expected="the file as sparsona wrote it", hint=hint
        ) from None


class Search:
    """The search of one method: trials in batches, each a file when it is finished."""

    def __init__(
        self,
        path: Path,
        name: str,
        space: Space,
        options: dict[str, Any],
        defaults: Mapping[str, Any],
        trials: int,
        seed: int,
        prunes: bool,
    ) -> None:
        self.name, self.space, self.options, self.seed, self.prunes = name, space, options, seed, prunes
        first = {key: defaults[key] for key in space}
        # The defaults are the first trial, if they are among the values: a search should not do worse than none.
        self.first = first if space and all(first[key] in values for key, values in space.items()) else None
        self.folder = path / folder_name(name)
        self.trials: list[Trial] = []
        self.total = min(trials, max(1, size_of(space)))

    def next_batch(self) -> list[tuple[int, dict[str, Any]]]:
        """Numbers and options of the trials to do now; empty when the search is over."""
        first, count = len(self.trials), min(BATCH, self.total - len(self.trials))
        begin = None if first else self.first
        return list(
            enumerate(_propose(self.space, self.trials, f"{self.seed}/{self.name}/{first}", count, begin), first)
        )

    def limits(self) -> dict[int, float]:
        """The median of the trials of earlier batches at each evaluated round: below it, a trial is pruned."""
        if not self.prunes:
            return {}
        curves = [one.curve for one in self.trials if one.state == "complete"]
        rounds = sorted(set().union(*curves))[:-1] if curves else []
        # The first evaluation says little: rates that are right later may begin slowly.
        return {at: statistics.median(curve[at] for curve in curves if at in curve) for at in rounds[1:]}

    def file(self, number: int) -> Path:
        return self.folder / f"trial-{number:03d}.json"

    def finished(self, number: int) -> Trial | None:
        """A trial that was finished before, from its file."""
        if not self.file(number).exists():
            return None
        hint = "delete it: the trial is then done again"
        trial = read_file(Trial, self.file(number), hint)
        known = trial.options.keys() == self.space.keys()
        if not known or any(trial.options[key] not in values for key, values in self.space.items()):
            raise SparsonaError(
                f"'{self.file(number)}' is of another search", expected="options of this one", hint=hint
            )
        return trial

    def finish(self, trial: Trial) -> None:
        """Keep a trial's file, and nothing of its run."""
        write_file(self.file(trial.number), trial)
        shutil.rmtree(self.file(trial.number).with_suffix(""), ignore_errors=True)


def play_all(
    searches: Iterable[Search],
    rows: Mapping[str, MethodCard],
    federation: Federation | None,
    model: Any,
    jobs: int,
    listen: Listen | None,
) -> None:
    """Play all batches of all searches; those of one method one after the other, those of others beside them.

    `rows` are the methods that were passed from Python, by the name of their search.
    """
    searches = list(searches)
    total = sum(one.total for one in searches)

    def report(search: Search, trial: Trial) -> None:
        if listen is not None:
            done = sum(len(one.trials) for one in searches) + sum(map(len, waiting.values()))
            listen(done, total, f"{search.name}: {_describe(trial)}")

    waiting: dict[str, dict[int, Trial]] = {}  # of unfinished batches
    if listen is not None:
        listen(0, total, "")
    with processes(jobs) as pool:
        given = pack_given(federation, model, rows) if jobs > 1 else (federation, model, rows)
        running: dict[Future[Trial], Search] = {}

        def start(search: Search) -> None:
            while batch := search.next_batch():
                check_plain(search.folder, is_folder=True)
                with explain_disk_errors(search.folder):
                    search.folder.mkdir(exist_ok=True)
                waiting[search.name], limits = {}, search.limits()
                sent = 0
                for number, options in batch:
                    if (done := search.finished(number)) is not None:
                        waiting[search.name][number] = done
                        report(search, done)
                        continue
                    where = search.file(number).with_suffix("")
                    check_plain(where, is_folder=True)
                    task = (search.name, {**search.options, **options}, options, number, str(where), limits, given)
                    running[pool.submit(unless_stopped, _play_trial, *task)] = search
                    sent += 1
                if sent:
                    return
                close(search)

        def close(search: Search) -> None:
            search.trials += [trial for _, trial in sorted(waiting.pop(search.name).items())]

        for search in searches:
            start(search)
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                search = running.pop(future)
                trial = future.result()
                search.finish(trial)
                waiting[search.name][trial.number] = trial
                report(search, trial)
                if search not in running.values():
                    close(search)
                    start(search)


class _PrunedError(Exception):
    """A trial is below its limit; its argument is the curve up to there."""


class _Watch:
    """Follows the value on held-out data, and ends a trial that is below its limit."""

    def __init__(self, limits: Mapping[int, float], curve: Mapping[int, float] | None = None) -> None:
        self.limits, self.curve = limits, dict[int, float]()
        for completed, value in (curve or {}).items():
            self.add(completed, value)

    def on_evaluation(self, result: EvaluationResult) -> None:
        """Of what clients receive: points that are evaluated at the end only have no curve."""
        if (value := _mean(result)) is not None:
            self.add(result.completed, value)

    def add(self, completed: int, value: float) -> None:
        self.curve[completed] = value
        if value < self.limits.get(completed, -math.inf):
            raise _PrunedError(dict(self.curve))


def _mean(result: EvaluationResult) -> float | None:
    """Mean accuracy at `received` or, of a regression, the negative of its mean loss: higher is better."""
    if (accuracy := result.mean(RECEIVED)) is not None:
        return accuracy
    losses = [one.loss for one in result.clients if one.point == RECEIVED]
    return -sum(losses) / len(losses) if losses else None


def _recorded(folder: RunFolder) -> dict[int, float]:
    """The curve of a run so far, from its records: that of a run which was stopped is not in memory."""
    sign = -1 if folder.facts.is_regression else 1
    return {completed: sign * value for completed, value in summaries.curve(folder, RECEIVED)}


def _play_trial(
    name: str,
    options: dict[str, Any],
    chosen: dict[str, Any],
    number: int,
    where: str,
    limits: Mapping[int, float],
    given: Any,
) -> Trial:
    """One trial; `given` is pickled for a process of its own."""
    import cloudpickle

    federation, model, rows = cloudpickle.loads(given) if isinstance(given, bytes) else given
    folder, row = Path(where), rows.get(name)
    try:
        if (folder / "config.json").exists():
            observers = ObserverList([_Watch(limits, _recorded(RunFolder.open(folder)))])
            run = resume_run(folder, federation, model, observers, method=row)
        else:
            shutil.rmtree(folder, ignore_errors=True)  # killed before the run was made
            config, own = make_configs(row or name, options, federation, model)
            observers = ObserverList([_Watch(limits)])
            run = start_run(config, federation, model, folder, observers, method_config=own, row=row)
    except _PrunedError as error:
        (curve,) = error.args
        return Trial(number, chosen, "pruned", list(curve.values())[-1], curve)
    except Exception as error:  # one method's fault must not cost the others their trials: the table shows it
        if is_of_machine(error):
            raise  # the search can be resumed
        text = str(error) if isinstance(error, SparsonaError) else f"{type(error).__name__}: {error}"
        return Trial(number, chosen, "failed", error=text)
    recorded = RunFolder.open(folder)
    accuracy = run.summary["accuracy"][MEANS[recorded.facts.weight]]
    value = -run.summary["error"]["loss"] if accuracy is None else accuracy
    if not math.isfinite(value):
        return Trial(number, chosen, "failed", error="training diverged")
    return Trial(number, chosen, "complete", float(value), _recorded(recorded))


def _propose(
    space: Space, trials: Sequence[Trial], seed: str, count: int, begin: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Options of the next trials: those that a tree-structured Parzen estimator prefers, none of them tried before.

    `begin` comes before them, if it is given.
    """
    import optuna

    if not count:
        return []
    if not space:
        return [{}]
    drawn = random.Random(seed)
    scale = {key: optuna.distributions.IntDistribution(0, len(values) - 1) for key, values in space.items()}
    sampler = optuna.samplers.TPESampler(
        seed=drawn.randrange(2**32), n_startup_trials=BATCH, multivariate=True, constant_liar=True
    )
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for trial in trials:
        if trial.value is not None:
            at = {key: values.index(trial.options[key]) for key, values in space.items()}
            study.add_trial(optuna.trial.create_trial(params=at, distributions=dict(scale), value=trial.value))
    tried = [tuple(trial.options.values()) for trial in trials]
    grid = [*itertools.product(*space.values())]
    proposals = [] if begin is None else [begin]
    tried += [tuple(one.values()) for one in proposals]
    while len(proposals) < count and len(tried) < len(grid):
        for _ in range(BATCH):
            asked = study.ask(dict(scale))
            values = tuple(space[key][place] for key, place in asked.params.items())
            if values not in tried:
                break
        else:  # it insists on what is known: something else, at random
            values = drawn.choice([one for one in grid if one not in tried])
        tried.append(values)
        proposals.append(dict(zip(space, values, strict=True)))
    return proposals


def size_of(space: Space) -> int:
    """How many combinations there are."""
    return math.prod(len(values) for values in space.values())


def written(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def written_options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={written(value)}" for key, value in options.items())


def written_value(value: float) -> str:
    return f"{value:.1%}" if value >= 0 else f"loss {-value:.4g}"


def _describe(trial: Trial) -> str:
    reached = "" if trial.value is None else f" {written_value(trial.value)}"
    return f"{written_options(trial.options) or 'as it is'}: {trial.state}{reached}"
