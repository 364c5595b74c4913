"""LotteryFL: clients prune what they receive, rewind to the initial weights, and train.

By hand, a linear layer of 4 inputs and 2 classes: eight weights and two biases, ten entries.

    initial weights   1  1  1  1    received    8 -7  6 -5    a quarter: ceil(0.25 * 7) = 2 go, the smallest of what was
                      1  1  1  1                4 -3  2 -1    received, -1 and 2
    biases            3  3                      0  0

The client starts from ones and threes: 1 1 1 1, 1 1 0 0 and 3 3. Its example x = (0, 0, 1, 1.1) has outputs 6 - 5.5 =
0.5 and 2 - 1.1 = 0.9 before that: class 1.
"""

from __future__ import annotations

import pytest
import torch
from lenet5 import MASK, SIZE
from torch import nn

import sparsona as sp
from sparsona.core.method import Client, Round
from sparsona.core.round import Batch
from sparsona.core.seeds import Seeds
from sparsona.core.task import Task
from sparsona.core.tree import Tree, counts
from sparsona.engine.rounds import simulate
from sparsona.executors.serial import Serial
from sparsona.experiment import build
from sparsona.methods import card
from sparsona.methods.lotteryfl import LotteryFLConfig, lotteryfl
from sparsona.sparsity.erk import kept_count
from sparsona.testing import Case
from sparsona.testing.case import fingerprint

PRUNES = {"accuracy_threshold": 0.05, "prune_rate": 0.2, "density": 0.7}
BATTERY = {"lotteryfl": {"options": {**PRUNES, "momentum": 0.5}, "accuracy": 0.35}}
# The mask and the initial weights; the model; a gradient.
MEMORY = [("lotteryfl", {}, MASK + SIZE, MASK + 2 * SIZE, MASK + 3 * SIZE, 0)]

TASK = Task(nn.Linear(4, 2), (4,), 2)
RECEIVED = [8.0, -7.0, 6.0, -5.0, 4.0, -3.0, 2.0, -1.0, 0.0, 0.0]
ROUND = Round(0, 3, 1.0, 8, Seeds(0).at(0)).on(Client(0, 4, num_clients=2))


class OneExample:
    """A probe with x = (0, 0, 1, 1.1) of class 1 as validation data."""

    def validation(self, flops=None):
        assert flops == 2 * 8 + 2  # the model as it was received
        index = torch.zeros(1, dtype=torch.int64)
        yield Batch(torch.tensor([[0, 0, 1, 1.1]]), torch.tensor([1]), torch.ones(1), index, index)


def begun(**options):
    """The State, the Work before the first step, and what the client sends if it then takes none."""
    method = lotteryfl(TASK, LotteryFLConfig(**{"prune_rate": 0.25, **options}))
    params, buffers = TASK.init(0)
    initial = params.like(torch.tensor([1.0] * 8 + [3.0] * 2))
    state = method.init_client(initial, buffers, ROUND.client, Seeds(0))
    server = method.server.init(params.like(torch.tensor(RECEIVED)), (ROUND.client,), Seeds(0))
    inbox = (method.server.reply(server, ROUND.client, ROUND),)
    received = method.receive(state, inbox, OneExample(), ROUND)
    assert received.params.flat.tolist() == RECEIVED  # what a client is evaluated with is neither pruned nor rewound
    work = method.phases[0].enter(received, OneExample(), ROUND)
    return *method.finish(state, work, inbox, OneExample(), ROUND), work


def test_a_ticket_by_hand():
    state, update, work = begun()
    assert work.params.flat.tolist() == [1, 1, 1, 1, 1, 1, 0, 0, 3, 3]
    assert state.mask.flat.tolist() == [True] * 6 + [False] * 2 + [True] * 2
    assert update.parts["model"].bitmap is not None
    assert update.parts["model"].values.tolist() == [1] * 6 + [3] * 2
    assert begun(rewind=False)[2].params.flat.tolist() == [8, -7, 6, -5, 4, -3, 0, 0, 0, 0]


@pytest.mark.parametrize("options", [{"accuracy_threshold": 1.0}, {"density": 1.0}])
def test_a_client_that_does_not_prune_goes_on(options):
    """Its accuracy is not above the threshold, or its density not above the target."""
    state, update, work = begun(**options)
    assert work.params.flat.tolist() == RECEIVED
    assert bool(state.mask.flat.all())
    assert update.parts["model"].bitmap is None


def test_the_last_step_ends_at_the_target():
    assert begun(density=0.9)[0].mask.flat.tolist() == [True] * 7 + [False] + [True] * 2
    assert int(begun(density=0.9, overshoots=True)[0].mask.flat.sum()) == 8


def test_masks_shrink_to_the_target_and_no_further():
    history = Case(card("lotteryfl"), PRUNES).history
    sizes = [sum(counts(state.mask)) for state in history.last.states.values()]
    assert min(sizes) == kept_count(history.context.task.layout.size, 0.7)
    for state in history.last.states.values():
        assert torch.equal(state.initial.flat, history.context.params.flat)


def test_without_pruning_it_is_fedavg():
    """Clients of equally many examples, none of which can be more accurate than 1: the same bits after three rounds."""
    random = torch.Generator().manual_seed(0)
    clients = [
        (torch.rand(20, 3, generator=random), torch.arange(20) % 2, torch.rand(4, 3), torch.arange(4) % 2)
        for _ in range(4)
    ]
    federation = sp.Federation.from_clients(clients)
    options = {"rounds": 3, "per_round": 4, "epochs": 2, "batch_size": 5, "executor": "serial"}

    def served(name: str, **more) -> Tree:
        model = nn.Linear(3, 2)
        with torch.no_grad():
            model.weight.fill_(0.1)
            model.bias.fill_(0.0)
        config = build.make_config(name, {**options, **more}, federation, model)
        context = build.make_context(config, federation, model)
        engine = simulate(context, Serial(context))
        population = engine.start()
        for index in range(3):
            population, _ = engine.play(population, index)
        return population.server.params

    assert fingerprint(served("lotteryfl", accuracy_threshold=1.0)) == fingerprint(served("fedavg"))
    assert fingerprint(served("lotteryfl", accuracy_threshold=0.0)) != fingerprint(served("fedavg"))
