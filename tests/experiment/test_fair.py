"""What makes a comparison fair: the same conditions for all, equal work where it is asked for, and what each spent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import sparsona as sp
from sparsona import methods
from sparsona.core.errors import SparsonaError


def test_a_method_that_needs_validation_data_is_refused_without_any(tmp_path):
    needy = replace(methods.card("local"), name="needy", needs_validation=True)
    with pytest.raises(SparsonaError, match=r"needy decides by validation data, and validation_rate is 0"):
        sp.train(needy, clients=4, rounds=1, validation_rate=0, out=tmp_path / "none")
    data = [(torch.randn(8, 3), torch.arange(8) % 2, torch.randn(4, 3), torch.arange(4) % 2) for _ in range(2)]
    bare = sp.Federation.from_clients(data, validation_rate=0)
    with pytest.raises(SparsonaError, match=r"2 clients have none"):
        sp.train(needy, bare, torch.nn.Linear(3, 2), rounds=1, out=tmp_path / "bare")
    assert not (tmp_path / "none").exists()
    run = sp.train(needy, clients=4, rounds=1, data_rate=0.2, epochs=1, executor="serial", out=tmp_path / "some")
    assert run.summary["rounds"] == 1
