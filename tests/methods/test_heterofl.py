"""HeteroFL and FedRolex: narrow networks by capacity. Their arithmetic is in tests/golden/test_heterofl_by_hand.py."""

from __future__ import annotations

import pytest
import torch
from lenet5 import SIZE
from torch import nn

from sparsona.core.errors import SparsonaError
from sparsona.costs import cost
from sparsona.engine.final import has_partial_global
from sparsona.engine.rounds import simulate
from sparsona.executors.graphed import Graphed
from sparsona.experiment import build
from sparsona.methods import card
from sparsona.testing import Case
from sparsona.testing.case import smooth_net

CAPACITIES = [1.0, 0.4, 0.1]
BATTERY = {
    "heterofl": {"options": {"capacities": CAPACITIES, "density": 0.8}, "accuracy": 0.35},
    "fedrolex": {"options": {"capacities": CAPACITIES, "density": 0.8, "optimizer": "adam"}, "accuracy": 0.2},
}
# LeNet5 with half of its units: 10 and 25 channels, 250 hidden units.
HALF_WIDTH = 4 * ((10 * 25 + 10) + (25 * 10 * 25 + 25) + (250 * 25 * 16 + 250) + (26 * 250 + 26))
WITH_FLAGS = 4 + 4  # the scaler's number, and 26 labels as bits
HALF = {"capacities": [0.5], "width": "rate"}
WITH_MEMORY = {"fedrolex": None}  # each round trains other units
MEMORY = [
    ("heterofl", {}, 0, SIZE, 2 * SIZE + WITH_FLAGS, 0),
    ("heterofl", HALF, 0, HALF_WIDTH, 2 * HALF_WIDTH + WITH_FLAGS, 0),
    ("heterofl", {**HALF, "scaler": False, "masked_loss": "off"}, 0, HALF_WIDTH, 2 * HALF_WIDTH, 0),
    ("fedrolex", HALF, 0, HALF_WIDTH, 2 * HALF_WIDTH + WITH_FLAGS, 0),
]


@pytest.mark.parametrize("name", ["heterofl", "fedrolex"])
def test_at_full_width_it_is_fedavg(name):
    """One window has all units: the same bits after three rounds, with the scaler, which then multiplies by 1."""
    plain = {"masked_loss": "off", "weight": "examples"}
    fedavg = Case(card("fedavg")).history.prints
    assert Case(card(name), plain).history.prints == fedavg
    assert Case(card(name), {**plain, "weight": "equal"}).history.prints != fedavg


def test_bytes_by_capacity():
    """Four bytes a parameter both ways, as papers count. A sixteenth of LeNet5's width: 2 and 4 channels, 32 units."""
    sixteenth = 4 * ((2 * 25 + 2) + (4 * 2 * 25 + 4) + (32 * 4 * 16 + 32) + (26 * 32 + 26))
    for capacity, size in ((1.0, SIZE), (0.5, HALF_WIDTH), (0.0625, sixteenth)):
        paper = cost("heterofl", model="lenet5", width="rate", capacities=[capacity]).paper
        assert (paper.down, paper.up) == (size, size)


def test_fit_is_the_widest_network_that_a_client_can_hold():
    """The widest layer of LeNet5 has 500 units. 350 of them keep 14 and 35 channels: 219,226 of 439,096 parameters;
    351 keep 15 and 36, and 226,307 are more than half."""
    found = cost("heterofl", model="lenet5", capacities=[0.5]).paper.down
    assert found == 4 * ((14 * 25 + 14) + (35 * 14 * 25 + 35) + (350 * 35 * 16 + 350) + (26 * 350 + 26))
    more = (15 * 25 + 15) + (36 * 15 * 25 + 36) + (351 * 36 * 16 + 351) + (26 * 351 + 26)
    assert found / 4 <= 439_096 / 2 < more
    assert cost("heterofl", model="lenet5", density=0.5).paper.down == found
    with pytest.raises(SparsonaError, match="no width fits"):
        cost("heterofl", model="lenet5", capacities=[0.0001])


def test_windows_roll_and_what_is_outside_stays():
    """Two rounds of clients that hold a tenth: HeteroFL's wide network changes in the same entries, FedRolex's in more.
    Both leave the rest alone."""
    moved = {}
    for name in ("heterofl", "fedrolex"):
        history = Case(card(name), {"capacities": [0.1]}).start().play(2)
        first, *later = (population.server.params.flat for population in history.populations)
        moved[name] = [(one != first).double().mean().item() for one in later]
        sent = history.sent[0].update.parts["model"].num_values
        assert 0.0 < moved[name][0] <= sent / len(first) <= 0.1
    assert moved["heterofl"][1] == pytest.approx(moved["heterofl"][0], abs=0.01)
    assert moved["fedrolex"][1] > 1.1 * moved["fedrolex"][0]


def test_absent_labels_are_never_predicted_unless_asked_for():
    options = {"capacities": CAPACITIES, "partition": "pathological:2"}
    for masked, share in ((True, 0.0), (False, 0.1)):
        history = Case(card("heterofl"), {**options, "masked_outputs": masked}).start().play(1)
        found = []
        for client in range(len(history.context.clients)):
            work = history.work(client)
            inputs = torch.cat([history.context.federation.examples(k, "test").inputs for k in range(6)])
            found.append(~work.labels[history.method.predict(work, inputs).argmax(1)])
        assert torch.cat(found).double().mean() >= share
        assert masked == (not torch.cat(found).any())


def test_absent_labels_are_left_out_without_a_bias_too():
    """Weights of 0 make a logit of 0, which can be the largest: plain weights cannot leave a label out then."""
    net = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10, bias=False))  # noqa: E731
    for masked_loss, filling in (("exclude", -1e4), ("zero", 0.0)):
        history = Case(card("heterofl"), {"masked_loss": masked_loss, "partition": "pathological:2"}, net).start()
        work = history.play(1).work(0)
        found = history.method.predict(work, history.context.federation.examples(0, "test").inputs)
        assert (found[:, ~work.labels] == filling).all()
        assert (found[:, work.labels] != filling).any()
        assert (history.method.deploy is None) == (masked_loss == "exclude")


@pytest.mark.parametrize(
    ("options", "partial"),
    [
        ({}, False),
        ({"capacities": [0.3, 1.0]}, False),
        ({"capacities": [0.3, 0.5]}, True),
        ({"capacities": [0.3, 1.0], "density": 0.9}, True),
        ({"capacities": [0.3, 0.5], "window": "rolling"}, False),
        (
            {"capacities": [0.3, 0.3, 0.3, 0.3, 0.3, 1.0], "novel": 5, "per_round": 1},
            True,
        ),  # the only wide one is not drawn to train
    ],
)
def test_the_wide_network_is_partial_if_no_client_trains_all_of_it(options, partial):
    assert has_partial_global(Case(card("heterofl"), options).start().context) == partial


@pytest.mark.parametrize("tuned", [False, True])
def test_statistics_are_estimated_before_predictions(tuned):
    """A narrow network predicts with the means of its own training data, whatever it was sent; tuned ones also do."""
    net = lambda: nn.Sequential(  # noqa: E731
        *(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    )
    history = Case(card("heterofl"), {"capacities": [0.3]}, model=net).start(tune_epochs=1).play(1)
    data = history.context.federation.examples(0, "train")
    work = history.engine.finish(history.last)[1][0] if tuned else history.work(0)
    x = nn.functional.conv2d(data.inputs, work.params["0.weight"], work.params["0.bias"])
    assert len(work.params["0.bias"]) == len(work.buffers["1.running_mean"]) < 8
    size = history.context.plan.batch_size
    means = torch.stack([some.mean((0, 2, 3)) for some in x.split(size) if len(some) > 1]).mean(0)
    assert torch.allclose(work.buffers["1.running_mean"], means, atol=1e-5)


def test_a_network_without_statistics_has_none_to_estimate():
    """One that takes means over a batch itself, in training alone: its models are made without a client's data."""

    class Centred(nn.Sequential):
        def forward(self, inputs):
            outputs = super().forward(inputs)
            return outputs - outputs.mean(0) if self.training else outputs

    net = lambda: Centred(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))  # noqa: E731
    context = Case(card("heterofl"), {"capacities": [0.3]}, model=net).start().context
    assert context.task.mixes_examples
    assert context.method.adapt is None


def test_captured_steps_of_several_widths_agree():
    """With `graphed`, in two rounds of moving windows; the battery has `stacked`."""
    case = Case(card("fedrolex"), {"capacities": CAPACITIES, "momentum": 0.9})
    alone, graphed = case.start(smooth_net).play(2), case.start(smooth_net)
    graphed.engine = simulate(graphed.context, Graphed(graphed.context))
    graphed.play(2)
    assert torch.allclose(alone.last.server.params.flat, graphed.last.server.params.flat, rtol=0, atol=1e-5)
    accuracies = [[found.correct for found in history.engine.evaluate(history.last, 2)] for history in (alone, graphed)]
    assert accuracies[0] == accuracies[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": "rolling", "optimizer_memory": "keep", "momentum": 0.9}, "rolling"),
        ({"model": "mlp:hidden=0"}, "no hidden layer"),
    ],
)
def test_what_is_refused(options, words):
    with pytest.raises(SparsonaError, match=words):
        Case(card("heterofl"), options).start()


def test_presets_train_as_the_authors_scripts():
    """CIFAR-10: HeteroFL's milestones are 150 and 250 of 400 rounds, FedRolex's optimizer is SGD with momentum."""
    config = build.make_config("heterofl", {"preset": "authors", "rounds": 400})
    plan = build.make_plan(config, 10, peers=False)
    scales = [plan.round_at(index).lr_scale for index in (0, 149, 150, 249, 250)]
    assert scales == pytest.approx([1, 1, 0.1, 0.1, 0.01])
    options = build.make_config("fedrolex", {"preset": "authors"}).options
    wanted = {"optimizer": "sgd", "lr": 2e-4, "momentum": 0.9, "weight_decay": 1e-3, "epochs": 1, "clip_norm": 1.0}
    assert {name: options[name] for name in wanted} == wanted
