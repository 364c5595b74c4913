"""A run whose clients are reached by frames alone gives the bits and bytes of one in which they share a memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from sparsona.core.errors import SparsonaError
from sparsona.core.method import Round, State, Update
from sparsona.core.round import Client
from sparsona.deploy.agent import Agent, lone_cards
from sparsona.deploy.exchange import Exchange, Handle, in_memory
from sparsona.deploy.frames import UNSIGNED
from sparsona.deploy.greeting import Greeting
from sparsona.deploy.remote import Connection, RemoteClients
from sparsona.deploy.vault import Vault
from sparsona.engine.clients import LocalClients
from sparsona.engine.context import ClientContext
from sparsona.engine.evaluate import Evaluation
from sparsona.engine.gate import check_message
from sparsona.engine.population import Turn
from sparsona.engine.rounds import engine_for
from sparsona.testing.case import Case, fingerprint, require

RUN = "a-run-of-a-test"

Reach = Callable[[Mapping[int, Handle]], Exchange]


def frames_give_the_same_bits(case: Case, reach: Reach = in_memory) -> None:
    """Clients that answer frames, each with a vault of its own, do what clients in the same memory do.

    Args:
        case: the method.
        reach: makes the transport, from what each client does with a frame.
    """
    history, other = case.history, case.start()
    rounds = len(history.records)
    with tempfile.TemporaryDirectory() as folder:
        vaults = {client.index: Vault(Path(folder) / str(client.index)) for client in other.context.clients}
        clients = remote_clients(other.context, vaults, reach)
        engine = engine_for(other.context.server_side, clients)
        population = engine.start()
        for index in range(rounds):
            population, record = engine.play(population, index)
            require(_exact(record.turns) == _exact(history.records[index].turns), f"turns of round {index} differ")
        require(
            fingerprint(population.server) == fingerprint(history.last.server), f"the server differs after {rounds}"
        )
        require(population.messages == history.last.messages, "the last messages differ")
        states = {
            client: vaults[client].get(ticket.hex, other.context.fresh_state(client))
            for client, ticket in population.states.items()
        }
        require(states.keys() == history.last.states.keys(), "other clients have a State")
        require(fingerprint(states) == fingerprint(history.last.states), "States in the vaults differ")
        evaluated = engine.evaluate(population, rounds)
        require(_values(evaluated) == _values(history.engine.evaluate(history.last, rounds)), "evaluations differ")
        final, _ = engine.finish(population)
        require(_values(final.evaluations) == _values(history.final[0].evaluations), "final evaluations differ")


def _exact(turns: list[Turn]) -> list[tuple[Turn, dict[str, str]]]:
    """Turns that are equal if they are: a measure that is not a number differs from itself."""
    plain = [replace(turn, tally=replace(turn.tally, measures={})) for turn in turns]
    measures = [{name: repr(values) for name, values in turn.tally.measures.items()} for turn in turns]
    return list(zip(plain, measures, strict=True))


def _values(found: list[Evaluation]) -> list[Evaluation]:
    return [replace(one, confusion=None) for one in found]


def remote_clients(context: ClientContext, vaults: dict[int, Vault], reach: Reach = in_memory) -> RemoteClients:
    """The clients of a context, reached by frames; each has a context of its own."""

    def agent(client: Client) -> Agent:
        def alone(card: Client) -> ClientContext:
            return replace(context, cards=lone_cards(card))

        train, validation, test = context.federation.sizes()[client.index].tolist()
        greeting = Greeting(
            context.task.layout.digest.hex(),
            context.start_digest,
            (train, validation, test),
            client.capacity,
            {},
            "",
        )
        return Agent(client.index, RUN, alone, greeting, vaults[client.index], UNSIGNED, UNSIGNED, fewest=1)

    handles = {client.index: agent(client).handle for client in context.clients}

    def check(message: bytes | None, client: Client, index: int) -> Update | None:
        """As a server does: the gate lets pass what an honest client sends."""
        cost = context.method.cost(context.params.layout, client, context.plan.round_at(index))
        require((message is None) == (cost.up is None), f"client {client.index}: its cost does not say what it sends")
        if message is None:
            return None
        try:
            return check_message(message, cost, client=client, round=index)
        except SparsonaError as error:
            raise AssertionError(f"client {client.index}'s message is refused: {error.what}") from error

    connection = Connection(RUN, reach(handles), UNSIGNED, UNSIGNED, context.clients, check)

    def wants(client: int, ticket: State | None, round_: Round, available: tuple[int, ...]) -> tuple[int, ...] | None:
        states = {} if ticket is None else {client: vaults[client].get(ticket.hex, context.fresh_state(client))}
        return LocalClients(context, None, states).wanted(client, round_, available)

    connection.wants = wants
    return RemoteClients(connection)
