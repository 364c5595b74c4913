"""What a method is: pure functions for ONE client, and for the server if there is one.

The loop belongs to the engine. A method never sees the other clients' data, the test data, the clock or the global
generator, and never changes what it is handed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparsona.core.layout import Layout
from sparsona.core.points import CONSENSUS, GLOBAL
from sparsona.core.round import Batch, Client, Probe, Round, Tick
from sparsona.core.seeds import Seeds
from sparsona.core.tree import Tree
from sparsona.core.update import Cost, Inbox, PartSize, Support, Update, dense, masked, message

if TYPE_CHECKING:
    from torch import Tensor, nn

# A State, Server or Work is a frozen dataclass of tensors, trees, and tuples or dicts of those; every method has its
# own. Its structure never changes during a run: what is stored is read back into the structure `init_*` makes.
State = Any
Server = Any
Work = Any
Sum = Any  # what a server adds up in a round; it may also hold plain numbers, and is gone when the round is
Grads = Mapping[str, Any]


def always(_: Round) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Some training: which fields of Work get gradients, the loss, and how a gradient changes Work.

    `loss(work, batch)` returns a scalar and the new value of `work.buffers` (BatchNorm statistics, or anything else a
    forward pass leaves behind); `batch` is a tuple of batches when `batches_per_step` > 1. `update(work, grads, tick)`
    returns the new Work; `grads` has one entry per name in `trains`, built like that field. Both are pure, without
    `.item()`, Python branches on tensors, boolean indexing or in-place operations on what they are handed: the executor
    may compile them, capture them, or run them for many clients at once. Inside a loss, differentiate with
    torch.func.grad, and keep constants in Work, so that they follow the device.
    """

    name: str
    trains: tuple[str, ...]
    loss: Callable[[Work, Any], tuple[Tensor, Any]]
    update: Callable[[Work, Grads, Tick], Work]
    epochs: int = 1
    max_steps: int | None = None  # stop early, in the middle of an epoch if need be; repeats do not count
    batches_per_step: int = 1  # Per-FedAvg looks at two batches in one step
    repeats: int = 1  # pFedMe takes several steps on one batch ...
    after_batch: Callable[[Work, Any, Tick], Work] | None = None  # ... and then does something else
    when: Callable[[Round], bool] = always
    enter: Callable[[Work, Probe, Round], Work] | None = None  # before the first step: FedEM's responsibilities
    mixes_examples: bool = False  # the loss of an example depends on its batch (BatchNorm): nothing may be padded
    traceable: bool = True  # False: it must not be compiled, captured or run for several clients at once
    flops: Callable[[Work], int] | None = None  # per example and step; None: three dense forward passes
    step_flops: Callable[[Work], int] | None = None  # per step, whatever its examples: what an optimizer adds

    def batch_size(self, num_examples: int, batch_size: int) -> int:
        """The size of its batches. One that takes two at once needs two, also of data that would fit into one."""
        return max(1, min(batch_size, num_examples // self.batches_per_step))


def examples_seen(phase: Phase, client: Client, round_: Round) -> int:
    """How many examples a client's phase goes through, each as often as it is seen; its FLOPs are so many times
    `phase.flops`."""
    return _amounts(phase, client, round_)[0]


def steps_taken(phase: Phase, client: Client, round_: Round) -> int:
    """How many steps a client's phase takes."""
    return _amounts(phase, client, round_)[1]


def _amounts(phase: Phase, client: Client, round_: Round) -> tuple[int, int]:
    """Examples and steps: the last batch of a pass may be smaller, and what does not fill a step is left out."""
    count = client.num_examples
    if not count or not phase.when(round_):
        return 0, 0
    size = phase.batch_size(count, round_.batch_size)
    batches = -(-count // size)
    if phase.mixes_examples and batches > 1 and count % size == 1:
        batches -= 1  # a last example joins the batch before it
    all_ = phase.epochs * batches
    if phase.max_steps is not None:
        all_ = min(all_, phase.max_steps * phase.batches_per_step)
    steps = all_ // phase.batches_per_step
    passes, rest = divmod(steps * phase.batches_per_step, batches)
    return phase.repeats * (passes * count + rest * size), phase.repeats * steps


@dataclass(frozen=True, kw_only=True)
class ServerHalf:
    """What the server does: functions of a Server, which only it holds.

    - `init(params, clients, seeds)`: the Server before the first round.
    - `reply(server, client, round)`: what a client is sent.
    - `zero(server, round)`: the Sum of a round in which nothing has arrived.
    - `add(server, total, update)`: the Sum with one update more. It may change `total` in place, which nobody uses
      afterwards, so that memory does not grow with the number of clients. Updates are added in client order.
    - `step(server, total, round)`: the next Server; not called if nothing was added.
    - `merge(one, other)`: the Sum of what was added to either; None: a round's updates must be added one by one.
    - `global_model(server)`: the shared model, where there is one. State.buffers are then those of the task's module.
    - `client_memory`: the fields of Server that are dicts by client, and hold what it remembers of each.

    All are pure but for `add` and `merge`, which may consume the sums that they are handed.
    """

    init: Callable[[Tree, tuple[Client, ...], Seeds], Server]
    reply: Callable[[Server, Client, Round], Update]
    zero: Callable[[Server, Round], Sum]
    add: Callable[[Server, Sum, Update], Sum]
    step: Callable[[Server, Sum, Round], Server]
    merge: Callable[[Sum, Sum], Sum] | None = None
    global_model: Callable[[Server], Tree] | None = None
    is_partial: bool = False  # some of the global model is as it began: no model that a client would be served by
    client_memory: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PeerHalf:
    """What peers do beyond training: whom to ask for a model (None: as the graph says), and the shared model.

    `wants` is handed a Round bound to the client. `consensus(inbox, round)` makes one model of everybody's last
    messages; each says in which round it was made.
    """

    wants: Callable[[State, Round], tuple[int, ...]] | None = None
    consensus: Callable[[Inbox, Round], Tree] | None = None


@dataclass(frozen=True, kw_only=True)
class Method:
    """A federated method as a value. Made by a factory `name(task, config)`; see docs/add-a-method.md.

    - `init_client(params, buffers, client, seeds)`: what stays on the client between rounds.
    - `receive(state, inbox, probe, round)`: what arrived becomes the model at hand.
    - `phases`: what is trained.
    - `finish(state, work, inbox, probe, round)`: the new State, and the Update to send (None: nothing is sent). The new
      State is provisional: the engine keeps the old one if the Update is lost.
    - `predict(work, inputs)`: what the client would deploy; each prediction depends on its own input alone. Executors
      capture it, too: it keeps the rules of a Phase's loss.
    - `cost(layout, client, round)`: messages and FLOPs of one turn without training; equals the ledger exactly.
    - `deploy(work)`: predict as plain (params, buffers) of the task's module, or as an nn.Module of its own where the
      client's network is another; None where no plain weights do it.
    - `adapt(work, probe, round)`: the Work to predict with, where a model is adapted to a client's data before use
      without being trained in rounds (Per-FedAvg's step, statistics); not called for models that were tuned.
    - `tune`: the phase of final fine-tuning and of onboarding novel clients.
    - `trait(state)`: what tells clients apart, for analysis: a mask (a bool tree) or a gate's scores (a vector).
    - `server`, `peer`: the other half. A method with neither is a client alone.

    `inbox` is in client order and may be walked once per call. A State has a field `buffers`: the shared model is
    evaluated with those of each client.
    """

    name: str = ""
    init_client: Callable[[Tree, Tree, Client, Seeds], State]
    receive: Callable[[State, Inbox, Probe, Round], Work]
    phases: tuple[Phase, ...]
    finish: Callable[[State, Work, Inbox, Probe, Round], tuple[State, Update | None]]
    predict: Callable[[Work, Tensor], Tensor]
    cost: Callable[[Layout, Client, Round], Cost]
    deploy: Callable[[Work], tuple[Tree, Tree] | nn.Module] | None = None
    tune: Phase | None = None
    server: ServerHalf | None = None
    peer: PeerHalf | None = None
    trait: Callable[[State], Tree | Tensor] | None = None
    adapt: Callable[[Work, Probe, Round], Work] | None = None
    transductive: bool = False  # a prediction depends on its batch: nothing is padded there, and results say so

    @property
    def shared_point(self) -> str | None:
        """The point at which the shared model is evaluated, where there is such a model."""
        if self.server is not None and self.server.global_model is not None:
            return GLOBAL
        return CONSENSUS if self.peer is not None and self.peer.consensus is not None else None


# Everything a method file needs of the contract, from one place.
__all__ = [
    "Batch",
    "Client",
    "Cost",
    "Grads",
    "Inbox",
    "Layout",
    "Method",
    "PartSize",
    "PeerHalf",
    "Phase",
    "Probe",
    "Round",
    "Seeds",
    "Server",
    "ServerHalf",
    "State",
    "Sum",
    "Support",
    "Tick",
    "Tree",
    "Update",
    "Work",
    "dense",
    "examples_seen",
    "masked",
    "message",
    "steps_taken",
]
