"""What a table or a report needs to know of a run, read from its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparsona.analysis.clients import ClientEffects, client_effects, has_effects
from sparsona.analysis.gates import Gates, recorded_gates
from sparsona.analysis.measure import (
    ACCURACY,
    LOSS,
    Measure,
    client_scores,
    measure_called,
    measure_curve,
    measure_of,
    measure_of_metric,
    metric_values,
)
from sparsona.analysis.similarity import Similarity, recorded_distances, recorded_similarity
from sparsona.analysis.summary import at, effort, headline, points, summary_of, weighted_curve
from sparsona.core.points import FEW
from sparsona.core.points import point as evaluation_point
from sparsona.runs.files import check_shape
from sparsona.runs.folder import CONFIG_FILE, RunFolder, reached
from sparsona.runs.profile import search_time
from sparsona.runs.records import RoundRow
from sparsona.runs.stopping import validation_point, watched

_USED = {"seed": (int,), "rounds": (int,)}  # of the options, which a folder of somebody else may lack


@dataclass(frozen=True, eq=False)
class RunView:
    """One finished (or unfinished) run, as plain data; accuracies are fractions from 0 to 1 everywhere.

    `curves` maps an evaluation point to (completed rounds, mean accuracy); `correct` and `count` are per client at
    the headline point; `confusion` is summed over clients, rows are the true classes; `label_counts` counts the
    training data by client (row i is client i of `count`) and class, and is None where labels are tokens;
    `cumulative_bytes` is (completed rounds, bytes sent so far in both directions), `cumulative_steps` the same of
    local steps; `sizes` has each client's number of training, validation and test examples. `effects`, `similarity`,
    `gates` and `distances` are there where the run recorded them; the last is (completed rounds, mean distance between
    clients' traits, mean distance of each to its own start).

    `weighted_curves` are `curves` with every test example counting the same; `cumulative_paper_bytes` are
    `cumulative_bytes` as the papers count; `results` has right predictions and examples of each client for every
    point, on any data, at its last evaluation; `num_personal` is how many of the model's `num_parameters` are a
    client's own, and `search_time` what mask search took of a profiled run; None: not known. `has_few`: clients did not
    tell counts from 1 to 4 of the confusion, which lacks them. `data` is what the data set is called ("": not known);
    `client_names` and `class_names` are empty where there are none. `cumulative_time` is (completed rounds, simulated
    time so far), where clients have speeds.

    `measure` is what the run is judged by: accuracy, and of a regression another figure, of which `curves` are then.
    `scores` has each client's value of it at the headline point, NaN where there is none. `metrics` are the same of
    each metric, by name, and `metric_curves` its means over clients by point, as `curves` are; `losses` and
    `loss_curves` are the same of the loss on test data. `patience_curve` has the means on validation data that a run
    with patience goes by, and `patience_name` says of what; it is empty where a run has no patience. `unfinished_at` is
    how many rounds a run completed that has not finished; None: it has.
    """

    name: str
    path: str
    method: str
    title: str
    seed: int
    protocol: str
    point: str
    config: dict[str, object]
    environment: dict[str, object]
    summary: dict[str, Any]
    curves: dict[str, list[tuple[int, float]]]
    train_loss: list[tuple[int, float]]
    correct: np.ndarray
    count: np.ndarray
    confusion: np.ndarray | None
    label_counts: np.ndarray | None
    sizes: np.ndarray
    cumulative_bytes: list[tuple[int, int]]
    cumulative_steps: Sequence[tuple[int, int]] = ()
    effects: ClientEffects | None = None
    similarity: Similarity | None = None
    distances: Sequence[tuple[int, float, float]] = ()
    weighted_curves: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    cumulative_paper_bytes: Sequence[tuple[int, int]] = ()
    results: Mapping[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    num_parameters: int | None = None
    num_personal: int | None = None
    search_time: Mapping[str, Any] | None = None
    gates: Gates | None = None
    has_few: bool = False
    data: str = ""
    client_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    cumulative_time: Sequence[tuple[int, float]] = ()
    measure: Measure = ACCURACY
    scores: np.ndarray = field(default_factory=lambda: np.zeros(0))
    metrics: Mapping[str, np.ndarray] = field(default_factory=dict)
    metric_curves: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]] = field(default_factory=dict)
    losses: np.ndarray = field(default_factory=lambda: np.zeros(0))
    loss_curves: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    patience_name: str = ""
    patience_curve: Sequence[tuple[int, float]] = ()
    unfinished_at: int | None = None

    def __post_init__(self) -> None:
        if len(self.scores) != len(self.count):  # made without them: the accuracies
            known = np.where(self.count > 0, self.correct / np.maximum(self.count, 1), np.nan)
            object.__setattr__(self, "scores", known)


def read_view(folder: RunFolder) -> RunView:
    """Everything a table or a report needs of a run."""
    with folder.records.reading():
        return _read_view(folder)


def _read_view(folder: RunFolder) -> RunView:
    facts, config = folder.facts, check_shape(folder.config, _USED, folder.path / CONFIG_FILE)
    # Effort comes from the records: the summaries of older runs lack it.
    summary = {**(folder.summary or summary_of(folder)), **effort(folder)}
    point, completed, correct, count = headline(folder)
    last_round = folder.last_round
    matrices = list(folder.records.confusions(completed, point).values())
    rounds = folder.records.rounds()
    steps = np.cumsum(folder.records.steps_by_round()).tolist()
    sent = [row.bytes_down if facts.peers else row.bytes_up + row.bytes_down for row in rounds]
    counted = [row.paper_down if facts.peers else row.paper_up + row.paper_down for row in rounds]
    tested = [name for name in points(folder) if evaluation_point(name).data == "test"]
    measure, metrics = measure_of(folder), metric_values(folder, completed, point)
    watches = None
    if config.get("patience") is not None:
        watches = measure_called(watched(config.get("patience_metric"), facts.is_regression))
    return RunView(
        name=folder.path.name,
        path=str(folder.path),
        method=facts.method,
        title=facts.title,
        seed=config["seed"],
        protocol=summary["protocol"],
        point=point,
        config=config,
        environment=folder.environment,
        summary=summary,
        curves={name: measure_curve(folder, measure, name) for name in tested},
        # Final tuning is recorded as one more round, which it is not.
        train_loss=[(row.round + 1, row.loss) for row in rounds if row.loss is not None and row.round < last_round],
        correct=correct,
        count=count,
        confusion=np.sum([matrix.clip(min=0) for matrix in matrices], axis=0) if matrices else None,
        has_few=any((matrix == FEW).any() for matrix in matrices),
        sizes=facts.sizes,
        label_counts=facts.label_counts,
        cumulative_bytes=_after_rounds(rounds, np.cumsum(sent).tolist()),
        cumulative_steps=_after_rounds(rounds, steps),
        effects=client_effects(folder) if has_effects(folder) else None,
        similarity=recorded_similarity(folder),
        distances=recorded_distances(folder),
        weighted_curves={} if facts.is_regression else {name: weighted_curve(folder, name) for name in tested},
        cumulative_paper_bytes=_after_rounds(rounds, np.cumsum(counted).tolist()),
        results={} if facts.is_regression else {name: at(folder, name)[2:] for name in points(folder)},
        num_parameters=facts.num_parameters,
        num_personal=facts.num_personal,
        search_time=search_time(folder.path),
        gates=recorded_gates(folder),
        cumulative_time=_times(folder),
        measure=measure,
        scores=client_scores(folder, measure, completed, point),
        metrics=metrics,
        metric_curves={
            name: {at: measure_curve(folder, measure_of_metric(name), at) for at in tested}
            for name, values in metrics.items()
            if name != "accuracy" and not np.isnan(values).all()
        },
        losses=client_scores(folder, LOSS, completed, point),
        loss_curves={name: measure_curve(folder, LOSS, name) for name in tested},
        data=facts.data,
        client_names=facts.client_names,
        class_names=facts.class_names,
        patience_name=watches.name if watches else "",
        patience_curve=measure_curve(folder, watches, validation_point(facts.point)) if watches else (),
        unfinished_at=None if reached(folder.path).finished else min(len(rounds), config["rounds"]),
    )


def _times(folder: RunFolder) -> list[tuple[int, float]]:
    rows = [(row.round + 1, row.time) for row in folder.records.conditions() if row.time is not None]
    totals = np.cumsum([time for _, time in rows]).tolist()
    return [(completed, total) for (completed, _), total in zip(rows, totals, strict=True)]


def _after_rounds(rounds: Sequence[RoundRow], totals: Sequence[int]) -> list[tuple[int, int]]:
    return [(row.round + 1, total) for row, total in zip(rounds, totals, strict=True)]
