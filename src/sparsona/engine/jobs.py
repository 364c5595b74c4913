"""Work that can be handed to a process: messages in, messages out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from sparsona.core.errors import SparsonaError
from sparsona.core.method import Round, State, Tree, Update, Work
from sparsona.engine.evaluate import Evaluation
from sparsona.engine.profiler import OFF, Clock
from sparsona.wire.codec import decode, encode

# Encoded, or as it is where sender and receiver share a memory: then only its bytes are counted.
Message = bytes | Update
# How an executor reports what its start-up is doing ("starting 2 workers", "compiling"); "" when that is over. It may
# be called at any time, also again: a progress bar shows the last text until a round or an outcome is reported.
Tell = Callable[[str], None]


@dataclass
class Tally:
    """What a turn did, counted as it happened."""

    examples: int = 0
    steps: int = 0
    loss: float = 0.0  # mean over the examples of the last phase that trained
    train_flops: int = 0
    search_flops: int = 0


@dataclass(frozen=True)
class Job:
    """What one client is asked to do: train, be evaluated, or tune.

    The server's side makes jobs without a State; the client's side adds its own. `state` None: the initial State.
    """

    do: Literal["train", "evaluate", "tune"]
    client: int
    round: Round
    messages: tuple[Message, ...]
    state: State | None = None
    points: tuple[str, ...] = ()
    shared_model: Tree | None = None  # what points of a shared model evaluate
    epochs: int = 0  # of tuning
    # Stays with the sender: the same job with the masks sent along, for a client that does not hold them.
    resend: Callable[[], Job] | None = None

    def again(self) -> Job:
        """The same job with the masks sent along."""
        assert self.resend is not None
        return replace(self.resend(), state=self.state, resend=None)

    def packed(self) -> Job:
        """The job as it goes to another process: messages as bytes, and nothing that stays with the sender."""
        messages = tuple(encode(m) if isinstance(m, Update) else m for m in self.messages)
        return replace(self, messages=messages, resend=None)


@dataclass(frozen=True)
class Outcome:
    """What came of a job. `lacks_mask`: the message assumed a mask the client does not hold; nothing was done.

    `state` and `work` stay with the client: what a server may see is `public`.
    """

    client: int
    lacks_mask: bool = False
    state: State | None = None
    message: Message | None = None
    work: Work | None = None
    tally: Tally = field(default_factory=Tally)
    evaluations: tuple[Evaluation, ...] = ()

    @property
    def public(self) -> Outcome:
        """What a client's answer tells the server."""
        return replace(self, state=None, work=None)


class Executor(Protocol):
    """Runs jobs, one way or another, and gives their outcomes in the order of the jobs.

    `encodes`: messages of training and tuning go in and out as bytes; otherwise as updates, which stay where they are.
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


def settle(job: Job, outcome: Outcome) -> Job | None:
    """The job to do instead where the client lacked a mask, or None if the outcome stands."""
    if not outcome.lacks_mask:
        return None
    if job.resend is None:
        raise unreadable(job)
    return job.again()


def unreadable(job: Job) -> SparsonaError:
    """A client cannot read a message that has all masks in it."""
    return SparsonaError(
        f"client {job.client} cannot read its message of round {job.round.index}, masks and all",
        expected="a method whose receive() takes a mask that is sent along",
    )
