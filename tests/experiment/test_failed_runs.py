"""A comparison goes on without a run that fails, and ends with what is missing and why."""

from __future__ import annotations

import json

import pytest

import sparsona as sp
from sparsona.core.errors import SparsonaError
from sparsona.experiment import compare as comparisons
from sparsona.experiment.run import missing_in, views_in
from sparsona.runs.failed import NAME, read_failed
from sparsona.runs.records import Records

METHODS = ["fedavg:lr=1e30,clip_norm=none", "local"]
OPTIONS = {"clients": 4, "rounds": 1, "epochs": 1, "data_rate": 0.1, "on_divergence": "stop", "progress": False}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("comparison") / "both"
    found = sp.compare(METHODS, out=path, executor="serial", **OPTIONS)
    assert [run.summary["method"] for run in found.runs] == ["local"]
    return path


def test_the_others_are_finished_and_it_is_said_what_is_missing(path):
    (failed,) = missing_in(path)
    assert (failed.method, failed.seed) == ("FedAvg", 0)
    assert failed.what.startswith("training diverged: client")
    assert failed.what.endswith("in round 1 (fedavg)")
    assert "--on-divergence drop" in failed.error
    assert [view.method for view in views_in(path)] == ["local"]


def test_resume_retries_the_missing_alone_and_the_table_has_a_row_for_them(path, monkeypatch):
    played = []
    original = comparisons.resume_run
    monkeypatch.setattr(comparisons, "resume_run", lambda *a, **k: played.append(a[0].name) or original(*a, **k))
    before = Records(path / "local-seed0" / "records.sqlite").rounds()
    found = comparisons.resume_comparison(path, progress=False)
    assert len(played) == 2  # a finished run is loaded
    assert Records(path / "local-seed0" / "records.sqlite").rounds() == before  # with its seconds: not played again
    assert [one.method for one in found.missing] == ["FedAvg"]
    assert found.table()[-1]["accuracy"].startswith("failed: training diverged")
    assert any("failed: training diverged" in note for note in found.notes())
    assert "1 failed" in repr(found)


def test_the_page_and_the_command_say_it(path, say):
    said = say("resume", path)
    assert said.code == 1
    assert "– failed" in said.out
    assert "1 of 2 runs failed: FedAvg" in said.err
    assert f"`sparsona resume {path}` retries what failed" in said.err
    said = say("resume", path, "--json")
    assert said.code == 1
    (missing,) = json.loads(said.out)["missing"]
    assert missing["error"].startswith("training diverged")
    said = say("report", path, "--out", "page.html")
    assert said.code == 0
    assert "missing: FedAvg" in said.err
    with open("page.html") as page:
        assert "failed: training diverged" in page.read()


@pytest.mark.parametrize("error", [ValueError("no such layer"), SparsonaError("no data")])
def test_any_error_of_a_method_or_model(tmp_path, monkeypatch, error):
    original = comparisons.start_run

    def start(config, *args, **options):
        if config.method == "fedavg" and config.seed == 1:
            raise error
        return original(config, *args, **options)

    monkeypatch.setattr(comparisons, "start_run", start)
    found = sp.compare(["fedavg", "local"], out=tmp_path / "both", seeds=2, executor="serial", **OPTIONS)
    played = [(run.summary["method"], run.config["seed"]) for run in found.runs]
    assert played == [("fedavg", 0), ("local", 0), ("local", 1)]
    (failed,) = found.missing
    assert (failed.method, failed.seed) == ("FedAvg", 1)
    assert ("ValueError: no such layer" in failed.error) == isinstance(error, ValueError)
    assert ("Traceback" in failed.trace) == isinstance(error, ValueError)
    monkeypatch.undo()
    assert comparisons.resume_comparison(tmp_path / "both", progress=False).missing == ()
    assert not (tmp_path / "both" / NAME).exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("disk full"), MemoryError()])
def test_what_stops_everything(tmp_path, monkeypatch, error):
    def start(*args, **options):
        raise error

    monkeypatch.setattr(comparisons, "start_run", start)
    with pytest.raises(type(error)):
        sp.compare(METHODS, out=tmp_path / "both", executor="serial", **OPTIONS)
    assert read_failed(tmp_path / "both") == {}


def test_all_that_fail_are_an_error(tmp_path):
    with pytest.raises(SparsonaError, match="training diverged"):
        sp.compare(METHODS[:1], out=tmp_path / "one", executor="serial", **OPTIONS)
    with pytest.raises(SparsonaError, match=r"no run .* has results yet: FedAvg .* failed: training diverged"):
        views_in(tmp_path / "one")


@pytest.mark.slow
def test_in_processes(tmp_path):
    found = sp.compare(METHODS, out=tmp_path / "both", executor="serial", jobs=2, **OPTIONS)
    assert [one.method for one in found.missing] == ["FedAvg"]
    assert len(found.runs) == 1


def test_a_damaged_note_is_refused(path, tmp_path):
    (tmp_path / NAME).write_text('[{"method": 1}]')
    with pytest.raises(SparsonaError, match="damaged"):
        read_failed(tmp_path)
