"""Peers on their own are the simulation of them, to the bit; and go on when others do not."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import sparsona as sp
from sparsona.core.errors import SparsonaError
from sparsona.deploy import identity, peer
from sparsona.deploy.exchange import in_threads
from sparsona.deploy.federation_file import FederationFile
from sparsona.deploy.identity import KeyFile, Roster
from sparsona.engine.stored import to_bytes
from sparsona.experiment.agreement import agree
from sparsona.experiment.network import Terms, own_data
from sparsona.experiment.peers import gather, make_peer
from sparsona.runs.records import Records

COMMON = {"rounds": 3, "epochs": 1, "seed": 7}
LONG = 60.0  # a deadline that no test waits for


@pytest.fixture(autouse=True)
def one_thread():
    """Peers of one process share torch's setting, on which bits depend."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A function that makes a federation file, with keys, for a method and options."""
    folder = tmp_path_factory.mktemp("federation")
    authority = identity.new_authority("fed", folder / "fed.authority.key")
    keys: list[KeyFile] = []

    def make(method="dispfl", num=4, addresses=None, model="digits-cnn", **options):
        while len(keys) < num:
            keys.append(KeyFile.read(identity.new_key(f"site-{len(keys)}", folder)[0]))
        run = agree(method, {**COMMON, **options}, model=model, classes=10, input_shape=(1, 8, 8))
        file = FederationFile("fed", run, authority.certificate, None)
        for index, key in enumerate(keys[:num]):
            where = () if addresses is None else addresses[index]
            hosts = identity.LOCAL_HOSTS
            file = file.admit(identity.Request(f"site-{index}", key.public), authority, addresses=where, hosts=hosts)
        path = folder / f"{file.digest}.toml"
        file.write(path)
        return Terms.read(path), keys[:num]

    return make


class Killed(BaseException):
    """Stands for a power failure: nothing after it is done."""


class Party:
    """Peers of one process, each of which can be started, killed and started again."""

    def __init__(self, terms, keys, folder, deadline=LONG, exchange=None, grace=None, **data):
        self.terms, self.keys, self.folder, self.data = terms, keys, folder, data
        self.deadline, self.grace = deadline, deadline if grace is None else grace
        self.handles = {}
        self.exchange = exchange or (lambda index: in_threads(self.handles))
        self.peers, self.errors, self.heard, self._threads = {}, {}, {}, {}
        self.before_play = lambda peer: None

    def start(self, index):
        self.heard.setdefault(index, [])
        federation = own_data(self.terms, index, "digits", **self.data)
        found = make_peer(
            self.terms,
            index,
            federation,
            self.folder / f"site-{index}",
            self.exchange(index),
            self.keys[index],
            Roster(self.terms.file.keys()),
            deadline=self.deadline,
            grace=self.grace,
            report=self.heard[index].append,
        )
        self.peers[index] = found
        self.before_play(found)

        def play():
            try:
                found.wait(seconds=LONG)
                found.play()
            except BaseException as error:
                self.errors[index] = error
            finally:
                found.close()
                if self.handles.get(index) == found.handle:
                    del self.handles[index]

        self.handles[index] = found.handle
        self._threads[index] = threading.Thread(target=play, daemon=True)
        self._threads[index].start()

    def join(self, index):
        self._threads[index].join(180)
        assert not self._threads[index].is_alive(), f"peer {index} hangs"

    def play(self, indices=None):
        indices = range(len(self.keys)) if indices is None else indices
        for index in indices:
            self.start(index)
        for index in indices:
            self.join(index)
        return self

    def folders(self, indices=None):
        return [self.folder / f"site-{index}" for index in (range(len(self.keys)) if indices is None else indices)]


def rows(path):
    records = Records(Path(path) / "records.sqlite")
    plain = [replace(row, seconds=0.0) for row in records.rounds()]
    return plain, records.turns(), records.evaluations(), records.measures(), records.failures()


def simulate(tmp_path, method, num=4, **options):
    options = {**COMMON, **options}
    return sp.train(method, clients=num, **options, executor="serial", out=tmp_path / "simulated")


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("dispfl", {}),
        ("dispfl", {"graph": "ring", "drop_rate": 0.3}),
        ("dispfl", {"graph": "random:2", "per_round": 2, "eval_every": 2, "drop_rate": 0.2, "rounds": 14}),
        ("dispfl", {"graph": "random:1", "per_round": 3, "tune_epochs": 1, "novel": 1}),
        ("dpsgd", {"graph": "ring", "drop_rate": 0.3}),
        ("dpsgd-ft", {"graph": "random:2", "rounds": 2, "tune_epochs": 1}),
        ("fedfomo", {"num_candidates": 1, "validation_rate": 0.2}),
    ],
)
def test_peers_give_the_simulations_records_and_states(made, tmp_path, method, options):
    data = {key: value for key, value in options.items() if key == "validation_rate"}
    terms, keys = made(method, **{key: value for key, value in options.items() if key not in data})
    party = Party(terms, keys, tmp_path / "peers", **data).play()
    assert party.errors == {}
    run = gather(tmp_path / "run", party.folders())
    simulated = simulate(tmp_path, method, **options)
    assert rows(run.path) == rows(simulated.path)
    for name in ("accuracy", "bytes", "flops", "steps", "rounds"):
        assert run.summary[name] == simulated.summary[name]

