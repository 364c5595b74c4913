"""What an error suggests for a name that is not known."""

from __future__ import annotations

import pytest

from sparsona.core.errors import nearest, unknown_name

PEOPLE = [f"person-{number:02d}" for number in range(1, 31)]


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("person-7", PEOPLE, "person-07"),
        ("person-007", PEOPLE, "person-07"),
        ("Person_7", PEOPLE, "person-07"),
        ("ward-10", ["ward-1", "ward-010", "ward-100"], "ward-010"),
        ("0", ["00", "10"], "00"),
        ("F1", ["accuracy", "auc", "f1"], "f1"),
        ("FEDSAP", ["fedavg", "fedspa"], "fedspa"),
        ("Local-Epochs", ["rounds", "epochs"], "epochs"),
        ("person", ["iid", "natural", "dirichlet:A"], "natural"),
        ("person", ["persona", "iid"], "persona"),
        ("x", ["accuracy"], None),
        ("x", [], None),
        ("9" * 9999, ["accuracy"], None),  # too long for a number
    ],
)
def test_the_name_that_was_meant(name, known, meant):
    assert nearest(name, known) == meant
    assert unknown_name("name", name, known).hint == (f"did you mean '{meant}'?" if meant else "")
