"""Observers that write a run's figures to TensorBoard, MLflow or Weights & Biases."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from sparsona.core.errors import SparsonaError
from sparsona.runs.observers import EvaluationResult, RoundResult, RunEnd, RunStart
from sparsona.runs.records import NAME, Records

QUANTILES = {"worst": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9}


class Figures:
    """The figures of a run's records, by names such as "train/loss"; bytes and steps are summed over rounds."""

    def __init__(self) -> None:
        self._sums = dict.fromkeys(("bytes_up", "bytes_down", "steps", "train_flops"), 0)

    @classmethod
    def since(cls, start: RunStart) -> Figures:
        """Those of a run that starts, or goes on from what its records say was spent."""
        found = cls()
        if start.completed:
            records = Records(start.path / NAME)
            with records.reading():
                for row, steps in zip(records.rounds(), records.steps_by_round(), strict=True):
                    if row.round < start.completed:  # later ones are played again
                        found._sums["steps"] += steps
                        for name in ("bytes_up", "bytes_down", "train_flops"):
                            found._sums[name] += getattr(row, name)
        return found

    def of_round(self, result: RoundResult) -> dict[str, float]:
        """The loss of a round, what was spent so far, and the mean of what the method measured."""
        found = {"train/clients": result.total("trained"), "train/seconds": result.seconds}
        found["train/lr_scale"] = result.lr_scale
        if result.loss is not None:
            found["train/loss"] = result.loss
        for name in self._sums:
            self._sums[name] += result.total(name)
            found[f"spent/{name}"] = self._sums[name]
        measured: dict[str, list[float]] = {}
        for turn in result.turns:
            for name, values in turn.measures.items():
                if len(values) == 1:  # more are of single blocks or layers
                    measured.setdefault(name, []).append(values[0])
        return found | {f"measured/{name}": float(np.mean(values)) for name, values in measured.items()}

    def of_evaluation(self, result: EvaluationResult) -> dict[str, float]:
        """Of each point: mean accuracy over clients (see `headline_weight`), its quantiles, and the means of loss and
        metrics."""
        found = {}
        for point in dict.fromkeys(one.point for one in result.clients):
            here = [one for one in result.clients if one.point == point and one.count]
            known = [one.correct / one.count for one in here if one.correct is not None]
            name = point.replace("/", "_on_")
            if (mean := result.mean(point)) is not None:
                found[f"{name}/accuracy"] = mean
                found |= {f"{name}/accuracy_{key}": float(np.quantile(known, at)) for key, at in QUANTILES.items()}
            if here:
                found[f"{name}/loss"] = float(np.mean([one.loss for one in here]))
            for metric in dict.fromkeys(key for one in here for key in one.metrics if key != "accuracy"):
                # Over the clients that it is defined for.
                values = [one.metrics[metric] for one in here if metric in one.metrics]
                found[f"{name}/{metric}"] = float(np.mean(values))
        return found


class TensorBoard:
    """Writes figures as TensorBoard reads them, to a folder below `place` for each run.

    Args:
        place: the folder that `tensorboard --logdir` is given.
    """

    def __init__(self, place: str) -> None:
        self._make = _import("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._place = Path(place)
        self._writer: Any = None
        self._figures = Figures()

    def on_start(self, start: RunStart) -> None:
        self._close()
        self._figures = Figures.since(start)
        self._writer = self._make(str(self._place / start.path.name))
        self._writer.add_text("options", f"```json\n{json.dumps(dict(start.options), indent=1, default=str)}\n```")

    def on_round(self, result: RoundResult) -> None:
        self._write(self._figures.of_round(result), result.index + 1)

    def on_evaluation(self, result: EvaluationResult) -> None:
        self._write(self._figures.of_evaluation(result), result.completed)

    def on_end(self, end: RunEnd) -> None:
        self._close()

    def _write(self, figures: Mapping[str, float], step: int) -> None:
        assert self._writer is not None
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class MLflow:
    """Writes figures and options to MLflow, a run of its for each of ours.

    Args:
        place: the tracking URI, such as "sqlite:///runs.db" or a server's; or a folder, in which a database mlflow.db
            is made, because MLflow 3 refuses to write folders.
    """

    def __init__(self, place: str) -> None:
        self._mlflow = _import("mlflow", "mlflow")
        # "databricks" is the one address that MLflow knows without a scheme.
        is_address = re.match(r"[\w+.-]{2,}:|databricks$", place) is not None
        self._folder = None if is_address else Path(place)
        self._place = place if self._folder is None else f"sqlite:///{self._folder / 'mlflow.db'}"
        self._figures, self._is_open = Figures(), False

    def on_start(self, start: RunStart) -> None:
        self._close("KILLED")
        self._figures = Figures.since(start)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._mlflow.set_tracking_uri(self._place)
        self._mlflow.set_experiment("sparsona")
        self._mlflow.start_run(run_name=start.path.name)
        self._is_open = True
        # MLflow takes at most 100 parameters at once, of at most 500 characters.
        options = [(name, str(value)[:500]) for name, value in _flat(start.options).items()]
        for first in range(0, len(options), 100):
            self._mlflow.log_params(dict(options[first : first + 100]))

    def on_round(self, result: RoundResult) -> None:
        self._mlflow.log_metrics(self._figures.of_round(result), step=result.index + 1)

    def on_evaluation(self, result: EvaluationResult) -> None:
        self._mlflow.log_metrics(self._figures.of_evaluation(result), step=result.completed)

    def on_end(self, end: RunEnd) -> None:
        self._close("FINISHED" if end.finished else "KILLED")

    def _close(self, status: str) -> None:
        if self._is_open:
            self._mlflow.end_run(status)
            self._is_open = False


class WandB:
    """Writes figures and options to Weights & Biases; offline, to ./wandb, unless WANDB_MODE says otherwise.

    Args:
        place: the project.
    """

    def __init__(self, place: str) -> None:
        self._wandb = _import("wandb", "wandb")
        self._place, self._figures, self._step = place, Figures(), 0
        self._run: Any = None

    def on_start(self, start: RunStart) -> None:
        self._close(1)
        self._figures, self._step = Figures.since(start), 0
        mode = os.environ.get("WANDB_MODE", "offline")  # nothing leaves the machine unless its user says so
        options = json.loads(json.dumps(dict(start.options), default=str))
        self._run = self._wandb.init(project=self._place, name=start.path.name, config=options, mode=mode)

    def on_round(self, result: RoundResult) -> None:
        self._log(self._figures.of_round(result), result.index + 1)

    def on_evaluation(self, result: EvaluationResult) -> None:
        self._log(self._figures.of_evaluation(result), result.completed)

    def on_end(self, end: RunEnd) -> None:
        self._close(0 if end.finished else 1)

    def _log(self, figures: Mapping[str, float], step: int) -> None:
        assert self._run is not None
        # W&B ignores what is logged to an earlier step, as the evaluation after final tuning would be.
        self._step = max(self._step, step)
        self._run.log(dict(figures), step=self._step)

    def _close(self, code: int) -> None:
        if self._run is not None:
            self._run.finish(exit_code=code)
            self._run = None


def _flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in options.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def _import(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise SparsonaError(
            f"{package} is not installed", expected="it, for this log", hint=f"pip install {package}"
        ) from error
