"""One round of FedSpa, worked out by hand.

The model is a linear layer without bias, 3 inputs and 2 classes. Its six weights are numbered row by row:

    class 0:  0 1 2        the server holds   w = ( 1      0.5    -2 )
    class 1:  3 4 5                               (-0.125  0.75    1 )

Three clients, two of them sampled: A and B. C is not. Density 0.5 means that three weights are active in each mask.
Learning rate 0.5, weight decay 0.5, gradients clipped to norm 2.5, one epoch of one batch, initial pruning rate 0.5.

Client A: x = (3, 4, 5), label 0; mask {0, 1, 5}
    starts from        w_A = (1, 0.5, 0; 0, 0, 1)
    logits             3 * 1 + 4 * 0.5 = 5 and 5 * 1 = 5: both classes have probability 1/2
    gradient           (p - onehot) x = (-1.5, -2, -2.5; 1.5, 2, 2.5)
    its norm           sqrt(2 * (2.25 + 4 + 6.25)) = 5, over all six; clipped to 2.5, it is halved
                       (over the three active weights it would be sqrt(12.5) = 3.54)
    step               w - 0.5 * (g / 2 + 0.5 * w) = 0.75 * w - 0.25 * g
                       0: 0.75 + 0.375 = 1.125;  1: 0.375 + 0.5 = 0.875;  5: 0.75 - 0.625 = 0.125
    U_A                0: 1 - 1.125 = -0.125;  1: 0.5 - 0.875 = -0.375;  5: 1 - 0.125 = 0.875
    prune              ceil(0.5 * 3) = 2 of |w| = {0: 1.125, 1: 0.875, 5: 0.125}: 5 and 1 go, 0 stays
    regrow             two of {1, 2, 3, 4, 5}. At any weights the gradient's rows are -q x and q x, so its magnitude
                       orders candidates by |x| of their column: {1: 4, 2: 5, 3: 3, 4: 4, 5: 5}: 2 and 5 grow
    next mask          {0, 2, 5}: 5 was pruned a moment ago and is back, 1 is not, 2 is new

Client B: x = (4, 5, 3), label 1, three times; mask {1, 3, 5}
    starts from        w_B = (0, 0.5, 0; -0.125, 0, 1)
    logits             5 * 0.5 = 2.5 and 4 * -0.125 + 3 * 1 = 2.5: 1/2 each
    gradient           (2, 2.5, 1.5; -2, -2.5, -1.5), a mean over three equal examples; norm 5, halved
    step               1: 0.375 - 0.625 = -0.25;  3: -0.09375 + 0.5 = 0.40625;  5: 0.75 + 0.375 = 1.125
    U_B                1: 0.5 + 0.25 = 0.75;  3: -0.125 - 0.40625 = -0.53125;  5: 1 - 1.125 = -0.125
    prune              1 (|-0.25|) and 3 (0.40625) go, 5 stays
    regrow             two of {0: 4, 1: 5, 2: 3, 3: 4, 4: 5}: 1 and 4
    next mask          {1, 4, 5}

Server: w - (U_A + U_B) / 2, whoever holds a weight, and although B has three examples and A one
    0: 1 + 0.125 / 2 = 1.0625                       (a mean over its one holder would give 1.125)
    1: 0.5 - (-0.375 + 0.75) / 2 = 0.3125           (weighted by examples, 0.5 - 0.46875)
    2: -2, which nobody holds
    3: -0.125 + 0.53125 / 2 = 0.140625              (a mean over its one holder would give 0.40625)
    4: 0.75, which nobody holds
    5: 1 - (0.875 - 0.125) / 2 = 0.625

Next, A is sent (1.0625, 0, -2; 0, 0, 0.625) and B (0, 0.3125, 0; 0, 0.75, 0.625): weights that grew start from what the
server holds, not from zero. C keeps its mask {0, 2, 4} and would be sent (1.0625, 0, -2; 0, 0.75, 0).
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from sparsona.data.federation import Federation
from sparsona.engine.plan import participation
from sparsona.engine.population import Population
from sparsona.engine.rounds import received_work, simulate
from sparsona.executors.serial import Serial
from sparsona.experiment import build

A, B, C = 0, 1, 2
START = [1.0, 0.5, -2.0, -0.125, 0.75, 1.0]
MASKS = {A: {0, 1, 5}, B: {1, 3, 5}, C: {0, 2, 4}}
SERVER = [1.0625, 0.3125, -2.0, 0.140625, 0.75, 0.625]


class TurnsInEval(nn.Linear):
    """In evaluation mode, as dropout and BatchNorm would, it does something else: its inputs change places."""

    def forward(self, x):
        return super().forward(x if self.training else x.roll(-1, dims=-1))


def play_one_round(method, layer):
    """The product's setting and its population after the first of three rounds."""
    x_a, x_b = torch.tensor([[3.0, 4.0, 5.0]]), torch.tensor([[4.0, 5.0, 3.0]])
    none = (torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    test = (torch.ones(1, 3), torch.tensor([0]))
    federation = Federation.from_clients(
        [
            (x_a, torch.tensor([0]), *none, *test),
            (x_b.repeat(3, 1), torch.tensor([1, 1, 1]), *none, *test),
            (x_a, torch.tensor([1]), *none, *test),
        ],
        num_classes=2,
    )
    model = layer(3, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor(START).reshape(2, 3))
    options = {"rounds": 3, "per_round": 2, "batch_size": 4, "epochs": 1}
    options |= {"lr": 0.5, "weight_decay": 0.5, "clip_norm": 2.5, "prune_rate": 0.5, "density": 0.5}
    for seed in range(100):
        context = build.make_context(
            build.make_config(method, options | {"seed": seed}, federation, model), federation, model
        )
        if participation(context.plan, context.clients, 0).trains == (A, B):
            break
    else:
        pytest.fail("no seed samples A and B")
    star = simulate(context, Serial(context))
    server = star.start().server
    masks = {k: mask.like(torch.tensor([i in MASKS[k] for i in range(6)])) for k, mask in server.masks.items()}
    states = {k: replace(context.fresh_state(k), mask=mask) for k, mask in masks.items()}
    population, _ = star.play(Population(replace(server, masks=masks), states), 0)
    return context, population


def active(mask):
    return set(mask["weight"].flatten().nonzero().flatten().tolist())


def check(context, population, masks):
    assert population.server.params["weight"].flatten().tolist() == pytest.approx(SERVER, abs=2e-6)
    assert {k: active(mask) for k, mask in population.server.masks.items()} == masks
    assert {k: active(state.mask) for k, state in population.states.items()} == masks
    for k in (A, B, C):
        sent = [SERVER[i] if i in masks[k] else 0.0 for i in range(6)]
        assert received_work(context, population, k).params["weight"].flatten().tolist() == pytest.approx(
            sent, abs=2e-6
        )


def test_dst():
    check(*play_one_round("fedspa", nn.Linear), {A: {0, 2, 5}, B: {1, 4, 5}, C: {0, 2, 4}})


def test_rsm():
    """Training is the same; the masks stay."""
    check(*play_one_round("fedspa-rsm", nn.Linear), MASKS)


def test_the_gradient_for_regrowth_is_taken_in_eval_mode():
    """In eval mode A's input is (4, 5, 3) and B's is (5, 3, 4); training is as before.

    A: candidates {1: 5, 2: 3, 3: 4, 4: 5, 5: 3}: 1 and 4 grow. B: {0: 5, 1: 3, 2: 4, 3: 5, 4: 3}: 0 and 3 grow.
    """
    check(*play_one_round("fedspa", TurnsInEval), {A: {0, 1, 4}, B: {0, 3, 5}, C: {0, 2, 4}})
