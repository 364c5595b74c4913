"""Per-FedAvg: a shared model from which one step leads to a good model for each client."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from lenet5 import SIZE
from line_by_hand import Line, weight
from torch import nn

import sparsona as sp
from sparsona.core.method import Batch, Tick
from sparsona.data.batches import in_order
from sparsona.engine.rounds import simulate
from sparsona.engine.turn import take_step
from sparsona.executors.graphed import Graphed
from sparsona.executors.serial import Serial
from sparsona.executors.stacked import Stacked
from sparsona.experiment import build
from sparsona.learning.phases import Model
from sparsona.methods.perfedavg import PerFedAvgConfig, perfedavg
from sparsona.testing.case import smooth_net

BATTERY = {
    "perfedavg": {"accuracy": 0.35},
    "perfedavg-hf": {"options": {"momentum": 0.5, "optimizer_memory": "keep"}, "accuracy": 0.35},
}
# The model, what a step holds besides, and a gradient.
INNER_GRADIENTS = ("perfedavg", "perfedavg-hf")
MEMORY = [
    ("perfedavg", {}, 0, SIZE, 3 * SIZE, 0),
    ("perfedavg-hf", {}, 0, SIZE, 5 * SIZE, 0),
    ("perfedavg", {"variant": "exact"}, 0, SIZE, 4 * SIZE, 0),
]
by_hand = partial(Line, perfedavg, PerFedAvgConfig, adapt_lr=0.1)
LONG = {"fo": {}, "hf": {"hf_length": 0.01}, "exact": {}}
TICK = Tick(torch.tensor(1.0), torch.tensor(0))


def batch(x, y):
    one = torch.ones(1)
    return Batch(torch.tensor([[x]]), torch.tensor([[y]]), one, one.long(), torch.tensor(0))


@pytest.mark.parametrize(("variant", "w"), [("fo", -0.12), ("hf", -0.064), ("exact", -0.064)])
def test_a_step_by_hand(variant, w):
    """f = a/2 (w - b)^2 on an example (x, y), with a = 2 x^2 and b = y / x; w = 1, both rates 0.1.

    (1, 3): gradient -4, so the adapted model is 1.4. (2, 0): a = 8, the gradient there is 11.2; FO goes to 1 - 1.12.
    (0.5, 1): a = 0.5, so (1 - 0.1 * 0.5) * 11.2 = 10.64. The loss is that of the adapted model, (2 * 1.4)^2 = 7.84.
    """
    line = by_hand(variant=variant, **LONG[variant])
    (phase,) = line.method.phases
    batches = (batch(1.0, 3.0), batch(2.0, 0.0), batch(0.5, 1.0))[: phase.batches_per_step]
    work, loss = take_step(phase, Model(line.params, line.buffers), batches, TICK)
    assert weight(work.params) == pytest.approx(w, abs=1e-4)
    assert float(loss) == pytest.approx(7.84)


@pytest.mark.parametrize(("variant", "w"), [("hf", 1.0), ("exact", 8.2)])
def test_the_hessians_part_is_limited_where_it_is_a_difference(variant, w):
    """adapt_lr = 0.5: (1, 3) leads to 3, where the gradient of (2, 0) is 24; 0.5 * 8 * 24 = 96 is limited to 24."""
    line = by_hand(variant=variant, adapt_lr=0.5, **LONG[variant])
    (phase,) = line.method.phases
    batches = (batch(1.0, 3.0), batch(2.0, 0.0), batch(2.0, 0.0))
    work, _ = take_step(phase, Model(line.params, line.buffers), batches, TICK)
    assert weight(work.params) == pytest.approx(w, abs=1e-3)


@pytest.mark.parametrize(
    ("variant", "epochs", "own", "w"), [("fo", 2, 1.32, 0.774528), ("exact", 6, 1.479232, 0.98684812)]
)
def test_a_round_by_hand(variant, epochs, own, w):
    """`line_by_hand` with adapt_lr = 0.1. FO: two epochs are one step of client 0, of 0.2 * 0.8 of the way to 3: 1.32;
    and, in batches of one example, three of client 1, each a factor 1 - 0.8 * 0.2 = 0.84: 0.592704. Their mean by
    examples is 0.774528. Exact: six epochs are two steps of client 0, of 0.2 * 0.64 of the way: 3 - 2 * 0.872^2 =
    1.479232; and six of client 1, each a factor 1 - 0.8 * 0.04 = 0.968: 0.968^6 = 0.8226868. Before the model predicts,
    it goes a fifth of the way to 3.
    """
    line = by_hand(variant=variant, epochs=epochs)
    assert weight(line.turn()[0].params) == pytest.approx(own)
    assert line.play().w == pytest.approx(w, abs=1e-5)

    class Probe:
        def batch(self):
            return batch(1.0, 3.0)

    received, *_ = line.turn(phases=())
    adapted = line.method.adapt(received, Probe(), None)
    assert line.deployed(adapted) == pytest.approx(w + 0.2 * (3 - w), abs=1e-5)
    tuned, *_ = line.turn(phases=[replace(line.method.tune, epochs=3)])
    assert line.deployed(tuned) == pytest.approx(line.deployed(adapted))  # one step


def directions(task, work, batches):
    """What a step of each variant subtracts: FO, HF, exact."""
    for variant in ("fo", "hf", "exact"):
        (phase,) = perfedavg(task, PerFedAvgConfig(adapt_lr=0.05, variant=variant)).phases
        at = work.params.like(work.params.flat.detach().requires_grad_())
        loss, _ = phase.loss(replace(work, params=at), batches[: phase.batches_per_step])
        yield torch.autograd.grad(loss, at.flat)[0]


def problem(model, scale=1.0):
    """A network after a few steps, and three batches of each client."""
    options = {"executor": "serial", "batch_size": 8, "clients": 10}
    context = build.make_context(build.make_config("perfedavg", options, model=model), None, model)
    task = context.task
    batches = [tuple(in_order(context.federation.examples(client, "train"), 8))[:3] for client in range(10)]
    batches = [three for three in batches if len(three) == 3]
    (phase,) = context.method.phases
    work = Model(context.params, context.buffers)
    for step in range(30):
        work, _ = take_step(phase, work, batches[step % len(batches)][:2], TICK)
    mean_loss = task.mean_loss
    task.mean_loss = lambda outputs, one: scale * mean_loss(outputs, one)
    return task, work, batches


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_hessian_free_agrees_with_exact(scale):
    """In a smooth network, at any length of the gradient. The Hessian's part shrinks with the square of `scale`."""
    task, work, batches = problem(smooth_net, scale)
    for three in batches:
        fo, hf, exact = directions(task, work, three)
        assert (hf - exact).norm() < 0.01 * (fo - exact).norm()


def test_hessian_free_mostly_agrees_where_there_are_kinks():
    """With ReLU: in the median."""
    task, work, batches = problem(None)
    found = [(*directions(task, work, three),) for three in batches]
    gaps = [float((hf - exact).norm() / (fo - exact).norm()) for fo, hf, exact in found]
    assert sorted(gaps)[len(gaps) // 2] < 0.01


def test_exact_is_what_second_derivatives_give():
    """Against autograd's own, without torch.func."""
    task, work, (batches, *_) = problem(None)
    w = work.params.like(work.params.flat.detach().requires_grad_())

    def gradient(at, one):
        value = task.mean_loss(task.forward(at, work.buffers, one.inputs, True, one.noise)[0], one)
        return torch.autograd.grad(value, at.flat, create_graph=True)[0]

    adapted = w.like((w.flat - 0.05 * gradient(w, batches[0])).detach().requires_grad_())
    slope = gradient(adapted, batches[1]).detach()
    product = torch.autograd.grad(gradient(w, batches[2]), w.flat, slope)[0]
    fo, _, exact = directions(task, work, batches)
    assert torch.allclose(fo, slope, 1e-4, 1e-6)
    assert torch.allclose(exact, slope - 0.05 * product, 1e-4, 1e-6)
    assert (fo - exact).norm() > 0.02 * exact.norm()


@pytest.mark.parametrize("variant", ["hf", "exact"])
@pytest.mark.parametrize("executor", [Stacked, Graphed])
def test_executors_agree(variant, executor):
    """Second derivatives for several clients at once, through LayerNorm, too."""

    def model():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 10))

    options = {"variant": variant, "clients": 3, "per_round": 3, "rounds": 1, "epochs": 1, "data_rate": 0.2}
    ends = []
    for make in (Serial, executor):
        context = build.make_context(build.make_config("perfedavg", options, model=model), None, model)
        engine = simulate(context, make(context))
        ends.append(engine.play(engine.start(), 0)[0].server.params.flat)
    assert torch.allclose(*ends, 0, 2e-5 if variant == "exact" else 1e-3)


@pytest.mark.parametrize(("name", "needed"), [("fedavg", 2), ("perfedavg", 4), ("perfedavg-hf", 6)])
def test_a_client_too_small_for_batch_norm_is_refused(name, needed):
    """A step reads two or three batches, each of which needs two examples."""

    def train(count):
        x, y = torch.arange(8.0).reshape(8, 1).repeat(1, 4), torch.arange(8) % 2
        sizes = (8, count)
        clients = [(x[:size], y[:size], x[:0], y[:0], x, y) for size in sizes]
        federation = sp.Federation.from_clients(clients, num_classes=2)
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        config = build.make_config(name, {"rounds": 1, "per_round": 2, "epochs": 1}, federation, net)
        context = build.make_context(config, federation, net)
        engine = simulate(context, Serial(context))
        assert engine.play(engine.start(), 0)[0].states

    with pytest.raises(sp.SparsonaError, match=f"a client of {needed - 1} training examples(.|\\n)*{needed} or more"):
        train(needed - 1)
    train(needed)


@pytest.mark.parametrize("variant", ["fo", "exact"])
def test_the_length_of_a_difference_that_is_not_taken_is_refused(variant):
    with pytest.raises(sp.SparsonaError, match=f"hf_length=0.01 with variant={variant}"):
        by_hand(variant=variant, hf_length=0.01)


def test_differences_in_low_precision_are_refused():
    line = by_hand()
    line.task.half = torch.bfloat16
    for variant in ("fo", "exact"):
        assert perfedavg(line.task, PerFedAvgConfig(variant=variant))
    with pytest.raises(sp.SparsonaError, match="variant=hf with precision=bf16"):
        perfedavg(line.task, PerFedAvgConfig(variant="hf"))
