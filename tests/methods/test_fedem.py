"""FedEM: a mixture of components that all clients train, with weights of each client's own."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from math import exp

import pytest
import torch
from lenet5 import SIZE
from torch import nn

from sparsona.core.losses import squared_error
from sparsona.core.method import Client, Round
from sparsona.core.seeds import Seeds
from sparsona.core.task import Task
from sparsona.core.tree import Tree
from sparsona.data.batches import Examples
from sparsona.engine.jobs import Tally
from sparsona.engine.turn import ClientProbe, run_phase
from sparsona.gpu.stacking import kinds_of
from sparsona.learning.mixture import mix_predictions
from sparsona.methods import card
from sparsona.methods.fedem import FedEMConfig, fedem
from sparsona.testing import Case

BATTERY = {"fedem": {"options": {"num_models": 2}, "accuracy": 0.35}}
SHARES = 4 * 3 * 500
MEMORY = [
    # Three components, a gradient of each, and a share of each of 500 examples in each; with momentum, that of each.
    ("fedem", {}, 12, 12 + 3 * SIZE, 12 + 6 * SIZE + SHARES, 0),
    ("fedem", {"momentum": 0.9}, 12, 12 + 3 * SIZE, 12 + 9 * SIZE + SHARES, 0),
    ("fedem", {"momentum": 0.9, "optimizer_memory": "keep"}, 12 + 3 * SIZE, 12 + 6 * SIZE, 12 + 9 * SIZE + SHARES, 0),
]
CLIENTS = tuple(Client(index, count, num_clients=3, most_examples=3) for index, count in enumerate((3, 1, 2)))
PLAIN = {"num_models": 2, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": None, "epochs": 1, "lr": 0.1}


@pytest.fixture
def task():
    return Task(nn.Linear(1, 1, bias=False), (1,), 1, losses=squared_error)


def line(weight):
    return Tree.of({"weight": torch.tensor([[weight]])})


def examples(*targets):
    return Examples(torch.ones(len(targets), 1), torch.tensor(targets)[:, None])


def begun(task, mixture, data, client=CLIENTS[0], is_new=False, **options):
    """A client's Work with the components 1 * x and 3 * x, and what it was made with."""
    method = fedem(task, FedEMConfig(**{**PLAIN, **options}))
    params, buffers = task.init(0)
    server = replace(method.server.init(params, CLIENTS, Seeds(0)), models=(line(1.0), line(3.0)))
    round_ = replace(Round(0, 1, 1.0, 8, Seeds(0).at(0)).on(client), is_new=is_new)
    state = method.init_client(params, buffers, client, Seeds(0).of(client.index))
    state = replace(state, mixture=torch.tensor(mixture))
    inbox = (method.server.reply(server, client, round_),)
    probe = ClientProbe(task, data, examples(), round_, Tally())
    return method, server, state, inbox, probe, round_, method.receive(state, inbox, probe, round_)


def test_a_turn_by_hand(task):
    """Components x and 3x, and the examples (1, 1), (1, 1), (1, 3): losses 0, 0, 4 and 4, 4, 0. With pi = (0.8, 0.2)

        q = 0.8 / (0.8 + 0.2 e^-4) = 0.9954 of the first two is the first component's,
        r = 0.8 e^-4 / (0.8 e^-4 + 0.2) = 0.0683 of the third.

    The new pi is ((2q + r) / 3, 1 minus that) = (0.6864, 0.3136). The gradient of q (w - y)^2, a mean over all three,
    is 2 r (1 - 3) / 3 for the first component and 2 * 2 (1 - q) (3 - 1) / 3 for the second; one step at a rate of 0.1.
    """
    data = examples(1.0, 1.0, 3.0)
    method, _, state, inbox, probe, round_, work = begun(task, (0.8, 0.2), data)
    q, r = 0.8 / (0.8 + 0.2 * exp(-4)), 0.8 * exp(-4) / (0.8 * exp(-4) + 0.2)
    assert (q, r) == (pytest.approx(0.9954, abs=1e-4), pytest.approx(0.0683, abs=1e-4))
    (phase,) = method.phases
    work = run_phase(phase, work, task, data, probe, round_, Tally())
    state, update = method.finish(state, work, inbox, probe, round_)
    assert state.mixture.tolist() == pytest.approx([(2 * q + r) / 3, 1 - (2 * q + r) / 3])
    first, second = (float(update.parts[name].tree()["weight"]) for name in ("model0", "model1"))
    assert first == pytest.approx(1 + 0.1 * 4 * r / 3)
    assert second == pytest.approx(3 - 0.1 * 8 * (1 - q) / 3)
    assert update.weight == 3


def test_the_servers_mean_by_hand(task):
    """Clients of 3 and of 1 examples send 2 and 6 for both components: (3 * 2 + 6) / 4 = 3. Over all, the third with
    its 2 examples has the old ones, 1 and 3: (3 * 2 + 6 + 2 * 1) / 6 = 2.3333 and (3 * 2 + 6 + 2 * 3) / 6 = 3.
    """
    for over, means in (("participants", [3.0, 3.0]), ("all", [14 / 6, 3.0])):
        sent = []
        for client, weight in zip(CLIENTS[:2], (2.0, 6.0), strict=True):
            data = examples(*[1.0] * client.num_examples)
            method, server, state, inbox, probe, round_, work = begun(task, (0.5, 0.5), data, client, average_over=over)
            sent.append(method.finish(state, replace(work, models=(line(weight),) * 2), inbox, probe, round_)[1])
        half = method.server
        total = reduce(lambda total, update: half.add(server, total, update), sent, half.zero(server, round_))
        assert [float(model["weight"]) for model in half.step(server, total, round_).models] == pytest.approx(means)


def test_a_newcomer_finds_its_mixture_and_trains_nothing(task):
    """Two of three examples are the second component's: losses 0, 4, 4 and 4, 0, 0. With e = e^-4, repeated E-steps end
    where log(1 - p + p e) + 2 log((1 - p) e + p), the likelihood, is largest: p = (2 - e) / (3 (1 - e)) = 0.6729."""
    data, near = examples(1.0, 3.0, 3.0), exp(-4)
    method, *_, probe, round_, work = begun(task, (0.5, 0.5), data, is_new=True, newcomer_steps=50)
    found = method.adapt(work, probe, round_)
    own = (2 - near) / (3 * (1 - near))
    assert found.mixture.tolist() == pytest.approx([1 - own, own], abs=1e-5)
    assert found.models == work.models
    assert method.adapt(work, probe, replace(round_, is_new=False)) is work
    assert float(method.predict(found, torch.ones(1, 1))) == pytest.approx(1 + 2 * own)


@pytest.mark.parametrize(
    ("is_new", "index", "steps"), [(True, 3, 50), (True, 0, 1), (False, 3, 1)], ids=["newcomer", "first round", "known"]
)
def test_a_newcomer_trains_with_the_mixture_it_found(task, is_new, index, steps):
    """As above, from (0.5, 0.5): a step takes p, the second component's, to the mean of its shares, p e / (p e + 1 - p)
    and twice p / (p + (1 - p) e). The pass over three examples is charged once, however many steps there are."""
    data, near, p = examples(1.0, 3.0, 3.0), exp(-4), 0.5
    for _ in range(steps):
        first, others = p * near / (p * near + 1 - p), p / (p + (1 - p) * near)
        p = (first + 2 * others) / 3
    method, _, _, _, _, round_, work = begun(task, (0.5, 0.5), data, is_new=is_new, newcomer_steps=50)
    tally, round_ = Tally(), replace(round_, index=index)
    entered = method.tune.enter(work, ClientProbe(task, data, examples(), round_, tally), round_)
    assert entered.mixture.tolist() == pytest.approx([1 - p, p], abs=1e-5)
    assert entered.shares[:3, 1].tolist() == pytest.approx([first, others, others], abs=1e-5)
    assert tally.search_flops == method.cost(task.layout, CLIENTS[0], round_).search_flops


def test_a_component_that_a_client_has_none_of():
    one, other = torch.tensor([[2.0, 0.0]]), torch.tensor([[float(-7), 7.0]])
    assert torch.allclose(mix_predictions([one, other], torch.tensor([1.0, 0.0]), "classes"), one.log_softmax(-1))


def test_with_one_component_it_is_fedavg():
    """All of an example is that component's: the same bits after three rounds."""
    options = {"momentum": 0.9, "data_rate": 0.3}
    one, two = (Case(card("fedem"), {**options, "num_models": num}).history for num in (1, 2))
    other = Case(card("fedavg"), options).history
    for mine, theirs in zip(one.populations, other.populations, strict=True):
        assert torch.equal(mine.server.models[0].flat, theirs.server.params.flat)
    assert not torch.equal(two.last.server.models[0].flat, other.last.server.params.flat)


def zeros():
    net = nn.Linear(4, 3)
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    return net


@pytest.mark.parametrize("model", [lambda: nn.Linear(4, 3), nn.Linear(4, 3), zeros()], ids=["drawn", "given", "zeros"])
def test_components_start_apart(model):
    """Components that start equal would stay equal, and the draws are the run's."""
    task = Task(model, (4,), 3)
    init = fedem(task, FedEMConfig()).server.init
    params = task.init(0)[0]
    first, second, third = (tree.flat for tree in init(params, CLIENTS, Seeds(0)).models)
    assert torch.equal(first, params.flat)
    assert not torch.isclose(first, second).any()
    assert not torch.isclose(second, third).any()
    assert torch.equal(second, init(params, CLIENTS, Seeds(0)).models[1].flat)
    assert not torch.equal(second, init(params, CLIENTS, Seeds(1)).models[1].flat)


def test_clients_of_any_size_share_one_shape(task):
    """Executors run together what has one shape: the shares have as many rows as the largest client needs."""
    works = [begun(task, (0.5, 0.5), examples(), client)[-1] for client in CLIENTS]
    assert len({kinds_of(work) for work in works}) == 1
