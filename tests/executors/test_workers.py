"""Worker processes: the same bits as serial, whatever happens to them."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import textwrap
import time

import pytest
import torch
from processes import children, is_alive, rounds_recorded
from small_runs import Deadly, Printing, context_of, evaluation_jobs, played
from torch import nn

import sparsona as sp
from sparsona.core.errors import SparsonaError
from sparsona.engine.rounds import simulate
from sparsona.executors.backlog import AHEAD
from sparsona.executors.serial import Serial
from sparsona.executors.worker import FRAME, pack
from sparsona.executors.workers import Workers
from sparsona.experiment import build

pytestmark = pytest.mark.long


@pytest.fixture
def workers(forked_workers):
    made = []

    def make(context, count: int = 2) -> Workers:
        made.append(Workers(context, count))
        return made[-1]

    yield make
    for executor in made:
        executor.close()


@pytest.mark.parametrize(
    "method",
    [
        "fedspa",
        "dispfl",
        pytest.param("local", marks=pytest.mark.slow),
        pytest.param("fedavg-ft", marks=pytest.mark.slow),
    ],
)
def test_same_bits_as_serial(method, workers):
    context = context_of(method)
    assert played(context, workers(context)) == played(context, Serial(context))


def test_a_model_that_prints(workers, capfd):
    context = context_of("fedavg", model=Printing)
    assert played(context, workers(context, 1)) == played(context, Serial(context))
    capfd.readouterr()


def test_killed_workers_are_replaced_and_nothing_is_lost(workers):
    context = context_of()
    executor = workers(context, 1)
    star = simulate(context, executor)
    population = star.start()
    population, _ = star.play(population, 0)
    for worker in executor._workers:
        os.kill(worker.process.pid, signal.SIGKILL)
    assert played(context, executor) == played(context, Serial(context))


def test_workers_killed_in_the_middle_of_a_pass(workers):
    context = context_of()
    executor = workers(context)
    jobs = list(evaluation_jobs(context))
    outcomes = executor.run(iter(jobs))
    found = [next(outcomes)]
    for worker in executor._workers:  # at work or just done with it, as it happens
        os.kill(worker.process.pid, signal.SIGKILL)
    found += list(outcomes)
    assert [outcome.client for outcome in found] == [job.client for job in jobs]


def test_answers_that_arrive_together_are_both_seen(workers):
    """The parent looks when the second is there, too: a buffer would swallow it, and the parent wait for ever."""
    context = context_of()
    executor = workers(context, 1)
    (worker,) = executor._workers
    job = next(iter(evaluation_jobs(context)))
    first, look = FRAME.size + len(pack(("done", None))), executor._readable

    def late():
        while worker.opening and _arrived(worker) <= first:
            time.sleep(0.01)
        return look()

    executor._readable = late
    assert [outcome.client for outcome in executor.run([job])] == [job.client]


def _arrived(worker) -> int:
    """Bytes in the pipe that nobody has read."""
    return struct.unpack("i", fcntl.ioctl(worker.stdout, termios.FIONREAD, b"\0" * 4))[0]


def test_data_that_a_killed_process_left_is_removed(workers, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here = socket.gethostname()
    notes = {
        "dead": f"{here} {gone.pid}",
        "alive": f"{here} {os.getpid()}",
        "apart": f"elsewhere {gone.pid}",
        "odd": "?",
    }
    for name, note in notes.items():
        folder = tmp_path / f"sparsona-data-{name}"
        folder.mkdir()
        (folder / "x.npy").write_bytes(b"much")
        (folder / "owner").write_text(note)
    (tmp_path / "sparsona-data-new").mkdir()  # whose it is has not been said yet
    others = tmp_path / "others-data"
    others.mkdir()
    (others / "owner").write_text(notes["dead"])
    executor = workers(context_of(), 1)
    left = {path.name for path in tmp_path.iterdir()} - {executor._folder.name}
    assert left == {*(f"sparsona-data-{name}" for name in ("alive", "apart", "odd", "new")), "others-data"}
    assert (executor._folder / "owner").read_text() == f"{here} {os.getpid()}"
    executor.close()
    assert not executor._folder.exists()


def test_a_job_that_always_kills_its_worker_is_given_up(workers):
    context = context_of("fedavg", model=Deadly)
    with pytest.raises(SparsonaError, match=r"no client.s turn comes to its end.*died 3 times: exit code -9"):
        played(context, workers(context, 1))


def test_errors_in_a_worker_reach_the_person(workers):
    context = context_of("fedavg", lr=1e30, clip_norm=None, on_divergence="stop")
    with pytest.raises(SparsonaError, match=r"diverged: client \d+'s .* in round 1"):
        played(context, workers(context, 1))


def test_serial_gives_back_the_number_of_threads():
    context = context_of()
    torch.set_num_threads(2)
    try:
        played(context, Serial(context), 1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_a_run_gives_back_the_number_of_threads_and_sums_with_one(tmp_path):
    """Split among threads, sums have other last bits: a server that adds up must not depend on how many there are."""
    seen = []
    torch.set_num_threads(2)
    try:
        options = {"rounds": 1, "per_round": 2, "epochs": 1, "clients": 4, "executor": "serial", "device": "cpu"}
        sp.train(
            "fedavg", out=tmp_path / "run", observers=[lambda record: seen.append(torch.get_num_threads())], **options
        )
        assert seen[-2] == 1  # the last is the end, told after the run has given back what it took
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_outcomes_do_not_pile_up_behind_a_slow_client(workers):
    """However many are sampled, only so many are begun before the first is handed out."""
    x, y = torch.rand(600, 4), torch.arange(600) % 3
    sizes = [600, *[6] * 29]
    federation = sp.Federation.from_clients([(x[:n], y[:n], x[:3], y[:3]) for n in sizes], validation_rate=0.0)
    options = {"rounds": 1, "per_round": 30, "epochs": 1, "batch_size": 1, "device": "cpu"}
    config = build.make_config("fedavg", options, federation, _Linear)
    context = build.make_context(config, federation, _Linear)
    executor, begun = workers(context), []
    star = simulate(context, executor)
    population = star.start()

    def jobs():
        for client in range(30):
            begun.append(client)
            yield star._job("train", client, population.server, context.plan.round_at(0), (), {})

    outcomes = executor.run(jobs())
    assert next(outcomes).client == 0
    assert len(begun) <= AHEAD * 2
    assert [outcome.client for outcome in outcomes] == list(range(1, 30))


class _Linear(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 3))


def test_an_unguarded_script_and_ctrl_c(tmp_path):
    """A script without `if __name__` trains its own class, and one of a module beside it, on workers; Ctrl-C ends it
    and every worker it started. In the current folder, which is another, are modules that nobody meant to run."""
    here = tmp_path / "here"
    here.mkdir()
    for name in ("pickle", "torch", "sparsona", "beside"):
        (here / f"{name}.py").write_text("open('EXECUTED', 'w')")
    (tmp_path / "beside.py").write_text("import torch\nclass Layer(torch.nn.Linear): pass\n")
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, torch, sparsona as sp
            from beside import Layer
            print("started", flush=True)
            class Net(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.layer = Layer(64, 10)
                def forward(self, x):
                    return self.layer(x.flatten(1))
            sp.train("fedavg", model=Net, clients=5, rounds=int(sys.argv[1]), epochs=1, executor="workers",
                     device="cpu", out=sys.argv[2])
            """
        )
    )
    long = subprocess.Popen(
        [sys.executable, script, "100000", tmp_path / "long"],
        cwd=here,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not rounds_recorded(tmp_path / "long") and time.monotonic() < deadline:
        time.sleep(0.05)
    workers = children(long.pid)
    assert workers
    os.killpg(long.pid, signal.SIGINT)  # as a terminal does: to everybody
    told, errors = long.communicate(timeout=60)
    assert not (here / "EXECUTED").exists()
    assert told.split() == [b"started"]  # once: no worker ran the script again
    assert long.returncode != 0
    assert b"KeyboardInterrupt" in errors
    assert (tmp_path / "long" / "checkpoint" / "manifest.json").exists()
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in workers)
