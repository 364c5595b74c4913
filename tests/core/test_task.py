"""A module as pure functions."""

from __future__ import annotations

import pickle

import cloudpickle
import pytest
import torch
from torch import nn

from sparsona.core.errors import SparsonaError
from sparsona.core.round import Batch
from sparsona.core.task import Task


def batch_of(inputs, targets) -> Batch:
    count = len(targets)
    return Batch(inputs, targets, torch.ones(count), torch.arange(count), torch.tensor(9))


@pytest.fixture
def conv():
    return Task(
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)),
        (1, 8, 8),
        5,
    )


def test_builder_depends_on_the_seed_and_module_does_not(untouched_generators):
    built = Task(lambda: nn.Linear(3, 2), (3,), 2)
    assert torch.equal(built.init(1)[0].flat, built.init(1)[0].flat)
    assert not torch.equal(built.init(1)[0].flat, built.init(2)[0].flat)
    with torch.random.fork_rng():
        net = nn.Linear(3, 2)
    given = Task(net, (3,), 2)
    assert torch.equal(given.init(1)[0]["weight"], net.weight)
    assert torch.equal(given.init(2)[0]["weight"], net.weight)


def test_forward_equals_the_module_and_moves_buffers_purely(conv):
    params, buffers = conv.init(0)
    inputs = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    before = buffers.flat.clone()
    module = conv.module(params, buffers).train()
    expected = module(inputs)
    outputs, after = conv.forward(params, buffers, inputs, train=True)
    assert torch.equal(outputs, expected)
    assert torch.equal(buffers.flat, before)
    for name, value in module.named_buffers():
        assert torch.equal(after[name], value.float())
    again, unchanged = conv.forward(params, after, inputs, train=False)
    assert unchanged is after
    assert torch.equal(again, module.eval()(inputs))


def test_dropout_is_a_function_of_the_noise(untouched_generators):
    task = Task(lambda: nn.Sequential(nn.Linear(20, 20), nn.Dropout(0.5), nn.Linear(20, 2)), (20,), 2)
    params, buffers = task.init(0)
    inputs = torch.ones(3, 20)

    def out(noise: int):
        return task.forward(params, buffers, inputs, True, torch.tensor(noise))[0]

    assert torch.equal(out(1), out(1))
    assert not torch.equal(out(1), out(2))
    with pytest.raises(ValueError, match="noise"):
        task.forward(params, buffers, inputs, True)


def test_flops_and_roles(conv):
    costs = {slot.name: (slot.flops_per_weight, slot.bias_counts_dense) for slot in conv.layout.slots}
    assert costs["0.weight"] == (2 * 36, False)
    assert costs["0.bias"] == (36, True)
    assert costs["1.weight"] == (0, False)
    assert costs["4.weight"] == (2, False)
    assert costs["4.bias"] == (1, False)
    assert conv.roles.input == ("0.weight", "0.bias")
    assert conv.roles.output == ("4.weight", "4.bias")
    assert conv.roles.norm == ("1.weight", "1.bias")
    assert conv.mixes_examples


def test_gradient_is_that_of_the_mean_loss_in_evaluation_mode(conv):
    params, buffers = conv.init(3)
    draws = torch.Generator().manual_seed(2)
    batch = batch_of(torch.randn(7, 1, 8, 8, generator=draws), torch.randint(5, (7,), generator=draws))
    module = conv.module(params, buffers)
    nn.functional.cross_entropy(module(batch.inputs), batch.targets).backward()
    found = conv.gradient(params, buffers, batch)
    for name, value in module.named_parameters():
        torch.testing.assert_close(found[name], value.grad)


def test_padding_does_not_count():
    task = Task(lambda: nn.Linear(3, 2), (3,), 2)
    params, buffers = task.init(0)
    whole = batch_of(torch.eye(3), torch.tensor([0, 1, 1]))
    padded = whole.__class__(whole.inputs, whole.targets, torch.tensor([1.0, 1.0, 0.0]), whole.index, whole.noise)
    short = batch_of(torch.eye(3)[:2], torch.tensor([0, 1]))

    def loss(batch):
        return task.mean_loss(task.forward(params, buffers, batch.inputs, True)[0], batch)

    torch.testing.assert_close(loss(padded), loss(short))
    assert task.score(task.forward(params, buffers, padded.inputs, False)[0], padded)[1] == 2


def test_wrong_models_are_refused():
    with pytest.raises(SparsonaError, match="does not take one example of shape"):
        Task(lambda: nn.Linear(3, 2), (1, 8, 8), 2)
    with pytest.raises(SparsonaError, match="the data has 5 classes"):
        Task(lambda: nn.Linear(3, 2), (3,), 5)
    with pytest.raises(SparsonaError, match="no parameters"):
        Task(lambda: nn.ReLU(), (3,), 3)


class Tied(nn.Module):
    """One matrix used twice, as language models do."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(4, 4, bias=False)
        self.decode = nn.Linear(4, 4, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, inputs):
        return self.decode(self.encode(inputs).relu())


def test_tied_weights_count_once_and_get_both_gradients():
    task = Task(Tied, (4,), 4)
    assert task.layout.names == ("encode.weight",)
    params, buffers = task.init(0)
    batch = batch_of(torch.eye(4), torch.arange(4))
    module = task.module(params, buffers)
    nn.functional.cross_entropy(module(batch.inputs), batch.targets).backward()
    torch.testing.assert_close(task.gradient(params, buffers, batch)["encode.weight"], module.encode.weight.grad)


def test_a_copied_task_uses_its_own_module():
    task = Task(lambda: nn.Linear(3, 2), (3,), 2)
    other = pickle.loads(cloudpickle.dumps(task))
    params, buffers = task.init(4)
    assert torch.equal(
        other.forward(params, buffers, torch.eye(3), True)[0], task.forward(params, buffers, torch.eye(3), True)[0]
    )
    assert isinstance(other._module.weight, nn.Parameter)
    assert isinstance(task._module.weight, nn.Parameter)


class HiddenDropout(nn.Module):
    """Noise that no layer's class gives away."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, inputs):
        return self.layer(nn.functional.dropout(inputs, 0.5, self.training))


def test_noise_is_found_wherever_it_hides(untouched_generators):
    task = Task(HiddenDropout, (6,), 2)
    assert task.draws_noise
    params, buffers = task.init(0)
    first, second = (task.forward(params, buffers, torch.ones(3, 6), True, torch.tensor(5))[0] for _ in range(2))
    assert torch.equal(first, second)
    assert not Task(lambda: nn.Linear(6, 2), (6,), 2).draws_noise


def test_frozen_parameters_are_refused():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    net[0].requires_grad_(False)
    with pytest.raises(SparsonaError, match=r"frozen parameters: 0\.weight, 0\.bias"):
        Task(net, (3,), 2)
