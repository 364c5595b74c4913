"""Attackers that know each other's updates: what they send is made when all of them have trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

from sparsona.core.method import Support, Tree, Update
from sparsona.core.tree import loaded, parts
from sparsona.core.update import Part, mask_digest
from sparsona.engine.context import ClientContext
from sparsona.engine.jobs import Executor, Job, Outcome, open_message
from sparsona.engine.plan import attackers
from sparsona.robust.attacks import collude
from sparsona.wire.codec import encode


def collude_in_round(context: ClientContext, executor: Executor, jobs: Iterable[Job]) -> Iterator[Outcome]:
    """Run jobs; the attackers' messages are replaced when all have been made, so that a round's outcomes are held.

    Args:
        context: the side of clients, all of which are in this process.
        executor: runs the jobs.
        jobs: what clients are to do, all the same. Only training is attacked.

    Returns:
        The outcomes in the order of the jobs.
    """
    coming = iter(jobs)
    first = next(coming, None)
    if first is None or first.do != "train":
        yield from executor.run(chain(() if first is None else (first,), coming))
        return
    lying = attackers(context.plan, len(context.clients))
    masks: dict[int, dict[bytes, Tree]] = {}

    def noted() -> Iterator[Job]:
        for job in chain((first,), coming):
            if job.client in lying:
                masks[job.client] = _masks_of(context, job)
            yield job

    outcomes, updates = list[Outcome](), dict[int, Update]()
    for outcome in executor.run(noted()):
        if outcome.client in lying and outcome.message is not None:
            updates[outcome.client] = open_message(outcome.message, context.clock).owned()
        elif isinstance(outcome.message, Update):
            outcome = replace(outcome, message=outcome.message.owned())
        outcomes.append(outcome)
    if updates:
        assert context.plan.attack is not None
        known = [
            {name: mask for name, part in update.parts.items() if (mask := _mask(part, masks[client])) is not None}
            for client, update in updates.items()
        ]
        lies = collude(list(updates.values()), known, context.plan.attack, context.plan.per_round)
        updates = dict(zip(updates, lies, strict=True))
    for outcome in outcomes:
        if (lie := updates.get(outcome.client)) is None:
            yield outcome
        else:
            yield replace(outcome, message=encode(lie) if isinstance(outcome.message, bytes) else lie)


def _masks_of(context: ClientContext, job: Job) -> dict[bytes, Tree]:
    """The masks that a client has before its turn, or is sent for it, by digest: its message may assume one."""
    state = context.fresh_state(job.client) if job.state is None else loaded(job.state)
    found = [leaf for _, leaf in parts(state) if isinstance(leaf, Tree) and not leaf.dtype.is_floating_point]
    for message in job.messages:
        found += [part.mask for part in open_message(message).parts.values() if part.mask is not None]
    return {mask_digest(mask): mask for mask in found}


def _mask(part: Part, masks: dict[bytes, Tree]) -> Tree | None:
    if part.is_mask or part.support is Support.DENSE:
        return None
    return part.mask if part.mask is not None else masks[part.proof]
