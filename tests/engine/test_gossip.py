"""Peers: what each hears and when, what is counted, who is out of reach, and what survives a stop."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import sparsona as sp
from sparsona.core.errors import SparsonaError
from sparsona.core.method import Cost, Method, PeerHalf, Tree, dense, message
from sparsona.core.task import Task
from sparsona.core.tree import leaves
from sparsona.data.federation import Federation
from sparsona.engine.context import ClientContext
from sparsona.engine.gossip import consensus
from sparsona.engine.graphs import Graph
from sparsona.engine.plan import Plan, novel_clients, participation
from sparsona.engine.rounds import check_plan, received_work, simulate
from sparsona.executors.serial import Serial
from sparsona.executors.stacked import Stacked
from sparsona.experiment import build
from sparsona.runs.checkpoint import Checkpoints, Progress
from sparsona.wire.codec import encode

ALL = Graph("full")
CHAIN = Graph("file", sources=((2,), (0,), (1,)))  # 0 to 1 to 2 to 0


@dataclass(frozen=True)
class Number:
    params: Tree
    buffers: Tree


def counting(task, wants=None):
    """A peer is a number, at first 0. It takes the mean of those it hears and itself, and adds its index and 1."""

    def receive(state, inbox, probe, round_):
        values = [state.params.flat, *(update.parts["model"].tree().flat for update in inbox)]
        return replace(state, params=state.params.like(torch.stack(values).mean(0)))

    def finish(state, work, inbox, probe, round_):
        params = work.params.like(work.params.flat + round_.client.index + 1)
        return Number(params, work.buffers), message(round_, {"model": dense(params)})

    def consensus(inbox, round_):
        found = [update.parts["model"].tree() for update in inbox]
        return found[0].like(torch.stack([one.flat for one in found]).mean(0))

    def predict(work, inputs):
        return task.forward(work.params, work.buffers, inputs, train=False)[0]

    return Method(
        name="counting",
        init_client=lambda params, buffers, client, seeds: Number(params.like(params.flat * 0), buffers),
        receive=receive,
        phases=(),
        finish=finish,
        predict=predict,
        cost=lambda layout, client, round_: Cost(None, None, 0),
        peer=PeerHalf(wants=wants, consensus=consensus),
    )


def context_of(num=3, make=counting, **plan):
    x, y = torch.ones(4, 2), torch.tensor([0, 1, 0, 1])
    federation = Federation.from_clients([(x, y, x, y)] * num)
    task = Task(lambda: nn.Linear(2, 2, bias=False), (2,), 2)
    options = {
        "rounds": 4,
        "per_round": num - plan.get("num_novel", 0),
        "batch_size": 2,
        "seed": 0,
        "graph": ALL,
        **plan,
    }
    return ClientContext(task, make, federation, Plan(**options))


def play(context, rounds, population=None, first=0):
    gossip, records = simulate(context, Serial(context)), []
    population = population or gossip.start()
    for index in range(first, rounds):
        population, record = gossip.play(population, index)
        records.append(record)
    return gossip, population, records


def numbers(population):
    return {client: float(state.params.flat[0]) for client, state in sorted(population.states.items())}


def traffic(record):
    return {turn.client: (turn.traffic.up, turn.traffic.down) for turn in record.turns}


def size_of(population):
    (size,) = {len(said) for said in population.messages.values()}
    return size


def test_three_peers_by_hand():
    """Round 0: nobody is heard. Round 1: (1 + 2 + 3) / 3 = 2, and 1, 2, 3 on top. Round 2: (3 + 4 + 5) / 3 = 4."""
    context = context_of()
    for rounds, expected in ((1, (1, 2, 3)), (2, (3, 4, 5)), (3, (5, 6, 7))):
        gossip, population, records = play(context, rounds)
        assert tuple(numbers(population).values()) == expected
    size = size_of(population)
    assert traffic(records[0]) == {0: (0, 0), 1: (0, 0), 2: (0, 0)}
    assert traffic(records[1]) == traffic(records[2]) == dict.fromkeys(range(3), (2 * size, 2 * size))
    assert all(turn.traffic.paper_up == turn.traffic.paper_down == 2 * 4 * 4 for turn in records[2].turns)
    assert float(consensus(gossip.context, population, 1).flat[0]) == 6
    assert float(received_work(context, population, 1).params.flat[0]) == 6


def test_who_hears_whom_is_directed():
    """0 hears 2, 1 hears 0, 2 hears 1: (1 + 3) / 2 + 1, (2 + 1) / 2 + 2, (3 + 2) / 2 + 3."""
    _, population, records = play(context_of(graph=CHAIN), 2)
    assert numbers(population) == {0: 3.0, 1: 3.5, 2: 5.5}
    assert set(traffic(records[1]).values()) == {(size_of(population),) * 2}


def test_a_method_may_say_whom_it_wants():
    """All want 0, who wants 1; nobody is sent what it did not ask for, nor its own."""

    def wants(state, round_, available):
        return (0,) if round_.client.index else (1, 0)

    _, population, records = play(context_of(make=lambda task: counting(task, wants)), 2)
    assert numbers(population) == {0: 2.5, 1: 3.5, 2: 5.0}
    size = size_of(population)
    assert traffic(records[1]) == {0: (2 * size, size), 1: (size, size), 2: (0, size)}


def test_a_method_is_told_who_has_a_message():
    told = {}

    def wants(state, round_, available):
        told[round_.index, round_.client.index] = available
        return available

    plan = {"graph": None, "num_novel": 1, "rounds": 2}
    context = context_of(4, make=lambda task: counting(task, wants), **plan)
    _, population, records = play(context, 2)
    (novel,) = novel_clients(context.plan, context.clients)
    members = [client for client in range(4) if client != novel]
    assert told == {
        **{(0, client): () for client in members},
        **{(1, client): tuple(peer for peer in members if peer != client) for client in members},
    }
    assert set(traffic(records[1]).values()) == {(2 * size_of(population),) * 2}


def test_who_chooses_its_peers_has_no_graph():
    context = context_of(make=lambda task: counting(task, lambda state, round_, available: (0,)))
    with pytest.raises(SparsonaError, match="choose whose models they receive"):
        check_plan(context.server_side)


def test_who_drops_out_is_not_reached_and_goes_on_alone():
    for seed in range(500):
        context = context_of(drop_rate=0.4, seed=seed)
        if [participation(context.plan, context.clients, t).dropped for t in range(3)] == [set(), {1}, set()]:
            break
    else:
        pytest.fail("no seed drops 1 in the second round alone")
    _, population, records = play(context, 2)
    # (1 + 3) / 2 = 2 without the second peer, whose own 2 becomes 4.
    assert numbers(population) == {0: 3.0, 1: 4.0, 2: 5.0}
    size = size_of(population)
    assert traffic(records[1]) == {0: (size, size), 1: (0, 0), 2: (size, size)}
    assert [turn.dropped for turn in records[1].turns] == [False, True, False]
    _, population, _ = play(context, 3, population, 2)  # what it did meanwhile is heard now
    assert numbers(population) == {0: 5.0, 1: 6.0, 2: 7.0}


def test_who_is_not_sampled_keeps_still_and_can_be_heard():
    for seed in range(500):
        context = context_of(per_round=2, seed=seed)
        who = [participation(context.plan, context.clients, t).trains for t in range(3)]
        if who == [(0, 1), (1, 2), (0, 2)]:
            break
    else:
        pytest.fail("no seed samples these")
    _, population, records = play(context, 2)
    # 2 has said nothing before its first turn; 0 keeps its 1 and is heard by both.
    assert numbers(population) == {0: 1.0, 1: (2 + 1) / 2 + 2, 2: (0 + 1 + 2) / 3 + 3}
    size = size_of(population)
    assert traffic(records[1]) == {0: (2 * size, 0), 1: (size, size), 2: (0, 2 * size)}
    assert {turn.client: turn.trained for turn in records[1].turns} == {0: False, 1: True, 2: True}
    assert population.messages[0] == play(context, 1)[1].messages[0]
    _, population, _ = play(context, 3, population, 2)
    assert numbers(population)[0] == pytest.approx((1 + 3.5 + 4) / 3 + 1)


def test_novel_clients_join_at_the_end():
    context = context_of(num=4, num_novel=1, rounds=2)
    gossip, population, _ = play(context, 2)
    (novel,) = novel_clients(context.plan, context.clients)
    assert novel not in population.states
    rest = list(numbers(population).values())
    assert float(received_work(context, population, novel).params.flat[0]) == pytest.approx(sum(rest) / 4)
    record, _ = gossip.finish(population)
    assert {(e.client, e.point) for e in record.evaluations} == {(novel, "novel")}


def test_whoever_is_heard_by_a_tuned_novel_client_pays_for_it(tmp_path):
    options = {**DISPFL, "graph": "full", "rounds": 2, "novel": 1, "novel_epochs": 1, "per_round": None}
    run = sp.train("dispfl", out=tmp_path / "run", executor="serial", model=small_net, **options)
    sent = run.summary["bytes"]
    # Five heard each other, four times each, in the second round; then one heard all five.
    assert sent["up"] == sent["down"] == sent["total"] == (5 * 4 + 5) * sent["busiest_round_out"] / 4


def test_the_consensus_is_tested_on_everybody():
    context = context_of(points=("received", "consensus"))
    gossip, population, _ = play(context, 2)
    found = gossip.evaluate(population, 2)
    assert {(e.client, e.point) for e in found} == {(k, p) for k in range(3) for p in ("received", "consensus")}


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        ({"stateless": True}, "do not keep what they learn"),
        ({"everyone_trains": True}, "no server"),
        ({"points": ("global",)}, "use 'consensus'"),
        ({"graph": Graph("random", 3)}, "each of 3 peers receives from 3"),
        ({"graph": Graph("file", sources=((1,), (0,), ()))}, "client 2 receives from no client"),
    ],
)
def test_what_peers_cannot_do(plan, told):
    context = context_of(**plan)
    with pytest.raises(SparsonaError) as caught:
        check_plan(context.server_side)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("options", "told"), [({"graph": "ring"}, "on a graph"), ({"points": "consensus"}, "use 'global'")]
)
def test_what_a_server_cannot_do(options, told, tmp_path):
    with pytest.raises(SparsonaError) as caught:
        sp.train("fedavg", out=tmp_path / "run", **options)
    assert told in str(caught.value)
    assert not (tmp_path / "run").exists()


DISPFL = {
    "clients": 6,
    "rounds": 4,
    "epochs": 1,
    "batch_size": 16,
    "graph": "random:2",
    "device": "cpu",
    "data_rate": 0.1,
}


def small_net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))


def dispfl(**more):
    return build.make_context(build.make_config("dispfl", {**DISPFL, **more}, None, small_net), None, small_net)


def bits(population):
    said = {k: m if isinstance(m, bytes) else encode(m) for k, m in population.messages.items()}
    return {path: tensor.numpy().tobytes() for path, tensor in leaves(population.states)}, said


@pytest.mark.parametrize("make", [Serial, Stacked])
@pytest.mark.parametrize("more", [{}, {"per_round": 3, "drop_rate": 0.3}], ids=["all", "some"])
def test_a_resumed_run_equals_an_uninterrupted_one(make, more, tmp_path):
    def playing(population=None, first=0, last=4):
        context = dispfl(**more)
        engine = simulate(context, make(context))
        if population is None:
            found = Checkpoints(tmp_path, context.method).load(engine, engine.start())
            population = found.population if found else engine.start()
        for index in range(first, last):
            population, _ = engine.play(population, index)
        return engine, population

    _, whole = playing()
    engine, half = playing(last=2)
    Checkpoints(tmp_path, engine.clients.context.method).save(Progress(2, 1.0, half, {}), engine.start())
    assert bits(playing(first=2)[1]) == bits(whole)


def test_a_message_that_the_state_holds_is_not_written_twice(tmp_path):
    context = dispfl()
    engine = simulate(context, Stacked(context))
    population, _ = engine.play(engine.start(), 0)
    checkpoints = Checkpoints(tmp_path, context.method)
    checkpoints.save(Progress(1, 1.0, population, {}), engine.start())
    folder = tmp_path / "checkpoint"
    names = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert sum(name.startswith("message-") for name in names) == 6
    assert all(size < 1000 for name, size in names.items() if name.startswith("message-"))
    checkpoints.save(Progress(1, 2.0, population, {}), engine.start())
    assert {path.name for path in folder.iterdir()} == set(names)  # nothing is written anew
    found = Checkpoints(tmp_path, context.method).load(engine, engine.start()).population
    assert bits(found) == bits(population)
    assert found.messages[0].parts["model"].whole is found.states[0].params
    # Where the state has moved on and the message has not, it is written whole.
    moved = replace(population, states={**population.states, 0: context.fresh_state(0)})
    checkpoints.save(Progress(2, 3.0, moved, {}), engine.start())
    assert bits(Checkpoints(tmp_path, context.method).load(engine, engine.start()).population) == bits(moved)


def test_the_busiest_peer_is_bounded_where_it_is_asked_for(tmp_path):
    options = {**DISPFL, "clients": 12, "executor": "serial", "model": small_net}
    free, bounded = (
        sp.train("dispfl", out=tmp_path / name, **{**options, "graph": graph})
        for name, graph in (("free", "random:2"), ("bounded", "random:2:bounded"))
    )
    one = len(rounds_message(bounded))
    found = [run.summary["bytes"] for run in (free, bounded)]
    assert found[1]["busiest_round_in"] == found[1]["busiest_round_out"] == found[0]["busiest_round_in"] == 2 * one
    assert found[0]["busiest_round_out"] > 2 * one
    assert found[1]["busiest_node"] == 3 * 4 * one  # in three rounds of four; in the first nobody is heard
    assert found[1]["total"] == found[1]["up"] == found[1]["down"] == 12 * 3 * 2 * one
    assert "at the end of its local training" in bounded.protocol


def rounds_message(run):
    """Any message of a run, as its checkpoint has it."""
    context = run._make_context()
    engine = simulate(context)
    return Checkpoints(run.path, context.method).load(engine, engine.start()).population.messages[0]


def test_a_graph_file_that_changed_is_told(tmp_path):
    path = tmp_path / "graph.json"
    path.write_text(json.dumps([[k, (k + 1) % 6] for k in range(6)]))
    options = {**DISPFL, "graph": f"file:{path}", "rounds": 2, "executor": "serial", "model": small_net}
    run = sp.train("dispfl", out=tmp_path / "run", **options)
    assert 0 <= run.accuracies().mean() <= 1
    path.write_text(json.dumps([[k, (k + 2) % 6] for k in range(6)] + [[0, 1]]))
    with pytest.raises(SparsonaError, match="the graph is not that of"):
        sp.resume(tmp_path / "run", model=small_net)


def test_only_peers_of_a_comparison_are_on_the_graph(tmp_path):
    options = {"clients": 4, "rounds": 1, "epochs": 1, "data_rate": 0.1, "executor": "serial", "model": small_net}
    found = sp.compare(["local", "dispfl:per_round=4"], graph="ring", per_round=2, out=tmp_path / "both", **options)
    assert [(run.config["graph"], run.config["per_round"]) for run in found.runs] == [(None, 2), ("ring", 4)]
    with pytest.raises(SparsonaError, match="local on a graph"):
        sp.compare(["local", "fedavg"], graph="ring", out=tmp_path / "none", **options)


def test_tuning_may_start_from_everybodys_models(tmp_path):
    """On a ring of five each hears two, and all four others if it asks for all; costs say the same."""
    options = {"clients": 5, "rounds": 1, "tune_epochs": 1, "graph": "ring"}
    for whose, links in (("neighbours", 2), ("all", 4)):
        run = sp.train(
            "dispfl", out=tmp_path / whose, epochs=1, data_rate=0.1, executor="serial", tune_from=whose, **options
        )
        tuning = [turn.bytes_down for turn in run._folder.records.turns(1)]
        costs = sp.cost("dispfl", data="digits", tune_from=whose, **options).encoded
        assert sum(tuning) == costs.tuning == links * costs.round / 2


@pytest.mark.parametrize("executor", ["serial", "stacked"])
def test_what_novel_clients_hear_is_on_its_senders_bill(tmp_path, executor):
    options = {
        "clients": 6,
        "rounds": 2,
        "epochs": 1,
        "novel": 2,
        "data_rate": 0.1,
        "device": "cpu",
        "executor": executor,
    }
    run = sp.train("dispfl", novel_epochs=1, out=tmp_path / "run", **options)
    assert run.summary["bytes"]["up"] == run.summary["bytes"]["down"] > 0
    tuning = run._folder.records.turns(2)
    assert sum(turn.bytes_up for turn in tuning) == sum(turn.bytes_down for turn in tuning) > 0
    assert sum(turn.steps for turn in tuning) > 0
