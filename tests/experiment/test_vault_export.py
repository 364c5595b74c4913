"""A client's model out of its vault: what the file and its card say of it."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from federations import make
from safetensors import safe_open
from safetensors.torch import load_file

from sparsona.cli.app import cli
from sparsona.deploy.exchange import in_memory, in_threads
from sparsona.deploy.journal import Journal
from sparsona.deploy.vault import ABOUT, TESTED
from sparsona.experiment.client_data import own_data
from sparsona.experiment.client_side import describe_client, make_agent
from sparsona.experiment.export import METADATA
from sparsona.experiment.peers import make_peer, play_together
from sparsona.experiment.server_side import play_network
from sparsona.experiment.terms import Terms
from sparsona.runs.records import Records

NAMES = [f"digit {number}" for number in range(10)]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Two clients with arrays of their own, whose run is over."""
    folder = tmp_path_factory.mktemp("vaults")
    made, agents, generator = make(folder / "fed", "fedavg", 2, rounds=1), [], np.random.default_rng(0)
    for index in range(2):
        x = generator.random((60, 1, 8, 8), dtype=np.float32)
        x = x if index else (x * 255).astype(np.uint8)
        np.savez(folder / f"{index}.npz", x=x, y=np.arange(60) % 10, class_names=NAMES)
        data = own_data(made.terms, index, f"arrays:{folder / f'{index}.npz'}", test_rate=0.3)
        agent = make_agent(made.terms, index, data, folder / f"vault-{index}", made.key(index), made.roster)
        describe_client(made.terms, index, data, agent.vault, agent.greeting)
        agents.append(agent)
    network = made.network(in_memory({one.client: one.handle for one in agents}))
    network.wait(2, 5.0, lambda there, of: None)
    run = play_network(network, folder / "run")
    rows = Records(run.path / "records.sqlite").evaluations(1, "received")
    return folder, next(row for row in rows if row.client == 1)


def export(vault, out):
    done = CliRunner().invoke(cli, ["vault", "export", "--vault", str(vault), str(out)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("suffix", ["safetensors", "pt2", "onnx"])
def test_an_export_says_whose_model_it_is_and_how_good(played, tmp_path, suffix):
    folder, row = played
    out = tmp_path / f"mine.{suffix}"
    if suffix == "onnx":
        pytest.importorskip("onnxscript")
    shown = export(folder / "vault-1", out)
    assert f"{out.name}.md" in shown
    if suffix == "safetensors":
        with safe_open(out, "pt") as file:
            about = file.metadata()
    elif suffix == "pt2":
        extra = {METADATA: ""}
        torch.export.load(out, extra_files=extra)
        about = json.loads(extra[METADATA])
    else:
        runtime = pytest.importorskip("onnxruntime")
        about = runtime.InferenceSession(out).get_modelmeta().custom_metadata_map
    assert json.loads(about["class_names"]) == NAMES
    assert (about["client"], about["client_name"], about["rounds"]) == ("1", "site-1", "1")
    assert float(about["test_accuracy"]) == pytest.approx(row.correct / row.count, abs=1e-6)
    assert about["test_examples"] == str(row.count)
    assert about["input_preparation"].startswith("none")
    card = out.with_name(f"{out.name}.md").read_text(encoding="utf-8")
    assert "the model of client 1, site-1" in card
    assert f"Accuracy {row.correct / row.count:.1%}" in card
    assert "digit 3" in card
    assert "not finished" not in card


def test_bytes_are_scaled_by_the_graph_as_in_other_exports(played, tmp_path):
    """The vault knows what its data looked like; a file of weights says what to do."""
    folder, _ = played
    export(folder / "vault-0", tmp_path / "mine.pt2")
    export(folder / "vault-0", tmp_path / "mine.safetensors")
    extra = {METADATA: ""}
    program = torch.export.load(tmp_path / "mine.pt2", extra_files=extra).module()
    assert json.loads(extra[METADATA])["input_dtype"] == "uint8"
    with safe_open(tmp_path / "mine.safetensors", "pt") as file:
        assert file.metadata()["input_preparation"] == "divide by 255"
    task = Terms.read(folder / "vault-0" / "federation.toml").task()
    module = task.module(*task.init(0))
    module.load_state_dict(load_file(tmp_path / "mine.safetensors"))
    inputs = torch.randint(0, 256, (3, 1, 8, 8), dtype=torch.uint8)
    assert torch.allclose(program(inputs), module(inputs / 255), atol=1e-4)


def test_a_vault_of_an_older_version_has_no_card(played, tmp_path):
    folder, _ = played
    old = shutil.copytree(folder / "vault-1", tmp_path / "old")
    for name in (ABOUT, TESTED):
        (old / name).unlink()
    export(old, tmp_path / "mine.pt2")
    (old / "federation.toml").unlink()
    export(old, tmp_path / "mine.safetensors")
    assert (tmp_path / "mine.safetensors").read_bytes() == (old / "model.safetensors").read_bytes()
    assert not list(tmp_path.glob("*.md"))


def test_peers_keep_what_they_measured(tmp_path):
    made, handles, peers = make(tmp_path / "fed", "dispfl", 2, rounds=1), {}, []
    for index in range(2):
        own = (made.key(index), made.roster)
        folder = tmp_path / f"vault-{index}"
        peers.append(make_peer(made.terms, index, made.own_data(index), folder, in_threads(handles), *own))
        handles[index] = peers[-1].handle
    play_together(peers)
    export(tmp_path / "vault-1", tmp_path / "mine.safetensors")
    (entry,) = (one for one in Journal(tmp_path / "vault-1").read()[1] if (one.kind, one.round) == ("evaluation", 1))
    (found,) = (one for one in entry.outcome.evaluations if one.point == "received")
    with safe_open(tmp_path / "mine.safetensors", "pt") as file:
        assert float(file.metadata()["test_accuracy"]) == pytest.approx(found.correct / found.count, abs=1e-6)
