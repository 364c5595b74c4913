"""A federation between two rounds, and the record of each round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sparsona.core.errors import DivergedError, SparsonaError
from sparsona.core.method import Client, Server, State, Update
from sparsona.core.points import point
from sparsona.engine.context import ServerContext
from sparsona.engine.evaluate import Evaluation
from sparsona.engine.failures import DIVERGED, WITHHELD
from sparsona.engine.jobs import Message, Outcome, Tally, open_message
from sparsona.engine.pace import round_time
from sparsona.engine.plan import Participation
from sparsona.engine.profiler import Clock
from sparsona.wire.codec import encode
from sparsona.wire.format import message_size, sizes_of
from sparsona.wire.ledger import Traffic


@dataclass(frozen=True)
class Population:
    """The whole federation between two rounds: the server, and each client that has trained.

    `messages` holds each peer's last message, where there is no server: other peers may receive it later. `losses` has
    clients' last training losses, where they are sampled by them (`sampling.known_losses`).
    """

    server: Server | None
    states: dict[int, State]
    messages: dict[int, Message] = field(default_factory=dict)
    losses: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """What one client did in one round. A peer that only sent its last message did not train.

    `failure`: why a client elsewhere was not heard, and then it is `dropped` and what it did is not known; that its
    training diverged, and then it is `dropped` and what it did is without effect; or what else happened to it.
    """

    client: int
    tally: Tally
    traffic: Traffic
    aggregated: bool
    dropped: bool
    trained: bool = True
    failure: str = ""


@dataclass
class EvaluationLog:
    """What evaluations took besides training, and who was not heard in them.

    `down` are the bytes of messages that were sent for them, `up` those of the answers: None where none was encoded, as
    in a simulation. `failures`: why a client has no result, or what else happened to it.
    """

    jobs: int = 0
    down: int = 0
    up: int | None = None
    failures: dict[int, str] = field(default_factory=dict)

    def add(self, outcome: Outcome, down: int) -> None:
        """Add an outcome, and the bytes that were sent for it."""
        self.jobs += 1
        self.down += down if outcome.sent else 0
        if outcome.num_bytes is not None:
            self.up = (self.up or 0) + outcome.num_bytes
        self.note(outcome)

    def note(self, outcome: Outcome) -> None:
        """Add what an outcome says of its evaluations alone."""
        reasons = (outcome.failure, outcome.note, WITHHELD if outcome.withheld else "")
        if found := "; ".join(filter(None, reasons)):
            self.failures[outcome.client] = found


@dataclass
class RoundRecord:
    """What happened in one round.

    `evaluations` are of models after the round, and `log` is about those that took messages of their own. `earlier` are
    of models that clients received in the round to train on: evaluations after the rounds before it. `withheld` are
    the clients that did not tell these. `time` is the simulated one, `num_awake` how many clients were available, and
    `num_late` how many of those that trained would not have made the deadline; None: not simulated.
    """

    index: int
    lr_scale: float
    turns: list[Turn] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    log: EvaluationLog = field(default_factory=EvaluationLog)
    earlier: list[Evaluation] = field(default_factory=list)
    withheld: list[int] = field(default_factory=list)
    time: float | None = None
    num_awake: int | None = None
    num_late: int | None = None

    def add_evaluations(self, outcome: Outcome) -> None:
        """Sort the evaluations of a turn: before training, and after it."""
        for found in outcome.evaluations:
            (self.earlier if is_earlier(found.point) else self.evaluations).append(found)
        if any(map(is_earlier, outcome.withheld)):
            self.withheld.append(outcome.client)
        if not all(map(is_earlier, outcome.withheld)):
            self.log.failures[outcome.client] = WITHHELD


def round_record(context: ServerContext, index: int, who: Participation) -> RoundRecord:
    """The record of a round before anything happened in it."""
    plan = context.plan
    return RoundRecord(
        index,
        plan.round_at(index).lr_scale,
        time=round_time(plan, [context.clients[client] for client in who.trains]),
        num_awake=who.num_awake,
        num_late=None if plan.deadline is None else len(who.late),
    )


def is_earlier(name: str) -> bool:
    """Whether an evaluation of a turn is of the model as it was before that."""
    return point(name).when == "round"


def not_heard(outcome: Outcome, traffic: Traffic) -> Turn:
    """The turn of a client that was sent a job and did not answer, whose answer was refused, or that diverged."""
    charged = traffic if outcome.sent else Traffic()
    return Turn(outcome.client, outcome.tally, charged, False, True, trained=False, failure=outcome.failure)


def diverged(outcome: Outcome, error: DivergedError) -> Outcome:
    """The outcome of a turn whose update cannot be used: what it spent is charged, and nothing of it is kept."""
    return replace(outcome, message=None, tally=replace(outcome.tally, examples=0, loss=0.0), failure=error.what)


def without_effect(record: RoundRecord, why: str) -> RoundRecord:
    """The record of a round that changed neither the server nor any client."""
    turns = [
        turn if turn.failure else replace(turn, aggregated=False, dropped=True, failure=why) for turn in record.turns
    ]
    return replace(record, turns=turns)


def read_update(outcome: Outcome, client: Client, index: int, clock: Clock) -> Update:
    """The update of a client's turn in this round; a wrong sender or non-finite values raise SparsonaError."""
    assert outcome.message is not None
    update = open_message(outcome.message, clock) if outcome.update is None else outcome.update
    if (update.sender, update.round) != (outcome.client, index):
        raise SparsonaError(
            f"client {client.label}'s message of round {index + 1} says client {update.sender}, "
            f"round {update.round + 1}",
            expected="its own sender and round",
            hint="make updates with core.update.message(round, ...)",
        )
    check_finite(update, client)
    return update


def num_bytes(message: Message) -> int:
    """The bytes of a message. Those of one that is not encoded follow from its parts, unless it is to be compact."""
    if isinstance(message, Update) and message.compact:
        message = encode(message)
    return len(message) if isinstance(message, bytes) else message_size(sizes_of(message))


def check_finite(update: Update, client: Client) -> None:
    """Raise DivergedError for values, and SparsonaError for a weight, that would make the mean non-finite."""
    for name, part in update.parts.items():
        if not part.is_finite():
            raise DivergedError(
                f"{DIVERGED}client {client.label}'s update in round {update.round + 1} has values in '{name}' that are "
                "not finite",
                expected="finite numbers",
                hint="lower the learning rate (--lr), clip gradients (--set clip_norm=1), or check its data",
            )
    if not 0 <= update.weight < float("inf"):
        raise SparsonaError(f"client {client.label}'s update claims weight {update.weight}", expected="0 or more")
