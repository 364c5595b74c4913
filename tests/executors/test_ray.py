"""Actors of a Ray cluster: the same bits as serial, wherever they are and whatever happens to them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch
from processes import rounds_recorded
from small_runs import Deadly, Printing, context_of, evaluation_jobs, played
from torch import nn

import sparsona as sp
from sparsona.core.errors import SparsonaError
from sparsona.executors import EXECUTORS, choose, numeric_mode, ray_cluster
from sparsona.executors.backlog import AHEAD, Backlog
from sparsona.executors.ray_cluster import RayCluster, TurnTaker
from sparsona.executors.serial import Serial
from sparsona.executors.worker import open_answer
from sparsona.experiment.build import make_config, make_context

DEVICE = os.environ.get("SPARSONA_TEST_DEVICE", "cpu")


def frozen():
    """The first layer stays as it was passed: it is in no message, so every actor has to receive it with the task."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 10))
    net[1].requires_grad_(False)
    context = context_of("fedalt", model=net, device=DEVICE)
    assert set(context.task.frozen) == {"1.weight", "1.bias"}
    return context


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.words, self.last = nn.Linear(16, 4), nn.Embedding(6, 4), nn.Linear(8, 3)

    def forward(self, image, words):
        assert (image.shape[1:], words.dtype) == ((4, 4), torch.int64)
        return self.last(torch.cat([self.image(image.flatten(1)), self.words(words).mean(1)], 1))


def packed():
    """Two inputs by name, of two types."""
    targets = np.arange(60) % 3
    images = np.random.default_rng(0).random((60, 4, 4), dtype=np.float32)
    inputs = {"image": images, "words": np.stack([targets, targets + 3], 1)}
    data = sp.federate(inputs, targets, clients=3, partition="iid")
    config = make_config("fedspa", {"rounds": 3, "device": DEVICE, "batch_size": 8}, data, TwoInputs)
    return make_context(config, data, TwoInputs)


def functions():
    """A loss and a metric that no other process can import."""
    power = 2.0

    def focal(outputs, targets):
        entropy = nn.functional.cross_entropy(outputs, targets, reduction="none")
        return (1 - torch.exp(-entropy)) ** power * entropy

    def best_two(outputs, targets):
        return (outputs.topk(2).indices == targets.unsqueeze(1)).any(1).double().mean()

    return context_of("fedavg", loss=focal, metrics=["f1", best_two], device=DEVICE)


TASKS = (frozen, packed, functions)


# What needs no Ray.


class OneActor:
    """The executor with one actor, which is an object in this process: its messages are bytes all the same."""

    def __init__(self, context, encodes: bool | None = None) -> None:
        self.encodes = context.encodes if encodes is None else encodes
        fields = ("task", "make_method", "plan", "capacities", "device", "precision")
        recipe = cloudpickle.dumps({name: getattr(context, name) for name in fields})
        data = pickle.loads(pickle.dumps(ray_cluster._to_arrays(context.federation)))
        for array in data[1:]:
            array.flags.writeable = False  # as in an object store
        self.actor = TurnTaker(sys.path, False, False)
        self.versions, _ = open_answer(pickle.loads(self.actor.open(recipe, data)))

    def run(self, jobs):
        backlog = Backlog(jobs, False, self.encodes)
        while (packed := backlog.take(1)) is not None:
            outcome, _ = open_answer(pickle.loads(self.actor.take(packed.body)))
            backlog.done(packed.number, packed.job, outcome)
            yield from backlog.outcomes()


@pytest.mark.long
@pytest.mark.parametrize("encodes", [None, False])  # False, as on a GPU: updates travel as they are
@pytest.mark.parametrize("method", ["fedspa", "dispfl", pytest.param("pfedgate", marks=pytest.mark.slow)])
def test_an_actor_gives_the_bits_of_serial(method, encodes):
    context = context_of(method, device=DEVICE)
    with numeric_mode(context):
        expected = played(context, Serial(context))
    executor = OneActor(context, encodes)
    assert executor.versions == ray_cluster.versions()
    with numeric_mode(context):
        assert played(context, executor) == expected


@pytest.mark.parametrize("make", TASKS)
def test_an_actor_has_the_frozen_parameters_packed_inputs_and_functions_of_a_task(make):
    context = make()
    with numeric_mode(context):
        expected = played(context, Serial(context))
    executor = OneActor(context)
    with numeric_mode(context):
        assert played(context, executor) == expected


@pytest.mark.parametrize("make", [context_of, packed])
def test_data_arrives_unchanged(make):
    federation = make().federation
    found = ray_cluster._from_arrays(*ray_cluster._to_arrays(federation))
    assert (found.digest(), found.packing) == (federation.digest(), federation.packing)


def test_without_the_extra(monkeypatch, say):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    say("run", "fedspa", "--executor", "ray").refused("executor ray without Ray", "sparsona[cluster]")


@pytest.mark.parametrize("text", ["ray:", "serial:2", "workers:10.0.0.1:6379"])
def test_addresses_are_for_ray_alone(say, text):
    say("run", "fedspa", "--executor", text).refused(f"executor '{text}'", "ray:ADDRESS")


def test_auto_never_chooses_it(monkeypatch):
    monkeypatch.setattr("sparsona.executors.WORTH_WORKERS", 0.0)
    assert "ray" in EXECUTORS
    assert choose("auto", context_of()) != "ray"


def test_other_versions_are_refused():
    found = ray_cluster.versions()
    ray_cluster._check_versions(found)
    with pytest.raises(SparsonaError, match=r"has torch 1\.0(.|\n)*the same versions"):
        ray_cluster._check_versions({**found, "torch": "1.0"})


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "there", "10.0.0.1:port", ":6379"])
def test_no_address(address):
    with pytest.raises(SparsonaError, match="a node of"):
        ray_cluster._check_address(address)


def test_nobody_listens_at_the_address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for address in (f"127.0.0.1:{port}", "auto", "local"):
            ray_cluster._check_address(address)
    with pytest.raises(SparsonaError, match=f"nobody listens at 127.0.0.1:{port}"):
        ray_cluster._check_address(f"127.0.0.1:{port}")


# What needs it.


@pytest.fixture(scope="module")
def nodes():
    """A cluster of two nodes, which this program is connected to; more can be added."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "token")  # before Ray is imported, which reads it once
        patch.setenv("RAY_AUTH_TOKEN", ray_cluster._token())
        import ray
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def cluster(nodes):
    made = []

    def make(context, **more) -> RayCluster:
        made.append(RayCluster(context, **more))
        return made[-1]

    yield make
    for executor in made:
        executor.close()


def pids(executor) -> list[int]:
    import ray

    return ray.get([actor.handle.__ray_call__.remote(lambda self: os.getpid()) for actor in executor._actors])


@pytest.mark.cluster
@pytest.mark.parametrize("method", ["fedspa", "dispfl", "pfedgate"])
def test_same_bits_as_serial(cluster, method):
    context = context_of(method)
    assert played(context, cluster(context)) == played(context, Serial(context))


@pytest.mark.cluster
@pytest.mark.parametrize("make", TASKS)
def test_same_bits_with_frozen_parameters_packed_inputs_and_functions(cluster, make):
    context = make()
    assert played(context, cluster(context)) == played(context, Serial(context))


@pytest.mark.cluster
def test_a_program_that_is_connected_stays_connected(cluster, nodes):
    import ray

    context = context_of()
    executor = cluster(context, address=nodes.address)
    list(executor.run(evaluation_jobs(context, 1)))
    executor.close()
    assert ray.is_initialized()
    with pytest.raises(SparsonaError, match="is connected to the Ray cluster"):
        RayCluster(context, "10.0.0.1:6379")


@pytest.mark.cluster
def test_killed_actors_are_replaced_and_nothing_is_lost(cluster):
    context = context_of()
    executor = cluster(context)

    def kill(index: int) -> None:
        if index == 0:
            for pid in pids(executor):
                os.kill(pid, signal.SIGKILL)

    assert played(context, executor, after_round=kill) == played(context, Serial(context))


@pytest.mark.cluster
def test_actors_killed_in_the_middle_of_a_pass(cluster):
    context = context_of()
    executor = cluster(context)
    jobs = list(evaluation_jobs(context))
    list(executor.run(jobs[:2]))
    killed, outcomes = pids(executor), executor.run(iter(jobs))
    found = [next(outcomes)]
    for pid in killed:  # at work or just done with it, as it happens
        os.kill(pid, signal.SIGKILL)
    found += list(outcomes)
    assert [outcome.client for outcome in found] == [job.client for job in jobs]


@pytest.mark.cluster
def test_a_lost_node_with_many_actors(cluster, nodes):
    """A job that is given to one dead actor after another is not given up: none of them died of it."""
    import ray

    context = context_of()
    added = nodes.add_node(num_cpus=4)
    nodes.wait_for_nodes()
    executor = cluster(context)
    assert len(executor._actors) == 6
    _wait_until_open(executor)
    found = ray.get([actor.handle.__ray_call__.remote(lambda self: _place()) for actor in executor._actors])
    places = dict(zip(executor._actors, found, strict=True))
    lost = [actor for actor, (node, _) in places.items() if node == added.node_id]
    assert len(lost) == 4
    executor._actors.sort(key=lambda actor: actor not in lost)
    nodes.remove_node(added, allow_graceful=False)
    for actor in lost:
        with contextlib.suppress(ProcessLookupError):  # they end soon after their node, or here
            os.kill(places[actor][1], signal.SIGKILL)
    (job,) = list(evaluation_jobs(context, 1))[:1]
    assert [outcome.client for outcome in executor.run([job])] == [job.client]
    assert not set(lost) & set(executor._actors)  # the job was given to each of them


def _place() -> tuple[str, int]:
    import ray

    return ray.get_runtime_context().get_node_id(), os.getpid()


@pytest.mark.cluster
def test_a_node_lost_during_a_round(cluster, nodes):
    context = context_of("dispfl")
    expected = played(context, Serial(context))
    added = nodes.add_node(num_cpus=2)
    nodes.wait_for_nodes()
    executor = cluster(context)
    _wait_until_open(executor)
    run, count = executor.run, 0

    def breaking(jobs):
        nonlocal count
        for outcome in run(jobs):
            count += 1
            if count == 6:
                nodes.remove_node(added, allow_graceful=False)
            yield outcome

    executor.run = breaking
    assert played(context, executor) == expected
    assert count > 6


def _wait_until_open(executor) -> None:
    while any(actor.opening for actor in executor._actors):
        for place in executor._answered():
            executor._receive(place, Backlog([], False))


@pytest.mark.cluster
def test_a_job_that_always_kills_its_actor_is_given_up(cluster):
    context = context_of("fedavg", model=Deadly)
    with pytest.raises(SparsonaError, match=r"no client's turn comes to its end.*died 3 times"):
        played(context, cluster(context, num_actors=1))


@pytest.mark.cluster
def test_no_room(cluster, monkeypatch):
    context = context_of()
    _wait_until_open(cluster(context))
    monkeypatch.setattr(ray_cluster, "PATIENCE", 5.0)
    second = cluster(context)
    with pytest.raises(SparsonaError, match=r"no actor .* started within 5 s"):
        list(second.run(evaluation_jobs(context)))


class Failing(nn.Module):
    """A model whose training fails with an error of its own."""

    def __init__(self):
        super().__init__()
        self.layer, self.parent = nn.Linear(64, 10), os.getpid()

    def forward(self, inputs):
        if self.training and os.getpid() != self.parent:
            raise ValueError("not my day")
        return self.layer(inputs.flatten(1))


@pytest.mark.cluster
def test_errors_reach_the_person(cluster):
    context = context_of("fedavg", lr=1e30, clip_norm=None, on_divergence="stop")
    executor = cluster(context)
    with pytest.raises(SparsonaError, match=r"diverged: client \d+'s .* in round 1"):
        played(context, executor)
    executor.close()
    context = context_of("fedavg", model=Failing)
    with pytest.raises(RuntimeError, match=r"Traceback(.|\n)*not my day"):
        played(context, cluster(context))


@pytest.mark.cluster
def test_a_model_that_prints(cluster, capfd):
    context = context_of("fedavg", model=Printing)
    assert played(context, cluster(context)) == played(context, Serial(context))
    capfd.readouterr()


@pytest.mark.cluster
def test_outcomes_do_not_pile_up(cluster):
    context, begun = context_of(), []
    executor = cluster(context)

    def jobs():
        for number, job in enumerate(evaluation_jobs(context, 8)):
            begun.append(number)
            yield job

    outcomes = executor.run(jobs())
    next(outcomes)
    assert len(begun) <= AHEAD * len(executor._actors)
    assert len(list(outcomes)) == 39


SCRIPT = """
    import hashlib, os, signal, sys, torch, sparsona as sp
    print("started", flush=True)
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.layer = torch.nn.Linear(64, 20).requires_grad_(False), torch.nn.Linear(20, 10)
        def forward(self, x):
            return self.layer(self.first(x.flatten(1)).relu())
    def loss(outputs, targets):
        return torch.nn.functional.cross_entropy(outputs, targets, reduction="none", label_smoothing=0.1)
    def best_two(outputs, targets):
        return (outputs.topk(2).indices == targets.unsqueeze(1)).any(1).double().mean()
    before = dict(os.environ), signal.getsignal(signal.SIGTERM)
    for number, executor in enumerate(sys.argv[2:]):
        run = sp.train("fedspa", model=Net, clients=5, rounds=int(sys.argv[1]), epochs=1, executor=executor,
                       device="cpu", out=str(number), loss=loss, metrics=[best_two])
        measured = run.curve(), run.summary["bytes"], run.metric("best_two").tolist()
        digest = hashlib.sha256(repr(measured).encode())
        for client in range(5):
            for tensor in run.personal_model(client).state_dict().values():
                digest.update(tensor.numpy().tobytes())
        print(digest.hexdigest(), flush=True)
    assert before == (dict(os.environ), signal.getsignal(signal.SIGTERM))
    if "ray" in sys.modules:
        assert not sys.modules["ray"].is_initialized()
    print("finished", flush=True)
"""


@pytest.fixture
def script(tmp_path, nodes):
    """Starts SCRIPT with a home and a temporary folder of its own. (`nodes`: where another cluster is running.)"""
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    short = tempfile.mkdtemp(prefix="t", dir="/tmp")
    ours = ("RAY_USAGE_STATS_ENABLED", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment |= {"HOME": str(tmp_path / "home"), "TMPDIR": short}

    def start(*args: str, **more: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-W", "error", tmp_path / "script.py", *args],
            cwd=tmp_path,
            env=environment | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    yield start
    left = [path.name for path in (*Path(short).iterdir(), *(tmp_path / "home").rglob("*"))]
    shutil.rmtree(short)
    assert not left, left


@pytest.mark.cluster
def test_an_unguarded_script_starts_a_cluster_of_its_own(script):
    """Its own class with frozen parameters, its own loss and metric, twice in one process: the results of serial, and
    nothing left behind."""
    out, errors = script("2", "serial", "ray", "ray:local").communicate(timeout=200)
    first, serial, ray, again, last = out.split() or [errors]
    assert (first, last) == ("started", "finished")
    assert serial == ray == again


@pytest.mark.cluster
def test_a_running_cluster_is_used_and_left_running(script, nodes):
    """By RAY_ADDRESS and by its address; nodes have what their `ray start` gave them."""
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": ray_cluster._token(), "RAY_ADDRESS": nodes.address}
    out, errors = script("1", "serial", "ray", f"ray:{nodes.address}", **secret).communicate(timeout=200)
    assert out.endswith("finished\n"), errors
    assert len(set(out.split())) == 3
    assert len(nodes.list_all_nodes()) == 2


@pytest.mark.cluster
def test_ctrl_c(script, tmp_path):
    """It ends the run and everything it started, within seconds, with a checkpoint."""
    long = script("100000", "ray")
    deadline = time.monotonic() + 120
    while not rounds_recorded(tmp_path / "0") and time.monotonic() < deadline:
        time.sleep(0.1)
    started = _session(long.pid)
    assert len(started) > 3  # itself, Ray's servers, an actor
    before = time.monotonic()
    os.killpg(long.pid, signal.SIGINT)  # as a terminal does: to everybody
    _, errors = long.communicate(timeout=60)
    assert time.monotonic() - before < 15
    assert long.returncode != 0
    assert "KeyboardInterrupt" in errors
    assert (tmp_path / "0" / "checkpoint" / "manifest.json").exists()
    deadline = time.monotonic() + 10
    while _session(long.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _session(long.pid)


def _session(leader: int) -> list[int]:
    """The processes of a session, which is that of a script and all that it started."""
    found = subprocess.run(["ps", "-o", "pid=", "--sid", str(leader)], capture_output=True, text=True, check=False)
    return [int(word) for word in found.stdout.split()]


@pytest.mark.cluster
def test_a_cluster_of_its_own_listens_to_this_machine_alone(script):
    long = script("100000", "ray")
    assert long.stdout is not None
    try:
        deadline = time.monotonic() + 120
        found: list[str] = []
        while len(_session(long.pid)) < 6 and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(3)
        shown = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
        session = {f"pid={pid}," for pid in _session(long.pid)}
        found = [line.split()[3] for line in shown.splitlines() if any(pid in line for pid in session)]
        assert found
        assert not [address for address in found if not address.startswith(("127.0.0.1:", "[::ffff:127.0.0.1]:"))], (
            shown
        )
    finally:
        os.killpg(long.pid, signal.SIGINT)
        long.communicate(timeout=60)
