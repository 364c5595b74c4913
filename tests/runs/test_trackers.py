"""Observers for TensorBoard, MLflow and Weights & Biases, with stand-ins that note what they are called with."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from made_facts import make_facts

import sparsona as sp
from sparsona.core.errors import SparsonaError
from sparsona.runs.observers import EvaluationResult, RoundResult, RunStart
from sparsona.runs.trackers import MLflow, WandB

OPTIONS = {"clients": 4, "rounds": 2, "data_rate": 0.1, "device": "cpu", "epochs": 1}


# What is called, with the parameters that the packages document; a call that does not fit them is a TypeError.
class _Board:
    def add_scalar(self, tag, scalar_value, global_step=None, walltime=None, new_style=False): ...
    def add_text(self, tag, text_string, global_step=None, walltime=None): ...
    def close(self): ...
    def make(self, log_dir=None, comment="", purge_step=None, max_queue=10, flush_secs=120): ...


_Board.SummaryWriter = _Board.make  # type: ignore[attr-defined]  # which is a class


class _Flow:
    def set_tracking_uri(self, uri): ...
    def set_experiment(self, experiment_name=None, experiment_id=None): ...
    def start_run(self, run_id=None, experiment_id=None, run_name=None, nested=False): ...
    def log_params(self, params, synchronous=None, run_id=None): ...
    def log_metrics(self, metrics, step=None, synchronous=None, run_id=None): ...
    def end_run(self, status="FINISHED"): ...


class _Bias:
    def init(self, *, project=None, name=None, config=None, mode=None): ...  # of many more
    def log(self, data, step=None, commit=None): ...
    def finish(self, exit_code=None, quiet=None): ...


SIGNATURES = {"torch.utils.tensorboard": _Board, "mlflow": _Flow, "wandb": _Bias}


class Noting(ModuleType):
    """A module of which every function notes its name and arguments, if it has such a function."""

    def __init__(self, name: str, calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> None:
        super().__init__(name)
        self.calls = calls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        known = inspect.signature(getattr(SIGNATURES[self.__name__], name))

        def call(*args: Any, **more: Any) -> Noting:
            known.bind(self, *args, **more)
            self.calls.append((name, args, more))
            return self

        return call


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What the three packages are called with in one run."""
    found: dict[str, list[Any]] = {"torch.utils.tensorboard": [], "mlflow": [], "wandb": []}
    with pytest.MonkeyPatch.context() as patch:
        for name, calls in found.items():
            patch.setitem(sys.modules, name, Noting(name, calls))
        patch.delenv("WANDB_MODE", raising=False)
        logs = ["tensorboard:board", "mlflow:sqlite:///runs.db", "wandb:project"]
        more = {"metrics": ["accuracy", "f1"]}
        sp.train("fedspa", **OPTIONS, **more, out=tmp_path_factory.mktemp("x") / "spa", observers=logs)
    return found


def test_every_tracker_gets_loss_bytes_and_quantiles(noted: dict[str, list[Any]]) -> None:
    board = {args[0]: args[1:] for name, args, _ in noted["torch.utils.tensorboard"] if name == "add_scalar"}
    flow, bias = _steps(noted["mlflow"], "log_metrics"), _steps(noted["wandb"], "log")
    assert board == flow == bias
    assert {"train/loss", "spent/bytes_up", "received/accuracy_p10", "received/accuracy", "received/loss"} <= set(board)
    assert 0 < board["received/f1"][0] <= 1
    assert board["spent/bytes_up"][1] == 2  # after the last round


def test_bytes_are_summed(noted: dict[str, list[Any]]) -> None:
    sent = [args[1] for name, args, _ in noted["torch.utils.tensorboard"] if args[:1] == ("spent/bytes_up",)]
    assert len(sent) == 2
    assert 0 < sent[0] < sent[1]


def test_a_resumed_run_goes_on_from_what_was_spent(
    noted: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[Any] = []
    sp.train("fedspa", **OPTIONS, out=tmp_path / "run", max_seconds=1e-9)
    monkeypatch.setitem(sys.modules, "mlflow", Noting("mlflow", calls))
    sp.resume(tmp_path / "run", observers=["mlflow:sqlite:///runs.db"])
    whole, rest = (_steps(one, "log_metrics") for one in (noted["mlflow"], calls))
    names = [name for name in whole if name.startswith("spent/")]
    assert {name: rest[name] for name in names} == {name: whole[name] for name in names}


def test_runs_begin_and_end(noted: dict[str, list[Any]]) -> None:
    assert noted["mlflow"][0] == ("set_tracking_uri", ("sqlite:///runs.db",), {})
    assert noted["mlflow"][-1] == ("end_run", ("FINISHED",), {})
    ((_, _, made),) = _of(noted["wandb"], "init")
    assert (made["project"], made["name"], made["mode"]) == ("project", "spa", "offline")
    assert made["config"]["options"]["density"] == 0.5
    assert noted["wandb"][-1] == ("finish", (), {"exit_code": 0})
    params = {key: value for _, (values,), _ in _of(noted["mlflow"], "log_params") for key, value in values.items()}
    assert params["options.density"] == "0.5"


def test_steps_never_go_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Weights & Biases ignores what does: it would lose the accuracy after final tuning."""
    calls: list[Any] = []
    monkeypatch.setitem(sys.modules, "wandb", Noting("wandb", calls))
    tracker = WandB("project")
    for _ in range(2):  # the second run counts anew
        tracker.on_start(RunStart(tmp_path / "run", make_facts(), {}, 0, 2))
        tracker.on_round(RoundResult(1, 1.0, (), 0.5))
        tracker.on_round(RoundResult(2, 1.0, (), 0.5, is_tuning=True))
        tracker.on_evaluation(EvaluationResult(2, "tuned", ()))
    assert [more["step"] for _, _, more in _of(calls, "log")] == [2, 3, 3, 2, 3, 3]


@pytest.mark.parametrize(
    ("place", "address"),
    [
        ("board/flow", "sqlite:///board/flow/mlflow.db"),
        ("sqlite:///runs.db", "sqlite:///runs.db"),
        ("http://127.0.0.1:5000", "http://127.0.0.1:5000"),
        ("databricks", "databricks"),
        ("databricks://me", "databricks://me"),
    ],
)
def test_mlflow_writes_a_database_into_a_folder(
    place: str, address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """MLflow 3 refuses a folder as the place of its files."""
    calls: list[Any] = []
    monkeypatch.setitem(sys.modules, "mlflow", Noting("mlflow", calls))
    monkeypatch.chdir(tmp_path)
    MLflow(place).on_start(RunStart(tmp_path / "run", make_facts(), {}, 0, 1))
    assert _of(calls, "set_tracking_uri") == [("set_tracking_uri", (address,), {})]
    assert (tmp_path / "board" / "flow").is_dir() == (place == "board/flow")


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SparsonaError, match=r"wandb is not installed(.|\n)*pip install wandb"):
        sp.train("fedavg", **OPTIONS, out=tmp_path / "run", observers=["wandb:project"])
    assert not (tmp_path / "run").exists()


def _steps(calls: list[Any], name: str) -> dict[str, tuple[float, int]]:
    """The last figure of each name, and its step."""
    return {key: (value, more["step"]) for _, (values,), more in _of(calls, name) for key, value in values.items()}


def _of(calls: list[Any], name: str) -> list[Any]:
    return [call for call in calls if call[0] == name]
