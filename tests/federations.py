"""Federations of a few digits each: their files and keys, their clients and peers, and what a run left behind."""

from __future__ import annotations

import shutil
import socket
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparsona as sp
from sparsona import methods
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


def free_addresses(count: int) -> list[str]:
    """Addresses of this machine that nobody listens on."""
    with ExitStack() as stack:
        chosen = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [f"127.0.0.1:{one.getsockname()[1]}" for one in chosen]


def free_address() -> str:
    return free_addresses(1)[0]


@pytest.fixture(autouse=True)
def one_task(monkeypatch):
    """Tasks are values, and building them is most of a start: those of the same terms are the same one."""
    known, build = {}, Terms.task

    def task(terms):
        if terms.run not in known:
            known[terms.run] = build(terms)
        return known[terms.run]

    monkeypatch.setattr(Terms, "task", task)


@dataclass(frozen=True)
class Made:
    """A federation: its file, its keys, and how its clients get their data."""

    path: Path
    method: str
    num_clients: int
    options: dict[str, Any]
    data: dict[str, Any]

    @cached_property
    def terms(self) -> Terms:
        return Terms.read(self.path)

    @property
    def roster(self) -> Roster:
        return Roster(self.terms.file.keys())

    @property
    def server_key(self) -> KeyFile:
        return KeyFile.read(key_path(self.path, "server"))

    def key_path(self, index: int) -> Path:
        return self.path.parent / f"site-{index}.key"

    def key(self, index: int) -> KeyFile:
        return KeyFile.read(self.key_path(index))

    def own_data(self, index: int) -> Federation:
        return own_data(self.terms, index, "digits", **self.data)

    def simulate(self, out: Path) -> Run:
        """The same run in this process."""
        options = {**self.options, **self.data}
        return sp.train(self.method, clients=self.num_clients, **options, executor="serial", device="cpu", out=out)

    def network(self, exchange: Exchange, **more: Any) -> Network:
        """The server's side."""
        return Network(self.terms, exchange, self.server_key, self.roster, **more)

    def sites(self, folder: Path, **more: Any) -> list[Site]:
        """All clients, with vaults in a folder."""
        return [Site(self, index, folder, **more) for index in range(self.num_clients)]


def make(
    folder: Path,
    method: str = "fedspa",
    num_clients: int = 3,
    *,
    data: dict[str, Any] | None = None,
    addresses: tuple[str, ...] = (),
    keys_of: Made | None = None,
    **options: Any,
) -> Made:
    """A federation in a folder of its own.

    Args:
        folder: where its file and all keys are written.
        method: what it trains; without a server if the method has none.
        num_clients: how many clients or peers it has.
        data: how clients split the digits; None: `EXAMPLES` each.
        addresses: where the first peers listen.
        keys_of: another federation, whose members have the same keys in this one.
        options: of the run; None leaves one to its default.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if keys_of is not None:
        for own in (*keys_of.path.parent.glob("site-*"), *keys_of.path.parent.glob("fed.server.key")):
            shutil.copy(own, folder)
    path, is_served = folder / "fed.toml", not methods.METHODS[method].peers
    authority = identity.new_authority("fed", folder / "fed.authority.key")
    usual = {"rounds": 4, "epochs": 1, "batch_size": 10, "seed": 7, "evaluate": "everyone"}
    usual |= {"per_round": 2} if is_served else {}
    options = {key: value for key, value in (usual | options).items() if value is not None}
    run = agree(method, options, model="digits-cnn", classes=10, input_shape=(1, 8, 8))
    server = None
    if is_served:
        own = key_path(path, "server")
        key = KeyFile.read(own) if own.exists() else identity.write_new_key(own)
        certificate = identity.certify(identity.Request("server", key.public), authority, hosts=identity.LOCAL_HOSTS)
        server = Server(key.public, certificate)
    file = FederationFile("fed", run, authority.certificate, server)
    for index in range(num_clients):
        if not (folder / f"site-{index}.pub").exists():
            identity.new_key(f"site-{index}", folder)
        request = identity.read_request(folder / f"site-{index}.pub")
        where = {} if is_served else {"addresses": addresses[index : index + 1], "hosts": identity.LOCAL_HOSTS}
        file = file.admit(request, authority, **where)
    file.write(path)
    if data is None:
        holder = np.full(1797, -1)
        holder[: EXAMPLES * num_clients] = np.arange(EXAMPLES * num_clients) % num_clients
        np.save(folder / "clients.npy", holder)
        data = {"partition": f"file:{folder / 'clients.npy'}"}
    return Made(path, method, num_clients, options, data)


class Site:
    """A client in this process that can be ended and started again: all that remains of it is its vault."""

    def __init__(self, made: Made, index: int, folder: Path, **options: Any) -> None:
        self.made, self.index, self.folder, self.options = made, index, folder / str(index), options
        self.heard: list[str] = []
        self.terms, self.key, self._data = made.terms, made.key(index), made.own_data(index)
        self.agent: Agent
        self.start()

    def start(self) -> None:
        self.agent = make_agent(
            self.terms,
            self.index,
            self._data,
            self.folder,
            self.key,
            self.made.roster,
            device="cpu",
            report=self.heard.append,
            **self.options,
        )

    def handle(self, data: bytes) -> bytes | None:
        return self.agent.handle(data)


def rows(path: Path) -> tuple[Any, ...]:
    """What a run recorded, but for its seconds."""
    records = Records(path / "records.sqlite")
    rounds = [replace(row, seconds=0.0) for row in records.rounds()]
    failures = records.failures(), records.evaluation_failures()
    found = rounds, records.turns(), records.evaluations(), records.measures(), failures
    records.close()
    return found


def traces(path: Path) -> tuple[Any, ...]:
    """All of a run that must be the same in a simulation and on a network, whatever happened to it on its way."""
    model = path / "global.safetensors"
    return *rows(path), model.exists() and model.read_bytes()
