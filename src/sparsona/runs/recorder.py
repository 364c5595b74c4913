"""The observer that keeps a run's records. What they are, and the SQL, is in records.py."""

from __future__ import annotations

import math
from dataclasses import asdict

from sparsona.runs.observers import EvaluationResult, RoundResult
from sparsona.runs.records import (
    ClassesRow,
    ConditionRow,
    EvaluationFailureRow,
    EvaluationRow,
    EvaluationTrafficRow,
    FailureRow,
    MeasureRow,
    MetricRow,
    Records,
    RoundRow,
    TurnRow,
    pack_confusion,
    pack_numbers,
)

SUMS = ("bytes_up", "bytes_down", "paper_up", "paper_down", "train_flops", "search_flops")


class Recorder:
    """Writes rounds, turns and evaluations. Each record is one transaction, or part of the one that is open."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def on_round(self, result: RoundResult) -> None:
        row = RoundRow(
            round=result.index,
            lr_scale=result.lr_scale,
            num_trained=result.total("trained"),
            num_aggregated=result.total("aggregated"),
            num_dropped=result.total("dropped"),
            loss=result.loss,
            seconds=result.seconds,
            **{name: result.total(name) for name in SUMS},
        )
        with self._records.writing():
            self._records.add([row])
            self._records.add(
                TurnRow(
                    round=result.index,
                    client=turn.client,
                    loss=turn.loss,
                    examples=turn.examples,
                    steps=turn.steps,
                    aggregated=turn.aggregated,
                    dropped=turn.dropped,
                    **{name: getattr(turn, name) for name in SUMS},
                )
                for turn in result.turns
            )
            self._records.add(
                FailureRow(result.index, turn.client, turn.failure) for turn in result.turns if turn.failure
            )
            simulated = (result.time, result.num_awake, result.num_late)
            if any(one is not None for one in simulated):
                self._records.add([ConditionRow(result.index, *simulated)])
            self._records.add(
                MeasureRow(result.index, turn.client, name, pack_numbers(values, "<f4"))
                for turn in result.turns
                for name, values in turn.measures.items()
            )

    def on_evaluation(self, result: EvaluationResult) -> None:
        with self._records.writing():
            self._records.add(
                EvaluationRow(
                    completed=result.completed,
                    client=one.client,
                    point=one.point,
                    correct=one.correct,
                    count=one.count,
                    # SQLite has no NaN. The mean over clients must not be one over those with a number.
                    loss=math.inf if math.isnan(one.loss) else one.loss,
                    confusion=pack_confusion(one.confusion),
                )
                for one in result.clients
            )
            self._records.add(
                ClassesRow(completed=result.completed, client=one.client, point=one.point, **asdict(one.classes))
                for one in result.clients
                if one.classes is not None
            )
            self._records.add(
                MetricRow(completed=result.completed, client=one.client, point=one.point, name=name, value=value)
                for one in result.clients
                for name, value in one.metrics.items()
            )
            completed, is_final, num = result.completed, result.is_final, result.sent_to
            if num:
                row = EvaluationTrafficRow(completed, is_final, num, result.bytes_up, result.bytes_down)
                self._records.add([row])
            self._records.add(
                EvaluationFailureRow(completed, is_final, client, reason)
                for client, reason in sorted(result.failures.items())
            )
