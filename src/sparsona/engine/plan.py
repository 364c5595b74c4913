"""The engine's options, the same for every method: how many rounds, who takes part, when models are evaluated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from sparsona.core.points import RECEIVED, point, select
from sparsona.core.round import Client, Round
from sparsona.core.seeds import Seeds, generator
from sparsona.core.targets import given_name
from sparsona.engine.availability import Availability, available_clients
from sparsona.engine.graphs import Graph
from sparsona.engine.pace import PerClient, is_late
from sparsona.engine.sampling import SAMPLERS, Draw, Sampler, call_sampler
from sparsona.learning.schedule import lr_schedule
from sparsona.robust import Attack


@dataclass(frozen=True)
class Plan:
    """Engine options of a run. Plain data."""

    rounds: int
    per_round: int
    batch_size: int
    seed: int
    lr_decay: float = 1.0  # the learning rate is multiplied by this every round
    lr_schedule: str = "decay"  # or another row of learning.schedule.SCHEDULES
    drop_last: bool = False  # the last batch of a pass over training data is left out if it is incomplete
    eval_every: int = 1
    evaluate: Literal["everyone", "participants"] = "everyone"  # who is tested before the end: `tests_everyone_after`
    eval_clients: int | None = None  # how many are tested, always the same ones; None: all that take part
    points: tuple[str, ...] = (RECEIVED,)
    tune_epochs: int = 0  # final tuning of every client; 0: none
    tune_lr_scale: float = 1.0  # the learning rate of tuning, as a share of the first round's
    tune_from: Literal["neighbours", "all"] = "neighbours"  # whose messages a peer mixes before it is tuned
    drop_rate: float = 0.0  # probability that a trained client's update is lost
    min_updates: int = 0  # that that a round needs to have an effect, where there is a server
    everyone_trains: bool = False  # all train every round; only `per_round` of them are aggregated
    stateless: bool = False  # clients keep no State between rounds
    num_novel: int = 0  # clients that take no part until the end
    starts_warm: bool = False  # the initial weights are another run's: a model to compare the personal ones with
    train_accuracy: bool = False  # evaluate the last models on training data as well
    guard: bool = False  # let each client keep the shared model, if it is better on its validation data
    novel_epochs: int | None = None  # of tuning, for novel clients alone; None: tune_epochs
    graph: Graph | None = None  # who receives from whom, among peers; None: as in the papers
    client_lr_scale: PerClient[float] = (1.0,)  # factors of clients' learning rates
    client_epochs: PerClient[int] = ()  # clients' own passes over their data in a round; empty: the method's
    speeds: str | PerClient[float] = ()  # relative speeds of clients; empty: all the same
    deadline: float | None = None  # of a round, in simulated time: engine/pace.py
    late: Literal["drop", "partial"] = "drop"  # what becomes of clients that would not make it
    sampler: str = "uniform"  # a row of engine.sampling.SAMPLERS, or a function from Python
    availability: Availability | None = None  # who is available; None: everybody always is
    turn_seconds: float | None = None  # of real time, after which a client loses its turn; None: no limit
    # What becomes of a client whose training diverges: it is left out of the round, or the run ends with an error.
    on_divergence: Literal["drop", "stop"] = "stop"
    divergence_factor: float | None = None  # times the median norm of a round's updates that one may be; None: any
    ends_after: int | None = None  # a run that stopped early ends after so many of its rounds
    is_resumed: bool = False  # rounds were played before, perhaps by an older version
    attack: Attack | None = None  # what some clients do in place of what they should; None: all are honest

    @property
    def seeds(self) -> Seeds:
        return Seeds(self.seed)

    def round_at(self, index: int) -> Round:
        """The round of this index as the server sees it."""
        lr_scale = lr_schedule(self.lr_schedule)(index, self.rounds, self.lr_decay)
        return Round(index, self.rounds, lr_scale, self.batch_size, self.seeds.at(index), drop_last=self.drop_last)

    @property
    def last(self) -> int:
        """How many rounds are played: all, but in a run that stopped early."""
        return self.rounds if self.ends_after is None else self.ends_after

    @property
    def tuning_round(self) -> Round:
        """The turn after the last round, with its own seeds and learning rate."""
        seeds = self.seeds.at(self.last)
        return Round(self.last, self.rounds, self.tune_lr_scale, self.batch_size, seeds, drop_last=self.drop_last)

    def tuning_epochs(self, is_novel: bool) -> int:
        """Epochs of final tuning for a client that took part, or for a novel one."""
        return self.tune_epochs if not is_novel or self.novel_epochs is None else self.novel_epochs

    def evaluates_after(self, completed: int) -> bool:
        """Whether models are evaluated after so many rounds: every `eval_every`, and the last ten, whose mean is
        reported."""
        return completed % self.eval_every == 0 or completed > self.rounds - 10

    def tests_everyone_after(self, completed: int) -> bool:
        """Whether all that are tested get a message to be evaluated after so many rounds.

        With `evaluate` "participants" only at the end: before, clients that train are evaluated on what they receive to
        train on (`start_points`).
        """
        return self.evaluates_after(completed) if self.evaluate == "everyone" else completed == self.rounds

    def points_after(self, completed: int) -> tuple[str, ...]:
        """The points evaluated in, and after, the round that completes so many; none if nothing is evaluated."""
        if not self.evaluates_after(completed):
            return ()
        at_round = select(self.points, "round") if self.tests_everyone_after(completed) else ()
        return (*select(self.points, "turn"), *at_round)


@dataclass(frozen=True)
class Participation:
    """Three different sets: who trains, whose update is aggregated, whose update is lost.

    `late` are those that would not make the deadline. `num_awake`: of the clients that take part in the run, how many
    are available; None: all always are.
    """

    trains: tuple[int, ...]
    aggregated: frozenset[int]
    dropped: frozenset[int]
    late: frozenset[int] = frozenset()
    num_awake: int | None = None


def novel_clients(plan: Plan, clients: Sequence[Client]) -> frozenset[int]:
    """Clients held out of training, drawn once."""
    return _novel(plan, len(clients))


def _novel(plan: Plan, num_clients: int) -> frozenset[int]:
    if not plan.num_novel:
        return frozenset()
    order = torch.randperm(num_clients, generator=generator(plan.seeds.shared("novel")))
    return frozenset(int(place) for place in order[: plan.num_novel])


def attackers(plan: Plan, num_clients: int) -> frozenset[int]:
    """Clients that attack, drawn once from those that take part: a share of them, and at least one."""
    if plan.attack is None:
        return frozenset()
    return _drawn_attackers(plan.attack, plan.seed, num_clients, _novel(plan, num_clients))


@lru_cache(maxsize=8)
def _drawn_attackers(attack: Attack, seed: int, num_clients: int, novel: frozenset[int]) -> frozenset[int]:
    order = torch.randperm(num_clients, generator=generator(Seeds(seed).shared("attackers"))).tolist()
    pool = [place for place in order if place not in novel]
    return frozenset(pool[: attack.count(len(pool))])


def tested_clients(plan: Plan, clients: Sequence[Client]) -> list[int]:
    """The clients that are tested after rounds: all that take part, are honest and have test data, or `eval_clients` of
    them, drawn once."""
    held_out = novel_clients(plan, clients) | attackers(plan, len(clients))
    pool = [place for place, client in enumerate(clients) if place not in held_out and client.is_tested]
    if plan.eval_clients is None or plan.eval_clients >= len(pool):
        return pool
    order = torch.randperm(len(pool), generator=generator(plan.seeds.shared("evaluate")))
    return sorted(pool[place] for place in order[: plan.eval_clients].tolist())


def turn_points(plan: Plan, clients: Sequence[Client], index: int) -> dict[int, tuple[str, ...]]:
    """The points at which clients are evaluated at the end of their turn in a round: of those that are tested."""
    points = select(plan.points, "turn")
    if not points or not plan.evaluates_after(index + 1):
        return {}
    return dict.fromkeys(tested_clients(plan, clients), points)


def start_points(plan: Plan, clients: Sequence[Client], index: int) -> dict[int, tuple[str, ...]]:
    """The points at which clients are evaluated when their turn in a round starts, before they train: of their own
    model, as the rounds before left it. A shared model would be a message of its own."""
    if plan.evaluate == "everyone" or not index or not plan.evaluates_after(index):
        return {}
    own = tuple(name for name in select(plan.points, "round") if point(name).model == "own")
    return dict.fromkeys(tested_clients(plan, clients), own)


def training_points(plan: Plan, clients: Sequence[Client], index: int) -> dict[int, tuple[str, ...]]:
    """All points at which clients are evaluated in their turn in a round, before and after they train."""
    first, last = start_points(plan, clients, index), turn_points(plan, clients, index)
    return {client: (*first.get(client, ()), *last.get(client, ())) for client in {**first, **last}}


def participation(
    plan: Plan,
    clients: Sequence[Client],
    index: int,
    sampler: Sampler | None = None,
    losses: Mapping[int, float] | None = None,
) -> Participation:
    """Who takes part in a round. Depends on the seed and the round alone, so every method has the same clients.

    Args:
        plan: the options of the run.
        clients: all clients.
        index: the round.
        sampler: a function from Python, where the plan says that there is one.
        losses: the last training losses of clients, for the sampler that chooses by them: the one that depends on what
            was learned.

    Returns:
        Who trains, and whose update counts. Where fewer clients are available than are wanted, all that are.
    """
    held_out = novel_clients(plan, clients)
    pool: Sequence[int] = range(len(clients))  # a client's index is its position
    if held_out:
        pool = [place for place in pool if place not in held_out]
    members, num_awake = pool, None
    if plan.availability is not None:
        present = available_clients(plan.availability, len(clients), index, plan.seeds)
        pool = [place for place in pool if place in present]
        num_awake = len(pool)
    seeds = plan.seeds.at(index)
    random = generator(seeds.shared("sample"))
    draw = Draw(plan.per_round, clients, members, pool, index * plan.per_round, random, losses or {})
    if given_name(plan.sampler) is not None:
        assert sampler is not None, "a sampler from Python is passed again"
        sampled = frozenset(call_sampler(sampler, plan.round_at(index), draw))
    else:
        sampled = frozenset(SAMPLERS[plan.sampler].choose(draw))
    trains = tuple(pool) if plan.everyone_trains else tuple(sorted(sampled))
    dropped: frozenset[int] = frozenset()
    if plan.drop_rate:
        lost = torch.rand(len(trains), generator=generator(seeds.shared("drop"))) < plan.drop_rate
        dropped = frozenset(client for client, gone in zip(trains, lost.tolist(), strict=True) if gone)
    late = frozenset(client for client in trains if is_late(plan, clients[client]))
    if plan.late == "drop":
        dropped |= late
    return Participation(trains, sampled - dropped, dropped, late, num_awake)
