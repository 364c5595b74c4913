"""Clients and servers that are killed at any moment, as often as it takes, come back to the same bits.

In this process and therefore fast: a kill is an exception at one of the places where files change or an answer is on
its way. What the killed one had in memory is dropped, its clean-up included: a file that it was writing stays behind
half written.
"""

from __future__ import annotations

import contextlib
import gc
import random
from pathlib import Path

import pytest
from federations import Made, make, traces

import sparsona.deploy.agent as agent_module
import sparsona.deploy.federation_file as file_module
import sparsona.deploy.vault as vault_module
import sparsona.runs.checkpoint as checkpoint_module
import sparsona.runs.files as run_files
import sparsona.runs.folder as folder_module
from sparsona.deploy.vault import Vault
from sparsona.experiment.server_side import play_network
from sparsona.runs.records import Records
from sparsona.runs.session import Session

CLIENT_RATE, SERVER_RATE, ALL_RATE = 0.04, 0.03, 0.01


class Killed(BaseException):
    """Whoever raises it is dead from then on."""


class Fate:
    """Decides at each place whether somebody is killed there."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._random = random.Random(seed)
        self.places: list[str] = []
        self.is_server_dead = False
        self.is_over = False  # no kills any more
        self._patch(monkeypatch)

    def client(self, place: str) -> None:
        if not self.is_over and self._random.random() < CLIENT_RATE:
            self.places.append(f"client: {place}")
            raise Killed

    def server(self, place: str) -> None:
        if self.is_server_dead:  # on its way out: what it would do there is not done
            raise Killed
        if not self.is_over and self._random.random() < SERVER_RATE:
            self.is_server_dead = True
            self.places.append(f"server: {place}")
            raise Killed

    def restarts_clients(self) -> bool:
        return self._random.random() < ALL_RATE / SERVER_RATE

    def _patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def around(owner: object, name: str, place: str, kill) -> None:
            real = getattr(owner, name)

            def wrapped(*args, **kwargs):
                kill(f"before {place}")
                found = real(*args, **kwargs)
                kill(f"after {place}")
                return found

            monkeypatch.setattr(owner, name, wrapped)

        around(agent_module, "perform", "its work", self.client)
        for name in ("put", "keep", "remember", "visit"):
            around(Vault, name, name, self.client)
        monkeypatch.setattr(vault_module, "replace_file", self._torn(vault_module.replace_file, self.client))
        for module in (run_files, file_module):
            monkeypatch.setattr(module, "replace_file", self._torn(module.replace_file, self.server))
        around(checkpoint_module, "write_atomically", "a checkpoint's file", self.server)
        around(Records, "flush", "flushing the records", self.server)
        around(Records, "rewind", "dropping rows", self.server)
        around(Session, "_save", "a checkpoint", self.server)
        around(Session, "_keep", "recording a round", self.server)
        around(folder_module.RunFolder, "create", "making the folder", self.server)
        around(Session, "_open", "reading the checkpoint", self.server)

    def _torn(self, real, kill):
        @contextlib.contextmanager
        def replaced(path: Path, **options):
            draft, left = path.with_name(f".{path.name}.part"), None
            try:
                with real(path, **options) as file:
                    draft = Path(file.name)
                    yield file
                    file.flush()
                    left = draft.read_bytes()
                    kill(f"writing {path.suffix or path.name}")
            except Killed:
                draft.write_bytes(b"" if left is None else left[: len(left) // 2])
                raise

        return replaced


def play(made: Made, folder: Path, fate: Fate) -> int:
    """Play a run, restarting whoever is killed; returns how many servers it took."""
    sites = made.sites(folder / "vaults")

    def exchange(items, deadline):
        for client, frame in items:
            fate.server("sending a job")
            while True:  # a link sends a frame again until there is an answer
                try:
                    answer = sites[client].handle(frame)
                    fate.client("its answer on the way")
                    break
                except Killed:
                    if fate.is_server_dead:
                        raise
                    sites[client].start()
            fate.server("receiving an answer")
            yield client, answer

    for starts in range(1, 200):
        fate.is_server_dead = False
        try:
            network = made.network(exchange)
            network.wait(made.num_clients, 1.0, lambda there, of: None)
            play_network(network, folder / "run")
            return starts
        except Killed:
            fate.is_over = starts > 100
            if fate.restarts_clients():
                for site in sites:
                    site.start()
        gc.collect()  # a process that is killed holds no lock
    raise AssertionError("it never came to an end")


@pytest.fixture(autouse=True, scope="module")
def little_garbage():
    """What was made before is not looked at whenever somebody is killed."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """A checkpoint after every round."""
    monkeypatch.setattr("sparsona.runs.session.CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr("sparsona.runs.session.CHECKPOINT_SHARE", 1e9)


@pytest.fixture(scope="module")
def federations(tmp_path_factory):
    """Federations and the traces of their undisturbed runs, made once."""
    known = {}

    def get(method, **options):
        name = f"{method} {options}"
        if name not in known:
            folder = tmp_path_factory.mktemp("federation")
            made = make(folder, method, **options)
            known[name] = made, traces(made.simulate(folder / "simulated").path)
        return known[name]

    return get


CASES = [
    ("fedspa", {"rounds": 4}),
    ("fedspa", {"rounds": 3, "drop_rate": 0.3, "novel": 1, "tune_epochs": 1, "evaluate": "participants"}),
    # It ends after the second round, by clients of which each has enough validation examples to tell.
    (
        "fedspa",
        {"rounds": 6, "lr": 1e-9, "patience": 1, "tune_epochs": 1, "sampler": "loss", "data": {"data_rate": 0.2}},
    ),
]


def check(federations, tmp_path, monkeypatch, seed, method, options):
    made, undisturbed = federations(method, **options)
    fate = Fate(seed, monkeypatch)
    starts = play(made, tmp_path, fate)
    assert traces(tmp_path / "run") == undisturbed, (seed, fate.places)
    return fate, starts


@pytest.mark.parametrize(("method", "options"), CASES)
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4))])
def test_killed_at_any_place_it_comes_to_the_same_end(federations, tmp_path, monkeypatch, seed, method, options):
    fate, _ = check(federations, tmp_path, monkeypatch, seed, method, options)
    print(seed, len(fate.places), "kills:", fate.places)


def test_each_start_gets_one_place_further(federations, tmp_path, monkeypatch):
    made, undisturbed = federations("fedspa", rounds=2)  # few rounds: there is a start for every place in each

    class NextPlace(Fate):
        passed = 0

        def server(self, place: str) -> None:
            if self.is_server_dead:
                raise Killed
            self.passed += 1
            if self.passed > len(self.places):
                self.is_server_dead, self.passed = True, 0
                self.places.append(place)
                raise Killed

        def client(self, place: str) -> None:
            pass

    fate = NextPlace(0, monkeypatch)
    play(made, tmp_path, fate)
    assert len(set(fate.places)) > 12, fate.places
    assert traces(tmp_path / "run") == undisturbed, fate.places


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedspa", "fedavg", "ditto", "pfedgate", "sub-fedavg", "scaffold", "local"])
@pytest.mark.parametrize("seed", range(100, 110))
def test_every_kind_of_method(federations, tmp_path, monkeypatch, seed, method):
    check(federations, tmp_path, monkeypatch, seed, method, {"rounds": 4, "tune_epochs": 1})
