"""A person's own network with BatchNorm: its statistics stay on the client, neither averaged nor masked."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sparsona as sp

CLIENTS, ROUNDS, EPOCHS, SIZE, BATCH, FEATURES = 4, 3, 2, 24, 8, 6


def examples(client: int, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each client's features lie around a centre of its own."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 3
    return torch.randn(count, FEATURES, generator=generator) + y[:, None] + 10.0 * (client + 1), y


def net() -> nn.Module:
    return nn.Sequential(
        nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)
    )


@pytest.mark.parametrize(("method", "options"), [("fedavg", {}), ("fedspa", {"density": 0.3})])
def test_statistics_stay_local(tmp_path, method, options):
    """The first layer sees the data itself, so that its statistics follow from the client's own data alone: after n
    batches the mean is (1 - 0.9^n) of the client's, whatever the weights and whoever else took part."""
    federation = sp.Federation.from_clients(
        [(*examples(k, SIZE, seed=k), *examples(k, 6, seed=50 + k)) for k in range(CLIENTS)]
    )
    run = sp.train(
        method,
        federation,
        net,
        rounds=ROUNDS,
        per_round=CLIENTS,
        epochs=EPOCHS,
        batch_size=BATCH,
        executor="serial",
        out=tmp_path / "run",
        **options,
    )
    num_batches = ROUNDS * EPOCHS * SIZE // BATCH
    weights = []
    for k in range(CLIENTS):
        module = run.personal_model(k)
        first, second = module[0], module[2]
        assert first.num_batches_tracked == num_batches
        assert first.num_batches_tracked.dtype == torch.int64
        own_mean = federation.examples(k, "train").inputs.mean(dim=0)
        torch.testing.assert_close(first.running_mean, (1 - 0.9**num_batches) * own_mean, rtol=0.05, atol=0.0)
        assert (first.running_var > 0.5).all()
        assert (second.running_var > 0).all()
        weights.append(torch.cat([value.flatten() for value in module.parameters()]))
    nonzero = [int((weight != 0).sum()) for weight in weights]
    if method == "fedavg":
        assert all(torch.equal(weights[0], weight) for weight in weights)  # the parameters are shared, affine ones too
    else:
        assert max(nonzero) <= round(0.3 * len(weights[0])) + len(list(net().parameters()))


def protocol_of(folder, model, **options) -> str:
    federation = sp.Federation.from_clients(
        [(*examples(k, SIZE, seed=k), *examples(k, 6, seed=50 + k)) for k in range(CLIENTS)]
    )
    common = {"rounds": 1, "per_round": 1, "epochs": 1, "batch_size": BATCH, "executor": "serial", **options}
    return sp.train("fedavg", federation, model, out=folder / "run", **common).protocol


@pytest.mark.parametrize(
    ("options", "told", "untold"),
    [
        ({}, "stay on the client; 3 of the clients never trained and are scored with the initial ones.", "stateless"),
        ({"per_round": CLIENTS}, "BatchNorm statistics stay on the client.", "never trained"),
        # All updates of the only round are lost, and with them what clients gathered.
        ({"per_round": CLIENTS, "drop_rate": 0.999}, f"; {CLIENTS} of the clients never trained", "stateless"),
        ({"tune_epochs": 1}, "BatchNorm statistics stay on the client.", "never trained"),
        (
            {"stateless": True},
            "nothing between rounds, and buffers such as BatchNorm statistics are the initial",
            "stay",
        ),
        ({"stateless": True, "tune_epochs": 1}, "keep nothing between rounds.", "initial"),
    ],
)
def test_the_protocol_tells_whose_statistics_are_used(tmp_path, options, told, untold):
    found = protocol_of(tmp_path, net, **options)
    assert told in found
    assert untold not in found


def test_the_protocol_is_silent_where_no_buffer_moves(tmp_path):
    def steady() -> nn.Module:
        module = nn.Sequential(nn.Linear(FEATURES, 3))
        module.register_buffer("shift", torch.zeros(3))
        return module

    assert "BatchNorm" not in protocol_of(tmp_path, steady)
