"""Bad input: one clear message (what, expected, a hint), an exit code, no traceback, and nothing lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from older import unseal
from processes import completed, small, traces
from torch import nn

import sparsona as sp
from sparsona.runs.folder import RunFolder


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["run", "fedavg", "--set", "learning_rate=0.1"], ["unknown option of fedavg", "did you mean 'lr'?"]),
        (["run", "fedavg", "--set", "num_rounds=3"], ["did you mean 'rounds'?"]),
        (["run", "finetune"], ["did you mean 'fedavg-ft'?"]),
        (["run", "fedsap"], ["unknown method 'fedsap'", "fedavg, ", "did you mean 'fedspa'?"]),
        (["compare", "local", "fedavgft"], ["unknown method 'fedavgft'", "did you mean 'fedavg-ft'?"]),
        (["methods", "fedspa-rms"], ["unknown method 'fedspa-rms'", "did you mean 'fedspa-rsm'?"]),
        (["run", "fedspa", "--data", "digit"], ["unknown data set 'digit'", "did you mean 'digits'?"]),
        (["compare", "fedspa", "--data", "digit"], ["unknown data set 'digit'", "did you mean 'digits'?"]),
        (["run", "fedspa", "--model", "lenet"], ["unknown model 'lenet'", "did you mean 'lenet5'?"]),
        (["run", "fedspa", "--executor", "wrokers"], ["unknown executor 'wrokers'", "did you mean 'workers'?"]),
        (
            ["run", "fedspa", "--partition", "dirichlt:1"],
            ["unknown partition 'dirichlt'", "did you mean 'dirichlet:A'"],
        ),
        (["run", "fedspa", "--partition", "dirichlet:-1"], ["'-1' is not a concentration", "write for example"]),
        (["run", "fedspa", "--set", "sede=3"], ["unknown option of fedspa 'sede'", "did you mean 'seed'?"]),
        (["run", "fedspa:denisty=0.2"], ["unknown option of fedspa 'denisty'", "did you mean 'density'?"]),
        (
            ["compare", "fedspa", "local", "--set", "serach=rsm"],
            ["unknown option of fedspa, local 'serach'", "'search'"],
        ),
        (
            ["run", "fedavg", "--density", "0.5"],
            ["unknown option of fedavg 'density'", "fedavg has none: it is an option of fedspa, ", ", dispfl\n"],
        ),
        (
            ["run", "fedavg", "--set", "densty=0.5"],
            [
                "unknown option of fedavg 'densty'",
                "did you mean 'density'? fedavg has none: it is an option of fedspa,",
            ],
        ),
        (
            ["compare", "fedavg", "local", "--density", "0.5"],
            ["unknown option of fedavg, local 'density'", "none of fedavg, local has it: it is an option of fedspa, "],
        ),
        (["tune", "fedavg", "--density", "0.5"], ["fedavg has none: it is an option of fedspa, "]),
        (["tune", "fedavg", "--search", "density=0.5"], ["fedavg has none: it is an option of fedspa, "]),
        (["cost", "fedavg", "local", "--density", "0.5"], ["none of fedavg, local has it: it is an option of fedspa"]),
        (["run", "fedavg", "--set", "metrics=F1"], ["unknown metric 'F1'", "did you mean 'f1'?"]),
        (["run", "fedavg", "--partition", "person"], ["unknown partition 'person'", "did you mean 'natural'?"]),
        (["run", "fedspa", "--set", "density"], ["'density' is not an option", "key=value"]),
        (
            ["run", "fedspa", "--density", "0"],
            ["density = 0.0", "greater than 0", "give density a number: above 0, at most 1"],
        ),
        (["run", "fedspa", "--density", "1.5"], ["density = 1.5", "less than or equal to 1"]),
        (["run", "fedspa", "--density", "nan"], ["density = nan", "give density a number: above 0, at most 1"]),
        (["run", "fedspa:density=nan"], ["density = 'nan'"]),
        (["run", "fedspa", "--lr", "nan"], ["lr = nan", "finite"]),
        (
            ["run", "fedspa", "--rounds", "-1"],
            ["rounds = -1", "greater than or equal to 0", "give rounds a whole number: 0 or more"],
        ),
        (["run", "fedspa", "--set", "lr=fast"], ["lr = 'fast'", "expected: a number\n", "give lr a number: above 0"]),
        (["run", "fedspa", "--rounds", "0"], ["rounds = 0 without a model", "--warm-start RUN"]),
        (
            ["run", "fedspa", "--clients", "4", "--per-round", "5"],
            ["cannot sample 5 clients per round: only 4 take part", "per_round from 1 to 4", "lower --per-round"],
        ),
        (["compare", "fedavg", "fedspa", "--clients", "4", "--per-round", "5"], ["cannot sample 5 clients"]),
        (
            ["run", "fedspa", "--clients", "900"],
            ["1797 examples cannot give 900 clients 10 each", "at most 179 clients"],
        ),
        (
            ["run", "fedavg", "--preset", "dispfl", "--set", "min_size=30"],
            ["cannot give 100 clients 30 each", "100 clients are those of --preset dispfl: --clients sets fewer"],
        ),
        (["run", "fedavg", "--graph", "ring"], ["fedavg on a graph", "such as dispfl", "leave --graph out"]),
        (["run", "dispfl", "--graph", "rings"], ["unknown graph 'rings'", "did you mean 'ring'?"]),
        (["run", "dispfl", "--clients", "4", "--graph", "random:9"], ["each of 4 peers receives from 9", "at most 3"]),
        (["run", "dispfl", "--set", "stateless=true"], ["do not keep what they learn", "leave 'stateless' out"]),
        (["run", "fedspa", "--config", "none.toml"], ["there is no config file 'none.toml'"]),
        (["run", "fedspa", "--set", "out=x"], ["'out' is no option of a run", "--out"]),
        (["run", "fedspa", "--set", "federation=3"], ["'federation' is no option of a run"]),
        (["run", "fedspa", "--set", "method=local"], ["'method' is no option of a run"]),
        (["compare", "fedspa", "--set", "seeds=3"], ["'seeds' is no option of a run", "--seeds"]),
        (["compare", "fedspa", "fedspa"], ["a method twice", "fedspa:density=0.2"]),
        (["compare", "fedspa", "fedspa:search=dst"], ["fedspa and fedspa:search=dst are the same method"]),
        (["compare", "fedspa", "fedavg:seed=3"], ["'fedavg:seed=3' sets seed for one method alone", "set it for all"]),
        (["compare", "fedspa", "fedavg:partition=iid"], ["sets partition for one method alone"]),
        (["compare", "fedspa", "fedavg:eval_clients=2"], ["sets eval_clients for one method alone"]),
        (["compare", "fedspa", "--seeds", "0"], ["no seeds", "at least one"]),
        (["compare", "fedspa", "--set", "seed=abc"], ["seed = 'abc'", "a whole number"]),
        (["compare", "fedspa", "--seed", "-1"], ["seed = -1", "greater than or equal to 0"]),
        (["resume", "nowhere"], ["there is no run 'nowhere'", "`sparsona runs` lists"]),
        (["report", "nowhere"], ["there is no run 'nowhere'", "`sparsona runs` lists"]),
        (["resume", "."], ["'.' is not a run", "config.json", "`sparsona runs` lists"]),
        (["report", "."], ["'.' is not a run"]),
        (
            ["compare", "fedspa:density=0.2", "--set", "bogus=3"],
            ["unknown option of fedspa 'bogus'", "`sparsona methods fedspa`"],
        ),
    ],
    ids=lambda value: (
        " ".join(value) if value and value[0] in ("run", "compare", "resume", "report", "methods") else ""
    ),
)
def test_refused(say, tmp_path, monkeypatch, args, words):
    monkeypatch.setattr("sparsona.experiment.train.Session.play", None)  # nothing of this may get as far as training
    say(*args).refused(*words)
    assert list(tmp_path.iterdir()) == []  # a refusal makes no folder


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["run", "fedspa", "--cliens", "3"], ["No such option '--cliens'", "Did you mean '--clients'?"]),
        (["run", "fedspa", "--learning-rate", "1"], ["No such option '--learning-rate'", "Did you mean '--lr'?"]),
        (["run", "fedavg", "--num-models", "2"], ["Did you mean '--set num_models=VALUE', an option of fedem?"]),
        (["run", "fedavg", "--patience", "2"], ["Did you mean '--set patience=VALUE'?"]),
        (
            ["run", "fedavg", "--seeds", "2"],
            ["No such option '--seeds'. `sparsona compare` has it; here it is '--seed'"],
        ),
        (["rnu", "fedspa"], ["No such command 'rnu'", "Did you mean 'run'?"]),
        (["run"], ["Missing argument 'METHOD'"]),
        (["run", "fedspa", "--rounds", "many"], ["Invalid value for '--rounds'", "'many'"]),
        (["report"], ["Missing argument 'RUN...'"]),
        (["run", "fedspa", "local"], ["unexpected extra argument"]),
    ],
)
def test_refused_by_the_shape_of_the_command(say, args, words):
    say(*args).refused(*words, code=2)


def test_several_mistakes_in_a_config_file_at_once(say, tmp_path):
    (tmp_path / "c.toml").write_text(
        "rounds = -1\ndensity = 1.5\nclientz = 4\nper-round = 3\n[options]\nserach = 'rsm'\n"
    )
    said = say("run", "fedspa", "--config", "c.toml", "--lr", "-1")
    said.refused(
        "error: 5 mistakes",
        "unknown option of fedspa 'clientz'",
        "did you mean 'clients'?",
        "unknown option of fedspa 'serach'",
        "did you mean 'search'?",
        "rounds = -1",
        "density = 1.5",
        "lr = -1.0",
    )
    (tmp_path / "c.toml").write_text("out = 'somewhere'\n")
    say("run", "fedspa", "--config", "c.toml").refused("'out' is no option of a run")
    (tmp_path / "c.toml").write_text("rounds 3\n")
    say("run", "fedspa", "--config", "c.toml").refused("config file 'c.toml' cannot be read", "line 1")


def test_debug_shows_the_traceback(say, capsys):
    with pytest.raises(sp.SparsonaError, match="unknown method 'fedsap'"):
        say("run", "fedsap", "--debug")
    with pytest.raises(sp.SparsonaError, match="unknown method 'fedsap'"):
        say("--debug", "run", "fedsap")


def test_what_nobody_foresaw(say, monkeypatch):
    """A fault of ours is called one."""
    monkeypatch.setattr("sparsona.experiment.train.train", lambda *_args, **_options: 1 // 0)
    said = say("run", "fedspa")
    assert said.code == 70
    assert "error: ZeroDivisionError" in said.err
    assert "this is a bug: run again with --debug" in said.err
    assert "Traceback" not in said.err
    with pytest.raises(ZeroDivisionError):
        say("--debug", "run", "fedspa")


def test_a_client_without_data(say, tmp_path):
    holder = np.arange(1797) % 5
    holder[holder == 3] = -1
    np.save(tmp_path / "who.npy", holder)
    say("run", "fedavg", "--clients", 5, "--partition", "file:who.npy").refused(
        "client 3 has no examples", "leave this client out"
    )
    x, y = torch.zeros(4, 3), torch.tensor([0, 1, 0, 1])
    none = torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)
    with pytest.raises(sp.SparsonaError, match="client 1 has no train examples\n  expected: at least one"):
        sp.Federation.from_clients([(x, y, x, y), (*none, x, y)])
    with pytest.raises(sp.SparsonaError, match="no client has test examples"):
        sp.Federation.from_clients([(x, y, *none), (x, y, *none)])


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([1, 2, 3] * 10, "labels from 1 to 3"),
        ([0, 1, 3] * 10, "never occur, the first is 2"),
        ([0, 1, -1] * 10, "labels -1 are outside the range"),
        ([0.0, 1.0, 2.0] * 10, "labels of type float"),
        ([True, False, True] * 10, "labels of type bool"),
    ],
)
def test_labels_that_are_not_0_to_c(labels, words):
    with pytest.raises(sp.SparsonaError, match=words) as caught:
        sp.federate(np.zeros((30, 4), dtype=np.float32), np.array(labels), clients=2, min_size=2)
    assert caught.value.expected
    assert caught.value.hint


def test_labels_that_are_true_or_false():
    x, y = np.zeros((30, 4), dtype=np.float32), np.arange(30) % 2 == 0
    with pytest.raises(sp.SparsonaError, match=r"type bool\n(.|\n)*hint: +task=\"binary\""):
        sp.federate(x, y, clients=2)
    with pytest.raises(sp.SparsonaError, match=r"shape \(30, 2\)\n(.|\n)*hint: +task=\"multilabel\": each column"):
        sp.federate(x, np.stack([y, ~y], axis=1), clients=2)
    sp.federate(x, y, clients=2, task="binary")
    sp.federate(x, np.stack([y, ~y], axis=1), clients=2, task="multilabel", partition="iid")
    federation = sp.federate(x, y.astype(int), clients=2)
    with pytest.raises(sp.SparsonaError, match=r"hint: (.*); or use task=\"binary\""):
        sp.train("fedavg", federation, torch.nn.Linear(4, 1), rounds=1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_in_data(bad):
    x = np.zeros((30, 4), dtype=np.float32)
    x[17, 2] = bad
    with pytest.raises(
        sp.SparsonaError, match="NaN or infinity in 1 of 30 examples, the first is example 17"
    ) as caught:
        sp.federate(x, np.arange(30) % 3, clients=2, min_size=2)
    assert caught.value.hint


def test_training_that_diverges(say, tmp_path):
    said = say("run", "fedspa", *small(tmp_path, out="run"), "--lr", "1e30", "--set", "clip_norm=none")
    # Every client does, in every round: the default leaves nobody to go on with.
    said.refused(
        "the training of every client diverged", "in round 1", "finite numbers", "lower the learning rate (--lr)"
    )
    (row,) = json.loads(say("runs", "--in", ".", "--json").out)
    assert row["state"] == "unfinished: resume it"
    say("resume", "run").refused("the training of every client diverged")
    assert say("report", "run").code == 0  # of the rounds in which nobody learned anything


def poisoned_federation() -> sp.Federation:
    """Client 2 holds numbers so large that its first turn overflows."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(4, 30, 6, generator=generator), torch.arange(30) % 3
    x[2] *= 1e30  # whose squares are infinite
    return sp.Federation.from_clients([(x[k, :20], y[:20], x[k, 20:], y[20:]) for k in range(4)])


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, inputs):
        return self.linear(inputs * inputs)


@pytest.mark.parametrize("method", ["fedavg", "fedspa", "local"])
def test_a_client_that_diverges_later_spoils_no_round_before(tmp_path, method):
    federation, path = poisoned_federation(), tmp_path / "run"
    options = {"rounds": 12, "per_round": 1, "epochs": 1, "seed": 1, "executor": "serial", "on_divergence": "stop"}

    net = Squares
    with pytest.raises(sp.SparsonaError, match=r"client 2's .* in round [2-9]") as caught:
        sp.train(method, federation, net, out=path, **options)
    assert caught.value.hint
    reached = completed(path)
    assert reached >= 1
    run = sp.load(path, federation, net)
    assert run.summary["rounds"] == reached
    assert np.isfinite(run.accuracies()).all()
    assert all(bool(p.isfinite().all()) for p in run.personal_model(0).parameters())
    assert run.report(tmp_path / "page.html").exists()
    before = (path / "checkpoint" / "manifest.json").read_bytes()
    with pytest.raises(sp.SparsonaError, match="client 2's"):
        sp.resume(path, federation, net)
    after = json.loads((path / "checkpoint" / "manifest.json").read_bytes())
    assert after["files"] == json.loads(before)["files"]


class Spiteful(nn.Module):
    """Its loss is finite and its gradient is not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.extra = nn.Parameter(torch.zeros(()))

    def forward(self, inputs):
        return self.linear(inputs) + self.extra.sqrt()


@pytest.mark.parametrize("method", ["fedavg", "fedspa"])
def test_nan_in_an_update(tmp_path, method):
    federation = poisoned_federation()
    options = {"rounds": 2, "epochs": 1, "batch_size": 64, "seed": 1, "on_divergence": "stop"}
    with pytest.raises(sp.SparsonaError, match="client 1's weights are not finite in round 1") as caught:
        sp.train(method, federation, Spiteful, out=tmp_path, executor="serial", **options)
    assert "numbers" in caught.value.expected
    assert "lower the learning rate" in caught.value.hint


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    options = {"clients": 5, "per_round": 2, "epochs": 1, "batch_size": 10, "rounds": 3, "executor": "serial"}
    partition = small(folder)[1]
    sp.train("fedspa", out=folder / "run", partition=partition, max_seconds=1e-9, **options)
    assert completed(folder / "run") == 1
    return folder / "run"


@pytest.fixture
def run(stopped, say, tmp_path) -> Path:
    """A run of which one round of three is done."""
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def test_an_out_that_is_used(say, tmp_path, run):
    before = traces(run)
    for args in (["run", "fedspa", *small(tmp_path, out="run")], ["compare", "fedspa", *small(tmp_path, out="run")]):
        say(*args).refused("'run' is already used", "a folder that does not exist yet", "choose another --out")
    assert traces(run) == before
    (tmp_path / "file").write_text("mine")
    for out in ("file", "file/below"):
        for command in ("run", "compare"):
            say(command, "fedspa", *small(tmp_path, out=out)).refused(out, "choose another")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("command", ["run", "compare"])
def test_an_out_that_cannot_be_written(say, tmp_path, monkeypatch, command):
    """As root, who tests in containers, may write anywhere, the refusal is played."""
    (tmp_path / "closed").mkdir(mode=0o500)
    args = [command, "fedspa", *small(tmp_path, out="closed/run")]
    if not os.geteuid():

        def refuse(*_args, **_options):
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(os, "mkdir", refuse)
    say(*args).refused("'closed/run' cannot be written: Permission denied", "choose another folder with --out")


def test_a_run_in_use(say, tmp_path, run):
    with RunFolder.open(run):
        say("resume", "run").refused("'run' is in use by another process", "wait for it")
        assert say("runs", "--in", ".").code == 0
        assert say("report", "run").code == 0  # reading is free
    assert say("resume", "run", "--json").code == 0


def spoil(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "truncated": data[: len(data) // 2], "garbage": b"\x00garbage" * 40}[how])


def checkpoint_file(run: Path, owner: str) -> Path:
    files = json.loads((run / "checkpoint" / "manifest.json").read_text())["files"]
    return run / "checkpoint" / next(entry for name, entry in files.items() if name.startswith(owner)).split()[0]


@pytest.mark.parametrize("how", ["missing", "empty", "truncated", "garbage"])
@pytest.mark.parametrize(
    "name",
    ["server", "client", "manifest.json", "config.json", "about.json", "environment.json", "records.sqlite"],
)
def test_a_damaged_run(say, stopped, run, name, how):
    """The damaged file is named, nothing is made anew over it, and with the file back the run goes on."""
    if name in ("server", "client"):
        path = checkpoint_file(run, name)
    else:
        path = run / "checkpoint" / name if name == "manifest.json" else run / name
    spoil(path, how)
    damaged = {file: file.read_bytes() for file in run.rglob("*") if file.is_file() and "records" not in file.name}
    said = say("resume", "run")
    said.refused("'run" if name == "config.json" and how == "missing" else path.name, "hint:")
    assert {file: file.read_bytes() for file in damaged} == damaged
    assert say("runs", "--in", ".").code == 0
    if how == "truncated":
        shutil.copy(stopped / path.relative_to(run), path)
        assert say("resume", "run", "--json").code == 0
        assert completed(run) == 2


def test_a_finished_run_whose_records_are_gone(say, tmp_path):
    """Its summary must not be worked out anew from nothing."""
    say("run", "fedavg", *small(tmp_path, out="run"), "--json")
    summary = (tmp_path / "run" / "summary.json").read_bytes()
    (tmp_path / "run" / "records.sqlite").unlink()
    say("resume", "run").refused("records.sqlite' is missing")
    assert (tmp_path / "run" / "summary.json").read_bytes() == summary


@pytest.mark.parametrize("name", ["about.json", "checkpoint/manifest.json"])
def test_another_format(say, run, name):
    path = run / name
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 7}))
    ours = "expected: format 2" if name == "about.json" else "expected: format 1"
    say("resume", "run").refused("format 7", ours, "use the version of sparsona named in")
    if name == "about.json":
        say("report", "run").refused("format 7", ours)


def test_a_run_of_a_method_or_with_an_option_we_do_not_have(say, run):
    path = run / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "telepathy": 1}))
    say("resume", "run").refused("was edited after the run was made: telepathy")
    path.write_text(json.dumps({**config, "method": "fedspb"}))
    say("resume", "run").refused("was edited after the run was made: method")
    path.write_text(json.dumps({**config, "options": {**config["options"], "telepathy": 1}}))
    say("resume", "run").refused("was edited after the run was made: options.telepathy")


def test_other_data_or_another_model(say, tmp_path, run):
    path = run / "config.json"
    config = json.loads(path.read_text())
    facts = json.loads((run / "about.json").read_text())
    (run / "about.json").write_text(json.dumps({**facts, "config": {}}))  # as in folders of older versions
    unseal(run)
    path.write_text(json.dumps({**config, "partition": "iid"}))
    say("resume", "run").refused("the data is not that of 'run'", "the same examples, labels and splits")
    path.write_text(json.dumps({**config, "method": "fedspb"}))
    say("resume", "run").refused("was made with fedspb, which is not installed")
    (tmp_path / "own").mkdir()
    federation = poisoned_federation()
    sp.train("fedavg", federation, nn.Linear(6, 3), out=tmp_path / "own" / "run", rounds=1, per_round=1, seed=1)
    say("resume", "own/run").refused("was started from Python on its own data", "sparsona.resume")


@pytest.mark.parametrize("content", ["", "{}", "[]", "[3]", '[{"folder": "x"}]', '[{"folder": "x", "config": {}}]'])
def test_a_damaged_comparison(say, tmp_path, content):
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "comparison.json").write_text(content)
    say("resume", "both").refused("comparison.json")


def test_lists_survive_a_damaged_run(say, run):
    (run / "config.json").write_text("{")
    said = say("runs", "--in", ".")
    assert said.code == 0
    assert "damaged: " in said.out


def test_hints_are_written_as_options_of_the_shell(say):
    np.savez("rows.npz", x=np.zeros((8, 3), np.float32), y=np.eye(8, 3, dtype=np.int64))
    found = say("run", "local", "--data", "rows.npz", "--rounds", 1)
    assert "--set task=multilabel" in found.err
    assert 'task="' not in found.err
