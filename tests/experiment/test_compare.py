"""A comparison: what all methods have in common, what is told of their differences, and going on with it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import EAGER, completed, small, start, traces, wait_until

import sparsona as sp
from sparsona.core.errors import SparsonaError
from sparsona.core.method import Method
from sparsona.experiment import build
from sparsona.experiment import compare as comparisons
from sparsona.experiment import train as training
from sparsona.methods.fedavg import FedAvgConfig, fedavg
from sparsona.runs.manifest import Manifest
from sparsona.runs.observers import ObserverList
from sparsona.runs.options import RunConfig


def federation_of(folder) -> str:
    return json.loads((folder / "about.json").read_text())["federation"]


METHOD_LIST = ["local", "fedavg-ft", "fedspa", "fedspa:density=0.2"]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """Four methods, two seeds, with an option that only some have."""
    folder = tmp_path_factory.mktemp("comparison")
    partition = small(folder)[1]
    return comparisons.compare(
        METHOD_LIST,
        seeds=2,
        out=folder / "both",
        partition=partition,
        clients=5,
        per_round=2,
        epochs=1,
        batch_size=10,
        rounds=2,
        executor="serial",
        search="rsm",
        tune_epochs=0,
    )


def test_all_methods_meet_the_same_conditions(comparison):
    seen: dict[int, set] = {}
    for run in comparison.runs:
        with contextlib.closing(sqlite3.connect(run.path / "records.sqlite")) as db:
            sampled = db.execute("SELECT round, client FROM turns WHERE round < 2 ORDER BY 1, 2").fetchall()
        config = RunConfig(**run.config)
        start_weights = build.make_context(config, None, None).params.flat.numpy().tobytes()
        seen.setdefault(config.seed, set()).add((federation_of(run.path), tuple(sampled), start_weights))
    assert set(seen) == {0, 1}
    assert all(len(conditions) == 1 for conditions in seen.values())
    assert seen[0] != seen[1]


def test_options_go_to_the_methods_that_have_them(comparison):
    configs = {run.path.name: run.config for run in comparison.runs}
    assert set(configs) == {
        f"{name}-seed{seed}" for name in ("local", "fedavg-ft", "fedspa", "fedspa_density-0.2") for seed in (0, 1)
    }
    assert configs["fedspa-seed0"]["options"]["search"] == "rsm"
    assert configs["fedspa-seed0"]["options"]["density"] == 0.5
    assert configs["fedspa_density-0.2-seed1"]["options"]["density"] == 0.2
    assert "search" not in configs["fedavg-ft-seed0"]["options"]
    assert configs["fedavg-ft-seed0"]["tune_epochs"] == 0  # an option of all overrules the row's


def test_differences_are_paired_by_seed(comparison):
    mean = {run.path.name: run.summary["accuracy"]["mean"] for run in comparison.runs}
    rows = comparison.differences()
    assert rows[0]["method"] == "FedAvg-FT"
    assert len(rows) == 3
    for name, row in zip(("fedavg-ft", "fedspa", "fedspa_density-0.2"), rows, strict=True):
        pairs = [100 * (mean[f"{name}-seed{seed}"] - mean[f"local-seed{seed}"]) for seed in (0, 1)]
        assert float(row["difference"].replace("−", "-")) == pytest.approx(np.mean(pairs), abs=0.006)
        assert row["seeds"] == "2"
        low, high = (float(end.replace("−", "-")) for end in row["interval"].split(" to "))
        half = 12.7062 * abs(pairs[0] - pairs[1]) / 2  # Student's t, one degree of freedom
        assert (low, high) == pytest.approx((np.mean(pairs) - half, np.mean(pairs) + half), abs=0.02)


def test_the_table_has_a_spread_over_seeds(comparison):
    rows = comparison.table()
    assert [row["method"] for row in rows][:2] == ["Local", "FedAvg-FT"]
    assert all(" ± " in row["accuracy"] for row in rows)
    assert rows[0]["bytes up"] == "0 B"


def test_compare_prints_one_table_and_one_report(say, tmp_path):
    said = say("compare", "fedavg", "fedspa", *small(tmp_path, out="both", rounds=1), "--seeds", 2)
    assert "±: sample standard deviation over seeds" in said.out
    assert said.code == 0
    assert said.out.count("How this was measured") == 1
    assert re.search(r"FedSpa \(DST\) +[+−0-9.]+ +[+−0-9.]+ to [+−0-9.]+ +2", said.out)
    assert "runs:   both\n" in said.out
    assert "report: both/report.html\n" in said.out
    page = (tmp_path / "both" / "report.html").read_text()
    assert "FedAvg" in page
    assert "FedSpa" in page


def test_compare_one_method_under_several_seeds(say, tmp_path):
    """There is nothing to compare it with, and still a table."""
    said = say("compare", "fedavg", *small(tmp_path, out="one", rounds=1), "--seeds", 2)
    assert said.code == 0
    assert " ± " in said.out


def test_compare_as_json(say, tmp_path):
    said = say("compare", "fedavg", "local", *small(tmp_path, out="both", rounds=1), "--json")
    found = json.loads(said.out)
    assert [run["method"] for run in found["runs"]] == ["fedavg", "local"]
    assert found["differences"][0]["method"] == "Local"
    assert found["differences"][0]["interval"] == "one seed: no interval"


def test_the_default_comparison(say, monkeypatch):
    asked = {}

    def compare(names, **options):
        asked.update(names=names, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(comparisons, "compare", compare)
    assert say("compare", "--rounds", 2).code == 130
    assert list(asked["names"]) == ["local", "fedavg", "fedavg-ft", "fedspa", "dispfl", "pfedgate", "fedalt"]
    assert asked["rounds"] == 2


# Kills a comparison when the second run makes its first, and its second, checkpoint or file.
KILL_IN_SECOND = """
import os, signal, sys

def hook(event, args):
    if event == "os.rename" and "/fedspa-seed0/" in str(args[1]) and str(args[1]).endswith("{name}"):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(hook)
"""


FOUR = [f"{method}-seed{seed}" for method in ("fedavg", "fedspa") for seed in (0, 1)]


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("never-killed")
    words = small(folder, rounds=2)
    options = {key[2:].replace("-", "_"): value for key, value in zip(words[::2], words[1::2], strict=True)}
    found = comparisons.compare(["fedavg", "fedspa"], seeds=2, out=folder / "both", **options)
    return {run.path.name: traces(run.path) for run in found.runs}


@pytest.mark.long
@pytest.mark.parametrize("name", ["config.json", "checkpoint/manifest.json", "summary.json"])
def test_a_killed_comparison_goes_on(forks, tmp_path, never_killed, name):
    args = ["compare", "fedavg", "fedspa", *small(tmp_path, rounds=2), "--seeds", 2]
    setup, both = EAGER + KILL_IN_SECOND.format(name=name), tmp_path / "both"
    assert start(forks, tmp_path, *args, "--out", "both", setup=setup).wait()[0] == -signal.SIGKILL
    assert completed(both / "fedavg-seed1") == 2
    assert not (both / "fedspa-seed1").exists()
    untouched = (both / "fedavg-seed0" / "checkpoint" / "manifest.json").read_bytes()
    if name == "checkpoint/manifest.json":  # the second run has begun and has no results
        code, out, err = start(forks, tmp_path, "report", "both").wait()  # what there is can be looked at
        assert (code, out) == (0, "both/report.html\n"), err
    code, out, err = start(forks, tmp_path, "resume", "both", "--json").wait()
    assert code == 0, err
    assert [run["run"] for run in json.loads(out)["runs"]] == [f"both/{run}" for run in FOUR]
    assert (both / "fedavg-seed0" / "checkpoint" / "manifest.json").read_bytes() == untouched
    assert {run: traces(both / run) for run in FOUR} == never_killed


def test_a_preset_is_for_those_that_have_one(tmp_path, capfd):
    """The others are trained under its conditions: it is one experiment."""
    options = {"clients": 4, "rounds": 1, "data_rate": 0.2, "executor": "serial", "out": tmp_path / "both"}
    both = comparisons.compare(["fedavg", "dispfl"], preset="authors", **options)
    assert [run.config["preset"] for run in both.runs] == [None, "authors"]
    assert [run.config["validation_rate"] for run in both.runs] == [0, 0]
    assert [run.config["batch_size"] for run in both.runs] == [16, 128]  # no condition
    told = capfd.readouterr().err
    assert "fedavg without the preset 'authors', which they do not have" in told
    assert "under its conditions: clients=4, rounds=1, validation_rate=0.0" in told
    with pytest.raises(SparsonaError, match="unknown preset of local 'authors'"):
        comparisons.compare(["local", "fedavg"], preset="authors", **options)


def test_a_transform_that_one_method_refuses_is_found_before_anything_is_trained(tmp_path):
    with pytest.raises(SparsonaError, match="topk"):
        sp.compare(["fedspa", "fedavg"], clients=4, rounds=1, transform=["topk:0.1"], out=tmp_path / "cmp")
    assert not (tmp_path / "cmp").exists()


def test_runs_in_processes_say_how_far_they_are(tmp_path, monkeypatch):
    """Of processes that are played by threads: what observers receive, from a run's start to its end."""
    begun, told = [], []
    go_on = threading.Event()

    def play(path, values, given, records, times):
        folder = Path(path)
        begun.append(folder.name)
        wait_until(lambda: folder.name.upper() in {one.title for one in told})
        (folder / "checkpoint").mkdir(parents=True)
        Manifest(3, False, 60.0, 1, {}).write(folder)
        if folder.name == "a":  # stops early, after it was seen under way
            assert go_on.wait(10)
            Manifest(5, True, 100.0, 2, {}).write(folder)
        if folder.name == "b":
            raise ValueError("no such layer")
        if folder.name == "c":
            Manifest(9, True, 120.0, 2, {}).write(folder)

    def observe(progress):
        told.append(progress)
        if (progress.title, progress.completed) == ("A", 3):
            go_on.set()

    monkeypatch.setattr(comparisons, "processes", ThreadPoolExecutor)
    monkeypatch.setattr(comparisons, "unless_stopped", lambda function, *args: function(*args))
    monkeypatch.setattr(comparisons, "_play_run", play)
    monkeypatch.setattr(comparisons, "PROGRESS_SECONDS", 0.02)
    planned = [(tmp_path / name, RunConfig(method="local", rounds=9), None) for name in "abc"]
    titles = {folder: folder.name.upper() for folder, _, _ in planned}
    failed = comparisons.play_in_processes(planned, titles, None, None, ObserverList([observe]), 2)
    assert [(folder.name, str(error)) for folder, error in failed.items()] == [("b", "no such layer")]
    by_run = {title: [one for one in told if one.title == title] for title in "ABC"}
    of_a = [(one.completed, one.doing, one.is_over) for one in by_run["A"]]
    assert of_a[:2] == [(0, "in a process of its own", False), (3, "in a process of its own", False)]
    # Its last checkpoint may be seen before its process is over.
    assert of_a[2:] in ([(5, "stopped early", True)], [(5, of_a[0][1], False), (5, "stopped early", True)])
    assert [one.is_over for ones in by_run.values() for one in ones].count(True) == 3
    assert [(one[-1].completed, one[-1].doing, one[-1].seconds) for one in (by_run["B"], by_run["C"])] == [
        (3, "failed", 60.0),
        (9, "", 120.0),
    ]
    # A run begins when a process is free, and not in a queue.
    assert begun[2] == "c"
    assert told.index(by_run["C"][0]) > told.index(by_run["B"][-1])


def test_progress_tells_methods_of_one_title_apart(tmp_path, capsys):
    options = {"clients": 4, "rounds": 1, "data_rate": 0.1, "executor": "serial", "progress": True}
    comparisons.compare(["local", "fedspa:density=0.2", "fedspa"], seeds=2, **options, out=tmp_path / "all")
    shown = {line.partition(":")[0] for line in capsys.readouterr().err.splitlines() if "finished" in line}
    assert shown == {f"{name}, seed {seed}" for name in ("Local", "fedspa_density-0.2", "fedspa") for seed in (0, 1)}


class Kept:
    """What an observer receives, without times; progress apart."""

    def __init__(self) -> None:
        self.records, self.ends = [], 0

    def on_start(self, start):
        self.records.append(("start", start.path.name, start.completed))

    def on_round(self, result):
        self.records.append(("round", result.index, result.loss))

    def on_evaluation(self, result):
        self.records.append(("evaluation", result.completed, result.accuracy))

    def on_end(self, end):
        self.ends += 1
        self.records.append(("end", end.finished, end.reason))


def test_a_stopped_comparison_is_resumed_with_as_many_jobs(tmp_path, monkeypatch, capsys):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(comparisons, "play_in_processes", stop)
    monkeypatch.setattr(comparisons, "start_run", stop)
    path = tmp_path / "both"
    for begin, said in (
        (lambda: comparisons.compare(["local"], rounds=1, jobs=2, out=path), f"resume {path} --jobs 2` continues it"),
        (lambda: comparisons.resume_comparison(path, jobs=3), f"resume {path} --jobs 3` continues it"),
        (lambda: comparisons.resume_comparison(path), f"resume {path}` continues it"),
    ):
        with pytest.raises(KeyboardInterrupt):
            begin()
        assert said in capsys.readouterr().err


@pytest.mark.long
def test_observers_receive_the_same_of_runs_in_processes(tmp_path):
    """One run after another; also of a search's runs with the chosen options, which are in processes by default."""
    options = {"clients": 4, "rounds": 2, "data_rate": 0.2, "executor": "serial"}
    found = []
    for jobs in (1, 2):
        kept, log = Kept(), tmp_path / f"{jobs}.jsonl"
        both = comparisons.compare(
            ["local", "fedavg"], jobs=jobs, observers=[kept, str(log)], out=tmp_path / str(jobs), **options
        )
        runs = "".join(str(record) for record in kept.records).split("('start'")[1:]
        found.append((sorted(runs), sorted(line.partition('"seconds"')[0] for line in log.read_text().splitlines())))
        assert kept.ends == 2
        assert len(found[-1][1]) == len(kept.records)
    assert found[0][0] == found[1][0]
    kept = Kept()
    again = comparisons.resume_comparison(both.path, jobs=2, observers=[kept], progress=True)
    assert [run.summary["accuracy"] for run in again.runs] == [run.summary["accuracy"] for run in both.runs]
    assert not kept.records  # all are finished
    sp.tune(["local"], trials=1, jobs=2, observers=[kept], out=tmp_path / "tune", **options)
    assert [kind for kind, *_ in kept.records] == ["start", "round", "evaluation", "round", "evaluation", "end"]


class FromAnotherModuleError(Exception):
    def __init__(self, one, other):
        super().__init__(f"{one}, {other}")


@pytest.mark.long
def test_records_of_processes_are_read_from_a_folder_of_their_own(tmp_path, monkeypatch):
    """They are pickles: a run's folder may be from somebody else."""
    modes, pass_on = [], comparisons.pass_on

    def see(path: Path, observers: object) -> None:
        modes.append(stat.S_IMODE(path.parent.stat().st_mode))
        assert path.exists()
        assert not path.is_relative_to(tmp_path)
        pass_on(path, observers)

    monkeypatch.setattr(comparisons, "pass_on", see)
    options = {"clients": 4, "rounds": 1, "data_rate": 0.2, "executor": "serial", "progress": False}
    comparisons.compare(["local"], seeds=2, jobs=2, out=tmp_path / "both", observers=[print], **options)
    assert modes == [0o700, 0o700]
    comparisons.compare(["local"], seeds=2, jobs=2, out=tmp_path / "unheard", **options)
    assert len(modes) == 2  # nothing is kept where nobody receives it


@pytest.mark.long
@pytest.mark.parametrize("jobs", [1, 2])
def test_an_observer_that_fails_costs_its_run_alone(tmp_path, jobs):
    class Failing:
        def __init__(self):
            self.titles = []

        def on_start(self, start):
            self.titles.append(start.facts.title)

        def on_round(self, result):
            if self.titles[-1] == "FedAvg":
                raise ValueError("no room for a line")

    options = {"clients": 4, "rounds": 1, "data_rate": 0.2, "executor": "serial", "progress": False}
    failing = Failing()
    found = comparisons.compare(["fedavg", "local"], jobs=jobs, out=tmp_path / "c", observers=[failing], **options)
    assert [run.path.name for run in found.runs] == ["local-seed0"]
    assert [one.error for one in found.missing] == ["ValueError: no room for a line"]
    assert sorted(failing.titles) == ["FedAvg", "Local"]  # each once


@pytest.mark.long
def test_an_error_that_cannot_be_sent_costs_its_run_alone(tmp_path):
    def mine(task, config: FedAvgConfig) -> Method:
        def finish(*_):
            raise FromAnotherModuleError(1, 2)

        return replace(fedavg(task, config), finish=finish)

    options = {"clients": 4, "rounds": 1, "data_rate": 0.2, "executor": "serial", "progress": False}
    both = comparisons.compare(["fedavg", mine, "local"], jobs=2, out=tmp_path / "both", **options)
    assert [run.path.name for run in both.runs] == ["fedavg-seed0", "local-seed0"]
    assert [one.error for one in both.missing] == ["FromAnotherModuleError: 1, 2"]


SCRIPT = """
import sparsona as sp
from sparsona.methods.fedavg import FedAvgConfig, fedavg

print("begun")


def mine(task, config: FedAvgConfig):
    return fedavg(task, config)


options = {"clients": 4, "rounds": 1, "data_rate": 0.2, "executor": "serial"}
both = sp.compare(["fedavg", mine], jobs=2, out="both", **options)
print([run.summary["rounds"] for run in both.runs])
"""


@pytest.mark.long
def test_a_script_without_a_guard_is_not_run_again_by_processes(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(sp.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "begun\n[1, 1]\n"


def test_an_observer_that_fails_at_the_end_costs_the_others_nothing(tmp_path):
    class Fails:
        def on_end(self, end):
            raise OSError("the server is gone")

    kept = Kept()
    with pytest.raises(SparsonaError, match="training of every client diverged"):
        comparisons.compare(
            ["fedavg"],
            clients=4,
            rounds=2,
            data_rate=0.2,
            lr=1e30,
            executor="serial",
            observers=[Fails(), kept],
            out=tmp_path / "both",
        )
    assert kept.ends == 1


def test_a_stored_comparison_is_loaded_without_data(tmp_path):
    """Those of its runs that have results; the others are named."""
    x, y = np.eye(60, 6, dtype=np.float32), np.arange(60) % 3
    data, path = sp.federate(x, y, clients=3, partition="iid"), tmp_path / "both"
    both = comparisons.compare(
        ["local", "fedavg", "fedspa"], data, torch.nn.Linear(6, 3), rounds=1, executor="serial", out=path
    )
    found = sp.load_comparison(path)
    assert found.table() == both.table()
    assert found.to_markdown() == both.to_markdown()
    shutil.rmtree(path / "fedspa-seed0")
    found = sp.load_comparison(path)
    assert [run.path.name for run in found.runs] == ["local-seed0", "fedavg-seed0"]
    assert [one.folder for one in found.missing] == ["fedspa-seed0"]
    with pytest.raises(SparsonaError, match="is a comparison") as told:
        sp.load(path)
    assert "load_comparison" in told.value.hint


def test_clients_that_no_round_sampled_are_counted(tmp_path):
    options = {"clients": 4, "rounds": 1, "data_rate": 0.2, "executor": "serial", "progress": False, "epochs": 1}
    one = sp.train("local", out=tmp_path / "one", per_round=1, **options)
    all_of_them = sp.train("local", out=tmp_path / "all", per_round=4, **options)
    tuned = sp.train("fedavg-ft", out=tmp_path / "tuned", per_round=1, **options)  # every client is tuned
    assert one.summary["untrained"] == {"clients": 3, "of": 4}
    assert "untrained" not in all_of_them.summary | tuned.summary
    lost = sp.train("fedavg", out=tmp_path / "lost", per_round=4, drop_rate=0.7, **options)
    num = sum(turn.dropped for turn in lost._folder.records.turns())
    assert 0 < num < 4
    assert lost.summary["untrained"] == {"clients": num, "of": 4}
    assert "'one': 3 of 4 clients trained in no round." in all_of_them.clients(one).notes


def test_runs_that_begin_in_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    digits = iter(["00aa", "00aa", "00ab"])
    monkeypatch.setattr(training.secrets, "token_hex", lambda count: next(digits))
    monkeypatch.setattr(training.time, "strftime", lambda form: "20300101-000000")
    first = training.free_path("fedavg")
    first.mkdir(parents=True)
    assert training.free_path("fedavg").name == "fedavg-20300101-000000-00ab"
