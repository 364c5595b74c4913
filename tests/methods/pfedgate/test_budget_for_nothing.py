"""A budget in which no block fits trains nothing: it is refused, as by the other sparse methods."""

from __future__ import annotations

import pytest
from torch import nn

from sparsona.core.errors import SparsonaError
from sparsona.core.task import Task
from sparsona.methods.pfedgate.config import PFedGateConfig, budget_left, cut


@pytest.mark.parametrize(("density", "keeps"), [(1e-9, False), (0.01, False), (0.5, True), (1.0, True)])
def test_a_density_that_keeps_nothing_is_refused(density, keeps):
    layout = Task(nn.Linear(6, 3), (6,), 3).layout
    config = PFedGateConfig(density=density)
    blocks = cut(layout, config, min(0.2, density))
    if keeps:
        assert budget_left(blocks, config, density, min(0.2, density))[0] >= 0
    else:
        with pytest.raises(SparsonaError, match="keeps no parameter at all") as caught:
            budget_left(blocks, config, density, density)
        assert "raise --density" in caught.value.hint
