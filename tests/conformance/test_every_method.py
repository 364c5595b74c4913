"""What every method must do, whatever it is: `sparsona.testing` for each row, as its own test file says.

The first row of a file goes through the whole battery, the further ones through what other options may change.
"""

from __future__ import annotations

import os
from functools import cache

import pytest
from method_lines import battery, memory

from sparsona.costs import cost
from sparsona.methods import METHODS, card
from sparsona.testing import PROPERTIES, SHORT, Case

pytestmark = pytest.mark.long
DEVICE = os.environ.get("SPARSONA_TEST_DEVICE", "cpu")
LINES, MEMORY = battery(), memory()
FIRST = {row.module: row.name for row in reversed(METHODS.values())}


FEW = {"fedavg", "fedspa", "dispfl"}  # with a server and without, dense and sparse
# For the other rows these are `slow`: `learns` takes seconds each, and tests/executors/test_executors_agree.py runs
# every method together and alone, for more rounds and with more that must agree.
FOR_FEW = {"learns", "clients_run_together_as_alone"}


def properties():
    for name in LINES:
        for found in PROPERTIES if name in FIRST.values() else SHORT:
            again = name not in FEW and found in FOR_FEW
            yield pytest.param(name, found, id=f"{name}-{found}", marks=[pytest.mark.slow] if again else [])


@cache
def case(name: str) -> Case:
    line = LINES[name]
    return Case(card(name), **{**line, "options": {"device": DEVICE, **line.get("options", {})}})


def test_every_row_has_a_line_in_its_methods_test_file():
    assert set(LINES) == set(METHODS), "BATTERY in tests/methods/test_NAME.py: see docs/add-a-method.md"


@pytest.mark.parametrize(("name", "found"), [*properties()])
def test_battery(name, found):
    PROPERTIES[found](case(name))


@pytest.mark.parametrize(("method", "options", "kept", "at_hand", "training", "search"), MEMORY)
def test_memory_by_hand(method, options, kept, at_hand, training, search):
    """Of LeNet5: see tests/lenet5.py."""
    found = cost(method, model="lenet5", **options).memory
    assert vars(found) == {"kept": kept, "at_hand": at_hand, "training": training, "search": search}


def test_memory_of_every_method_is_done_by_hand():
    """Rows that differ in options of the engine alone hold the same."""
    done = {_what_it_is(name) for name, *_ in MEMORY}
    missing = [name for name in METHODS if _what_it_is(name) not in done]
    assert not missing, "MEMORY in tests/methods/test_NAME.py: see docs/add-a-method.md"


def _what_it_is(name: str) -> tuple[object, ...]:
    row = METHODS[name]
    return row.module, row.config, repr(sorted(row.options.items()))
