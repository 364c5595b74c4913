"""A run's folder: made once, locked while used, written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sqlite3
import threading

import numpy as np
import pytest

from sparsona.core.errors import SparsonaError
from sparsona.runs import store
from sparsona.runs.store import RunFolder, pack_confusion, read_json, unpack_confusion, write_atomically

ROW = (0, 1.0, 2, 2, 0, 0.5, 10, 20, 8, 16, 100, 10, 0.1)


def rows_of_round(index: int) -> tuple:
    return (index, *ROW[1:])


@pytest.fixture
def run(tmp_path):
    with RunFolder.create(tmp_path / "run", "{}\n", {"method": "fedavg"}) as folder:
        yield folder


def test_writing_is_all_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            with pytest.raises(SparsonaError, match="Input/output error"):
                write_atomically(path, b"new")
        assert path.read_bytes() == b"old"
        assert [entry.name for entry in tmp_path.iterdir()] == ["file"]  # nothing is left lying about
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_file_reaches_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    """Contents, then name, then the folder's entry: in any other order power failing may leave an empty file."""
    seen = []
    fsync, replace = os.fsync, os.replace

    def spy_fsync(number):
        kind = "folder" if os.path.isdir(f"/proc/self/fd/{number}") else "file"
        seen.append((kind, os.path.exists(tmp_path / "file")))
        fsync(number)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", lambda *paths: (seen.append("replace"), replace(*paths)))
    write_atomically(tmp_path / "file", b"x")
    if os.path.exists("/proc/self/fd"):
        assert seen == [("file", False), "replace", ("folder", True)]


def test_a_new_folder_is_a_run(run):
    assert sorted(path.name for path in run.path.iterdir()) == ["about.json", "config.json", "environment.json", "lock"]
    assert run.about == {"format": store.FORMAT, "method": "fedavg"}
    assert run.environment.keys() == {
        "sparsona",
        "python",
        "torch",
        "numpy",
        "machine",
        "processor",
        "system",
        "cores",
        "gpu",
    }
    assert run.summary is None
    assert RunFolder.open(run.path).config == {}


@pytest.mark.parametrize("content", ["file.txt", "config.json", "comparison.json"])
def test_a_used_folder_is_refused_and_left_alone(tmp_path, content):
    (tmp_path / content).write_text("mine")
    with pytest.raises(SparsonaError, match=r"is already used\n  expected: .*\n  to mend:  choose another --out"):
        RunFolder.create(tmp_path, "{}", {})
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(content, "mine")]


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SparsonaError, match="is already used"):
        RunFolder.create(tmp_path / "file", "{}", {})
    with pytest.raises(SparsonaError, match="cannot be written: Not a directory"):
        RunFolder.create(tmp_path / "file" / "run", "{}", {})


def test_an_empty_folder_and_one_whose_making_was_killed_will_do(tmp_path):
    (tmp_path / "about.json").write_text("{}")
    (tmp_path / ".config.json.part").write_text("{")
    (tmp_path / "lock").touch()
    with RunFolder.create(tmp_path, '{"a": 1}', {}) as folder:
        assert folder.config == {"a": 1}


def test_two_runs_never_share_a_folder(tmp_path):
    """Of many who want the same new folder at the same time, one gets it; the others are told."""
    path, go = tmp_path / "run", threading.Barrier(8)
    outcome: list[str] = []

    def make(number: int) -> None:
        go.wait()
        try:
            with RunFolder.create(path, json.dumps({"number": number}), {}) as folder:
                outcome.append(f"got {folder.config['number']}, wanted {number}")
                done.wait(10)
        except SparsonaError as error:
            outcome.append(
                "used" if "already used" in error.what else "locked" if "in use" in error.what else str(error)
            )
            if len(outcome) >= 7:
                done.set()

    done = threading.Event()
    threads = [threading.Thread(target=make, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [text for text in outcome if text not in ("used", "locked")]
    assert len(winners) == 1
    got, wanted = winners[0].removeprefix("got ").split(", wanted ")
    assert got == wanted


def test_a_folder_taken_in_the_last_moment(tmp_path, monkeypatch):
    """Between looking into an empty folder and locking it, somebody else was quicker."""
    acquire = RunFolder._acquire

    def too_late(folder):
        (folder.path / "config.json").write_text("theirs")
        acquire(folder)

    monkeypatch.setattr(RunFolder, "_acquire", too_late)
    with pytest.raises(SparsonaError, match="is already used"):
        RunFolder.create(tmp_path / "run", "ours", {})
    assert (tmp_path / "run" / "config.json").read_text() == "theirs"


def test_a_run_in_use_is_locked(run):
    with pytest.raises(SparsonaError, match=r"is in use by another process\n  expected: .*\n  to mend:"):
        RunFolder.open(run.path).__enter__()


def test_the_lock_is_given_back(tmp_path):
    with RunFolder.create(tmp_path / "run", "{}", {}):
        pass
    with contextlib.suppress(ZeroDivisionError), RunFolder.open(tmp_path / "run"):
        1 / 0  # noqa: B018
    with RunFolder.open(tmp_path / "run"):
        pass


def test_a_folder_whose_making_failed_is_not_locked(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(SparsonaError, match="the disk is full"):
            RunFolder.create(tmp_path / "run", "{}", {})
    with RunFolder.create(tmp_path / "run", "{}", {}):
        pass


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "is not a run"),
        (lambda path: path.mkdir(), "is not a run"),
        (lambda path: path.write_text(""), "is not a run"),
        (lambda path: (path.mkdir(), (path / "comparison.json").write_text("[]")), "is a comparison"),
    ],
)
def test_what_is_not_a_run_is_not_opened(tmp_path, make, words):
    make(tmp_path / "run")
    with pytest.raises(SparsonaError, match=words) as caught:
        RunFolder.open(tmp_path / "run")
    assert caught.value.expected
    assert caught.value.mend


@pytest.mark.parametrize("name", ["about.json", "config.json", "environment.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff", None])
def test_damaged_files_of_a_run(run, name, content):
    path = run.path / name
    path.unlink() if content is None else path.write_bytes(content)

    def read() -> None:
        opened = RunFolder.open(run.path)
        print(opened.config, opened.environment)

    words = r"'.*run(/[a-z]+\.json)?' (cannot be read|is missing|holds no|is not a run)"
    with pytest.raises(SparsonaError, match=words) as caught:
        read()
    assert caught.value.expected


def test_a_run_of_another_format(run):
    about = read_json(run.path / "about.json")
    (run.path / "about.json").write_text(json.dumps({**about, "format": 99}))
    with pytest.raises(SparsonaError, match="format 99\n  expected: format 1\n  to mend:  use the version of sparsona"):
        RunFolder.open(run.path)


def test_rows_of_a_round_are_written_together(run):
    with contextlib.suppress(KeyboardInterrupt), run.writing():
        run.insert("rounds", [rows_of_round(0)])
        raise KeyboardInterrupt
    assert run.select("SELECT round FROM rounds") == []
    with run.writing():
        run.insert("rounds", [rows_of_round(0)])
    assert run.select("SELECT * FROM rounds") == [ROW]


def test_rows_that_cannot_be_committed_are_taken_back(run, monkeypatch):
    """Else the next statement would meet a transaction that is still open, and its message hide the true one."""
    db = run.db

    class Full:
        def execute(self, query, *values):
            if query == "COMMIT":
                raise sqlite3.OperationalError("database or disk is full")
            return db.execute(query, *values)

        executemany = db.executemany

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "db", Full())
        with pytest.raises(SparsonaError, match="the disk is full"), run.writing():
            run.insert("rounds", [ROW])
    assert not db.in_transaction
    assert run.select("SELECT * FROM rounds") == []


def test_rewinding_drops_what_the_checkpoint_does_not_know(run):
    points = ("received", "trained", "global", "tuned", "novel", "novel_tuned")
    with run.writing():
        run.insert("rounds", map(rows_of_round, range(5)))
        run.insert("turns", ((index, client, *[0] * 11) for index in range(5) for client in (0, 1)))
        run.insert("evaluations", ((index + 1, 0, point, 1, 2, 0.5, None) for index in range(5) for point in points))
    run.write_summary({"rounds": 4})
    run.rewind(3, ("received", "trained", "global"))
    assert run.select("SELECT MAX(round), COUNT(*) FROM rounds") == [(2, 3)]
    assert run.select("SELECT MAX(round), COUNT(*) FROM turns") == [(2, 6)]
    # What is looked at after the last round only belongs to a checkpoint that has not been written yet.
    assert run.select("SELECT completed, point FROM evaluations WHERE completed >= 3 ORDER BY point") == [
        (3, "global"),
        (3, "received"),
        (3, "trained"),
    ]
    assert run.summary is None  # it told of rounds that are gone


def test_records_that_lack_rounds_are_refused(run):
    with run.writing():
        run.insert("rounds", map(rows_of_round, (0, 2)))
    run.check_records(1)
    with pytest.raises(SparsonaError, match=r"has 2 of the 3 rounds its checkpoint has\n  expected: .*\n  to mend:"):
        run.check_records(3)


def damage(path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b"not a database at all" * 100),
        lambda path: damage(path, 0, b"XXXX"),
        lambda path: damage(path, 4096, b"\xff" * 4096),
        lambda path: os.truncate(path, 5000),
    ],
    ids=["text", "header", "page", "truncated"],
)
def test_damaged_records_are_refused(tmp_path, spoil):
    with RunFolder.create(tmp_path / "run", "{}", {}) as folder, folder.writing():
        folder.insert("rounds", map(rows_of_round, range(400)))
    spoil(tmp_path / "run" / "records.sqlite")
    with pytest.raises(SparsonaError, match=r"records\.sqlite") as caught, RunFolder.open(tmp_path / "run") as folder:
        folder.check_records(400)
    assert caught.value.expected
    assert "restore" in caught.value.mend


def test_reading_writes_nothing(tmp_path):
    """Anybody may look at a run at any time, also one that has not begun, and leaves no trace."""
    with RunFolder.create(tmp_path / "run", "{}", {}) as folder:
        assert RunFolder.open(folder.path).select("SELECT * FROM rounds") == []
        assert not folder.has_records
        with folder.writing():
            folder.insert("rounds", [ROW])
        assert RunFolder.open(folder.path).select("SELECT * FROM rounds") == [ROW]
    before = sorted(path.name for path in folder.path.iterdir())
    assert "records.sqlite" in before
    assert not [name for name in before if name.startswith("records.sqlite-")]  # the file can be copied alone
    assert RunFolder.open(folder.path).select("SELECT * FROM rounds") == [ROW]
    assert sorted(path.name for path in folder.path.iterdir()) == before


def test_records_made_and_not_filled_are_empty(tmp_path):
    with RunFolder.create(tmp_path / "run", "{}", {}) as folder:
        (folder.path / "records.sqlite").touch()  # killed while the file was made
        assert folder.select("SELECT * FROM rounds") == []


def test_flushed_records_do_not_need_their_journal(run, tmp_path):
    with run.writing():
        run.insert("rounds", [ROW])
    run.flush()
    shutil.copy(run.path / "records.sqlite", tmp_path / "alone.sqlite")
    with contextlib.closing(sqlite3.connect(tmp_path / "alone.sqlite")) as db:
        assert db.execute("SELECT * FROM rounds").fetchall() == [ROW]


def test_confusion_survives():
    matrix = np.arange(100, dtype=np.int32).reshape(10, 10)
    assert np.array_equal(unpack_confusion(pack_confusion(matrix)), matrix)
    assert unpack_confusion(pack_confusion(None)) is None


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENAMETOOLONG, errno.EIO])
def test_refusals_of_the_system_are_told(tmp_path, number):
    with pytest.raises(SparsonaError) as caught, store.telling_disk_errors(tmp_path):
        raise OSError(number, os.strerror(number))
    assert os.strerror(number) in caught.value.what
    assert caught.value.mend


def test_a_locked_database_is_not_called_a_full_disk(tmp_path):
    with pytest.raises(SparsonaError) as caught, store.telling_disk_errors(tmp_path):
        raise sqlite3.OperationalError("database is locked")
    assert "full" not in str(caught.value)
