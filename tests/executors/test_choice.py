"""Which executor `auto` takes on a CPU: by the network, the loss and the batch, never by the machine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sparsona as sp
from sparsona.core.errors import SparsonaError
from sparsona.engine.rounds import simulate
from sparsona.executors import SMALL_STEP, choose
from sparsona.executors.stacked import Stacked
from sparsona.experiment.build import make_configs, make_context
from sparsona.gpu.lanes import Lane

OPTIONS = {"rounds": 1, "epochs": 1, "device": "cpu", "batch_size": 8}


def federation() -> sp.Federation:
    draws = np.random.default_rng(0)
    x, y = draws.random((60, 6), dtype=np.float32), np.arange(60) % 3
    return sp.federate(x, y, clients=3, partition="iid")


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


class Branches(nn.Module):
    """Depends on values, in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and x.abs().max() > 100:
            x = x / 100
        return self.layer(x)


class Mixes(Branches):
    """The examples of a batch, in training alone."""

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(x)
        return outputs - outputs.mean(0) if self.training else outputs


class Raises(Branches):
    """An error that is none of torch's."""

    def forward(self, x: Tensor) -> Tensor:
        if torch._C._functorch.is_batchedtensor(x):
            raise ValueError("one client at a time")
        return self.layer(x)


def careful(outputs: Tensor, targets: Tensor) -> Tensor:
    found = nn.functional.cross_entropy(outputs, targets, reduction="none")
    return found / 2 if found.max() > 5 else found


def chosen(model, **options) -> str:
    data = federation()
    config, own = make_configs("fedavg", {**OPTIONS, **options}, data, model)
    return choose("auto", make_context(config, data, model, method_config=own))


def test_small_networks_are_stacked_and_large_ones_are_not() -> None:
    assert chosen(mlp) == "stacked"
    assert chosen(nn.Sequential(nn.Linear(6, 2000), nn.ReLU(), nn.Linear(2000, 600), nn.Linear(600, 3))) == "serial"
    assert chosen(mlp, batch_size=200_000) == "serial"
    wide = nn.Sequential(nn.Linear(6, 6000), nn.ReLU(), nn.Linear(6000, 3))  # few FLOPs, many parameters
    assert SMALL_STEP > 3 * 8 * 2 * 9 * 6000
    assert chosen(wide) == "serial"


@pytest.mark.parametrize(
    "model",
    [
        Branches,
        Raises,
        Mixes,
        lambda: nn.Sequential(mlp(), nn.Dropout(0.5)),  # draws noise: trained one client after the other
        lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)),
    ],
    ids=["branches", "raises", "mixes", "dropout", "batch-norm"],
)
def test_what_cannot_be_stacked_is_not(model) -> None:
    assert chosen(model) == "serial"


def test_a_loss_that_depends_on_values(tmp_path) -> None:
    run = sp.train("fedavg", federation(), mlp, **OPTIONS, loss=careful, out=tmp_path / "run")
    assert run.config["executor"] == "serial"
    with pytest.raises(SparsonaError, match="executor stacked with this model and loss"):
        sp.train("fedavg", federation(), mlp, **OPTIONS, loss=careful, executor="stacked", out=tmp_path / "stacked")
    assert not (tmp_path / "stacked").exists()


def test_a_stack_shrinks_as_clients_are_done(monkeypatch) -> None:
    """Otherwise data of unequal sizes takes as long as if every client had the most."""
    draws, sizes = np.random.default_rng(0), (8, 16, 64)
    x, y = draws.random((100, 6), dtype=np.float32), np.arange(100) % 3
    data = sp.Federation.from_clients([(x[:n], y[:n], x[:9], y[:9]) for n in sizes], validation_rate=0.0, num_classes=3)
    config, own = make_configs("fedavg", {**OPTIONS, "executor": "stacked", "per_round": 3}, data, mlp)
    context = make_context(config, data, mlp, method_config=own)
    taken, take = [], Lane._take

    def spy(lane, *tensors):
        taken.append(len(tensors[-3]))  # the sizes of the batches
        return take(lane, *tensors)

    monkeypatch.setattr(Lane, "_take", spy)
    star = simulate(context, Stacked(context))
    star.play(star.start(), 0)
    assert taken == [3, 2, 1, 1, 1, 1, 1, 1]
