"""A server and its clients over a real link with mutual TLS, in threads of one process."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from federations import free_address
from safetensors.torch import load_file

import sparsona as sp
from sparsona.cli.app import cli
from sparsona.core.errors import SparsonaError
from sparsona.deploy.vault import Vault
from sparsona.experiment import client_data, client_side, server_side
from sparsona.experiment.terms import Terms
from sparsona.runs.records import Records

OPTIONS = {"rounds": 2, "epochs": 1, "per_round": 2, "seed": 3}


def command(*words: str) -> str:
    done = CliRunner().invoke(cli, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def new(method: str, model: str, shape: str, *more: str) -> None:
    words = f"federation new fed.toml --method {method} --model {model} --classes 10 --input {shape}"
    command(*words.split(" "), *more)


def admit(name: str) -> None:
    command("keys", "new", name)
    command("federation", "admit", "fed.toml", f"{name}.pub")


@pytest.fixture
def address() -> str:
    return free_address()


@pytest.mark.long
def test_a_run_over_a_link_is_its_simulation(tmp_path, monkeypatch, address):
    monkeypatch.chdir(tmp_path)
    new("fedspa", "digits-cnn", "1x8x8", *(f"--set={key}={value}" for key, value in OPTIONS.items()))
    models, threads = {}, []

    def client(index: int, ready: threading.Event) -> None:
        def report(text: str) -> None:
            if "looking for" in text:
                ready.set()

        own = {"key": f"site-{index}.key", "vault": f"vault/site-{index}"}
        models[index] = client_side.join("fed.toml", "digits", connect=[address], report=report, **own)

    for index in range(3):
        admit(f"site-{index}")
    for index in range(3):  # one after the other: torch draws initial weights from a generator of the whole process
        ready = threading.Event()
        threads.append(threading.Thread(target=client, args=(index, ready), daemon=True))
        threads[-1].start()
        assert ready.wait(60)
    run = server_side.serve("fed.toml", "runs/x", listen=[address], wait=60)
    for thread in threads:
        thread.join(timeout=20)
    schedule = {"evaluate": "participants"}  # as `federation new` writes it
    simulated = sp.train("fedspa", clients=3, **OPTIONS, **schedule, executor="serial", out="runs/simulated")
    one, other = (Records(found.path / "records.sqlite") for found in (run, simulated))
    assert one.turns() == other.turns()
    assert one.evaluations() == other.evaluations()
    assert one.failures() == []
    assert (run.path / "global.safetensors").read_bytes() == (simulated.path / "global.safetensors").read_bytes()
    # What a client keeps is what the simulation has for it.
    weights = simulated.personal_model(1).state_dict()
    kept = load_file(models[1])
    assert {name: value.tolist() for name, value in kept.items()} == {
        name: value.tolist() for name, value in weights.items()
    }
    assert "personal model" in command("vault", "show", "--vault", "vault/site-1")
    with pytest.raises(SparsonaError, match="3 vaults in"):
        command("vault", "show")
    command("vault", "export", "--vault", "vault/site-1", "mine.safetensors")
    exported = load_file("mine.safetensors")
    assert {name: value.tolist() for name, value in exported.items()} == {
        name: value.tolist() for name, value in kept.items()
    }
    card = (tmp_path / "mine.safetensors.md").read_text(encoding="utf-8")
    assert "the model of client 1, site-1" in card
    told = [row for row in one.evaluations() if (row.client, row.completed, row.point) == (1, 2, "received")]
    assert f"Accuracy {told[0].correct / told[0].count:.1%}" in card if told else "Not measured" in card
    command("vault", "export", "--vault", "vault/site-1", "mine.pt2")  # its federation file is in the vault
    program, inputs = torch.export.load("mine.pt2").module(), torch.rand(3, 1, 8, 8)
    assert torch.allclose(program(inputs), simulated.personal_model(1)(inputs), atol=1e-5)
    with pytest.raises(SparsonaError, match="exists already"):
        command("vault", "export", "--vault", "vault/site-1", "--federation", "fed.toml", "mine.pt2")
    with pytest.raises(SparsonaError, match="are with its clients"):
        run.personal_model(0)
    loaded = sp.load(run.path)
    with pytest.raises(SparsonaError, match="are with its clients"):
        loaded.export(0, "other.safetensors")
    shared = loaded.model().state_dict()  # the server has that one
    assert all(torch.equal(shared[name], value) for name, value in simulated.model().state_dict().items())


def test_mistakes_at_the_start_have_names(tmp_path, monkeypatch, address):
    monkeypatch.chdir(tmp_path)
    new("fedspa", "digits-cnn", "1x8x8")
    with pytest.raises(SparsonaError, match="has no clients yet"):
        server_side.serve("fed.toml", "runs/x", listen=[address])
    with pytest.raises(SparsonaError, match="has no clients yet"):
        client_side.join("fed.toml", "digits")
    admit("site-0")
    command("keys", "new", "stranger")
    with pytest.raises(SparsonaError, match="has the key"):
        client_side.join("fed.toml", "digits", key="stranger.key")
    with pytest.raises(SparsonaError, match="does not say where its server is"):
        client_side.join("fed.toml", "digits")  # the one key here that is in the roster is found
    with pytest.raises(SparsonaError, match="is not the key of this federation's server"):
        server_side.serve("fed.toml", "runs/x", key="stranger.key")
    with pytest.raises(SparsonaError, match="--at-least 2"):
        server_side.serve("fed.toml", "runs/x", at_least=2)
    with pytest.raises(SparsonaError, match="0 of 1 client came within 0 s"):
        server_side.serve("fed.toml", "runs/x", listen=[address], wait=0, tls=False)
    assert not (tmp_path / "runs").exists()


def test_a_client_says_when_the_server_goes_away_and_is_back(monkeypatch):
    monkeypatch.setattr(client_side, "WATCH_SECONDS", 0.001)
    states = iter([False, False, True, True, False, False, True])
    finished, heard = threading.Event(), []

    class Link:
        trouble = ""

        def connected(self):
            try:
                return next(states)
            except StopIteration:
                finished.set()
                return True

    client_side._watch(Link(), SimpleNamespace(finished=finished, is_greeted=False), heard.append, "fed.toml")
    assert [text.split(":")[0] for text in heard] == ["the server has gone away", "the server is back"]


def test_a_client_has_its_vault_for_itself(tmp_path, monkeypatch, address):
    """Over Flower as well: two processes of one client would answer with states that the other does not have."""
    monkeypatch.chdir(tmp_path)
    new("fedavg", "digits-cnn", "1x8x8")
    admit("site-0")
    other = Vault(tmp_path / "vault" / "mine")
    other.claim(Terms.read("fed.toml").run, 0, "data")
    for more in ({"flower": "a.sock"}, {"connect": [address]}):
        with pytest.raises(SparsonaError, match="in use by another process"):
            client_side.join("fed.toml", "digits", vault="vault/mine", **more)
    other.release()


def test_options_of_a_clients_data(tmp_path, monkeypatch, address):
    monkeypatch.chdir(tmp_path)
    new("fedavg", "digits-cnn", "1x8x8")
    admit("site-0")
    with pytest.raises(SparsonaError, match="unknown option of a client's share of a data set 'test_rat'") as told:
        client_side.join("fed.toml", "digits", connect=[address], test_rat=0.3)
    assert told.value.hint == "did you mean 'test_rate'?"
    assert "partition" in told.value.expected
    assert len(told.value.expected.split(", ")) < 20  # and not all options of a run
    np.savez("mine.npz", x=np.zeros((40, 1, 8, 8), dtype=np.float32), y=np.arange(40) % 10)
    with pytest.raises(SparsonaError, match="unknown option of a client's own data 'partition'"):
        client_side.join("fed.toml", "arrays:mine.npz", connect=[address], partition="iid")


def test_data_of_another_shape_is_refused(tmp_path, monkeypatch, address):
    monkeypatch.chdir(tmp_path)
    new("fedavg", "lenet5", "1x28x28")
    admit("site-0")
    with pytest.raises(SparsonaError, match=r"examples of shape \(1, 8, 8\)(.|\n)*federation new --input 1x8x8`"):
        client_side.join("fed.toml", "digits", connect=[address])


def test_a_client_may_lack_classes(tmp_path, monkeypatch):
    """Also the first ones: how many there are, the federation file says."""
    monkeypatch.chdir(tmp_path)
    new("fedavg", "digits-cnn", "1x8x8")
    admit("site-0")
    terms = Terms.read("fed.toml")
    x = np.zeros((40, 1, 8, 8), dtype=np.float32)
    np.savez("high.npz", x=x, y=np.arange(40) % 6 + 4)
    assert client_data.own_data(terms, 0, "arrays:high.npz").num_classes == 10
    np.savez("off.npz", x=x, y=np.arange(40) % 10 + 1)
    with pytest.raises(SparsonaError, match="labels 10 are outside the range"):
        client_data.own_data(terms, 0, "arrays:off.npz")


def test_owners_of_one_clients_data_are_told(tmp_path, monkeypatch, capsys):
    """They may be a hospital's patients, or a file of everybody's that was not meant."""
    monkeypatch.chdir(tmp_path)
    new("fedavg", "digits-cnn", "1x8x8")
    admit("site-0")
    terms = Terms.read("fed.toml")
    arrays = {"x": np.zeros((40, 1, 8, 8), dtype=np.float32), "y": np.arange(40) % 10}
    for owners, said in (
        (
            ["ana", "bo"] * 20,
            "2 owners, all of whom are one client here: ana, bo; if each is to be a client, save a file",
        ),
        (np.arange(40) % 8 + 1, "8 owners, all of whom are one client here: 1, 2, 3, 4, 5 and 3 more; if"),
    ):
        np.savez("several.npz", **arrays, owners=owners)
        assert client_data.own_data(terms, 0, "arrays:several.npz").sizes().sum() == 40
        assert f"warning: 'arrays:several.npz' has examples of {said}" in capsys.readouterr().err
    np.savez("one.npz", **arrays, owners=["ana", ""] * 20)
    client_data.own_data(terms, 0, "arrays:one.npz")
    assert capsys.readouterr().err == ""


def test_a_method_of_peers_has_nothing_to_join(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    new("dispfl", "digits-cnn", "1x8x8")
    admit("site-0")
    with pytest.raises(SparsonaError, match="DisPFL has no server to join"):
        client_side.join("fed.toml", "digits")
    new_file = tmp_path / "fed.toml"
    new_file.unlink()
    for key in tmp_path.glob("fed.*.key"):
        key.unlink()
    new("fedavg", "digits-cnn", "1x8x8")
    command("federation", "admit", "fed.toml", "site-0.pub")
    with pytest.raises(SparsonaError, match="FedAvg has a server"):
        sp.be_peer("fed.toml", "digits")
