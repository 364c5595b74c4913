"""D-PSGD: three peers worked out by hand, and what it is on a full graph.

The model is a linear layer without bias, 3 inputs and 2 classes; its six weights are numbered row by row. At first all
weights are 1. What the peers sent last:

    A   (3 0  0; 0 0 3)        B   (0 6  0; 3 0 6)        C   (6 0 -3; 0 3 0)

All receive from all: the mean is (9 6 -3; 3 3 9) / 3 = (3 2 -1; 1 1 3). On a graph where B receives from A alone, B has
(3 6 0; 3 0 9) / 2 = (1.5 3 0; 1.5 0 4.5). D never trained: it has the mean of the three, without its own ones.

B trains one step at learning rate 0.5 on x = (0, 0, 1), label 1. From the mean of all, its logits are -1 and 3, and the
probability of class 1 is p = 1 / (1 + exp(-4)) = 0.982014. The gradient is zero but for entry 2 (1 - p) and entry 5
(p - 1): w_2 = -1 - 0.5 * 0.017986 = -1.008993 and w_5 = 3.008993. From its neighbour's mean the logits are 0 and 4.5,
1 - p = 1 / (1 + exp(4.5)) = 0.010987, so w_2 = -0.005493 and w_5 = 4.505493.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lenet5 import HALF, MASK, SIZE, UNIFORM
from torch import nn

import sparsona as sp
from sparsona.analysis.clients import has_effects
from sparsona.core.method import dense, masked, message
from sparsona.data.federation import Federation
from sparsona.engine.gossip import consensus
from sparsona.engine.graphs import Graph
from sparsona.engine.population import Population
from sparsona.engine.rounds import check_plan, received_work, shared_model, simulate
from sparsona.executors.serial import Serial
from sparsona.experiment import build
from sparsona.methods.dpsgd import DPSGDState
from sparsona.wire.codec import decode, encode

BATTERY = {
    "dpsgd": {"options": {"density": 0.6, "graph": "random:2", "points": ()}, "accuracy": 0.35},
    "dpsgd-ft": {"options": {"tune_epochs": 2, "graph": "random:2"}, "accuracy": 0.5},
}
MEMORY = [
    # Its model, the sum of what it was sent, which becomes the model at work, and a gradient.
    ("dpsgd", {}, SIZE, 2 * SIZE, 3 * SIZE, 0),
    ("dpsgd", UNIFORM, HALF + MASK, 2 * HALF + MASK, 2 * HALF + MASK + SIZE, 0),
]

A, B, C, D = range(4)
WEIGHTS = {A: (3, 0, 0, 0, 0, 3), B: (0, 6, 0, 3, 0, 6), C: (6, 0, -3, 0, 3, 0)}
MEAN = [3, 2, -1, 1, 1, 3]
EVERYBODY = ((B, C), (A, C), (A, B), (A, B, C))
B_HEARS_A = ((B,), (A,), (A,), (A,))
LACKS_5 = 3  # a seed whose mask is without entry 5
STEP = {"rounds": 3, "per_round": 4, "batch_size": 4, "epochs": 1, "lr": 0.5, "weight_decay": 0.0}


def population_of(heard, method="dpsgd", **options):
    x = torch.tensor([[0.0, 0.0, 1.0]])
    none = (torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    one = (x, torch.tensor([1]), *none, x, torch.tensor([1]))
    federation = Federation.from_clients([one] * 4, num_classes=2)
    model = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    config = build.make_config(method, {**STEP, **options}, federation, model)
    context = build.make_context(config, federation, model)
    object.__setattr__(context.plan, "graph", Graph("file", sources=heard))
    states, messages = {}, {}
    for k in (A, B, C):
        params = context.params.like(torch.tensor(WEIGHTS[k], dtype=torch.float32))
        masks = context.fresh_state(k).masks
        for mask in masks:
            params = params.like(params.flat * mask.flat)
        states[k] = DPSGDState(params, context.buffers, masks)
        part = masked(params, masks[0]) if masks else dense(params)
        messages[k] = message(context.plan.round_at(0).on(context.clients[k]), {"model": part})
    return context, Population(None, states, messages)


def test_the_mean_by_hand():
    context, population = population_of(EVERYBODY)
    for client in range(4):
        assert received_work(context, population, client).params.flat.tolist() == MEAN
    assert consensus(context.server_side, population, 1).flat.tolist() == MEAN
    context, population = population_of(B_HEARS_A)
    assert received_work(context, population, B).params.flat.tolist() == [1.5, 3, 0, 1.5, 0, 4.5]
    assert consensus(context.server_side, population, 1).flat.tolist() == MEAN


def test_who_hears_nobody_goes_on_with_its_own():
    context, population = population_of(EVERYBODY)
    alone = replace(population, messages={})
    assert received_work(context, alone, B).params.flat.tolist() == list(WEIGHTS[B])
    assert received_work(context, alone, D).params.flat.tolist() == [1] * 6


def test_a_round_by_hand():
    context, population = population_of(EVERYBODY)
    after, _ = simulate(context, Serial(context)).play(population, 0)
    expected = pytest.approx([3, 2, -1.008993, 1, 1, 3.008993], abs=1e-6)
    assert after.states[B].params.flat.tolist() == expected
    assert decode(after.messages[B]).parts["model"].tree().flat.tolist() == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [3, 2, -1.008993, 1, 1, 3.008993]),
        ({"tune_from": "neighbours"}, [1.5, 3, -0.005493, 1.5, 0, 4.505493]),
    ],
)
def test_tuning_starts_from_the_mean_of_all(options, expected):
    """Also where a peer hears one other alone in the rounds; every message but its own is received, and charged."""
    context, population = population_of(B_HEARS_A, "dpsgd-ft", tune_epochs=1, **options)
    record, tuned = simulate(context, Serial(context)).finish(population)
    assert tuned[B].params.flat.tolist() == pytest.approx(expected, abs=1e-6)
    size = len(encode(population.messages[A]))
    received = {turn.client: turn.traffic.down // size for turn in record.turns}
    assert received == ({A: 1, B: 1, C: 1, D: 1} if options else {A: 2, B: 2, C: 2, D: 3})


@pytest.mark.parametrize("encoded", [False, True])
def test_one_mask_for_all(encoded):
    """The mask is drawn from the seed, so that nobody sends it: neither neighbours nor the mean of all need it."""
    context, population = population_of(EVERYBODY, density=0.5, seed=LACKS_5)
    (mask,) = context.fresh_state(A).masks
    assert int(mask.flat.sum()) == 3
    assert not mask.flat[5]  # which a step would move
    assert all(torch.equal(context.fresh_state(k).masks[0].flat, mask.flat) for k in range(4))
    assert torch.equal(context.fresh_state(D).params.flat, mask.flat.float())
    if encoded:
        population = replace(population, messages={k: encode(m) for k, m in population.messages.items()})
    expected = (torch.tensor(MEAN) * mask.flat).tolist()
    for client in range(4):
        assert received_work(context, population, client).params.flat.tolist() == expected
    assert consensus(context.server_side, population, 1).flat.tolist() == expected
    after, _ = simulate(context, Serial(context)).play(population, 0)
    assert all(not state.params.flat[~mask.flat].any() for state in after.states.values())
    assert decode(after.messages[B]).parts["model"].num_values == 3


def test_one_mask_for_a_seed_and_an_allocation():
    def mask(**options):
        return population_of(EVERYBODY, density=0.5, **options)[0].fresh_state(A).masks[0].flat.tolist()

    assert len({str(mask(seed=seed)) for seed in range(5)}) > 1
    net = sp.cost("dpsgd", model="lenet5", density=0.5, allocation="erk")
    assert net.inference_flops > sp.cost("dpsgd", model="lenet5", density=0.5).inference_flops


def equal_clients():
    random = torch.Generator().manual_seed(3)
    x, y = torch.randn(4, 12, 5, generator=random), torch.randint(0, 3, (4, 12), generator=random)
    return Federation.from_clients([(x[k, :8], y[k, :8], x[k, 8:], y[k, 8:]) for k in range(4)], num_classes=3)


def net():
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_on_a_full_graph_it_is_fedavg(momentum):
    """With all clients in every round, and all of a size: the same bits in every round, and after tuning.

    Models are added in client order in double precision, as FedAvg adds them; FedAvg's equal weights cancel."""
    options = {"rounds": 3, "per_round": 4, "epochs": 2, "batch_size": 3, "momentum": momentum, "tune_epochs": 2}
    shared, tuned = {}, {}
    for name, own in (("fedavg-ft", {}), ("dpsgd-ft", {"graph": "full"})):
        federation = equal_clients()
        context = build.make_context(build.make_config(name, {**options, **own}, federation, net), federation, net)
        engine = simulate(context, Serial(context))
        population, found = engine.start(), []
        for index in range(3):
            population, _ = engine.play(population, index)
            found.append(shared_model(context.server_side, population).flat)
        shared[name] = torch.stack(found)
        tuned[name] = torch.stack([work.params.flat for _, work in sorted(engine.finish(population)[1].items())])
    assert torch.equal(shared["fedavg-ft"], shared["dpsgd-ft"])
    assert torch.equal(tuned["fedavg-ft"], tuned["dpsgd-ft"])
    assert not torch.equal(tuned["dpsgd-ft"][0], tuned["dpsgd-ft"][1])


def test_one_step_a_round():
    context, population = population_of(EVERYBODY, steps_a_round=1, epochs=3)
    _, record = simulate(context, Serial(context)).play(population, 0)
    assert {turn.tally.steps for turn in record.turns} == {1}
    context, population = population_of(EVERYBODY, "dpsgd-ft", steps_a_round=1, tune_epochs=3)
    record, _ = simulate(context, Serial(context)).finish(population)
    assert {turn.tally.steps for turn in record.turns} == {3}  # tuning has all its epochs


def test_the_headline_is_the_mean_of_all(tmp_path):
    options = {"clients": 4, "rounds": 1, "epochs": 1, "data_rate": 0.2, "executor": "serial", "device": "cpu"}
    plain = sp.train("dpsgd", out=tmp_path / "plain", **{**options, "rounds": 10})
    assert plain._folder.facts.point == "consensus"
    assert {"received", "trained", "consensus"} <= set(plain.points)
    assert not has_effects(plain._folder)  # a shared model as headline is not compared with itself
    tuned = sp.train("dpsgd-ft", out=tmp_path / "tuned", tune_epochs=1, **options)
    assert has_effects(tuned._folder)
    assert 0 < plain.summary["accuracy"]["last10"] < 1
    assert plain.summary["protocol"].startswith("model: The mean of all peers' models.")
    assert "the mean of all peers' models after final tuning" in tuned.summary["protocol"]
    assert tuned._folder.facts.point == "tuned"
    assert "consensus" in tuned.points
    spent = tuned.summary["bytes"]
    costs = sp.cost("dpsgd-ft", data="digits", clients=4, rounds=1)
    assert spent["total"] == costs.encoded.tuning  # of the first round there is nothing to send


def test_presets():
    _, paper = build.make_configs("dpsgd", {"preset": "paper"})
    assert (paper.steps_a_round, paper.momentum, paper.weight_decay, paper.clip_norm) == (1, 0.0, 0.0, None)
    run, own = build.make_configs("dpsgd-ft", {"preset": "dispfl"})
    assert own.lr * run.tune_lr_scale == pytest.approx(0.1002, abs=1e-6)  # not decayed: round -1
    assert (own.epochs, own.clip_norm, run.lr_decay, run.tune_epochs) == (5, None, 0.998, 5)


def test_a_server_has_no_neighbours_to_tune_from():
    config = build.make_config("fedavg", {"tune_from": "all", "clients": 4, "data_rate": 0.2})
    with pytest.raises(sp.SparsonaError, match="tune_from=all for fedavg"):
        check_plan(build.make_context(config).server_side)
