"""What tells clients apart: bits counted by hand, and a record that an interruption does not change."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import sparsona as sp
from sparsona.analysis.similarity import recorded_distances, recorded_similarity
from sparsona.analysis.view import read_view
from sparsona.core.errors import SparsonaError
from sparsona.core.tree import Tree
from sparsona.runs import traits
from sparsona.runs.folder import RunFolder

OPTIONS = {"rounds": 4, "per_round": 3, "epochs": 1, "batch_size": 8, "executor": "serial", "seed": 1}


def of(*masks: str) -> traits.Traits:
    trees = [Tree.of({"w": torch.tensor([c == "1" for c in mask])}) for mask in masks]
    return traits.Traits(
        "mask", tuple(range(len(masks))), np.stack([traits._row(tree)[1] for tree in trees]), len(masks[0])
    )


def test_hamming_by_hand():
    now = of("11110000110", "11110000110", "00001111110")
    assert now.distances() == pytest.approx(np.array([[0, 0, 8], [0, 0, 8], [8, 8, 0]]) / 11)
    assert now.moved_from(of("11110000110", "01110000111", "11111111110")) == pytest.approx(np.array([0, 2, 4]) / 11)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000])
def test_bits_are_counted_as_entries_are(size):
    rng = np.random.default_rng(size)
    masks = ["".join("01"[bit] for bit in rng.integers(0, 2, size)) for _ in range(4)]
    found = of(*masks).distances()
    for i, a in enumerate(masks):
        for j, b in enumerate(masks):
            assert found[i, j] == pytest.approx(sum(x != y for x, y in zip(a, b, strict=True)) / size)


def test_vectors_by_their_length():
    rows = [traits._row(torch.tensor(values)) for values in ([0.0, 0.0], [3.0, 4.0], [3.0, 0.0])]
    assert {kind for kind, _, _ in rows} == {"vector"}
    found = traits.Traits("vector", (0, 1, 2), np.stack([row for _, row, _ in rows]), 2).distances()
    assert found.tolist() == [[0, 5, 3], [5, 0, 4], [3, 4, 0]]


@pytest.fixture(scope="module")
def federation() -> sp.Federation:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(160, 6, generator=generator), torch.arange(160) % 4
    return sp.federate(x.numpy(), y.numpy(), clients=6, partition="dirichlet:0.5", seed=0)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.fixture(scope="module")
def run(federation, tmp_path_factory) -> sp.Run:
    out = tmp_path_factory.mktemp("traits") / "run"
    return sp.train("fedspa", federation, net, out=out, record_traits=True, eval_every=1, **OPTIONS)


def rows(path):
    return RunFolder.open(path).records.traits()


def test_what_is_recorded_is_what_the_checkpoint_says(run):
    found, recorded = run.similarity(), recorded_similarity(RunFolder.open(run.path))
    assert found.kind == recorded.kind == "mask"
    assert found.clients == recorded.clients == tuple(range(6))
    assert np.array_equal(found.distances, recorded.distances)
    assert np.array_equal(found.label_counts, recorded.label_counts)
    assert found.distances.max() > 0
    curve = recorded_distances(RunFolder.open(run.path))
    assert [completed for completed, _, _ in curve] == [1, 2, 3, 4]
    upper = found.distances[np.triu_indices(6, 1)]
    assert curve[-1][1] == pytest.approx(upper.mean())
    assert curve[0][2] < curve[-1][2]  # masks start as one and evolve


def test_a_record_changes_nothing_and_survives_a_stop(run, federation, tmp_path):
    plain = sp.train("fedspa", federation, net, out=tmp_path / "plain", **OPTIONS)
    assert plain.accuracies().tolist() == run.accuracies().tolist()
    assert rows(plain.path) == []
    assert read_view(RunFolder.open(plain.path)).similarity is None

    class StopError(Exception):
        pass

    class Stop:
        def on_evaluation(self, result):
            if result.completed == 2:
                raise StopError

    with pytest.raises(StopError):
        sp.train("fedspa", federation, net, out=tmp_path / "cut", record_traits=True, observers=[Stop()], **OPTIONS)
    assert len(rows(tmp_path / "cut")) == 2
    sp.resume(tmp_path / "cut", federation, net)
    assert rows(tmp_path / "cut") == rows(run.path)


def test_many_clients_are_drawn_once(run, monkeypatch):
    context = run._make_context()
    monkeypatch.setattr(traits, "MOST", 3)
    drawn = traits.compared_clients(context)
    assert len(drawn) == 3 == len(set(drawn))
    assert drawn == traits.compared_clients(context) == tuple(sorted(drawn))


def test_methods_without_traits_say_so(federation, tmp_path):
    fedavg = sp.train("fedavg", federation, net, out=tmp_path / "fedavg", record_traits=True, **OPTIONS)
    assert rows(fedavg.path) == []
    with pytest.raises(SparsonaError, match="neither masks nor gates"):
        fedavg.similarity()
    forgets = sp.train("fedspa", federation, net, out=tmp_path / "f", record_traits=True, stateless=True, **OPTIONS)
    assert rows(forgets.path) == []
    with pytest.raises(SparsonaError, match="stateless clients keep no masks"):
        forgets.similarity()


def test_clients_of_two_runs(run, federation, tmp_path):
    fedavg = sp.train("fedavg", federation, net, out=tmp_path / "fedavg", **OPTIONS)
    change = run.clients(fedavg).changes[0]
    assert change.after.tolist() == run.accuracies().tolist()
    assert change.before.tolist() == fedavg.accuracies().tolist()
    assert fedavg.summary["bytes"]["upload_share"] == 1
    assert run.summary["bytes"]["upload_share"] == pytest.approx(0.5, abs=0.01)  # density, as whole entries
    local = sp.train("local", federation, net, out=tmp_path / "local", **OPTIONS)
    assert local.summary["bytes"]["upload_share"] is None
