"""The examples in the docstrings of the public functions run and print what they say."""

import doctest
from importlib import import_module

import pytest

MODULES = ("catalog", "download", "federate", "federation", "partition", "read")


@pytest.mark.parametrize("name", MODULES)
def test_examples_of(name):
    found = doctest.testmod(import_module(f"sparsona.data.{name}"))
    assert found.attempted
    assert not found.failed
