"""Attacks that must succeed where everything is told, and fail where nothing is."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import sparsona as sp
from sparsona.analysis.leakage import label_presence
from sparsona.analysis.privacy import show_epsilon
from sparsona.cli.app import cli
from sparsona.core.errors import SparsonaError
from sparsona.core.round import Batch
from sparsona.core.task import Task
from sparsona.experiment import leakage
from sparsona.experiment.leakage import invert, matched_psnr, psnr, visible_update, with_noise


def distances_of(masks: np.ndarray) -> np.ndarray:
    return (masks[:, None] != masks[None]).mean(2)


def test_masks_that_are_the_labels_tell_all_and_random_ones_nothing():
    random = np.random.default_rng(0)
    counts = np.zeros((24, 6), dtype=int)
    for client in range(24):
        counts[client, random.choice(6, 2, replace=False)] = 5
    told = label_presence(distances_of(np.repeat(counts > 0, 50, axis=1)), counts)
    assert told.auc > 0.99
    found = [label_presence(distances_of(random.random((24, 300)) < 0.5), counts, seed) for seed in range(4)]
    assert abs(np.mean([one.auc for one in found]) - 0.5) < 0.1
    assert abs(np.mean([one.chance for one in found]) - 0.5) < 0.05
    same = label_presence(np.zeros((24, 24)), counts)
    assert (same.auc, same.chance, same.spread) == (0.5, 0.5, 0.0)


def test_a_mask_of_ones_own_that_has_nothing_to_do_with_labels_tells_nothing():
    """Judged on clients that it was fitted to, an attacker would recognise each."""
    counts = np.array([[1, 0]] * 10 + [[0, 1]] * 10)
    found = label_presence(distances_of(np.eye(20, dtype=bool)), counts)
    assert found.auc == pytest.approx(0.5, abs=0.05)


def test_clients_without_different_classes_are_refused():
    with pytest.raises(SparsonaError, match="no class"):
        label_presence(np.zeros((3, 3)), np.ones((3, 2)))


TASK = Task(nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.Sigmoid(), nn.Linear(24, 4)), (1, 6, 6), 4)


def test_one_picture_is_found_in_its_update_and_not_in_noise():
    params, buffers = TASK.init(0)
    random = torch.Generator().manual_seed(1)
    smooth = torch.rand(1, 1, 3, 3, generator=random).repeat_interleave(2, 2).repeat_interleave(2, 3)
    one = torch.zeros(1, dtype=torch.int64)
    batch = Batch(smooth, torch.tensor([2]), torch.ones(1), one, one[0])
    update = visible_update(TASK, params, buffers, batch, None)
    blind = Batch(torch.zeros_like(smooth), batch.targets, batch.weight, batch.index, batch.noise)
    found = invert(TASK, params, buffers, update, blind, steps=60)
    assert psnr(found[0], smooth[0], 1.0) > 25
    hidden = with_noise(update, None, 1.0, random)
    lost = invert(TASK, params, buffers, hidden, blind, steps=60)
    assert psnr(lost[0], smooth[0], 1.0) < 15


def test_pictures_are_matched_whatever_their_order():
    true = torch.stack([torch.zeros(1, 4, 4), torch.ones(1, 4, 4)])
    assert matched_psnr(true.flip(0), true, 1.0) == 80.0
    assert matched_psnr(true[:1].repeat(2, 1, 1, 1), true, 1.0) == pytest.approx(40.0)


def test_a_run_is_attacked_and_epsilon_stands_beside(tmp_path):
    more = {"clients": 8, "rounds": 1, "epochs": 1, "data_rate": 0.2, "partition": "shards:2", "executor": "serial"}
    run = sp.train("fedspa", **more, model="mlp:hidden=8", privacy="central:noise=5", out=tmp_path / "run")
    args = ["leakage", str(run.path), "--batches", "2", "--pictures", "1", "--steps", "2"]
    shown = CliRunner().invoke(cli, ["leakage", str(run.path), "--batches", "none"]).output
    assert "class present, from masks" in shown
    assert f"Epsilon: {show_epsilon(run.privacy().epsilon)}" in shown
    found = json.loads(CliRunner().invoke(cli, [*args, "--json"]).output)
    assert [one["update"] for one in found["inversions"]] == ["dense", "masked", "dense, noised", "masked, noised"]
    assert found["noise"] == 5
    assert 0 <= found["presence"]["auc"] <= 1
    for name, value in {"seed": -1, "noise": 1e300, "batches": 0, "steps": 1.5, "batch_sizes": 4, "listen": 1}.items():
        with pytest.raises(SparsonaError, match=name):
            run.leakage(**{name: value})
    for args in (["--seed", "9" * 23], ["--seed", "-1"], ["--noise", "1e300"], ["--noise", "nan"]):
        assert CliRunner().invoke(cli, ["leakage", str(run.path), *args]).exit_code not in (0, 70)


def test_clients_that_share_all_classes_leave_the_other_attacks(tmp_path):
    more = {"clients": 4, "rounds": 1, "epochs": 1, "data_rate": 0.5, "partition": "iid", "executor": "serial"}
    run = sp.train("fedspa", **more, model="mlp:hidden=8", out=tmp_path / "run")
    found = run.leakage(batch_sizes=np.array([2]), batches=1, steps=1)
    assert found.presence is None
    assert "no class that two clients have" in found.sentences()[0]
    assert len(found.inversions) == 4


def test_what_needs_no_update_is_matched_as_guesses_are(tmp_path, monkeypatch):
    """Two pictures of one class, drawn in the other order: unmatched, they would look worse than they are."""
    called = []
    monkeypatch.setattr(leakage, "matched_psnr", lambda *args: called.append(len(args[0])) or matched_psnr(*args))
    run = sp.train("fedavg", clients=4, rounds=1, epochs=1, data_rate=0.5, model="mlp:hidden=8", out=tmp_path / "run")
    run.leakage(batch_sizes=[2], batches=1, steps=1)
    assert called == [2] * 5  # four updates, and the pictures in place of them
