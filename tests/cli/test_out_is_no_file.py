"""--out of commands that write one file: a pipe, a device and a folder are refused, and still there."""

from __future__ import annotations

import os
import stat

import pytest
from processes import small

from sparsona.core.errors import SparsonaError
from sparsona.core.files import replace_file


@pytest.mark.parametrize("place", ["pipe", "folder"])
def test_replace_file(tmp_path, place):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    before = (tmp_path / place).stat().st_mode
    with pytest.raises(SparsonaError, match=r"is a pipe or a device|is a folder"), replace_file(tmp_path / place):
        pass
    assert stat.S_IFMT((tmp_path / place).stat().st_mode) == stat.S_IFMT(before)


def test_commands(say, tmp_path):
    say("run", "fedspa", *small(tmp_path, out="run"), "--set", 'points=["global"]')
    for name in ("pipe", "pipe.svg", "pipe.png", "pipe.safetensors"):
        os.mkfifo(tmp_path / name)
    lines = [
        ["report", "run", "--out", "pipe"],
        ["table", "run", "--out", "pipe"],
        ["clients", "run", "--out", "pipe.svg"],
        ["clients", "run", "--out", "pipe.png"],
        ["data", "show", "digits", "--clients", "4", "--out", "pipe.svg"],
        ["latency", "--data", "digits", "--out", "pipe"],
        ["export", "run", "--client", "0", "--out", "pipe.safetensors"],
        ["run", "fedavg", *small(tmp_path, out="pipe")],
    ]
    for line in lines:
        said = say(*line)
        assert said.code == 1, (line, said)
        assert "pipe" in said.err
    assert all(stat.S_ISFIFO((tmp_path / one).stat().st_mode) for one in os.listdir(tmp_path) if "pipe" in one)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["compare", "fedavg", "--seeds", "100000000000"], ["seeds = 100000000000", "from 0 to 100,000"]),
        (["run", "fedavg", "--clients", "1000000000000"], ["clients = 1000000000000", "at most 10,000,000"]),
        (["run", "fedavg", "--rounds", "1" + "0" * 23], ["rounds = 1", "at most 10,000,000"]),
        (["cost", "fedavg", "--model", "lenet5", "--clients", "1" + "0" * 12], ["clients = 1", "at most 10,000,000"]),
        (["run", "fedavg", "--seed", "1" + "0" * 30], ["seed = 1", "at most 9,223,372,036,854,775,807"]),
        (["run", "fedavg", "--epochs", "1" + "0" * 12], ["epochs = 1", "at most 1,000,000,000"]),
        (["run", "fedavg", "--batch-size", "1" + "0" * 12], ["batch_size = 1", "at most 1,000,000,000"]),
        (["tune", "fedavg", "--trials", "1" + "0" * 12], ["trials = 1", "to 1,000,000"]),
        (["run", "fedavg", "--set", "rounds=true"], ["rounds = True", "a whole number"]),
        (["run", "fedavg", "--set", "rounds=2.0"], ["rounds = 2.0", "a whole number"]),
        (["run", "fedavg", "--set", "guard=1"], ["guard = 1", "true or false"]),
        (["run", "fedavg", "--set", "lr=true"], ["lr = True", "a number"]),
    ],
)
def test_sizes_and_kinds(say, line, words):
    say(*line).refused(*words)
