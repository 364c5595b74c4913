"""What is looked at once, after the last round, and what each client keeps by it.

A point is a model ("received", "tuned", "global", ...) on a client's test data, or, after a slash, on another part of
it: "received/train". Whoever plays rounds asks for points; jobs.py looks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sparsona.core.errors import SparsonaError
from sparsona.core.guard import Seen, keeps_shared
from sparsona.engine.evaluate import Evaluation
from sparsona.engine.jobs import Setting
from sparsona.engine.plan import Plan, tested_clients

GUARDED = "guarded"
PERSONAL, SHARED = "personal/validation", "shared/validation"  # what decides, and all that decides


@dataclass(frozen=True)
class FinalLooks:
    """Points of the models as they are received at the end, and of those that are tuned then."""

    received: tuple[str, ...]
    tuned: tuple[str, ...]


def final_looks(plan: Plan, has_global: bool) -> FinalLooks:
    """What this plan asks for; nothing, unless it has an option that needs it."""
    headline = "tuned" if plan.tune_epochs else "received"
    received: list[str] = ["start"] if plan.starts_warm else []
    tuned: list[str] = ["tuned"]
    own = tuned if plan.tune_epochs else received
    if plan.train_accuracy:
        received += ["received/train", *(["start/train"] if plan.starts_warm else [])]
        received += ["global/train"] if has_global else []
        if plan.tune_epochs:
            tuned.append("tuned/train")
    if plan.guard:
        shared = shared_model(plan)
        received += [shared, f"{shared}/validation"]
        own += [headline, PERSONAL]
    return FinalLooks(tuple(dict.fromkeys(received)), tuple(dict.fromkeys(tuned)))


def shared_model(plan: Plan) -> str:
    """The model that personal ones are held against: the one that they began from, or else the one of all."""
    return "start" if plan.starts_warm else "global"


def check_final_looks(setting: Setting, has_global: bool) -> None:
    """Refuse what method, data and plan cannot do together."""
    plan, method = setting.plan, setting.method
    if method.tune is None and (plan.tune_epochs or plan.novel_epochs):
        raise SparsonaError(
            f"{method.name} has nothing to tune", expected="no tuning", mend="leave tune_epochs and novel_epochs out"
        )
    if not plan.guard:
        return
    if not plan.starts_warm and not has_global:
        raise SparsonaError(
            f"guard: {method.name} has no shared model that a client could keep instead of its own",
            expected="a method with a global model, or a warm start from one",
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


def guarded(evaluations: Sequence[Evaluation], plan: Plan) -> list[Evaluation]:
    """What each client's choice, by its validation data alone, gives on its test data; and what it chose by."""
    shared, headline = shared_model(plan), "tuned" if plan.tune_epochs else "received"
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
