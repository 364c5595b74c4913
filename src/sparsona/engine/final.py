"""The end of a run: novel clients, final tuning, final evaluations, and which model each client keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from sparsona.core.errors import SparsonaError
from sparsona.core.method import Round, Work
from sparsona.core.points import (
    GUARDED,
    NOVEL,
    NOVEL_TUNED,
    PERSONAL,
    RECEIVED,
    SHARED,
    START,
    TUNED,
    headline,
    on,
    point,
    select,
)
from sparsona.engine.clients import Clients
from sparsona.engine.context import ClientContext, ServerContext
from sparsona.engine.evaluate import Evaluation
from sparsona.engine.failures import WITHHELD
from sparsona.engine.guard import Seen, keeps_shared
from sparsona.engine.jobs import Outcome
from sparsona.engine.plan import Plan, novel_clients, tested_clients
from sparsona.engine.population import EvaluationLog, Population, RoundRecord, Turn
from sparsona.wire.ledger import Traffic


@dataclass(frozen=True)
class TuningRequest:
    """How long a client's model is tuned, and at which points it is evaluated afterwards."""

    points: tuple[str, ...]
    epochs: int


class RoundEngine(Protocol):
    """The part of a round engine that the end of a run needs."""

    context: ServerContext
    clients: Clients

    def evaluate_points(
        self,
        population: Population,
        completed: int,
        points: tuple[str, ...],
        clients: Sequence[int],
        log: EvaluationLog | None = None,
    ) -> list[Evaluation]: ...

    def tune(
        self, population: Population, clients: Clients, round_: Round, requests: Mapping[int, TuningRequest]
    ) -> Iterator[tuple[Outcome, Traffic]]: ...


def evaluate_after_round(
    engine: RoundEngine, population: Population, completed: int, log: EvaluationLog | None = None
) -> list[Evaluation]:
    """The clients that are tested, at the plan's points that need no training."""
    context = engine.context
    points = select(context.plan.points, "round")
    return engine.evaluate_points(population, completed, points, tested_clients(context.plan, context.clients), log)


def finish_run(engine: RoundEngine, population: Population) -> tuple[RoundRecord, dict[int, Work]]:
    """Final evaluations and tuning: the record of it, and the models that were tuned."""
    context, plan = engine.context, engine.context.plan
    round_ = plan.tuning_round
    record = RoundRecord(plan.last, round_.lr_scale)
    shared = context.method.shared_point
    novel, tested = novel_clients(plan, context.clients), tested_clients(plan, context.clients)
    received_points, tuned_points = final_points(plan, shared)
    if met := sorted(client for client in novel if context.clients[client].is_tested):
        record.evaluations.extend(engine.evaluate_points(population, plan.last, (NOVEL,), met, record.log))
    if received_points:
        found = engine.evaluate_points(population, plan.last, received_points, tested, record.log)
        record.evaluations.extend(found)
    requests, is_tested = dict[int, TuningRequest](), set(tested)
    for client in range(len(context.clients)):
        is_novel = client in novel
        # Clients that are tested after rounds, and the novel ones, are tested after tuning.
        points = ((NOVEL_TUNED,) if client in met else ()) if is_novel else tuned_points if client in is_tested else ()
        if epochs := plan.tuning_epochs(is_novel):
            requests[client] = TuningRequest(points, epochs)
    clients = engine.clients.at(population.states)
    for outcome, traffic in engine.tune(population, clients, round_, requests):
        # Otherwise a client that did not answer or diverged, or a peer that only sent its message, which is charged.
        trained, failed = outcome.client in requests and not outcome.failure, outcome.failure
        charged, note = traffic if outcome.sent else Traffic(), failed or outcome.note
        record.turns.append(Turn(outcome.client, outcome.tally, charged, False, bool(failed), trained, note))
        record.evaluations.extend(outcome.evaluations)
        if outcome.withheld:
            record.log.failures[outcome.client] = WITHHELD
    if plan.guard:
        record.evaluations.extend(choose_models(record.evaluations, plan, guard_point(plan, shared)))
    return record, clients.tuned


def final_points(plan: Plan, shared: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The plan's points of the models that are received at the end, and of those that are tuned; `shared` is the point
    of the shared model."""
    received: list[str] = [START] if plan.starts_warm else []
    tuned: list[str] = [TUNED, *(select(plan.points, "end") if plan.tune_epochs else ())]
    if plan.train_accuracy:
        models = [RECEIVED, *([START] if plan.starts_warm else []), *([shared] if shared else [])]
        received += [on(model, "train") for model in models]
        tuned += [on(TUNED, "train")] if plan.tune_epochs else []
    if plan.guard:
        other = guard_point(plan, shared)
        received += [other, on(other, "validation")]
        own = tuned if plan.tune_epochs else received
        own += [headline(plan.tune_epochs), on(PERSONAL, "validation")]
    return tuple(dict.fromkeys(received)), tuple(dict.fromkeys(tuned))


def guard_point(plan: Plan, shared: str | None) -> str:
    """The point that personal models are compared with: the model that they started from, or else the shared one."""
    return START if plan.starts_warm else str(shared)


def has_partial_global(context: ServerContext | ClientContext) -> bool:
    """Whether some of the server's model keeps its initial values."""
    half, novel = context.method.server, novel_clients(context.plan, context.clients)
    return half is not None and half.is_partial(tuple(c for c in context.clients if c.index not in novel))


def check_end(context: ServerContext) -> None:
    """Raise SparsonaError if method, data and plan do not fit together at the end of a run."""
    plan, method = context.plan, context.method
    if plan.stateless and not method.learns_without_memory:
        what = "has no server" if method.server is None else "sends no model"
        raise SparsonaError(
            f"{method.name} {what}, and stateless clients do not keep what they learn",
            expected="a method with a server that is sent models, or clients that keep a State",
            hint="leave 'stateless' out",
        )
    if method.tune is None and (plan.tune_epochs or plan.novel_epochs):
        raise SparsonaError(
            f"{method.name} has nothing to tune", expected="no tuning", hint="leave tune_epochs and novel_epochs out"
        )
    if any(point(name).data == "validation" for name in plan.points):
        _require_validation(context, "points on validation data", "leave them out of points")
    if not plan.guard:
        return
    is_partial = has_partial_global(context)
    if not plan.starts_warm and (method.shared_point is None or is_partial):
        because = ": no client trains all of the global one" if is_partial else ""
        raise SparsonaError(
            f"guard: {method.name} has no shared model that a client could keep instead of its own{because}",
            expected="a method with a global model that is trained, or a warm start from one",
            hint="--warm-start a run of fedavg, or leave --guard out",
        )
    _require_validation(context, "guard", "leave --guard out")


def _require_validation(context: ServerContext, what: str, otherwise: str) -> None:
    """Raise SparsonaError if a client that is tested has no validation data; of one yet to come nothing is known."""
    tested = [context.clients[client] for client in tested_clients(context.plan, context.clients)]
    without = [client.index for client in tested if client.num_examples and not client.num_validation]
    if without:
        first = context.clients[without[0]].label
        raise SparsonaError(
            f"{what}: {len(without)} clients have no validation data (client {first} is the first)",
            expected="validation data on every client, which is neither trained nor tested on",
            hint=f"--set validation_rate=0.1, or {otherwise}",
        )


def choose_models(evaluations: Sequence[Evaluation], plan: Plan, shared: str) -> list[Evaluation]:
    """The test results of the model that each client chooses by its validation data, and those it chose by."""
    own, own_validation, shared_validation = (
        headline(plan.tune_epochs),
        on(PERSONAL, "validation"),
        on(shared, "validation"),
    )
    at = {name: _by_client(evaluations, name) for name in (own_validation, shared_validation, own, shared)}
    chosen = []
    for client, personal in at[own_validation].items():
        if not all(client in found for found in at.values()):  # it was not heard every time
            continue
        other = at[shared_validation][client]
        kept = at[shared if keeps_shared(_seen(personal), _seen(other)) else own][client]
        chosen += [replace(other, point=on(SHARED, "validation")), replace(kept, point=GUARDED)]
    return chosen


def _by_client(evaluations: Iterable[Evaluation], point: str) -> dict[int, Evaluation]:
    return {found.client: found for found in evaluations if found.point == point}


def _seen(found: Evaluation) -> Seen:
    return Seen(found.correct, found.count, found.loss)
