"""Peers on their own are the simulation of them, to the bit; and go on when others do not."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from dataclasses import replace

import pytest
import torch
from federations import make, rows

from sparsona.core.errors import SparsonaError
from sparsona.deploy import peer
from sparsona.deploy.exchange import in_threads
from sparsona.deploy.frames import Frame, seal, unseal
from sparsona.deploy.journal import Entry, Journal
from sparsona.deploy.remote import LostError
from sparsona.deploy.vault import Vault
from sparsona.engine.jobs import Outcome
from sparsona.experiment.gather import gather
from sparsona.experiment.peers import be_peer, make_peer
from sparsona.runs.records import Records
from sparsona.runs.verify import verify
from sparsona.wire.codec import decode, encode
from sparsona.wire.ledger import Traffic

LONG = 60.0  # a deadline that no test waits for
NUM = 4


@pytest.fixture(autouse=True)
def one_thread():
    """Peers of one process share torch's setting, on which bits depend."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Killed(BaseException):
    """Stands for a power failure: nothing after it is done."""


class Party:
    """Peers of one process, each of which can be started, killed and started again."""

    def __init__(self, folder, method="dispfl", num=NUM, *, deadline=LONG, exchange=None, **options):
        self.made = make(folder / "federation", method, num, **{"rounds": 3, **options})
        self.folder, self.deadline = folder / "peers", deadline
        self.handles = {}
        self.exchange = exchange or (lambda index: in_threads(self.handles))
        self.peers, self.errors, self.heard, self._threads = {}, {}, {}, {}
        self.before_play = lambda peer: None

    def start(self, index):
        self.heard.setdefault(index, [])
        found = make_peer(
            self.made.terms,
            index,
            self.made.own_data(index),
            self.folder / f"site-{index}",
            self.exchange(index),
            self.made.key(index),
            self.made.roster,
            deadline=self.deadline,
            grace=self.deadline,
            report=self.heard[index].append,
        )
        self.peers[index] = found
        self.before_play(found)

        def play():
            try:
                found.wait(seconds=LONG)
                found.play()
            except BaseException as error:
                self.errors[index] = error
            finally:
                if self.handles.get(index) == found.handle:
                    del self.handles[index]
                found.close()

        self.handles[index] = found.handle
        self._threads[index] = threading.Thread(target=play, daemon=True)
        self._threads[index].start()

    def join(self, index):
        self._threads[index].join(180)
        assert not self._threads[index].is_alive(), f"peer {index} hangs"

    def play(self, indices=None):
        indices = range(self.made.num_clients) if indices is None else indices
        for index in indices:
            self.start(index)
        for index in indices:
            self.join(index)
        return self

    def folders(self, indices=None):
        return [
            self.folder / f"site-{index}" for index in (range(self.made.num_clients) if indices is None else indices)
        ]

    def gather(self):
        return gather(self.folder.parent / "run", self.folders())

    def simulate(self):
        return self.made.simulate(self.folder.parent / "simulated")


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("dispfl", {"evaluate": "participants", "points": ("received", "trained", "consensus")}),
        ("dispfl", {"graph": "ring", "drop_rate": 0.3}),
        ("dispfl", {"graph": "random:2", "per_round": 2, "eval_every": 2, "drop_rate": 0.2, "rounds": 14}),
        ("dispfl", {"graph": "random:1", "per_round": 3, "tune_epochs": 1, "novel": 1}),
        ("dpsgd", {"graph": "ring", "drop_rate": 0.3}),
        ("dpsgd-ft", {"graph": "random:2", "rounds": 2, "tune_epochs": 1}),
        ("fedfomo", {"num_candidates": 1}),
        ("dispfl", {"graph": "ring", "rounds": 2, "client_epochs": [1, 2], "client_lr_scale": [0.5, 1.0, 0.1]}),
        ("dispfl", {"sampler": "round-robin", "per_round": 2, "availability": "markov:0.6:0.3", "rounds": 6}),
    ],
)
def test_peers_give_the_simulations_records_and_states(tmp_path, method, options):
    data = {"data_rate": 0.1, "partition": "dirichlet:2"}
    data |= {"validation_rate": 0.2} if method == "fedfomo" else {}
    party = Party(tmp_path, method, data=data, **options).play()
    assert party.errors == {}
    run, simulated = party.gather(), party.simulate()
    assert rows(run.path) == rows(simulated.path)
    assert evaluation_traffic(run) == evaluation_traffic(simulated)
    for name in ("accuracy", "bytes", "flops", "steps", "rounds", "conditions"):
        assert run.summary.get(name) == simulated.summary.get(name)
    assert verify(run.path).is_right  # without a shared model, which nobody has made
    assert states(party) == simulated_states(simulated)
    assert not any("not waiting" in text for heard in party.heard.values() for text in heard)  # all said when to end
    for folder in party.folders():  # what nobody needs any more was removed
        assert len(list(folder.glob("*.message"))) <= 3
        assert (folder / "model.safetensors").exists()


def evaluation_traffic(run):
    return Records(run.path / "records.sqlite").evaluation_traffic()


def states(party):
    """The State of each peer that trained, as it lies in its vault."""
    found = {}
    for index, folder in enumerate(party.folders()):
        _, entries = Journal(folder).read()
        tickets = [entry.ticket for entry in entries if entry.ticket]
        assert {path.stem for path in folder.glob("*.state")} == set(tickets[-1:])
        if tickets:
            found[index] = (folder / f"{tickets[-1]}.state").read_bytes()
    return found


def simulated_states(run):
    files = json.loads((run.path / "checkpoint" / "manifest.json").read_text())["files"]
    names = {owner.partition("/")[2]: entry.split()[0] for owner, entry in files.items() if owner.startswith("client/")}
    return {int(index): (run.path / "checkpoint" / name).read_bytes() for index, name in names.items()}


def test_messages_are_kept_for_those_that_are_behind(tmp_path):
    """Peers that do not need a slow one run ahead of it; what it needs of them is still there when it comes to that."""
    options = {"graph": "random:1", "rounds": 8, "eval_every": 20, "points": ("received",)}

    def wait_for_the_others():
        """Until one of them is three rounds ahead, or none can be, because all need this one."""
        ends = time.monotonic() + 1.0
        while time.monotonic() < ends:
            if max(found.completed for found in party.peers.values()) > party.peers[3].completed + 2:
                break
            time.sleep(0.02)

    def exchange(index):
        def slow(items, deadline):
            if index == 3 and party.peers[3].sizes.keys() == {0, 1, 2, 3}:
                wait_for_the_others()
            yield from in_threads(party.handles)(items, deadline)

        return slow

    party = Party(tmp_path, exchange=exchange, **options)
    ahead = []
    party.before_play = lambda found: setattr(
        found, "_make_room", lambda inner=found._make_room: (inner(), ahead.append(len(found._sent)))
    )
    party.play()
    assert party.errors == {}
    assert max(ahead) > 2
    assert rows(party.gather().path) == rows(party.simulate().path)


class Fault:
    """Kills a peer before or after the n-th of its steps: a question, a State, a line of the journal."""

    def __init__(self, at, after):
        self.at, self.after, self.count = at, after, 0

    def wrap(self, function):
        def wrapped(*args, **options):
            self.count += 1
            if self.count == self.at and not self.after:
                raise Killed
            found = function(*args, **options)
            if self.count == self.at:
                raise Killed
            return found

        return wrapped


@pytest.mark.parametrize("graph", ["ring", "random:1"])
def test_a_peer_that_is_killed_again_and_again_comes_back_to_the_same_bits(tmp_path, graph):
    party = Party(tmp_path, graph=graph, drop_rate=0.2, rounds=5)
    moments = [(1, False), (2, True), (3, False), (1, True), (4, True), (2, False), (3, True), (3, False)]

    def arm(found):
        if found.client == 1 and moments:
            fault = Fault(*moments[0])
            found._journal.append = fault.wrap(found._journal.append)
            found.vault.put = fault.wrap(found.vault.put)
            found._fetch = fault.wrap(found._fetch)
            found._make_room = fault.wrap(found._make_room)

    party.before_play = arm
    for index in range(4):
        party.start(index)
    num_killed, renamed = 0, []
    while moments:
        party.join(1)
        num_killed += isinstance(party.errors.pop(1, None), Killed)
        moments.pop(0)
        with (party.folders()[1] / "journal.jsonl").open("a") as file:
            file.write('{"kind": "tu')  # a line that the kill cut off
        for kept in party.peers[1].vault.folder.glob("sent-*.message"):  # as older versions call them
            kept.rename(kept.with_name(kept.name.replace("sent-", "said-")))
            renamed.append(kept)
        party.start(1)
    for index in range(4):
        party.join(index)
    assert party.errors == {}
    assert num_killed == 8
    assert renamed
    simulated = party.simulate()
    assert rows(party.gather().path) == rows(simulated.path)
    assert states(party) == simulated_states(simulated)


def test_a_peer_that_stays_away_is_recorded_and_the_others_go_on(tmp_path):
    party = Party(tmp_path, graph="ring", rounds=4, deadline=2.0)
    has_heard = {0: threading.Event(), 2: threading.Event()}  # what 3 sent in round 1

    def watch(fetch, event):
        def fetched(index, peers):
            heard, lost = fetch(index, peers)
            if index == 2 and 3 in heard:
                event.set()
            return heard, lost

        return fetched

    def die(evaluate):
        def evaluated(completed, *rest):
            evaluate(completed, *rest)
            if completed == 2:
                assert all(event.wait(LONG) for event in has_heard.values())
                raise Killed

        return evaluated

    def arm(found):
        if found.client in has_heard:
            found._fetch = watch(found._fetch, has_heard[found.client])
        elif found.client == 3:
            found._evaluate = die(found._evaluate)

    party.before_play = arm
    party.play()
    assert {index: type(error) for index, error in party.errors.items()} == {3: Killed}
    records = Records(party.gather().path / "records.sqlite")
    found = {(row.round, row.client): row.reason for row in records.failures()}
    assert found[2, 3] == "its journal ends before this round"  # what it said in round 1 was heard
    assert found[3, 3] == "its journal ends before this round; no answer within 2 s (not heard by 0, 2)"
    assert {row.client for row in records.evaluation_failures()} == {3}
    assert {client for _, client in found} == {3}  # nobody else was lost, though all waited for one that was
    turns = [turn for turn in records.turns() if turn.client == 3]
    assert [turn.dropped for turn in turns] == [False, False, True, True]
    assert [row.num_trained for row in records.rounds()] == [4, 4, 3, 3]
    assert len(records.evaluations(completed=4, point="received")) == 3


def forge(message, number):
    """What a neighbour with a key of the roster might send."""
    update = decode(message)
    part = update.parts["model"]
    values = part.values.clone()
    if number % 5 == 0:
        values[0] = float("nan")
    elif number % 5 == 1:
        values *= 1e30
    elif number % 5 == 2:
        return encode(replace(update, weight=1e300))
    elif number % 5 == 3:
        return encode(replace(update, round=update.round + 1))
    else:
        return message[:-7]
    return encode(replace(update, parts={**update.parts, "model": replace(part, arrived=values, whole=None)}))


def test_forged_messages_of_a_neighbour_are_refused_and_nobody_else_is_harmed(tmp_path):
    party = Party(tmp_path, graph="full", rounds=4)

    def corrupt(found):
        def commit(entry, commit=found._commit):
            if entry.message:
                path = found._message_path(entry.round)
                path.write_bytes(forge(path.read_bytes(), entry.round))
            commit(entry)

        if found.client == 2:
            found._commit = commit

    party.before_play = corrupt
    party.play()
    assert party.errors == {}
    records = Records(party.gather().path / "records.sqlite")
    found = {(row.round, row.client): row.reason for row in records.failures()}
    assert set(found) == {(index, 2) for index in (1, 2, 3, 4)}
    assert all(reason.endswith(" (not heard by 0, 1, 3)") for reason in found.values())
    assert "not finite" in found[1, 2]
    assert "too large" in found[2, 2]
    assert "weight 1e+300" in found[3, 2]
    assert "not asked: its last 3 answers were refused" in found[4, 2]
    assert all(turn.bytes_up == 0 for turn in records.turns() if turn.client == 2)
    assert all(turn.aggregated for turn in records.turns())


def test_what_makes_training_diverge_is_not_the_victims_end(tmp_path, monkeypatch):
    party = Party(tmp_path, graph="ring", rounds=2)
    original = peer.Gossip.play

    def diverge(self, population, index):
        if index == 1 and self._here == (0,) and len(population.messages) > 1:
            raise SparsonaError("training diverged: client 0's loss is nan in round 1")
        return original(self, population, index)

    monkeypatch.setattr(peer.Gossip, "play", diverge)
    party.play()
    assert party.errors == {}
    records = Records(party.gather().path / "records.sqlite")
    assert [(row.round, row.client) for row in records.failures()] == [(1, 0)]
    assert "trained on alone" in records.failures()[0].reason


def test_an_answer_to_an_earlier_question_is_not_heard(tmp_path):
    old = {}

    def exchange(index):
        def replay(items, deadline):
            for client, answer in in_threads(party.handles)(items, deadline):
                if index == 0 and client == 1 and answer is not None:
                    frame = unseal(answer, party.made.roster, run=party.made.terms.run, receiver=0)
                    if frame.round == 2 and frame.blobs:
                        answer = old[1]  # the answer to an earlier question
                    elif frame.blobs:
                        old.setdefault(1, answer)
                yield client, answer

        return replay

    party = Party(tmp_path, exchange=exchange, graph="ring")
    party.play()
    assert party.errors == {}
    _, entries = Journal(party.folders()[0]).read()
    assert {entry.lost[1] for entry in entries if entry.lost} == {
        "an answer that is not its own: one of peer 1 to something else"
    }


@pytest.fixture(scope="module")
def overheard(tmp_path_factory):
    """Two runs of the same peers that are over, and all questions and answers of both."""
    folder, heard, first = tmp_path_factory.mktemp("overheard"), [], None

    def listen(party):
        def exchange(index):
            def overhear(items, deadline):
                asked = dict(items)
                for client, answer in in_threads(party.handles)(asked.items(), deadline):
                    said.append((index, client, asked[client], answer))
                    yield client, answer

            return overhear

        said = []
        party.exchange = exchange
        return said

    for name, graph in (("one", "ring"), ("other", "full")):
        party = Party(folder / name, graph=graph, rounds=4, keys_of=first)
        first = first or party.made
        said = listen(party)
        party.play()
        assert party.errors == {}
        for found in party.peers.values():
            found._closed = False  # to see what it would answer
        heard.append((party, said))
    return heard


def vaults(party):
    return {path: path.read_bytes() for path in party.folder.rglob("*") if path.is_file()}


def test_questions_of_others_are_not_answered(overheard):
    (party, _), (other, _) = overheard
    found, keys, terms = party.peers[0], [party.made.key(index) for index in range(NUM)], party.made.terms
    question = Frame(terms.run, "pull", 1, 0, 3, "a", {"hold": 0.0})
    assert found.handle(seal(question, keys[1])) is not None
    for frame, key in (
        (question, keys[2]),  # another's key
        (replace(question, run=other.made.terms.run), keys[1]),
        (replace(question, receiver=2), keys[1]),
        (replace(question, sender=0), keys[0]),
        (replace(question, sender=NUM), keys[1]),
        (replace(question, kind="job"), keys[1]),
    ):
        assert found.handle(seal(frame, key)) is None
    assert found.handle(b"") is None
    assert found.handle(seal(replace(question, round=99), keys[1])) is not None  # not yet: at once, since hold is 0


MANY = pytest.mark.parametrize("number", [200, pytest.param(10_000, marks=pytest.mark.slow)])


@MANY
def test_replayed_answers_are_no_answers(overheard, number):
    """Of an earlier round, to the same question asked again, and of another run: as many of each."""
    (party, said), (_, foreign) = overheard
    asker, draws = party.peers[0], random.Random(3)
    old = [(client, answer) for index, client, _, answer in said if index == 0 and answer]
    strange = [(client, answer) for index, client, _, answer in foreign if index == 0 and answer]
    assert len({answer for _, answer in old}) > 10
    accepted = dict.fromkeys(("an earlier round", "another run"), 0)
    for kind, answers in (("an earlier round", old), ("another run", strange)):
        for _ in range(number):
            client, answer = draws.choice(answers)
            asked = asker._question("pull", client, draws.randrange(1, 5), {"hold": 0.0})
            with contextlib.suppress(SparsonaError, LostError):
                asker._open(answer, asked, len(answer))
                accepted[kind] += 1
    assert accepted == {"an earlier round": 0, "another run": 0}


@MANY
def test_replayed_questions_change_nothing(overheard, number):
    """One of another run is not answered; one of an earlier round is answered with what was said then, or not at all:
    whoever replays it learns nothing new, and the peer's folder and what it owes others stay as they are."""
    (party, said), (_, foreign) = overheard
    draws = random.Random(4)
    before = vaults(party), [dict(one._done) for one in party.peers.values()]
    strange = [(client, asked) for _, client, asked, _ in foreign]
    assert sum(party.peers[client].handle(asked) is not None for client, asked in draws.choices(strange, k=number)) == 0
    first: dict[bytes, bytes] = {}
    for _, client, asked, answer in draws.choices([one for one in said if one[3]], k=number):
        again = party.peers[client].handle(asked)
        assert again == first.setdefault(asked, again)
        frame = unseal(asked, party.made.roster, run=party.made.terms.run, receiver=client)
        told = again and unseal(again, party.made.roster, run=party.made.terms.run, receiver=frame.sender)
        if told and told.blobs:
            assert told.blobs == unseal(answer, party.made.roster, run=frame.run, receiver=frame.sender).blobs
    assert (vaults(party), [dict(one._done) for one in party.peers.values()]) == before


def test_another_models_peer_is_refused_before_training(tmp_path):
    party = Party(tmp_path, rounds=1, deadline=0.5)
    party.before_play = lambda found: (
        setattr(found, "greeting", replace(found.greeting, start="0" * 32)) if found.client == 0 else None
    )
    for index in (1, 2, 0):
        party.start(index)
    party.join(0)
    assert "this peer's model is another than that of" in str(party.errors[0])
    assert any("site-0 cannot take part: site-0 has other initial weights" in text for text in party.heard[1])
    assert party.peers[1].completed == 0
    for index in (1, 2):
        party.peers[index].sizes.update({0: (9, 0, 9), 3: (9, 0, 9)})  # lets them go on, and end
    for index in (1, 2):
        party.join(index)


def test_other_versions_are_told_and_gathered(tmp_path):
    party = Party(tmp_path, rounds=1, num=2)
    old = {"torch": "1.0"}
    party.before_play = lambda found: (
        setattr(found, "greeting", replace(found.greeting, environment=old)) if found.client == 0 else None
    )
    party.play()
    assert any(text.startswith("site-0 has torch 1.0 (here ") for text in party.heard[1])
    journal = party.folders()[0] / "journal.jsonl"
    first, *lines = journal.read_text(encoding="utf-8").splitlines(keepends=True)
    journal.write_text(json.dumps(json.loads(first) | {"environment": old}) + "\n" + "".join(lines), encoding="utf-8")
    run = party.gather()
    with pytest.raises(SparsonaError, match="is a run already") as told:
        party.gather()
    assert "sparsona gather" in told.value.hint
    assert "Its machines differ in torch (1.0 and " in run.protocol


def test_what_cannot_be_gathered(tmp_path):
    party = Party(tmp_path, rounds=1, num=2).play()
    foreign = Party(tmp_path / "foreign", rounds=1, num=2, seed=8).play()
    one, two = party.folders()
    for folders, what in (
        ([one], "the journal of site-1 is missing"),
        ([one, foreign.folders()[1]], "is of another run than"),
        ([one, two, two], "is a second journal of site-1"),
        ([one, tmp_path], "has no journal"),
        ([], "no folders of peers"),
    ):
        with pytest.raises(SparsonaError, match=what):
            gather(tmp_path / "run", folders)
    assert not (tmp_path / "run").exists()
    run = gather(tmp_path / "run", [one], partial=True)
    assert [(row.client, row.reason) for row in Records(run.path / "records.sqlite").failures()] == [
        (1, "its journal was not gathered")
    ]
    journal = two / "journal.jsonl"
    journal.write_text(journal.read_text().replace('"round": 0', '"round": 7'))
    with pytest.raises(SparsonaError, match="rounds are missing"):
        gather(tmp_path / "again", [one, two])
    foreign.folder = party.folder
    with pytest.raises(SparsonaError, match="belongs to another run or peer"):
        foreign.start(0)


@pytest.mark.slow
def test_a_net_that_is_cut_in_two_and_joined_again_goes_on(tmp_path):
    num, rounds = 16, 24
    options = {"rounds": rounds, "graph": "random:3", "points": ("received",), "headline": "received"}

    def exchange(index):
        def cut(items, deadline):
            is_cut = 2 <= party.peers[index].completed < 22
            items = list(items)
            beyond = [client for client, _ in items if is_cut and (client < num // 2) != (index < num // 2)]
            yield from in_threads(party.handles)([item for item in items if item[0] not in beyond], deadline)
            if beyond:
                time.sleep(deadline)
            yield from ((client, None) for client in beyond)

        return cut

    party = Party(tmp_path, "dpsgd", num, deadline=4.0, exchange=exchange, **options)
    party.play()
    assert party.errors == {}
    records = Records(party.gather().path / "records.sqlite")
    assert [row.num_trained for row in records.rounds()] == [num] * rounds
    lost = {row.round for row in records.failures()}
    assert {5, 10, 20} <= lost
    assert not {rounds - 1, rounds} & lost  # all are heard again
    withheld = {row.client for row in records.evaluation_failures()}  # they have too few examples
    assert all(len(records.evaluations(completed=at, point="received")) == num - len(withheld) for at in (1, rounds))


def test_a_peer_has_its_folder_for_itself(tmp_path):
    made = make(tmp_path / "federation", "dispfl", 2, rounds=1)
    other = Vault(tmp_path / "mine")
    other.claim(made.terms.run, 0, "data")
    with pytest.raises(SparsonaError, match="in use by another process"):
        be_peer(made.path, "digits", key=made.key_path(0), listen=[":9"], vault=tmp_path / "mine", **made.data)
    other.release()
    assert not (tmp_path / "mine" / "journal.jsonl").exists()


def test_refusals_of_a_neighbour_are_in_the_journal():
    """What was fetched for a round is told twice, and counts once; a message that was mixed starts the count again."""
    refused, traffic = {1: "refused: x"}, {1: Traffic(down=1)}
    told = [Entry("evaluation", 1, Outcome(0), lost=refused), Entry("turn", 1, Outcome(0), lost=refused)]
    told += [Entry("turn", 2, Outcome(0), lost=refused), Entry("turn", 3, Outcome(0), lost={1: "no answer within 1 s"})]
    assert peer._refusals(told) == {1: 2}
    assert peer._refusals([*told, Entry("turn", 4, Outcome(0), traffic=traffic)]) == {}


def test_a_peer_that_diverges_keeps_its_state_and_its_last_message(tmp_path, monkeypatch):
    from sparsona.core.errors import DivergedError
    from sparsona.engine import turn

    original = turn.record_phase

    def record_phase(task, tally, round_, *args):
        original(task, tally, round_, *args)
        if (round_.client.index, round_.index) == (1, 1):
            raise DivergedError("training diverged: client 1's loss is nan in round 1", hint="lower --lr")

    monkeypatch.setattr(turn, "record_phase", record_phase)
    party = Party(tmp_path, "dispfl", data={"data_rate": 0.1, "partition": "dirichlet:2"}, graph="full").play()
    assert party.errors == {}
    run, simulated = party.gather(), party.simulate()
    assert rows(run.path) == rows(simulated.path)
    assert states(party) == simulated_states(simulated)
    assert [row.client for row in run._folder.records.failures()] == [1]
    assert run.summary["diverged"]["turns"] == simulated.summary["diverged"]["turns"] == 1
