"""`sparsona data`: lists, pictures, and data sets of every kind through a whole run."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import sparsona as sp
from sparsona.cli import app as cli
from sparsona.core.errors import SparsonaError
from sparsona.experiment import build


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
    config = build.make_config("local", {"clients": 6, "partition": "pathological:2", "seed": 4})
    assert build.read_data(config).sizes()[:, 0].tolist() == found["train"]


def test_options_that_say_nothing_about_data_are_refused():
    with pytest.raises(SparsonaError, match="'rounds' is not an option of the data"):
        invoke("data", "show", "digits", "--set", "rounds=3")


def test_the_protocol_says_that_clients_were_drawn_unless_they_are_owners(tmp_path):
    rng = np.random.default_rng(0)
    x, y, owners = rng.random((120, 4), dtype=np.float32), np.arange(120) % 3, np.repeat(["a", "b", "c", "d"], 30)
    np.savez(tmp_path / "nobody.npz", x=x, y=y)
    np.savez(tmp_path / "owned.npz", x=x, y=y, owners=owners)

    def told(source, *words):
        run = ("run", "fedavg", "--data", tmp_path / source, "--rounds", 1, "--out", tmp_path / f"run{len(texts)}")
        return invoke(*run, *words).stdout.partition("How this was measured:\n")[2]

    texts = []
    texts.append(told("nobody.npz", "--clients", 3))
    assert "  clients: The 3 clients were drawn from all examples by partition dirichlet:0.3.\n" in texts[0]
    texts.append(told("owned.npz"))
    assert texts[1]
    assert "drawn from" not in texts[1]
    texts.append(told("owned.npz", "--clients", 1, "--partition", "iid"))
    assert "  clients: The 1 client was drawn from all examples by partition iid.\n" in texts[2]
    sp.federate(x, y, clients=4, partition="shards:2").save(tmp_path / "saved")
    made = sp.Federation.open(tmp_path / "saved")
    run = sp.train("fedavg", made, rounds=1, out=tmp_path / "made")
    assert "The 4 clients were drawn from all examples by partition shards:2." in run.protocol
    own = sp.train("fedavg", sp.Federation.from_clients([(x, y), (x, y)]), rounds=1, out=tmp_path / "own")
    assert "drawn from" not in own.protocol


@pytest.fixture
def people(tmp_path):
    """Images of bytes by seven writers, and half as many that were published to test on, of the same writers."""
    rng = np.random.default_rng(0)
    arrays = {}
    for part, times in (("train", 4), ("test", 2)):
        owners = np.repeat(np.arange(7), (np.arange(7) + 3) * times)
        y = np.arange(len(owners)) % 3
        x = (rng.integers(100, size=(len(y), 1, 8, 8)) + 50 * y[:, None, None, None]).astype(np.uint8)
        arrays |= {f"x_{part}": x, f"y_{part}": y, f"owners_{part}": owners}
    path = tmp_path / "people.npz"
    np.savez(path, **arrays)
    return path


def test_a_run_on_people(people, tmp_path):
    options = {"data": f"arrays:{people}", "partition": "natural", "model": "digits-cnn", "executor": "serial"}
    run = sp.train("fedspa", out=tmp_path / "run", rounds=2, epochs=1, min_train=17, **options)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["clients"] == 5  # two have too few: 12 and 16
    about = json.loads((tmp_path / "run" / "about.json").read_text())
    assert about["left_out"] == {"fewer than 17 to train on (min_train)": 2}
    assert "published for it" in run.protocol
    # Tested on what was published for that, and on nothing that was trained on.
    federation = build.read_data(build.make_config("fedspa", options | {"min_train": 17}))
    assert federation.digest() == about["federation"]
    assert federation.sizes()[:, 2].tolist() == [10, 12, 14, 16, 18]
    trained, tested = (
        {image.numpy().tobytes() for k in range(5) for part in parts for image in federation.examples(k, part).inputs}
        for parts in (("train", "validation"), ("test",))
    )
    assert len(trained) == 20 + 24 + 28 + 32 + 36
    assert len(tested) == 70
    assert not trained & tested
    again = sp.load(tmp_path / "run")
    assert again.accuracies().tolist() == run.accuracies().tolist()
    assert len(run.accuracies()) == 5


def test_a_run_with_crops_says_so_and_is_repeatable(people, tmp_path, forked_workers):
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
    for partition in ("shards:2", "dirichlet:0.3"):
        with pytest.raises(SparsonaError, match="goes by class, but these examples are sequences"):
            sp.train("fedavg", out=tmp_path / "no", **options | {"partition": partition, "clients": 2})


def test_windows_as_leaf_cuts_them_leak_nothing(tmp_path, monkeypatch):
    """Two roles with texts in which no character occurs twice, and one of whom only training examples are published."""
    monkeypatch.setenv("SPARSONA_DATA", str(tmp_path / "cache"))
    windows = {}
    for role, (start, count) in enumerate([(200, 90), (400, 60), (200, 266)]):
        text = "".join(map(chr, range(start, start + count + 6)))
        windows[f"role {role}"] = [(text[i : i + 6], text[i + 6]) for i in range(count)]
    last = windows.pop("role 2")
    for part, rows in (("train", slice(50)), ("test", slice(56, None))):
        data = {
            name: {"x": [x for x, _ in found[rows]], "y": [y for _, y in found[rows]]}
            for name, found in windows.items()
        }
        if part == "train":
            data["role 2"] = {"x": [x for x, _ in last], "y": [y for _, y in last]}
        (tmp_path / "shakespeare" / part).mkdir(parents=True)
        content = {"users": list(data), "num_samples": [], "user_data": data}
        (tmp_path / "shakespeare" / part / "all.json").write_text(json.dumps(content))
    options = {"data": "shakespeare", "data_dir": str(tmp_path), "partition": "natural"}
    for more in ({}, {"test": "split"}, {"test": "split-train"}, {"sequence_length": 3}):
        federation = build.read_data(build.make_config("local", options | more))
        assert federation.num_clients == (3 if "test" in more else 2)
        assert federation.left_out == ({} if "test" in more else {"no published test examples": 1})
        for client in range(federation.num_clients):
            seen = []
            for part in ("train", "validation", "test"):
                examples = federation.examples(client, part)
                assert len(examples.targets)
                seen.append({*examples.inputs.flatten().tolist(), *examples.targets[:, -1].tolist()})
            assert not seen[0] & seen[1]
            assert not seen[2] & (seen[0] | seen[1])
    with pytest.raises(SparsonaError, match="whose examples overlap"):
        build.read_data(build.make_config("local", options | {"partition": "iid", "clients": 2}))


def test_a_run_is_resumed_from_another_folder(people, tmp_path, monkeypatch):
    """Paths of one's own data, of a partition's file and of the data folder hold from anywhere."""
    (tmp_path / "elsewhere").mkdir()
    owners = np.arange(3 * 4 + 4 * 4 + 5 * 4 + 6 * 4 + 7 * 4 + 8 * 4 + 9 * 4) % 4
    np.save(tmp_path / "four.npy", owners)
    monkeypatch.chdir(tmp_path)
    options = {"data": f"arrays:{people.name}", "partition": "file:four.npy", "data_dir": "."}
    run = sp.train("fedavg", rounds=1, epochs=1, model="digits-cnn", executor="serial", **options)
    assert run.path.parent == Path("runs")  # a folder, named after the file, and no folders in it
    assert run.path.name.startswith("fedavg-people-seed0-")
    config = json.loads((run.path / "config.json").read_text())
    assert config["clients"] == 4  # the file says so
    assert config["data"] == f"arrays:{people}"
    assert config["partition"] == f"file:{tmp_path / 'four.npy'}"
    assert config["data_dir"] == str(tmp_path)
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = sp.resume(tmp_path / run.path)
    assert again.accuracies().tolist() == sp.load(tmp_path / run.path).accuracies().tolist()


def test_absent_data_is_told_in_one_message(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSONA_DATA", str(tmp_path / "cache"))
    with pytest.raises(SparsonaError) as error:
        sp.train("fedavg", data="cifar10", data_dir=str(tmp_path), out=tmp_path / "run")
    message = str(error.value)
    for word in ("data_batch_1", str(tmp_path), str(tmp_path / "cache"), "sparsona data get cifar10"):
        assert word in message
    assert not (tmp_path / "run").exists()


def test_folders_and_names_are_checked_before_any_work(tmp_path, say):
    assert "there is no folder" in say("data", "show", "digits", "--out", "nowhere/x.svg").err
    assert "ends in .svg or .png" in say("data", "show", "digits", "--out", "x.pdf").err
    assert "unknown data set" in say("data", "show", "digit").err
    assert "there is no folder" in say("run", "local", "--data-dir", "nowhere").err


def test_text_is_by_speaker_unless_one_says_otherwise(plays):
    options = {"data": "shakespeare", "data_dir": str(plays)}
    assert build.make_config("local", options).partition == "natural"
    assert build.make_config("local", options | {"partition": "iid"}).clients == 20
    assert build.make_config("local", {"data": "digits"}).partition == "dirichlet:0.3"
