"""A client's side of a run on a network: it answers the server's frames, and keeps its data and its State to itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from threading import Event, Lock
from typing import Any

import torch

from sparsona.core.errors import MaskMismatchError, SparsonaError
from sparsona.core.points import FEWEST
from sparsona.core.round import Client
from sparsona.core.update import SERVER
from sparsona.deploy.frames import Frame, Signer, Verifier, seal, unseal
from sparsona.deploy.greeting import (
    Greeting,
    OtherNamesError,
    check_class_names,
    check_model,
    other_environment,
    read_class_names,
    read_environment,
)
from sparsona.deploy.jobs import answer_head, during, in_words, read_job, reported_points
from sparsona.deploy.vault import LostStateError, Vault
from sparsona.engine.clients import LocalClients
from sparsona.engine.context import ClientContext
from sparsona.engine.gossip import loaded
from sparsona.engine.jobs import Job, Outcome, Report
from sparsona.engine.turn import perform
from sparsona.wire.codec import encode

MAX_EXAMPLES = 10_000_000  # of a client: tables with a row for each example are made by this number
MAX_CLIENTS = 1_000_000


class Agent:
    """Answers the server's frames for one client.

    Args:
        client: its index.
        run: the run's identity.
        make_context: makes the client's context, from how the server knows it.
        greeting: what it tells about itself.
        vault: where it keeps its States.
        signer: signs as this client.
        verifier: knows the server's key.
        shares_labels: whether confusions may leave, and with them its label counts.
        report: is called with what happens, for people to read.
        fewest: results of fewer examples than this are not reported.
        may_end_early: any evaluation after a round may be the last one: the model that it is of is kept.
    """

    def __init__(
        self,
        client: int,
        run: str,
        make_context: Callable[[Client], ClientContext],
        greeting: Greeting,
        vault: Vault,
        signer: Signer,
        verifier: Verifier,
        shares_labels: bool = False,
        report: Report = lambda text: None,
        fewest: int = FEWEST,
        may_end_early: bool = False,
    ) -> None:
        self.client, self.run, self.greeting, self.vault = client, run, greeting, vault
        self._make_context, self._signer, self._verifier = make_context, signer, verifier
        self._shares_labels, self._report, self._fewest = shares_labels, report, fewest
        self._may_end_early = may_end_early
        self._card: Client | None = None
        self._context: ClientContext | None = None
        self._lock = Lock()
        self.finished, self.is_greeted = Event(), False
        self.refusal: SparsonaError | None = None  # why this client cannot take part: it is finished then

    def handle(self, data: bytes) -> bytes | None:
        """Answer a frame.

        Args:
            data: what arrived.

        Returns:
            The answer; None to what is not signed by the server, belongs to another run, or was sent before.
        """
        with self._lock:  # a frame that is sent again while its job is done waits, and is answered from the vault
            try:
                frame = unseal(data, self._verifier, run=self.run, receiver=self.client)
                if frame.sender != SERVER:
                    raise SparsonaError(f"a frame from client {frame.sender}", expected="one from the server")
                session, number = frame.head.get("session"), frame.head.get("number")
                if not isinstance(session, int) or not isinstance(number, int):
                    raise SparsonaError(
                        "a frame without its number", expected="that of the server's start, and its own"
                    )
                self.vault.check_visit(session, number)
                self.is_greeted = True
                if (before := self.vault.answer(frame.job)) is not None:
                    return before
            except SparsonaError as error:
                self._report(f"refused: {error.what}")
                return None
            try:
                self.vault.visit(session, number)
                return self._answer(frame)
            except SparsonaError as error:  # of this side: the server learns why it gets no more
                self._report(f"{_when(frame)}: {error.what}")
                return self._sealed(frame, {"error": str(error)})
            except Exception as error:  # likewise, and this client goes on with the next job
                self._report(f"{_when(frame)}: a fault: {type(error).__name__}: {error}")
                return self._sealed(frame, {"error": f"a fault: {type(error).__name__}"})

    def _answer(self, frame: Frame) -> bytes | None:
        if frame.kind == "hello":
            return self._hello(frame)
        if frame.kind == "end":
            self.finished.set()
            return self._sealed(frame, {})
        if frame.kind != "job":
            raise SparsonaError(f"a frame of kind '{frame.kind}'", expected="hello, job or end")
        return self._do(frame)

    def _sealed(self, frame: Frame, head: Mapping[str, Any], blobs: tuple[bytes, ...] = ()) -> bytes:
        answer = Frame(self.run, "answer", self.client, SERVER, frame.round, frame.job, head, blobs)
        return seal(answer, self._signer)

    def _hello(self, frame: Frame) -> bytes:
        """Say who this is; refuse a server whose model is another, before anything is trained."""
        mine = self.greeting
        check_model(frame.head, mine.layout, mine.start, "the server")
        if found := other_environment(read_environment(frame.head.get("environment")), mine.environment):
            self._report(f"the server has {found}")
        self._report("the server is there")
        try:
            check_class_names(mine.class_names, read_class_names(frame.head), "this client", "the federation")
        except OtherNamesError as error:  # the server finds out from the answer
            self.refusal = error
            self.finished.set()
        return self._sealed(frame, mine.as_plain())

    def context(self, card: Client) -> ClientContext:
        """This client's context, as the server knows it."""
        if self._context is None or card != self._card:
            self._card, self._context = card, self._make_context(card)
        return self._context

    def _context_of(self, frame: Frame) -> ClientContext:
        reported = frame.head.get("card")
        sizes, capacity = self.greeting.sizes, self.greeting.capacity
        num, most = (
            reported.get(name) if isinstance(reported, Mapping) else None for name in ("num_clients", "most_examples")
        )
        if not (isinstance(num, int) and isinstance(most, int) and self.client < num <= MAX_CLIENTS):
            raise SparsonaError("a job without the client's card", expected="how many clients there are")
        if not 0 <= most <= MAX_EXAMPLES:
            raise SparsonaError(f"a client of {most} examples", expected=f"at most {MAX_EXAMPLES:,}")
        return self.context(Client(self.client, sizes[0], capacity, sizes[1], num, most))

    def _do(self, frame: Frame) -> bytes:
        context = self._context_of(frame)
        ticket, live = frame.head.get("ticket"), frame.head.get("live")
        if not isinstance(ticket, str) or not isinstance(live, list):
            raise SparsonaError("a job without a ticket", expected="that of a state, or an empty one")
        job = self._here(context, read_job(frame, context.plan, context.task.layout), ticket)
        try:
            state = self.vault.get(ticket, context.fresh_state(self.client)) if ticket else None
            reported, withheld = reported_points(job.points, self.greeting.sizes, self._fewest)
            outcome = replace(self._perform(context, replace(job, state=state, points=reported)), withheld=withheld)
        except LostStateError as error:
            self._report(error.what)
            return self._sealed(frame, {"lost_state": True})
        except MaskMismatchError:
            return self._sealed(frame, answer_head(Outcome(self.client, lacks_mask=True), False))
        kept = [str(one) for one in live]
        head = answer_head(outcome, self._shares_labels)
        # On the disk before the answer leaves: a server that has the ticket can count on the State.
        if outcome.state is not None and not context.plan.stateless:
            head["ticket"] = self.vault.put(outcome.state)
            kept.append(head["ticket"])
        if outcome.work is not None:
            head["tuned"] = self.vault.put(outcome.work)
            kept.append(head["tuned"])
        blobs = () if outcome.message is None else (_bytes(outcome),)
        answer = self._sealed(frame, head, blobs)
        if job.do != "evaluate":
            self.vault.remember(frame.job, answer)
            self.vault.keep(kept)
        if outcome.work is not None:
            self.vault.keep_model(context, outcome.work, frame.round, outcome.evaluations, is_tuned=True)
        elif job.do == "evaluate" and (frame.round == context.plan.rounds or self._may_end_early):
            states = {} if state is None else {self.client: state}
            work = LocalClients(context, None, states).work(job)
            self.vault.keep_model(context, work, frame.round, outcome.evaluations)
        done = {"train": "trained", "evaluate": "", "tune": "tuned"}[job.do]
        reached = ", ".join(filter(None, [done, in_words(outcome.evaluations)])) or "tested"
        self._report(outcome.failure or f"{_when(frame)}: {reached}")
        return answer

    def _here(self, context: ClientContext, job: Job, ticket: str) -> Job:
        """The job with this client's secret seeds, and its messages on the client's device."""
        # Of this job alone: a server that sends one round twice with other models must not get the same noise twice.
        key = hashlib.blake2b(ticket.encode(), digest_size=32, key=self.vault.secret())
        for message in job.messages:
            assert isinstance(message, bytes)
            key.update(hashlib.sha256(message).digest())
        seeds = replace(job.round.seeds, key=key.digest())
        messages = job.messages
        if context.device.type != "cpu":
            messages = tuple(loaded(context.server_side, message) for message in messages)
        shared = context.place(job.shared_model)
        return replace(job, round=replace(job.round, seeds=seeds), messages=messages, shared_model=shared)

    def _perform(self, context: ClientContext, job: Job) -> Outcome:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # sums that are split among threads differ in their last bits
        try:
            return perform(context, job)
        finally:
            torch.set_num_threads(threads)


def _when(frame: Frame) -> str:
    """When a job is done, for people to read."""
    return during(str(frame.head.get("do")), frame.round)


def _bytes(outcome: Outcome) -> bytes:
    assert outcome.message is not None
    return outcome.message if isinstance(outcome.message, bytes) else encode(outcome.message)


def lone_cards(card: Client) -> tuple[Client, ...]:
    """The clients as one of them knows them: itself, and how many others there are.

    Args:
        card: the client.

    Returns:
        One entry for each client; those of the others have no data.
    """
    others = (Client(index, 0, 1.0, 0, card.num_clients, card.most_examples) for index in range(card.num_clients))
    return tuple(card if other.index == card.index else other for other in others)
