"""A client of a run on several machines: it joins, answers the server, and keeps its data to itself."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sparsona.core.errors import SparsonaError
from sparsona.core.round import Client
from sparsona.core.torch_state import usual_torch
from sparsona.data.federation import Federation
from sparsona.deploy.agent import Agent, lone_cards
from sparsona.deploy.federation_file import FederationFile, Member
from sparsona.deploy.flower import SocketServer
from sparsona.deploy.frames import Signer, Verifier
from sparsona.deploy.greeting import Greeting
from sparsona.deploy.identity import KeyFile, Roster, check_certificate
from sparsona.deploy.jobs import reported_counts
from sparsona.deploy.memory import share_memory_among_threads
from sparsona.deploy.vault import Vault
from sparsona.deploy.zenoh_link import Tls, ZenohLink
from sparsona.engine.context import ClientContext
from sparsona.executors import choose_device
from sparsona.experiment.build import describe_examples
from sparsona.experiment.client_data import own_data
from sparsona.experiment.terms import Terms
from sparsona.runs.folder import FEDERATION_FILE, environment

WATCH_SECONDS = 1.0  # between two looks at the connection
UNASKED_SECONDS = 20.0  # after which a client that is connected says that nobody asks for it


def used_environment(device: torch.device) -> dict[str, Any]:
    """Versions and machine of this process, with the GPU only if it computes there."""
    found = environment()
    return found if device.type == "cuda" else {**found, "gpu": None}


def make_greeting(context: ClientContext, federation: Federation, index: int, shares_labels: bool) -> Greeting:
    """What a client, or a peer, tells the others about itself."""
    train, validation, test = (int(count) for count in federation.sizes()[index])
    counts = federation.label_counts("train") if shares_labels else None
    return Greeting(
        layout=context.task.layout.digest.hex(),
        start=context.start_digest,
        sizes=(train, validation, test),
        capacity=context.clients[index].capacity,
        environment=used_environment(context.device),
        data=federation.digest(),
        label_counts=None if counts is None else tuple(reported_counts(counts[index].tolist())),
        class_names=federation.class_names,
    )


def describe_client(terms: Terms, index: int, federation: Federation, vault: Vault, greeting: Greeting) -> None:
    """Note in a client's vault what a model that is exported from there says of itself: see `export_client`."""
    examples, counts = describe_examples(federation), federation.label_counts("train")
    vault.describe(
        {
            "client": index,
            "sizes": list(greeting.sizes),
            "class_names": list(federation.class_names or ()),
            "label_counts": None if counts is None else counts[index].tolist(),
            "examples": None if examples is None else asdict(examples),
            "environment": dict(greeting.environment),
        }
    )
    if not (vault.folder / FEDERATION_FILE).exists():
        terms.file.write(vault.folder / FEDERATION_FILE)  # for `gather`, and to export the network


def make_agent(
    terms: Terms,
    index: int,
    federation: Federation,
    vault: Path,
    signer: Signer,
    verifier: Verifier,
    shares_labels: bool = False,
    device: str = "auto",
    report: Callable[[str], None] = lambda text: None,
) -> Agent:
    """The agent of a client, which answers the server.

    Args:
        terms: of the run.
        index: the client.
        federation: its data, as `own_data` returns it.
        vault: the folder of its States.
        signer: signs as this client.
        verifier: knows the server's key.
        shares_labels: whether its label counts may become known.
        device: where it trains.
        report: is called with what happens.

    Returns:
        The agent.
    """
    member, place = terms.file.clients[index], choose_device(device, "fp32")
    train, validation, _ = (int(count) for count in federation.sizes()[index])

    def make_context(card: Client) -> ClientContext:
        return terms.context(federation, lone_cards(card), place)

    context = make_context(Client(index, train, member.capacity, validation, terms.num_clients, train))
    greeting = make_greeting(context, federation, index, shares_labels)
    return Agent(
        index,
        terms.run,
        make_context,
        greeting,
        Vault(vault),
        signer,
        verifier,
        shares_labels,
        report,
        may_end_early=terms.config.patience is not None,
    )


@usual_torch()
def join(
    path: str | Path,
    data: str,
    *,
    key: str | Path | None = None,
    connect: Sequence[str] = (),
    vault: str | Path | None = None,
    shares_labels: bool = False,
    device: str = "auto",
    tls: bool = True,
    flower: str | Path | None = None,
    report: Callable[[str], None] = lambda text: None,
    data_dir: str | None = None,
    **options: Any,
) -> Path | None:
    """Be a client of a run on several machines, until the server says that it is over.

    Args:
        path: the federation file.
        data: "arrays:mine.npz" or "folder:pictures", all of which is this client's; or the name of a data set, of which
            this client takes the share that it has in a simulation.
        key: this client's key; None: the one here or beside the file that the roster has.
        connect: addresses of the server; none: those in the file.
        vault: folder of this client's states and its model; None: a folder in ./vault.
        shares_labels: let the server know how many examples of each class this client has, and its confusions.
        device: where it trains.
        tls: as for `serve`.
        flower: a Unix socket to answer on, for the relay of a Flower SuperNode; None: dial the server.
        report: is called with what happens, for people to read.
        data_dir: folder that is searched first for the data's files.
        options: how the data is split: validation_rate, test_rate, and of a data set partition and so on.

    Returns:
        The file of the personal model, if the method has a plain one.

    Example:
        On a client's machine::

            model = sp.join("fed.toml", "arrays:mine.npz", report=print)
    """
    share_memory_among_threads()
    terms = Terms.read(path)
    if terms.row.peers:
        raise SparsonaError(
            f"{terms.row.title} has no server to join",
            expected="a method with a server",
            hint=f"`sparsona peer {path}`",
        )
    signer, member = find_key(terms.file, Path(path), key)
    check_certificate(member.certificate, terms.file.authority, member.key, member.name)
    addresses = tuple(connect) or (() if terms.file.server is None else terms.file.server.addresses)
    if flower is not None and (connect or not tls):
        raise SparsonaError("an address or --plain beside --flower", expected="one of them: Flower has the connection")
    if flower is None and not addresses:
        raise SparsonaError(
            f"'{path}' does not say where its server is", expected="an address", hint="--connect host:7447"
        )
    folder = terms.vault_of(member, vault)
    federation = own_data(terms, member.index, data, data_dir, **options)
    roster = Roster(terms.file.keys())
    agent = make_agent(terms, member.index, federation, folder, signer, roster, shares_labels, device, report)

    def failed(error: Exception) -> None:
        report(f"a fault: {type(error).__name__}: {error}")

    name = f"{member.name}: client {member.index} of {terms.num_clients}"
    longest = terms.longest_frame()
    certificates = Tls(terms.file.authority, member.certificate, signer.pem) if tls else None
    with ExitStack() as stack:
        agent.vault.claim(terms.run, member.index, agent.greeting.data)
        stack.callback(agent.vault.release)
        describe_client(terms, member.index, federation, agent.vault, agent.greeting)
        if flower is not None:
            stack.enter_context(SocketServer(flower, agent.handle, failed, longest))
            report(f"{name}, answering on {flower}")
            agent.finished.wait()
        else:
            link = ZenohLink(member.index, run=terms.run, connect=addresses, tls=certificates, max_bytes=longest)
            stack.enter_context(link)
            link.serve(agent.handle, failed=failed)
            report(f"{name}, looking for {', '.join(addresses)}")
            _watch(link, agent, report, f"'{path}', whose digest is {terms.run}")
        time.sleep(0.5)  # the last answer is on its way
    if agent.refusal is not None:
        raise agent.refusal
    return agent.vault.model


def _watch(link: ZenohLink, agent: Agent, report: Callable[[str], None], file: str) -> None:
    """Until the run is over, say what becomes of the connection to the server."""
    trouble, began, warned, was_there, is_away = "", time.monotonic(), False, False, False
    while not agent.finished.wait(WATCH_SECONDS):
        if link.trouble and link.trouble != trouble:
            report(link.trouble)
        trouble, is_connected = link.trouble, link.connected()
        was_there = was_there or is_connected or agent.is_greeted
        if was_there and is_connected == is_away:
            is_away = not is_connected
            report("the server has gone away: looking for it until it is back" if is_away else "the server is back")
        if not warned and not agent.is_greeted and is_connected and time.monotonic() - began > UNASKED_SECONDS:
            warned = True
            report(
                "connected, but not asked for: the run may be over, or the server may have another file than "
                f"{file} (`sparsona federation show`)"
            )


def find_key(file: FederationFile, path: Path, key: str | Path | None) -> tuple[KeyFile, Member]:
    """The key of a client and its entry in the roster; without a name, the one key here that is in the roster."""
    if key is not None:
        found = KeyFile.read(key)
        return found, file.client(found.public)
    public = {one.key: one for one in file.clients}
    mine = {}
    for folder in (Path.cwd(), path.parent):
        for name in sorted(folder.glob("*.key")):
            with contextlib.suppress(SparsonaError):
                candidate = KeyFile.read(name)
                if candidate.public in public:
                    mine[candidate.public] = candidate
    if len(mine) != 1:
        names = ", ".join(sorted(public[one].name for one in mine))
        raise SparsonaError(
            f"{len(mine)} keys here are in the roster of '{path}'" + (f": {names}" if names else ""),
            expected="one",
            hint="--key NAME.key" if mine else "`sparsona keys new NAME`, then have NAME.pub admitted",
        )
    ((name_of, only),) = mine.items()
    return only, public[name_of]
