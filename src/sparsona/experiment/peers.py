"""Runs without a server: peers on machines of their own, from a federation file, and their journals as one run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from sparsona.analysis import summary as summaries
from sparsona.core.errors import SparsonaError
from sparsona.core.points import FEW, select
from sparsona.core.round import Client
from sparsona.data.federation import Federation
from sparsona.deploy.exchange import Exchange
from sparsona.deploy.frames import Signer, Verifier
from sparsona.deploy.greeting import read_environment
from sparsona.deploy.identity import Roster, check_certificate
from sparsona.deploy.journal import Entry, Journal, Opening
from sparsona.deploy.peer import COMPUTING, Peer
from sparsona.deploy.vault import Vault
from sparsona.deploy.zenoh_link import Tls, ZenohLink
from sparsona.engine.context import ClientContext
from sparsona.engine.evaluate import Evaluation
from sparsona.engine.jobs import Tally
from sparsona.engine.plan import Plan, participation, tested_clients
from sparsona.engine.population import EvaluationLog, Population, RoundRecord, Turn
from sparsona.executors import choose_device
from sparsona.experiment.network import Guest, Terms, find_key, make_greeting, own_data, with_guests
from sparsona.experiment.run import Run
from sparsona.experiment.train import NETWORK, describe_run, load
from sparsona.runs.checkpoint import Checkpoints, Progress
from sparsona.runs.folder import FEDERATION_FILE, RunFolder
from sparsona.runs.options import dump
from sparsona.runs.recorder import Recorder
from sparsona.runs.records import FailureRow
from sparsona.runs.session import earlier_result, evaluation_result, round_result
from sparsona.wire.ledger import Traffic

ENDED = "its journal ends before this round"
MISSING = "its journal was not gathered"


def _check_peers(terms: Terms) -> None:
    """Raise SparsonaError for a method with a server."""
    if not terms.row.peers:
        raise SparsonaError(
            f"{terms.row.title} has a server",
            expected="a method whose clients send to each other, such as dispfl",
            hint=f"`sparsona server {terms.file.path}` on one machine, `sparsona join` on the others",
        )


def make_peer(
    terms: Terms,
    index: int,
    federation: Federation,
    folder: Path,
    exchange: Exchange,
    signer: Signer,
    verifier: Verifier,
    *,
    deadline: float = 60.0,
    grace: float | None = None,
    shares_labels: bool = False,
    device: str = "auto",
    report: Callable[[str], None] = lambda text: None,
) -> Peer:
    """One peer of a run.

    Args:
        terms: of the run.
        index: the peer.
        federation: its data, as `own_data` returns it.
        folder: where it keeps its State, its messages and its journal.
        exchange: the transport.
        signer: signs as this peer.
        verifier: knows the others' keys.
        deadline: seconds after which a neighbour that has not answered is left out of a round.
        grace: seconds that it stays at the end for others; None: as many.
        shares_labels: whether its journal tells its label counts.
        device: where it trains.
        report: is called with what happens.

    Returns:
        The peer: `handle` answers the others, `wait` and `play` do the rest.
    """
    _check_peers(terms)
    place = choose_device(device, "fp32")
    train, validation, _ = (int(count) for count in federation.sizes()[index])

    def make_context(cards: tuple[Client, ...]) -> ClientContext:
        return terms.context(federation, cards, place)

    num = terms.num_clients
    alone = tuple(Client(one.index, train, one.capacity, validation, num, train) for one in terms.file.clients)
    with COMPUTING:
        context = make_context(alone)
    greeting = make_greeting(context, federation, index, shares_labels)
    vault = Vault(folder)
    found = Peer(
        index,
        terms.run,
        [one.name for one in terms.file.clients],
        terms.file.capacities,
        make_context,
        greeting,
        vault,
        exchange,
        signer,
        verifier,
        deadline,
        grace,
        shares_labels,
        report,
    )
    if not (folder / FEDERATION_FILE).exists():
        terms.file.write(folder / FEDERATION_FILE)  # for `gather`
    return found


def play_together(peers: Sequence[Peer]) -> None:
    """Play peers of this process at the same time, each in a thread, to the end; an error of one is raised afterwards.

    Args:
        peers: made by `make_peer`; their exchange must reach each other's `handle`.
    """
    errors: list[BaseException] = []

    def play(peer: Peer) -> None:
        try:
            peer.wait()
            peer.play()
        except BaseException as error:
            errors.append(error)
        finally:
            peer.close()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for all of them: sums that are split among threads differ in their last bits
    try:
        playing = [Thread(target=play, args=(peer,), daemon=True) for peer in peers]
        for thread in playing:
            thread.start()
        for thread in playing:
            thread.join()
    finally:
        torch.set_num_threads(threads)
    if errors:
        raise errors[0]


def be_peer(
    path: str | Path,
    data: str,
    *,
    listen: Sequence[str] = (),
    connect: Sequence[str] = (),
    key: str | Path | None = None,
    vault: str | Path | None = None,
    at_least: int | None = None,
    deadline: float = 60.0,
    wait: float | None = None,
    grace: float | None = None,
    shares_labels: bool = False,
    device: str = "auto",
    tls: bool = True,
    report: Callable[[str], None] = lambda text: None,
    waiting: Callable[[int, int], None] = lambda there, of: None,
    data_dir: str | None = None,
    **options: Any,
) -> Path:
    """Be a peer of a run on several machines, until it is over and the others need nothing more.

    Args:
        path: the federation file.
        data: as for `join`.
        listen: addresses to listen on; none: it dials out only, and needs no open port.
        connect: addresses to dial; none: those of the other peers in the file.
        key: this peer's key; None: the one here or beside the file that the roster has.
        vault: this peer's folder; None: a folder in ./vault.
        at_least: how many peers must be there before the first round; None: all of the roster.
        deadline: seconds after which a neighbour that has not answered is left out of a round.
        wait: seconds to wait for the others before the first round; None: as long as it takes.
        grace: seconds that it stays at the end for others that are not done; None: as many as the deadline.
        shares_labels: whether the journal, and so the gathered run, tells its label counts.
        device: where it trains.
        tls: encrypt, and accept those with a certificate of the federation only. Frames are signed in any case.
        report: is called with what happens, for people to read.
        waiting: is called with how many peers are there, and of how many.
        data_dir: folder that is searched first for the data's files.
        options: how the data is split: validation_rate, test_rate, and of a data set partition and so on.

    Returns:
        The peer's folder, with its journal and its model.
    """
    terms = Terms.read(path)
    _check_peers(terms)
    signer, member = find_key(terms.file, Path(path), key)
    check_certificate(member.certificate, terms.file.authority, member.key, member.name)
    terms.check_at_least(at_least)
    others = [address for one in terms.file.clients if one.index != member.index for address in one.addresses]
    addresses = tuple(connect) or tuple(others)
    if not (listen or addresses):
        raise SparsonaError(
            f"'{path}' does not say where any peer is, and this one does not listen",
            expected="an address to dial, or one to listen on",
            hint="--connect host:7447, --listen :7447, or `sparsona federation admit --address` for a few peers",
        )
    folder = terms.vault_of(member, vault)
    federation = own_data(terms, member.index, data, data_dir, **options)
    certificates = Tls(terms.file.authority, member.certificate, signer.pem) if tls else None
    with COMPUTING:
        longest = terms.longest_frame()
    link: ZenohLink  # made below: when it carries the first question, the peer must be able to answer
    peer = make_peer(
        terms,
        member.index,
        federation,
        folder,
        lambda items, seconds: link.exchange(items, seconds),
        signer,
        Roster(terms.file.keys()),
        deadline=deadline,
        grace=grace,
        shares_labels=shares_labels,
        device=device,
        report=report,
    )
    # The link is closed first: to a peer that leaves early and comes back, others send their questions again.
    with (
        closing(peer),
        ZenohLink(
            member.index,
            run=terms.run,
            listen=tuple(listen),
            connect=addresses,
            tls=certificates,
            max_bytes=longest,
        ) as link,
    ):
        # Every other peer may have one question that waits, and ask another one.
        link.serve(
            peer.handle,
            threads=terms.num_clients + 4,
            failed=lambda error: report(f"a fault: {type(error).__name__}: {error}"),
        )
        where = [*(f"listening on {one}" for one in listen), *(f"dialling {one}" for one in addresses)]
        report(f"{member.name}: peer {member.index} of {terms.num_clients}, {', '.join(where)}")
        peer.wait(at_least, wait, waiting)
        peer.play(lambda completed, rounds: report(f"{completed} of {rounds} rounds"))
        time.sleep(0.5)  # the last answers are on their way
    return folder


# Journals as a run.


@dataclass(frozen=True)
class _Told:
    """The journal of one peer, by rounds."""

    opening: Opening
    turns: Mapping[int, Entry]
    evaluations: Mapping[int, Entry]
    end: Entry | None

    @classmethod
    def of(cls, opening: Opening, entries: Sequence[Entry]) -> _Told:
        by_kind: dict[str, dict[int, Entry]] = {"turn": {}, "evaluation": {}, "end": {}}
        for entry in entries:
            by_kind[entry.kind][entry.round] = entry
        return cls(opening, by_kind["turn"], by_kind["evaluation"], next(iter(by_kind["end"].values()), None))


def gather(out: str | Path, folders: Iterable[str | Path], partial: bool = False) -> Run:
    """Make one run of the journals of its peers, as a simulation of it would have been recorded.

    Args:
        out: the folder of the run to make.
        folders: of the peers: each has a journal.jsonl and a federation.toml, and may have nothing else.
        partial: accept that journals of some peers are missing.

    Returns:
        The run. The peers' models are not in it.
    """
    terms, told = _read_journals([Path(folder) for folder in folders], partial)
    plan = terms.plan()
    guests = [_guest(told[one.index].opening) if one.index in told else Guest() for one in terms.file.clients]
    most, num = max(guest.sizes[0] for guest in guests), terms.num_clients
    cards = tuple(
        Client(one.index, guest.sizes[0], one.capacity, guest.sizes[1], num, most)
        for one, guest in zip(terms.file.clients, guests, strict=True)
    )
    context = terms.context(terms.no_data(), cards, torch.device("cpu"))
    is_finished = any(one.end for one in told.values())
    completed = plan.rounds if is_finished else min(len(one.turns) for one in told.values())
    if not is_finished and not completed:
        raise SparsonaError("no round is in all of these journals yet", expected="peers that have played a round")
    config, facts = describe_run(terms.config, context, terms.row, executor=NETWORK)
    facts = with_guests(facts, terms, guests)
    seconds = 0.0
    with RunFolder.create(Path(out), dump(config), facts, None) as folder:
        terms.file.write(folder.path / FEDERATION_FILE)
        with folder.records.writing():
            for index in range(completed + is_finished):
                seconds += _record(folder, _Round(plan, cards, told, index, is_end=index == completed))
        folder.records.flush()
        nobody = Population(None, {})
        Checkpoints(folder.path, context.method).save(Progress(completed, seconds, nobody, {}, is_finished), nobody)
        folder.write_summary(summaries.summarize(folder, seconds))
    return load(out)


def _record(folder: RunFolder, found: _Round) -> float:
    """Write the rows of a round, or of the end; returns its seconds."""
    recorder, facts, record = Recorder(folder.records), folder.facts, found.record()
    if not found.is_end or record.turns or record.evaluations:
        recorder.on_round(replace(round_result(record, found.seconds), is_tuning=found.is_end))
    after = found.index if found.is_end else found.index + 1
    results = [evaluation_result(facts, after, record.evaluations, record.log, is_final=found.is_end)]
    results.append(earlier_result(facts, record))
    if found.is_end and not found.index:  # of a run without rounds, before the end
        results.append(evaluation_result(facts, 0, *found.evaluations(0)))
    for result in filter(None, results):
        recorder.on_evaluation(result)
    lost = found.lost()
    for turn in record.turns:
        if turn.failure:
            lost[turn.client] = "; ".join(filter(None, (turn.failure, lost.get(turn.client))))
    folder.records.add(FailureRow(found.index, client, why) for client, why in sorted(lost.items()))
    return found.seconds


@dataclass(frozen=True)
class _Round:
    """What peers told of one round, or of the end."""

    plan: Plan
    cards: tuple[Client, ...]
    told: Mapping[int, _Told]
    index: int
    is_end: bool

    @property
    def entries(self) -> dict[int, Entry]:
        found = {
            client: one.end if self.is_end else one.turns.get(self.index) for client, one in sorted(self.told.items())
        }
        return {client: entry for client, entry in found.items() if entry is not None}

    @property
    def seconds(self) -> float:
        return max((entry.seconds for entry in self.entries.values()), default=0.0)

    def record(self) -> RoundRecord:
        """As the simulator would have made it of these."""
        round_ = self.plan.tuning_round if self.is_end else self.plan.round_at(self.index)
        made = RoundRecord(self.index, round_.lr_scale, self._turns())
        for client, entry in self.entries.items():
            if self.is_end:
                made.evaluations.extend(entry.outcome.evaluations)
                _add(made.log, client, entry)
            else:
                made.add_evaluations(entry.outcome)
        if not self.is_end and self.plan.tests_everyone_after(self.index + 1):
            found, log = self.evaluations(self.index + 1)
            made.evaluations.extend(found)
            made.log = replace(log, failures={**made.log.failures, **log.failures})
        return made

    def evaluations(self, completed: int) -> tuple[list[Evaluation], EvaluationLog]:
        """What was evaluated after so many rounds, on messages that were fetched for that."""
        found: list[Evaluation] = []
        log = EvaluationLog()
        for client in tested_clients(self.plan, self.cards):
            entry = self.told[client].evaluations.get(completed) if client in self.told else None
            if entry is not None:
                found.extend(entry.outcome.evaluations)
                _add(log, client, entry)
            elif select(self.plan.points, "round"):
                log.failures[client] = self._why(client)
        return found, log

    def _why(self, client: int) -> str:
        return ENDED if client in self.told else MISSING

    def _turns(self) -> list[Turn]:
        """The turns of a round: a message is charged to who sent it and to who received it, by who received it."""
        entries = self.entries
        traffic: dict[int, Traffic] = defaultdict(Traffic)
        for entry in entries.values():
            for client, sent in entry.traffic.items():
                traffic[client] += sent
        trained = {client for client, entry in entries.items() if entry.trained}
        trains = () if self.is_end else participation(self.plan, self.cards, self.index).trains
        found = []
        for client in sorted({*trains, *trained}):
            sent = traffic.pop(client, Traffic())
            if client in entries:
                own = entries[client]
                was_heard = not own.dropped and not self.is_end
                found.append(Turn(client, own.outcome.tally, sent, was_heard, own.dropped, failure=own.note))
            else:
                found.append(Turn(client, Tally(), sent, False, True, trained=False, failure=self._why(client)))
        found += (Turn(client, Tally(), sent, False, False, trained=False) for client, sent in sorted(traffic.items()))
        return found

    def lost(self) -> dict[int, str]:
        """Who was not heard, why, and by whom."""
        reasons: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for receiver, one in sorted(self.told.items()):
            # What was fetched for a round was also evaluated before it.
            fetched = (one.end if self.is_end else one.turns.get(self.index), one.evaluations.get(self.index))
            for peer, why in {peer: why for entry in fetched if entry for peer, why in entry.lost.items()}.items():
                reasons[peer][why].append(receiver)
        return {
            peer: "; ".join(f"{why} (not heard by {', '.join(map(str, by))})" for why, by in found.items())
            for peer, found in reasons.items()
        }


def _add(log: EvaluationLog, client: int, entry: Entry) -> None:
    log.jobs += entry.jobs
    log.down += entry.down
    log.note(replace(entry.outcome, client=client))


def _read_journals(folders: Sequence[Path], partial: bool) -> tuple[Terms, dict[int, _Told]]:
    told: dict[int, _Told] = {}
    terms: Terms | None = None
    for folder in folders:
        opening, entries = Journal(folder).read()
        if opening is None:
            raise SparsonaError(
                f"'{folder}' has no journal",
                expected="the folder of a peer, with its journal.jsonl and federation.toml",
                hint="copy them from `sparsona peer --vault`",
            )
        terms = terms or Terms.read(folder / FEDERATION_FILE)
        if opening.run != terms.run or opening.client >= terms.num_clients:
            raise SparsonaError(
                f"'{folder}' is of another run than '{folders[0]}'",
                expected=f"journals of the run {terms.run}",
                hint="gather the peers of one federation file",
            )
        if opening.client in told:
            name = terms.file.clients[opening.client].name
            raise SparsonaError(f"'{folder}' is a second journal of {name}", expected="one of each peer")
        told[opening.client] = _Told.of(opening, entries)
    if terms is None:
        raise SparsonaError("no folders of peers", expected="sparsona gather RUN PEER...", hint="peers/*")
    missing = [one.name for one in terms.file.clients if one.index not in told]
    if missing and not partial:
        raise SparsonaError(
            f"the journals of {len(missing)} peers are missing: {', '.join(missing[:8])}",
            expected=f"those of all {terms.num_clients}",
            hint="--partial makes a run without them",
        )
    return terms, told


def _guest(opening: Opening) -> Guest:
    greeting = opening.greeting
    counts = greeting.label_counts
    told = None if counts is None else tuple(FEW if count is None else count for count in counts)
    return Guest(greeting.sizes, greeting.data, told, read_environment(greeting.environment))
