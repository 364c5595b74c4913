"""The data that several tests of this folder use."""

import pytest
import torch

from sparsona.data.read import read


@pytest.fixture
def digits():
    """Images and labels of the embedded digits."""
    pool = read("digits")
    return torch.from_numpy(pool.x), torch.from_numpy(pool.y)
