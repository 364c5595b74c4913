"""One round of pFedGate, worked out by hand.

The model is a linear layer without bias, 2 inputs and 2 classes. Its four weights, row by row, are four blocks of one
entry each: s_min = 1/4 makes the first one entry long, and the other three share the rest.

    class 0:  0 1        the server holds   theta = (6 -1)
    class 1:  2 3                                   (4 -2)

s = 0.5: two entries, block 0 always being one of them. The gates have no norms, one path, and weights of zero: what
they say is the sigmoid of their bias, b, whatever the input. Learning rates 0.4, weight decay 0.5, no clipping, and
momentum 0.9, which does nothing in one step. Three clients, of whom A and B are sampled; C, with four examples, is not.

Client A: x = (1, 2), label 0; b = (-l, l, 0, 0) with l = log 3
    G = M              (1/4, 3/4, 1/2, 1/2)
    I*                 block 0 in any case, and 1, the best of the others
    M' = M I*          (1/4, 3/4, 0, 0); theta' = (1.5, -0.75; 0, 0)
    logits             1.5 - 2 * 0.75 = 0 and 0: both classes have probability 1/2
    by theta'          (p - onehot) x = (-0.5, -1; 0.5, 1)
    by theta           times M': (-0.125, -0.75; 0, 0)
    step               0.4 * (g + theta / 2): 0: 0.4 * (-0.125 + 3) = 1.15;  1: 0.4 * (-0.75 - 0.5) = -0.5
                       blocks 2 and 3 were not used: they do not decay
    theta_A            (4.85, -0.5; 4, -2)
    by M'              by theta' times theta: (-3, 1; 2, -2)
    by G               M' = M (I* - sg(G) + G) with M = G: dM'/dG = I* + G = (5/4, 7/4, 1/2, 1/2)
                       (-3.75, 1.75, 1, -1)
    by b               times G (1 - G) = (3/16, 3/16, 1/4, 1/4): (-0.703125, 0.328125, 0.25, -0.25)
    by the weights     each times x
    step               b - 0.4 * (g + b / 2) = 0.8 b - 0.4 g; the weights, at zero, -0.4 g
    sends              blocks 0 and 1: (-1.15, 0.5)

    With no gradient to dropped blocks (the authors' way), M' = M (1 - sg(G) + G) where kept: the same for 0 and 1,
    and 0 for 2 and 3.

Client B: x = (1, 2), label 1, three times; b = (0, -l, l, 0)
    G = M              (1/2, 1/4, 3/4, 1/2): 0 and 2 are kept
    theta'             (3, 0; 3, 0): logits 3 and 3, 1/2 each
    by theta'          (0.5, 1; -0.5, -1), by theta (0.25, 0; -0.375, 0)
    step               0: 0.4 * (0.25 + 3) = 1.3;  2: 0.4 * (-0.375 + 2) = 0.65
    sends              blocks 0 and 2: (-1.3, -0.65)

Server, index by index over those who sent it, by numbers of examples 1 and 3
    0: 6 - (1.15 + 3 * 1.3) / 4 = 4.7375;  1: -1 + 0.5 = -0.5;  2: 4 - 0.65 = 3.35;  3: -2
The authors' dense mean, over all 8 examples, C standing still, and with decay also where nothing was used:
    A: 1.15, -0.5, 0.4 * 2 = 0.8, 0.4 * -1 = -0.4;  B: 1.3, 0.4 * -0.5 = -0.2, 0.65, -0.4
    0: 6 - (1.15 + 3.9) / 8;  1: -1 + (0.5 + 0.6) / 8;  2: 4 - (0.8 + 1.95) / 8;  3: -2 + (0.4 + 1.2) / 8
"""

from dataclasses import replace
from math import log

import pytest
import torch
from torch import nn

from sparsona.core.tree import Tree
from sparsona.data.federation import Federation
from sparsona.engine.plan import participation
from sparsona.engine.population import Population
from sparsona.engine.rounds import received_work, simulate
from sparsona.executors.serial import Serial
from sparsona.experiment import build

A, B, C = 0, 1, 2
L = log(3)
BIAS = {A: [-L, L, 0.0, 0.0], B: [0.0, -L, L, 0.0], C: [0.0, 0.0, 0.0, 0.0]}


def play_one_round(**more):
    x = torch.tensor([[1.0, 2.0]])
    none = (torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64))
    test = (torch.ones(1, 2), torch.tensor([0]))
    clients = [(x, [0]), (x.repeat(3, 1), [1, 1, 1]), (x.repeat(4, 1), [0, 1, 0, 1])]
    federation = Federation.from_clients([(x, torch.tensor(y), *none, *test) for x, y in clients], num_classes=2)
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[6.0, -1.0], [4.0, -2.0]]))
    options = {"rounds": 3, "per_round": 2, "batch_size": 4, "epochs": 1, "lr": 0.4, "gate_lr": 0.4}
    options |= {"weight_decay": 0.5, "clip_norm": None, "density": 0.5, "smallest": 0.25, "num_blocks": 4}
    options |= {"pre_norm": False, "post_norm": False, **more}
    for seed in range(100):
        config = build.make_config("pfedgate", options | {"seed": seed}, federation, model)
        context = build.make_context(config, federation, model)
        if participation(context.plan, context.clients, 0).trains == (A, B):
            break
    else:
        pytest.fail("no seed samples A and B")
    star, states = simulate(context, Serial(context)), {}
    for client, bias in BIAS.items():
        state = context.fresh_state(client)
        named = {"0.weight": torch.zeros(4, 2), "0.bias": torch.tensor(bias)}
        states[client] = replace(state, gate=Tree.of(named, state.gate.layout))
    population, record = star.play(Population(star.start().server, states), 0)
    return context, population, record


def close(tensor, expected):
    assert tensor.flatten().tolist() == pytest.approx(expected, abs=2e-6)


def test_one_round():
    context, population, record = play_one_round()
    close(population.server.params["weight"], [4.7375, -0.5, 3.35, -2.0])
    state = population.states[A]
    by_bias = [-0.703125, 0.328125, 0.25, -0.25]
    close(state.gate["0.bias"], [0.8 * b - 0.4 * g for b, g in zip(BIAS[A], by_bias, strict=True)])
    close(state.gate["0.weight"], [-0.4 * g * x for g in by_bias for x in (1.0, 2.0)])
    close(state.scores, 2 * [0.25, 0.75, 0.5, 0.5])
    assert [turn.traffic.paper_up for turn in record.turns] == [8, 8]  # two entries each: q = 1/2
    # What A deploys now: the new model behind the scores of its training.
    params, _ = context.method.deploy(received_work(context, population, A))
    close(params["weight"], [4.7375 / 4, -0.375, 0.0, 0.0])


def test_no_gradient_to_dropped_blocks():
    _, population, _ = play_one_round(straight_through="kept")
    by_bias = [-0.703125, 0.328125, 0.0, 0.0]
    close(population.states[A].gate["0.bias"], [0.8 * b - 0.4 * g for b, g in zip(BIAS[A], by_bias, strict=True)])


def test_dense_mean():
    _, population, record = play_one_round(aggregation="dense", steps="all")
    expected = [6 - (1.15 + 3.9) / 8, -1 + (0.5 + 0.6) / 8, 4 - (0.8 + 1.95) / 8, -2 + (0.4 + 1.2) / 8]
    close(population.server.params["weight"], expected)
    assert [turn.traffic.paper_up for turn in record.turns] == [16, 16]
