"""FedPer, FedRep, LG-FedAvg and FedBN: rows of fedalt.py, worked out by hand.

The network is b*(a*x), a the representation and b the output layer, both 1 at first, and the loss is (y - b*a*x)^2: its
gradients are -2*r*b*x by a and -2*r*a*x by b, where r = y - b*a*x. Client 0 has x = 1, y = 3, client 1 has x = 2, y =
0. The rate is 0.1, a pass over the data is one step.

FedPer and LG-FedAvg, both at once: client 0 has r = 2 and gradients -4, -4: a = b = 1.4; client 1 has r = -2 and
gradients 8, 8: a = b = 0.2. FedPer sends a, whose mean is 0.8, and LG-FedAvg sends b, whose mean is 0.8.

FedRep, two steps for b, then one for a:
    client 0: r = 2, b = 1.4; r = 1.6, b = 1.72; r = 1.28, gradient -2*1.28*1.72 = -4.4032, a = 1.44032
    client 1: r = -2, b = 0.2; r = -0.4, b = 0.04; r = -0.08, gradient 2*0.08*0.04*2 = 0.0128, a = 0.99872
The mean of a is 1.21952. The last step, for b alone, of client 0: r = 3 - 1.21952*1.72 = 0.9024256, gradient
-2*0.9024256*1.21952 = -2.2010521, b = 1.72 + 0.2201052 = 1.9401052.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lenet5 import OUTPUT, SIZE
from torch import nn

from sparsona import models
from sparsona.core.errors import SparsonaError
from sparsona.core.method import Client, Round
from sparsona.core.outline import Roles
from sparsona.core.seeds import Seeds
from sparsona.core.task import Task
from sparsona.data.batches import Examples
from sparsona.engine.jobs import Tally
from sparsona.engine.turn import run_phase
from sparsona.experiment import build
from sparsona.learning.partial import split_model
from sparsona.methods import METHODS, card, factory, make
from sparsona.testing import Case
from sparsona.testing.case import net_with_statistics

BATTERY = {
    "fedper": {"options": {"personal": "last:2"}, "accuracy": 0.35},
    "fedrep": {"options": {"personal_epochs": 2, "tune_epochs": 1, "momentum": 0.5}, "accuracy": 0.35},
    "lg-fedavg": {"options": {"weight": "equal"}, "accuracy": 0.35},
    "fedbn": {"model": net_with_statistics, "accuracy": 0.35},
}
MEMORY = [
    ("fedper", {}, OUTPUT, SIZE, 2 * SIZE, 0),
    ("fedrep", {}, OUTPUT, SIZE, 2 * SIZE - OUTPUT, 0),
    ("lg-fedavg", {}, SIZE - OUTPUT, SIZE, 2 * SIZE, 0),
    ("fedbn", {"personal": "output"}, OUTPUT, SIZE, 2 * SIZE, 0),  # LeNet5 has no norms
]
ANYWHERE = {"fedbn": {"personal": "output"}, "fedrep": {"personal_epochs": 2, "tune_epochs": 1}}

CLIENTS = (Client(0, 1, num_clients=2), Client(1, 1, num_clients=2))
DATA = tuple(Examples(torch.tensor([[x]]), torch.tensor([[y]])) for x, y in ((1.0, 3.0), (2.0, 0.0)))
A, B = "0.weight", "1.weight"


def squared_error(outputs, batch):
    return (outputs - batch.targets).square().sum(-1), batch.weight


def play(name, **options):
    """One round of a row: what each client sent and kept, what the server has then, and tuned models."""
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for parameter in net.parameters():
        nn.init.ones_(parameter)
    task, row = Task(net, (1,), 1, losses=squared_error), card(name)
    own = {**row.options, "lr": 0.1, "epochs": 1, "clip_norm": None, **options}
    method = make(task, row=row, config=factory(row)[1](**own))
    params, buffers = task.init(0)
    half, round_ = method.server, Round(0, 1, 1.0, 1, Seeds(0).at(0))
    server, sent, states = half.init(params, CLIENTS, Seeds(0)), [], []
    total = half.zero(server, round_)

    def train(state, client, phases):
        mine, inbox = round_.on(client), (half.reply(server, client, round_),)
        work = method.receive(state, inbox, None, mine)
        for phase in phases:
            work = run_phase(phase, work, task, DATA[client.index], None, mine, Tally())
        return work, inbox, mine

    for client in CLIENTS:
        state = method.init_client(params, buffers, client, Seeds(0).of(client.index))
        work, inbox, mine = train(state, client, method.phases)
        state, update = method.finish(state, work, inbox, None, mine)
        sent.append(named(update.parts["shared"].tree()))
        states.append(state)
        total = half.add(server, total, update)
    server = half.step(server, total, round_)
    last = (replace(method.tune, epochs=1),)  # the engine says how many epochs
    tuned = [train(state, client, last)[0] for state, client in zip(states, CLIENTS, strict=True)]
    return sent, [named(state.personal) for state in states], named(server.shared), tuned


def named(tree):
    return {name: round(float(value), 5) for name, value in tree.items()}


def test_fedper():
    sent, kept, server, _ = play("fedper")
    assert sent == [{A: 1.4}, {A: 0.2}]
    assert kept == [{B: 1.4}, {B: 0.2}]
    assert server == {A: 0.8}


def test_lg_fedavg():
    sent, kept, server, _ = play("lg-fedavg")
    assert sent == [{B: 1.4}, {B: 0.2}]
    assert kept == [{A: 1.4}, {A: 0.2}]
    assert server == {B: 0.8}


def test_fedrep():
    """The head first, then the representation with the head frozen; at the end the head alone."""
    sent, kept, server, tuned = play("fedrep", personal_epochs=2)
    assert sent == [{A: 1.44032}, {A: 0.99872}]
    assert kept == [{B: 1.72}, {B: 0.04}]
    assert server == {A: 1.21952}
    assert named(tuned[0].personal) == {B: 1.94011}
    assert [named(work.shared) for work in tuned] == [{A: 1.21952}] * 2


def test_fedreps_last_epochs_train_the_head_of_every_client():
    row = METHODS["fedrep"]
    assert row.engine == {"tune_epochs": 10}
    case = Case(row, {"personal_epochs": 1, "epochs": 1, "tune_epochs": 1, "per_round": 2})
    record, tuned = case.history.final
    assert len(tuned) == len(record.turns) == 6  # also those that were never sampled
    for client, work in tuned.items():
        before = case.history.work(client)
        assert torch.equal(work.shared.flat, before.shared.flat)
        assert not torch.equal(work.personal.flat, before.personal.flat)


def test_fedbns_norms_never_travel():
    """Neither their scales and shifts nor their statistics; both differ from client to client after training."""
    history = Case(METHODS["fedbn"], model=net_with_statistics).history
    names = {slot.name for _, _, update in history.sent for part in update.parts.values() for slot in part.layout.slots}
    assert names == {"1.weight", "1.bias", "5.weight", "5.bias"}
    one, other, *_ = history.last.states.values()
    assert one.personal.layout.names == ("2.weight", "2.bias")
    assert not torch.equal(one.personal.flat, other.personal.flat)
    assert not torch.equal(one.buffers["2.running_mean"], other.buffers["2.running_mean"])


def test_fedbn_without_norms_is_refused():
    with pytest.raises(SparsonaError, match="no norm parameters") as caught:
        Case(METHODS["fedbn"]).start()
    for model in ("resnet18", "digits-cnn:norm=group", "cnn28:norm=group"):
        assert model in str(caught.value)
        assert split(model, "all-norms").own.size


def test_fedreps_paper_has_batches_of_ten():
    assert {METHODS["fedrep"].presets[name].options["batch_size"] for name in ("paper", "authors")} == {10}


def split(model, personal):
    row, _ = models.read_spec(model)
    return split_model(models.outline(model, row.input_shape, row.num_classes), (personal,), 0)


def test_all_norms_are_also_those_of_shortcuts():
    own, all_ = (split("resnet18", personal).own for personal in ("norm", "all-norms"))
    shortcuts = {f"layer{stage}.0.downsample.1.{kind}" for stage in (2, 3, 4) for kind in ("weight", "bias")}
    assert set(all_.names) - set(own.names) == shortcuts
    assert set(own.names) < set(all_.names)
    assert split("vgg11", "norm").own == split("vgg11", "all-norms").own
    assert split("transformer", "norm").own == split("transformer", "all-norms").own  # a bias alone is no norm
    # Those that roles name may have another form, and a norm of several dimensions is no layer with a weight matrix.
    net = nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3)), nn.LayerNorm((2, 3)), nn.Flatten(), nn.Linear(6, 2))
    task = Task(net, (4,), 2, roles=Roles(norm=("0.bias",)))
    assert split_model(task, ("all-norms",), 0).own.names == ("0.bias", "2.weight", "2.bias")
    assert split_model(task, ("last:1",), 0).own.names == ("4.weight", "4.bias")


@pytest.mark.parametrize(
    ("model", "part", "names"),
    [
        ("lenet5", "last:1", ("9.weight", "9.bias")),
        ("vgg11", "last:2", ("25.weight", "25.bias", "26.weight", "26.bias", "31.weight", "31.bias")),
        (
            "resnet18",
            "last:2",
            ("layer4.1.conv2.weight", "layer4.1.bn2.weight", "layer4.1.bn2.bias", "fc.weight", "fc.bias"),
        ),
    ],
)
def test_the_last_layers_come_with_their_norms(model, part, names):
    parts = split(model, part)
    assert parts.own.names == names
    assert split(model, f"!{part}").shared == parts.own


@pytest.mark.parametrize(
    ("part", "words"), [("last:0", "from 1 to 2"), ("last:3", "from 1 to 2"), ("last:x", "last:x")]
)
def test_layers_that_a_model_does_not_have_are_refused(part, words):
    with pytest.raises(SparsonaError, match=words):
        split("mlp", part)


def test_a_part_that_is_all_or_nothing_is_refused():
    with pytest.raises(SparsonaError, match="nothing would be sent"):
        split("mlp", "last:2")
    with pytest.raises(SparsonaError, match=r"no part of the model is personal \(!last:2\)"):
        split("mlp", "!last:2")


def test_presets_are_as_the_docstring_says():
    rep = {name: build.make_config("fedrep", {"preset": name}) for name in ("paper", "authors", "pfedgate")}
    assert [(c.options["epochs"], c.options["personal_epochs"], c.tune_epochs) for c in rep.values()] == [
        (1, 10, 10),
        (1, 10, 10),
        (1, 1, 0),
    ]
    assert [c.options["weight"] for c in rep.values()] == ["equal", "examples", "examples"]
    assert [c.options["momentum"] for c in rep.values()] == [0.5, 0.5, 0.9]
    for name in ("lg-fedavg", "fedbn"):
        assert build.make_config(name, {"preset": "authors"}).options["weight"] == "equal"
    assert build.make_config("lg-fedavg", {"preset": "authors"}).options["personal"] == ["!last:2"]
