"""Work that can be handed to a process: messages and state in, messages and state out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sparsona.core.errors import MaskMismatchError, SparsonaError
from sparsona.core.method import Client, Method, Round, State, Tree, Update, Work
from sparsona.core.task import Task
from sparsona.core.tree import awake, map_parts
from sparsona.data.federation import Federation
from sparsona.engine.clock import OFF, Clock
from sparsona.engine.evaluate import Evaluation, evaluate
from sparsona.engine.plan import Plan
from sparsona.engine.shelf import Shelf
from sparsona.engine.turn import ClientProbe, Tally, client_turn, tuning_turn
from sparsona.wire.codec import decode, encode

T = TypeVar("T")
NOT_OWN = ("global", "consensus", "start")  # points at which a model is looked at that is one of all
# Encoded, or as it is where sender and receiver share a memory: then only its bytes are counted.
Message = bytes | Update
# How an executor says what its start-up is doing ("starting 2 workers", "compiling"); "" when that is over. It may be
# called at any time, also again: whoever shows progress shows the last text until a round or an outcome is told.
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Setting:
    """Everything a turn needs besides its job; the same in the parent and in every worker process.

    Models, states and the data live on `device`. `clock` measures where the time goes; it is off unless asked for.
    """

    task: Task
    make_method: Callable[[Task], Method]
    federation: Federation
    plan: Plan
    capacities: tuple[float, ...] = (1.0,)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: str = "fp32"
    clock: Clock = OFF
    method: Method = field(init=False)
    clients: tuple[Client, ...] = field(init=False)
    params: Tree = field(init=False)
    buffers: Tree = field(init=False)
    shelf: Shelf = field(init=False)  # where what clients keep lies between their turns
    _placed: WeakKeyDictionary[Tree, Tree] = field(init=False, default_factory=WeakKeyDictionary)

    def __post_init__(self) -> None:
        params, buffers = self.task.init(self.plan.seeds.shared("model"))
        for name, value in (
            ("method", self.make_method(self.task)),
            ("clients", self.federation.clients(self.capacities)),
            ("federation", self.federation.to(self.device)),
            ("params", self.place(params)),
            ("buffers", self.place(buffers)),
            ("shelf", Shelf(self.device)),
        ):
            object.__setattr__(self, name, value)
        self.clock.attach(self.device)

    @property
    def largest_batch(self) -> int:
        """As many examples as a batch can have."""
        return min(self.plan.batch_size, max(client.num_examples for client in self.clients))

    @property
    def encodes(self) -> bool:
        """Whether one client at a time sends bytes: on a GPU they would travel to the host and back."""
        return self.device.type == "cpu"

    def place(self, value: T) -> T:
        """A State, Server, Work or tree with its tensors on the device."""
        if self.device.type == "cpu":
            return value  # the very same trees, which remember what was found out about them
        return map_parts(self._place, value)

    def _place(self, _path: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tree):
            return leaf.to(self.device)
        # A tree that many clients share is one tree on the device, too.
        if leaf not in self._placed:
            flat = leaf.flat
            moved = flat.to(self.device)
            if moved is flat:
                return leaf
            self._placed[leaf] = Tree(leaf.layout, moved, leaf.known)
        return self._placed[leaf]

    def fresh_state(self, client: int) -> State:
        """A client's State before its first turn."""
        with self.clock.measure("init"):
            made = self.method.init_client(self.params, self.buffers, self.clients[client], self.plan.seeds.of(client))
            return awake(self.place(made))


@dataclass(frozen=True)
class Job:
    """One client's part: train, be evaluated, or tune. `state` None: the client's initial State."""

    do: Literal["train", "evaluate", "tune"]
    client: int
    round: Round
    messages: tuple[Message, ...]
    state: State | None
    points: tuple[str, ...] = ()
    global_model: Tree | None = None
    epochs: int = 0  # of tuning
    # Stays in the parent: the same job with the masks sent along, for a client that does not hold them.
    resend: Callable[[], Job] | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of a job. `lacks_mask`: the message assumed a mask the client does not hold; nothing was done."""

    client: int
    lacks_mask: bool = False
    state: State | None = None
    message: Message | None = None
    work: Work | None = None
    tally: Tally = field(default_factory=Tally)
    evaluations: tuple[Evaluation, ...] = ()


class Executor(Protocol):
    """Runs jobs, one way or another, and gives their outcomes in the order of the jobs.

    `encodes`: messages go in and out as bytes; otherwise as updates, which stay where they are.
    """

    encodes: bool

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]: ...

    def close(self) -> None: ...


def perform(setting: Setting, job: Job) -> Outcome:
    """Do a job. Pure: the same setting and job give the same outcome in any process."""
    try:
        return _perform(setting, job)
    except MaskMismatchError:
        return Outcome(job.client, lacks_mask=True)


def settle(job: Job, outcome: Outcome) -> Job | None:
    """The job to do instead where the client lacked a mask, or None if the outcome stands."""
    if not outcome.lacks_mask:
        return None
    if job.resend is None:
        raise SparsonaError(
            f"client {job.client} cannot read its message of round {job.round.index}, masks and all",
            expected="a method whose receive() takes a mask that is sent along",
        )
    return job.resend()


def opened(message: Message, clock: Clock = OFF) -> Update:
    """The update inside a message."""
    if isinstance(message, Update):
        return message
    with clock.measure("decode"):
        return decode(message)


def _perform(setting: Setting, job: Job) -> Outcome:
    method, task, data = setting.method, setting.task, setting.federation
    round_ = job.round.on(setting.clients[job.client])
    clock = setting.clock
    inbox = tuple(opened(message, clock) for message in job.messages)
    state = setting.fresh_state(job.client) if job.state is None else awake(job.state)
    own = (data.examples(job.client, "train"), data.examples(job.client, "validation"))

    def seen(work: Work) -> tuple[Evaluation, ...]:
        if not own_points(job):
            return ()
        with clock.measure("evaluate"):
            return at_points(job, examine(setting, job.client, work))

    if job.do == "train":
        new_state, update, work, tally = client_turn(method, task, state, inbox, *own, round_, clock)
        sent: Message | None = update
        if update is not None and setting.encodes:
            with clock.measure("encode"):
                sent = encode(update)
        return Outcome(job.client, state=new_state, message=sent, tally=tally, evaluations=seen(work))
    if job.do == "tune":
        work, tally = tuning_turn(method, task, state, inbox, *own, round_, job.epochs, clock)
        return Outcome(
            job.client, work=work, tally=tally, evaluations=seen(work) + look_further(setting, job, state, work)
        )
    # Evaluation is ours, not the client's: what it looks at here is on nobody's bill.
    with clock.measure("evaluate"):
        received = method.receive(state, inbox, ClientProbe(task, *own, round_, Tally()), round_)
        found = at_points(job, examine(setting, job.client, received)) if own_points(job) else ()
        return Outcome(job.client, evaluations=found + look_further(setting, job, state, received))


def own_points(job: Job) -> list[str]:
    """The points at which the client's own model is tested: one and the same model within a job."""
    return [point for point in job.points if "/" not in point and point not in NOT_OWN]


def at_points(job: Job, found: Evaluation) -> tuple[Evaluation, ...]:
    """What a client's own model did, at each of these points."""
    return tuple(replace(found, point=point) for point in own_points(job))


def examine(setting: Setting, client: int, work: Work) -> Evaluation:
    """A client's own model on its test data, at no point yet."""
    test = setting.federation.examples(client, "test")
    return evaluate(client, "", partial(setting.method.predict, work), setting.task, test)


def needs_work(job: Job) -> bool:
    """Whether `look_further` looks at the client's own model."""
    return any("/" in point and point.partition("/")[0] not in NOT_OWN for point in job.points)


def look_further(setting: Setting, job: Job, state: State, work: Work | None) -> tuple[Evaluation, ...]:
    """What is no `own_points`: a model of all, with this client's buffers, or other data than the test data."""
    buffers, task, own = getattr(state, "buffers", setting.buffers), setting.task, own_points(job)
    found = []
    for point in job.points:
        if point in own:
            continue
        name, _, part = point.partition("/")
        predict = partial(setting.method.predict, work)
        if name in NOT_OWN:
            model = setting.params if name == "start" else job.global_model
            assert model is not None
            predict = partial(_predict_plainly, task, model, buffers)
        examples = setting.federation.examples(job.client, part or "test")
        with setting.clock.measure("evaluate"):
            found.append(evaluate(job.client, point, predict, task, examples))
    return tuple(found)


def _predict_plainly(task: Task, model: Tree, buffers: Tree, inputs: Tensor) -> Tensor:
    return task.forward(model, buffers, inputs, False)[0]
