"""The server's step towards the mean, by hand.

One weight of 1 and a mean of 0.9: a slope of 0.1. Rate 0.05, eps 0.001, so that second moments start with 1e-6.
fedadam: first = 0.1 * 0.1 = 0.01, second = 0.99e-6 + 0.01 * 0.01 = 1.0099e-4, whose root and eps are 0.01104938: the
    weight moves by 0.05 * 0.01 / 0.01104938 = 0.0452514.
fedyogi: the square, 0.01, is above 1e-6, so second = 1e-6 + 0.01 * 0.01 = 1.01e-4: it moves by 0.0452493.
fedadagrad: first = 0.1, second = 1e-6 + 0.01 = 0.010001: it moves by 0.05 * 0.1 / 0.101005 = 0.0495025.
A second slope of 0.001, whose square is 1e-6: first = 0.0091 (fedadagrad: 0.001).
fedadam: second = 0.99 * 1.0099e-4 + 1e-8 = 9.999010e-5; fedyogi, as the square is smaller now: 1.01e-4 - 1e-8 =
    1.0099e-4; fedadagrad: 0.010002.
"""

from __future__ import annotations

import pytest
import torch

from sparsona.core.tree import Tree
from sparsona.learning.server_optimizer import DEFAULTS, ServerStep, begin_moments, server_step
from sparsona.methods import METHODS


def tree(value):
    return Tree.of({"w": torch.tensor([value])})


@pytest.mark.parametrize(
    ("name", "moves", "seconds"),
    [
        ("fedadam", (0.0452514, 0.05 * 0.0091 / (9.999010e-5**0.5 + 0.001)), (1.0099e-4, 9.999010e-5)),
        ("fedyogi", (0.0452493, 0.05 * 0.0091 / (1.0099e-4**0.5 + 0.001)), (1.01e-4, 1.0099e-4)),
        ("fedadagrad", (0.0495025, 0.05 * 0.001 / (0.010002**0.5 + 0.001)), (0.010001, 0.010002)),
    ],
)
def test_two_steps_by_hand(name, moves, seconds):
    config = ServerStep(server_optimizer=name, server_lr=0.05)
    old = tree(1.0)
    moments = begin_moments(config, old)
    for slope, move, second in zip((0.1, 0.001), moves, seconds, strict=True):
        new, moments = server_step(config, old, tree(float(old["w"]) - slope), moments)
        assert float(old["w"] - new["w"]) == pytest.approx(move, rel=1e-3)
        assert float(moments[0].second["w"]) == pytest.approx(second, rel=1e-4)
        old = new


def test_betas_and_eps_are_options():
    config = ServerStep(server_optimizer="fedadam", server_lr=1.0, server_beta1=0.0, server_beta2=0.0, server_eps=0.1)
    new, _ = server_step(config, tree(1.0), tree(0.9), begin_moments(config, tree(1.0)))
    assert float(new["w"]) == pytest.approx(0.5)  # 0.1 / (0.1 + 0.1)


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [("sgd", "server_beta1"), ("sgd", "server_beta2"), ("sgd", "server_eps"), ("fedadagrad", "server_beta2")],
)
def test_what_an_optimizer_does_not_have_is_refused(optimizer, name):
    with pytest.raises(ValueError, match=f"{name} with server_optimizer={optimizer}"):
        ServerStep(server_optimizer=optimizer, **{name: 0.5})
    assert ServerStep(server_optimizer="fedyogi", **{name: 0.5})


def test_every_optimizer_has_defaults():
    assert set(DEFAULTS) == set(ServerStep.model_fields["server_optimizer"].annotation.__args__)
    for name in ("fedadam", "fedyogi", "fedadagrad"):
        assert METHODS[name].options == {"server_optimizer": name}
