"""FedFomo: a round worked out by hand, and which peers a client requests.

The model is a linear layer without bias, two inputs and one output. Every target is 0.5, and (a, b) are the weights
less 0.5. Every client's validation data are x = (1, 0) and x = (0, 1), so its loss is (a^2 + b^2) / 2.

    A   before its last training (4, 0): loss 8        after it (3, 0): loss 4.5
    B   sent (0, 3): loss 4.5                          C   sent (8, 3): loss 36.5

By gain over distance from (4, 0), A's own model is worth 3.5 / 1, B's 3.5 / 5 = 0.7, C's -28.5 / 5 = -5.7. The positive
ones have the shares 5/6 and 1/6: A mixes (4, 0) + 5/6 (-1, 0) + 1/6 (-4, 3) = (2.5, 0.5).
A then trains one step at learning rate 0.125 on x = (1, 0): the gradient is (2 a, 0) = (5, 0), and it has and
sends (1.875, 0.5). It tried four models on two examples of 2 * 2 FLOPs: 32 FLOPs.

In the other order A has (4, 0), trains it to (4 - 0.125 * 8, 0) = (3, 0), and mixes this with what it received.

D never trained, and starts at (4, 0): of B and C it takes B, which alone has a positive weight.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lenet5 import SIZE
from torch import nn

import sparsona as sp
from sparsona.core.method import dense, message
from sparsona.data.federation import Federation
from sparsona.engine.population import Population
from sparsona.engine.rounds import check_plan, received_work, simulate
from sparsona.executors.serial import Serial
from sparsona.experiment import build
from sparsona.methods.fedfomo import FedFomoState
from sparsona.wire.codec import decode

BATTERY = {"fedfomo": {"options": {"num_candidates": 2, "validation_rate": 0.2}, "accuracy": 0.35}}
WORTH = 4 * 100  # a number for each of the hundred clients
MEMORY = [("fedfomo", {}, 2 * SIZE + WORTH, 4 * SIZE + WORTH, 4 * SIZE + WORTH, 0)]

A, B, C, D = range(4)
SENT = {A: (3.0, 0.0), B: (0.0, 3.0), C: (8.0, 3.0)}
STEP = {"rounds": 3, "batch_size": 4, "epochs": 1, "lr": 0.125, "lr_decay": 1.0, "weight_decay": 0.0}


def population_of(num=4, previous=(4.0, 0.0), trained=SENT[A], **options):
    """A as above, and what B and C sent; with more clients, nobody else has sent anything."""
    x, y = torch.eye(2), torch.full((2, 1), 0.5)
    federation = Federation.from_clients([(x[:1], y[:1], x, y, x, y)] * num)
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[4.5, 0.5]]))
    options = {**STEP, "clip_norm": None, "per_round": num, **options}
    context = build.make_context(build.make_config("fedfomo", options, federation, model), federation, model)

    def tree(values):
        return context.params.like(torch.tensor(values) + 0.5)

    own = FedFomoState(
        tree(previous), tree(trained), context.buffers, torch.tensor([1.0, 2.0, 0.0, *[0.0] * (num - 3)])
    )
    messages = {
        k: message(context.plan.round_at(0).on(context.clients[k]), {"model": dense(tree(values))})
        for k, values in SENT.items()
    }
    return context, Population(None, {A: own}, messages)


def test_a_round_by_hand():
    context, population = population_of()
    work = received_work(context, population, A)
    assert work.params.flat.sub(0.5).tolist() == pytest.approx([2.5, 0.5])
    assert work.worth.tolist() == pytest.approx([4.5, 2.7, -5.7, 0])  # of 1, 2, 0, 0 before
    after, record = simulate(context, Serial(context)).play(population, 1)
    state, turn = after.states[A], record.turns[A]
    assert state.params.flat.sub(0.5).tolist() == pytest.approx([1.875, 0.5])
    assert state.previous.flat.sub(0.5).tolist() == pytest.approx([2.5, 0.5])
    assert state.worth.tolist() == pytest.approx([4.5, 2.7, -5.7, 0])
    assert decode(after.messages[A]).parts["model"].tree().flat.sub(0.5).tolist() == pytest.approx([1.875, 0.5])
    assert (turn.client, turn.tally.search_flops, turn.tally.steps) == (A, 32, 1)


def test_the_other_order_by_hand():
    context, population = population_of(previous=(4.0, 0.0), trained=(4.0, 0.0), order="train-mix")
    after, record = simulate(context, Serial(context)).play(population, 1)
    state = after.states[A]
    assert state.params.flat.sub(0.5).tolist() == state.previous.flat.sub(0.5).tolist() == pytest.approx([2.5, 0.5])
    assert state.worth.tolist() == pytest.approx([4.5, 2.7, -5.7, 0])
    assert decode(after.messages[A]).parts["model"].tree().flat.sub(0.5).tolist() == pytest.approx([2.5, 0.5])
    assert record.turns[A].tally.search_flops == 32
    assert received_work(context, after, A).params.flat.sub(0.5).tolist() == pytest.approx(
        [2.5, 0.5]
    )  # not mixed once more


@pytest.mark.parametrize("order", ["mix-train", "train-mix"])
def test_who_never_trained_mixes_what_it_receives(order):
    context, population = population_of(order=order)
    without_a = replace(population, messages={k: population.messages[k] for k in (B, C)})
    work = received_work(context, without_a, D)
    assert work.params.flat.sub(0.5).tolist() == [0, 3]
    assert work.worth.tolist() == pytest.approx([0, 0.7, -5.7, 0])
    alone = replace(population, messages={})
    assert received_work(context, alone, D).params.flat.sub(0.5).tolist() == [4, 0]


@pytest.mark.parametrize(("choice", "expected"), [("keep", [1, 0]), ("discard", [0, 0])])
def test_where_no_model_helps(choice, expected):
    """Before training A was perfect: everybody else's weight is negative, and so is that of its trained model."""
    context, population = population_of(previous=(0.0, 0.0), trained=(1.0, 0.0), if_none_helps=choice)
    assert received_work(context, population, A).params.flat.sub(0.5).tolist() == expected
    alone = replace(population, messages={})
    assert received_work(context, alone, A).params.flat.sub(0.5).tolist() == expected


@pytest.mark.parametrize(("choice", "expected"), [("keep", [-1, 0]), ("discard", [1, 0])])
def test_where_no_model_helps_in_the_other_order(choice, expected):
    """A step of 1.0 from a = 1 leads to -1, which has the same loss: a weight of 0."""
    context, population = population_of(
        previous=(1.0, 0.0), trained=(1.0, 0.0), order="train-mix", if_none_helps=choice, lr=1.0
    )
    after, _ = simulate(context, Serial(context)).play(replace(population, messages={}), 1)
    assert after.states[A].params.flat.sub(0.5).tolist() == expected


def test_a_model_that_did_not_move_has_no_weight():
    context, population = population_of(previous=(3.0, 0.0), trained=(3.0, 0.0))
    only_c = replace(population, messages={C: population.messages[C]})
    work = received_work(context, only_c, A)
    assert work.params.flat.sub(0.5).tolist() == [3, 0]
    assert work.worth[A] == 1  # as before


def test_one_model_that_helps_is_taken_to_the_bit():
    for step in range(1, 12):
        trained = (0.07 * step, 0.03 * step)
        context, population = population_of(previous=(1.1, 2.3), trained=trained)
        alone = replace(population, messages={})
        assert torch.equal(received_work(context, alone, A).params.flat, torch.tensor(trained) + 0.5)


def wanted(worth, index=0, client=A, available=None, **options):
    context, _ = population_of(num=len(worth), **options)
    state = replace(context.fresh_state(client), worth=torch.tensor(worth))
    others = tuple(k for k in range(len(worth)) if k != client) if available is None else available
    return context.method.peer.wants(state, context.plan.round_at(index).on(context.clients[client]), others)


def test_the_peers_of_most_worth_are_requested():
    worth = [9.0, 0.2, -1.0, 0.5, 0.1, 0.3]
    assert wanted(worth, num_candidates=3, explore_rate=0.0) == (3, 5, 1)
    assert wanted(worth, num_candidates=3, explore_rate=0.0, client=3) == (0, 5, 1)
    assert sorted(wanted(worth, num_candidates=10, explore_rate=0.5)) == [1, 2, 3, 4, 5]
    assert wanted(worth, index=6, num_candidates=3) == (3, 5, 1)  # 0.3 - 6 * 0.05: explored enough


def test_only_peers_with_a_message_are_requested():
    """1 and 2 never sent anything, and have the worth 0; the others' models did not help."""
    worth = [0.0, 0.0, 0.0, -2.0, -1.0, -3.0]
    for explore_rate in (0.0, 1.0):
        options = {"available": (3, 4, 5), "explore_rate": explore_rate, "explore_decay": 0.0}
        assert len(found := wanted(worth, num_candidates=2, **options)) == 2
        assert set(found) <= {3, 4, 5}
        assert sorted(wanted(worth, num_candidates=10, **options)) == [3, 4, 5]
    assert wanted(worth, num_candidates=2, explore_rate=0.0, available=(3, 4, 5)) == (4, 3)
    assert wanted(worth, available=()) == ()


@pytest.mark.parametrize("order", ["mix-train", "train-mix"])
def test_novel_clients_are_not_requested(order):
    """Five of ten never send anything. The others do after the first round: every request is answered."""
    options = {"clients": 10, "novel": 5, "rounds": 4, "epochs": 1, "data_rate": 0.5, "partition": "dirichlet:0.1"}
    more = {"min_size": 5, "num_candidates": 2, "explore_rate": 0.0, "order": order, "device": "cpu"}
    context = build.make_context(build.make_config("fedfomo", {**options, **more}))
    engine = simulate(context, Serial(context))
    population = engine.start()
    for index in range(4):
        population, record = engine.play(population, index)
        size = len(population.messages[record.turns[0].client])
        assert [turn.traffic.down for turn in record.turns] == [2 * size * bool(index)] * 5


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e30])
def test_a_model_that_diverged_has_no_weight(value):
    """As in the round by hand, but for C's model: A mixes the same, and C is worth less than all others. 1e30 has a
    distance and a loss that are not finite."""
    context, population = population_of()
    bad = context.params.like(torch.full_like(context.params.flat, value))
    sent = message(context.plan.round_at(0).on(context.clients[C]), {"model": dense(bad)})
    work = received_work(context, replace(population, messages={**population.messages, C: sent}), A)
    assert work.params.flat.sub(0.5).tolist() == pytest.approx([2.5, 0.5])
    assert work.worth.tolist() == pytest.approx([4.5, 2.7, -1, 0])
    assert context.method.peer.wants(
        replace(population.states[A], worth=work.worth), context.plan.round_at(9).on(context.clients[A]), (B, C, D)
    ) == (B, D, C)


def test_some_peers_are_requested_at_random():
    worth = [0.0, *(float(-k) for k in range(1, 12))]
    drawn = [wanted(worth, index=k, num_candidates=3, explore_rate=1.0, explore_decay=0.0) for k in range(20)]
    assert all(len(set(found)) == 3 and A not in found for found in drawn)
    assert set().union(*drawn) == set(range(1, 12))
    half = [wanted(worth, index=k, num_candidates=3, explore_rate=0.5, explore_decay=0.0) for k in range(40)]
    once = [
        wanted(worth, index=k, num_candidates=3, explore_rate=0.5, explore_decay=0.0, explore="all") for k in range(40)
    ]
    best = (1, 2, 3)
    assert 10 <= sum(found == best for found in once) <= 30
    mixed = [found for found in once if found != best and len({1, 2, 3} & set(found)) == 2]
    assert len(mixed) <= 5  # all at random, or none
    assert sum(len({1, 2, 3} & set(found)) in (1, 2) for found in half) >= 10


def test_equal_worths_favour_nobody():
    first = {wanted([0.0] * 12, index=k, num_candidates=1, explore_rate=0.0)[0] for k in range(60)}
    assert first == set(range(1, 12))


def test_a_run_learns_whom_to_ask(tmp_path):
    options = {"clients": 6, "rounds": 3, "epochs": 1, "data_rate": 0.3, "executor": "serial", "device": "cpu"}
    run = sp.train("fedfomo", num_candidates=2, out=tmp_path / "run", **options)
    costs = sp.cost("fedfomo", data="digits", clients=6, rounds=2, num_candidates=2)
    assert run.summary["bytes"]["total"] == costs.to_json()["encoded"]["total"]["comm_gb"] * 1e9  # none in round 0
    assert run.summary["flops"]["mask_search"] > 0


def test_what_it_needs():
    with pytest.raises(sp.SparsonaError, match="fedfomo decides by validation data"):
        build.make_config("fedfomo", {"validation_rate": 0.0})
    context = build.make_context(build.make_config("fedfomo", {"graph": "ring", "data_rate": 0.3}))
    with pytest.raises(sp.SparsonaError, match="choose whose models they receive"):
        check_plan(context.server_side)
    with pytest.raises(sp.SparsonaError, match="choose whose models they receive"):
        sp.cost("fedfomo", model="lenet5", graph="ring")
    assert sp.cost("fedfomo", model="lenet5", num_candidates=4).neighbours == 4
    assert sp.cost("fedfomo", model="lenet5", clients=5).neighbours == 4


def test_presets():
    _, paper = build.make_configs("fedfomo", {"preset": "paper"})
    assert paper.if_none_helps == "discard"
    _, own = build.make_configs("fedfomo", {"preset": "dispfl"})
    assert (own.order, own.explore, own.explore_rate, own.explore_decay) == ("train-mix", "all", 0.5, 0.0)
    assert own.if_none_helps == "discard"
    assert build.make_configs("fedfomo", {})[1].if_none_helps == "keep"
