"""A run is one sealed thing: what does not belong together is refused and named; a stranger's folder does no harm."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import sqlite3
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from older import unseal

import sparsona as sp
from sparsona.analysis.clients import client_effects
from sparsona.core.errors import SparsonaError
from sparsona.experiment.compare import resume_comparison
from sparsona.experiment.run import views_in
from sparsona.experiment.tune import resume_tuning
from sparsona.runs.failed import failed_run, read_failed, write_failed
from sparsona.runs.files import checksum
from sparsona.runs.folder import RunFolder
from sparsona.runs.listing import list_runs
from sparsona.runs.manifest import MANIFEST
from sparsona.runs.records import Bounds, EvaluationRow, Records, explain_record_errors
from sparsona.runs.verify import verify

OPTIONS = {"epochs": 1, "batch_size": 4, "per_round": 3, "executor": "serial", "device": "cpu", "progress": False}
SMALL = {**OPTIONS, "rounds": 2, "model": "mlp:hidden=0"}


@pytest.fixture(scope="module")
def federation() -> sp.Federation:
    x, y = np.random.default_rng(0).normal(size=(3, 12, 4)).astype("float32"), np.arange(12) % 2
    return sp.Federation.from_clients([(x[k, :8], y[:8], x[k, 8:], y[8:]) for k in range(3)])


def train(method: str, federation: sp.Federation, out: Path, **options: object) -> Path:
    return sp.train(method, federation, out=out, **{**SMALL, **options}).path


@pytest.fixture(scope="module")
def made(federation, tmp_path_factory) -> Path:
    """A finished run, a stopped one, and one of another seed."""
    folder = tmp_path_factory.mktemp("made")
    train("fedavg", federation, folder / "finished")
    train("fedavg", federation, folder / "stopped", max_seconds=1e-9)
    train("fedavg", federation, folder / "other", max_seconds=1e-9, seed=5)
    return folder


@pytest.fixture
def runs(made, tmp_path) -> Path:
    shutil.copytree(made, tmp_path / "made")
    return tmp_path / "made"


def edit_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def execute(path: Path, *texts: str) -> None:
    with contextlib.closing(sqlite3.connect(path / "records.sqlite")) as db:
        for text in texts:
            db.execute(text)
        db.commit()


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def exchange(path: Path, name: str) -> None:
    target, source = path / name, path.parent / "other" / name
    if source.is_dir():
        shutil.rmtree(target)
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)


def other_labels(path: Path) -> None:
    about = json.loads((path / "about.json").read_text())
    about["label_counts"][0][0] += 1
    edit_json(path / "about.json", **about)


def add_wal(path: Path) -> None:
    """Rows beside a file that stays as it was: SQLite reads them first."""
    copy = path.parent / "copy.sqlite"
    shutil.copy(path / "records.sqlite", copy)
    with contextlib.closing(sqlite3.connect(copy)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("UPDATE evaluations SET correct = 0")
        db.commit()
        shutil.copy(copy.with_name("copy.sqlite-wal"), path / "records.sqlite-wal")


def spoil_name(path: Path) -> None:
    data = bytearray((path / "records.sqlite").read_bytes())
    data[data.index(b"sqlite_autoindex_turns_1") + 13] ^= 0x80
    (path / "records.sqlite").write_bytes(data)


TAMPERED = {
    "lr": (lambda path: edit_json(path / "config.json", options={"lr": 0.3}), r"config\.json' was edited .*options"),
    "checkpoint": (lambda path: exchange(path, "checkpoint"), r"about\.json' differs since the run was started"),
    "records": (lambda path: exchange(path, "records.sqlite"), r"records\.sqlite' differs since round 1"),
    "turns": (lambda path: execute(path, "DELETE FROM turns WHERE round = 0"), "differs since round 1: the rows of"),
    "correct": (lambda path: execute(path, "UPDATE evaluations SET correct = 0"), "what was evaluated after round 1"),
    "more": (lambda path: execute(path, "INSERT INTO conditions (round) VALUES (0)"), "differs since round 1"),
    "labels": (other_labels, r"about\.json' differs since the run was started"),
    "environment": (lambda path: edit_json(path / "environment.json", torch="1"), r"environment\.json' differs"),
    "wal": (add_wal, "differs since round 1: what was evaluated after round 1"),
    "name": (spoil_name, "records in .* could not be used"),
    "no manifest": (lambda path: shutil.rmtree(path / "checkpoint"), r"manifest\.json' is missing"),
    "gone": (lambda path: (path / "records.sqlite").unlink(), r"records\.sqlite' is missing"),
}


NAMED = {"lr": "config.json", "gone": "records.sqlite", "name": "records.sqlite", "no manifest": str(MANIFEST)}
NAMED |= {"labels": "about.json", "environment": "environment.json", "wal": "records.sqlite"}


@pytest.mark.parametrize("case", TAMPERED)
@pytest.mark.parametrize("state", ["stopped", "finished"])
def test_what_does_not_belong_together_is_refused_and_named(runs, federation, case, state):
    tamper, words = TAMPERED[case]
    path = runs / state
    tamper(path)
    with pytest.raises(SparsonaError, match=words):
        sp.resume(path, federation, progress=False)
    with pytest.raises(SparsonaError, match=words):
        views_in(path)
    found = verify(path)
    assert not found.is_right
    if case in NAMED:
        assert [one.file for one in found.findings if one.state == "wrong"] == [NAMED[case]]


def test_rounds_that_were_added_are_no_edit(runs, federation):
    """Of a run whose process was killed while it was given more rounds the config is the old one, until they begin."""
    path = runs / "finished"
    sp.resume(path, federation, rounds=4, progress=False)
    played = (path / "config.json").read_text()
    for rounds in (2, 3):
        edit_json(path / "config.json", rounds=rounds)
        with pytest.raises(SparsonaError, match=r"config\.json' was edited after the run was made: rounds"):
            RunFolder.open(path)
        (path / "config.json").write_text(played)
    assert RunFolder.open(path).last_round == 4


def test_records_of_a_finished_run_are_compared_while_its_lock_is_held(runs):
    path = runs / "finished"
    with RunFolder.open(path):
        assert views_in(path)
        execute(path, "UPDATE evaluations SET correct = 0")
        with pytest.raises(SparsonaError, match="what was evaluated after round 1"):
            views_in(path)
        assert [one.file for one in verify(path).findings if one.state == "wrong"] == ["records.sqlite"]


def test_a_check_that_fails_is_a_finding(runs, monkeypatch):
    def fail(*_: object) -> None:
        raise IndexError("odd")

    monkeypatch.setattr(Records, "compare", fail)
    (found,) = [one for one in verify(runs / "finished").findings if one.state == "wrong"]
    assert (found.file, found.what) == ("records.sqlite", "it cannot be read: IndexError: odd")


def test_what_a_run_ends_with_is_sealed(runs, federation):
    path = runs / "finished"
    edit_json(path / "summary.json", rounds=9)
    with pytest.raises(SparsonaError, match=r"summary\.json' differs since the run was finished"):
        sp.load(path)
    model = path / "global.safetensors"
    flip(model, 8 * (model.stat().st_size - 2))
    with pytest.raises(SparsonaError, match=r"global\.safetensors' differs since the run was finished"):
        sp.train("fedavg", federation, out=runs / "next", warm_start=str(path), **SMALL)
    wrong = {one.file for one in verify(path).findings if one.state == "wrong"}
    assert wrong == {"summary.json", "global.safetensors"}


@pytest.mark.parametrize("name", ["summary.json", "global.safetensors"])
@pytest.mark.parametrize("is_missing", [False, True])
def test_a_result_that_is_written_again_is_said(runs, federation, say, capsys, name, is_missing):
    path = runs / "finished"
    file, before = path / name, (path / name).read_bytes()
    file.unlink()
    if not is_missing:
        file.write_bytes(before + b" ")
    said = say("verify", path)
    assert said.code == 1
    assert f"wrong: {name}: it {'is missing' if is_missing else 'differs since'}" in " ".join(said.out.split())
    assert "`sparsona resume` writes it again" in " ".join(said.out.split())
    capsys.readouterr()
    sp.resume(path, federation, progress=False)
    told = capsys.readouterr().err
    assert f"{name}' {'is missing' if is_missing else 'differs since'}" in told
    assert "the file is written again from its records and checkpoint" in told
    after = file.read_bytes()
    if name == "summary.json":  # it has the folder's path, which was another when the run was made
        after, before = ({**json.loads(data), "run": ""} for data in (after, before))
    assert after == before
    assert verify(path).is_right
    sp.resume(path, federation, progress=False)
    assert "written again" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["summary.json", "global.safetensors"])
def test_a_result_is_replaced_only_when_it_can_be(runs, federation, capsys, name):
    """Refused rounds, or data that is not given, leave everything as it was: what is wrong does not look right."""
    path = runs / "finished"
    (path / name).write_bytes((path / name).read_bytes() + b" ")
    before = {one: one.read_bytes() for one in path.rglob("*") if one.is_file() and one.name != "lock"}
    with pytest.raises(SparsonaError, match="the new total"):
        sp.resume(path, federation, progress=False, rounds=1)
    with pytest.raises(SparsonaError, match="federation"):
        sp.resume(path, progress=False)
    assert {one: one.read_bytes() for one in before} == before
    assert "written again" not in capsys.readouterr().err
    assert [one.file for one in verify(path).findings if one.state == "wrong"] == [name]
    sp.resume(path, federation, progress=False, rounds=3)
    assert f"{name}' differs since the run was finished" in capsys.readouterr().err
    assert verify(path).is_right


def test_a_process_that_is_killed_while_it_repairs_leaves_what_can_be_repaired(runs, federation, monkeypatch):
    path, write = runs / "finished", RunFolder.write

    class Killed(BaseException):
        pass

    def kill(folder: RunFolder, name: str, data: bytes) -> None:
        write(folder, name, data)
        if name == "summary.json":
            folder._is_stale = False  # as if it were never released
            raise Killed

    monkeypatch.setattr(RunFolder, "write", kill)
    with pytest.raises(Killed):
        sp.resume(path, federation, progress=False)
    monkeypatch.undo()
    assert verify(path).is_right


def test_a_finished_run_has_its_results(runs, federation, tmp_path):
    """A process that was killed at the end has written none: the manifest names none, and verify misses them."""
    path = runs / "finished"
    with RunFolder.open(path) as folder:
        folder.drop("summary.json", "global.safetensors")
    wrong = {one.file: one for one in verify(path).findings if one.state == "wrong"}
    assert set(wrong) == {"summary.json", "global.safetensors"}
    assert {one.what for one in wrong.values()} == {"it is missing"}
    assert all("`sparsona resume` writes it again" in one.hint for one in wrong.values())
    with RunFolder.open(path):
        assert verify(path).is_right  # a process that is about to write them
    sp.resume(path, federation, progress=False)
    assert verify(path).is_right
    alone = train("local", federation, tmp_path / "alone")
    assert not (alone / "global.safetensors").exists()
    assert verify(alone).is_right


@pytest.mark.parametrize("name", ["summary.json", "global.safetensors"])
@pytest.mark.parametrize("is_link", [False, True])
def test_what_resume_refuses_is_listed_once_with_its_own_hint(runs, federation, name, is_link):
    path = runs / "finished"
    (path / name).rename(runs / name)
    (path / name).symlink_to(runs / name) if is_link else (path / name).mkdir()
    (found,) = [one for one in verify(path).findings if one.file == name]
    assert f"is a {'link' if is_link else 'folder'}" in found.what
    assert "resume" not in found.hint
    assert "remove it" in found.hint
    with pytest.raises(SparsonaError, match=f"is a {'link' if is_link else 'folder'}"):
        sp.resume(path, federation, progress=False)


def test_a_run_that_is_played_meanwhile_is_checked_again(runs, federation, monkeypatch):
    """A checkpoint removes the files of the one before, and drafts come and go."""
    path, read, scan = runs / "stopped", sys.modules[verify.__module__].read_file, os.scandir

    def play_meanwhile(file: Path) -> bytes:
        if file.suffix == ".safetensors":
            monkeypatch.undo()
            sp.resume(path, federation, progress=False)
        return read(file)

    monkeypatch.setattr("sparsona.runs.verify.read_file", play_meanwhile)
    assert {one.state for one in verify(path).findings} == {"right"}

    class Gone:
        name = ".config.json.part"

        def stat(self, follow_symlinks: bool) -> os.stat_result:
            raise FileNotFoundError

    monkeypatch.setattr(os, "scandir", lambda place: contextlib.nullcontext([*scan(place), Gone()]))
    assert verify(path).is_right


@pytest.mark.parametrize("name", ["start.safetensors", "initial.safetensors", "federation.toml", "guests.json"])
def test_a_new_run_seals_nothing_that_it_did_not_write(federation, tmp_path, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("of somebody else")
    with pytest.raises(SparsonaError, match="is already used"):
        train("fedavg", federation, tmp_path / "run")


def test_a_right_run_and_the_command(runs, say, monkeypatch):
    monkeypatch.chdir(runs)
    for name in ("finished", "stopped"):
        assert sp.load(runs / name).verify().is_right
    assert {one.state for one in verify(runs / "finished").findings} == {"right"}
    said = say("verify", runs / "finished", runs / "stopped")
    assert said.code == 0, said.err
    assert "finished: right: all " in said.out
    assert "The run is finished." in said.out
    assert "The run is not finished: its checkpoint is that of round 1." in said.out
    assert "records.sqlite" not in said.out  # files that are right are listed on demand
    assert "records.sqlite" in say("verify", runs / "finished", "--all").out
    execute(runs / "stopped", "DELETE FROM turns WHERE client = 2")
    said = say("verify", runs / "finished", runs / "stopped", "--json")
    assert said.code == 1
    right, wrong = json.loads(said.out)
    assert (right["right"], wrong["right"]) == (True, False)
    (found,) = [one for one in wrong["findings"] if one["state"] == "wrong"]
    assert found["file"] == "records.sqlite"
    assert "differs since round 1" in found["what"]
    said = say("verify", runs / "stopped")
    assert "stopped: WRONG: 1 of " in said.out
    assert "wrong: records.sqlite: it differs since round 1" in " ".join(said.out.split())
    assert "hint: restore " in said.out
    say("report", runs / "stopped").refused("records.sqlite' differs since round 1")


def test_limits_may_be_edited_and_that_is_said(runs, federation, capsys):
    path = runs / "stopped"
    edit_json(path / "config.json", max_seconds=100.0)
    found = verify(path)
    assert found.is_right
    (config,) = [one for one in found.findings if one.file == "config.json"]
    assert config.what == "edited limits: max_seconds; limits may be edited"
    assert sp.resume(path, federation, progress=False).summary["rounds"] == 2
    assert "was edited: max_seconds, which may be" in capsys.readouterr().err
    assert verify(path).is_right


def test_a_run_of_an_older_version_loads_and_is_sealed_when_it_goes_on(runs, federation, capsys):
    path = runs / "stopped"
    unseal(path)
    assert sp.load(path).summary["rounds"] == 1
    found = verify(path)
    assert found.is_right
    assert {one.file for one in found.findings if one.state == "unknown"} >= {str(MANIFEST), "records.sqlite"}
    assert sp.resume(path, federation, progress=False).summary["rounds"] == 2
    assert "made by a version that did not seal runs" in capsys.readouterr().err
    assert {one.state for one in verify(path).findings} == {"right"}


def test_a_viewer_may_write_the_file_anew(runs):
    """Its bytes are others then, its rows are not."""
    execute(runs / "finished", "PRAGMA journal_mode = WAL")
    with contextlib.closing(sqlite3.connect(runs / "finished" / "records.sqlite")) as db:
        db.execute("VACUUM")
    assert views_in(runs / "finished")
    assert verify(runs / "finished").is_right


# Folders that come from somebody else.


def victim(place: Path) -> Path:
    (place / "victim").mkdir()
    for name in ("precious", "client-0.1.safetensors"):
        (place / "victim" / name).write_text("mine")
    return place / "victim"


@pytest.mark.parametrize("name", ["checkpoint", "lock", "records.sqlite", "about.json", "summary.json", "config.json"])
def test_links_are_not_followed(runs, federation, name):
    path, target = runs / "stopped", victim(runs)
    there = path / name
    shutil.rmtree(there) if there.is_dir() else there.unlink()
    there.symlink_to(target if name == "checkpoint" else target / "precious")
    with pytest.raises(SparsonaError, match=f"{name}' is a link"):
        sp.resume(path, federation, progress=False)
    assert not verify(path).is_right
    assert sorted(one.read_text() for one in target.iterdir()) == ["mine", "mine"]


def test_pipes_and_folders_are_not_read(runs):
    (runs / "stopped" / "summary.json").unlink()
    os.mkfifo(runs / "stopped" / "summary.json")
    with pytest.raises(SparsonaError, match=r"summary\.json' is a pipe"):
        sp.load(runs / "stopped")
    (runs / "finished" / "environment.json").unlink()
    (runs / "finished" / "environment.json").mkdir()
    with pytest.raises(SparsonaError, match=r"environment\.json' is a folder"):
        sp.load(runs / "finished")


def test_only_what_a_checkpoint_made_is_removed(runs, federation):
    """Drafts that are links are not written through; folders and files of others stay, and stop nothing."""
    path, target = runs / "stopped", victim(runs)
    folder = path / "checkpoint"
    for place in (path / ".summary.json.part", folder / ".manifest.json.part"):
        place.symlink_to(target / "precious")
    (folder / ".ipynb_checkpoints").mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "client-0.99.safetensors").symlink_to(target / "precious")
    (folder / "client-1.99.safetensors").write_text("left by a killed process")
    assert sp.resume(path, federation, progress=False).summary["rounds"] == 2
    assert sorted(one.read_text() for one in target.iterdir()) == ["mine", "mine"]
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / ".ipynb_checkpoints").is_dir()
    assert not (folder / "client-1.99.safetensors").exists()
    assert (folder / "client-0.99.safetensors").is_symlink()


@pytest.mark.parametrize("name", ["../../x", "/tmp/x", "", "..", "a/b", 3, "a\nb"])
def test_runs_of_a_comparison_are_inside_it(tmp_path, federation, name):
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "comparison.json").write_text(json.dumps([{"folder": name, "config": {}}]))
    for act in (views_in, lambda path: resume_comparison(path, federation, progress=False)):
        with pytest.raises(SparsonaError, match="is no folder in that of the comparison"):
            act(tmp_path / "both")


def test_a_comparison_is_bound_to_its_runs(tmp_path, federation):
    both = sp.compare(["local", "fedavg"], federation, out=tmp_path / "both", **{**SMALL, "rounds": 1})
    assert both.verify().is_right
    path = tmp_path / "both"
    text = (path / "comparison.json").read_text()
    (path / "comparison.json").write_text(text.replace('"seed": 0', '"seed": 1', 1))
    with pytest.raises(SparsonaError, match="'local-seed0' was edited since the comparison was started"):
        resume_comparison(path, federation, progress=False)
    assert not verify(path).is_right
    (path / "comparison.json").write_text(text)
    shutil.rmtree(path / "local-seed0")
    train("local", federation, path / "local-seed0", rounds=1, seed=7)
    for act in (views_in, lambda path: resume_comparison(path, federation, progress=False)):
        with pytest.raises(
            SparsonaError, match="local-seed0' is not the run that its comparison was started with: seed"
        ):
            act(path)
    assert not verify(path).is_right


def test_the_note_of_failed_runs(tmp_path, federation):
    """It names runs of its comparison, has a checksum, and what it says is listed."""
    path = tmp_path / "both"
    sp.compare(["local", "fedavg"], federation, out=path, **{**SMALL, "max_seconds": 1e-9})
    note = failed_run(path / "local-seed0", "Local", 0, SparsonaError("no data"))
    write_failed(path, {note.folder: note})
    assert read_failed(path) == {note.folder: note}
    states = {one.file: one.state for one in verify(path).findings}
    assert states["failed.json"] == "right"
    assert {row["run"]: row["state"] for row in list_runs(tmp_path)} == {
        "both/local-seed0": "failed: no data",
        "both/fedavg-seed0": "unfinished: resume it",
    }
    text = (path / "failed.json").read_text()
    (path / "failed.json").write_text(json.dumps(json.loads(text)["failed"]))  # as older versions wrote it
    assert read_failed(path) == {note.folder: note}
    assert {one.file: one.state for one in verify(path).findings}["failed.json"] == "unknown"
    write_failed(path, {"x": replace(note, folder="../x")})
    strange = (path / "failed.json").read_text()
    for odd, words in ((text.replace("no data", "no time"), "checksum"), (strange, "no run of the comparison")):
        (path / "failed.json").write_text(odd)
        with pytest.raises(SparsonaError, match=words):
            views_in(path)
        assert [one.file for one in verify(path).findings if one.state == "wrong"] == ["failed.json"]
    assert len(list_runs(tmp_path)) == 2


@pytest.mark.slow
def test_the_refit_of_a_search_is_no_link(tmp_path, federation):
    options = {key: value for key, value in SMALL.items() if key not in ("progress", "rounds")}
    path = tmp_path / "search"
    sp.tune(["local"], federation, out=path, trials=1, rounds=1, refit_seeds=1, **options)
    (path / "refit").rename(tmp_path / "elsewhere")
    (path / "refit").symlink_to(tmp_path / "elsewhere")
    (found,) = [one for one in verify(path).findings if one.state == "wrong"]
    assert found.file == "refit"
    assert "is a link" in found.what
    with pytest.raises(SparsonaError, match="refit' is a link"):
        resume_tuning(path, federation)


# Records are data.


@pytest.mark.parametrize(
    "text",
    [
        "CREATE TRIGGER more AFTER INSERT ON rounds BEGIN UPDATE rounds SET bytes_up = 0; END",
        "CREATE VIEW conditions2 AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n",
        "CREATE TABLE other (a INTEGER)",
        "CREATE INDEX fast ON turns (loss)",
        "ALTER TABLE turns ADD COLUMN more INTEGER AS (abs(-1))",
    ],
)
def test_records_hold_our_tables_and_nothing_else(runs, federation, text):
    path = runs / "stopped"
    unseal(path)  # as a stranger would
    execute(path, text)
    for act in (views_in, lambda path: sp.resume(path, federation, progress=False)):
        with pytest.raises(SparsonaError, match="which is not one of a run's tables"):
            act(path)


def test_a_view_in_place_of_a_table_hangs_nobody(runs):
    path = runs / "stopped"
    unseal(path)
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS round FROM n"
    execute(path, "DROP TABLE rounds", f"CREATE VIEW rounds AS {endless}")
    with pytest.raises(SparsonaError, match="holds view 'rounds'"):
        views_in(path)


def test_a_query_of_a_forged_file_ends(tmp_path, monkeypatch):
    records = Records(tmp_path / "records.sqlite")
    records.add([EvaluationRow(1, 0, "received", 1, 2, 0.5)])
    records.close()
    monkeypatch.setattr(Records, "_count_steps", lambda self: 1)
    monkeypatch.setattr("sparsona.runs.records._STEPS", 1)
    with pytest.raises(SparsonaError, match="took longer than any file of this size needs"):
        records.evaluations()


@pytest.mark.parametrize(
    "blob", [zlib.compress(bytes(5000)), zlib.compress(bytes(400))[:-1], b"none", zlib.compress(bytes(12))]
)
def test_blobs_are_no_larger_than_a_run_can_have_them(tmp_path, blob):
    records = Records(tmp_path / "records.sqlite", Bounds(confusion=400))
    records.add([EvaluationRow(1, 0, "received", 1, 2, 0.5, blob)])
    records.close()
    with pytest.raises(SparsonaError, match="the records are damaged"):
        records.confusions(1, "received")


@pytest.mark.parametrize(
    "text",
    [
        "UPDATE turns SET client = client + 99",
        "UPDATE rounds SET bytes_up = 'a'",
        "UPDATE evaluations SET point = x'00'",
    ],
)
def test_odd_values_are_refused(runs, text):
    path = runs / "stopped"
    unseal(path)
    execute(path, text)
    with pytest.raises(SparsonaError, match="that no run records"):
        views_in(path)


def edit_summary(block: str, **values: object) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        summary = json.loads((path / "summary.json").read_text())
        edit_json(path / "summary.json", **{block: {**summary[block], **values}})

    return edit


def without(*names: str) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        found = json.loads((path / "summary.json").read_text())
        block = found if len(names) == 1 else found[names[0]]
        del block[names[-1]]
        (path / "summary.json").write_text(json.dumps(found))

    return edit


def edit_about(**values: object) -> Callable[[Path], None]:
    return lambda path: edit_json(path / "about.json", **values)


def set_confusion(*matrices: object) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        with contextlib.closing(sqlite3.connect(path / "records.sqlite")) as db:
            for client, matrix in enumerate(matrices):
                blob = zlib.compress(np.asarray(matrix, "<i4").tobytes())
                db.execute("UPDATE evaluations SET confusion = ? WHERE client = ?", (blob, client))
            db.commit()

    return edit


ODD = {
    "accuracy": edit_summary("accuracy", mean="high"),
    "steps": edit_summary("steps", total="many"),
    "bytes": edit_summary("bytes", total=10**400),
    "no protocol": without("protocol"),
    "no accuracy": without("accuracy"),
    "no total": without("bytes", "total"),
    "classes": lambda path: edit_json(path / "summary.json", classes={"unseen": 3}),
    "parameters": edit_about(num_parameters=None),
    "float labels": edit_about(label_counts=1.5),
    "large labels": edit_about(label_counts=[[1e39, 1]] * 3),
    "few labels": edit_about(label_counts=[[1, 1]]),
    "flat sizes": edit_about(sizes=[1, 2, 3]),
    "title": edit_about(title=3),
    "novel": edit_about(novel=[7]),
    "seconds": lambda path: execute(path, "UPDATE rounds SET seconds = 9e999"),
    "empty confusion": set_confusion([]),
    "two confusions": set_confusion([1], [[1, 2], [3, 4]]),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_values_of_an_unsealed_run_are_refused(runs, say, case):
    """One such folder does not hide the others from a list."""
    path = runs / "finished"
    unseal(path)
    ODD[case](path)
    with pytest.raises(SparsonaError, match=r"damaged|cannot be read|that no run records"):
        views_in(path)
    with contextlib.suppress(SparsonaError):  # where it is not of the records, whose rows are not needed for this
        repr(sp.load(path))
    say("report", path, "--out", path / "page.html").refused("")
    assert {row["run"] for row in list_runs(runs)} == {"finished", "stopped", "other"}


def test_what_is_unpacked_is_bounded_whatever_the_facts_say(runs):
    path = runs / "finished"
    unseal(path)
    about = json.loads((path / "about.json").read_text())
    assert RunFolder.open(path).records.bounds.confusion == 16
    wide = {**about["examples"], "num_outputs": 40_000}
    edit_json(path / "about.json", examples=wide)
    with pytest.raises(SparsonaError, match="label counts of 2 classes, and 40000 outputs"):
        RunFolder.open(path)
    edit_json(path / "about.json", label_counts=None, num_parameters=10**15)
    bounds = RunFolder.open(path).records.bounds
    assert (bounds.confusion, bounds.numbers) == (1 << 24, 1 << 28)


def test_a_journal_that_names_another_file_is_not_used(runs):
    path = runs / "stopped" / "records.sqlite-journal"
    path.write_bytes(bytes(64) + bytes.fromhex("d9d505f920a163d7"))
    with pytest.raises(SparsonaError, match="names another file"):
        views_in(runs / "stopped")


def test_a_program_that_holds_the_records_is_named(tmp_path):
    with pytest.raises(SparsonaError, match="another program has them open") as caught, explain_record_errors(tmp_path):
        raise sqlite3.OperationalError("database is locked")
    assert caught.value.hint.startswith("close it, then `sparsona resume`")


# The manifest.


@pytest.mark.parametrize(
    "values",
    [
        {"files": {"client/x": "client-x.1.safetensors 00000000"}},
        {"files": {"client/99": "client-99.1.safetensors 00000000"}},
        {"files": {"client/0": "../../etc/passwd 00000000"}},
        {"files": []},
        {"losses": {"a": 1}},
        {"completed": "1"},
        {"completed": -1},
        {"number": None},
        {"sealed": []},
        {"sealed": {"files": {}, "limits": {}, "records": {"rounds": {}, "evaluations": {}, "kept": 3, "file": 1}}},
    ],
)
def test_odd_manifests_with_a_good_checksum(runs, federation, values):
    path = runs / "stopped"
    found = json.loads((path / MANIFEST).read_text()) | values
    del found["checksum"]
    if "sealed" not in values:
        del found["sealed"]  # as a stranger would
    (path / MANIFEST).write_text(json.dumps(found | {"checksum": checksum(found)}))
    with pytest.raises(SparsonaError, match="checkpoint"):
        sp.resume(path, federation, progress=False)


# Figures of one round.


def test_figures_of_different_rounds_are_not_compared(tmp_path, federation):
    """Where the shared model was last evaluated in another round than the headline's, both would be compared."""
    path = train("dispfl", federation, tmp_path / "run", points=["consensus"], graph="full", density=0.9)
    assert client_effects(RunFolder.open(path)).changes
    unseal(path)
    execute(path, "DELETE FROM evaluations WHERE completed = 2 AND point = 'consensus'")
    with pytest.raises(SparsonaError, match="at consensus after round 1"):
        client_effects(RunFolder.open(path))
    assert views_in(path)[0].effects is None


# Flipped bits.


def results(path: Path, federation: sp.Federation) -> list[object]:
    """What a person would see of a run: its report's numbers, and where it goes on to."""
    (view,) = views_in(path)
    view.summary.pop("seconds"), view.summary.pop("run")
    run = sp.resume(path, federation, progress=False)
    turns = run._folder.records.turns()
    weights = [value.tolist() for value in run.personal_model(0).state_dict().values()]
    summary = {key: value for key, value in run.summary.items() if key not in ("seconds", "run")}
    return [
        view.summary,
        view.curves,
        view.train_loss,
        view.correct.tolist(),
        view.environment,
        summary,
        turns,
        weights,
    ]


def silent_flips(made: Path, federation: sp.Federation, place: Path, count: int) -> list[str]:
    """Flips after which nothing is said and something is different."""
    chance, found = random.Random(count), []
    references = {}
    for name in ("finished", "stopped"):
        shutil.copytree(made / name, place / "copy")
        references[name] = results(place / "copy", federation)
        shutil.rmtree(place / "copy")
    files = [file for name in references for file in sorted((made / name).rglob("*")) if file.is_file()]
    files = [file for file in files if file.stat().st_size]
    for number in range(count):
        file = files[number % len(files)]
        bit = chance.randrange(8 * file.stat().st_size)
        name = file.relative_to(made).parts[0]
        shutil.copytree(made / name, place / "copy")
        flip(place / "copy" / file.relative_to(made / name), bit)
        with contextlib.suppress(SparsonaError):
            if verify(place / "copy").is_right and results(place / "copy", federation) != references[name]:
                found.append(f"{file.relative_to(made)} bit {bit}")
        shutil.rmtree(place / "copy")
    return found


def test_no_flipped_bit_is_silent(made, federation, tmp_path):
    assert silent_flips(made, federation, tmp_path, 60) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_none_of_a_thousand_flipped_bits_is_silent(made, federation, tmp_path):
    assert silent_flips(made, federation, tmp_path, 1000) == []


def test_a_report_of_a_damaged_run_refuses_without_being_asked_to_verify(made, federation, tmp_path):
    """Every byte of the records, and of what describes the run, is covered when it is read."""
    chance = random.Random(1)
    for name in ("records.sqlite", "about.json", "summary.json", "environment.json"):
        for _ in range(6):
            shutil.copytree(made / "finished", tmp_path / "copy")
            file = tmp_path / "copy" / name
            flip(file, chance.randrange(8 * file.stat().st_size))
            try:
                (view,) = views_in(tmp_path / "copy")
            except SparsonaError:
                pass
            else:  # in a page of the database that holds no row
                assert name == "records.sqlite"
                assert view.curves == views_in(made / "finished")[0].curves
            shutil.rmtree(tmp_path / "copy")
