"""Every byte is counted once, and twice when it travels twice."""

import torch

from sparsona.core.layout import Layout, Slot
from sparsona.core.tree import Tree
from sparsona.core.update import SERVER, Support, Update, dense, masked
from sparsona.wire.codec import encode
from sparsona.wire.format import message_size, sizes_of
from sparsona.wire.ledger import Ledger, Traffic, paper_bytes

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


def test_counts_by_round_and_client() -> None:
    ledger = Ledger()
    down, up = encode(DOWN), encode(UP)
    ledger.down(0, 3, down, DOWN)
    ledger.up(0, 3, up, UP)
    ledger.down(0, 4, down, DOWN)
    ledger.down(1, 3, down, DOWN)
    once = Traffic(down=len(down), paper_down=16)
    back = Traffic(up=len(up), paper_up=12)
    assert ledger.of(0, 3) == once + back
    assert ledger.of_round(0) == once + once + back
    assert ledger.of_round(1) == once
    assert ledger.of_client(3) == once + once + back
    assert ledger.of_client(4) == once
    assert ledger.totals() == once + once + once + back


def test_a_resend_counts_again() -> None:
    ledger = Ledger()
    ledger.up(0, 3, encode(UP), UP)
    first = ledger.totals()
    ledger.up(0, 3, encode(UP), UP)
    assert ledger.of(0, 3) == ledger.totals() == first + first


def test_a_counted_size_stands_for_the_bytes() -> None:
    real, simulated = Ledger(), Ledger()
    real.up(0, 3, encode(UP), UP)
    simulated.up(0, 3, message_size(sizes_of(UP)), UP)
    assert simulated.totals() == real.totals()


def test_busiest_node() -> None:
    """The server carries 12; client 0 carries 5 and client 1 carries 7."""
    ledger = Ledger()
    assert ledger.busiest_node() == ledger.busiest_node(server=False) == 0
    ledger.add(0, 0, Traffic(up=2, down=3))
    ledger.add(0, 1, Traffic(up=3))
    ledger.add(1, 1, Traffic(down=4))
    assert ledger.busiest_node() == 12
    assert ledger.busiest_node(server=False) == 7


def test_asking_leaves_no_trace() -> None:
    ledger = Ledger()
    assert ledger.of(9, 9) == ledger.of_round(9) == ledger.of_client(9) == ledger.totals() == Traffic()
    assert ledger.busiest_node(server=False) == 0
