"""The columns of a results table. A column is one row here: the terminal, the report and JSON read this table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from sparsona.analysis.format import alike, human_bytes, human_flops, human_seconds, percent, signed
from sparsona.analysis.privacy import show_epsilon

if TYPE_CHECKING:
    from sparsona.analysis.view import RunView

# Rows that a personal model must beat to be worth having, with their titles.
BASELINES = {"local": "Local", "fedavg": "FedAvg"}


@dataclass(frozen=True)
class Column:
    """One figure of a run.

    Args:
        name: the key in JSON.
        title: the heading in the terminal and on the page.
        meaning: what the figure is, for the page's legend.
        value: reads it from a run; None where the run has none.
        show: prints it, without the unit; None: a number that is written with as many decimals as others of its column.
        show_spread: prints its spread; None: as the mean.
        unit: printed after the figure and its spread.
        better: which end is the good one; "neither": none is marked as the best.
        has_spread: whether the spread over seeds is printed as well.
        shown: always, only where some run has the figure, only where it is not 0 for all, only where runs differ in
            it, only where clients of a run differ in their number of test examples, or only where all runs were run
            alike (device and executor).
        task: runs that predict classes, runs that predict numbers, or both.
        is_first: shown first; the others are folded away on a page and left out of a narrow terminal.
        over_seeds: what stands for several seeds: their mean, or the largest.
        marks_zero: whether 0 can be the best of its column: who sends nothing is not the one that sends least.
    """

    name: str
    title: str
    meaning: str
    value: Callable[[RunView], float | None]
    show: Callable[[float], str] | None
    unit: str = ""
    better: Literal["high", "low", "neither"] = "low"
    has_spread: bool = False
    shown: Literal["always", "if known", "if any", "if different", "if uneven", "if alike"] = "always"
    task: Literal["classes", "numbers", "both"] = "both"
    is_first: bool = False
    show_spread: Callable[[float], str] | None = None
    marks_zero: bool = True
    over_seeds: Literal["mean", "largest"] = "mean"

    def writer(self, values: Iterable[float]) -> Callable[[float], str]:
        """What prints these figures, which are all of the column."""
        return self.show or alike(values)


def columns_for(views: Sequence[RunView], in_print: bool = True) -> tuple[Column, ...]:
    """The columns that a table of these runs has; one that is not printed also has those that say little here."""
    unwanted = "classes" if all("error" in view.summary for view in views) else "numbers"

    def is_shown(column: Column) -> bool:
        if column.task == unwanted or column.shown == "always":
            return column.task != unwanted
        if column.shown == "if uneven":
            return not in_print or has_uneven_tests(views)
        if column.shown == "if alike":
            return not in_print or not ways_of_running(views)
        known = {value for view in views if (value := column.value(view)) is not None}
        if column.shown == "if any":
            return any(known)
        return len(known) > (column.shown == "if different")

    # Clients that a method hurts are counted beside the accuracies, before what the method spends.
    place = next(i for i, column in enumerate(COLUMNS) if column.name == "density")
    judged = [*_accuracies(views, COLUMNS[:place]), *_metric_columns(views)]
    if unwanted == "classes":  # the headline of a regression is a metric
        judged.sort(key=lambda column: not column.name.startswith("metric_"))
    return tuple(filter(is_shown, (*judged, *_hurt_columns(views), *COLUMNS[place:])))


def _accuracies(views: Sequence[RunView], columns: Sequence[Column]) -> list[Column]:
    """These columns, the weighted accuracy first where that is what the runs are judged by."""
    if not views or any(view.measure.weight == "clients" for view in views):
        return list(columns)
    by_name = {column.name: column for column in columns}
    plain, weighted = by_name.pop("accuracy_mean"), by_name.pop("accuracy_weighted")
    weighted = replace(weighted, title=views[0].measure.mean_name, shown="always", is_first=True)
    return [weighted, replace(plain, is_first=False), *by_name.values()]


def ways_of_running(views: Sequence[RunView]) -> list[str]:
    """Executors and devices of these runs, in words, where not all were run alike; otherwise none."""
    found = dict.fromkeys((view.config.get("executor"), view.config.get("device")) for view in views)
    names = [" on ".join(str(one) for one in way if one is not None) or "not known" for way in found]
    return names if len(found) > 1 else []


def _metric_columns(views: Sequence[RunView]) -> Iterator[Column]:
    """A column for each metric of the runs; accuracy has its own."""
    from sparsona.analysis.measure import measure_of_metric

    names = dict.fromkeys(name for view in views for name in view.summary.get("metrics", {}) if name != "accuracy")
    for name in names:
        found = measure_of_metric(name)
        meaning = f"{METRIC_MEANINGS.get(name, 'a function from Python')}; mean over the clients that it is defined for"
        # Who names metrics wants to see them.
        first = any(view.measure.name == name or view.config.get("metrics") for view in views)
        yield Column(
            f"metric_{name.replace('-', '_')}",
            found.title,
            meaning,
            _entry("metrics", name, "mean"),
            found.show if found.unit else None,
            found.unit,
            found.better,
            True,
            "if known",
            is_first=first,
        )


METRIC_MEANINGS = {
    "balanced-accuracy": "mean of the accuracies on each class",
    "f1": "F1, mean over classes or labels",
    "auc": "area under the ROC curve, mean over classes (each against the rest) or labels",
    "rmse": "root of the mean squared error",
    "mae": "mean absolute error",
    "r2": "share of the variance explained",
}


def has_uneven_tests(views: Sequence[RunView]) -> bool:
    """Whether clients of a run differ in their number of test examples, so that it matters what a mean weighs by."""
    return any(len({int(num) for num in view.count if num}) > 1 for view in views)


def _hurt_columns(views: Sequence[RunView]) -> Iterator[Column]:
    """For each baseline in the comparison: how many clients each other method serves worse than it."""
    for name, title in BASELINES.items():
        base: dict[int, RunView] = {}
        for view in views:
            if view.method == name:
                base.setdefault(view.seed, view)  # of several, the first
        if base:
            meaning = f"clients whose accuracy is below that of {title} under the same seed; mean over seeds"
            yield Column(
                f"hurt_against_{name}",
                f"hurt vs {title}",
                meaning,
                partial(_num_hurt, base),
                "{:.4g}".format,
                shown="if known",
                task="classes",
            )


def _num_hurt(base: Mapping[int, RunView], view: RunView) -> float | None:
    import numpy as np  # here and below: the command line reads this table for its help, and these take long

    from sparsona.analysis.clients import Change
    from sparsona.analysis.groups import same_clients

    other = base.get(view.seed)
    if other is None or other is view or not same_clients(other, view):
        return None
    tested = np.flatnonzero(view.count > 0)
    before, after = (one.correct[tested] / one.count[tested] for one in (other, view))
    return Change("test", tested, before, after, view.sizes[tested, 0]).num_hurt


def _entry(*path: str) -> Callable[[RunView], float | None]:
    """An entry of the run's summary."""

    def value(view: RunView) -> float | None:
        found = view.summary
        for key in path:
            found = (found or {}).get(key, {})
        return float(found) if isinstance(found, int | float) else None

    return value


def _epsilon(view: RunView) -> float | None:
    """Epsilon; infinite where a summary, which is JSON, has null."""
    found = view.summary.get("privacy")
    return None if found is None else math.inf if found["epsilon"] is None else float(found["epsilon"])


def _option(view: RunView, name: str) -> float | None:
    """A number among the method's own options."""
    options = view.config.get("options")
    found = options.get(name) if isinstance(options, dict) else None
    return float(found) if isinstance(found, int | float) else None


def _train_test_gap(view: RunView) -> float | None:
    from sparsona.analysis.charts import train_test_gap

    return train_test_gap(view)


def _novel_gap(view: RunView) -> float | None:
    from sparsona.analysis.charts import novel_gap

    return novel_gap(view)


def _share_of_budget(view: RunView) -> float | None:
    from sparsona.analysis.summary import spent

    matched: Any = view.config.get("matched")
    return spent(view.summary, matched["by"]) / matched["budget"] if matched and matched["budget"] else None


def _accuracy(
    key: str,
    title: str,
    meaning: str,
    is_first: bool = False,
    shown: Literal["always", "if known", "if uneven"] = "always",
    value: Callable[[RunView], float | None] | None = None,
) -> Column:
    value = value or _entry("accuracy", key)
    return Column(f"accuracy_{key}", title, meaning, value, percent, "%", "high", True, shown, "classes", is_first)


def _on_classes(kind: str) -> Callable[[RunView], float | None]:
    """Accuracy on classes seen or unseen, of a run whose clients were tested on classes that they had not seen."""

    def value(view: RunView) -> float | None:
        found = view.summary.get("classes")
        return found[kind]["mean"] if found and found["unseen"]["clients"] else None

    return value


def _error(key: str, title: str, meaning: str, is_squared: bool = True) -> Column:
    def value(view: RunView) -> float | None:
        return _entry("error", key)(view) if is_squared == ("mse" in view.summary.get("error", ())) else None

    shown: Literal["if known"] = "if known"
    return Column(f"error_{key}", title, meaning, value, None, has_spread=True, task="numbers", shown=shown)


def _bytes(key: str, title: str, meaning: str, is_first: bool = False, if_known: bool = False) -> Column:
    shown: Literal["always", "if known"] = "if known" if if_known else "always"
    value = _entry("bytes", key)
    return Column(f"bytes_{key}", title, meaning, value, human_bytes, shown=shown, is_first=is_first, marks_zero=False)


COLUMNS = (
    _accuracy("mean", "accuracy", "mean over clients at the headline point", is_first=True),
    _accuracy("weighted", "weighted", "mean over test examples, each counting the same", shown="if uneven"),
    _accuracy("bottom_decile", "bottom decile", "the client a tenth from the bottom", is_first=True),
    _accuracy("worst", "worst", "the worst client"),
    _accuracy("last10", "last 10", "mean of the last ten rounds"),
    _accuracy(
        "seen",
        "seen",
        "on classes that the client has among its training data, mean over clients",
        shown="if known",
        value=_on_classes("seen"),
    ),
    _accuracy(
        "unseen",
        "unseen",
        "on classes that the client has not, mean over the clients that are tested on any",
        shown="if known",
        value=_on_classes("unseen"),
    ),
    _error("mse", "MSE", "mean squared error, over clients"),
    _error("worst", "worst MSE", "the worst client"),
    _error("last10", "last 10 MSE", "mean of the last ten rounds"),
    _error("loss", "loss", "mean loss, over clients", is_squared=False),
    Column(
        "train_test_gap",
        "train − test",
        "mean accuracy on training data less that on test data, in percentage points",
        _train_test_gap,
        signed,
        better="neither",  # below 0 it is no better than above
        has_spread=True,
        shown="if known",
        task="classes",
        show_spread="{:.2f}".format,
    ),
    Column(
        "novel_gap",
        "novel gap",
        "accuracy of participating clients less that of novel ones, weighted by test examples, in percentage points",
        _novel_gap,
        signed,
        better="neither",
        has_spread=True,
        shown="if known",
        task="classes",
        show_spread="{:.2f}".format,
    ),
    Column(
        "mask_search_share",
        "mask search",
        "time of mask search over that of training, mean over turns (profiled runs)",
        lambda view: None if view.search_time is None else float(view.search_time["ratio"]),
        percent,
        "%",
        has_spread=True,
        shown="if known",
    ),
    Column(
        "density",
        "density",
        "the largest share of the parameters that a client's model keeps, as the method's option says",
        lambda view: _option(view, "density"),
        "{:.4g}".format,
        better="neither",
        shown="if known",
    ),
    Column(
        "rounds",
        "rounds",
        "rounds that were run",
        _entry("rounds"),
        "{:,.0f}".format,
        better="neither",
        shown="if different",
    ),
    Column(
        "turns",
        "turns",
        "client turns that trained, final tuning included",
        _entry("turns", "total"),
        "{:,.0f}".format,
        better="neither",
    ),
    Column(
        "steps",
        "steps",
        "local steps of all clients together, final tuning included",
        _entry("steps", "total"),
        "{:,.0f}".format,
        better="neither",
        is_first=True,
    ),
    Column(
        "budget_share",
        "of budget",
        "what was spent, as a share of what all methods were given alike (--match)",
        _share_of_budget,
        "{:.1%}".format,
        better="neither",
        shown="if known",
        is_first=True,
    ),
    _bytes("total", "bytes sent", "all messages of training, as encoded: headers, masks and checksums included", True),
    _bytes("up", "bytes up", "clients to server; of peers, sent"),
    _bytes("down", "bytes down", "server to clients; of peers, received"),
    Column(
        "upload_share",
        "uploaded",
        "share of the model's entries in a client's upload, mean over uploads (pFedGate's q)",
        _entry("bytes", "upload_share"),
        percent,
        "%",
        shown="if known",
    ),
    _bytes("busiest_round_in", "busiest in", "most bytes into one node (server or peer) in one round", if_known=True),
    _bytes("busiest_round_out", "busiest out", "most bytes out of one node in one round", if_known=True),
    _bytes("paper_total", "papers' count", "parameters × 4 in both directions, masks free"),
    Column(
        "train_flops",
        "train FLOPs",
        "local training",
        _entry("flops", "train"),
        human_flops,
        is_first=True,
        marks_zero=False,
    ),
    Column(
        "mask_flops", "mask FLOPs", "searching for masks", _entry("flops", "mask_search"), human_flops, marks_zero=False
    ),
    Column(
        "seconds",
        "seconds",
        "wall time of the run; compared only where all runs had the same device and executor",
        _entry("seconds"),
        human_seconds,
        better="neither",  # depends on what else the machine did
        is_first=True,
        shown="if alike",
    ),
    Column(
        "simulated_time",
        "sim. time",
        "simulated time of all rounds, in turns of a client of speed 1 with the mean amount of data",
        _entry("conditions", "time"),
        "{:,.4g}".format,
        shown="if known",
    ),
    Column(
        "turns_late",
        "late",
        "turns of clients that would not have made the deadline",
        _entry("conditions", "late"),
        "{:,.0f}".format,
        shown="if known",
    ),
    Column(
        "turns_diverged",
        "diverged",
        "turns whose training diverged, and which were left out of their rounds; of peers also turns in which one left "
        "out messages far larger than the others",
        lambda view: float(sum((view.summary.get("diverged") or {}).get(key, 0) for key in ("turns", "receivers"))),
        "{:,.0f}".format,
        shown="if any",
        is_first=True,
    ),
    Column(
        "turns_not_heard",
        "not heard",
        "turns of clients on other machines that did not answer, or whose answers were refused",
        _entry("heard", "turns"),
        "{:,.0f}".format,
        shown="if known",
    ),
    Column(
        "epsilon",
        "epsilon",
        "differential privacy of one client's whole data, of the values in updates; less is more private; the largest "
        "over seeds. Its delta, what it holds under and what it does not cover are in the protocol",
        _epsilon,
        show_epsilon,
        shown="if known",
        is_first=True,
        over_seeds="largest",
    ),
    Column(
        "evaluation_bytes_down",
        "eval. down",
        "server to clients for evaluations alone, no part of bytes down; a simulation counts what it would send",
        _entry("evaluation_bytes", "down"),
        human_bytes,
        shown="if known",
    ),
    Column(
        "evaluation_bytes_up",
        "eval. up",
        "answers of clients for evaluations alone, no part of bytes up; not known of a simulation, which sends none",
        _entry("evaluation_bytes", "up"),
        human_bytes,
        shown="if known",
    ),
)
