"""The contract of a method: pure functions for ONE client, and for the server if there is one.

The loop belongs to the engine. A method never sees other clients' data, test data, the clock or the global random
generator, and never modifies its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
# own. Its structure is constant during a run: checkpoints are read back into the structure that `init_*` makes.
State = Any
Server = Any
Work = Any
Sum = Any  # what a server adds up in a round; it may also hold plain numbers, and is discarded after the round
Grads = Mapping[str, Any]
SLACK = 1e-9  # 0.29 * 100 is less than 29


def always(_: Round) -> bool:
    """The default of `Phase.when`: the phase runs in every round."""
    return True


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of local training: which fields of Work get gradients, the loss, and how a gradient changes Work.

    `loss` and `update` are pure, without `.item()`, Python branches on tensors, boolean indexing or in-place operations
    on their arguments: the executor may compile them, capture them, or run them for many clients at once. Inside a
    loss, differentiate with torch.func.grad, and keep constants in Work, so that they move to the device with it.

    Args:
        name: part of the names of random draws, and the row of the phase in a profile.
        trains: the fields of Work that are differentiated.
        loss: `loss(work, batch)` returns a scalar and the new value of `work.buffers` (BatchNorm statistics, or what
            else a forward pass updates); `batch` is a tuple of batches if `batches_per_step` > 1. A mean is weighted by
            `batch.weight`, which is 0 for examples that fill up a batch: `Task.mean_loss`.
        update: `update(work, grads, tick)` returns the new Work; `grads` has one entry for each name in `trains`, with
            the structure of that field.
        epochs: passes over the client's training data; 0: the phase does not run.
        own_epochs: how many passes of a client that has its own number of them in a round are this phase's; None: all.
        max_steps: stops the phase early, in the middle of an epoch if need be; repeats do not count.
        batches_per_step: batches that one step reads; Per-FedAvg needs two.
        repeats: steps taken on each batch; pFedMe takes several.
        after_batch: `after_batch(work, batch, tick)` runs after the last repeat on a batch.
        when: whether the phase runs in a given round.
        enter: `enter(work, probe, round)` runs before the first step; FedEM computes its responsibilities there.
        mixes_examples: the loss of an example depends on its batch (BatchNorm), so batches are never padded.
        traceable: False if the phase must not be compiled, captured or run for several clients at once.
        flops: FLOPs per example and step; None: three dense forward passes.
        used_flops: `used_flops(before, after)` returns the FLOPs of all examples of the phase as they were used, from
            the Work before and after it, where training decides that; `flops` then is an upper bound.
        step_flops: FLOPs per step whatever its number of examples, such as those of an optimizer.
    """

    name: str
    trains: tuple[str, ...]
    loss: Callable[[Work, Any], tuple[Tensor, Any]]
    update: Callable[[Work, Grads, Tick], Work]
    epochs: int = 1
    own_epochs: Callable[[int], int] | None = None
    max_steps: int | None = None
    batches_per_step: int = 1
    repeats: int = 1
    after_batch: Callable[[Work, Any, Tick], Work] | None = None
    when: Callable[[Round], bool] = always
    enter: Callable[[Work, Probe, Round], Work] | None = None
    mixes_examples: bool = False
    traceable: bool = True
    flops: Callable[[Work], int] | None = None
    used_flops: Callable[[Work, Work], int] | None = None
    step_flops: Callable[[Work], int] | None = None

    def batch_size(self, num_examples: int, batch_size: int) -> int:
        """The size of this phase's batches: a phase that reads two at once gets two, even if one could hold all."""
        return max(1, min(batch_size, num_examples // self.batches_per_step))

    def batches_in_pass(self, num_examples: int, round_: Round) -> int:
        """The batches of one pass over so many examples: the last one may be smaller, unless it is left out."""
        size = self.batch_size(num_examples, round_.batch_size)
        count = num_examples - (num_examples % size if round_.drop_last else 0)
        batches = -(-count // size)
        # A last example joins the batch before it.
        return batches - (self.mixes_examples and batches > 1 and count % size == 1)

    def epochs_of(self, client: Client) -> int:
        """The passes of this client."""
        if client.epochs is None:
            return self.epochs
        return client.epochs if self.own_epochs is None else self.own_epochs(client.epochs)

    def num_batches(self, client: Client, in_a_pass: int) -> int:
        """The batches that this client's steps read, repeats not counted: the one rule of how long a phase takes.

        Args:
            client: whose turn it is.
            in_a_pass: the batches of one pass over its data.
        """
        steps = self.epochs_of(client) * in_a_pass // self.batches_per_step
        if self.max_steps is not None:
            steps = min(steps, self.max_steps)
        if client.share < 1 and steps:
            steps = max(1, int(client.share * steps + SLACK))
        return steps * self.batches_per_step


def examples_seen(phase: Phase, client: Client, round_: Round) -> int:
    """How many examples a client's phase processes in a round, each counted as often as it is used.

    Args:
        phase: a phase of a method.
        client: the client, for its number of examples.
        round_: the round, for its batch size.

    Returns:
        The number of examples. The FLOPs of the phase are this number times `phase.flops`.

    Example:
        >>> phase = Phase(name="train", trains=("params",), loss=lambda w, b: b, update=lambda w, g, t: w, epochs=2)
        >>> examples_seen(phase, Client(0, num_examples=10), Round(0, 1, 1.0, 4, Seeds(0)))
        20
    """
    return _amounts(phase, client, round_)[0]


def steps_taken(phase: Phase, client: Client, round_: Round) -> int:
    """How many steps a client's phase takes in a round.

    Args:
        phase: a phase of a method.
        client: the client, for its number of examples.
        round_: the round, for its batch size.

    Returns:
        The number of optimizer steps.

    Example:
        >>> phase = Phase(name="train", trains=("params",), loss=lambda w, b: b, update=lambda w, g, t: w, epochs=2)
        >>> steps_taken(phase, Client(0, num_examples=10), Round(0, 1, 1.0, 4, Seeds(0)))
        6
    """
    return _amounts(phase, client, round_)[1]


def _amounts(phase: Phase, client: Client, round_: Round) -> tuple[int, int]:
    """Examples and steps: the last batch of a pass may be smaller, and batches that do not fill a step are left out.

    With `round_.drop_last` all batches of a pass are whole. None is larger than the client's data, so there is one.
    """
    count = client.num_examples
    if not count or not phase.when(round_):
        return 0, 0
    size, batches = phase.batch_size(count, round_.batch_size), phase.batches_in_pass(count, round_)
    if round_.drop_last:
        count -= count % size
    read = phase.num_batches(client, batches)
    passes, rest = divmod(read, batches)
    return phase.repeats * (passes * count + rest * size), phase.repeats * (read // phase.batches_per_step)


def never(_: tuple[Client, ...]) -> bool:
    """The default of `ServerHalf.is_partial`: the whole model is trained, whoever takes part."""
    return False


@dataclass(frozen=True, kw_only=True)
class ServerHalf:
    """The server's side of a method: functions of a Server, which only the server holds.

    All are pure except `add` and `merge`, which may modify the sums that they are given.

    Args:
        init: `init(params, clients, seeds)` returns the Server before the first round.
        reply: `reply(server, client, round)` returns the message to a client.
        zero: `zero(server, round)` returns the Sum of a round before any update was added.
        add: `add(server, total, update)` returns the Sum with one more update. It may modify `total` in place, which is
            not used afterwards, so that memory does not grow with the number of clients. Updates are added in client
            order.
        step: `step(server, total, round)` returns the next Server; not called if nothing was added, but for
            `steps_always`.
        merge: `merge(one, other)` returns the Sum of everything added to either; None: the updates of a round must be
            added one by one.
        global_model: `global_model(server)` returns the shared model, where there is one. State.buffers are then those
            of the task's module.
        is_partial: `is_partial(clients)` says, of the clients that take part in training, whether some of the global
            model keeps its initial values, so that it is not a model to serve a client with.
        client_memory: the fields of Server that are dicts by client, with what the server keeps for each.
        needs_every_update: what the server knows of clients is wrong once one trains and its update is not added, so
            that a run in which all train and some are aggregated is refused. (A client whose update is lost is no such
            case: it keeps its old State.)
        comparable: clients' numbers mean the same, entry by entry, so that they can be judged by a robust mean.
        takes_mean: of the values in updates, `step` uses nothing but their mean over all updates, by `Update.weight`,
            and `add` takes values that cover every entry: what one client can change is then known.
        steps_always: a round without any update is a step as well.
    """

    init: Callable[[Tree, tuple[Client, ...], Seeds], Server]
    reply: Callable[[Server, Client, Round], Update]
    zero: Callable[[Server, Round], Sum]
    add: Callable[[Server, Sum, Update], Sum]
    step: Callable[[Server, Sum, Round], Server]
    merge: Callable[[Sum, Sum], Sum] | None = None
    global_model: Callable[[Server], Tree] | None = None
    is_partial: Callable[[tuple[Client, ...]], bool] = never
    client_memory: tuple[str, ...] = ()
    needs_every_update: bool = False
    comparable: bool = True
    takes_mean: bool = False
    steps_always: bool = False


@dataclass(frozen=True, kw_only=True)
class PeerHalf:
    """The peers' side of a method without a server: which models to request, and the shared model.

    Args:
        wants: `wants(state, round, available)` returns the peers whose messages this client requests, with `round`
            bound to the client; `available` are the other peers that have a message, in client order. None: its
            neighbours in the graph. A run with it has no graph, and `Cost.requests` says how many it requests at most.
        consensus: `consensus(inbox, round)` returns one model made of every peer's last message; each message says in
            which round it was made.
        mask: `mask(state)` returns the mask of the peer's next model, outside of which what arrives is cut away, and
            which a message with support KNOWN assumes; None: it has all entries.
        first: `first(params, client, seeds, round)` returns the message of a peer that has not trained, with `round`
            bound to it and the arguments of `init_client`. Neighbours mix it in the first round. It follows from the
            seed, so that they make it themselves and nothing is sent. None: nothing is mixed in the first round.
    """

    wants: Callable[[State, Round, tuple[int, ...]], tuple[int, ...]] | None = None
    consensus: Callable[[Inbox, Round], Tree] | None = None
    mask: Callable[[State], Tree] | None = None
    first: Callable[[Tree, Client, Seeds, Round], Update] | None = None


@dataclass(frozen=True, kw_only=True)
class Method:
    """A federated method as a value, made by a factory `name(task, config)`; see docs/add-a-method.md.

    A method with neither `server` nor `peer` trains each client alone. `inbox` is in client order and can be iterated
    once per call. A State has a field `buffers`: the shared model is evaluated with each client's own.

    Args:
        name: the row of the method, for messages.
        init_client: `init_client(params, buffers, client, seeds)` returns the State, which stays on the client between
            rounds.
        receive: `receive(state, inbox, probe, round)` returns the Work: the model to train, made of the messages.
        phases: the training, in order.
        finish: `finish(state, work, inbox, probe, round)` returns the new State and the Update to send (or None).
            The new State is provisional: the engine keeps the old one if the Update is lost.
        predict: `predict(work, inputs)` returns the outputs of the model that the client would deploy; each prediction
            depends on its own input alone. Executors capture it, so it follows the rules of a Phase's loss.
        cost: `cost(layout, client, round)` returns messages and FLOPs of one turn without training; it equals the
            ledger exactly.
        deploy: `deploy(work)` returns plain (params, buffers) of the task's module that predict the same, or an
            nn.Module where the client's network is a different one; None if plain weights cannot express the model.
        tune: the phase of final fine-tuning and of onboarding novel clients.
        server: the server's side.
        peer: the peers' side.
        trait: `trait(state)` returns what distinguishes clients in analysis: a mask (a bool tree) or a gate's scores (a
            vector).
        other_traits: further such functions, by the name that an analysis asks for them with.
        measure: `measure(work, round)` returns numbers and vectors about a turn that trained, by name, which are
            recorded in rounds that are evaluated. They are part of the simulation: not kept, not sent, not charged.
        adapt: `adapt(work, probe, round)` returns the Work to predict with, where a model is adapted to a client's data
            before use without training (Per-FedAvg's step, statistics); not called for models that were tuned.
        adapts_tuned: it is called for those, too: statistics must be those of the tuned weights.
        transductive: a prediction depends on its batch, so batches are never padded, and results say so.
        annealed: the options whose effect follows a run's progress (`round.total`): a run that is given more rounds
            later is not what it would have been with them from the start.
        model_travels: False if a client's model is on the client alone although there is a server, so that clients
            without memory would learn nothing.
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
    other_traits: Mapping[str, Callable[[State], Tree | Tensor]] = field(default_factory=dict)
    measure: Callable[[Work, Round], Mapping[str, Tensor]] | None = None
    adapt: Callable[[Work, Probe, Round], Work] | None = None
    adapts_tuned: bool = False
    transductive: bool = False
    annealed: tuple[str, ...] = ()
    model_travels: bool = True

    @property
    def learns_without_memory(self) -> bool:
        """Whether anything is learned by clients that keep no State between rounds."""
        return self.server is not None and self.model_travels

    @property
    def shared_point(self) -> str | None:
        """The point at which the shared model is evaluated, where there is such a model."""
        if self.server is not None and self.server.global_model is not None:
            return GLOBAL
        return CONSENSUS if self.peer is not None and self.peer.consensus is not None else None

    def message_sizes(self, layout: Layout) -> tuple[tuple[PartSize, ...], tuple[PartSize, ...]]:
        """The parts that a client receives and those that it sends, by `cost`; they do not depend on the round. A
        message that was decoded does not say which of them are changes."""
        cost = self.cost(layout, Client(0, 1, num_validation=1), Round(0, 1, 1.0, 1, Seeds(0)))
        return cost.down or (), cost.up or ()


# Everything that a method file needs of the contract, from one place.
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
