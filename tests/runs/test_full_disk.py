"""A disk that fills up: one clear message, nothing lost, and the run goes on when there is room again."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import subprocess

import pytest
from processes import completed, small, traces

import sparsona as sp
from sparsona.runs import session

ROUNDS = 4


def options(folder, **more) -> list[str]:
    return small(folder, rounds=ROUNDS, **more)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    small(folder)
    run = sp.train(
        "fedspa",
        out=folder / "run",
        rounds=ROUNDS,
        clients=5,
        per_round=2,
        epochs=1,
        batch_size=10,
        executor="serial",
        partition=f"file:{folder / 'clients.npy'}",
    )
    return traces(run.path)


@pytest.fixture
def eager(monkeypatch):
    """A checkpoint after every round."""
    monkeypatch.setattr(session, "CHECKPOINT_SECONDS", 0)
    monkeypatch.setattr(session, "CHECKPOINT_SHARE", 1e9)


@pytest.mark.parametrize(
    ("number", "call", "good"),
    [
        (errno.ENOSPC, "replace", 2),
        (errno.ENOSPC, "fsync", 2),
        (errno.ENOSPC, "replace", 3),
        (errno.ENOSPC, "replace", 9),
        (errno.ENOSPC, "replace", 24),
        (errno.ENOSPC, "fsync", 37),
        (errno.EDQUOT, "replace", 15),
    ],
)
def test_files_cannot_be_written(say, tmp_path, monkeypatch, eager, reference, call, good, number):
    """From the good-th call on, all fail, as on a disk that stays full."""
    real, calls = getattr(os, call), []

    def fill_up(*args):
        calls.append(args)
        if len(calls) > good:
            raise OSError(number, os.strerror(number))
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fill_up)
        said = say("run", "fedspa", *options(tmp_path, out="run"))
    said.refused("the disk is full: '", "free space", "free some space, then `sparsona resume` this run")
    assert (tmp_path / "run" / "config.json").exists() == (good > 2)
    if good == 2:  # there is no run to resume; it can be started again
        assert say("run", "fedspa", *options(tmp_path, out="run"), "--json").code == 0
    else:
        said = say("resume", "run", "--json")
        assert said.code == 0, said.err
    assert traces(tmp_path / "run") == reference


@pytest.mark.parametrize("pages", [3, 8, 10])
def test_records_cannot_be_written(say, tmp_path, monkeypatch, eager, reference, pages):
    """SQLite's own refusal, at the size at which a disk would be full."""
    connect = sqlite3.connect

    def cramped(*args, **options):
        db = connect(*args, **options)
        db.execute("PRAGMA page_size = 512")
        db.execute(f"PRAGMA max_page_count = {pages}")
        return db

    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", cramped)
        said = say("run", "fedspa", *options(tmp_path, out="run"))
    said.refused("records.sqlite", "the disk is full", "free some space, then `sparsona resume` this run")
    before = completed(tmp_path / "run")
    assert before < ROUNDS
    assert say("resume", "run", "--json").code == 0
    assert traces(tmp_path / "run") == reference


def fill(path) -> None:
    """Take all the space there is."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(file, b"\0" * 4096)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
    finally:
        os.close(file)


def test_a_real_disk_fills_up(say, tmp_path, reference):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        run = disk / "run"
        said = say("run", "fedspa", *options(tmp_path, out=run), "--set", "max_seconds=1e-9", "--json")
        assert said.code == 0
        assert completed(run) == 1
        before = sp.load(run).accuracies()
        fill(disk / "filler")
        said = say("resume", run)
        said.refused("the disk is full", "free some space, then `sparsona resume` this run")
        assert completed(run) == 1
        assert (sp.load(run).accuracies() == before).all()
        say("run", "fedspa", *options(tmp_path, out=disk / "other")).refused("the disk is full")
        (disk / "filler").unlink()
        while completed(run) < ROUNDS:
            assert say("resume", run, "--json").code == 0
        assert traces(run) == reference
        # And where nothing can be written at all, results can still be read.
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        say("resume", run).refused("Read-only file system")
        say("run", "fedspa", *options(tmp_path, out=disk / "third")).refused("cannot be written: Read-only file system")
        say("compare", "fedspa", *options(tmp_path, out=disk / "fourth")).refused("cannot be written: Read-only file")
        assert len(sp.load(run).accuracies()) == 5
        said = say("report", run, "--out", tmp_path / "page.html")
        assert said.code == 0, said.err
        say("report", run).refused("the report could not be written", "Read-only file system")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_what_sqlite_says_of_a_full_disk_has_not_changed(tmp_path):
    """The message is recognised by its words."""
    db = sqlite3.connect(tmp_path / "db")
    db.execute("CREATE TABLE t (x)")
    db.execute("PRAGMA max_page_count = 2")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        db.executemany("INSERT INTO t VALUES (?)", [("x" * 1000,)] * 100)
    db.close()
