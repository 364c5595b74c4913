"""The server's side of clients on other machines: jobs go out as frames, and what comes back is checked."""

from __future__ import annotations

import math
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any

from sparsona.core.errors import SparsonaError
from sparsona.core.method import Round, State, Work
from sparsona.core.round import Client
from sparsona.core.targets import LARGEST, is_usable
from sparsona.core.update import SERVER, Update
from sparsona.deploy.exchange import Exchange
from sparsona.deploy.frames import Frame, Signer, Verifier, printable, seal, unseal
from sparsona.deploy.jobs import during, job_frame, read_answer
from sparsona.deploy.vault import TICKET_BYTES, Ticket
from sparsona.engine.evaluate import Evaluation
from sparsona.engine.failures import ABSENT, BARRED, FOREIGN, LOST, REFUSALS, REFUSED, STARTED_ANEW, UNABLE
from sparsona.engine.jobs import Job, Outcome, Report, settle

MOST = 2**62  # of what is added up over clients: the records hold 63 bits
WAITING = 8  # outcomes in memory that wait for those before them; what comes beyond waits in a file

Check = Callable[[bytes | None, Client, int], Update | None]


@dataclass
class Connection:
    """How a server reaches its clients, and what it remembers of them while it runs.

    Args:
        run: the run's identity.
        exchange: the transport.
        signer: signs as the server.
        verifier: knows the clients' keys.
        clients: what is known of each client: its number of examples, and its capacity.
        check: is called with a client's message (or None if it sent none), the client and the round, after training;
            raises SparsonaError to refuse it, and may return the update in it.
        limit: the most bytes that an answer of a client may have.
        check_evaluation: is called with each result that a client tells, and raises SparsonaError to refuse it.
        deadline: seconds after which a client that has not answered counts as lost.
        report: is called with what happens, for people to read.
        listen: is called with the kind of a job and how many of it are done.
        session: the number of this start of the server, larger than all before: older frames are refused.
        greet: asks clients of which nothing is known yet who they are.
        wait: is called before the jobs of a round, and returns when enough clients are there.
        name: of a client, for people to read.
        wants: for clients that send to each other: whose messages a client requests. Peers on a network decide that by
            themselves; a test that reaches them from one place needs it.
    """

    run: str
    exchange: Exchange
    signer: Signer
    verifier: Verifier
    clients: Sequence[Client]
    check: Check
    limit: Callable[[Client], int | None] = lambda client: None
    check_evaluation: Callable[[Evaluation], None] = lambda found: None
    deadline: float = 60.0
    report: Report = lambda text: None
    listen: Callable[[str, int], None] = lambda kind, done: None
    session: int = field(default_factory=time.time_ns)
    greet: Callable[[Sequence[int]], None] = lambda clients: None
    wait: Callable[[], None] = lambda: None
    name: Callable[[int], str] = lambda client: f"client {client}"
    wants: Callable[[int, State | None, Round, tuple[int, ...]], tuple[int, ...] | None] = lambda *_: None
    round: int = 0  # of the last job
    doing: str = ""  # and when it is done, for people to read
    done_by: int = 0  # completed rounds with which the last job is done, and in the records
    refusals: dict[int, int] = field(default_factory=dict)
    saved: dict[int, list[str]] = field(default_factory=dict)  # tickets that the checkpoint names
    num_received: int = 0  # bytes of answers
    _number: int = 0

    def stamp(self) -> dict[str, int]:
        """What the head of every frame says, so that it cannot be sent again later by somebody else."""
        self._number += 1
        return {"session": self.session, "number": self._number}

    def ask(self, frame: Frame) -> Frame:
        """Send one frame and return the answer; SparsonaError if there is none."""
        for _, data in self.exchange([(frame.receiver, seal(frame, self.signer))], self.deadline):
            return self.open(data, frame)
        raise SparsonaError(LOST.format(seconds=self.deadline), expected="an answer")

    def open(self, data: bytes | None, asked: Frame) -> Frame:
        """The answer to a frame; SparsonaError if it is none, or comes from another client."""
        client = asked.receiver
        if data is None:
            raise LostError(LOST.format(seconds=self.deadline), expected="an answer")
        self.num_received += len(data)
        limit = self.limit(self.clients[client])
        try:
            frame = unseal(data, self.verifier, run=self.run, receiver=SERVER, limit=limit)
            if frame.sender != client:
                raise SparsonaError(f"an answer of client {frame.sender}", expected=f"one of client {client}")
        except SparsonaError as error:
            # Whoever sent it, nobody can be blamed for it.
            raise LostError(f"{FOREIGN}{error.what}", expected=error.expected) from None
        if (frame.kind, frame.round, frame.job) != ("answer", asked.round, asked.job):
            raise SparsonaError(
                f"an answer to another job, of round {frame.round + 1}",
                expected=f"one to this job of round {asked.round + 1}",
            )
        if "error" in frame.head:
            raise UnableError(printable(str(frame.head["error"])))
        return frame


class LostError(SparsonaError):
    """A client did not answer in time, or somebody else answered for it."""


class UnableError(SparsonaError):
    """A client says that it cannot do its job now, for a reason of its own such as a full disk. It is asked again."""


class RemoteClients:
    """Clients on other machines. `states` and `tuned` hold tickets: the States themselves lie in the clients' vaults.

    Args:
        connection: how they are reached.
        states: their tickets.
    """

    encodes = True

    def __init__(self, connection: Connection, states: Mapping[int, State] | None = None) -> None:
        self.connection = connection
        self.states: dict[int, State] = dict(states or {})
        self.tuned: dict[int, Work] = {}
        self._last: tuple[int, Ticket | None] | None = None

    def at(self, states: Mapping[int, State]) -> RemoteClients:
        return RemoteClients(self.connection, states)

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Send jobs; yields outcomes in order, also of those clients that were not heard."""
        connection = self.connection
        order: deque[int] = deque()
        asked: dict[int, tuple[Job, Frame]] = {}
        ready: dict[int, _Waiting] = {}
        kind, done = "", 0

        def items() -> Iterator[tuple[int, bytes]]:
            nonlocal kind
            for job in jobs:
                if job.do == "train" and not order and not done:
                    connection.wait()
                kind, client, connection.round = job.do, job.client, job.round.index
                connection.doing = during(kind, connection.round)
                connection.done_by = connection.round + (job.do != "evaluate")
                order.append(client)
                if not connection.clients[client].num_examples:
                    connection.greet([client])
                if not connection.clients[client].num_examples:
                    ready[client] = _Waiting(Outcome(client, failure=ABSENT, sent=False), "", "", False)
                    continue
                if connection.refusals.get(client, 0) >= REFUSALS:
                    ready[client] = _Waiting(Outcome(client, failure=BARRED, sent=False), "", "", False)
                    continue
                frame = self._frame(job)
                # Without messages, of which many would wait here: a job that is sent again is made again.
                kept = job if job.resend is None else replace(job, messages=())
                asked[client] = (kept, replace(frame, blobs=()))
                yield client, seal(frame, connection.signer)
                del job, frame

        def in_order() -> Iterator[Outcome]:
            nonlocal done
            while order and order[0] in ready:
                client = order.popleft()
                waiting = ready.pop(client)
                outcome = self._checked(waiting)
                self._last = (client, Ticket.of(bytes.fromhex(waiting.ticket)) if waiting.ticket else None)
                if waiting.tuned:
                    self.tuned[client] = Ticket.of(bytes.fromhex(waiting.tuned))
                done += 1
                connection.listen(kind, done)
                yield outcome

        for client, data in connection.exchange(items(), connection.deadline):
            job, frame = asked.pop(client)
            ready[client] = self._outcome(job, frame, data, len(ready) >= WAITING)
            yield from in_order()
        yield from in_order()
        assert not order, "the transport left clients out"

    def _frame(self, job: Job, ticket: str | None = None) -> Frame:
        if ticket is None:
            state = self.states.get(job.client)
            ticket = "" if state is None else state.hex
        return job_frame(job, self.connection.run, ticket, self._more(job.client))

    def _more(self, client: int) -> dict[str, Any]:
        """What every frame to a client says."""
        state, known = self.states.get(client), self.connection.clients[client]
        live = {*([] if state is None else [state.hex]), *self.connection.saved.get(client, [])}
        card = {"num_clients": known.num_clients, "most_examples": known.most_examples}
        return {**self.connection.stamp(), "live": sorted(live), "card": card}

    def _outcome(self, job: Job, frame: Frame, data: bytes | None, to_file: bool) -> _Waiting:
        connection, client = self.connection, job.client
        note, before = "", self.connection.num_received
        try:
            answer = connection.open(data, frame)
            if answer.head.get("lost_state") is True:
                note = STARTED_ANEW
                connection.report(f"{connection.name(client)}: {note}")
                job = job.again() if job.resend is not None else job
                frame = self._frame(job, ticket="")
                answer = connection.ask(frame)
            outcome = read_answer(answer, client)
            if (instead := settle(job, outcome)) is not None:
                frame = self._frame(replace(instead, resend=None), ticket="" if note else None)
                answer = connection.ask(frame)
                outcome = read_answer(answer, client)
                if outcome.lacks_mask:
                    raise SparsonaError("it cannot read a message that has all masks in it")
            self._check(job, outcome)
            if outcome.failure:
                connection.report(f"{connection.name(client)}: {outcome.failure}")
                num_bytes = connection.num_received - before
                return _Waiting(replace(outcome, num_bytes=num_bytes), "", "", False)
            ticket, tuned = (_ticket(answer.head.get(name)) for name in ("ticket", "tuned"))
        except LostError as error:
            connection.report(f"{connection.name(client)}: {error.what}")
            return _Waiting(Outcome(client, failure=error.what), "", "", False)
        except SparsonaError as error:
            if job.do != "evaluate":
                self.refuses(client, error)
            why = f"{UNABLE}{error.what}" if isinstance(error, UnableError) else error.what
            return _Waiting(Outcome(client, failure=f"{REFUSED}{why}"), "", "", False)
        outcome = replace(outcome, note=note, num_bytes=connection.num_received - before)
        return _Waiting(outcome, ticket, tuned, to_file, job.round.index if job.do == "train" else None)

    def _checked(self, waiting: _Waiting) -> Outcome:
        """The outcome, with the update in its message: checked when it is needed, so that it is read once."""
        outcome = waiting.take()
        if waiting.trained_in is None:
            return outcome
        assert outcome.message is None or isinstance(outcome.message, bytes)
        try:
            known = self.connection.clients[outcome.client]
            return replace(outcome, update=self.connection.check(outcome.message, known, waiting.trained_in))
        except SparsonaError as error:
            self.refuses(outcome.client, error)
            waiting.ticket = waiting.tuned = ""
            return Outcome(outcome.client, failure=f"{REFUSED}{error.what}")

    def _check(self, job: Job, outcome: Outcome) -> None:
        """Refuse an answer that does not fit its job."""
        if job.do != "train" and outcome.message is not None:
            raise SparsonaError(f"a message in the answer to '{job.do}'", expected="none")
        if outcome.failure and (job.do == "evaluate" or outcome.message is not None):
            raise SparsonaError("an answer that says that training diverged, and has a result", expected="one of both")
        reported = [*(one.point for one in outcome.evaluations), *outcome.withheld]
        if extra := set(reported) - set(job.points):
            raise SparsonaError(f"an evaluation at '{min(extra)[:40]}'", expected="the points that were asked for")
        if len(reported) > len(set(reported)):
            raise SparsonaError("two results at one point", expected="one, or none")
        for one in outcome.evaluations:
            self.connection.check_evaluation(one)
        counts = outcome.tally.examples, outcome.tally.steps, outcome.tally.train_flops, outcome.tally.search_flops
        if max(counts) > MOST // len(self.connection.clients):
            raise SparsonaError(f"a count of {max(counts)}", expected="what a turn can take")
        check_plausible(outcome.tally.loss, "training loss")

    def keep(self, client: int) -> None:
        assert self._last is not None
        assert self._last[0] == client
        if self._last[1] is not None:
            self.states[client] = self._last[1]

    def used(self, client: int) -> None:
        self.connection.refusals.pop(client, None)

    def refuses(self, client: int, error: SparsonaError) -> bool:
        connection = self.connection
        if not isinstance(error, UnableError):
            connection.refusals[client] = connection.refusals.get(client, 0) + 1
        connection.report(f"{connection.name(client)}, {connection.doing}: refused: {error.what}")
        if connection.refusals.get(client, 0) == REFUSALS:
            connection.report(f"{connection.name(client)} is {BARRED}")
        return True

    def blank_state(self, client: int) -> State:
        return Ticket.blank()

    def blank_tuned(self, job: Job) -> Work:
        return Ticket.blank()

    def saved(self, states: Mapping[int, State], tuned: Mapping[int, Work]) -> None:
        found: dict[int, list[str]] = {}
        for tickets in (states, tuned):
            for client, ticket in tickets.items():
                found.setdefault(client, []).append(ticket.hex)
        self.connection.saved = found

    def wanted(self, client: int, round_: Round, available: tuple[int, ...]) -> tuple[int, ...] | None:
        return self.connection.wants(client, self.states.get(client), round_, available)


class _Waiting:
    """An outcome that waits for those before it; in a file if there are many.

    `trained_in`: the round whose training its message is of, and has to be checked for.
    """

    def __init__(self, outcome: Outcome, ticket: str, tuned: str, to_file: bool, trained_in: int | None = None) -> None:
        self.ticket, self.tuned, self.trained_in, self._outcome = ticket, tuned, trained_in, outcome
        self._file: IO[bytes] | None = None
        if to_file and isinstance(outcome.message, bytes):
            self._file = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `take`
            self._file.write(outcome.message)
            self._outcome = replace(outcome, message=b"")

    def take(self) -> Outcome:
        if self._file is None:
            return self._outcome
        with self._file as file:
            file.seek(0)
            return replace(self._outcome, message=file.read())


def check_plausible(value: float, what: str) -> None:
    """Refuse a figure so large that sums over clients would not be finite. One that is not finite itself is that of a
    model that diverged, which is no lie."""
    if math.isfinite(value) and not is_usable(value):
        raise SparsonaError(f"a {what} of {value:.3g}", expected=f"no more than {LARGEST:g}")


def _ticket(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) != 2 * TICKET_BYTES or not set(value) <= set("0123456789abcdef"):
        raise SparsonaError("a ticket that is none", expected=f"{2 * TICKET_BYTES} hexadecimal digits")
    return value
