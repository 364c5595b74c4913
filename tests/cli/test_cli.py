"""The command line: what it prints, what stays the same, what a comparison compares, and how fast it answers."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import sqlite3
import subprocess
import sys

import click
import numpy as np
import pytest
import torch
from older_runs import unseal
from processes import small, start, traces
from pydantic import Field

from sparsona.cli import app as cli
from sparsona.cli import options as cli_options
from sparsona.core.version import VERSION
from sparsona.costs import cost_options
from sparsona.data import SOURCES
from sparsona.data.partition import PARTITIONS
from sparsona.experiment import build
from sparsona.experiment import train as api
from sparsona.learning.phases import Training
from sparsona.methods import METHODS, factory
from sparsona.methods.fedspa import FedSpaConfig
from sparsona.models import MODELS
from sparsona.runs import observers
from sparsona.runs.declaration import options_of
from sparsona.runs.options import OPTIONS, RunConfig

ACCURACY = {"mean", "weighted", "bottom_decile", "worst", "std", "last10"}
BYTES = {"up", "down", "total", "busiest_node", "busiest_round_in", "busiest_round_out", "busiest_round_paper"}
PAPER_BYTES = {"paper_up", "paper_down", "paper_total", "upload_share"}  # the papers' own count, beside ours


def bare(summary: dict) -> dict:
    """A summary without when and where."""
    return {key: value for key, value in summary.items() if key not in ("run", "seconds")}


def test_a_run_says_who_trained_in_no_round(say, tmp_path):
    said = say("run", "local", *small(tmp_path, out="run"), "--per-round", 1, "--rounds", 1)
    assert said.code == 0
    assert re.search(r"note: \d+ of \d+ clients trained in no round", said.out)


def test_json_alone_on_stdout_with_the_promised_keys(say, tmp_path):
    said = say("run", "fedspa", *small(tmp_path, out="run"), "--json")
    assert said.code == 0
    assert said.out.count("\n") == 1
    summary = json.loads(said.out)
    promised = {"run", "method", "protocol", "accuracy", "bytes", "flops", "turns", "steps", "rounds", "seconds"}
    assert set(summary) == promised | {"pipeline", "classes", "evaluation_bytes", "untrained"}
    assert set(summary["accuracy"]) == ACCURACY
    assert set(summary["bytes"]) == BYTES | PAPER_BYTES
    assert set(summary["flops"]) == {"train", "mask_search"}
    assert summary["run"] == "run"
    assert summary["method"] == "fedspa"
    assert summary["rounds"] == 3
    assert summary["accuracy"]["last10"] is None  # there were no ten
    assert summary["bytes"]["total"] == summary["bytes"]["up"] + summary["bytes"]["down"] > 0
    assert summary["bytes"]["busiest_node"] == summary["bytes"]["total"]
    assert summary["bytes"]["busiest_round_in"] == summary["bytes"]["up"] / 3  # the server, in each of three rounds
    assert summary["bytes"]["busiest_round_out"] == summary["bytes"]["down"] / 3
    assert 0 < summary["seconds"] < 60
    assert "finished after round 3 of 3" in said.err  # progress
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary


def test_the_protocol_in_words(say, tmp_path):
    texts = {}
    for method in ("fedspa", "fedavg-ft", "local", "dispfl"):
        said = say("run", method, *small(tmp_path, out=method))
        assert said.code == 0
        assert re.search(r"\naccuracy|method +accuracy", said.out)
        assert f"run:    {method}\n" in said.out
        assert f"report: {method}/report.html\n" in said.out
        assert (tmp_path / method / "report.html").stat().st_size > 1000
        texts[method] = said.out.partition("How this was measured:\n")[2].partition("\n\n")[0]
        assert "  test data: Each client's own test data (10 examples), " in texts[method]
        assert "  result: The mean over 5 clients, each counting the same, after round 3 of 3, " in texts[method]
        assert "the last and not the best" in texts[method]
    assert texts["fedspa"].startswith("  model: The personal model each client would deploy")
    assert "after final tuning on its own training data" in texts["fedavg-ft"]
    assert "trained on its data alone" in texts["local"]
    assert "mixed with what its neighbours sent last" in texts["dispfl"]


def test_the_headline_is_the_last_round_and_never_the_best(say, tmp_path):
    said = say("run", "fedavg", *small(tmp_path, out="run", rounds=12), "--json")
    summary = json.loads(said.out)
    curve = api.load(tmp_path / "run").curve()
    assert [completed for completed, _ in curve] == list(range(1, 13))
    assert summary["accuracy"]["mean"] == pytest.approx(curve[-1][1], abs=1e-12)
    assert summary["accuracy"]["last10"] == pytest.approx(np.mean([value for _, value in curve[-10:]]), abs=1e-12)
    unseal(tmp_path / "run")  # so that its records can be edited
    with contextlib.closing(sqlite3.connect(tmp_path / "run" / "records.sqlite")) as db:
        db.execute("UPDATE evaluations SET correct = count WHERE completed = 5")
        db.commit()
    (tmp_path / "run" / "summary.json").unlink()
    again = json.loads(say("resume", "run", "--json").out)
    assert again["accuracy"]["mean"] == summary["accuracy"]["mean"] < 1
    assert again["accuracy"]["last10"] > summary["accuracy"]["last10"]


def test_the_summary_is_what_the_records_say(say, tmp_path):
    said = say("run", "fedspa", *small(tmp_path, out="run"), "--json")
    summary = json.loads(said.out)
    with contextlib.closing(sqlite3.connect(tmp_path / "run" / "records.sqlite")) as db:
        up, down, train, search = db.execute(
            "SELECT SUM(bytes_up), SUM(bytes_down), SUM(train_flops), SUM(search_flops) FROM turns"
        ).fetchone()
        rows = db.execute("SELECT correct, count FROM evaluations WHERE completed = 3").fetchall()
    assert (summary["bytes"]["up"], summary["bytes"]["down"]) == (up, down)
    assert (summary["flops"]["train"], summary["flops"]["mask_search"]) == (train, search)
    accuracies = [correct / count for correct, count in rows]
    assert summary["accuracy"]["mean"] == pytest.approx(np.mean(accuracies), abs=1e-12)
    assert summary["accuracy"]["worst"] == min(accuracies)
    assert summary["accuracy"]["weighted"] == pytest.approx(sum(c for c, _ in rows) / sum(n for _, n in rows))


def test_twice_the_same(say, forks, tmp_path):
    """In this process and in another one."""
    args = ["run", "fedspa", *small(tmp_path, rounds=4, seed=1), "--json"]
    first, second = json.loads(say(*args, "--out", "a").out), json.loads(say(*args, "--out", "b").out)
    code, out, err = start(forks, tmp_path, *args, "--out", "c").wait()
    assert code == 0, err
    assert bare(first) == bare(second) == bare(json.loads(out))
    assert traces(tmp_path / "a") == traces(tmp_path / "b") == traces(tmp_path / "c")


def federation_of(folder) -> str:
    return json.loads((folder / "about.json").read_text())["federation"]


def test_a_seed_varies_everything_unless_the_partition_is_fixed(say, tmp_path):
    common = ["run", "fedavg", "--clients", 4, "--epochs", 1, "--rounds", 2, "--executor", "serial", "--json"]
    found = {}
    for name, more in {
        "0": ["--seed", 0],
        "1": ["--seed", 1],
        "0 fixed": ["--seed", 0, "--partition-seed", 7],
        "1 fixed": ["--seed", 1, "--partition-seed", 7],
    }.items():
        assert say(*common, *more, "--out", name).code == 0
        found[name] = traces(tmp_path / name)
    assert federation_of(tmp_path / "0") != federation_of(tmp_path / "1")
    assert federation_of(tmp_path / "0 fixed") == federation_of(tmp_path / "1 fixed") != federation_of(tmp_path / "0")
    assert found["0 fixed"]["tensors"] != found["1 fixed"]["tensors"]
    sampled = [[row[:2] for row in found[name]["rows"]["turns"]] for name in ("0 fixed", "1 fixed")]
    assert sampled[0] != sampled[1]
    settings = [build.make_context(build.make_config("fedavg", {"seed": seed}), None, None) for seed in (0, 1)]
    assert not torch.equal(settings[0].params.flat, settings[1].params.flat)


def test_options_from_a_file_and_from_the_command_line(say, tmp_path):
    (tmp_path / "c.toml").write_text('rounds = 5\nbatch-size = 7\nlr = 0.5\n[options]\ndensity = 0.3\nsearch = "rsm"\n')
    assert (
        say("run", "fedspa", "--config", "c.toml", *small(tmp_path, out="run"), "--set", "density=0.4", "--json").code
        == 0
    )
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["rounds"] == 3  # the command line wins over the file
    assert config["options"]["density"] == 0.4  # and --set over both
    assert config["options"]["lr"] == 0.5
    assert config["options"]["search"] == "rsm"
    assert config["batch_size"] == 10


def flags_of(command) -> dict[str, click.Option]:
    found = command.get_params(click.Context(command))
    return {one.name: one for one in found if isinstance(one, click.Option) and "--help" not in one.opts}


def test_help_names_the_true_defaults():
    fields = {**FedSpaConfig.model_fields, **RunConfig.model_fields}
    checked = 0
    for option in flags_of(cli.run).values():
        shown = re.search(r"\[([^\]]+)\]$", option.help or "")
        field = fields.get(option.name)
        if shown and field is not None and field.default is not None:
            assert shown[1] == str(field.default), option.name
            checked += 1
    assert checked >= 11


def test_help_is_made_of_whole_phrases(say):
    """Not "Of convolutions", nor what click adds of ranges and defaults."""
    for command in ("run", "watch", "export"):
        words = " ".join(say(command, "--help").out.split())
        assert not re.search(r"\bdefault: |<=x<=|\[in the", words), command
        assert not re.search(r"(--[\w-]+ )(\S+ )?Of ", words), command
    shown = " ".join(say("run", "--help").out.split())
    assert "task, loss, class_weights, metrics and patience: see docs/experiments.md" in shown


def test_help_lists_the_observers(say, monkeypatch):
    monkeypatch.setitem(observers.OBSERVERS, "curves", observers.ObserverRow("mine:Curves", "pictures of curves"))
    for command in ("run", "compare", "resume"):
        assert "curves: pictures of curves" in " ".join(say(command, "--help").out.split())


@pytest.mark.parametrize("command", [cli.run, cli.compare, cli.cost])
def test_every_flag_is_an_option_and_every_option_with_a_flag_has_it(command):
    every = [one for name in METHODS for one in options_of(factory(name)[1]).values()] + [*OPTIONS.values()]
    flags = flags_of(command)
    known = {*(one.name for one in every), *cost_options()}
    words = {"config", "pairs", "as_json", "out", "profile", "seeds", "match", "jobs", "logs"}
    assert set(flags) - words <= known
    wanted = {one.name for one in every if one.flag}
    assert wanted <= set(flags)
    assert {"lr", "epochs", "weight_decay", "density", "personal"} <= wanted
    given = command.make_context("sparsona", ["fedspa"]).params
    for name in wanted:
        assert flags[name].help, name
        assert given[name] in (None, ()), name  # printed, but set by the table alone
    assert "pfedgate: 0.05" in flags["lr"].help  # who has another default


def test_a_new_option_of_a_method_is_a_flag():
    class Config(Training):
        warmth: float = Field(0.9, description="share of the last step kept", json_schema_extra={"flag": True})

    flags = {one.name: one for one in cli_options.method_flags({"mine": Config})}
    assert flags["warmth"].opts == ["--warmth"]
    assert flags["warmth"].help == "Share of the last step kept.  [0.9]"


def test_runs_go_to_new_folders_of_their_own(say, tmp_path):
    args = small(tmp_path, rounds=1)
    for _ in range(2):
        assert say("run", "fedavg", *args, "--json").code == 0
    names = [path.name for path in (tmp_path / "runs").iterdir()]
    assert len(names) == 2
    assert all(re.fullmatch(r"fedavg-digits-seed0-\d{8}-\d{6}-[0-9a-f]{4}", name) for name in names)
    listed = json.loads(say("runs", "--json").out)
    assert {row["run"] for row in listed} == set(names)
    said = say("resume", names[0], "--json")  # by its name in ./runs
    assert said.code == 0
    assert json.loads(said.out)["run"] == f"runs/{names[0]}"


def test_report_of_several_runs(say, tmp_path):
    for method in ("fedavg", "local"):
        say("run", method, *small(tmp_path, out=method, rounds=1), "--json")
    said = say("report", "fedavg", "local", "--out", "page/both.html")
    assert (said.code, said.out) == (0, "page/both.html\n")
    page = (tmp_path / "page" / "both.html").read_text()
    assert "FedAvg" in page
    assert "Local" in page
    assert not re.search(r"<(script|link)[^>]+(src|href)=[\"']?https?:", page)
    said = say("report", "local")
    assert said.out == "local/report.html\n"


def test_the_list_of_runs(say, tmp_path):
    assert say("runs").out == "no runs in 'runs' yet: start with `sparsona compare`\n"
    assert json.loads(say("runs", "--json").out) == []
    say("run", "fedavg", *small(tmp_path, out="runs/done", rounds=2), "--json")
    say("run", "fedspa", *small(tmp_path, out="runs/begun", rounds=2, seed=3), "--set", "max_seconds=1e-9", "--json")
    say("compare", "local", *small(tmp_path, out="runs/both", rounds=1), "--json")
    rows = {row["run"]: row for row in json.loads(say("runs", "--json").out)}
    assert set(rows) == {"done", "begun", "both/local-seed0"}
    assert (rows["done"]["state"], rows["done"]["rounds"], rows["done"]["method"]) == ("finished", "2/2", "fedavg")
    assert re.fullmatch(r"\d+\.\d%", rows["done"]["accuracy"])
    assert (rows["begun"]["state"], rows["begun"]["rounds"]) == ("unfinished: resume it", "1/2")
    assert rows["begun"]["seed"] == 3
    text = say("runs").out
    assert "unfinished: resume it" in text
    assert "both/local-seed0" in text
    for run in ("done", "both"):
        assert "it had finished: nothing was left to run" in say("resume", run).err
    assert "nothing was left" not in say("resume", "begun").err


def test_the_lists_explain_themselves(say):
    text = say("methods").out
    for row in METHODS.values():
        assert row.name in text
    for heading in ("paper", "kept", "travels"):
        assert heading in text
    assert "McMahan et al., AISTATS 2017" in text
    rows = json.loads(say("methods", "--json").out)
    assert [row["name"] for row in rows] == list(METHODS)
    assert all(row["paper"] and row["kept"] and row["travels"] for row in rows)
    rows = json.loads(say("models", "--json").out)
    assert {row["name"]: row["parameters"] for row in rows} == {m.name: m.num_parameters for m in MODELS.values()}
    found = json.loads(say("data", "--json").out)
    assert [row["name"] for row in found["data"]] == list(SOURCES)
    assert [row["partition"] for row in found["partitions"]] == [card.form for card in PARTITIONS.values()]
    assert "digits-cnn" in say("models").out
    assert "dirichlet:A" in say("data").out


def test_the_options_of_a_method(say):
    text = say("methods", "fedspa-rsm").out
    assert "FedSpa (RSM)" in text
    assert "search = rsm" in text  # as this row has it
    for key, field in FedSpaConfig.model_fields.items():
        assert f"  {key} = " in text
        assert field.description in text
    text = say("methods", "dispfl").out
    assert "--preset paper, dispfl: clients=100, rounds=500, validation_rate=0.0, epochs=5, batch_size=128," in text
    assert (
        "  with --data tiny-imagenet: model=resnet18, partition=dirichlet-equal:0.2, test=shares:100, rounds=300"
        in text
    )
    text = say("methods", "local").out
    assert "  in a comparison, per_round of its own: alone, all clients train" in text
    assert "    and --density 0.3: lr=0.05, gate_lr=0.5" in say("methods", "pfedgate").out


GROUPS = [name for name, one in cli.cli.commands.items() if isinstance(one, click.Group)]


@pytest.mark.parametrize("name", ["", *GROUPS])
def test_help_says_of_each_command_a_whole_sentence(say, name):
    """In a terminal of 80 columns, where click cuts what is longer."""
    listed = say(*filter(None, [name]), "--help").out.partition("\nCommands:")[2]
    assert listed.strip()
    assert "..." not in listed


def test_the_version(say):
    assert VERSION in say("--version").out


LIGHT = [
    ["--help"],
    ["run", "--help"],
    ["--version"],
    ["methods"],
    ["methods", "fedspa"],
    ["methods", "pfedhn"],
    ["cost", "--help"],
    ["cost", "dispfl", "--model", "lenet5", "--graph", "grid"],
    ["models"],
    ["data"],
    ["runs"],
    ["reproduce"],
]


def processor_seconds(code, *args, cwd=None) -> float:
    """What a process that runs this code takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code, *args], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("args", LIGHT, ids=" ".join)
def test_lists_and_help_answer_at_once(say, tmp_path, args):
    """Without torch, and in a few times the processor time of the least that a command line imports.

    Both are measured in turns: other tests beside this one make both slower.
    """
    if args == ["runs"]:
        say("run", "fedavg", *small(tmp_path, out="runs/done", rounds=1), "--json")
    code = (
        "import sys; from sparsona.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as done: assert not done.code\n"
        "assert 'sparsona.experiment.train' not in sys.modules and 'torch' not in sys.modules"
    )
    least = "import click, rich; print(click, rich)"  # 0.06 s where help takes 0.17 s
    times = {"--help": 5, "methods": 10, "reproduce": 70}  # the last looks at 1,400 rows and their data
    limit = times.get(" ".join(args), 35)
    assert any(
        processor_seconds(code, *args, cwd=tmp_path) < limit * processor_seconds(least, cwd=tmp_path) for _ in range(5)
    )


def test_importing_the_package_imports_no_torch():
    code = "import sparsona as sp, sys; dir(sp); sp.METHODS, sp.MODELS, sp.SOURCES, sp.SparsonaError"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True)


def test_bounds(say, tmp_path):
    assert say("run", "fedalt", *small(tmp_path, out="alt"), "--model", "mlp", "--json").code == 0
    few = ("--clients", 2, "--batches", 2)
    told = say("bounds", "alt", *few, "--out", "bounds.svg")
    assert told.code == 0
    for words in ("FedAlt, Theorem 2", "chi", "violated: ", "held: ", "cannot be checked: ", "picture: bounds.svg"):
        assert words in told.out
    found = json.loads(say("bounds", "alt", *few, "--json").out)
    assert found["bounds"][0]["value"] is None  # eta is above what the theorem allows
    assert found["bounds"][0]["terms"]
    assert say("run", "ditto", *small(tmp_path, out="ditto"), "--json").code == 0
    told = say("bounds", "ditto", "--out", "none.svg")
    assert told.code == 0
    assert "nothing was drawn" in told.out
    say("bounds", "alt", "--clients", 1).refused("clients=1", "2 or more")
    say("bounds", "nowhere").refused("nowhere")


def test_clients_and_similarity(say, tmp_path):
    """The papers' analyses of a run: tables, text pictures, JSON, pictures in files; and what cannot be compared."""
    options = ["--rounds", "2", "--clients", "5", "--set", "epochs=1", "--json"]
    assert say("run", "fedspa", *options, "--set", 'points=["global"]', "--out", "spa").code == 0
    assert say("run", "fedavg", *options, "--out", "avg").code == 0
    assert say("run", "fedavg", *options, "--seed", "1", "--out", "other").code == 0
    told = say("clients", "spa", "--out", "clients.svg").out
    assert "FedSpa (DST): received over global" in told
    assert "percentage points gained against training examples" in told
    assert (tmp_path / "clients.svg").read_text().startswith("<svg")
    assert "over FedAvg (received)" in say("clients", "spa", "--against", "avg").out
    found = json.loads(say("clients", "spa", "--against", "global", "--json").out)
    assert found["changes"][0]["num_clients"] == 5
    say("clients", "spa", "--against", "other").refused("hold different data")
    say("clients", "spa", "--against", "nothing").refused("there is no run 'nothing'")
    say("clients", "avg").refused("did not evaluate a shared model")
    say("clients", "spa", "--out", "a.pdf").refused(".svg or .png")
    told = say("similarity", "spa", "--out", "masks.svg").out
    assert "Correlation of distance with label similarity: Pearson" in told
    assert "distance of masks" in told
    assert (tmp_path / "masks.svg").exists()
    assert json.loads(say("similarity", "spa", "--json").out)["kind"] == "mask"
    say("similarity", "avg").refused("neither masks nor gates")


def test_targets_and_figures(say, tmp_path):
    options = ["--rounds", "2", "--clients", "5", "--set", "epochs=1", "--set", "capacities=[0.5, 1.0]", "--json"]
    assert say("run", "fedspa", *options, "--set", "train_accuracy=true", "--out", "spa").code == 0
    assert say("run", "fedavg-ft", *options, "--out", "tuned").code == 0
    summary = json.loads((tmp_path / "spa" / "summary.json").read_text())
    assert [(one["capacity"], one["clients"]) for one in summary["capacities"]] == [(0.5, 3), (1.0, 2)]
    told = say("targets", "spa", "tuned", "--at", "100", "--share", "0.5").out
    assert ">2" in told
    assert "'tuned' was not evaluated over the rounds" in told
    found = json.loads(say("targets", "spa", "--at", "2,100", "--json").out)
    assert [one["target"] for one in found["methods"][0]["targets"]] == [2, 100]
    say("targets", "spa").refused("no target")
    say("targets", "spa", "--at", "70;80").refused("numbers with commas")
    say("targets", "spa", "--at", "0.7").refused("an accuracy in percent")
    assert "gain-by-personal-parameters" in say("figure").out
    told = say("figure", "accuracy-by-capacity", "spa", "--out", "capacity.svg").out
    assert "capacity of a client" in told
    assert (tmp_path / "capacity.svg").read_text().startswith("<svg")
    found = json.loads(say("figure", "violins", "tuned", "--against", "spa", "--json").out)
    assert found["methods"][0]["changes"][0]["num_clients"] == 5
    say("figure", "violin", "spa").refused("violins")
    say("figure", "violins").refused("one or more runs")
    say("figure", "client-bands", "tuned", "--against", "spa").refused("--partition-seed 0")


def test_gates(say, tmp_path):
    """What a gated model's turns used, the histogram in a file, and the tree over phi."""
    options = ["--rounds", "2", "--clients", "4", "--set", "epochs=1", "--set", "data_rate=0.3", "--json"]
    assert say("run", "pfedgate", *options, "--set", "drop_last=true", "--out", "gates").code == 0
    told = say("gates", "gates", "--out", "gates.svg").out
    assert "density used s'" in told
    assert "upload share" in told
    assert (tmp_path / "gates.svg").read_text().startswith("<svg")
    assert len(json.loads(say("gates", "gates", "--json").out)["turns"]) == 4
    assert json.loads(say("similarity", "gates", "--of", "phi", "--json").out)["title"].endswith("phi")
    say("similarity", "gates", "--of", "theta").refused("unknown trait 'theta'")
