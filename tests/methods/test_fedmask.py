"""FedMask: frozen weights, and masks of the last layers that are learned and sent as bits."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from math import exp

import pytest
import torch
from lenet5 import SIZE
from torch import nn

from sparsona.core.errors import SparsonaError
from sparsona.core.losses import squared_error
from sparsona.core.method import Client, Round
from sparsona.core.seeds import Seeds
from sparsona.core.task import Task
from sparsona.core.tree import Tree
from sparsona.costs import cost
from sparsona.data.batches import Examples
from sparsona.engine.jobs import Tally
from sparsona.engine.turn import run_phase
from sparsona.methods.fedmask import START, FedMaskConfig, fedmask

BATTERY = {"fedmask": {"options": {"density": 0.6}, "accuracy": 0.35}}
LAST_TWO = 800 * 500 + 500 * 26
SCORES, BITS = 4 * LAST_TWO, LAST_TWO // 8
MEMORY = [
    # The frozen model, scores and support; two masks received; in training also a gradient of the scores.
    ("fedmask", {}, SIZE + SCORES + BITS, SIZE + SCORES + 3 * BITS, SIZE + 2 * SCORES + 3 * BITS, 0),
]
CLIENTS = tuple(Client(index, count, num_clients=3) for index, count in enumerate((1, 2, 4)))
PLAIN = {"lr": 0.1, "epochs": 1, "clip_norm": None, "num_masked_layers": 1, "frozen_weights": "initial"}


@pytest.fixture
def task():
    line = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        line.weight.copy_(torch.tensor([[2.0, -1.0, 3.0, 1.0]]))
    return Task(line, (4,), 1, losses=squared_error)


def vector(*values):
    return Tree.of({"weight": torch.tensor([values])})


def begun(task, client=CLIENTS[0], is_new=False, scores=None, support=None, server=None, **options):
    """A client's Work, and what it was made with."""
    method = fedmask(task, FedMaskConfig(**{**PLAIN, **options}))
    params, buffers = task.init(0)
    start = method.server.init(params, CLIENTS, Seeds(0))
    start = start if server is None else replace(start, **server)
    round_ = replace(Round(0, 1, 1.0, 8, Seeds(0).at(0)).on(client), is_new=is_new)
    state = method.init_client(params, buffers, client, Seeds(0).of(client.index))
    state = state if scores is None else replace(state, scores=scores)
    state = state if support is None else replace(state, support=support)
    inbox = (method.server.reply(start, client, round_),)
    return method, start, state, inbox, round_, method.receive(state, inbox, None, round_)


def test_a_step_by_hand(task):
    """Weights 2, -1, 3, 1 with scores 0.5, -0.25, 1, 2 and the last entry outside the support: the mask is 1, 0, 1, 0,
    and the output for x = (1, 2, 1, 1) is 2 + 3 = 5. With y = 4 the squared error's slope is 2. Through the threshold
    as through a sigmoid, the gradient of score s is 2 w x sigmoid'(s): 2*2*1 sigmoid'(0.5), 2*(-1)*2 sigmoid'(-0.25),
    2*3*1 sigmoid'(1), and 0 outside. At a rate of 0.1 the second score rises by 0.4 * 0.2461 = 0.0985; weights stay.
    """

    def slope(score):
        return exp(-score) / (1 + exp(-score)) ** 2

    scores, support = vector(0.5, -0.25, 1.0, 2.0), vector(True, True, True, False)
    method, _, state, inbox, round_, work = begun(task, scores=scores, support=support)
    data = Examples(torch.tensor([[1.0, 2.0, 1.0, 1.0]]), torch.tensor([[4.0]]))
    assert float(method.predict(work, data.inputs)) == 5.0
    tally = Tally()
    work = run_phase(method.phases[0], work, task, data, None, round_, tally)
    assert tally.loss == 1.0
    wanted = [0.5 - 0.4 * slope(0.5), -0.25 + 0.4 * slope(0.25), 1 - 0.6 * slope(1.0), 2.0]
    assert work.scores.flat.tolist() == pytest.approx(wanted)
    assert torch.equal(work.params.flat, state.params.flat)
    state, update = method.finish(state, work, inbox, None, round_)
    assert update.parts["mask"].tree().flat.tolist() == [True, False, True, False]
    assert torch.equal(state.support.flat, support.flat)


def test_the_first_turn_prunes_once(task):
    """Of four entries half are kept, those of the highest scores; a later turn leaves the support alone."""
    method, _, state, inbox, round_, work = begun(task, is_new=True)
    work = replace(work, scores=vector(0.1, 0.4, -0.3, 0.2))
    state, update = method.finish(state, work, inbox, None, round_)
    assert state.support.flat.tolist() == update.parts["support"].tree().flat.tolist() == [False, True, False, True]
    work = replace(work, scores=vector(0.9, -0.4, 0.3, 0.2))
    state, update = method.finish(state, work, inbox, None, replace(round_, is_new=False))
    assert state.support.flat.tolist() == [False, True, False, True]
    assert update.parts["mask"].tree().flat.tolist() == [False, False, False, True]


def test_the_servers_masks_by_hand(task):
    """Clients of 1, 2 and 4 examples; by column: bits 1, 1, 0 of all three, weight 3 of 7 for 1; bits 1, 0 of the first
    two, 1 of 3; bits 0, 1 of the first and the third, 4 of 5; the last entry is in the first support alone."""
    bits = ((True, True, False, False), (True, False, False, False), (False, False, True, False))
    supports = ((True, True, True, True), (True, True, False, False), (True, False, True, False))
    wanted = {"majority": [False, False, True, True], "intersection": [False, False, False, True]}
    for aggregation, mask in wanted.items():
        sent = []
        for client, on, may in zip(CLIENTS, bits, supports, strict=True):
            scores = vector(*(1.0 if bit else -1.0 for bit in on))
            method, server, state, inbox, round_, work = begun(
                task, client, support=vector(*may), aggregation=aggregation
            )
            sent.append(method.finish(state, replace(work, scores=scores), inbox, None, round_)[1])
        half = method.server
        total = reduce(lambda total, update: half.add(server, total, update), sent, half.zero(server, round_))
        after = half.step(server, total, round_)
        assert after.mask.flat.tolist() == mask
        assert after.shared.flat.tolist() == [True, True, True, False]
        assert half.global_model(after)["weight"].tolist() == [[2.0 * mask[0], -mask[1], 3.0 * mask[2], mask[3]]]


def test_received_bits_turn_the_signs_of_scores(task):
    """Own bits 1, 0, 1, 1; received 0, 1, 1, 0, of which all but the last are shared."""
    server = {"mask": vector(False, True, True, False), "shared": vector(True, True, True, False)}
    work = begun(task, scores=vector(0.5, 0.0, 0.25, 0.75), server=server)[-1]
    assert work.scores.flat.tolist() == [-0.5, pytest.approx(1e-5), 0.25, 0.75]


def test_frozen_weights():
    """Signs at the size of a Kaiming draw, the root of 2 / fan-in, without biases; all clients have the same."""
    task = Task(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3)), (8,), 3)
    params, buffers = task.init(0)
    for frozen, size in (("signed", 0.5), ("initial", None)):
        method = fedmask(task, FedMaskConfig(frozen_weights=frozen))
        states = [method.init_client(params, buffers, client, Seeds(0).of(client.index)) for client in CLIENTS[:2]]
        server = method.server.init(params, CLIENTS, Seeds(0))
        assert torch.equal(states[0].params.flat, server.params.flat)
        assert torch.equal(states[0].scores.flat, states[1].scores.flat)
        assert 0 < float(states[0].scores.flat.min()) <= float(states[0].scores.flat.max()) <= START
        if size is None:
            assert torch.equal(server.params.flat, params.flat)
        else:
            assert torch.equal(server.params["0.weight"], size * params["0.weight"].sign())
            assert not server.params["0.bias"].any()


def test_only_bits_travel():
    """Of LeNet5's last two layers, two masks each way. A message is 24 bytes; for each part 16, its name, and of each
    tensor 3, its name of 8 and 8 for two dimensions, in all a multiple of 4; payloads likewise; a checksum of 4."""
    found = cost("fedmask", model="lenet5").encoded
    for size, names in ((found.down, "mask" + "shared"), (found.up, "mask" + "support")):
        head = 24 + 2 * (16 + 2 * (3 + 8 + 8)) + len(names)
        assert size == -(-head // 4) * 4 + 2 * (-(-BITS // 4) * 4) + 4
    assert found.up + found.down < (SIZE + SIZE) / 15


def test_more_layers_than_there_are(task):
    with pytest.raises(SparsonaError, match="masks of 2 layers"):
        fedmask(task, FedMaskConfig(num_masked_layers=2))


def test_a_sub_network_has_masks_of_the_same_layers():
    """Of the matrices 2 x 4 and 3 x 2 half is left: rows of 2 and of 1 on average. Capacities change nothing."""
    task = Task(nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 3)), (4,), 3)
    params, _ = task.init(0)
    task.restrict(params.like(torch.tensor(([True, False] * 4 + [True] * 2) + [True, False] * 3 + [True] * 3)))
    method = fedmask(task, FedMaskConfig())
    state = method.init_client(*task.init(0), CLIENTS[0], Seeds(0))
    assert state.scores.layout.names == ("0.weight", "1.weight")
    assert state.params["0.weight"].abs().tolist() == pytest.approx([1.0] * 4)
    assert state.params["1.weight"].abs().tolist() == pytest.approx([2**0.5] * 3)
    round_ = Round(0, 1, 1.0, 8, Seeds(0).at(0))
    one, other = (method.cost(task.layout, replace(CLIENTS[0], capacity=share), round_) for share in (1.0, 0.1))
    assert one == other
