"""The same clients' data in two pools, ordered otherwise: the same bits, one run to a comparison and to resume."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from older import unseal
from processes import traces

import sparsona as sp
from sparsona.analysis.clients import client_effects
from sparsona.core.errors import SparsonaError
from sparsona.runs.folder import RunFolder

OPTIONS = {"rounds": 2, "epochs": 1, "batch_size": 8, "points": ["global"], "executor": "serial", "progress": False}


def net() -> torch.nn.Module:
    return torch.nn.Linear(6, 3)


def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Examples of three owners, one after another in turn."""
    rng, y = np.random.default_rng(0), np.arange(120) // 3 % 3
    return (rng.normal(size=(120, 6)) + np.eye(3, 6)[y]).astype("float32"), y, np.arange(120) % 3


@pytest.fixture(scope="module")
def pools() -> tuple[sp.Federation, sp.Federation]:
    x, y, owners = arrays()
    clients = {str(one): (x[owners == one], y[owners == one]) for one in range(3)}
    return sp.federate(x, y, owners=owners), sp.Federation.from_clients(clients)


def test_what_each_client_holds_is_told_apart_and_no_more(pools):
    one, other = pools
    for client in range(3):
        for part in ("train", "validation", "test"):
            mine, same = one.examples(client, part), other.examples(client, part)
            assert torch.equal(mine.inputs, same.inputs)
            assert torch.equal(mine.targets, same.targets)
    assert one.digest() != other.digest()
    assert one.client_digest() == other.client_digest()
    x, y, owners = arrays()
    pixel, label = x.copy(), y.copy()
    pixel[17, 1] += 1
    label[0], label[3] = label[3], label[0]
    others = [
        sp.federate(pixel, y, owners=owners),
        sp.federate(x, label, owners=owners),
        sp.federate(x, y, owners=owners, num_classes=4),
        sp.federate(x, y, owners=owners, test_rate=0.5),
        sp.federate(x, y, owners=(owners + 1) % 3),
    ]
    assert len({f.client_digest() for f in (one, *others)}) == 1 + len(others)
    more = np.concatenate([x, x[:1]]), np.concatenate([y, y[:1]])
    spare = sp.Federation(torch.from_numpy(more[0]), torch.from_numpy(more[1]), one.splits, 3)
    assert spare.client_digest() == one.client_digest() != spare.digest()


@pytest.mark.parametrize("piece", [1, 100])
def test_how_much_is_gathered_at_a_time_does_not_matter(pools, monkeypatch, piece):
    monkeypatch.setattr("sparsona.data.federation.PIECE", piece)
    x, y, owners = arrays()
    assert sp.federate(x, y, owners=owners).client_digest() == pools[0].client_digest()


def test_runs_on_both_are_the_same_and_compare(pools, tmp_path):
    one, other = (
        sp.train("fedavg", data, net, out=tmp_path / name, **OPTIONS)
        for name, data in zip(("one", "other"), pools, strict=True)
    )
    assert traces(one.path)["tensors"] == traces(other.path)["tensors"]
    assert client_effects(RunFolder.open(one.path), RunFolder.open(other.path)).changes[0].gains.tolist() == [0] * 3
    stopped = sp.train("fedavg", pools[0], net, out=tmp_path / "stopped", max_seconds=1e-9, **OPTIONS)
    assert stopped.summary["rounds"] == 1
    resumed = sp.resume(stopped.path, pools[1], net, progress=False)
    assert traces(resumed.path)["tensors"] == traces(one.path)["tensors"]
    x, y, owners = arrays()
    for wrong in (sp.federate(x + 1, y, owners=owners), sp.federate(x, y, owners=owners, test_rate=0.5)):
        with pytest.raises(SparsonaError, match="the data is not that of"):
            sp.resume(one.path, wrong, net)


def test_a_warm_start_from_the_other_is_one_on_the_same_data(pools, tmp_path):
    first = sp.train("fedavg", pools[0], net, out=tmp_path / "first", **OPTIONS)
    second = sp.train("fedavg-ft", pools[1], net, out=tmp_path / "second", warm_start=first, tune_epochs=1, **OPTIONS)
    assert json.loads((second.path / "about.json").read_text())["warm_start"]["same_data"]


def test_runs_of_older_versions_are_known_by_their_pool(pools, tmp_path):
    """They did not record what each client holds."""
    runs = [sp.train("fedavg", data, net, out=tmp_path / str(at), **OPTIONS) for at, data in enumerate(pools)]
    new = sp.train("fedavg", pools[0], net, out=tmp_path / "new", **OPTIONS)
    for run in runs:
        about = json.loads((run.path / "about.json").read_text())
        del about["client_digest"]
        (run.path / "about.json").write_text(json.dumps(about))
        unseal(run.path)
    old, other = (RunFolder.open(run.path) for run in runs)
    assert client_effects(RunFolder.open(new.path), old).changes
    assert sp.resume(runs[0].path, pools[0], net, progress=False).summary["rounds"] == 2
    with pytest.raises(SparsonaError, match="hold different data"):
        client_effects(old, other)
