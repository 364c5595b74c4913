"""A method under test: its options, and a short run of it that all properties read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from sparsona import methods
from sparsona.core.method import Client, Cost, Method, Phase, Round, Tick, Update, Work
from sparsona.core.tree import leaves
from sparsona.data.batches import in_order
from sparsona.engine.context import ClientContext
from sparsona.engine.jobs import Tally
from sparsona.engine.population import Population, RoundRecord
from sparsona.engine.rounds import check_plan, received_work, simulate
from sparsona.engine.turn import ClientProbe, take_step
from sparsona.executors.serial import Serial
from sparsona.experiment import build
from sparsona.methods import MethodCard
from sparsona.wire.codec import encode

ROUNDS = 3
COMMON = {"clients": 6, "per_round": 3, "rounds": 4, "epochs": 2, "batch_size": 8, "lr": 0.1, "executor": "serial"}
FEWER = {"data_rate": 0.12}  # of the examples, where only `learns` needs them all


def require(condition: Any, message: object) -> None:
    """An assertion that holds under `python -O`, too."""
    if not condition:
        raise AssertionError(str(message))


class Sent(NamedTuple):
    """An Update that the method made: for a client (`down`), or as one (`up`)."""

    way: str
    client: int
    update: Update


@dataclass
class History:
    """A run of `ROUNDS` rounds: what there was after each of them, and what was sent."""

    context: ClientContext
    sent: list[Sent]
    populations: list[Population] = field(default_factory=list)
    prints: list[str] = field(default_factory=list)  # made at once: a population that is changed later shows
    records: list[RoundRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_plan(self.context.server_side)
        self.engine = simulate(self.context, Serial(self.context))
        self.constants = fingerprint((self.context.params, self.context.buffers))

    def play(self, rounds: int) -> History:
        """Play until this number of rounds."""
        if not self.populations:
            self._keep(self.engine.start())
        while len(self.records) < rounds:
            population, record = self.engine.play(self.populations[-1], len(self.records))
            self.records.append(record)
            self._keep(population)
        return self

    def _keep(self, population: Population) -> None:
        self.populations.append(population)
        self.prints.append(population_print(population))

    @property
    def method(self) -> Method:
        return self.context.method

    @property
    def last(self) -> Population:
        return self.populations[-1]

    @cached_property
    def final(self) -> tuple[RoundRecord, dict[int, Work]]:
        """Final tuning after the last round that was played."""
        return self.engine.finish(self.last)

    def work(self, client: int) -> Work:
        """The model this client would use now."""
        return received_work(self.context, self.last, client)

    def cost(self, client: int, index: int = 0) -> Cost:
        """What a turn of this client costs in a round."""
        return self.method.cost(self.context.task.layout, self.context.clients[client], self.round(index))

    def round(self, index: int) -> Round:
        return self.context.plan.round_at(index)

    def enter(self, phase: Phase, work: Work, client: int) -> Work:
        """Work as it is before this phase's first step."""
        round_ = self.round(len(self.records)).on(self.context.clients[client])
        data = self.context.federation
        train, validation = data.packed_examples(client, "train"), data.packed_examples(client, "validation")
        probe = ClientProbe(self.context.task, train, validation, round_, Tally())
        return work if phase.enter is None else phase.enter(work, probe, round_)

    def batch(self, phase: Phase, client: int) -> Any:
        """The batch of one step of this phase."""
        batches = list(in_order(self.context.federation.packed_examples(client, "train"), 4))[: phase.batches_per_step]
        return batches[0] if phase.batches_per_step == 1 else tuple(batches)


def step(phase: Phase, work: Work, batch: Any, lr_scale: float) -> Work:
    """One step at a share of the learning rate."""
    tick = Tick(torch.tensor(lr_scale, dtype=torch.float32), torch.tensor(0, dtype=torch.int64))
    return take_step(phase, work, batch, tick)[0]


def trained_print(phase: Phase, work: Work) -> str:
    """A fingerprint of what a phase trains; statistics and momentum may change at any learning rate."""
    return fingerprint(tuple(getattr(work, name) for name in phase.trains))


@dataclass(frozen=True)
class Case:
    """A method under test: see `sparsona.testing.check`.

    Args:
        card: the method.
        options: of the method and the run; choose those that reach most of its code.
        model: a function that builds its network, or a name; None: the default of `digits`.
        accuracy: the mean accuracy it must exceed; guessing reaches 0.1.

    Example:
        >>> from sparsona.methods import card
        >>> Case(card("fedavg")).history.records[0].index
        0
    """

    card: MethodCard
    options: Mapping[str, Any] = field(default_factory=dict)
    model: Any = None
    accuracy: float = 0.35

    @cached_property
    def history(self) -> History:
        """The run that properties share; none of them may change it."""
        return self.start().play(ROUNDS)

    def start(self, model: Any = None, **more: Any) -> History:
        """A run with other options or another network, before its first round."""
        options, model = {**COMMON, **FEWER, **self.options, **more}, model or self.model
        config = build.make_config(self.card, options, model=model)
        sent: list[Sent] = []
        watched = replace(
            self.card, module=partial(_record_sent, self.card, sent), config=methods.factory(self.card)[1]
        )
        return History(build.make_context(config, None, model, row=watched), sent)

    def option(self, name: str) -> Any:
        """What an option of the method is in this case."""
        return build.make_config(self.card, {**COMMON, **self.options}, model=self.model).options.get(name)


def _record_sent(card: MethodCard, sent: list[Sent], task: Any, config: Any) -> Method:
    """The method, which also records what it sends."""
    method: Method = methods.make(task, row=card, config=config)

    def finish(state: Any, work: Any, inbox: Any, probe: Any, round_: Round) -> Any:
        state, update = method.finish(state, work, inbox, probe, round_)
        if update is not None:
            assert round_.client is not None
            sent.append(Sent("up", round_.client.index, update))
        return state, update

    def reply(server: Any, client: Client, round_: Round) -> Update:
        assert method.server is not None
        update = method.server.reply(server, client, round_)
        sent.append(Sent("down", client.index, update))
        return update

    half = None if method.server is None else replace(method.server, reply=reply)
    return replace(method, finish=finish, server=half)


def fingerprint(value: Any) -> str:
    """A hash of the bits of a value's tensors."""
    state = hashlib.sha256()
    for path, tensor in sorted(leaves(value), key=lambda item: item[0]):
        state.update(path.encode() + tensor.contiguous().cpu().numpy().tobytes())
    return state.hexdigest()


def population_print(population: Population) -> str:
    """A fingerprint of a population: the server, the clients, and the last messages of peers."""
    last = {k: m if isinstance(m, bytes) else encode(m) for k, m in sorted(population.messages.items())}
    return fingerprint((population.server, population.states)) + hashlib.sha256(repr(last).encode()).hexdigest()


def shapes(value: Any) -> list[tuple[str, torch.Size, torch.dtype]]:
    """The structure of a State, Server or Work."""
    return [(path, tensor.shape, tensor.dtype) for path, tensor in leaves(value)]


def net_with_statistics() -> nn.Module:
    """A network with buffers and noise."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 10)
    )


def smooth_net() -> nn.Module:
    """Without kinks: near one of a ReLU, rounding errors become differences."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten()),
        *(nn.Linear(128, 24), nn.Tanh(), nn.Linear(24, 10)),
    )
