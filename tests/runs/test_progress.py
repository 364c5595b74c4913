"""Progress where nobody watches a terminal, and the clocks of bars."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from made_facts import make_facts
from rich.console import Console
from rich.progress import Progress

import sparsona as sp
from sparsona.runs import progress as module
from sparsona.runs.observers import ClientEvaluation, EvaluationResult, ProgressUpdate, RoundResult, RunEnd, RunStart
from sparsona.runs.progress import Bar, Lines, progress_bar


class Clock:
    """Time as a test sets it."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def play_round(lines: Lines, clock: Clock, index: int, seconds: float, right: int) -> None:
    clock.now += seconds
    lines.on_round(RoundResult(index, 1.0, (), seconds))
    lines.on_evaluation(EvaluationResult(index + 1, "received", (ClientEvaluation(0, "received", right, 10, 0.5),)))


@pytest.mark.parametrize(
    ("metrics", "said"), [({"bias": 3.0, "mae": 28.61}, "MAE 28.61"), ({"bias": 3.0}, "loss 1018"), ({}, "loss 1018")]
)
def test_a_regression_is_shown_by_what_it_is_judged_by(metrics: dict[str, float], said: str) -> None:
    found = ClientEvaluation(0, "received", None, 10, 1018.0, metrics=metrics)
    assert module._accuracy(EvaluationResult(1, "received", (found,))) == said


def test_a_line_at_the_start_and_the_end_and_one_a_minute(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(None, has_seeds=True)
    lines.on_progress(ProgressUpdate("FedAvg", 2, 0, 10, "reading digits", 0.0))
    assert capsys.readouterr().err == "FedAvg, seed 2: starting\n"
    clock.now += 40  # of reading, which say nothing of how long rounds take
    lines.on_start(RunStart(Path("x"), make_facts(), {}, 0, 10))
    lines.on_progress(ProgressUpdate("FedAvg", 2, 0, 10, "starting", 0.0))
    for index in range(10):
        play_round(lines, clock, index, 30, index)
    lines.on_end(RunEnd(10, 10, 340.0, True, None, None))
    assert capsys.readouterr().err.splitlines() == [
        # What is evaluated after a round is received after it: a line has the round before, with its accuracy.
        "FedAvg, seed 2: round 0 of 10",
        "FedAvg, seed 2: round 2 of 10, accuracy 10.0%, about 4 min left",
        "FedAvg, seed 2: round 4 of 10, accuracy 30.0%, about 2 min left",
        "FedAvg, seed 2: round 6 of 10, accuracy 50.0%, about 2 min left",
        "FedAvg, seed 2: round 8 of 10, accuracy 70.0%, about 30 s left",
        "FedAvg, seed 2: finished after round 10 of 10, accuracy 90.0%, took 6 min",
    ]


def test_lines_of_a_run_that_is_resumed_and_of_a_long_round(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines("fedavg:lr=0.1", has_seeds=False)
    lines.on_start(RunStart(Path("x"), make_facts(), {}, 100, 200))
    lines.on_progress(ProgressUpdate("FedAvg", 0, 100, 200, "starting", 500.0))
    play_round(lines, clock, 100, 50, 5)
    clock.now += 20
    lines.on_progress(ProgressUpdate("FedAvg", 0, 101, 200, "3/50 trained", 570.0))
    lines.on_progress(ProgressUpdate("FedAvg", 0, 101, 200, "4/50 trained", 572.0))
    lines.on_end(RunEnd(101, 200, 9000.0, False, "interrupted", None))
    assert capsys.readouterr().err.splitlines() == [
        "fedavg:lr=0.1: resumed after round 100 of 200",
        "fedavg:lr=0.1: round 101 of 200, accuracy 50.0%, 3/50 trained, about 1 h 22 min left",
        "fedavg:lr=0.1: stopped (interrupted) after round 101 of 200, accuracy 50.0%, took 2 h 30 min",
    ]


def test_lines_of_runs_side_by_side(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(None, has_seeds=False, total=("all of table 1", 8))
    for title in ("A", "B"):
        lines.on_progress(ProgressUpdate(title, 0, 0, 4, "in a process of its own", 0.0))
    clock.now += 60
    for title in ("A", "B"):
        lines.on_progress(ProgressUpdate(title, 0, 2, 4, "in a process of its own", 50.0))
    lines.on_progress(ProgressUpdate("A", 0, 4, 4, "", 120.0, is_over=True))
    lines.on_progress(ProgressUpdate("B", 0, 3, 4, "failed", 100.0, is_over=True))
    assert capsys.readouterr().err.splitlines() == [
        "A: starting",
        "B: starting",
        "A: round 2 of 4, in a process of its own, about 60 s left",
        "B: round 2 of 4, in a process of its own, about 60 s left",
        "A: finished after round 4 of 4, took 2 min",
        "all of table 1: 4 of 8 rounds",
        "B: failed after round 3 of 4, took 2 min",
        "all of table 1: 7 of 8 rounds",
    ]


def test_lines_of_trials(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(None, has_seeds=False)
    lines.trials(0, 9, "")
    for done in range(1, 10):
        clock.now += 25
        lines.trials(done, 9, f"fedavg: lr={done}: complete")
    assert capsys.readouterr().err.splitlines() == [
        "trials: 0 of 9",
        "trials: 3 of 9, fedavg: lr=3: complete",
        "trials: 6 of 9, fedavg: lr=6: complete",
        "trials: 9 of 9, fedavg: lr=9: complete",
    ]


def test_lines_have_nothing_that_moves_a_cursor(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    Lines(None, has_seeds=False).on_progress(ProgressUpdate("a\x1b[2J\nb", 0, 0, 1, "", 0.0))
    assert capsys.readouterr().err == "a\\x1b[2J\\nb: starting\n"


def test_bars_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    with progress_bar() as shown:
        assert isinstance(shown, Lines)
    stderr = io.StringIO()
    stderr.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar() as shown:
        assert isinstance(shown, Bar)
    monkeypatch.setenv("TERM", "dumb")
    with progress_bar() as shown:
        assert isinstance(shown, Lines)


def test_a_bars_clock_is_that_of_its_run() -> None:
    clock = Clock()
    bars = Progress(console=Console(file=io.StringIO()), auto_refresh=False, get_time=clock.monotonic)
    bar = Bar(bars, None, has_seeds=False)
    for seconds, completed in ((30, 3), (50, 4)):  # two runs of one name; the first one stops early
        bar.on_progress(ProgressUpdate("FedSpa", 0, 0, 4, "", 0.0))
        clock.now += seconds
        bar.on_round(RoundResult(completed - 1, 1.0, (), seconds))
        bar.on_end(RunEnd(completed, 4, seconds, True, "best validation at round 2" if completed < 4 else None, None))
    clock.now += 1000
    assert [(task.description, task.elapsed, task.completed) for task in bars.tasks] == [
        ("FedSpa", 30, 3),
        ("FedSpa", 50, 4),
    ]
    assert [task.remaining for task in bars.tasks] == [0, 0]


def test_commands_say_how_far_they_are_in_a_log_file(say) -> None:
    small = ["--rounds", 1, "--clients", 4, "--set", "data_rate=0.1", "--set", "executor=serial"]
    done = say("compare", "local", "fedavg", *small, "--out", "both")
    assert done.code == 0
    titles = [line.partition(":")[0] for line in done.err.splitlines() if not line.startswith("warning: ")]
    assert titles == ["Local", "Local", "FedAvg", "FedAvg"]
    assert "Local: starting\nLocal: finished after round 1 of 1, accuracy " in done.err


def test_a_script_has_lines_where_it_asks_for_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"clients": 4, "rounds": 1, "data_rate": 0.1, "executor": "serial"}
    for progress, expected in ((False, 0), (None, 0), (True, 2)):
        sp.train("local", **options, out=tmp_path / str(progress), progress=progress)
        assert len(capsys.readouterr().err.splitlines()) == expected
