"""Checkpoints: the manifest is the truth, only what changed is written, and damage is told."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from torch import nn

from sparsona.core.errors import SparsonaError
from sparsona.core.tree import leaves
from sparsona.data.federation import Federation
from sparsona.engine.population import Population
from sparsona.engine.rounds import simulate
from sparsona.executors.serial import Serial
from sparsona.experiment import build
from sparsona.runs.checkpoint import Checkpoints, Progress

CLIENTS = 6


@pytest.fixture(scope="module")
def federation() -> Federation:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(CLIENTS, 24, 5, generator=generator), torch.arange(24) % 3
    return Federation.from_clients([(x[k, :18], y[:18], x[k, 18:], y[18:]) for k in range(CLIENTS)])


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@pytest.fixture
def star(federation):
    options = {"rounds": 4, "per_round": 2, "epochs": 1, "executor": "serial", "tune_epochs": 1}
    context = build.make_context(build.make_config("fedspa", options, federation, net), federation, net)
    return simulate(context, Serial(context))


@pytest.fixture
def played(star) -> list[tuple[Population, set[int]]]:
    """The population after each of three rounds, and who took part."""
    found, population = [], star.start()
    for index in range(3):
        population, record = star.play(population, index)
        found.append((population, {turn.client for turn in record.turns}))
    return found


def files(folder) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (folder / "checkpoint").iterdir()}


def manifest(folder) -> dict:
    return json.loads((folder / "checkpoint" / "manifest.json").read_text())


def bits(value) -> dict[str, bytes]:
    return {path: tensor.contiguous().numpy().tobytes() for path, tensor in leaves(value)}


def test_comes_back_bit_for_bit(star, played, tmp_path):
    population = played[-1][0]
    _, tuned = star.finish(population)
    Checkpoints(tmp_path, star.context.method).save(Progress(3, 12.5, population, tuned, True), star.start())
    found = Checkpoints(tmp_path, star.context.method).load(star, star.start())
    assert (found.completed, found.seconds, found.finished) == (3, 12.5, True)
    assert bits((found.population.server, found.population.states)) == bits((population.server, population.states))
    assert found.population.states.keys() == population.states.keys()
    assert bits(found.tuned) == bits(tuned)
    assert found.tuned.keys() == set(range(CLIENTS))


def test_no_checkpoint_yet(star, tmp_path):
    assert Checkpoints(tmp_path, star.context.method).load(star, star.start()) is None


def test_only_clients_that_changed_are_written(star, played, tmp_path):
    checkpoints, initial = Checkpoints(tmp_path, star.context.method), star.start()
    (_, trained), (second, trained_too), (third, trained_then) = played
    trained = trained | trained_too
    checkpoints.save(Progress(2, 1.0, second, {}), initial)
    owners = set(manifest(tmp_path)["files"])
    assert owners == {"server", *(f"client/{k}" for k in trained), *(f"server/{k}" for k in trained)}
    before, entries = files(tmp_path), manifest(tmp_path)["files"]
    assert trained - trained_then  # else this would prove nothing
    checkpoints.save(Progress(3, 2.0, third, {}), initial)
    after, entries_then = files(tmp_path), manifest(tmp_path)["files"]
    for client in trained - trained_then:
        for owner in (f"client/{client}", f"server/{client}"):
            assert entries_then[owner] == entries[owner]
            name = entries[owner].split()[0]
            assert after[name] == before[name]
    for client in trained_then:
        assert entries_then[f"client/{client}"] != entries.get(f"client/{client}")
    # And what is no longer named is gone.
    assert set(after) == {"manifest.json", *(entry.split()[0] for entry in entries_then.values())}


def test_saving_the_same_again_writes_the_manifest_alone(star, played, tmp_path):
    checkpoints, initial = Checkpoints(tmp_path, star.context.method), star.start()
    checkpoints.save(Progress(3, 1.0, played[-1][0], {}), initial)
    before = files(tmp_path)
    checkpoints.save(Progress(3, 2.0, played[-1][0], {}), initial)
    again = Checkpoints(tmp_path, star.context.method)
    again.save(again.load(star, initial), initial)  # a resumed run rewrites nothing either
    after = files(tmp_path)
    assert after.pop("manifest.json") != before.pop("manifest.json")
    assert after == before


def test_a_resumed_run_writes_only_what_changes(star, played, tmp_path):
    """A client that was loaded and not trained since keeps its file."""
    initial = star.start()
    Checkpoints(tmp_path, star.context.method).save(Progress(2, 1.0, played[1][0], {}), initial)
    before = manifest(tmp_path)["files"]
    resumed = Checkpoints(tmp_path, star.context.method)
    progress = resumed.load(star, initial)
    population, record = star.play(progress.population, 2)
    trained = {turn.client for turn in record.turns}
    resumed.save(Progress(3, 1.0, population, {}), initial)
    after = manifest(tmp_path)["files"]
    changed = {owner for owner in after if after[owner] != before.get(owner)}
    assert changed == {"server", *(f"client/{k}" for k in trained), *(f"server/{k}" for k in trained)}
    assert {f"client/{k}" for k in played[0][1] | played[1][1]} - changed


def test_a_save_that_fails_leaves_the_last_one_whole(star, played, tmp_path, monkeypatch):
    checkpoints, initial = Checkpoints(tmp_path, star.context.method), star.start()
    checkpoints.save(Progress(1, 1.0, played[0][0], {}), initial)
    replace, calls = os.replace, []

    def fill_up(*paths):
        calls.append(paths)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return replace(*paths)

    monkeypatch.setattr(os, "replace", fill_up)
    with pytest.raises(SparsonaError, match="the disk is full"):
        checkpoints.save(Progress(2, 2.0, played[1][0], {}), initial)
    found = Checkpoints(tmp_path, star.context.method).load(star, initial)
    assert found.completed == 1
    assert bits(found.population.server) == bits(played[0][0].server)
    # The same object goes on as if nothing had happened.
    checkpoints.save(Progress(2, 2.0, played[1][0], {}), initial)
    found = Checkpoints(tmp_path, star.context.method).load(star, initial)
    assert found.completed == 2
    assert bits((found.population.server, found.population.states)) == bits((played[1][0].server, played[1][0].states))
    assert set(files(tmp_path)) == {
        "manifest.json",
        *(entry.split()[0] for entry in manifest(tmp_path)["files"].values()),
    }


def any_file(folder, owner: str = "server"):
    return folder / "checkpoint" / manifest(folder)["files"][owner].split()[0]


@pytest.fixture
def saved(star, played, tmp_path):
    Checkpoints(tmp_path, star.context.method).save(Progress(3, 1.0, played[-1][0], {}), star.start())
    return tmp_path


@pytest.mark.parametrize("kind", ["server", "client/", "server/"])
@pytest.mark.parametrize("spoil", ["missing", "empty", "truncated", "flipped", "longer", "swapped"])
def test_a_damaged_file_is_told(star, saved, kind, spoil):
    owner = next(
        owner for owner in manifest(saved)["files"] if owner == kind or (kind[-1] == "/" and owner.startswith(kind))
    )
    path = any_file(saved, owner)
    data = path.read_bytes()
    if spoil == "missing":
        path.unlink()
    elif spoil == "swapped":  # whole, but somebody else's
        shutil.copy(
            any_file(saved, "server" if owner != "server" else "client/" + str(min(played_clients(saved)))), path
        )
    else:
        flipped = data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]
        path.write_bytes({"empty": b"", "truncated": data[:-1], "flipped": flipped, "longer": data + b"\0"}[spoil])
    with pytest.raises(SparsonaError) as caught:
        Checkpoints(saved, star.context.method).load(star, star.start())
    text = str(caught.value)
    assert f"checkpoint file '{path}' is missing or damaged" in text
    assert "\n  expected: " in text
    assert "\n  hint:     restore it from a copy" in text


def played_clients(folder) -> set[int]:
    return {int(owner.removeprefix("client/")) for owner in manifest(folder)["files"] if owner.startswith("client/")}


def test_any_damage_to_the_manifest_is_told(star, saved):
    """Whatever byte is hit: an error, or (white space) the same meaning. Never another meaning."""
    path = saved / "checkpoint" / "manifest.json"
    data = path.read_bytes()
    before = manifest(saved)
    told = []
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x04]) + data[place + 1 :])
        try:
            Checkpoints(saved, star.context.method).load(star, star.start())
        except SparsonaError as error:
            told.append(error)
        else:
            assert manifest(saved) == before
    assert len(told) > len(data) / 2
    assert all("manifest.json" in error.what and error.expected for error in told)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'"manifest"', b"{}"])
def test_a_manifest_that_is_none(star, saved, content):
    (saved / "checkpoint" / "manifest.json").write_bytes(content)
    with pytest.raises(SparsonaError, match=r"manifest\.json") as caught:
        Checkpoints(saved, star.context.method).load(star, star.start())
    assert caught.value.hint


def test_a_truncated_manifest(star, saved):
    path = saved / "checkpoint" / "manifest.json"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(SparsonaError, match=r"manifest\.json' cannot be read"):
        Checkpoints(saved, star.context.method).load(star, star.start())


def test_another_format(star, saved):
    (saved / "checkpoint" / "manifest.json").write_text(json.dumps({**manifest(saved), "format": 2}))
    with pytest.raises(SparsonaError) as caught:
        Checkpoints(saved, star.context.method).load(star, star.start())
    assert "is a checkpoint of format 2" in caught.value.what
    assert caught.value.expected == "format 1"
    assert "version of sparsona" in caught.value.hint


def test_a_checkpoint_of_another_model(saved, federation):
    def other() -> nn.Module:
        return nn.Linear(5, 3)

    config = build.make_config("fedspa", {"rounds": 4, "per_round": 2}, federation, other)
    star = simulate(context := build.make_context(config, federation, other), Serial(context))
    with pytest.raises(SparsonaError, match="the checkpoint of the server holds") as caught:
        Checkpoints(saved, star.context.method).load(star, star.start())
    assert "the model" in caught.value.hint
