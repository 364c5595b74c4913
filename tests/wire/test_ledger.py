"""Every byte is counted once, and twice when it travels twice."""

import torch

from sparsona.core.layout import Layout, Slot
from sparsona.core.tree import Tree
from sparsona.core.update import SERVER, Support, Update, dense, masked
from sparsona.wire.ledger import Traffic, paper_bytes

LAYOUT = Layout((Slot("w", (4,)),))
VALUES = Tree(LAYOUT, torch.arange(4.0))
MASK = Tree(LAYOUT, torch.tensor([True, False, True, True]))
DOWN = Update(SERVER, 0, 1.0, {"params": dense(VALUES)})
UP = Update(3, 0, 1.0, {"params": masked(VALUES, MASK, Support.BITS), "mask": dense(MASK)})


def test_traffic_adds_field_by_field() -> None:
    both = Traffic(1, 2, 3, 4) + Traffic(10, 20, 30, 40)
    assert both == Traffic(11, 22, 33, 44)
    assert both.total == 33
    assert sum([both, both], Traffic()) == both + both


def test_paper_bytes_are_four_for_each_float() -> None:
    """Four dense floats; three floats inside a mask, which is free, and a mask, which is free."""
    assert paper_bytes(DOWN) == 16
    assert paper_bytes(UP) == 12
