"""What differs from client to client in training: learning rates, epochs, speeds, and who makes the deadline.

Time is simulated: it follows from options, the seed and amounts of data, never from a clock, and it is the same for
every method. Imported without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol, TypeVar

from sparsona.core import spec
from sparsona.core.errors import SparsonaError
from sparsona.core.round import Client
from sparsona.core.seeds import Seeds, generator

T = TypeVar("T")
# One value for each client, in turn, or by client; those that are not named have the usual one.
PerClient = tuple[T, ...] | Mapping[int, T]
LOGNORMAL = "lognormal:SIGMA"


class Pace(Protocol):
    """The part of a plan that this module reads."""

    @property
    def seeds(self) -> Seeds: ...
    @property
    def client_lr_scale(self) -> PerClient[float]: ...
    @property
    def client_epochs(self) -> PerClient[int]: ...
    @property
    def speeds(self) -> str | PerClient[float]: ...
    @property
    def deadline(self) -> float | None: ...
    @property
    def late(self) -> Literal["drop", "partial"]: ...


def spread(values: PerClient[T], num: int, usual: T) -> list[T]:
    """The value of each client.

    Args:
        values: a sequence, which is repeated over clients, or values by client.
        num: how many clients there are.
        usual: the value of clients that have none.

    Returns:
        A list with an entry for each client.

    Example:
        >>> spread((1, 5), 3, 2), spread({1: 5}, 3, 2)
        ([1, 5, 1], [2, 5, 2])
    """
    return [value_of(values, client, usual) for client in range(num)]


def value_of(values: PerClient[T], client: int, usual: T) -> T:
    """The value of one client, as `spread` has it."""
    if isinstance(values, Mapping):
        return values.get(client, usual)
    return values[client % len(values)] if values else usual


def read_sigma(text: str) -> float:
    """The sigma of `lognormal:SIGMA`; SparsonaError for any other text."""
    found = spec.read("speeds", text, (LOGNORMAL,))
    sigma = spec.as_number(found.args[0]) if len(found.args) == 1 and not found.options else None
    if sigma is None or not 0 <= sigma <= 10:
        raise found.wrong("lognormal:SIGMA with a sigma from 0 to 10", "--set speeds=lognormal:0.5")
    return sigma


def client_speeds(speeds: str | PerClient[float], num: int, seeds: Seeds) -> list[float]:
    """The relative speed of each client; drawn once from the seed where a text says so."""
    if not isinstance(speeds, str):
        return spread(speeds, num, 1.0)
    import torch

    normal = torch.randn(num, generator=generator(seeds.shared("speeds")), dtype=torch.float64)
    return torch.exp(read_sigma(speeds) * normal).tolist()


def with_conditions(plan: Pace, clients: Sequence[Client]) -> Sequence[Client]:
    """The clients with their learning rates, epochs and simulated times; the same object where they have them already.

    A client's turn takes its share of the work divided by its speed, where a share of 1 is the mean amount of data
    (times epochs, where clients have their own): a client of speed 1 that has it takes 1.
    """
    num = len(clients)
    if plan.client_lr_scale in ((), (1.0,)) and not plan.client_epochs and not plan.speeds and plan.deadline is None:
        return clients
    for name in ("client_lr_scale", "client_epochs", "speeds"):
        check_clients(name, getattr(plan, name), num)
    scales, epochs = spread(plan.client_lr_scale, num, 1.0), spread(plan.client_epochs, num, None)
    known = [one for one in epochs if one is not None]
    # Clients without epochs of their own have the method's, which all methods must not share: they count as the mean.
    usual = sum(known) / len(known) if known else 1.0
    work = [max(one.num_examples, 1) * (own or usual) for one, own in zip(clients, epochs, strict=True)]
    mean = sum(work) / num
    speeds = client_speeds(plan.speeds, num, plan.seeds)
    is_timed = bool(plan.speeds) or plan.deadline is not None
    found = []
    for client, scale, own, amount, speed in zip(clients, scales, epochs, work, speeds, strict=True):
        time, share = (amount / mean / speed if is_timed else 0.0), 1.0
        if plan.deadline is not None and plan.late == "partial" and time > plan.deadline:
            share = plan.deadline / time
        found.append(replace(client, lr_scale=scale, epochs=own, share=share, time=time))
    return clients if found == list(clients) else tuple(found)


def check_clients(name: str, values: Any, num: int) -> None:
    """Raise SparsonaError if values are given for clients that do not exist."""
    if isinstance(values, Mapping) and (unknown := [client for client in values if not 0 <= client < num]):
        raise SparsonaError(
            f"{name} of client {unknown[0]}", expected=f"clients from 0 to {num - 1}", hint="correct its number"
        )


def is_late(plan: Pace, client: Client) -> bool:
    """Whether a client would not finish its turn before the deadline."""
    return plan.deadline is not None and client.time > plan.deadline


def round_time(plan: Pace, trained: Sequence[Client]) -> float | None:
    """The simulated time of a round: until the slowest of its clients has answered, or the deadline.

    Returns:
        The time; None where none is simulated.
    """
    if not plan.speeds and plan.deadline is None:
        return None
    slowest = max((client.time for client in trained), default=0.0)
    return slowest if plan.deadline is None else min(slowest, plan.deadline)
