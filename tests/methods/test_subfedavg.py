"""Sub-FedAvg: clients prune their sub-networks while they stay accurate.

By hand, a linear layer of 4 inputs and 2 classes: eight weights and two biases of 0, ten entries.

    weights after training     8 -7  6 -5      a quarter of them: ceil(0.25 * 7) = 2 go, the smallest are -1 and 2
                               4 -3  2 -1
    after the first epoch the smallest were the first two: the candidates differ in 4 of 8 weights, distance 0.5

    x = (0, 0, 1, 1.1): outputs 6 - 5.5 = 0.5 and 2 - 1.1 = 0.9, class 1; without the two weights 0.5 and 0, class 0
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lenet5 import MASK, SIZE
from torch import nn

from sparsona.core.errors import SparsonaError
from sparsona.core.method import Client, Round, message
from sparsona.core.round import Batch
from sparsona.core.seeds import Seeds
from sparsona.core.task import Task
from sparsona.core.tree import Tree, counts
from sparsona.experiment import build
from sparsona.learning.subnetworks import pruned_names, subnet_part
from sparsona.methods import card
from sparsona.methods.subfedavg import SubFedAvgConfig, SubFedAvgWork, subfedavg
from sparsona.sparsity.erk import kept_count
from sparsona.sparsity.prune import channels_of, num_pruned, prune_channels
from sparsona.testing import Case
from sparsona.wire.codec import decode, encode

PRUNES = {"accuracy_threshold": 0.05, "prune_rate": 0.2, "density": 0.7}
BATTERY = {
    "sub-fedavg": {"options": PRUNES, "accuracy": 0.35},
    "sub-fedavg-hy": {"options": {**PRUNES, "channel_rate": 0.2, "distance": 0.0}, "accuracy": 0.35},
}
# The mask and the model, then a gradient and two candidates.
MEMORY = [
    ("sub-fedavg", {}, MASK, MASK + SIZE, 3 * MASK + 2 * SIZE, 0),
    ("sub-fedavg-hy", {}, MASK, MASK + SIZE, 3 * MASK + 2 * SIZE, 0),
]

TASK = Task(nn.Linear(4, 2), (4,), 2)
WEIGHTS = [8.0, -7.0, 6.0, -5.0, 4.0, -3.0, 2.0, -1.0]
ROUND = Round(0, 3, 1.0, 8, Seeds(0).at(0)).on(Client(0, 4, num_clients=2))


def model(weights) -> Tree:
    return TASK.init(0)[0].like(torch.tensor([*weights, 0.0, 0.0]))


def mask_without(*entries) -> Tree:
    return model(WEIGHTS).like(torch.tensor([entry not in entries for entry in range(10)]))


class OneExample:
    """A probe with x = (0, 0, 1, 1.1) of some class as validation data, and of the other as training data."""

    def __init__(self, validation: int) -> None:
        self.label, self.passes = validation, []

    def validation(self, flops=None):
        return self._pass("validation", flops, self.label)

    def train(self, flops=None):
        return self._pass("train", flops, 1 - self.label)

    def _pass(self, name, flops, label):
        self.passes.append((name, flops))
        index = torch.zeros(1, dtype=torch.int64)
        yield Batch(torch.tensor([[0, 0, 1, 1.1]]), torch.tensor([label]), torch.ones(1), index, index)


def pruned(probe, early=(0, 1), **options):
    """Entries that the client's next mask lacks after a round from a full mask, and what it sends."""
    method = subfedavg(TASK, SubFedAvgConfig(**{"prune_rate": 0.25, **options}))
    params, buffers = TASK.init(0)
    state = method.init_client(params, buffers, ROUND.client, Seeds(0))
    work = SubFedAvgWork(model(WEIGHTS), buffers, state.mask.like(state.mask.flat.float()), mask_without(*early), ())
    inbox = (message(ROUND, {"model": subnet_part(params, state.mask, state.mask)}),)
    new, update = method.finish(state, work, inbox, probe, ROUND)
    return {entry for entry in range(10) if not new.mask.flat[entry]}, update


def test_two_weights_go_by_hand():
    """What is sent is the model inside the new mask, with that mask; one pass over validation data is charged."""
    probe = OneExample(validation=0)
    gone, update = pruned(probe)
    assert gone == {6, 7}
    sent = decode(encode(update)).parts["model"]
    assert sent.bitmap is not None
    assert sent.values.tolist() == [8, -7, 6, -5, 4, -3, 0, 0]
    assert probe.passes == [("validation", 2 * 6 + 2)]  # six weights at two operations, two biases


@pytest.mark.parametrize(
    ("label", "options", "gone"),
    [
        (0, {"early": (6, 7)}, set()),  # the candidates agree: distance 0
        (0, {"distance": 0.5}, set()),  # they must differ by more
        (0, {"distance": 0.49}, {6, 7}),
        (0, {"density": 1.0}, set()),  # the target is reached
        (1, {"density": 0.9}, {7}),  # one entry above the target: the last step is cut; outputs 0.5 and 2, class 1
        (0, {"density": 0.9, "overshoots": True}, {6, 7}),
        (0, {"accuracy_threshold": 1.0}, set()),  # an accuracy of 1 is not above 1
        (0, {"accuracy_on": "train"}, set()),  # there its label is the other one
        (1, {"accuracy_on": "train"}, {6, 7}),
    ],
)
def test_when_a_client_prunes_by_hand(label, options, gone):
    assert pruned(OneExample(validation=label), **options)[0] == gone


def test_the_accuracy_is_that_of_the_pruned_model():
    """Unpruned, the model is right about class 1; pruned it is not. Nothing changes, and the mask is not sent again."""
    gone, update = pruned(OneExample(validation=1))
    assert gone == set()
    assert decode(encode(update)).parts["model"].bitmap is None


@pytest.mark.parametrize(("divide_by", "of_6"), [("new", 4.0), ("used", 2.0)])
def test_the_servers_mean_by_hand(divide_by, of_6):
    """Entry 6: client 0 has just pruned it, client 1 has 4: the mean is 4, or 4 / 2 if the mask before that counts.
    Entry 7: nobody had it, so it stays -1. The others: (2 + 4) / 2 = 3, whoever has more examples."""
    method = subfedavg(TASK, SubFedAvgConfig(divide_by=divide_by))
    half = method.server
    server = half.init(model(WEIGHTS), (Client(0, 5), Client(1, 500)), Seeds(0))
    server = type(server)(server.params, {0: mask_without(7), 1: mask_without(7)})
    total = half.zero(server, ROUND)
    for index, (value, new) in enumerate(((2.0, mask_without(6, 7)), (4.0, server.masks[1]))):
        values = model(WEIGHTS).like(torch.full((10,), value))
        part = subnet_part(values, server.masks[index], new)
        total = half.add(server, total, decode(encode(message(ROUND.on(Client(index, 5)), {"model": part}))))
    after = half.step(server, total, ROUND)
    assert after.params.flat.tolist() == [3, 3, 3, 3, 3, 3, of_6, -1, 3, 3]
    assert after.masks[0].flat.tolist() == mask_without(6, 7).flat.tolist()
    assert half.reply(after, Client(0, 5), ROUND).parts["model"].values.tolist() == [3] * 8  # m_k * w


def test_candidates_are_below_the_percentile():
    """As many as numpy's percentile leaves out, of any number of weights at any rate."""
    random = np.random.default_rng(0)
    for size in (1, 2, 10, 21, 200):
        for rate in (0.05, 0.1, 0.3, 0.5):
            values = np.abs(random.normal(size=size))
            below = int((values < np.percentile(values, 100 * rate)).sum())
            mask = Tree.of({"w": torch.ones(size, dtype=torch.bool)})
            assert num_pruned(mask, ("w",), rate) == (below,)


def test_scales_decide_over_filters():
    """The filter of channel 0 is smallest, the norm's scale of channel 1: the latter goes with all that belongs to it,
    and its output is 0 whatever goes in. At most half of three channels may go, rounded down: one."""
    net = nn.Sequential(nn.Conv2d(1, 3, 2), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(3, 2))
    task = Task(net, (1, 2, 2), 2)
    found = channels_of(task.layout, task.roles.norm)
    assert [(one.weight, one.others, one.scale) for one in found] == [
        ("0.weight", ("0.bias", "1.weight", "1.bias"), "1.weight")
    ]
    params, buffers = task.init(0)
    named = {name: torch.ones_like(value) for name, value in params.items()}
    named["0.weight"][0] = 0.1
    named["1.weight"][1] = -0.5
    params = Tree.of(named, params.layout)
    full = params.like(torch.ones_like(params.flat, dtype=torch.bool))
    mask = prune_channels(params, full, found, rate=0.9, least=0.5)
    for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
        assert mask[name].reshape(3, -1).float().mean(1).tolist() == [1, 0, 1]
    assert bool(mask["3.weight"].all())
    inside = params.like(params.flat * mask.flat)
    module = task.module(inside, buffers)
    assert module[:2](torch.rand(1, 1, 2, 2))[0, 1].item() == 0.0
    assert bool(full.flat.all())  # the mask before is as it was


def test_dispfls_names_include_scales_of_group_norms():
    net = nn.Sequential(nn.Conv2d(1, 4, 2), nn.GroupNorm(1, 4), nn.Flatten(), nn.Linear(4, 2))
    layout = Task(net, (1, 2, 2), 2).layout
    assert pruned_names(layout, "matrices") == ("0.weight", "3.weight")
    assert pruned_names(layout, "weights") == ("0.weight", "1.weight", "3.weight")


@pytest.mark.parametrize(
    ("options", "channels", "weights"),
    [
        ({}, {0}, {0, 1}),
        ({"channel_distance": 0.5}, set(), {0, 1}),  # each of the two has a distance of its own
        ({"distance": 0.5}, {0}, set()),
        ({"density": 0.8}, set(), {0, 1}),  # 24 of 30 entries must stay: two may go, and then not five more
        ({"density": 0.8, "overshoots": True}, {0}, {0, 1}),
        ({"channel_density": 1.0}, set(), {0, 1}),
        ({"accuracy_threshold": 1.0}, set(), set()),
    ],
)
def test_hybrid_by_hand(options, channels, weights):
    """Four filters of 2x2 with entries 1, 2, 3, 4, then eight weights 1 to 8; the last bias makes all of class 1.

    A quarter of the channels is one, the weakest is 0: with its bias five entries. A quarter of the weights is two. The
    candidates of the first epoch lacked channel 3 and the last two weights: both distances are 0.5.
    """
    task = Task(nn.Sequential(nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(4, 2)), (1, 2, 2), 2)
    method = subfedavg(task, SubFedAvgConfig(structure="hybrid", prune_rate=0.25, channel_rate=0.25, **options))
    params, buffers = task.init(0)
    entries = [1.0] * 4 + [2.0] * 4 + [3.0] * 4 + [4.0] * 4 + [0.0] * 4 + [float(k) for k in range(1, 9)] + [0.0, 1e4]
    params = params.like(torch.tensor(entries))
    state = method.init_client(params, buffers, ROUND.client, Seeds(0))
    early = state.mask.like(torch.tensor([place not in {12, 13, 14, 15, 19, 26, 27} for place in range(30)]))
    work = SubFedAvgWork(params, buffers, state.mask.like(state.mask.flat.float()), early, ())

    class Images(OneExample):
        def validation(self, flops=None):
            index = torch.zeros(1, dtype=torch.int64)
            yield Batch(torch.rand(1, 1, 2, 2), torch.tensor([1]), torch.ones(1), index, index)

    inbox = (message(ROUND, {"model": subnet_part(params, state.mask, state.mask)}),)
    mask = method.finish(state, work, inbox, Images(1), ROUND)[0].mask
    assert {place for place in range(4) if not mask["0.weight"][place].any()} == channels
    assert {place for place in range(4) if not mask["0.bias"][place]} == channels
    assert {place for place in range(8) if not mask["2.weight"].flatten()[place]} == weights
    assert bool(mask["2.bias"].all())
    assert sum(counts(mask)) == 30 - 5 * len(channels) - len(weights)


@pytest.mark.parametrize("name", ["sub-fedavg", "sub-fedavg-hy"])
def test_masks_shrink_to_the_target_and_no_further(name):
    history = Case(card(name), BATTERY[name]["options"]).history
    size = history.context.task.layout.size
    sizes = [sum(counts(state.mask)) for state in history.last.states.values()]
    assert kept_count(size, 0.7) <= min(sizes) < 0.95 * size
    if name == "sub-fedavg":
        assert min(sizes) == kept_count(size, 0.7)  # in two steps, the second of which is cut
    if name == "sub-fedavg-hy":
        filters = [counts(state.mask)[0] for state in history.last.states.values()]
        first = history.context.task.layout.slots[0]
        assert min(filters) < first.size
        assert all(count % (first.size // first.shape[0]) == 0 for count in filters)  # whole channels


def test_validation_data_is_required_where_it_decides():
    with pytest.raises(SparsonaError, match="sub-fedavg decides by validation data"):
        build.make_config("sub-fedavg", {"validation_rate": 0})
    assert build.make_config("sub-fedavg", {"validation_rate": 0, "preset": "dispfl"}).options["accuracy_on"] == "train"


def test_the_first_candidate_is_of_the_first_epoch():
    """Or of the model that was received, if there is one epoch: otherwise masks could never differ."""
    for epochs, passes in ((1, [1, 0]), (4, [1, 3])):
        method = subfedavg(TASK, SubFedAvgConfig(epochs=epochs))
        first, later = method.phases
        assert [phase.epochs for phase in method.phases] == passes
        # A client's own epochs are shared out in the same way.
        for own in (1, 4):
            client = Client(0, 10, epochs=own)
            assert [phase.epochs_of(client) for phase in method.phases] == [1, own - 1]
        ones = model(WEIGHTS).like(torch.ones(10))
        received = SubFedAvgWork(model(WEIGHTS), TASK.init(0)[1], ones, mask_without(), ())
        for client, is_single in ((Client(0, 10), epochs == 1), (Client(0, 10, epochs=1), True)):
            entered = first.enter(received, None, ROUND.on(client))
            assert (entered is not received) == is_single
        assert later.enter(received, None, ROUND.on(client)) is not received


def small_cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 16), nn.ReLU(), nn.Linear(16, 10))


@pytest.mark.parametrize("name", ["sub-fedavg", "lotteryfl"])
def test_all_matrices_of_a_sub_network_are_pruned(name):
    """What is left of a matrix is a vector there; it is pruned all the same, down to the target."""
    options = {"accuracy_threshold": 0.0, "prune_rate": 0.5, "density": 0.6}
    if name == "sub-fedavg":
        options["distance"] = 0.0
    history = Case(card(name), {**options, "subnetwork": 0.3}, model=small_cnn).start().play(2)
    mask = min((state.mask for state in history.last.states.values()), key=lambda mask: sum(counts(mask)))
    assert sum(counts(mask)) == kept_count(history.context.task.layout.size, 0.6)
    pruned = {slot.name for slot, left in zip(mask.layout.slots, counts(mask), strict=True) if left < slot.size}
    assert pruned == {"0.weight", "3.weight", "5.weight"}


def test_channels_of_a_sub_network_are_refused():
    """Unless the sub-network has all their entries."""
    task = Task(small_cnn, (1, 8, 8), 10)
    config = SubFedAvgConfig(structure="hybrid")
    whole = Tree(task.layout, torch.ones(task.layout.size, dtype=torch.bool))
    whole["3.weight"][:, ::2] = False
    task.restrict(whole)
    subfedavg(task, config)
    whole["0.weight"][0] = False
    task.restrict(whole)
    with pytest.raises(SparsonaError, match="structure=hybrid on a sub-network"):
        subfedavg(task, config)
