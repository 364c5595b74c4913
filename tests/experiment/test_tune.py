"""A search over options: what it may see, what it tries, that it can be stopped, and the file it writes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import sparsona as sp
from sparsona.cli.app import cli
from sparsona.cli.options import table_for
from sparsona.core.errors import SparsonaError
from sparsona.core.method import Method
from sparsona.experiment.search import BATCH, Trial, _propose, _PrunedError, _Watch
from sparsona.experiment.tune import Tuned, _spaces, resume_tuning
from sparsona.methods import METHODS
from sparsona.methods.fedavg import FedAvgConfig, fedavg
from sparsona.report.live import live_page
from sparsona.runs.observers import ClientEvaluation, EvaluationResult
from sparsona.runs.request import read_option_file

QUICK = {"clients": 3, "rounds": 2, "data_rate": 0.15, "epochs": 1, "partition": "iid"}


def small_federation() -> sp.Federation:
    rng, y = np.random.default_rng(0), np.arange(90) % 3
    x = (rng.normal(size=(90, 6)) + 2 * np.eye(3, 6)[y]).astype("float32")
    return sp.federate(x, y, clients=3, partition="iid", seed=0)


def net() -> torch.nn.Module:
    return torch.nn.Linear(6, 3)


def test_held_out_data_is_training_data_and_never_test_data():
    """Of 20 examples to train on, 2 for validation and 8 to test on: a quarter of the 22 is tested on, the 8 unused."""
    whole = small_federation()
    held = whole.hold_out(0.25, validation_rate=0.0)
    assert held.tested_on == "held-out"
    for before, after in zip(whole.splits, held.splits, strict=True):
        used = {*after.train.tolist(), *after.validation.tolist(), *after.test.tolist()}
        assert used == {*before.train.tolist(), *before.validation.tolist()}
        assert not used & set(before.test.tolist())
        assert len(after.test) == round(len(used) / 4)
        assert not len(after.validation)
        assert not set(after.train.tolist()) & set(after.test.tolist())
        assert len(set(whole.y[after.test].tolist())) == 3  # every class


def test_the_option_of_a_run_holds_out_the_same_share():
    from sparsona.experiment.build import make_config, read_data

    options = {"clients": 3, "partition": "iid", "data_rate": 0.2}
    plain, held = (read_data(make_config("local", {**options, **more})) for more in ({}, {"holdout_rate": 0.25}))
    assert (held.name, held.tested_on, plain.tested_on) == (plain.name, "held-out", "split")
    total = plain.sizes()[:, :2].sum(1)
    assert held.sizes().sum(1).tolist() == total.tolist()
    assert held.sizes()[:, 2].tolist() == [int(0.25 * count + 0.5) for count in total.tolist()]  # at least half: up


def test_trials_do_not_depend_on_test_data(tmp_path):
    """With other test labels the refit has another accuracy, and every trial the same value."""
    whole = small_federation()
    tests = torch.cat([split.test for split in whole.splits])
    labels = whole.y.clone()
    labels[tests] = (labels[tests] + 1) % 3
    found = [
        sp.tune(["local"], data, net, rounds=1, trials=2, jobs=1, out=tmp_path / name)
        for name, data in (("right", whole), ("wrong", replace(whole, y=labels)))
    ]
    right, wrong = ([trial.value for trial in one.methods["local"].trials] for one in found)
    assert right == wrong
    means = [one.comparison.runs[0].summary["accuracy"]["mean"] for one in found]
    assert means[0] > means[1]
    assert "tuned with 2 trials" in found[0].comparison.runs[0].protocol


def own_method(task, config: FedAvgConfig) -> Method:
    """FedAvg under another name."""
    return fedavg(task, config)


def test_a_method_from_python(tmp_path):
    """Its trials and its refit are FedAvg's; a search is resumed when it is passed again."""
    card = replace(METHODS["fedavg"], name="mine", module=own_method, grid={"epochs": (1, 2)})
    options = {**QUICK, "trials": 2, "jobs": 1}
    del options["epochs"]
    found = sp.tune(["fedavg", own_method, card], out=tmp_path / "t", **options)
    assert [trial.value for trial in found.methods["own_method"].trials] == [
        trial.value for trial in found.methods["fedavg"].trials
    ]
    assert sorted(found.best["mine"]) == ["epochs", "lr"]
    assert [run.config["method"] for run in found.comparison.runs] == ["fedavg", "own_method", "mine"]
    (tmp_path / "t" / "own_method" / "trial-001.json").unlink()
    with pytest.raises(SparsonaError, match=r"resume_tuning with methods=\[own_method, mine\]"):
        resume_tuning(tmp_path / "t")
    again = resume_tuning(tmp_path / "t", methods=[own_method, card], jobs=1)
    assert again.table() == found.table()
    assert again.comparison.figures() == found.comparison.figures()


def test_files_are_found_from_another_folder(tmp_path, monkeypatch, say):
    """A search stores paths as a run does: to go on elsewhere, and for `--config`."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    y = np.arange(90) % 3
    np.savez("mine.npz", x=np.eye(3, 6, dtype="float32")[y], y=y)
    sp.train("fedavg", clients=3, rounds=1, data="mine.npz", model="mlp", out="runs/first", progress=False)
    options = {"data": "mine.npz", "warm_start": "first", "clients": 3, "rounds": 1, "model": "mlp"}
    found = sp.tune(["fedavg"], **options, trials=1, refit_seeds=0, jobs=1, out=tmp_path / "t")
    stored = read_option_file(found.config).options
    assert stored["data"] == f"arrays:{tmp_path / 'here' / 'mine.npz'}"
    assert stored["warm_start"] == str(tmp_path / "here" / "runs" / "first")
    (tmp_path / "t" / "fedavg" / "trial-000.json").unlink()
    monkeypatch.chdir(tmp_path)
    assert resume_tuning("t", jobs=1).best == found.best
    assert say("compare", "--config", found.config, "--out", "c").code == 0


def test_what_came_from_python_is_needed_again(tmp_path):
    sp.tune(["local"], small_federation(), net, rounds=1, trials=1, refit_seeds=0, jobs=1, out=tmp_path / "t")
    with pytest.raises(SparsonaError, match="its own federation"):
        resume_tuning(tmp_path / "t")
    with pytest.raises(SparsonaError, match="its own model"):
        resume_tuning(tmp_path / "t", small_federation())
    assert resume_tuning(tmp_path / "t", small_federation(), net).best


def test_a_search_that_was_stopped_ends_as_if_it_had_not_been(tmp_path):
    """A trial that has no file is done again; the first batch's other trials, and what follows from them, are kept."""
    options = {**QUICK, "model": "mlp", "trials": BATCH + 1, "refit_seeds": 0}
    whole = sp.tune(["local"], **options, jobs=1, out=tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    for lost in ("local/trial-002.json", f"local/trial-{BATCH:03d}.json", "tuned.toml"):
        (tmp_path / "killed" / lost).unlink()
    (tmp_path / "killed" / "local" / "trial-002").mkdir()  # killed before the run was made
    again = resume_tuning(tmp_path / "killed", jobs=2)
    assert [vars(trial) for trial in again.methods["local"].trials] == [
        vars(trial) for trial in whole.methods["local"].trials
    ]
    assert again.config.read_text() == whole.config.read_text()


def test_trials_and_results_are_matched(tmp_path):
    """FedAlt trains twice in a round: half the rounds for the same steps, in trials by the same factor."""
    options = {**QUICK, "rounds": 8, "data_rate": 0.1, "trials": 1, "trial_rounds": 4, "jobs": 1, "match": "steps"}
    found = sp.tune(["fedavg", "fedalt"], **options, out=tmp_path / "t")
    assert json.loads((tmp_path / "t" / "tune.json").read_text())["planned"] == {
        "fedavg": {"rounds": 4},
        "fedalt": {"rounds": 2},
    }
    assert [run.config["rounds"] for run in found.comparison.runs] == [8, 4]
    assert list(found.methods["fedalt"].trials[0].curve) == [1, 2]


def test_a_trial_that_was_stopped_midway_is_judged_as_if_it_had_not_been(tmp_path, monkeypatch):
    """Those of the first batch are stopped after their second evaluation, those of the second after their last."""
    rates = [0.3, 0.2, 0.25, 0.35, 1e-6, 0.28]
    options = {
        **QUICK,
        "rounds": 6,
        "data_rate": 0.1,
        "trials": 6,
        "refit_seeds": 0,
        "jobs": 1,
        "search": {"lr": rates},
    }

    def in_order(space, trials, seed, count, begin):
        return [{"lr": rate} for rate in rates[len(trials) : len(trials) + count]]

    monkeypatch.setattr("sparsona.experiment.search._propose", in_order)
    whole = sp.tune(["local"], **options, out=tmp_path / "whole").methods["local"].trials
    assert any(trial.state == "pruned" for trial in whole)
    add, stopped = _Watch.add, set()

    def stop(self, completed, value):
        add(self, completed, value)
        key = len(stopped)
        if completed == (2 if key < BATCH else 6) and id(self) not in stopped:
            stopped.add(id(self))
            watches.append(self)  # alive, so that no other one has its identity
            raise KeyboardInterrupt

    watches: list[_Watch] = []
    monkeypatch.setattr(_Watch, "add", stop)
    with pytest.raises(KeyboardInterrupt):
        sp.tune(["local"], **options, out=tmp_path / "stopped")
    found = None
    for _ in range(40):
        try:
            found = resume_tuning(tmp_path / "stopped", jobs=1)
            break
        except KeyboardInterrupt:
            if len(stopped) > 7:
                monkeypatch.setattr(_Watch, "add", add)
    assert found is not None
    assert [vars(trial) for trial in found.methods["local"].trials] == [vars(trial) for trial in whole]


def test_one_process_at_a_time(tmp_path):
    import filelock

    sp.tune(["local"], **QUICK, trials=1, refit_seeds=0, jobs=1, out=tmp_path / "t")
    with filelock.FileLock(str(tmp_path / "t" / "lock")), pytest.raises(SparsonaError, match="in use by another"):
        resume_tuning(tmp_path / "t")


def test_damaged_files_are_named(tmp_path):
    sp.tune(["local"], **QUICK, trials=1, refit_seeds=0, jobs=1, out=tmp_path / "t")
    trial, request = tmp_path / "t" / "local" / "trial-000.json", tmp_path / "t" / "tune.json"
    good = json.loads(trial.read_text())
    for wrong in ({**good, "curve": []}, {**good, "options": {"lr": 7.0}}, {**good, "options": {}}):
        trial.write_text(json.dumps(wrong))
        with pytest.raises(SparsonaError, match=r"trial-000.json' is .*\n.*\n.*delete it"):
            resume_tuning(tmp_path / "t", jobs=1)
    request.write_text(json.dumps({**json.loads(request.read_text()), "trials": "six"}))
    with pytest.raises(SparsonaError, match=r"tune.json' is damaged"):
        resume_tuning(tmp_path / "t", jobs=1)


def test_a_given_federation_is_searched_and_refitted_on_training_and_validation_data(tmp_path):
    """88 examples to train on and 60 to validate with: trials are judged by a fifth of 148, the refit has them all."""
    whole = small_federation()
    assert int(whole.sizes()[:, 1].sum())
    found = sp.tune(["local"], whole, net, rounds=1, trials=1, jobs=1, out=tmp_path / "t")
    facts = json.loads((found.comparison.runs[0].path / "about.json").read_text())
    assert [row[1] for row in facts["sizes"]] == [0, 0, 0]
    assert [row[0] for row in facts["sizes"]] == whole.sizes()[:, :2].sum(1).tolist()


def test_trials_have_the_size_of_the_results(tmp_path):
    """A client of capacity 0.25 among others: FedAvg's trials, too, train a sub-network that it can hold."""
    options = {**QUICK, "capacities": [1.0, 0.25], "trials": 1, "jobs": 1}
    found = sp.tune(["fedavg"], **options, out=tmp_path / "t")
    planned = json.loads((tmp_path / "t" / "tune.json").read_text())["planned"]["fedavg"]
    assert planned["subnetwork"] == found.comparison.runs[0].config["subnetwork"] == 0.25


def test_a_preset_has_the_grid_of_its_paper():
    """Ditto's own grid has 1 and 2, too, which pFedGate did not try; what is given is not searched."""

    def searched(**options):
        request = SimpleNamespace(names=["ditto"], options=options, search={}, match="rounds")
        return _spaces(request, {})["ditto"].get("prox")

    assert searched(preset="pfedgate") == (0.05, 0.1, 0.5, 0.8)
    assert searched(preset="fedspa") == searched() == (0.05, 0.1, 0.5, 0.8, 1.0, 2.0)
    assert searched(preset="pfedgate", prox=0.3) is None


def test_proposals_repeat_nothing_and_follow_what_was_found():
    """Of a space of 9 all are tried once; after 4 trials a different history leads elsewhere."""
    space = {"a": (1, 2, 3), "b": (0.1, 0.2, 0.3)}
    trials: list[Trial] = []
    while new := _propose(space, trials, f"seed/{len(trials)}", min(BATCH, 9 - len(trials))):
        trials += [Trial(len(trials) + i, one, "complete", one["a"] * one["b"]) for i, one in enumerate(new)]
    assert len({tuple(one.options.values()) for one in trials}) == len(trials) == 9
    first = trials[:BATCH]
    assert _propose(space, first, "x", 2) == _propose(space, first, "x", 2)
    wide = {"a": tuple(range(50)), "b": tuple(range(50))}
    points = [Trial(i, {"a": 10 * i, "b": 10 * i}, "complete", float(i)) for i in range(BATCH + 1)]
    turned = [replace(one, value=-float(one.number)) for one in points]
    high, low = (_propose(wide, told, "y", BATCH) for told in (points, turned))
    assert np.mean([one["a"] for one in high]) > np.mean([one["a"] for one in low])


def test_the_defaults_are_tried_first(tmp_path):
    """FedAvg's rate of 0.1 is in the grid; a space without the default begins elsewhere, and nothing is tried twice."""
    found = sp.tune(["local"], **QUICK, trials=7, refit_seeds=0, prune=False, jobs=1, out=tmp_path / "t")
    rates = [trial.options["lr"] for trial in found.methods["local"].trials]
    assert rates[0] == 0.1
    assert len(set(rates)) == 7
    other = sp.tune(["local"], **QUICK, trials=1, search={"lr": [0.2]}, refit_seeds=0, jobs=1, out=tmp_path / "u")
    assert other.best == {"local": {"lr": 0.2}}


def test_unequal_numbers_of_trials_are_said_with_their_reason(tmp_path, capsys):
    options = {**QUICK, "trials": 3, "search": {"lr": [0.1, 0.2], "prox": [0.1, 1.0]}, "jobs": 1}
    sp.tune(["fedavg", "ditto"], **options, out=tmp_path / "t")
    told = capsys.readouterr().err
    assert "fewer than 3 trials where there are no more combinations to try: fedavg 2\n" in told
    assert "options were tuned with different numbers of trials: fedavg 2, ditto 3\n" in told
    sp.tune(["fedavg", "local"], **{**options, "search": {"lr": [0.1, 0.2]}}, out=tmp_path / "u")
    assert "trials" not in capsys.readouterr().err


def test_options_after_a_colon_leave_the_rest_of_a_table():
    tables = {"ditto": {"lr": 0.1, "prox": 1.0, "tuned_with": 4}, "local:lr=0.2": {"momentum": 0.5}}
    assert table_for("ditto", tables) == tables["ditto"]
    assert table_for("ditto:lr=0.3", tables) == {"prox": 1.0}
    assert table_for("local:lr=0.2", tables) == {"momentum": 0.5}
    assert table_for("fedavg", tables) == {}


def test_a_trial_below_the_median_of_earlier_ones_is_pruned():
    def after(completed: int, correct: int) -> EvaluationResult:
        return EvaluationResult(completed, "received", (ClientEvaluation(0, "received", correct, 10, 1.0),))

    watch = _Watch({2: 0.5})
    watch.on_evaluation(after(1, 1))  # no limit yet
    watch.on_evaluation(after(2, 5))  # level with the median
    with pytest.raises(_PrunedError):
        watch.on_evaluation(after(2, 4))
    assert watch.curve == {1: 0.1, 2: 0.4}


def test_the_best_trial_is_complete():
    trials = (
        Trial(0, {"lr": 0.1}, "complete", 0.5),
        Trial(1, {"lr": 0.2}, "pruned", 0.9),
        Trial(2, {"lr": 0.3}, "complete", 0.5),
        Trial(3, {"lr": 0.4}, "failed", error="diverged"),
    )
    best = Tuned("local", {}, trials).best
    assert best is not None
    assert best.options == {"lr": 0.1}
    assert Tuned("local", {}, trials[3:]).best is None


def test_a_method_that_cannot_be_trained_is_left_out_and_named(tmp_path, capfd):
    """A rate at which weights become infinite: the others keep their trials."""
    wild, quick = "fedavg:lr=1e30,clip_norm=none", {"rounds": 2, "trials": 1, "jobs": 1}
    found = sp.tune(["local", wild], small_federation(), net, **quick, out=tmp_path / "t")
    assert [row["chosen"] for row in found.table()][1] == "no trial was completed"
    assert list(found.best) == ["local"]
    assert f"1 of 1 trials of {wild}" in found.failures()[0]
    assert wild in capfd.readouterr().err
    with pytest.raises(SparsonaError, match="no trial could be completed of fedavg"):
        sp.tune([wild], small_federation(), net, **quick, out=tmp_path / "u")


def test_command_writes_a_file_that_run_and_compare_take(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call = CliRunner().invoke
    small = ["--clients", "3", "--rounds", "1", "--set", "data_rate=0.15", "--partition", "iid", "--epochs", "1"]
    small += ["--model", "mlp:hidden=8"]
    found = call(
        cli, ["tune", "local", "fedavg", *small, "--search", "lr=0.2,0.4", "--trials", "2", "--jobs", "1", "--out", "t"]
    )
    assert found.exit_code == 0, found.output
    assert "Chosen on data held out of training" in found.output
    assert "on test data" in found.output
    options = read_option_file("t/tuned.toml")
    assert options.methods["fedavg"]["tuned_with"] == 2
    assert options.options["validation_rate"] == 0
    assert set(options.methods) == {"local", "fedavg"}
    assert options.options["model"] == "mlp:hidden=8"
    both = call(cli, ["compare", "--config", "t/tuned.toml", "--seed", "1", "--json"])
    one = call(cli, ["run", "fedavg", "--config", "t/tuned.toml", "--seed", "1", "--json", "--out", "one"])
    assert both.exit_code == one.exit_code == 0, both.output + one.output
    compared = json.loads(both.stdout)["runs"][1]
    assert compared["accuracy"] == json.loads(one.stdout)["accuracy"]
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    assert config["options"]["lr"] == options.methods["fedavg"]["lr"]
    assert config["tuned_with"] == 2
    typed = call(cli, ["run", "fedavg", "--config", "t/tuned.toml", "--lr", "0.3", "--out", "typed"])
    assert typed.exit_code == 0, typed.output
    config = json.loads((tmp_path / "typed" / "config.json").read_text())
    assert (config["options"]["lr"], config["tuned_with"]) == (0.3, None)  # not what the trials chose
    mixed = call(cli, ["compare", "fedavg", "fedspa", "--config", "t/tuned.toml", "--json"])
    assert mixed.exit_code == 0, mixed.output
    assert ["tuned with" in run["protocol"] for run in json.loads(mixed.stdout)["runs"]] == [True, False]
    assert "fedspa not tuned" in mixed.stderr


def test_a_search_is_listed_and_stands_for_its_runs_with_the_chosen_options(tmp_path, say):
    small = ["--clients", 3, "--rounds", 1, "--set", "data_rate=0.15", "--epochs", 1, "--search", "lr=0.2"]
    small += ["--trials", 1, "--jobs", 1]
    assert say("tune", "local", "fedavg", *small, "--out", "runs/t").code == 0
    assert say("tune", "local", *small, "--refit-seeds", 0, "--out", "runs/bare").code == 0
    inside = {f"t/refit/{method}_lr-0.2_tuned_with-1-seed0" for method in ("local", "fedavg")}
    rows = {row["run"]: (row["method"], row["state"]) for row in json.loads(say("runs", "--json").out)}
    assert rows.keys() == inside | {"t", "bare"}
    assert rows["t"] == ("search: local, fedavg", "finished")
    for command in (["table"], ["report"], ["targets", "--at", 50]):
        said = say(command[0], "t", *command[1:])
        assert said.code == 0, said
    assert say("table", "t").out == say("table", "t/refit").out
    assert [run.config["method"] for run in sp.load_comparison("runs/t").runs] == ["local", "fedavg"]
    assert "FedAvg" in live_page(tmp_path / "runs" / "t").html
    say("clients", "t").refused("'runs/t' is a search", f"such as runs/{min(inside)}")
    for command in ("table", "clients"):
        say(command, "bare").refused("is a search", "`sparsona compare --config runs/bare/tuned.toml` makes some")
    (tmp_path / "runs" / "bare" / "tuned.toml").unlink()
    say("table", "bare").refused("`sparsona resume runs/bare` makes some")
    assert {row["run"]: row["state"] for row in json.loads(say("runs", "--json").out)}[
        "bare"
    ] == "unfinished: resume it"
    (tmp_path / "runs" / "bare" / "tune.json").write_text("[]")
    assert "damaged: " in say("runs").out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"trials": 0}, "trials = 0"),
        ({"holdout_rate": 1.0}, "holdout_rate is 1.0"),
        ({"search": {"lrr": [1]}}, "lrr"),
        ({"search": {"rounds": [1, 2]}}, "a search over rounds"),
        ({"search": {"lr": []}}, "no values of lr"),
        ({"search": {"lr": [0.1, -1.0]}}, "lr"),
        ({"search": {"epochs": [1, 2]}, "match": "steps"}, "a search over epochs with --match steps"),
        ({"trial_rounds": 0}, "trial_rounds = 0"),
        ({"epohcs": 1}, "epohcs"),
    ],
)
def test_mistakes_are_named_before_a_folder_is_made(arguments, error, tmp_path):
    with pytest.raises(SparsonaError, match=error):
        sp.tune(["local"], **{**QUICK, **arguments}, out=tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_the_example_of_make_run_tunes_all_methods_alike():
    path = Path(__file__).parents[2] / "examples" / "digits.toml"
    assert len({table.get("tuned_with") for table in read_option_file(path).methods.values()}) == 1
