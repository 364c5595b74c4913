"""What a run will spend, before it is trained: the engine's own rules applied to a method's phases and costs.

Who takes part in a round follows from the seed alone, and so does who sends to whom among peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sparsona.core.method import Client, Cost, Phase, Round, always, steps_taken
from sparsona.core.update import PartSize, Support
from sparsona.engine.context import ServerContext
from sparsona.engine.gossip import graph_of, members_of
from sparsona.engine.graphs import Graph, senders
from sparsona.engine.plan import novel_clients
from sparsona.wire.format import message_size


@dataclass(frozen=True)
class Forecast:
    """Totals of a run, final tuning included.

    Args:
        turns: client turns that train.
        steps: local steps of all clients.
        flops: FLOPs of training and mask search.
        bytes: bytes as encoded; between peers each message counts once.
        exact: False if training decides what is used and sent, or how short messages become: `flops` and `bytes` are
            upper bounds then.
    """

    turns: int = 0
    steps: int = 0
    flops: int = 0
    bytes: int = 0
    exact: bool = True


def forecast(context: ServerContext, with_bytes: bool = True) -> Forecast:
    """What a run with this context will spend.

    Args:
        context: the server's side: the method, the plan and the clients.
        with_bytes: False leaves `bytes` at 0: who sends to whom among peers takes the most time.

    Returns:
        The totals over all rounds and final tuning.
    """
    return _Forecaster(context, with_bytes).run()


class _Forecaster:
    """Adds up a run, with the costs of clients that are alike computed once."""

    def __init__(self, context: ServerContext, with_bytes: bool) -> None:
        self._with_bytes = with_bytes
        self.context, self.plan, self.method = context, context.plan, context.method
        self._costs: dict[tuple[object, ...], Cost] = {}
        self._steps: dict[tuple[object, ...], int] = {}
        first, last = (self._active(index) for index in (0, max(self.plan.rounds - 1, 0)))
        # Costs that change from round to round while the same phases run must be asked for in every round.
        self._changes = first == last and self._cost_at(0) != self._cost_at(self.plan.rounds - 1)
        self.turns = self.steps = self.flops = self.bytes = 0
        self.exact = True

    def _cost_at(self, index: int) -> Cost:
        client = self.context.clients[0]
        return self.method.cost(self.context.params.layout, client, self.plan.round_at(max(index, 0)).on(client))

    def _active(self, index: int) -> tuple[bool, ...]:
        round_ = self.plan.round_at(index)
        return tuple(phase.when(round_) for phase in self.method.phases)

    def run(self) -> Forecast:
        sent: set[int] = set()  # peers that have made a message
        for index in range(self.plan.rounds):
            round_, who = self.plan.round_at(index), self.context.participation(index)
            active = tuple(phase.when(round_) for phase in self.method.phases)
            for number in who.trains:
                client = self.context.clients[number]
                cost = self._cost(client, round_, active)
                self.turns += 1
                self.steps += self._num_steps(self.method.phases, client, round_, ("train", active))
                self.flops += cost.train_flops + cost.search_flops
                if self.method.peer is None:
                    self.bytes += self._size(cost.down, is_down=True) + self._size(cost.up)
            if self.method.peer is not None:
                reached = [client for client in who.trains if client not in who.dropped]
                self._deliver(reached, round_, active, sent - who.dropped)
                sent |= set(who.trains)
        self._tune(sent)
        return Forecast(self.turns, self.steps, self.flops, self.bytes, self.exact)

    def _tune(self, sent: set[int]) -> None:
        round_, tune = self.plan.tuning_round, self.method.tune
        novel, tuned = novel_clients(self.plan, self.context.clients), []
        active = tuple(True for _ in self.method.phases)
        everyone = Graph("full") if self.plan.tune_from == "all" else None
        for client in self.context.clients:
            epochs = self.plan.tuning_epochs(client.index in novel)
            if not epochs or tune is None:
                continue
            tuned.append(client.index)
            client = client.in_tuning
            cost = self._cost(client, round_, active)
            self.turns += 1
            phase = replace(tune, epochs=epochs, when=always)
            self.steps += self._num_steps((phase,), client, round_, ("tune", epochs))
            layout = self.context.params.layout
            infer = layout.forward_flops() if cost.infer_flops is None else cost.infer_flops
            self.flops += epochs * (
                client.num_examples * layout.with_backward(infer) if cost.tune_flops is None else cost.tune_flops
            )
            self.flops += cost.tune_search_flops
            if self.method.peer is None:
                self.bytes += self._size(cost.down, is_down=True)
            elif everyone and cost.requests is not None:
                self.flops += cost.message_flops * (len(sent - {client.index}) - cost.requests)
        if self.method.peer is not None:
            self._deliver(tuned, round_, active, sent, everyone)

    def _deliver(
        self,
        receivers: Sequence[int],
        round_: Round,
        active: tuple[bool, ...],
        sent: set[int],
        graph: Graph | None = None,
    ) -> None:
        """Add the bytes of a round among peers; `sent` are those that have a message and can send it."""
        if not self._with_bytes:
            return
        assert self.method.peer is not None
        costs = {sender: self._cost(self.context.clients[sender], round_, active) for sender in sent}
        sizes = {sender: self._size(cost.up) for sender, cost in costs.items()}
        if graph is None and self.method.peer.wants is not None:
            self.exact = False  # training decides whose messages are requested: at most the largest ones
            largest = sorted(sizes, key=sizes.__getitem__, reverse=True)
            for client in receivers:
                requests = self._cost(self.context.clients[client], round_, active).requests
                count = len(largest) if requests is None else requests
                self.bytes += sum(sizes[sender] for sender in [s for s in largest[: count + 1] if s != client][:count])
            return
        members = members_of(self.context)
        for client in receivers:
            found = senders(graph or graph_of(self.context), members, client, round_.seeds)
            self.bytes += sum(sizes[sender] for sender in found if sender in sizes)

    def _cost(self, client: Client, round_: Round, active: tuple[bool, ...]) -> Cost:
        key = (*client.kind, active, round_.index if self._changes else 0)
        if key not in self._costs:
            self._costs[key] = self.method.cost(self.context.params.layout, client, round_.on(client))
            cost = self._costs[key]
            self.exact = self.exact and cost.exact and not (cost.compact and self._with_bytes)
        return self._costs[key]

    def _num_steps(self, phases: Sequence[Phase], client: Client, round_: Round, key: tuple[object, ...]) -> int:
        where = (*client.kind, *key)
        if where not in self._steps:
            self._steps[where] = sum(steps_taken(phase, client, round_) for phase in phases)
        return self._steps[where]

    def _size(self, parts: tuple[PartSize, ...] | None, is_down: bool = False) -> int:
        if parts is None:
            return 0
        if is_down and self.plan.stateless:  # a stateless client has no mask: it is sent
            parts = tuple(replace(p, support=Support.BITS) if p.support is Support.KNOWN else p for p in parts)
        return message_size(parts)
