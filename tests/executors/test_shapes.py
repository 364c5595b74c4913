"""Clients whose networks differ: narrower ones, with buffers of their own, on every executor."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_executors_agree import DEVICE, EXECUTORS, assert_agree, played
from torch import nn

import sparsona as sp
from sparsona.core.method import Cost, Method, PartSize, Tree
from sparsona.core.task import Task
from sparsona.engine.context import ClientContext
from sparsona.engine.plan import Plan
from sparsona.executors.serial import Serial
from sparsona.gpu import lanes
from sparsona.learning.phases import Model, Training, predictor, training_phase

CONFIG = Training(lr=0.1, epochs=2, weight_decay=0.0, clip_norm=None)
WIDTHS = (8, 4, 2)  # of the hidden layer, by client


def network(norm: bool):
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.Tanh(), nn.Linear(8, 3))


def narrow(tree: Tree, width: int) -> Tree:
    """The first units of the hidden layer."""

    def cut(name: str, value: torch.Tensor) -> torch.Tensor:
        if value.dim() == 0 or name == "3.bias":
            return value
        return value[:, :width] if name == "3.weight" else value[:width]

    return Tree.of({name: cut(name, tree[name]) for name in tree})


def narrow_local(task: Task) -> Method:
    """Every client trains a network of its own width, alone."""

    def init_client(params, buffers, client, seeds):
        width = WIDTHS[client.index % len(WIDTHS)]
        return Model(narrow(params, width), narrow(buffers, width) if len(buffers) else buffers)

    def cost(layout, client, round_):
        return Cost(None, None, 0, kept=(PartSize("params", layout, layout.size),))

    return Method(
        name="narrow",
        init_client=init_client,
        receive=lambda state, inbox, probe, round_: state,
        phases=(training_phase(task, CONFIG),),
        finish=lambda state, work, inbox, probe, round_: (work, None),
        predict=predictor(task),
        cost=cost,
    )


def context_of(norm=False):
    x = torch.randn(6, 30, 4, generator=torch.Generator().manual_seed(0))
    y = (x.sum(-1) > 0).long() + (x[..., 0] > 1).long()
    clients = [(x[k, :20], y[k, :20], x[k, 20:], y[k, 20:]) for k in range(6)]
    federation = sp.Federation.from_clients(clients, num_classes=3, validation_rate=0.0)
    task = Task(lambda: network(norm), (4,), 3)
    plan = Plan(rounds=2, per_round=5, batch_size=8, seed=0, points=("received", "trained"))
    return ClientContext(task, narrow_local, federation, plan, device=torch.device(DEVICE))


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "with BatchNorm"])
@pytest.mark.parametrize("executor", sorted(EXECUTORS))
def test_networks_of_several_widths(executor, norm):
    one, other = played(Serial, context_of(norm)), played(EXECUTORS[executor], context_of(norm))
    assert_agree(one, other)
    widths = {len(state.params["0.bias"]) for state in other[0].states.values()}
    assert widths == set(WIDTHS)
    if norm:
        assert {len(state.buffers["1.running_mean"]) for state in other[0].states.values()} == set(WIDTHS)


@pytest.mark.parametrize("executor", ["stacked", "graphed"])
def test_each_width_has_a_lane_and_nobody_trains_alone(executor, monkeypatch):
    from sparsona.executors import graphed, stacked

    alone = []
    for module in (stacked, graphed):
        monkeypatch.setattr(module, "train_alone", lambda context, turn, phase: alone.append(turn.job.client))
    context = context_of()
    engine = EXECUTORS[executor](context)
    played(lambda _: engine, context)
    assert not alone
    assert len(engine._lanes) == len(WIDTHS)


def test_shapes_past_the_limit_run_alone(monkeypatch):
    monkeypatch.setattr(lanes, "MOST_SHAPES", 1)
    assert_agree(played(Serial, context_of()), played(EXECUTORS["stacked"], context_of()))


def test_a_layout_of_another_client_is_no_key():
    """What a program is kept by tells networks apart, and phases that differ only in how long they go on do not."""
    phase = training_phase(Task(lambda: network(False), (4,), 3), CONFIG)
    key = lanes.program_key(phase, "shape")
    assert key == lanes.program_key(replace(phase, epochs=9, name="tune"), "shape")
    assert key != lanes.program_key(phase, "another shape")
