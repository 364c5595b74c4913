"""A run on a network, played again in the simulator with the failures that were observed, gives the same bits."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from test_remote import DATA, NUM, start

import sparsona as sp
from sparsona.cli.app import cli
from sparsona.core.errors import SparsonaError
from sparsona.deploy.exchange import in_memory
from sparsona.deploy.frames import seal, unseal
from sparsona.experiment.network import Network
from sparsona.experiment.server_side import play_network
from sparsona.runs.records import Records


def silent_in(site, rounds, do="train"):
    """A client that hears nothing of this kind in these rounds."""

    def handle(data):
        frame = unseal(data, site.agent._verifier, run=site.terms.run, receiver=site.index)
        return None if frame.round in rounds and frame.head.get("do") == do else site.handle(data)

    return handle


def forging(site, rounds):
    """A client whose updates are damaged on their way, which the server refuses."""

    def handle(data):
        frame = unseal(data, site.agent._verifier, run=site.terms.run, receiver=site.index)
        answer = site.handle(data)
        if frame.round not in rounds or frame.head.get("do") != "train":
            return answer
        told = unseal(answer, site.agent._verifier, run=site.terms.run, receiver=-1)
        wrong = bytearray(told.blobs[0])
        wrong[-1] ^= 1
        return seal(told.__class__(**{**vars(told), "blobs": (bytes(wrong),)}), site.key)

    return handle


def absent_until(site, round_):
    """A client that comes in this round."""

    def handle(data):
        frame = unseal(data, site.agent._verifier, run=site.terms.run, receiver=site.index)
        return None if frame.round < round_ else site.handle(data)

    return handle


class Lose:
    """Empties a client's vault after a round."""

    def __init__(self, site, index):
        self.site, self.index = site, index

    def on_round(self, result):
        if result.index == self.index:
            for path in self.site.folder.glob("*.state"):
                path.unlink()


@pytest.mark.parametrize(("method", "evaluate"), [("fedspa", "participants"), ("fedem", "everyone")])
def test_a_run_with_failures_is_replayed_to_the_same_bits(tmp_path, method, evaluate):
    def handles(sites):
        return {
            0: silent_in(sites[0], {1}),
            1: forging(sites[1], {2}),
            2: silent_in(sites[2], {2, 3}, "evaluate"),
            3: absent_until(sites[3], 1),
        }

    network, sites, _ = start(
        tmp_path, method, handles, deadline=0.3, per_round=4, rounds=3, evaluate=evaluate, min_updates=2
    )
    network.wait(NUM - 1, 1.0, lambda there, of: None)
    run = play_network(network, tmp_path / "run", [Lose(sites[2], 0)])
    reasons = {row.reason.partition(":")[0] for row in Records(run.path / "records.sqlite").failures()}
    assert reasons == {"no answer within 0.3 s", "refused", "not asked", "its state was lost"}
    found = sp.replay(run.path, "digits", out=tmp_path / "replay", **DATA)
    assert found.difference == ""
    assert found.same_data
    models = [path / "global.safetensors" for path in (run.path, found.run.path)]
    assert [path.exists() for path in models] == [method == "fedspa"] * 2
    assert method != "fedspa" or models[0].read_bytes() == models[1].read_bytes()


def test_other_data_is_told_apart(tmp_path):
    network, _, _ = start(tmp_path)
    network.wait(NUM, 1.0, lambda there, of: None)
    run = play_network(network, tmp_path / "run")
    words = ["--data", "digits", *(f"--set={key}={value}" for key, value in DATA.items())]
    result = CliRunner().invoke(cli, ["replay", str(run.path), *words, "--out", str(tmp_path / "same")])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1].startswith("same: turns, evaluations and shared model")
    arguments = [*words, "--set", "partition_seed=3", "--out", str(tmp_path / "other")]
    result = CliRunner().invoke(cli, ["replay", str(run.path), *arguments])
    assert result.exit_code == 1
    last = result.output.splitlines()[-1]
    assert last.startswith("differs: round 1, client ")
    assert "the data is not what the clients reported" in last


def test_what_cannot_be_replayed_is_said(tmp_path):
    simulated = sp.train("fedavg", clients=4, rounds=1, data_rate=0.2, out=tmp_path / "simulated")
    with pytest.raises(SparsonaError, match="was simulated"):
        sp.replay(simulated.path, "digits")
    network, _, _ = start(tmp_path, "pfedgate", transform=["clip:1", "noise:0.1"], rounds=1)
    network.wait(NUM, 1.0, lambda there, of: None)
    run = play_network(network, tmp_path / "run")
    with pytest.raises(SparsonaError, match="a secret of its own"):
        sp.replay(run.path, "digits", **DATA)
    with pytest.raises(SparsonaError, match=r"data of 2 clients(.|\n)*repeat --data, once for each client"):
        sp.replay(play_plain(tmp_path).path, ["digits", "digits"])


def play_plain(tmp_path):
    network, _, _ = start(tmp_path / "plain", "local", rounds=1)
    network.wait(NUM, 1.0, lambda there, of: None)
    return play_network(network, tmp_path / "plain" / "run")


def test_a_server_that_is_started_again_knows_its_late_clients(tmp_path):
    """The largest client comes in the second round; the server is killed, and goes on while that client is away."""

    def handles(sites):
        return {site.index: site.handle for site in sites} | {3: absent_until(sites[3], 1)}

    network, sites, _ = start(tmp_path, "fedem", handles, deadline=0.3, per_round=4, rounds=3)
    network.wait(NUM - 1, 1.0, lambda there, of: None)

    class Killed(BaseException):
        pass

    class Kill:
        def on_round(self, result):
            if result.index == 1:
                raise Killed

    with pytest.raises(Killed):
        play_network(network, tmp_path / "run", [Kill()])
    known = {row["client"]: row["since"] for row in json.loads((tmp_path / "run" / "guests.json").read_text())}
    assert known == {0: 0, 1: 0, 2: 0, 3: 1}  # evaluated after the first round
    answering = {site.index: site.handle for site in sites[:3]}
    again = Network(
        network.terms, in_memory(answering), network.connection.signer, network.connection.verifier, deadline=0.3
    )
    again.wait(NUM - 1, 1.0, lambda there, of: None)
    run = play_network(again, tmp_path / "run")
    assert [card.num_examples > 0 for card in again.context.clients] == [True] * NUM
    found = sp.replay(run.path, "digits", out=tmp_path / "replay", **DATA)
    assert found.difference == ""
