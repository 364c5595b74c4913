"""Transforms of messages between `finish` and the wire, and between the wire and `add`, for any method.

Transforms form a chain: a sender applies it in order, a receiver backwards. `with_transforms` makes a new method of a
method and a chain, so that everything that runs methods (an executor, another process, a cost report) applies it.
Free of torch, as costs are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

from sparsona.core.errors import SparsonaError
from sparsona.core.layout import Layout
from sparsona.core.method import Method, PeerHalf, Server, ServerHalf, State, Sum, Work
from sparsona.core.round import Client, Probe, Round
from sparsona.core.seeds import Seeds
from sparsona.core.tree import Tree
from sparsona.core.update import Cost, Inbox, PartSize, Update

Way = Literal["up", "down", "both"]
Memory = Mapping[str, Tree]  # by the name of a part of the message


class Transform(Protocol):
    """A frozen value that changes messages.

    Flags of masks are never changed. Random draws come from `round.seeds`, never from a global generator.
    """

    @property
    def name(self) -> str:
        """The row in the table of transforms."""
        ...

    @property
    def way(self) -> Way:
        """Whose messages it changes: the clients' (up), the server's (down), or both. Peers' messages are up."""
        ...

    @property
    def for_changes(self) -> bool:
        """Whether it is for changes of a model only, not for models."""
        ...

    @property
    def compacts(self) -> bool:
        """Whether it only makes the encoded message shorter, masks included: by how much, the content decides."""
        ...

    def describe(self) -> str:
        """A few words for the protocol of a run."""
        ...

    def send(self, update: Update, memory: Memory, round_: Round) -> tuple[Update, Memory]:
        """Transform a message at its sender.

        Args:
            update: float32 values, from the method or from the transform before this one.
            memory: what this client kept at its last turn; zeros before the first.
            round_: the round, for its seeds.

        Returns:
            The message to send, and what to keep until the client's next turn.
        """
        ...

    def receive(self, update: Update) -> Update:
        """The message with float32 values again, at its receiver."""
        ...

    def size(self, part: PartSize) -> PartSize:
        """The size of a part after `send`, known before training."""
        ...

    def keeps(self, part: PartSize) -> bool:
        """Whether it keeps a number for each entry of a part; known before training."""
        ...


Chain = Sequence[Transform]


@dataclass(frozen=True)
class TransformedState:
    """A client's State of its method, and the memory of each transform. Like any State it is provisional: the old one
    is kept if the message is lost, and stateless clients do not keep it."""

    state: State
    memory: tuple[Memory, ...]

    @property
    def buffers(self) -> Tree:
        found: Tree = self.state.buffers
        return found


def send(chain: Chain, update: Update, memory: tuple[Memory, ...], round_: Round) -> tuple[Update, tuple[Memory, ...]]:
    """Apply a chain to a message at its sender.

    Args:
        chain: the transforms.
        update: the method's message.
        memory: what each transform kept at the client's last turn.
        round_: the round, for its seeds.

    Returns:
        The message to send, and what each transform keeps.
    """
    kept = []
    for transform, before in zip(chain, memory, strict=True):
        for name, part in update.parts.items():
            _check_change(transform, name, part.is_change or part.is_mask)
        update, after = transform.send(update, before, round_)
        if after.keys() != before.keys():
            raise SparsonaError(
                f"the transform '{transform.name}' keeps memory for the parts {sorted(after)}",
                expected=f"{sorted(before)}, the parts that the method's `cost` lists",
            )
        kept.append(after)
    return update, tuple(kept)


def receive(chain: Chain, update: Update) -> Update:
    """Apply a chain backwards to a message at its receiver.

    Args:
        chain: the transforms.
        update: the message as it was sent.

    Returns:
        The message as a method reads it: float32 values and flags.
    """
    for transform in reversed(chain):
        update = transform.receive(update)
    return update


def init_memory(chain: Chain, parts: Sequence[PartSize]) -> tuple[Memory, ...]:
    """The memory of the transforms before a client's first turn: zeros.

    Args:
        chain: the transforms.
        parts: the parts that the method sends.

    Returns:
        The memory of each transform.
    """
    import torch

    return tuple(
        {part.name: Tree(part.layout, torch.zeros(part.layout.size)) for part in kept} for kept in _kept(chain, parts)
    )


def _kept(chain: Chain, parts: Sequence[PartSize]) -> Iterator[list[PartSize]]:
    """For each transform, the parts that it keeps memory for."""
    for transform, before in zip(chain, _stages(chain, parts), strict=False):
        yield [part for part in before if not part.is_mask and transform.keeps(part)]


def sizes(chain: Chain, parts: Sequence[PartSize]) -> tuple[PartSize, ...]:
    """The sizes of a message's parts after a chain.

    Args:
        chain: the transforms.
        parts: the parts that the method sends.

    Returns:
        The parts that are sent.

    Raises:
        SparsonaError: a part is a model, and a transform is for changes only.

    Example:
        >>> from sparsona.core.layout import Slot
        >>> from sparsona.transforms import read_transforms
        >>> model = PartSize("model", Layout((Slot("w", (3,)),)), num_values=3)
        >>> sizes(read_transforms(["half"]), [model])[0].bits
        16
    """
    return tuple(list(_stages(chain, parts))[-1])


def _stages(chain: Chain, parts: Sequence[PartSize]) -> Iterator[Sequence[PartSize]]:
    """The sizes before each transform, and after the last."""
    yield parts
    for transform in chain:
        for part in parts:
            _check_change(transform, part.name, part.is_change or part.is_mask)
        if not transform.compacts:  # the others receive float32 values
            plain_parts = (part if part.is_mask else replace(part, bits=32, is_bfloat=False) for part in parts)
            parts = [part if part.is_mask else transform.size(part) for part in plain_parts]
        yield parts


def plain(update: Update) -> Update:
    """A message with float32 values or flags, whatever type they were sent in."""
    parts = {name: part.plain() for name, part in update.parts.items()}
    return update if all(parts[name] is part for name, part in update.parts.items()) else replace(update, parts=parts)


def with_transforms(method: Method, chain: Chain) -> Method:
    """The same method, whose messages go through a chain of transforms.

    Args:
        method: any method.
        chain: the transforms, in the order in which a sender applies them.

    Returns:
        A method whose messages, `cost` and State include the chain.

    Example:
        >>> from torch import nn
        >>> from sparsona.core.task import Task
        >>> from sparsona.methods.fedavg import FedAvgConfig, fedavg
        >>> from sparsona.transforms import read_transforms
        >>> method = fedavg(Task(nn.Linear(4, 3), (4,), 3), FedAvgConfig())
        >>> with_transforms(method, read_transforms(["half"])).phases == method.phases
        True
    """
    if not chain:
        return method
    up, down = upward(chain), downward(chain)

    if method.peer is not None and len(up) < len(chain):
        raise SparsonaError(
            f"a transform of a server's messages for {method.name}, which has no server",
            expected="transforms of clients' messages",
            hint="leave way=down out",
        )

    def open_message(inbox: Inbox) -> Inbox:
        return (receive(down if method.peer is None else up, update) for update in inbox)

    def fresh_memory(params: Tree, client: Client, seeds: Seeds) -> tuple[Memory, ...]:
        # The parts of a message do not depend on the round.
        sent = method.cost(params.layout, client, Round(0, 1, 1.0, 1, seeds)).up
        return init_memory(up, sent or ())

    def init_client(params: Tree, buffers: Tree, client: Client, seeds: Seeds) -> TransformedState:
        state = method.init_client(params, buffers, client, seeds)
        return TransformedState(state, fresh_memory(params, client, seeds))

    def receive_work(state: TransformedState, inbox: Inbox, probe: Probe, round_: Round) -> Work:
        return method.receive(state.state, open_message(inbox), probe, round_)

    def finish(
        state: TransformedState, work: Work, inbox: Inbox, probe: Probe, round_: Round
    ) -> tuple[TransformedState, Update | None]:
        after, update = method.finish(state.state, work, open_message(inbox), probe, round_)
        memory = state.memory
        if update is not None:
            update, memory = send(up, update, memory, round_)
        return TransformedState(after, memory), update

    def cost(layout: Layout, client: Client, round_: Round) -> Cost:
        return transform_cost(method.cost(layout, client, round_), chain)

    trait = method.trait
    return replace(
        method,
        init_client=init_client,
        receive=receive_work,
        finish=finish,
        cost=cost,
        server=None if method.server is None else _server_half(method.server, up, down),
        peer=None if method.peer is None else _peer_half(method.peer, up, fresh_memory),
        trait=None if trait is None else _of_state(trait),
        other_traits={name: _of_state(other) for name, other in method.other_traits.items()},
    )


def _of_state(trait: Callable[[State], Any]) -> Callable[[TransformedState], Any]:
    return lambda state: trait(state.state)


def with_chain(make: Callable[[Any], Method], chain: Chain) -> Callable[[Any], Method]:
    """A factory of methods with a chain of transforms; it can be pickled if `make` can.

    Args:
        make: makes a method for a task.
        chain: the transforms.

    Returns:
        A factory like `make`.
    """
    return partial(_make, make, chain) if chain else make


def _make(make: Callable[[Any], Method], chain: Chain, task: Any) -> Method:
    return with_transforms(make(task), chain)


def _server_half(half: ServerHalf, up: Chain, down: Chain) -> ServerHalf:
    def add(server: Server, total: Sum, update: Update) -> Sum:
        return half.add(server, total, receive(up, update))

    def reply(server: Server, client: Client, round_: Round) -> Update:
        # Transforms of the server's messages keep no memory: it would need one for each client.
        return send(down, half.reply(server, client, round_), ({},) * len(down), round_)[0]

    return replace(half, add=add, reply=reply)


def _peer_half(
    half: PeerHalf, up: Chain, fresh_memory: Callable[[Tree, Client, Seeds], tuple[Memory, ...]]
) -> PeerHalf:
    wants, consensus, mask, first = half.wants, half.consensus, half.mask, half.first

    def first_message(params: Tree, client: Client, seeds: Seeds, round_: Round) -> Update:
        assert first is not None
        return send(up, first(params, client, seeds, round_), fresh_memory(params, client, seeds), round_)[0]

    def consensus_model(inbox: Inbox, round_: Round) -> Tree:
        assert consensus is not None
        return consensus((receive(up, update) for update in inbox), round_)

    return replace(
        half,
        wants=None if wants is None else lambda state, round_, available: wants(state.state, round_, available),
        consensus=None if consensus is None else consensus_model,
        mask=None if mask is None else lambda state: mask(state.state),
        first=None if first is None else first_message,
    )


def transform_cost(cost: Cost, chain: Chain) -> Cost:
    """The cost of a turn with transforms: the sizes of its messages, and the memory kept on the client.

    Args:
        cost: the cost without them.
        chain: the transforms.

    Returns:
        The cost with them.

    Raises:
        SparsonaError: a transform does not fit the messages.
    """
    up = upward(chain)
    only_down = tuple(transform for transform in chain if transform.way == "down")
    for who, chosen, parts in (("clients", up, cost.up), ("the server", only_down, cost.down)):
        found = [transform for transform in chosen if not transform.compacts]
        if found and parts and all(part.is_mask for part in parts):
            raise SparsonaError(
                f"the transform '{found[0].name}' where {who} send{'s' * (chosen is only_down)} masks only: it would "
                "change nothing",
                expected="messages with numbers",
                hint="leave --transform out",
            )
    kept = [
        PartSize(f"{part.name} ({transform.name})", part.layout, part.layout.size)
        for transform, parts in zip(up, _kept(up, cost.up or ()), strict=True)
        for part in parts
    ]
    return replace(
        cost,
        down=None if cost.down is None else sizes(downward(chain), cost.down),
        up=None if cost.up is None else sizes(up, cost.up),
        kept=(*cost.kept, *kept),
        compact=any(one.compacts for one in up if cost.up) or any(one.compacts for one in downward(chain) if cost.down),
    )


def describe(chain: Chain, among_peers: bool = False) -> str:
    """A sentence for the protocol of a run."""
    ways = {"clients send": upward(chain), "the server sends": () if among_peers else downward(chain)}
    texts = [f"what {who}: {', then '.join(one.describe() for one in found)}" for who, found in ways.items() if found]
    return f"Messages are transformed; {'; '.join(texts)}."


def upward(chain: Chain) -> Chain:
    """The transforms of clients' messages."""
    return tuple(transform for transform in chain if transform.way != "down")


def downward(chain: Chain) -> Chain:
    """The transforms of the server's messages."""
    return tuple(transform for transform in chain if transform.way != "up")


def _check_change(transform: Transform, part: str, is_change: bool) -> None:
    if transform.for_changes and not is_change:
        raise SparsonaError(
            f"the transform '{transform.name}' for part '{part}', which is a model",
            expected="a method that sends changes, such as fedspa or pfedgate",
            hint="use 'half' or 'quantize', which are for models, too",
        )
