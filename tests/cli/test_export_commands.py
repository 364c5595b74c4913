"""`sparsona export` and `evaluate`."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.torch import load_file

import sparsona as sp
from sparsona.cli.app import cli
from sparsona.core.errors import SparsonaError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("exports")
    sp.train("fedspa", out=path / "runs" / "spa", clients=4, rounds=1, data_rate=0.3, model="mlp")
    return path


@pytest.fixture
def call(folder, monkeypatch):
    monkeypatch.chdir(folder)

    def call(*args):
        return CliRunner().invoke(cli, args, catch_exceptions=False).output

    return call


def test_export(call, folder):
    text = call("export", "spa", "--client", "2")
    assert "spa-client-2.safetensors" in text
    assert "model card: spa-client-2.safetensors.md" in text
    assert "the run's network: 4,810 parameters, 19,240 bytes as float32" in text
    expected = sp.load(folder / "runs" / "spa").personal_model(2).state_dict()
    assert all((value == expected[name]).all() for name, value in load_file("spa-client-2.safetensors").items())
    with pytest.raises(SparsonaError, match="exists already"):
        call("export", "spa", "--client", "2")


def test_files_of_two_comparisons_have_two_names(call, folder, monkeypatch):
    """Their runs have folders of the same name."""
    quick = {"clients": 4, "rounds": 1, "data_rate": 0.2, "model": "mlp", "progress": False}
    for name in ("first", "second"):
        sp.compare(["fedavg", "local"], out=folder / "runs" / name, **quick)
        call("export", f"runs/{name}/fedavg-seed0", "--client", "3", "--no-card")
        call("export", f"{name}/fedavg-seed0", "--client", "all", "--no-card")
    found = {path.name for path in folder.iterdir()}
    assert {f"{name}-fedavg-seed0-client-3.safetensors" for name in ("first", "second")} <= found
    assert {f"{name}-fedavg-seed0-models" for name in ("first", "second")} <= found
    monkeypatch.chdir(folder / "runs" / "first" / "local-seed0")
    assert "first-local-seed0-client-1.safetensors" in call("export", ".", "--client", "1", "--no-card")


def test_export_several(call, folder):
    found = json.loads(call("export", "spa", "--client", "all", "--out", "all", "--no-card", "--sparse", "--json"))
    assert [one["client"] for one in found] == [0, 1, 2, 3]
    assert all(one["card"] is None and one["sizes"]["parameters_before"] == 4810 for one in found)
    names = sorted(path.name for path in (folder / "all").iterdir())
    assert names == [f"client-{k}.safetensors" for k in range(4)]
    call("export", "spa", "--client", "1", "--client", "3", "--out", "two")
    assert sorted(path.name for path in (folder / "two").iterdir())[::2] == [
        "client-1.safetensors",
        "client-3.safetensors",
    ]
    assert "shared" in call("export", "spa", "--global", "--out", "shared.safetensors")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "no model named"),
        (["--client", "0", "--global"], "both --client and --global"),
        (["--client", "9"], "no client 9"),
        (["--client", "x"], "no client 'x'"),
        (["--client", "0", "--out", "x.bin"], "no format has the suffix"),
    ],
)
def test_export_refuses(call, args, words):
    with pytest.raises(SparsonaError, match=words):
        call("export", "spa", *args)


def test_evaluate(call, folder):
    rng = np.random.default_rng(0)
    x, y = rng.random((30, 1, 8, 8), dtype=np.float32), rng.integers(0, 10, 30)
    np.savez(folder / "new.npz", x=x, y=y)
    np.savez(folder / "split.npz", x_train=x[:10] * 0, y_train=y[:10], x_test=x, y_test=y)
    expected = sp.load(folder / "runs" / "spa").evaluate(1, x, y)
    found = json.loads(call("evaluate", "spa", "--client", "1", "--data", "new.npz", "--json"))
    assert found == json.loads(json.dumps(expected.as_dict()))
    assert json.loads(call("evaluate", "spa", "--client", "1", "--data", "split.npz", "--json")) == found
    text = call("evaluate", "spa", "--client", "1", "--data", "new.npz")
    assert f"{expected.rows()[0]['accuracy']:.2%}" in text
    assert "recall" in text
    assert "predictions, true classes by row" in text
    several = call("evaluate", "spa", "--client", "all", "--global", "--data", "new.npz")
    assert "shared" in several
    assert "recall" not in several
    np.savez(folder / "wrong.npz", x=x[:, :, :7], y=y)
    for args, words in (
        (["--data", "new.npz"], "no model named"),
        (["--client", "0", "--data", "nowhere.npz"], "does not exist"),
        (["--client", "0", "--data", "wrong.npz"], "examples of shape"),
    ):
        with pytest.raises(SparsonaError, match=words):
            call("evaluate", "spa", *args)


def test_evaluate_writes_each_figure_as_the_table_does(call, folder):
    rng = np.random.default_rng(0)
    x, y = rng.random((12, 3), dtype=np.float32), np.arange(12) % 2
    federation = sp.Federation.from_clients({"north": (x, y), "south": (x, y)})
    sp.train("local", federation, rounds=1, metrics=["f1", "auc"], out=folder / "runs" / "named", device="cpu")
    np.savez(folder / "named.npz", x=x, y=y)
    row = sp.load(folder / "runs" / "named").evaluate("south", x, y).rows()[0]
    text = call("evaluate", "named", "--client", "south", "--data", "named.npz")
    line = next(line for line in text.splitlines() if "south" in line)
    assert (row["client"], row["name"]) == (1, "south")
    assert line.split()[:4] == ["1", "south", "12", f"{row['accuracy']:.2%}"]
    assert line.split()[-2:] == [f"{row['f1']:.2%}", f"{row['auc']:.4g}"]


def test_who_is_meant_by_a_number(say):
    x, y = np.random.default_rng(0).random((12, 3), dtype=np.float32), np.arange(12) % 2
    federation = sp.Federation.from_clients(dict.fromkeys(("person-1", "person-2", "1"), (x, y)))
    sp.train("local", federation, rounds=1, out="run", device="cpu")
    np.savez("new.npz", x=x, y=y)
    named = "client 0 is person-1\n"
    for command in (("evaluate", "run", "--data", "new.npz"), ("export", "run", "--out", "models")):
        assert (
            say(*command, "--client", "0", "--client", "person-1", "--client", "1").err == named
        )  # the last is a name
        shutil.rmtree("models", ignore_errors=True)
        assert say(*command, "--client", "all").err == ""
    assert say("evaluate", "run", "--client", "0", "--data", "new.npz").err == named
    assert say("export", "run", "--client", "0").err == named
