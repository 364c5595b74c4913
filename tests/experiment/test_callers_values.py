"""Values from Python: what is wrong with them is the caller's, named, and raised before a folder is made."""

from __future__ import annotations

import threading
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import nn

import sparsona as sp

BAD = [
    True,
    -1,
    1.5,
    2.0,
    "5",
    "a",
    float("nan"),
    10**30,
    [],
    {},
    object(),
    b"x",
    np.array([1, 2]),
    int,
    torch.zeros(2),
]


@pytest.fixture(scope="module")
def arrays():
    return np.random.default_rng(0).random((60, 4), dtype=np.float32), np.arange(60) % 3


@pytest.fixture(scope="module")
def federation(arrays):
    return sp.federate(*arrays, clients=3, partition="iid", min_size=2)


@pytest.fixture
def accepted(monkeypatch, tmp_path):
    """Training itself is no part of these tests."""

    def stop(*_args, **_options):
        raise sp.SparsonaError("accepted")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sparsona.runs.session.Session.play", stop)
    monkeypatch.setattr("sparsona.experiment.tune._tune", stop)
    return tmp_path


@pytest.mark.parametrize("name", ["rounds", "clients", "seed", "batch_size", "eval_every", "tune_epochs", "patience"])
def test_whole_numbers_of_runs(accepted, name):
    for value in (value for value in BAD if not isinstance(value, type)):
        if isinstance(value, str) and value.isdecimal():
            continue  # a number that is written as a text is one
        with pytest.raises(sp.SparsonaError) as caught:
            sp.train("fedavg", **{name: value})
        assert name in caught.value.what, value
    assert not (accepted / "runs").exists()


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("guard", [1, 0, "yes", "true", 0.0]),
        ("lr", [True, "fast", [0.1]]),
        ("epochs", [True, "two", 2.0, 10**10]),
        ("data", [3, True, ["digits"]]),
        ("partition", [None, 3, ["iid"]]),
        ("capacities", [[True], True]),
        ("client_epochs", [[True], [10**10]]),
        ("max_steps", [10**20]),
        ("headline", [3, np.array([1, 2])]),
        ("preset", [torch.zeros(2), 7]),
        ("warm_start", [True, 3]),
    ],
)
def test_kinds_of_options(accepted, name, bad):
    for value in bad:
        with pytest.raises(sp.SparsonaError) as caught:
            sp.train("fedavg", **{name: value})
        assert name in str(caught.value), value


def test_numbers_of_numpy(federation, accepted):
    options = {"rounds": np.int64(2), "lr": np.float32(0.5), "capacities": np.array([0.5, 1.0])}
    with pytest.raises(sp.SparsonaError, match="accepted"):
        sp.train("fedspa", federation, **options)


SPLITS = ["seed", "clients", "num_classes", "name", "num_train", "view", "tokens", "task", "class_names", "test"]
SPLITS += ["validation_rate", "test_rate", "min_size", "max_examples", "bogus", "partition_seed", "holdout_rate"]


@pytest.mark.parametrize("name", SPLITS)
def test_federate(arrays, name):
    """Never a TypeError; seeds of -1, "a" and 1.5 were accepted."""
    for value in BAD:
        try:
            sp.federate(*arrays, **{"clients": 3, "partition": "iid", "min_size": 2, name: value})
        except sp.SparsonaError:
            continue
        assert name not in ("seed", "clients", "bogus", "partition_seed", "task", "test"), value
    sp.federate(*arrays, clients=3, partition=None, min_size=2)


def test_from_clients(arrays):
    for value in BAD:
        for name in ("seed", "validation_rate", "num_classes", "name", "tokens", "task", "test_rate", "class_names"):
            with suppress(sp.SparsonaError):  # some are right for some
                sp.Federation.from_clients([arrays] * 2, **{name: value})
        for clients in (value, [arrays, value], [arrays, (value, arrays[1])]):
            with pytest.raises(sp.SparsonaError):
                sp.Federation.from_clients(clients)
    for seed in (-1, "a", 1.5, True):
        with pytest.raises(sp.SparsonaError, match="seed = "):
            sp.Federation.from_clients([arrays] * 2, seed=seed)


def test_compare_tune_load(federation, accepted):
    for value in BAD:
        for name in ("seeds", "jobs", "match", "out", "observers", "progress"):
            with pytest.raises(sp.SparsonaError):
                sp.compare(["fedavg", "local"], federation, executor="serial", rounds=1, **{name: value})
        for name in ("trials", "search", "trial_rounds", "holdout_rate", "prune", "refit_seeds", "jobs"):
            with pytest.raises(sp.SparsonaError):
                sp.tune(["fedavg"], federation, **{"rounds": 1, "jobs": 1, "trials": 1, name: value})
        for call in (sp.load, sp.resume, sp.compare, sp.tune):
            with pytest.raises(sp.SparsonaError):
                call(value)
    with pytest.raises(sp.SparsonaError, match="seeds = 100000000000"):
        sp.compare(["fedavg"], federation, seeds=10**11)


class Odd(nn.Module):
    def __init__(self, how) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(4, 3), how

    def forward(self, inputs):
        return self.how(self.linear(inputs))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda out: out[:, None], "output for one example is"),
        (lambda out: out[0], "output for one example is"),
        (lambda out: out.detach(), "training step of the model fails"),
        (lambda out: out.long(), "output is of int64"),
        (lambda out: out.sum(), "output is"),
        (lambda out: [out], "output is list"),
    ],
)
def test_outputs_of_models(federation, accepted, how, words):
    with pytest.raises(sp.SparsonaError, match=words):
        sp.train("fedavg", federation, Odd(how), out="run")
    assert not (accepted / "run").exists()


def test_models_that_cannot_be_copied(federation, accepted):
    def build():
        module = nn.Linear(4, 3)
        module.lock = threading.Lock()
        return module

    for model in (build(), build):
        with pytest.raises(sp.SparsonaError, match="the model cannot be copied"):
            sp.train("fedavg", federation, model, out="run")
    assert not (accepted / "run").exists()
