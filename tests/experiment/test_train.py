"""From Python: own data, own model, personal models, and going on with a run."""

from __future__ import annotations

import contextlib
import copy
import json
import sqlite3

import numpy as np
import pytest
import torch
from processes import completed, traces
from torch import nn

import sparsona as sp
from sparsona.core.errors import SparsonaError
from sparsona.experiment import compare as comparisons
from sparsona.runs.observers import RoundResult, RunStart
from sparsona.runs.records import unpack_confusion

CLIENTS, CLASSES = 9, 4
OPTIONS = {"rounds": 4, "per_round": 4, "epochs": 2, "batch_size": 8, "executor": "serial", "seed": 3}


def blobs(client: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A client's own view of four clouds of points: each sees two of them more often."""
    generator = torch.Generator().manual_seed(client)
    y = torch.randint(0, 2, (count,), generator=generator) + client % 3
    y[:CLASSES] = torch.arange(CLASSES)
    centres = 2 * torch.eye(CLASSES).repeat(1, 2)[:, :6]
    return centres[y] + 0.5 * torch.randn(count, 6, generator=generator), y


@pytest.fixture(scope="module")
def federation() -> sp.Federation:
    return sp.Federation.from_clients([(*blobs(k, 40 + k), *blobs(100 + k, 20)) for k in range(CLIENTS)])


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, CLASSES))


@pytest.fixture(scope="module")
def fedspa(federation, tmp_path_factory) -> sp.Run:
    return sp.train("fedspa", federation, net, density=0.4, out=tmp_path_factory.mktemp("api") / "run", **OPTIONS)


@pytest.fixture(scope="module")
def fedavg_ft(federation, tmp_path_factory) -> sp.Run:
    return sp.train("fedavg-ft", federation, net, out=tmp_path_factory.mktemp("api") / "run", **OPTIONS)


def test_public_names():
    assert len(sp.__all__) <= 28
    assert all(getattr(sp, name) is not None for name in sp.__all__)
    assert set(sp.__all__) <= set(dir(sp))
    assert sp.__version__
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        sp.trian  # noqa: B018


def test_accuracies_of_every_client(fedspa):
    accuracies = fedspa.accuracies()
    assert accuracies.shape == (CLIENTS,)
    assert ((accuracies >= 0) & (accuracies <= 1)).all()
    assert fedspa.summary["accuracy"]["mean"] == pytest.approx(accuracies.mean(), abs=1e-12)
    assert [reached for reached, _ in fedspa.curve()] == [1, 2, 3, 4]
    assert fedspa.curve()[-1][1] == pytest.approx(accuracies.mean(), abs=1e-12)
    assert "BatchNorm statistics stay on the client" in fedspa.protocol
    assert repr(fedspa).startswith("Run(fedspa, 4 rounds, accuracy ")


def evaluated(run: sp.Run, point: str) -> dict[int, tuple]:
    with contextlib.closing(sqlite3.connect(run.path / "records.sqlite")) as db:
        rows = db.execute(
            "SELECT client, correct, count, loss, confusion FROM evaluations WHERE completed = ? AND point = ?",
            (run.summary["rounds"], point),
        ).fetchall()
    return {client: rest for client, *rest in rows}


@pytest.mark.parametrize(("fixture", "point"), [("fedspa", "received"), ("fedavg_ft", "tuned")])
def test_a_personal_model_predicts_exactly_as_evaluated(request, federation, fixture, point):
    run = request.getfixturevalue(fixture)
    recorded = evaluated(run, point)
    assert set(recorded) == set(range(CLIENTS))
    for client in (0, 7, 8):
        module = run.personal_model(client)
        assert isinstance(module, nn.Sequential)
        assert not module.training
        test = federation.examples(client, "test")
        with torch.no_grad():
            outputs = module(test.inputs)
        predicted = outputs.argmax(dim=1)
        correct, count, loss, confusion = recorded[client]
        assert int((predicted == test.targets).sum()) == correct == round(run.accuracies()[client] * count)
        assert nn.functional.cross_entropy(outputs, test.targets).item() == pytest.approx(loss, rel=1e-5)
        cells = np.zeros((CLASSES, CLASSES), dtype=int)
        np.add.at(cells, (test.targets.numpy(), predicted.numpy()), 1)
        assert np.array_equal(unpack_confusion(confusion), cells)


@pytest.mark.parametrize("density", [0.2, 0.5, 1.0])
def test_a_personal_model_has_the_density_asked_for(federation, tmp_path, density):
    def plain() -> nn.Module:  # no parameter of it starts at zero
        return nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, CLASSES))

    run = sp.train("fedspa", federation, plain, density=density, out=tmp_path / "run", **OPTIONS)
    size = sum(parameter.numel() for parameter in plain().parameters())
    masks = []
    for client in (0, 7):
        parameters = list(run.personal_model(client).parameters())
        masks.append(torch.cat([(parameter != 0).flatten() for parameter in parameters]))
        # Each of the four tensors keeps a whole number of entries.
        assert density * size - 4 <= int(masks[-1].sum()) <= density * size
    assert torch.equal(*masks) == (density == 1)  # each client has a mask of its own


def test_a_tuned_model_is_dense_and_ones_own(fedavg_ft):
    first, second = fedavg_ft.personal_model(0), fedavg_ft.personal_model(1)
    assert all(bool(parameter.count_nonzero() == parameter.numel()) for parameter in (first[0].weight, first[3].weight))
    assert not torch.equal(first[3].weight, second[3].weight)


def test_a_personal_model_is_a_copy(fedspa):
    module = fedspa.personal_model(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert any(bool(parameter.any()) for parameter in fedspa.personal_model(2).parameters())


@pytest.mark.parametrize("client", [-1, CLIENTS, 100])
def test_a_client_there_is_not(fedspa, client):
    with pytest.raises(sp.SparsonaError, match=f"there is no client {client}\n  expected: 0 to {CLIENTS - 1}"):
        fedspa.personal_model(client)


def test_stateless_clients_are_deployed_as_evaluated(federation, tmp_path):
    run = sp.train("fedspa", federation, net, stateless=True, out=tmp_path / "run", **OPTIONS)
    recorded = evaluated(run, "received")
    for client in range(CLIENTS):
        test = federation.examples(client, "test")
        with torch.no_grad():
            right = (run.personal_model(client)(test.inputs).argmax(dim=1) == test.targets).sum()
        assert int(right) == recorded[client][0]


def test_a_module_is_the_start_and_stays_as_it_was(federation, tmp_path):
    torch.manual_seed(5)
    module = net()
    before = copy.deepcopy(module.state_dict())
    run = sp.train("local", federation, module, out=tmp_path / "run", **{**OPTIONS, "rounds": 1, "per_round": 1})
    after = module.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    same = [
        client for client in range(CLIENTS) if torch.equal(run.personal_model(client)[0].weight, before["0.weight"])
    ]
    assert len(same) == CLIENTS - 1  # all but the one that trained


def test_from_arrays_with_a_built_in_model(tmp_path, monkeypatch):
    """The ten lines of the documentation, on pictures."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(240, 1, 8, 8)), np.arange(240) % 3
    federation = sp.federate(x, y, clients=8, partition="dirichlet:0.3", seed=0)
    run = sp.train("fedspa", federation, model="digits-cnn", rounds=2, epochs=1, density=0.5, seed=0)
    assert run.path.parent.name == "runs"
    assert len(run.accuracies()) == 8
    weights = run.personal_model(7)[0].weight
    assert weights.shape == (16, 1, 3, 3)
    assert run.report("page.html").exists()
    assert run.config["data"] == run.config["partition"] == "given"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data": "digits"}, "'data' together with a federation"),
        ({"clients": 3}, "'clients' together with a federation"),
        ({"partition_seed": 3}, "'partition_seed' together with a federation"),
        ({"test_rate": 0.5}, "'test_rate' together with a federation"),
        ({"model": "lenet"}, "unknown model 'lenet'"),
        ({"model": "lenet5"}, "takes images"),
        ({"model": nn.Linear(5, 4)}, "does not take one example of shape"),
        ({"model": nn.Linear(6, 2)}, "but the data has 4 classes"),
        ({"model": nn.Flatten()}, r"output is \(1, 6\)|no parameters"),
        ({"dansity": 0.5}, "unknown option of fedspa 'dansity'"),
        ({"per_round": 10}, "cannot sample 10 clients per round: only 9 take part"),
    ],
)
def test_what_is_refused(federation, tmp_path, options, words):
    with pytest.raises(sp.SparsonaError, match=words) as caught:
        sp.train("fedspa", federation, **{"model": net, "out": tmp_path / "run", **options})
    assert caught.value.expected
    assert not (tmp_path / "run").exists()


def test_load(fedspa, federation):
    loaded = sp.load(fedspa.path, federation, net)
    assert np.array_equal(loaded.accuracies(), fedspa.accuracies())
    assert loaded.summary == fedspa.summary
    assert loaded.protocol == fedspa.protocol
    for mine, theirs in zip(loaded.personal_model(7).parameters(), fedspa.personal_model(7).parameters(), strict=True):
        assert torch.equal(mine, theirs)
    without = sp.load(fedspa.path)  # the figures need no data
    assert np.array_equal(without.accuracies(), fedspa.accuracies())
    with pytest.raises(sp.SparsonaError, match="was started from Python on its own data") as caught:
        without.similarity()
    assert "sparsona.load with the same federation" in caught.value.hint
    with pytest.raises(sp.SparsonaError, match="was started from Python on its own model"):
        sp.load(fedspa.path, federation).personal_model(7)


def test_load_while_it_runs(federation, tmp_path):
    """Anybody may look in at any time."""
    seen = []

    class Look:
        def on_evaluation(self, result):
            seen.append((result.completed, sp.load(tmp_path / "run").summary["rounds"]))

    sp.train("fedspa", federation, net, out=tmp_path / "run", observers=[Look()], **OPTIONS)
    assert seen == [(1, 1), (2, 2), (3, 3), (4, 4)]


def stopped(method: str, federation, path, **more) -> None:
    """A run on own data that was interrupted after two rounds."""

    class Stop:
        def on_round(self, result):
            if result.index == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sp.train(method, federation, net, out=path, observers=[Stop()], **{**OPTIONS, **more})
    assert completed(path) == 2


@pytest.mark.parametrize(("method", "fixture"), [("fedspa", "fedspa"), ("fedavg-ft", "fedavg_ft")])
def test_resume_on_own_data(request, federation, tmp_path, method, fixture):
    whole = request.getfixturevalue(fixture)
    stopped(method, federation, tmp_path / "run", **({"density": 0.4} if method == "fedspa" else {}))
    run = sp.resume(tmp_path / "run", federation, net)
    assert np.array_equal(run.accuracies(), whole.accuracies())
    assert traces(run.path) == traces(whole.path)


def test_resume_on_other_data_or_another_model(federation, tmp_path):
    path = tmp_path / "run"
    stopped("fedavg", federation, path)
    before = (path / "checkpoint" / "manifest.json").read_bytes()
    other = sp.Federation.from_clients([(*blobs(k, 40 + k), *blobs(200 + k, 20)) for k in range(CLIENTS)])
    with pytest.raises(sp.SparsonaError, match="the data is not that of"):
        sp.resume(path, other, net)
    with pytest.raises(
        sp.SparsonaError, match=r"/run': it has \d+ parameters\n  expected: the \d+ parameters of the run"
    ):
        sp.resume(path, federation, nn.Linear(6, CLASSES))
    with pytest.raises(sp.SparsonaError, match="on its own data"):
        sp.resume(path, model=net)
    with pytest.raises(sp.SparsonaError, match="on its own model"):
        sp.resume(path, federation)
    assert (path / "checkpoint" / "manifest.json").read_bytes() == before
    assert sp.resume(path, federation, net).summary["rounds"] == 4
    bare = net()
    bare[3].register_parameter("bias", None)
    for model, words in (  # now the folder has the shared model
        (
            lambda: nn.Sequential(nn.Linear(6, CLASSES)),
            r"its '0.weight' has shape \[4, 6\]\n  expected: one of shape \[24, 6\]",
        ),
        (nn.Linear(6, CLASSES), r"its 'weight' has shape \[4, 6\]\n  expected: no parameter of that name"),
        (bare, r"it has no '3.bias'\n  expected: one of shape \[4\], as in the run"),
    ):
        with pytest.raises(sp.SparsonaError, match=words):
            sp.load(path, federation, model).personal_model(0)


def test_resume_of_what_is_no_run(federation, tmp_path):
    for path, words in ((tmp_path, "is not a run"), (tmp_path / "nowhere", "there is no run '")):
        for read in (sp.resume, sp.load):
            with pytest.raises(sp.SparsonaError, match=words):
                read(path)
    for read in (sp.resume_comparison, sp.load_comparison):
        with pytest.raises(
            sp.SparsonaError, match=r"there is no run 'nowhere'\n  expected: a folder, or a name in \./runs"
        ):
            read("nowhere")
    sp.compare(["local"], federation, net, out=tmp_path / "both", **{**OPTIONS, "rounds": 1})
    for read in (sp.resume, sp.load):
        with pytest.raises(sp.SparsonaError, match="is a comparison\n  expected: a run"):
            read(tmp_path / "both", federation, net)


def test_runs_are_found_by_name_in_runs(federation, tmp_path, monkeypatch):
    """As on the command line."""
    monkeypatch.chdir(tmp_path)
    run = sp.train("local", federation, net, out="runs/spa", **{**OPTIONS, "rounds": 1})
    assert np.array_equal(sp.load("spa").accuracies(), run.accuracies())
    assert np.array_equal(sp.resume("spa", federation, net).accuracies(), run.accuracies())
    both = sp.compare(["local"], federation, net, out="runs/both", **{**OPTIONS, "rounds": 1})
    assert sp.load_comparison("both").table() == both.table()
    assert sp.resume_comparison("both", federation, net).table() == both.table()


def test_compare_on_own_data(federation, tmp_path):
    told = []
    comparison = sp.compare(
        ["local", "fedspa"],
        federation,
        net,
        seeds=[5, 2],
        out=tmp_path / "both",
        density=0.4,
        observers=[told.append],
        **{key: value for key, value in OPTIONS.items() if key != "seed"} | {"rounds": 1},
    )
    assert [run.config["seed"] for run in comparison.runs] == [5, 2, 5, 2]
    starts = [record for record in told if isinstance(record, RunStart)]
    assert [(start.facts.title, start.options["seed"]) for start in starts] == [
        *(("Local", 5), ("Local", 2)),
        *(("FedSpa (DST)", 5), ("FedSpa (DST)", 2)),
    ]
    assert sum(isinstance(record, RoundResult) for record in told) == 4
    assert comparison.differences()[0]["seeds"] == "2"
    assert comparison.report().exists()
    again = comparisons.resume_comparison(tmp_path / "both", federation, net)
    assert [run.summary for run in again.runs] == [run.summary for run in comparison.runs]
    with pytest.raises(sp.SparsonaError, match="on its own data"):
        comparisons.resume_comparison(tmp_path / "both")
    with pytest.raises(sp.SparsonaError, match="seeds \\[1, 1\\]"):
        sp.compare(["local"], federation, net, seeds=[1, 1], out=tmp_path / "twice")
    with pytest.raises(sp.SparsonaError, match="no method to compare"):
        sp.compare([], federation, net, out=tmp_path / "none")


def test_a_run_on_own_data_says_so(fedspa):
    config = json.loads((fedspa.path / "config.json").read_text())
    assert (config["data"], config["model"], config["clients"]) == ("given", "given", CLIENTS)
    about = json.loads((fedspa.path / "about.json").read_text())
    assert np.array(about["label_counts"]).shape == (CLIENTS, CLASSES)
    assert about["has_batch_statistics"] is True


def test_novel_clients_have_models_too(federation, tmp_path):
    run = sp.train("fedspa", federation, net, novel=2, out=tmp_path / "run", **OPTIONS)
    assert np.isnan(run.accuracies()).sum() == 2
    assert set(run.summary["other_points"]) == {"novel"}
    for client in range(CLIENTS):
        assert run.personal_model(client)(torch.zeros(2, 6)).shape == (2, CLASSES)
    assert run.report(tmp_path / "page.html").exists()


def test_some_clients_stand_for_all(federation, tmp_path):
    options = {**OPTIONS, "density": 0.4, "points": ["global"]}
    run = sp.train("fedspa", federation, net, eval_clients=2, novel=1, out=tmp_path / "run", **options)
    with sqlite3.connect(run.path / "records.sqlite") as records:
        tested = records.execute(
            "SELECT DISTINCT client FROM evaluations WHERE point IN ('received', 'global')"
        ).fetchall()
        novel = records.execute("SELECT DISTINCT client FROM evaluations WHERE point = 'novel'").fetchall()
    assert len(tested) == 2  # the same ones after every round
    assert len(novel) == 1
    assert not set(tested) & set(novel)
    assert np.isfinite(run.accuracies()).sum() == 2
    assert "mean over 2 clients" in run.protocol
    assert f"the same for every evaluation, from the {CLIENTS - 1} that took part" in run.protocol
    assert "1 novel client took no part" in run.protocol
    all_tested = sp.train("fedspa", federation, net, novel=1, out=tmp_path / "all", **options)
    chosen = np.isfinite(run.accuracies())
    assert np.array_equal(run.accuracies()[chosen], all_tested.accuracies()[chosen])
    assert "drawn once" not in all_tested.protocol
    assert run.report(tmp_path / "page.html").exists()
    tuned = sp.train("fedavg-ft", federation, net, eval_clients=2, novel=1, out=tmp_path / "tuned", **OPTIONS)
    assert np.array_equal(np.isfinite(tuned.accuracies()), chosen)  # methods are compared on the same clients
    for wrong in (0, CLIENTS + 1):
        with pytest.raises(SparsonaError, match=r"eval_clients|only"):
            sp.train("fedspa", federation, net, eval_clients=wrong, out=tmp_path / "none", **OPTIONS)
