"""Attackers that know each other's updates: what they send is made when all of them have trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

from sparsona.core.errors import SparsonaError
from sparsona.core.method import Support, Tree, Update
from sparsona.core.tree import loaded, parts
from sparsona.core.update import Part, mask_digest
from sparsona.engine.context import ClientContext
from sparsona.engine.jobs import Executor, Job, Outcome, open_message
from sparsona.engine.plan import attackers
from sparsona.robust import LITTLE, little_z
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
    trained: dict[int, Job] = {}
    counted: set[int] = set()

    def noted() -> Iterator[Job]:
        for job in chain((first,), coming):
            if job.client in lying:
                trained[job.client] = job
            if job.is_aggregated:
                counted.add(job.client)
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
            {
                name: _mask(context, trained[client], part)
                for name, part in update.parts.items()
                if not part.is_mask and part.support is not Support.DENSE
            }
            for client, update in updates.items()
        ]
        counted &= {outcome.client for outcome in outcomes if outcome.message is not None}
        z = context.plan.attack.option("z")
        z = little_z(len(counted), len(counted & lying)) if z is None else z
        lies = collude(list(updates.values()), known, z)
        updates = dict(zip(updates, lies, strict=True))
    for outcome in outcomes:
        if (lie := updates.get(outcome.client)) is None:
            yield outcome
        else:
            yield replace(outcome, message=encode(lie) if isinstance(outcome.message, bytes) else lie)


def _mask(context: ClientContext, job: Job, part: Part) -> Tree:
    """The mask of a part: in the message, or one that the client had before its turn or was sent for it."""
    if part.mask is not None:
        return part.mask
    state = context.fresh_state(job.client) if job.state is None else loaded(job.state)
    found = [leaf for _, leaf in parts(state) if isinstance(leaf, Tree) and not leaf.dtype.is_floating_point]
    for message in job.messages:
        found += [one.mask for one in open_message(message).parts.values() if one.mask is not None]
    known = next((mask for mask in found if mask_digest(mask) == part.proof), None)
    if known is None:
        raise SparsonaError(
            f"attack={LITTLE}: the entries of client {job.client}'s update are not known to the other attackers",
            expected="a method whose clients keep their mask, or send it",
            hint="use another attack",
        )
    return known
