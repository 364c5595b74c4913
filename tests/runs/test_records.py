"""Records: all rows of a transaction or none, read by name, and nothing left behind by whoever reads."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from sparsona.core.errors import SparsonaError
from sparsona.runs.records import (
    ClassesRow,
    EvaluationRow,
    Kept,
    Records,
    RoundRow,
    Totals,
    TraitsRow,
    TurnRow,
    explain_record_errors,
    pack_confusion,
    unpack_confusion,
)

ROW = RoundRow(
    round=0,
    lr_scale=1.0,
    num_trained=2,
    num_aggregated=2,
    num_dropped=0,
    loss=0.5,
    bytes_up=10,
    bytes_down=20,
    paper_up=8,
    paper_down=16,
    train_flops=100,
    search_flops=10,
    seconds=0.1,
)


def round_at(index: int) -> RoundRow:
    return replace(ROW, round=index)


def turn_at(index: int, client: int) -> TurnRow:
    return TurnRow(index, client, 0.5, 4, 1, True, False, 10, 20, 8, 16, 100, 10)


@pytest.fixture
def records(tmp_path):
    found = Records(tmp_path / "records.sqlite")
    yield found
    found.close()


def test_rows_are_written_together(records):
    with contextlib.suppress(KeyboardInterrupt), records.writing():
        records.add([ROW])
        raise KeyboardInterrupt
    assert records.rounds() == []
    with records.writing():
        records.add([ROW])
        records.add([turn_at(0, 1), turn_at(0, 0)])
    assert records.rounds() == [ROW]
    assert [turn.client for turn in records.turns(0)] == [0, 1]


def test_a_transaction_inside_another_is_part_of_it(records):
    with contextlib.suppress(KeyboardInterrupt), records.writing():
        with records.writing():
            records.add([ROW])
        raise KeyboardInterrupt
    assert records.rounds() == []


def test_rows_that_cannot_be_committed_are_taken_back(records):
    """Else the next statement would meet a transaction that is still open, and its message hide the true one."""
    db = records.writer

    class Full:
        in_transaction = False
        executemany = db.executemany

        def execute(self, query, *values):
            if query == "COMMIT":
                raise sqlite3.OperationalError("database or disk is full")
            return db.execute(query, *values)

    records._writer = Full()
    with pytest.raises(SparsonaError, match="the disk is full"), records.writing():
        db.execute("INSERT INTO rounds (round) VALUES (0)")
    records._writer = db
    assert not db.in_transaction
    assert records.rounds() == []


def test_rewinding_drops_what_the_checkpoint_does_not_know(records):
    points = ("received", "trained", "consensus", "tuned", "novel", "novel_tuned")
    records.add(map(round_at, range(5)))
    records.add(turn_at(index, client) for index in range(5) for client in (0, 1))
    records.add(EvaluationRow(index + 1, 0, point, 1, 2, 0.5) for index in range(5) for point in points)
    records.add(ClassesRow(index + 1, 0, point, 1, 2, 0, 0) for index in range(5) for point in points)
    records.add(TraitsRow(index + 1, "mask", 0.1, 0.2, b"", b"") for index in range(5))
    records.rewind(3, Kept(("received", "trained", "consensus"), True, True))
    assert [row.round for row in records.rounds()] == [0, 1, 2]
    assert len(records.turns()) == 6
    assert [row.completed for row in records.traits()] == [1, 2, 3]
    # What is evaluated once, after the last round, belongs to a checkpoint that has not been written yet.
    assert [row.point for row in records.evaluations(3)] == ["consensus", "received", "trained"]
    assert records.last_evaluated() == 3
    assert records.classes(2, "tuned") == [ClassesRow(2, 0, "tuned", 1, 2, 0, 0)]
    assert (len(records.classes(3, "received")), records.classes(3, "tuned"), records.classes(4, "received")) == (
        1,
        [],
        [],
    )
    # Where nothing would have been evaluated without the stop, nothing stays.
    records.rewind(2, Kept((), True, False))
    assert records.last_evaluated() == 1
    assert [row.completed for row in records.traits()] == [1]


def test_records_that_lack_rounds_are_refused(records):
    records.add(map(round_at, (0, 2)))
    records.check(1)
    with pytest.raises(SparsonaError, match=r"has 2 of the 3 rounds its checkpoint has\n  expected: .*\n  hint:"):
        records.check(3)


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
def test_damaged_records_are_refused(records, spoil):
    records.add(map(round_at, range(400)))
    records.close()
    spoil(records.path)
    with pytest.raises(SparsonaError, match=r"records\.sqlite") as caught:
        records.check(400)
    assert caught.value.expected
    assert "restore" in caught.value.hint


def test_reading_writes_nothing(records):
    """Anybody may look at a run at any time, also one that has not begun, and leaves no trace."""
    reader = Records(records.path)
    assert reader.rounds() == []
    assert reader.totals() == Totals(*[None] * 7)
    assert reader.last_evaluated() is None
    assert not records.exist
    records.add([ROW])
    assert reader.rounds() == [ROW]
    records.close()
    assert [path.name for path in records.path.parent.iterdir()] == ["records.sqlite"]  # it can be copied alone
    assert reader.rounds() == [ROW]
    assert [path.name for path in records.path.parent.iterdir()] == ["records.sqlite"]


def test_one_connection_reads_many_times(records, monkeypatch):
    records.add([ROW])
    records.close()
    connect, open_message = sqlite3.connect, []
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **how: open_message.append(args) or connect(*args, **how))
    with records.reading():
        assert records.rounds() == [ROW]
        with records.reading():
            assert records.points() == []
        assert records.totals().bytes_down == 20
    assert len(open_message) == 1
    assert records.rounds() == [ROW]  # it was closed, and opens again
    assert len(open_message) == 2


def test_records_made_and_not_filled_are_empty(records):
    records.path.touch()  # killed while the file was made
    assert records.rounds() == []


def test_flushed_records_do_not_need_their_journal(records, tmp_path):
    records.add([ROW])
    records.flush()
    shutil.copy(records.path, tmp_path / "alone.sqlite")
    assert Records(tmp_path / "alone.sqlite").rounds() == [ROW]


KILLED = """
import os, signal, sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA cache_size = 1")  # pages go to the file before the end of the transaction
db.execute("BEGIN IMMEDIATE")
db.execute("UPDATE traits SET pairs = randomblob(20000)")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def interrupted(records):
    """Records whose writer was killed within a transaction, while the file was not in WAL mode."""
    records.add([ROW])
    records.add(TraitsRow(number, "mask", 0.5, 0.1, b"", bytes(20_000)) for number in range(20))
    records.close()
    subprocess.run([sys.executable, "-S", "-c", KILLED, str(records.path)], check=False)
    journal = records.path.with_name(f"{records.path.name}-journal")
    assert journal.stat().st_size > 20_000
    return records, journal


def test_what_a_killed_writer_had_begun_is_taken_back_by_who_reads(interrupted):
    records, journal = interrupted
    assert records.rounds() == [ROW]
    assert not journal.exists()


def test_a_killed_writer_where_nothing_can_be_written_is_named(interrupted, monkeypatch):
    records, journal = interrupted
    connect = records._connect
    monkeypatch.setattr(records, "_connect", lambda mode="rwc": connect("ro"))
    with pytest.raises(SparsonaError, match="their writer was killed, and left a journal") as caught:
        records.rounds()
    assert caught.value.hint.startswith("copy the folder")
    assert journal.exists()


def test_curves_and_last_evaluations(records):
    rows = [(1, 0, 1, 4, 1.0), (1, 1, 3, 4, 3.0), (2, 0, 4, 4, 0.5)]
    records.add(EvaluationRow(completed, client, "global", *rest) for completed, client, *rest in rows)
    assert [(one.completed, one.mean) for one in records.accuracy_curve("global")] == [(1, 0.5), (2, 1.0)]
    assert [(one.completed, one.mean) for one in records.loss_curve("global")] == [(1, 2.0), (2, 0.5)]
    assert records.points() == ["global"]
    assert records.last_evaluated("global") == 2
    assert records.last_evaluated("received") is None


def test_loads_of_a_server_and_of_peers(records):
    records.add([ROW, replace(ROW, round=1, bytes_up=50, bytes_down=5)])
    records.add([turn_at(0, 0), replace(turn_at(0, 1), bytes_up=30), replace(turn_at(1, 1), bytes_down=90)])
    server, peer = records.server_load(), records.peer_load()
    assert (server.total, server.most_in, server.most_out) == (85, 50, 20)
    assert (peer.total, peer.most_in, peer.most_out) == (30 + 20 + 10 + 90, 90, 30)
    assert records.mean_upload() == 8


def test_confusion_survives(records):
    matrix = np.arange(100, dtype=np.int32).reshape(10, 10)
    assert np.array_equal(unpack_confusion(pack_confusion(matrix)), matrix)
    assert pack_confusion(None) is None
    records.add([EvaluationRow(1, 3, "received", 1, 2, 0.5, pack_confusion(matrix))])
    records.add([EvaluationRow(1, 4, "received", 1, 2, 0.5)])
    found = records.confusions(1, "received")
    assert list(found) == [3]
    assert np.array_equal(found[3], matrix)


def test_a_locked_database_is_not_called_a_full_disk(tmp_path):
    with pytest.raises(SparsonaError) as caught, explain_record_errors(tmp_path):
        raise sqlite3.OperationalError("database is locked")
    assert "full" not in str(caught.value)
