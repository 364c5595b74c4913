"""One `sparsona run`, traced: every fact is read once, and nothing is done twice."""

from __future__ import annotations

from collections import Counter
from importlib import import_module

import pytest

from sparsona.engine.star import Star
from sparsona.methods.fedspa import FedSpaConfig
from sparsona.runs.facts import RunFacts
from sparsona.runs.options import RunConfig


@pytest.fixture
def counts(monkeypatch):
    """How often these were called, by name."""
    found = Counter()

    def count(owner, name, what, wrap=lambda function: function):
        original = getattr(owner, name)

        def counted(*args, **kwargs):
            found[what] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrap(counted))

    count(Star, "__init__", "engines")
    for how, wrap in (("__init__", lambda function: function), ("model_validate", staticmethod)):
        count(FedSpaConfig, how, "validations of the method's options", wrap)
        count(RunConfig, how, "validations of the run's options", wrap)
    count(RunFacts, "from_json", "readings of the facts", staticmethod)
    for module in ("sparsona.engine.star", "sparsona.engine.turn", "sparsona.engine.gossip", "sparsona.engine.jobs"):
        count(import_module(module), "encode", "messages encoded")
    return found


FEW = ("--set", "data_rate=0.1", "--executor", "serial")


def test_a_run_does_everything_once(say, counts):
    done = say("run", "fedspa", "--rounds", 2, "--clients", 4, "--per-round", 2, "--epochs", 1, *FEW)
    assert done.code == 0, done.err
    assert counts["engines"] == 1
    assert counts["validations of the method's options"] == 1
    assert counts["validations of the run's options"] == 1
    assert counts["readings of the facts"] <= 1
    # Two clients in each of two rounds, down and up. All four are evaluated after each round, and nothing is encoded.
    assert counts["messages encoded"] == 2 * 2 * 2
