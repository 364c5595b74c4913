"""Subsampling: FedAvg whose clients send a random share of their change."""

from __future__ import annotations

import pytest
import torch
from lenet5 import SIZE
from torch import nn

from sparsona.core.method import Client, Round, Support, masked, message
from sparsona.core.seeds import Seeds
from sparsona.core.task import Task
from sparsona.core.tree import subtract
from sparsona.costs import cost
from sparsona.methods import card
from sparsona.methods.subsampling import SubsamplingConfig, draw_mask, num_sent, subsampling
from sparsona.testing import Case
from sparsona.wire.codec import decode, encode

BATTERY = {"subsampling": {"options": {"density": 0.6}, "accuracy": 0.35}}
# The model, where it started, and a gradient.
MEMORY = [("subsampling", {}, 0, SIZE, 3 * SIZE, 0)]


def aggregate(rescale):
    """The server's step from changes of ones and fives, of 30 and 10 examples; and which entries each of them sent."""
    task = Task(nn.Linear(4, 2), (4,), 2)
    method = subsampling(task, SubsamplingConfig(density=0.5, rescale=rescale))
    half, round_ = method.server, Round(0, 3, 1.0, 8, Seeds(0).at(0))
    params, _ = task.init(0)
    server = half.init(params, (), Seeds(0))
    total, masks = half.zero(server, round_), []
    for index, (value, weight) in enumerate(((1.0, 30), (5.0, 10))):
        seed = bytes([index]) * 16
        masks.append(draw_mask(params.layout, 0.5, seed, params.device))
        part = masked(params.like(torch.full_like(params.flat, value)), masks[-1], Support.SEED, seed)
        total = half.add(
            server, total, decode(encode(message(round_.on(Client(index, weight)), {"update": part}, weight)))
        )
    moved = subtract(half.global_model(half.step(server, total, round_)), params)
    return moved.flat, [mask.flat for mask in masks]


@pytest.mark.parametrize("rescale", [False, True])
def test_the_mean_by_hand(rescale):
    """Half of ten entries is five, each a mean over both clients, whoever sent it.

    Ones from 30 examples, fives from 10. Sent by both: (30 * 1 + 10 * 5) / 40 = 2; by the first alone: 30 / 40 =
    0.75; by the second alone: 50 / 40 = 1.25; by nobody: 0. Rescaled by 10 / 5: 4, 1.5, 2.5 and 0.
    """
    moved, (first, second) = aggregate(rescale)
    assert int(first.sum()) == int(second.sum()) == 5
    assert not torch.equal(first, second)
    values = {(True, True): 2.0, (True, False): 0.75, (False, True): 1.25, (False, False): 0.0}
    expected = [(1 + rescale) * values[pair] for pair in zip(first.tolist(), second.tolist(), strict=True)]
    assert moved.tolist() == pytest.approx(expected, abs=1e-6)


def test_every_entry_has_the_same_chance():
    """Of 400 masks of 5 among 10 entries each has 200, give or take 5 standard deviations of 10: biases, too."""
    layout = Task(nn.Linear(4, 2), (4,), 2).layout
    draws = [draw_mask(layout, 0.5, seed.to_bytes(16, "little"), torch.device("cpu")).flat for seed in range(400)]
    chosen = torch.stack(draws).sum(0)
    assert int(chosen.min()) > 150
    assert int(chosen.max()) < 250
    assert num_sent(layout, 0.3) == 3  # not the 2.9999 that floats may make of it


def test_masks_differ_by_client_and_round():
    sent = [update for way, _, update in Case(card("subsampling")).history.sent if way == "up"]
    assert len({update.parts["update"].seed for update in sent}) == len(sent)


def test_with_all_of_the_change_it_is_fedavg():
    """But for the rounding of a difference that is added again."""
    plain, whole, half = (
        Case(card(name), options).history.last.server.params.flat
        for name, options in (("fedavg", {}), ("subsampling", {"density": 1.0}), ("subsampling", {"density": 0.5}))
    )
    assert torch.allclose(plain, whole, rtol=0, atol=2e-6)
    assert not torch.allclose(plain, half, rtol=0, atol=1e-3)


def test_a_round_costs_three_quarters_of_fedavg():
    ours, plain = (cost(name, model="lenet5", rounds=1).paper.round for name in ("subsampling", "fedavg"))
    assert ours == 0.75 * plain
