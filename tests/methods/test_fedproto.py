"""FedProto: prototypes by hand, what they do to a step, and clients with different networks.

By hand: the network is a feature f = a*x and two outputs w*f, with a = 1 and w = (0, 0) at first, so that both classes
have probability 1/2. Client 0 has x = 1 and x = 3, both of class 0; client 1 has x = 5 of class 0 and x = 4 of class 1.
One step a round, of all examples, at rate 0.1.

Round 0. There are no prototypes, and w = 0 passes no gradient on to a. Client 0: the gradient by w is the mean of
(p - onehot) * f = (-1/2, 1/2) * 2 = (-1, 1), so w = (0.1, -0.1). Its prototype of class 0 is (1 + 3) / 2 = 2, of two
examples. Client 1's are 5 and 4, of one each. The means by examples: (2*2 + 5*1) / 3 = 3 and 4, of 3 and 1 examples. If
clients count the same: (2 + 5) / 2 = 3.5 and 4.

Round 1, client 0, prototype_weight 0.5. Cross-entropy: p of class 1 is 1 / (1 + e^0.2) = 0.4501660 and 1 / (1 + e^0.6)
= 0.3543437; its gradient by f is (p0 - 1) * 0.1 - p1 * 0.1 = -0.2 * p1, by a the mean of that times x:
(-0.0900332 - 3 * 0.0708687) / 2 = -0.1513197. Distance of the examples: ((1 - 3)^2 + (3 - 3)^2) / 2 = 2, its gradient
the mean of 2 * (f - 3) * x: (-4 + 0) / 2 = -2. Together a = 1 + 0.1 * (0.1513197 + 0.5 * 2) = 1.1151320. Distance of
the batch's mean: (2 - 3)^2 = 1, gradient 2 * (2 - 3) * 2 = -4: a = 1 + 0.1 * (0.1513197 + 0.5 * 4) = 1.2151320.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lenet5 import SIZE
from torch import nn

import sparsona as sp
from sparsona import models
from sparsona.core.errors import SparsonaError
from sparsona.core.method import Client, Round
from sparsona.core.seeds import Seeds
from sparsona.core.task import Task
from sparsona.core.tree import leaves
from sparsona.data.batches import Examples, in_order
from sparsona.engine.jobs import Tally
from sparsona.engine.rounds import simulate
from sparsona.engine.turn import ClientProbe, run_phase
from sparsona.executors.graphed import Graphed
from sparsona.executors.serial import Serial
from sparsona.executors.stacked import Stacked
from sparsona.experiment import build
from sparsona.methods import MethodCard, card
from sparsona.methods.fedproto import FedProtoConfig, fedproto
from sparsona.testing import Case

BATTERY = {"fedproto": {"accuracy": 0.35}}
PROTOTYPES = 4 * 26 * (500 + 1)  # of LeNet5: 26 classes, 500 features
MEMORY = [("fedproto", {}, SIZE, SIZE + PROTOTYPES, 2 * SIZE + PROTOTYPES, 0)]

CLIENTS = (Client(0, 2, num_clients=2), Client(1, 2, num_clients=2))
DATA = tuple(
    Examples(torch.tensor(x)[:, None], torch.tensor(y)) for x, y in (([1.0, 3.0], [0, 0]), ([5.0, 4.0], [0, 1]))
)


def play(**options):
    """Two rounds by hand: the server's prototypes and counts after the first, client 0's `a` and `w` after each."""
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False))
    nn.init.ones_(net[0].weight)
    nn.init.zeros_(net[1].weight)
    task = Task(net, (1,), 2)
    plain = {"lr": 0.1, "epochs": 1, "clip_norm": None, "weight_decay": 0.0, "prototype_weight": 0.5}
    method = fedproto(task, FedProtoConfig(**{**plain, **options}))
    (params, buffers), half = task.init(0), method.server
    server = half.init(params, CLIENTS, Seeds(0))
    states = [method.init_client(params, buffers, client, Seeds(0).of(client.index)) for client in CLIENTS]
    found = []
    for index in range(2):
        round_ = Round(index, 2, 1.0, 2, Seeds(0).at(index))
        total = half.zero(server, round_)
        for client, examples in zip(CLIENTS, DATA, strict=True):
            mine, inbox = round_.on(client), (half.reply(server, client, round_),)
            probe = ClientProbe(task, examples, examples, mine, Tally())
            work = method.receive(states[client.index], inbox, probe, mine)
            work = run_phase(method.phases[0], work, task, examples, probe, mine, Tally())
            states[client.index], update = method.finish(states[client.index], work, inbox, probe, mine)
            total = half.add(server, total, update)
        server = half.step(server, total, round_)
        found.append((server.prototypes, states[0].params))
    return found


def test_by_hand():
    (prototypes, first), (_, second) = play()
    assert prototypes["mean"].flatten().tolist() == [3.0, 4.0]
    assert prototypes["count"].tolist() == [3.0, 1.0]
    assert float(first["0.weight"]) == 1.0
    torch.testing.assert_close(first["1.weight"], torch.tensor([[0.1], [-0.1]]))
    assert float(second["0.weight"]) == pytest.approx(1.1151320, abs=1e-6)


def test_by_hand_with_means_of_a_batch():
    (_, second) = play(distance_of="classes")[1]
    assert float(second["0.weight"]) == pytest.approx(1.2151320, abs=1e-6)


def test_by_hand_where_clients_count_the_same():
    (prototypes, _) = play(weight="equal")[0]
    assert prototypes["mean"].flatten().tolist() == [3.5, 4.0]


def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))


def smaller():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Tanh(), nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 10))


def made(**options):
    """The method of a task, a batch, and a Work with prototypes of the classes 0 to 4."""
    task = Task(net, (1, 8, 8), 10)
    method = fedproto(task, FedProtoConfig(**options))
    params, buffers = task.init(0)
    client, round_ = Client(0, 6), Round(0, 1, 1.0, 6, Seeds(0).at(0))
    server = method.server.init(params, (client,), Seeds(0))
    random = torch.Generator().manual_seed(0)
    prototypes = server.prototypes.like(torch.rand(server.prototypes.flat.shape, generator=random))
    prototypes["count"][5:] = 0.0
    inbox = (method.server.reply(replace(server, prototypes=prototypes), client, round_),)
    work = method.receive(method.init_client(params, buffers, client, Seeds(0).of(0)), inbox, None, round_.on(client))
    examples = Examples(torch.rand(6, 1, 8, 8, generator=random), torch.tensor([0, 1, 1, 7, 8, 9]))
    features = task.forward_with_features(params, buffers, examples.inputs, "3", False)[1]
    return task, method, work, next(in_order(examples, 6)), features


def test_examples_of_classes_without_a_prototype_are_left_alone():
    """The mean over the batch of the mean squared difference of the features, 0 for the examples of classes 7 to 9."""
    task, method, work, batch, features = made(prototype_weight=2.0)
    found = method.phases[0].loss(work, batch)[0]
    plain = task.mean_loss(task.forward(work.params, work.buffers, batch.inputs, True)[0], batch)
    gaps = [(features[row] - work.prototypes["mean"][label]).square().mean() for row, label in ((0, 0), (1, 1), (2, 1))]
    torch.testing.assert_close(found, plain + 2.0 * sum(gaps) / 6)


def test_the_distance_of_a_batchs_classes():
    """The sum over the classes 0 and 1, which are in the batch and have prototypes; 2 to 4 are not in it."""
    task, method, work, batch, features = made(prototype_weight=2.0, distance_of="classes")
    found = method.phases[0].loss(work, batch)[0]
    plain = task.mean_loss(task.forward(work.params, work.buffers, batch.inputs, True)[0], batch)
    gaps = [
        (mean - work.prototypes["mean"][label]).square().mean()
        for label, mean in ((0, features[0]), (1, features[1:3].mean(0)))
    ]
    torch.testing.assert_close(found, plain + 2.0 * sum(gaps))


def test_padding_counts_for_nothing():
    for distance_of in ("examples", "classes"):
        _, method, work, batch, _ = made(distance_of=distance_of)
        one, other = (
            replace(batch, **{key: getattr(batch, key)[rows] for key in vars(batch) if key != "noise"})
            for rows in (torch.tensor([0, 1]), torch.tensor([0, 1, 2, 3]))
        )
        padded = replace(other, weight=torch.tensor([1.0, 1.0, 0.0, 0.0]))
        torch.testing.assert_close(method.phases[0].loss(work, one)[0], method.phases[0].loss(work, padded)[0])


def test_the_nearest_prototype():
    _, method, work, batch, features = made(predict_by="prototypes")
    found = method.predict(work, batch.inputs)
    distances = torch.cdist(features, work.prototypes["mean"][:5])
    assert torch.equal(found[:, :5].argsort(descending=True), distances.argsort())
    assert found.argmax(1).max() < 5
    assert bool((found[:, 5:] < found[:, :5].amin(1, keepdim=True)).all())  # nobody's classes come last
    torch.testing.assert_close(found[:, 0] - found[:, 1], (distances[:, 1] ** 2 - distances[:, 0] ** 2) / 12)
    assert method.deploy is None
    # Before anybody has sent a prototype, the client's own output layer predicts.
    none = replace(work, prototypes=work.prototypes.like(torch.zeros_like(work.prototypes.flat)))
    assert torch.equal(method.predict(none, batch.inputs), made()[1].predict(none, batch.inputs))


def test_without_its_weight_it_is_local_training():
    """The same bits as Local's after three rounds, at each client that took part."""
    one, other = (
        Case(card(name), options).history for name, options in (("fedproto", {"prototype_weight": 0.0}), ("local", {}))
    )
    assert one.last.states.keys() == other.last.states.keys()
    for client, state in one.last.states.items():
        assert torch.equal(state.params.flat, other.last.states[client].params.flat)
    pulled = Case(card("fedproto")).history.last.states
    assert any(not torch.equal(state.params.flat, other.last.states[c].params.flat) for c, state in pulled.items())


def test_no_model_travels():
    """Ten classes of 64 features and a count, and nothing else: to the byte."""
    history = Case(card("fedproto")).history
    assert {part.num_values for _, _, update in history.sent for part in update.parts.values()} == {10 * (64 + 1)}
    assert {tuple(update.parts) for _, _, update in history.sent} == {("prototypes",)}
    turn = history.records[0].turns[0]
    assert turn.traffic.paper_up == turn.traffic.paper_down == 4 * 10 * 65
    examples = history.context.clients[turn.client].num_examples
    assert turn.tally.search_flops == examples * history.context.task.layout.forward_flops()


def test_a_class_that_nobody_sends_keeps_its_prototype():
    (prototypes, _), _ = play()
    task = Task(nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False)), (1,), 2)
    method = fedproto(task, FedProtoConfig())
    half, round_ = method.server, Round(0, 1, 1.0, 2, Seeds(0).at(0))
    server = replace(half.init(task.init(0)[0], CLIENTS, Seeds(0)), prototypes=prototypes)
    sent = prototypes.like(torch.tensor([7.0, 0.0, 2.0, 0.0]))  # class 0 alone
    update = half.reply(replace(server, prototypes=sent), CLIENTS[0], round_)
    after = half.step(server, half.add(server, half.zero(server, round_), update), round_).prototypes
    assert after["mean"].flatten().tolist() == [7.0, 4.0]
    assert after["count"].tolist() == [2.0, 1.0]


def mixed(task, config: FedProtoConfig):
    """Clients of little capacity have another network, with as many features."""
    return fedproto(task, config, (Task(smaller, task.input_shape, task.num_classes),))


MIXED = MethodCard("mixed", "Mixed", "two networks", "its model", "prototypes", mixed, FedProtoConfig)
TWO = {"capacities": [1.0, 0.6], "clients": 4, "rounds": 2, "epochs": 1, "data_rate": 0.15, "per_round": 4}


def run_mixed(make, **more):
    config = build.make_config(MIXED, {**TWO, "executor": "serial", **more}, model=net)
    context = build.make_context(config, None, net, row=MIXED)
    engine = simulate(context, make(context))
    population, records = engine.start(), []
    for index in range(2):
        population, record = engine.play(population, index)
        records.append(record)
    records[-1].evaluations.extend(engine.evaluate(population, 2))
    return context, population, records


@pytest.mark.parametrize(
    "more", [{}, {"distance_of": "classes", "predict_by": "prototypes"}], ids=["", "other options"]
)
def test_clients_with_different_networks(more):
    """Two networks with 12 features take part in one run: they are trained, tested and charged each as its own, and all
    executors agree."""
    context, population, records = run_mixed(Serial, **more)
    sizes = [state.params.layout.size for _, state in sorted(population.states.items())]
    wide, narrow = 64 * 12 + 12 + 130, 64 * 4 + 4 + 60 + 130
    assert sizes == [wide, narrow, wide, narrow]
    assert all(not torch.equal(s.params.flat, context.fresh_state(c).params.flat) for c, s in population.states.items())
    for record in records:
        for turn in record.turns:
            known = context.method.cost(context.task.layout, context.clients[turn.client], context.plan.round_at(0))
            assert (turn.tally.train_flops, turn.tally.search_flops) == (known.train_flops, known.search_flops)
    for make in (Stacked, lambda context: Graphed(context, 2)):
        _, other, other_records = run_mixed(make, **more)
        for (path, one), (_, two) in zip(leaves(vars(population)), leaves(vars(other)), strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=2e-5, msg=path)
        for one, two in zip(records[-1].evaluations, other_records[-1].evaluations, strict=True):
            assert abs(one.correct - two.correct) <= 1


def test_a_client_of_another_network_deploys_a_module_of_it():
    context, population, _ = run_mixed(Serial)
    images = context.federation.examples(1, "test").inputs
    round_ = context.plan.round_at(2).on(context.clients[1])
    inbox = (context.method.server.reply(population.server, context.clients[1], round_),)
    work = context.method.receive(population.states[1], inbox, None, round_)
    module = context.method.deploy(work)
    assert isinstance(module, nn.Module)
    torch.testing.assert_close(module(images), context.method.predict(work, images))


def test_a_run_of_two_networks_is_resumed(tmp_path):
    options = {**TWO, "executor": "serial", "rounds": 3}
    whole = sp.train(MIXED, model=net, out=tmp_path / "whole", **options)
    first = sp.train(MIXED, model=net, out=tmp_path / "first", max_seconds=1e-9, **options)
    assert first.curve()[-1][0] == 1
    while first.curve()[-1][0] < 3:
        first = sp.resume(tmp_path / "first", model=net, method=MIXED)
    assert first.curve() == whole.curve()


def test_the_example_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[2] / "docs" / "methods" / "fedproto.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    found = {"__name__": "page"}
    exec(block.replace("rounds=2", "rounds=1, epochs=1, executor='serial', data_rate=0.3"), found)
    assert 0 < found["run"].summary["accuracy"]["mean"] <= 1


def test_networks_that_do_not_fit_are_refused():
    task = Task(net, (1, 8, 8), 10)
    for other in (
        Task(nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 10)), (1, 8, 8), 10),
        Task(nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10)), (1, 8, 8), 10),
    ):
        with pytest.raises(SparsonaError, match="2 networks"):
            fedproto(task, FedProtoConfig(), (other,))


def test_a_model_without_features_is_refused():
    row, _ = models.read_spec("transformer")
    text = models.outline("transformer", row.input_shape, row.num_classes)
    convolution = Task(nn.Sequential(nn.Conv2d(1, 10, 8), nn.Flatten()), (1, 8, 8), 10)
    for task, words in ((text, "texts"), (convolution, r"0\.weight \[10, 1, 8, 8\]")):
        with pytest.raises(SparsonaError, match=words):
            fedproto(task, FedProtoConfig())


def test_the_authors_preset():
    options = build.make_config("fedproto", {"preset": "authors"}).options
    assert (options["weight"], options["predict_by"], options["momentum"]) == ("equal", "prototypes", 0.5)


def test_clients_without_memory_are_refused():
    """No model travels: theirs would begin anew in every turn."""
    with pytest.raises(sp.SparsonaError, match="fedproto sends no model, and stateless clients do not keep"):
        Case(card("fedproto")).start(stateless=True)
