"""The side of a session whose clients are on other machines: who is there, and what arrives from them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch

from sparsona.core.errors import SparsonaError
from sparsona.core.points import FEW, FEWEST, point
from sparsona.core.round import Client
from sparsona.core.update import SERVER, Update
from sparsona.data.client_index import PARTS
from sparsona.deploy.agent import MAX_EXAMPLES
from sparsona.deploy.exchange import Exchange
from sparsona.deploy.frames import MAX_HEAD, Frame, Signer, Verifier, seal
from sparsona.deploy.greeting import (
    OtherNamesError,
    check_class_names,
    check_model,
    names_head,
    opening_head,
    other_environment,
    read_class_names,
    read_environment,
)
from sparsona.deploy.jobs import is_reported
from sparsona.deploy.remote import Connection, RemoteClients, check_plausible
from sparsona.engine.clients import Clients
from sparsona.engine.evaluate import Evaluation, confusion_shape
from sparsona.engine.gate import check_message, largest_message
from sparsona.engine.jobs import Report
from sparsona.engine.plan import tested_clients
from sparsona.executors import numeric_mode
from sparsona.experiment.build import headline_of
from sparsona.experiment.client_side import used_environment
from sparsona.experiment.guests import Cards, Guest, read_guests
from sparsona.experiment.terms import Terms
from sparsona.runs.folder import reached
from sparsona.runs.session import Listen
from sparsona.runs.stopping import validation_point, watched
from sparsona.runs.traits import TraitRecord

HELLO_SECONDS = 2.0  # for a client to say that it is there


class Network:
    """The side of a session whose clients are on other machines.

    Args:
        terms: of the run.
        exchange: the transport.
        signer: signs as the server.
        verifier: knows the clients' keys.
        deadline: seconds for a client's answer.
        report: is called with what happens.
        present: says which clients are there now, as far as the transport knows; None: it does not.
        hello: seconds for a client to say that it is there.
        session: the number of this start of the server, above those of all starts before; None: the time.
    """

    def __init__(
        self,
        terms: Terms,
        exchange: Exchange,
        signer: Signer,
        verifier: Verifier,
        deadline: float = 60.0,
        report: Callable[[str], None] = lambda text: None,
        present: Callable[[], set[int]] | None = None,
        hello: float = HELLO_SECONDS,
        session: int | None = None,
    ) -> None:
        self.terms, self.report, self._present, self._hello = terms, report, present, hello
        self.guests: dict[int, Guest] = {}
        self.known: dict[int, Guest] = {}  # what those who took part before a restart reported then
        self.admitted: dict[int, int] = {}  # with how many completed rounds that is in the records
        self._cards = Cards(terms.file.clients, terms.plan())
        self.connection = Connection(
            terms.run,
            exchange,
            signer,
            verifier,
            self._cards,
            self._check,
            self._limit,
            deadline=deadline,
            report=report,
        )
        self.connection.greet, self.connection.wait = self._admit_late, self._wait_for_clients
        self.connection.check_evaluation = self._check_evaluation
        self.connection.name = lambda client: terms.file.clients[client].name
        self._refused: set[tuple[int, str]] = set()  # greetings, each reported once
        self._unnamed: set[int] = set()  # those without class names, each reported once
        self.note_arrival: Callable[[], None] = lambda: None
        self.clients: Clients = RemoteClients(self.connection)
        if session is not None:
            self.connection.session = session
        self.client_context = terms.context(terms.no_data(), self._cards, torch.device("cpu"))
        self.context = self.client_context.server_side
        self.environment = used_environment(self.client_context.device)
        self._digests = (self.client_context.task.layout.digest.hex(), self.client_context.start_digest)

    # What `Session` needs.

    def numeric_mode(self) -> AbstractContextManager[None]:
        return numeric_mode(self.client_context)

    @contextmanager
    def open(self, executor: str, report: Report, listen: Listen) -> Iterator[None]:
        self.connection.listen = listen
        report("")
        yield

    def traits(self) -> TraitRecord | None:
        return None

    # Who is there.

    def wait(self, at_least: int, seconds: float | None, listen: Callable[[int, int], None]) -> None:
        """Wait until so many clients have reported that they are there.

        Args:
            at_least: how many.
            seconds: how long at most; None: as long as it takes.
            listen: is called with how many are there, of how many.
        """
        began = time.monotonic()
        while True:
            asked = time.monotonic()
            self.greet([one.index for one in self.terms.file.clients if one.index not in self.guests])
            listen(len(self.guests), self.terms.num_clients)
            if len(self.guests) >= at_least:
                return
            if seconds is not None and time.monotonic() - began > seconds:
                missing = [one.name for one in self.terms.file.clients if one.index not in self.guests]
                raise SparsonaError(
                    f"{len(self.guests)} of {at_least} client{'s' * (at_least != 1)} came within {seconds:g} s",
                    expected=f"{', '.join(missing[:8])}{' and others' * (len(missing) > 8)}",
                    hint="start them with `sparsona join`, or lower --at-least",
                )
            time.sleep(max(0.0, min(1.0, self._hello) - (time.monotonic() - asked)))

    def gather_guests(
        self, path: Path, at_least: int, seconds: float | None, listen: Callable[[int, int], None]
    ) -> None:
        """Wait for the clients of a run, as `wait` does; those of one that is over need not come."""
        if (path / "config.json").exists():
            self.known = {client: guest for client, (_, guest) in read_guests(path).items()}
            if reached(path).finished:
                self.greet([one.index for one in self.terms.file.clients])
                return
        self.wait(at_least, seconds, listen)

    def _wait_for_clients(self) -> None:
        """Wait before a round while there are too few clients to play it: rounds are not spent on nobody."""
        if self._present is None:
            return
        needed, is_said = max(1, self.terms.config.min_updates), False
        while len(self._present() & set(range(self.terms.num_clients))) < needed:
            if not is_said:
                self.report("waiting: nobody is there" if needed == 1 else f"waiting: fewer than {needed} are there")
                is_said = True
            time.sleep(0.2)

    def check_patience(self) -> None:
        """Raise SparsonaError if nobody who is here tells what the run's patience goes by; say how many do."""
        config, context, targets = self.terms.config, self.client_context, self.terms.kind.targets
        if config.patience is None:
            return
        by, place = watched(config.patience_metric, targets == "numbers"), validation_point(self._headline)
        if place not in context.plan.points:
            raise SparsonaError(
                f"patience in '{self.terms.file.path}', whose points lack '{place}'",
                expected="what `sparsona federation new --set patience=...` writes",
                hint="make the file anew",
            )
        tested = tested_clients(context.plan, context.clients)
        there = [self.guests[client] for client in tested if client in self.admitted]
        # Who shares labels is known by their counts, which numbers have none of.
        telling = [
            one
            for one in there
            if one.sizes[PARTS.index("validation")] >= FEWEST
            and is_reported(by, targets, targets == "numbers" or one.label_counts is not None)
        ]
        if not telling:
            is_open = is_reported(by, targets, shares_labels=False)
            raise SparsonaError(
                f"patience by {by}: none of the {len(there)} clients here tells it of its validation data",
                expected=f"clients with {FEWEST} validation examples or more"
                + " that share label counts, which this metric reveals" * (not is_open),
                hint=f"`sparsona join{' --share labels' * (not is_open)} --set validation_rate=0.2` there",
            )
        # A class with few examples has a client tell no metric by classes, which only its answers show.
        few = "" if is_reported(by, targets, shares_labels=False) else "up to "
        self.report(f"patience goes by the {by} of {few}{len(telling)} of {len(there)} clients on validation data")

    @property
    def _headline(self) -> str:
        return headline_of(self.terms.config, self.terms.row)

    def greet(self, clients: Sequence[int]) -> None:
        """Ask clients who they are; those that answer are guests from then on."""
        connection, (_, class_names) = self.connection, self._class_names()
        head = {**opening_head(*self._digests, self.environment), **names_head(class_names)}
        frames = {
            client: Frame(
                self.terms.run,
                "hello",
                SERVER,
                client,
                connection.round,
                f"hello-{time.time_ns():x}",
                {**connection.stamp(), **head},
            )
            for client in clients
        }
        items = ((client, seal(frame, connection.signer)) for client, frame in frames.items())
        misnamed = []
        # In the order of the roster: whose class names the others must have does not depend on who is faster.
        for client, data in sorted(connection.exchange(items, self._hello), key=lambda one: one[0]):
            if data is None:
                continue
            name = self.terms.file.clients[client].name
            try:
                guest = self._read_greeting(connection.open(data, frames[client]), client)
                known = self.known.get(client)
                if known is not None and (guest.data, guest.sizes) != (known.data, known.sizes):
                    raise SparsonaError("its data is not what it was when it began", expected="the same examples")
                whose, class_names = self._class_names()
                check_class_names(guest.class_names, class_names, "it", whose)
            except SparsonaError as error:
                if (client, error.what) not in self._refused:
                    self._refused.add((client, error.what))
                    is_named = isinstance(error, OtherNamesError)
                    more = f"; expected: {error.expected}; {error.hint}" if is_named else ""
                    self.report(f"{name} cannot take part: {error.what}{more}")
                    misnamed += [client] * is_named
                continue
            self.guests[client] = guest
            self.report(f"{name} is there, with {guest.sizes[0]} examples")
            if found := other_environment(guest.environment, self.environment):
                self.report(f"{name} has {found}")
        self._report_unnamed()
        if misnamed:  # a greeting tells the client the names, and so why it cannot take part
            self.greet(misnamed)

    def _class_names(self) -> tuple[str, tuple[str, ...] | None]:
        """What classes are called, and who says so: the federation file, or the first client that has names."""
        if self.terms.class_names:
            return f"'{self.terms.file.path}'", self.terms.class_names
        for client, guest in (*self.known.items(), *self.guests.items()):
            if guest.class_names:
                return self.terms.file.clients[client].name, guest.class_names
        return "", None

    def _report_unnamed(self) -> None:
        """Say whose classes are numbers alone, where others have names."""
        whose, class_names = self._class_names()
        found = [client for client, guest in self.guests.items() if not guest.class_names]
        if class_names and (new := [client for client in found if client not in self._unnamed]):
            self._unnamed.update(new)
            listed = [self.terms.file.clients[client].name for client in new]
            self.report(
                f"{', '.join(listed[:8])}{' and others' * (len(new) > 8)} without class names: class 0 there is taken "
                f"for '{class_names[0]}', as {whose} calls it, and so on"
            )

    def admit(self, clients: Sequence[int]) -> None:
        """Fill in the cards of these guests: from now on they take part.

        Guests are admitted before the first round, and late ones with their first job, so that a run can be resumed
        and replayed.
        """
        self.admitted |= dict.fromkeys(clients, self.connection.done_by)
        self._cards.fill({client: self.guests[client].sizes for client in self.admitted})

    def _admit_late(self, clients: Sequence[int]) -> None:
        self.greet([client for client in clients if client not in self.guests])
        if found := [client for client in clients if client in self.guests]:
            self.admit(found)
            self.note_arrival()

    def _read_greeting(self, frame: Frame, client: int) -> Guest:
        head = frame.head
        check_model(head, *self._digests, "it")
        sizes, counts = head.get("sizes"), head.get("label_counts")
        if not (
            isinstance(sizes, list)
            and len(sizes) == 3
            and all(type(n) is int and 0 <= n <= MAX_EXAMPLES for n in sizes)
        ):
            raise SparsonaError("its numbers of examples are none", expected=f"three counts up to {MAX_EXAMPLES:,}")
        if sizes[0] < 1:
            raise SparsonaError("it has no training examples", expected="at least one")
        if counts is not None and not (
            isinstance(counts, list)
            and len(counts) == self.terms.kind.num_labels
            and all(n is None or (type(n) is int and n >= 0) for n in counts)
        ):
            raise SparsonaError("its label counts are none", expected="a count for each class")
        return Guest(
            (sizes[0], sizes[1], sizes[2]),
            str(head.get("data"))[:64],
            None if counts is None else tuple(FEW if n is None else n for n in counts),
            read_environment(head.get("environment")),
            read_class_names(head, self.terms.kind.num_labels),
        )

    # What arrives.

    def _limit(self, client: Client) -> int:
        """The most bytes that an answer may have: a message, and a head."""
        cost = self.context.method.cost(self.context.params.layout, client, self.context.plan.round_at(0))
        return (0 if cost.up is None else largest_message(cost.up)) + 2 * MAX_HEAD

    def _check(self, message: bytes | None, client: Client, index: int) -> Update | None:
        cost = self.context.method.cost(self.context.params.layout, client, self.context.plan.round_at(index))
        if message is not None:
            return check_message(message, cost, client=client, round=index)
        if cost.up is not None:
            raise SparsonaError("no message after training", expected="one")
        return None

    def _check_evaluation(self, found: Evaluation) -> None:
        """Refuse a result that this client, with so many examples, cannot have."""
        kind, about = self.terms.kind, point(found.point)
        size = self.guests[found.client].sizes[PARTS.index(about.data)]
        of_tokens = kind.targets == "tokens"
        if found.count > size * (math.prod(kind.shape) if of_tokens else 1) or (not of_tokens and found.count < size):
            raise SparsonaError(f"a result of {found.count} examples", expected=f"its {size}")
        if (found.correct is None) != (kind.targets == "numbers"):
            raise SparsonaError("a result of another kind of task", expected=f"one of {kind.targets}")
        if found.confusion is not None and tuple(found.confusion.shape) != confusion_shape(self.client_context.task):
            raise SparsonaError("a confusion matrix of another shape", expected="a row for each class")
        known = self.client_context.task.metrics
        if strange := [name for name in found.metrics if name not in known]:
            raise SparsonaError(f"the metric '{strange[0]}' of a run", expected=f"one of {', '.join(known) or 'none'}")
        for value in (found.loss, *found.metrics.values()):
            check_plausible(value, "result")

    def end(self) -> None:
        """Tell the clients that the run is over."""
        connection = self.connection
        name = f"end-{connection.session:x}"
        frames = [
            Frame(self.terms.run, "end", SERVER, client, connection.round, name, connection.stamp())
            for client in self.guests
        ]
        items = ((frame.receiver, seal(frame, connection.signer)) for frame in frames)
        for _ in connection.exchange(items, self._hello):
            pass
