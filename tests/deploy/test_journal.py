"""The journal of a peer outlives a power failure: lines are on the disk before anybody hears of what they say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sparsona.deploy.journal import Entry, Greeting, Journal, Opening
from sparsona.engine.jobs import Outcome


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="descriptors have no paths here")
def test_a_line_is_on_the_disk_when_it_is_written(tmp_path, monkeypatch):
    synced = []

    def spy(number):
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        synced.append((path.name, len(path.read_bytes().splitlines()) if path.is_file() else None))

    monkeypatch.setattr(os, "fsync", spy)
    journal = Journal(tmp_path)
    journal.open(Opening("5eed", 0, Greeting("a", "b", (9, 0, 3), 1.0, {}, "c")))
    assert synced == [(journal.path.name, 1), (tmp_path.name, None)]  # a new file's entry in its folder, too
    del synced[:]
    for index in range(2):
        journal.append(Entry("turn", index, Outcome(0), trained=True))
    assert synced == [(journal.path.name, 2), (journal.path.name, 3)]
