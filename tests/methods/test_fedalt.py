"""What travels and what stays, how a model may be split, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lenet5 import OUTPUT, SIZE
from torch import nn

from sparsona import models
from sparsona.core.errors import SparsonaError
from sparsona.core.outline import Roles
from sparsona.core.round import Client, Round
from sparsona.core.seeds import Seeds
from sparsona.core.task import Task
from sparsona.core.tree import leaves
from sparsona.data.batches import Examples, in_order
from sparsona.engine.rounds import received_work, simulate
from sparsona.engine.turn import Tally, run_phase
from sparsona.executors.serial import Serial
from sparsona.executors.stacked import Stacked
from sparsona.experiment import build
from sparsona.learning.means import WeightedSum
from sparsona.learning.partial import split_model
from sparsona.learning.server_optimizer import ServerStep, server_step
from sparsona.methods.fedalt import FedAltConfig, fedalt
from sparsona.methods.fedavg import FedAvgPartConfig, fedavg
from sparsona.wire.format import message_size

BATTERY = {
    "fedalt": {
        "options": {"start_pull": 0.01, "personal_epochs": 1, "max_personal_steps": 3, "clip_norm": 1.0},
        "accuracy": 0.35,
    },
    "fedsim": {
        "options": {"personal": "additive,input", "server_optimizer": "adam", "server_lr": 0.01},
        "accuracy": 0.35,
    },
}
MEMORY = [
    # The two parts are a model together; FedAlt's gradient is of one part at a time. A pulled part is kept twice.
    ("fedalt", {}, OUTPUT, SIZE, 2 * SIZE - OUTPUT, 0),
    ("fedalt", {"clip_stale": True, "start_pull": 0.1}, 2 * OUTPUT, SIZE + OUTPUT, 2 * SIZE + OUTPUT, 0),
    ("fedsim", {}, OUTPUT, SIZE, 2 * SIZE, 0),
]
TINY = {
    "clients": 4,
    "per_round": 2,
    "rounds": 2,
    "epochs": 1,
    "batch_size": 16,
    "data_rate": 0.15,
    "executor": "serial",
}


class Adapted(nn.Module):
    """A net with everything that can be personal."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.adapter = nn.Linear(64, 12), nn.LayerNorm(12), nn.Linear(12, 12)
        self.last = nn.Linear(12, 10)
        self.roles = Roles(
            ("first.weight", "first.bias"),
            ("last.weight", "last.bias"),
            ("norm.weight", "norm.bias"),
            ("adapter.weight", "adapter.bias"),
        )

    def forward(self, images):
        x = self.first(images.flatten(1))
        return self.last(self.norm((x + self.adapter(x)).tanh()))


def context_of(name, model=Adapted, **more):
    """A string is the name of a network."""
    return build.make_context(build.make_config(name, {**TINY, **more}, model=model), None, model)


def play(context, make=Serial):
    star = simulate(context, make(context))
    population, records = star.start(), []
    for index in range(context.plan.rounds):
        population, record = star.play(population, index)
        records.append(record)
    return star, population, records


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("digits-cnn", {"personal": ""}, ["no part of the model is personal", "--personal output"]),
        ("digits-cnn", {"personal": "ouput"}, ["'ouput'", "0.weight", "output"]),
        ("digits-cnn", {"personal": "conv.*"}, ["'conv.*'", "9.bias"]),
        ("digits-cnn", {"personal": "*"}, ["nothing would be sent"]),
        ("digits-cnn", {"personal": "adapter"}, ["no adapter", "resnet18:adapters=true", "transformer:adapters=16"]),
        ("digits-cnn", {"personal": "norm"}, ["no norm"]),
        ("cnn28", {"personal": "split"}, ["no split", "cnn28:split=true"]),
        ("transformer", {"personal": "additive"}, ["tokens"]),
        ("digits-cnn", {"updates": "simultaneous", "personal_epochs": 2, "epochs": 1}, ["personal_epochs"]),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_reason(model, options, words):
    row, _ = models.read_spec(model)
    with pytest.raises(SparsonaError) as caught:
        fedalt(models.outline(model, row.input_shape, row.num_classes), FedAltConfig(**options))
    assert all(word in str(caught.value) for word in words)


def test_an_additive_model_cannot_be_tuned_alone():
    row, _ = models.read_spec("digits-cnn")
    with pytest.raises(SparsonaError, match="use fedalt or fedsim"):
        fedavg(models.outline("digits-cnn", row.input_shape, 10), FedAvgPartConfig(personal="additive"))


@pytest.mark.parametrize(
    ("model", "personal", "size"),
    [
        ("resnet18-emnist", "input", 704),
        ("resnet18-emnist", "output", 31_806),
        ("resnet18-emnist:adapters=true", "adapter", 1_400_320),
        ("resnet18-emnist:adapters=true", "adapter+norms", 1_408_128),  # as in the authors' code
        ("transformer:adapters=16", "adapter", 67_712),
        ("transformer:adapters=16", "adapter+norms", 71_808),
        ("digits-cnn", "input,output", 160 + 650),
        ("digits-cnn:split=true", "split", 160),
        ("resnet18-emnist:split=true", "split", 64 * 9),
        ("digits-cnn", ["*.bias"], 16 + 32 + 64 + 10),
        ("digits-cnn", "additive", 650 + 1),
        ("digits-cnn", "additive,output", 650 + 651),
    ],
)
def test_how_much_stays(model, personal, size):
    row, _ = models.read_spec(model)
    outline = models.outline(model, row.input_shape, row.num_classes)
    method = fedalt(outline, FedAltConfig(personal=personal))
    cost = method.cost(outline.layout, Client(0, 10), Round(0, 1, 1.0, 8, Seeds(0)))
    assert sum(part.num_values for part in cost.kept) == size
    own = 651 if "additive" in personal else 0  # of a second model, which is not in the layout
    assert sum(part.num_values for part in cost.down) == outline.layout.size - (size - own)


@pytest.mark.parametrize(
    ("model", "adapters", "text", "code"),
    [
        ("resnet18-emnist", "true", 12.50, 12.57),
        ("resnet18-gldv2", "true", 11.46, 11.53),
        ("transformer", "16", 1.18, 1.25),
    ],
)
def test_the_share_that_adapters_are_of_the_network(model, adapters, text, code):
    """Section 4.1 prints 12.5%, 11.5% and 1.2%: adapters alone. The authors' code keeps the norms as well."""
    row, _ = models.read_spec(model)
    size = models.outline(model, row.input_shape, row.num_classes).layout.size
    outline = models.outline(f"{model}:adapters={adapters}", row.input_shape, row.num_classes)
    for personal, percent in (("adapter", text), ("adapter+norms", code)):
        assert 100 * split_model(outline, (personal,), 0).own.size / size == pytest.approx(percent, abs=0.005)


def test_only_the_shared_part_travels_and_nobody_else_moves_the_personal_one():
    context = context_of("fedalt", personal="adapter+norms")
    star, population, records = play(context)
    shared = ("first.weight", "first.bias", "last.weight", "last.bias")
    update = context.method.server.reply(population.server, context.clients[0], context.plan.round_at(2))
    assert [part.layout.names for part in update.parts.values()] == [shared]
    size = message_size(context.method.cost(context.task.layout, context.clients[0], context.plan.round_at(0)).down)
    assert size < 4 * (64 * 12 + 12 + 12 * 10 + 10) + 400
    assert {(turn.traffic.up, turn.traffic.down) for record in records for turn in record.turns} == {(size, size)}
    start = context.params.select(("norm.weight", "norm.bias", "adapter.weight", "adapter.bias"))
    assert torch.equal(population.server.rest.flat, start.flat)  # which the server never learns
    took_part = {turn.client for record in records for turn in record.turns}
    assert set(population.states) == took_part
    assert all(not torch.equal(state.personal.flat, start.flat) for state in population.states.values())
    # Somebody's round changes the personal part of those who took part in it, and of nobody else.
    after, record = star.play(population, 1)
    for client in set(population.states) - {turn.client for turn in record.turns}:
        assert after.states[client] is population.states[client]


def test_part_tuning_leaves_the_shared_part_as_it_was():
    context = context_of("fedavg-ft-part", personal="input,norm", tune_epochs=2, weight_decay=0.1, rounds=1)
    star, population, _ = play(context)
    _, tuned = star.finish(population)
    assert len(tuned) == 4
    for work in tuned.values():
        for name, value in population.server.params.items():
            assert torch.equal(work.params[name], value) is not name.startswith(("first", "norm")), name


def test_tuning_trains_the_personal_part_alone():
    context = context_of("fedsim", tune_epochs=1, rounds=1)
    star, population, _ = play(context)
    _, tuned = star.finish(population)
    for client, work in tuned.items():
        before = received_work(context, population, client)
        assert torch.equal(work.shared.flat, before.shared.flat)
        assert not torch.equal(work.personal.flat, before.personal.flat)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedalt", {"personal": "additive,norm", "additive_hidden": 5, "server_optimizer": "adam"}),
        (
            "fedalt",
            {"personal": "adapter", "clip_norm": 0.5, "clip_stale": True, "start_pull": 0.1, "max_personal_steps": 2},
        ),
        ("fedsim", {"personal": "*.bias", "personal_lr": 0.3, "weight": "batches", "clip_norm": 0.5}),
        ("fedsim", {"model": "digits-cnn:split=true", "personal": "split", "server_lr": 0.5}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_stacked_agrees_with_serial(name, options):
    one, other = (play(context_of(name, **options), make) for make in (Serial, Stacked))
    for (path, value), (path2, value2) in zip(leaves(vars(one[1])), leaves(vars(other[1])), strict=True):
        assert path == path2
        torch.testing.assert_close(value, value2, rtol=0, atol=2e-5)
    for turn, turn2 in zip(one[2][-1].turns, other[2][-1].turns, strict=True):
        assert turn.tally.train_flops == turn2.tally.train_flops
        context = one[0].clients.context
        cost = context.method.cost(context.task.layout, context.clients[turn.client], context.plan.round_at(0))
        assert turn.tally.train_flops == cost.train_flops


def test_a_mixture_of_two_models():
    task = Task(Adapted, (1, 8, 8), 10)
    method = fedalt(task, FedAltConfig(personal="additive", additive_hidden=3))
    params, buffers = task.init(0)
    state = method.init_client(params, buffers, Client(0, 5), Seeds(0).of(0))
    assert torch.equal(
        state.personal.flat, method.init_client(params, buffers, Client(1, 5), Seeds(0).of(1)).personal.flat
    )
    server = method.server.init(params, (), Seeds(0))
    round_ = Round(0, 1, 1.0, 4, Seeds(0).at(0)).on(Client(0, 5))
    work = method.receive(state, (method.server.reply(server, Client(0, 5), round_),), None, round_)
    work.personal.flat.add_(0.3 * torch.randn(work.personal.flat.shape, generator=torch.Generator().manual_seed(0)))
    images = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    of = {name.partition("/")[2]: value for name, value in work.personal.items()}
    hidden = torch.relu(images.flatten(1) @ of["hidden.weight"].T + of["hidden.bias"])
    own = torch.softmax(hidden @ of["weight"].T + of["bias"], -1)
    shared = torch.softmax(task.forward(params, buffers, images, False)[0], -1)
    theta = torch.sigmoid(of["theta"])
    found = method.predict(work, images)
    torch.testing.assert_close(found.exp(), theta * shared + (1 - theta) * own)
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(6))
    assert method.deploy is None


def test_a_personal_model_fits_the_residual_of_the_shared_one():
    """Regression: y = 2x + 1 where the shared model says x; the personal one learns x + 1, and the shared one stays."""
    line = nn.Linear(1, 1)
    with torch.no_grad():
        line.weight.fill_(1.0)
        line.bias.fill_(0.0)
    task = Task(line, (1,), 1, losses=lambda outputs, b: ((outputs - b.targets).square().sum(-1), b.weight))
    task.is_regression = True
    method = fedalt(task, FedAltConfig(personal="additive", lr=0.1, personal_epochs=60))
    params, buffers = task.init(0)
    client, round_ = Client(0, 8), Round(0, 1, 1.0, 4, Seeds(0).at(0))
    x = torch.linspace(-1, 1, 8)[:, None]
    server = method.server.init(params, (client,), Seeds(0))
    state = method.init_client(params, buffers, client, Seeds(0).of(0))
    assert "additive/theta" not in state.personal
    work = method.receive(state, (method.server.reply(server, client, round_),), None, round_.on(client))
    torch.testing.assert_close(method.predict(work, x), x)  # no opinion yet
    work = run_phase(method.phases[0], work, task, Examples(x, 2 * x + 1), None, round_.on(client), Tally())
    assert float(work.personal["additive/weight"]) == pytest.approx(1.0, abs=1e-3)
    assert float(work.personal["additive/bias"]) == pytest.approx(1.0, abs=1e-3)
    assert float(work.shared["weight"]) == 1.0


def test_the_pull_is_the_squared_distance_without_a_half():
    context = context_of("fedsim", start_pull=0.5)
    _, population, _ = play(context)
    client = next(iter(population.states))
    work = received_work(context, population, client)
    plain = context_of("fedsim").method.phases[0].loss
    batch = next(in_order(context.federation.examples(client, "train"), 8))
    distance = (work.personal.flat - context.params.select(("last.weight", "last.bias")).flat).square().sum()
    assert float(distance) > 0
    without = plain(replace(work, start=None), batch)[0]
    torch.testing.assert_close(context.method.phases[0].loss(work, batch)[0], without + 0.5 * distance)


@pytest.mark.parametrize(("weight", "wanted"), [("examples", 5), ("batches", 3), ("equal", 1)])
def test_what_an_update_weighs_by(weight, wanted):
    task = Task(Adapted, (1, 8, 8), 10)
    method = fedalt(task, FedAltConfig(weight=weight))
    params, buffers = task.init(0)
    client, round_ = Client(0, 5), Round(0, 1, 1.0, 2, Seeds(0).at(0))
    state = method.init_client(params, buffers, client, Seeds(0).of(0))
    inbox = (method.server.reply(method.server.init(params, (client,), Seeds(0)), client, round_),)
    work = method.receive(state, inbox, None, round_.on(client))
    assert method.finish(state, work, inbox, None, round_.on(client))[1].weight == wanted


def test_the_servers_plain_step_is_the_mean_to_the_bit():
    params, _ = Task(Adapted, (1, 8, 8), 10).init(0)
    other = params.like(params.flat * 1.7 + 0.1)
    mean = WeightedSum().add(params, 1.0).add(other, 2.0).mean(otherwise=params)
    assert server_step(ServerStep(), params, mean, ())[0] is mean
    half, _ = server_step(ServerStep(server_lr=0.5), params, mean, ())
    torch.testing.assert_close(half.flat, (params.flat + mean.flat) / 2)


def test_presets_differ_as_the_docstring_says():
    paper, authors = (build.make_config("fedalt", {"preset": name}) for name in ("paper", "authors"))
    assert (paper.options["weight"], authors.options["weight"]) == ("examples", "batches")
    assert (paper.options["max_personal_steps"], authors.options["max_personal_steps"]) == (None, 1000)
    assert (paper.options["clip_stale"], authors.options["clip_stale"]) == (False, True)
    assert paper.tune_epochs == authors.tune_epochs == 5
    assert build.make_config("fedsim", {"preset": "paper"}).options["updates"] == "simultaneous"


def test_the_config_of_a_run_made_under_the_former_name_is_read():
    """`start_pull` was called `pull`: it is not the proximal term of other methods."""
    assert FedAltConfig(pull=0.5).start_pull == 0.5
    assert "pull" not in FedAltConfig().model_dump()
