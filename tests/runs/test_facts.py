"""Facts of a run: one typed value, read once; what version 4c20921 wrote is still read."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from made_facts import make_facts
from processes import small

import sparsona as sp
from sparsona.core.errors import SparsonaError
from sparsona.runs import folder, session
from sparsona.runs.facts import ExampleFacts, RunFacts, WarmStartFacts

OLD = Path(__file__).parent / "format1_run"  # two rounds of fedspa on four clients, made by commit 4c20921


def test_facts_survive_being_written():
    start = WarmStartFacts("runs/a", "fedavg", 3, "weights", "data", 4, 5, False)
    seen = ExampleFacts((3, 8, 8), "uint8", 5, (0.1, 0.2, 0.3), (1.0, 1.0, 2.0), 6, True, "pictures")
    facts = make_facts(novel=(2,), left_out={"no test data": 3}, warm_start=start, label_counts=None, examples=seen)
    again = RunFacts.from_json(json.loads(json.dumps(facts.as_json())), "run")
    assert again.as_json() == facts.as_json()
    assert again.warm_start == start
    assert again.examples == seen
    assert again.novel == (2,)
    assert next(iter(facts.as_json())) == "format"


def test_facts_cannot_be_changed():
    facts = RunFacts.from_json(make_facts().as_json(), "run")
    with pytest.raises(dataclasses.FrozenInstanceError):
        facts.title = "FedSpa"
    with pytest.raises(ValueError, match="read-only"):
        facts.sizes[0] = 7


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"title": None}, "it lacks title"),
        ({"sizes": "many"}, "in 0 dimensions"),
        ({"warm_start": {"run": "x"}}, "missing"),
        ({"examples": {"shape": [2], "dtype": "float32"}}, "missing"),
        ({"examples": {"shape": [2], "dtype": "nn", "num_outputs": 2}}, "examples of"),
        ({"examples": {"shape": ["2"], "dtype": "float32", "num_outputs": 2}}, "examples of"),
        ({"examples": {"shape": [2], "dtype": "float32", "num_outputs": 2, "mean": ["x"]}}, "examples of"),
        ({"examples": {"shape": 2, "dtype": "float32", "num_outputs": 2}}, "must be an iterable"),
        ({"examples": [2]}, "missing"),
    ],
)
def test_damaged_facts(change, words):
    values = {**make_facts().as_json(), **change}
    values = {key: value for key, value in values.items() if key != "title" or value}
    with pytest.raises(SparsonaError, match=f"'run' is damaged: its facts cannot be read .*{words}"):
        RunFacts.from_json(values, "run")


def test_a_run_of_the_format_before_is_read(say, tmp_path):
    """Its report, its row in the list, a table with others, its figures; it is not gone on with."""
    shutil.copytree(OLD, tmp_path / "runs" / "old")
    found = sp.load(tmp_path / "runs" / "old")
    stored = json.loads((OLD / "summary.json").read_text())
    assert found.summary["accuracy"] == stored["accuracy"]
    assert np.mean(found.accuracies()) == pytest.approx(stored["accuracy"]["mean"])
    assert [completed for completed, _ in found.curve()] == [1, 2]
    (row,) = json.loads(say("runs", "--json").out)
    assert (row["method"], row["rounds"], row["state"]) == ("fedspa", "2/2", "finished")
    (tmp_path / "runs" / "old" / "summary.json").unlink()  # worked out again from its records
    again = sp.load(tmp_path / "runs" / "old").summary["bytes"]
    assert {key: again[key] for key in stored["bytes"]} == stored["bytes"]
    said = say("report", "old", "--out", "page.html")
    assert said.code == 0, said.err
    assert (tmp_path / "page.html").stat().st_size > 10_000
    say("resume", "old").refused(
        "'runs/old' was written in format 1 by sparsona 0.1.0", "expected: a run in format 2", "the version that wrote"
    )


def test_a_run_reads_and_opens_little(say, tmp_path, monkeypatch):
    """Facts are parsed once at most, one engine is built, and records are opened a handful of times."""
    counts = {"facts": 0, "engines": 0, "records": 0}

    def counted(name, function):
        def call(*args, **options):
            counts[name] += 1
            return function(*args, **options)

        return call

    monkeypatch.setattr(folder.RunFacts, "from_json", counted("facts", folder.RunFacts.from_json))
    monkeypatch.setattr(session, "engine_for", counted("engines", session.engine_for))
    monkeypatch.setattr(sqlite3, "connect", counted("records", sqlite3.connect))
    said = say("run", "fedspa", *small(tmp_path, out="run", rounds=2))
    assert said.code == 0, said.err
    assert (tmp_path / "run" / "report.html").exists()
    assert counts["facts"] <= 1
    assert counts["engines"] == 1
    assert counts["records"] <= 3  # to write and sum up; to draw


@pytest.mark.parametrize(
    ("method", "options", "personal"),
    [
        ("fedavg", {}, 0),
        ("fedavg-ft", {}, "whole"),
        ("fedavg-ft-part", {"personal": "output"}, 650),  # 64 weights and a bias for each of ten classes
        ("fedalt", {"personal": "output"}, 650),
        ("local", {}, "whole"),
        ("ditto", {}, "whole"),
        ("fedspa", {}, None),  # masks are no parameters
    ],
)
def test_personal_parameters_are_counted(method, options, personal, tmp_path):
    run = sp.train(method, clients=2, rounds=1, epochs=1, data_rate=0.1, device="cpu", out=tmp_path / "run", **options)
    assert run.view.num_personal == (run.view.num_parameters if personal == "whole" else personal)
