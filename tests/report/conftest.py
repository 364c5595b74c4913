"""Pages of made runs."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
from fake_runs import make_comparison_fixture, make_view_fixture

from sparsona.analysis.partition import Partition
from sparsona.report import page

__all__ = ["make_comparison_fixture", "make_view_fixture"]

_drawn: dict[bytes, str] = {}


@pytest.fixture(autouse=True)
def _a_partition_is_written_once(monkeypatch):
    """Most pages here are of the same clients, and to lay out the picture of their data is most of the work."""
    draw = page.draw

    def draw_once(found):
        picture = draw(found)
        if not isinstance(found, Partition):
            return picture
        key = pickle.dumps(found)
        if key not in _drawn:
            _drawn[key] = picture.inline()
        return SimpleNamespace(inline=lambda: _drawn[key])

    monkeypatch.setattr(page, "draw", draw_once)
