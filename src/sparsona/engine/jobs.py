"""Jobs and outcomes, which can be sent to another process: messages in, messages out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from sparsona.core.errors import SparsonaError
from sparsona.core.method import Round, State, Tree, Update, Work
from sparsona.core.update import SERVER, dense
from sparsona.engine.evaluate import Evaluation
from sparsona.engine.profiler import OFF, Clock
from sparsona.wire.codec import decode, encode

SHARED = "shared"  # the part of the message that holds a shared model to be evaluated
# Encoded, or the update itself where sender and receiver share memory: then its bytes are only counted.
Message = bytes | Update
# How an executor reports what its start-up is doing ("starting 2 workers", "compiling"); "" when that is over. It may
# be called repeatedly, at any time: a progress bar shows the last text until a round or an outcome is reported.
Report = Callable[[str], None]


@dataclass
class Tally:
    """Counts of a turn: examples, steps and FLOPs."""

    examples: int = 0
    steps: int = 0
    loss: float = 0.0  # mean over the examples of the last phase that trained
    train_flops: int = 0
    search_flops: int = 0
    measures: dict[str, tuple[float, ...]] = field(default_factory=dict)  # what the method measured of the turn


@dataclass(frozen=True)
class Job:
    """What one client is to do: train, be evaluated, or tune.

    The server's side makes jobs without a State; the client's side adds its own. `state` None: the initial State.
    """

    do: Literal["train", "evaluate", "tune"]
    client: int
    round: Round
    messages: tuple[Message, ...]
    state: State | None = None
    points: tuple[str, ...] = ()
    shared_model: Tree | None = None  # for points of a shared model
    epochs: int = 0  # of tuning
    is_aggregated: bool = True  # False: it trains, and nobody waits for its update
    # Stays with the sender: makes the same job with masks in its messages, for a client that does not have them.
    resend: Callable[[], Job] | None = None

    def again(self) -> Job:
        """The same job with the masks in its messages."""
        assert self.resend is not None
        return replace(self.resend(), state=self.state, resend=None, is_aggregated=self.is_aggregated)

    def packed(self) -> Job:
        """The job for another process: messages as bytes, and without what stays with the sender."""
        messages = tuple(encode(m) if isinstance(m, Update) else m for m in self.messages)
        return replace(self, messages=messages, resend=None)


@dataclass(frozen=True)
class Outcome:
    """The result of a job. `lacks_mask`: the message assumed a mask that the client does not have; nothing was done.

    `state` and `work` stay with the client: `public` is what a server may see. `failure`: why there is no result that
    could be used, of a client elsewhere: it did not answer in time, or its answer was refused. `sent`: it was sent the
    job. `note`: what else is to be recorded of an outcome that can be used. `withheld`: points whose result the client
    does not tell, for it would be one of a few examples. `num_bytes`: of the answer; None: nothing was sent. `update`:
    what is in the message, where that was read already.
    """

    client: int
    lacks_mask: bool = False
    state: State | None = None
    message: Message | None = None
    work: Work | None = None
    tally: Tally = field(default_factory=Tally)
    evaluations: tuple[Evaluation, ...] = ()
    failure: str = ""
    sent: bool = True
    note: str = ""
    withheld: tuple[str, ...] = ()
    num_bytes: int | None = None
    update: Update | None = None

    @property
    def public(self) -> Outcome:
        """The outcome without what stays with the client."""
        return replace(self, state=None, work=None)


class Executor(Protocol):
    """Runs jobs, and yields their outcomes in the order of the jobs.

    `encodes`: messages of training and tuning are bytes; otherwise updates, which stay on their device.
    """

    encodes: bool

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]: ...

    def close(self) -> None: ...


def open_message(message: Message, clock: Clock = OFF) -> Update:
    """The update inside a message."""
    if isinstance(message, Update):
        return message
    with clock.measure("decode"):
        return decode(message)


def shared_update(model: Tree, index: int) -> Update:
    """The message with which a shared model goes to a client, to be evaluated in the round of this index."""
    return Update(SERVER, index, 1.0, {SHARED: dense(model)})


def settle(job: Job, outcome: Outcome) -> Job | None:
    """The job to run again if the client lacked a mask, or None if the outcome is final."""
    if not outcome.lacks_mask:
        return None
    if job.resend is None:
        raise unreadable(job)
    return job.again()


def unreadable(job: Job, label: str = "") -> SparsonaError:
    """The error for a client, called `label`, that cannot read a message with all masks in it."""
    return SparsonaError(
        f"client {label or job.client} cannot read its message of {job.round.title}, which has all masks in it",
        expected="a method whose receive() accepts a mask in the message",
    )
