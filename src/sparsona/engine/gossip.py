"""Rounds without a server: each peer mixes the last messages of its neighbours, trains, and sends a message itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from sparsona.core.errors import DivergedError, SparsonaError
from sparsona.core.method import Round, Tree, Update, Work
from sparsona.core.points import CONSENSUS, GLOBAL, point
from sparsona.core.update import Part, Support
from sparsona.engine.clients import Clients
from sparsona.engine.context import ServerContext
from sparsona.engine.divergence import Range, update_norm
from sparsona.engine.evaluate import Evaluation
from sparsona.engine.failures import LEFT_OUT
from sparsona.engine.final import TuningRequest, check_end, evaluate_after_round, finish_run
from sparsona.engine.graphs import Graph, check, senders
from sparsona.engine.jobs import Job, Message, Outcome, Tally, open_message
from sparsona.engine.plan import novel_clients, training_points
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
)
from sparsona.wire.codec import encode
from sparsona.wire.format import paper_size, read_head
from sparsona.wire.ledger import Traffic, paper_bytes

# Bytes of masks that are unpacked once for all their receivers in a round; beyond that, each receiver unpacks again.
UNPACKED = 4 * 2**30


@dataclass
class _Deliveries:
    """The deliveries of a round: the senders of each receiver, and the bytes that each peer sends and receives."""

    senders: dict[int, tuple[int, ...]] = field(default_factory=dict)
    traffic: dict[int, Traffic] = field(default_factory=dict)
    notes: dict[int, str] = field(default_factory=dict)  # whose messages a receiver left out, and why


class Gossip:
    """Runs rounds among peers, as Star does with a server. It passes messages on, without any peer's data or State.

    Synchronous: in round t every peer mixes messages of earlier rounds, the last one of each neighbour. A peer that has
    made none yet sends none; where a method has first messages (`PeerHalf.first`), which follow from the seed and are
    not sent, peers mix their neighbours' in the first round. A peer that is not sampled neither mixes nor trains, but
    its last message can still be sent. A peer that drops out of a round neither sends nor receives in it: it trains its
    own model, and its neighbours mix the messages that arrived.

    Args:
        context: the side without data.
        clients: the peers.
        here: the peers whose turns are played, where the others are on other machines: what those sent must be in the
            population, and a record has what these received. None: all.
    """

    def __init__(self, context: ServerContext, clients: Clients, here: Collection[int] | None = None) -> None:
        self.context, self.clients, self._here = context, clients, here
        self._loaded: dict[int, Update] = {}
        self._firsts: dict[int, Message] = {}
        self._norms: dict[int, tuple[Message, float]] = {}
        self._num_unpacked = 0

    def start(self) -> Population:
        return Population(None, {})

    def play(self, population: Population, index: int) -> tuple[Population, RoundRecord]:
        """One round: deliver, mix, train."""
        context, plan = self.context, self.context.plan
        round_ = plan.round_at(index)
        who = context.participation(index)
        record = round_record(context, index, who)
        clients, messages = self.clients.at(population.states), dict(population.messages)
        trains = [client for client in who.trains if self._is_here(client)]
        reached = [client for client in trains if client not in who.dropped]
        delivered = self._deliver(population, clients, round_, reached, who.dropped)
        points = training_points(plan, context.clients, index)
        jobs = (self._job("train", client, population, round_, points.get(client, ()), delivered) for client in trains)
        for outcome in clients.run(jobs):
            client = outcome.client
            traffic = delivered.traffic.pop(client, Traffic())
            update = None
            if outcome.message is not None and not outcome.failure:
                try:
                    update = read_update(outcome, context.clients[outcome.client], index, context.clock)
                except DivergedError as error:
                    if plan.on_divergence == "stop":
                        raise
                    outcome = diverged(outcome, error)
            if outcome.failure:
                record.turns.append(not_heard(outcome, traffic))
                record.add_evaluations(outcome)
                continue
            if outcome.message is not None:
                messages[client] = outcome.message
                if update is not None and self._factor is not None:
                    self._norms[client] = outcome.message, update_norm(update)
                if update is outcome.message:
                    context.spill_store.store(tuple(_trees(update)))
            clients.keep(client)
            dropped = client in who.dropped
            note = "; ".join(filter(None, (outcome.note, delivered.notes.get(client))))
            record.turns.append(Turn(client, outcome.tally, traffic, not dropped, dropped, failure=note))
            record.add_evaluations(outcome)
        # Peers that did not train may have sent a message.
        record.turns += (_sender_only(client, sent) for client, sent in delivered.traffic.items())
        self._unload()
        return Population(None, clients.states, messages), record

    def _is_here(self, client: int) -> bool:
        return self._here is None or client in self._here

    def _deliver(
        self,
        population: Population,
        clients: Clients,
        round_: Round,
        receivers: Iterable[int],
        dropped: frozenset[int] = frozenset(),
        graph: Graph | None = None,
    ) -> _Deliveries:
        """Who sends to whom; every copy of a message is charged to its sender and to its receiver."""
        delivered, members = _Deliveries(), members_of(self.context)
        sizes: dict[int, tuple[int, int]] = {}
        self._unload()
        for client in receivers:
            found = senders_of(self.context, clients, members, population, client, round_, graph)
            delivered.senders[client] = tuple(sender for sender in found if sender not in dropped)
            for sender in delivered.senders[client]:
                if sender not in population.messages:
                    continue  # its first message, which the receiver makes itself
                if sender not in sizes:
                    sizes[sender] = _sizes(population.messages[sender])
                size, paper = sizes[sender]
                for peer, sent in ((sender, Traffic(up=size, paper_up=paper)), (client, Traffic(0, size, 0, paper))):
                    delivered.traffic[peer] = delivered.traffic.get(peer, Traffic()) + sent
            self._leave_out(delivered, client, population)
        return delivered

    @property
    def _factor(self) -> float | None:
        """How many times the median norm of what a peer has a message may be; None: any."""
        plan = self.context.plan
        return plan.divergence_factor if plan.on_divergence == "drop" else None

    def _leave_out(self, delivered: _Deliveries, client: int, population: Population) -> None:
        """Leave out what a receiver does not mix: messages far larger than the others that it has, its own included."""
        found, norms = delivered.senders[client], Range(self._factor)
        if norms.factor is None or not population.messages.keys() & set(found):
            return
        have = [peer for peer in (*found, client) if population.messages.get(peer)]
        values = {peer: self._norm(peer, population.messages[peer]) for peer in have}
        for norm in values.values():
            norms.add(norm)
        times = {peer: over for peer in found if (over := norms.times_over(values.get(peer, 0.0))) is not None}
        if times:
            delivered.senders[client] = tuple(peer for peer in found if peer not in times)
            names = {peer: self.context.clients[peer].label for peer in times}
            left_out = (f"client {names[peer]}'s message, {over:.3g} times as large as" for peer, over in times.items())
            delivered.notes[client] = f"{LEFT_OUT}{', '.join(left_out)} the median of what it has"

    def _norm(self, peer: int, message: Message) -> float:
        if self._norms.get(peer, (None, 0.0))[0] is not message:
            self._norms[peer] = message, update_norm(open_message(message, self.context.clock))
        return self._norms[peer][1]

    def _job(
        self,
        do: Literal["train", "evaluate", "tune"],
        client: int,
        population: Population,
        round_: Round,
        points: tuple[str, ...],
        delivered: _Deliveries,
        model: Tree | None = None,
        epochs: int = 0,
    ) -> Job:
        found = delivered.senders.get(client, ())
        with self.context.clock.measure("reply"):
            messages = tuple(
                self._readable(sender, population.messages.get(sender) or self._first(sender, round_))
                for sender in found
            )
        return Job(do, client, round_, messages, points=points, shared_model=model, epochs=epochs)

    def _first(self, sender: int, round_: Round) -> Message:
        """The first message of a peer, made once for all receivers."""
        if sender not in self._firsts:
            update = self.context.first_message(sender, round_)
            self._firsts[sender] = encode(update) if self.clients.encodes else update
        return self._firsts[sender]

    def _readable(self, sender: int, message: Message) -> Message:
        """A message in the form that the clients' side reads; converted once for all receivers."""
        if self.clients.encodes:
            return message if isinstance(message, bytes) else encode(message)
        if sender in self._loaded:
            return self._loaded[sender]
        update = loaded(self.context, message)
        if self._num_unpacked < UNPACKED:
            self._loaded[sender] = update
            self._num_unpacked += sum(tree.layout.size for tree in _trees(update) if not tree.dtype.is_floating_point)
        return update

    def _unload(self) -> None:
        """Drop the loaded messages, at the end of a round or an evaluation."""
        self._loaded.clear()
        self._firsts.clear()
        self._num_unpacked = 0

    def evaluation_job(self, population: Population, client: int, round_: Round) -> Job:
        """A job that evaluates the model that a peer would have if it mixed now. Not charged."""
        delivered = self._deliver(population, self.clients.at(population.states), round_, (client,))
        return self._job("evaluate", client, population, round_, (), delivered)

    def evaluate(self, population: Population, completed: int, log: EvaluationLog | None = None) -> list[Evaluation]:
        """Peers' models on their own test data, at the plan's points that need no training: `received` is the model
        that each would train next if no peer dropped out."""
        return evaluate_after_round(self, population, completed, log)

    def evaluate_points(
        self,
        population: Population,
        completed: int,
        points: tuple[str, ...],
        clients: Sequence[int],
        log: EvaluationLog | None = None,
    ) -> list[Evaluation]:
        """Evaluate these clients at these points, after mixing what they would receive now; no part of training, and
        added to `log`. A consensus is made of messages that this process has: it is not sent."""
        clients = [client for client in clients if self._is_here(client)]
        if not points or not clients:
            return []
        round_ = self.context.plan.round_at(completed)
        here = self.clients.at(population.states)
        delivered = self._deliver(population, here, round_, clients)
        needs_mean = any(point(name).model == "shared" for name in points)
        model = consensus(self.context, population, completed) if needs_mean else None
        jobs = (self._job("evaluate", client, population, round_, points, delivered, model) for client in clients)
        found: list[Evaluation] = []
        for outcome in here.run(jobs):
            found.extend(outcome.evaluations)
            if log is not None:
                log.add(outcome, delivered.traffic.get(outcome.client, Traffic()).down)
        self._unload()
        return found

    def tune(
        self, population: Population, clients: Clients, round_: Round, requests: Mapping[int, TuningRequest]
    ) -> Iterator[tuple[Outcome, Traffic]]:
        """Let these clients mix once more and tune the result; yields outcomes with the bytes sent."""
        requests = {client: request for client, request in requests.items() if self._is_here(client)}
        everyone = Graph("full") if self.context.plan.tune_from == "all" else None
        delivered = self._deliver(population, clients, round_, requests, graph=everyone)
        jobs = (
            self._job("tune", client, population, round_, request.points, delivered, epochs=request.epochs)
            for client, request in requests.items()
        )
        for outcome in clients.run(jobs):
            yield outcome, delivered.traffic.pop(outcome.client, Traffic())
        yield from ((Outcome(client), sent) for client, sent in delivered.traffic.items())  # sent, and not tuned
        self._unload()

    def finish(self, population: Population) -> tuple[RoundRecord, dict[int, Work]]:
        """After the last round: final tuning and evaluations; the novel clients join now."""
        return finish_run(self, population)


def check_gossip(context: ServerContext) -> None:
    """Raise SparsonaError if method and plan do not fit together among peers."""
    name, plan, half = context.method.name, context.plan, context.method.peer
    assert half is not None
    if plan.everyone_trains:
        raise SparsonaError(
            f"'everyone_trains' for {name}: there is no server that could leave some of them out",
            expected="per_round: so many peers mix and train in a round",
            hint="leave both out: then all take part in every round",
        )
    if plan.sampler == "loss":
        raise SparsonaError(
            f"sampler=loss for {name}: there is no server that peers tell their losses",
            expected="a sampler that needs none",
            hint="--set sampler=size, or leave it out",
        )
    if plan.deadline is not None and plan.late == "drop":
        raise SparsonaError(
            f"late=drop for {name}: a peer's message of this round is sent in the next, when it is not late any more",
            expected="late=partial: peers that would be late make fewer steps",
            hint="--set late=partial",
        )
    bases = {point(found).base for found in plan.points}
    if GLOBAL in bases:
        raise SparsonaError(
            f"{name} has no server and no global model",
            expected=f"points other than '{GLOBAL}'",
            hint=f"use '{CONSENSUS}': the mean of all peers' models",
        )
    if CONSENSUS in bases and half.consensus is None:
        raise SparsonaError(f"{name} has no consensus model to evaluate", hint=f"leave '{CONSENSUS}' out of points")
    check_end(context)
    if half.wants is not None and plan.graph is not None:
        raise SparsonaError(
            f"{name} on a graph: its clients choose whose models they receive",
            expected="no graph",
            hint="leave --graph out",
        )
    check(graph_of(context), members_of(context))


def _sender_only(client: int, sent: Traffic) -> Turn:
    """The turn of a peer that did not train, and whose last message was sent."""
    return Turn(client, Tally(), sent, False, False, trained=False)


def consensus(context: ServerContext, population: Population, completed: int) -> Tree | None:
    """The shared model, made of each peer's last message; the initial one if there is none."""
    half = context.method.peer
    if half is None or half.consensus is None:
        return None
    last = sorted(population.messages.items())
    if not last:
        return context.params
    return half.consensus((loaded(context, message) for _, message in last), context.plan.round_at(completed))


def graph_of(context: ServerContext) -> Graph:
    return context.plan.graph or Graph("random")


def members_of(context: ServerContext) -> Sequence[int]:
    """Who takes part in rounds."""
    novel = novel_clients(context.plan, context.clients)
    clients = range(len(context.clients))
    return [client for client in clients if client not in novel] if novel else clients


def senders_of(
    context: ServerContext,
    clients: Clients,
    members: Sequence[int],
    population: Population,
    client: int,
    round_: Round,
    graph: Graph | None = None,
) -> tuple[int, ...]:
    """Who sends to a client in this round: its neighbours in `graph` if that is given, otherwise those in the plan's
    graph, or the peers it requests; in any case those of them that have a message, if only a first one."""
    half = context.method.peer
    if graph is None and half is not None and half.wants is not None:
        available = tuple(sorted(peer for peer in population.messages if peer != client))
        wanted = clients.wanted(client, round_, available)
        if wanted is not None:
            return tuple(sorted(set(wanted) & set(available)))
    found = senders(graph or graph_of(context), members, client, round_.seeds)
    if half is not None and half.first is not None and round_.index == 0:
        return tuple(found)
    return tuple(sender for sender in found if sender in population.messages)


def loaded(context: ServerContext, message: Message) -> Update:
    """A message on this context's device, decoded, with its masks unpacked."""

    def here(tree: Tree | None) -> Tree | None:
        if tree is None or tree.device.type == context.device.type:  # not placed: that would unpack it once more
            return None if tree is None else tree.loaded()
        return context.place(tree)

    def whole(part: Part) -> Part:
        part = part.plain()  # once for all receivers; its bytes were counted before
        tree = part.whole
        if tree is None and part.support in (Support.DENSE, Support.BITS):
            tree = part.tree()
        if tree is None:  # its mask is at the receiver only
            return replace(part, arrived=context.place(part.values), mask=here(part.mask))
        return replace(part, arrived=None, whole=here(tree), mask=here(part.mask))

    update = open_message(message, context.clock)
    if isinstance(message, bytes) and context.device.type == "cpu":
        return update
    return replace(update, parts={name: whole(part) for name, part in update.parts.items()})


def _sizes(message: Message) -> tuple[int, int]:
    """Bytes as sent, and as the papers count them; those of an encoded message are read from its head."""
    if isinstance(message, Update):
        return num_bytes(message), paper_bytes(message)
    head, _ = read_head(memoryview(message))
    return len(message), paper_size(tuple(part.size for part in head.parts))


def _trees(update: Update) -> Iterator[Tree]:
    for part in update.parts.values():
        yield from (tree for tree in (part.whole, part.mask) if tree is not None)
