"""Who takes part and when it is over, on several machines: decided by the server, as in the simulation of it."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from federations import make, rows
from safetensors.torch import load_file
from test_remote import DATA, NUM, simulate, start

import sparsona as sp
from sparsona.core.errors import SparsonaError
from sparsona.core.seeds import Seeds
from sparsona.core.targets import given_name
from sparsona.deploy import agent, jobs
from sparsona.deploy.exchange import in_memory
from sparsona.engine.availability import available_clients, read_availability, write_out
from sparsona.experiment import flower
from sparsona.experiment.agreement import agree
from sparsona.experiment.network import Network
from sparsona.experiment.replay import first_difference
from sparsona.experiment.server_side import play_network, read_server
from sparsona.experiment.terms import Terms
from sparsona.runs.folder import RunFolder
from sparsona.runs.options import SIMULATED
from sparsona.runs.records import Records

STOPS = {"rounds": 8, "lr": 1e-9, "patience": 2}  # nothing is learned: the first evaluation is the best


def network_of(model="mlp:hidden=0", method="fedavg", predicts=None, **options):
    return agree(method, options, model=model, classes=10, input_shape=(1, 8, 8), predicts=predicts)


def play(network, folder, observers=()):
    network.wait(NUM, 1.0, lambda there, of: None)
    return play_network(network, folder, observers)


# Early stopping.


@pytest.mark.parametrize("tune_epochs", [0, 1])
def test_patience_ends_a_run_as_in_the_simulation(tmp_path, tune_epochs):
    network, sites, heard = start(tmp_path, "fedavg", tune_epochs=tune_epochs, **STOPS)
    run = play(network, tmp_path / "run")
    simulated = simulate(sites, tmp_path)
    assert run.summary["early_stop"] == simulated.summary["early_stop"]
    assert run.summary["early_stop"]["after"] == 3
    assert rows(run.path) == rows(simulated.path)
    assert run.summary["accuracy"] == simulated.summary["accuracy"]
    assert heard[-1] == "stopped early after round 3 of 8, best validation at round 1"
    assert f"patience goes by the accuracy of {NUM} of {NUM} clients on validation data" in heard
    assert all(site.agent.finished.is_set() for site in sites)
    # What a client keeps is what the simulation has for it, though nobody had told it which evaluation was the last.
    for client, site in enumerate(sites):
        weights = simulated.personal_model(client).state_dict()
        kept = load_file(site.agent.vault.model)
        assert {name: value.tolist() for name, value in kept.items()} == {
            name: value.tolist() for name, value in weights.items()
        }
    found = sp.replay(run.path, "digits", out=tmp_path / "replay", **DATA)
    assert found.difference == ""
    assert found.run.summary["early_stop"] == run.summary["early_stop"]


def test_what_was_evaluated_where_a_run_ended_early_is_compared(tmp_path):
    network, sites, _ = start(tmp_path, "fedavg", **STOPS)
    play(network, tmp_path / "run")
    run, simulated = RunFolder.open(tmp_path / "run"), RunFolder.open(simulate(sites, tmp_path).path)
    assert first_difference(run, simulated) == ""

    class Changed:
        """Records in which client 2 has another loss in the last evaluation."""

        def __getattr__(self, name):
            return getattr(simulated.records, name)

        def evaluations(self, completed):
            found = simulated.records.evaluations(completed)
            return [replace(row, loss=9.0) if (completed, row.client) == (3, 2) else row for row in found]

    other = SimpleNamespace(path=simulated.path, records=Changed())
    assert first_difference(run, other).startswith("evaluated after 3, client 2, at 'received': loss is")
    patient = replace(sites[0].made, options={**sites[0].made.options, "patience": 4}).simulate(tmp_path / "patient")
    expected = "it ended after round 3, the replay after 5"  # said first
    assert first_difference(run, RunFolder.open(patient.path)) == expected


class Killed(BaseException):
    pass


class Kill:
    def __init__(self, index):
        self.index = index

    def on_round(self, result):
        if result.index == self.index:
            raise Killed


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_server_that_is_killed_comes_to_the_same_decision(tmp_path, index):
    network, sites, _ = start(tmp_path, "fedspa", tune_epochs=1, **STOPS)
    with pytest.raises(Killed):
        play(network, tmp_path / "run", [Kill(index)])
    for site in sites:
        site.start()
    answering = in_memory({site.index: site.handle for site in sites})
    signer, verifier = network.connection.signer, network.connection.verifier
    run = play(Network(network.terms, answering, signer, verifier), tmp_path / "run")
    simulated = simulate(sites, tmp_path)
    assert rows(run.path) == rows(simulated.path)
    assert run.summary["early_stop"] == simulated.summary["early_stop"]
    # And once more: it is over, and nobody is asked for anything but to end.
    again = play(Network(network.terms, answering, signer, verifier), tmp_path / "run")
    assert again.summary["early_stop"] == run.summary["early_stop"]


BY_F1 = STOPS | {"metrics": ["f1"], "patience_metric": "f1"}


def test_patience_by_a_metric_that_clients_share(tmp_path):
    """F1 reveals how many examples of each class there are: it is told with these, by clients with enough of each."""
    data = {"partition": "iid", "validation_rate": 0.3}
    made = make(tmp_path / "federation", "fedavg", 2, data=data, **BY_F1)
    sites, heard = made.sites(tmp_path / "vaults", shares_labels=True), []
    network = made.network(in_memory({site.index: site.handle for site in sites}), report=heard.append)
    network.wait(2, 1.0, lambda there, of: None)
    run = play_network(network, tmp_path / "run")
    assert "patience goes by the f1 of up to 2 of 2 clients on validation data" in heard
    assert run.summary["early_stop"]["metric"] == "f1"
    assert run.summary["early_stop"] == made.simulate(tmp_path / "simulated").summary["early_stop"]


def test_a_metric_that_nobody_tells_is_said(tmp_path, capsys):
    network, _, _ = start(tmp_path, "fedavg", own={"shares_labels": True}, **BY_F1)  # classes of one to four examples
    run = play(network, tmp_path / "run")
    assert "early_stop" not in run.summary
    said = "patience: after round 1 no client's f1 on validation data is known; such evaluations do not count"
    assert capsys.readouterr().err.count(said) == 1


def test_metrics_that_would_reveal_too_much_are_refused_at_the_start(tmp_path):
    network, _, _ = start(tmp_path, "fedavg", **BY_F1)
    with pytest.raises(SparsonaError, match=f"patience by f1: none of the {NUM} clients here tells it") as told:
        play(network, tmp_path / "run")
    assert "--share labels" in told.value.hint
    assert not (tmp_path / "run").exists()
    with pytest.raises(SparsonaError, match="where labels are predicted"):
        network_of(predicts="labels", patience=2, metrics=["f1"], patience_metric="f1")


def test_who_has_few_validation_examples_tells_nothing(tmp_path):
    made = make(tmp_path / "federation", "fedavg", 2, data={"data_rate": 0.02}, **STOPS)  # of 16 examples each
    sites = made.sites(tmp_path / "vaults")
    network = made.network(in_memory({site.index: site.handle for site in sites}))
    network.wait(2, 1.0, lambda there, of: None)
    with pytest.raises(SparsonaError, match="patience by accuracy: none of the 2 clients"):
        play_network(network, tmp_path / "run")


def test_a_client_that_is_lost_makes_nothing_better_or_worse(tmp_path):
    """A mean over fewer clients is another figure. It is compared with that of the same clients."""

    def handles(sites):
        answering = {site.index: site.handle for site in sites}

        def flaky(data, count=[0]):  # noqa: B006  # counts its calls
            count[0] += 1
            return sites[1].handle(data) if count[0] % 2 else None

        return answering | {1: flaky}

    network, _, _ = start(tmp_path, "fedavg", handles, deadline=0.2, **STOPS)
    run = play(network, tmp_path / "run")
    assert run.summary["early_stop"]["after"] == 3
    points = Records(run.path / "records.sqlite").evaluations(point="received/validation")
    assert {row.completed for row in points if row.client == 1} < {1, 2, 3}


def lying(monkeypatch, losses):
    """Have clients tell these losses of their validation data."""
    told = jobs._evaluation_values

    def lie(found, *more):
        values = told(found, *more)
        if found.client in losses and found.point.endswith("/validation"):
            values["loss"] = losses[found.client].hex()
        return values

    monkeypatch.setattr(jobs, "_evaluation_values", lie)


def test_losses_that_cannot_be_are_refused_and_end_no_run(tmp_path, monkeypatch):
    lying(monkeypatch, {0: 1.7e308, 1: 1.7e308})
    network, _, _ = start(tmp_path, "fedavg", rounds=3, lr=0.1, patience=2, patience_metric="loss")
    run = play(network, tmp_path / "run")
    assert run.summary["rounds"] == 3
    told = Records(run.path / "records.sqlite").evaluations(point="received/validation")
    assert {row.client for row in told} == set(range(2, NUM))


def test_training_losses_that_cannot_be_are_refused(tmp_path, monkeypatch):
    told = jobs.answer_head

    def lie(outcome, *more):
        head = told(outcome, *more)
        return head | {"tally": head["tally"] | {"loss": (1.7e308).hex()}} if outcome.client < 2 else head

    monkeypatch.setattr(agent, "answer_head", lie)
    network, _, _ = start(tmp_path, "fedavg", rounds=2, per_round=NUM)
    run = play(network, tmp_path / "run")
    failed = {(one.round, one.client): one.reason for one in Records(run.path / "records.sqlite").failures()}
    assert set(failed) == {(index, client) for index in range(2) for client in range(2)}
    assert all("a training loss of 1.7e+308" in why for why in failed.values())


def test_a_client_without_a_loss_does_not_end_the_run_of_the_others(tmp_path, monkeypatch):
    lying(monkeypatch, {0: math.nan})
    network, _, _ = start(tmp_path, "fedavg", rounds=4, lr=0.1, patience=2, patience_metric="loss")
    assert "early_stop" not in play(network, tmp_path / "run").summary


def test_a_client_yet_to_come_is_not_one_without_validation_data(tmp_path):
    network, _, _ = start(
        tmp_path,
        "fedavg",
        lambda sites: {s.index: s.handle for s in sites[:3]} | {3: lambda data: None},
        deadline=0.2,
        **STOPS,
    )
    network.wait(3, 1.0, lambda there, of: None)
    run = play_network(network, tmp_path / "run")
    assert run.summary["early_stop"]["after"] == 3


# Sampling.


def newest_first(round_, clients, available, generator):
    return sorted(available, reverse=round_.index % 2 == 0)


def oldest(round_, clients, available, generator):
    return available


def test_a_function_samples_the_clients_of_a_server(tmp_path):
    made = make(tmp_path / "federation", "fedspa", NUM, data=DATA, rounds=3, sampler=newest_first)
    assert made.terms.config.sampler == "given:newest_first"
    terms, _ = read_server(made.path, None, None, newest_first)
    sites = made.sites(tmp_path / "vaults")  # which do not have the function
    network = Network(terms, in_memory({site.index: site.handle for site in sites}), made.server_key, made.roster)
    run = play(network, tmp_path / "run")
    simulated = made.simulate(tmp_path / "simulated")
    assert rows(run.path) == rows(simulated.path)
    trained = [{turn.client for turn in Records(run.path / "records.sqlite").turns(index)} for index in range(3)]
    assert trained == [{2, 3}, {0, 1}, {2, 3}]
    assert sp.replay(run.path, "digits", out=tmp_path / "replay", sampler=newest_first, **DATA).is_same
    with pytest.raises(SparsonaError, match="sampled by the function 'newest_first'") as told:
        sp.replay(run.path, "digits", **DATA)
    assert told.value.hint == "from Python: sp.replay(..., sampler=newest_first)"
    with pytest.raises(SparsonaError, match="sampled by the function 'newest_first'"):
        sp.replay(run.path, "digits", out=tmp_path / "other", **DATA)


def test_a_client_that_is_gone_is_not_asked_in_every_round(tmp_path):
    """By the records and the checkpoint alone: also by a server that was killed, and by the replay."""

    def gone(sites):
        answers = sites[0].handle, lambda data: None
        handles = iter((answers[0], *[answers[1]] * 99))  # it says hello
        return {site.index: site.handle for site in sites} | {0: lambda data: next(handles)(data)}

    options = {"rounds": 8, "per_round": 1, "sampler": "loss", "evaluate": "participants"}
    network, _, _ = start(tmp_path / "whole", "fedavg", gone, deadline=0.2, **options)
    whole = play(network, tmp_path / "whole" / "run")
    records = Records(whole.path / "records.sqlite")
    assert 1 <= sum(row.client == 0 for row in records.failures()) <= 2
    network, sites, _ = start(tmp_path / "part", "fedavg", gone, deadline=0.2, **options)
    with pytest.raises(Killed):
        play(network, tmp_path / "part" / "run", [Kill(4)])
    for site in sites:
        site.start()
    signer, verifier = network.connection.signer, network.connection.verifier
    again = Network(network.terms, in_memory(gone(sites)), signer, verifier, deadline=0.2)
    part = play(again, tmp_path / "part" / "run")
    assert rows(part.path) == rows(whole.path)
    assert sp.replay(whole.path, "digits", out=tmp_path / "replay", **DATA).is_same


def test_a_server_needs_the_function_that_its_file_names(tmp_path):
    made = make(tmp_path, "fedavg", 2, sampler=newest_first)
    for wrong in (None, oldest):
        with pytest.raises(SparsonaError, match="sampled by the function 'newest_first'") as told:
            read_server(made.path, None, None, wrong)
    assert "not 'oldest'" in told.value.expected
    assert told.value.hint == "from Python: sp.serve(..., sampler=newest_first)"
    plain = make(tmp_path / "plain", "fedavg", 2)
    with pytest.raises(SparsonaError, match="says sampler = 'uniform'"):
        read_server(plain.path, None, None, oldest)
    assert read_server(plain.path, None, None)[0].config.functions == {}


# Availability.


@pytest.mark.parametrize("text", ["client,round_from,round_to\n0,0,1\n0,2,2\n2,1,4\n", "101\n110\n001\n000\n"])
def test_a_trace_is_written_out(tmp_path, text):
    file = tmp_path / "trace.csv"
    file.write_text("\n".join(",".join(line) for line in text.split()) if "client" not in text else text)
    run = network_of(availability=f"file:{file}", sampler="round-robin")
    assert run["availability"].startswith("windows:")
    one, other = (read_availability(each, 4) for each in (f"file:{file}", run["availability"]))
    for index in range(8):
        assert available_clients(one, 4, index, Seeds(0)) == available_clients(other, 4, index, Seeds(0))
    file.unlink()  # nobody needs it any more
    assert network_of(availability=run["availability"])["availability"] == run["availability"]
    assert write_out("markov:0.2:0.1") == "markov:0.2:0.1"


def test_those_that_a_trace_says_are_away_are_not_asked(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("client,round_from,round_to\n0,0,0\n1,0,1\n2,1,1\n")  # nobody in the third round, client 3 never
    asked = []

    def handles(sites):
        def noting(site):
            def handle(data):
                before = len(site.heard)
                answer = site.handle(data)
                asked.extend((site.index, text) for text in site.heard[before:] if "trained" in text)
                return answer

            return handle

        return {site.index: noting(site) for site in sites}

    network, sites, _ = start(tmp_path, "fedavg", handles, availability=f"file:{file}", evaluate="participants")
    run = play(network, tmp_path / "run")
    assert sorted((client, text[:7]) for client, text in asked) == [
        (0, "round 1"),
        (1, "round 1"),
        (1, "round 2"),
        (2, "round 2"),
    ]
    simulated = simulate(sites, tmp_path)
    assert rows(run.path) == rows(simulated.path)
    assert run.summary["conditions"] == simulated.summary["conditions"]
    assert run.summary["conditions"]["empty"] == 1
    assert sp.replay(run.path, "digits", out=tmp_path / "replay", **DATA).is_same


def test_a_trace_of_other_clients_is_refused_when_the_file_is_read(tmp_path):
    for index, trace in enumerate(("windows:2:0-0/1-1", "windows:0:0-0/1-1/0-1/0-1")):
        made = make(tmp_path / str(index), "fedavg", 3, availability=trace)
        with pytest.raises(SparsonaError, match=r"a trace of \d clients for 3"):
            Terms.read(made.path)
    for wrong in ("windows:2:0-2", "windows:2:1-0", "windows:0-0", "windows:0:a"):
        with pytest.raises(SparsonaError, match="availability"):
            network_of(availability=wrong)


# Through Flower, by the same server.


def the_last_two(round_, clients, available, generator):
    return available[::-1][:2]


def test_a_function_samples_through_flower(tmp_path, monkeypatch):
    _, sites, _ = start(tmp_path, "fedavg", per_round=2, rounds=2, sampler="given:the_last_two")
    found = []
    monkeypatch.setattr(flower.flower, "server_app", found.append)
    flower.server_app(the_last_two)
    flower.server_app()
    handles = in_memory({site.index: site.handle for site in sites})
    link = SimpleNamespace(exchange=handles, present=lambda: set(range(NUM)), max_bytes=0)
    made = sites[0].made
    config = {"federation": str(made.path), "out": str(tmp_path / "run"), "deadline": 5, "wait": 5}
    with pytest.raises(SparsonaError, match="sampled by the function 'the_last_two'") as caught:
        found[1](link, config)
    assert "server_app.py, server_app(..., sampler=the_last_two)" in caught.value.hint
    found[0](link, config)
    options = {**made.options, "sampler": the_last_two}
    simulated = replace(made, options=options).simulate(tmp_path / "simulated")
    assert rows(tmp_path / "run") == rows(simulated.path)
    assert {turn.client for turn in Records(tmp_path / "run" / "records.sqlite").turns()} == {NUM - 1, NUM - 2}


# Rates and epochs of each client.


def test_rates_and_epochs_by_the_names_of_clients(tmp_path):
    """They are in the file that all sides have. Late clients have theirs, too, and a replay."""
    own = {"client_epochs": {"site-1": 3, "3": 2}, "client_lr_scale": {"site-0": 0.25}}
    network, sites, _ = start(
        tmp_path, "fedavg", lambda sites: {s.index: s.handle for s in sites}, per_round=NUM, rounds=2, **own
    )
    assert network.terms.config.client_epochs == {1: 3, 3: 2}
    assert network.terms.config.client_lr_scale == {0: 0.25}
    run = play(network, tmp_path / "run")
    numbers = {"client_epochs": {1: 3, 3: 2}, "client_lr_scale": {0: 0.25}}
    made = replace(sites[0].made, options={**sites[0].made.options, **numbers})
    assert rows(run.path) == rows(made.simulate(tmp_path / "simulated").path)
    one, other = (Records(folder / "records.sqlite") for folder in (run.path, plain(sites, tmp_path)))
    steps = [{turn.client: turn.steps for turn in records.turns() if turn.round == 0} for records in (one, other)]
    assert [steps[0][client] / steps[1][client] for client in range(NUM)] == [1, 3, 1, 2]
    losses = [{turn.client: turn.loss for turn in records.turns() if turn.round == 0} for records in (one, other)]
    assert {client for client in range(NUM) if losses[0][client] != losses[1][client]} == {0, 1, 3}
    assert sp.replay(run.path, "digits", out=tmp_path / "replay", **DATA).difference == ""
    assert (
        "2 of the clients have epochs of their own, 2 to 3 in a round, the others as many as the method has"
        in run.protocol
    )


def plain(sites, folder):
    """The same without values of clients' own."""
    own = ("client_epochs", "client_lr_scale")
    options = {key: value for key, value in sites[0].made.options.items() if key not in own}
    return replace(sites[0].made, options=options).simulate(folder / "plain").path


def test_a_client_that_comes_late_has_its_own_epochs(tmp_path):
    late = [False]

    def handles(sites):
        answer = {site.index: site.handle for site in sites}
        return answer | {2: lambda data: sites[2].handle(data) if late[0] else None}

    class Come:
        def on_round(self, result):
            late[0] = True

    network, sites, _ = start(tmp_path, "fedavg", handles, 0.3, per_round=NUM, rounds=2, client_epochs=[1, 1, 3, 1])
    network.wait(NUM - 1, 1.0, lambda there, of: None)
    run = play_network(network, tmp_path / "run", [Come()])
    turns = {turn.client: turn for turn in Records(run.path / "records.sqlite").turns() if turn.round == 1}
    alone = Records(plain(sites, tmp_path) / "records.sqlite").turns()
    assert turns[2].steps == 3 * next(turn.steps for turn in alone if turn.client == 2)
    assert sp.replay(run.path, "digits", out=tmp_path / "replay", **DATA).difference == ""


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("client_epochs = [0]", "greater than or equal to 1"),
        ("client_epochs = [1.5]", "integer"),
        ("client_lr_scale = [inf]", "finite"),
        ("client_lr_scale = [-1.0]", "greater than 0"),
        ('client_lr_scale = {"site-9" = 0.5}', "unknown client 'site-9'"),
        ('client_epochs = {"7" = 2}', "client_epochs of client 7"),
        ('client_epochs = {"1" = 2, "site-1" = 3}', "client_epochs of client site-1 twice"),
        ("speeds = [1.0, 2.0]", "'speeds' in a federation file: only a simulation has it"),
    ],
)
def test_a_file_with_wrong_values_of_clients_is_refused(tmp_path, line, match):
    made = make(tmp_path, "fedavg", 3)
    name = line.partition(" ")[0]
    lines = [one for one in made.path.read_text().splitlines() if not one.startswith(f"{name} =")]
    made.path.write_text("\n".join(line if one.startswith("rounds =") else one for one in lines))
    with pytest.raises(SparsonaError, match=match):
        Terms.read(made.path)


# What no network can have, when the file is made.


@pytest.mark.parametrize("name", SIMULATED)
def test_what_is_only_simulated_says_what_to_use(name):
    values = {"speeds": [1.0, 2.0], "deadline": 1.0, "late": "partial"}
    with pytest.raises(SparsonaError, match=f"'{name}' in a federation file: only a simulation has it") as told:
        network_of(**{name: values.get(name, "sign-flip:0.2")})
    assert told.value.hint == SIMULATED[name][1]


def test_what_peers_cannot_decide_without_a_server(tmp_path):
    for options, match in (
        ({"patience": 3}, "patience for DisPFL, a run of peers"),
        ({"sampler": "size", "per_round": 2}, "sampler=size for DisPFL"),
        ({"sampler": oldest, "per_round": 2}, "sampler=given:oldest for DisPFL"),
    ):
        with pytest.raises(SparsonaError, match=match):
            network_of(method="dispfl", **options)
    with pytest.raises(SparsonaError, match="evaluate=participants"):
        network_of(patience=3, evaluate="participants")
    with pytest.raises(SparsonaError, match="'max_seconds' in a federation file"):
        network_of(max_seconds=3.0)
    assert network_of(patience=3)["evaluate"] == "everyone"
    assert given_name(network_of(sampler=oldest)["sampler"]) == "oldest"
