"""A run's folder: made once, locked while used, written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading

import pytest
from made_facts import make_facts

from sparsona.core.errors import SparsonaError
from sparsona.runs.folder import Reached, RunFolder, explain_disk_errors, reached, read_json, write_atomically
from sparsona.runs.manifest import Manifest

FACTS = make_facts()


@pytest.fixture
def run(tmp_path):
    with RunFolder.create(tmp_path / "run", "{}\n", FACTS) as folder:
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
    assert RunFolder.open(run.path).facts.as_json() == run.facts.as_json() == FACTS.as_json()
    assert run.environment.keys() == {
        "sparsona",
        "python",
        "torch",
        "numpy",
        "machine",
        "processor",
        "system",
        "cores",
        "mkldnn",
        "deterministic",
        "matmul_precision",
        "default_dtype",
        "flushes_denormals",
        "gpu",
    }
    assert run.summary is None
    assert RunFolder.open(run.path).config == {}


@pytest.mark.parametrize("content", ["file.txt", "config.json", "comparison.json"])
def test_a_used_folder_is_refused_and_left_alone(tmp_path, content):
    (tmp_path / content).write_text("mine")
    with pytest.raises(SparsonaError, match=r"is already used\n  expected: .*\n  hint:     choose another --out"):
        RunFolder.create(tmp_path, "{}", FACTS)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(content, "mine")]


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SparsonaError, match="is already used"):
        RunFolder.create(tmp_path / "file", "{}", FACTS)
    with pytest.raises(SparsonaError, match="cannot be written: Not a directory"):
        RunFolder.create(tmp_path / "file" / "run", "{}", FACTS)


def test_an_empty_folder_and_one_whose_making_was_killed_will_do(tmp_path):
    (tmp_path / "about.json").write_text("{}")
    (tmp_path / ".config.json.part").write_text("{")
    (tmp_path / "lock").touch()
    with RunFolder.create(tmp_path, '{"a": 1}', FACTS) as folder:
        assert folder.config == {"a": 1}


def test_two_runs_never_share_a_folder(tmp_path):
    """Of many who want the same new folder at the same time, one gets it; the others are told."""
    path, go = tmp_path / "run", threading.Barrier(8)
    outcome: list[str] = []

    def make(number: int) -> None:
        go.wait()
        try:
            with RunFolder.create(path, json.dumps({"number": number}), FACTS) as folder:
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
        RunFolder.create(tmp_path / "run", "ours", FACTS)
    assert (tmp_path / "run" / "config.json").read_text() == "theirs"


def test_a_run_in_use_is_locked(run):
    with pytest.raises(SparsonaError, match=r"is in use by another process\n  expected: .*\n  hint:"):
        RunFolder.open(run.path).__enter__()


def test_the_lock_is_given_back(tmp_path):
    with RunFolder.create(tmp_path / "run", "{}", FACTS):
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
            RunFolder.create(tmp_path / "run", "{}", FACTS)
    with RunFolder.create(tmp_path / "run", "{}", FACTS):
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
    assert caught.value.hint


@pytest.mark.parametrize("name", ["about.json", "config.json", "environment.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff", None])
def test_damaged_files_of_a_run(run, name, content):
    path = run.path / name
    path.unlink() if content is None else path.write_bytes(content)

    def read() -> None:
        open_message = RunFolder.open(run.path)
        print(open_message.config, open_message.environment)

    words = r"'.*run(/[a-z]+\.json)?' (cannot be read|is missing|holds no|is not a run)"
    with pytest.raises(SparsonaError, match=words) as caught:
        read()
    assert caught.value.expected


def test_a_run_of_another_format(run):
    about = read_json(run.path / "about.json")
    (run.path / "about.json").write_text(json.dumps({**about, "format": 99}))
    with pytest.raises(SparsonaError, match="format 99\n  expected: format 2\n  hint:     use the version of sparsona"):
        RunFolder.open(run.path)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENAMETOOLONG, errno.EIO])
def test_refusals_of_the_system_are_told(tmp_path, number):
    with pytest.raises(SparsonaError) as caught, explain_disk_errors(tmp_path):
        raise OSError(number, os.strerror(number))
    assert os.strerror(number) in caught.value.what
    assert caught.value.hint


def test_how_far_a_run_got(run):
    assert reached(run.path) == Reached(0, False)
    (run.path / "checkpoint").mkdir()
    Manifest(3, True, 1.0, 1, {}).write(run.path)
    assert reached(run.path) == Reached(3, True)
    path = run.path / "checkpoint" / "manifest.json"
    path.write_text(path.read_text().replace('"completed": 3', '"completed": 5'))
    with pytest.raises(SparsonaError, match=r"manifest\.json' is damaged: its checksum does not match"):
        reached(run.path)


def test_a_summary_can_be_dropped(run):
    summary = {"method": "fedavg", "protocol": "", "rounds": 4, "accuracy": {"mean": None}, "bytes": {"total": 0}}
    run.write_summary(summary)
    assert run.summary == {**summary, "run": str(run.path)}
    run.drop("summary.json")
    assert run.summary is None
    run.drop("summary.json")
