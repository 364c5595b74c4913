"""The round engine that fits a method: a server in the middle, or peers."""

from __future__ import annotations

from sparsona.core.errors import SparsonaError
from sparsona.core.method import Tree, Work
from sparsona.core.targets import given_name
from sparsona.engine import gossip, star
from sparsona.engine.clients import Clients, LocalClients
from sparsona.engine.context import ClientContext, ServerContext
from sparsona.engine.gossip import Gossip
from sparsona.engine.jobs import Executor
from sparsona.engine.population import Population
from sparsona.engine.star import Star


def check_plan(context: ServerContext) -> None:
    """Raise SparsonaError if method and plan do not fit together."""
    if given_name(context.plan.sampler) is not None and context.sampler is None:
        raise SparsonaError(
            "this run's clients are sampled by a function from Python",
            expected="that function again",
            hint="call sparsona.train or sparsona.resume with sampler=",
        )
    (star.check_star if context.method.peer is None else gossip.check_gossip)(context)
    # Also raised here: a transform that does not take what the method sends.
    context.method.cost(context.params.layout, context.clients[0], context.plan.round_at(0))


def engine_for(context: ServerContext, clients: Clients) -> Star | Gossip:
    """The engine for this method, with clients in this process or elsewhere."""
    return Star(context, clients) if context.method.peer is None else Gossip(context, clients)


def simulate(context: ClientContext, executor: Executor | None = None) -> Star | Gossip:
    """The engine for this method, with all clients in this process. Without an executor it can only start."""
    return engine_for(context.server_side, LocalClients(context, executor))


def received_work(context: ClientContext, population: Population, client: int, completed: int | None = None) -> Work:
    """The model a client would use after so many rounds (None: all of them): what `predict` and `deploy` take."""
    round_ = context.plan.round_at(context.plan.last if completed is None else completed)
    clients = LocalClients(context, None, population.states)
    return clients.work(engine_for(context.server_side, clients).evaluation_job(population, client, round_))


def shared_model(context: ServerContext, population: Population) -> Tree | None:
    """The shared model, the server's or the peers' mean, where a method has one."""
    if context.method.peer is None:
        return star.global_model(context.method, population)
    return gossip.consensus(context, population, context.plan.last)
