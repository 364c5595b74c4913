"""One round of DisPFL among three peers, worked out by hand.

The model is a linear layer without bias, 3 inputs and 2 classes; its six weights are numbered row by row. In the last
round each peer trained in its mask ("used"), then moved one entry of it ("next"); learning rate 0.5 in what follows.

    A   w = (1 2  0; 0 0 4)    used {0, 1, 5}    next {0, 2, 5}: 1 was pruned, 2 is new
    B   w = (0 6  0; 3 0 8)    used {1, 3, 5}    next {1, 4, 5}: 3 was pruned, 4 is new
    C   w = (5 0 -2; 0 1 0)    used {0, 2, 4}    next {0, 3, 4}: 2 was pruned, 3 is new

All hear all. The sum of the three models is (6 8 -2; 3 1 12).

Divided by the next masks, as in Algorithm 1 line 7: their counts are (2 1 1; 1 2 2)
    A   0: 6 / 2 = 3;  2: -2 / 1 = -2;  5: 12 / 2 = 6
    B   1: 8 / 1 = 8, since A pruned it: it adds, and does not count;  4: 1 / 2, since B counts, where it has nothing
        yet;  5: 6
    C   0: 3;  3: 3 / 1 = 3, which is B's, who pruned it;  4: 1 / 2

Divided by the masks last used, as the authors do: their counts are (2 2 1; 1 1 2)
    A   0: 3;  2: -2;  5: 6
    B   1: 8 / 2 = 4;  4: 1 / 1 = 1, which is C's;  5: 6
    C   0: 3;  3: 3;  4: 1
The mean of all, in which each entry counts where it was trained: (3 4 -2; 3 1 6).

On a graph where B hears A alone, the sum is (1 8 0; 3 0 12). Nobody who is heard was trained in entry 4: B starts there
from 0. By the next masks its 1 is 8 / 1, by those used 8 / 2; its 5 is 12 / 2.

D never trained, and its mask is {0, 1, 4}. It only listens, to all three: by the next masks (3 8 .; . 0.5 .), by those
used (3 4 .; . 1 .). Its own initial weights, ones, are in neither.

Then B trains, once, on x = (0, 0, 1), label 1. By the used masks it starts from (0 4 0; 0 1 6): logits 0 and 6, so the
probability of class 1 is p = 1 / (1 + exp(-6)) = 0.997527, and the gradient is zero but for entry 2 (1 - p) and entry 5
(p - 1): w_5 = 6 + 0.5 * 0.002473 = 6.001236; 2 is outside its mask. What B says next is (4, 1, 6.001236) on {1, 4, 5}.
In the first round half of the mask is pruned, ceil(0.5 * 3) = 2 entries: 4 and 1, the smallest. The gradient at the new
weights is again largest in 2 (and 5, which is there already), and zero elsewhere, where the lowest index wins: 2 and 0
grow, and the next mask is {0, 2, 5}.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from sparsona.core.method import Support, dense, masked, message
from sparsona.data.federation import Federation
from sparsona.engine.gossip import consensus
from sparsona.engine.graphs import Graph
from sparsona.engine.population import Population
from sparsona.engine.rounds import received_work, simulate
from sparsona.executors.serial import Serial
from sparsona.experiment import build
from sparsona.methods.dispfl import DisPFLState
from sparsona.wire.codec import decode

A, B, C, D = range(4)
WEIGHTS = {A: (1, 2, 0, 0, 0, 4), B: (0, 6, 0, 3, 0, 8), C: (5, 0, -2, 0, 1, 0)}
USED = {A: {0, 1, 5}, B: {1, 3, 5}, C: {0, 2, 4}}
NEXT = {A: {0, 2, 5}, B: {1, 4, 5}, C: {0, 3, 4}}
EVERYBODY = ((B, C), (A, C), (A, B), (A, B, C))


def flags(context, places):
    return context.params.like(torch.tensor([place in places for place in range(6)]))


def population_of(divide_by, heard):
    """The three who trained, and what each said; that the product says just this, `test_a_whole_round` sees."""
    x = torch.tensor([[0.0, 0.0, 1.0]])
    none = (torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    one = (x, torch.tensor([1]), *none, x, torch.tensor([1]))
    federation = Federation.from_clients([one] * 4, num_classes=2)
    model = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    options = {"rounds": 3, "per_round": 4, "batch_size": 4, "epochs": 1, "lr": 0.5, "weight_decay": 0.0}
    options |= {"density": 0.5, "prune_rate": 0.5, "divide_by": divide_by}
    context = build.make_context(build.make_config("dispfl", options, federation, model), federation, model)
    object.__setattr__(context.plan, "graph", Graph("file", sources=heard))
    states, messages = {}, {}
    for k in (A, B, C):
        params = context.params.like(torch.tensor(WEIGHTS[k], dtype=torch.float32))
        states[k] = DisPFLState(params, flags(context, USED[k]), flags(context, NEXT[k]), context.buffers)
        parts = {"model": masked(params, states[k].used, Support.BITS)}
        if divide_by == "new":
            parts["mask"] = dense(states[k].mask)
        messages[k] = message(context.plan.round_at(0).on(context.clients[k]), parts)
    return context, Population(None, states, messages)


def received(context, population, client):
    return received_work(context, population, client).params.flat.tolist()


@pytest.mark.parametrize(
    ("divide_by", "expected"),
    [
        ("new", {A: (3, 0, -2, 0, 0, 6), B: (0, 8, 0, 0, 0.5, 6), C: (3, 0, 0, 3, 0.5, 0)}),
        ("used", {A: (3, 0, -2, 0, 0, 6), B: (0, 4, 0, 0, 1, 6), C: (3, 0, 0, 3, 1, 0)}),
    ],
)
def test_the_mixture(divide_by, expected):
    context, population = population_of(divide_by, EVERYBODY)
    for client, weights in expected.items():
        assert received(context, population, client) == list(weights)
    mean = consensus(context.server_side, population, 1)
    assert mean.flat.tolist() == [3, 4, -2, 3, 1, 6]


@pytest.mark.parametrize(("divide_by", "one"), [("new", 8), ("used", 4)])
def test_an_entry_that_nobody_heard_was_trained_in_is_zero(divide_by, one):
    context, population = population_of(divide_by, ((B,), (A,), (A,), (A,)))
    assert received(context, population, B) == [0, one, 0, 0, 0, 6]


@pytest.mark.parametrize(("divide_by", "expected"), [("new", (3, 8, 0, 0, 0.5, 0)), ("used", (3, 4, 0, 0, 1, 0))])
def test_who_never_trained_only_listens(divide_by, expected):
    context, population = population_of(divide_by, EVERYBODY)
    fresh = replace(context.fresh_state(D), mask=flags(context, {0, 1, 4}))
    assert not fresh.used.flat.any()
    population = replace(population, states={**population.states, D: fresh})
    assert received(context, population, D) == list(expected)


@pytest.mark.parametrize("divide_by", ["used", "new"])
def test_a_whole_round(divide_by):
    context, population = population_of(divide_by, EVERYBODY)
    after, _ = simulate(context, Serial(context)).play(population, 0)
    state, update = after.states[B], decode(after.messages[B])
    if divide_by == "new":  # it starts from 8 and 0.5 in 1 and 4: 4 and 5 are the smallest, 2 and 5 grow
        assert update.parts["model"].values.tolist() == pytest.approx([8, 0.5, 6.001236], abs=1e-6)
        assert update.parts["mask"].tree().flat.nonzero().flatten().tolist() == [1, 2, 5]
        return
    assert list(update.parts) == ["model"]
    assert state.params.flat.tolist() == pytest.approx([0, 4, 0, 0, 1, 6.001236], abs=1e-6)
    assert update.parts["model"].values.tolist() == pytest.approx([4, 1, 6.001236], abs=1e-6)
    assert update.parts["model"].mask.flat.nonzero().flatten().tolist() == [1, 4, 5]
    assert state.used.flat.nonzero().flatten().tolist() == [1, 4, 5]
    assert state.mask.flat.nonzero().flatten().tolist() == [0, 2, 5]
