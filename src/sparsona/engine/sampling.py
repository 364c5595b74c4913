"""Which of the clients that are there take part in a round. Imported without torch.

A sampler is a row of `SAMPLERS`, or a function `sampler(round, clients, available, generator)` that returns indices.
All but `loss` choose by the seed and the round alone, so that every method has the same clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparsona.core.errors import SparsonaError
from sparsona.core.round import Client, Round
from sparsona.core.targets import given_name, is_usable

if TYPE_CHECKING:
    from torch import Generator

# (round, all clients, those that are there in client order, a generator) -> the indices of those that take part
Sampler = Callable[[Round, Sequence[Client], Sequence[int], Any], Iterable[int]]
CANDIDATES = 2  # of `loss`: so many times as many clients are drawn as are chosen


@dataclass(frozen=True)
class Draw:
    """What a sampler chooses from.

    Args:
        num: how many are wanted; as many as are there, if those are fewer.
        clients: all clients.
        members: the indices of those that take part in the run, in order.
        available: the indices of those that can be chosen, in order.
        position: how many were wanted in the rounds before, all together.
        random: the generator of the round.
        losses: of each client that was asked: `known_losses`.
    """

    num: int
    clients: Sequence[Client]
    members: Sequence[int]
    available: Sequence[int]
    position: int
    random: Generator
    losses: Mapping[int, float]


@dataclass(frozen=True)
class SamplerRow:
    """A row of `SAMPLERS`."""

    text: str
    choose: Callable[[Draw], Iterable[int]]


def _uniform(draw: Draw) -> Iterable[int]:
    import torch

    order = torch.randperm(len(draw.available), generator=draw.random)
    return [draw.available[int(place)] for place in order[: draw.num]]


def _by_size(draw: Draw) -> list[int]:
    return _weighted(draw, draw.num)


def _weighted(draw: Draw, num: int) -> list[int]:
    """So many different clients, one after the other in proportion to their training examples."""
    import torch

    if not draw.available:
        return []
    sizes = torch.tensor([max(draw.clients[one].num_examples, 1) for one in draw.available], dtype=torch.float64)
    # The smallest of exponential draws with these rates, in order: torch.multinomial has a limit of 2**24 clients.
    times = -torch.log1p(-torch.rand(len(sizes), generator=draw.random, dtype=torch.float64)) / sizes
    return [draw.available[int(place)] for place in times.argsort()[:num]]


def _round_robin(draw: Draw) -> list[int]:
    start = draw.position % len(draw.members)
    there = set(draw.available)
    # From the place that was reached, in client order; those that are not there are passed over.
    order = [*draw.members[start:], *draw.members[:start]]
    return [client for client in order if client in there][: draw.num]


def _by_loss(draw: Draw) -> list[int]:
    candidates = _weighted(draw, CANDIDATES * draw.num)
    unknown = float("inf")  # a client that was never asked comes first
    return sorted(candidates, key=lambda client: -draw.losses.get(client, unknown))[: draw.num]


def known_losses(before: Mapping[int, float], asked: Mapping[int, float | None]) -> dict[int, float]:
    """Clients' losses after a round, for the sampler that goes by them.

    One that reported none has the lowest of the others': were it unknown it would be asked again at once, and so would
    a client that is gone, in nearly every round. As the others learn, its turn comes again.

    Args:
        before: the losses before the round.
        asked: those that clients of the round reported; None, or not a finite number: none.
    """
    reported = {client: loss for client, loss in asked.items() if loss is not None and is_usable(loss)}
    others = {client: loss for client, loss in before.items() if client not in asked} | reported
    lowest = min(others.values(), default=0.0)
    return {**others, **dict.fromkeys(sorted(asked.keys() - reported.keys()), lowest)}


SAMPLERS = {
    "uniform": SamplerRow("each with the same probability", _uniform),
    "size": SamplerRow("with probability by training examples", _by_size),
    "round-robin": SamplerRow("one after the other", _round_robin),
    "loss": SamplerRow(
        f"of {CANDIDATES} times as many, drawn by size, those whose last training loss is highest (power of choice)",
        _by_loss,
    ),
}


def check_sampler(name: str) -> str:
    """Raise SparsonaError for a name that is no sampler's."""
    if name not in SAMPLERS and given_name(name) is None:
        raise SparsonaError(
            f"sampler '{name}'",
            expected=f"one of {', '.join(SAMPLERS)}; from Python also a function",
            hint="for example --set sampler=size",
        )
    return name


def call_sampler(sampler: Sampler, round_: Round, draw: Draw) -> list[int]:
    """What a function from Python chooses, checked: the first `draw.num` of those that it returns."""
    found = sampler(round_, draw.clients, tuple(draw.available), draw.random)
    try:
        chosen = [int(one) for one in found]
    except (TypeError, ValueError):
        raise SparsonaError(
            f"the sampler returned {type(found).__name__} in {round_.title}",
            expected="indices of clients",
            hint="return a list of some of `available`",
        ) from None
    there = set(draw.available)
    wrong = [one for one in chosen if one not in there]
    if wrong or len(set(chosen)) < len(chosen):
        what = f"client {wrong[0]}, which is not there" if wrong else "a client twice"
        raise SparsonaError(
            f"the sampler chose {what} in {round_.title}",
            expected="different clients of those in `available`",
            hint="choose among `available`: clients that are not in it cannot be sampled",
        )
    return chosen[: draw.num]
