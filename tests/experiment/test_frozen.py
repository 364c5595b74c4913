"""Frozen parameters: in the module, and in no tree."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from small_runs import played
from torch import nn

import sparsona as sp
from sparsona.core.errors import SparsonaError
from sparsona.engine.rounds import simulate
from sparsona.executors.graphed import Graphed
from sparsona.executors.serial import Serial
from sparsona.executors.stacked import Stacked
from sparsona.executors.workers import Workers
from sparsona.experiment.build import make_config, make_context
from sparsona.methods import METHODS

FROZEN = ("0.weight", "0.bias")


def build() -> nn.Module:
    net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3))
    net[0].requires_grad_(False)
    return net


def whole() -> nn.Module:
    return build().requires_grad_(True)


@pytest.fixture(scope="module")
def data() -> sp.Federation:
    x = np.random.default_rng(0).random((60, 8), dtype=np.float32)
    return sp.federate(x, np.arange(60) % 3, clients=3, partition="iid")


def context_of(data, method: str, model, **options):
    options = {"rounds": 1, "device": "cpu", "batch_size": 8, "clients": 3, **options}
    return make_context(make_config(method, options, federation=data, model=model), data, model)


def sent(context) -> int:
    """Values in the messages of a client, both ways."""
    cost = context.method.cost(context.task.layout, context.clients[0], context.plan.round_at(0))
    return sum(part.num_values for part in (*(cost.up or ()), *(cost.down or ())) if not part.is_mask)


SAME = {"local", "lg-fedavg", "fedproto", "fedmask"}  # send nothing, the last layers, prototypes, or masks of the last


@pytest.mark.parametrize("method", METHODS)
def test_every_method_leaves_frozen_parameters_alone_and_does_not_send_them(data, method):
    torch.manual_seed(0)
    net = build()
    context = context_of(data, method, net)
    star = simulate(context, Serial(context))
    population, _ = star.play(star.start(), 0)
    (found,) = star.evaluate(population, 1)[:1]
    assert found.count
    assert not set(FROZEN) & set(context.task.layout.names)
    for name in FROZEN:
        assert torch.equal(context.task.frozen[name], net.get_parameter(name))
        assert torch.equal(context.task.module(context.params, context.buffers).get_parameter(name), net.get_parameter(name))
    before = sent(context_of(data, method, whole()))
    assert sent(context) == before if method in SAME else sent(context) < before


@pytest.mark.parametrize("make", [Workers, Stacked, Graphed])
def test_all_executors_agree(data, make):
    context = context_of(data, "fedspa", build, rounds=2)
    executor = make(context)
    try:
        assert played(context, executor, 2) == played(context, Serial(context), 2)
    finally:
        executor.close()
