"""`resume --rounds`: a run that is given more rounds is one that always had them; and edited configs are noticed."""

from __future__ import annotations

import json
from dataclasses import astuple

import pytest
from older import unseal

import sparsona as sp
from sparsona.core.errors import SparsonaError
from sparsona.core.tree import leaves
from sparsona.experiment import train
from sparsona.runs.folder import RunFolder
from sparsona.runs.manifest import MANIFEST

OPTIONS = {"clients": 4, "epochs": 1, "data_rate": 0.1, "device": "cpu", "executor": "serial", "eval_every": 5}
OPTIONS |= {"tune_epochs": 1, "model": "mlp:hidden=0"}


def everything(run: sp.Run) -> list[object]:
    """What a run leaves behind, but for what its clock says."""
    records = run._folder.records
    rounds = [astuple(row)[:-1] for row in records.rounds()]
    weights = [tensor.tolist() for _, tensor in leaves(dict(run.personal_model(2).named_parameters()))]
    rest = [records.turns(), records.evaluations(), records.evaluation_traffic(), run.summary["accuracy"], weights]
    model = run.path / "global.safetensors"
    return [rounds, *rest, model.read_bytes() if model.exists() else b"", run.config["rounds"]]


@pytest.mark.parametrize("method", ["fedavg", "dpsgd"])
def test_it_is_the_run_that_had_them_from_the_start(method, tmp_path, capsys):
    whole = sp.train(method, out=tmp_path / "whole", rounds=12, **OPTIONS)
    sp.train(method, out=tmp_path / "part", rounds=11, **OPTIONS)
    part = sp.resume(tmp_path / "part", rounds=12)
    assert everything(part) == everything(whole)
    assert "warning" not in capsys.readouterr().err
    assert "Rounds were added to the 11 it had, up to 12." in part.summary["protocol"]
    assert everything(sp.load(tmp_path / "part")) == everything(whole)


def test_a_run_that_was_stopped_and_killed_while_rounds_were_added(tmp_path, monkeypatch, say):
    whole = sp.train("fedavg", out=tmp_path / "whole", rounds=3, **OPTIONS)
    sp.train("fedavg", out=tmp_path / "part", rounds=2, **OPTIONS)
    write = RunFolder.extend

    def killed(folder, rounds, facts):
        folder.learn(facts)
        raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "extend", killed)
    with pytest.raises(KeyboardInterrupt):
        sp.resume(tmp_path / "part", rounds=3)
    monkeypatch.setattr(RunFolder, "extend", write)
    assert sp.resume(tmp_path / "part").summary["rounds"] == 2
    said = say("resume", "part", "--rounds", 3, "--json")
    assert said.code == 0
    assert json.loads(said.out)["rounds"] == 3
    assert everything(sp.load(tmp_path / "part")) == everything(whole)


def test_what_follows_a_runs_progress_is_named(tmp_path, capsys):
    options = OPTIONS | {"tune_epochs": 0, "lr_schedule": "linear:0.1"}
    sp.train("fedspa", out=tmp_path / "run", rounds=2, **options)
    run = sp.resume(tmp_path / "run", rounds=3)
    assert "lr_schedule and prune_rate follow a run's progress" in capsys.readouterr().err
    assert "up to 3, of which lr_schedule and prune_rate followed the progress of each." in run.summary["protocol"]
    found = RunFolder.open(run.path).facts.extensions
    assert [(one.rounds, one.total, one.changed) for one in found] == [(2, 3, ("lr_schedule", "prune_rate"))]
    with pytest.raises(SparsonaError, match="which has 3 already"):
        sp.resume(run.path, rounds=3)


def test_a_comparison_is_refused(tmp_path, say):
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "comparison.json").write_text("[]")
    say("resume", "both", "--rounds", 3).refused("--rounds for a comparison")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("edited") / "run"
    sp.train("fedavg", out=path, rounds=1, max_seconds=60, **OPTIONS)
    return path


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda config: config | {"rounds": 5, "seed": 3}, "rounds, seed"),
        (lambda config: config | {"options": config["options"] | {"lr": 0.5}}, "options.lr"),
        (lambda config: {key: value for key, value in config.items() if key != "eval_every"}, "eval_every"),
    ],
)
def test_an_edited_config_is_noticed(small, edit, named):
    path = small / "config.json"
    before = path.read_text()
    path.write_text(json.dumps(edit(json.loads(before))))
    try:
        for act in (train.load, train.resume):
            with pytest.raises(SparsonaError, match=f"was edited after the run was made: {named}\n") as said:
                act(small)
            assert "resume RUN --rounds N" in str(said.value)
    finally:
        path.write_text(before)


def test_limits_of_a_session_and_older_runs_are_not_checked(small):
    config, about = small / "config.json", small / "about.json"
    texts, manifest = (config.read_text(), about.read_text()), (small / MANIFEST).read_bytes()
    try:
        config.write_text(json.dumps(json.loads(texts[0]) | {"max_seconds": None}, indent=1))
        assert sp.load(small).summary["rounds"] == 1
        facts = json.loads(texts[1])
        del facts["config"], facts["extensions"], facts["availability"]
        about.write_text(json.dumps(facts))
        unseal(small)
        config.write_text(json.dumps(json.loads(texts[0]) | {"eval_every": 7}))
        assert sp.load(small).summary["rounds"] == 1
    finally:
        config.write_text(texts[0])
        about.write_text(texts[1])
        (small / MANIFEST).write_bytes(manifest)
