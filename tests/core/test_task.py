"""A module as pure functions."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import cloudpickle
import pytest
import torch
from torch import nn

from sparsona.core.errors import SparsonaError
from sparsona.core.round import Batch
from sparsona.core.task import Task
from sparsona.core.tree import Tree


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
    conv.channels_last = False  # as the module that is handed out, to the bit
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


def test_frozen_parameters_are_constants():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    net[0].requires_grad_(False)
    task = Task(net, (3,), 2)
    params, buffers = task.init(0)
    assert task.layout.names == ("1.weight", "1.bias")
    x = torch.rand(4, 3)
    assert torch.equal(task.forward(params, buffers, x, train=True)[0], net(x))
    task.begin_with({"0.bias": torch.ones(3)})
    twin = pickle.loads(pickle.dumps(task))
    with torch.no_grad():
        net[0].bias.fill_(1.0)
    assert torch.equal(twin.forward(params, buffers, x, train=True)[0], net(x))


class Moving(nn.Module):
    """A mean over all batches, of the outputs, that forward replaces and does not edit."""

    def __init__(self, kind=torch.float32):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(3, dtype=kind))

    def forward(self, inputs):
        outputs = self.layer(inputs)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * outputs.mean(0)
        return outputs - self.mean.float()


def test_a_buffer_that_forward_replaces_is_not_lost():
    task = Task(Moving, (6,), 3)
    assert task.moves_buffers
    params, buffers = task.init(0)
    inputs = torch.rand(4, 6, generator=torch.Generator().manual_seed(1))
    named = {**{name: params[name] for name in params}, "mean": torch.zeros(3)}
    expected = torch.func.functional_call(Moving(), named, (inputs,))
    outputs, after = task.forward(params, buffers, inputs, train=True)
    assert torch.equal(outputs, expected)
    assert torch.equal(after["mean"], named["mean"])
    assert named["mean"].any()
    assert not after.flat.requires_grad  # or each batch would hold on to all before it
    assert not task._module.mean.any()


def with_buffers(**values: torch.Tensor):
    def build() -> nn.Module:
        net = nn.Linear(6, 3)
        for name, value in values.items():
            net.register_buffer(name, value.clone())
        return net

    return build


def test_buffers_that_float32_cannot_hold_stay_as_they_are():
    exact = {"mask": torch.tensor([True, False]), "index": torch.tensor([3, 2**24]), "short": torch.ones(2).half() / 3}
    inexact = {
        "table": torch.tensor([2**24 + 1, 2**40 + 1]),
        "third": torch.tensor(1 / 3, dtype=torch.float64),
        "wave": torch.full((3,), 1j),
    }
    task = Task(with_buffers(**exact, **inexact), (6,), 3)
    assert task.buffer_layout.names == tuple(exact)
    assert not task.moves_buffers
    params, buffers = task.init(0)
    _, after = task.forward(params, buffers, torch.rand(2, 6), train=True)
    for module in (task.module(params, after), pickle.loads(cloudpickle.dumps(task)).module(params, after)):
        for name, value in {**exact, **inexact}.items():
            found = module.get_buffer(name)
            assert found.dtype == value.dtype
            assert torch.equal(found, value), name


def test_buffers_that_would_be_changed_silently_are_refused():
    with pytest.raises(SparsonaError, match=r"training changes the buffer 'mean', whose values \(torch.float64\)"):
        Task(lambda: Moving(torch.float64), (6,), 3)

    def drawn() -> nn.Module:
        net = nn.Linear(6, 3)
        net.register_buffer("table", torch.rand(2, dtype=torch.float64))
        return net

    task = Task(drawn, (6,), 3)
    with pytest.raises(SparsonaError, match=r"the buffer 'table' \(torch.float64\) depends on the seed"):
        task.init(1)


class Wrapped(nn.Module):
    """A linear layer, before which something is done to the batch."""

    def __init__(self, change):
        super().__init__()
        self.change, self.layer = change, nn.Linear(6, 3)

    def forward(self, inputs):
        return self.layer(self.change(inputs))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x - x.mean(0),
        lambda x: x - x[:1],
        lambda x: x - x[-1:],
        lambda x: nn.functional.dropout(x, 0.5),  # in evaluation mode, too
        lambda x: nn.functional.batch_norm(x.reshape(-1, 2, 3), None, None, training=True).reshape(-1, 6),
    ],
)
def test_predictions_that_depend_on_the_batch_are_refused(change, untouched_generators):
    with pytest.raises(SparsonaError, match="depends on the batch that it is in"):
        Task(lambda: Wrapped(change), (6,), 3)


class MixedInTraining(nn.Module):
    """What goes into `last` is changed by a function, in training alone."""

    def __init__(self, change, last=None):
        super().__init__()
        self.change, self.first, self.last = change, nn.Linear(6, 8), last or nn.Linear(8, 3)

    def forward(self, inputs):
        hidden = torch.tanh(self.first(inputs))
        return self.last(self.change(hidden) if self.training else hidden)


def zeros():
    layer = nn.Linear(8, 3)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def hooked():
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    net[0].register_forward_hook(lambda layer, _, found: found - found.mean(0) if layer.training else found)
    return net


@pytest.mark.parametrize(
    "model",
    [
        lambda: MixedInTraining(lambda x: x - x.mean(0)),
        lambda: MixedInTraining(lambda x: x / (x.std(0) + 1e-3)),
        lambda: MixedInTraining(lambda x: x / x.abs().max()),
        lambda: MixedInTraining(lambda x: x / len(x)),
        lambda: MixedInTraining(lambda x: x + x.roll(1, 0)),
        lambda: MixedInTraining(lambda x: x - x.mean(0), zeros()),  # the outputs are 0 at first
        hooked,
    ],
)
def test_a_network_that_mixes_examples_in_training_alone_is_noticed(model, untouched_generators):
    assert Task(model, (6,), 3).mixes_examples


def test_a_network_that_counts_its_passes_does_not_mix():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.passes = nn.Linear(6, 3), 0

        def forward(self, x):
            self.passes += self.training
            return self.inner(x) / (1 + self.passes)

    assert not Task(Counting, (6,), 3).mixes_examples


@pytest.mark.parametrize("layer", [nn.Identity(), nn.Dropout(0.5), nn.LayerNorm(8), nn.RReLU()])
def test_noise_is_not_taken_for_mixing(layer):
    assert not Task(lambda: MixedInTraining(layer), (6,), 3).mixes_examples


def test_networks_of_torchs_layers_are_not_tried(monkeypatch):
    """They start as fast as before: of torch's layers only BatchNorm mixes examples."""
    monkeypatch.setattr("sparsona.core.task._mixes_in_training", None)
    for norm in (nn.LayerNorm(8), nn.BatchNorm1d(8)):
        net = nn.Sequential(nn.Linear(6, 8), norm, nn.Linear(8, 3))
        assert Task(net, (6,), 3).mixes_examples == isinstance(norm, nn.BatchNorm1d)


def test_statistics_are_those_that_training_moves(conv):
    assert conv.moves_buffers
    assert not Task(with_buffers(shift=torch.ones(3)), (6,), 3).moves_buffers
    norm = nn.Sequential(nn.Flatten(), nn.Unflatten(1, (1, 6)), nn.InstanceNorm1d(1, track_running_stats=True))
    task = Task(lambda: nn.Sequential(norm, nn.Flatten(), nn.Linear(6, 3)), (6,), 3)
    assert task.moves_buffers
    assert not task.mixes_examples


def test_models_that_are_not_built_are_refused():
    with pytest.raises(SparsonaError, match=r"without a size yet: 0\.weight, 0\.bias"):
        Task(lambda: nn.Sequential(nn.LazyLinear(3)), (6,), 3)
    with pytest.raises(SparsonaError, match="the model is a function"):
        Task(lambda: with_buffers(), (6,), 3)


def test_a_class_that_needs_arguments_is_no_model():
    said = (
        r"the model is Linear, which needs arguments to be called: in_features, out_features\n"
        r"  expected: .*built, or a function without arguments(.|\n)*model=Linear\(\.\.\.\), or lambda: Linear"
    )
    with pytest.raises(SparsonaError, match=said):
        Task(nn.Linear, (6,), 3)
    with pytest.raises(SparsonaError, match="the model is partial, which needs arguments to be called: out_features"):
        Task(partial(nn.Linear, 6), (6,), 3)
    for builds in (partial(nn.Linear, 6, 3), lambda width=6, *rest, **options: nn.Linear(width, 3)):
        assert Task(builds, (6,), 3).layout.names == ("weight", "bias")


class Unusual(nn.Module):
    """Matrices that no linear layer or convolution owns, and some that nobody multiplies by."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(5, 4)
        self.memory = nn.LSTM(4, 4, batch_first=True)
        self.norm = nn.LayerNorm((7, 4))
        self.raw = nn.Parameter(torch.ones(3, 4))

    def forward(self, tokens):
        return self.norm(self.memory(self.rows(tokens))[0])[:, -1] @ self.raw.T


def test_what_is_not_counted_is_named():
    task = Task(Unusual, (7,), 3, tokens=True)
    assert task.uncounted == ("raw", "memory.weight_ih_l0", "memory.weight_hh_l0")
    assert Task(lambda: nn.Linear(3, 2), (3,), 2).uncounted == ()


def test_flops_of_a_transposed_convolution():
    """4x4 pixels become 8x8: each of the 4 * 6 * 2 * 2 weights is used once per pixel that goes in."""
    task = Task(
        lambda: nn.Sequential(nn.ConvTranspose2d(4, 6, 2, stride=2), nn.Flatten(), nn.Linear(384, 2)), (4, 4, 4), 2
    )
    costs = {slot.name: slot.flops_per_weight for slot in task.layout.slots}
    assert (costs["0.weight"], costs["0.bias"]) == (2 * 16, 64)


class Seen(nn.Module):
    """Lets images through, and remembers whether their channels lay side by side."""

    def __init__(self):
        super().__init__()
        self.last = []

    def forward(self, images):
        self.last.append(images.is_contiguous(memory_format=torch.channels_last) and images.stride(1) == 1)
        return images


class Flattens(nn.Module):
    """As many people write it: a view() that only channels first allow."""

    def forward(self, images):
        return images.view(len(images), -1)


def _layout_task(channels, flatten):
    seen = Seen()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(channels, 4, 3), nn.MaxPool2d(2), seen, nn.Tanh(), flatten, nn.Linear(36, 3))
    task = Task(lambda: net, (channels, 8, 8), 3)
    return task, next(layer for layer in task._module if isinstance(layer, Seen))


@pytest.mark.parametrize("channels", [1, 3])
def test_images_lie_with_channels_last_on_a_cpu(channels):
    """Also with one channel, where strides are ambiguous; what is computed stays the same."""
    task, seen = _layout_task(channels, nn.Flatten())
    params, buffers = task.init(0)
    images = torch.rand(5, channels, 8, 8)
    batch = Batch(images, torch.tensor([0, 1, 2, 0, 1]), torch.ones(5), torch.arange(5), torch.tensor(0))
    found = task.gradient(params, buffers, batch)
    assert seen.last[-1]
    task.channels_last = False
    expected = task.gradient(params, buffers, batch)
    assert not seen.last[-1]
    torch.testing.assert_close(found.flat, expected.flat, rtol=1e-5, atol=1e-6)


def test_a_network_that_asks_for_channels_first_gets_them():
    task, seen = _layout_task(3, Flattens())
    params, buffers = task.init(0)
    assert task.forward(params, buffers, torch.rand(5, 3, 8, 8), train=True)[0].shape == (5, 3)
    assert not seen.last[-1]


class _ViewsWhenTested(nn.Module):
    """Flattens by view() in evaluation alone."""

    def __init__(self):
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 2)

    def forward(self, images):
        x = self.conv(images)
        return self.last(x.flatten(1) if self.training else x.view(len(x), -1))


class _SeesStrides(nn.Module):
    """Gives other numbers where images lie otherwise."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, images):
        x = self.conv(images)
        return x.as_strided((len(x), 2), (x.stride(0), 1))


@pytest.mark.parametrize(
    "model",
    [
        lambda: nn.Sequential(nn.GroupNorm(3, 3), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2)),
        _ViewsWhenTested,
        _SeesStrides,
    ],
    ids=["norm of raw images", "view in evaluation", "strides"],
)
def test_models_for_channels_first_are_left_as_they_are(model):
    task = Task(model, (3, 8, 8), 2)
    assert not task.takes_channels_last
    params, buffers = task.init(0)
    images = torch.rand(2, 3, 8, 8)
    for train in (True, False):
        outputs, _ = task.forward(params, buffers, images, train)
        module = task.module(params, buffers).train(train)
        torch.testing.assert_close(outputs, module(images))


def test_a_restricted_task_is_a_sub_network(conv):
    """It predicts as the whole network with zeros outside the mask, and its gradient is that inside the mask."""
    task = conv
    task.channels_last = False  # as the module that is handed out, to the bit
    params, buffers = task.init(0)
    generator = torch.Generator().manual_seed(1)
    mask = params.like(torch.rand(params.flat.shape, generator=generator) < 0.4)
    inputs = torch.randn(4, 1, 8, 8, generator=generator)
    batch = batch_of(inputs, torch.tensor([0, 1, 2, 0]))
    zeroed = params.like(params.flat * mask.flat)
    expected, _ = task.forward(zeroed, buffers, inputs, train=False)
    gradient = task.gradient(zeroed, buffers, batch)
    flops = task.layout.forward_flops([int(mask[name].sum()) for name in task.layout.names])

    task.restrict(mask)
    inside, buffers = task.init(0)
    assert torch.equal(inside.flat, params.flat[mask.flat])
    assert task.layout.size == int(mask.flat.sum()) < task.whole_layout.size
    assert task.layout.names == task.whole_layout.names
    dense = sum(s.flops_per_weight * (s.size - n.size) for s, n in _slots(task) if s.bias_counts_dense)
    assert task.layout.forward_flops() == flops - dense  # a bias that is left out is no longer charged
    assert torch.equal(task.forward(inside, buffers, inputs, train=False)[0], expected)
    assert torch.equal(task.gradient(inside, buffers, batch).flat, gradient.flat[mask.flat])
    assert torch.equal(task.module(inside, buffers)(inputs), expected)
    copied = pickle.loads(cloudpickle.dumps(task))
    assert torch.equal(copied.forward(inside, buffers, inputs, train=False)[0], expected)
    stack = torch.stack([inside.flat, 2 * inside.flat])
    both = torch.vmap(lambda flat: task.forward(inside.like(flat), buffers, inputs, train=False)[0])(stack)
    torch.testing.assert_close(both[0], expected)


def _slots(task):
    return zip(task.whole_layout.slots, task.layout.slots, strict=True)


def test_features_are_what_enters_a_layer(conv):
    """The same outputs and buffers as a plain pass, gradients through the features, and no hook left behind."""
    params, buffers = conv.init(0)
    images = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for train in (True, False):
        outputs, features, moved = conv.forward_with_features(params, buffers, images, "4", train)
        plain, plainly_moved = conv.forward(params, buffers, images, train)
        assert torch.equal(outputs, plain)
        assert torch.equal(moved.flat, plainly_moved.flat)
        torch.testing.assert_close(features @ params["4.weight"].T + params["4.bias"], outputs)
    live = params.like(params.flat.clone().requires_grad_())
    conv.forward_with_features(live, buffers, images, "4", True)[1].sum().backward()
    assert live.flat.grad is not None
    assert not any(layer._forward_pre_hooks for layer in conv._module.modules())
    with pytest.raises(RuntimeError):
        conv.forward_with_features(params, buffers, torch.rand(6, 2, 8, 8), "4", True)
    assert not any(layer._forward_pre_hooks for layer in conv._module.modules())


def test_features_of_several_clients_at_once():
    task = Task(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), (3,), 2)
    (params, buffers), inputs = task.init(0), torch.rand(5, 3, generator=torch.Generator().manual_seed(0))

    def features(flat):
        return task.forward_with_features(params.like(flat), buffers, inputs, "2", True)[1]

    flats = torch.stack([params.flat, 2 * params.flat])
    torch.testing.assert_close(torch.func.vmap(features)(flats), torch.stack([features(flat) for flat in flats]))
    linear = Task(lambda: nn.Linear(3, 2), (3,), 2)  # a model of one layer: what enters it are the inputs
    assert torch.equal(linear.forward_with_features(*linear.init(0), inputs, "", False)[1], inputs)


def test_norms_follow_narrower_weights_and_a_copy_does_not_notice():
    """GroupNorm keeps two channels a group, LayerNorm normalises over what there is."""
    net = nn.Sequential(nn.Conv2d(1, 6, 1), nn.GroupNorm(3, 6), nn.Flatten(), nn.LayerNorm(6), nn.Linear(6, 2))
    task = Task(net, (1, 1, 1), 2)
    assert task.norm_groups == {"1.weight": 3, "3.weight": 1}
    params, buffers = task.init(0)
    narrow = Tree.of({n: v[:, :4] if n == "4.weight" else v[: min(4, len(v))] for n, v in params.items()})
    inputs = torch.rand(3, 1, 1, 1)
    found, _ = task.forward(narrow, buffers, inputs, train=False)
    x = nn.functional.conv2d(inputs, narrow["0.weight"], narrow["0.bias"])
    x = nn.functional.group_norm(x, 2, narrow["1.weight"], narrow["1.bias"]).flatten(1)
    x = nn.functional.layer_norm(x, (4,), narrow["3.weight"], narrow["3.bias"])
    assert torch.equal(found, nn.functional.linear(x, narrow["4.weight"], narrow["4.bias"]))
    module = task.module(narrow, buffers)
    assert torch.equal(module(inputs), found)
    assert (module[1].num_groups, module[1].num_channels, module[4].in_features) == (2, 4, 4)
    wide = task.forward(params, buffers, inputs, train=False)[0]
    for other in (copy.copy(task), pickle.loads(pickle.dumps(task))):
        assert torch.equal(other.forward(params, buffers, inputs, train=False)[0], wide)
        assert torch.equal(other.forward(narrow, buffers, inputs, train=False)[0], found)


def test_statistics_are_the_mean_over_batches():
    """Inputs 0 2 and 4 8, and a batch of one, which has no variance: means 1 and 6, unbiased variances 2 and 8."""
    task = Task(nn.Sequential(nn.BatchNorm1d(1), nn.Dropout(0.5), nn.Linear(1, 2)), (1,), 2)
    params, buffers = task.init(0)

    def batch(*values):
        x = torch.tensor(values)[:, None]
        return Batch(x, torch.zeros(len(x)).long(), torch.ones(len(x)), torch.arange(len(x)), torch.zeros(()))

    batches = [batch(0.0, 2.0), batch(4.0, 8.0), batch(100.0)]
    found = task.statistics(params, buffers, batches)
    assert (found["0.running_mean"].item(), found["0.running_var"].item()) == (3.5, 5.0)
    assert found["0.num_batches_tracked"].item() == 2
    assert (buffers["0.running_mean"].item(), buffers["0.running_var"].item()) == (0.0, 1.0)
    assert task.statistics(params, buffers, batches[2:]) is buffers
    after = task.forward(params, buffers, batches[0].inputs, True, torch.tensor(0))[1]
    assert after["0.running_mean"].item() == pytest.approx(0.1)  # its momentum is as before
