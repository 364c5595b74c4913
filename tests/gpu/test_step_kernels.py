"""Kernels around convolutions and norms (layouts, gradients, pooling, updates) against torch's own operations.

Without a GPU the kernels run in Triton's interpreter; without Triton they are not tested.
"""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
import torch
from by_triton import BY_TRITON, check_in_interpreter, needs_gpu, needs_triton, on_gpu
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import sparsona as sp
from sparsona.core.tree import leaves
from sparsona.engine.rounds import simulate
from sparsona.executors import numeric_mode
from sparsona.executors.graphed import Graphed
from sparsona.executors.serial import Serial
from sparsona.experiment.build import make_config, make_context
from sparsona.gpu import pool_ops, weight_ops
from sparsona.gpu.flat_fusion import fuse_flat, load_kernel
from sparsona.gpu.fused_norm import fuse_group_norms
from sparsona.gpu.pool_ops import POOL, POOL_BACKWARD, fuse_pools
from sparsona.gpu.step_graph import fuse_step, is_covered
from sparsona.gpu.weight_ops import COLLECT, LAY_OUT

aten = torch.ops.aten


def fused(fuse, function, *inputs):
    """A function traced, after one pass."""
    module = make_fx(function)(*[value.clone() for value in inputs])
    fuse(module.graph)
    module.graph.lint()
    module.recompile()
    return module


def targets(graph):
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def drawn(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def check_weights(lay_out, collect):
    for shape in ((5, 70, 3, 3), (4, 3, 5, 5), (6, 64, 1, 1), (2, 1, 3, 2)):
        weight = drawn(*shape)
        for half in (False, True):
            found = lay_out(weight, half)
            assert found.dtype is (torch.bfloat16 if half else torch.float32)
            assert found.is_contiguous(memory_format=torch.channels_last)
            torch.testing.assert_close(found.float(), weight, rtol=2**-7 if half else 0, atol=0)
    filters = drawn(5, 70, 3, 3, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    two, three = drawn(130, 2, 40), drawn(7, 3, 10)
    parts = [filters, two, two, two, drawn(11, 4, dtype=torch.bfloat16), three, drawn(9), three, three]
    rows = [-1, 1, 0, 1, -1, 2, -1, 0, 1]
    wanted = torch.cat([p.float().reshape(-1) if r < 0 else p[:, r].sum(0) for p, r in zip(parts, rows, strict=True)])
    found = collect(parts, rows, len(wanted))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    only_first = collect([three, drawn(4)], [0, -1], 14)  # rows that nobody asked for go nowhere
    torch.testing.assert_close(only_first, torch.cat([three[:, 0].sum(0), drawn(4)]), rtol=1e-5, atol=1e-5)


def check_pools(pool, backward):
    for shape, size in (((2, 5, 4, 6), 2), ((3, 70, 7, 5), 2), ((1, 64, 9, 9), 3)):
        x = drawn(*shape).mul(2).round().contiguous(memory_format=torch.channels_last)  # many are equal
        x = x.requires_grad_()
        y = F.max_pool2d(x, size)
        dy = drawn(*y.shape)
        (dx,) = torch.autograd.grad(y, [x], dy)
        assert torch.equal(pool(x.detach(), size), y.detach())
        assert torch.equal(backward(dy, x.detach(), size), dx)


def update(params, velocity, gradient, mask, rate):
    """Clipping, decay and momentum inside a mask, written back: what a method's step ends with."""
    share = (1.0 / (torch.linalg.vector_norm(gradient) + 1e-6)).clamp(max=1.0)
    speed = 0.9 * velocity + gradient * share + 5e-4 * params
    new = (params - rate * speed).where(mask > 0, params)
    size = new.abs().sum()
    velocity.copy_(speed)
    params.copy_(new)
    return [size]


def update_inputs():
    generator = torch.Generator().manual_seed(0)
    flats = [torch.randn(70_000, generator=generator) for _ in range(3)]
    return [*flats, (torch.rand(70_000, generator=generator) > 0.5).float(), torch.tensor(0.1)]


def fused_update(inputs):
    graph = fused(fuse_flat, update, *inputs)
    (kernel,) = [target for target in targets(graph) if hasattr(target, "source")]
    return graph, kernel


def check_update(by_kernel):
    inputs = update_inputs()
    graph, kernel = fused_update(inputs)
    if by_kernel:
        kernel.kernel.append(load_kernel(kernel.source))
    wanted, found = [value.clone() for value in inputs], [value.clone() for value in inputs]
    expected, result = update(*wanted), graph(*found)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert not torch.equal(found[0], inputs[0])


def test_weights():
    check_weights(weight_ops.lay_out, weight_ops.collect)


def test_pools():
    check_pools(pool_ops.max_pool, pool_ops.max_pool_backward)


def test_update():
    check_update(by_kernel=False)


def test_an_update_is_one_kernel_that_writes_in_place():
    graph, _ = fused_update(update_inputs())
    left = [target for target in targets(graph) if hasattr(target, "source") or target is aten.copy_.default]
    assert len(left) == 1


def test_a_kernel_is_written_of_our_words_and_numbers():
    """Its text is run: nothing from outside may get into it. Operands that are no numbers stay out of kernels."""
    _, kernel = fused_update(update_inputs())
    lines = kernel.source.splitlines()
    allowed = r"(in_|out_)?[bnv]?\d+|tl(\.[a-zA-Z_0-9]+)+|at|there|size|mask|propagate_nan|to|BLOCK|e"
    for line in lines[4:]:
        for word in re.findall(r"[A-Za-z_][A-Za-z_0-9.]*", line):
            assert re.fullmatch(allowed, word), word

    def infinite(params, gradient):
        return [(params + float("inf")) * gradient + gradient]

    graph = fused(fuse_flat, infinite, drawn(70_000), drawn(70_000))
    assert not any("inf" in getattr(target, "source", "") for target in targets(graph))


def flat_cases():
    """Updates whose kernel must not run after what it reads has changed, or whose results are written and read."""

    def heavy_ball(params, previous, gradient):  # the old model goes to another field
        new, old = params - 0.1 * gradient + 0.9 * (params - previous), params.clone()
        params.copy_(new)
        previous.copy_(old)
        return []

    def counted(params, mean, count):
        new = params * 0.9
        average = mean + (new - mean) * (1 / (count.sum() + 1))
        count.copy_(count + 1)
        params.copy_(new)
        mean.copy_(average)
        return []

    def kept_gradient(params, last, gradient):
        new = params - 0.1 * (gradient - 0.5 * last)
        last.copy_(gradient)
        params.copy_(new)
        return []

    def returned(params, other, gradient):
        params.copy_(params * 2 + other)
        return [params]

    def chained(params, other, gradient):
        new = params * 2 + gradient
        params.copy_(new)
        other.copy_(new * 0.5 + params)
        return [other.sum()]

    def through_an_alias(params, other, gradient):
        alias = params.detach()
        alias.mul_(0.5)
        other.copy_(alias + gradient)
        return [params.sum()]

    def of_flags(params, other, gradient):
        flags = (params > 0) + (other > 0)  # three values would be one too many
        params.copy_(params.where(flags, other) * flags + gradient)
        return [flags.sum()]

    def wider(params, other, gradient):
        new = params * 2
        new.mul_(gradient.double())
        return [new + other]

    return [heavy_ball, counted, kept_gradient, returned, chained, through_an_alias, of_flags, wider]


@pytest.mark.parametrize("function", flat_cases(), ids=lambda function: function.__name__)
def test_what_a_kernel_reads_has_not_changed_yet(function):
    inputs = [drawn(70_000) + number for number in range(3)]
    graph = fused(fuse_flat, function, *inputs)
    wanted, found = [value.clone() for value in inputs], [value.clone() for value in inputs]
    torch.testing.assert_close(graph(*found), function(*wanted))
    torch.testing.assert_close(found, wanted)


def test_images_of_networks_without_norms_keep_their_layout():
    """Their views need it: a network that flattens by `view` is not run channels last."""

    def function(x, weight):
        return [F.max_pool2d(F.conv2d(x, weight), 2).view(2, -1)]

    inputs = (drawn(2, 4, 9, 9), drawn(6, 4, 2, 2))
    module = make_fx(function)(*inputs)
    assert not is_covered(module)
    torch.testing.assert_close(fuse_step(module)(*inputs), function(*inputs))


def test_weights_that_change_between_two_uses_are_copied_twice():
    def function(flat, x, gamma):
        weight = flat[:576].view(8, 8, 3, 3)
        one = F.group_norm(F.conv2d(x, weight, padding=1), 2, gamma, gamma).sum()
        flat.mul_(2.0)
        return [one, F.group_norm(F.conv2d(x, weight, padding=1), 2, gamma, gamma).square().sum()]

    inputs = (drawn(70_000), drawn(2, 8, 6, 6), torch.ones(8) + drawn(8))
    module = fuse_group_norms(make_fx(function)(*[value.clone() for value in inputs]))
    found = fuse_step(module)(*[value.clone() for value in inputs])
    torch.testing.assert_close(found, function(*[value.clone() for value in inputs]), rtol=1e-4, atol=1e-4)


def test_old_values_that_are_read_later_are_not_overwritten():
    def function(params, gradient):
        new = params - 0.1 * gradient
        before = torch.linalg.vector_norm(params * 1.0)  # another kernel, after the first
        later = torch.sort(params)[0] + new
        params.copy_(new)
        return [before, later]

    inputs = [drawn(70_000), drawn(70_000) + 1]
    graph = fused(fuse_flat, function, *inputs)
    wanted, found = [value.clone() for value in inputs], [value.clone() for value in inputs]
    torch.testing.assert_close(graph(*found), function(*wanted))
    torch.testing.assert_close(found, wanted)


SHAPES = ((64, 16, 3, 3), (64,), (64,), (64,), (64, 64, 3, 3), (64,), (64,), (64, 64, 1, 1), (64,), (64,), (64, 400))
SIZE = sum(torch.Size(shape).numel() for shape in SHAPES)


def network(x, first, shift, gamma, beta, second, gamma2, beta2, third, gamma3, beta3, last):
    """A convolution with bias, norm, ReLU, pooling; a block with a shortcut that is convolved; a linear layer."""
    images = F.max_pool2d(F.relu(F.group_norm(F.conv2d(x, first, shift, padding=1), 4, gamma, beta)), 2)
    short = F.group_norm(F.conv2d(images, third, stride=2), 4, gamma3, beta3)
    images = F.relu(F.group_norm(F.conv2d(images, second, stride=2, padding=1), 4, gamma2, beta2) + short)
    return (images.mean((2, 3)) @ last).square().mean()


def step(flat, x):
    """A step of SGD on a flat buffer, clipped."""
    live = flat.detach().requires_grad_()
    parts = live.split([torch.Size(shape).numel() for shape in SHAPES])
    loss = network(x, *(part.view(shape) for part, shape in zip(parts, SHAPES, strict=True)))
    (gradient,) = torch.autograd.grad(loss, [live])
    share = (10.0 / (torch.linalg.vector_norm(gradient) + 1e-6)).clamp(max=1.0)
    flat.copy_(flat - 0.01 * share * gradient)
    return [loss.detach()]


def test_a_step_with_all_passes_is_the_same_step():
    flat, x = drawn(SIZE), drawn(2, 16, 32, 32)
    graph = fuse_group_norms(make_fx(step)(flat.clone(), x))
    assert is_covered(graph)
    graph = fuse_step(graph)
    assert {LAY_OUT, COLLECT, POOL, POOL_BACKWARD} <= set(targets(graph))
    assert aten.cat.default not in targets(graph)
    wanted, found = flat.clone(), flat.clone()
    torch.testing.assert_close(graph(found, x), step(wanted, x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def check_step():
    """The whole step by its kernels, each where the graph has put it."""
    flat, x = drawn(SIZE), drawn(2, 16, 4, 4)
    graph = fuse_step(fuse_group_norms(make_fx(step)(flat.clone(), x)))
    for node in graph.graph.nodes:
        node.target = BY_TRITON.get(node.target, node.target)
        if hasattr(node.target, "source"):
            node.target.kernel.append(load_kernel(node.target.source))
    graph.recompile()
    wanted, found = flat.clone(), flat.clone()
    torch.testing.assert_close(graph(found, x), step(wanted, x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert not torch.equal(found, flat)


def test_networks_with_other_layers_are_left_to_the_compiler():
    def function(x, weight):
        return [torch.sigmoid(F.conv2d(x, weight, padding=1)).square().tanh()]

    assert not is_covered(make_fx(function)(drawn(8, 16, 8, 8), drawn(16, 16, 3, 3)))


def test_pools_that_overlap_or_give_their_indices_are_left_alone():
    def overlapping(x):
        return [F.max_pool2d(x, 3, 2)]

    def indexed(x):
        return list(F.max_pool2d(x, 2, return_indices=True))

    for function in (overlapping, indexed):
        graph = fused(fuse_pools, function, drawn(2, 3, 8, 8))
        assert aten.max_pool2d_with_indices.default in targets(graph)
        torch.testing.assert_close(graph(drawn(2, 3, 8, 8)), function(drawn(2, 3, 8, 8)))


def check_kernels():
    """In a process of its own: Triton asks for its interpreter when it is imported."""
    check_weights(weight_ops.lay_out_by_triton, weight_ops.collect_by_triton)
    check_pools(pool_ops.pool_by_triton, pool_ops.backward_by_triton)
    check_update(by_kernel=True)
    check_step()


@needs_triton
def test_kernels():
    check_in_interpreter("test_step_kernels")


@pytest.mark.gpu
@needs_gpu
def test_kernels_on_a_gpu():
    check_weights(on_gpu(weight_ops.lay_out), on_gpu(weight_ops.collect))
    check_pools(on_gpu(pool_ops.max_pool), on_gpu(pool_ops.max_pool_backward))
    inputs = update_inputs()
    graph, _ = fused_update([value.cuda() for value in inputs])
    wanted, found = [value.clone() for value in inputs], [value.cuda() for value in inputs]
    torch.testing.assert_close([value.cpu() for value in graph(*found)], update(*wanted), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close([value.cpu() for value in found], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("model", ["vgg11", "resnet18"])
def test_large_networks_agree_with_serial_on_a_gpu(model):
    """All kernels in a whole round, momentum and masks included, in float32; and none of it asked for the compiler."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(256, size=(120, 3, 32, 32), dtype=np.uint8), np.arange(120) % 10
    look = sp.View((0.5,) * 3, (0.25,) * 3, pad=4, flip=True)
    federation = sp.federate(x, y, clients=3, partition="iid", view=look, num_train=96, validation_rate=0.0)
    options = {"rounds": 2, "per_round": 3, "batch_size": 16, "epochs": 1, "momentum": 0.9, "device": "cuda"}
    found = []
    for executor in (Serial, Graphed):
        context = make_context(make_config("fedspa", options, federation, model), federation, model)
        with numeric_mode(context):
            star = simulate(context, executor(context))
            population, record = star.play(star.start(), 0)
        found.append((population, record))
    (one, record), (other, record2) = found
    for (path, tensor), (_, tensor2) in zip(leaves(one.server), leaves(other.server), strict=True):
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, tensor2, rtol=0, atol=2e-3, msg=path)
    losses = [[turn.tally.loss for turn in each.turns] for each in (record, record2)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert "torch._inductor.compile_fx" not in sys.modules
