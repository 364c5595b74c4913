"""Observers: typed records in, nothing out."""

from __future__ import annotations

import dataclasses
import json

import pytest
from processes import completed, small, traces

import sparsona as sp
from sparsona.core.errors import SparsonaError
from sparsona.runs import session
from sparsona.runs.json_lines import JsonLines
from sparsona.runs.observers import (
    EvaluationResult,
    ObserverList,
    ProgressUpdate,
    RoundResult,
    RunEnd,
    RunStart,
    make_observer,
)

OPTIONS = {"rounds": 3, "clients": 4, "per_round": 2, "epochs": 1, "data_rate": 0.1, "executor": "serial"}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """A run, and all that its observer was told."""
    records: list = []
    options = {**OPTIONS, "tune_epochs": 1, "novel": 1}
    run = sp.train("fedavg-ft", out=tmp_path_factory.mktemp("told") / "run", observers=[records.append], **options)
    return run, records


def test_what_happens_is_told_in_order(told):
    _, records = told
    kinds = [type(record) for record in records if not isinstance(record, ProgressUpdate)]
    assert kinds == [RunStart, *[RoundResult, EvaluationResult] * 3, RoundResult, EvaluationResult, RunEnd]
    assert isinstance(records[0], ProgressUpdate)  # data is read before there is a run
    assert records[0].doing == "reading digits"
    rounds = [record for record in records if isinstance(record, RoundResult)]
    assert [(one.index, one.is_tuning) for one in rounds] == [(0, False), (1, False), (2, False), (3, True)]
    assert [str(one).partition(":")[0] for one in rounds] == ["round 1", "round 2", "round 3", "final tuning"]


def test_what_is_told_is_what_is_recorded(told):
    run, records = told
    start, end = records[[type(one) for one in records].index(RunStart)], records[-1]
    assert repr(start) == f"RunStart({start})"  # and no client's label counts
    assert start.path == run.path
    assert start.facts is run._folder.facts
    assert start.options == run.config
    assert (start.completed, start.rounds) == (0, 3)
    assert end.finished
    assert end.reason is None
    assert end.summary == run.summary
    kept = run._folder.records
    rounds = [record for record in records if isinstance(record, RoundResult)]
    for told_round, row in zip(rounds, kept.rounds(), strict=True):
        assert (told_round.index, told_round.lr_scale, told_round.loss) == (row.round, row.lr_scale, row.loss)
        assert told_round.total("bytes_up") == row.bytes_up
        assert told_round.total("train_flops") == row.train_flops
        for turn, turn_row in zip(told_round.turns, kept.turns(row.round), strict=True):
            assert (turn.client, turn.steps, turn.bytes_down) == (turn_row.client, turn_row.steps, turn_row.bytes_down)
    found = {
        (result.completed, one.client, one.point, one.correct, one.count, one.loss)
        for result in records
        if isinstance(result, EvaluationResult)
        for one in result.clients
    }
    assert found == {dataclasses.astuple(row)[:-1] for row in kept.evaluations()}
    last = [record for record in records if isinstance(record, EvaluationResult)][-1]
    assert last.point == "tuned"
    assert last.accuracy == pytest.approx(run.summary["accuracy"]["mean"])
    assert last.mean("global") is None


def test_records_cannot_be_changed(told):
    for record in told[1]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, dataclasses.fields(record)[0].name, 7)
    evaluation = next(record for record in told[1] if isinstance(record, EvaluationResult))
    with pytest.raises(ValueError, match="read-only"):
        evaluation.clients[0].confusion[0, 0] = 7


def test_an_observer_changes_nothing(told, tmp_path):
    run = told[0]

    class Meddler:
        def on_start(self, start):
            start.options["rounds"] = 1

        def on_end(self, end):
            end.summary.clear()

    options = {**OPTIONS, "tune_epochs": 1, "novel": 1}
    again = sp.train("fedavg-ft", out=tmp_path / "run", observers=[Meddler()], **options)
    assert traces(again.path) == traces(run.path)
    assert again.config["rounds"] == 3


@pytest.mark.parametrize("event", ["on_start", "on_progress", "on_round", "on_evaluation"])
def test_an_observer_that_raises_ends_the_run_and_what_was_reached_is_saved(tmp_path, event):
    whole = sp.train("fedavg", out=tmp_path / "whole", **OPTIONS)
    ends = []

    class Broken:
        def on_end(self, end):
            ends.append(end)
            raise ValueError("and again")

    def fail(record):
        if getattr(record, "index", 0) == 0 and getattr(record, "doing", "starting") == "starting":
            raise RuntimeError("the light is out")

    broken = Broken()
    setattr(broken, event, fail)
    with pytest.raises(RuntimeError, match="the light is out") as caught:
        sp.train("fedavg", out=tmp_path / "run", observers=[broken], **OPTIONS)
    assert completed(tmp_path / "run") == (1 if event in ("on_round", "on_evaluation") else 0)
    assert [(end.finished, end.reason, end.summary) for end in ends] == [
        (False, "RuntimeError: the light is out", None)
    ]
    assert caught.value.__notes__ == ["an observer failed at the end, too: ValueError('and again')"]
    sp.resume(tmp_path / "run")
    assert traces(tmp_path / "run") == traces(whole.path)


def test_why_a_run_was_stopped(tmp_path, capsys):
    ends: list = []

    class Last:
        def on_end(self, end):
            ends.append(end)

    sp.train("fedavg", out=tmp_path / "run", max_seconds=1e-9, observers=[Last()], **OPTIONS)
    (end,) = ends
    assert (end.completed, end.finished, end.reason) == (1, False, "max_seconds")
    assert end.summary["rounds"] == 1
    assert str(end) == "stopped (max_seconds) after round 1 of 3"
    assert "stopped by max_seconds after round 1 of 3" in capsys.readouterr().err

    class Impatient(Last):
        def on_round(self, result):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sp.resume(tmp_path / "run", observers=[Impatient()])
    assert (ends[-1].completed, ends[-1].reason) == (2, "interrupted")


def test_a_long_round_says_what_it_is_at(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "PROGRESS_SECONDS", 0)
    doing = []

    class Watch:
        def on_progress(self, progress):
            doing.append((progress.completed, progress.doing))

    sp.train("fedavg", out=tmp_path / "run", observers=[Watch()], **{**OPTIONS, "rounds": 1})
    assert doing[:2] == [(0, "reading digits"), (0, "starting")]
    assert (0, "2/2 trained") in doing
    assert (0, "4/4 tested") in doing


@pytest.mark.parametrize(
    ("observer", "words"),
    [
        (3, "3 is no observer"),
        (JsonLines, r"make one: JsonLines\(\)"),
        (type("Misspelt", (), {"on_rounds": print})(), "did you mean 'on_round'"),
        ("run.txt", r"log 'run.txt'\n  expected: FILE.jsonl"),
        ("jsonl:", "log 'jsonl:'"),
    ],
)
def test_what_is_no_observer_is_refused_before_a_folder_is_made(tmp_path, observer, words):
    for train in (lambda **how: sp.train("fedavg", **how), lambda **how: sp.compare(["fedavg"], **how)):
        with pytest.raises(SparsonaError, match=words):
            train(out=tmp_path / "run", observers=[observer], **OPTIONS)
    assert list(tmp_path.iterdir()) == []


def test_observers_by_name(tmp_path):
    for text in (f"jsonl:{tmp_path / 'log'}", str(tmp_path / "log.jsonl")):
        assert isinstance(make_observer(text), JsonLines)
    ObserverList([print, str(tmp_path / "log.jsonl")])


def test_a_log_of_json_lines(say, tmp_path):
    log = tmp_path / "log.jsonl"
    said = say("run", "fedspa", *small(tmp_path, out="run", rounds=2), "--log", log, "--json")
    assert said.code == 0, said.err
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["start", *["round", "evaluation"] * 2, "end"]
    assert {line["run"] for line in lines} == {"run"}
    assert lines[0]["facts"]["title"] == "FedSpa (DST)"
    assert lines[0]["options"]["rounds"] == 2
    assert [turn["steps"] for turn in lines[1]["turns"]] == [3, 3]
    assert {one["point"] for one in lines[2]["clients"]} == {"received"}
    assert lines[-1]["summary"] == json.loads(said.out)
    said = say("compare", "local", "fedavg", *small(tmp_path, out="both", rounds=1), "--log", log)
    assert said.code == 0, said.err
    lines = [json.loads(line) for line in log.read_text().splitlines()][6:]
    assert [line["run"] for line in lines if line["event"] == "end"] == ["both/local-seed0", "both/fedavg-seed0"]


def test_a_log_that_cannot_be_written(say, tmp_path):
    said = say("run", "fedspa", *small(tmp_path, out="run"), "--log", "nowhere/log.jsonl")
    said.refused("'nowhere/log.jsonl' cannot be written: No such file or directory")
    assert not (tmp_path / "run").exists()
