"""Networks without the units that a mask removed predict the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparsona.sparsity.dead_units import drop_dead_units


class Pictures(nn.Module):
    """Convolutions and linear layers, joined as people join them."""

    def __init__(self, act=F.relu, flatten="view") -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 5, 3), nn.Conv2d(5, 4, 2)
        self.third, self.last = nn.Linear(4 * 4, 6), nn.Linear(6, 3)
        self.act, self.flatten = act, flatten

    def forward(self, x):
        x = F.max_pool2d(self.act(self.first(x)), 2, 1)
        x = self.act(self.second(x))
        if self.flatten == "view":
            x = x.view(x.size(0), -1)
        elif self.flatten == "shape":
            x = x.reshape(x.shape[0], -1)
        else:
            x = torch.flatten(x, 1)
        return self.last(self.act(self.third(x)))


def with_dead_units(net):
    with torch.no_grad():
        net.first.weight[[1, 3]] = net.first.bias[[1, 3]] = 0  # silent
        net.second.weight[:, 4] = 0  # unread
        net.third.weight[:, 8:12] = 0  # unit 2 of `second`, four pixels
        net.third.weight[5] = 0  # no weight, but a bias: read, and not silent
    return net.eval()


def sizes(net):
    return {name: tuple(value.shape) for name, value in net.named_parameters() if name.endswith("weight")}


@pytest.mark.parametrize("flatten", ["view", "shape", "flatten"])
def test_dead_units_are_dropped_and_predictions_stay(flatten):
    net = with_dead_units(Pictures(flatten=flatten))
    before = sizes(net)
    made, dropped = drop_dead_units(net)
    assert dropped == {"first": 3, "second": 1}
    assert sizes(made) == {
        "first.weight": (2, 1, 3, 3),
        "second.weight": (3, 2, 2, 2),
        "third.weight": (6, 12),
        "last.weight": (3, 6),
    }
    assert (made.first.out_channels, made.second.in_channels, made.third.in_features) == (2, 2, 12)
    x = torch.randn(7, 1, 6, 6)
    assert torch.allclose(made(x), net(x), atol=1e-6)
    assert sizes(net) == before  # a copy


def test_a_unit_that_something_makes_of_zero_stays():
    """A sigmoid makes 0.5 of 0, and a norm its shift."""
    net = with_dead_units(Pictures(act=torch.sigmoid))
    assert drop_dead_units(net) == (net, {})
    for norm, expected in ((nn.BatchNorm1d(4), {}), (nn.LayerNorm(4), {}), (nn.GroupNorm(2, 4), {})):
        chain = nn.Sequential(nn.Linear(3, 4), norm, nn.ReLU(), nn.Linear(4, 2)).eval()
        with torch.no_grad():
            chain[0].weight[1] = chain[0].bias[1] = 0
            norm.bias.fill_(0.5)
        assert drop_dead_units(chain)[1] == expected


def test_a_norm_goes_with_its_units():
    chain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).eval()
    with torch.no_grad():
        chain[1].running_mean.copy_(torch.arange(4.0))
        chain[1].weight[1] = chain[1].bias[1] = 0  # always 0 after the norm
        chain[3].weight[:, 3] = 0
    made, dropped = drop_dead_units(chain)
    assert dropped == {"0": 2}
    assert made[1].running_mean.tolist() == [0, 2]
    x = torch.randn(5, 3)
    assert torch.allclose(made(x), chain(x), atol=1e-6)


def test_chains_of_dead_units():
    """A unit that only dead ones feed is dead, too, where it has no bias; one unit is always left."""
    chain = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)), nn.Linear(4, 2)).eval()
    with torch.no_grad():
        chain[0].weight[:2] = 0
        chain[1].weight[:3, 2:] = 0
    made, dropped = drop_dead_units(chain)
    assert dropped == {"0": 2, "1": 3}
    x = torch.randn(5, 4)
    assert torch.allclose(made(x), chain(x), atol=1e-6)
    with torch.no_grad():
        chain[0].weight.zero_()
    made, dropped = drop_dead_units(chain)
    assert dropped == {"0": 3}
    assert torch.allclose(made(x), chain(x), atol=1e-6)


class Twice(nn.Module):
    """A layer that is called twice, a shortcut, a sequence that is flattened, and a condition."""

    def __init__(self, kind) -> None:
        super().__init__()
        self.one, self.two, self.kind = nn.Linear(4, 4), nn.Linear(4, 4), kind
        self.wide = nn.Linear(8, 2)

    def forward(self, x):
        if self.kind == "twice":
            return self.two(torch.relu(self.one(torch.relu(self.one(x)))))
        if self.kind == "shortcut":
            y = torch.relu(self.one(x))
            return self.two(y) + y
        if self.kind == "sequence":
            return self.wide(torch.flatten(torch.relu(self.one(x)), 1))
        if self.kind == "pooled":
            return self.two(F.max_pool1d(self.one(x), 3, 1, 1))  # over units
        return self.two(self.one(x)) if x.sum() > 0 else self.one(x)


@pytest.mark.parametrize("kind", ["twice", "shortcut", "sequence", "pooled", "condition"])
def test_networks_of_other_shapes_stay_as_they_are(kind):
    net = Twice(kind).eval()
    with torch.no_grad():
        net.one.weight[1] = net.one.bias[1] = 0
        net.wide.weight[:, 2:4] = 0
        net.two.weight[:, 3] = 0
    made, dropped = drop_dead_units(net)
    x = torch.randn(3, 2, 4)
    assert dropped == {}
    assert torch.equal(made(x), net(x))
