"""A run over frames is the simulation of it, to the bit; and goes on when clients do not."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from federations import make
from safetensors.torch import load_file

import sparsona as sp
from sparsona.core.errors import SparsonaError
from sparsona.core.update import SERVER, Support
from sparsona.deploy.exchange import in_memory
from sparsona.deploy.frames import seal, unseal
from sparsona.deploy.vault import Vault
from sparsona.engine import gate, jobs
from sparsona.experiment.network import Network
from sparsona.experiment.server_side import play_network, refusals_in_a_row
from sparsona.runs.records import FailureRow, Records
from sparsona.runs.verify import verify
from sparsona.wire.codec import decode, encode

NUM = 4
DATA = {"data_rate": 0.2}


def start(
    folder, method="fedspa", handles=lambda sites: {s.index: s.handle for s in sites}, deadline=1.0, own=None, **options
):
    """A server's side and its clients in this process, and what the server reports."""
    made = make(folder / "federation", method, NUM, data=DATA, **{"rounds": 3, **options})
    sites, heard = made.sites(folder / "vaults", **(own or {})), []
    network = made.network(in_memory(handles(sites)), deadline=deadline, report=heard.append)
    return network, sites, heard


def simulate(sites, folder):
    return sites[0].made.simulate(folder / "simulated")


def rows(run):
    records = Records(run.path / "records.sqlite")
    plain = [replace(row, seconds=0.0) for row in records.rounds()]
    return plain, records.turns(), records.evaluations(), records.failures()


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fedspa", {}),
        ("fedspa", {"evaluate": "participants", "points": ["trained", "global", "received/train"]}),
        ("fedspa", {"transform": ["bf16", "compact"]}),
        ("fedavg-ft", {"novel": 1, "drop_rate": 0.3, "points": ["global"]}),
        ("pfedgate", {"tune_epochs": 1}),
        ("local", {"evaluate": "participants"}),
        ("fedspa", {"sampler": "size"}),
        ("fedavg", {"sampler": "loss", "evaluate": "participants"}),
        ("fedspa", {"sampler": "round-robin", "availability": "diurnal:3:0.4"}),
        ("fedspa", {"client_epochs": [1, 3], "client_lr_scale": [1.0, 0.5, 0.1]}),
        ("fedavg-ft", {"client_epochs": {"1": 4}, "client_lr_scale": {"0": 0.3}, "tune_epochs": 1}),
        ("fedavg", {"availability": "windows:2:0-0/0-1/1-1/", "min_updates": 1}),
        ("fedspa", {"rounds": 8, "lr": 1e-9, "patience": 2}),
        ("fedavg-ft", {"rounds": 8, "lr": 1e-9, "patience": 2, "patience_metric": "loss", "min_delta": 1.0}),
    ],
)
def test_frames_give_the_simulations_records(tmp_path, method, options):
    network, sites, _ = start(tmp_path, method, **options)
    network.wait(NUM, 1.0, lambda there, of: None)
    run = play_network(network, tmp_path / "run")
    simulated = simulate(sites, tmp_path)
    assert rows(run) == rows(simulated)
    one, other = (path / "global.safetensors" for path in (run.path, simulated.path))
    assert one.exists() == other.exists()
    assert not one.exists() or one.read_bytes() == other.read_bytes()
    assert run.summary["accuracy"] == simulated.summary["accuracy"]
    sent, counted = (Records(one.path / "records.sqlite").evaluation_traffic() for one in (run, simulated))
    assert [replace(row, bytes_up=None) for row in sent] == counted  # a simulation sends no answers
    assert all(row.bytes_up > 100 * row.clients for row in sent)


def test_a_client_that_is_silent_is_recorded_and_the_round_goes_on(tmp_path):
    def handles(sites):
        return {site.index: site.handle for site in sites} | {1: silent_after_hello(sites[1])}

    network, sites, heard = start(tmp_path, handles=handles, per_round=4)
    network.wait(NUM, 1.0, lambda there, of: None)
    run = play_network(network, tmp_path / "run")
    records = Records(run.path / "records.sqlite")
    assert {(row.client, row.reason) for row in records.failures()} == {(1, "no answer within 1 s")}
    assert "site-1: no answer within 1 s" in heard
    turns = [turn for turn in records.turns() if turn.client == 1]
    assert all(turn.dropped and not turn.aggregated and turn.steps == 0 and turn.bytes_down for turn in turns)
    assert len(turns) == 3
    assert {turn.client for turn in records.turns() if turn.aggregated} == {0, 2, 3}
    assert not list(sites[1].folder.glob("*.state"))


def silent_after_hello(site):
    count = 0

    def handle(data):
        nonlocal count
        count += 1
        return site.handle(data) if count == 1 else None

    return handle


def test_too_few_updates_change_nothing(tmp_path):
    def handles(sites):
        return {site.index: site.handle for site in sites} | {k: silent_after_hello(sites[k]) for k in (0, 1, 2)}

    network, _, _ = start(tmp_path, handles=handles, per_round=4, min_updates=2, rounds=1)
    network.wait(NUM, 1.0, lambda there, of: None)
    run = play_network(network, tmp_path / "run")
    records = Records(run.path / "records.sqlite")
    assert [row.reason for row in records.failures() if row.client == 3] == ["1 of the 2 updates that a round needs"]
    assert records.rounds()[0].num_aggregated == 0


def test_a_killed_client_and_a_killed_server_come_back_to_the_same_bits(tmp_path):
    network, sites, _ = start(tmp_path)
    undisturbed = simulate(sites, tmp_path)
    network.wait(NUM, 1.0, lambda there, of: None)

    class Killed(BaseException):
        pass

    class KillAfter:
        def __init__(self):
            self.rounds = 0

        def on_round(self, result):
            self.rounds += 1
            raise Killed

    for _ in range(2):  # each start gets one round further, and all clients are restarted
        with pytest.raises(Killed):
            play_network(network, tmp_path / "run", [KillAfter()])
        for site in sites:
            site.start()
        network = Network(
            network.terms,
            in_memory({site.index: site.handle for site in sites}),
            network.connection.signer,
            network.connection.verifier,
        )
        network.wait(NUM, 1.0, lambda there, of: None)
    run = play_network(network, tmp_path / "run")
    assert rows(run) == rows(undisturbed)


@pytest.mark.parametrize("name", ["summary.json", "global.safetensors"])
def test_a_result_that_is_wrong_is_said_and_written_again(tmp_path, capsys, name):
    network, sites, _ = start(tmp_path, "fedavg", rounds=1)
    network.wait(NUM, 1.0, lambda there, of: None)
    path = play_network(network, tmp_path / "run").path
    before = (path / name).read_bytes()
    (path / name).write_bytes(before + b" ")
    (found,) = [one for one in verify(path).findings if one.state == "wrong"]
    assert "`sparsona resume`, while the run's clients can be reached, writes it again" in found.hint
    (path / "server.json").write_text(json.dumps({"flower": {}}))
    (found,) = [one for one in verify(path).findings if one.state == "wrong"]
    assert "`flwr run`, which starts the same app again, writes it again" in found.hint  # resume refuses it
    capsys.readouterr()
    for site in sites:
        site.start()
    exchange, connection = in_memory({site.index: site.handle for site in sites}), network.connection
    again = Network(network.terms, exchange, connection.signer, connection.verifier)
    again.wait(NUM, 1.0, lambda there, of: None)
    play_network(again, path)
    told = capsys.readouterr().err
    assert f"{name}' differs since the run was finished" in told
    assert "the file is written again from its records and checkpoint" in told
    assert (path / name).read_bytes() == before
    assert verify(path).is_right


def test_a_lost_vault_starts_anew(tmp_path):
    network, sites, heard = start(tmp_path, per_round=4)
    network.wait(NUM, 1.0, lambda there, of: None)

    class Lose:
        def on_round(self, result):
            if result.index == 0:
                for path in sites[2].folder.glob("*.state"):
                    path.unlink()

    run = play_network(network, tmp_path / "run", [Lose()])
    records = Records(run.path / "records.sqlite")
    found = {(row.round, row.client): row.reason for row in records.failures()}
    assert found == {(1, 2): "its state was lost: it started anew"}
    assert all(turn.aggregated for turn in records.turns())
    assert any("started anew" in text for text in heard)


def test_another_models_client_is_refused_before_training(tmp_path):
    network, sites, heard = start(tmp_path)
    sites[0].agent.greeting = replace(sites[0].agent.greeting, start="0" * 32)
    with pytest.raises(SparsonaError, match="3 of 4 clients came"):
        network.wait(NUM, 0.0, lambda there, of: None)
    assert any("site-0 cannot take part: the server has other initial weights" in text for text in heard)


def test_old_frames_and_frames_of_others_are_not_answered(tmp_path):
    seen = []

    def handles(sites):
        def listening(site):
            def handle(data):
                seen.append((site.index, data))
                return site.handle(data)

            return handle

        return {site.index: listening(site) for site in sites}

    network, sites, _ = start(tmp_path, handles=handles, per_round=4)
    network.wait(NUM, 1.0, lambda there, of: None)
    play_network(network, tmp_path / "run")
    answered = [(index, data) for index, data in seen if sites[index].agent.handle(data) is not None]
    assert sorted(answered) == sorted(dict(seen).items())  # to the last one again, to none before it
    assert len(seen) > 2 * len(answered)
    assert all(sites[(index + 1) % NUM].agent.handle(data) is None for index, data in seen)
    _, data = seen[-1]
    assert sites[seen[-1][0]].agent.handle(data[:-1] + bytes([data[-1] ^ 1])) is None


def test_an_answer_of_somebody_else_does_not_count_against_a_client(tmp_path):
    def handles(sites):
        def another_answers(data):
            answer = sites[1].handle(data)
            return answer if count() <= 1 else answer[:-1] + bytes([answer[-1] ^ 1])

        calls = []

        def count():
            calls.append(1)
            return len(calls)

        return {site.index: site.handle for site in sites} | {1: another_answers}

    network, _, _ = start(tmp_path, handles=handles, per_round=4, rounds=5)
    network.wait(NUM, 1.0, lambda there, of: None)
    run = play_network(network, tmp_path / "run")
    reasons = {(row.client, row.reason) for row in Records(run.path / "records.sqlite").failures()}
    assert {client for client, _ in reasons} == {1}
    assert all("not its own" in reason for _, reason in reasons)  # and in no round "not asked"


def test_an_update_that_assumes_another_mask_is_refused_and_the_run_goes_on(tmp_path, monkeypatch):
    """The gate does not know which mask the server has for a client: the method notices."""

    def handles(sites):
        finish = type(sites[0].agent)._perform

        def lie(agent, context, job):
            outcome = finish(agent, context, job)
            if agent.client != 1 or outcome.message is None:
                return outcome
            update = decode(outcome.message)
            name, part = next((name, part) for name, part in update.parts.items() if part.support is Support.KNOWN)
            forged = replace(part, digest=bytes(8))
            return replace(outcome, message=encode(replace(update, parts={**update.parts, name: forged})))

        monkeypatch.setattr(type(sites[0].agent), "_perform", lie)
        return {site.index: site.handle for site in sites}

    network, _, heard = start(tmp_path, handles=handles, per_round=4, rounds=5)
    network.wait(NUM, 1.0, lambda there, of: None)
    run = play_network(network, tmp_path / "run")
    records = Records(run.path / "records.sqlite")
    reasons = [row.reason for row in records.failures() if row.client == 1]
    assert [reason.startswith("refused") for reason in reasons] == [True, True, True, False, False]
    assert reasons[3].startswith("not asked")
    assert heard.count("site-1 is not asked: its last 3 answers were refused") == 1
    told = [text.partition(": refused: ")[0] for text in heard if ": refused: " in text]
    assert told == [f"site-1, round {number}" for number in (1, 2, 3)]  # as everywhere, the first is round 1
    assert {turn.client for turn in records.turns() if turn.aggregated} == {0, 2, 3}
    assert [refusals_in_a_row(records, completed) for completed in (0, 2, 5)] == [{}, {1: 2}, {1: 3}]
    again = Network(network.terms, in_memory({}), network.connection.signer, network.connection.verifier)
    play_network(again, tmp_path / "run")
    assert again.connection.refusals == {1: 3}  # a restart of the server does not lift the bar


def test_a_message_is_decoded_once(tmp_path, monkeypatch):
    senders = []

    def counting(data, *expected):
        update = decode(data, *expected)
        senders.append(update.sender)
        return update

    for module in (gate, jobs):
        monkeypatch.setattr(module, "decode", counting)
    network, *_ = start(tmp_path, rounds=1, per_round=4)
    network.wait(NUM, 1.0, lambda there, of: None)
    play_network(network, tmp_path / "run")
    assert sorted(sender for sender in senders if sender != SERVER) == [0, 1, 2, 3]


def test_refusals_in_a_row_are_counted_as_a_running_server_does():
    """Lost turns and what a client says it cannot do count neither way; an update that was used starts again."""
    reasons = ["refused: x", "no answer within 1 s", "refused: it says that it cannot: x", "refused: x"]
    assert refusals(reasons) == 2
    assert refusals([*reasons, ""]) == 0
    assert refusals([*reasons, "its state was lost: it started anew", "refused: x"]) == 1
    assert refusals([*reasons, "1 of the 2 updates that a round needs"]) == 0


def refusals(reasons):
    class Told:
        def failures(self):
            return [FailureRow(index, 0, reason) for index, reason in enumerate(reasons) if reason]

        def turns(self):
            return [SimpleNamespace(round=index, client=0, dropped=bool(why)) for index, why in enumerate(reasons)]

    return refusals_in_a_row(Told(), len(reasons)).get(0, 0)


@pytest.mark.parametrize("method", ["fedavg-ft", "fedspa"])
def test_a_client_keeps_the_model_that_the_simulation_has_for_it(tmp_path, method):
    own = {"tune_epochs": 1} if method == "fedavg-ft" else {}
    network, sites, _ = start(tmp_path, method, **own)
    network.wait(NUM, 1.0, lambda there, of: None)
    play_network(network, tmp_path / "run")
    simulated = simulate(sites, tmp_path)
    for site in sites:
        kept = load_file(site.agent.vault.model)
        expected = simulated.personal_model(site.index).state_dict()
        assert {name: value.tolist() for name, value in kept.items()} == {
            name: value.tolist() for name, value in expected.items()
        }


def lie_about(change):
    """A function of sites, for `start`: client 1's answers to jobs have a changed head, which it signs."""

    def handles(sites):
        def handle(data):
            answer = sites[1].handle(data)
            frame = unseal(answer, sites[1].made.roster, run=sites[1].terms.run, receiver=SERVER)
            if "tally" not in frame.head:
                return answer
            return seal(replace(frame, head=change(dict(frame.head))), sites[1].key)

        return {site.index: site.handle for site in sites} | {1: handle}

    return handles


def with_result(**values):
    def change(head):
        head["evaluations"] = [{**one, **values} for one in head["evaluations"]]
        return head

    return change


def twice(head):
    head["evaluations"] = head["evaluations"] * 2
    return head


def with_flops(head):
    return {**head, "tally": {**head["tally"], "train_flops": 2**63 - 1}}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_flops, "a count of"),
        (with_result(count=2**62, correct=2**62), "a result of"),
        (with_result(count=1, correct=0), "a result of 1 examples"),
        (with_result(correct=None), "another kind of task"),
        (with_result(confusion=[[1, 2], [3, 4]]), "confusion"),
        (twice, "two results"),
    ],
)
def test_what_a_client_says_of_itself_must_be_possible(tmp_path, change, reason):
    points = {"points": ["trained"]}  # evaluated in the turn
    network, _, _ = start(tmp_path, handles=lie_about(change), per_round=4, rounds=1, **points)
    network.wait(NUM, 1.0, lambda there, of: None)
    run = play_network(network, tmp_path / "run")
    records = Records(run.path / "records.sqlite")
    assert [row.client for row in records.failures()] == [1]
    assert reason in records.failures()[0].reason
    assert {turn.client for turn in records.turns() if turn.aggregated} == {0, 2, 3}
    assert run.report(tmp_path / "page.html").exists()


def test_a_refusal_in_final_tuning_is_not_said_to_be_in_a_round(tmp_path):
    options = {"method": "fedavg-ft", "tune_epochs": 1, "per_round": 4, "rounds": 1}
    network, _, heard = start(tmp_path, handles=lie_about(with_result(count=1, correct=0)), **options)
    network.wait(NUM, 1.0, lambda there, of: None)
    play_network(network, tmp_path / "run")
    assert [text for text in heard if "refused" in text] == ["site-1, after round 1: refused: a result of 1 examples"]


def test_a_vault_has_one_owner_at_a_time(tmp_path):
    first, second = Vault(tmp_path / "vault"), Vault(tmp_path / "vault")
    first.claim("run", 0, "data")
    with pytest.raises(SparsonaError, match="in use by another process"):
        second.claim("run", 0, "data")
    first.release()
    second.claim("run", 0, "data")
    second.release()
    with pytest.raises(SparsonaError, match="belongs to other data"):
        first.claim("run", 0, "other data")


def test_a_client_that_comes_back_with_other_data_is_refused(tmp_path):
    network, sites, _ = start(tmp_path, rounds=1)
    network.wait(NUM, 1.0, lambda there, of: None)
    play_network(network, tmp_path / "run")
    sites[2].agent.greeting = replace(sites[2].agent.greeting, data="other")
    heard = []
    handles = {site.index: site.handle for site in sites}
    signer, verifier = network.connection.signer, network.connection.verifier
    again = Network(network.terms, in_memory(handles), signer, verifier, report=heard.append)
    again.gather_guests(tmp_path / "run", NUM, 0.0, lambda there, of: None)  # it is over: nobody is waited for
    assert set(again.guests) == {0, 1, 3}
    assert any("site-2 cannot take part: its data is not what it was" in text for text in heard)


def test_other_versions_are_told_on_both_sides_and_recorded(tmp_path):
    """Only another model is refused: another version of torch is reported, and stands in the protocol sentence."""
    network, sites, heard = start(tmp_path, rounds=1)
    mine = sites[0].agent.greeting
    other = {**mine.environment, "torch": "1.0\x1b[2J", "python": "2.7"}
    sites[0].agent.greeting = replace(mine, environment=other)
    network.wait(NUM, 1.0, lambda there, of: None)
    (told,) = [text for text in heard if "last bits" in text]
    here = mine.environment
    assert told.startswith(
        f"site-0 has python 2.7 (here {here['python']}), torch 1.0?[2J (here {here['torch']}): results"
    )
    assert any(text.startswith(f"the server has python {here['python']} (here 2.7)") for text in sites[0].heard)
    assert not any("last bits" in text for text in sites[1].heard)
    run = play_network(network, tmp_path / "run")
    assert f"Its machines differ in python (2.7 and {here['python']}), torch (1.0?[2J and " in run.protocol
    assert sp.load(run.path)._folder.facts.differing["python"] == ("2.7", here["python"])
    guests = json.loads((run.path / "guests.json").read_text(encoding="utf-8"))
    assert [guest["environment"]["python"] for guest in guests].count("2.7") == 1


def diverge(monkeypatch, client, at):
    """Let the training of one client diverge in one round, wherever it runs."""
    from sparsona.core.errors import DivergedError
    from sparsona.engine import turn

    original = turn.record_phase

    def record_phase(task, tally, round_, *args):
        original(task, tally, round_, *args)
        if (round_.client.index, round_.index) == (client, at):
            raise DivergedError(f"training diverged: client {client}'s loss is nan in round {at}", hint="lower --lr")

    monkeypatch.setattr(turn, "record_phase", record_phase)


def test_a_client_that_diverges_says_so_and_is_asked_again(tmp_path, monkeypatch):
    diverge(monkeypatch, 1, at=1)
    network, sites, heard = start(tmp_path, per_round=4)
    network.wait(NUM, 1.0, lambda there, of: None)
    run = play_network(network, tmp_path / "run")
    assert rows(run) == rows(simulate(sites, tmp_path))
    assert rows(run)[3] == [FailureRow(1, 1, "training diverged: client 1's loss is nan in round 1")]
    assert any("training diverged" in text for text in heard)
    assert not network.connection.refusals
    assert "1 of 12 turns diverged and was left out" in run.protocol


def test_an_answer_that_diverged_and_has_a_result_is_refused(tmp_path):
    network, _, _ = start(
        tmp_path, handles=lie_about(lambda head: {**head, "failure": "\x1b[2J"}), per_round=4, rounds=1
    )
    network.wait(NUM, 1.0, lambda there, of: None)
    run = play_network(network, tmp_path / "run")
    assert "refused: an answer that says that training diverged, and has a result" in rows(run)[3][0].reason


def test_a_clients_log_counts_rounds_from_one_and_has_plain_words(tmp_path):
    made = make(tmp_path / "federation", "fedavg", 2, rounds=2, data={**DATA, "validation_rate": 0.2})
    sites = made.sites(tmp_path / "vaults")
    network = made.network(in_memory({site.index: site.handle for site in sites}))
    network.wait(2, 5.0, lambda there, of: None)
    play_network(network, tmp_path / "run")
    told = [text for text in sites[0].heard if "the server" not in text]
    assert [text for text in told if "trained" in text] == ["round 1: trained", "round 2: trained"]
    tested = [text for text in told if text.startswith("after round 2: accuracy ")]
    assert tested
    assert tested[0].endswith("% on test data")
    assert not any("received" in text for text in told)
