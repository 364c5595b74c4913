"""What is done to a traced step before it is compiled. Compiling itself needs a GPU to be worth it."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from method_lines import further_rows_are_slow, takes_inner_gradients
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import sparsona as sp
from sparsona import methods
from sparsona.core.tree import map_leaves
from sparsona.engine.rounds import simulate
from sparsona.engine.turn import begin
from sparsona.experiment import build
from sparsona.gpu import programs
from sparsona.gpu.fused_norm import fuse_group_norms
from sparsona.gpu.lanes import Lane, Programs
from sparsona.gpu.pad_channels import pad_few_channels
from sparsona.gpu.stacked_conv import as_products

aten = torch.ops.aten


def gradients(**how):
    """A function of images, weight and bias: what is made of them, and the gradients of all three."""

    def function(*given):
        live = [value.detach().requires_grad_() for value in given]
        outputs = F.conv2d(*live, **how)
        return [outputs.detach(), *torch.autograd.grad(outputs.float().square().sum(), live)]

    return function


def test_few_channels_are_filled_with_zeros():
    torch.manual_seed(0)
    given = [value.bfloat16() for value in (torch.randn(4, 3, 8, 8), torch.randn(16, 3, 3, 3), torch.randn(16))]
    expected = gradients(padding=1)(*given)
    graph = pad_few_channels(make_fx(gradients(padding=1))(*given))
    widths = [
        node.args[at].meta["val"].shape[1]
        for target, at in ((aten.convolution.default, 0), (aten.convolution_backward.default, 1))
        for node in graph.graph.find_nodes(op="call_function", target=target)
    ]
    assert widths == [8, 8]
    for found, wanted in zip(graph(*given), expected, strict=True):
        assert found.shape == wanted.shape
        torch.testing.assert_close(found, wanted, rtol=2**-6, atol=2**-6 * float(wanted.abs().max()))


def test_float32_is_left_alone():
    given = (torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(4))
    graph = pad_few_channels(make_fx(gradients(padding=1))(*given))
    assert not graph.graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)


@pytest.mark.parametrize(("stride", "padding"), [(1, 0), (2, 1), (1, 2)])
def test_convolutions_of_a_stack_are_products(stride, padding):
    torch.manual_seed(0)
    groups = 3
    given = (torch.randn(4, groups * 2, 9, 7), torch.randn(groups * 5, 2, 3, 3), torch.randn(groups * 5))
    function = gradients(groups=groups, stride=stride, padding=padding)
    graph = make_fx(function, decomposition_table=as_products(groups))(*given)
    assert not graph.graph.find_nodes(op="call_function", target=aten.convolution.default)
    assert not graph.graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    for found, wanted in zip(graph(*given), function(*given), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


class CaughtError(Exception):
    """Instead of being run, a job is handed to the test."""


def first_job(context):
    """The first client's job of the first round, whichever engine makes it."""

    class Catcher:
        encodes = False

        def run(self, jobs):
            raise CaughtError(next(iter(jobs)))

    engine = simulate(context, Catcher())
    with pytest.raises(CaughtError) as caught:
        engine.play(engine.start(), 0)
    return caught.value.args[0]


def scaled(factor):
    return lambda _, value: value * factor if value.is_floating_point() else value


@pytest.mark.parametrize("stacked", [None, 3])
@pytest.mark.parametrize("name", further_rows_are_slow(sorted(methods.METHODS)))
def test_every_methods_step_is_traced_and_its_norms_are_fused(name, stacked):
    """What a GPU asks of a method: no `.item()`, no branch on a tensor, in its steps and in `predict`. With images that
    are cropped, mirrored and scaled in place."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(256, size=(60, 3, 8, 8)).astype(np.uint8), np.arange(60) % 4
    federation = sp.federate(x, y, clients=3, partition="iid", view=sp.View((0.5,) * 3, (0.25,) * 3, pad=2, flip=True))

    def model():
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.AvgPool2d(6), nn.Flatten(), nn.Linear(8, 4)
        )

    config = build.make_config(name, {"batch_size": 8, "device": "cpu", "per_round": 3}, federation, model)
    context = build.make_context(config, federation, model)
    context.task.channels_last = stacked is None
    turn = begin(context, first_job(context))
    lane = Lane(context, context.method.phases[0], turn.work, Programs(), stacked)
    lane.load(context.method.phases[0], [turn] * (stacked or 1))
    lane._batch.zero_()
    table = None if stacked is None else as_products(stacked)
    graph = make_fx(lane._take, decomposition_table=table)(*lane._inputs())
    if stacked is None:
        graph = fuse_group_norms(graph)
    if stacked is None and not takes_inner_gradients(name):
        assert not graph.graph.find_nodes(op="call_function", target=aten.native_group_norm.default)
        assert not graph.graph.find_nodes(op="call_function", target=aten.threshold_backward.default)
    before = [value.clone() for value in lane._leaves]
    lane._take(*lane._inputs())
    wanted = [value.clone() for value in lane._leaves]
    for fixed, value in zip(lane._leaves, before, strict=True):
        fixed.copy_(value)
    graph(*lane._inputs())
    if stacked is None:  # `predict` is the same either way
        seen = torch.rand(5, 3, 8, 8)
        traced = make_fx(lambda flat, images: context.method.predict(map_leaves(scaled(flat), turn.work), images))
        torch.testing.assert_close(
            traced(torch.ones(()), seen)(torch.ones(()), seen), context.method.predict(turn.work, seen)
        )
    moved = 0.0
    for found, value, old in zip(lane._leaves, wanted, before, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5)
        moved += float((value.float() - old.float()).abs().max()) if value.numel() else 0.0
    assert moved > 0


def test_work_in_the_background_is_over_once_it_is_joined_and_its_errors_are_the_callers() -> None:
    done, go = [], threading.Event()

    def wait() -> None:
        assert go.wait(10)
        done.append("waited")

    def fail() -> None:
        raise ValueError("as the caller will")

    programs.in_background(wait, torch.device("cpu"))
    programs.in_background(fail, torch.device("cpu"))
    assert not done
    go.set()
    programs.join_background()
    assert done == ["waited"]
    assert not programs._underway
