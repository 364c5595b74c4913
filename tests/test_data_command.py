"""`sparsona data`: lists, pictures, and data sets of every kind through a whole run."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

import sparsona as sp
from sparsona import cli, prepare
from sparsona.core.errors import SparsonaError


def invoke(*words):
    return CliRunner().invoke(cli.cli, [str(word) for word in words], catch_exceptions=False)


def test_the_list_has_data_partitions_and_tests():
    found = json.loads(invoke("data", "--json").stdout)
    assert {"digits", "cifar10", "femnist", "stackoverflow"} <= {row["name"] for row in found["data"]}
    assert {"natural", "pathological:C", "groups:G:A"} <= {row["partition"] for row in found["partitions"]}
    assert {"split", "shares:N", "natural"} <= {row["test"] for row in found["tests"]}
    assert "sparsona data get NAME" in invoke("data").stdout


def test_a_partition_is_shown_drawn_and_told(tmp_path):
    options = ("data", "show", "digits", "--clients", 6, "--partition", "pathological:2", "--seed", 4)
    shown = invoke(*options, "--out", tmp_path / "shares.svg")
    assert "6 clients" in shown.stdout
    assert (tmp_path / "shares.svg").read_text().startswith("<svg")
    found = json.loads(invoke(*options, "--json").stdout)
    assert sum(map(sum, (found["train"], found["validation"], found["test"]))) == 1797
    assert all(sum(count > 0 for count in row) == 2 for row in found["label_counts"])
    # What is shown is what a run would use.
    config = prepare.make_config("local", {"clients": 6, "partition": "pathological:2", "seed": 4})
    assert prepare.read_data(config).sizes()[:, 0].tolist() == found["train"]


def test_options_that_say_nothing_about_data_are_refused():
    with pytest.raises(SparsonaError, match="'rounds' says nothing about data"):
        invoke("data", "show", "digits", "--set", "rounds=3")


@pytest.fixture
def people(tmp_path):
    """Images of bytes by seven writers, with a published test set of the same writers."""
    rng = np.random.default_rng(0)
    owners = np.repeat(np.arange(7), np.arange(7) * 4 + 12)
    y = np.arange(len(owners)) % 3
    x = (rng.integers(100, size=(len(y), 1, 8, 8)) + 50 * y[:, None, None, None]).astype(np.uint8)
    path = tmp_path / "people.npz"
    arrays = {"x_train": x, "y_train": y, "owners_train": owners, "x_test": x, "y_test": y, "owners_test": owners}
    np.savez(path, **arrays)
    return path


def test_a_run_on_people(people, tmp_path):
    options = {"data": f"arrays:{people}", "partition": "natural", "model": "digits-cnn", "executor": "serial"}
    run = sp.train("fedspa", out=tmp_path / "run", rounds=2, epochs=1, min_train=15, **options)
    about = json.loads((tmp_path / "run" / "config.json").read_text())
    assert about["clients"] == 5  # two have too few: 12 and 16, less one and two for validation
    assert "published for it" in run.protocol
    again = sp.load(tmp_path / "run")
    assert again.accuracies().tolist() == run.accuracies().tolist()
    assert len(run.accuracies()) == 5


def test_a_run_with_crops_says_so_and_is_repeatable(people, tmp_path):
    options = {"data": f"arrays:{people}", "partition": "iid", "clients": 3, "model": "digits-cnn"}
    options |= {"augment": True, "rounds": 2, "epochs": 1}
    runs = [sp.train("fedavg", out=tmp_path / name, executor=name, **options) for name in ("serial", "workers")]
    assert runs[0].accuracies().tolist() == runs[1].accuracies().tolist()
    assert "cropped and mirrored at random" in runs[0].protocol
    weights = [[p.detach().numpy().tobytes() for p in run.personal_model(0).parameters()] for run in runs]
    assert weights[0] == weights[1]
    plain = sp.train("fedavg", out=tmp_path / "plain", executor="serial", **options | {"augment": False})
    assert "cropped" not in plain.protocol
    assert [p.detach().numpy().tobytes() for p in plain.personal_model(0).parameters()] != weights[0]


@pytest.fixture
def plays(tmp_path):
    words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "runs", "away", "here"]
    rng = np.random.default_rng(0)
    turns = [f"{name}:\n{' '.join(rng.choice(words, 40))}.\n" for name in ("Ann", "Bob", "Cid") for _ in range(6)]
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "input.txt").write_text("\n".join(turns))
    return tmp_path


def test_a_run_on_text_asks_for_the_next_token(plays, tmp_path):
    options = {"data": "shakespeare-words", "data_dir": str(plays), "partition": "natural", "sequence_length": 8}
    run = sp.train("fedavg", out=tmp_path / "run", rounds=1, epochs=2, lr=0.5, executor="serial", **options)
    assert len(run.accuracies()) == 3
    assert "tokens" in run.protocol
    assert run.summary["accuracy"]["mean"] > 0.05  # of 12 words, one is twice as frequent
    page = run.report(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "3 clients" in page
    for method in ("shards:2", "dirichlet:0.3"):
        with pytest.raises(SparsonaError):
            sp.train("fedavg", out=tmp_path / "no", **options | {"partition": method, "clients": 2})


def test_absent_data_is_told_in_one_message(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSONA_DATA", str(tmp_path / "cache"))
    with pytest.raises(SparsonaError) as error:
        sp.train("fedavg", data="cifar10", data_dir=str(tmp_path), out=tmp_path / "run")
    message = str(error.value)
    for word in ("data_batch_1", str(tmp_path), str(tmp_path / "cache"), "sparsona data get cifar10"):
        assert word in message
    assert not (tmp_path / "run").exists()
