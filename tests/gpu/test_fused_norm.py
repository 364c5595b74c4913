"""The pass that fuses norms, on real networks traced on a CPU as CUDA's autocast would run them."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sparsona.gpu.fused_norm import fuse_group_norms
from sparsona.gpu.norm_ops import BACKWARD, FORWARD
from sparsona.models import vgg
from sparsona.models.resnet import Block, ResidualAdapter

aten = torch.ops.aten


class LikeCudaAutocast(TorchFunctionMode):
    """Convolutions and products in bf16; norms in float32 and, as CUDA's, on images laid out channel by channel."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (F.conv2d, F.linear):
            args = [arg.bfloat16() if isinstance(arg, torch.Tensor) else arg for arg in args]
        if function is F.group_norm:
            args = [args[0].float().contiguous(), *args[1:]]
        return function(*args, **(kwargs or {}))


def trace(model, images, half):
    """The loss and the gradient of everything, as an executor traces them, and what to call it with."""
    model = model.to(memory_format=torch.channels_last)
    names, values = zip(*((name, value.detach()) for name, value in model.named_parameters()), strict=True)
    targets = torch.arange(len(images)) % 10

    def step(*tensors):
        live = [tensor.detach().requires_grad_() for tensor in tensors[1:]]
        with LikeCudaAutocast() if half else nullcontext():
            outputs = torch.func.functional_call(model, dict(zip(names, live, strict=True)), (tensors[0],))
        loss = F.cross_entropy(outputs.float(), targets)
        return [loss.detach(), *torch.autograd.grad(loss, live)]

    tensors = [images.contiguous(memory_format=torch.channels_last), *values]
    return make_fx(step, tracing_mode="real")(*tensors), tensors


def count(graph_module):
    return Counter(node.target for node in graph_module.graph.nodes if node.op == "call_function")


def casts_up(graph_module):
    """Casts of images to float32."""
    casts = graph_module.graph.find_nodes(op="call_function", target=aten._to_copy.default)
    return [node for node in casts if node.kwargs["dtype"] is torch.float32 and node.meta["val"].shape[2:].numel() > 9]


def distances(found, truth):
    """Relative to each tensor; where it is nearly nothing, to all of them."""
    whole = 1e-3 * max(float(value.norm()) for value in truth)
    return [
        float((one - other).norm()) / max(whole, float(other.norm())) for one, other in zip(found, truth, strict=True)
    ]


def residual_network(adapter=nn.Identity):
    """ResNet18's blocks, with and without a convolution in the shortcut, but narrow."""

    def norm(width):
        return nn.GroupNorm(8, width)

    stem = (nn.Conv2d(3, 16, 3, padding=1, bias=False), norm(16), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1))
    blocks = (Block(16, 16, 1, norm, adapter), Block(16, 32, 2, norm, adapter), Block(32, 32, 1, norm, adapter))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


NETWORKS = {  # how to make it, the images, norms, ReLUs, sums that stay
    "resnet": (residual_network, (4, 3, 16, 16), 8, 7, 1),  # where two gradients meet before the pooling
    "adapters": (
        lambda: residual_network(lambda width: ResidualAdapter(nn.GroupNorm(8, width), 0.0, False)),
        (4, 3, 16, 16),
        14,
        7,
        13,  # and of each adapter, both ways
    ),
    "vgg": (lambda: vgg.vgg11((3, 32, 32), 10), (4, 3, 32, 32), 5, 5, 0),
}
NEIGHBOURS = (aten.native_group_norm, aten.native_group_norm_backward, aten.relu, aten.threshold_backward)


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_networks(name, monkeypatch):
    monkeypatch.setattr(vgg, "VGG_WIDTHS", ((64,), (32,), (96,), (32,), (64,)))  # down to one pixel, odd groups, quick
    make, shape, norms, relus, sums = NETWORKS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, images = make(), torch.randn(shape)
    results = []
    for half in (False, True):
        before, tensors = trace(model, images, half)
        after = fuse_group_norms(copy.deepcopy(before))
        was, now = count(before), count(after)
        assert was[aten.native_group_norm.default] == now[FORWARD] == now[BACKWARD] == norms
        assert was[aten.relu.default] == was[aten.threshold_backward.default] == relus
        for gone in NEIGHBOURS:
            assert now[gone.default] == 0
        assert now[aten.add.Tensor] == sums  # shortcuts are taken in, and where gradients of two branches meet
        assert now[aten.max_pool2d_with_indices.default] == was[aten.max_pool2d_with_indices.default]
        assert not half or len(casts_up(before)) > norms
        assert len(casts_up(after)) <= 3  # for that sum, and for the mean over the pixels
        results += [before(*tensors), after(*tensors)]
    plain, fused, autocast, fused_half = results
    assert [(value.shape, value.dtype) for value in plain] == [(value.shape, value.dtype) for value in fused_half]
    assert max(distances(fused, plain)) < 1e-5
    # bf16 is about as far from the truth as autocast is, in the loss and in each parameter's gradient. Not quite: the
    # sums of shortcuts are rounded as well, each of which adds as much as a convolution's rounding does.
    ours, theirs = distances(fused_half, plain), distances(autocast, plain)
    assert sum(ours) < 1.6 * sum(theirs)
    assert max(ours) < 1.6 * max(theirs)


class Odd(nn.Module):
    """Norms whose neighbours cannot be taken in, or not all of them."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.GroupNorm(2, 8) for _ in range(5))

    def forward(self, x):
        a = self.norms[0](self.convs[0](x))
        b = a.relu() * a.tanh()  # two want what comes before the ReLU
        c = self.convs[1](b)
        d = self.norms[1](c) + c.sigmoid()  # somebody else sees the convolution with its bias; no ReLU
        e = self.convs[2](d)
        f = (self.norms[2](e) + self.norms[3](self.convs[3](d)) + d).relu() + e  # a sum of three
        return self.norms[4](f.flatten(2)).flatten(1)[:, :10]  # not an image


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_what_does_not_fit_stays(half):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        before, tensors = trace(Odd(), torch.randn(3, 8, 6, 6), half)
    after = fuse_group_norms(copy.deepcopy(before))
    now = count(after)
    assert (now[FORWARD], now[aten.native_group_norm.default], now[aten.relu.default]) == (4, 1, 2)
    assert max(distances(after(*tensors), before(*tensors))) < (0.05 if half else 1e-5)


def test_a_graph_that_writes_into_images_is_left_alone():
    writes = nn.Sequential(nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8), nn.ReLU(inplace=True), nn.Flatten())
    before, _ = trace(writes, torch.randn(3, 8, 2, 2), False)
    assert count(fuse_group_norms(before))[aten.native_group_norm.default] == 1
