"""Rounds with a server in the middle (or with nobody there, for clients that train alone)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from sparsona.core.errors import MaskMismatchError, SparsonaError
from sparsona.core.method import Method, Round, Server, State, Tree, Update, Work
from sparsona.core.tree import awake
from sparsona.engine.closing import Wish, check_last_looks, close
from sparsona.engine.evaluate import Evaluation
from sparsona.engine.jobs import Executor, Job, Message, Outcome, Setting
from sparsona.engine.plan import novel_clients, participation, tested_clients
from sparsona.engine.population import Population, RoundRecord, Turn, checked_update, num_bytes
from sparsona.engine.turn import ClientProbe, Tally
from sparsona.wire.codec import encode
from sparsona.wire.ledger import Traffic, paper_bytes


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
        check_last_looks(setting)
        self.novel = novel_clients(self.plan, setting.clients)

    def start(self) -> Population:
        half = self.method.server
        # Nobody knows of novel clients' data yet: where a mean is over all clients, they are none of them.
        clients = tuple(replace(c, num_examples=0) if c.index in self.novel else c for c in self.setting.clients)
        server = half.init(self.setting.params, clients, self.plan.seeds) if half else None
        server = self.setting.place(server)
        self._rest_memories(server, None)
        return Population(server, {})

    def _rest_memories(self, server: Server | None, before: Server | None) -> None:
        """Let what the server remembers of each client rest, where that changed."""
        known = memories(self.method, before)
        for name, values in memories(self.method, server).items():
            old = known.get(name, {})
            fresh = {id(value): value for client, value in values.items() if old.get(client) is not value}
            self.setting.shelf.rest(tuple(fresh.values()))  # clients may share one

    def play(self, population: Population, index: int) -> tuple[Population, RoundRecord]:
        """One round: reply, train, add up, step. Updates stream: memory does not grow with the number of clients."""
        round_ = self.plan.round_at(index)
        who = participation(self.plan, self.setting.clients, index)
        record = RoundRecord(index, round_.lr_scale)
        states = dict(population.states)
        sent: dict[int, Traffic] = {}

        def jobs() -> Iterator[Job]:
            points = ("trained",) if self._looks_at_trained(index) else ()
            for client in who.trains:
                yield self._job("train", client, population, round_, points, sent)

        server, half, clock = population.server, self.method.server, self.setting.clock
        total = None if half is None else half.zero(server, round_)
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
            if half is not None and update is not None and aggregated:
                self._rest_masks(update)
                with clock.measure("aggregate"):
                    total = half.add(server, total, update)
        if half is not None and any(turn.aggregated for turn in record.turns):
            with clock.measure("aggregate"):
                server = half.step(server, total, round_)
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
        return self.look(population, completed, points, tested_clients(self.plan, self.setting.clients))

    def look(
        self, population: Population, completed: int, points: tuple[str, ...], clients: list[int]
    ) -> list[Evaluation]:
        """These clients at these points, with what the server would send them now; on nobody's bill."""
        round_ = self.plan.round_at(completed)
        model = global_model(self.method, population) if any(p.startswith("global") for p in points) else None
        jobs = (self._job("evaluate", client, population, round_, points, {}, model) for client in clients)
        return [evaluation for outcome in self._executor.run(jobs) for evaluation in outcome.evaluations]

    def tune(
        self, population: Population, round_: Round, wishes: Mapping[int, Wish]
    ) -> Iterator[tuple[Outcome, Traffic]]:
        """Tune these clients' models, and count what they are sent for it."""
        sent: dict[int, Traffic] = {}
        jobs = (
            replace(self._job("tune", client, population, round_, wish.points, sent), epochs=wish.epochs)
            for client, wish in wishes.items()
        )
        return ((outcome, sent.pop(outcome.client)) for outcome in self._executor.run(jobs))

    def closing(self, population: Population) -> tuple[RoundRecord, dict[int, Work]]:
        """After the last round: final tuning, and the novel clients' first meeting with the model."""
        return close(self, population)


def global_model(method: Method, population: Population) -> Tree | None:
    """The one model of all, where a method has such a thing."""
    half = method.server
    return None if half is None or half.global_model is None else half.global_model(population.server)


def memories(method: Method, server: Server | None) -> dict[str, dict[int, Any]]:
    """What a server remembers of each client, by the fields that its method names."""
    if method.server is None or server is None:
        return {}
    return {name: getattr(server, name) for name in method.server.client_memory}


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
