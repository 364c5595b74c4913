"""`--profile`: a table, a file, and the very same results."""

from __future__ import annotations

import contextlib
import json
import sqlite3

import pytest
from processes import small, traces

import sparsona as sp
from sparsona.runs import session
from sparsona.runs.observers import ProgressUpdate

OPTIONS = {"clients": 5, "per_round": 4, "rounds": 2, "epochs": 1, "batch_size": 16, "tune_epochs": 1, "data_rate": 0.1}


def steps_of(run) -> tuple[int, int]:
    with contextlib.closing(sqlite3.connect(run / "records.sqlite")) as db:
        return db.execute("SELECT SUM(steps), SUM(examples) FROM turns").fetchone()


def phases_of(part) -> dict[str, dict]:
    assert sum(row["share"] for row in part["phases"]) == pytest.approx(1)
    assert sum(row["seconds"] for row in part["phases"]) == pytest.approx(part["seconds"])
    return {row["phase"]: row for row in part["phases"]}


def test_a_profiled_run_is_the_same_run_and_says_where_the_time_went(say, tmp_path):
    args = ["run", "fedspa", *small(tmp_path)]
    plain = json.loads(say(*args, "--out", "plain", "--json").out)
    said = say(*args, "--out", "run", "--profile", "--json")
    summary = json.loads(said.out)
    found = summary.pop("profile")
    assert traces(tmp_path / "run") == traces(tmp_path / "plain")
    assert set(summary) == set(plain)
    assert not (tmp_path / "plain" / "profile.json").exists()
    assert found == json.loads((tmp_path / "run" / "profile.json").read_text()) == sp.load("run").profile()
    (part,) = found["parts"]
    assert (part["rounds"], part["executor"], part["device"]) == ({"from": 0, "to": 3}, "serial", "cpu")
    assert part["workers"] is None
    assert part["memory"]["process"] > 2**20
    rows = phases_of(part)
    start = ["start: import", "start: read data", "start: build"]
    turn = ["reply", "encode", "decode", "init", "receive", "train", "mask search", "finish", "aggregate", "evaluate"]
    assert list(rows) == [*start, *turn, "records", "checkpoint", "other"]
    # Two of five clients train in each of three rounds, and all five are tested after each; the server adds up what the
    # two sent, and then steps.
    counts = {name: rows[name]["calls"] for name in ("receive", "train", "finish", "aggregate", "evaluate", "reply")}
    assert counts == {"receive": 21, "train": 6, "finish": 6, "aggregate": 15, "evaluate": 15, "reply": 21}
    assert (rows["encode"]["calls"], rows["decode"]["calls"]) == (12, 12)  # of those who train
    assert (rows["train"]["steps"], rows["train"]["examples"]) == steps_of(tmp_path / "run")
    assert all(rows[name]["seconds"] > 0 for name in rows)
    assert rows["mask search"]["calls"] == part["search"]["turns"] == 6
    assert part["search"]["ratio"] > 0
    assert sp.load("run").view.search_time == part["search"]
    assert sp.load("plain").view.search_time is None


def test_the_table(say, tmp_path):
    said = say("run", "fedavg-ft", *small(tmp_path, out="run"), "--profile")
    assert said.code == 0
    text = said.out.partition("Where the time went: ")[2]
    assert text.startswith("3 rounds in ")
    for word in ("phase", "seconds", "share", "calls", "ms per call", "start: read data", "aggregate", "other"):
        assert word in text
    steps = {row["phase"]: row["steps"] for row in sp.load("run").profile()["parts"][0]["phases"] if "steps" in row}
    assert set(steps) == {"train", "train: tune"}
    for name, count in steps.items():
        assert f"{name}: {count} client-steps, " in text
    assert "most memory: " in text
    assert "Where the time went" not in say("run", "local", *small(tmp_path, out="other", rounds=1)).out


@pytest.mark.long
def test_workers_measure_themselves(tmp_path, forked_workers):
    serial = sp.train("fedavg-ft", out=tmp_path / "serial", executor="serial", **OPTIONS)
    events = []
    run = sp.train(
        "fedavg-ft", out=tmp_path / "run", executor="workers", profile=True, observers=[events.append], **OPTIONS
    )
    assert run.accuracies().tolist() == serial.accuracies().tolist()
    assert run.summary["bytes"] == serial.summary["bytes"]
    (part,) = run.profile()["parts"]
    here, workers = phases_of(part), phases_of(part["workers"])
    assert {"start: workers", "pipe", "wait for workers", "aggregate", "reply"} <= set(here)
    assert "train" not in here
    assert {"start: import", "start: build", "train", "train: tune", "finish", "evaluate", "pipe", "idle"} <= set(
        workers
    )
    together = [workers[name]["steps"] for name in ("train", "train: tune")]
    assert sum(together) == steps_of(run.path)[0]
    assert workers["train"]["calls"] == 2 * 4
    assert len(part["memory"]["workers"]) == part["workers"]["processes"]
    doing = [event.doing for event in events if isinstance(event, ProgressUpdate)]
    assert doing[:2] == ["reading digits", "starting"]
    assert doing[2].startswith(f"starting {part['workers']['processes']} worker")
    assert "" in doing[3:]


def test_resume_adds_a_part(say, tmp_path):
    args = [*small(tmp_path, out="run"), "--set", "max_seconds=1e-9", "--json"]
    say("run", "fedavg", *args, "--profile")
    say("resume", "run", "--json")  # no need to ask again
    found = json.loads(say("resume", "run", "--json").out)["profile"]["parts"]
    assert [part["rounds"] for part in found] == [{"from": k, "to": k + 1} for k in range(3)]
    assert [phases_of(part)["train"]["calls"] for part in found] == [2, 2, 2]
    said = say("resume", "run")
    assert "Where the time went: rounds 3 to 3 in " in said.out
    assert sp.load("run").profile()["parts"] == found  # nothing was played, so nothing was measured


def test_resume_may_begin_to_measure(say, tmp_path):
    args = [*small(tmp_path, out="run"), "--set", "max_seconds=1e-9", "--json"]
    say("run", "fedavg", *args)
    with pytest.raises(sp.SparsonaError, match="has no profile"):
        sp.load("run").profile()
    assert "profile" not in json.loads(say("resume", "run", "--json").out)
    found = json.loads(say("resume", "run", "--profile", "--json").out)["profile"]["parts"]
    assert [part["rounds"] for part in found] == [{"from": 2, "to": 3}]


def test_what_was_measured_survives_an_interruption(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "CHECKPOINT_SECONDS", 1e9)

    class Stop:
        def on_round(self, result):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sp.train("fedavg", out=tmp_path / "run", executor="serial", profile=True, observers=[Stop()], **OPTIONS)
    (part,) = json.loads((tmp_path / "run" / "profile.json").read_text())["parts"]
    assert part["rounds"] == {"from": 0, "to": 1}
    assert phases_of(part)["train"]["calls"] == 4


def test_refusals(say, tmp_path):
    say("run", "fedavg", *small(tmp_path), "--set", "profile=true").refused("'profile' is no option", "--profile")
    say("compare", "fedavg", *small(tmp_path, out="both", rounds=1), "--json")
    say("resume", "both", "--profile").refused("--profile for a comparison")
    say("run", "fedavg", *small(tmp_path, out="run"), "--set", "max_seconds=1e-9", "--profile", "--json")
    (tmp_path / "run" / "profile.json").write_text("{}")
    say("resume", "run").refused("profile.json", "remove it")
