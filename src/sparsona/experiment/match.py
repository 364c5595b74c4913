"""How many rounds each method of a comparison gets, so that all spend the same: computed before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sparsona.core.errors import unknown_name
from sparsona.engine.context import ServerContext
from sparsona.engine.forecast import Forecast, forecast
from sparsona.runs.options import MATCHES


def check_match(by: str) -> None:
    """Refuse what is not a key of MATCHES."""
    if by not in MATCHES:
        raise unknown_name("thing to match", by, MATCHES)


def amounts(contexts: Sequence[ServerContext], by: str, rounds: int | None = None) -> tuple[list[int], bool]:
    """What a method spends of `by` in so many rounds under each seed, and whether that is exact.

    Args:
        contexts: the method's context under each seed.
        by: steps, flops or bytes.
        rounds: None: the plan's.

    Returns:
        The amounts in the order of the contexts. Steps are always exact.
    """
    found: list[Forecast] = []
    for context in contexts:
        plan = context.plan if rounds is None else replace(context.plan, rounds=rounds)
        found.append(forecast(replace(context, plan=plan), with_bytes=by == "bytes"))
    return [getattr(one, by) for one in found], by == "steps" or all(one.exact for one in found)


def rounds_for(contexts: Sequence[ServerContext], by: str, budget: int) -> int | None:
    """The number of rounds whose total over seeds, final tuning included, is nearest to the budget.

    Args:
        contexts: the method's context under each seed.
        by: steps, flops or bytes.
        budget: the amount to come near to, summed over seeds.

    Returns:
        At least 1; the smaller of two that are equally near. None if the method spends none of it.
    """
    known: dict[int, int] = {}

    def total(rounds: int) -> int:
        if rounds not in known:
            known[rounds] = sum(amounts(contexts, by, rounds)[0])
        return known[rounds]

    untuned = [replace(one, plan=replace(one.plan, tune_epochs=0, novel_epochs=0)) for one in contexts]
    if not any(amounts(untuned, by, 2)[0]):  # in the first round of peers nobody has a message yet
        return None
    low, high = 1, contexts[0].plan.rounds
    while total(high) < budget:
        low, high = high, 2 * high
    while low < high:  # a further round never costs less
        middle = (low + high) // 2
        if total(middle) < budget:
            low = middle + 1
        else:
            high = middle
    return min((max(1, low - 1), low), key=lambda rounds: (abs(total(rounds) - budget), rounds))
