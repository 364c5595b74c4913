"""Methods that live outside this repository: an installed package, a card, and a factory in a script."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from processes import EAGER, completed, start, traces, wait_until

import sparsona as sp
from sparsona import methods
from sparsona.core.errors import SparsonaError
from sparsona.core.method import Method
from sparsona.methods.fedavg import FedAvgConfig, fedavg
from sparsona.testing import check

PACKAGE = Path(__file__).parents[1] / "packages" / "sparsona_fedlc"
OPTIONS = {"clients": 4, "rounds": 2, "epochs": 1, "data_rate": 0.1}
FLAGS = ["--clients", "4", "--epochs", "1", "--set", "data_rate=0.1"]
INSTALLED = f"import sys; sys.path.append({str(PACKAGE)!r})\n"


@pytest.fixture
def installed(monkeypatch):
    """As if the package were installed here."""
    monkeypatch.syspath_prepend(PACKAGE)
    yield
    for name in [name for name in sys.modules if name.startswith("sparsona_fedlc")]:
        del sys.modules[name]


def about(run: Path) -> dict:
    return json.loads((run / "about.json").read_text())


def test_the_command_line_takes_an_installed_package(installed, forked_workers, say, tmp_path):
    runs = {}
    for executor in ("serial", "workers"):
        words = ["fedlc:margin=0.5", *FLAGS, "--rounds", "2", "--executor", executor, "--out", executor, "--json"]
        runs[executor] = json.loads(say("run", *words).out)
    assert runs["serial"]["accuracy"] == runs["workers"]["accuracy"]
    assert traces(tmp_path / "serial")["tensors"] == traces(tmp_path / "workers")["tensors"]
    assert about(tmp_path / "serial")["title"] == "FedLC"


def test_commands_that_do_not_train(installed, say):
    assert "fedlc" in say("methods").out
    told = say("methods", "fedlc").out
    assert "margin = 1.0" in told
    assert "--preset strong: margin=2.0" in told
    assert json.loads(say("cost", "fedlc", "--model", "lenet5", "--json").out)["method"] == "fedlc"
    say("run", "fedlcc").refused("did you mean 'fedlc'?")
    say("cost", "fedlcc", "--model", "lenet5").refused("did you mean 'fedlc'?")
    say("run", "fedlc", "--preset", "week").refused("strong")


def test_listing_an_installed_package_imports_no_torch():
    code = f"{INSTALLED}from sparsona import methods; methods.card('fedlc'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


def test_compare_and_presets(installed, tmp_path):
    names = ["fedavg", "fedlc", "fedlc:preset=strong", "fedlc:margin=0"]
    found = sp.compare(names, out=tmp_path / "compare", executor="serial", **OPTIONS)
    tensors = [traces(run.path)["tensors"]["server"] for run in found.runs]
    assert tensors[0] == tensors[3]
    assert len(set(tensors)) == 3


def test_killed_and_resumed(forks, tmp_path):
    words = ["run", "fedlc", *FLAGS, "--rounds", "4", "--executor", "serial", "--out"]
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    code, _, err = start(forks, tmp_path / "whole", *words, "run", setup=INSTALLED + EAGER).wait()
    assert code == 0, err
    under_way = start(forks, tmp_path / "killed", *words, "run", setup=INSTALLED + EAGER)
    path = tmp_path / "killed" / "run"
    wait_until(lambda: (path / "checkpoint" / "manifest.json").exists() and completed(path) >= 2)
    under_way.kill()
    assert under_way.wait()[0] == -signal.SIGKILL
    code, _, err = start(forks, tmp_path / "killed", "resume", "run", setup=INSTALLED + EAGER).wait()
    assert code == 0, err
    assert traces(path) == traces(tmp_path / "whole" / "run")
    code, _, err = start(forks, tmp_path / "killed", "resume", "run").wait()  # without the package
    assert code == 1
    assert "which is not installed" in err
    assert "install its package" in err


def test_the_battery_of_an_installed_package(installed):
    from sparsona.testing import SHORT

    quick = {name: holds for name, holds in SHORT.items() if name != "learns"}
    check(methods.card("fedlc"), {"margin": 0.5}, properties=quick)


def test_entry_points_that_lead_nowhere(tmp_path, monkeypatch):
    info = tmp_path / "broken-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    for line, words in (
        ("lost = nowhere.at_all:CARD", "reinstall broken"),
        ("lost = sparsona.methods:METHODS", "leads to a dict"),
        ("lost = sparsona.methods:_CARD", "cannot be imported"),
    ):
        (info / "entry_points.txt").write_text(f"[sparsona.methods]\n{line}\n")
        with pytest.raises(sp.SparsonaError, match=words):
            methods.card("lost")
    (info / "entry_points.txt").write_text("[sparsona.methods]\nfedavg = nowhere:CARD\n")
    assert methods.card("fedavg").title == "FedAvg"
    with pytest.raises(sp.SparsonaError, match="has the name of another method"):
        methods.names()


SCRIPT = '''
import sys
from dataclasses import dataclass, replace
from pydantic import Field
import sparsona as sp
from sparsona.core.method import Tree
from sparsona.executors import workers
from sparsona.methods.fedavg import FedAvgConfig, fedavg


class MineConfig(FedAvgConfig):
    scale: float = Field(1.0, ge=0)


@dataclass(frozen=True)
class MineState:
    buffers: Tree
    last: Tree
    memory: tuple = ()


def mine(task, config: MineConfig):
    """FedAvg that remembers."""
    base = fedavg(task, config)

    def init_client(params, buffers, client, seeds):
        return MineState(buffers, params)

    def finish(state, work, inbox, probe, round_):
        _, update = base.finish(state, work, inbox, probe, round_)
        return MineState(work.buffers, work.params), update

    return replace(base, init_client=init_client, finish=finish)


if __name__ == "__main__":
    workers.num_cores = lambda: 1  # one imports torch for as long as several
    for executor in ("serial", "workers"):
        options = {"clients": 4, "rounds": 2, "epochs": 1, "data_rate": 0.1, "tune_epochs": 1, "scale": 2.0}
        run = sp.train(mine, out=executor, executor=executor, **options)
        sp.resume(run.path, method=mine)
    try:
        sp.resume("workers")
    except sp.SparsonaError as error:
        print(error)
'''


def test_a_factory_in_a_script(tmp_path):
    """Its classes are those of `__main__`, which no worker can import."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(sp.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "'workers' was made with mine" in done.stdout
    assert "sparsona.load with method=mine" in done.stdout
    one, other = (traces(tmp_path / executor) for executor in ("serial", "workers"))
    assert one["tensors"] == other["tensors"]
    assert json.loads((tmp_path / "serial" / "config.json").read_text())["options"]["scale"] == 2.0


def own_method(task, config: FedAvgConfig) -> Method:
    """FedAvg under another name."""
    return fedavg(task, config)


def test_a_factory_or_a_card_in_python(tmp_path):
    run = sp.train(own_method, out=tmp_path / "run", executor="serial", **OPTIONS)
    known = sp.train("fedavg", out=tmp_path / "known", executor="serial", **OPTIONS)
    assert traces(run.path)["tensors"] == traces(known.path)["tensors"]
    assert about(run.path)["title"] == "own_method"
    assert sp.load(run.path, method=own_method).personal_model(0)
    with pytest.raises(sp.SparsonaError, match="which is not installed"):
        sp.load(run.path).personal_model(0)
    with pytest.raises(sp.SparsonaError, match="is a run of 'own_method', not of 'fedavg'"):
        sp.resume(run.path, method=fedavg)
    card = replace(methods.card("fedavg"), name="fedavg-mine", module=own_method, options={"lr": 0.05})
    assert about(sp.train(card, out=tmp_path / "card", executor="serial", **OPTIONS).path)["title"] == "FedAvg"
    assert about(sp.train(fedavg, out=tmp_path / "row", executor="serial", **OPTIONS).path)["method"] == "fedavg"


def test_what_is_no_method_is_refused():
    def unannotated(task, config):
        return fedavg(task, config)

    def fedspa(task, config: FedAvgConfig):
        return fedavg(task, config)

    def forgetful(task, config: FedAvgConfig):
        fedavg(task, config)

    for method, words in (
        (3, "a int where a method is expected"),
        (unannotated, "annotate its second parameter"),
        (fedspa, "a method passed from Python is named 'fedspa'"),
        (forgetful, "the factory of forgetful returned None\n.*a sparsona.core.method.Method"),
        (replace(methods.card("fedavg"), options={"lr": 0.3}), "pass a MethodCard with another name"),
        (replace(methods.card("dispfl"), name="alone", peers=False), "pass a MethodCard with peers=True"),
    ):
        with pytest.raises(sp.SparsonaError, match=words):
            sp.train(method, **OPTIONS)
    with pytest.raises(sp.SparsonaError, match="a int among the methods to compare"):
        sp.compare(["fedavg", 3], **OPTIONS)

    with pytest.raises(AssertionError, match="the factory of forgetful returned None"):
        check(methods.as_card(forgetful))


@pytest.mark.parametrize("executor", ["serial", "stacked"])
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda loss, buffers: loss, "returned a Tensor"),
        (lambda loss, buffers: (loss, buffers, 0 * loss), "returned 3 values"),
        (lambda loss, buffers: None, "returned a NoneType"),
    ],
)
def test_a_loss_without_buffers_is_refused(executor, wrong, words, tmp_path):
    def mine(task, config: FedAvgConfig) -> Method:
        base = fedavg(task, config)
        (plain,) = base.phases
        phase = replace(plain, loss=lambda work, batch: wrong(*plain.loss(work, batch)))
        return replace(base, phases=(phase,))

    said = f"the loss of phase 'train', .*mine.<locals>.<lambda>, {words}\n.*two values: the loss, and the buffers"
    with pytest.raises(SparsonaError, match=said):
        sp.train(mine, executor=executor, **OPTIONS, model="mlp", progress=False, out=tmp_path / "run")


def test_a_comparison_of_methods_from_python(tmp_path):
    """A factory, with options of its own too, and a card; resumed when they are passed again."""
    card = replace(methods.card("fedavg"), name="fedavg-mine", title="FedAvg of mine", module=own_method)
    names = ["fedavg", own_method, (own_method, {"lr": 0.05}), card]
    path, quick = tmp_path / "c", {**OPTIONS, "executor": "serial", "progress": False}
    found = sp.compare(names, out=path, **quick)
    tensors = [traces(run.path)["tensors"] for run in found.runs]
    assert [run.path.name for run in found.runs] == [
        "fedavg-seed0",
        "own_method-seed0",
        "own_method_lr-0.05-seed0",
        "fedavg-mine-seed0",
    ]
    assert tensors[0] == tensors[1] == tensors[3] != tensors[2]
    assert found.table()[3]["method"] == "FedAvg of mine"
    assert found.runs[1].personal_model(0)
    shutil.rmtree(path / "own_method-seed0")
    with pytest.raises(sp.SparsonaError, match=r"resume_comparison with methods=\[own_method, fedavg-mine\]"):
        sp.resume_comparison(path)
    with pytest.raises(sp.SparsonaError, match="unknown method of"):
        sp.resume_comparison(path, methods=[own_method, card, methods.card("local")])
    again = sp.resume_comparison(path, methods=[own_method, card], progress=False)
    assert [traces(run.path)["tensors"] for run in again.runs] == tensors
    assert sp.load(path / "own_method-seed0", method=own_method).personal_model(0)
    other = replace(card, name="own_method")
    with pytest.raises(sp.SparsonaError, match="two methods called 'own_method'"):
        sp.compare([own_method, (other, {"lr": 0.05})], **quick)


@pytest.mark.long
def test_methods_from_python_in_processes(tmp_path):
    """A function within another one can be found by no name: it is sent as it is."""
    quick, lock = {**OPTIONS, "executor": "serial", "progress": False}, threading.Lock()

    def inner(task, config: FedAvgConfig) -> Method:
        """FedAvg under another name."""
        return fedavg(task, config)

    def locked(task, config: FedAvgConfig) -> Method:
        with lock:
            return fedavg(task, config)

    found = sp.compare(["fedavg", inner], out=tmp_path / "c", jobs=2, **quick)
    known, own = (traces(run.path)["tensors"] for run in found.runs)
    assert known == own
    assert found.runs[1].personal_model(0)
    with pytest.raises(sp.SparsonaError, match="cannot be sent to other processes: cannot pickle") as told:
        sp.compare(["fedavg", locked], out=tmp_path / "d", jobs=2, **quick)
    assert "jobs=1" in told.value.hint
    assert not (tmp_path / "d").exists()
    del quick["progress"]
    assert sp.tune([locked], trials=1, refit_seeds=0, jobs=1, out=tmp_path / "t", **quick).best


def test_a_card_names_its_headline(tmp_path):
    card = replace(methods.card("dispfl"), name="dispfl-mean", headline="consensus")
    run = sp.train(card, out=tmp_path / "run", executor="serial", **OPTIONS)
    assert about(run.path)["point"] == "consensus"
    assert "The mean of all peers' models" in run.summary["protocol"]
    own = sp.train("dispfl", points=["consensus"], out=tmp_path / "own", executor="serial", **OPTIONS)
    assert run.summary["accuracy"] != own.summary["accuracy"]


def test_errors_call_a_method_by_its_row(tmp_path):
    """FedSim shares FedAlt's file."""
    with pytest.raises(sp.SparsonaError, match="guard: fedsim has no shared model"):
        sp.train("fedsim", guard=True, out=tmp_path / "run", **OPTIONS)


def test_validation_is_a_point_of_every_method(tmp_path):
    for name in ("local", "fedalt", "dispfl"):
        run = sp.train(name, points=["received/validation"], out=tmp_path / name, executor="serial", **OPTIONS)
        rows = traces(run.path)["rows"]["evaluations"]
        assert any("received/validation" in row for row in rows)


def test_a_headline_on_other_data_is_refused():
    """The protocol sentence says that a result was obtained on test data."""
    row = replace(methods.card("fedavg"), name="mine", headline="trained/train")
    with pytest.raises(SparsonaError, match="as the headline"):
        sp.train(row, rounds=1, clients=4)


def test_costs_of_a_card_are_those_of_its_row():
    own = sp.cost(replace(methods.card("fedavg"), name="mine"), model="lenet5")
    assert own.to_json()["per_round"] == sp.cost("fedavg", model="lenet5").to_json()["per_round"]
