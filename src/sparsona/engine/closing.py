"""The end of a run, whoever played its rounds: novel clients, final tuning, last looks, and what each client keeps.

A point is a model ("received", "tuned", "global", ...) on a client's test data, or, after a slash, on another part of
it: "received/train". Whoever plays rounds asks for points; jobs.py looks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from sparsona.core.errors import SparsonaError
from sparsona.core.guard import Seen, keeps_shared
from sparsona.core.method import Round, Work
from sparsona.engine.evaluate import Evaluation
from sparsona.engine.jobs import Outcome, Setting
from sparsona.engine.plan import Plan, tested_clients
from sparsona.engine.population import Population, RoundRecord, Turn
from sparsona.engine.turn import Tally
from sparsona.wire.ledger import Traffic

GUARDED = "guarded"
PERSONAL, SHARED = "personal/validation", "shared/validation"  # what decides, and all that decides


@dataclass(frozen=True)
class Wish:
    """How long a client's model is tuned, and where it is looked at afterwards."""

    points: tuple[str, ...]
    epochs: int


class Player(Protocol):
    """Whoever plays rounds: what it can do after the last one."""

    setting: Setting
    plan: Plan
    novel: frozenset[int]

    def look(
        self, population: Population, completed: int, points: tuple[str, ...], clients: list[int]
    ) -> list[Evaluation]: ...

    def tune(
        self, population: Population, round_: Round, wishes: Mapping[int, Wish]
    ) -> Iterator[tuple[Outcome, Traffic]]: ...


def close(player: Player, population: Population) -> tuple[RoundRecord, dict[int, Work]]:
    """What was seen, and the models that were tuned."""
    setting, plan = player.setting, player.plan
    round_ = plan.tuning_round
    record = RoundRecord(plan.rounds, round_.lr_scale)
    tested, received, tuned_points = tested_clients(plan, setting.clients), *last_looks(plan, setting.method.common)
    if player.novel:
        record.evaluations.extend(player.look(population, plan.rounds, ("novel",), sorted(player.novel)))
    if received:
        record.evaluations.extend(player.look(population, plan.rounds, received, tested))
    wishes, is_tested = dict[int, Wish](), set(tested)
    for client in range(len(setting.clients)):
        is_novel = client in player.novel
        # Tested are those who are tested after rounds, and the novel ones.
        points = ("novel_tuned",) if is_novel else tuned_points if client in is_tested else ()
        if epochs := plan.tuning_epochs(is_novel):
            wishes[client] = Wish(points, epochs)
    tuned: dict[int, Work] = {}
    for outcome, traffic in player.tune(population, round_, wishes):
        if outcome.client not in wishes:  # what a peer said was heard once more: that is on its bill
            record.turns.append(Turn(outcome.client, Tally(), traffic, False, False, trained=False))
            continue
        tuned[outcome.client] = outcome.work
        setting.shelf.rest(outcome.work)
        record.turns.append(Turn(outcome.client, outcome.tally, traffic, False, False))
        record.evaluations.extend(outcome.evaluations)
    if plan.guard:
        record.evaluations.extend(guarded(record.evaluations, plan, shared_model(plan, setting.method.common)))
    return record, tuned


def last_looks(plan: Plan, common: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Points of the models as they are received at the end, and of those that are tuned then, as the plan asks for
    them; `common` is the point of the one model of all."""
    headline = "tuned" if plan.tune_epochs else "received"
    received: list[str] = ["start"] if plan.starts_warm else []
    tuned: list[str] = ["tuned"]
    own = tuned if plan.tune_epochs else received
    if plan.train_accuracy:
        received += ["received/train", *(["start/train"] if plan.starts_warm else [])]
        received += [f"{common}/train"] if common else []
        if plan.tune_epochs:
            tuned.append("tuned/train")
    if plan.guard:
        shared = shared_model(plan, common)
        received += [shared, f"{shared}/validation"]
        own += [headline, PERSONAL]
    return tuple(dict.fromkeys(received)), tuple(dict.fromkeys(tuned))


def shared_model(plan: Plan, common: str | None) -> str:
    """The model that personal ones are held against: the one that they began from, or else the one of all."""
    return "start" if plan.starts_warm else str(common)


def check_last_looks(setting: Setting) -> None:
    """Refuse what method, data and plan cannot do together."""
    plan, method = setting.plan, setting.method
    if method.tune is None and (plan.tune_epochs or plan.novel_epochs):
        raise SparsonaError(
            f"{method.name} has nothing to tune", expected="no tuning", mend="leave tune_epochs and novel_epochs out"
        )
    if not plan.guard:
        return
    is_partial = method.server is not None and method.server.is_partial
    if not plan.starts_warm and (method.common is None or is_partial):
        because = ": nobody trained all of the global one" if is_partial else ""
        raise SparsonaError(
            f"guard: {method.name} has no shared model that a client could keep instead of its own{because}",
            expected="a method with a global model that is trained, or a warm start from one",
            mend="--warm-start a run of fedavg, or leave --guard out",
        )
    sizes = setting.federation.sizes()
    without = [client for client in tested_clients(plan, setting.clients) if not sizes[client, 1]]
    if without:
        raise SparsonaError(
            f"guard: {len(without)} clients have no validation data (client {without[0]} is the first)",
            expected="some of everybody's data to decide by, which is neither trained nor tested on",
            mend="--set validation_rate=0.1, or leave --guard out",
        )


def guarded(evaluations: Sequence[Evaluation], plan: Plan, shared: str) -> list[Evaluation]:
    """What each client's choice, by its validation data alone, gives on its test data; and what it chose by."""
    headline = "tuned" if plan.tune_epochs else "received"
    at = {point: _by_client(evaluations, point) for point in (PERSONAL, f"{shared}/validation", headline, shared)}
    found = []
    for client, personal in at[PERSONAL].items():
        other = at[f"{shared}/validation"][client]
        kept = at[shared if keeps_shared(_seen(personal), _seen(other)) else headline][client]
        found += [replace(other, point=SHARED), replace(kept, point=GUARDED)]
    return found


def _by_client(evaluations: Iterable[Evaluation], point: str) -> dict[int, Evaluation]:
    return {found.client: found for found in evaluations if found.point == point}


def _seen(found: Evaluation) -> Seen:
    return Seen(found.correct, found.count, found.loss)
