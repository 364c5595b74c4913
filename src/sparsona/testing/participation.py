"""Clients that forget, are dropped, join late, or train without being sampled: options of the engine that every method
must support."""

from __future__ import annotations

from sparsona.core.errors import SparsonaError
from sparsona.core.points import NOVEL
from sparsona.engine.plan import novel_clients, participation
from sparsona.testing.case import Case, require


def clients_without_memory(case: Case) -> None:
    """With `stateless`, nothing stays on a client; where no model travels to a server nothing would be left, which is
    refused."""
    if not case.history.method.learns_without_memory:
        _require_refusal(case, "stateless", "do not keep what they learn")
        return
    history = case.start(stateless=True).play(2)
    require(history.last.states == {}, "stateless clients kept something")
    require(history.records[-1].turns, "no client had a turn")


def _require_refusal(case: Case, option: str, words: str) -> None:
    try:
        case.start(**{option: True})
    except SparsonaError as error:
        require(words in str(error), f"'{option}' was refused for another reason: {error}")
        return
    raise AssertionError(f"'{option}' was not refused")


def lost_updates_change_nobody(case: Case) -> None:
    """A dropped client keeps its old State, and the server does not use its update: their masks cannot drift apart.
    A peer that is out of reach trains alone."""
    history = case.start(drop_rate=0.6, rounds=5)
    lost = 0
    for index in range(5):
        record = history.play(index + 1).records[index]
        before, after = history.populations[index : index + 2]
        who = participation(history.context.plan, history.context.clients, index)
        dropped = {turn.client for turn in record.turns if turn.dropped}
        require(not {t.client for t in record.turns if t.aggregated} & who.dropped, "a lost update was aggregated")
        if history.method.peer is not None or not any(turn.traffic.up for turn in record.turns):
            require(set(who.trains) <= set(after.states), "a client that trained has no State")
        if history.method.peer is not None:
            require(dropped == who.dropped, f"round {index}: {dropped} were out of reach, not {who.dropped}")
            alone = [turn for turn in record.turns if turn.dropped]
            require(
                all(t.traffic.total == 0 and t.tally.steps for t in alone), "a peer out of reach did not train alone"
            )
            lost += bool(index and who.dropped)
        elif history.method.server is None:
            require(not dropped, "a client that sends nothing cannot lose anything")
            lost += 1
        else:
            require(dropped == who.dropped, f"round {index}: the updates of {dropped} were lost, not of {who.dropped}")
            kept = [after.states.get(client) is before.states.get(client) for client in who.dropped]
            require(all(kept), f"round {index}: a client whose update was lost has a new State")
            require(who.aggregated or after.server is before.server, "the server moved without an update")
            lost += len(who.dropped)
    require(lost, "no update was lost")


def novel_clients_join_at_the_end(case: Case) -> None:
    """Novel clients take no part in training and are evaluated after it."""
    history = case.start(novel=2, rounds=2).play(2)
    novel = novel_clients(history.context.plan, history.context.clients)
    require(len(novel) == 2 and not novel & set(history.last.states), "a novel client has a State before it joins")
    met = {e.client for e in history.final[0].evaluations if e.point == NOVEL}
    require(met == novel, f"{met} were evaluated as novel clients, not {set(novel)}")
    tested = {e.client for e in history.engine.evaluate(history.last, 2)}
    require(not tested & novel, "a novel client was evaluated among the others")


def everyone_trains_some_are_aggregated(case: Case) -> None:
    """A method works also if clients change without the server's knowledge (masks): they are sent what they lack. One
    whose server would be wrong about them says so, and is refused."""
    if case.history.method.peer is not None:
        _require_refusal(case, "everyone_trains", "no server that could leave some of them out")
        return
    if case.history.method.server is not None and case.history.method.server.needs_every_update:
        _require_refusal(case, "everyone_trains", "its server must hear from every client that trained")
        return
    history = case.start(everyone_trains=True).play(2)
    turns = history.records[-1].turns
    require(len(turns) == len(history.context.clients), f"{len(turns)} clients had a turn, not all")
    require(len(history.engine.evaluate(history.last, 2)) == len(turns), "not every client was evaluated")
    require(history.work(0), "a client cannot receive")
    if history.method.server is not None:
        require(sum(turn.aggregated for turn in turns) == 3, "not the sampled clients alone were aggregated")
