"""What is shown of a run on a network: who was heard, what evaluations took, and what is not known."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner
from federations import make
from test_remote import DATA, NUM, silent_after_hello, simulate, start

import sparsona as sp
from sparsona.analysis.partition import Partition
from sparsona.cli.app import cli
from sparsona.core.errors import SparsonaError
from sparsona.core.points import FEW
from sparsona.deploy.exchange import in_memory
from sparsona.deploy.frames import unseal
from sparsona.experiment.client_data import own_data
from sparsona.experiment.client_side import make_agent
from sparsona.experiment.server_side import play_network
from sparsona.runs.records import Records

FEWEST = {"data_rate": 0.06, "test_rate": 0.1}  # fewer than five test examples


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """A run in which client 1 falls silent, client 2 comes late, and client 3 has two test examples."""
    folder = tmp_path_factory.mktemp("played")
    options = {"rounds": 3, "evaluate": "participants", "per_round": 4, "points": ["global"]}
    made = make(folder / "federation", "fedspa", NUM, data=DATA, **options)
    sites = made.sites(folder / "vaults")
    small = own_data(made.terms, 3, "digits", **FEWEST)
    sizes = small.sizes()[3].tolist()
    assert 0 < sizes[2] < 5 < sizes[0]
    sites[3].agent = make_agent(made.terms, 3, small, folder / "vaults" / "few", sites[3].key, made.roster)

    def late(data):
        return sites[2].handle(data) if started else None

    started = []

    class Come:
        def on_round(self, result):
            started.append(result.index)

    handles = {site.index: site.handle for site in sites} | {1: silent_after_hello(sites[1]), 2: late}
    network = made.network(in_memory(handles), deadline=0.2)
    network.wait(NUM - 1, 1.0, lambda there, of: None)
    return play_network(network, folder / "run", [Come()])


def test_the_protocol_says_who_was_heard(played):
    text = played.protocol
    assert "2 of 4 clients were not heard in some rounds (no answer: 3 turns, not there yet: 1)." in text
    assert "Not heard: site-1, site-2." in text  # by the names of the roster
    assert "Not tested: site-1, site-3." in text
    few, silent = "1 client with fewer than 5 test examples, whose result is not told", "1 client not heard in the last"
    assert f"Not in the mean: {few}; {silent} evaluation." in text
    assert "each point of a learning curve is a mean over the clients that were sampled in that round" in text
    assert "mean over 2 clients" in text
    assert "tokens" not in text
    assert played.summary["heard"]["names"] == ["site-1", "site-2"]
    assert sp.load(played.path)._folder.facts.client_names == ("site-0", "site-1", "site-2", "site-3")
    assert played.summary["heard"]["reasons"] == {"no answer": 3, "not there yet": 1}
    assert np.flatnonzero(played.counts()[1]).tolist() == [0, 2]


def test_bytes_of_evaluations_are_apart_from_those_of_training(played):
    records = Records(played.path / "records.sqlite")
    (row,) = records.evaluation_traffic()  # everybody, once, at the end
    assert (row.completed, row.clients) == (3, 4)
    assert played.summary["evaluation_bytes"] == {"up": row.bytes_up, "down": row.bytes_down}
    assert played.summary["bytes"]["down"] == sum(turn.bytes_down for turn in records.turns())
    table = json.dumps(sp.Comparison(played.path, [played]).figures())
    assert f'"evaluation_bytes_down": {{"mean": {float(row.bytes_down)}' in table
    assert '"turns_not_heard": {"mean": 4.0' in table


def test_participants_are_evaluated_on_what_they_train_on(played):
    records = Records(played.path / "records.sqlite")
    found = {(row.completed, row.client) for row in records.evaluations() if row.point == "received"}
    assert found == {(1, 0), (1, 2), (2, 0), (2, 2), (3, 0), (3, 2)}
    assert {row.completed for row in records.evaluations() if row.point == "global"} == {3}
    withheld = [row for row in records.evaluation_failures() if row.reason.startswith("few")]
    assert {(row.completed, row.client) for row in withheld} == {(1, 3), (2, 3), (3, 3)}


def test_a_page_a_list_and_what_is_not_known(played, tmp_path):
    page = played.report(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "not known" not in page.split("<h2")[4]
    assert "Data of the clients" in page
    assert "tokens" not in page.split("<h2")[1]
    loaded = sp.load(played.path)
    assert loaded.curve() == played.curve()
    assert loaded.clients().changes[0].clients.tolist() == [0, 2]
    assert loaded.clients().changes[0].samples.min() > 10  # also of the one that came late
    for ask in (loaded.similarity, loaded.union_density, lambda: loaded.personal_model(0)):
        with pytest.raises(SparsonaError, match="are with its clients, on several machines"):
            ask()
    result = CliRunner().invoke(cli, ["clients", str(played.path)])
    assert result.exit_code == 0, result.output


def test_a_client_that_never_came_is_not_known():
    sizes = {"train": np.array([5, 0, 9]), "test": np.array([2, 0, 1])}
    assert Partition("x", sizes).summary()[1] == "Per client: 7 to 10 examples (median 8.5); of 1 client not known"


def test_participants_find_what_everyone_finds(tmp_path):
    """The schedule changes who is evaluated, not what is found: in a simulation, with rounds and rests of any kind."""
    options = {"clients": 6, "per_round": 3, "rounds": 14, "eval_every": 3, "epochs": 1, "data_rate": 0.1}
    options |= {"points": ["trained", "received/train"], "executor": "serial"}
    rows = []
    for evaluate in ("everyone", "participants"):
        run = sp.train("fedspa", **options, evaluate=evaluate, out=tmp_path / evaluate)
        rows.append({(r.completed, r.client, r.point): r for r in Records(run.path / "records.sqlite").evaluations()})
    everyone, some = rows
    assert all(everyone[key] == row for key, row in some.items())
    at_end = {key for key in everyone if key[0] == 14}
    assert at_end <= some.keys() < everyone.keys()
    received = {key[:2] for key in some if key[2] == "received" and key[0] < 14}
    assert {completed for completed, _ in received} == {3, *range(5, 14)}
    assert len(received) == 3 * 10


def test_counts_that_are_shared_are_told_as_few(tmp_path):
    network, sites, _ = start(tmp_path, "fedavg", own={"shares_labels": True}, rounds=1, per_round=4)
    network.wait(NUM, 1.0, lambda there, of: None)
    run = play_network(network, tmp_path / "run")
    simulated = simulate(sites, tmp_path)
    told, true = (sp.load(one.path)._folder for one in (run, simulated))
    hidden = (true.facts.label_counts > 0) & (true.facts.label_counts < 5)
    assert hidden.any()
    assert np.array_equal(told.facts.label_counts, np.where(hidden, FEW, true.facts.label_counts))
    for client, matrix in true.records.confusions(1, "received").items():
        shown = told.records.confusions(1, "received")[client]
        assert np.array_equal(shown, np.where((matrix > 0) & (matrix < 5), FEW, matrix))
    page = run.report(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "few: 1 to 4, drawn as 2" in page
    assert "Counts that clients tell as few (1 to 4) are left out." in page
    network, *_ = start(tmp_path / "silent", "fedavg", rounds=1)
    network.wait(NUM, 1.0, lambda there, of: None)
    silent = play_network(network, tmp_path / "silent" / "run")
    assert sp.load(silent.path)._folder.facts.label_counts is None
    assert not Records(silent.path / "records.sqlite").confusions(1, "received")


def test_bytes_of_evaluations_are_those_of_the_frames(tmp_path):
    down, up = [], []

    def handles(sites):
        def counting(site):
            def handle(data):
                frame = unseal(data, site.made.roster, run=site.terms.run, receiver=site.index)
                answer = site.handle(data)
                if frame.head.get("do") == "evaluate":
                    down.append(sum(map(len, frame.blobs)))
                    up.append(len(answer))
                return answer

            return handle

        return {site.index: counting(site) for site in sites}

    network, *_ = start(tmp_path, "fedspa", handles, evaluate="everyone", points=["global"], rounds=2)
    network.wait(NUM, 1.0, lambda there, of: None)
    run = play_network(network, tmp_path / "run")
    assert run.summary["evaluation_bytes"] == {"up": sum(up), "down": sum(down)}
    assert len(down) >= 2 * NUM


def test_a_run_of_which_nobody_tells_a_result_ends(played, tmp_path):
    """All clients have fewer than five test examples: the run ends, and says that nothing was evaluated, and why."""
    options = {"rounds": 1, "per_round": 4, "points": ["global"]}
    made = make(tmp_path / "federation", "fedavg", NUM, data=FEWEST, **options)
    sites = made.sites(tmp_path / "vaults")
    assert all(0 < made.own_data(site.index).sizes()[site.index][2] < 5 for site in sites)
    network = made.network(in_memory({site.index: site.handle for site in sites}))
    network.wait(NUM, 1.0, lambda there, of: None)
    run = play_network(network, tmp_path / "run")
    assert "Nothing was evaluated: no client told a result" in run.protocol
    assert "Without a result: 4 clients with fewer than 5 test examples, whose result is not told." in run.protocol
    assert run.summary["accuracy"]["mean"] is None
    assert run.summary["rounds"] == 1
    assert "not evaluated" in repr(run)
    assert np.isnan(run.accuracies()).all()
    assert sp.Comparison(run.path, [run]).table()[0]["accuracy"] == "–"
    page = run.report(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Nothing was evaluated" in page
    both = sp.Comparison(tmp_path, [run, played])  # beside one that was evaluated, either first
    both.report(tmp_path / "both.html")
    assert both.differences()[0]["difference"] == "–"
    sp.Comparison(tmp_path, [played, run]).report(tmp_path / "both.html")
    for command in ("clients", "similarity", "targets"):
        result = CliRunner().invoke(cli, [command, str(run.path)])
        assert isinstance(result.exception, SparsonaError), f"{command}: {result.exception}"


def test_a_run_whose_only_tested_client_is_lost_ends(tmp_path):
    def handles(sites):
        return {site.index: silent_after_hello(site) for site in sites}

    network, *_ = start(tmp_path, "fedavg", handles, deadline=0.1, rounds=1, eval_clients=1)
    network.wait(NUM, 1.0, lambda there, of: None)
    run = play_network(network, tmp_path / "run")
    assert "Without a result: 1 client not heard in the last evaluation." in run.protocol
