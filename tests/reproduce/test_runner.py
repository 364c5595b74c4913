"""What is run of a recipe, what is kept, resumed or refused, and what is claimed of it. On digits, in seconds."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from processes import EAGER, completed, start, traces, wait_until

import sparsona as sp
from sparsona.core.errors import SparsonaError
from sparsona.reproduce import recipe as recipes
from sparsona.reproduce import rows, runner
from sparsona.reproduce.page import command
from sparsona.reproduce.recipe import Recipe
from sparsona.runs.comparison import REPRODUCTION_FILE
from sparsona.runs.listing import list_runs
from sparsona.runs.observers import ProgressUpdate, RunEnd, RunStart

TINY = {"data": "digits", "data_rate": 0.2, "clients": 5, "per_round": 2, "rounds": 2, "executor": "serial"}
VALUES = {
    "title": "Digits",
    "where": "table 1",
    "seeds": 2,
    "columns": {
        "accuracy": {"measure": "accuracy", "title": "accuracy, %"},
        "traffic": {"measure": "traffic_gb", "title": "traffic, GB", "digits": 6},
        "gain": {"measure": "gain", "title": "gain"},
    },
    "options": {**TINY, "epochs": 1, "batch_size": 10},
    "settings": {"A": {"partition": "iid"}, "A/deep": {"partition": "dirichlet:0.5"}},
    "rows": {
        "A/local": {"method": "local", "printed": {"accuracy": [50, 2], "traffic": 0}},
        "A/tuned": {"method": "fedavg-ft", "warm_start": "A/fedavg", "against": "A/local"},
        "A/fedavg": {"method": "fedavg", "printed": {"accuracy": 55.0}},
        "A/deep/letters": {"method": "fedavg", "stand_in": "EMNIST-L"},
        "B/absent": {"method": "fedavg", "options": {"data": "gldv2"}, "printed": {"traffic": 1.5}},
        "B/missing": {"method": "fedavg", "options": {"data": "cifar100"}, "printed": {"accuracy": 1, "traffic": 1.5}},
        "B/rule": {"method": "pfedhn", "options": {"data": "cifar10"}, "printed": {"traffic": 3.0}},
    },
    "absent": {"gldv2": "nobody has it"},
    "differs": ["everything is small"],
}
OWN = Recipe(**VALUES)


@pytest.fixture(autouse=True)
def _in_a_folder_without_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPARSONA_DATA", str(tmp_path / "none"))


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """All rows, two seeds."""
    folder = tmp_path_factory.mktemp("done")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSONA_DATA", str(folder / "none"))
        return runner.reproduce(OWN, seeds=2, out=folder / "runs")


def cell(result, row, column):
    return next(one for one in result.cells() if (one.row, one.column) == (row, column))


def test_a_figure_is_compared_with_the_printed_one(done):
    found = cell(done, "A/local", "accuracy")
    accuracies = [100 * run.summary["accuracy"]["mean"] for run in done.runs["A/local"]]
    mean = sum(accuracies) / 2
    spread = abs(accuracies[0] - accuracies[1]) / 2**0.5
    assert (found.ours.value, found.ours.spread, found.ours.seeds) == pytest.approx((mean, spread, 2))
    assert found.difference == pytest.approx(mean - 50)
    assert found.agrees == (abs(mean - 50) <= (2**2 + spread**2) ** 0.5)
    assert found.why == "spread: both"
    line = next(one for one in done.table() if one["row"] == "A/local")
    assert line["paper"] == "50.0 ± 2.0"
    assert line["ours"] == f"{mean:.1f} ± {spread:.1f} (2 seeds)"


def test_a_row_is_compared_with_another_under_the_same_seed(done):
    tuned, local = (
        [100 * run.summary["accuracy"]["mean"] for run in done.runs[f"A/{row}"]] for row in ("tuned", "local")
    )
    gains = [a - b for a, b in zip(tuned, local, strict=True)]
    assert cell(done, "A/tuned", "gain").ours.value == pytest.approx(sum(gains) / 2)


def test_a_row_starts_from_the_model_of_another_which_is_run_first(done):
    for seed in (0, 1):
        folder = done.path / f"A_tuned-seed{seed}"
        start_of = json.loads((folder / "about.json").read_text())["warm_start"]
        assert start_of["run"] == str((done.path / f"A_fedavg-seed{seed}").absolute())
        assert start_of["same_data"]


def test_settings_reach_the_rows_below_them_and_the_longer_name_wins(done):
    partitions = {row: runs[0].config["partition"] for row, runs in done.runs.items()}
    assert partitions == {
        "A/local": "iid",
        "A/tuned": "iid",
        "A/fedavg": "iid",
        "A/deep/letters": "dirichlet:0.5",
    }


def test_rows_without_data_have_costs_alone_and_say_why(done):
    assert set(done.runs) == {"A/local", "A/tuned", "A/fedavg", "A/deep/letters"}
    assert done.costs_only["B/absent"] == "no gldv2 here (nobody has it)"
    assert done.costs_only["B/missing"] == "no cifar100 here (`sparsona data get cifar100`)"
    assert done.costs_only["B/rule"] == "pfedhn cannot be run yet"
    for row in ("B/absent", "B/missing", "B/rule"):
        assert cell(done, row, "traffic").ours.value > 0
        assert any(note.startswith("costs only") and row in note for note in done.notes())
    assert cell(done, "B/missing", "accuracy").ours is None


def test_what_stands_in_is_marked_and_has_nothing_in_the_papers_column(done):
    mine = [line for line in done.table() if line["row"] == "A/deep/letters (stand-in for EMNIST-L)"]
    assert [line["figure"] for line in mine] == ["accuracy, %", "traffic, GB"]
    assert all(line["paper"] == line["difference"] == line["agrees"] == "–" for line in mine)
    printed = {**VALUES["rows"]["A/deep/letters"], "printed": {"accuracy": 1}}
    with pytest.raises(ValueError, match="stands in for EMNIST-L"):
        Recipe(**{**VALUES, "rows": {"x": printed}})


def test_a_second_call_trains_nothing(done):
    before = {path: path.stat().st_mtime_ns for path in done.path.rglob("*") if path.is_file()}
    seen = []
    again = runner.reproduce(OWN, seeds=2, out=done.path, observers=[seen.append])
    assert not seen
    assert again.figures() == done.figures()
    after = {path: path.stat().st_mtime_ns for path in done.path.rglob("*") if path.is_file()}
    assert {path: when for path, when in after.items() if path.name != REPRODUCTION_FILE} == {
        path: when for path, when in before.items() if path.name != REPRODUCTION_FILE
    }


def test_only_what_is_missing_is_run(tmp_path):
    first = sp.reproduce(OWN, rows="A/fedavg", out="x")
    assert list(first.runs) == ["A/fedavg"]
    started = []
    sp.reproduce(
        OWN, rows="A/*", out="x", observers=[lambda record: isinstance(record, RunStart) and started.append(record)]
    )
    assert [record.path.name for record in started] == ["A_local-seed0", "A_tuned-seed0", "A_deep_letters-seed0"]


def test_rows_that_others_need_are_run_though_they_are_not_shown():
    found = sp.reproduce(OWN, rows="A/tuned")
    assert {line["row"] for line in found.table()} == {"A/tuned"}
    assert set(found.runs) == {"A/tuned", "A/fedavg", "A/local"}


def test_a_scaled_result_is_marked_and_claims_nothing(done):
    small = sp.reproduce(OWN, rows="A/local", scale=0.5, rounds=8)
    assert small.path.parts[-1] == "digits-table-1-scale-0.5-rounds=8"
    (run,) = small.runs["A/local"]
    assert (run.config["rounds"], run.config["clients"], run.config["per_round"]) == (4, 4, 2)
    assert run.config["data_rate"] == pytest.approx(0.2 * 4 / 5)
    found = cell(small, "A/local", "accuracy")
    assert (found.difference, found.agrees) == (None, None)
    assert found.why.startswith("scaled to 0.5")
    assert "SCALED to 0.5" in small.notes()[0]
    assert "CHANGED by rounds=8" in small.notes()[1]
    assert cell(small, "A/local", "traffic").why == "changed: rounds"
    assert cell(sp.reproduce(OWN, rows="A/local", scale=0.5, dry_run=True), "A/local", "traffic").agrees


def test_changes_that_make_another_experiment_are_marked_and_others_are_not():
    assert sp.reproduce(OWN, rows="A/local", dry_run=True, lr=0.5).mark == "changed: lr"
    assert sp.reproduce(OWN, rows="A/local", dry_run=True, executor="serial", device="cpu", eval_every=2).mark == ""
    with pytest.raises(SparsonaError, match="unknown option of these rows 'densty'"):
        sp.reproduce(OWN, dry_run=True, densty=0.5)
    with pytest.raises(SparsonaError, match="'seed' for all rows"):
        sp.reproduce(OWN, dry_run=True, seed=1)


def test_a_dry_run_makes_nothing(tmp_path):
    found = sp.reproduce(OWN, dry_run=True)
    assert not list(tmp_path.iterdir())
    assert not found.runs
    assert cell(found, "A/local", "traffic").agrees
    assert "4 of 4 runs are not done" in found.notes()


@pytest.mark.parametrize(("scale", "seeds"), [(0, 1), (1.5, 1), (1, 0), (1, [1, 1])])
def test_wrong_scales_and_seeds_are_refused(scale, seeds):
    with pytest.raises(SparsonaError):
        sp.reproduce(OWN, scale=scale, seeds=seeds, dry_run=True)


def test_runs_with_other_options_are_not_taken_for_these(done):
    with pytest.raises(SparsonaError, match=r"A_local-seed0' was run with other options.*batch_size 10 -> 20"):
        runner.reproduce(OWN, out=done.path, batch_size=20)
    with pytest.raises(SparsonaError, match="has runs of own/digits-table-1 at scale 1"):
        runner.reproduce(OWN, out=done.path, scale=0.5)


def test_a_run_of_an_older_version_had_the_defaults_of_later_options(tmp_path):
    """Its config.json has no `headline_weight`."""
    result = runner.reproduce(OWN, rows="A/local", out=tmp_path / "runs")
    (run,) = result.runs["A/local"]
    config = json.loads((run.path / "config.json").read_text())
    del config["headline_weight"]
    old = tmp_path / "old" / run.path.name
    old.mkdir(parents=True)
    (old / "config.json").write_text(json.dumps(config))
    (planned,) = runner.reproduce(OWN, rows="A/local", out=tmp_path / "other", dry_run=True).planned
    runner._check_same(replace(planned, folder=old))
    weighted = planned.config.model_copy(update={"headline_weight": "examples"})
    with pytest.raises(SparsonaError, match=r"other options.*headline_weight clients -> examples"):
        runner._check_same(replace(planned, folder=old, config=weighted))


def test_runs_of_a_recipe_are_listed_among_all(tmp_path):
    runner.reproduce(OWN, rows="A/local", out=tmp_path / "runs" / "reproduce" / "own" / "table")
    for where in (tmp_path / "runs", tmp_path / "runs" / "reproduce"):
        assert [Path(row["run"]).name for row in list_runs(where)] == ["A_local-seed0"]


def test_damaged_folders_are_named(tmp_path):
    sp.reproduce(OWN, rows="A/local", out="x")
    manifest = tmp_path / "x" / "A_local-seed0" / "checkpoint" / "manifest.json"
    whole = manifest.read_text()
    manifest.write_text(whole[:20])
    with pytest.raises(SparsonaError, match=r"manifest\.json' cannot be read"):
        sp.reproduce(OWN, rows="A/local", out="x")
    manifest.write_text(whole)
    (tmp_path / "x" / REPRODUCTION_FILE).write_text("{}")
    with pytest.raises(SparsonaError, match=REPRODUCTION_FILE):
        sp.reproduce(OWN, rows="A/local", out="x")
    (tmp_path / "x" / REPRODUCTION_FILE).unlink()
    (tmp_path / "x" / "A_local-seed0" / "config.json").unlink()
    failed = sp.reproduce(OWN, rows="A/local", out="x")
    assert "is already used" in failed.failures["A/local", 0]
    with pytest.raises(SparsonaError, match="is not a reproduction"):
        runner.open_reproduction(tmp_path)


def test_an_unknown_measure_is_refused_before_anything_is_run(tmp_path):
    wrong = Recipe(**{**VALUES, "columns": {**VALUES["columns"], "x": {"measure": "acuracy", "title": "x"}}})
    with pytest.raises(SparsonaError, match="unknown measure 'acuracy'"):
        sp.reproduce(wrong, rows="A/local")
    assert not list(tmp_path.iterdir())


def test_a_row_that_cannot_be_run_is_named():
    wrong = Recipe(**{**VALUES, "rows": {"x": {"method": "fedavg", "options": {"per_round": 50}}}})
    with pytest.raises(SparsonaError, match="row 'x': cannot sample 50 clients"):
        sp.reproduce(wrong)


def test_columns_about_time_and_masks_have_what_they_need():
    columns = {
        "search": {"measure": "search_time", "title": "mask search, s", "digits": 4},
        "ratio": {"measure": "search_time_ratio", "title": "of training, %"},
        "union": {"measure": "union_density", "title": "union of masks"},
    }
    rows = {"spa": {"method": "fedspa", "options": {"density": 0.2}}, "avg": {"method": "fedavg"}}
    found = sp.reproduce(Recipe(**{**VALUES, "columns": columns, "rows": rows}))
    assert cell(found, "spa", "search").ours.value > 0
    assert cell(found, "spa", "ratio").ours.value > 0
    assert 0.2 < cell(found, "spa", "union").ours.value <= 1
    assert not [one for one in found.cells() if one.row == "avg"]  # it has no masks


REGISTER = f"""
import sparsona.reproduce.recipe as recipes
recipes.names = lambda: ["fedspa/own"]
recipes.load = lambda name: recipes.Recipe(**{VALUES!r})
"""


@pytest.mark.parametrize("sign", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_what_was_stopped_is_resumed_by_the_same_command(forks, tmp_path, sign):
    args = ("reproduce", "fedspa/own", "--rows", "A/fedavg", "--set", "rounds=20", "--json")
    runs = tmp_path / "runs" / "reproduce" / "fedspa" / "own-rounds=20"
    process = start(forks, tmp_path, *args, setup=EAGER + REGISTER)
    manifest = runs / "A_fedavg-seed0" / "checkpoint" / "manifest.json"
    wait_until(lambda: manifest.exists() and completed(manifest.parents[1]) >= 1)
    process.kill(sign)
    code, _, err = process.wait()
    assert code == (-signal.SIGKILL if sign == signal.SIGKILL else 130)
    if sign == signal.SIGINT:
        assert "the same command continues it" in err
    assert completed(runs / "A_fedavg-seed0") < 20
    code, out, err = start(forks, tmp_path, *args, setup=EAGER + REGISTER).wait()
    assert code == 0, err
    assert json.loads(out)["figures"][0]["row"] == "A/fedavg"
    (tmp_path / "whole").mkdir()
    assert start(forks, tmp_path / "whole", *args, setup=REGISTER).wait()[0] == 0
    whole = tmp_path / "whole" / "runs" / "reproduce" / "fedspa" / "own-rounds=20"
    assert traces(runs / "A_fedavg-seed0") == traces(whole / "A_fedavg-seed0")


@pytest.mark.long
def test_runs_side_by_side_have_the_same_results(done, tmp_path):
    records = []
    both = runner.reproduce(OWN, rows="A/*", out="x", jobs=2, observers=[records.append])
    played = {"A/local", "A/fedavg", "A/tuned", "A/deep/letters"}
    assert {record.title for record in records if isinstance(record, ProgressUpdate)} == played
    assert len([record for record in records if isinstance(record, RunEnd)]) == len(played)
    for row, runs in both.runs.items():
        assert runs[0].summary["accuracy"] == done.runs[row][0].summary["accuracy"]


@pytest.mark.parametrize(
    ("jobs", "groups"), [("auto", [["small", "also small"], ["large"]]), (2, [["small", "also small", "large"]])]
)
def test_rows_of_one_network_are_packed_together(jobs, groups, tmp_path, monkeypatch):
    """How many get faster side by side is another number for another network."""
    played = []

    def play(runs, titles, federation, model, observers, at_a_time):
        played.append([titles[folder] for folder, _, _ in runs])
        assert at_a_time == jobs
        return {}

    monkeypatch.setattr(runner, "play_in_processes", play)
    rows = {
        "small": {"method": "local", "options": {"model": "digits-cnn"}},
        "large": {"method": "fedavg", "options": {"model": "mlp"}},
        "also small": {"method": "fedavg", "options": {"model": "digits-cnn"}},
    }
    recipe = Recipe(title="Networks", where="here", columns=VALUES["columns"], options=TINY, rows=rows)
    runner.reproduce(recipe, out=tmp_path / "runs", jobs=jobs)
    assert played == groups


def test_the_page_has_the_table_what_differs_and_how_it_was_made(done, tmp_path):
    page = done.report(tmp_path / "page.html").read_text()
    for text in (
        "own/digits-table-1: Digits",
        "50.0 ± 2.0",
        "A/deep/letters (stand-in for EMNIST-L)",
        "everything is small",
        "seeds=[0, 1], scale=1.0, out=",
        done.record.commits["A_local-seed0"][0],
        "Accuracy by rounds",
        "nobody has it",
    ):
        assert text in page, text
    nothing = sp.reproduce(OWN, rows="B/*", dry_run=True)
    assert "nobody has it" in nothing.report(tmp_path / "costs.html").read_text()


def test_both_names_of_the_function_are_the_function():
    assert callable(sys.modules["sparsona.reproduce"])
    assert sp.reproduce(OWN, rows="A/local", dry_run=True).rows == ["A/local"]


@pytest.fixture
def named(monkeypatch):
    """The recipe by name, for the command line."""
    monkeypatch.setattr(recipes, "names", lambda: ["fedspa/own"])
    monkeypatch.setattr(recipes, "load", lambda name: OWN)


def test_the_command(say, named, tmp_path):
    said = say("reproduce", "fedspa/own", "--rows", "A/local", "--dry-run")
    assert said.code == 0, said.err
    assert "new" in said.out
    assert "unknown" in said.out  # how long it takes
    said = say("reproduce", "fedspa/own", "--rows", "A/local", "--json")
    found = json.loads(said.out)
    assert found["recipe"] == "fedspa/own"
    assert [one["state"] for one in found["runs"]] == ["done"]
    said = say("reproduce", "fedspa/own", "--rows", "A/local", "--page", "own.html")
    assert "50.0 ± 2.0" in said.out
    assert "known to differ: everything is small" in said.out
    assert (tmp_path / "own.html").exists()
    assert say("report", "runs/reproduce/fedspa/own").out.strip() == "runs/reproduce/fedspa/own/report.html"
    assert "<h1>fedspa/own: Digits</h1>" in (tmp_path / "runs/reproduce/fedspa/own/report.html").read_text()
    listed = json.loads(say("reproduce", "--json").out)
    assert (listed[0]["done"], listed[0]["runs"]) == (1, 8)
    assert listed[0]["data"]["gldv2"] == {"here": False, "how": "nobody has it"}
    assert listed[0]["seconds"] > 0
    shown = say("reproduce").out
    assert "1/8 runs" in shown
    assert "sparsona data get cifar100" in shown


def test_what_the_command_refuses(say, named):
    say("reproduce", "fedspa/own", "--rows", "C/*").refused("no row of fedspa/own is called 'C/*'", "A/local", "B/rule")
    say("reproduce", "fedspa/own", "--set", "rows=3").refused("'rows' in --set")
    say("reproduce", "fedspa/own", "--scale", 2).refused("a scale of 2")
    say("reproduce", "fedspa/own", "--jobs", 0).refused("jobs = 0")
    say("reproduce", "fedspa", "--rows", "A/*").refused("--rows without a table or figure")
    say("reproduce", "--set", "rounds=1").refused("--set without a table or figure")


TUNING = {"method": "fedavg-ft", "options": {"rounds": 0}, "warm_start": "A/fedavg"}
WITH_TUNING = Recipe(**{**VALUES, "rows": {"A/fedavg": {"method": "fedavg"}, "A/tuning": TUNING}})


def test_rows_without_rounds_are_run_when_they_are_all_that_is_left(say, named, monkeypatch):
    monkeypatch.setattr(recipes, "load", lambda name: WITH_TUNING)
    assert say("reproduce", "fedspa/own", "--rows", "A/fedavg", "--json").code == 0
    said = say("reproduce", "fedspa/own", "--rows", "A/tuning", "--json")
    assert said.code == 0, said.err
    assert {one["state"] for one in json.loads(said.out)["runs"]} == {"done"}
    say("reproduce", "fedspa/own", "--set", "rounds=3").refused("which only tunes the model of 'A/fedavg'")


def test_a_row_that_fails_does_not_keep_others_from_running(say, named, monkeypatch, tmp_path):
    monkeypatch.setattr(recipes, "load", lambda name: WITH_TUNING_AND_LOCAL)
    taken = tmp_path / "x" / "A_fedavg-seed0"
    taken.mkdir(parents=True)
    (taken / "notes.txt").write_text("mine")
    said = say("reproduce", "fedspa/own", "--out", "x")
    assert said.code == 1
    assert "error: row 'A/fedavg', seed 0" in said.err
    assert "it starts from 'A/fedavg', which failed" in said.err
    assert (tmp_path / "x" / "A_local-seed0" / "summary.json").exists()
    assert "2 of 3 runs are not done" in said.out


WITH_TUNING_AND_LOCAL = Recipe(
    **{**VALUES, "rows": {**WITH_TUNING.model_dump()["rows"], "A/local": {"method": "local"}}}
)


@pytest.mark.slow
def test_a_row_that_fails_in_a_process_of_its_own(tmp_path):
    (tmp_path / "x" / "A_fedavg-seed0").mkdir(parents=True)
    (tmp_path / "x" / "A_fedavg-seed0" / "notes.txt").write_text("mine")
    found = runner.reproduce(WITH_TUNING_AND_LOCAL, out="x", jobs=2)
    assert set(found.failures) == {("A/fedavg", 0), ("A/tuning", 0)}
    assert list(found.runs) == ["A/local"]


def test_costs_of_another_experiment_are_not_compared():
    asked = {"rows": "cifar10/dir/vgg11/*", "dry_run": True}
    costs = [one for one in sp.reproduce("dispfl/table3", **asked, scale=0.004).cells() if one.is_cost and one.paper]
    assert costs
    assert all(one.agrees is not None for one in costs)  # scaled: of the full size
    changed = [one for one in sp.reproduce("dispfl/table3", **asked, scale=0.004, epochs=1).cells() if one.is_cost]
    assert {(one.agrees, one.difference, one.why) for one in changed if one.paper} == {(None, None, "changed: epochs")}


def test_another_experiment_has_a_folder_of_its_own(say, named):
    assert say("reproduce", "fedspa/own", "--rows", "A/local", "--set", "rounds=1", "--json").code == 0
    found = json.loads(say("reproduce", "fedspa/own", "--rows", "A/local", "--json", "--dry-run").out)
    assert [one["state"] for one in found["runs"]] == ["new"]
    assert json.loads(say("reproduce", "--json").out)[0]["done"] == 0
    assert sp.reproduce(OWN, rows="A/local", dry_run=True, executor="serial").path.name == "digits-table-1"


def test_own_recipes_have_folders_of_their_own_which_can_be_reported(say):
    other = Recipe(**{**VALUES, "title": "Other digits"})
    first, second = (sp.reproduce(one, rows="A/local") for one in (OWN, other))
    assert first.path != second.path
    assert say("report", str(second.path)).out.strip() == str(second.path / "report.html")
    assert "Other digits" in (second.path / "report.html").read_text()


def test_a_run_that_was_stopped_goes_on_to_the_new_limit():
    longer = Recipe(**{**VALUES, "options": {**VALUES["options"], "rounds": 6}})
    sp.reproduce(longer, rows="A/local", max_steps=1)
    stopped = sp.reproduce(longer, rows="A/local", dry_run=True)
    assert [one.state for one in stopped.planned] == ["unfinished"]
    assert sp.reproduce(longer, rows="A/local").runs["A/local"][0].summary["rounds"] == 6


def test_nothing_to_run_is_said_and_no_folder_is_named(say, named):
    said = say("reproduce", "fedspa/own", "--rows", "B/absent")
    assert "nothing to run: no gldv2 here (nobody has it)" in said.out
    assert "runs/reproduce" not in said.out
    assert "report:" not in said.out


def test_runs_are_counted_over_the_rows_that_are_shown():
    assert "1 of 1 runs are not done" in sp.reproduce(OWN, rows="A/tuned", dry_run=True).notes()


def test_the_printed_command_makes_these_runs(named):
    def said(**options):
        return command(runner.reproduce("fedspa/own", rows="A/local", dry_run=True, **options))

    assert said(out="x", seeds=2) == "sparsona reproduce fedspa/own --rows A/local --seeds 2 --out x"
    assert said(lr=0.5) == "sparsona reproduce fedspa/own --rows A/local --set lr=0.5"
    assert said(seeds=[3]) == "sp.reproduce('fedspa/own', rows='A/local', seeds=[3], scale=1.0)"


def test_rows_of_a_gpu_need_one(monkeypatch):
    monkeypatch.setattr(rows, "has_gpu", lambda: False)
    own = Recipe(**{**VALUES, "rows": {"A/gpu": {"method": "local", "options": {"device": "cuda"}}}})
    found = sp.reproduce(own, dry_run=True)
    assert found.costs_only == {"A/gpu": "it needs a GPU, and there is none here"}
    assert not found.planned


def test_where_seconds_are_measured_the_place_is_part_of_the_experiment():
    timed = Recipe(
        **{**VALUES, "columns": {"s": {"measure": "train_time", "title": "s"}}, "rows": {"x": {"method": "local"}}}
    )
    assert sp.reproduce(timed, dry_run=True, device="cpu").mark == "changed: device"
