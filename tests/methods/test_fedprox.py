"""FedProx: FedAvg whose clients are pulled towards the model they received."""

from __future__ import annotations

import pytest
from lenet5 import SIZE
from line_by_hand import Line, weight

from sparsona.methods import card
from sparsona.methods.fedprox import FedProxConfig, fedprox
from sparsona.testing import Case

BATTERY = {"fedprox": {"options": {"prox": 0.1}, "accuracy": 0.35}}
MEMORY = [("fedprox", {}, 0, SIZE, 3 * SIZE, 0)]


def test_the_pull_by_hand():
    """`line_by_hand` with prox = 2. Client 0: 1.4, then 1.4 + 0.1 * (3.2 - 2 * 0.4) = 1.64. Client 1: 0.2, then 0.04 +
    0.1 * 2 * 0.8 = 0.2. By examples: (1.64 + 3 * 0.2) / 4 = 0.56."""
    line = Line(fedprox, FedProxConfig, prox=2.0)
    assert [weight(line.turn(client)[0].params) for client in (0, 1)] == pytest.approx([1.64, 0.2])
    assert line.play().w == pytest.approx(0.56)
    # The next pull goes to 0.56: 0.56 + 0.2 * 2.44 = 1.048, + 0.1 * (2 * 1.952 - 2 * 0.488) = 1.3408.
    assert weight(line.turn()[0].params) == pytest.approx(1.3408)


def test_without_a_pull_it_is_fedavg():
    """Equation 2 with prox = 0 is FedAvg's loss: the same bits after three rounds."""
    plain, none, much = (
        Case(card(name), found).history.prints
        for name, found in (("fedavg", {}), *(("fedprox", {"prox": p}) for p in (0, 1)))
    )
    assert none == plain
    assert much != plain
