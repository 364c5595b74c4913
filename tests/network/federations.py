"""Federations of a few digits each: their files and keys, their clients, and what a run left behind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import sparsona as sp
from sparsona.data.federation import Federation
from sparsona.deploy import identity
from sparsona.deploy.agent import Agent
from sparsona.deploy.exchange import Exchange
from sparsona.deploy.federation_file import FederationFile, Server, key_path
from sparsona.deploy.identity import KeyFile, Roster
from sparsona.experiment.agreement import agree
from sparsona.experiment.client_data import own_data
from sparsona.experiment.client_side import make_agent
from sparsona.experiment.network import Network
from sparsona.experiment.run import Run
from sparsona.experiment.terms import Terms
from sparsona.runs.records import Records

EXAMPLES = 40  # of each client


@dataclass(frozen=True)
class Made:
    """A federation: its file, its keys, and how its clients get their data."""

    path: Path
    method: str
    num_clients: int
    options: dict[str, Any]
    data: dict[str, Any]

    @property
    def terms(self) -> Terms:
        return Terms.read(self.path)

    @property
    def server_key(self) -> KeyFile:
        return KeyFile.read(key_path(self.path, "server"))

    def key(self, index: int) -> Path:
        return self.path.parent / f"site-{index}.key"

    def simulate(self, out: Path) -> Run:
        """The same run in this process."""
        options = {**self.options, **self.data}
        return sp.train(self.method, clients=self.num_clients, **options, executor="serial", device="cpu", out=out)

    def network(self, exchange: Exchange, **more: Any) -> Network:
        """The server's side."""
        return Network(self.terms, exchange, self.server_key, Roster(self.terms.file.keys()), **more)


def make(folder: Path, method: str = "fedspa", num_clients: int = 3, **options: Any) -> Made:
    """A federation in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    authority = identity.new_authority("fed", folder / "fed.authority.key")
    server = identity.write_new_key(key_path(folder / "fed.toml", "server"))
    options = {"rounds": 4, "per_round": 2, "epochs": 1, "batch_size": 10, "seed": 7, "evaluate": "everyone", **options}
    options = {key: value for key, value in options.items() if value is not None}
    run = agree(method, options, model="digits-cnn", classes=10, input_shape=(1, 8, 8))
    certificate = identity.certify(identity.Request("server", server.public), authority, hosts=identity.LOCAL_HOSTS)
    file = FederationFile("fed", run, authority.certificate, Server(server.public, certificate))
    for index in range(num_clients):
        key = KeyFile.read(identity.new_key(f"site-{index}", folder)[0])
        file = file.admit(identity.Request(f"site-{index}", key.public), authority)
    file.write(folder / "fed.toml")
    holder = np.full(1797, -1)
    holder[: EXAMPLES * num_clients] = np.arange(EXAMPLES * num_clients) % num_clients
    np.save(folder / "clients.npy", holder)
    return Made(folder / "fed.toml", method, num_clients, options, {"partition": f"file:{folder / 'clients.npy'}"})


class Site:
    """A client in this process that can be ended and started again: all that remains of it is its vault."""

    def __init__(self, made: Made, index: int, folder: Path) -> None:
        self.made, self.index, self.folder = made, index, folder / str(index)
        self.heard: list[str] = []
        self._terms, self._key = made.terms, KeyFile.read(made.key(index))
        self._data: Federation = own_data(self._terms, index, "digits", **made.data)
        self.agent: Agent
        self.start()

    def start(self) -> None:
        roster = Roster(self._terms.file.keys())
        self.agent = make_agent(
            self._terms, self.index, self._data, self.folder, self._key, roster, device="cpu", report=self.heard.append
        )

    def handle(self, data: bytes) -> bytes | None:
        return self.agent.handle(data)


def traces(path: Path) -> tuple[Any, ...]:
    """All of a run that must be the same in a simulation and on a network, whatever happened to it on its way."""
    records = Records(path / "records.sqlite")
    rounds = [replace(row, seconds=0.0) for row in records.rounds()]
    model = path / "global.safetensors"
    found = rounds, records.turns(), records.evaluations(), records.failures(), model.exists() and model.read_bytes()
    records.close()
    return found
