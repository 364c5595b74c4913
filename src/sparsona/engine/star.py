"""Rounds with a server (or without one, for clients that train alone)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from sparsona.core.errors import DivergedError, SparsonaError
from sparsona.core.method import Method, Round, Server, State, Tree, Update, Work
from sparsona.core.points import CONSENSUS, GLOBAL, point
from sparsona.engine.clients import Clients
from sparsona.engine.context import ServerContext
from sparsona.engine.divergence import Range, update_norm
from sparsona.engine.evaluate import Evaluation
from sparsona.engine.failures import DIVERGED, REFUSED, TOO_FEW
from sparsona.engine.final import TuningRequest, check_end, evaluate_after_round, finish_run
from sparsona.engine.jobs import Job, Message, Outcome, open_message, shared_update
from sparsona.engine.plan import Participation, novel_clients, training_points
from sparsona.engine.population import (
    EvaluationLog,
    Population,
    RoundRecord,
    Turn,
    diverged,
    not_heard,
    num_bytes,
    read_update,
    round_record,
    without_effect,
)
from sparsona.engine.sampling import known_losses
from sparsona.wire.codec import encode
from sparsona.wire.ledger import Traffic, paper_bytes


class Star:
    """Runs rounds with a server. A Population is a value: if a round is interrupted, the one before it is intact.

    This is the server's side: it reaches clients through jobs, and has no access to their data and States.
    """

    def __init__(self, context: ServerContext, clients: Clients) -> None:
        self.context, self.clients = context, clients

    def start(self) -> Population:
        """The population before the first round."""
        context, half = self.context, self.context.method.server
        novel = novel_clients(context.plan, context.clients)
        # Novel clients' data is not known yet: they must not count in a mean over all clients.
        known = tuple(replace(c, num_examples=0) if c.index in novel else c for c in context.clients)
        server = context.place(half.init(context.params, known, context.plan.seeds)) if half else None
        self._store_memories(server, None)
        return Population(server, {})

    def play(self, population: Population, index: int) -> tuple[Population, RoundRecord]:
        """One round: reply, train, add up, step. Memory does not grow with the number of clients."""
        context, plan, half = self.context, self.context.plan, self.context.method.server
        round_ = plan.round_at(index)
        who = context.participation(index, population.losses)
        record = round_record(context, index, who)
        points = training_points(plan, context.clients, index)
        sent: dict[int, Traffic] = {}
        clients = self.clients.at(population.states)
        server = population.server
        total = half.zero(server, round_) if half else None
        num_added, losses = 0, dict[int, float | None]()  # of those that were asked; None: not known
        jobs = (
            replace(self._job("train", c, server, round_, points.get(c, ()), sent), is_aggregated=c in who.aggregated)
            for c in who.trains
        )
        for outcome, update, up in self._arrivals(clients, jobs, who, index, population.states):
            client, traffic = outcome.client, sent.pop(outcome.client)
            aggregated = update is not None and client in who.aggregated and not outcome.failure
            try:
                if update is not None and aggregated:
                    assert half is not None
                    self._store_masks(update)
                    with context.clock.measure("aggregate"):
                        total = half.add(server, total, update)
                    num_added += 1
            except SparsonaError as error:
                if not clients.refuses(client, error):
                    raise
                _take_back(clients, population.states, client)
                outcome, up = Outcome(client, failure=f"{REFUSED}{error.what}"), Traffic()
            record.add_evaluations(outcome)
            losses[client] = None if outcome.failure else outcome.tally.loss
            if outcome.failure:
                record.turns.append(not_heard(outcome, traffic + up))
                continue
            clients.used(client)
            dropped = update is not None and client in who.dropped  # without an update, none can be lost
            record.turns.append(Turn(client, outcome.tally, traffic + up, aggregated, dropped, failure=outcome.note))
        record.turns.sort(key=lambda turn: turn.client)  # the first few may have waited for others
        record.evaluations.sort(key=lambda found: found.client)
        if plan.sampler == "loss":  # also after a round without effect: who was asked has been asked
            population = replace(population, losses=known_losses(population.losses, losses))
        if half is not None and num_added < plan.min_updates:
            return population, without_effect(record, f"{num_added} of the {plan.min_updates} {TOO_FEW}")
        if half is not None and (num_added or half.steps_always):
            with context.clock.measure("aggregate"):
                server = half.step(server, total, round_)
        self._store_memories(server, population.server)
        return Population(server, clients.states, losses=population.losses), record

    def _arrivals(
        self, clients: Clients, jobs: Iterable[Job], who: Participation, index: int, before: Mapping[int, State]
    ) -> Iterator[tuple[Outcome, Update | None, Traffic]]:
        """Outcomes with the updates in them, and their bytes. One that cannot be used has a `failure`, and its client
        has the State that it had `before` the round.

        Updates are judged by the norms of those before them. Only the first few wait, until there are enough norms.
        """
        context, plan = self.context, self.context.plan
        norms = Range(plan.divergence_factor if plan.on_divergence == "drop" else None)
        waiting: list[tuple[Outcome, Update, Traffic, float]] = []

        def judged() -> Iterator[tuple[Outcome, Update | None, Traffic]]:
            for outcome, update, up, norm in waiting:
                if (times := norms.times_over(norm)) is not None:
                    label = context.clients[outcome.client].label
                    what = f"client {label}'s update in round {index + 1} is {times:.3g} times as large as their median"
                    _take_back(clients, before, outcome.client)
                    outcome = diverged(outcome, DivergedError(f"{DIVERGED}{what}"))
                    # Results of the model that it trained are those of a model which is thrown away.
                    kept = tuple(one for one in outcome.evaluations if point(one.point).when == "round")
                    outcome = replace(outcome, evaluations=kept)
                yield outcome, update, up
            waiting.clear()

        for outcome in clients.run(jobs):
            client, update, up = outcome.client, None, Traffic()
            try:
                if outcome.message is not None and not outcome.failure:
                    update = read_update(outcome, context.clients[client], index, context.clock)
                    up = _sent(outcome, update)
            except DivergedError as error:
                if plan.on_divergence == "stop" and not clients.refuses(client, error):
                    raise
                yield diverged(outcome, error), None, _sent(outcome)
                continue
            except SparsonaError as error:
                if not clients.refuses(client, error):
                    raise
                yield Outcome(client, failure=f"{REFUSED}{error.what}"), None, Traffic()
                continue
            if not outcome.failure and (update is None or client not in who.dropped):
                clients.keep(client)
            if update is None or norms.factor is None or client not in who.aggregated:
                yield outcome, update, up
                continue
            with context.clock.measure("aggregate"):
                norm = update_norm(update)
            norms.add(norm)
            waiting.append((outcome, update, up, norm))
            if norms.is_known:
                yield from judged()
        yield from judged()

    def _store_memories(self, server: Server | None, before: Server | None) -> None:
        """Store what the server keeps for each client, where it changed."""
        old = memories(self.context.method, before)
        for name, values in memories(self.context.method, server).items():
            known = old.get(name, {})
            fresh = {id(value): value for client, value in values.items() if known.get(client) is not value}
            self.context.spill_store.store(tuple(fresh.values()))  # clients may share one

    def _store_masks(self, update: Update) -> None:
        """Store the masks of an update: a server usually keeps them, and unpacked they would fill the memory."""
        for part in update.parts.values():
            if part.whole is not None and not part.dtype.is_floating_point:
                self.context.spill_store.store(part.whole)

    def _job(
        self,
        do: Literal["train", "tune"],
        client: int,
        server: Server,
        round_: Round,
        points: tuple[str, ...],
        sent: dict[int, Traffic],
        epochs: int = 0,
    ) -> Job:
        """A client's job, with the server's message, whose bytes are added to `sent`."""
        sent[client] = Traffic()
        if self.context.method.server is None:
            return Job(do, client, round_, (), points=points, epochs=epochs)
        bare = Job(do, client, round_, (), points=points, epochs=epochs)

        def message(update: Update) -> tuple[Message]:
            with self.context.clock.measure("encode"):
                data = encode(update) if self.clients.encodes else update
                sent[client] += Traffic(down=num_bytes(data), paper_down=paper_bytes(update))
            return (data,)

        def again() -> Job:  # made anew: of many clients that are waited for, no message is kept
            return replace(bare, messages=message(self._reply(server, client, round_).with_bitmaps()))

        return replace(bare, messages=message(self._reply(server, client, round_)), resend=again)

    def evaluation_job(
        self,
        population: Population,
        client: int,
        round_: Round,
        points: tuple[str, ...] = (),
        model: Tree | None = None,
        sent: dict[int, int] | None = None,
    ) -> Job:
        """A job that evaluates the model that the client would receive now. Its bytes are no part of training: they are
        added to `sent`, and the message is encoded only if it leaves this machine."""
        if self.context.method.server is None:
            return Job("evaluate", client, round_, (), points=points)
        bare = Job("evaluate", client, round_, (), points=points, shared_model=model)

        def message(update: Update) -> tuple[Update]:
            if sent is not None:
                extra = 0 if model is None else num_bytes(shared_update(model, round_.index))
                sent[client] = sent.get(client, 0) + num_bytes(update) + extra
            return (update,)

        def again() -> Job:
            return replace(bare, messages=message(self._reply(population.server, client, round_).with_bitmaps()))

        return replace(bare, messages=message(self._reply(population.server, client, round_)), resend=again)

    def _reply(self, server: Server, client: int, round_: Round) -> Update:
        half = self.context.method.server
        assert half is not None
        with self.context.clock.measure("reply"):
            update = half.reply(server, self.context.clients[client], round_)
        # A stateless client has no mask.
        return update.with_bitmaps() if self.context.plan.stateless else update

    def evaluate(self, population: Population, completed: int, log: EvaluationLog | None = None) -> list[Evaluation]:
        """Clients' models on their own test data, at the plan's points that need no training."""
        return evaluate_after_round(self, population, completed, log)

    def evaluate_points(
        self,
        population: Population,
        completed: int,
        points: tuple[str, ...],
        clients: Sequence[int],
        log: EvaluationLog | None = None,
    ) -> list[Evaluation]:
        """Evaluate these clients at these points, with what the server would send them now; `log` is added to."""
        if not points:
            return []
        round_ = self.context.plan.round_at(completed)
        model = None
        if any(point(name).model == "shared" for name in points):
            model = global_model(self.context.method, population)
        sent: dict[int, int] = {}
        jobs = (self.evaluation_job(population, client, round_, points, model, sent) for client in clients)
        found: list[Evaluation] = []
        for outcome in self.clients.at(population.states).run(jobs):
            found.extend(outcome.evaluations)
            if log is not None:
                log.add(outcome, sent.pop(outcome.client, 0))
        return found

    def tune(
        self, population: Population, clients: Clients, round_: Round, requests: Mapping[int, TuningRequest]
    ) -> Iterator[tuple[Outcome, Traffic]]:
        """Tune these clients' models; yields outcomes with the bytes sent."""
        sent: dict[int, Traffic] = {}
        jobs = (
            self._job("tune", client, population.server, round_, request.points, sent, request.epochs)
            for client, request in requests.items()
        )
        return ((outcome, sent.pop(outcome.client)) for outcome in clients.run(jobs))

    def finish(self, population: Population) -> tuple[RoundRecord, dict[int, Work]]:
        """After the last round: final tuning and evaluations, and the novel clients' first turn."""
        return finish_run(self, population)


def _take_back(clients: Clients, before: Mapping[int, State], client: int) -> None:
    """Give a client the State back that it had before the round: its update cannot be used after all."""
    if client in before:
        clients.states[client] = before[client]
    else:
        clients.states.pop(client, None)


def _sent(outcome: Outcome, update: Update | None = None) -> Traffic:
    """The bytes of a client's message, which may have been read already."""
    assert outcome.message is not None
    found = open_message(outcome.message) if update is None else update
    return Traffic(up=num_bytes(outcome.message), paper_up=paper_bytes(found))


def check_star(context: ServerContext) -> None:
    """Raise SparsonaError if method and plan do not fit together with a server."""
    plan, method, half = context.plan, context.method, context.method.server
    if plan.graph is not None:
        raise SparsonaError(
            f"{method.name} on a graph",
            expected="a method whose clients send to each other, such as dispfl",
            hint="leave --graph out",
        )
    if plan.tune_from != "neighbours":
        raise SparsonaError(
            f"tune_from={plan.tune_from} for {method.name}",
            expected="a method whose clients send to each other: with a server, what it sends is tuned",
            hint="leave tune_from out",
        )
    if plan.everyone_trains and half is not None and half.needs_every_update:
        raise SparsonaError(
            f"'everyone_trains' for {method.name}: its server must hear from every client that trained",
            expected="per_round: so many clients train and are aggregated",
            hint="leave everyone_trains out",
        )
    bases = {point(name).base for name in plan.points}
    if CONSENSUS in bases:
        raise SparsonaError(
            f"point '{CONSENSUS}' for {method.name}, which is not a method of peers",
            expected=f"points other than '{CONSENSUS}'",
            hint=f"use '{GLOBAL}': the server's model",
        )
    if GLOBAL in bases and (half is None or half.global_model is None):
        raise SparsonaError(
            f"{method.name} has no global model to evaluate",
            expected=f"points other than '{GLOBAL}'",
            hint=f"leave '{GLOBAL}' out of points",
        )
    check_end(context)


def global_model(method: Method, population: Population) -> Tree | None:
    """The server's model, if the method has a global one."""
    half = method.server
    return None if half is None or half.global_model is None else half.global_model(population.server)


def memories(method: Method, server: Server | None) -> dict[str, dict[int, Any]]:
    """Fields of a server that hold something for each client, as the method declares them."""
    if method.server is None or server is None:
        return {}
    return {name: getattr(server, name) for name in method.server.client_memory}
