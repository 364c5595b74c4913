"""What every test may rely on: one thread, a small problem, and nobody touching the global generators."""

from __future__ import annotations

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def untouched_generators():
    """Fails if the test moved a global generator."""
    torch.manual_seed(11)
    np.random.seed(11)  # noqa: NPY002
    before = torch.get_rng_state().clone(), np.random.get_state()[1].copy()  # noqa: NPY002
    yield
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002
