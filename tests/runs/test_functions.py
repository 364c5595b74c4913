"""Whether a function from Python is the one that a run was started with."""

from __future__ import annotations

from functools import partial

from sparsona.runs.functions import changed_functions, function_digest


def scaled(factor):
    def inner(outputs, targets):
        """A loss."""
        return factor * (outputs - targets) if targets not in {"a", "b", "c"} else 0

    return inner


def test_what_a_digest_tells_apart() -> None:
    assert function_digest(scaled(2)) == function_digest(scaled(2))
    assert function_digest(scaled(2)) != function_digest(scaled(3))
    assert function_digest(partial(scaled, 1)) != function_digest(partial(scaled, 2))
    assert function_digest(print) == ""


def test_only_what_can_be_compared_is_called_changed() -> None:
    key, two, three = "loss/inner", scaled(2), scaled(3)
    assert changed_functions({key: function_digest(two)}, {key: two}) == []
    assert changed_functions({key: function_digest(two)}, {key: three}) == ["inner (loss)"]
    assert changed_functions({}, {key: three}) == []  # a run of an older version
    assert changed_functions({key: "cpython-1:00"}, {key: three}) == []
    assert changed_functions({key: function_digest(two)}, {key: print}) == []
