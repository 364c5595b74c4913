"""Runs on several machines: a server and its clients, built from a federation file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel

from sparsona import methods
from sparsona.core import spec
from sparsona.core.errors import SparsonaError
from sparsona.core.method import Method
from sparsona.core.points import FEW, point
from sparsona.core.round import Client
from sparsona.core.task import Task
from sparsona.core.update import SERVER, PartSize
from sparsona.data import SOURCES
from sparsona.data.client_index import PARTS, ClientIndex
from sparsona.data.federation import Federation
from sparsona.deploy.agent import MAX_EXAMPLES, Agent, Greeting, lone_cards
from sparsona.deploy.exchange import Exchange
from sparsona.deploy.federation_file import FederationFile, Member, key_path
from sparsona.deploy.flower import SocketServer
from sparsona.deploy.frames import MAX_HEAD, Frame, Signer, Verifier, seal
from sparsona.deploy.identity import KeyFile, Roster, check_certificate
from sparsona.deploy.jobs import told_counts
from sparsona.deploy.memory import return_large_buffers, share_memory_among_threads
from sparsona.deploy.remote import Connection, RemoteClients
from sparsona.deploy.vault import Vault
from sparsona.deploy.zenoh_link import Tls, ZenohLink
from sparsona.engine.clients import Clients
from sparsona.engine.context import ClientContext
from sparsona.engine.evaluate import Evaluation, confusion_shape
from sparsona.engine.gate import check_message, largest_message
from sparsona.engine.jobs import Report
from sparsona.engine.plan import Plan
from sparsona.executors import choose_device, numeric_mode
from sparsona.experiment.build import (
    GIVEN,
    ExampleKind,
    make_plan,
    make_task,
    method_maker,
    read_data,
)
from sparsona.experiment.run import Run
from sparsona.experiment.train import NETWORK, describe_run, models_elsewhere, play
from sparsona.methods import MethodCard
from sparsona.runs.facts import RunFacts
from sparsona.runs.folder import (
    FEDERATION_FILE,
    GUESTS_FILE,
    SERVER_FILE,
    RunFolder,
    environment,
    make_empty_folder,
    reached,
    read_json,
    write_atomically,
)
from sparsona.runs.observers import ObserverList
from sparsona.runs.options import RunConfig, dump
from sparsona.runs.session import Listen, Session
from sparsona.runs.traits import TraitRecord
from sparsona.runs.validation import merge_errors, validate

UNASKED_SECONDS = 20.0  # after which a client that is connected says that nobody asks for it
MANY_CLIENTS = 32  # whose messages make a server grow unless freed memory is returned, which costs it some time
HELLO_SECONDS = 2.0  # for a client to say that it is there
_OF_TASK = ("classes", "input", "predicts")


@dataclass(frozen=True)
class Terms:
    """What all sides of a run agree on, as objects.

    Args:
        file: the federation file.
        config: the options of the run.
        row: the method's row.
        method_config: the method's own options.
        kind: what examples look like.
    """

    file: FederationFile
    config: RunConfig
    row: MethodCard
    method_config: BaseModel
    kind: ExampleKind

    @classmethod
    def read(cls, path: str | Path) -> Terms:
        """Read a federation file.

        Args:
            path: the file.

        Returns:
            Its terms; SparsonaError names what is wrong with them.
        """
        file = FederationFile.read(path)
        if not file.clients:
            raise SparsonaError(
                f"'{path}' has no clients yet",
                expected="a roster",
                hint=f"`sparsona keys new NAME` there, `sparsona federation admit {path} NAME.pub` here",
            )
        values = {key: value for key, value in file.run.items() if key not in _OF_TASK}
        num = len(file.clients)
        values |= {"clients": num, "capacities": file.capacities, "executor": NETWORK, "device": "cpu"}
        config = validate(RunConfig, values | {"data": GIVEN, "partition": GIVEN, "test": GIVEN}, f"'{path}'")
        if found := config.conflicts():
            raise merge_errors(found)
        row = methods.card(config.method)
        own = validate(methods.factory(row)[1], config.options, config.method)
        try:
            shape, classes = tuple(int(side) for side in file.run["input"]), int(file.run["classes"])
            predicts = str(file.run.get("predicts", "classes"))
        except (KeyError, TypeError, ValueError) as error:
            raise SparsonaError(
                f"'{path}' does not say what examples look like: {error}", expected="input and classes in [run]"
            ) from None
        return cls(file, config, row, own, ExampleKind(shape, classes, predicts, predicts == "tokens"))

    @property
    def run(self) -> str:
        """The run's identity."""
        return self.file.digest

    @property
    def num_clients(self) -> int:
        return len(self.file.clients)

    def check_at_least(self, at_least: int | None) -> None:
        """Raise SparsonaError if a run cannot wait for so many clients; None: for all."""
        if at_least is not None and not 0 < at_least <= self.num_clients:
            raise SparsonaError(f"--at-least {at_least}", expected=f"1 to {self.num_clients}, the size of the roster")

    def vault_of(self, member: Member, given: str | Path | None) -> Path:
        """The folder of a client's vault: the given one, or one in ./vault."""
        return Path("vault") / f"{member.name}-{self.run[:8]}" if given is None else Path(given)

    def plan(self) -> Plan:
        return make_plan(self.config, self.num_clients, self.row.peers)

    def task(self) -> Task:
        """A new task of this run."""
        assert self.config.model is not None
        return make_task(self.config.model, self.kind)

    def make_method(self) -> Callable[[Task], Method]:
        return method_maker(self.config, self.row, self.method_config)

    def context(self, federation: Federation, cards: tuple[Client, ...], device: torch.device) -> ClientContext:
        """A context with the data that this process has, perhaps none."""
        return ClientContext(
            self.task(), self.make_method(), federation, self.plan(), self.file.capacities, device, "fp32", cards=cards
        )

    def longest_frame(self) -> int:
        """The most bytes that a frame of this run may have: messages either way, a shared model, and heads."""
        task, plan = self.task(), self.plan()
        method = self.make_method()(task)
        model = largest_message((PartSize("shared", task.layout, task.layout.size),))
        longest = 0
        for one in self.file.clients:
            cost = method.cost(task.layout, Client(one.index, 1, one.capacity, 1, self.num_clients), plan.round_at(0))
            longest = max(longest, *(0 if parts is None else largest_message(parts) for parts in (cost.up, cost.down)))
        # A job may have every mask in it for a client that lost its state: a bit for each entry, and less than a model.
        return longest + 2 * model + 2 * MAX_HEAD

    def no_data(self) -> Federation:
        """A federation of these clients whose data is elsewhere."""
        x = torch.zeros((0, *self.kind.shape), dtype=torch.int32 if self.kind.has_tokens else torch.float32)
        y = torch.zeros(0, dtype=torch.float32 if self.kind.targets == "numbers" else torch.int64)
        empty = np.zeros((self.num_clients, 3), dtype=np.int64)
        return Federation(x, y, ClientIndex(torch.zeros(0, dtype=torch.int64), empty), self.kind.num_classes)


# A client.


def own_data(terms: Terms, index: int, source: str, data_dir: str | None = None, **options: Any) -> Federation:
    """A client's data, as that of client `index` among clients without any.

    Args:
        terms: of the run.
        index: the client.
        source: "arrays:mine.npz" or "folder:pictures": all of it is this client's. The name of a data set: the share of
            it that this client has in a simulation of the run.
        data_dir: folder that is searched first for the data's files.
        options: how the data is read and split: validation_rate, test_rate, seed, and for a data set partition and so
            on.

    Returns:
        The federation.
    """
    return _share(terms, _read(terms, source, data_dir, options), index, source)


def everyones_data(
    terms: Terms, sources: Sequence[str], data_dir: str | None = None, **options: Any
) -> list[Federation]:
    """The data of all clients, each as `own_data` returns it.

    Args:
        terms: of the run.
        sources: the name of a data set, of which each client takes its share, or a source for each client of the
            roster.
        data_dir: as for `own_data`.
        options: as for `own_data`.

    Returns:
        A federation for each client.
    """
    num = terms.num_clients
    if len(sources) == 1 and not _is_own(sources[0]):
        shared = _read(terms, sources[0], data_dir, options)
        return [_share(terms, shared, index, sources[0]) for index in range(num)]
    if len(sources) != num:
        raise SparsonaError(
            f"data of {len(sources)} clients",
            expected=f"a data set that is shared out, or one source for each of {num}",
        )
    return [own_data(terms, index, source, data_dir, **options) for index, source in enumerate(sources)]


def _is_own(source: str) -> bool:
    """Whether all of a source is one client's."""
    return spec.parse("data set", source).name not in SOURCES or source.partition(":")[0] in ("arrays", "folder")


def _read(terms: Terms, source: str, data_dir: str | None, options: Mapping[str, Any]) -> Federation:
    given = {"seed": terms.config.seed, "data": source, "data_dir": data_dir, **options}
    is_own = _is_own(source)
    own = {"partition": "iid", "clients": 1} if is_own else {"clients": terms.num_clients}
    config = validate(RunConfig, {"method": terms.config.method, **own, **given}, "the client's data")
    # A client need not have every class: how many there are, the file says.
    is_classes = is_own and terms.kind.targets == "classes"
    return read_data(config, num_classes=terms.kind.num_classes if is_classes else None)


def _share(terms: Terms, shared: Federation, index: int, source: str) -> Federation:
    """What a client has of the data that was read, checked against the terms."""
    found = alone(shared, 0 if _is_own(source) else index, index, terms.num_clients)
    kind = ExampleKind.of(found)
    if kind.packing is not None:
        raise SparsonaError(
            f"examples of several inputs: {kind.packing.describe()}",
            expected=f"one array of inputs, which '{terms.file.path}' describes",
            hint="concatenate them, and split them in the model; or simulate the run in one process",
        )
    if kind != terms.kind and (kind.shape, kind.targets) != (terms.kind.shape, terms.kind.targets):
        raise SparsonaError(
            f"examples of shape {kind.shape} that have {kind.targets}",
            expected=f"shape {terms.kind.shape} and {terms.kind.targets}, as '{terms.file.path}' says",
            hint="reshape the arrays, or use the data that the federation is about",
        )
    if kind.num_classes > terms.kind.num_classes:
        raise SparsonaError(
            f"labels of {kind.num_classes} classes",
            expected=f"at most {terms.kind.num_classes}, as '{terms.file.path}' says",
            hint="labels are whole numbers from 0",
        )
    names = found.class_names if found.num_classes == terms.kind.num_classes else None
    return replace(found, num_classes=terms.kind.num_classes, class_names=names)


def alone(federation: Federation, client: int, index: int, num_clients: int) -> Federation:
    """The data of one client of a federation, as client `index` of so many; the others have none here."""
    split = federation.splits[client]
    entries = torch.cat([split.train, split.validation, split.test])
    sizes = np.zeros((num_clients, 3), dtype=np.int64)
    sizes[index] = [len(split.train), len(split.validation), len(split.test)]
    x, y = federation.x[entries].clone(), federation.y[entries].clone()
    # The others' names are not known here.
    return replace(federation, x=x, y=y, splits=ClientIndex(torch.arange(len(entries)), sizes), client_names=None)


def make_greeting(context: ClientContext, federation: Federation, index: int, shares_labels: bool) -> Greeting:
    """What a client, or a peer, tells the others about itself."""
    train, validation, test = (int(count) for count in federation.sizes()[index])
    counts = federation.label_counts("train") if shares_labels else None
    return Greeting(
        layout=context.task.layout.digest.hex(),
        start=context.start_digest,
        sizes=(train, validation, test),
        capacity=context.clients[index].capacity,
        environment=environment(),
        data=federation.digest(),
        label_counts=None if counts is None else tuple(told_counts(counts[index].tolist())),
    )


def make_agent(
    terms: Terms,
    index: int,
    federation: Federation,
    vault: Path,
    signer: Signer,
    verifier: Verifier,
    shares_labels: bool = False,
    device: str = "auto",
    report: Callable[[str], None] = lambda text: None,
) -> Agent:
    """The agent of a client, which answers the server.

    Args:
        terms: of the run.
        index: the client.
        federation: its data, as `own_data` returns it.
        vault: the folder of its States.
        signer: signs as this client.
        verifier: knows the server's key.
        shares_labels: whether its label counts may become known.
        device: where it trains.
        report: is called with what happens.

    Returns:
        The agent.
    """
    member, place = terms.file.clients[index], choose_device(device, "fp32")
    train, validation, _ = (int(count) for count in federation.sizes()[index])

    def make_context(card: Client) -> ClientContext:
        return terms.context(federation, lone_cards(card), place)

    context = make_context(Client(index, train, member.capacity, validation, terms.num_clients, train))
    greeting = make_greeting(context, federation, index, shares_labels)
    return Agent(index, terms.run, make_context, greeting, Vault(vault), signer, verifier, shares_labels, report)


# The server.


@dataclass
class Guest:
    """What the server knows of one client."""

    sizes: tuple[int, int, int] = (0, 0, 0)
    data: str = ""
    label_counts: tuple[int, ...] | None = None  # FEW for a count from 1 to 4
    environment: dict[str, str] = field(default_factory=dict)


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
        self.terms, self._report, self._present, self._hello = terms, report, present, hello
        self.guests: dict[int, Guest] = {}
        self.known: dict[int, Guest] = {}  # what those who took part before a restart said then
        self.admitted: dict[int, int] = {}  # with how many completed rounds that is in the records
        num = terms.num_clients
        self._cards = [Client(one.index, 0, one.capacity, 0, num, 0) for one in terms.file.clients]
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
        self._refused: set[tuple[int, str]] = set()  # greetings, each reported once
        self.note_arrival: Callable[[], None] = lambda: None
        self.clients: Clients = RemoteClients(self.connection)
        if session is not None:
            self.connection.session = session
        # A session reads the clients' cards where they are: those of late clients are filled in when they come.
        self.client_context = terms.context(terms.no_data(), self._cards, torch.device("cpu"))  # type: ignore[arg-type]
        self.context = self.client_context.server_side
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
        """Wait until so many clients have said that they are there.

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
                    f"{len(self.guests)} of {at_least} clients came within {seconds:g} s",
                    expected=f"{', '.join(missing[:8])}{' and others' * (len(missing) > 8)}",
                    hint="start them with `sparsona join`, or lower --at-least",
                )
            time.sleep(max(0.0, min(1.0, self._hello) - (time.monotonic() - asked)))

    def gather_guests(
        self, path: Path, at_least: int, seconds: float | None, listen: Callable[[int, int], None]
    ) -> None:
        """Wait for the clients of a run, as `wait` does; those of one that is over need not come."""
        if (path / "config.json").exists():
            self.known = {client: guest for client, (_, guest) in _written_guests(path).items()}
            if reached(path).finished:
                self.greet([one.index for one in self.terms.file.clients])
                return
        self.wait(at_least, seconds, listen)

    def _wait_for_clients(self) -> None:
        """Wait before a round while there are too few clients to play it: rounds are not spent on nobody."""
        if self._present is None:
            return
        needed, said = max(1, self.terms.config.at_least), False
        while len(self._present() & set(range(self.terms.num_clients))) < needed:
            if not said:
                self._report(f"waiting: fewer than {needed} clients are there")
                said = True
            time.sleep(0.2)

    def greet(self, clients: Sequence[int]) -> None:
        """Ask clients who they are; those that answer are guests from then on."""
        connection, head = self.connection, {"layout": self._digests[0], "start": self._digests[1]}
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
        for client, data in connection.exchange(items, self._hello):
            if data is None:
                continue
            name = self.terms.file.clients[client].name
            try:
                guest = self._read_greeting(connection.open(data, frames[client]), client)
                known = self.known.get(client)
                if known is not None and (guest.data, guest.sizes) != (known.data, known.sizes):
                    raise SparsonaError("its data is not what it was when it began", expected="the same examples")
            except SparsonaError as error:
                if (client, error.what) not in self._refused:
                    self._refused.add((client, error.what))
                    self._report(f"{name} cannot take part: {error.what}")
                continue
            self.guests[client] = guest
            self._report(f"{name} is there, with {guest.sizes[0]} examples")

    def admit(self, clients: Sequence[int]) -> None:
        """Fill in the cards of these guests: from now on they take part.

        A run depends on when that is, for methods know how many examples the largest client has. Guests are admitted
        before the first round, and late ones with their first job, so that a run can be resumed and replayed.
        """
        self.admitted |= dict.fromkeys(clients, self.connection.done_by)
        most = max((self.guests[client].sizes[0] for client in self.admitted), default=0)
        for client in self.admitted:
            sizes = self.guests[client].sizes
            self._cards[client] = replace(
                self._cards[client], num_examples=sizes[0], num_validation=sizes[1], most_examples=most
            )

    def _admit_late(self, clients: Sequence[int]) -> None:
        self.greet([client for client in clients if client not in self.guests])
        if found := [client for client in clients if client in self.guests]:
            self.admit(found)
            self.note_arrival()

    def _read_greeting(self, frame: Frame, client: int) -> Guest:
        head = frame.head
        if (head.get("layout"), head.get("start")) != self._digests:
            raise SparsonaError("its model or initial weights are others", expected="those of the federation file")
        sizes, counts, about = head.get("sizes"), head.get("label_counts"), head.get("environment")
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
            and len(counts) == self.terms.kind.num_classes
            and all(n is None or (type(n) is int and n >= 0) for n in counts)
        ):
            raise SparsonaError("its label counts are none", expected="a count for each class")
        return Guest(
            (sizes[0], sizes[1], sizes[2]),
            str(head.get("data"))[:64],
            None if counts is None else tuple(FEW if n is None else n for n in counts),
            {str(key): str(value)[:200] for key, value in about.items()} if isinstance(about, dict) else {},
        )

    # What arrives.

    def _limit(self, client: Client) -> int:
        """The most bytes that an answer may have: a message, and a head."""
        cost = self.context.method.cost(self.context.params.layout, client, self.context.plan.round_at(0))
        return (0 if cost.up is None else largest_message(cost.up)) + 2 * MAX_HEAD

    def _check(self, message: bytes | None, client: Client, index: int) -> None:
        cost = self.context.method.cost(self.context.params.layout, client, self.context.plan.round_at(index))
        if message is not None:
            check_message(message, cost, client=client, round=index)
        elif cost.up is not None:
            raise SparsonaError("no message after training", expected="one")

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


def joint_digest(digests: Sequence[str]) -> str:
    """A digest of the clients' digests of their data, "" for those that were not there."""
    return hashlib.blake2b(json.dumps(list(digests)).encode(), digest_size=16).hexdigest()


def with_guests(facts: RunFacts, terms: Terms, guests: Sequence[Guest]) -> RunFacts:
    """The facts of a run, with what its clients said of their data."""
    counts = [guest.label_counts for guest in guests]
    return replace(
        facts,
        federation=joint_digest([guest.data for guest in guests]),
        targets=terms.kind.targets,
        sizes=np.array([guest.sizes for guest in guests], dtype=np.int64),
        label_counts=None if None in counts else np.array(counts, dtype=np.int64),
    )


def play_network(
    network: Network, path: Path, observers: Sequence[object] = (), served: Mapping[str, Any] | None = None
) -> Run:
    """Play a run from its start or, if its folder exists, from its last checkpoint.

    Args:
        network: the server's side, whose clients are there.
        path: the run's folder.
        observers: as for `train`.
        served: how the server is reached, kept for `resume`.

    Returns:
        The finished run.
    """
    guests_file = path / GUESTS_FILE

    def no_models() -> ClientContext:
        raise models_elsewhere(path)

    exists = (path / "config.json").exists()  # otherwise it was killed before there was a run
    since = read_guests(network, path) if exists else {}
    network.admit(list(since or network.guests))
    network.admitted |= since
    network.note_arrival = lambda: write_guests(network, guests_file)
    session = Session(network, ObserverList(observers))
    config, facts = describe_run(network.terms.config, network.client_context, network.terms.row, executor=NETWORK)
    if exists:
        folder = RunFolder.open(path)
        folder.check_resumable()
        if FederationFile.read(path / FEDERATION_FILE).digest != network.terms.run:
            raise SparsonaError(
                f"'{path}' is a run of another federation file",
                expected=f"a run of '{network.terms.file.path}'",
                hint="choose another folder with --out",
            )
    else:
        guests = [network.guests.get(one.index, Guest()) for one in network.terms.file.clients]
        make_empty_folder(path)
        network.terms.file.write(path / FEDERATION_FILE)  # both first: a folder with a config is a run, and complete
        write_guests(network, guests_file)
        folder = RunFolder.create(path, dump(config), with_guests(facts, network.terms, guests), None)
    with folder:
        if served is not None:
            write_atomically(path / SERVER_FILE, (json.dumps(dict(served), indent=2) + "\n").encode())
        try:
            found = play(folder, session, config, no_models)
        finally:
            if session.is_finished:
                network.end()
        sizes = folder.facts.sizes.copy()
        for client in network.admitted:
            sizes[client] = network.guests[client].sizes
        folder.learn(replace(folder.facts, sizes=sizes))
    return found


def write_guests(network: Network, path: Path) -> None:
    """Note who takes part, since how many rounds, with what data: a server that is started again knows them."""
    found = [
        {
            "client": client,
            "since": since,
            "sizes": network.guests[client].sizes,
            "data": network.guests[client].data,
            "label_counts": network.guests[client].label_counts,
        }
        for client, since in network.admitted.items()
    ]
    write_atomically(path, (json.dumps(found, indent=1) + "\n").encode())


def guests_at_start(path: Path) -> list[int]:
    """Those who took part from the first round of a run on."""
    return [client for client, (since, _) in _written_guests(path).items() if since == 0]


def read_guests(network: Network, path: Path) -> dict[int, int]:
    """Those who took part when the checkpoint of a run was made, since when; who is not here is as it was then."""
    found, completed = {}, reached(path).completed
    for client, (since, guest) in _written_guests(path).items():
        if since <= completed:
            found[client] = since
            network.guests.setdefault(client, guest)
    return found


def _written_guests(path: Path) -> dict[int, tuple[int, Guest]]:
    """What `write_guests` wrote into a run's folder."""
    found = {}
    for row in read_json(path / GUESTS_FILE, list):
        counts = None if row["label_counts"] is None else tuple(row["label_counts"])
        found[row["client"]] = (row["since"], Guest(tuple(row["sizes"]), row["data"], counts))
    return found


def read_server(path: str | Path, key: str | Path | None, at_least: int | None) -> tuple[Terms, KeyFile]:
    """The terms of a run that has a server, and the server's key; SparsonaError names what does not fit."""
    terms = Terms.read(path)
    if terms.row.peers or terms.file.server is None:
        raise SparsonaError(
            f"{terms.row.title} has no server",
            expected="a method with a server",
            hint=f"`sparsona peer {path}` on every machine",
        )
    check_certificate(terms.file.server.certificate, terms.file.authority, terms.file.server.key, "the server")
    signer = KeyFile.read(key or key_path(path, "server"))
    if signer.public != terms.file.server.key:
        raise SparsonaError(
            f"'{key or key_path(path, 'server')}' is not the key of this federation's server",
            expected=f"the key whose public half is {terms.file.server.key}",
            hint="--key FILE, the one that `sparsona federation new` made",
        )
    terms.check_at_least(at_least)
    return terms, signer


def serve(
    path: str | Path,
    out: str | Path,
    *,
    listen: Sequence[str] = (),
    key: str | Path | None = None,
    at_least: int | None = None,
    deadline: float = 60.0,
    wait: float | None = None,
    tls: bool = True,
    observers: Sequence[object] = (),
    report: Callable[[str], None] = lambda text: None,
    waiting: Callable[[int, int], None] = lambda there, of: None,
) -> Run:
    """Be the server of a run on several machines: wait for its clients, play its rounds, and tell them the end.

    Args:
        path: the federation file.
        out: the run's folder. If it exists, the run is resumed from its last checkpoint.
        listen: addresses to listen on; none: port 7447 of all interfaces.
        key: the server's key; None: the one that was made with the file.
        at_least: how many clients must be there before the first round; None: all of the roster.
        deadline: seconds after which a client that has not answered is left out of a round.
        wait: seconds to wait for the clients; None: as long as it takes.
        tls: encrypt, and accept those with a certificate of the federation only. Frames are signed in any case.
        observers: as for `train`.
        report: is called with what happens to clients, for people to read.
        waiting: is called with how many clients are there, and of how many.

    Returns:
        The finished run.

    Example:
        On one machine, while others call `join`::

            run = sp.serve("fed.toml", "runs/x", listen=["0.0.0.0:7447"], report=print)
            run.report("page.html")
    """
    terms, signer = read_server(path, key, at_least)
    if terms.num_clients > MANY_CLIENTS:
        return_large_buffers()
    assert terms.file.server is not None
    certificates = Tls(terms.file.authority, terms.file.server.certificate, signer.pem) if tls else None
    addresses = tuple(listen) or (":7447",)
    names = {one.index: one.name for one in terms.file.clients}
    longest = terms.longest_frame()
    with ZenohLink(SERVER, run=terms.run, listen=addresses, tls=certificates, names=names, max_bytes=longest) as link:
        roster = Roster(terms.file.keys())
        session = next_session(Path(out))
        network = Network(terms, link.exchange, signer, roster, deadline, report, link.present, session=session)
        report(f"listening on {', '.join(addresses)}")
        network.gather_guests(Path(out), terms.num_clients if at_least is None else at_least, wait, waiting)
        served = {
            "session": session,
            "listen": list(addresses),
            "key": str(Path(key or key_path(path, "server")).absolute()),
            "at_least": at_least,
            "deadline": deadline,
            "tls": tls,
        }
        return play_network(network, Path(out), observers, served)


def next_session(path: Path) -> int:
    """The number of the next start of a server: the time, or more if its clock went back since the last one."""
    file = path / SERVER_FILE
    last = read_json(file).get("session", 0) if file.is_file() else 0
    return max(time.time_ns(), int(last) + 1)


def resume_served(path: Path, observers: Sequence[object] = (), **reports: Any) -> Run:
    """Resume a run on several machines, listening where it listened before.

    Args:
        path: the run's folder.
        observers: as for `train`.
        reports: `report` and `waiting`, as for `serve`.

    Returns:
        The finished run.
    """
    served = read_json(path / SERVER_FILE)
    if "flower" in served:
        raise SparsonaError(
            f"the clients of '{path}' are reached through Flower",
            expected="a run whose server listens itself",
            hint="start the same app again: `flwr run`",
        )
    known = {name: served[name] for name in ("listen", "key", "at_least", "deadline", "tls") if name in served}
    return serve(path / FEDERATION_FILE, path, observers=observers, **known, **reports)


def join(
    path: str | Path,
    data: str,
    *,
    key: str | Path | None = None,
    connect: Sequence[str] = (),
    vault: str | Path | None = None,
    shares_labels: bool = False,
    device: str = "auto",
    tls: bool = True,
    flower: str | Path | None = None,
    report: Callable[[str], None] = lambda text: None,
    data_dir: str | None = None,
    **options: Any,
) -> Path | None:
    """Be a client of a run on several machines, until the server says that it is over.

    Args:
        path: the federation file.
        data: "arrays:mine.npz" or "folder:pictures", all of which is this client's; or the name of a data set, of which
            this client takes the share that it has in a simulation.
        key: this client's key; None: the one here or beside the file that the roster has.
        connect: addresses of the server; none: those in the file.
        vault: folder of this client's states and its model; None: a folder in ./vault.
        shares_labels: let the server know how many examples of each class this client has, and its confusions.
        device: where it trains.
        tls: as for `serve`.
        flower: a Unix socket to answer on, for the relay of a Flower SuperNode; None: dial the server.
        report: is called with what happens, for people to read.
        data_dir: folder that is searched first for the data's files.
        options: how the data is split: validation_rate, test_rate, and of a data set partition and so on.

    Returns:
        The file of the personal model, if the method has a plain one.

    Example:
        On a client's machine::

            model = sp.join("fed.toml", "arrays:mine.npz", report=print)
    """
    share_memory_among_threads()
    terms = Terms.read(path)
    if terms.row.peers:
        raise SparsonaError(
            f"{terms.row.title} has no server to join",
            expected="a method with a server",
            hint=f"`sparsona peer {path}`",
        )
    signer, member = find_key(terms.file, Path(path), key)
    check_certificate(member.certificate, terms.file.authority, member.key, member.name)
    addresses = tuple(connect) or (() if terms.file.server is None else terms.file.server.addresses)
    if flower is not None and (connect or not tls):
        raise SparsonaError("an address or --plain beside --flower", expected="one of them: Flower has the connection")
    if flower is None and not addresses:
        raise SparsonaError(
            f"'{path}' does not say where its server is", expected="an address", hint="--connect host:7447"
        )
    folder = terms.vault_of(member, vault)
    federation = own_data(terms, member.index, data, data_dir, **options)
    roster = Roster(terms.file.keys())
    agent = make_agent(terms, member.index, federation, folder, signer, roster, shares_labels, device, report)

    def failed(error: Exception) -> None:
        report(f"a fault: {type(error).__name__}: {error}")

    name = f"{member.name}: client {member.index} of {terms.num_clients}"
    longest = terms.longest_frame()
    if flower is not None:
        with SocketServer(flower, agent.handle, failed, longest):
            report(f"{name}, answering on {flower}")
            agent.finished.wait()
            time.sleep(0.5)  # the last answer is on its way
        return agent.vault.model
    certificates = Tls(terms.file.authority, member.certificate, signer.pem) if tls else None
    agent.vault.claim(terms.run, member.index, agent.greeting.data)
    with ZenohLink(member.index, run=terms.run, connect=addresses, tls=certificates, max_bytes=longest) as link:
        link.serve(agent.handle, failed=failed)
        report(f"{name}, looking for {', '.join(addresses)}")
        trouble, began, warned = "", time.monotonic(), False
        while not agent.finished.wait(1.0):
            if link.trouble and link.trouble != trouble:
                report(link.trouble)
            trouble = link.trouble
            if not warned and not agent.is_greeted and link.connected() and time.monotonic() - began > UNASKED_SECONDS:
                warned = True
                report(
                    f"connected, but not asked for: the run may be over, or the server may have another file than "
                    f"'{path}', whose digest is {terms.run} (`sparsona federation show`)"
                )
        time.sleep(0.5)  # the last answer is on its way
    return agent.vault.model


def find_key(file: FederationFile, path: Path, key: str | Path | None) -> tuple[KeyFile, Member]:
    """The key of a client and its entry in the roster; without a name, the one key here that is in the roster."""
    if key is not None:
        found = KeyFile.read(key)
        return found, file.client(found.public)
    public = {one.key: one for one in file.clients}
    mine = {}
    for folder in (Path.cwd(), path.parent):
        for name in sorted(folder.glob("*.key")):
            with contextlib.suppress(SparsonaError):
                candidate = KeyFile.read(name)
                if candidate.public in public:
                    mine[candidate.public] = candidate
    if len(mine) != 1:
        names = ", ".join(sorted(public[one].name for one in mine))
        raise SparsonaError(
            f"{len(mine)} keys here are in the roster of '{path}'" + (f": {names}" if names else ""),
            expected="one",
            hint="--key NAME.key" if mine else "`sparsona keys new NAME`, then have NAME.pub admitted",
        )
    ((name_of, only),) = mine.items()
    return only, public[name_of]
