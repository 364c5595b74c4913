"""ResNet18 against a restatement of it, its adapters, and weights from a file. Also how VGG11 starts."""

from __future__ import annotations

import math

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsona import models
from sparsona.core.errors import SparsonaError
from sparsona.core.task import Task

WIDTHS = (64, 128, 256, 512)


def net(spec: str, input_shape: tuple[int, ...] = (3, 32, 32), num_classes: int = 10) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return models.builder(spec, input_shape, num_classes)()


def images(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


def restated(state: dict[str, Tensor], x: Tensor, groups: dict[int, int], large_stem: bool) -> Tensor:
    """ResNet18 as He et al. describe it, with GroupNorm, from the state_dict alone."""

    def norm(name: str, y: Tensor) -> Tensor:
        return F.group_norm(y, groups[y.shape[1]], state[f"{name}.weight"], state[f"{name}.bias"])

    if large_stem:
        x = F.conv2d(x, state["conv1.weight"], stride=2, padding=3)
        x = F.max_pool2d(norm("bn1", x).relu(), 3, 2, 1)
    else:
        x = norm("bn1", F.conv2d(x, state["conv1.weight"], padding=1)).relu()
    for stage in (1, 2, 3, 4):
        for block in (0, 1):
            at = f"layer{stage}.{block}"
            stride = 2 if (stage > 1 and block == 0) else 1
            y = norm(f"{at}.bn1", F.conv2d(x, state[f"{at}.conv1.weight"], stride=stride, padding=1)).relu()
            y = norm(f"{at}.bn2", F.conv2d(y, state[f"{at}.conv2.weight"], padding=1))
            if stride == 2:
                x = norm(f"{at}.downsample.1", F.conv2d(x, state[f"{at}.downsample.0.weight"], stride=2))
            x = (x + y).relu()
    return F.linear(F.adaptive_avg_pool2d(x, 1).flatten(1), state["fc.weight"], state["fc.bias"])


@pytest.mark.parametrize(
    ("spec", "shape", "groups", "large_stem"),
    [
        ("resnet18", (3, 32, 32), dict.fromkeys(WIDTHS, 32), False),
        ("resnet18-emnist", (1, 28, 28), dict(zip(WIDTHS, (8, 8, 16, 32), strict=True)), False),
        ("resnet18-gldv2", (3, 64, 48), dict(zip(WIDTHS, (8, 8, 16, 32), strict=True)), True),
    ],
)
def test_forward_is_the_networks_definition(spec, shape, groups, large_stem):
    module = net(spec, shape)
    with torch.no_grad():
        for value in module.parameters():  # norms start as 1 and 0, which hides mistakes
            value.add_(0.05 * images(*value.shape))
        x = images(2, *shape)
        kept = x.clone()
        torch.testing.assert_close(
            module(x), restated(module.state_dict(), x, groups, large_stem), rtol=1e-4, atol=1e-4
        )
    assert torch.equal(x, kept)


@pytest.mark.parametrize("form", ["paper", "authors"])
def test_adapters_add_what_they_say(form):
    """a(x) = x + conv1x1(norm(x)), or 2x + ...: asked of one block, with weights that matter."""
    module = net(f"resnet18-emnist:adapters=true,adapter_form={form}", (1, 8, 8))
    adapter = module.layer2[0].adapter1
    assert 0.9e-4 < adapter.conv.weight.std() < 1.1e-4
    assert adapter.norm.num_groups == 8
    x = images(2, 128, 4, 4)
    with torch.no_grad():
        adapter.conv.weight.copy_(images(128, 128, 1, 1))
        adapter.norm.weight.copy_(images(128))
        y = F.group_norm(x, 8, adapter.norm.weight, adapter.norm.bias)
        change = torch.einsum("oi,nihw->nohw", adapter.conv.weight[:, :, 0, 0], y)
        factor = 1 if form == "paper" else 2
        torch.testing.assert_close(adapter(x), factor * x + change, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["paper", "authors"])
def test_adapters_of_nothing_leave_the_network_as_it_is(form):
    with_adapters = net(f"resnet18-emnist:adapters=true,adapter_form={form}", (1, 8, 8))
    without = net("resnet18-emnist", (1, 8, 8))
    without.load_state_dict({k: v for k, v in with_adapters.state_dict().items() if ".adapter" not in k})
    x = images(2, 1, 8, 8)
    with torch.no_grad():
        for name, value in with_adapters.named_parameters():
            if ".adapter" in name and "conv" in name:
                value.zero_()
        torch.testing.assert_close(with_adapters(x), without(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("options", ["dropout=0.5", "adapters=true,dropout=0.5"])
def test_dropout_acts_in_training_alone(options, untouched_generators):
    task = Task(models.builder(f"resnet18:{options}", (1, 4, 4), 3), (1, 4, 4), 3)
    params, buffers = task.init(0)
    for name in task.roles.adapter:
        params[name].mul_(1e4)  # otherwise too small to be seen

    def outputs(train: bool, noise: int) -> Tensor:
        return task.forward(params, buffers, images(2, 1, 4, 4), train, torch.tensor(noise))[0].detach()

    assert torch.equal(outputs(False, 1), outputs(False, 2))
    assert torch.equal(outputs(True, 1), outputs(True, 1))
    assert not torch.equal(outputs(True, 1), outputs(True, 2))


def test_vgg11_starts_as_published():
    module = net("vgg11")
    convs = [layer for layer in module if isinstance(layer, nn.Conv2d)]
    norms = [layer for layer in module if isinstance(layer, nn.GroupNorm)]
    assert len(convs) == len(norms) == 8
    for conv in convs:
        assert conv.weight.std().item() == pytest.approx(math.sqrt(2 / (9 * conv.out_channels)), rel=0.05)
        assert not conv.bias.any()
    assert {norm.num_groups for norm in norms} == {32}
    assert all((norm.weight == 1).all() and not norm.bias.any() for norm in norms)
    assert module[-1].weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert not module[-1].bias.any()


def imagenet_state(num_classes: int = 1000) -> dict[str, Tensor]:
    """Names and shapes of torchvision's resnet18, made-up values."""
    shapes: dict[str, tuple[int, ...]] = {"conv1.weight": (64, 3, 7, 7)}

    def norm(name: str, width: int) -> None:
        for part in ("weight", "bias", "running_mean", "running_var"):
            shapes[f"{name}.{part}"] = (width,)
        shapes[f"{name}.num_batches_tracked"] = ()

    norm("bn1", 64)
    inputs = 64
    for stage, width in enumerate(WIDTHS, start=1):
        for block in (0, 1):
            at = f"layer{stage}.{block}"
            shapes[f"{at}.conv1.weight"] = (width, inputs, 3, 3)
            norm(f"{at}.bn1", width)
            shapes[f"{at}.conv2.weight"] = (width, width, 3, 3)
            norm(f"{at}.bn2", width)
            if inputs != width:
                shapes[f"{at}.downsample.0.weight"] = (width, inputs, 1, 1)
                norm(f"{at}.downsample.1", width)
            inputs = width
    shapes |= {"fc.weight": (num_classes, 512), "fc.bias": (num_classes,)}
    generator = torch.Generator().manual_seed(1)
    return {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_weights_from_a_file(tmp_path, suffix):
    """Every parameter but the last layer's comes from the file, adapters start as without it; no statistics stay."""
    state, path = imagenet_state(), tmp_path / f"resnet18.{suffix}"
    safetensors.torch.save_file(state, path) if suffix == "safetensors" else torch.save(state, path)
    module = net(f"resnet18-gldv2:adapters=true,weights={path}", (3, 32, 32), 7)
    random = net("resnet18-gldv2:adapters=true", (3, 32, 32), 7).state_dict()
    for name, value in module.state_dict().items():
        kept = name.startswith("fc.") or ".adapter" in name
        assert torch.equal(value, random[name] if kept else state[name]), name
    assert not list(module.buffers())
    assert len(set(state) & set(random)) == 62  # 20 convolutions, 20 norms of two, the last layer of two


def test_a_last_layer_that_fits_is_taken_too(tmp_path):
    state, path = imagenet_state(num_classes=9), tmp_path / "nine.pth"
    torch.save(state, path)
    assert torch.equal(net(f"resnet18-gldv2:weights={path}", (3, 32, 32), 9).fc.bias, state["fc.bias"])


def test_weights_that_do_not_fit_are_listed(tmp_path):
    state, path = imagenet_state(), tmp_path / "other.pth"
    del state["layer3.1.bn2.bias"]
    state["layer5.0.conv1.weight"] = torch.zeros(1)
    torch.save(state, path)
    with pytest.raises(SparsonaError) as caught:
        net(f"resnet18:weights={path}", (1, 8, 8))
    message = str(caught.value)
    assert "layer3.1.bn2.bias is missing" in message
    assert "layer5.0.conv1.weight is not known" in message
    assert "conv1.weight is 64x3x7x7, not 64x1x3x3" in message
    assert "fc" not in message.splitlines()[0]


class Code:
    """Something that a careless reader would run."""

    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("absent.pth", None, "there is no file"),
        ("noise.pth", b"not weights at all", "cannot be read"),
        ("noise.safetensors", b"not weights at all", "cannot be read"),
        ("empty.pth", b"", "cannot be read"),
        ("list.pth", [torch.zeros(2)], "something else than weights"),
        ("nested.pth", {"state_dict": {"fc.bias": torch.zeros(2)}}, "something else than weights"),
        ("numbered.pth", {1: torch.zeros(2)}, "something else than weights"),
        ("code.pth", {"fc.bias": Code()}, "more than tensors; nothing in it was run"),
        ("nan.pth", {"fc.bias": torch.tensor([1.0, math.nan])}, "no plain finite numbers: fc.bias"),
        ("complex.pth", {"fc.bias": torch.ones(2) * 1j}, "no plain finite numbers: fc.bias"),
        ("bool.pth", {"fc.bias": torch.ones(2) > 0}, "no plain finite numbers: fc.bias"),
        ("sparse.pth", {"fc.bias": torch.ones(2).to_sparse()}, "no plain finite numbers: fc.bias"),
        ("none.pth", {}, "and 54 more"),
    ],
)
def test_files_without_weights(tmp_path, name, content, words):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(SparsonaError, match=words) as caught:
        net(f"resnet18-gldv2:weights={path}")
    assert len(str(caught.value)) < 800


def test_home_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    torch.save(imagenet_state(), tmp_path / "mine.pth")
    assert net("resnet18-gldv2:weights=~/mine.pth").conv1.weight.min() >= 0


@pytest.mark.parametrize(("spec", "shape"), [("resnet18-emnist", (1, 9, 8)), ("resnet18:stem=7x7", (3, 21, 16))])
def test_two_first_layers_side_by_side(spec, shape):
    """The upper rows see one, the lower rows the other; of an odd number the middle one is an upper row."""
    module = net(f"{spec}{',' if ':' in spec else ':'}split=true", shape)
    x, first = images(2, *shape), module.conv1
    rows = shape[1] - shape[1] // 2
    side = 7 if "7x7" in spec else 3
    options = {"stride": 2 if side == 7 else 1, "padding": side // 2}
    halves = (
        F.conv2d(x[:, :, :rows], first.upper.weight, **options),
        F.conv2d(x[:, :, rows:], first.lower.weight, **options),
    )
    torch.testing.assert_close(first(x), torch.cat(halves, dim=2))
    assert not torch.equal(first.upper.weight, first.lower.weight)
    assert module.roles.split == ("conv1.lower.weight",)
    assert module(x).shape[0] == 2
