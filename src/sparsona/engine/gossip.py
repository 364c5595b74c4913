"""Rounds without a server: each peer mixes what its neighbours said last, trains, and says something itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from sparsona.core.errors import SparsonaError
from sparsona.core.method import Round, State, Tree, Update, Work
from sparsona.core.tree import awake
from sparsona.core.update import Part, Support
from sparsona.engine.closing import Wish, check_last_looks, close
from sparsona.engine.evaluate import Evaluation
from sparsona.engine.graphs import Graph, check, senders
from sparsona.engine.jobs import Executor, Job, Message, Outcome, Setting, opened
from sparsona.engine.plan import novel_clients, participation, tested_clients
from sparsona.engine.population import Population, RoundRecord, Turn, checked_update, num_bytes
from sparsona.engine.turn import ClientProbe, Tally
from sparsona.wire.codec import encode
from sparsona.wire.format import paper_size, read_head
from sparsona.wire.ledger import Traffic, paper_bytes

# Bytes of masks that are unpacked once for all who read them in a round; past that, each reader unpacks for itself.
UNPACKED = 4 * 2**30


@dataclass
class _Post:
    """What is delivered at once: whom each hears from, and the bytes that each sends and receives."""

    heard: dict[int, tuple[int, ...]] = field(default_factory=dict)
    traffic: dict[int, Traffic] = field(default_factory=dict)


class Gossip:
    """Plays rounds among peers, as Star does with a server.

    Synchronous: in round t everybody mixes messages of earlier rounds, the last one that each neighbour made. Who made
    none yet is not heard. Who is not sampled keeps still and can be heard. Who drops out of a round is not reached in
    it, neither way: it goes on with its own model and trains, and its neighbours mix what arrived.
    """

    def __init__(self, setting: Setting, executor: Executor) -> None:
        self.setting, self.plan, self.method = setting, setting.plan, setting.method
        self._executor = executor
        self._refuse()
        check_last_looks(setting)
        self.novel = novel_clients(self.plan, setting.clients)
        check(graph_of(setting), members_of(setting))
        self._at_hand: dict[int, Update] = {}
        self._unpacked = 0

    def _refuse(self) -> None:
        """What peers cannot do."""
        name, plan, half = self.method.name, self.plan, self.method.peer
        assert half is not None
        if plan.stateless:
            raise SparsonaError(
                f"{name} has no server, and stateless clients forget what they learn",
                expected="a method with a server, or clients with a memory",
                mend="leave 'stateless' out",
            )
        if plan.everyone_trains:
            raise SparsonaError(
                f"'everyone_trains' for {name}: there is no server that could leave some of them out",
                expected="per_round: so many peers mix and train, the others keep still",
                mend="leave both out, and all take part in every round",
            )
        if "global" in plan.points:
            raise SparsonaError(
                f"{name} has no server and no global model",
                expected="points other than 'global'",
                mend="use 'consensus': the mean of all peers' models",
            )
        if "consensus" in plan.points and half.consensus is None:
            raise SparsonaError(f"{name} has no consensus model to evaluate", mend="leave 'consensus' out of points")

    def start(self) -> Population:
        return Population(None, {})

    def play(self, population: Population, index: int) -> tuple[Population, RoundRecord]:
        """One round: deliver, mix, train."""
        round_ = self.plan.round_at(index)
        who = participation(self.plan, self.setting.clients, index)
        record = RoundRecord(index, round_.lr_scale)
        states, messages = dict(population.states), dict(population.messages)
        reached = [client for client in who.trains if client not in who.dropped]
        post = self._deliver(population, round_, reached, who.dropped)
        points = ("trained",) if "trained" in self.plan.points and self.plan.evaluates_after(index + 1) else ()
        jobs = (self._job("train", client, population, round_, points, post) for client in who.trains)
        for outcome in self._executor.run(jobs):
            client = outcome.client
            if outcome.message is not None:
                update = checked_update(outcome, index, self.setting.clock)
                messages[client] = outcome.message
                if update is outcome.message:
                    self.setting.shelf.rest(tuple(_trees(update)))
            states[client] = outcome.state
            self.setting.shelf.rest(outcome.state)
            dropped = client in who.dropped
            traffic = post.traffic.pop(client, Traffic())
            record.turns.append(Turn(client, outcome.tally, traffic, not dropped, dropped))
            record.evaluations.extend(outcome.evaluations)
        # Whoever kept still may have been heard.
        record.turns += (_silent(client, sent) for client, sent in post.traffic.items())
        self._put_away()
        return Population(None, states, messages), record

    def _deliver(
        self,
        population: Population,
        round_: Round,
        receivers: Iterable[int],
        dropped: frozenset[int] = frozenset(),
    ) -> _Post:
        """Who is heard by whom; every copy of a message counts, for its sender and for its receiver."""
        post, members, sizes = _Post(), members_of(self.setting), {}
        self._put_away()
        for client in receivers:
            heard = heard_by(self.setting, members, population, client, round_)
            post.heard[client] = tuple(sender for sender in heard if sender not in dropped)
            for sender in post.heard[client]:
                if sender not in sizes:
                    sizes[sender] = _sizes(population.messages[sender])
                size, paper = sizes[sender]
                for peer, sent in ((sender, Traffic(up=size, paper_up=paper)), (client, Traffic(0, size, 0, paper))):
                    post.traffic[peer] = post.traffic.get(peer, Traffic()) + sent
        return post

    def _job(
        self,
        do: Literal["train", "evaluate", "tune"],
        client: int,
        population: Population,
        round_: Round,
        points: tuple[str, ...],
        post: _Post,
        model: Tree | None = None,
    ) -> Job:
        heard = post.heard.get(client, ())
        with self.setting.clock.measure("reply"):
            messages = tuple(self._readable(sender, population.messages[sender]) for sender in heard)
        state = population.states.get(client)
        if not self._executor.encodes:
            state = awake(state)
        return Job(do, client, round_, messages, state, points, model)

    def _readable(self, sender: int, message: Message) -> Message:
        """A message as the executor takes it. What had to be done for that is done once for all who read it."""
        if self._executor.encodes:
            return message if isinstance(message, bytes) else encode(message)
        if sender in self._at_hand:
            return self._at_hand[sender]
        update = at_hand(self.setting, message)
        if self._unpacked < UNPACKED:
            self._at_hand[sender] = update
            self._unpacked += sum(tree.layout.size for tree in _trees(update) if not tree.dtype.is_floating_point)
        return update

    def _put_away(self) -> None:
        """Messages are at hand while one round, or one look, lasts."""
        self._at_hand.clear()
        self._unpacked = 0

    def evaluate(self, population: Population, completed: int) -> list[Evaluation]:
        """Peers' models on their own test data, at the plan's points that need no training: `received` is what each
        would train next, if nobody dropped out."""
        points = tuple(point for point in self.plan.points if point in ("received", "consensus"))
        if not points:
            return []
        return self.look(population, completed, points, tested_clients(self.plan, self.setting.clients))

    def look(
        self, population: Population, completed: int, points: tuple[str, ...], clients: list[int]
    ) -> list[Evaluation]:
        """These clients at these points, after they mixed what they would hear now; on nobody's bill."""
        round_ = self.plan.round_at(completed)
        post = self._deliver(population, round_, clients)
        asks_for_mean = any(point.startswith("consensus") for point in points)
        model = consensus(self.setting, population) if asks_for_mean else None
        jobs = (self._job("evaluate", client, population, round_, points, post, model) for client in clients)
        found = [evaluation for outcome in self._executor.run(jobs) for evaluation in outcome.evaluations]
        self._put_away()
        return found

    def tune(
        self, population: Population, round_: Round, wishes: Mapping[int, Wish]
    ) -> Iterator[tuple[Outcome, Traffic]]:
        """Let these clients mix once more, tune what they have then, and count what they were sent."""
        post = self._deliver(population, round_, wishes)
        jobs = (
            replace(self._job("tune", client, population, round_, wish.points, post), epochs=wish.epochs)
            for client, wish in wishes.items()
        )
        for outcome in self._executor.run(jobs):
            yield outcome, post.traffic.pop(outcome.client, Traffic())
        yield from ((Outcome(client), sent) for client, sent in post.traffic.items())  # heard, and not tuned
        self._put_away()

    def closing(self, population: Population) -> tuple[RoundRecord, dict[int, Work]]:
        """After the last round: final tuning; the novel clients join now."""
        return close(self, population)


def _silent(client: int, sent: Traffic) -> Turn:
    """The turn of a peer that kept still and was heard."""
    return Turn(client, Tally(), sent, False, False, trained=False)


def consensus(setting: Setting, population: Population) -> Tree | None:
    """The one model of all, made of what each said last; the initial one if nobody said anything."""
    half = setting.method.peer
    if half is None or half.consensus is None:
        return None
    said = sorted(population.messages.items())
    if not said:
        return setting.params
    return half.consensus(at_hand(setting, message) for _, message in said)


def graph_of(setting: Setting) -> Graph:
    return setting.plan.graph or Graph("random")


def members_of(setting: Setting) -> Sequence[int]:
    """Who takes part in rounds."""
    novel = novel_clients(setting.plan, setting.clients)
    everybody = range(len(setting.clients))
    return [client for client in everybody if client not in novel] if novel else everybody


def heard_by(
    setting: Setting, members: Sequence[int], population: Population, client: int, round_: Round
) -> tuple[int, ...]:
    """Whom a client hears in this round: its neighbours, or those it wants to hear, who have said something."""
    half = setting.method.peer
    assert half is not None
    if half.wants is None:
        wanted = senders(graph_of(setting), members, client, round_.seeds)
    else:
        asked = half.wants(_state(setting, population, client), round_.on(setting.clients[client]))
        wanted = tuple(sorted(set(asked) & set(members) - {client}))
    return tuple(sender for sender in wanted if sender in population.messages)


def at_hand(setting: Setting, message: Message) -> Update:
    """A message to be read here: on the device, whole, its masks unpacked."""

    def here(tree: Tree | None) -> Tree | None:
        if tree is None or tree.device.type == setting.device.type:  # not placed: that would unpack it once more
            return None if tree is None else tree.awake()
        return setting.place(tree)

    def whole(part: Part) -> Part:
        tree = part.whole
        if tree is None and part.support in (Support.DENSE, Support.BITS):
            tree = part.tree()
        if tree is None:  # of a mask that only the receiver knows
            return replace(part, arrived=setting.place(part.values), mask=here(part.mask))
        return replace(part, arrived=None, whole=here(tree), mask=here(part.mask))

    update = opened(message, setting.clock)
    if isinstance(message, bytes) and setting.device.type == "cpu":
        return update
    return replace(update, parts={name: whole(part) for name, part in update.parts.items()})


def _state(setting: Setting, population: Population, client: int) -> State:
    found = population.states.get(client)
    return setting.fresh_state(client) if found is None else awake(found)


def _sizes(message: Message) -> tuple[int, int]:
    """Bytes as sent, and as the papers count them; of an encoded message, its head tells."""
    if isinstance(message, Update):
        return num_bytes(message), paper_bytes(message)
    head, _ = read_head(memoryview(message))
    return len(message), paper_size(tuple(part.size for part in head.parts))


def _trees(update: Update) -> Iterator[Tree]:
    for part in update.parts.values():
        yield from (tree for tree in (part.whole, part.mask) if tree is not None)


def received_work(setting: Setting, population: Population, client: int) -> Work:
    """The model a peer would use now: what `predict` and `deploy` take."""
    round_ = setting.plan.round_at(setting.plan.rounds)
    heard = heard_by(setting, members_of(setting), population, client, round_)
    inbox = tuple(at_hand(setting, population.messages[sender]) for sender in heard)
    round_ = round_.on(setting.clients[client])
    own = (setting.federation.examples(client, "train"), setting.federation.examples(client, "validation"))
    probe = ClientProbe(setting.task, *own, round_, Tally())
    return setting.method.receive(_state(setting, population, client), inbox, probe, round_)
