"""Nothing in the current folder is run: not by a command, not by the processes that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparsona.core.version import VERSION
from sparsona.executors import worker
from sparsona.reproduce import folder as reproductions

CONSOLE = (
    "import sys; sys.argv[0] = 'sparsona'; from sparsona.cli import main; main()"  # what the installed script does
)
TINY = ["--clients", "3", "--per-round", "2", "--rounds", "1", "--epochs", "1", "--set", "data_rate=0.2"]


@pytest.fixture
def planted(tmp_path):
    """A folder with modules of the names that everything imports; each would leave a trace."""
    trace = f"open({str(tmp_path / 'EXECUTED')!r}, 'w')\n"
    here = tmp_path / "here"
    (here / "sparsona" / "executors").mkdir(parents=True)
    names = ("pickle", "torch", "json", "struct", "numpy", "cloudpickle", "multiprocessing", "sitecustomize", "click")
    for name in (*names, "sparsona/__init__", "sparsona/__main__", "sparsona/executors/worker"):
        (here / f"{name}.py").write_text(trace)
    yield here
    assert not (tmp_path / "EXECUTED").exists()


def run(here: Path, *command: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *command], cwd=here, capture_output=True, text=True, check=True, **options)


def test_a_worker_imports_nothing_from_there(planted):
    done = subprocess.run(worker.start_command(), cwd=planted, input=b"", capture_output=True, check=True)
    assert done.stderr == b""


@pytest.mark.parametrize("entry", [["-P", "-c", CONSOLE], ["-P", "-m", "sparsona"]])
def test_a_command_imports_nothing_from_there(planted, entry):
    assert VERSION in run(planted, *entry, "--version").stdout
    assert "fedspa" in run(planted, *entry, "methods").stdout


def test_python_m_imports_the_package_alone_from_where_it_stands(planted):
    """Python finds the package before the package can do anything; of what it imports, nothing is from there."""
    for path in sorted((planted / "sparsona").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (planted / "sparsona").rmdir()
    assert VERSION in run(planted, "-m", "sparsona", "--version").stdout
    assert "fedspa" in run(planted, "-m", "sparsona", "methods").stdout


def test_git_is_asked_about_the_source(planted, monkeypatch):
    """Not a program, and not a repository, of the current folder."""
    (planted / "git").write_text(f"#!/bin/sh\ntouch {planted.parent / 'EXECUTED'}\n")
    (planted / "git").chmod(0o755)
    monkeypatch.chdir(planted)
    monkeypatch.setenv("PATH", f".:{os.environ['PATH']}")
    assert reproductions.source_commit()


@pytest.mark.slow
@pytest.mark.parametrize("entry", [["-P", "-c", CONSOLE], ["-P", "-m", "sparsona"]])
def test_whole_commands(planted, tmp_path, entry):
    """Workers, processes of --jobs, resuming, a search, and a report."""
    say = [*entry]
    run(
        planted,
        *say,
        "run",
        "fedavg",
        *TINY,
        "--executor",
        "workers",
        "--set",
        "max_seconds=1e-9",
        "--out",
        tmp_path / "r",
    )
    run(planted, *say, "resume", tmp_path / "r")
    run(planted, *say, "compare", "fedavg", "local", *TINY, "--jobs", "2", "--out", tmp_path / "c")
    run(planted, *say, "report", tmp_path / "c")
    run(planted, *say, "tune", "fedavg", *TINY, "--trials", "2", "--jobs", "2", "--out", tmp_path / "t")
