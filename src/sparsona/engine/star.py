"""Rounds with a server in the middle (or with nobody there, for clients that train alone)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

from sparsona.core.errors import MaskMismatchError, SparsonaError
from sparsona.core.method import Inbox, Round, Server, State, Tree, Update, Work
from sparsona.core.tree import awake
from sparsona.engine.clock import Clock
from sparsona.engine.evaluate import Evaluation
from sparsona.engine.jobs import Executor, Job, Message, Outcome, Setting, opened
from sparsona.engine.plan import novel_clients, participation, tested_clients
from sparsona.engine.turn import ClientProbe, Tally, check_finite
from sparsona.wire.codec import encode
from sparsona.wire.format import message_size, sizes_of
from sparsona.wire.ledger import Traffic, paper_bytes


@dataclass(frozen=True)
class Population:
    """The whole federation between two rounds: the server, and each client that has changed since its start.

    `messages` is what each peer said last, where there is no server: others may yet read it.
    """

    server: Server | None
    states: dict[int, State]
    messages: dict[int, Message] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """What one client did in one round. A peer that kept still and was heard did not train."""

    client: int
    tally: Tally
    traffic: Traffic
    aggregated: bool
    dropped: bool
    trained: bool = True


@dataclass
class RoundRecord:
    """What happened in one round."""

    index: int
    lr_scale: float
    turns: list[Turn] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)


class Star:
    """Plays rounds. A Population is a value: if a round is interrupted, the one before it is still whole."""

    def __init__(self, setting: Setting, executor: Executor) -> None:
        self.setting, self.plan, self.method = setting, setting.plan, setting.method
        self._executor = executor
        half = self.method.server
        if half is None and self.plan.stateless:
            raise SparsonaError(
                f"{self.method.name} has no server, and stateless clients forget what they learn",
                expected="a method with a server, or clients with a memory",
                mend="leave 'stateless' out",
            )
        if half is None and self.method.peer is not None:
            raise SparsonaError(f"{self.method.name} is for peers without a server", expected="a method with a server")
        if "global" in self.plan.points and (half is None or half.global_model is None):
            raise SparsonaError(
                f"{self.method.name} has no global model to evaluate",
                expected="points other than 'global'",
                mend="leave 'global' out of points",
            )
        self.novel = novel_clients(self.plan, setting.clients)

    def start(self) -> Population:
        half = self.method.server
        server = half.init(self.setting.params, self.setting.clients, self.plan.seeds) if half else None
        server = self.setting.place(server)
        self._rest_memories(server, None)
        return Population(server, {})

    def _rest_memories(self, server: Server | None, before: Server | None) -> None:
        """Let what the server remembers of each client rest, where that changed."""
        known = {} if before is None else memories(before)
        for name, values in {} if server is None else memories(server).items():
            old = known.get(name, {})
            fresh = {id(value): value for client, value in values.items() if old.get(client) is not value}
            self.setting.shelf.rest(tuple(fresh.values()))  # clients may share one

    def play(self, population: Population, index: int) -> tuple[Population, RoundRecord]:
        """One round: reply, train, aggregate. Updates stream: memory does not grow with the number of clients."""
        round_ = self.plan.round_at(index)
        who = participation(self.plan, self.setting.clients, index)
        record = RoundRecord(index, round_.lr_scale)
        states = dict(population.states)
        sent: dict[int, Traffic] = {}

        def jobs() -> Iterator[Job]:
            points = ("trained",) if self._looks_at_trained(index) else ()
            for client in who.trains:
                yield self._job("train", client, population, round_, points, sent)

        def arriving() -> Inbox:
            for outcome in self._executor.run(jobs()):
                client = outcome.client
                update, traffic = self._open(outcome, sent.pop(client), index)
                dropped = update is not None and client in who.dropped  # who sends nothing can lose nothing
                if not dropped and not self.plan.stateless:
                    states[client] = outcome.state
                    self.setting.shelf.rest(outcome.state)
                aggregated = update is not None and client in who.aggregated
                record.turns.append(Turn(client, outcome.tally, traffic, aggregated, dropped))
                record.evaluations.extend(outcome.evaluations)
                if update is not None and aggregated:
                    self._rest_masks(update)
                    yield update

        inbox = arriving()
        server = population.server
        if self.method.server is not None and who.aggregated:
            with self.setting.clock.measure("aggregate"):
                server = self.method.server.aggregate(server, inbox, round_)
        for _ in inbox:  # whatever the method left unread, and every turn where there is no server
            pass
        self._rest_memories(server, population.server)
        return Population(server, states), record

    def _rest_masks(self, update: Update) -> None:
        """A server usually keeps the masks that it is sent: at rest, or memory would grow with every update."""
        for part in update.parts.values():
            if part.whole is not None and not part.dtype.is_floating_point:
                self.setting.shelf.rest(part.whole)

    def _looks_at_trained(self, index: int) -> bool:
        return "trained" in self.plan.points and self.plan.evaluates_after(index + 1)

    def _state(self, population: Population, client: int) -> State | None:
        state = None if self.plan.stateless else population.states.get(client)
        return state if self._executor.encodes else awake(state)  # what goes to a process goes as it rests

    def _job(
        self,
        do: Literal["train", "evaluate", "tune"],
        client: int,
        population: Population,
        round_: Round,
        points: tuple[str, ...],
        sent: dict[int, Traffic],
        model: Tree | None = None,
    ) -> Job:
        """A client's job, with what the server sends it; every byte of that is counted in `sent`."""
        half = self.method.server
        if half is None:
            sent[client] = Traffic()
            return Job(do, client, round_, (), self._state(population, client), points, model)
        clock = self.setting.clock
        with clock.measure("reply"):
            update = half.reply(population.server, self.setting.clients[client], round_)
        sent[client] = Traffic()

        def message(update: Update) -> tuple[Message]:
            with clock.measure("encode"):
                data = encode(update) if self._executor.encodes else update
                sent[client] += Traffic(down=num_bytes(data), paper_down=paper_bytes(update))
            return (data,)

        if self.plan.stateless:
            update = update.with_bitmaps()  # a client that forgets has no mask to apply
        job = Job(do, client, round_, message(update), self._state(population, client), points, model)
        return replace(job, resend=lambda: replace(job, messages=message(update.with_bitmaps())))

    def _open(self, outcome: Outcome, sent: Traffic, index: int) -> tuple[Update | None, Traffic]:
        """A client's update as it arrives, checked and counted. What is lost on the way was sent all the same."""
        if outcome.message is None:
            return None, sent
        update = checked_update(outcome, index, self.setting.clock)
        return update, sent + Traffic(up=num_bytes(outcome.message), paper_up=paper_bytes(update))

    def evaluate(self, population: Population, completed: int) -> list[Evaluation]:
        """Clients' models on their own test data, at the plan's points that need no training."""
        points = tuple(point for point in self.plan.points if point in ("received", "global"))
        if not points:
            return []
        return self._look(population, completed, points, tested_clients(self.plan, self.setting.clients))

    def _look(
        self, population: Population, completed: int, points: tuple[str, ...], clients: list[int]
    ) -> list[Evaluation]:
        round_ = self.plan.round_at(completed)
        half, model = self.method.server, None
        if "global" in points and half is not None and half.global_model is not None:
            model = half.global_model(population.server)
        jobs = (self._job("evaluate", client, population, round_, points, {}, model) for client in clients)
        return [evaluation for outcome in self._executor.run(jobs) for evaluation in outcome.evaluations]

    def closing(self, population: Population) -> tuple[RoundRecord, dict[int, Work]]:
        """After the last round: final tuning of every client, and the novel clients' first meeting with the model."""
        round_ = self.plan.tuning_round
        record = RoundRecord(self.plan.rounds, round_.lr_scale)
        if self.novel:
            novel = sorted(self.novel)
            record.evaluations.extend(self._look(population, self.plan.rounds, ("novel",), novel))
        tuned: dict[int, Work] = {}
        if not self.plan.tune_epochs:
            return record, tuned
        sent: dict[int, Traffic] = {}
        tested = set(tested_clients(self.plan, self.setting.clients))

        def jobs() -> Iterator[Job]:
            for client in self.setting.clients:
                # Everybody is tuned; tested are those who are tested after rounds, and the novel ones.
                points = ("tuned",) if client.index in tested else ()
                points = ("novel_tuned",) if client.index in self.novel else points
                yield self._job("tune", client.index, population, round_, points, sent)

        for outcome in self._executor.run(jobs()):
            tuned[outcome.client] = outcome.work
            self.setting.shelf.rest(outcome.work)
            record.turns.append(Turn(outcome.client, outcome.tally, sent.pop(outcome.client), False, False))
            record.evaluations.extend(outcome.evaluations)
        return record, tuned


def memories(server: Server) -> dict[str, dict[int, Any]]:
    """Fields of a server that remember something about each client."""
    assert is_dataclass(server)
    return {
        field.name: value
        for field in fields(server)
        if isinstance(value := getattr(server, field.name), dict) and set(map(type, value)) <= {int}
    }


def checked_update(outcome: Outcome, index: int, clock: Clock) -> Update:
    """The update that came of a client's turn in this round; one that would poison a mean is refused."""
    assert outcome.message is not None
    update = opened(outcome.message, clock)
    if (update.sender, update.round) != (outcome.client, index):
        raise SparsonaError(
            f"client {outcome.client}'s message of round {index} says {update.sender}, round {update.round}",
            expected="its sender and its round",
            mend="make updates with core.update.message(round, ...)",
        )
    check_finite(update)
    return update


def num_bytes(message: Message) -> int:
    """The bytes of a message. One that is not encoded has as many: sizes follow from its parts."""
    return len(message) if isinstance(message, bytes) else message_size(sizes_of(message))


def received_work(setting: Setting, population: Population, client: int) -> Work:
    """The model a client would use now: what `predict` and `deploy` take."""
    round_ = setting.plan.round_at(setting.plan.rounds)
    state = population.states.get(client)
    if state is None:
        state = setting.fresh_state(client)
    inbox: tuple[Update, ...] = ()
    if setting.method.server is not None:
        inbox = (setting.method.server.reply(population.server, setting.clients[client], round_),)
    round_ = round_.on(setting.clients[client])
    own = (setting.federation.examples(client, "train"), setting.federation.examples(client, "validation"))
    probe = ClientProbe(setting.task, *own, round_, Tally())
    try:
        return setting.method.receive(awake(state), inbox, probe, round_)
    except MaskMismatchError:
        return setting.method.receive(awake(state), [update.with_bitmaps() for update in inbox], probe, round_)
