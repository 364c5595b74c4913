"""One peer of a run without a server: it plays its own turns, fetches its neighbours' messages, and answers them.

Rounds are synchronous and there is no barrier: in round t a peer mixes each neighbour's last message before t, and a
neighbour that is asked for that answers when it has played round t - 1. Who trains, who drops out and who receives from
whom follows from the plan, so every peer knows it. What a peer would mix in round t is also what it evaluates after t
rounds: it is fetched once.

What a peer was sent is checked before it is mixed. A neighbour that does not answer in time, or whose message is
refused, is not heard in that round, which the journal says; the round goes on.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Condition, Lock, Thread
from typing import Any

from sparsona.core.errors import SparsonaError
from sparsona.core.files import replace_file
from sparsona.core.method import State
from sparsona.core.points import FEWEST
from sparsona.core.reading import parse_json, read_text
from sparsona.core.round import Client
from sparsona.deploy.calendar import Calendar
from sparsona.deploy.exchange import Exchange
from sparsona.deploy.frames import MAX_HEAD, Frame, Signer, Verifier, seal, unseal
from sparsona.deploy.greeting import (
    Greeting,
    OtherModelError,
    OtherNamesError,
    check_class_names,
    check_model,
    names_head,
    opening_head,
    other_environment,
    read_class_names,
    read_environment,
)
from sparsona.deploy.jobs import in_words, reported_points, when
from sparsona.deploy.journal import Entry, Journal, Opening
from sparsona.deploy.remote import LostError
from sparsona.deploy.vault import LostStateError, Vault
from sparsona.engine.clients import LocalClients
from sparsona.engine.context import ClientContext
from sparsona.engine.failures import ABSENT, ALONE, BARRED, FOREIGN, LOST, REFUSALS, REFUSED, STARTED_ANEW
from sparsona.engine.gate import check_message, largest_message
from sparsona.engine.gossip import Gossip, members_of, senders_of
from sparsona.engine.jobs import Job, Message, Outcome, Report, Tally
from sparsona.engine.population import EvaluationLog, Population, RoundRecord
from sparsona.engine.rounds import check_plan, received_work
from sparsona.executors import numeric_mode
from sparsona.executors.serial import Serial
from sparsona.wire.codec import encode

HELLO_SECONDS = 5.0  # for a peer to say that it is there
ABSENT_SHARE = 0.1  # of the deadline: how long a peer is waited for that did not answer the last time
PATIENCE = 10.0  # deadlines: how long a peer is waited for that answers that it waits for others itself
MOST_HELD = 30.0  # seconds that a question waits here before it is answered that there is no answer yet
KEPT = 16  # messages that are kept for others, at most, besides the last one
PEERS = "peers.json"
# States of an answer: the message is in it; it is no longer kept; the round is not played yet, and why.
SENT, GONE, WAITS, WORKS = "said", "gone", "waits", "works"  # what peers write of any version


# Torch's random numbers and number of threads belong to the process: peers in one process compute one after another.
COMPUTING = Lock()


class Peer:
    """One peer: `handle` answers the others, in other threads, while `play` plays its turns.

    Args:
        client: its index.
        run: the run's identity.
        names: of all peers.
        capacities: of all peers.
        make_context: makes its context from all peers' cards.
        greeting: what it tells about itself.
        vault: where it keeps its State, its messages and its journal.
        exchange: the transport.
        signer: signs as this peer.
        verifier: knows the others' keys.
        deadline: seconds after which a neighbour that has not answered is left out of a round.
        grace: seconds that it stays at the end for others that are not done yet, from their last question on; None: as
            long as a deadline.
        shares_labels: whether its journal has confusions, which tell its label counts.
        fewest: results of fewer examples than this are not in its journal.
        report: is called with what happens, for people to read.
    """

    def __init__(
        self,
        client: int,
        run: str,
        names: Sequence[str],
        capacities: Sequence[float],
        make_context: Callable[[tuple[Client, ...]], ClientContext],
        greeting: Greeting,
        vault: Vault,
        exchange: Exchange,
        signer: Signer,
        verifier: Verifier,
        deadline: float = 60.0,
        grace: float | None = None,
        shares_labels: bool = False,
        report: Report = lambda text: None,
        fewest: int = FEWEST,
    ) -> None:
        self.client, self.run, self.names, self.greeting, self.vault = client, run, names, greeting, vault
        self.deadline, self.grace = deadline, deadline if grace is None else grace
        self._capacities, self._make_context = capacities, make_context
        self._exchange, self._signer, self._verifier = exchange, signer, verifier
        self._report, self._fewest = report, fewest
        self._journal = Journal(vault.folder, shares_labels)
        opening, self._entries = self._journal.read()
        if opening is None:
            self._journal.open(Opening(run, client, greeting))
        elif (opening.run, opening.client) != (run, client) or opening.greeting.data != greeting.data:
            other = "other data" if (opening.run, opening.client) == (run, client) else "another run or peer"
            raise SparsonaError(
                f"'{vault.folder}' belongs to {other}",
                expected="the folder that this peer had before, or a new one",
                hint="choose another folder with --vault",
            )
        self.sizes: dict[int, tuple[int, int, int]] = {client: greeting.sizes}  # of the peers that are known
        self._cards: tuple[Client, ...] = ()
        self._refusals = _refusals(self._entries)
        self._absent: set[int] = set()  # those that did not answer in time, the last time that they were asked
        self._stuck: dict[int, Any] = {}  # those that were there then, and how many rounds they had played
        # What threads that answer share with the one that plays.
        self._changed = Condition()
        self._completed = sum(entry.kind == "turn" for entry in self._entries)
        made = {entry.round for entry in self._entries if entry.kind == "turn" and entry.message}
        for old in self.vault.folder.glob("said-*.message"):  # of an older version
            old.replace(old.with_name(old.name.replace("said-", "sent-", 1)))
        self._sent = sorted(one for one in made if self._message_path(one).exists())  # rounds of the messages kept
        self._done: dict[int, int] = {}  # what each peer never asks for again: anything before this round
        self._held: dict[int, object] = {}  # the last question of each peer
        self._heard_at = time.monotonic()
        self._is_waiting, self._closed = True, False
        self._lost_state = ""  # what happened to its State since the last turn
        self._telling: Thread | None = None

    @property
    def completed(self) -> int:
        """Rounds that this peer has played."""
        return self._completed

    @property
    def is_finished(self) -> bool:
        """Whether it has played all rounds, and the end."""
        return any(entry.kind == "end" for entry in self._entries)

    def close(self) -> None:
        """Answer nothing from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # Answering.

    def handle(self, data: bytes) -> bytes | None:
        """Answer a frame of another peer. It may take until this peer has played a round.

        Args:
            data: what arrived.

        Returns:
            The answer; None to what is not signed by a peer of this run.
        """
        try:
            frame = unseal(data, self._verifier, run=self.run, receiver=self.client, limit=2 * MAX_HEAD)
            if not 0 <= frame.sender < len(self.names) or frame.sender == self.client:
                raise SparsonaError(f"a frame of {frame.sender}", expected="one of another peer")
            if frame.kind == "hello":
                try:
                    self._learn(frame)
                except OtherModelError as error:  # it finds out from the answer
                    self._report(f"{self.names[frame.sender]} cannot take part: {error.what}")
                return self._answer(frame, self._hello())
            if frame.kind not in ("pull", "done"):
                raise SparsonaError(f"a frame of kind '{frame.kind[:40]}'", expected="hello, pull or done")
        except SparsonaError as error:
            self._report(f"refused: {error.what}")
            return None
        self._note(frame.sender, frame.round)
        return self._answer(frame, {}) if frame.kind == "done" else self._hold(frame)

    def _answer(self, frame: Frame, head: Mapping[str, Any], blobs: tuple[bytes, ...] = ()) -> bytes | None:
        if self._closed:
            return None
        answer = Frame(self.run, "answer", self.client, frame.sender, frame.round, frame.job, head, blobs)
        return seal(answer, self._signer)

    def _note(self, peer: int, done: int) -> None:
        """A peer is there, and needs nothing of the rounds before `done` any more."""
        with self._changed:
            self._done[peer] = max(self._done.get(peer, 0), done)
            self._absent.discard(peer)
            self._heard_at = time.monotonic()
            self._changed.notify_all()

    def _hold(self, frame: Frame) -> bytes | None:
        """This peer's last message before a round, once it has played the round before; or that it has not yet."""
        hold = frame.head.get("hold")
        seconds = min(float(hold), MOST_HELD) if isinstance(hold, int | float) else 0.0
        ends, question = time.monotonic() + seconds, object()
        with self._changed:
            self._held[frame.sender] = question  # one for each peer: a question that comes again takes its place
            self._changed.notify_all()
            while self._completed < frame.round:
                left = ends - time.monotonic()
                if self._closed or self._held[frame.sender] is not question:
                    return None
                if left <= 0:
                    state = WAITS if self._is_waiting else WORKS
                    return self._answer(frame, {"state": state, "completed": self._completed})
                self._changed.wait(left)
            found = [one for one in self._sent if one < frame.round]
        try:
            message = self._message_path(found[-1]).read_bytes() if found else None
        except FileNotFoundError:  # removed in this moment
            message = None
        if message is None:
            return self._answer(frame, {"state": GONE})
        return self._answer(frame, {"state": SENT, "made": found[-1]}, (message,))

    # Who is there.

    def _hello(self) -> dict[str, Any]:
        mine = self.greeting
        head = opening_head(mine.layout, mine.start, mine.environment)
        return {**head, "sizes": list(mine.sizes), "done": self._completed, **names_head(mine.class_names)}

    def _learn(self, frame: Frame) -> None:
        """Take note of a greeting; SparsonaError if its sender cannot take part."""
        head, name = frame.head, self.names[frame.sender]
        check_model(head, self.greeting.layout, self.greeting.start, name)
        check_class_names(read_class_names(head), self.greeting.class_names, name, "this peer")
        sizes = head.get("sizes")
        if not (isinstance(sizes, list) and len(sizes) == 3 and all(type(n) is int and n >= 0 for n in sizes)):
            raise SparsonaError(f"{name} tells no numbers of examples", expected="three counts")
        if sizes[0] < 1:
            raise SparsonaError(f"{name} has no training examples", expected="at least one")
        if frame.sender not in self.sizes:
            self._report(f"{name} is there, with {sizes[0]} examples")
            if found := other_environment(read_environment(head.get("environment")), self.greeting.environment):
                self._report(f"{name} has {found}")
        self.sizes[frame.sender] = (sizes[0], sizes[1], sizes[2])
        done = head.get("done")
        self._note(frame.sender, done if type(done) is int else 0)

    def greet(self, peers: Iterable[int]) -> dict[int, SparsonaError]:
        """Tell peers who this is, and learn who they are; returns those that cannot take part."""
        wrong: dict[int, SparsonaError] = {}
        asked = {peer: self._question("hello", peer, self._completed, self._hello()) for peer in peers}
        for peer, data in self._send(asked, min(HELLO_SECONDS, self.deadline)):
            try:
                self._learn(self._open(data, asked[peer], 2 * MAX_HEAD))
            except LostError:
                continue
            except SparsonaError as error:
                self._report(f"{self.names[peer]} cannot take part: {error.what}")
                wrong[peer] = error
        return wrong

    def wait(
        self,
        at_least: int | None = None,
        seconds: float | None = None,
        listen: Callable[[int, int], None] = lambda there, of: None,
    ) -> None:
        """Wait for the others. A peer that has begun already goes on with those that it knows.

        Args:
            at_least: how many must be there, this one included; None: all.
            seconds: how long at most; None: as long as it takes.
            listen: is called with how many are there, of how many.
        """
        if self._load_sizes():
            self.greet([peer for peer in range(len(self.names)) if peer != self.client])
            return
        began, wanted = time.monotonic(), len(self.names) if at_least is None else at_least
        while True:
            wrong = self.greet([peer for peer in range(len(self.names)) if peer not in self.sizes])
            there = set(self.sizes)
            others = [error for error in wrong.values() if isinstance(error, OtherModelError)]
            if others and len(others) >= len(there):
                if isinstance(others[0], OtherNamesError):
                    raise others[0]
                raise SparsonaError(
                    f"this peer's model is another than that of {len(others)} of the others: {others[0].what}",
                    expected=others[0].expected,
                    hint=f"this is sparsona {self.greeting.environment.get('sparsona')}, torch "
                    f"{self.greeting.environment.get('torch')}",
                )
            listen(len(there), len(self.names))
            if len(there) >= wanted:
                break
            if seconds is not None and time.monotonic() - began > seconds:
                missing = [name for peer, name in enumerate(self.names) if peer not in there]
                raise SparsonaError(
                    f"{len(there)} of {wanted} peer{'s' * (wanted != 1)} there within {seconds:g} s",
                    expected=f"{', '.join(missing[:8])}{' and others' * (len(missing) > 8)}",
                    hint="start them with `sparsona peer`, or lower --at-least",
                )
            if wrong:
                time.sleep(min(1.0, self.deadline))
        with replace_file(self.vault.folder / PEERS, is_durable=True) as file:
            file.write(json.dumps(sorted([peer, *sizes] for peer, sizes in self.sizes.items())).encode())

    def _load_sizes(self) -> bool:
        """What was known of the others when the first round began: the same after a restart."""
        path = self.vault.folder / PEERS
        if not path.exists():
            return False
        try:
            for peer, train, validation, test in parse_json(read_text(path)):
                self.sizes[int(peer)] = (int(train), int(validation), int(test))
        except (OSError, ValueError, TypeError, OverflowError) as error:
            raise SparsonaError(
                f"'{path}' cannot be read: {error}", expected="the file as it was written", hint="restore it"
            ) from None
        return True

    def cards(self) -> tuple[Client, ...]:
        """All peers as methods see them; of those that are not known, without examples."""
        most = max(sizes[0] for sizes in self.sizes.values())
        num = len(self.names)
        found = []
        for peer, capacity in enumerate(self._capacities):
            train, validation, _ = self.sizes.get(peer, (0, 0, 0))
            found.append(Client(peer, train, capacity, validation, num, most))
        return tuple(found)

    # Asking.

    def _question(self, kind: str, peer: int, index: int, head: Mapping[str, Any]) -> Frame:
        # A name that was never used: an answer of earlier is no answer to this question.
        return Frame(self.run, kind, self.client, peer, index, secrets.token_hex(8), head)

    def _send(self, frames: Mapping[int, Frame], seconds: float) -> Iterator[tuple[int, bytes | None]]:
        return self._exchange(((peer, seal(frame, self._signer)) for peer, frame in frames.items()), seconds)

    def _open(self, data: bytes | None, asked: Frame, limit: int) -> Frame:
        """The answer to a question; LostError if there is none, or it comes from somebody else."""
        if data is None:
            raise LostError(LOST.format(seconds=self.deadline), expected="an answer")
        try:
            frame = unseal(data, self._verifier, run=self.run, receiver=self.client, limit=limit)
            found = (frame.kind, frame.sender, frame.round, frame.job)
            if found != ("answer", asked.receiver, asked.round, asked.job):
                raise SparsonaError(f"one of peer {frame.sender} to something else", expected="one to this question")
        except SparsonaError as error:
            # Whoever sent it, nobody can be blamed for it.
            raise LostError(f"{FOREIGN}{error.what}", expected=error.expected) from None
        return frame

    def _fetch(self, index: int, peers: Sequence[int]) -> tuple[dict[int, bytes], dict[int, str]]:
        """The messages of peers, checked, and why those of others are missing."""
        heard: dict[int, bytes] = {}
        lost = {peer: BARRED for peer in peers if self._refusals.get(peer, 0) >= REFUSALS}
        asked = [peer for peer in peers if peer not in lost]
        if unknown := [peer for peer in asked if peer not in self.sizes]:
            self.greet(unknown)
            lost |= dict.fromkeys((peer for peer in unknown if peer not in self.sizes), ABSENT)
        absent = set(self._absent)
        with self._waiting():
            for group, seconds in (
                ([peer for peer in asked if peer not in absent], self.deadline),
                ([peer for peer in asked if peer in absent], self.deadline * ABSENT_SHARE),
            ):
                self._fetch_group(index, [peer for peer in group if peer not in lost], seconds, heard, lost)
        for peer, why in lost.items():
            self._report(f"round {index + 1}: {self.names[peer]} is not heard: {why}")
        return heard, lost

    def _fetch_group(
        self, index: int, peers: list[int], seconds: float, heard: dict[int, bytes], lost: dict[int, str]
    ) -> None:
        began = time.monotonic()
        ends = dict.fromkeys(peers, began + seconds)
        while peers:
            at = time.monotonic()
            longest = max(0.0, max(ends[peer] for peer in peers) - at)
            asked = {peer: self._question("pull", peer, index, {"hold": longest / 2}) for peer in peers}
            peers = []
            for peer, data in self._send(asked, longest):
                now = time.monotonic()
                try:
                    answer = self._open(data, asked[peer], self._limit(peer))
                    state, completed = answer.head.get("state"), answer.head.get("completed")
                    if state not in (WAITS, WORKS) or completed != self._stuck.get(peer):
                        self._absent.discard(peer)
                        self._stuck.pop(peer, None)
                        # It has the whole deadline for its own work. That it waits for others is no work.
                        ends[peer] = max(ends[peer], began + self.deadline) + (now - at if state == WAITS else 0.0)
                        ends[peer] = min(ends[peer], began + PATIENCE * self.deadline)
                    if state in (WAITS, WORKS) and now < ends[peer]:
                        peers.append(peer)
                    elif state in (WAITS, WORKS):
                        self._stuck[peer] = completed
                        self._absent.add(peer)
                        lost[peer] = LOST.format(seconds=self.deadline)
                    elif state == GONE:
                        lost[peer] = "it no longer has its message of that round"
                    else:
                        heard[peer] = self._checked(answer, peer, index)
                        self._refusals.pop(peer, None)
                except LostError as error:
                    if data is None:
                        self._absent.add(peer)
                    lost[peer] = error.what
                except SparsonaError as error:
                    self._refusals[peer] = self._refusals.get(peer, 0) + 1
                    lost[peer] = f"{REFUSED}{error.what}"

    def _limit(self, peer: int) -> int:
        cost = self._cost(peer, 0)
        return (0 if cost.up is None else largest_message(cost.up)) + 2 * MAX_HEAD

    def _cost(self, peer: int, index: int) -> Any:
        context = self.context
        card = replace(self._cards[peer], num_examples=self.sizes[peer][0], num_validation=self.sizes[peer][1])
        return context.method.cost(context.params.layout, card, context.plan.round_at(index))

    def _checked(self, answer: Frame, peer: int, index: int) -> bytes:
        """The message in an answer, if its sender can have made it honestly."""
        if answer.head.get("state") != SENT or len(answer.blobs) != 1:
            raise SparsonaError("an answer without a message", expected="its last message before the round")
        made, reported = self.calendar.made(peer, index), answer.head.get("made")
        assert made is not None
        # Of a peer whose training diverged, the last good message is an earlier one.
        if type(reported) is int and 0 <= reported < made and peer in self.calendar.who(reported).trains:
            made = reported
        message, cost = bytes(answer.blobs[0]), self._cost(peer, made)
        card = replace(self._cards[peer], num_examples=self.sizes[peer][0])
        check_message(message, cost, client=card, round=made)
        return message

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """While it lasts, others are told that this peer waits itself."""
        self._is_waiting = True
        try:
            yield
        finally:
            self._is_waiting = False

    # Playing.

    def play(self, listen: Callable[[int, int], None] = lambda completed, rounds: None) -> None:
        """Play from the last line of the journal to the end, and stay until the others need nothing of this peer.

        Args:
            listen: is called with the rounds completed, and of how many.
        """
        self._is_waiting = False
        self._cards = self.cards()
        with COMPUTING:
            self.context = self._make_context(self._cards)
        check_plan(self.context.server_side)
        self.calendar = Calendar(self.context)
        self._turns = _Turns(self.context, self.vault.secret(), self.greeting.sizes, self._fewest)
        self._clients = LocalClients(self.context, self._turns)
        self._gossip = Gossip(self.context.server_side, self._clients, here=(self.client,))
        with numeric_mode(self.context):
            if not self.is_finished:
                self._play_rounds(listen)
            self._absent.clear()
            rounds = self.context.plan.rounds
            self._tell(self.calendar.sources(self.client, rounds), rounds + 1)
            self._stay()

    def _play_rounds(self, listen: Callable[[int, int], None]) -> None:
        plan, index = self.context.plan, self._completed
        listen(index, plan.rounds)
        with COMPUTING:
            states, self._lost_state = self._stored_state()
        received: tuple[Population, dict[int, str]] | None = None
        evaluated = {entry.round for entry in self._entries if entry.kind == "evaluation"}
        while True:
            if self.calendar.points_after(self.client, index) and index not in evaluated:
                received = self._receive(index, states)
                self._evaluate(index, *received)
            if index == plan.rounds:
                break
            states = self._play_round(index, *(received or self._receive(index, states)))
            received, index = None, index + 1
            listen(index, plan.rounds)
        self._finish(*(received or self._receive(index, states)))

    def _stored_state(self) -> tuple[dict[int, State], str]:
        """This peer's State by its journal, and what happened to it."""
        tickets = [entry.ticket for entry in self._entries if entry.ticket]
        if not tickets:
            return {}, ""
        try:
            return {self.client: self.vault.get(tickets[-1], self.context.fresh_state(self.client))}, ""
        except LostStateError as error:
            self._report(error.what)
            return {}, STARTED_ANEW

    def _receive(self, index: int, states: dict[int, State]) -> tuple[Population, dict[int, str]]:
        """What this peer would mix in a round: fetch what it needs; who is not heard counts as having no message."""
        lost: dict[int, str] = {}
        # Of those that it does not receive from, that they have a message is all that matters.
        messages: dict[int, Message] = {
            peer: b""
            for peer in members_of(self.context.server_side)
            if peer != self.client and self.calendar.made(peer, index) is not None
        }
        if before := [made for made in self._sent if made < index]:
            messages[self.client] = self._message_path(before[-1]).read_bytes()
        while missing := [
            peer for peer in self._needed(index, Population(None, states, messages)) if not messages[peer]
        ]:
            heard, failed = self._fetch(index, missing)
            messages |= heard
            lost |= failed
            for peer in failed:
                del messages[peer]
        return Population(None, states, messages), lost

    def _needed(self, index: int, population: Population) -> list[int]:
        """Whose messages this peer mixes, now that these have one."""
        context, calendar = self.context, self.calendar
        assert context.method.peer is not None
        found = calendar.sources(self.client, index)
        if found and context.method.peer.wants is not None and not calendar.needs_all(self.client, index):
            clients, members = self._clients.at(population.states), members_of(context.server_side)
            round_ = context.plan.round_at(index)
            with COMPUTING:
                found = frozenset(senders_of(context.server_side, clients, members, population, self.client, round_))
        if index < context.plan.rounds and not calendar.points_after(self.client, index):
            found -= calendar.who(index).dropped
        return sorted(found & population.messages.keys())

    def _play_round(self, index: int, population: Population, lost: dict[int, str]) -> dict[int, State]:
        began, note = time.monotonic(), self._lost_state
        own = {peer: message for peer, message in population.messages.items() if peer == self.client}
        received = self.calendar.receives(self.client, index) and len(own) < len(population.messages)
        played, why = None, ""
        try:
            with COMPUTING:
                played = self._gossip.play(population, index)
            why = self._failure(played[1])
        except Exception as error:
            if not received:
                raise
            why = error.what if isinstance(error, SparsonaError) else f"{type(error).__name__}: {error}"
        if why and received:
            # What others sent must not end this peer's training. If it cannot train on its own model either, that is
            # raised, or its training diverged whatever it received.
            with COMPUTING:
                alone = self._gossip.play(replace(population, messages=own), index)
            if played is None or not self._failure(alone[1]):
                played, note = alone, f"{ALONE}{why[:200]}"
                self._report(f"round {index + 1}: {note}")
        assert played is not None
        after, record = played
        entry = self._entry("turn", index, record, lost)
        left_out = (turn.failure for turn in record.turns if turn.client == self.client and turn.trained)
        note = "; ".join(filter(None, (note, *left_out)))
        state, message = after.states.get(self.client), after.messages.get(self.client)
        if entry.trained and state is not None:
            entry = replace(entry, ticket=self.vault.put(state))
        if entry.trained and message is not None:
            with replace_file(self._message_path(index), is_durable=True) as file:
                file.write(message if isinstance(message, bytes) else encode(message))
            entry = replace(entry, message=True)
        if entry.trained:
            self._lost_state = ""
        self._commit(replace(entry, note=note if entry.trained else "", seconds=time.monotonic() - began))
        if entry.ticket:
            self.vault.keep([entry.ticket])
        self._make_room()
        # Those that are asked for something in the next round learn it from that.
        half, calendar = self.context.method.peer, self.calendar
        assert half is not None
        asked = calendar.sources(self.client, index + 1) if half.wants is None else frozenset()
        self._tell(calendar.sources(self.client, index) - asked, index + 1)
        return after.states

    def _failure(self, record: RoundRecord) -> str:
        """Why this peer's own turn had no effect; "" if it had."""
        return next((turn.failure for turn in record.turns if turn.client == self.client and not turn.trained), "")

    def _evaluate(self, completed: int, population: Population, lost: dict[int, str]) -> None:
        began = time.monotonic()
        log = EvaluationLog()
        with COMPUTING:
            found = self._gossip.evaluate(population, completed, log)
        outcome = Outcome(self.client, evaluations=tuple(found), withheld=self._turns.take_withheld())
        entry = Entry("evaluation", completed, outcome, lost=lost, jobs=log.jobs, down=log.down)
        self._commit(replace(entry, seconds=time.monotonic() - began))
        self._report(f"{when(completed)}: {in_words(found) or 'tested'}")

    def _finish(self, population: Population, lost: dict[int, str]) -> None:
        """Final tuning and evaluations, and the personal model."""
        began = time.monotonic()
        with COMPUTING:
            record, tuned = self._gossip.finish(population)
            work = tuned.get(self.client)
            if work is None:
                work = received_work(self.context, population, self.client)
            last = self.context.plan.rounds
            known = [one.outcome for one in self._entries if (one.kind, one.round) == ("evaluation", last)]
            tested = [*(found for one in known for found in one.evaluations), *record.evaluations]
            mine = [one for one in tested if one.client == self.client]
            self.vault.keep_model(self.context, work, last, mine, is_tuned=self.client in tuned)
        entry = self._entry("end", self.context.plan.rounds, record, lost)
        self._commit(replace(entry, seconds=time.monotonic() - began))
        self._report("all rounds are played")

    def _entry(self, kind: Any, index: int, record: RoundRecord, lost: dict[int, str]) -> Entry:
        own = [turn for turn in record.turns if turn.client == self.client and (turn.trained or turn.failure)]
        tally, trained = (own[0].tally, own[0].trained) if own else (Tally(), False)
        return Entry(
            kind,
            index,
            Outcome(
                self.client,
                tally=tally,
                evaluations=(*record.earlier, *record.evaluations),
                withheld=self._turns.take_withheld(),
                failure="" if trained or not own else own[0].failure,
            ),
            trained=trained,
            dropped=bool(own) and own[0].dropped,
            traffic={turn.client: turn.traffic for turn in record.turns if turn.traffic.total},
            lost=lost,
            jobs=record.log.jobs,
            down=record.log.down,
        )

    def _commit(self, entry: Entry) -> None:
        """Write a line, and only then let others have what it tells of."""
        self._journal.append(entry)
        with self._changed:
            self._entries.append(entry)
            if entry.kind == "turn":
                self._completed = entry.round + 1
                if entry.message:
                    self._sent.append(entry.round)
            self._changed.notify_all()

    # What others still need of this peer.

    def _message_path(self, made: int) -> Path:
        return self.vault.folder / f"sent-{made}.message"

    def _claimants(self, made: int, until: int) -> set[int]:
        """Who may still ask for the message of a round, which was this peer's last one up to round `until`."""
        return {
            peer
            for peer in range(len(self.names))
            if peer != self.client
            and any(
                self.client in self.calendar.sources(peer, index)
                for index in range(max(made + 1, self._done.get(peer, 0)), until + 1)
            )
        }

    def _make_room(self) -> None:
        """Remove messages that nobody needs any more. Others that are far behind are waited for, for a while."""

        def claimed() -> list[tuple[int, set[int]]]:
            found = [(made, self._claimants(made, following)) for made, following in pairwise(self._sent)]
            return [(made, peers) for made, peers in found if peers]

        def is_room() -> bool:
            return self._closed or sum(bool(peers - self._absent) for _, peers in claimed()) < KEPT

        with self._changed:
            if not is_room():
                with self._waiting():
                    if not self._changed.wait_for(is_room, self.deadline):
                        self._absent.update(*(peers for _, peers in claimed()))
            needed = [made for made, _ in claimed()][-KEPT:]
            kept = {*needed, *self._sent[-1:]}
            removed = [made for made in self._sent if made not in kept]
            self._sent = [made for made in self._sent if made in kept]
        for made in removed:
            self._message_path(made).unlink(missing_ok=True)

    def _tell(self, peers: Iterable[int], done: int) -> None:
        """Tell peers, in the background, that this one needs nothing of the rounds before `done` any more."""
        frames = {peer: self._question("done", peer, done, {}) for peer in peers if peer not in self._absent}
        seconds = min(HELLO_SECONDS, self.deadline)

        def send() -> None:
            for _ in self._send(frames, seconds):
                pass

        if frames:
            self._telling = Thread(target=send, name="sparsona-done", daemon=True)
            self._telling.start()

    def _stay(self) -> None:
        """Answer until all others are done, or have not asked for a while."""
        rounds = self.context.plan.rounds

        def is_over() -> bool:
            return self._closed or not self._claimants(-1, rounds)

        with self._changed:
            while not is_over():
                left = self._heard_at + self.grace - time.monotonic()
                if left <= 0:
                    names = [self.names[peer] for peer in sorted(self._claimants(-1, rounds))]
                    self._report(f"not waiting any longer for {', '.join(names[:8])}")
                    break
                self._changed.wait(left)
        if self._telling is not None:
            self._telling.join(HELLO_SECONDS)


def _refusals(entries: Iterable[Entry]) -> dict[int, int]:
    """How often each neighbour was refused since it was last heard, by the journal: a restart does not lift a bar."""
    found: dict[int, int] = {}
    counted: set[tuple[int, int]] = set()  # what was fetched for a round was also evaluated before it
    for entry in entries:
        for peer in entry.traffic:
            found.pop(peer, None)
        for peer, why in entry.lost.items():
            if why.startswith(REFUSED) and (peer, entry.round) not in counted:
                counted.add((peer, entry.round))
                found[peer] = found.get(peer, 0) + 1
    return found


class _Turns:
    """The executor of a peer: its turns have its secret seeds, and results of a few examples are not reported."""

    def __init__(self, context: ClientContext, secret: bytes, sizes: tuple[int, int, int], fewest: int) -> None:
        self._serial, self._secret, self._sizes, self._fewest = Serial(context), secret, sizes, fewest
        self._withheld: tuple[str, ...] = ()
        self.encodes = context.encodes

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        for job in jobs:
            reported, withheld = reported_points(job.points, self._sizes, self._fewest)
            self._withheld += withheld
            round_ = replace(job.round, seeds=replace(job.round.seeds, key=self._secret))
            for outcome in self._serial.run([replace(job, round=round_, points=reported)]):
                yield replace(outcome, withheld=withheld)

    def take_withheld(self) -> tuple[str, ...]:
        """The points that were withheld since the last time."""
        found, self._withheld = self._withheld, ()
        return found

    def close(self) -> None:
        pass
