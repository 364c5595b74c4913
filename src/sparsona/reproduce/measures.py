"""What a column of a recipe measures: costs, which need no training, and figures of runs. A measure is one row here.

Written `name` or `name:argument`. Accuracies are in percent, as papers print them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparsona.analysis.statistics import mean_and_spread
from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.points import NOVEL, NOVEL_TUNED, RECEIVED, TUNED

if TYPE_CHECKING:
    from sparsona.experiment.run import Run


@dataclass(frozen=True)
class Figure:
    """A figure of ours: the mean over seeds and its sample standard deviation, None for one seed.

    `is_bound`: some seed did not get there (a target accuracy), so that the mean is a lower bound.
    """

    value: float
    spread: float | None = None
    seeds: int = 1
    is_bound: bool = False


@dataclass(frozen=True)
class AtLeast:
    """The value of a run that did not get there: it is above this."""

    value: float


OfRun = float | AtLeast | None  # None: this run does not have the figure


@dataclass(frozen=True)
class Measure:
    """A row of `MEASURES`.

    Args:
        text: what is measured.
        of_cost: reads it from what `sparsona cost` says, in the papers' counting.
        of_run: reads it from a run, the run of the same seed in the row `against`, and the argument.
        argument: what follows the colon, for messages; "": nothing does.
        needs_against: it is relative to another row.
    """

    text: str
    of_cost: Callable[[Mapping[str, Any], str], float | None] | None = None
    of_run: Callable[[Run, Run | None, str], OfRun] | None = None
    argument: str = ""
    needs_against: bool = False

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
    if bool(colon) != bool(measure.argument):
        written = f"'{name}:{measure.argument}'" if measure.argument else f"'{name}' alone"
        raise SparsonaError(f"measure '{text}'", expected=f"{written}: {measure.text}")
    if measure.argument in ("UNIT", "PERCENT", "SHARE"):
        _number(text, argument)
    return measure, argument


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
    found = [measure.of_run(run, against.get(run.config["seed"]), argument) for run in runs]
    known = [one for one in found if one is not None]
    if not known:
        return None
    numbers = [one.value if isinstance(one, AtLeast) else one for one in known]
    mean, spread = mean_and_spread(numbers)
    is_bound = any(isinstance(one, AtLeast) for one in known)
    return Figure(mean, None if is_bound else spread, len(known), is_bound)


def _number(text: str, argument: str) -> float:
    try:
        return float(argument)
    except ValueError:
        raise SparsonaError(f"measure '{text}'", expected="a number after the colon") from None


# Costs.


def _entry(*path: str) -> Callable[[Mapping[str, Any], str], float | None]:
    def read(report: Mapping[str, Any], unit: str) -> float | None:
        found: Any = report
        for key in path:
            found = found[key]
        return None if found is None else float(found) / (float(unit) if unit else 1.0)

    return read


def _storage(report: Mapping[str, Any], unit: str) -> float:
    return float(report["memory"]["at_hand_mb"] * 1e6 / (4 * report["num_parameters"]))


# Runs.


def _accuracy(key: str) -> Callable[[Run, Run | None, str], OfRun]:
    def read(run: Run, against: Run | None, argument: str) -> OfRun:
        found = run.summary["accuracy"].get(key)
        return None if found is None else 100 * float(found)

    return read


def _curve(run: Run) -> list[tuple[int, float]]:
    """Accuracy over rounds at the headline point or, where that is measured once at the end, before it."""
    at_headline = run.curve(run.view.point)
    return at_headline if len(at_headline) > 1 else run.curve(RECEIVED)


def _best(run: Run, against: Run | None, argument: str) -> OfRun:
    return 100 * max(value for _, value in (*_curve(run), *run.curve(run.view.point)))


def _mean_at(run: Run, point: str) -> float | None:
    import numpy as np

    return 100 * float(np.nanmean(run.accuracies(point))) if point in run.points else None


def _at(run: Run, against: Run | None, argument: str) -> OfRun:
    return _mean_at(run, argument)


def _rounds_to(run: Run, against: Run | None, argument: str) -> OfRun:
    reached = [completed for completed, value in _curve(run) if 100 * value >= float(argument)]
    return float(min(reached)) if reached else AtLeast(float(run.summary["rounds"]))


def _relative_rounds(run: Run, against: Run | None, argument: str) -> OfRun:
    """Rounds to this share of the other row's final accuracy, relative to those that it needs itself."""
    if against is None:
        return None
    target = float(argument) * 100 * _curve(against)[-1][1]
    own, other = _rounds_to(run, None, str(target)), _rounds_to(against, None, str(target))
    if own is None or not isinstance(other, float) or not other:
        return None
    return AtLeast(own.value / other) if isinstance(own, AtLeast) else own / other


def _over(key: str) -> Callable[[Run, Run | None, str], OfRun]:
    """The accuracy minus that of the row it is compared with, under the same seed."""
    read = _accuracy(key)

    def difference(run: Run, against: Run | None, argument: str) -> OfRun:
        own = read(run, None, "")
        other = None if against is None else read(against, None, "")
        return own - other if isinstance(own, float) and isinstance(other, float) else None

    return difference


def _weighted_at(run: Run, point: str) -> float | None:
    from sparsona.analysis.statistics import accuracy_summary

    found = run.counts(point) if point in run.points else None
    return None if found is None else 100 * accuracy_summary(*found)["weighted"]


def _novel_gap(run: Run, against: Run | None, argument: str) -> OfRun:
    novel = _weighted_at(run, NOVEL_TUNED if NOVEL_TUNED in run.points else NOVEL)
    own = _weighted_at(run, run.view.point)
    return None if novel is None or own is None else own - novel


def _tuned_gain(run: Run, against: Run | None, argument: str) -> OfRun:
    tuned, received = _mean_at(run, TUNED), _mean_at(run, RECEIVED)
    return None if tuned is None or received is None else tuned - received


def _run_flops(run: Run, against: Run | None, argument: str) -> OfRun:
    found = run.summary["flops"]
    return float((found["train"] or 0) + (found["mask_search"] or 0)) / float(argument)


def _run_traffic(run: Run, against: Run | None, argument: str) -> OfRun:
    return float(run.summary["bytes"]["paper_total"]) / 1e9


def _upload_share(run: Run, against: Run | None, argument: str) -> OfRun:
    found = run.summary["bytes"].get("upload_share")
    return None if found is None else float(found)


def _clients_hurt(run: Run, against: Run | None, argument: str) -> OfRun:
    if against is None:
        return None
    return float(next(change.num_hurt for change in run.clients(against).changes if change.name == "test"))


MEASURES: dict[str, Measure] = {
    # Without training, as the papers count.
    "traffic_gb": Measure("GB sent in the whole run", _entry("total", "comm_gb")),
    "busiest_mb": Measure(
        "MB through the busiest node in a round, in one direction", _entry("busiest_node", "comm_mb")
    ),
    "client_mb": Measure("MB that a client sends in a round", _entry("per_client_round", "up_mb")),
    "flops": Measure("FLOPs of training and mask search, whole run", _entry("total", "flops"), argument="UNIT"),
    "client_flops": Measure(
        "FLOPs of a client's training and mask search in a round", _entry("per_client_round", "flops"), argument="UNIT"
    ),
    "inference_flops": Measure("FLOPs of predicting one example", _entry("inference_flops"), argument="UNIT"),
    "parameters": Measure("parameters of the network", _entry("num_parameters")),
    "storage": Measure("what a client stores and receives, in sizes of the dense model", _storage),
    # Of runs.
    "accuracy": Measure("mean over clients at the headline point", of_run=_accuracy("mean")),
    "accuracy_weighted": Measure("the same, clients weighted by their test data", of_run=_accuracy("weighted")),
    "accuracy_decile": Measure("the client a tenth from the bottom", of_run=_accuracy("bottom_decile")),
    "accuracy_worst": Measure("the worst client", of_run=_accuracy("worst")),
    "accuracy_spread": Measure("standard deviation over clients", of_run=_accuracy("std")),
    "accuracy_last10": Measure("mean of the last ten rounds", of_run=_accuracy("last10")),
    "accuracy_best": Measure("the best evaluated round, chosen on test data as some papers do", of_run=_best),
    "accuracy_at": Measure("mean over clients at another point", of_run=_at, argument="POINT"),
    "rounds_to": Measure("rounds until the mean accuracy reaches a target", of_run=_rounds_to, argument="PERCENT"),
    "relative_rounds": Measure(
        "rounds to a share of the other row's final accuracy, relative to that row's",
        of_run=_relative_rounds,
        argument="SHARE",
        needs_against=True,
    ),
    "run_flops": Measure("FLOPs that the run spent", of_run=_run_flops, argument="UNIT"),
    "run_traffic_gb": Measure("GB that the run sent, as the papers count", of_run=_run_traffic),
    "upload_share": Measure("share of the model's entries in an upload", of_run=_upload_share),
    "gain": Measure("accuracy over that of another row", of_run=_over("mean"), needs_against=True),
    "drop": Measure("weighted accuracy over that of another row", of_run=_over("weighted"), needs_against=True),
    "novel_gap": Measure("weighted accuracy of participants over that of novel clients", of_run=_novel_gap),
    "tuned_gain": Measure("accuracy after final tuning over that before it", of_run=_tuned_gain),
    "clients_hurt": Measure("clients worse off than in another row", of_run=_clients_hurt, needs_against=True),
}
