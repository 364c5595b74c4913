"""What a column of a recipe measures: costs and options, which need no training, and runs. A measure is one row here.

Written `name` or `name:argument`. Accuracies are in percent, as papers print them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparsona.analysis.charts import novel_gap, train_test_gap
from sparsona.analysis.outcomes import capacities
from sparsona.analysis.statistics import accuracy_summary, mean_and_spread
from sparsona.analysis.targets import first_reached, relative_rounds
from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.points import RECEIVED, TUNED

if TYPE_CHECKING:
    from sparsona.experiment.run import Run
    from sparsona.reproduce.recipe import Recipe


@dataclass(frozen=True)
class Figure:
    """A figure of ours: the mean over seeds and its sample standard deviation, None for one seed.

    `is_bound`: some seed did not get there (a target accuracy), so that the mean is a lower bound; `reached` seeds did.
    `is_early`: some seed stopped before its last round, so that its figure is not the row's.
    """

    value: float
    spread: float | None = None
    seeds: int = 1
    is_bound: bool = False
    reached: int | None = None
    is_early: bool = False


@dataclass(frozen=True)
class AtLeast:
    """The value of a run that did not get there: it is above this."""

    value: float


Value = float | AtLeast | None  # None: not known
OfCost = Callable[[Mapping[str, Any], Mapping[str, Any] | None, str], Value]
OfOptions = Callable[[Mapping[str, Any], str], Value]
OfRun = Callable[["Run", "Run | None", str], Value]


@dataclass(frozen=True)
class Measure:
    """A row of `MEASURES`. One of the three functions reads the figure; the last argument is what follows the colon.

    Args:
        text: what is measured.
        of_cost: from what `sparsona cost` says of a row, in the papers' counting, and of the row `against`.
        of_options: from the options that the row is run with.
        of_run: from a run, and the run of the same seed of the row `against`.
        argument: what follows the colon, for messages; "": nothing does; in brackets: it may be left out.
        needs_against: it is relative to another row.
        needs_profile: runs must be profiled.
        by_evaluation: it depends on which rounds are evaluated (`eval_every`).
        spread: of one run, such as over its turns; it is shown where there is one seed.
    """

    text: str
    of_cost: OfCost | None = None
    of_options: OfOptions | None = None
    of_run: OfRun | None = None
    argument: str = ""
    needs_against: bool = False
    needs_profile: bool = False
    by_evaluation: bool = False
    spread: OfRun | None = None

    @property
    def needs_training(self) -> bool:
        """Whether runs are needed."""
        return self.of_run is not None


def find(text: str) -> tuple[Measure, str]:
    """The measure that a column names, and its argument."""
    name, colon, argument = text.partition(":")
    if name not in MEASURES:
        raise unknown_name("measure", name, MEASURES)
    measure = MEASURES[name]
    optional = measure.argument.startswith("[")
    if bool(colon) != bool(measure.argument) and not (optional and not colon):
        written = f"'{name}:{measure.argument}'" if measure.argument else f"'{name}' alone"
        raise SparsonaError(f"measure '{text}'", expected=f"{written}: {measure.text}")
    if colon and measure.argument.strip("[]") in ("UNIT", "PERCENT", "SHARE"):
        _number(text, argument)
    return measure, argument


def needs_runs(recipe: Recipe) -> bool:
    """Whether a recipe shows anything that training gives; other tables print costs or settings."""
    return recipe.picture is not None or any(find(one.measure)[0].needs_training for one in recipe.columns.values())


def measures_time(recipe: Recipe) -> bool:
    """Whether a column is about seconds, so that runs must be profiled, one after another."""
    return any(find(one.measure)[0].needs_profile for one in recipe.columns.values())


def of_runs(text: str, runs: Sequence[Run], against: Mapping[int, Run]) -> Figure | None:
    """A measure over the seeds of a row; None where no run has it.

    Args:
        text: the measure.
        runs: the runs of a row, one per seed.
        against: those of the row that it is compared with, by seed.

    Returns:
        The mean over the runs that have the figure.
    """
    measure, argument = find(text)
    assert measure.of_run is not None
    found = [(run, measure.of_run(run, against.get(run.config["seed"]), argument)) for run in runs]
    known = [(run, one) for run, one in found if one is not None]
    if not known:
        return None
    mean, spread = mean_and_spread([one.value if isinstance(one, AtLeast) else one for _, one in known])
    is_early = any(run.summary.get("rounds", 0) < run.config.get("rounds", 0) for run, _ in known)
    reached = sum(not isinstance(one, AtLeast) for _, one in known)
    if reached < len(known):
        return Figure(mean, None, len(known), True, reached, is_early)
    if len(known) == 1 and measure.spread is not None:
        of_turns = measure.spread(known[0][0], None, argument)
        spread = of_turns if isinstance(of_turns, float) else None
    return Figure(mean, spread, len(known), is_early=is_early)


def _number(text: str, argument: str) -> float:
    try:
        return float(argument)
    except ValueError:
        raise SparsonaError(f"measure '{text}'", expected="a number after the colon") from None


# Costs.


def _entry(*path: str) -> OfCost:
    def read(report: Mapping[str, Any], against: Mapping[str, Any] | None, unit: str) -> Value:
        found: Any = report
        for key in path:
            found = found[key]
        return None if found is None else float(found) / (float(unit) if unit else 1.0)

    return read


def _saved(read: OfCost) -> OfCost:
    """How much less than the other row, in per cent."""

    def share(report: Mapping[str, Any], against: Mapping[str, Any] | None, unit: str) -> Value:
        own, other = read(report, None, ""), None if against is None else read(against, None, "")
        return 100 * (1 - own / other) if isinstance(own, float) and isinstance(other, float) and other else None

    return share


def _values(*path: str) -> OfCost:
    """Megabytes as a number of parameters, four bytes each."""
    read = _entry(*path)

    def count(report: Mapping[str, Any], against: Mapping[str, Any] | None, unit: str) -> Value:
        found = read(report, None, unit)
        return found * 1e6 / 4 if isinstance(found, float) else None

    return count


def _dense_multiple(report: Mapping[str, Any], against: Mapping[str, Any] | None, what: str) -> Value:
    """Of the size of a dense model, or of the FLOPs of an example in it; training is two passes, as pFedGate counts."""
    turn, megabytes, flops = report["per_client_round"], 4 * report["num_parameters"] / 1e6, report["dense_flops"]
    found = {
        "infer": lambda: report["inference_flops"] / flops,
        "up": lambda: turn["up_mb"] / megabytes,
        "down": lambda: turn["down_mb"] / megabytes,
        "stored": lambda: report["memory"]["at_hand_mb"] / megabytes,
        "train": lambda: (
            None
            if turn["train_flops"] is None
            else turn["train_flops"] / (report["trained"] * report["options"]["epochs"] * flops) * 2 / 3
        ),
    }
    if what not in found:
        raise unknown_name("multiple of a dense model", what, found)
    return found[what]()


# Options.


def _option(options: Mapping[str, Any], name: str) -> Value:
    found = options.get(name)
    return float(found) if isinstance(found, int | float) else None


def _tuning_lr(options: Mapping[str, Any], argument: str) -> Value:
    lr, scale = _option(options, "lr"), _option(options, "tune_lr_scale")
    return lr * scale if isinstance(lr, float) and isinstance(scale, float) else None


# Runs.


def _accuracy(key: str) -> OfRun:
    def read(run: Run, against: Run | None, argument: str) -> Value:
        found = run.summary["accuracy"].get(key)
        return None if found is None else 100 * float(found)

    return read


def _against(read: OfRun, sign: int = 1) -> OfRun:
    """A figure minus that of the other row under the same seed, or the other way round."""

    def difference(run: Run, against: Run | None, argument: str) -> Value:
        own, other = read(run, None, argument), None if against is None else read(against, None, argument)
        return sign * (own - other) if isinstance(own, float) and isinstance(other, float) else None

    return difference


def _saved_by_run(read: OfRun) -> OfRun:
    """How much less than the other row's run, in per cent."""

    def share(run: Run, against: Run | None, argument: str) -> Value:
        own, other = read(run, None, argument), None if against is None else read(against, None, argument)
        return 100 * (1 - own / other) if isinstance(own, float) and isinstance(other, float) and other else None

    return share


def _curve(run: Run) -> list[tuple[int, float]]:
    """Accuracy over rounds at the headline point or, where that is measured once at the end, before it."""
    at_headline = run.curve(run.view.point)
    return at_headline if len(at_headline) > 1 else run.curve(RECEIVED)


def _best(run: Run, against: Run | None, argument: str) -> Value:
    return 100 * max(value for _, value in (*_curve(run), *run.curve(run.view.point)))


def _at(key: str) -> OfRun:
    """The accuracy at another point, at its last evaluation."""

    def read(run: Run, against: Run | None, point: str) -> Value:
        return 100 * accuracy_summary(*run.counts(point))[key] if point in run.points else None

    return read


def _reached(run: Run, target: float) -> float | AtLeast:
    found = first_reached(_curve(run), target)
    return AtLeast(float(run.summary["rounds"])) if found is None else float(found)


def _rounds_to(run: Run, against: Run | None, percent: str) -> Value:
    return _reached(run, float(percent) / 100)


def _relative_rounds(run: Run, against: Run | None, share: str) -> Value:
    found = None if against is None else relative_rounds([run.view], [against.view], float(share))
    return None if found is None else found.mean


def _rounds_saved(run: Run, against: Run | None, argument: str) -> Value:
    """Per cent fewer rounds than the other row takes to its best accuracy."""
    if against is None:
        return None
    best = max(value for _, value in _curve(against))
    own, other = _reached(run, best), _reached(against, best)
    return 100 * (1 - own / other) if isinstance(own, float) and isinstance(other, float) and other else None


def _of_capacity(run: Run, against: Run | None, capacity: str) -> Value:
    """Mean over the clients of this capacity."""
    found = capacities(run.config, *run.counts()).get(float(capacity))
    return None if found is None else 100 * found["mean"]


def _tuned_gain(run: Run, against: Run | None, argument: str) -> Value:
    read = _at("weighted")
    tuned, received = read(run, None, TUNED), read(run, None, RECEIVED)
    return tuned - received if isinstance(tuned, float) and isinstance(received, float) else None


def _flops(run: Run) -> float:
    return float((run.summary["flops"]["train"] or 0) + (run.summary["flops"]["mask_search"] or 0))


def _run_flops(run: Run, against: Run | None, unit: str) -> Value:
    return _flops(run) / float(unit)


def _run_client_flops(run: Run, against: Run | None, unit: str) -> Value:
    turns = run.summary["turns"]["total"]
    return _flops(run) / turns / float(unit) if turns else None


def _run_traffic(run: Run, against: Run | None, argument: str) -> Value:
    return float(run.summary["bytes"]["paper_total"]) / 1e9


def _run_busiest(run: Run, against: Run | None, argument: str) -> Value:
    found = run.summary["bytes"].get("busiest_round_paper")  # older summaries lack it
    return None if found is None else float(found) / 1e6


def _upload_share(run: Run, against: Run | None, argument: str) -> Value:
    # pFedGate's q is what a turn used, also where everything is sent.
    found = run.summary.get("upload_share", run.summary["bytes"].get("upload_share"))
    return None if found is None else float(found)


def _measured(name: str) -> OfRun:
    """What a method measured in its turns, the mean over them."""

    def read(run: Run, against: Run | None, argument: str) -> Value:
        found = run.summary.get(name)
        return None if found is None else float(found)

    return read


def _search_time(name: str, scale: float = 1.0) -> OfRun:
    """From the profile of a run whose clients search for masks."""

    def read(run: Run, against: Run | None, argument: str) -> Value:
        found = run.view.search_time
        return None if found is None or found.get(name) is None else scale * float(found[name])

    return read


def _clients_hurt(run: Run, against: Run | None, argument: str) -> Value:
    if against is None:
        return None
    return float(next(change.num_hurt for change in run.clients(against).changes if change.name == "test"))


def _num_clients(run: Run, against: Run | None, argument: str) -> Value:
    return float(len(run.view.sizes))


def _examples(pick: Callable[[Any], Any]) -> OfRun:
    """Of a client's training, validation and test examples together."""
    return lambda run, against, argument: float(pick(run.view.sizes.sum(axis=1)))


MEASURES: dict[str, Measure] = {
    # Without training, as the papers count.
    "traffic_gb": Measure("GB sent in the whole run", _entry("total", "comm_gb")),
    "busiest_mb": Measure("MB through the busiest node in a round, one way", _entry("busiest_node", "comm_mb")),
    "client_mb": Measure("MB that a client sends in a round", _entry("per_client_round", "up_mb")),
    "flops": Measure("FLOPs of training and mask search, whole run", _entry("total", "flops"), argument="UNIT"),
    "client_flops": Measure(
        "FLOPs of a client's training and mask search in a round", _entry("per_client_round", "flops"), argument="UNIT"
    ),
    "inference_flops": Measure("FLOPs of predicting one example", _entry("inference_flops"), argument="UNIT"),
    "parameters": Measure("parameters of the network", _entry("num_parameters"), argument="[UNIT]"),
    "personal_parameters": Measure(
        "parameters that stay with a client", _values("memory", "kept_mb"), argument="[UNIT]"
    ),
    "shared_parameters": Measure(
        "parameters that a client sends", _values("per_client_round", "up_mb"), argument="[UNIT]"
    ),
    "dense_multiple": Measure(
        "train, infer, up, down or stored, in multiples of a dense model's", _dense_multiple, argument="WHAT"
    ),
    "traffic_saved": Measure("% less traffic", _saved(_entry("total", "comm_gb")), needs_against=True),
    "flops_saved": Measure("% fewer FLOPs", _saved(_entry("total", "flops")), needs_against=True),
    "num_classes": Measure("classes of the data", _entry("classes")),
    # Options: tables that print settings.
    "option": Measure("an option of the run", of_options=_option, argument="NAME"),
    "tuning_lr": Measure("learning rate of final tuning", of_options=_tuning_lr),
    # Of runs.
    "accuracy": Measure("mean over clients at the headline point", of_run=_accuracy("mean")),
    "accuracy_weighted": Measure("the same, clients weighted by their test data", of_run=_accuracy("weighted")),
    "accuracy_decile": Measure("the client a tenth from the bottom", of_run=_accuracy("bottom_decile")),
    "accuracy_worst": Measure("the worst client", of_run=_accuracy("worst")),
    "accuracy_spread": Measure("standard deviation over clients", of_run=_accuracy("std")),
    "accuracy_last10": Measure("mean of the last ten rounds", of_run=_accuracy("last10"), by_evaluation=True),
    "accuracy_best": Measure(
        "the best evaluated round, chosen on test data as some papers do", of_run=_best, by_evaluation=True
    ),
    "accuracy_at": Measure("mean over clients at another point", of_run=_at("mean"), argument="POINT"),
    "accuracy_weighted_at": Measure("the same, weighted by test data", of_run=_at("weighted"), argument="POINT"),
    "accuracy_group": Measure("mean over the clients of a capacity", of_run=_of_capacity, argument="SHARE"),
    "rounds_to": Measure(
        "rounds until the mean accuracy reaches a target", of_run=_rounds_to, argument="PERCENT", by_evaluation=True
    ),
    "relative_rounds": Measure(
        "rounds to a share of the final accuracy, relative to the other row's",
        of_run=_relative_rounds,
        argument="SHARE",
        needs_against=True,
        by_evaluation=True,
    ),
    "rounds_saved": Measure(
        "% fewer rounds to the other row's best", of_run=_rounds_saved, needs_against=True, by_evaluation=True
    ),
    "run_flops": Measure("FLOPs that the run spent", of_run=_run_flops, argument="UNIT"),
    "run_client_flops": Measure("FLOPs of a client's turn in the run", of_run=_run_client_flops, argument="UNIT"),
    "run_traffic_gb": Measure("GB that the run sent, as the papers count", of_run=_run_traffic),
    "run_traffic_saved": Measure("% less than the other row", of_run=_saved_by_run(_run_traffic), needs_against=True),
    "run_busiest_mb": Measure("MB through the busiest node in a round of the run, one way", of_run=_run_busiest),
    "density_used": Measure("share of the model that an example used (s')", of_run=_measured("density_used")),
    "upload_share_formula": Measure("upload_share by pFedGate's formula", of_run=_measured("upload_share_formula")),
    "union_density": Measure("share of entries in any client's mask", of_run=lambda run, *_: run.union_density()),
    "train_time": Measure(
        "seconds of a client's training",
        of_run=_search_time("train_seconds"),
        needs_profile=True,
        spread=_search_time("train_sd"),
    ),
    "search_time": Measure(
        "seconds of its mask search",
        of_run=_search_time("search_seconds"),
        needs_profile=True,
        spread=_search_time("search_sd"),
    ),
    "search_time_ratio": Measure(
        "mask search, % of training",
        of_run=_search_time("ratio", 100.0),
        needs_profile=True,
        spread=_search_time("ratio_sd", 100.0),
    ),
    "upload_share": Measure("share of the model's entries in an upload", of_run=_upload_share),
    "gain": Measure("accuracy over that of another row", of_run=_against(_accuracy("mean")), needs_against=True),
    "weighted_gain": Measure("weighted accuracy likewise", of_run=_against(_accuracy("weighted")), needs_against=True),
    "decile_gain": Measure("bottom decile likewise", of_run=_against(_accuracy("bottom_decile")), needs_against=True),
    "drop": Measure(
        "weighted accuracy below that of another row", of_run=_against(_accuracy("weighted"), -1), needs_against=True
    ),
    "decile_drop": Measure(
        "bottom decile likewise", of_run=_against(_accuracy("bottom_decile"), -1), needs_against=True
    ),
    "novel_gap": Measure(
        "weighted accuracy of participants over that of novel clients", of_run=lambda run, *_: novel_gap(run.view)
    ),
    "train_test_gap": Measure(
        "accuracy on training data over that on test data", of_run=lambda run, *_: train_test_gap(run.view)
    ),
    "tuned_gain": Measure("weighted accuracy after final tuning over that before it", of_run=_tuned_gain),
    "clients_hurt": Measure("clients worse off than in another row", of_run=_clients_hurt, needs_against=True),
    "num_clients": Measure("clients of the run", of_run=_num_clients),
    "examples_mean": Measure("a client's examples, mean", of_run=_examples(lambda sizes: sizes.mean())),
    "examples_max": Measure("a client's examples, most", of_run=_examples(lambda sizes: sizes.max())),
}
