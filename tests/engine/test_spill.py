"""Trees at rest: the same bits, wherever they lie, and nothing left behind."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from sparsona.core import storage as resting
from sparsona.core.errors import SparsonaError
from sparsona.core.storage import pack_bits
from sparsona.core.tree import Tree, counts, leaves, parts
from sparsona.core.update import mask_digest, masked
from sparsona.engine.rounds import simulate
from sparsona.engine.spill import SpillStore
from sparsona.executors.serial import Serial
from sparsona.executors.stacked import Stacked
from sparsona.experiment import build
from sparsona.runs.checkpoint import Checkpoints, Progress

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def some(seed: int, size: int = 1003) -> Tree:
    draws = torch.rand(size, generator=torch.Generator().manual_seed(seed))
    return Tree.of({"a": draws[:500].view(5, 100), "b": draws[500:]})


def mask_of(seed: int) -> Tree:
    return some(seed).like(some(seed).flat < 0.4)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("sparsona-spill-*/*.tree"))


def test_a_resting_mask_is_the_same_mask_in_an_eighth_of_the_memory():
    mask, before = mask_of(1), mask_of(1).flat
    kept, digest, known = counts(mask), mask_digest(mask), mask.identity
    assert mask.store().num_bytes == 126
    assert torch.equal(mask.flat, before)
    assert mask.flat is not mask.flat  # nothing brought back is kept
    assert (mask.dtype, mask.shape, mask.device) == (torch.bool, (1003,), CPU)
    assert torch.equal(mask["a"], before[:500].view(5, 100))
    assert (counts(mask), mask_digest(mask)) == (kept, digest)
    again = mask.loaded()
    assert again.flat is again.flat
    assert again.identity is mask.identity is known
    assert again.store() is mask.store()  # packed once
    part = masked(some(2), mask)
    assert torch.equal(part.tree(again).flat, torch.where(before, some(2).flat, 0))


def test_places_of_bits_are_used_again_and_shared_by_nobody(monkeypatch):
    monkeypatch.setattr(resting, "SMALL", 0)
    masks = [mask_of(seed) for seed in range(4)]
    for mask in masks:
        mask.store()
    bits, again = masks[1].bits(), masks[2].loaded()
    place = masks[1].store()._kept.data_ptr()
    del masks[1], mask
    late = mask_of(9)
    assert late.store()._kept.data_ptr() == place
    assert torch.equal(bits, pack_bits(mask_of(1).flat))  # what was given out is a copy
    assert torch.equal(again.flat, mask_of(2).flat)
    assert [torch.equal(m.flat, mask_of(k).flat) for m, k in zip(masks, (0, 2, 3), strict=True)] == [True] * 3


def test_masks_travel_between_processes_as_bits():
    mask = mask_of(1)
    counts(mask), mask_digest(mask)
    data = pickle.dumps(mask)
    assert len(data) < 1003
    arrived = pickle.loads(data)
    assert torch.equal(arrived.flat, mask.flat)
    assert (arrived.identity.counts, arrived.identity.digest) == (counts(mask), mask_digest(mask))
    mask.store()
    assert torch.equal(pickle.loads(pickle.dumps(mask)).flat, arrived.flat)


@pytest.mark.parametrize("size", [0, 1, 8, 77])
def test_a_gpu_packs_as_numpy_does(size):
    flags = torch.rand(size, generator=torch.Generator().manual_seed(size)) < 0.5
    packed = resting._pack(flags)
    assert torch.equal(packed, pack_bits(flags))
    assert torch.equal(resting._unpack(packed, size), flags)


def test_what_does_not_fit_goes_to_files_the_longest_untouched_first(temporary):
    spill_store, trees = SpillStore(CPU, host_bytes=2 * 4012), [some(k) for k in range(4)]
    for tree in trees[:2]:
        spill_store.store(tree)
    assert [tree.store().where for tree in trees[:2]] == ["device"] * 2
    spill_store.store(tuple(trees[2:]))
    assert [tree.store().where for tree in trees] == ["file", "file", "device", "device"]
    assert len(files(temporary)) == 2
    for seed, tree in enumerate(trees):
        assert tree.flat.numpy().tobytes() == some(seed).flat.numpy().tobytes()
    kept = trees[1].loaded()
    del trees[0], tree
    assert len(files(temporary)) == 2 - 1  # a file goes with its value
    del spill_store, trees
    assert torch.equal(kept.flat, some(1).flat)
    assert len(files(temporary)) == 1  # and outlives the shelf
    del kept
    gc.collect()
    assert list(temporary.iterdir()) == []


def test_order_of_use_decides(temporary):
    spill_store, trees = SpillStore(CPU, host_bytes=2 * 4012), [some(k) for k in range(3)]
    for tree in (trees[0], trees[1], trees[0], trees[2]):
        spill_store.store(tree)
    assert [tree.store().where for tree in trees] == ["device", "file", "device"]


def test_a_device_spills_to_the_host_before_files(temporary):
    spill_store, trees = SpillStore(torch.device("cuda"), 4012, 4012), [some(k) for k in range(3)]
    moved = []
    for tree in trees:
        spill_store.store(tree)
        moved.append(len(files(temporary)))
    assert moved == [0, 0, 1]
    assert trees[0].store().where == "file"


def test_a_full_disk_is_told_and_nothing_is_lost(temporary, monkeypatch):
    spill_store, tree = SpillStore(CPU, host_bytes=0), some(1)
    real = Path.open

    def full(path, mode="r", *args, **more):
        file = real(path, mode, *args, **more)
        if path.suffix == ".tree" and "x" in mode:
            file.write(b"half")
            file.close()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return file

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises(SparsonaError, match=r"cannot be written to files.*No space left"):
            spill_store.store(tree)
    assert torch.equal(tree.flat, some(1).flat)
    assert files(temporary) == []
    spill_store.store(some(2))  # room again
    assert tree.store().where == "file"
    os.unlink(files(temporary)[0])
    with pytest.raises(SparsonaError, match="cannot be read again"):
        _ = tree.flat


@pytest.mark.parametrize("method", ["fedspa", "local"])
def test_a_run_that_lives_in_files_has_the_same_bits(method, tmp_path):
    options = {"clients": 3, "per_round": 2, "rounds": 2, "epochs": 1, "tune_epochs": 1, "device": "cpu"}
    options |= {"batch_size": 200}

    def small_net():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def play(spill_store, folder):
        context = build.make_context(build.make_config(method, options, None, small_net), None, small_net)
        if spill_store is not None:
            object.__setattr__(context, "spill_store", spill_store)
        star = simulate(context, Serial(context))
        initial = population = star.start()
        folder.mkdir()
        checkpoints = Checkpoints(folder, context.method)
        for index in range(2):
            population, _ = star.play(population, index)
            checkpoints.save(Progress(index + 1, 0.0, population, {}), initial)
        _, tuned = star.finish(population)
        checkpoints.save(Progress(2, 0.0, population, tuned, True), initial)
        found = Checkpoints(folder, context.method).load(star, initial)
        assert bits(found.population.states) == bits(population.states)
        stored = {path.name: path.read_bytes() for path in (folder / "checkpoint").iterdir()}
        return (population.server, population.states, tuned), stored

    (value, stored), (value2, stored2) = play(None, tmp_path / "a"), play(SpillStore(CPU, host_bytes=0), tmp_path / "b")
    assert bits(value) == bits(value2)
    assert stored == stored2  # what rests is written as what is at hand was
    kept = [tree for _, tree in parts(value2[1:]) if tree.layout.size]
    assert all(tree._flat is None for tree in kept)
    assert {tree.store().where for tree in kept if tree.dtype is torch.float32} == {"file"}


@pytest.mark.parametrize("executor", [Serial, Stacked])  # messages as bytes, and as they are
def test_masks_rest_as_they_arrive(executor):
    """However many are sampled, no mask is at hand while the updates of others are awaited."""
    config = build.make_config("fedspa", {"clients": 4, "per_round": 4, "rounds": 1, "epochs": 1, "device": "cpu"})
    context = build.make_context(config)
    star, at_hand = simulate(context, executor(context)), []
    add = context.method.server.add

    def watched(server, total, update):
        at_hand.append(update.parts["mask"].tree()._flat)
        return add(server, total, update)

    object.__setattr__(context.method.server, "add", watched)
    population, _ = star.play(star.start(), 0)
    assert at_hand == [None] * 4
    assert all(mask._flat is None for mask in population.server.masks.values())


def test_a_small_mask_takes_a_small_place():
    mask = mask_of(0)
    assert mask.store()._kept.untyped_storage().nbytes() < 1024


def bits(value) -> dict[str, bytes]:
    return {path: tensor.contiguous().numpy().tobytes() for path, tensor in leaves(value)}
