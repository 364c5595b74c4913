"""The two sides of a run: what a round needs on a server, and what a turn needs on a client.

A process may hold one of the two. The simulator holds both and passes messages between them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from sparsona.core.method import Client, Method, Round, State, Tree, Update
from sparsona.core.task import Task
from sparsona.core.tree import loaded, map_parts
from sparsona.data.federation import Federation
from sparsona.engine.pace import with_conditions
from sparsona.engine.plan import Participation, Plan, participation
from sparsona.engine.profiler import OFF, Clock
from sparsona.engine.sampling import Sampler
from sparsona.engine.spill import SpillStore

T = TypeVar("T")


class Placement:
    """Moves values to a device. A tree that many clients share is one shared tree there as well.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._placed: WeakKeyDictionary[Tree, Tree] = WeakKeyDictionary()

    def __call__(self, value: T) -> T:
        if self.device.type == "cpu":
            return value  # the same objects, with their cached facts
        return map_parts(self._place, value)

    def _place(self, _path: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tree):
            return leaf.to(self.device)
        if leaf not in self._placed:
            flat = leaf.flat
            moved = flat.to(self.device)
            if moved is flat:
                return leaf
            self._placed[leaf] = Tree(leaf.layout, moved, leaf.identity)
        return self._placed[leaf]


@dataclass(frozen=True)
class ServerContext:
    """What a round needs on a server, or on the process that passes messages among peers: no client's data or State.

    Args:
        method: the method.
        plan: the options of the run.
        clients: what each client reported about itself: its number of examples and its capacity.
        params: the initial parameters.
        place: moves values to the server's device.
        spill_store: where trees are stored between rounds.
        clock: measures where the time goes; off by default.
        sampler: a function that samples clients, where one was passed from Python.
    """

    method: Method
    plan: Plan
    clients: Sequence[Client]
    params: Tree
    place: Placement
    spill_store: SpillStore
    clock: Clock = OFF
    sampler: Sampler | None = None

    def participation(self, index: int, losses: Mapping[int, float] | None = None) -> Participation:
        """Who takes part in a round, given the last training losses of clients."""
        return participation(self.plan, self.clients, index, self.sampler, losses)

    @property
    def device(self) -> torch.device:
        return self.place.device

    def first_message(self, client: int, round_: Round) -> Update:
        """A peer's message before any training, for methods that mix one.

        Args:
            client: the index of the peer.
            round_: the first round.

        Returns:
            The message, which follows from the seed.
        """
        assert self.method.peer is not None
        assert self.method.peer.first is not None
        card = self.clients[client]
        return self.method.peer.first(self.params, card, self.plan.seeds.of(client), round_.on(card))

    @classmethod
    def make(
        cls,
        task: Task,
        make_method: Callable[[Task], Method],
        plan: Plan,
        clients: Sequence[Client],
        device: torch.device | None = None,
    ) -> ServerContext:
        """The context of a process that is a server only.

        Args:
            task: the task.
            make_method: makes the method for the task.
            plan: the options of the run.
            clients: what each client reported about itself.
            device: the device of the server; None: the CPU.

        Returns:
            The context.
        """
        place = Placement(device or torch.device("cpu"))
        params, _ = task.init(plan.seeds.shared("model"))
        return cls(make_method(task), plan, clients, place(params), place, SpillStore(place.device))


@dataclass(frozen=True)
class ClientContext:
    """What turns need on the side of clients: task, method, and the data of the clients in this process.

    It is the same in the simulator and in every worker process.

    Args:
        task: the task.
        make_method: makes the method for the task.
        federation: the clients' data.
        plan: the options of the run.
        capacities: the highest density that clients can hold, repeated in turn.
        device: the device of models, states and data.
        precision: the precision of products on a GPU.
        clock: measures where the time goes; off by default.
        cards: the clients as methods see them, where this process has the data of some only; None: of the federation.
        sampler: a function that samples clients, where one was passed from Python; the server's.
        devices: the devices that turns are shared out to, by name, where there are several; `device` is the first.
    """

    task: Task
    make_method: Callable[[Task], Method]
    federation: Federation
    plan: Plan
    capacities: tuple[float, ...] = (1.0,)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: str = "fp32"
    clock: Clock = OFF
    cards: Sequence[Client] | None = None
    sampler: Sampler | None = None
    devices: tuple[str, ...] = ()
    method: Method = field(init=False)
    clients: Sequence[Client] = field(init=False)
    params: Tree = field(init=False)
    buffers: Tree = field(init=False)
    spill_store: SpillStore = field(init=False)  # holds clients' states between their turns
    place: Placement = field(init=False)

    def __post_init__(self) -> None:
        place = Placement(self.device)
        seed = self.plan.seeds.shared("model")
        self.task.set_frozen(seed, self.device)
        params, buffers = self.task.init(seed)
        clients = self.federation.clients(self.capacities) if self.cards is None else self.cards
        for name, value in (
            ("method", self.make_method(self.task)),
            ("clients", with_conditions(self.plan, clients)),
            ("federation", self.federation.to(self.device)),
            ("place", place),
            ("params", place(params)),
            ("buffers", place(buffers)),
            ("spill_store", SpillStore(self.device)),
        ):
            object.__setattr__(self, name, value)
        self.clock.attach(self.device)

    @property
    def server_side(self) -> ServerContext:
        """The context of the simulator's server."""
        return ServerContext(
            self.method, self.plan, self.clients, self.params, self.place, self.spill_store, self.clock, self.sampler
        )

    @property
    def largest_batch(self) -> int:
        """The largest number of examples in a batch."""
        return min(self.plan.batch_size, max(client.num_examples for client in self.clients))

    @property
    def encodes(self) -> bool:
        """Whether `perform` encodes messages as bytes: on a GPU they would be copied to the host and back."""
        return self.device.type == "cpu"

    @property
    def start_digest(self) -> str:
        """A digest of the initial weights and buffers, which may come from a module passed from Python, and of frozen
        parameters."""
        state = hashlib.blake2b(digest_size=16)
        for tree in (self.params, self.buffers):
            state.update(tree.flat.cpu().numpy().tobytes())
        for name, value in self.task.frozen.items():
            state.update(f"{name}{value.dtype}{tuple(value.shape)}".encode())
            state.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return state.hexdigest()

    def fresh_state(self, client: int) -> State:
        """A client's State before its first turn.

        Args:
            client: the index of the client.

        Returns:
            The State, on the device.
        """
        with self.clock.measure("init"):
            made = self.method.init_client(self.params, self.buffers, self.clients[client], self.plan.seeds.of(client))
            return loaded(self.place(made))
