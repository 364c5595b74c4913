"""What becomes of models that people bring: each trains, or is refused with the reason."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import sparsona as sp
from sparsona.core.errors import SparsonaError
from sparsona.engine.rounds import simulate
from sparsona.executors.serial import Serial
from sparsona.executors.stacked import Stacked
from sparsona.experiment.build import make_config, make_context

WIDTH, STEPS, CLASSES = 4, 3, 3  # an example is (STEPS, WIDTH)


@pytest.fixture(scope="module")
def data() -> sp.Federation:
    x = np.random.default_rng(0).random((48, STEPS, WIDTH), dtype=np.float32)
    return sp.federate(x, np.arange(48) % CLASSES, clients=3, partition="iid")


def train(data, method: str, model, executor=Serial, **options):
    """One round, and the model of client 0 on its test data."""
    config = make_config(method, {"rounds": 1, "device": "cpu", "batch_size": 8, **options}, data, model)
    context = make_context(config, data, model)
    star = simulate(context, executor(context))
    population, record = star.play(star.start(), 0)
    assert all(np.isfinite(turn.tally.loss) for turn in record.turns)
    assert star.evaluate(population, 1)[0].count
    return context


class Residual(nn.Module):
    """BatchNorm, Dropout, ReLU in place, += and view."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv1d(STEPS, 4, 1), nn.BatchNorm1d(4)
        self.block = nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Conv1d(4, 4, 3, padding=1))
        self.dropout, self.last = nn.Dropout(0.2), nn.Linear(4 * WIDTH, CLASSES)

    def forward(self, x):
        x = torch.relu_(self.norm(self.first(x)))
        out = self.block(x)
        out += x
        return self.last(self.dropout(out).view(len(x), -1))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cells, self.last = kind(WIDTH, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.last(self.cells(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(WIDTH, 2, batch_first=True), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.last(self.attention(x, x, x, need_weights=False)[0].mean(1))


class DropPath(nn.Module):
    """A layer that is left out for some examples in training."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(12, 12), nn.Linear(12, CLASSES)

    def forward(self, x):
        x = x.flatten(1)
        kept = (torch.rand(len(x), 1) < 0.8) / 0.8 if self.training else 1.0
        return self.last(x + kept * self.layer(x))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = self.two = nn.Linear(12, 12)
        self.last = nn.Linear(12, CLASSES)

    def forward(self, x):
        return self.last(self.two(self.one(x.flatten(1)).relu()))


class Branching(nn.Module):
    """What it computes depends on the values of each example."""

    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Linear(12, CLASSES), nn.Linear(12, CLASSES)

    def forward(self, x):
        x = x.flatten(1)
        return torch.stack([self.low(row) if row.sum() < 6 else self.high(row) for row in x])


def normed(norm) -> nn.Module:
    return nn.Sequential(nn.Flatten(), norm(nn.Linear(12, 5)), nn.ReLU(), norm(nn.Linear(5, CLASSES)))


def partly_frozen() -> nn.Module:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, CLASSES))
    net[1].requires_grad_(False)
    return net


MODELS = {
    "residual": Residual,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "attention": Attention,
    "drop path": DropPath,
    "spectral norm": lambda: normed(spectral_norm),
    "tied": Tied,
    "branching": Branching,
    "frozen": partly_frozen,
}


@pytest.mark.parametrize("method", ["fedavg", "fedspa", "pfedgate"])
@pytest.mark.parametrize("name", MODELS)
def test_trains(data, name, method):
    torch.manual_seed(0)
    train(data, method, MODELS[name]())


@pytest.mark.parametrize("name", ["residual", "drop path", "tied", "frozen"])
def test_trains_in_stacks_or_alone_among_them(data, name):
    torch.manual_seed(0)
    train(data, "fedavg", MODELS[name](), Stacked)


@pytest.mark.parametrize(("name", "reason"), [("lstm", "lstm"), ("branching", "data-dependent")])
def test_what_cannot_be_stacked_is_refused_with_the_reason(data, name, reason):
    with pytest.raises(SparsonaError, match=f"(?is)stacked.*{reason}"):
        sp.train("fedavg", data, MODELS[name](), rounds=1, executor="stacked", device="cpu")


def test_weight_norm(data):
    """It divides by the norm of a row, and a row that a method sets to zero has none."""
    torch.manual_seed(0)
    for method in ("fedavg", "fedspa"):
        train(data, method, normed(weight_norm))
    with pytest.raises(SparsonaError, match=r"(?s)diverged.*a row of '1\.parametrizations.*weight_norm"):
        train(data, "pfedgate", normed(weight_norm), on_divergence="stop")
    with pytest.raises(SparsonaError, match=r"(?s)diverged.*lower the learning rate"):
        train(data, "fedavg", Tied(), lr=1e30, clip_norm=None, on_divergence="stop")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that its older form is deprecated
        old = normed(nn.utils.weight_norm)
        with pytest.raises(SparsonaError, match=r"(?s)cannot be copied.*parametrizations"):
            train(data, "fedavg", old)


class Pair(nn.Module):
    def forward(self, x):
        return x.flatten(1), x


def linear(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, outputs))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(CLASSES)), r"without a size yet.*nn\.Linear for nn\.Lazy"),
        (lambda: linear(13, CLASSES), r"does not take one example of shape \(3, 4\)"),
        (lambda: linear(12, 5), r"output is \(1, 5\), but the data has 3 classes"),
        (lambda: nn.Sequential(linear(12, 12), Pair()), r"output is tuple.*one logit per class"),
        (lambda: linear(12, CLASSES).double(), r"is float64.*model\.float\(\)"),
        (lambda: linear(12, CLASSES).half(), r"is float16.*model\.float\(\)"),
        (lambda: linear(12, CLASSES).requires_grad_(False), "all 2 parameters of the model are frozen"),
        (Pair, "has no parameters"),
    ],
)
def test_is_refused(data, build, reason):
    with pytest.raises(SparsonaError, match=f"(?s){reason}"):
        train(data, "fedavg", build())


def test_a_frozen_part_of_another_type_is_named(data):
    net = partly_frozen()
    net[1].double()
    with pytest.raises(SparsonaError, match=r"(?s)float32, float64.*model\.float\(\)"):
        train(data, "fedavg", net)


def test_softmax_at_the_end_is_pointed_out(data, tmp_path, capsys):
    for last, says in ((nn.Softmax(-1), True), (nn.LogSoftmax(-1), False)):
        net = nn.Sequential(linear(12, CLASSES), last)
        sp.train("fedavg", data, net, rounds=1, executor="serial", out=tmp_path / str(says))
        assert ("outputs are probabilities" in capsys.readouterr().err) is says
