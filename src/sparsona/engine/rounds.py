"""Plays a method's rounds with whichever engine fits: a server in the middle, or peers."""

from __future__ import annotations

from sparsona.core.errors import SparsonaError
from sparsona.core.method import Tree, Work
from sparsona.engine import gossip, star
from sparsona.engine.gossip import Gossip
from sparsona.engine.jobs import Executor, Setting
from sparsona.engine.population import Population
from sparsona.engine.star import Star


def rounds_of(setting: Setting, executor: Executor) -> Star | Gossip:
    """The engine for this method. What method and plan cannot do together is refused."""
    if setting.method.peer is not None:
        return Gossip(setting, executor)
    if setting.plan.graph is not None:
        raise SparsonaError(
            f"{setting.method.name} on a graph",
            expected="a method whose clients send to each other, such as dispfl",
            mend="leave --graph out",
        )
    if "consensus" in setting.plan.points:
        raise SparsonaError(
            f"point 'consensus' for {setting.method.name}, which is no method of peers",
            expected="points other than 'consensus'",
            mend="use 'global': the server's model",
        )
    return Star(setting, executor)


def received_work(setting: Setting, population: Population, client: int) -> Work:
    """The model a client would use now: what `predict` and `deploy` take."""
    engine = star if setting.method.peer is None else gossip
    return engine.received_work(setting, population, client)


def common_model(setting: Setting, population: Population) -> Tree | None:
    """The one model of all, the server's or the peers' mean, where a method has such a thing."""
    if setting.method.peer is None:
        return star.global_model(setting.method, population)
    return gossip.consensus(setting, population)
